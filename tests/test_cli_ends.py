"""How a command ends, and what it prints, on any terminal."""

import io
import os
import signal
import subprocess
import sys

import pytest
from PIL import Image

from cudiff import cli, signals
from cudiff.cli import main
from cudiff.evaluate import Report
from cudiff.pipeline import Pipeline
from cudiff.sample_command import drawing_alone_in
from cudiff.tensorfile import require_writable
from tests.test_cli import TINY
from tests.test_evaluate import tiny_pipeline


@pytest.mark.parametrize("error, code", [
    (signals.Stopped(15), 143), (BrokenPipeError(), 141), (KeyboardInterrupt(), 130), (ValueError("x"), 2),
])
def test_exit_codes(error, code, monkeypatch, capsys):
    def fails(options):
        raise error

    monkeypatch.setattr(cli, "_info", fails)
    assert main(["info"]) == code
    if isinstance(error, KeyboardInterrupt | ValueError):
        with pytest.raises(type(error)):
            main(["info", "--debug"])


@pytest.mark.parametrize("error, line", [
    (OSError(28, "No space left on device"), "cannot write (No space left on device): make room or choose another"),
    (OSError(13, "Permission denied", "a.png"), "cannot use a.png (Permission denied): check its permissions"),
    (FileExistsError(17, "File exists", "run"), "cannot use run (File exists): choose another folder"),
    (OSError("alone"), "cannot write (alone)"), (KeyError(), "unexpected KeyError (run again with --debug"),
    (ValueError("first\nsecond"), "unexpected ValueError: first (run again with --debug"),
])
def test_what_the_system_refuses_is_one_line(error, line, monkeypatch, capsys):
    def fails(options):
        raise error

    monkeypatch.setattr(cli, "_info", fails)
    assert main(["info"]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"cudiff: {line}") and message.count("\n") == 1


def test_names_that_a_terminal_cannot_show_end_no_command(monkeypatch, tmp_path):
    """Its encoding may lack their letters; what stands for a terminal may be no text file at all."""
    monkeypatch.chdir(tmp_path)
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stderr", stream)
    assert main(["train", "--data", "Bär"]) == 2
    stream.flush()
    assert stream.buffer.getvalue().startswith(b"cudiff: no data at 'B?r'")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert main(["train", "--data", "Bär"]) == 2
    assert sys.stderr.getvalue().startswith("cudiff: no data at 'Bär'")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_mistake_is_one_where_its_line_cannot_be_written(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "cudiff", "sample", str(tmp_path / "none")], stderr=full)
    assert done.returncode == 2


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_pipeline(image_size=8, channels=1).save(tmp_path / "model.safetensors")
    return ["sample", "model.safetensors", "-n", "2", "--steps", "1", "--device", "cpu", "--out"]


@pytest.mark.parametrize("out", ["there.png", "file/a.png", "file", "x" * 300 + ".npz"])
def test_where_samples_cannot_be_written_none_are_drawn(model, out, monkeypatch, capsys, tmp_path):
    (tmp_path / "there.png").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(Pipeline, "sample", lambda *args, **options: pytest.fail("drawn"))
    assert main([*model, out]) == 2
    assert capsys.readouterr().err.startswith(f"cudiff: cannot write {out}")
    assert {path.name for path in tmp_path.iterdir()} == {"there.png", "file", "model.safetensors"}


def test_a_folder_that_another_process_draws_into_is_refused(model, monkeypatch, capsys, tmp_path):
    """At once, as long as it draws; what it has drawn stays, also where it began and ended meanwhile."""
    pytest.importorskip("fcntl")
    (tmp_path / "out").mkdir()
    with drawing_alone_in("out"):
        assert main([*model, "out"]) == 2
        assert capsys.readouterr().err == "cudiff: another process draws into out: name another folder with --out\n"
    assert main([*model, "out"]) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(before) == ["000000.png", "000001.png"]
    monkeypatch.setattr("cudiff.cli.check_options", lambda options: "")  # which had found the folder empty
    assert main([*model, "out", "-n", "1", "--seed", "3"]) == 2
    assert "out holds pictures already" in capsys.readouterr().err
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}


def test_to_ask_whether_a_file_can_be_written_leaves_what_another_process_writes(model, tmp_path):
    (tmp_path / ".a.png.tmp").write_bytes(b"half a picture")
    require_writable(tmp_path / "a.png")
    assert [path.name for path in tmp_path.glob(".*")] == [".a.png.tmp"]


def test_a_picture_that_no_step_changes_is_a_film_of_one(model, tmp_path, capsys):
    Image.new("L", (8, 8), 77).save(tmp_path / "g.png")
    assert main([*model, "a\nb.gif", "--init", "g.png", "--strength", "0"]) == 0
    assert "2 images in a\\nb.gif\n" in capsys.readouterr().out
    with Image.open(tmp_path / "a\nb.gif") as film:
        assert film.n_frames == 1


def test_a_film_shows_all_pictures_of_several_processes(model, capfd):
    """It had shown those of the first one."""
    assert main([*model, "a.gif", "-n", "3", "--steps", "1", "--processes", "2", "--device", "cpu"]) == 0
    assert "3 images in a.gif\n" in capfd.readouterr().out


def test_eval_prints_its_table(monkeypatch, capsys):
    report = Report(
        data="letters", samples=2345, real=2, test=2, seed=7, guidance=None, features="any", frechet=1.25,
        frechet_real=None, kernel=0.125, kernel_real=-0.5, precision=0.5, precision_real=None, recall=1.0,
        recall_real=0.25, class_names=("one", "two"), classifier_accuracy=0.9, found_by_class=[0.25, 0.75],
        variance_by_class=[None, None],
    )
    asked = {}
    monkeypatch.setattr("cudiff.evaluate.evaluate_pipeline", lambda *args, **options: asked.update(options) or report)
    monkeypatch.setattr(cli, "_load", lambda options: None)
    assert main(["eval", "x"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "2,345 samples against letters, seed 7" in out and "25.0%" in out and "75.0%" in out
    assert "Fréchet distance 1.250 not meaningful kernel distance 0.125 -0.5 precision 50.0% not meaningful" in out
    assert "recall 100.0% 25.0%" in out
    assert (asked["seed"], asked["batch_size"], asked["steps"], asked["guidance"]) == (0, 256, None, None)


def test_a_folder_of_any_name_is_told_on_one_line(tmp_path, capsys):
    assert main(["train", *TINY, "--steps", "1", "--folder", str(tmp_path / "a\nb")]) == 0
    out = capsys.readouterr().out
    assert f"run in {tmp_path}/a\\nb\n" in out and f"saved {tmp_path}/a\\nb/step-00000001.safetensors\n" in out


@pytest.mark.parametrize("precision, told", [("bf16", True), ("fp32", False)])
def test_training_in_bf16_on_a_cpu_is_said_to_be_slow(precision, told, tmp_path, capsys):
    words = ["--steps", "1", "--num-classes", "0", "--precision", precision, "--folder", str(tmp_path / "run")]
    assert main(["train", *TINY, *words]) == 0
    assert ("bf16 is emulated on the CPU, which is slow: --precision fp32 is faster" in capsys.readouterr().out) == told


def test_ctrl_c_raises_while_a_command_runs_and_ends_the_process_before_and_after():
    before = signal.signal(signal.SIGINT, signals._leave)
    try:
        with pytest.raises(ZeroDivisionError), signals.raising():
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
            raise ZeroDivisionError
        assert signal.getsignal(signal.SIGINT) is signals._leave
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with signals.raising():  # of a process that ignores it, or a program with a handler of its own
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
