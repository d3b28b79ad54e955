"""Elementwise work that other kernels' host code launches too."""

from __future__ import annotations

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.launch import blocks, launch


def grid(array: Array) -> int:
    """Blocks of 256 threads, one pack of 16 bytes a thread."""
    return blocks(array.size * array.itemsize, 256 * 16)


def relu_forward(x: Array, out: Array) -> None:
    """out = max(x, 0); out may be x."""
    launch("elementwise", "relu_forward", grid(x), 256, (x, out, np.int64(x.size)), T=x.dtype)
