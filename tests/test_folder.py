"""A run's folder: one process at a time, whole checkpoints found beside damaged ones, its data known, nothing lost."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import cudiff
from cudiff import checkpoint
from cudiff import folder as module
from cudiff.beginning import saved_bytes
from cudiff.checkpoint import latest, load_checkpoint
from cudiff.cli import main
from cudiff.config import Config
from cudiff.data import Dataset, load_dataset
from cudiff.errors import CudiffError
from cudiff.folder import Metrics, alone_in, check_free, check_unused, read_checkpoint
from cudiff.info import checkpoint_table
from cudiff.plot import save_npz
from cudiff.train import Trainer

ROOT = Path(__file__).resolve().parents[1]
TINY = Config(
    image_size=8, channels=1, model_channels=8, channel_mult=(1, 2), num_res_blocks=1, num_heads=2, num_classes=10,
    batch_size=8, steps=4, log_every=2, sample_every=0, save_every=2, sample_steps=2, sampler="euler", device="cpu",
)
FIRST, SECOND = "step-00000002.safetensors", "step-00000004.safetensors"


@pytest.fixture
def digits():
    return load_dataset("digits", image_size=8, count=40)


@pytest.fixture
def run(digits, tmp_path):
    """The folder of a finished run of 4 steps, with checkpoints of two of them."""
    Trainer(TINY, digits, tmp_path / "my run").run()
    return tmp_path / "my run"


class Display(list):
    update, message = (lambda self, metrics: None), list.append


class Fails:
    """A display that ends the run."""

    def __init__(self, at):
        self.at = at

    def message(self, text):
        pass

    def update(self, metrics):
        if metrics["step"] == self.at:
            raise ZeroDivisionError


def refused(*arguments, **options):
    with pytest.raises(CudiffError) as error:
        Trainer(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# --- one process -----------------------------------------------------------------------------------------------------


@pytest.fixture
def live(tmp_path):
    """A process that trains in live/, and its folder."""
    words = ["--image-size", "8", "--model-channels", "8", "--num-head-channels", "8", "--batch-size", "8", "--steps",
             "1000000", "--log-every", "2", "--sample-every", "0", "--save-every", "3", "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "cudiff", "train", *words, "--folder", str(tmp_path / "live")],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while latest(tmp_path / "live") is None and time.monotonic() < deadline:
        time.sleep(0.05)
    yield process, tmp_path / "live"
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_in_a_live_run_s_folder_every_way_in_names_its_process(live, digits, capsys, tmp_path):
    pytest.importorskip("fcntl")
    process, folder = live
    for words in (["--folder", folder], ["--resume", folder], ["--resume", latest(folder)]):
        assert main(["train", *map(str, words), "--image-size", "8", "--num-head-channels", "8"]) == 2
        line = capsys.readouterr().err
        assert f"another process trains in {folder} (process {process.pid} on " in line and "wait for its end" in line
        assert "delete" not in line and "damaged" not in line
    assert f"process {process.pid}" in refused(TINY, digits, folder)
    process.kill()
    process.wait()
    check_unused(folder)  # the lock ends with the process, though its file stays
    with pytest.raises(CudiffError, match=r"already holds a run, with step-\d+\.safetensors: go on with"):
        check_free(folder)


def test_a_second_run_that_starts_at_the_same_time_stops(digits, tmp_path):
    pytest.importorskip("fcntl")
    trainer = Trainer(TINY, digits, tmp_path / "run")
    with alone_in(trainer.folder), pytest.raises(CudiffError, match=rf"another process .* \(process {os.getpid()} on"):
        trainer.run()
    trainer.run()
    assert trainer.save_path.exists()


def test_a_trainer_made_before_another_ran_in_its_folder_loses_nothing(digits, tmp_path):
    first, second = (Trainer(TINY.replace(seed=seed), digits, tmp_path / "run") for seed in (0, 1))
    first.run()
    before = content(tmp_path / "run")
    with pytest.raises(CudiffError, match=rf"already holds a run, with {SECOND}: go on with .* or choose another --fo"):
        second.run()
    more = TINY.replace(steps=8)
    first, second = (Trainer(more, digits, tmp_path / "run", load_checkpoint(tmp_path / "run")) for _ in range(2))
    assert content(tmp_path / "run") == before
    first.run()
    before = content(tmp_path / "run")
    with pytest.raises(CudiffError, match=r"holds a newer checkpoint: go on with .*step-00000008\.safetensors, or ch"):
        second.run()
    assert content(tmp_path / "run") == before


def test_a_run_does_not_go_on_in_the_folder_of_another(run, digits, tmp_path):
    """`keep` would delete the other's checkpoints, and its metrics would lose lines."""
    config = TINY.replace(steps=6, save_every=1, keep=2, seed=1)
    Trainer(config, digits, tmp_path / "mine").run()
    start, before = load_checkpoint(tmp_path / "mine"), content(run)
    more = config.replace(steps=8)
    line = f"{run} already holds a run, with {SECOND}: go on with cudiff train --resume '{run}', or choose another"
    assert line in refused(more, digits, run, start)
    early = Trainer(more, digits, tmp_path / "later", start)
    run.rename(tmp_path / "later")
    with pytest.raises(CudiffError, match=f"later already holds a run, with {SECOND}: "):
        early.run()
    assert content(tmp_path / "later") == before
    (tmp_path / "mine" / "step-00000006.safetensors").rename(tmp_path / "mine" / "best")  # its own, renamed
    Trainer(more, digits, tmp_path / "mine", start).run()


def test_a_stopped_trainer_runs_on_in_its_folder(digits, tmp_path):
    trainer = Trainer(TINY, digits, tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        trainer.run(Fails(at=2))
    assert trainer.step == 2
    trainer.run()
    assert load_checkpoint(trainer.folder).counters["step"] == 4
    assert [line["step"] for line in trainer.metrics.lines()] == [2, 4]


def test_a_lock_that_does_not_say_whose_it_is_still_locks(tmp_path):
    pytest.importorskip("fcntl")
    with alone_in(tmp_path):
        for text in ("", "[]", '{"pid": "x", "host": 3}'):
            (tmp_path / module.LOCK).write_text(text)
            with pytest.raises(CudiffError, match=r"another process trains in [^(]*: wait"):
                check_unused(tmp_path)


def test_a_run_that_has_just_begun_is_live_though_it_holds_no_checkpoint(tmp_path, capsys):
    pytest.importorskip("fcntl")
    with alone_in(tmp_path):
        assert main(["train", "--resume", str(tmp_path)]) == 2
    assert f"another process trains in {tmp_path} (process {os.getpid()} on " in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").touch()
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert "ended before it saved a checkpoint: begin again, in another folder" in capsys.readouterr().err


def test_processes_that_look_at_the_same_time_do_not_refuse_each_other(tmp_path, monkeypatch):
    """As those of one run do, before they meet."""
    fcntl = pytest.importorskip("fcntl")
    with alone_in(tmp_path):
        pass
    looked, flock = [], fcntl.flock

    def beside(*given):
        flock(*given)
        looked.append(given)
        if len(looked) == 1:
            check_unused(tmp_path)

    monkeypatch.setattr(fcntl, "flock", beside)
    check_unused(tmp_path)
    assert len(looked) == 2


def test_a_system_without_locks_trains(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", lambda *args: (_ for _ in ()).throw(OSError("no locks")))
    with alone_in(tmp_path):
        check_unused(tmp_path)


def test_metrics_without_a_checkpoint_are_not_to_be_deleted(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    check_free(tmp_path)  # the disk had no room for a line
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(CudiffError, match=r"the metrics.jsonl of a run that left no checkpoint: choose another --fold"):
        check_free(tmp_path)


# --- damaged checkpoints ---------------------------------------------------------------------------------------------


DAMAGE = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_the_newest_is_damaged_and_the_one_before_goes_on(damage, run, digits, capsys, tmp_path):
    (run / SECOND).write_bytes(DAMAGE[damage]((run / SECOND).read_bytes()))
    before = content(run)
    for words in (["train", "--resume"], ["sample"], ["eval"], ["info"]):
        assert main([*words, str(run)]) == 2
        line = capsys.readouterr().err
        assert f"{run / SECOND} is " in line and line.count("\n") == 1
        assert line.endswith(f"; {FIRST} before it is whole: {'go on with --resume' if 'train' in words else 'give'} "
                             f"'{run / FIRST}'\n")
    with pytest.raises(CudiffError, match="before it is whole"):
        cudiff.load(run)
    assert content(run) == before

    whole, display = (run / FIRST).read_bytes(), Display()
    Trainer(TINY.replace(save_every=1, keep=2), digits, run, load_checkpoint(run / FIRST)).run(display)
    assert display[0] == f"{SECOND} is damaged and named {SECOND}.damaged from now on"
    assert (run / f"{SECOND}.damaged").read_bytes() == before[SECOND] and whole == before[FIRST]
    assert load_checkpoint(run).counters["step"] == 4 and latest(run).name == SECOND
    assert [line["step"] for line in Metrics(run).lines()] == [2, 4]


def test_a_damaged_file_never_takes_the_name_of_another(tmp_path):
    for index in range(3):
        (tmp_path / FIRST).write_bytes(bytes([index]))
        module.set_aside(tmp_path / FIRST, "damaged")
    assert [(tmp_path / f"{FIRST}.damaged{end}").read_bytes()[0] for end in ("", "-2", "-3")] == [0, 1, 2]


def test_a_copy_under_a_newer_name_makes_way_for_its_own_step(run, digits):
    """It was copied over the newest, or named so by hand: a run goes on from what it holds, and it is kept."""
    copy = (run / FIRST).read_bytes()
    (run / "step-20.safetensors").write_bytes(copy)
    message = refused(TINY.replace(steps=9), digits, run, load_checkpoint(run))
    assert f"holds a newer checkpoint: go on with cudiff train --resume '{run / SECOND}', or choose another" in message
    (run / SECOND).write_bytes(copy)
    display = Display()
    Trainer(TINY.replace(save_every=1, keep=1), digits, run, load_checkpoint(run)).run(display)
    assert display[:2] == [f"{name} is of step 2 and named {name}.of-step-2 from now on"
                           for name in ("step-20.safetensors", SECOND)]
    assert (run / f"{SECOND}.of-step-2").read_bytes() == (run / "step-20.safetensors.of-step-2").read_bytes() == copy
    assert latest(run).name == SECOND and load_checkpoint(run).counters["step"] == 4


def test_only_damage_is_gone_back_behind(run, digits):
    before = content(run)
    message = refused(TINY.replace(steps=9), digits, run, load_checkpoint(run / FIRST))
    assert f"holds a newer checkpoint: go on with cudiff train --resume '{run / SECOND}', or choose another" in message
    assert content(run) == before


def test_where_none_is_whole_the_newest_is_named_alone(run):
    for name in (FIRST, SECOND):
        (run / name).write_bytes(b"")
    with pytest.raises(CudiffError, match=f"{SECOND} is no safetensors file") as error:
        read_checkpoint(run)
    assert FIRST not in str(error.value)


# --- what cannot be written ------------------------------------------------------------------------------------------


def test_metrics_that_cannot_be_written_end_the_run_after_a_save(digits, tmp_path, monkeypatch):
    trainer = Trainer(TINY.replace(steps=9, save_every=0), digits, tmp_path / "my run")
    step = trainer.train_step

    def in_the_way():
        if trainer.step == 3:
            trainer.metrics.path.unlink()
            trainer.metrics.path.mkdir()
        return step()

    trainer._step = in_the_way
    line = rf"cannot use {trainer.metrics.path} \(no regular file\): .* cudiff train --resume '{trainer.folder}'"
    with pytest.raises(CudiffError, match=line):
        trainer.run()
    assert load_checkpoint(trainer.folder).counters["step"] == 4
    with pytest.raises(CudiffError, match=r"metrics.jsonl \(no regular file\): make it a file that can be written"):
        Trainer(TINY.replace(steps=9), digits, trainer.folder, load_checkpoint(trainer.folder)).run()
    trainer.metrics.path.rmdir()
    trainer.metrics.path.symlink_to("/dev/full")  # which is read for ever
    with pytest.raises(CudiffError, match=r"metrics.jsonl \(no regular file\): make it a file that can be written"):
        Trainer(TINY.replace(steps=9), digits, trainer.folder, load_checkpoint(trainer.folder)).run()
    trainer.metrics.path.unlink()
    Trainer(TINY.replace(steps=6), digits, trainer.folder, load_checkpoint(trainer.folder)).run()
    assert load_checkpoint(trainer.folder).counters["step"] == 6


@pytest.mark.parametrize("name", ["loss.png", "samples-00000002.png"])
def test_pictures_that_cannot_be_written_end_no_run(name, digits, tmp_path):
    (tmp_path / "run" / name).mkdir(parents=True)
    pytest.importorskip("matplotlib" if name == "loss.png" else "PIL")
    display = Display()
    Trainer(TINY.replace(sample_every=2, samples=4), digits, tmp_path / "run").run(display)
    assert load_checkpoint(tmp_path / "run").counters["step"] == 4
    assert any(name in text for text in display)


# --- the data --------------------------------------------------------------------------------------------------------


def changed(data, how):
    images, labels = data.images.copy(), data.labels.copy()
    if how == "replaced":
        images[-1] = 255 - images[-1]
    if how == "halved":
        return data.subset(range(20))
    if how == "added":
        return data.subset([*range(40), 0])
    if how == "relabelled":
        labels[3] = (labels[3] + 1) % 10
    if how == "classes":
        return Dataset(images, np.minimum(labels, 4), 5, "digits")
    if how == "unlabelled":
        return Dataset(images, name="digits")
    return Dataset(images, labels, 10, data.name)


@pytest.mark.parametrize("how, words", [
    ("replaced", "the pixels differ"), ("halved", "40 images are now 20"), ("added", "40 images are now 41"),
    ("relabelled", "the labels differ"), ("classes", "10 classes are now 5"), ("unlabelled", "10 classes are now 0"),
])
def test_changed_data_is_told(how, words, run, digits):
    other, more = changed(digits, how), TINY.replace(steps=6)
    message = refused(more, other, run, load_checkpoint(run))
    assert f"not the data that the run was trained on ({words}): name that with --data" in message
    if other.labels is None:
        assert "its model takes labels of 10 classes" in message
        assert refused(more, other, run, load_checkpoint(run), data_changed=True) == message
        return
    assert "--data-changed (data_changed=True) accepts this" in message
    display = Display()
    Trainer(more, other, run, load_checkpoint(run), data_changed=True).run(display)
    assert display[0] == f"the data has changed: {words}"
    Trainer(more.replace(steps=7), other, run, load_checkpoint(run)).run()  # it is the run's data from now on


def test_a_class_more_than_the_model_knows_is_told_what_works(run, digits):
    labels = np.append(digits.labels[:-1], 10)
    more, other = TINY.replace(steps=6), Dataset(digits.images, labels, 11, "digits")
    for accepted in (False, True):
        message = refused(more, other, run, load_checkpoint(run), data_changed=accepted)
        assert "(10 classes are now 11)" in message and "--data-changed" not in message
        assert "choose these with --only-classes, or begin a new run with its weights, by --init" in message
    chosen = other.only(range(10))
    assert Trainer(more, chosen, run, load_checkpoint(run), data_changed=True).run()["step"] == 6


def test_larger_images_are_told(run):
    larger = load_dataset("digits", image_size=16, count=40)
    message = refused(TINY.replace(image_size=0, steps=6), larger, run, load_checkpoint(run))
    assert "their size 8x8x1 is now 16x16x1" in message


def test_the_same_data_by_another_name_goes_on(run, digits, tmp_path):
    Trainer(TINY.replace(steps=6), dataclasses.replace(digits, name="moved"), run, load_checkpoint(run)).run()
    assert load_checkpoint(run).counters["step"] == 6


def test_another_data_set_is_named(run, digits):
    other = Dataset(digits.images[:30], digits.labels[:30], 10, "others")
    message = refused(TINY.replace(steps=6), other, run, load_checkpoint(run))
    assert "(digits is now others; 40 images are now 30)" in message


def test_a_checkpoint_that_does_not_know_its_data_goes_on_with_a_notice(run, digits):
    old = load_checkpoint(run)
    del old.counters["data"]
    display = Display()
    Trainer(TINY.replace(steps=6), changed(digits, "replaced"), run, old).run(display)
    assert "does not say which data it was trained on" in display[0]


def test_weights_alone_train_on_any_data_without_a_word(run, digits, tmp_path):
    cudiff.load(run, "cpu").save(tmp_path / "weights.safetensors")
    display, start = Display(), load_checkpoint(tmp_path / "weights.safetensors")
    Trainer(TINY, changed(digits, "replaced"), tmp_path / "tuned", start).run(display)
    assert not any("data" in text for text in display)


def test_the_command_line_never_draws_digits_for_a_run_of_other_data(tmp_path, capsys, rng):
    data = Dataset(rng.integers(0, 256, (40, 8, 8, 1), np.uint8), np.arange(40) % 10, 10, "mine")
    Trainer(TINY, data, tmp_path / "run").run()
    before = content(tmp_path / "run")
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "6"]) == 2
    line = capsys.readouterr().err
    assert "(mine is now digits; 40 images are now 4,000): name that with --data, or resume in Python with" in line
    assert content(tmp_path / "run") == before
    save_npz(tmp_path / "moved.npz", data.images, data.labels)
    words = ["train", "--resume", str(tmp_path / "run")]
    assert main([*words, "--steps", "6", "--data", str(tmp_path / "moved.npz")]) == 0
    assert main([*words, "--steps", "8", "--data", "digits", "--data-changed"]) == 0
    assert "the data has changed: moved is now digits; 40 images are now 4,000" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    line = rf"cannot write in {tmp_path} \(.+\): make it writable, with room, or choose another --folder"

    def full(file, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(module.os, "write", full)
        with pytest.raises(CudiffError, match=line), alone_in(tmp_path):
            pass
    with alone_in(tmp_path):  # the first has let go of it
        pass
    (tmp_path / module.LOCK).unlink()
    (tmp_path / module.LOCK).mkdir()  # no file can be opened there, as in a read-only folder
    with pytest.raises(CudiffError, match=line), alone_in(tmp_path):
        pass


@pytest.mark.parametrize("place, why", [("file", "File exists"), ("file/run", "Not a directory")])
def test_a_folder_that_is_a_file_is_told(place, why, digits, tmp_path):
    (tmp_path / "file").touch()
    message = refused(TINY, digits, tmp_path / place)
    assert message == f"cannot use {tmp_path / place} as a folder ({why}): choose another --folder"


def test_a_disk_without_room_for_a_checkpoint_is_told_before_the_first_step(run, digits, monkeypatch):
    trainer = Trainer(TINY.replace(steps=6), digits, run, load_checkpoint(run))
    disk, size = shutil.disk_usage(run), saved_bytes(trainer.net, trainer.optimizer)
    assert 0.8 < size / (run / SECOND).stat().st_size < 1
    before = content(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=size - 1))
    with pytest.raises(CudiffError) as error:
        trainer.run()
    assert str(error.value) == (f"a checkpoint of this run takes {size:,} bytes, and {run} has room for {size - 1:,}: "
                                "make room, or choose another --folder")
    assert trainer.step == 4 and content(run) | {module.LOCK: b""} == before | {module.LOCK: b""}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk._replace(free=size))
    assert trainer.run()["step"] == 6


@pytest.mark.parametrize("read", [load_checkpoint, read_checkpoint, checkpoint_table])
def test_a_checkpoint_that_its_run_prunes_meanwhile_is_looked_for_again(read, run, monkeypatch):
    """It is listed, and deleted before it is opened, as newer ones came."""
    real = checkpoint.is_unet_cu

    def pruned(path):
        if (run / SECOND).exists():
            (run / FIRST).unlink()
            (run / SECOND).rename(run / "step-00000006.safetensors")
        return real(path)

    monkeypatch.setattr(checkpoint, "is_unet_cu", pruned)
    read(run)
    assert not (run / SECOND).exists()
    with pytest.raises(CudiffError, match=r"cannot read .*No such file"):
        load_checkpoint(run / SECOND)


def test_the_lock_may_be_taken_by_whom_the_umask_lets(tmp_path):
    before = os.umask(0)
    try:
        with alone_in(tmp_path):
            (lock,) = tmp_path.iterdir()
            assert lock.stat().st_mode & 0o777 == 0o666
    finally:
        os.umask(before)
