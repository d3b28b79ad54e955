"""What a run begins with: a checkpoint that it goes on from, or weights that were trained elsewhere."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from cudiff.checkpoint import Checkpoint, part
from cudiff.config import Config, from_arguments
from cudiff.data.dataset import Dataset, differences
from cudiff.distributed import Group
from cudiff.errors import CudiffError
from cudiff.nn import Module, StateDict
from cudiff.optim import EMA, SGD, Adam, AdamW, Constant, Cosine, Optimizer
from cudiff.options import as_text
from cudiff.tensorfile import digest

LISTED = 6
"""How many names a notice repeats."""
_OF_A_RUN = ("image_size", "channels", "num_classes", "validation", "seed", "optimizer", "diffusion")
"""Fixed options that another run may well have otherwise, or of which there is a line of its own."""


def check_given(config: Any, dataset: Any, resume: Any, init: Any) -> None:
    """Raise CudiffError where a Trainer is given something of another kind, or two checkpoints to begin with."""
    if not isinstance(config, Config):
        raise CudiffError(f"a Trainer takes a cudiff.Config, not {type(config).__name__}: give Config(...), "
                          "Config.from_dict(values) or PRESETS[name]")
    for checkpoint in (resume, init):
        if not isinstance(dataset, Dataset) or not isinstance(checkpoint, Checkpoint | None):
            raise CudiffError("a Trainer takes what cudiff.load_dataset returns, and to resume or init what "
                              f"load_checkpoint does, not {type(dataset).__name__} and {type(checkpoint).__name__}")
    if resume is not None and init is not None:
        raise CudiffError("a run goes on (resume) or begins with trained weights (init): give one of them")


def resumed_configuration(arguments: argparse.Namespace, checkpoint: Checkpoint) -> Config:
    """That of a run that goes on, of a command line. Raises CudiffError for what cannot change before all else; options
    that stand for the data's are compared by `check_resumed`, once the data is known."""
    _check_fixed(checkpoint.config, arguments)
    config = from_arguments(arguments, checkpoint.config)
    _check_fixed(checkpoint.config, config, "it" if arguments.preset is None else f"--preset {arguments.preset}")
    return config


def _check_fixed(was: Config, given: Any, what: str = "it") -> None:
    """Raise CudiffError where `given` changes what a resumed run cannot, but for values that are the defaults."""
    default = Config()
    for name, before in was.fixed().items():
        value = getattr(given, name, before)
        if value not in (before, getattr(default, name, before)):
            raise _unchangeable(name, before, value, what)


def _unchangeable(name: str, before: Any, after: Any, what: str = "it") -> CudiffError:
    return CudiffError(f"a resumed run cannot change {name} from {before} to {after}: leave {what} out, or start anew")


def check_resumed(config: Config, checkpoint: Checkpoint) -> list[str]:
    """What to tell of a resumed run's options. Raises CudiffError where it would be of another kind than it was."""
    was = checkpoint.config
    values = config.to_dict()
    for name, before in was.fixed().items():
        if before != values.get(name):
            raise _unchangeable(name, before, values.get(name))
    if config.precision == was.precision or "optimizer" not in checkpoint.counters:
        return []
    return [f"the run was trained in {was.precision} and goes on in {config.precision}"]


def as_numbered(checkpoint: Checkpoint, dataset: Dataset, config: Config) -> tuple[Dataset, Config]:
    """`dataset` with its classes numbered as in the data that a run was trained on, see `Dataset.numbered`, where
    classes without names are called by their numbers; and `config`, without the class names of that data where the new
    data has others."""
    before = checkpoint.counters.get("data")
    names = before.get("class_names") if isinstance(before, dict) else None
    if isinstance(before, dict) and "class_names" in before and names is None:  # `Dataset.only` calls them by numbers
        names = list(map(str, range(checkpoint.config.num_classes)))
    if not isinstance(names, list):
        return dataset, config
    dataset = dataset.numbered(names)
    of_data = dataset.class_names and list(config.class_names) == names
    return dataset, config.replace(class_names=()) if of_data else config


def check_data(checkpoint: Checkpoint, data: Mapping[str, Any], accepted: bool) -> list[str]:
    """What to tell of a resumed run's data, and of what its checkpoint was made of. Raises CudiffError where the data
    is another and that is not accepted."""
    notes = notes_of(checkpoint)
    if "optimizer" not in checkpoint.counters:  # weights alone: training begins with them
        return notes
    before = checkpoint.counters.get("data")
    if not isinstance(before, dict):
        return [*notes, "the checkpoint does not say which data it was trained on: whether this is the same is not "
                        "checked"]
    found, classes = "; ".join(differences(before, data)), checkpoint.config.num_classes
    fits = not classes or 0 < data["classes"] <= classes
    if found and not (accepted and fits):
        raise CudiffError(
            f"this is not the data that the run was trained on ({found}): name that with --data, or resume in "
            "Python with its Dataset; " + ("--data-changed (data_changed=True) accepts this" if fits else
            f"its model takes labels of {classes} classes: choose these with --only-classes, or begin a new run with "
            "its weights, by --init (init=)")
        )
    return [*notes, f"the data has changed: {found}"] if found else notes


def notes_of(checkpoint: Checkpoint) -> list[str]:
    """What was left out of another program's file that the checkpoint was made of."""
    notes = checkpoint.counters.get("notes")
    return [str(note)[:200] for note in notes] if isinstance(notes, list) else []


def configuration_of(checkpoint: Checkpoint) -> Config:
    """That of a new run that starts from a checkpoint's weights: its own, with the size, the channels and the classes
    of the new data."""
    return checkpoint.config.replace(image_size=0, channels=0, num_classes=-1, class_names=(), only_classes=())


def optimizer_of(config: Config, net: Module, ema: EMA) -> Optimizer:
    """The optimiser that `config` names, with its schedule, clipping and the EMA in one kernel."""
    warmup = min(config.warmup, config.steps // 2) if config.steps else config.warmup
    schedule = Cosine(config.steps, warmup=warmup) if config.lr_schedule == "cosine" else Constant(warmup)
    common: dict[str, Any] = dict(weight_decay=config.weight_decay, clip=config.clip, schedule=schedule, ema=ema)
    if config.optimizer == "sgd":
        return SGD(net, config.lr, config.momentum, **common)
    betas = (config.betas[0], config.betas[1])
    return (AdamW if config.optimizer == "adamw" else Adam)(net, config.lr, betas, config.eps, **common)


def take_weights(checkpoint: Checkpoint, net: Module, config: Config) -> list[str]:
    """Copy a checkpoint's averaged weights into a net where name and shape agree.

    Returns lines that say how many were taken, and which were not: those of another shape, and those that only one of
    both has; which of the configuration's classes begin as classes of other names, whose numbers they have; whether
    something else was learned, and which options make another function of the same weights, or learn another one.
    Raises CudiffError where none fits.
    """
    given = part(checkpoint.tensors, "ema")
    own = net.state_dict()
    fits = (name for name, values in given.items() if name in own and values.shape == own[name].shape)
    taken = StateDict((name, given[name]) for name in fits)
    if not taken:
        raise CudiffError("none of the checkpoint's weights fits this model: begin with those of a model alike")
    net.load_state_dict(taken, strict=False)
    lines = [f"{len(taken):,} of {len(own):,} tensors begin as in the checkpoint"]
    if (learned := checkpoint.config.diffusion) != config.diffusion:
        lines.append(f"the checkpoint's model learned by {learned}, this one learns by {config.diffusion}: --diffusion "
                     f"{learned} goes on as it began")
    was, now = checkpoint.config.fixed(), config.fixed()
    lines += _listed("options that are others in the checkpoint", [
        f"{name} {as_text(now[name])}, there {as_text(was[name])}" for name in now
        if name in was and was[name] != now[name] and name not in _OF_A_RUN
    ])
    before, class_names = checkpoint.config.class_names, config.class_names  # of another number no embedding fits
    pairs = zip(class_names, before, strict=True) if len(class_names) == len(before) else ()
    lines += _listed("classes begin by their numbers", [f"{new} as {old}" for new, old in pairs if new != old])
    others = [f"{name} {own[name].shape}, {given[name].shape} in the checkpoint" for name in own
              if name in given and name not in taken]
    lines += _listed("another shape, so they begin anew", others)
    lines += _listed("not in the checkpoint, so they begin anew", [name for name in own if name not in given])
    return lines + _listed("not in this model, so they are left out", [name for name in given if name not in own])


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - LISTED:,} more" if len(names) > LISTED else ""
    return [f"{what}: {', '.join(names[:LISTED])}{more}"]


def moments_of(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    """An optimiser's state in a checkpoint, as its `load_state_dict` takes it."""
    moments = {key: value for key, value in checkpoint.tensors.items() if not key.startswith(("model.", "ema."))}
    if scale := checkpoint.counters.get("loss_scale"):
        moments["loss_scale"] = np.array(scale, np.float32)
    return moments | {"counters": np.array(checkpoint.counters["optimizer"])}


def saved_bytes(net: Module, optimizer: Optimizer) -> int:
    """What the tensors of a checkpoint take: weights, their average, with the buffers of both, and the moments."""
    buffers = sum(buffer.data.nbytes for buffer in net.buffers())
    return 4 * (2 + len(optimizer.moments)) * net.num_parameters() + 2 * buffers


def slow_widths(net: Module, device: str) -> list[str]:
    """A line on layers whose channels are no multiples of 8, which most fast kernels need for loads of 16 bytes: where
    they hold a tenth of the weights of a network that computes on a GPU, but in fp32."""
    if device != "cuda" or net.precision == "fp32":
        return []
    weights = [parameter for parameter in net.parameters() if parameter.low and parameter.ndim > 1]
    slow = [(size, weight) for weight in weights for size in {weight.shape[0], weight.shape[-1]}
            if size % 8 and size >= 8]  # images, of few channels, have kernels of their own
    widths = sorted({size for size, _ in slow})
    if not 10 * sum({id(weight): weight.size for _, weight in slow}.values()) > sum(weight.size for weight in weights):
        return []
    named = ", ".join(map(str, widths[:LISTED])) + ", ..." * (len(widths) > LISTED)
    below, above = widths[0] // 8 * 8, -(-widths[0] // 8) * 8
    return [f"layers of {named} channels are slow: fast kernels take multiples of 8, such as {below} or {above}"]


def check_shares(config: Config, group: Group) -> None:
    """Raise CudiffError where the processes of a group cannot have equal parts of a batch."""
    size = config.batch_size
    if size % group.size:
        near = [one for one in (size - size % group.size, size + -size % group.size) if one]
        raise CudiffError(f"a batch of {size} has no {group.size} equal parts, one a process: use --batch-size "
                          f"{' or '.join(map(str, near))}")


def begin_alike(group: Group, config: Config, data: Mapping[str, Any], resume: Checkpoint | None,
                net: Module) -> None:
    """Give a flat net process 0's weights, which initialisation on another machine may round otherwise.

    Raises CudiffError where the processes of a group have another configuration, data set or checkpoint.
    """
    begun = None
    if resume is not None and group.size > 1:
        begun = resume.counters, {name: digest(array) for name, array in resume.tensors.items()}
    for what, value in (("configuration", config.to_dict()), ("data set", data), ("checkpoint", begun)):
        group.check_same(what, hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest())
    group.broadcast(net.flat_parameters().data)
