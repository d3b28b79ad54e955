"""What a run says of its time where no line of metrics comes for long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from cudiff.config import Config
from cudiff.errors import CudiffError

TELL_EVERY = 60
"""Seconds after which a run says how far it is, where no line of metrics came meanwhile."""

LONG_STEP = 10
"""Seconds after which a step of several passes, or a preview, may say how far it is."""


class Pace:
    """How long the steps and passes of one call of `Trainer.run` take, and about how long what is left.

    display: told by `message(text)`, or None. step, seconds: those of the run so far.
    """

    def __init__(self, config: Config, device: str, display: Any, step: int, seconds: float):
        self.config, self.device, self.display = config, device, display
        self.step, self.seconds, self._steps = step, seconds, 0
        self._began = self._step_began = time.perf_counter()
        self._told, self._stops = -math.inf, False

    def passed(self, count: int) -> None:
        """So many passes of a step are done, 0 as it begins. Only the CPU's are told: a GPU's are launched ahead."""
        now = time.perf_counter()
        if count == 0 or self.device != "cpu":
            self._step_began = now
        elif (spent := now - self._step_began) > LONG_STEP:
            each, passes = spent / count, self.config.accumulate
            self._tell(f"{count} of {passes} passes of a step, each {duration(each)}", each * passes)

    def stepped(self, step: int) -> None:
        """So many steps are done."""
        self.step, self._steps = step, self._steps + step - self.step
        each = (time.perf_counter() - self._began) / self._steps
        if self._steps > 1:
            self._tell(f"step {self.step:,}, each {duration(each)}", each)
        elif self.device == "cpu":
            self._tell(f"first step {duration(each)}", each)
        else:
            self._tell(f"first step {duration(each)}, with the compiling of its kernels", math.nan)

    def logged(self) -> None:
        """A line of metrics was shown."""
        self._told = time.perf_counter()

    def previewing(self, beat: Callable[[], None]) -> Callable[[int], None] | None:
        """What a preview on the CPU calls after each of its steps; None for a GPU, which takes seconds for all of them.

        It calls `beat`, says how far the preview is, and raises CudiffError where a signal came.
        """
        config, began, done = self.config, time.perf_counter(), 0
        total = config.sample_steps * -(-config.samples // config.batch_size)
        told = began - TELL_EVERY + LONG_STEP

        def stepped(step: int) -> None:
            nonlocal done, told
            done, now = done + 1, time.perf_counter()
            beat()
            if self._stops:
                raise CudiffError("a signal came")
            if self.display is not None and now - told > TELL_EVERY:
                left = duration((now - began) / done * (total - done))
                self.display.message(f"draws a preview, step {done:,} of {total:,}; about {left} left for it")
                told = now

        return stepped if self.device == "cpu" else None

    def stopping(self) -> None:
        """A signal came. Said where a step takes over a second, or none is done: else the end itself is seen."""
        self._stops = True
        if self.display is not None and self._steps <= time.perf_counter() - self._began:
            self.display.message("stops after this step and saves; a second signal ends it at once, without")

    def _tell(self, text: str, step: float) -> None:
        now = time.perf_counter()
        if self.display is None or now - self._told <= TELL_EVERY:
            return
        config, left = self.config, math.inf
        if config.steps:
            left = step * (config.steps - self.step)
        if config.minutes:
            left = min(left, max(0.0, 60 * config.minutes - self.seconds - (now - self._began)))
        self.display.message(f"{text}; about {duration(left)} left" if 0 < left < math.inf else text)
        self._told = now


def duration(seconds: float) -> str:
    """A time as people say it: 4.1 ms, 29 s, 3.5 min, 4.0 h."""
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= 1.5 * size or (unit == "s" and seconds >= 1):
            return f"{seconds / size:.{0 if unit == 's' and seconds >= 10 else 1}f} {unit}"
    return f"{1000 * seconds:.1f} ms"
