"""How long a test lets a call take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_once(seconds: float = 1) -> Iterator[None]:
    """What runs within takes less time of the processor: a wait for a busy machine or its disk is none."""
    start = time.process_time()
    yield
    taken = time.process_time() - start
    assert taken < seconds, f"{taken:.2f} s of processor time"
