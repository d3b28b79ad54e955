"""A batch that a CPU's memory cannot hold is told before the system ends the process for it, without a word."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from cudiff.data import load_dataset
from cudiff.errors import CudiffError
from cudiff.train import Trainer
from tests.test_train import TINY, assert_same_state

LARGE = TINY.replace(image_size=32, model_channels=16, batch_size=64, steps=2, num_classes=0)


@pytest.fixture(scope="module")
def large():
    return load_dataset("digits", image_size=32, count=70)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell a peak of memory")
@pytest.mark.parametrize("free, fits", [(120, "16"), (60, "8"), (600, None)])
def test_a_batch_that_the_system_would_kill_for_is_told_before_the_first_step(free, fits, tmp_path):
    """64 images take about 0.35 GiB, told as 0.3 or 0.4. In a process of its own: what tests before have freed would
    hide what is taken."""
    code = f"""
import pathlib
from cudiff import forecast, train
from cudiff.data import load_dataset
from cudiff.errors import CudiffError
from tests.test_fits import LARGE
forecast.memory_available = lambda: {free} * 2**20
trainer = train.Trainer(LARGE, load_dataset("digits", image_size=32, count=70), pathlib.Path({str(tmp_path)!r}) / "run")
attempt, tried = trainer._try, []
trainer._try = lambda size: (tried.append(size), attempt(size))
try:
    trainer.forecast()
except train.CudiffError as error:
    print(error)
print(max(tried))
"""
    out = subprocess.check_output([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[1], text=True)
    *told, largest = out.splitlines()
    assert int(largest) <= 16
    if fits is None:
        assert told == []
    else:
        line = (r"batch size 64 would take about 0\.[34] GiB of memory, and 0\.1 GiB are free: "
                r"--batch-size (\d+) --accumulate (\d+) fits")
        found = re.fullmatch(line, told[0])
        assert found and found.groups() == (fits, str(64 // int(fits))), told


def test_a_check_of_memory_leaves_the_run_as_it_is(large, tmp_path, monkeypatch):
    small = LARGE.replace(dropout=0.2, batch_size=8)
    plain = Trainer(small, large, tmp_path / "plain")
    plain.run()
    checked, tried = Trainer(small, large, tmp_path / "checked"), []
    attempt = checked._try
    checked._try = lambda size: (tried.append(size), attempt(size))
    checked.run()
    assert_same_state(plain, checked)
    assert tried == [1] or not Path("/proc/self/clear_refs").exists()


def test_a_batch_far_too_large_is_refused_after_a_few_images(large, tmp_path, monkeypatch):
    """By 32 images it is clear; to go on until a sixteenth of the memory is taken would last minutes."""
    trainer = Trainer(LARGE.replace(batch_size=100_000), large, tmp_path / "run")
    tried: list[int] = []
    monkeypatch.setattr("cudiff.forecast.memory_available", lambda: 2**34 + 2**24)  # rounding may take an image or two
    monkeypatch.setattr("cudiff.forecast.resident", lambda: 2**27)

    def peak_of(run):
        run()
        return 2**27 + 2**21 * tried[-1]

    monkeypatch.setattr("cudiff.forecast.peak_of", peak_of)
    trainer._try = tried.append
    with pytest.raises(CudiffError, match=r"batch size 100000 would take about 195\.3 GiB .* --batch-size 8192 fits"):
        trainer.forecast()
    assert tried == [1, 2, 4, 8, 16, 32]


def test_one_peak_that_is_off_hides_no_batch_that_does_not_fit(large, tmp_path, monkeypatch):
    """As seen on a CPU: 397 MB an image by the last two peaks, where an image takes 519."""
    trainer = Trainer(LARGE.replace(batch_size=48), large, tmp_path / "run")
    tried: list[int] = []
    peaks = {1: 522, 2: 1038, 4: 2567, 8: 4155, 16: 8283}
    monkeypatch.setattr("cudiff.forecast.memory_available", lambda: 21_000 << 20)
    monkeypatch.setattr("cudiff.forecast.resident", lambda: 0)
    monkeypatch.setattr("cudiff.forecast.peak_of", lambda run: (run(), peaks[tried[-1]] << 20)[1])
    trainer._try = tried.append
    with pytest.raises(CudiffError, match=r"would take about 24\.\d GiB of memory, and 20\.5 GiB are free: .* 32"):
        trainer.forecast()
    assert tried == [1, 2, 4, 8]


def test_a_check_that_ran_out_of_memory_leaves_the_generator_as_it_was(large, tmp_path, monkeypatch):
    trainer = Trainer(LARGE, large, tmp_path / "run")
    before = trainer.generator.state()

    def attempt(size):
        trainer.generator.advance()
        raise MemoryError

    trainer._try = attempt
    trainer.forecast()
    assert trainer.generator.state() == before


@pytest.mark.parametrize("batch_size, start, peak, expected", [
    (3, 100, 10, []), (4, 100, 10, [1]), (4, None, 10, []), (64, 100, 15, [1]),
    (64, 100, 16, [1, 2, 4, 8]),  # exactly as much as is free: not known before 8, and not refused
    (64, 100, None, [1]),
])
def test_how_far_a_batch_is_tried(large, tmp_path, monkeypatch, batch_size, start, peak, expected):
    """With 1,024 bytes free of which an image takes `peak`: one that leaves room for all suffices."""
    trainer, tried = Trainer(LARGE.replace(batch_size=batch_size), large, tmp_path / "run"), []
    monkeypatch.setattr("cudiff.forecast.memory_available", lambda: 1024)
    monkeypatch.setattr("cudiff.forecast.resident", lambda: start)
    trainer._try = tried.append

    def peak_of(run):
        run()
        return None if peak is None else start + peak * tried[-1]

    monkeypatch.setattr("cudiff.forecast.peak_of", peak_of)
    trainer.forecast()
    assert tried == expected
