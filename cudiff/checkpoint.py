"""Checkpoints: one safetensors file with the weights, their average, the optimiser's moments and the configuration."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cudiff.config import Config
from cudiff.convert import check_binary, is_unet_cu, unet_cu_checkpoint
from cudiff.errors import CudiffError
from cudiff.models import outline
from cudiff.nn.module import Shaped, require_fit
from cudiff.nn.state_dict import StateDict
from cudiff.registry import TABLES
from cudiff.tensorfile import digest, read_header, read_tensors, write_tensors

T = TypeVar("T")

FORMAT_VERSION = 1
"""Written into every checkpoint, and the only one that is read. Digests came later and leave it: who does not know them
reads the file without, and a file without them is read as before."""
LAYOUT = "native KRSC"
ABOUT = "about"
"""The name, among the tensors' digests, of the digest over everything else that cudiff writes into the header."""
PARTS = ("model", "ema", "exp_avg", "exp_avg_sq", "momentum_buffer")
"""What a tensor's name begins with: the weights, their moving average, the moments of Adam or the momentum of SGD."""


class Checkpoint(NamedTuple):
    """tensors: arrays by prefixed name, see `part`. counters: step, seed and such."""

    config: Config
    tensors: dict[str, np.ndarray]
    counters: dict[str, Any]


def save_checkpoint(
    path: str | os.PathLike, config: Config, tensors: Mapping[str, np.ndarray], counters: Mapping[str, Any]
) -> None:
    """Write a checkpoint in place of what is at `path`, whole or not at all.

    tensors: NumPy arrays in native layout, their names prefixed as `prefixed` does. counters: what JSON can hold.
    Raises CudiffError where the system refuses to write, ValueError for a name without a known prefix.
    """
    strays = [name for name in tensors if name.partition(".")[0] not in PARTS]
    if strays:
        raise ValueError(f"tensor names must begin with one of {PARTS}: {strays[:3]}")
    about = {"format_version": FORMAT_VERSION, "layout": LAYOUT, "config": config.to_dict(), "counters": dict(counters)}
    if registrars := _registrars(config):
        about["registered_by"] = registrars
    digests = {ABOUT: _digest_of(about)} | {name: digest(array) for name, array in tensors.items()}
    write_tensors(path, tensors, {"cudiff": json.dumps(about | {"sha256": digests})})


def _registrars(config: Config) -> dict[str, str]:
    """Of a model, an objective or a sampler that cudiff has not, the module that registered it, by kind: of a program
    the name of its file."""
    found = {}
    for kind, table in TABLES.items():
        entry = table.get(getattr(config, kind))
        if entry is not None and not entry.of_library:
            module = getattr(entry.build, "__module__", "")
            program = getattr(sys.modules["__main__"], "__file__", None) if module == "__main__" else None
            found[kind] = Path(program).name if program else module
    return found


def load_checkpoint(
    path: str | os.PathLike, parts: Collection[str] = PARTS, sampler: str | None = None
) -> Checkpoint:
    """Read a checkpoint, or the newest in a run's folder; or only some of its `parts`: sampling needs no moments.

    unet.cu's binary is read as one, see `cudiff.convert.unet_cu_checkpoint`.

    sampler: in place of the checkpoint's, which then need not be registered.
    What is read is compared with its digests, and names and shapes with the configuration's before anything large is
    read. Raises CudiffError where the file is missing, truncated, damaged, no checkpoint, of another version, or where
    the names or shapes of its parts are not those of its model.
    """
    return read_newest(path, lambda found: _load(found, parts, sampler))


def _load(path: Path, parts: Collection[str], sampler: str | None) -> Checkpoint:
    if is_unet_cu(path):
        config, tensors, counters = unet_cu_checkpoint(path, parts)
        return Checkpoint(config if sampler is None else config.replace(sampler=sampler), tensors, counters)
    try:
        entries, metadata = read_header(path)
    except CudiffError:
        check_binary(path)
        raise
    about = _about(path, metadata)
    _check_counters(path, about["counters"])
    for kind, table in TABLES.items():
        name = about["config"].get(kind)
        if isinstance(name, str) and name not in table and (kind != "sampler" or sampler is None):
            registrars = about.get("registered_by")
            known = registrars.get(kind) if isinstance(registrars, dict) else None
            where = f", {known[:80]}" if isinstance(known, str) and known else ""
            raise CudiffError(
                f"{path}: its {kind} '{name[:80]}' is not registered here: first import what registers it{where} "
                f"(cudiff.register_{'objective' if kind == 'diffusion' else kind}), then load it from Python"
                + (", or choose another one with --sampler (sampler=)" if kind == "sampler" else "")
            )
    try:
        config = Config.stored(about["config"])
    except CudiffError as error:
        raise CudiffError(
            f"{path} needs the cudiff that wrote it, and what was registered there, as it cannot be built here: {error}"
        ) from None
    config = config if sampler is None else config.replace(sampler=sampler)
    check_parts(path, entries, config)
    tensors, _ = read_tensors(path, lambda name: name.partition(".")[0] in parts, about.get("sha256"))
    return Checkpoint(config, tensors, about["counters"])


def stored_options(path: str | os.PathLike) -> dict[str, Any]:
    """The configuration in a checkpoint as it was written, by name: of a sampler too that is not registered here.

    Raises CudiffError where the file cannot be read or is no checkpoint.
    """
    if is_unet_cu(path):
        return unet_cu_checkpoint(path, ())[0].to_dict()
    return _about(path, read_header(path)[1])["config"]


def prefixed(name: str, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """`state` with the names that it has as a part of a checkpoint: `prefixed("ema", {"out.bias": …})`."""
    return {f"{name}.{key}": array for key, array in state.items()}


def part(tensors: Mapping[str, np.ndarray], name: str) -> StateDict:
    """One part of a checkpoint's tensors, without the prefix.

    Raises CudiffError where it is absent: a missing average is never replaced by the weights.
    """
    own = ((key.removeprefix(f"{name}."), array) for key, array in tensors.items() if key.startswith(f"{name}."))
    state = StateDict(own)
    if not state:
        raise CudiffError(f"the checkpoint holds no '{name}' tensors: use one that cudiff train wrote")
    return state


def checkpoint_path(folder: str | os.PathLike, step: int) -> Path:
    """Where `latest` and `prune` look for the checkpoint of a step."""
    return Path(folder) / f"step-{step:08d}.safetensors"


def latest(folder: str | os.PathLike) -> Path | None:
    """The checkpoint of the highest step in `folder`, or None."""
    found = checkpoints(folder)
    return found[-1] if found else None


def find_checkpoint(path: str | os.PathLike) -> Path:
    """`path` itself, or the newest checkpoint where it is a run's folder. Raises CudiffError where there is none."""
    path = Path(path)
    found = latest(path) if path.is_dir() else path
    if found is None:
        if (path / "metrics.jsonl").exists():
            raise CudiffError(f"the run in {path} ended before it saved a checkpoint: begin again, in another folder")
        raise CudiffError(f"{path} holds no checkpoint: give the folder of a run, or a checkpoint")
    return found


def read_newest(path: str | os.PathLike, read: Callable[[Path], T]) -> T:
    """read(found) of what `find_checkpoint` finds; anew where a run deletes that meanwhile, as newer ones came."""
    while True:
        found = find_checkpoint(path)
        try:
            return read(found)
        except CudiffError:
            if not Path(path).is_dir() or found in checkpoints(path):
                raise


def prune(folder: str | os.PathLike, keep: int) -> list[Path]:
    """Delete all but the `keep` newest checkpoints in `folder` (none where keep is 0); returns the deleted ones."""
    old = checkpoints(folder)[:-keep] if keep > 0 else []
    for path in old:
        path.unlink(missing_ok=True)
    return old


def checkpoints(folder: str | os.PathLike) -> list[Path]:
    """The checkpoints in `folder`, oldest first; other files are not looked at."""
    found = sorted(Path(folder).glob("step-*.safetensors"))
    return sorted((path for path in found if path.stem.removeprefix("step-").isdecimal()), key=named_step)


def named_step(path: Path) -> int:
    """The step in the name of one of a run's checkpoints."""
    return int(path.stem.removeprefix("step-"))


def _about(path: str | os.PathLike, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The checked `cudiff` metadata."""
    if "cudiff" not in metadata:
        raise CudiffError(f"{path} holds weights but is no cudiff checkpoint: convert it first with cudiff convert")
    try:
        about = json.loads(metadata["cudiff"])
        version = about["format_version"]
        if version != FORMAT_VERSION:
            raise CudiffError(
                f"{path} has checkpoint format {str(version)[:20]}, this cudiff reads {FORMAT_VERSION}: "
                "use the version of cudiff that wrote it"
            )
        texts = {key: value for key, value in about.items() if key != "sha256"}
        if "sha256" in about and about["sha256"][ABOUT] != _digest_of(texts):
            raise ValueError
        if about["layout"] != LAYOUT or not all(isinstance(about[name], dict) for name in ("config", "counters")):
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise CudiffError(f"{path} is damaged: its cudiff metadata makes no sense; use another checkpoint") from None
    return about


def _digest_of(about: Mapping[str, Any]) -> str:
    """SHA-256 of the configuration and the counters, as JSON with sorted keys."""
    return digest(np.frombuffer(json.dumps(about, sort_keys=True).encode(), np.uint8))


def _check_counters(path: str | os.PathLike, counters: Mapping[str, Any]) -> None:
    """Raise CudiffError unless every counter that resuming needs is there, of its type and in its range."""
    needed = _COUNTERS if "optimizer" in counters else {"step": _COUNTERS["step"]}  # converted weights have no more
    for name, is_right in needed.items():
        if not is_right(counters.get(name)):
            raise CudiffError(f"{path} is damaged: its counter '{name}' is missing or no such number; use another")


def _whole(value: Any, below: int) -> bool:
    return type(value) is int and 0 <= value < below


def _finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300  # False for NaN


def _is_generator(state: Any) -> bool:
    return (
        isinstance(state, dict)
        and _whole(state.get("seed"), 2**63)
        and "step" in state
        and all(_whole(value, 2**31) for name, value in state.items() if name != "seed")
    )


_COUNTERS: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: _whole(value, 2**31),
    "seconds": lambda value: _finite(value) and value >= 0,
    "loss_sum": _finite,
    "loss_steps": lambda value: _whole(value, 2**31),
    "optimizer": lambda value: isinstance(value, list) and all(_whole(number, 2**31) for number in value),
    "generator": _is_generator,
    "loss_scale": lambda value: value is None or (isinstance(value, list) and [*map(_finite, value)] == [True, True]),
    "frozen": lambda value: value is None or (isinstance(value, list) and all(isinstance(name, str) for name in value)),
}


def check_parts(path: str | os.PathLike, entries: Mapping[str, Shaped], config: Config) -> None:
    """Raise CudiffError unless there are weights, and all parts have the names and shapes of the configuration's model.

    No model is built, and its outline stops where it is far larger than the file.
    """
    parts: dict[str, dict[str, Shaped]] = {name: {} for name in PARTS}
    for name, entry in entries.items():
        prefix, _, rest = name.partition(".")
        if prefix not in PARTS:
            raise CudiffError(f"{path} holds an unexpected tensor {name[:80]}: use a checkpoint that cudiff wrote")
        parts[prefix][rest] = entry
    if not parts["model"]:
        raise CudiffError(f"{path} holds no model weights: use another checkpoint")
    try:
        net = outline(config, len(parts["model"]), sum(math.prod(entry.shape) for entry in parts["model"].values()))
    except CudiffError as error:
        raise CudiffError(f"{path}: its weights do not fit its configuration's model ({error})") from None
    parameters = dict(net.named_parameters())
    state = parameters | dict(net.named_buffers())
    for name, found in parts.items():
        if found:
            expected = state if name in ("model", "ema") else parameters
            require_fit(found, expected, f"{path}: its '{name}' does not fit its configuration's model")
