"""Pickles of the three functions that a state_dict calls, made without PyTorch: what is read, and what is refused."""

import collections
import io
import pickle
import pickletools
import sys
import types
import zipfile

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.errors import CudiffError
from cudiff.torchfile import STORAGES, read_torch
from tests.test_convert import archive, message_of, tensor_program

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


@pytest.fixture
def torch_save(monkeypatch):
    """torch_save(path, content, protocol): a .pt of arrays in Python's containers, pickled as PyTorch pickles tensors,
    by functions and storages of its names. Arrays that are views of one array share a storage."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in STORAGES:
        setattr(torch, name[6:], type(name[6:], (), {"__module__": "torch"}))
    utils._rebuild_tensor_v2 = lambda *arguments: None
    utils._rebuild_tensor_v2.__module__ = "torch._utils"
    utils._rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)

    class Storage(collections.namedtuple("Storage", ["base"])):
        pass

    def save(path, content, protocol):
        bases = []

        class Pickler(pickle.Pickler):
            def reducer_override(self, value):
                if not isinstance(value, np.ndarray):
                    return NotImplemented
                base = value if value.base is None else value.base
                offset = value.__array_interface__["data"][0] - base.__array_interface__["data"][0]
                strides = tuple(stride // value.itemsize for stride in value.strides)
                hooks = collections.OrderedDict()
                return utils._rebuild_tensor_v2, (
                    Storage(base), offset // value.itemsize, value.shape, strides, False, hooks)

            def persistent_id(self, value):
                if not isinstance(value, Storage):
                    return None
                known = [one is value.base for one in bases]
                if True not in known:
                    bases.append(value.base)
                    known.append(True)
                kind = next(name for name, dtype in STORAGES.items() if dtype == value.base.dtype)[6:]
                return "storage", getattr(torch, kind), str(known.index(True)), "cpu", value.base.size

        pickled = io.BytesIO()
        Pickler(pickled, protocol).dump(content)
        return archive(path, pickled.getvalue(), {str(i): base.tobytes() for i, base in enumerate(bases)})

    return save


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_of_every_kind_in_every_protocol(torch_save, tmp_path, protocol):
    """Views of one storage, with an offset or other strides; scalars, empty ones and every dtype; a memo of many."""
    base = np.arange(60, dtype=np.float32)
    state = collections.OrderedDict(
        base=base, part=base[7:11], turned=base[12:24].reshape(3, 4).T, last=base[59:], spaced=base[1:20:3],
        scalar=np.array(2.5), empty=np.zeros((0, 3), np.float32), deep=np.ones((1,) * 32, np.float16),
    )
    state |= {str(dtype): np.array([0, 1, 1]).astype(dtype) for dtype in STORAGES.values()}
    state |= {f"many {i}": np.full(2, i, np.int32) for i in range(300)}
    found = read_torch(torch_save(tmp_path / "a.pt", state, protocol))
    assert list(found) == list(state) and found["bfloat16"].dtype == bfloat16
    for name, array in state.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_state_dict_is_found_among_what_a_run_keeps(torch_save, tmp_path, protocol):
    model, ema = {"w": np.float32([1, 2])}, {"w": np.float32([3, 4])}
    run = {
        "model": model, "ema": ema, "step": 70_000, "large": 2**40, "rate": 1e-3, "betas": (0.9, 0.999), "one": (1,),
        "three": (1, 2, 3), "many": (1, 2, 3, 4), "none": None, "flags": [True, False], "single": [1],
        "empty": [(), {}], "name": "x" * 300, 5: "a number for a name", "both": [model, ema],
    }
    path = torch_save(tmp_path / "a.pt", run, protocol)
    assert message_of(read_torch, path).endswith("choose from its parts 'model', 'ema' with key (--key)")
    assert read_torch(path, "model")["w"].tolist() == [1, 2] and read_torch(path, "ema")["w"].tolist() == [3, 4]
    for key in ("step", "other", "empty"):
        assert f"holds no state_dict '{key}': choose from" in message_of(read_torch, path, key)
    path = torch_save(tmp_path / "b.pt", {f"{i}".ljust(50, "x"): model for i in range(11)}, protocol)
    parts = ", ".join(repr(f"{i}".ljust(40, "x")) for i in range(10))
    assert message_of(read_torch, path).endswith(f"choose from its parts {parts} with key (--key)")
    path = torch_save(tmp_path / "n.pt", {0: model, 1: model}, protocol)
    assert message_of(read_torch, path).endswith("choose from its parts '0', '1' with key (--key)")
    assert read_torch(path, "0")["w"].tolist() == [1, 2]
    path = torch_save(tmp_path / "c.pt", {"step": 1, "names": ["a"], "state": {}}, protocol)
    assert message_of(read_torch, path).endswith("write one with torch.save(model.state_dict(), path)")


@pytest.mark.parametrize("changes, first", [
    ({"offset": 5, "shape": (1,), "strides": (1,)}, 5), ({"offset": 6, "shape": (1,), "strides": (1,)}, None),
    ({"offset": 1, "shape": (5,), "strides": (1,)}, 1), ({"offset": 2, "shape": (5,), "strides": (1,)}, None),
    ({"shape": (2, 2), "strides": (3, 2)}, 0), ({"shape": (2, 2), "strides": (3, 3)}, None),
    ({"shape": (6,), "strides": (0,)}, 0), ({"shape": (7,), "strides": (0,)}, None),
    ({"shape": (1,) * 32, "strides": (1,) * 32}, 0), ({"shape": (1,) * 33, "strides": (1,) * 33}, None),
    ({"shape": (2, 3), "strides": (1,)}, None),
], ids=str)
def test_tensors_up_to_the_end_of_their_storage(tmp_path, changes, first):
    path = archive(tmp_path / "w.pt", tensor_program(**changes), {"0": np.arange(6, dtype="<f4").tobytes()})
    if first is None:
        repeats = changes == {"shape": (7,), "strides": (0,)}
        told = "x of shape (7,) repeats its values: save tensor.contiguous()" if repeats else "is damaged"
        assert told in message_of(read_torch, path)
    else:
        assert read_torch(path)["x"].ravel()[0] == first


def test_sizes_are_below_2_to_the_62(tmp_path):
    for size in (2**62, -1):
        path = archive(tmp_path / "w.pt", tensor_program(shape=(0, size), strides=(1, 1)), {"0": bytes(24)})
        assert "sizes that are none" in message_of(read_torch, path)
    path = archive(tmp_path / "w.pt", tensor_program(shape=(0, 3), strides=(2**62 - 1, 1)), {"0": bytes(24)})
    assert read_torch(path)["x"].shape == (0, 3)


def test_a_state_dict_has_up_to_200_000_opcodes(tmp_path):
    """Those beyond a tensor's say the protocol again."""
    values = {"0": np.arange(6, dtype="<f4").tobytes()}
    program = tensor_program()
    count = sum(1 for _ in pickletools.genops(program))
    for opcodes in (200_000, 200_001):
        padded = program[:2] + b"\x80\x02" * (opcodes - count) + program[2:]
        path = archive(tmp_path / "w.pt", padded, values)
        if opcodes == 200_000:
            assert read_torch(path)["x"].shape == (2, 3)
    assert "holds more than a state_dict would" in message_of(read_torch, path)


OPTIONS = b"cargparse\nNamespace\n"


def test_the_options_of_a_command_line_beside_the_weights(tmp_path):
    """argparse's, as trainers save them: an object of it and its attributes, and nothing else of it."""
    def beside(options):
        weights = b"X\x03\x00\x00\x00ema" + state(TENSOR, b"}")[2:-1] + b"s"
        return b"\x80\x02}" + weights + b"X\x04\x00\x00\x00args" + options + b"s."

    path = tmp_path / "a.pt"
    assert "choose from its parts 'ema'" in message_of(read, path, beside(OPTIONS + EMPTY + b"\x81}b"))
    np.testing.assert_array_equal(read_torch(path, "ema")["w"], np.float32([1.5, -2]))
    for options in (OPTIONS + EMPTY + b"R", OPTIONS + b"K\x01\x85\x81", ORDERED + EMPTY + b"\x81",
                    OPTIONS + EMPTY + b"\x81]b", b"]}b"):
        assert "its pickle makes no sense" in message_of(read, path, beside(options))
    assert "refers to 'argparse.ArgumentParser'" in message_of(read, path, beside(b"cargparse\nArgumentParser\n"))


@pytest.mark.parametrize("metadata, told", [
    (EMPTY, None), (b"}X\x03\x00\x00\x00neg\x88s", "save tensor.resolve_neg()"),
])
def test_views_that_are_to_be_negated_are_refused(tmp_path, metadata, told):
    """PyTorch's seventh argument of a tensor."""
    whole = state(TENSOR.removesuffix(b"tR") + metadata + b"tR")
    if told is None:
        assert read(tmp_path / "a.pt", whole)["w"].tolist() == [1.5, -2]
    else:
        assert told in message_of(read, tmp_path / "a.pt", whole)
