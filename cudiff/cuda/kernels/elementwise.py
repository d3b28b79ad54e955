"""Elementwise kernels that other host code launches too, and the layout of broadcast operands."""

from __future__ import annotations

import numpy as np

from cudiff.backend import Array
from cudiff.cuda.kernels.shape import merge_axes
from cudiff.cuda.launch import blocks, launch


def grid(array: Array) -> int:
    """Blocks of 256 threads, one pack of 16 bytes a thread."""
    return blocks(array.size * array.itemsize, 256 * 16)


def activate(name: str, x: Array, slope: Array | None) -> None:
    """x = relu, silu, gelu or gelu_tanh of x. slope: None, or like x: receives the slope there, but not relu's."""
    if slope is None:
        launch("elementwise", f"{name}_forward", grid(x), 256, (x, x, np.int64(x.size)), T=x.dtype)
    else:
        launch("elementwise", f"{name}_with_slope", grid(x), 256, (x, x, slope, np.int64(x.size)), T=x.dtype)


def multiply(x: Array, factor: Array) -> None:
    """x *= factor, of the same shape."""
    args = (x, factor, 0.0, x, np.int64(x.size), broadcast_layout(x.shape, x, factor))
    launch("arithmetic", "multiply_forward", grid(x), 256, args, T=x.dtype)


_LAYOUT = np.dtype([("dims", "i4"), ("packed", "i4"), ("sizes", "i4", 6), ("a", "i4", 6), ("b", "i4", 6)])


def broadcast_layout(shape: tuple[int, ...], a: Array | None, b: Array | None) -> np.ndarray:
    """The kernel's struct `Layout`, with 0 dims if no operand is broadcast. Raises ValueError over 6 merged axes."""
    layout = np.zeros((), _LAYOUT)
    operands = [x for x in (a, b) if x is not None]
    if all(x.shape == shape for x in operands):
        return layout
    pack = 16 // operands[0].itemsize
    strides = [_broadcast_strides(x, shape) if x is not None else (0,) * len(shape) for x in (a, b)]
    sizes, (strides_a, strides_b) = merge_axes(shape, strides)
    if len(sizes) > 6 or np.prod(shape) >= 2**32:
        raise ValueError(f"broadcasting to shape {shape} on CUDA takes at most 6 axes and 2**32 elements")
    layout["dims"] = dims = len(sizes)
    layout["sizes"][:dims], layout["a"][:dims], layout["b"][:dims] = sizes, strides_a, strides_b
    layout["packed"] = sizes[-1] % pack == 0 and all(
        s[-1] == 0 or (s[-1] == 1 and all(n % pack == 0 for n in s[:-1])) for s in (strides_a, strides_b)
    )
    return layout


def _broadcast_strides(x: Array, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a contiguous x broadcast to `shape`: 0 along the axes where it repeats."""
    strides = [0 if size == 1 else stride // x.itemsize for size, stride in zip(x.shape, x.strides, strict=True)]
    return (*(0,) * (len(shape) - x.ndim), *strides)
