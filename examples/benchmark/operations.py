"""The rows of single operations, forward and backward, of kinds and shapes that the networks' rows do not have."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cudiff import ops
from cudiff.backend import bfloat16, float32, is_low
from cudiff.cuda.timing import graph_time
from cudiff.tensor import Tensor
from examples.benchmark.measure import Report, random_tensor

try:
    import torch
    import torch.nn.functional as F
except ImportError:  # the rows have no PyTorch beside them
    torch = F = None


class Operation(NamedTuple):
    """Ours and PyTorch's, of tensors of `shapes`, and of integers of the shape `chosen` below `below`, if given.

    images: the tensors are (N, H, W, C) or (K, R, S, C), and PyTorch gets channels-last views of them.
    """

    ours: Callable[..., Tensor]
    theirs: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    chosen: tuple[int, ...] | None = None
    below: int = 0
    images: bool = False
    dtypes: tuple = (bfloat16, float32)


SIDE = 8192
SQUARE = ((SIDE, SIDE),)
IMAGES, KERNEL = (64, 32, 32, 128), (128, 3, 3, 128)


def _convolution(shape: tuple[int, ...], weight: tuple[int, ...], **how: int) -> Operation:
    return Operation(lambda x, w: ops.conv2d(x, w, **how), lambda x, w: F.conv2d(x, w, **how), (shape, weight),
                     images=True)


def _layer_norm(x: Any, weight: Any, bias: Any) -> Any:
    return F.layer_norm(x, x.shape[1:], weight, bias)


@functools.cache
def _causal(tokens: int) -> Tensor:
    return Tensor(np.tri(tokens, dtype=bool), device="cuda")


def _causal_attention(q: Any, k: Any, v: Any) -> Any:
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2).flatten(2)


OPERATIONS = {
    "softmax of rows of 16": Operation(ops.softmax, lambda x: x.softmax(-1), ((1 << 22, 16),)),
    "softmax of rows of 100": Operation(ops.softmax, lambda x: x.softmax(-1), ((1 << 20, 100),)),
    "softmax of rows of 1000": Operation(ops.softmax, lambda x: x.softmax(-1), ((1 << 16, 1000),)),
    "softmax of columns": Operation(lambda x: ops.softmax(x, 0), lambda x: x.softmax(0), SQUARE),
    "logsumexp": Operation(lambda x: ops.logsumexp(x, 1), lambda x: x.logsumexp(1), SQUARE),
    "cross-entropy of 10": Operation(ops.cross_entropy, lambda x, i: F.cross_entropy(x, i), ((1 << 20, 10),),
                                     (1 << 20,), 10),
    "Huber loss": Operation(ops.huber, lambda x, y: F.huber_loss(x, y), SQUARE * 2),
    "layer norm of 1024": Operation(ops.layer_norm, _layer_norm, ((1 << 16, 1024), (1024,), (1024,))),
    "layer norm of 16384": Operation(ops.layer_norm, _layer_norm, ((4096, 16384), (16384,), (16384,))),
    "sum of columns": Operation(lambda x: x.sum(0), lambda x: x.sum(0), SQUARE),
    "std of columns": Operation(lambda x: x.std(0), lambda x: x.std(0, unbiased=False), SQUARE),
    "cumsum of rows": Operation(lambda x: ops.cumsum(x, 1), lambda x: x.cumsum(1), SQUARE),
    "cumsum of columns": Operation(lambda x: ops.cumsum(x, 0), lambda x: x.cumsum(0), SQUARE),
    "chosen rows": Operation(lambda x, i: x[i], lambda x, i: x[i], SQUARE, (SIDE,), SIDE),
    "chosen columns": Operation(lambda x, i: x[:, i], lambda x, i: x[:, i], SQUARE, (1000,), SIDE),
    "take along rows": Operation(lambda x, i: ops.take_along_axis(x, i, 1), lambda x, i: x.take_along_dim(i, 1), SQUARE,
                                 (SIDE, 16), SIDE),
    "embedding": Operation(lambda x, i: ops.embedding(i, x), lambda x, i: F.embedding(i, x), ((50_000, 512),),
                           (16384,), 50_000),
    "where": Operation(lambda x: ops.where(x > 0, x, 0.0), lambda x: torch.where(x > 0, x, 0.0), SQUARE),
    "a row added": Operation(lambda x, y: x + y, lambda x, y: x + y, (*SQUARE, (SIDE,))),
    "transpose": Operation(lambda x: x.T * 1, lambda x: (x.T * 1).contiguous(), SQUARE),
    "product of odd sides": Operation(ops.matmul, lambda x, y: x @ y, ((4095, 4097), (4097, 4095)), dtypes=(bfloat16,)),
    "causal attention": Operation(lambda *qkv: ops.attention(*qkv, _causal(1024)), _causal_attention,
                                  ((16, 1024, 8, 64),) * 3),
    "convolution 3x3": _convolution(IMAGES, KERNEL, padding=1),
    "convolution 3x3, dilation 2": _convolution(IMAGES, KERNEL, padding=2, dilation=2),
    "convolution 3x3, stride 2": _convolution(IMAGES, KERNEL, padding=1, stride=2),
    "convolution 3x3, 32 groups": _convolution((64, 32, 32, 256), (256, 3, 3, 8), padding=1, groups=32),
    "convolution 3x3 of 100 channels": _convolution((64, 32, 32, 100), (100, 3, 3, 100), padding=1),
    "convolution 7x7 of 3, stride 2": _convolution((64, 224, 224, 3), (64, 7, 7, 3), padding=3, stride=2),
    "depthwise convolution 3x3": _convolution((64, 64, 64, 128), (128, 3, 3, 1), padding=1, groups=128),
    "depthwise convolution 7x7": _convolution(IMAGES, (128, 7, 7, 1), padding=3, groups=128),
}


def operations(report: Report) -> None:
    """Each operation with its gradients. float32 is exact on both sides."""
    for name, operation in OPERATIONS.items():
        for dtype in operation.dtypes:
            operands = [random_tensor(*shape, dtype=dtype, grad=True) for shape in operation.shapes]
            chosen = []
            if operation.chosen:
                integers = np.random.default_rng(1).integers(0, operation.below, operation.chosen, np.int32)
                chosen = [Tensor(integers, device="cuda")]
            dout = random_tensor(*operation.ours(*operands, *chosen).shape, dtype=dtype)
            time = graph_time(functools.partial(_ours, operation, operands, chosen, dout), 3, 5)
            theirs = _theirs(operation, operands, chosen, dout) if report.torch else None
            report.add(f"{name}, {'bf16' if is_low(dtype) else 'float32'}", time, theirs)


def _ours(operation: Operation, operands: list[Tensor], chosen: list[Tensor], dout: Tensor) -> list[Any]:
    for x in operands:
        x.grad = None
    out = operation.ours(*operands, *chosen)
    out.backward(ops.astype(dout, out.dtype).data)  # of 16-bit logits the cross-entropy is float32
    return [x.grad for x in operands]


def _theirs(operation: Operation, operands: list[Tensor], chosen: list[Tensor], dout: Tensor) -> float:
    from examples.benchmark import baselines

    def of(x: Tensor) -> Any:
        wide = torch.as_tensor(ops.astype(x.detach(), float32).data, device="cuda")
        dtype = torch.bfloat16 if is_low(x.dtype) else torch.float32
        return (wide.permute(0, 3, 1, 2) if operation.images else wide).to(dtype)

    given, theirs_dout = [of(x).requires_grad_() for x in operands], of(dout)
    integers = [torch.as_tensor(x.data, device="cuda").long() for x in chosen]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    return baselines.theirs(lambda: torch.autograd.grad(operation.theirs(*given, *integers), given, theirs_dout), 3)
