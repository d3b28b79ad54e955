"""What `cudiff info` prints: hardware, versions, kernels, and what a checkpoint holds."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table
from rich.text import Text

from cudiff import __version__
from cudiff.backend import cuda_status
from cudiff.checkpoint import stored_options
from cudiff.config import Config
from cudiff.cuda.compiler import cubin_folder, kernel_folder, nvrtc_version
from cudiff.cuda.device import current_target, describe
from cudiff.cuda.select import FAMILIES
from cudiff.cuda.tiles import summary
from cudiff.errors import CudiffError
from cudiff.folder import read_checkpoint
from cudiff.registry import SAMPLERS, TABLES


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
        **({**describe(), "NVRTC": nvrtc_version(), "tiles": _tiles()} if usable else {}),
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


ARCHITECTURES = {"sm_80": "sm_80", "sm_86": "sm_86", "sm_89": "sm_89", "sm_90": "sm_90a", "sm_90a": "sm_90a",
                 "sm_100": "sm_100", "sm_120": "sm_120"}
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
        if here is not None:
            shown.add_column(f"runs on {here}")
        for row in table.rows:
            runs = row.architectures is None or here in row.architectures
            made_for = "every GPU" if row.architectures is None else ", ".join(sorted(row.architectures))
            shown.add_row(row.name, row.takes, made_for, *([] if here is None else ["yes" if runs else "no"]))
        found.append(shown)
    return found


def checkpoint_table(path: str | os.PathLike) -> Table:
    """A rich table of what a checkpoint, or a run's newest one, holds. Raises CudiffError where it cannot be read.

    Of a sampler that is not registered here it says the name.
    """
    path, checkpoint = read_checkpoint(path, parts=("model",), sampler=Config().sampler)
    options = stored_options(path)
    lost = options.get("sampler", Config().sampler) not in SAMPLERS
    config = checkpoint.config if lost else Config.stored(options)
    defaults = Config(**{kind: getattr(config, kind) for kind in TABLES}).to_dict()
    parameters = sum(array.size for array in checkpoint.tensors.values())
    steps = checkpoint.counters["step"]
    table = Table(title="checkpoint", show_header=False, caption="all other options are at their defaults")
    table.add_row("file", Text(str(path)))
    table.add_row("trained", f"{parameters:,} parameters, {steps:,} steps")
    table.add_section()
    values = config.to_dict() | ({"sampler": f"{options['sampler']}, which is not registered here"} if lost else {})
    for name, value in values.items():
        if value != defaults.get(name) or name in (*TABLES, "data"):
            table.add_row(name, Text(str(value)))
    return table


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
