"""What a run says of its time where no line of metrics comes for long."""

import signal
from types import SimpleNamespace

import pytest

import cudiff
from cudiff.diffusion.euler import Euler
from cudiff.pace import Pace, duration
from cudiff.train import VALIDATION_DRAWS, Trainer
from tests.test_train import TINY

DIGITS = cudiff.load_dataset("digits", image_size=8, count=20)


def test_the_first_step_is_told_with_an_estimate_and_then_a_line_a_minute(tmp_path, monkeypatch):
    class Display(list):
        update, message = (lambda self, metrics: self.append(metrics["step"])), list.append

    display = Display()
    trainer = Trainer(TINY.replace(steps=5000, log_every=2500), DIGITS, tmp_path / "run")
    now, step = [1000.0], trainer.train_step
    monkeypatch.setattr("cudiff.train.time.perf_counter", lambda: now[0])

    def slow():
        now[0] += 29
        trainer.step = 4995 if trainer.step == 4 else trainer.step
        return step()

    trainer._step = slow
    trainer.run(display)
    assert display[:2] == ["first step 29 s; about 40.3 h left", "step 4, each 29 s; about 40.2 h left"]
    assert display[-1] == 5000 or "no loss curve" in display[-1]


def test_a_signal_ends_a_preview_after_its_step(tmp_path, monkeypatch):
    """A preview on a CPU may take an hour."""
    class Display(list):
        update, message = (lambda self, metrics: None), list.append

    display, steps, step = Display(), [], Euler.step

    def signalled(self, *args):
        steps.append(1)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGTERM)
        return step(self, *args)

    monkeypatch.setattr(Euler, "step", signalled)
    config = TINY.replace(steps=2, sampler="euler", sample_steps=50, sample_every=2, samples=4)
    trainer = Trainer(config, DIGITS, tmp_path / "run")
    trainer.run(display)
    assert len(steps) == 3 and trainer.stopped_by == signal.SIGTERM and trainer.save_path.exists()
    assert "no preview of step 2: a signal came" in display and not list(trainer.folder.glob("samples-*"))


@pytest.mark.parametrize("seconds, text", [
    (0.00412, "4.1 ms"), (0.9996, "999.6 ms"), (1.04, "1.0 s"), (29.4, "29 s"), (89.0, "89 s"), (90.0, "1.5 min"),
    (5400, "1.5 h"), (0, "0.0 ms"),
])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("cudiff.pace.time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def paced(lines, **options):
    return Pace(TINY.replace(**options), "cpu", SimpleNamespace(message=lines.append), 0, 0.0)


def test_a_long_preview_says_how_far_it_is(clock):
    pace = paced(lines := [], sample_steps=50, samples=10, batch_size=4)
    beats = []
    stepped = pace.previewing(lambda: beats.append(1))
    for step in range(20):
        stepped(step)
        clock[0] += 6
    assert lines == ["draws a preview, step 3 of 150; about 9.8 min left for it",
                     "draws a preview, step 14 of 150; about 12.6 min left for it"]
    assert len(beats) == 20 and Pace(TINY, "cuda", None, 0, 0.0).previewing(beats.clear) is None


def test_previews_and_validation_go_on_as_the_other_processes_are_told(tmp_path):
    """Process 0 alone draws and validates, and the others wait for longer than a step may take."""
    beats = []
    config = TINY.replace(steps=2, sample_steps=3, samples=4, batch_size=4, validation=8, sample_every=2)
    trainer = Trainer(config, DIGITS, tmp_path / "run")
    trainer.group = SimpleNamespace(beat=lambda: beats.append(1))
    trainer.validation_loss(trainer.held_out)
    assert len(beats) == 2 * VALIDATION_DRAWS
    beats.clear()
    trainer.save_preview()
    assert len(beats) == 1


def test_a_limit_of_minutes_is_what_is_left(clock):
    pace = paced(lines := [], steps=0, minutes=2.0)
    clock[0] += 20
    pace.stepped(1)
    assert lines == ["first step 20 s; about 1.7 min left"]


def test_after_the_last_step_nothing_is_said_to_be_left(clock):
    pace = paced(lines := [], steps=1)
    clock[0] += 20
    pace.stepped(1)
    assert lines == ["first step 20 s"]


def test_passes_of_a_long_step_are_told_and_of_a_short_one_not(clock):
    pace = paced(lines := [], steps=3, accumulate=100)
    for _ in range(2):
        for count in range(5):
            pace.passed(count)
            clock[0] += 4
        assert lines == ["3 of 100 passes of a step, each 4.0 s; about 20.0 min left"]
        pace.logged()
    pace.stepped(2)  # within the same minute
    assert len(lines) == 1


def test_a_trainer_tells_of_its_passes(tmp_path, clock):
    class Slow(list):
        update, message = (lambda self, metrics: None), list.append

    trainer = Trainer(TINY.replace(steps=2, accumulate=3, log_every=9), DIGITS, tmp_path / "run")
    loss = trainer.loss

    def slow(*given):
        clock[0] += 29
        return loss(*given)

    trainer.loss = slow
    trainer.run(lines := Slow())
    assert lines[:2] == ["1 of 3 passes of a step, each 29 s; about 2.9 min left",
                         "1 of 3 passes of a step, each 29 s; about 87 s left"]
