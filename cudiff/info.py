"""What `cudiff info` prints: hardware, versions, kernels, and what a checkpoint holds."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

from rich.table import Table

from cudiff.backend import cuda_status
from cudiff.checkpoint import load_checkpoint
from cudiff.config import Config
from cudiff.cuda.module import cache_folder, describe, kernel_folder


def system_table() -> Table:
    """A rich table of the machine, the versions, the kernels, and why the GPU cannot be used if it cannot."""
    table = Table(title="cudiff", show_header=False)
    table.add_row("cudiff", _version("cudiff"))
    table.add_row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    table.add_row("CPU", f"{os.cpu_count()} cores")
    for package in ("numpy", "ml_dtypes", "matplotlib"):
        table.add_row(package, _version(package))
    usable, message = cuda_status()
    table.add_row("CUDA", "usable" if usable else f"[yellow]not usable[/]: {message}")
    if usable:
        for name, fact in describe().items():
            table.add_row(name, fact)
    folder = kernel_folder()
    table.add_row("kernels", f"{len(list(folder.glob('*.cu')))} files in {folder}")
    cached = list(cache_folder().glob("*.cubin"))
    table.add_row("compiled kernels", f"{len(cached)} in {cache_folder()}")
    table.add_row("default device", "cuda" if usable else "cpu")
    return table


def checkpoint_table(path: str | os.PathLike) -> Table:
    """A rich table of a checkpoint's configuration and counters. Raises CudiffError where it cannot be read."""
    checkpoint = load_checkpoint(path, parts=("model",))
    config, defaults = Config.from_dict(checkpoint.config), Config()
    parameters = sum(array.size for array in checkpoint.tensors.values())
    table = Table(title=f"{path}: {parameters:,} parameters after {checkpoint.counters.get('step', 0):,} steps")
    table.add_column("option")
    table.add_column("value")
    for name, value in config.to_dict().items():
        if value != getattr(defaults, name) or name in ("model", "diffusion", "data"):
            table.add_row(name, str(value))
    return table


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
