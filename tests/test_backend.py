"""What backend.py refuses, and how it moves arrays; with a stand-in for a GPU."""

import numpy as np
import pytest

from cudiff.backend import array_module, copy_into, to_device
from cudiff.cuda.compiler import compiles_ahead, compiling_ahead
from cudiff.cuda.launch import blocks
from cudiff.errors import CudiffError


def test_float64_stays_on_the_cpu(host_of):
    host = host_of(True)
    with pytest.raises(CudiffError, match="float64 arrays stay on the CPU"):
        to_device(np.zeros(2), "cuda")
    assert isinstance(to_device(np.zeros(2, np.float32), "cuda"), host.ndarray)


def test_an_unknown_device():
    with pytest.raises(CudiffError, match="unknown device 'tpu'"):
        array_module("tpu")


def test_copy_into_converts():
    out = np.zeros(3, np.float32)
    copy_into(out, np.array([1, 2, 3], np.int64))
    assert out.tolist() == [1, 2, 3] and out.dtype == np.float32


def test_kernels_are_compiled_ahead_inside_the_block_only():
    assert not compiles_ahead()
    with compiling_ahead():
        assert compiles_ahead()
    assert not compiles_ahead()


def test_blocks_cover_all_and_are_one_at_least():
    assert [blocks(count, 4) for count in (0, 1, 4, 5, 8, 9)] == [1, 1, 1, 2, 2, 3]
