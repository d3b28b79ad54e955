"""Checkpoints: whole or not at all, readable by others, and every damage named in one line."""

import builtins
import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.checkpoint import checkpoint_path, latest, load_checkpoint, part, prefixed, prune, save_checkpoint
from cudiff.config import PRESETS, Config
from cudiff.errors import CudiffError
from cudiff.tensorfile import DTYPES, read_header, read_tensors, write_tensors

COUNTERS = {"step": 12, "seed": 3}


def some_tensors(rng, names=("model", "ema", "exp_avg", "exp_avg_sq")):
    state = {
        "conv.weight": rng.standard_normal((4, 3, 3, 2)).astype(np.float32),
        "conv.bias": rng.standard_normal(4).astype(np.float32),
    }
    return {key: array for name in names for key, array in prefixed(name, state).items()}


def saved(path, rng, **changes):
    save_checkpoint(path, changes.get("config", Config(lr=1.0)), changes.get("tensors", some_tensors(rng)), COUNTERS)
    return path


def error_of(path, parts=("model",)):
    with pytest.raises(CudiffError) as error:
        load_checkpoint(path, parts)
    assert "\n" not in str(error.value)
    return str(error.value)


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_round_trip_with_the_whole_configuration(tmp_path, rng):
    tensors = some_tensors(rng)
    path = saved(tmp_path / "new" / "folder" / "a.safetensors", rng, config=PRESETS["mnist"], tensors=tensors)
    config, read, counters = load_checkpoint(path)
    assert config == PRESETS["mnist"] and counters == COUNTERS
    assert list(read) == list(tensors) and all(same(read[name], tensors[name]) for name in tensors)
    assert list(part(read, "ema")) == ["conv.weight", "conv.bias"]


def test_only_some_parts_are_read(tmp_path, rng):
    path = saved(tmp_path / "a.safetensors", rng)
    assert set(load_checkpoint(path, ("ema",)).tensors) == {"ema.conv.weight", "ema.conv.bias"}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_odd_shapes(name, tmp_path, rng):
    dtype = DTYPES[name]
    arrays = {str(shape): rng.integers(0, 2, shape).astype(dtype) for shape in [(), (0,), (3,), (2, 0, 3), (5, 7)]}
    arrays["strided"] = rng.integers(0, 2, (4, 6)).astype(dtype).T[::2]
    arrays["byte"] = np.ones(3, np.uint8)
    write_tensors(tmp_path / "a.safetensors", arrays, {})
    read, _ = read_tensors(tmp_path / "a.safetensors")
    assert all(same(read[key], arrays[key]) for key in arrays)
    starts = {key: entry.start for key, entry in read_header(tmp_path / "a.safetensors")[0].items()}
    assert all(starts[key] % array.dtype.itemsize == 0 for key, array in arrays.items())


def test_the_reference_implementation_reads_what_we_write_and_the_reverse(tmp_path, rng):
    reference = pytest.importorskip("safetensors.numpy")
    arrays = {"b": rng.standard_normal((2, 3)).astype(np.float32), "a": np.arange(5), "z": np.ones(3, bool)}
    write_tensors(tmp_path / "ours.safetensors", arrays, {"key": "value"})
    theirs = reference.load_file(tmp_path / "ours.safetensors")
    assert all(same(theirs[name], arrays[name]) for name in arrays)
    reference.save_file(arrays, tmp_path / "theirs.safetensors", {"key": "value"})
    read, metadata = read_tensors(tmp_path / "theirs.safetensors")
    assert metadata == {"key": "value"} and all(same(read[name], arrays[name]) for name in arrays)


def test_torch_reads_our_bfloat16(tmp_path, rng):
    torch = pytest.importorskip("torch")
    reference = pytest.importorskip("safetensors.torch")
    array = rng.standard_normal((3, 5)).astype(bfloat16)
    write_tensors(tmp_path / "ours.safetensors", {"x": array}, {})
    theirs = reference.load_file(tmp_path / "ours.safetensors")["x"]
    assert theirs.dtype == torch.bfloat16 and np.array_equal(theirs.float().numpy(), array.astype(np.float32))
    reference.save_file({"x": theirs}, tmp_path / "theirs.safetensors")
    assert same(read_tensors(tmp_path / "theirs.safetensors")[0]["x"], array)


class FullDisk:
    """A file that takes some bytes and then no more."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        size = memoryview(data).nbytes
        if size > self.room:
            self.file.write(bytes(memoryview(data).cast("B")[: self.room]))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= size
        return self.file.write(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


@pytest.mark.parametrize("room", [0, 5, 300, 700])
def test_a_full_disk_leaves_the_old_checkpoint(room, tmp_path, rng, monkeypatch):
    path = saved(tmp_path / "a.safetensors", rng)
    before, real = path.read_bytes(), builtins.open

    def small(file, mode="r", *args, **kwargs):
        opened = real(file, mode, *args, **kwargs)
        return FullDisk(opened, room) if "w" in mode else opened

    monkeypatch.setattr(builtins, "open", small)
    with pytest.raises(CudiffError, match="No space left on device"):
        saved(path, rng, config=Config(lr=2.0))
    monkeypatch.undo()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()])
def test_a_failure_before_the_swap_leaves_the_old_checkpoint(name, failure, tmp_path, rng, monkeypatch):
    path = saved(tmp_path / "a.safetensors", rng)
    before = path.read_bytes()

    def stop(*args):
        raise failure

    monkeypatch.setattr(os, name, stop)
    with pytest.raises((CudiffError, KeyboardInterrupt)):
        saved(path, rng, config=Config(lr=2.0))
    monkeypatch.undo()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_what_a_kill_leaves_behind_is_no_obstacle(tmp_path, rng):
    path = tmp_path / "step-00000001.safetensors"
    Path(tmp_path / f".{path.name}.tmp").write_bytes(b"half a checkpoint")
    assert latest(tmp_path) is None
    saved(path, rng)
    assert list(tmp_path.iterdir()) == [path]


def test_the_swap_comes_after_the_bytes_are_on_disk(tmp_path, rng, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b))[1])
    saved(tmp_path / "a.safetensors", rng)
    assert events == ["fsync", "replace", "fsync"]


def test_files_that_cannot_be_checkpoints(tmp_path, rng):
    assert "check the path" in error_of(tmp_path / "none.safetensors")
    assert "holds no checkpoint: give the folder of a run, or a checkpoint" in error_of(tmp_path)
    for content in [b"", b"PK\x03\x04" + bytes(100), bytes(7), b"{}" * 50]:
        (tmp_path / "x").write_bytes(content)
        assert "not a safetensors file" in error_of(tmp_path / "x")
    write_tensors(tmp_path / "weights.safetensors", {"x": np.zeros(3)}, {"format": "pt"})
    assert "convert it first with cudiff convert" in error_of(tmp_path / "weights.safetensors")


def test_every_truncation_is_noticed(tmp_path, rng):
    path = saved(tmp_path / "a.safetensors", rng)
    content = path.read_bytes()
    for length in [10, 100, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        assert "truncated" in error_of(path)
    path.write_bytes(content + b"\0")
    assert "damaged" in error_of(path)


def header_file(path, header, values=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + values)
    return path


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
        {"a": {"dtype": "F32", "shape": [2**40, 2**40, 0, 2**62], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
         "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1]}},
        {"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}},
        {"a": 3},
        {"__metadata__": 3},
        {"__metadata__": {"cudiff": 3}},
        b'{"a": 1, "a": 2}',
        b"{not json",
        b'{"\xff": 1}',
        b'{"a":' + b"[" * 100000,
    ],
)  # fmt: skip
def test_damaged_headers(header, tmp_path):
    assert "damaged" in error_of(header_file(tmp_path / "a.safetensors", header, bytes(4)))


def test_a_dtype_that_numpy_lacks(tmp_path):
    header = {"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    assert "type F8_E4M3" in error_of(header_file(tmp_path / "a.safetensors", header, bytes(4)))
    with pytest.raises(CudiffError, match="cannot hold complex64"):
        write_tensors(tmp_path / "b.safetensors", {"a": np.zeros(3, np.complex64)}, {})


@pytest.mark.parametrize(
    "about, message",
    [
        ({"format_version": 99}, "has checkpoint format 99, this cudiff reads 1"),
        ({"format_version": 1, "layout": "OIHW", "config": {}, "counters": {}}, "metadata makes no sense"),
        ({"format_version": 1, "layout": "native KRSC", "config": 3, "counters": {}}, "metadata makes no sense"),
        ({"format_version": 1, "layout": "native KRSC", "config": {"depth": 3}, "counters": {}},
         "a.safetensors needs the cudiff that wrote it, as this one cannot build it: unknown option 'depth'"),
        ({}, "metadata makes no sense"),
        ([], "metadata makes no sense"),
    ],
)
def test_other_versions(about, message, tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"model.x": np.zeros(3)}, {"cudiff": json.dumps(about)})
    assert message in error_of(tmp_path / "a.safetensors")


def test_parts_that_do_not_agree(tmp_path):
    def problem(tensors):
        save_checkpoint(tmp_path / "a.safetensors", Config(), tensors, COUNTERS)
        return error_of(tmp_path / "a.safetensors")

    weights = {f"model.{i}": np.zeros(i) for i in range(1, 7)}
    assert "no model weights" in problem({"ema.x": np.zeros(3)})
    message = problem(weights | {f"ema.{i}": np.zeros(9) for i in range(1, 7)})
    assert "'ema'" in message and "1 has shape (9,), not (1,)" in message and message.endswith("and 3 more")
    assert "unexpected other" in problem(weights | {"exp_avg.other": np.zeros(9)})
    write_tensors(tmp_path / "b.safetensors", {"net.x": np.zeros(3)}, {"cudiff": json.dumps(
        {"format_version": 1, "layout": "native KRSC", "config": {}, "counters": {}})})
    assert "unexpected tensor net.x" in error_of(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="must begin with"):
        problem({"x": np.zeros(3)})


def test_part_names_what_is_missing_unexpected_or_misshaped(rng):
    tensors = some_tensors(rng, ("model",))
    shapes = {"conv.weight": (4, 3, 3, 2), "conv.bias": (4,)}
    assert list(part(tensors, "model", shapes)) == list(shapes)
    with pytest.raises(CudiffError, match="holds no 'ema'"):
        part(tensors, "ema")
    with pytest.raises(CudiffError, match=r"missing norm\.weight; unexpected conv\.bias$"):
        part(tensors, "model", {"conv.weight": (4, 3, 3, 2), "norm.weight": (4,)})
    with pytest.raises(CudiffError, match=r"conv\.bias has shape \(4,\), not \(5,\)$"):
        part(tensors, "model", shapes | {"conv.bias": (5,)})


def test_latest_and_prune_see_only_checkpoints(tmp_path, rng):
    assert latest(tmp_path) is None and latest(tmp_path / "none") is None
    paths = [saved(checkpoint_path(tmp_path, step), rng) for step in (5, 20, 100, 123456789)]
    others = [tmp_path / name for name in ("mine.safetensors", "step-1.txt", "step-00000001.safetensors.bak")]
    for other in others:
        other.write_bytes(b"")
    assert latest(tmp_path) == paths[3]
    assert prune(tmp_path, 0) == []
    assert prune(tmp_path, 9) == []
    assert prune(tmp_path, 2) == paths[:2]
    assert sorted(tmp_path.iterdir()) == sorted(paths[2:] + others)
