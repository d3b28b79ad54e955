"""Checkpoints: whole or not at all, readable by others, and every damage named in one line."""

import builtins
import errno
import json
import os
import signal
import tracemalloc

import numpy as np
import pytest
import safetensors.numpy

from cudiff.backend import bfloat16
from cudiff.checkpoint import checkpoint_path, latest, load_checkpoint, part, prefixed, prune, save_checkpoint
from cudiff.config import Config
from cudiff.errors import CudiffError
from cudiff.files import temporary_of
from cudiff.models import build
from cudiff.tensorfile import DTYPES, read_header, read_tensors, replacing, write_tensors
from tests.at_once import at_once

COUNTERS = {"step": 12, "seed": 3}
SMALL = Config(model="cs179", image_size=4, channels=1, model_channels=2, channel_mult=(1,))
STATE = {name: value.shape for name, value in build(SMALL).named_parameters()}


def some_tensors(rng, names=("model", "ema", "exp_avg", "exp_avg_sq")):
    state = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in STATE.items()}
    return {key: array for name in names for key, array in prefixed(name, state).items()}


def saved(path, rng, **changes):
    config, tensors = changes.get("config", SMALL), changes.get("tensors", some_tensors(rng))
    save_checkpoint(path, config, tensors, changes.get("counters", COUNTERS))
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
    odd = SMALL.replace(lr=1.25e-5, data="Bär\n图", betas=(0.1, 0.7), channel_mult=[1], seed=2**63 - 1)
    path = saved(tmp_path / "new" / "folder" / "a.safetensors", rng, config=odd, tensors=tensors)
    config, read, counters = load_checkpoint(path)
    assert config == odd and counters == COUNTERS
    assert read.keys() == tensors.keys() and all(same(read[name], tensors[name]) for name in tensors)
    assert part(read, "ema").keys() == STATE.keys()


def test_only_some_parts_are_read(tmp_path, rng):
    path = saved(tmp_path / "a.safetensors", rng)
    assert set(load_checkpoint(path, ("ema",)).tensors) == {f"ema.{name}" for name in STATE}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_odd_shapes(name, tmp_path, rng):
    dtype = DTYPES[name]
    arrays = {str(shape): rng.integers(0, 2, shape).astype(dtype) for shape in [(), (0,), (3,), (2, 0, 3), (5, 7)]}
    arrays["strided"] = rng.integers(0, 2, (4, 6)).astype(dtype).T[::2]
    arrays["byte"] = np.ones(3, np.uint8)
    write_tensors(tmp_path / "a.safetensors", arrays, {})
    read, _ = read_tensors(tmp_path / "a.safetensors")
    assert all(same(read[key], arrays[key]) for key in arrays)
    entries, _ = read_header(tmp_path / "a.safetensors")
    assert all(entries[key] == (array.dtype, array.shape) for key, array in arrays.items())


def test_files_are_those_of_the_format_and_anybody_may_read_them(tmp_path, rng):
    arrays = {"b": rng.standard_normal((2, 3)).astype(np.float32), "a": np.arange(5), "z": np.ones(3, bool)}
    write_tensors(tmp_path / "ours.safetensors", arrays, {"key": "value"})
    theirs = safetensors.numpy.load_file(tmp_path / "ours.safetensors")
    assert all(same(theirs[name], arrays[name]) for name in arrays)
    (tmp_path / "plain").touch()
    assert (tmp_path / "ours.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode
    safetensors.numpy.save_file(arrays, tmp_path / "theirs.safetensors", {"key": "value"})
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


@pytest.mark.parametrize("room", [0, 5, 300])
def test_a_full_disk_leaves_the_old_file(room, tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"before")
    real = builtins.open

    def small(file, mode="r", *args, **kwargs):
        opened = real(file, mode, *args, **kwargs)
        return FullDisk(opened, room) if "w" in mode else opened

    monkeypatch.setattr(builtins, "open", small)
    with pytest.raises(CudiffError, match="No space left on device"), replacing(path) as file:
        file.write(bytes(700))
    monkeypatch.undo()
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("limit", [0, 100, 5000])
def test_a_full_disk_leaves_the_old_checkpoint(limit, tmp_path, rng):
    """safetensors writes by system calls of its own: a limit of the system stops them."""
    resource = pytest.importorskip("resource", reason="this system has no limits for files")
    path = saved(tmp_path / "a.safetensors", rng)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        with pytest.raises(CudiffError, match=r"File too large.*nothing there was changed"):
            saved(path, rng, config=SMALL.replace(lr=2.0))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
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
        saved(path, rng, config=SMALL.replace(lr=2.0))
    monkeypatch.undo()
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_what_a_kill_leaves_behind_is_no_obstacle(tmp_path, rng):
    path = tmp_path / "step-00000001.safetensors"
    temporary_of(path).write_bytes(b"half a checkpoint")  # that of another process stays until its run goes on
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
        assert "safetensors file" in error_of(tmp_path / "x")
    write_tensors(tmp_path / "weights.safetensors", {"x": np.zeros(3)}, {"format": "pt"})
    assert "convert it first with cudiff convert" in error_of(tmp_path / "weights.safetensors")


def test_every_truncation_is_noticed(tmp_path, rng):
    path = saved(tmp_path / "a.safetensors", rng)
    content = path.read_bytes()
    for length in [10, 100, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        assert "is truncated or damaged" in error_of(path)
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
        b'{"a": %b, "a": %b}' % ((b'{"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}',) * 2),
        b'{"a": {"dtype": "F32", "shape": [%b1], "data_offsets": [0, 4]}}' % (b"1," * 300_000),
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
        ({"format_version": 1, "layout": "native KRSC", "config": {"no_such": 3}, "counters": {"step": 0}},
         "the cudiff that wrote it, and what was registered there, as it cannot be built here: "
         "unknown option 'no_such'"),
        ({}, "metadata makes no sense"),
        ([], "metadata makes no sense"),
    ],
)
def test_other_versions(about, message, tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"model.x": np.zeros(3)}, {"cudiff": json.dumps(about)})
    assert message in error_of(tmp_path / "a.safetensors")


def test_parts_that_do_not_agree(tmp_path, rng):
    def problem(tensors, config=SMALL):
        return error_of(saved(tmp_path / "a.safetensors", rng, tensors=tensors, config=config))

    whole = some_tensors(rng)
    weights = {name: array for name, array in whole.items() if name.startswith("model.")}
    assert "no model weights" in problem({"ema.x": np.zeros(3)})
    message = problem(whole | {f"ema.{name}": np.zeros(99) for name in STATE})
    assert "'ema'" in message and "has shape (99,), not (" in message and message.endswith(f"{len(STATE) - 3} more")
    assert "unexpected other" in problem(whole | {"exp_avg.other": np.zeros(9)})
    assert "'exp_avg' does not fit its configuration's model: missing" in problem(
        {name: array for name, array in whole.items() if name != "exp_avg.out_conv.bias"}
    )
    assert "missing out_conv.bias; unexpected out_conv.bios" in problem(
        {name.replace("out_conv.bias", "out_conv.bios"): array for name, array in weights.items()}
    )
    assert "out_conv.bias has shape (1,), not (3,)" in problem(weights, SMALL.replace(channels=3))
    write_tensors(tmp_path / "b.safetensors", {"net.x": np.zeros(3)}, {"cudiff": json.dumps(
        {"format_version": 1, "layout": "native KRSC", "config": {}, "counters": {"step": 0}})})
    assert "unexpected tensor net.x" in error_of(tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="must begin with"):
        problem({"x": np.zeros(3)})


WRONG = {
    "num_res_blocks": 10**6, "model_channels": 16384, "num_classes": 10**8, "channel_mult": [1] * 100_000,
    "image_size": 10**9, "diffusion_steps": 10**12, "lr": 10**400, "attention_resolutions": [4] * 50_000,
    "betas": "x" * 10**6, "max_period": None, "model": "unet", "seed": -1,
}  # fmt: skip


@pytest.mark.parametrize("model", ["unet", "cs179"])
@pytest.mark.parametrize("name", WRONG)
def test_a_configuration_that_asks_for_more_than_the_file_holds(name, model, tmp_path, rng):
    """Refused before a model of it is built: at once, and in no more memory than the file's."""
    large = {"num_head_channels": 8, "num_res_blocks": 1000} if model == "unet" else {}
    config = SMALL.replace(model=model, model_channels=1000, **large).to_dict() | {name: WRONG[name]}
    about = {"format_version": 1, "layout": "native KRSC", "config": config, "counters": {"step": 0}}
    write_tensors(tmp_path / "a.safetensors", some_tensors(rng), {"cudiff": json.dumps(about)})
    tracemalloc.start()
    with at_once():
        message = error_of(tmp_path / "a.safetensors")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(message) < 500 and most < 2**26


def test_the_largest_model_that_options_allow_is_refused_at_once(tmp_path, rng):
    largest = Config(
        image_size=2**15, channels=3, model_channels=2**16, channel_mult=(2**10,) * 16, num_res_blocks=1000,
        num_classes=2**31 - 1, num_head_channels=128,
    )  # fmt: skip
    path = saved(tmp_path / "a.safetensors", rng, config=largest)
    with at_once():
        message = error_of(path)
    assert "does not fit its configuration" in message.replace("do not fit", "does not fit")


TRAINED = COUNTERS | {
    "seconds": 3.5, "loss_sum": 0.25, "loss_steps": 2, "optimizer": [12, 0, 0], "generator": {"seed": 3, "step": 12},
}  # fmt: skip
BAD_NUMBERS = [None, "12", -1, True, 2**70, float("nan"), [1], {}]


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=str)
@pytest.mark.parametrize("name", ["step", "seconds", "loss_sum", "loss_steps", "optimizer", "generator"])
def test_counters_that_are_none(name, value, tmp_path, rng):
    if (name, value) in [("optimizer", [1]), ("loss_sum", -1)] or (name in ("seconds", "loss_sum") and value == 2**70):
        return
    path = saved(tmp_path / "a.safetensors", rng, counters=TRAINED | {name: value})
    assert f"its counter '{name}' is missing or no such number" in error_of(path)
    saved(path, rng, counters={key: number for key, number in TRAINED.items() if key != name})
    if name != "optimizer":  # weights without an optimiser's state are whole
        assert f"its counter '{name}' is missing" in error_of(path)


@pytest.mark.parametrize("state", [{"seed": 3}, {"seed": "3", "step": 1}, {"seed": 2**64, "step": 1},
                                   {"seed": 3, "step": 2**31}, {"seed": 3, "step": 1, "draws": -1}])  # fmt: skip
def test_states_of_a_generator_that_are_none(state, tmp_path, rng):
    path = saved(tmp_path / "a.safetensors", rng, counters=TRAINED | {"generator": state})
    assert "its counter 'generator' is missing" in error_of(path)
    saved(path, rng, counters=TRAINED)
    assert load_checkpoint(path).counters == TRAINED


def test_the_largest_counters_are_read(tmp_path, rng):
    most = 2**31 - 1
    largest = {"step": most, "seconds": 0, "loss_sum": -1.0, "loss_steps": most, "optimizer": [most, 0, most],
               "generator": {"seed": 2**63 - 1, "step": most, "draws": most}}
    found = load_checkpoint(saved(tmp_path / "a.safetensors", rng, counters=TRAINED | largest)).counters
    assert found == TRAINED | largest
    for name, value in [("step", most + 1), ("loss_steps", most + 1), ("optimizer", [most + 1]), ("seconds", -0.1),
                        ("generator", {"seed": 2**63, "step": 0})]:
        path = saved(tmp_path / "b.safetensors", rng, counters=TRAINED | {name: value})
        assert f"its counter '{name}' is missing or no such number" in error_of(path)


def test_a_flipped_bit_names_the_tensor(tmp_path, rng):
    tensors = {name: array * (1 + (name[:3] == "ema")) for name, array in some_tensors(rng).items()}
    path = saved(tmp_path / "a.safetensors", rng, tensors=tensors)
    content = path.read_bytes()
    needle = load_checkpoint(path).tensors["ema.out_conv.weight"].tobytes()
    assert content.count(needle) == 1
    damaged = bytearray(content)
    damaged[content.index(needle)] ^= 4
    path.write_bytes(damaged)
    message = error_of(path, ("ema",))
    assert str(path) in message and "the values of ema.out_conv.weight are not those that were saved" in message
    assert load_checkpoint(path, ("model",)).counters == COUNTERS  # only what is read is verified
    start = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:start] + bytes(len(content) - start))
    assert "are not those that were saved" in error_of(path)


def test_a_flipped_bit_in_the_configuration(tmp_path, rng):
    path = saved(tmp_path / "a.safetensors", rng)
    content = path.read_bytes()
    for old, new in [(b'sample_steps\\": 18', b'sample_steps\\": 19'), (b'step\\": 12', b'step\\": 13')]:
        assert content.count(old) == 1
        path.write_bytes(content.replace(old, new))
        assert "metadata makes no sense" in error_of(path)


def test_a_file_without_digests_loads_as_before(tmp_path, rng):
    path = saved(tmp_path / "a.safetensors", rng)
    tensors, metadata = read_tensors(path)
    about = json.loads(metadata["cudiff"])
    assert about["format_version"] == 1 and about["sha256"].keys() == {"about", *tensors}
    del about["sha256"]
    write_tensors(path, tensors, {"cudiff": json.dumps(about)})
    assert load_checkpoint(path).tensors.keys() == tensors.keys()
    for strange in (3, [], {}, {"about": 3}, {"about": None}):
        write_tensors(path, tensors, {"cudiff": json.dumps(about | {"sha256": strange})})
        assert "metadata makes no sense" in error_of(path)


def test_headers_without_end(tmp_path):
    for text in (b"{" + b" " * 10**8 + b"}", b'{"a":' + b"[" * 4_000_000, b'{"__metadata__": "%b"}' % (b"a" * 2**22)):
        path = header_file(tmp_path / "a.safetensors", text)
        with at_once():
            assert len(error_of(path)) < 500
    with pytest.raises(CudiffError, match="are too many for one file"):
        write_tensors(tmp_path / "b.safetensors", {f"{i:0100d}": np.zeros(0) for i in range(30_000)}, {})
    assert not (tmp_path / "b.safetensors").exists()
    os.mkfifo(tmp_path / "pipe")
    assert "is not a file" in error_of(tmp_path / "pipe")


def test_saving_makes_no_second_copy_of_the_arrays(tmp_path):
    tensors = {f"model.{index}": np.zeros(2**20, np.float32) for index in range(8)}
    tracemalloc.start()
    write_tensors(tmp_path / "a.safetensors", tensors, {})
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**20


def test_a_part_that_is_absent(rng):
    tensors = some_tensors(rng, ("model",))
    assert part(tensors, "model").keys() == STATE.keys()
    with pytest.raises(CudiffError, match="holds no 'ema'"):
        part(tensors, "ema")


def test_latest_and_prune_see_only_checkpoints(tmp_path, rng):
    assert latest(tmp_path) is None and latest(tmp_path / "none") is None
    paths = [saved(checkpoint_path(tmp_path, step), rng) for step in (5, 20, 100, 123456789)]
    others = [tmp_path / name for name in ("mine.safetensors", "step-1.txt", "step-00000001.safetensors.bak")]
    for other in others:
        other.write_bytes(b"")
    assert latest(tmp_path) == paths[3]
    assert prune(tmp_path, 0) == []
    assert prune(tmp_path, 9) == []
    for keep, deleted in ((2, paths[:2]), (1, paths[2:3])):
        assert prune(tmp_path, keep) == deleted
        assert sorted(tmp_path.iterdir()) == sorted(paths[4 - keep :] + others)
