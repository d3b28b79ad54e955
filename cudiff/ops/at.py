"""x.at[index].set(v) and .add(v): the results of `x[index] = v` and `x[index] += v` as new tensors.

The names are JAX's. The operations are recorded as others are, so x and v have gradients.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cudiff.backend import Array, array_module, int32, is_float
from cudiff.cuda.kernels.shape import last
from cudiff.ops.arithmetic import where
from cudiff.ops.cast import as_tensor, astype, is_number
from cudiff.ops.create import full, ones
from cudiff.ops.index import Pick, check_mask, is_basic, is_mask, located, parsed
from cudiff.ops.place import place, place_rows
from cudiff.ops.shape import broadcast_to, reshape
from cudiff.tensor import Tensor

__all__ = ["at"]


class At:
    """`x.at`, of which `x.at[index]` has `set` and `add`."""

    def __init__(self, x: Tensor) -> None:
        self._x = x

    def __getitem__(self, index: Any) -> Elements:
        return Elements(self._x, index)


class Elements:
    """`x.at[index]`, of an index as in `getitem`, with the same errors.

    Values broadcast to x[index]'s shape and take x's dtype. Raises ValueError where they do not broadcast, TypeError
    for floats into integers.
    """

    def __init__(self, x: Tensor, index: Any) -> None:
        self._x, self._items = x, parsed(x, index)

    def set(self, values: Any) -> Tensor:
        """x with `values` at the index. Of several values for one position the last is set, and it alone gets the
        gradient. Overwritten elements of x get none."""
        x, items, values = self._x, self._items, self._given(values)
        if is_mask(items) and not values.ndim:
            return where(self._beside(items[0]), values, x)
        if is_basic(items):
            shape, index = _selected(x, items), tuple(items)
            there = place(ones(shape, bool, x.device), x.shape, index)
            return where(there, place(broadcast_to(values, shape), x.shape, index), x)
        table, places, _ = located(x, items)
        if not len(table):
            return x
        new = _rows(values, table, places)
        hit, source, inverse = _last(reshape(places, (places.size,)).data, len(table), x.device)
        chosen = Pick.apply(new, source, inverse)
        return reshape(where(reshape(hit, (len(table), *(1,) * (table.ndim - 1))), chosen, table), x.shape)

    def add(self, values: Any) -> Tensor:
        """x with `values` added at the index. Several for one position are all added, in their order."""
        x, items, values = self._x, self._items, self._given(values)
        if x.dtype == np.bool_:
            raise TypeError("x.at[index].add takes numbers, not bools: use .astype('int32')")
        if is_mask(items) and not values.ndim:
            return x + where(self._beside(items[0]), broadcast_to(values, x.shape), 0)
        if is_basic(items):
            shape = _selected(x, items)
            return x + place(broadcast_to(values, shape), x.shape, tuple(items))
        table, places, axis = located(x, items, leading=True)
        new, flat = _rows(values, table, places, axis), reshape(places, (places.size,))
        return reshape(table + place_rows(new, table.shape, flat, axis), x.shape)

    def _given(self, values: Any) -> Tensor:
        """`values` in x's dtype; a number becomes a tensor on x's device."""
        x = self._x
        if not is_number(values) and not isinstance(values, Tensor):
            values = as_tensor(values)
            if is_float(x.dtype) or not is_float(values.dtype):  # on the host, as float64 is not on a GPU
                values = Tensor(astype(values, x.dtype).data, device=x.device)
        floating = is_float(values.dtype) if isinstance(values, Tensor) else isinstance(values, float | np.floating)
        if floating and not is_float(x.dtype):
            raise TypeError(f"floats into a tensor of {x.dtype}: use x.astype('float32').at[...], or round the values")
        return astype(values, x.dtype) if isinstance(values, Tensor) else full((), values, x.dtype, x.device)

    def _beside(self, mask: Array) -> Tensor:
        """A mask of x's first axes, with an axis of 1 for each of the others."""
        check_mask(self._x, mask)
        return Tensor(mask.reshape(*mask.shape, *(1,) * (self._x.ndim - mask.ndim)), device=self._x.device)


def _selected(x: Tensor, items: list[Any]) -> tuple[int, ...]:
    """The shape of x[items], for items without an array."""
    return np.broadcast_to(np.zeros(()), x.shape)[tuple(items)].shape


def _rows(values: Tensor, table: Tensor, places: Tensor, axis: int = 0) -> Tensor:
    """`values` for the elements `places` of a table along an axis, one each."""
    lead, rest = table.shape[:axis], table.shape[axis + 1 :]
    wide = broadcast_to(values, (*lead, *places.shape, *rest))
    return reshape(wide, (*lead, places.size, *rest))


def _last(places: Array, count: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Which of `count` rows occur in `places`; for Pick the last i with places[i] = row of each, and its inverse."""
    module = array_module(device)
    places = module.where(places < 0, places + count, places)
    if device == "cpu":
        newest = np.zeros(count, int32)
        np.maximum.at(newest, places, np.arange(1, places.size + 1, dtype=int32))
    else:
        newest = last(places, count)
    inside = (places >= 0) & (places < count)
    counts = inside & (newest[module.where(inside, places, 0)] == module.arange(1, places.size + 1))
    source = module.where(newest > 0, newest - 1, places.size)
    inverse = module.where(counts, places, count)
    return Tensor(newest > 0), Tensor(source.astype(int32)), Tensor(inverse.astype(int32))


def at(x: Any) -> At:
    """x.at: `x.at[index].set(v)` and `x.at[index].add(v)` are x with v at the index, and x with v added there."""
    return At(as_tensor(x))
