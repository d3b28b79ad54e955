"""Ctrl-C, SIGTERM and SIGHUP: what they do while the command line starts, while a command runs and while it trains."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

INTERRUPTED = "cudiff: interrupted"
EXIT = 128
"""A process that signal n has ended leaves with 128 + n, as shells report it."""


class Stopped(Exception):
    """A signal ended the work early, and what it had done is saved. number: the signal."""

    def __init__(self, number: int):
        super().__init__(f"stopped by signal {number}")
        self.number = number


def heeded() -> list[int]:
    """SIGINT, SIGTERM and SIGHUP, without those that this process was started to ignore."""
    there = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    return [number for number in there if signal.getsignal(number) is not signal.SIG_IGN]


def _leave(number: int, frame: FrameType | None) -> None:
    """End the process at once; nothing is left to clean up. Of several processes the first tells, in one line."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(EXIT + number)


def _guard_the_command_line() -> None:
    """Where this process is the command line, let Ctrl-C end it in one line while everything is still imported.

    A program that imports cudiff keeps Python's KeyboardInterrupt, with its traceback.
    """
    program = (getattr(sys, "argv", None) or [""])[0]
    by_module = program == "-m" and "cudiff" in sys.orig_argv  # sys.argv[0] is -m until the module has been found
    by_script = os.path.basename(program).removesuffix(".exe") == "cudiff"
    if (by_module or by_script) and _is_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def raising() -> Iterator[None]:
    """Within the block Ctrl-C raises KeyboardInterrupt, so that what is half written is cleaned up."""
    if not _is_main_thread() or signal.getsignal(signal.SIGINT) is not _leave:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, _leave)


@contextmanager
def noted(tell: Callable[[], None] = lambda: None) -> Iterator[list[int]]:
    """The first Ctrl-C, SIGTERM or SIGHUP appends its number to the list, and calls `tell`; the second one ends the
    process as usual.

    Signals that the process was started to ignore, as SIGHUP under nohup, stay ignored.
    """
    received: list[int] = []
    if not _is_main_thread():
        yield received
        return

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        restore()
        with contextlib.suppress(RuntimeError):  # what was interrupted was writing to the same file
            tell()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before: dict[int, Any] = {}
    for number in heeded():
        before[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        restore()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_guard_the_command_line()  # on import: whatever is imported after this module is guarded
