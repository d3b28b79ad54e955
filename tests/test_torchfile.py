"""Pickles of the three functions that a state_dict calls, made by hand: which calls are taken, and which are not."""

import zipfile

import numpy as np
import pytest

from cudiff.errors import CudiffError
from cudiff.torchfile import read_torch

EMPTY, ORDERED = b")", b"ccollections\nOrderedDict\n"
TENSOR = (b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000"
          b"X\x03\x00\x00\x00cpuK\x02tQK\x00(K\x02t(K\x01t\x89" + ORDERED + EMPTY + b"RtR")
PARAMETER = b"ctorch._utils\n_rebuild_parameter\n"


def state(value, made=ORDERED + EMPTY + b"R"):
    """A dictionary, called for or as `made`, with `value` as its w."""
    return b"\x80\x02" + made + b"X\x01\x00\x00\x00w" + value + b"s."


def read(path, program):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", program)
        archive.writestr("a/data/0", np.float32([1.5, -2]).tobytes())
    return read_torch(path)


@pytest.mark.parametrize("value", [TENSOR, PARAMETER + b"(" + TENSOR + b"\x88" + ORDERED + EMPTY + b"RtR"],
                         ids=["tensor", "parameter"])
def test_calls_that_a_state_dict_has(tmp_path, value):
    found = read(tmp_path / "a.pt", state(value))
    assert list(found) == ["w"] and found["w"].tolist() == [1.5, -2]


@pytest.mark.parametrize("program", [
    state(TENSOR, ORDERED + b"(K\x01tR"),  # OrderedDict of something
    state(PARAMETER + b"(K\x01\x88" + ORDERED + EMPTY + b"RtR"),  # a parameter of no tensor
    state(TENSOR, PARAMETER + EMPTY + b"R"),  # another function without arguments
], ids=["OrderedDict(1)", "parameter of 1", "no arguments"])
def test_other_calls_are_refused(tmp_path, program):
    with pytest.raises(CudiffError):
        read(tmp_path / "a.pt", program)


def test_a_parameter_is_not_taken_where_another_function_is_called(tmp_path):
    with pytest.raises(CudiffError):
        read(tmp_path / "a.pt", state(b"ctorch\nFloatStorage\n(" + TENSOR + b"tR"))
