"""The command line as a process: signals while it starts, runs, samples and trains; a reader that closes the pipe."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from cudiff import signals
from cudiff.checkpoint import latest, load_checkpoint
from cudiff.cli import main
from cudiff.config import Config
from cudiff.data import digits
from cudiff.train import Trainer

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
TINY = [
    "--image-size", "8", "--model-channels", "8", "--num-head-channels", "0", "--num-heads", "2", "--batch-size", "8",
    "--log-every", "2", "--sample-every", "0", "--save-every", "0", "--device", "cpu", "--folder", "run",
]


def defaults():
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # the tests may run under nohup
        signal.signal(number, signal.SIG_DFL)


def start(*words, cwd, program=("-m", "cudiff")):
    return subprocess.Popen(
        [sys.executable, *program, *words], cwd=cwd, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=defaults,
    )


SITE = """
import signal, sys

class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder)
"""


@pytest.mark.parametrize("module", [
    "cudiff.nn", "numpy", "numpy.linalg", "numpy.random", "ml_dtypes", "cudiff.ops", "cudiff.tensor", "cudiff.__main__",
    "cudiff.cli", "rich.console", "argparse", "cudiff.config", "cudiff.train", "cudiff.display", "PIL.Image",
])
def test_ctrl_c_while_modules_are_imported_is_one_line(module, tmp_path):
    """The signal comes at the import of `module`, by a finder that sitecustomize puts before Python's own."""
    (tmp_path / "sitecustomize.py").write_text(SITE.format(module=module))
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "cudiff", "train", *TINY], cwd=tmp_path, env=environment, text=True,
        capture_output=True, preexec_fn=defaults, timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "cudiff: interrupted\n")


def test_a_program_that_imports_cudiff_keeps_its_ctrl_c():
    code = "import signal, cudiff; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, check=True, preexec_fn=defaults)


@pytest.mark.parametrize("words", [["sample"], ["eval"]], ids=lambda words: words[0])
def test_sampling_that_is_interrupted_leaves_no_file(words, tmp_path, monkeypatch, capsys):
    def interrupted(file, *details, **options):
        file.write(b"half a file")
        signal.raise_signal(signal.SIGINT)

    assert main(["train", *TINY, "--steps", "1", "--folder", str(tmp_path / "run")]) == 0
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("PIL.Image.Image.save", lambda image, file, *details: interrupted(file))
    monkeypatch.setattr("cudiff.evaluate._train", lambda *details: signal.raise_signal(signal.SIGINT))
    before = sorted(tmp_path.rglob("*"))
    options = {"sample": ["--out", str(tmp_path / "grid.png")], "eval": []}[words[0]]
    capsys.readouterr()
    assert main([*words, str(tmp_path / "run"), "-n", "4", "--steps", "2", "--device", "cpu", *options]) == 130
    assert capsys.readouterr().err == "cudiff: interrupted\n"
    assert sorted(tmp_path.rglob("*")) == before


def trained_a_little(process, folder):
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 60
    while not metrics.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_training_after_a_save(tmp_path, number, code):
    process = start("train", *TINY, "--steps", "100000", cwd=tmp_path)
    trained_a_little(process, tmp_path / "run")
    process.send_signal(number)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (code, "")
    step = load_checkpoint(latest(tmp_path / "run")).counters["step"]
    assert f"stopped at step {step} and saved: go on with cudiff train --resume run" in out


@pytest.mark.parametrize("seconds, told", [(0.0, False), (10.0, True)])
def test_a_signal_in_a_long_step_is_answered_at_once(tmp_path, monkeypatch, seconds, told):
    """The clock says what the first two steps took; the signal comes in the third."""
    config = Config(image_size=8, channels=1, model_channels=8, num_heads=2, num_head_channels=0, batch_size=4, steps=9,
                    sample_every=0, device="cpu")
    trainer, step, now, lines = Trainer(config, digits(20, 8), tmp_path), Trainer._step_or_explain, [0.0], []

    def stepped(trainer):
        now[0] += seconds
        if trainer.step == 2:
            signal.raise_signal(signal.SIGINT)
            lines.append("the step goes on")
        step(trainer)

    monkeypatch.setattr(Trainer, "_step_or_explain", stepped)
    monkeypatch.setattr("cudiff.pace.time", SimpleNamespace(perf_counter=lambda: now[0]))
    trainer.run(SimpleNamespace(message=lines.append, update=lambda metrics: None))
    at = lines.index("the step goes on")
    assert (lines[at - 1] == "stops after this step and saves; a second signal ends it at once, without") == told
    assert trainer.step == 3 and lines[-1].startswith("stopped at step 3 and saved")


def test_sigterm_before_training_ends_it_as_the_system_does(tmp_path):
    process = start("train", "--help", cwd=tmp_path, program=("-c", "import cudiff.cli, time; print(1, flush=True); "
                                                               "time.sleep(60)"))
    process.stdout.readline()
    process.terminate()
    assert (process.communicate(timeout=60)[1], process.returncode) == ("", -signal.SIGTERM)


def test_the_first_signal_is_noted_and_the_second_raises():
    with pytest.raises(KeyboardInterrupt), signals.noted() as received:
        signal.raise_signal(signal.SIGINT)
        assert received == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)


def test_what_the_process_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.noted() as received:
            signal.raise_signal(signal.SIGHUP)
        assert received == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_closed_pipe_leaves_no_traceback(tmp_path):
    process = start("info", cwd=tmp_path)
    process.stdout.close()
    assert (process.stderr.read(), process.wait(timeout=60)) == ("", 141)


def test_a_command_whose_output_was_read_in_part_ends_quietly(tmp_path):
    process = subprocess.run(
        f"{sys.executable} -m cudiff info | head -1", shell=True, cwd=tmp_path, env=ENVIRONMENT, text=True,
        capture_output=True, timeout=60,
    )
    assert process.stderr == "" and "cudiff" in process.stdout


def test_what_stopped_it_is_said():
    assert str(signals.Stopped(15)) == "stopped by signal 15" and signals.Stopped(15).number == 15


def test_a_run_goes_on_where_its_output_is_closed(tmp_path):
    process = start("train", *TINY, "--steps", "30", "--log-every", "1", cwd=tmp_path)
    assert any(line.startswith("step ") for line in process.stdout)
    process.stdout.close()
    process.wait(timeout=60)
    assert load_checkpoint(latest(tmp_path / "run")).counters["step"] == 30


def test_python_m_cudiff_and_mistakes_on_stderr(tmp_path):
    process = start("train", "--data", "none", cwd=tmp_path)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert error.startswith("cudiff: no data at 'none': give digits, ") and error.count("\n") == 1
