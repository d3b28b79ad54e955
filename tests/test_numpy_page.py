"""docs/numpy.md names what cudiff shares with NumPy, no more and no less."""

import re
from pathlib import Path

import numpy as np
import pytest

import cudiff
from cudiff import Tensor, ops
from cudiff.ops.methods import NUMPY

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "numpy.md").read_text()


def test_the_names_are_those_of_the_operations():
    listed = re.findall(r"`(\w+)`", PAGE.split("as `np.NAME` of tensors:")[1].split("\n\n")[1])
    named = [name for name in ops.__all__ if getattr(np, name, None) in NUMPY]
    assert listed == sorted(named)


def test_what_the_page_says_of_differences():
    x = Tensor([1.0, 2.0])
    assert cudiff.zeros(2).dtype == (x + np.ones(2)).dtype == (Tensor([1]) / 2).dtype == np.float32
    with pytest.raises(TypeError):
        x[0] = 3.0
    assert x.at[0].set(3.0).numpy().tolist() == [3, 2] and x.numpy().tolist() == [1, 2]
    assert not np.shares_memory(Tensor(np.ones((2, 3))).T.data, x.data)
    yes = Tensor([True, False])
    for refused in (lambda: Tensor(1j), lambda: -yes, lambda: np.einsum("i->", x, optimize=True),
                    lambda: np.atleast_1d(x, x), lambda: np.pad(x, 1, constant_values=(1, 2)),
                    *(lambda name=name: getattr(np, name)(yes, yes) for name in ("dot", "inner", "outer", "vdot"))):
        with pytest.raises(TypeError):
            refused()
    assert np.reciprocal(Tensor([2])).item() == 0.5 and (yes @ yes).item() is True
    assert np.mean(Tensor([1, 2])).dtype == np.float32
    with pytest.raises(IndexError, match="a mask"):
        x[np.array([], bool)]
    for positions in ([2, 1], [-1], [3]):
        assert np.split(np.ones(2), positions)
        with pytest.raises(ValueError, match="do not rise within axis 0"):
            np.split(x, positions)
    for name in ("mean", "var", "std"):
        with pytest.raises(ValueError, match=r"elements of shape \(0,\)"):
            getattr(np, name)(cudiff.zeros(0))
    with pytest.raises(TypeError, match="has no gradient in cudiff"):
        np.linalg.inv(Tensor(np.eye(2), requires_grad=True))
