"""Convolution over sequences."""

from __future__ import annotations

from cudiff import ops
from cudiff.errors import CudiffError
from cudiff.nn import init
from cudiff.nn.layers import convolution_repr
from cudiff.nn.module import Module
from cudiff.nn.parameter import Parameter
from cudiff.tensor import Tensor
from cudiff.values import flag, whole


class Conv1d(Module):
    """x (N, L, C) → (N, Lo, K). weight (K, S, C / groups). padding is dilation · (kernel_size // 2) by default.

    Raises CudiffError for sizes below 1 and for channels that do not divide into the groups.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, stride: int = 1,
                 padding: int | None = None, bias: bool = True, dilation: int = 1, groups: int = 1):
        super().__init__()
        self.stride, self.dilation = whole("stride", stride), whole("dilation", dilation)
        same = self.dilation * (whole("kernel_size", kernel_size) // 2)
        self.padding = same if padding is None else whole("padding", padding, least=0)
        self.groups = whole("groups", groups)
        for name, channels in (("in_channels", in_channels), ("out_channels", out_channels)):
            if whole(name, channels) % groups:
                raise CudiffError(f"{name} {channels} is no multiple of groups {groups}")
        shape = out_channels, kernel_size, in_channels // groups
        fan_in = kernel_size * shape[2]
        weight = init.uniform_fan_in(shape, fan_in)
        self.weight = Parameter(weight, low=True, decay=True, layout="conv1d", copy=False)
        self.bias = Parameter(init.uniform_fan_in((out_channels,), fan_in), copy=False) if flag("bias", bias) else None

    def forward(self, x: Tensor) -> Tensor:
        return ops.conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def extra_repr(self) -> str:
        return convolution_repr(self, self.weight.shape[2] * self.groups, self.weight.shape[0])
