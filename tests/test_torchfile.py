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


def test_lists_are_read_where_a_state_dict_stands_among_them(tmp_path):
    """As in a checkpoint of a whole run: {"betas": [1, 2], "empty": [], "model": ...}."""
    def entry(name, value):
        return b"X" + len(name).to_bytes(4, "little") + name.encode() + value + b"s"

    model = ORDERED + EMPTY + b"R" + entry("w", TENSOR)
    program = (b"\x80\x02}" + entry("betas", b"](K\x01K\x02e") + entry("one", b"]K\x01a") + entry("empty", b"]")
               + entry("model", model) + b".")
    with pytest.raises(CudiffError, match="choose from its parts 'model' with key"):
        read(tmp_path / "a.pt", program)
    assert read_torch(tmp_path / "a.pt", "model")["w"].tolist() == [1.5, -2]


def test_views_of_one_storage_are_at_most_twice_the_file(tmp_path):
    """Else a small file takes any memory: views that are not contiguous become copies."""
    tensor = TENSOR.replace(b"K\x02tQ", b"M\xe8\x03tQ").replace(b"(K\x02t", b"(M\xe8\x03t")
    for count in (2, 3):
        views = b"".join(b"X\x01\x00\x00\x00" + name + tensor + b"s" for name in (b"u", b"v", b"w")[:count])
        with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
            archive.writestr("a/data.pkl", b"\x80\x02}" + views + b".")
            archive.writestr("a/data/0", np.arange(1000, dtype=np.float32).tobytes())
        if count == 2:
            assert all(view.tolist() == list(range(1000)) for view in read_torch(tmp_path / "a.pt").values())
    with pytest.raises(CudiffError, match="its tensors are larger than the file"):
        read_torch(tmp_path / "a.pt")


METADATA, OTHER = (b"X" + bytes([len(name), 0, 0, 0]) + name for name in (b"_metadata", b"other"))


@pytest.mark.parametrize("attributes, taken", [
    (b"}" + METADATA + b"}s", True), (b"}" + OTHER + b"}s", False), (b"}" + METADATA + b"}s" + OTHER + b"}s", False),
    (b"}", False), (METADATA, False),
], ids=["_metadata", "other", "both", "none", "text"])
def test_of_a_state_dicts_attributes_only_its_versions_are_expected(tmp_path, attributes, taken):
    whole = state(TENSOR)[:-1] + attributes + b"b."
    if taken:
        assert read(tmp_path / "a.pt", whole)["w"].tolist() == [1.5, -2]
    else:
        with pytest.raises(CudiffError, match="attributes of something other than a state_dict"):
            read(tmp_path / "a.pt", whole)
    with pytest.raises(CudiffError, match="attributes of something other"):  # of a tensor
        read(tmp_path / "a.pt", state(TENSOR + b"}" + METADATA + b"}sb"))
