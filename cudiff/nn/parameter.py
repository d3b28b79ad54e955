"""Parameters and the flat buffers that hold a whole model's parameters, gradients and 16-bit copies."""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array, array_module, copy_into, device_of, float32, is_capturing, is_low, to_device
from cudiff.tensor import Tensor

BLOCK = 32
"""Every tensor in a flat buffer is padded to this many float32: 128 bytes."""


def array_of(values: Array | Tensor) -> Array:
    """The array of a tensor, or the array that is given."""
    return values.data if isinstance(values, Tensor) else values


class Parameter(Tensor):
    """A float32 leaf that training changes.

    Parameters
    ----------
    data : float array
    low : bool
        Whether matrix products in a 16-bit precision read a 16-bit copy of it, the shadow (weights of conv and linear).
    decay : bool
        Whether weight decay applies: it leaves out norms, biases and embeddings.
    layout : {"vector", "linear", "conv2d", "conv_transpose2d", "conv1d", "embedding"}
        How PyTorch's file layout differs: see `cudiff.convert`.
    """

    __slots__ = ("_stale", "decay", "layout", "low", "shadow")

    def __init__(self, data: Any, low: bool = False, decay: bool = False, layout: str = "vector"):
        super().__init__(np.asarray(data, float32) if not hasattr(data, "dtype") else data, requires_grad=True)
        self.low, self.decay, self.layout = low, decay, layout
        self.shadow: Array | None = None
        self._stale = True

    def operand(self, dtype: np.dtype) -> Array:
        if not self.low or not is_low(dtype):
            return self.data
        if self.shadow is None or self.shadow.dtype != dtype or device_of(self.shadow) != self.device:
            self.shadow, self._stale = array_module(self.device).empty(self.shape, dtype), True
        if self._stale:
            self.shadow[...] = self.data
            self._stale = is_capturing(self.device)  # then the copy is not made now, and may never be
        return self.shadow

    def assign(self, array: Any) -> None:
        """Copy new values in; the shadow is recast before it is read again. Raises ValueError on another shape."""
        array = array_of(array)
        if array.shape != self.shape:
            raise ValueError(f"cannot assign shape {array.shape} to a parameter of shape {self.shape}")
        copy_into(self.data, array)
        self._stale = True

    def bind(self, data: Array, grad: Array | None, shadow: Array | None) -> None:
        """Move the storage into slices of flat buffers; values stay, gradients start at zero."""
        copy_into(data, self.data)
        self.data, self.grad, self.shadow, self._stale = data, grad, shadow, True


class FlatParameters:
    """All parameters of a model in one buffer each for values, gradients and 16-bit shadows.

    Attributes
    ----------
    data, grad : float32 (size,). grad is None for a model that is not trained.
    shadow : 16-bit (size,) or None
    slots : dict from parameter name to (start, stop, shape), in state_dict order
    decay : uint8 (size / 32,), 1 where weight decay applies; on the same device
    """

    def __init__(self, parameters: dict[str, Parameter], device: str, low: np.dtype | None, trainable: bool = True):
        module = array_module(device)
        self.device, self.slots = device, {}
        start = 0
        for name, parameter in parameters.items():
            self.slots[name] = (start, start + parameter.size, parameter.shape)
            start += -(-parameter.size // BLOCK) * BLOCK
        self.size = start
        self.data: Array = module.zeros(start, float32)
        self._grad: Array | None = module.zeros(start, float32) if trainable else None
        self._parameters = list(parameters.values())
        self.shadow: Array | None = module.zeros(start, low) if low is not None else None
        decay = np.zeros(start // BLOCK, np.uint8)
        for name, parameter in parameters.items():
            first, last, shape = self.slots[name]
            decay[first // BLOCK : -(-last // BLOCK)] = parameter.decay
            grad = self._grad[first:last].reshape(shape) if self._grad is not None else None
            shadow = self.shadow[first:last].reshape(shape) if self.shadow is not None and parameter.low else None
            parameter.bind(self.data[first:last].reshape(shape), grad, shadow)
        self.decay: Array = to_device(decay, device)

    @property
    def grad(self) -> Array | None:
        for parameter in self._parameters:
            _ = parameter.grad  # writes zeros where no backward wrote
        return self._grad

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        for parameter in self._parameters:
            parameter.zero_grad()

    def views(self, flat: Array) -> dict[str, Array]:
        """Each parameter's slice of any flat buffer of this size, by name and in its shape."""
        return {name: flat[start:stop].reshape(shape) for name, (start, stop, shape) in self.slots.items()}
