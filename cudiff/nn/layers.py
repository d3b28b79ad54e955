"""Layers: parameters plus a one-line forward; and Dropout, which has random numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from cudiff import ops
from cudiff.distributed import ALONE, Group
from cudiff.errors import CudiffError
from cudiff.nn import init
from cudiff.nn.module import Module
from cudiff.nn.parameter import Parameter
from cudiff.ops.cast import as_input
from cudiff.recompute import inside, repeated
from cudiff.tensor import Tensor
from cudiff.values import flag, real, whole, whole_pair


def _own(array: np.ndarray, **attrs: Any) -> Parameter:
    """A parameter of an array that was just made for it."""
    return Parameter(array, copy=False, **attrs)


class Linear(Module):
    """x (..., in) → (..., out): x·weightᵀ + bias + residual. weight (out, in); `layout` is that of PyTorch's file."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, layout: str = "linear"):
        super().__init__()
        shape = (whole("out_features", out_features), whole("in_features", in_features))
        self.weight = _own(init.uniform_fan_in(shape, in_features), low=True, decay=True, layout=layout)
        self.bias = _own(init.uniform_fan_in((out_features,), in_features)) if flag("bias", bias) else None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return ops.linear(x, self.weight, self.bias, residual=residual)

    def extra_repr(self) -> str:
        out_features, in_features = self.weight.shape
        return f"in_features={in_features}, out_features={out_features}, bias={self.bias is not None}"


def grouped_linear(x: Tensor, *layers: Any, silu: bool = False, parts: int = 1) -> tuple[Tensor, ...]:
    """Each Linear's output for the few rows of x (N, in), or SiLU of it, float32, cut into `parts`.

    One operation makes all, and is made for them: for the two layers of the U-Net's time embedding it takes 23 µs of a
    step instead of 49 by `Linear`'s own forward."""
    return ops.grouped_linear(x, [layer.weight for layer in layers], [layer.bias for layer in layers], silu, parts)


Pair = tuple[int, int]


def _check_convolution(in_channels: int, out_channels: int, kernel_size: int, stride: int, padding: int) -> None:
    sizes = {"in_channels": in_channels, "out_channels": out_channels, "kernel_size": kernel_size, "stride": stride}
    for name, size in sizes.items():
        whole(name, size)
    whole("padding", padding, least=0)


class Conv2d(Module):
    """x (N, H, W, C) → (N, Ho, Wo, K). weight (K, R, S, C / groups).

    kernel_size, stride, padding and dilation are a number, or those of rows and columns; the padding is
    dilation · (kernel // 2) by default. Raises CudiffError for channels that do not divide into the groups.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int | Pair, stride: int | Pair = 1,
                 padding: int | Pair | None = None, bias: bool = True, dilation: int | Pair = 1, groups: int = 1):
        super().__init__()
        rows, columns = whole_pair("kernel_size", kernel_size)
        self.stride, self.dilation = whole_pair("stride", stride), whole_pair("dilation", dilation)
        same = self.dilation[0] * (rows // 2), self.dilation[1] * (columns // 2)
        self.padding = same if padding is None else whole_pair("padding", padding, least=0)
        self.groups = whole("groups", groups)
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if whole(name, channels) % groups:
                raise CudiffError(f"{name} {channels} is no multiple of groups {groups}")
        shape = (out_channels, rows, columns, in_channels // groups)
        fan_in = rows * columns * (in_channels // groups)
        self.weight = _own(init.uniform_fan_in(shape, fan_in), low=True, decay=True, layout="conv2d")
        self.bias = _own(init.uniform_fan_in((out_channels,), fan_in)) if flag("bias", bias) else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        return convolution_repr(self, self.weight.shape[3] * self.groups, self.weight.shape[0])


def convolution_repr(layer: Any, in_channels: int, out_channels: int) -> str:
    """Its channels and options as PyTorch shows them; those that have PyTorch's default are left out."""
    options = {"kernel_size": layer.weight.shape[1:-1], "stride": layer.stride}
    defaults = {"padding": 0, "dilation": 1, "groups": 1}
    for name, default in defaults.items():
        value = getattr(layer, name, default)
        if value not in (default, (default,) * 2):
            options[name] = value
    if layer.bias is None:
        options["bias"] = False
    return ", ".join([f"{in_channels}, {out_channels}", *(f"{name}={value}" for name, value in options.items())])


class ConvTranspose2d(Module):
    """x (N, H, W, C) → (N, (H−1)·stride − 2·padding + R, ..., K). weight (C, R, S, K), square kernel."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, padding: int = 0):
        super().__init__()
        _check_convolution(in_channels, out_channels, kernel_size, stride, padding)
        self.stride, self.padding = stride, padding
        shape = (in_channels, kernel_size, kernel_size, out_channels)
        fan_in = kernel_size * kernel_size * out_channels
        self.weight = _own(init.uniform_fan_in(shape, fan_in), low=True, decay=True, layout="conv_transpose2d")
        self.bias = _own(init.uniform_fan_in((out_channels,), fan_in))

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv_transpose2d(x, self.weight, self.bias, stride=self.stride, padding=self.padding)

    def extra_repr(self) -> str:
        return convolution_repr(self, self.weight.shape[0], self.weight.shape[3])


class GroupNorm(Module):
    """Normalise each group of channels of each image of x (N, ..., C); float32 weight and bias (C,)."""

    def __init__(self, num_groups: int, num_channels: int, eps: float = 1e-5):
        super().__init__()
        if whole("num_channels", num_channels) % whole("num_groups", num_groups):
            raise CudiffError(f"num_channels {num_channels} is no multiple of num_groups {num_groups}")
        self.num_groups, self.eps = num_groups, real("eps", eps, above=0)
        self.weight = _own(init.ones((num_channels,)))
        self.bias = _own(init.zeros((num_channels,)))

    def forward(
        self, x: Tensor, silu: bool = False, scale: Tensor | None = None, shift: Tensor | None = None
    ) -> Tensor:
        return ops.group_norm(x, self.weight, self.bias, self.num_groups, self.eps, silu, scale, shift)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.weight.size}, eps={self.eps}"


class LayerNorm(Module):
    """Normalise the last axis of x (..., C)."""

    def __init__(self, num_channels: int, eps: float = 1e-5):
        super().__init__()
        whole("num_channels", num_channels)
        self.eps = real("eps", eps, above=0)
        self.weight = _own(init.ones((num_channels,)))
        self.bias = _own(init.zeros((num_channels,)))

    def forward(self, x: Tensor) -> Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.size}, eps={self.eps}"


class _BatchNorm(Module):
    """What batch norms share: each channel is normalised over the batch; in eval mode by the running statistics.

    The batch is that of all processes of `group` (set by the trainer: `set_group`).
    """

    def __init__(self, num_channels: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        whole("num_channels", num_channels)
        self.eps, self.momentum = real("eps", eps, above=0), real("momentum", momentum, least=0, most=1)
        self.weight = _own(init.ones((num_channels,)))
        self.bias = _own(init.zeros((num_channels,)))
        self.register_buffer("running_mean", Tensor(init.zeros((num_channels,))))
        self.register_buffer("running_var", Tensor(init.ones((num_channels,))))
        self.group = ALONE

    def _normalize(self, x: Tensor, norm: Callable[..., Tensor]) -> Tensor:
        running_mean, running_var = self._buffers["running_mean"], self._buffers["running_var"]
        return norm(x, self.weight, self.bias, running_mean, running_var, self.training, self.momentum, self.eps,
                    self.group)

    def __getstate__(self) -> dict[str, Any]:
        """A copy is of this process alone: the others may not have it."""
        return super().__getstate__() | {"group": ALONE}

    def extra_repr(self) -> str:
        return f"{self.weight.size}, eps={self.eps}, momentum={self.momentum}"


class BatchNorm1d(_BatchNorm):
    """Normalise each channel of x (N, C) or (N, L, C) over the batch; running statistics are used in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in (2, 3):
            raise ValueError(f"BatchNorm1d: x has shape {x.shape}, not (N, C) or (N, L, C)")
        return self._normalize(x, ops.batch_norm)


class BatchNorm2d(_BatchNorm):
    """Normalise each channel of x (N, H, W, C) over the batch; running statistics are used in eval mode.

    With relu_pool, ReLU and 2×2 max-pooling follow in the same operation.
    """

    def forward(self, x: Tensor, relu_pool: bool = False) -> Tensor:
        return self._normalize(x, ops.batch_norm_relu_pool if relu_pool else ops.batch_norm)


class Embedding(Module):
    """indices int32 (N,) → (N, dim); index −1, the null class of guidance, gives zeros."""

    def __init__(self, num_embeddings: int, dim: int):
        super().__init__()
        whole("num_embeddings", num_embeddings), whole("dim", dim)
        self.weight = _own(init.normal((num_embeddings, dim)), decay=False, layout="embedding")

    def forward(self, indices: Tensor) -> Tensor:
        return ops.embedding(indices, self.weight)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.weight.shape))


class Dropout(Module):
    """Zero a share p of the elements in training and scale the rest by 1/(1−p).

    The mask comes from `generator` (set by the trainer: `set_generator`) and the layer's own stream. It differs from
    call to call: each of 65,536 calls without a `generator.advance()` has a stream. They are counted on the host: a
    captured step has new masks only if it advances the generator. Where none is set, the layer makes one of its own
    from `cudiff.seed`'s numbers, and advances it at each call.
    """

    def __init__(self, p: float = 0.5):
        super().__init__()
        self.p, self.stream = real("p", p, least=0, below=1), 0
        self.generator: ops.Generator | None = None
        self._own: ops.Generator | None = None
        self._last = [-1, 0]  # the generator's moves at the last call, -1 for none; calls since, less one

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        x = as_input(x)
        return ops.dropout(x, self.p, *repeated(partial(self._draw, x.device)))

    def draw(self, device: str) -> tuple[float, ops.Generator, int] | None:
        """What `ops.dropout` takes for the next mask, for an operation that drops itself; None where none is due."""
        if self.p == 0 or not self.training:
            return None
        return self.p, *repeated(partial(self._draw, device))

    def _draw(self, device: str) -> tuple[ops.Generator, int]:
        """The generator and the stream of the next mask."""
        generator = self._generator(device)
        moves, calls = self._last
        calls = (calls + 1) % 2**16 if moves == generator.moves else 0
        self._last[:] = generator.moves, calls
        stream = self.stream + (calls << 16)
        if generator is not self._own and not inside():
            return generator, stream
        frozen = generator.frozen()  # a recomputed part asks for the mask again
        if generator is self._own:
            generator.advance()
        return frozen, stream

    def _generator(self, device: str) -> ops.Generator:
        """The one that was set, or one of the layer's own."""
        found = self.generator
        if found is None or (found is self._own and found.device != device):
            found = self._own = ops.Generator(init.number(), device)
            set_generator(self, found)
        return found

    def extra_repr(self) -> str:
        return f"p={self.p}"

    def __getstate__(self) -> dict[str, Any]:
        """A copy has random numbers of its own, or is given some: nobody would advance a copy of the generator, and
        every step would have the same mask."""
        return super().__getstate__() | {"generator": None, "_own": None}


def set_group(model: Module, group: Group) -> None:
    """Have the batch norms of `model` normalise over the batches of all processes of a group."""
    for layer in model.modules():
        if isinstance(layer, _BatchNorm):
            layer.group = group


def set_generator(model: Module, generator: ops.Generator) -> None:
    """Give every Dropout of `model` the random numbers of `generator`, a stream each that no other layer has.

    A layer that has this generator already keeps its stream.
    """
    for layer in model.modules():
        if isinstance(layer, Dropout) and layer.generator is not generator:
            layer.generator, layer.stream = generator, ops.Purpose.DROPOUT + generator.dropouts
            layer._last[0] = -1
            generator.dropouts += 1
