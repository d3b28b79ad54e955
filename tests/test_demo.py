"""The demo in miniature: what it leaves behind and what it says."""

import signal
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from cudiff import demo
from cudiff.checkpoint import latest
from cudiff.config import PRESETS
from cudiff.data import load_dataset
from cudiff.folder import alone_in
from cudiff.signals import Stopped


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A demo of four steps on 64 digits; the rest is as in the real one."""
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path / "cache"))
    preset = PRESETS["digits"].replace(steps=4, model_channels=8, num_head_channels=8, batch_size=8, sample_steps=2)
    monkeypatch.setitem(demo.PRESETS, "digits", preset)
    monkeypatch.setattr("cudiff.demo.SAMPLES", 64)
    monkeypatch.setattr("cudiff.demo.load_dataset", lambda spec, part="train": load_dataset(spec, part=part, count=64))
    monkeypatch.setattr("cudiff.evaluate.LEAST_STEPS", 2)
    monkeypatch.setattr("cudiff.evaluate.EPOCHS", 0)


def test_the_demo_leaves_its_pictures(small, tmp_path, capsys):
    result = demo.demo(tmp_path / "demo", device="cpu", console=Console())
    out = capsys.readouterr().out
    assert 0 <= result.share <= 1 and result.guidance == PRESETS["digits"].guidance
    assert f"{result.share:.1%} of 64 samples are taken for the class asked for, at guidance" in out
    with Image.open(tmp_path / "demo" / "samples.png") as picture:
        assert picture.size[0] == picture.size[1] >= 8 * 16
    with Image.open(tmp_path / "demo" / "denoising.gif") as picture:
        assert picture.n_frames == 3
    assert latest(tmp_path / "demo") is not None
    assert not any(name in out and not (tmp_path / "demo" / name).exists() for name in ("loss.png", "denoising.gif"))


def test_without_matplotlib_only_what_was_written_is_announced(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    demo.demo(tmp_path / "demo", device="cpu", console=Console())
    out = capsys.readouterr().out
    assert "samples.png, denoising.gif; " in out and "loss.png" not in out and "cudiff[plots]" in out


def test_a_demo_stopped_by_ctrl_c_ends_there(small, tmp_path, monkeypatch, capsys):
    train_step = demo.Trainer.train_step

    def interrupted(trainer):
        signal.raise_signal(signal.SIGINT)
        return train_step(trainer)

    monkeypatch.setattr(demo.Trainer, "train_step", interrupted)
    with pytest.raises(Stopped) as stopped:
        demo.demo(tmp_path / "demo", device="cpu", console=Console())
    assert stopped.value.number == signal.SIGINT
    assert "stopped at step 1 and saved" in capsys.readouterr().out
    assert latest(tmp_path / "demo") is not None and not (tmp_path / "demo" / "denoising.gif").exists()


def test_a_demo_in_the_folder_of_a_run_goes_beside_it(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    assert demo.free_folder(Path(".")) == Path(".")
    Path("metrics.jsonl").write_text("{}")
    assert demo.free_folder(Path(".")) == demo.free_folder(Path("..") / "run") == tmp_path / "run-2"


def test_an_earlier_demo_is_kept(tmp_path):
    assert demo.free_folder(tmp_path / "demo") == tmp_path / "demo"
    for name in ("demo", "demo-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("{}")
    assert demo.free_folder(tmp_path / "demo") == tmp_path / "demo-3"
    (tmp_path / "demo-3").mkdir()
    with alone_in(tmp_path / "demo-3"):
        assert demo.free_folder(tmp_path / "demo") == tmp_path / "demo-4"
