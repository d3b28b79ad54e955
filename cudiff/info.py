"""What `cudiff info` prints: hardware, versions, kernels, and what a checkpoint holds."""

from __future__ import annotations

import os
import platform
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from cudiff import __version__
from cudiff.backend import cuda_status
from cudiff.beginning import notes_of
from cudiff.checkpoint import Checkpoint, read_newest, stored_options
from cudiff.classes import names_in_words
from cudiff.config import PRESET_NAMES, PRESETS, Config
from cudiff.cuda import nccl, tiles
from cudiff.cuda.compiler import cubin_folder, kernel_folder, nvrtc_version
from cudiff.cuda.device import describe
from cudiff.cuda.kernels.gemm.problem import Product
from cudiff.cuda.select import FAMILIES, current_target, watched
from cudiff.cuda.tiles import Planner, summary
from cudiff.data import Dataset
from cudiff.errors import CudiffError
from cudiff.folder import read_checkpoint
from cudiff.registry import SAMPLERS, TABLES
from cudiff.train import Trainer


def system_table() -> Table:
    """A rich table of the machine, the versions, the kernels, and why the GPU cannot be used if it cannot."""
    usable, message = cuda_status()
    folder, cache = kernel_folder(), cubin_folder()
    facts = {
        "cudiff": f"{__version__} in {Path(__file__).parent}",
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "CPU": f"{os.cpu_count()} cores",
        **{package: _version(package) for package in ("numpy", "ml_dtypes", "matplotlib")},
        "CUDA": "usable" if usable else f"not usable: {message}",
        **({**describe(), "NVRTC": nvrtc_version(), "NCCL": nccl.version(), "tiles": _tiles()} if usable else {}),
        "kernels": f"{len(list(folder.glob('*/*.cu')))} files in {folder}",
        "compiled kernels": f"{len(list(cache.glob('*.cubin')))} in {cache}",
        "default device": "cuda" if usable else "cpu",
    }
    table = Table(title="cudiff", show_header=False)
    for name, fact in facts.items():
        table.add_row(name, Text(fact, style="yellow" if fact.startswith("not ") else ""))
    return table


def _tiles() -> str:
    try:
        return summary()
    except CudiffError as error:
        return f"not usable: {error}"


ARCHITECTURES = {"sm_75": "sm_75", "sm_80": "sm_80", "sm_86": "sm_86", "sm_89": "sm_89", "sm_90": "sm_90a",
                 "sm_90a": "sm_90a", "sm_100": "sm_100", "sm_120": "sm_120"}
"""Those that the kernels are compiled for, by the names that users give them."""


def kernel_tables(architecture: str | None = None) -> list[Table]:
    """A rich table for each family of kernels: what each takes, in the order in which they are asked, and whether it
    runs on the current GPU or on an `architecture` such as "sm_80". Raises CudiffError for an unknown one."""
    if architecture is not None and architecture not in ARCHITECTURES:
        raise CudiffError(f"unknown architecture '{architecture}': choose one of {', '.join(ARCHITECTURES)}")
    here = None
    if architecture is not None:
        here = ARCHITECTURES[architecture]
    elif cuda_status()[0]:
        here = current_target().architecture
    found = []
    for table in FAMILIES.values():
        shown = Table("kernels", "takes", "made for", title=table.family, title_justify="left",
                      caption="the first that runs and takes a problem does it", caption_justify="left")
        shown.columns[0].overflow = "fold"  # names are searched for
        if here is not None:
            shown.add_column(f"runs on {here}")
        for row in table.rows:
            runs = row.architectures is None or here in row.architectures
            made_for = "every GPU" if row.architectures is None else ", ".join(sorted(row.architectures))
            shown.add_row(row.name, row.takes, made_for, *([] if here is None else ["yes" if runs else "no"]))
        found.append(shown)
    return found


def step_table(preset: str, **changes: Any) -> Table:
    """A rich table of the problems of a preset's training step, equal ones counted, in the order in which each came
    first, with the row that serves each; and of the deferred launches by how many are in a batch.

    Runs one step on black images, 32 x 32 in RGB where the preset leaves that to the data. `changes` are options in
    place of the preset's, None for its own. Raises CudiffError for an unknown preset, and where there is no GPU.
    """
    if preset not in PRESETS:
        raise CudiffError(f"unknown preset '{preset}': choose one of {', '.join(PRESET_NAMES)}")
    usable, why = cuda_status()
    if not usable:
        raise CudiffError(f"--preset runs a training step, which needs a GPU ({why}): --arch sm_80 prints the tables")
    config = PRESETS[preset].replace(device="cuda", validation=0, capture=False)
    config = config.replace(**{name: value for name, value in changes.items() if value is not None})
    classes = max(0, config.num_classes)
    size = config.image_size or 32
    images = np.zeros((64, size, size, config.channels or 3), np.uint8)
    dataset = Dataset(images, np.arange(64) % classes, classes) if classes else Dataset(images)
    served: list[list[str]] = []

    def note(by: Any, what: Any, choice: Any) -> None:
        if choice is None:
            kind = by.run.__module__.rpartition(".")[2]
            served.append(["deferred", f"batch of {len(what)}", kind, "", "", ""])
        else:
            fused, left = (", ".join(sorted(names)) for names in (choice.offer.fused & what.wanted, choice.left))
            plan = str(choice.offer.plan) if isinstance(choice.offer.plan, tuple) else ""
            served.append([f"{by.family}, {_pass(what)}", _sizes(what), choice.row.name, fused, left, plan])

    def note_plan(planner: Planner, problem: tuple, *_: Any) -> None:
        """Plans that are taken at the launch: of the newest row of that kernel, or of one in its file."""
        row = next((row for row in reversed(served) if row[2].partition(".")[0] in planner.kernel), None)
        if row is not None:
            row[-1] = str(planner(*problem).choice)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(config, dataset, folder)
        with watched(note), tiles.watched(note_plan):
            trainer.train_step(*trainer.loader.next())
    caption = ("what does not fuse a skip path, a second source or an upsampled input is asked again without it, and "
               "convolutions by matmul are asked again as linear layers")
    table = Table("operation", "problem", "kernels", "fuses", "does not fuse", "plan", "times",
                  title=f"a step of {preset}", title_justify="left", caption=caption, caption_justify="left")
    for row, count in Counter(map(tuple, served)).items():
        table.add_row(*map(Text, row), str(count))
    return table


def _pass(problem: Any) -> str:
    if isinstance(problem, Product):
        return f"a{'ᵀ' * problem.transpose_a}·b{'ᵀ' * problem.transpose_b}"
    return problem.direction.lower() if hasattr(problem, "direction") else ("forward", "backward")[problem.backward]


def _sizes(problem: Any) -> str:
    """A problem in short: of a convolution the images read and written and the weight, of a product the matrices, of
    others their numbers."""
    if isinstance(problem, Product):
        return f"{', '.join('x'.join(map(str, matrix.shape)) for matrix in problem[:3])} {problem.a.dtype}"
    if hasattr(problem, "direction"):
        shapes = problem.x.shape, problem.weight.shape, problem.out.shape
        return f"{', '.join('x'.join(map(str, shape)) for shape in shapes)} {problem.x.dtype}"
    numbers = (f"{name} {value}" for name, value in problem._asdict().items() if type(value) is int and value
               and name != "multiprocessors")
    return f"{', '.join(numbers)} {problem.dtype}"


def checkpoint_table(path: str | os.PathLike) -> Table:
    """A rich table of what a checkpoint, or a run's newest one, holds. Raises CudiffError where it cannot be read.

    Of a sampler that is not registered here it says the name.
    """
    def read(found: Path) -> tuple[Path, Checkpoint, dict[str, Any]]:
        return *read_checkpoint(found, parts=("model",), sampler=Config().sampler), stored_options(found)

    path, checkpoint, options = read_newest(path, read)
    lost = options.get("sampler", Config().sampler) not in SAMPLERS
    config = checkpoint.config if lost else Config.stored(options)
    defaults = Config(**{kind: getattr(config, kind) for kind in TABLES}).to_dict()
    parameters = sum(array.size for array in checkpoint.tensors.values())
    steps = checkpoint.counters["step"]
    table = Table(title="checkpoint", show_header=False, caption="all other options are at their defaults")
    table.add_row("file", Text(str(path)))
    table.add_row("trained", f"{parameters:,} parameters, {steps:,} steps")
    for note in notes_of(checkpoint):
        table.add_row("note", Text(note))
    table.add_section()
    values = config.to_dict() | ({"sampler": f"{options['sampler']}, which is not registered here"} if lost else {})
    for name, value in values.items():
        if value != defaults.get(name) or name in (*TABLES, "data"):
            table.add_row(name, Text(names_in_words(value) if name == "class_names" else str(value)))
    return table


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
