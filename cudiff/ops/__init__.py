"""The operations, and the operators and methods they give to Tensor."""
# ruff: noqa: I001 (names in rows)

from __future__ import annotations

from typing import Any

from cudiff.ops.arithmetic import add, divide, maximum, minimum, multiply, power, subtract, where
from cudiff.ops.attention import attention, attention_qkv
from cudiff.ops.batch import draw_batch, normalize_images
from cudiff.ops.batch_norm import batch_norm, batch_norm_relu_pool
from cudiff.ops.cast import astype
from cudiff.ops.conv2d import conv2d, conv_transpose2d
from cudiff.ops.dropout import dropout
from cudiff.ops.edm import edm_input, edm_mix, edm_output
from cudiff.ops.elementwise import (
    abs, clip, cos, exp, gelu, log, negative, relu, sigmoid, silu, sin, sqrt, square, tanh,
)
from cudiff.ops.embedding import embedding
from cudiff.ops.group_norm import group_norm
from cudiff.ops.grouped_linear import grouped_linear
from cudiff.ops.layer_norm import layer_norm
from cudiff.ops.matmul import linear, matmul
from cudiff.ops.mse import mse
from cudiff.ops.norm_silu_conv2d import norm_silu_conv2d
from cudiff.ops.pool import avg_pool2d, max_pool2d, upsample_nearest
from cudiff.ops.random import Generator, Purpose, normal, randint, uniform
from cudiff.ops.reduce import max, mean, min, std, sum, var
from cudiff.ops.shape import (
    broadcast_to, concatenate, expand_dims, flatten, getitem, pad, reshape, split, squeeze, stack, transpose,
)
from cudiff.ops.softmax import cross_entropy, log_softmax, softmax
from cudiff.ops.timestep_embedding import timestep_embedding
from cudiff.tensor import Tensor

__all__ = [
    "Generator",
    "Purpose",
    "abs",
    "add",
    "astype",
    "attention",
    "attention_qkv",
    "avg_pool2d",
    "batch_norm",
    "batch_norm_relu_pool",
    "broadcast_to",
    "clip",
    "concatenate",
    "conv2d",
    "conv_transpose2d",
    "cos",
    "cross_entropy",
    "divide",
    "draw_batch",
    "dropout",
    "edm_input",
    "edm_mix",
    "edm_output",
    "embedding",
    "exp",
    "expand_dims",
    "flatten",
    "gelu",
    "getitem",
    "group_norm",
    "grouped_linear",
    "layer_norm",
    "linear",
    "log",
    "log_softmax",
    "matmul",
    "max",
    "max_pool2d",
    "maximum",
    "mean",
    "min",
    "minimum",
    "mse",
    "multiply",
    "negative",
    "norm_silu_conv2d",
    "normal",
    "normalize_images",
    "pad",
    "power",
    "randint",
    "relu",
    "reshape",
    "sigmoid",
    "silu",
    "sin",
    "softmax",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "std",
    "subtract",
    "sum",
    "tanh",
    "timestep_embedding",
    "transpose",
    "uniform",
    "upsample_nearest",
    "var",
    "where",
]


def _sizes(first: Any, rest: tuple) -> Any:
    """The one sequence of `x.reshape((2, 3))`, or the numbers of `x.reshape(2, 3)`."""
    return first if isinstance(first, tuple | list) and not rest else (first, *rest)


_METHODS: dict[str, Any] = {
    "__add__": add,
    "__radd__": lambda x, other: add(other, x),
    "__sub__": subtract,
    "__rsub__": lambda x, other: subtract(other, x),
    "__mul__": multiply,
    "__rmul__": lambda x, other: multiply(other, x),
    "__truediv__": divide,
    "__rtruediv__": lambda x, other: divide(other, x),
    "__pow__": power,
    "__rpow__": lambda x, other: power(other, x),
    "__matmul__": matmul,
    "__rmatmul__": lambda x, other: matmul(other, x),
    "__neg__": negative,
    "__abs__": abs,
    "__getitem__": getitem,
    "T": property(transpose),
    "reshape": lambda x, shape, *more: reshape(x, _sizes(shape, more)),
    "transpose": lambda x, *axes: transpose(x, _sizes(axes[0], axes[1:]) if axes else None),
    **{function.__name__: function for function in (
        astype, clip, exp, flatten, log, max, mean, min, relu, sigmoid, silu, sqrt, square, squeeze, std, sum, tanh,
        var,
    )},
}
for _name, _method in _METHODS.items():
    setattr(Tensor, _name, _method)
