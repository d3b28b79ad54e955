"""What training and sampling launch, launch by launch: `python -m tests.traces`.

A redesign of the host's side that is to launch the same proves it by tests/test_traces.py, which records again what
tests/traces/ holds, on the stand-in for a GPU of tests/host.py: no kernel runs. For each preset, at its own batch size
and image size, there are one training step (`Trainer.train_step`: batch, forward, backward, clipping, update, moving
average) and a sampling of 64 images in two steps by its own sampler and guidance (`Pipeline.sample`, not captured).

    python -m tests.traces                   record, and tell where traces differ (2 minutes, 7 GB of memory)
    python -m tests.traces --update          write tests/traces/ anew
    python -m tests.traces --write FOLDER    write every trace in full: for a diff between two commits

tests/traces/<preset>.txt holds what Hopper launches to train in the preset's own precision, a line a launch:

    stem.kernel grid xblock shared-bytes CONSTANT=value ...: arguments

A constant of 0 is left out, and the kernel's name where it is the file's. Arguments stand in the kernel's order. 17 is
the seventeenth array of the trace by first appearance, of which the first time its dtype and shape are told, as
allocated; 17+64 starts 64 bytes into it; - is a null pointer. {17 shape/strides box kind.swizzle} is a tensor map, with
the driver's numbers for the last two, without strides where the array is whole, and with nothing but the array where
the rest is as in the map before. (3 4+8 #digest) is a table: its arrays and tensor maps in order, and a digest of the
rest. 8*3 is three times 8. What CuPy does by itself has lines too: `cupy.copy: 18 17`, the result first. No address is
in a trace, nor a number that a kernel computes. Both phases have run once before, which casts weights to 16 bits.

tests/traces/others.txt has of every other trace the number of launches, a digest of its text, the launches of each
kernel, and two letters for each launch, 60 launches a line: enough to tell where a trace differs first.

tests/traces/renames.toml maps old names to new ones, under [kernels] ("stem.kernel", or "stem" where both are the same)
and under [constants]; with them a trace is compared as it would have been before. --update empties it.
"""

from __future__ import annotations

import argparse
import base64
import gc
import hashlib
import math
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from cudiff import pipeline, train
from cudiff.backend import PRECISIONS
from cudiff.config import PRESETS, Config
from cudiff.cuda import tiles
from cudiff.cuda.kernels.attention.problem import Heads
from cudiff.data import Dataset
from cudiff.models import outline
from cudiff.nn import Module
from cudiff.tensor import Tensor
from tests.host import ADDRESS, MAP, Array, Launch, Map, decode, forget, owners, pretend

FOLDER = Path(__file__).resolve().with_suffix("")
NAMES = ("digits", "mnist", "cs179", "elephants", "guided64", "imagenet64", "dit-mnist")
SAMPLES, SAMPLE_STEPS = 64, 2
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int32": "i32", "uint8": "u8"}


Names = dict[str, dict[str, str]]
NO_NAMES: Names = {"kernels": {}, "constants": {}}


class Case(NamedTuple):
    """One trace: what runs, in which precision, on a GPU of Hopper or an older one."""

    preset: str
    phase: str
    precision: str
    hopper: bool

    def __str__(self) -> str:
        return f"{self.preset} {self.phase} {self.precision} {'hopper' if self.hopper else 'older'}"

    @property
    def in_full(self) -> bool:
        """Whether its text is kept."""
        return self.hopper and self.phase == "training" and self.precision == PRESETS[self.preset].precision


RUNS = [("training", name) for name in ("fp32", "tf32", "bf16")] + [("sampling", name) for name in PRECISIONS]
CASES = [Case(preset, *run, hopper) for preset in NAMES for hopper in (True, False) for run in RUNS]


def old_names() -> Names:
    """Of renames.toml: the old names by the new ones, for kernels and for constants."""
    tables = tomllib.loads((FOLDER / "renames.toml").read_text())
    return {kind: {new: old for old, new in tables[kind].items()} for kind in ("kernels", "constants")}


class Trace:
    """The text of launches as they come, a line each, and how many there were of each kernel.

    names: what kernels and constants were called before.
    """

    def __init__(self, names: Names) -> None:
        self._old_kernels, self._old_constants = names["kernels"], names["constants"]
        self.lines: list[str] = []
        self.kernels: Counter[str] = Counter()
        self._names: dict[int, int] = {}
        self._boxes = ""

    def __call__(self, launch: Launch) -> None:
        kernel = launch.stem if launch.stem == launch.name else f"{launch.stem}.{launch.name}"
        kernel = self._old_kernels.get(kernel, kernel)
        constants = sorted((self._old_constants.get(name, name), value) for name, value in launch.constants.items())
        words = [kernel, _sizes(launch.grid), f"x{_sizes(launch.block)}"]
        words += [f"{launch.shared}B"] if launch.shared else []
        words += ["cooperative"] if launch.cooperative else []
        words += [f"{name}={value}" for name, value in constants if value]
        self._boxes = ""
        runs = [(arg, len(list(run))) for arg, run in groupby(self._argument(arg) for arg in launch.args)]
        self.lines.append(f"{' '.join(words)}: {' '.join(f'{arg}*{n}' if n > 1 else arg for arg, n in runs)}")
        self.kernels[kernel] += 1

    def by_cupy(self, work: str, *arrays: Any) -> None:
        """A line for what CuPy does by itself."""
        names = " ".join(self._argument(array) for array in arrays if isinstance(array, Array))
        self.lines.append(f"cupy.{work}: {names}")
        self.kernels[f"cupy.{work}"] += 1

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.lines)

    @property
    def summary(self) -> list[str]:
        """The lines that others.txt has of it, but for the case."""
        counts = " ".join(f"{kernel}={count}" for kernel, count in sorted(self.kernels.items()))
        marks = "".join(map(_mark, self.lines))
        rows = [marks[start : start + 120] for start in range(0, len(marks), 120)]
        return [f"{len(self.lines)} launches, {_digest(self.text.encode())}", counts, *rows]

    def _argument(self, arg: Any) -> str:
        arg = arg.data if isinstance(arg, Tensor) else arg
        if arg is None:
            return "-"
        if isinstance(arg, (Array, Heads)):
            return self._place(arg.data.ptr)
        if type(arg) in (bytes, np.ndarray):
            return self._table(bytes(arg))
        value = arg.item() if isinstance(arg, np.generic) else arg
        return f"{value:.9g}" if isinstance(value, float) else str(int(value))

    def _place(self, address: int) -> str:
        number, offset = address >> 32 & 0xFFFFFF, address & 0xFFFFFFFF
        known = number in self._names
        name = str(self._names.setdefault(number, len(self._names) + 1))
        if not known and number in owners:
            owner = owners[number]
            name += f"={_SHORT.get(owner.dtype.name, owner.dtype.name)}[{_sizes(owner.shape)}]"
        return f"{name}+{offset}" if offset else name

    def _table(self, content: bytes) -> str:
        """A struct that is passed by value: arrays and tensor maps are found by their words' upper bits."""
        words = [int(word) for word in np.frombuffer(content + bytes(-len(content) % 8), np.uint64)]
        rest, parts, at = list(words), [], 0
        while at < len(words):
            tag, size = words[at] >> 56, 1
            if tag == MAP:
                size = 16
                parts.append(self._map(words[at : at + size]))
            elif tag == ADDRESS:
                parts.append(self._place(words[at]))
            if tag in (MAP, ADDRESS):
                rest[at : at + size] = [tag] * size
            at += size
        if len(words) == 16 and words[0] >> 56 == MAP:
            return parts[0]
        return f"({' '.join(parts)} #{_digest(np.array(rest, np.uint64).tobytes())})"

    def _map(self, words: list[int]) -> str:
        found = decode(words)
        strides = "" if found.strides == _whole(found) else f"/{_sizes(found.strides)}"
        boxes = f" {_sizes(found.shape)}{strides} {_sizes(found.box)} {found.kind}.{found.swizzle}"
        before, self._boxes = self._boxes, boxes
        return f"{{{self._place(found.pointer)}{'' if boxes == before else boxes}}}"


def _whole(found: Map) -> tuple[int, ...]:
    """The strides of an array of the map's shape."""
    itemsize = 4 if found.kind in (7, 11) else 2  # as cudiff/cuda/tensor_map.py names the types
    return tuple(math.prod(found.shape[axis:]) * itemsize for axis in range(1, len(found.shape)))


def _sizes(values: tuple[int, ...]) -> str:
    return ",".join(map(str, values))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _mark(line: str) -> str:
    return base64.b64encode(hashlib.sha256(line.encode()).digest())[:2].decode()


def record(case: Case, names: Names) -> Trace:
    """The trace of a case."""
    trace = Trace(names)
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        host = pretend(patch, case.hopper)
        patch.setattr(tiles, "user_file", lambda: FOLDER / "none")  # plans measured on this machine
        try:
            run = training(case, patch, folder) if case.phase == "training" else sampling(case, patch)
            run()
            host.watch = trace
            patch.setattr(Array, "watch", staticmethod(trace.by_cupy))
            run()
        finally:
            patch.undo()
            forget()
            gc.collect()  # arrays of gigabytes, in circles
    return trace


def training(case: Case, patch: pytest.MonkeyPatch, folder: str) -> Callable[[], Any]:
    config = PRESETS[case.preset].replace(precision=case.precision, device="cuda", validation=0, capture=False)
    classes = max(0, config.num_classes)
    images = np.zeros((64, config.image_size, config.image_size, config.channels), np.uint8)
    data = Dataset(images, np.arange(64) % classes, classes) if classes else Dataset(images)
    patch.setattr(train, "build", _without_values)
    return train.Trainer(config, data, folder).train_step


def sampling(case: Case, patch: pytest.MonkeyPatch) -> Callable[[], Any]:
    config = PRESETS[case.preset].replace(device="cuda", capture=False)
    net = _without_values(config)
    net.precision = case.precision
    net.train(False).flatten("cuda", trainable=False)  # as `cudiff.load`
    patch.setattr(pipeline, "to_uint8", lambda images: np.zeros(images.shape, np.uint8))
    return partial(pipeline.Pipeline(config, net).sample, SAMPLES, steps=SAMPLE_STEPS, batch_size=SAMPLES)


def _without_values(config: Config) -> Module:
    return outline(config, 10**5, 10**10)


def stored(case: Case) -> list[str]:
    """What tests/traces/ has of a case: its text, or the lines of `Trace.summary`."""
    if case.in_full:
        return (FOLDER / f"{case.preset}.txt").read_text().splitlines()
    blocks = (block.splitlines() for block in (FOLDER / "others.txt").read_text().split("\n\n"))
    return next(lines for title, *lines in blocks if title == str(case))


def difference(case: Case, trace: Trace, before: list[str]) -> str:
    """Where a trace differs first from what is stored of it; "" where it does not."""
    if before == (trace.lines if case.in_full else trace.summary):
        return ""
    now = trace.lines
    if case.in_full:
        old = before
    else:
        marks = "".join(before[2:])
        old, now = [marks[at : at + 2] for at in range(0, len(marks), 2)], [*map(_mark, now)]
    first = next((at for at, pair in enumerate(zip_longest(old, now)) if pair[0] != pair[1]), None)
    text = f"{case}: {len(old)} launches before, {len(now)} now"
    if first is None:
        return f"{text}; the digests differ: compare the texts that --write gives for both commits"
    text += f"; launch {first + 1} is the first that differs"
    if case.in_full:
        text += f"\n  before: {old[first] if first < len(old) else 'none'}"
    return f"{text}\n  now:    {trace.lines[first] if first < len(now) else 'none'}"


def update() -> None:
    """Write tests/traces/ anew, in today's names."""
    blocks = []
    for case in CASES:
        trace = record(case, NO_NAMES)
        if case.in_full:
            (FOLDER / f"{case.preset}.txt").write_text(trace.text)
        else:
            blocks.append("\n".join([str(case), *trace.summary]))
    (FOLDER / "others.txt").write_text("\n\n".join(blocks) + "\n")
    (FOLDER / "renames.toml").write_text("[kernels]\n\n[constants]\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.traces", description="what training and sampling launch")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--update", action="store_true", help="write tests/traces/ anew")
    choice.add_argument("--write", metavar="FOLDER", type=Path, help="write every trace in full")
    options = parser.parse_args()
    if options.update:
        update()
        return 0
    if options.write:
        options.write.mkdir(parents=True, exist_ok=True)
        for case in CASES:
            (options.write / f"{str(case).replace(' ', '-')}.txt").write_text(record(case, NO_NAMES).text)
        return 0
    found = [text for case in CASES if (text := difference(case, record(case, old_names()), stored(case)))]
    print("\n".join(found) or f"{len(CASES)} traces are as before")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
