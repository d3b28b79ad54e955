"""Layers without parameters: an operation each, for `Sequential`."""

from __future__ import annotations

from cudiff import ops
from cudiff.nn.module import Module
from cudiff.ops.cast import as_input
from cudiff.tensor import Tensor
from cudiff.values import whole_pair

Pair = tuple[int, int]


class Identity(Module):
    """x."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class SiLU(Module):
    """x·sigmoid(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.silu(as_input(x))


class ReLU(Module):
    """max(x, 0)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.relu(as_input(x))


class GELU(Module):
    """x·Φ(x): with the exact error function, or by tanh if `approximate` is "tanh". Raises ValueError for another."""

    def __init__(self, approximate: str = "none"):
        super().__init__()
        if approximate not in ("none", "tanh"):
            raise ValueError(f'GELU: approximate is "none" or "tanh", not {approximate!r}')
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return ops.gelu(as_input(x), self.approximate)

    def extra_repr(self) -> str:
        return "approximate='tanh'" if self.approximate == "tanh" else ""


class Tanh(Module):
    """tanh(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.tanh(as_input(x))


class Sigmoid(Module):
    """1 / (1 + exp(−x))."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.sigmoid(as_input(x))


class Flatten(Module):
    """x (N, ...) → (N, -1). Images lie as (H, W, C): weights of a layer behind PyTorch's, of (C, H, W), fit no more."""

    def forward(self, x: Tensor) -> Tensor:
        return ops.flatten(as_input(x), start=1)


class _Pool2d(Module):
    """x (N, H, W, C) → (N, Ho, Wo, C), Ho = (H + 2·padding − size) // stride + 1, rounded up with ceil_mode.

    size, stride and padding are a number, or those of rows and columns; the stride is the size by default."""

    def __init__(self, size: int | Pair, stride: int | Pair | None = None, padding: int | Pair = 0,
                 ceil_mode: bool = False):
        super().__init__()
        self.size, self.padding = _checked("size", size), _checked("padding", padding, least=0)
        self.stride = self.size if stride is None else _checked("stride", stride)
        self.ceil_mode = ceil_mode

    def extra_repr(self) -> str:
        rounded = ", ceil_mode=True" if self.ceil_mode else ""
        return f"{self.size}, stride={self.stride}, padding={self.padding}{rounded}"


def _checked(name: str, value: int | Pair, least: int = 1) -> int | Pair:
    """A number as it is given, or one for rows and one for columns."""
    pair = whole_pair(name, value, least)
    return pair if isinstance(value, tuple) else pair[0]


class MaxPool2d(_Pool2d):
    __doc__ = f"The maximum over windows. {_Pool2d.__doc__}"

    def forward(self, x: Tensor) -> Tensor:
        return ops.max_pool2d(as_input(x), self.size, self.stride, self.padding, ceil_mode=self.ceil_mode)


class AvgPool2d(_Pool2d):
    __doc__ = f"The mean over windows, of which padding is zeros. {_Pool2d.__doc__}"

    def forward(self, x: Tensor) -> Tensor:
        return ops.avg_pool2d(as_input(x), self.size, self.stride, self.padding, self.ceil_mode)
