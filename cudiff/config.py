"""The configuration of a model, its training and its sampling: flat, so that a TOML key and a flag share one name."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import cudiff.diffusion
import cudiff.models  # noqa: F401  both register what they have
from cudiff.diffusion.schedule import karras_sigmas
from cudiff.errors import CudiffError
from cudiff.files import opened
from cudiff.models.dit import SIZES
from cudiff.options import Option, as_text, shown
from cudiff.registry import (  # noqa: F401  for cudiff itself: whoever registers has `reserve` run
    MODELS,
    OBJECTIVES,
    SAMPLERS,
    TABLES,
    options_named,
    register_model,
    register_objective,
    register_sampler,
    reserve,
)

SECTIONS = ("data", "model", "diffusion", "training", "sampling")
CHOSEN_IN = {"model": "model", "diffusion": "diffusion", "sampling": "sampler"}
"""The section that holds the options of a table's entries."""


def _option(section: str, default: Any, text: str, *choices: Any, **rules: Any) -> Any:
    """A field that is an `Option` of a section."""
    return field(default=default, metadata={"section": section, "option": Option(default, text, *choices, **rules)})


_data, _model, _diffusion, _training, _sampling = (partial(_option, section) for section in SECTIONS)


@dataclass(frozen=True, init=False)
class Config:
    """Everything a run depends on, and nothing nested. `PRESETS` holds named ones; checkpoints hold theirs.

    Besides the fields it has the options of its model, its objective (`diffusion`) and its sampler, by name like fields
    (`config.num_res_blocks`), and what was given to samplers that it may change to.
    Raises CudiffError, one line, for a value of the wrong type or out of range, for values that contradict, and for an
    option that its model or objective does not have.
    """

    # Data
    data: str = _data("digits", "digits, mnist, fashion-mnist, a folder of images, an .npz or unet.cu's .bin")
    image_size: int = _data(0, "pixels a side; 0 = that of the data", least=0, most=2**16, fixed=True)
    channels: int = _data(0, "1 (gray), 3 (RGB), another number of latents; 0 = that of the data", least=0,
                          most=2**10, fixed=True)
    latent_scale: float = _data(0.0, "latents are multiplied by this to train on, and samples divided; 0 = pictures, "
                                "and 1 of latents", least=0, fixed=True)
    validation: int = _data(0, "images held out of the training data for the validation loss", least=0, fixed=True)
    only_classes: tuple[str, ...] = _data((), "of the data only these, by name or number; none = all", entries=str)
    flip: bool = _data(False, "mirror each image with probability 1/2")
    skip_bad: bool = _data(False, "leave out images that do not decode, instead of stopping")
    residency: str = _data("auto", "where training images lie; disk: a folder's, decoded into a file of the cache",
                           ("auto", "device", "host", "disk"))

    # Model
    model: str = _model("unet", "the network", MODELS, fixed=True)
    num_classes: int = _model(-1, "classes the model is conditioned on; 0 = unconditional, -1 = those of the data",
                              least=-1, below=2**31, fixed=True)
    class_names: tuple[str, ...] = _model((), "of the classes from 0 on; none = those of the data", entries=str)
    learn_sigma: bool = _model(False, "DDPM: also predict the variance (Improved DDPM)", fixed=True)

    # Diffusion
    diffusion: str = _diffusion("edm", "what is learned", OBJECTIVES, fixed=True)
    sigma_min: float = _diffusion(0.002, "lowest noise level of the EDM samplers", above=0)
    sigma_max: float = _diffusion(80.0, "highest noise level of the EDM samplers", above=0)
    rho: float = _diffusion(7.0, "how much the noise levels crowd near sigma_min", above=0)
    label_dropout: float = _diffusion(0.1, "share of labels dropped in training, for guidance", least=0, most=1)

    # Training
    batch_size: int = _training(128, "images a forward pass, of all GPUs together", least=1)
    accumulate: int = _training(1, "forward passes whose gradients are averaged for one update", least=1)
    recompute: bool = _training(False, "run blocks again in backward, for less memory")
    shard: bool = _training(False, "several GPUs: each holds its part of the moments and of the average alone")
    lr: float = _training(2e-4, "learning rate", above=0)
    optimizer: str = _training("adamw", "update rule", ("adamw", "adam", "sgd"), fixed=True)
    betas: tuple[float, ...] = _training((0.9, 0.999), "Adam: decay of the two moments", least=0, below=1)
    eps: float = _training(1e-8, "Adam: added to the root of the second moment", above=0)
    momentum: float = _training(0.9, "SGD momentum", least=0, below=1)
    weight_decay: float = _training(0.0, "of weights, not of norms, biases and embeddings", least=0)
    warmup: int = _training(0, "updates over which the learning rate rises from zero; at most half of steps", least=0)
    lr_schedule: str = _training("constant", "after warm-up; cosine falls to zero", ("constant", "cosine"))
    ema_half_life: float = _training(500.0, "updates after which old weights count half in the average", above=0)
    clip: float = _training(0.0, "largest norm of the whole gradient; 0 = do not clip", least=0)
    precision: str = _training("fp32", "of activations and matrix products", ("auto", "fp32", "tf32", "bf16", "fp16"))
    steps: int = _training(10000, "updates; 0 = as many as fit into minutes", least=0)
    minutes: float = _training(0.0, "stop after this long; 0 = no limit", least=0)
    seed: int = _training(0, "of weights, data order and noise", least=0, below=2**63, fixed=True)
    device: str = _training("auto", "auto takes the GPU where there is one", ("auto", "cpu", "cuda"))
    capture: bool = _training(True, "GPU: replay a step of training or sampling as one CUDA graph")
    max_bad_steps: int = _training(10, "gradients in a row that are not finite, after which a line of metrics ends "
                                   "training", least=1)
    log_every: int = _training(50, "updates between two lines of metrics.jsonl", least=1)
    sample_every: int = _training(1000, "updates between two sample grids; 0 = none", least=0)
    save_every: int = _training(1000, "updates between two checkpoints; 0 = only at the end", least=0)
    keep: int = _training(3, "newest checkpoints to keep; 0 = all", least=0)

    # Sampling
    sampler: str = _sampling("heun", "how noise becomes an image", SAMPLERS)
    sample_steps: int = _sampling(18, "noise levels a sample passes through", least=1, most=10**6)
    guidance: float = _sampling(1.0, "classifier-free guidance; 1 = the plain conditional model", least=0)
    guidance_channels: int = _sampling(0, "how many channels, the first ones, guidance changes; 0 = all", least=0)
    samples: int = _sampling(64, "images in a grid", least=1, most=10**6)

    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Those of the model, the objective and the sampler, and what else was given to samplers."""

    def __init__(self, /, **values: Any):
        core = _core()
        _require_known(values)
        for name, option in core.items():
            object.__setattr__(self, name, option.checked(name, values.get(name, option.default)))
        own = _own_options(values)
        defaults = {name: option.default for kind, table in TABLES.items()
                    for name, option in table[getattr(self, kind)].options.items()}
        for name in values:
            if name not in core and name not in own:
                others = " or ".join(f"{kind} {entry.name}" for kind, entry, _ in options_named(name))
                raise CudiffError(
                    f"{name} is an option of {others}, not of model {self.model} with diffusion {self.diffusion}: "
                    "leave it out"
                )
        given = {name: own[name].checked(name, value) for name, value in values.items() if name not in core}
        object.__setattr__(self, "options", MappingProxyType(defaults | given))
        object.__setattr__(self, "_given", given)
        _check_run(self)
        for kind, table in TABLES.items():
            table[getattr(self, kind)].check(self)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"options": dict(self.options)}  # the read-only view has no copy

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, options=MappingProxyType(state["options"]))

    def __getattr__(self, name: str) -> Any:
        options = vars(self).get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(f"this configuration has no '{name}': its model, objective and sampler do not know it")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], base: Config | None = None) -> Config:
        """`base` (or the defaults) with `values` in place of its own. Raises CudiffError for an unknown key."""
        return (base or cls()).replace(**values)

    @classmethod
    def stored(cls, values: Mapping[str, Any]) -> Config:
        """That in a checkpoint. An old one has all options of the library's models and objectives: those that are not
        its own are left out. So is a sampler that is not registered, with what can only be its options."""
        lost = isinstance(values.get("sampler"), str) and values["sampler"] not in SAMPLERS
        values = {name: value for name, value in values.items() if not lost or name != "sampler"}
        chosen = [table.get(str(values.get(kind, _core()[kind].default))) for kind, table in TABLES.items()]
        if all(entry is not None and entry.of_library for entry in chosen):  # no old one has a user's
            own = _core() | _own_options(values)
            others = {name for name in values if lost or any(entry.of_library for _, entry, _ in options_named(name))}
            values = {name: value for name, value in values.items() if name in own or name not in others}
        # Defaults are stored too; they are not given to another sampler or objective, which may have its own.
        defaults = {name: option.default for entry in chosen if entry for name, option in entry.options.items()}
        return cls(**{name: value for name, value in values.items() if defaults.get(name, cls) != value})

    def to_dict(self) -> dict[str, Any]:
        """All fields and options by name; JSON and TOML can hold every value."""
        return {name: getattr(self, name) for name in _core()} | dict(self.options)

    def replace(self, /, **changes: Any) -> Config:
        """A copy with some values changed, checked again. Raises CudiffError for an unknown name.

        With another model, objective or sampler go the options that only the one before has.
        """
        _require_known(changes)
        core = {name: getattr(self, name) for name in _core()} | changes
        own = _own_options(core)
        return Config(**{name: value for name, value in self._given.items() if name in own} | core)

    def fixed(self) -> dict[str, Any]:
        """What a resumed run cannot change: what its weights, its data and its loss depend on."""
        names = [name for name, option in (_core() | dict(OBJECTIVES[self.diffusion].options)).items() if option.fixed]
        return {name: getattr(self, name) for name in (*names, *MODELS[self.model].options)}

    def for_data(self, shape: tuple[int, ...], num_classes: int, class_names: Sequence[str] | None = None,
                 latents: bool = False) -> Config:
        """The configuration with the data's size, channels and class names where it has none, checked against the data.

        shape: (N, H, W, C) of the images. num_classes: how many classes their labels have, 0 without labels.
        class_names: one for each of them, or None. latents: whether they are that.
        """
        height, width, channels = shape[1:]
        if self.latent_scale and not latents:
            raise CudiffError("the data are pictures, and latent_scale is for latents: leave it out, or make it 0")
        if height != width:
            raise CudiffError(f"the images are {height}x{width}, not square: crop them with image_size")
        if (self.image_size or height, self.channels or channels) != (height, channels):
            raise CudiffError(
                f"the images have {height} pixels a side and {channels} channels, "
                f"but image_size is {self.image_size} and channels {self.channels}: load them with these"
            )
        classes = self.num_classes
        if classes < 0:
            classes = num_classes if MODELS[self.model].classes else 0
        if classes and num_classes == 0:
            raise CudiffError("the data has no labels: sort the images into sub-folders, or set num_classes to 0")
        if classes and num_classes > classes:
            raise CudiffError(f"the data has {num_classes} classes: num_classes {classes} is too small, or choose some "
                              "with only_classes")
        names = self.class_names or (tuple(class_names or ()) if classes else ())
        scale = self.latent_scale or float(latents)
        return self.replace(image_size=height, channels=channels, num_classes=classes, class_names=names,
                            latent_scale=scale)


def load_toml(path: str | os.PathLike, base: Config | None = None) -> Config:
    """The configuration in a TOML file; options it leaves out are those of its `preset`, else of `base`, else defaults.

    Raises CudiffError where the file is missing or not TOML, and for whatever `Config` does not take.
    """
    values = _read_toml(path)
    return _on(_preset(values.pop("preset")), values) if "preset" in values else Config.from_dict(values, base)


def _on(preset: Config, values: dict[str, Any]) -> Config:
    """A preset with `values` in place of its own. Of its classes only_classes leaves those of the data."""
    return preset.replace(**({"num_classes": -1} if preset.num_classes and values.get("only_classes") else {}) | values)


def add_arguments(parser: argparse.ArgumentParser, sections: Collection[str] = SECTIONS) -> None:
    """Add --preset, --config and a flag for every option of `sections`; `from_arguments` reads them.

    Of options that share a name, as one of a model and one of a sampler may, the first has the flag and its help.
    """
    parser.add_argument("--preset", metavar="NAME", help=f"start from {', '.join(PRESET_NAMES)}")
    parser.add_argument("--config", type=os.path.expanduser, metavar="FILE",
                        help="start from a TOML file; its keys are the options' names, with _ for -")
    added: set[str] = set()
    for section in sections:
        group = parser.add_argument_group(section)
        for name, option in options_in(section).items():
            if name in added:
                continue
            added.add(name)
            option.add_to(group, name, _help(name, option))


def from_arguments(arguments: argparse.Namespace, base: Config | None = None) -> Config:
    """The configuration of a command line: flags over the TOML file over the preset.

    Without a preset `base` is it, and without that the one named like the data set, so that `--data mnist` suffices.
    """
    given = vars(arguments)
    values = _read_toml(given["config"]) if given.get("config") else {}
    name = given.get("preset") or values.get("preset")
    values = {key: value for key, value in values.items() if key != "preset"}
    values |= {key: value for key, value in given.items() if _is_known(key)}
    if name is not None or base is None:
        return _on(PRESETS.get(str(values.get("data", "digits")), Config()) if name is None else _preset(name), values)
    return base.replace(**values)


def as_flags(values: Mapping[str, Any]) -> str:
    """Options as they are given on a command line."""
    words = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words.append(f"--{flag} {as_text(value) if value != () else repr('')}")
    return " ".join(words)


@cache
def _core() -> dict[str, Option]:
    """The options that every run has, by name."""
    return {field.name: field.metadata["option"] for field in dataclasses.fields(Config) if field.metadata}


def options_in(section: str) -> dict[str, Option]:
    """The options of a section by name: its fields, then those of what is chosen in it."""
    found = {field.name: field.metadata["option"] for field in dataclasses.fields(Config)
             if field.metadata.get("section") == section}
    for entry in TABLES[CHOSEN_IN[section]].values() if section in CHOSEN_IN else ():
        found = found | {name: option for name, option in entry.options.items() if name not in found}
    return found


def _help(name: str, option: Option) -> str:
    """An option's help: what it may be, where it chooses from a table, and its default, or each model's."""
    text = option.help
    if name in TABLES:
        text += ": " + " or ".join(f"{entry.name} ({entry.help})" for entry in TABLES[name].values())
    defaults = {entry.name: as_text(one.default) for _, entry, one in options_named(name)}
    if len(set(defaults.values())) > 1:
        return f"{text} (default {', '.join(f'{default} in {entry}' for entry, default in defaults.items())})"
    return f"{text} (default {as_text(option.default)})"


def _own_options(values: Mapping[str, Any]) -> dict[str, Option]:
    """The options besides the fields that a configuration of such values takes: those of its model, of its objective
    and of all samplers, as an image can be sampled by another one; the chosen one's go first."""
    own: dict[str, Option] = {}
    for entry in SAMPLERS.values():
        own |= entry.options
    for kind, table in TABLES.items():
        name = values.get(kind, _core()[kind].default)
        own |= table[name].options if isinstance(name, str) and name in table else {}
    return own


def _is_known(name: str) -> bool:
    return name in _core() or next(options_named(name), None) is not None


def _require_known(names: Collection[str]) -> None:
    """Raise CudiffError for an option that nothing has."""
    for name in names:
        if not _is_known(name):
            known = [*_core(), *(one for table in TABLES.values() for entry in table.values() for one in entry.options)]
            near = difflib.get_close_matches(name[:80], known, 1)
            advice = f"did you mean {near[0]}?" if near else "see cudiff train --help"
            raise CudiffError(f"unknown option '{name[:80]}': {advice}")


_LONGEST_FILE, _LONGEST_LINE = 2**16, 1000  # bytes; one line of 16 kB can keep tomllib busy for a second, of 64 for 18


def _check_run(config: Config) -> None:
    """Raise CudiffError where training or sampling with these options cannot mean anything."""
    model, objective = MODELS[config.model], OBJECTIVES[config.diffusion]
    if config.num_classes > 0 and not model.classes:
        raise CudiffError(f"model {model.name} has no classes: num_classes must be 0, not {config.num_classes}")
    if config.learn_sigma and not model.learns_variance:
        raise CudiffError(f"model {model.name} learns no variance: leave out learn_sigma")
    if config.learn_sigma and not objective.learns_variance:
        able = " or ".join(one.name for one in OBJECTIVES.values() if one.learns_variance)
        raise CudiffError(f"learn_sigma needs diffusion = {able}: {objective.name.upper()} has no variance to learn")
    _check_names(config)
    if not config.data:
        raise CudiffError("data is empty: give digits, mnist, fashion-mnist, a folder of images, an .npz or a .bin")
    if len(config.betas) != 2:
        raise CudiffError(f"betas must be two numbers such as 0.9,0.999: {len(config.betas)} given")
    if config.sigma_min >= config.sigma_max:
        raise CudiffError(f"sigma_min {config.sigma_min} must be below sigma_max {config.sigma_max}")
    karras_sigmas(1, config.sigma_min, config.sigma_max, config.rho)  # rho goes with both
    if config.steps == 0 and config.minutes == 0:
        raise CudiffError("training would never end: give steps or minutes")
    if config.lr_schedule == "cosine" and config.steps == 0:
        raise CudiffError("the cosine schedule needs an end: give steps, or lr_schedule = constant")


def _check_names(config: Config) -> None:
    names, classes = config.class_names, config.num_classes
    repeated = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if repeated is not None:
        raise CudiffError(f"class_names has '{repeated[:80]}' twice: give each class a name of its own")
    if 0 <= classes < len(names):
        raise CudiffError(f"{len(names):,} class_names for {classes:,} classes (num_classes): give no more than these")


def _preset(name: Any) -> Config:
    if not isinstance(name, str) or name not in PRESETS:
        what = name[:80] if isinstance(name, str) else shown(name)
        raise CudiffError(f"unknown preset '{what}': use {' or '.join(PRESET_NAMES)}")
    return PRESETS[name]


def _read_toml(path: str | os.PathLike) -> dict[str, Any]:
    with opened(path) as file:
        content = file.read(_LONGEST_FILE + 1)
    if len(content) > _LONGEST_FILE:
        raise CudiffError(f"{path} is over {_LONGEST_FILE >> 10} KiB: a configuration is some lines 'name = value'")
    if max(map(len, content.splitlines()), default=0) > _LONGEST_LINE:
        raise CudiffError(f"{path} has a line of over {_LONGEST_LINE} characters: write one 'name = value' a line")
    try:
        values = tomllib.loads(content.decode("utf-8-sig"))
    except RecursionError:
        raise CudiffError(f"{path} is nested too deeply: write one 'name = value' a line") from None
    except ValueError as error:
        raise CudiffError(f"{path} is not TOML ({str(error)[:200]}): write one 'name = value' a line") from None
    for name, value in values.items():
        if isinstance(value, dict):
            raise CudiffError(f"{path}: options have no sections; remove the line [{name[:80]}]")
    return values


_MNIST = Config(
    data="mnist", image_size=28, channels=1, model_channels=64, channel_mult=(1, 2, 2), num_res_blocks=2,
    attention_resolutions=(14, 7), num_head_channels=32, num_classes=10, batch_size=256, lr=5e-4, warmup=200,
    lr_schedule="cosine", clip=1.0, precision="bf16", steps=10000, sampler="euler", guidance=1.1,
)

# unet.cu's U-Net (github.com/clu0/unet.cu).
_UNET_CU = Config(
    data="elephant_train.bin", image_size=64, channels=3, num_classes=0, model_channels=64, channel_mult=(1, 2, 3, 4),
    num_res_blocks=2, attention_resolutions=(16, 8), num_head_channels=32, conv_resample=False,
    use_new_attention_order=True, max_period=1000.0, zero_init=False, diffusion="ddpm", batch_size=32, lr=1e-4,
    steps=100000, log_every=100, save_every=10000, sampler="ancestral", sample_steps=1000,
)

_GUIDED64 = Config(
    data="images", image_size=64, channels=3, model_channels=128, channel_mult=(1, 2, 3, 4), num_res_blocks=2,
    attention_resolutions=(16, 8), num_heads=4, use_scale_shift_norm=True, diffusion="ddpm", batch_size=32, lr=1e-4,
    ema_half_life=6931.0, precision="bf16", steps=500000, sampler="ancestral", sample_steps=250,
)

_DIT = Config(
    model="dit", batch_size=256, lr=1e-4, ema_half_life=6931.0, precision="bf16", steps=400000,
)

reserve(dir(Config()))
# These flags are commands' own, beside the options' flags.
reserve([
    "against", "arch", "batch_invariant", "classes", "config", "data_changed", "folder", "gpus", "guidance_interval",
    "guidance_rescale", "help", "images", "init", "kernels", "key", "mask", "preset", "resume", "strength", "timeout",
    "to_torch", "version", "weights",
])

PRESETS = {
    # A model that a laptop's CPU trains in a minute. A norm over one channel would take out a class embedding added
    # before it: hence two a group, and use_scale_shift_norm (with one a group 94 % of samples as asked, not 83).
    # P_mean: the shape of a digit is decided at more noise than the details of a photo (97 % of them, not 93).
    "digits": Config(
        data="digits", image_size=16, channels=1, model_channels=16, channel_mult=(1, 2), num_res_blocks=1,
        num_head_channels=16, use_scale_shift_norm=True, norm_group_channels=2, num_classes=10, P_mean=-0.4,
        batch_size=16, lr=2.5e-3, warmup=60, lr_schedule="cosine", ema_half_life=40.0, clip=1.0, steps=700,
        sample_every=350, save_every=350, sampler="euler", sample_steps=10, guidance=3.0,
    ),
    "mnist": _MNIST,
    "fashion-mnist": _MNIST.replace(data="fashion-mnist"),
    "mnist-ddpm": _MNIST.replace(
        diffusion="ddpm", noise_schedule="cosine", num_classes=0, sampler="ancestral", sample_steps=250
    ),
    # What the CS 179 project trained (github.com/Austinwang22/cs179-diffusion); its published weights fit. It shifts
    # and scales pixels in [0, 1] by MNIST's mean 0.1307 and deviation 0.3081: in [-1, 1] twice that, the mean less 1.
    "cs179": Config(
        data="mnist", image_size=28, channels=1, model="cs179", channel_mult=(1, 2), num_classes=0, data_mean=-0.7386,
        data_std=0.6162, batch_size=256, lr=1e-3, optimizer="adam", sampler="euler",
    ),
    # unet.cu's U-Net as EDM. Without dropout it learns a few hundred photos by heart.
    "elephants": _UNET_CU.replace(
        data="elephants", validation=20, flip=True, num_classes=-1, dropout=0.2, diffusion="edm", lr=2e-4, warmup=200,
        lr_schedule="cosine", clip=1.0, precision="bf16", steps=12000, log_every=50, save_every=1000, sampler="heun",
        sample_steps=18,
    ),
    # unet.cu's model and recipe, in float32 as there.
    "unet-cu": _UNET_CU,
    # The defaults of guided-diffusion's scripts (github.com/openai/guided-diffusion).
    "guided64": _GUIDED64,
    # The model whose weights guided-diffusion publishes as 64x64_diffusion.pt.
    "imagenet64": _GUIDED64.replace(
        model_channels=192, num_res_blocks=3, attention_resolutions=(32, 16, 8), num_head_channels=64, dropout=0.1,
        resblock_updown=True, num_classes=1000, learn_sigma=True, use_new_attention_order=True,
        noise_schedule="cosine",
    ),
    # Transformers (arXiv 2212.09748), on pixels: a small one, the paper's S/4 and its B/4.
    "dit-mnist": _DIT.replace(
        data="mnist", image_size=28, channels=1, num_classes=10, patch_size=2, hidden_size=256, depth=8, num_heads=4,
        lr=1e-3, warmup=500, lr_schedule="cosine", ema_half_life=500.0, clip=1.0, steps=15000, sampler="euler",
        guidance=1.5,
    ),
    "dit-elephants": _DIT.replace(
        data="elephants", image_size=64, channels=3, validation=20, flip=True, patch_size=4, batch_size=32, lr=2e-4,
        weight_decay=0.05, warmup=200, lr_schedule="cosine", ema_half_life=500.0, clip=1.0, steps=12000,
    ),
    "dit64": _DIT.replace(
        data="images", image_size=64, channels=3, patch_size=4, hidden_size=768, depth=12, num_heads=12, clip=1.0,
    ),
}
"""Configurations by name, for `--preset`."""

# The paper's models, dit-s-2 to dit-xl-8, as it trains them: any data, of images or latents.
_SIZED = {
    f"dit-{size}-{patch}": _DIT.replace(
        data="images", flip=True, diffusion="ddpm", learn_sigma=True, patch_size=patch, hidden_size=hidden_size,
        depth=depth, num_heads=num_heads, sampler="ancestral", sample_steps=250, guidance=1.5,
    )
    for size, (hidden_size, depth, num_heads) in SIZES.items() for patch in (2, 4, 8)
}
PRESET_NAMES = (*PRESETS, "dit-{s,b,l,xl}-{2,4,8}")
PRESETS |= _SIZED
