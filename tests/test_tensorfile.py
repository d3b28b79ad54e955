"""Safetensors files that other programs would read otherwise, and digests."""

import hashlib
import json

import numpy as np
import pytest

from cudiff.convert import read_weights
from cudiff.errors import CudiffError
from cudiff.tensorfile import digest, read_header, read_tensors, write_tensors


def write(path, header, values=b""):
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + values)
    return path


@pytest.mark.parametrize("header", [
    '{"__metadata__": {"a": "1", "a": "2"}}', '{"__metadata__": {}, "__metadata__": {}}',
    '{"w": {"dtype": "U8", "shape": [1], "shape": [1], "data_offsets": [0, 1]}}',
    '{"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "w": {"dtype": "U8", "shape": [1], '
    '"data_offsets": [0, 1]}}',
])
def test_a_name_that_occurs_twice_is_refused(tmp_path, header):
    path = write(tmp_path / "a.safetensors", header, b"x" if "w" in header else b"")
    for read in (read_header, read_tensors):
        with pytest.raises(CudiffError, match="is no safetensors file, or is truncated or damaged"):
            read(path)


def test_tensors_have_up_to_32_axes(tmp_path):
    for axes in (32, 33):
        header = json.dumps({"w": {"dtype": "U8", "shape": [1] * axes, "data_offsets": [0, 1]}})
        path = write(tmp_path / "a.safetensors", header, b"x")
        if axes == 32:
            assert read_tensors(path)[0]["w"].shape == (1,) * 32
    with pytest.raises(CudiffError, match="w has 33 axes"):
        read_header(path)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_a_digest_is_that_of_the_bytes(tmp_path, shape):
    array = np.array(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), order="F")
    known = hashlib.sha256(array.tobytes()).hexdigest()
    assert digest(array) == known
    write_tensors(tmp_path / "a.safetensors", {"w": array, "other": array}, {"note": "b"})
    found, metadata = read_tensors(tmp_path / "a.safetensors", lambda name: name == "w", {"w": known})
    assert list(found) == ["w"] and found["w"].shape == shape and metadata == {"note": "b"}
    for digests in ({"w": "another"}, {}):
        with pytest.raises(CudiffError, match="the values of w are not those that were saved"):
            read_tensors(tmp_path / "a.safetensors", lambda name: name == "w", digests)


@pytest.mark.parametrize("length", [0x80, 0x4B50])
def test_a_header_as_long_as_other_files_begin_is_no_such_file(tmp_path, length):
    """A pickle begins with 0x80, a zip with PK."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).ljust(length)
    path = write(tmp_path / "a.safetensors", header, b"\x07")
    assert read_weights(path).state["w"] == [7]
