"""Weights of other programs: layouts, PyTorch's files read without running them, unet.cu's binary, CS 179's file."""

import collections
import io
import os
import pickle
import subprocess
import tracemalloc
import zipfile

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.config import PRESETS
from cudiff.convert import UNETCU_MAGIC, from_torch, read_unet_cu, read_weights, rename, to_torch, write_weights
from cudiff.errors import CudiffError
from cudiff.models import build
from cudiff.tensorfile import read_tensors, write_tensors
from cudiff.torchfile import read_torch
from tests.at_once import at_once

LAYOUTS = {"conv": "conv2d", "up": "conv_transpose2d", "qkv": "pointwise", "wave": "conv1d", "linear": "linear",
           "bias": "vector", "table": "embedding"}  # fmt: skip
SHAPES = {"conv": (4, 3, 2, 5), "up": (3, 4, 2, 5), "qkv": (6, 2, 1), "wave": (6, 2, 5), "linear": (3, 4), "bias": (3,),
          "table": (10, 4), "steps": ()}  # fmt: skip


def torch_state(rng):
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def message_of(call, *args, **kwargs):
    with pytest.raises(CudiffError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


# Layouts


def test_layouts_there_and_back_are_the_identity(rng):
    state = torch_state(rng)
    native = from_torch(state, LAYOUTS)
    back = to_torch(native, LAYOUTS)
    for name, array in state.items():
        assert back[name].shape == array.shape and np.array_equal(back[name], array)
        assert native[name].flags.c_contiguous and back[name].flags.c_contiguous
        assert native[name].dtype == array.dtype


def test_layouts_element_by_element(rng):
    state = torch_state(rng)
    native = from_torch(state, LAYOUTS)
    assert native["conv"].shape == (4, 2, 5, 3) and native["conv"][3, 1, 4, 2] == state["conv"][3, 2, 1, 4]
    assert native["up"].shape == (3, 2, 5, 4) and native["up"][2, 1, 4, 3] == state["up"][2, 3, 1, 4]
    assert native["qkv"].shape == (6, 2) and native["qkv"][5, 1] == state["qkv"][5, 1, 0]
    assert native["wave"].shape == (6, 5, 2) and native["wave"][5, 3, 1] == state["wave"][5, 1, 3]
    assert native["steps"].shape == ()


def test_layouts_of_another_model(rng):
    assert "conv has shape (3,) where 4 axes" in message_of(from_torch, {"conv": np.zeros(3)}, LAYOUTS)
    assert "only convolutions of length 1" in message_of(from_torch, {"qkv": np.zeros((3, 2, 5))}, LAYOUTS)
    assert "qkv has shape (3,) where 2 axes" in message_of(to_torch, {"qkv": np.zeros(3)}, LAYOUTS)


# Files of torch.save


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="PyTorch is not installed: no files of torch.save to read")


def network(torch):
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2), nn.Conv1d(4, 4, 1), nn.Linear(4, 5),
        nn.Embedding(3, 4),
    )  # fmt: skip


def agree(read, state):
    assert list(read) == list(state)
    for name, tensor in state.items():
        expected = tensor.detach().float().numpy() if tensor.is_floating_point() else tensor.numpy()
        assert read[name].shape == tuple(tensor.shape)
        assert np.array_equal(read[name].astype(expected.dtype), expected)


def test_state_dict(torch, tmp_path):
    state = network(torch).state_dict()
    torch.save(state, tmp_path / "w.pt")
    agree(read_torch(tmp_path / "w.pt"), state)
    agree(read_weights(tmp_path / "w.pt").state, state)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickle_protocols(protocol, torch, tmp_path):
    state = network(torch).state_dict()
    torch.save(state, tmp_path / "w.pt", pickle_protocol=protocol)
    agree(read_torch(tmp_path / "w.pt"), state)


def test_every_dtype(torch, tmp_path):
    names = ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
    state = {name: torch.arange(-3, 4).abs().to(getattr(torch, name)) for name in names}
    torch.save(state, tmp_path / "w.pt")
    read = read_torch(tmp_path / "w.pt")
    agree(read, state)
    assert [str(array.dtype) for array in read.values()] == names and read["bfloat16"].dtype == bfloat16


def test_views_shared_storages_and_odd_shapes(torch, tmp_path):
    base = torch.arange(60.0).reshape(3, 4, 5)
    state = {
        "whole": base, "tied": base, "transposed": base.permute(2, 0, 1), "part": base[1:, ::2, 3],
        "one": base[2, 3, 4], "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "empty view": base[3:],
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }  # fmt: skip
    torch.save(state, tmp_path / "w.pt")
    agree(read_torch(tmp_path / "w.pt"), state)


def test_parts_of_a_training_checkpoint(torch, tmp_path):
    model, ema = network(torch).state_dict(), network(torch).state_dict()
    torch.save({"step": 7, "lr": 1e-3, "model": model, "ema": ema, "notes": ["a", None, (1, True)]}, tmp_path / "w.pt")
    agree(read_torch(tmp_path / "w.pt", "ema"), ema)
    assert "choose from its parts 'model', 'ema' with key" in message_of(read_torch, tmp_path / "w.pt")
    assert "holds no state_dict 'opt'" in message_of(read_torch, tmp_path / "w.pt", "opt")
    torch.save([1, 2], tmp_path / "w.pt")
    assert "is not one plain state_dict" in message_of(read_torch, tmp_path / "w.pt")


def test_whole_modules_optimizers_and_old_files_are_refused(torch, tmp_path):
    path = tmp_path / "w.pt"
    torch.save(network(torch), path)
    assert "runs no code out of files" in message_of(read_torch, path)
    torch.save(network(torch).state_dict(), path, _use_new_zipfile_serialization=False)
    assert "before 1.6" in message_of(read_torch, path)
    torch.save({"x": torch.ones(3).to_sparse()}, path)
    assert "runs no code out of files" in message_of(read_torch, path)
    torch.save({"x": torch.ones(3).expand(5, 3)}, path)
    assert "repeats its values: save tensor.contiguous()" in message_of(read_torch, path)


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def archive(path, program, storages=(), **options):
    with zipfile.ZipFile(path, "w", **options) as file:
        file.writestr("w/data.pkl", program)
        for key, content in dict(storages).items():
            file.writestr(f"w/data/{key}", content)
    return path


@pytest.mark.parametrize(
    "function, arguments",
    [(os.system, ("touch {}",)), (eval, ("open({!r}, 'w')",)), (subprocess.Popen, (["touch", "{}"],)),
     (getattr, (os, "system")), (collections.Counter, ()), (pickle.loads, (b"",)), (io.open, ("{}", "w"))],
)  # fmt: skip
@pytest.mark.parametrize("protocol", [2, 4])
def test_malicious_pickles_are_refused_and_run_nothing(function, arguments, protocol, tmp_path):
    target = str(tmp_path / "harm")
    arguments = tuple(
        argument.format(target) if isinstance(argument, str) else
        [word.format(target) for word in argument] if isinstance(argument, list) else
        "os" if argument is os else argument
        for argument in arguments
    )  # fmt: skip
    program = pickle.dumps({"x": Evil(function, *arguments)}, protocol=protocol)
    assert "runs no code out of files" in message_of(read_torch, archive(tmp_path / "w.pt", program))
    assert not os.path.exists(target)


OLD_STYLE = {
    "INST": b"(S'touch harm'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'x'\no.",
    "NEWOBJ": b"\x80\x02ccollections\nOrderedDict\n)\x81.",
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"Pstorage\n.",
    "EMPTY_SET": b"\x80\x04\x8f.",
    "BYTEARRAY8": b"\x80\x05\x96" + bytes(8) + b".",
}


@pytest.mark.parametrize("name", OLD_STYLE)
def test_other_opcodes_are_refused(name, tmp_path):
    message_of(read_torch, archive(tmp_path / "w.pt", OLD_STYLE[name]))


@pytest.mark.parametrize(
    "program",
    [b"", b".", b"\x80\x02", b"}", b"}h\x05.", b"}(X\x01\x00\x00\x00au.", b"]}a.", b"}]s.", b"(((.", b"}}}b.", b"t.",
     b"}X\xff\xff\xff\x7fa.", b"ccollections\nOrderedDict\nK\x01\x85R.", b"K\x01Q.", b"K\x01K\x02R.",
     b"ctorch.a\x20b\nFloatStorage\n.", b"}N]s.", b"}ccollections\nOrderedDict\nNs."],
)  # fmt: skip
def test_senseless_pickles(program, tmp_path):
    message_of(read_torch, archive(tmp_path / "w.pt", program))


def tensor_program(numel=6, offset=0, shape=(2, 3), strides=(3, 1), storage="FloatStorage", key="0"):
    """The pickle of {"x": a tensor} with any numbers in it."""

    def constant(value):
        if isinstance(value, tuple):
            return b"(" + b"".join(map(constant, value)) + b"t"
        if isinstance(value, str):
            return b"X" + len(value.encode()).to_bytes(4, "little") + value.encode()
        return pickle.dumps(value, 2)[2:-1]

    pid = b"(" + constant("storage") + f"ctorch\n{storage}\n".encode() + constant(key) + constant("cpu")
    pid += constant(numel) + b"tQ"
    arguments = b"(" + pid + b"".join(map(constant, (offset, shape, strides, False)))
    arguments += b"ccollections\nOrderedDict\n)Rt"
    return b"\x80\x02}" + constant("x") + b"ctorch._utils\n_rebuild_tensor_v2\n" + arguments + b"Rs."


def test_a_handmade_tensor(tmp_path):
    path = archive(tmp_path / "w.pt", tensor_program(), {"0": np.arange(6, dtype="<f4").tobytes()})
    assert np.array_equal(read_torch(path)["x"], np.arange(6, dtype=np.float32).reshape(2, 3))


@pytest.mark.parametrize(
    "changes",
    [{"numel": 5}, {"numel": 7}, {"numel": -6}, {"numel": 6.0}, {"numel": True}, {"offset": 1}, {"offset": -1},
     {"offset": 2**70}, {"shape": (3, 3)}, {"shape": (2,)}, {"shape": (-2, -3)}, {"shape": (2**40, 2**40)},
     {"shape": (2**40,), "strides": (0,)}, {"strides": (4, 1)}, {"strides": (-3, 1)}, {"strides": (3, 2**61)},
     {"storage": "DoubleStorage"}, {"storage": "HalfStorage"}, {"storage": "StringStorage"}, {"key": "1"},
     {"key": "../0"}, {"key": 0}],
)  # fmt: skip
def test_tensors_out_of_bounds(changes, tmp_path):
    path = archive(tmp_path / "w.pt", tensor_program(**changes), {"0": np.arange(6, dtype="<f4").tobytes()})
    message_of(read_torch, path)


def test_other_zip_files(tmp_path):
    values = {"0": np.arange(6, dtype="<f4").tobytes()}
    path = archive(tmp_path / "w.pt", tensor_program(), values, compression=zipfile.ZIP_DEFLATED)
    assert "compressed or encrypted" in message_of(read_torch, path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "hello")
    assert "not one that torch.save wrote" in message_of(read_torch, path)
    archive(path, tensor_program(), {**values, "byteorder": b""})
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("w/byteorder", "big")
    assert "big-endian" in message_of(read_torch, path)
    archive(path, tensor_program(), values)
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("w/data/0", values["0"])
    assert "not one that torch.save wrote" in message_of(read_torch, path)


def test_truncated_and_missing_files(torch, tmp_path):
    path = tmp_path / "w.pt"
    assert "check the path" in message_of(read_torch, path)
    assert "check the path" in message_of(read_weights, path)
    torch.save(network(torch).state_dict(), path)
    content = path.read_bytes()
    for length in [4, 100, len(content) // 2, len(content) - 10, len(content) - 1]:
        path.write_bytes(content[:length])
        assert "truncated" in message_of(read_torch, path)


def test_flipped_bytes_never_escape_as_another_error(torch, tmp_path, rng):
    path = tmp_path / "w.pt"
    torch.save({"x": torch.ones(3, 2), "y": torch.ones(3)[::2]}, path)
    content = np.frombuffer(path.read_bytes(), np.uint8)
    for _ in range(1500):
        damaged = content.copy()
        damaged[rng.integers(0, len(content), rng.integers(1, 4))] = rng.integers(0, 256)
        path.write_bytes(damaged.tobytes())
        try:
            read_torch(path)
        except CudiffError as error:
            assert "\n" not in str(error)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pickletools, over strange escapes
def test_flipped_pickle_bytes(tmp_path, rng):
    """Past the zip's checksum, straight into the interpreter."""
    program = np.frombuffer(tensor_program(), np.uint8)
    for _ in range(1500):
        damaged = program.copy()
        damaged[rng.integers(0, len(program), rng.integers(1, 4))] = rng.integers(0, 256)
        path = archive(tmp_path / "w.pt", damaged.tobytes(), {"0": bytes(24)})
        try:
            read_torch(path)
        except CudiffError as error:
            assert "\n" not in str(error)


# 40 nested pairs, each of twice the last: 2^40 numbers where somebody prints them.
LAUGHS = b"\x80\x04K\x01" + b"".join(b"\x94h" + bytes([index]) + b"\x86" for index in range(40))
HOSTILE = {
    "nested tuples for a name": LAUGHS + b"\x8c\x01a\x93.",
    "nested tuples alone": LAUGHS + b".",
    "nested tuples as a reference": LAUGHS + b"Q.", "nested tuples as a key": b"\x80\x04}" + LAUGHS[2:] + b"K\x01s.",
    "nested tuples called": LAUGHS + b")R.",
    "nested tuples built": b"}" + LAUGHS[2:] + b"b.",
    "marks": b"\x80\x02" + b"K\x01" * 150_000 + b"(t" * 3000 + b".",
    "marks within marks": b"\x80\x02" + b"(" * 99_000 + b"t" * 99_000 + b".",
    "opcodes": b"\x80\x02" + b"K\x010" * 3_000_000 + b".",
    "a long number": b"\x80\x02\x8b" + (2**22).to_bytes(4, "little") + b"\x11" * 2**22 + b".",
    "digits": b"L" + b"9" * 1_000_000 + b"L\n.", "a long name": b"c" + b"x" * 1_000_000 + b"\ny\n.",
    "a frame": b"\x80\x04\x95" + b"\xff" * 8 + b"}.", "a long pickle": b"\x80\x02" + bytes(2**25),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", HOSTILE)
def test_pickles_without_end_get_one_short_line_at_once(name, tmp_path):
    path = archive(tmp_path / "w.pt", HOSTILE[name], {"0": bytes(24)})
    with at_once(3):  # a second on a machine of its own
        message = message_of(read_torch, path)
    assert len(message) < 500


def test_nested_tuples_for_a_size(tmp_path):
    program = tensor_program(numel=((1,),)).replace(pickle.dumps(((1,),), 2)[2:-1], LAUGHS[2:])
    message_of(read_torch, archive(tmp_path / "w.pt", program, {"0": bytes(24)}))


def test_many_views_of_one_storage(tmp_path):
    one = tensor_program(numel=60_000, shape=(200, 300), strides=(1, 200))
    entry = one[one.index(b"ctorch._utils") : -2]
    program = b"\x80\x02}" + b"".join(b"X\x03\x00\x00\x00%03d" % i + entry + b"s" for i in range(999)) + b"."
    path = archive(tmp_path / "w.pt", program, {"0": bytes(240_000)})
    assert "its tensors are larger than the file" in message_of(read_torch, path)


def test_a_header_that_asks_for_a_huge_model(tmp_path, rng):
    path = tmp_path / "unet.bin"
    unet_cu_file(path, rng, C_model=4096)
    tracemalloc.start()
    with at_once():
        assert "truncated" in message_of(read_weights, path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2 * path.stat().st_size + 2**26


# Which kind of file


def test_pickles_are_refused_with_the_way_to_convert(tmp_path):
    for name, load in [("edm.pkl", "pickle.load(file)['ema'].state_dict()"), ("old.pt", "torch.load(file)")]:
        (tmp_path / name).write_bytes(pickle.dumps({"ema": 1}))
        message = message_of(read_weights, tmp_path / name)
        assert "is not run" in message and f"torch.save({load}, 'weights.pt')" in message


def test_safetensors_in_torch_layout_there_and_back(tmp_path, rng):
    state = torch_state(rng)
    write_weights(tmp_path / "w.safetensors", state)
    weights = read_weights(tmp_path / "w.safetensors")
    assert weights.config is None and all(np.array_equal(weights.state[name], state[name]) for name in state)
    assert read_tensors(tmp_path / "w.safetensors")[1] == {"format": "pt"}
    write_tensors(tmp_path / "c.safetensors", state, {"cudiff": "{}"})
    assert "a cudiff checkpoint already" in message_of(read_weights, tmp_path / "c.safetensors")
    (tmp_path / "x.bin").write_bytes(b"hello world")
    assert "not unet.cu's weights (no 12345678" in message_of(read_weights, tmp_path / "x.bin")


def test_wrappers_prefixes_go():
    for prefix in ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]:
        assert list(rename({f"{prefix}out.0.weight": np.zeros(1), f"{prefix}module.x": np.zeros(1)}).state) == [
            "out.0.weight", "module.x"
        ]  # fmt: skip


def test_cs179_weights(data_folder):
    weights = read_weights(data_folder / "cs179" / "model_bf16.safetensors")
    assert weights.config == PRESETS["cs179"] and len(weights.state) == 40
    assert weights.state["out_conv.weight"].shape == (1, 64, 1, 1)
    assert weights.state["dec_blocks.0.upsample.weight"].dtype == bfloat16
    assert all(np.isfinite(array.astype(np.float32)).all() for array in weights.state.values())


# unet.cu


def unet_cu_parameters(model_channels=32, channels=3):
    """Names (unet.cu's own) and shapes in the order of its file, spelled out independently of cudiff's U-Net."""
    c, emb = model_channels, 4 * model_channels
    result = []

    def layer(name, *shape):
        result.extend([(f"{name}.weight", shape), (f"{name}.bias", shape[:1])])

    def res(name, cin, cout):
        layer(f"{name}.gn1", cin)
        layer(f"{name}.cv3_1", cout, cin, 3, 3)
        layer(f"{name}.l_emb", cout, emb)
        layer(f"{name}.gn2", cout)
        layer(f"{name}.cv3_2", cout, cout, 3, 3)
        if cin != cout:
            layer(f"{name}.skip_connection", cout, cin, 1, 1)

    def attention(name, cin):
        layer(f"{name}.gn", cin)
        layer(f"{name}.qkv", 3 * cin, cin, 1)
        layer(f"{name}.proj", cin, cin, 1)

    layer("time_embed.0", emb, c)
    layer("time_embed.2", emb, emb)
    layer("input_blocks.0.0", c, channels, 3, 3)
    res("input_blocks.1.0", c, c)
    res("input_blocks.2.0", c, c)
    res("input_blocks.4.0", c, 2 * c)
    res("input_blocks.5.0", 2 * c, 2 * c)
    for index, cin, cout in [(7, 2, 3), (8, 3, 3), (10, 3, 4), (11, 4, 4)]:
        res(f"input_blocks.{index}.0", cin * c, cout * c)
        attention(f"input_blocks.{index}.1", cout * c)
    res("middle_block.0", 4 * c, 4 * c)
    attention("middle_block.1", 4 * c)
    res("middle_block.2", 4 * c, 4 * c)
    up = [(8, 4, 1), (8, 4, 1), (7, 4, 1), (7, 3, 1), (6, 3, 1), (5, 3, 1), (5, 2, 0), (4, 2, 0), (3, 2, 0), (3, 1, 0),
          (2, 1, 0), (2, 1, 0)]  # fmt: skip
    for index, (cin, cout, attended) in enumerate(up):
        res(f"output_blocks.{index}.0", cin * c, cout * c)
        if attended:
            attention(f"output_blocks.{index}.1", cout * c)
    layer("out.0", c)
    layer("out.2", channels, c, 3, 3)
    return result


GUIDED = {"gn1": "in_layers.0", "cv3_1": "in_layers.2", "l_emb": "emb_layers.1", "gn2": "out_layers.0",
          "cv3_2": "out_layers.3", "gn": "norm", "proj": "proj_out"}  # fmt: skip


def guided_name(name):
    return ".".join(GUIDED.get(word, word) for word in name.split("."))


def unet_cu_file(path, rng, moments=0, random_states=0, **header):
    """A file as unet.cu writes it, and what it holds."""
    arrays = [(name, rng.standard_normal(shape).astype("<f4")) for name, shape in unet_cu_parameters()]
    numbers = {"magic": UNETCU_MAGIC, "B": 32, "C_in": 3, "C_model": 32, "C_out": 3, "H": 64, "W": 64, "period": 1000,
               "moments": moments, "random": random_states} | header  # fmt: skip
    values = b"".join(array.tobytes() for _, array in arrays)
    start = np.array(list(numbers.values()) + [0] * (256 - len(numbers)), "<i4").tobytes()
    path.write_bytes(start + values * (1 + 2 * moments) + bytes(48 * 100) * random_states)
    return dict(arrays)


@pytest.mark.parametrize("moments, random_states", [(0, 0), (1, 1)])
def test_unet_cu_binary(moments, random_states, tmp_path, rng):
    arrays = unet_cu_file(tmp_path / "unet.bin", rng, moments, random_states)
    weights = read_weights(tmp_path / "unet.bin")
    assert list(weights.state) == [guided_name(name) for name in arrays]
    for (name, expected), array in zip(arrays.items(), weights.state.values(), strict=True):
        assert np.array_equal(array, expected), name
    assert weights.config == PRESETS["unet-cu"].replace(model_channels=32)


def test_unet_cu_state_dict_of_its_pytorch_twin(torch, tmp_path, rng):
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in unet_cu_parameters()}
    torch.save({f"_orig_mod.{name}": torch.tensor(array) for name, array in arrays.items()}, tmp_path / "w.pt")
    weights = read_weights(tmp_path / "w.pt")
    assert weights.config.use_new_attention_order and weights.config.max_period == 1000
    assert all(np.array_equal(weights.state[guided_name(name)], array) for name, array in arrays.items())


def test_unet_cu_binary_damaged(tmp_path, rng):
    path = tmp_path / "unet.bin"
    unet_cu_file(path, rng)
    content = path.read_bytes()
    path.write_bytes(content[:-4])
    assert "truncated" in message_of(read_weights, path)
    path.write_bytes(content[:100])
    assert "no weights of unet.cu" in message_of(read_weights, path)
    path.write_bytes(bytes(2000))
    assert "no weights of unet.cu" in message_of(read_unet_cu, path)
    for header in [{"W": 32}, {"C_out": 6}, {"C_model": 0}, {"C_model": 2**31 - 1}, {"H": 0, "W": 0}, {"period": 0},
                   {"H": 60, "W": 60}, {"C_in": 2, "C_out": 2}, {"moments": 1}]:  # fmt: skip
        unet_cu_file(path, rng, **({} if "moments" in header else header))
        if "moments" in header:
            path.write_bytes(path.read_bytes()[:32] + (1).to_bytes(4, "little") + path.read_bytes()[36:])
        message_of(read_weights, path)


def test_the_unet_takes_unet_cu_weights(tmp_path, rng):
    unet_cu_file(tmp_path / "unet.bin", rng)
    state, config = read_weights(tmp_path / "unet.bin")
    model = build(config)
    model.load_state_dict(from_torch(state, model.layouts()))
    back = to_torch(model.state_dict(), model.layouts())
    assert all(np.array_equal(back[name], state[name]) for name in state)
