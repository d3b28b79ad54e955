"""Every row of tests/ops/table.py, element by element, on random shapes and numbers of every magnitude."""

import contextlib
import os
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from cudiff import CudiffError, ops
from cudiff.function import Function
from tests.check import TOLERANCE, assert_close, check_adding, check_alone, check_captured, check_case, relative_error
from tests.ops.cases import Case, Numbers
from tests.ops.table import ELSEWHERE, ROWS

ROOT = Path(__file__).resolve().parents[2]


def _module(name):
    function = getattr(ops, name, None)
    return function.__module__.rsplit(".", 1)[-1] if function is not None else ""


# $CUDIFF_TABLE, an operation's file, limits the table to what stands there; other files' mutants take all of it.
_STEM = os.environ.get("CUDIFF_TABLE", "")
_STEMS = {_module(name) for name in ops.__all__}
CASES = [
    (name, magnitude) for name, (_, magnitudes) in ROWS.items() for magnitude in magnitudes
    if _STEM not in _STEMS or _module(name) == _STEM
]


def test_every_public_operation_has_a_row():
    assert set(ops.__all__) == {name for name in ROWS if hasattr(ops, name)} | set(ELSEWHERE)
    assert all((ROOT / path).is_file() for path in ELSEWHERE.values())


@pytest.fixture
def poisoned_empty(monkeypatch):
    """NumPy's memory is full of NaN where it is not written, as conftest.py has it for CuPy's."""
    def filled(like):
        def make(*args, **kwargs):
            array = like(*args, **kwargs)
            if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
                array.fill(np.nan)
            return array

        return make

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(np, name, filled(getattr(np, name)))


@pytest.mark.parametrize("name, magnitude", CASES)
def test_row(name, magnitude, device, poisoned_empty):
    draw, _ = ROWS[name]
    rng = np.random.default_rng(zlib.crc32(f"{name} {magnitude}".encode()))
    for _ in range(3):
        dtypes = ("float32", "bfloat16", "float16") if magnitude == "ordinary" else ("float32", "bfloat16")
        check_case(draw(Numbers(rng, magnitude)), device, dtypes, smooth=magnitude == "ordinary")


@pytest.mark.parametrize("name", [name for name, magnitude in CASES if magnitude == "ordinary"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_added_to_those_there(name, dtype, device, poisoned_empty):
    draw, _ = ROWS[name]
    check_adding(draw(Numbers(np.random.default_rng(zlib.crc32(name.encode())), "ordinary")), device, dtype)


FROM_HOST = {
    "at", "batch_norm", "batch_norm_relu_pool", "edm_input", "edm_output", "getitem by arrays and masks", "median",
    "percentile", "quantile", "repeat by numbers", "sort", "take", "take of many", "take_along_axis",
}
"""Rows whose calls bring an array from the host, or wait for the GPU."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, magnitude in CASES if magnitude == "ordinary"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured(name, dtype, streams):
    draw, _ = ROWS[name]
    with pytest.raises(CudiffError) if name in FROM_HOST else contextlib.nullcontext():
        check_captured(draw(Numbers(np.random.default_rng(zlib.crc32(name.encode())), "ordinary")), dtype)


@pytest.mark.parametrize("name", [name for name, magnitude in CASES if magnitude == "ordinary"])
def test_a_gradient_needs_no_other(name, poisoned_empty):
    draw, _ = ROWS[name]
    check_alone(draw(Numbers(np.random.default_rng(zlib.crc32(name.encode())), "ordinary")), "float32")


def test_one_wrong_element_of_many_is_seen(rng):
    """By the norm of the whole array it is not."""
    right = rng.uniform(0.5, 1.5, (64, 1024))
    wrong = right.copy()
    wrong[63, 1023] *= 2
    tolerance = TOLERANCE[np.dtype(ml_dtypes.bfloat16)]
    assert relative_error(wrong, right) < tolerance
    assert_close(right * (1 + 1e-3), right, tolerance)
    with pytest.raises(AssertionError, match=r"at 1 of 65536 elements, first at \[63, 1023\]"):
        assert_close(wrong, right, tolerance)


class _OneWrong(Function):
    """x, but for the last element of it or of its gradient."""

    @staticmethod
    def forward_numpy(ctx, x, forward, backward):
        ctx.factor = backward
        return _OneWrong.changed(x, forward)

    @staticmethod
    def backward_numpy(ctx, dout, needs, into):
        return (_OneWrong.changed(dout, ctx.factor),)

    @staticmethod
    def changed(x, factor):
        out = x.copy()
        out.reshape(-1)[-1] *= factor
        return out


@pytest.mark.parametrize("forward, backward, message", [
    (1.02, 1, r"at 1 of 4096 elements, first at \[63, 63\]"), (np.nan, 1, "never written"),
    (1, 1.5, "slope along a line"),
])
def test_an_operation_with_one_wrong_element_fails(forward, backward, message, rng):
    x = rng.uniform(0.5, 1.5, (64, 64))
    check_case(Case(lambda x: _OneWrong.apply(x, forward=1, backward=1), (x,), lambda x: x), "cpu")
    with pytest.raises(AssertionError, match=message):
        check_case(Case(lambda x: _OneWrong.apply(x, forward=forward, backward=backward), (x,), lambda x: x), "cpu")


def test_numpys_memory_is_poisoned(poisoned_empty):
    assert np.isnan(np.empty(3)).all() and np.isnan(np.empty_like(np.zeros(3, np.float32))).all()
