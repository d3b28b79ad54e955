"""Operations of cudiff inside of PyTorch's networks, by DLPack: no element is copied."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from cudiff.backend import Array, bfloat16
from cudiff.tensor import Tensor


def to_torch_function(function: Callable[..., Tensor]) -> Callable[..., Any]:
    """`function` of tensors as a function of PyTorch's tensors, with its gradient.

    function: takes Tensors positionally and returns one, such as `MyFunction.apply`, an operation or a Module. It runs
    where PyTorch's tensors lie, in their dtype: float32, float64, float16 or bfloat16. Tensors that require a gradient
    get one; parameters that the function holds itself get theirs, also where no argument requires one. A second
    backward (`retain_graph=True`) runs the function again, with other dropout. Gradients of gradients are not recorded.
    Backward raises RuntimeError where an argument was changed since. Raises TypeError for arguments that are no tensors
    of PyTorch's, and where the function returns no Tensor.
    """
    torch: Any = importlib.import_module("torch")

    class Bridge(torch.autograd.Function):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, parameters: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*[x for x in tensors if isinstance(x, torch.Tensor)])
            ctx.inputs = []
            for x in tensors:
                if not isinstance(x, torch.Tensor):
                    raise TypeError(f"the function takes PyTorch's tensors, not {type(x).__name__}")
                ctx.inputs.append(Tensor(x.contiguous()))
                ctx.inputs[-1].requires_grad = x.requires_grad
            ctx.out = out = function(*ctx.inputs)
            if not isinstance(out, Tensor):
                kind = type(out).__name__
                raise TypeError(f"the function returns one Tensor, not {kind}: join several by cudiff.concatenate")
            result = _to_torch(torch, out.data)
            if not out.requires_grad:
                ctx.mark_non_differentiable(result)
            return result

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, dout: Any) -> Any:
            _ = ctx.saved_tensors  # raises where one was changed since, as the inputs share their memory
            out = function(*ctx.inputs) if ctx.out is None else ctx.out
            ctx.out = None  # backward runs once over a tape
            for x in ctx.inputs:
                x.grad = None
            out.backward(Tensor(dout.contiguous()))
            return None, *(None if x.grad is None else _to_torch(torch, x.grad) for x in ctx.inputs)

    # PyTorch goes back only where an argument requires a gradient: this one stands for the function's own parameters.
    return functools.partial(Bridge.apply, torch.empty(0, requires_grad=True))


def _to_torch(torch: Any, array: Array) -> Any:
    """PyTorch's tensor of an array's memory."""
    if array.dtype == bfloat16:  # which DLPack does not hand on
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)
