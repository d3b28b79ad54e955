"""Which tests execute a line of cudiff/: `CUDIFF_EXECUTED=FOLDER python -m pytest -p tests.executed`.

A pytest plugin, for tests.mutate. Each process of pytest writes a JSON file into FOLDER when it ends: "tests", a list
of [node ID, seconds], and "lines", {path below the root: {line: [numbers of tests]}}. Lines that run when a module is
imported are left out, and those that run in another process. Needs sys.monitoring of Python 3.12, which reports a line
once a test.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
_PACKAGE = str(ROOT / "cudiff") + os.sep


class _Recorder:
    """The plugin, once it is configured."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tests: list[tuple[str, float]] = []
        self.lines: dict[str, dict[int, list[int]]] = {}
        self.seen: set[tuple[str, int]] = set()
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.COVERAGE_ID, "tests.executed")
        monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self.on_line)
        monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

    def on_line(self, code: CodeType, line: int) -> Any:
        """A function's first line counts as executed with any other: its arguments' defaults stand there."""
        if code.co_filename.startswith(_PACKAGE) and code.co_flags & inspect.CO_OPTIMIZED:
            self.seen |= {(code.co_filename, line), (code.co_filename, code.co_firstlineno)}
        return sys.monitoring.DISABLE

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.seen.clear()
        sys.monitoring.restart_events()
        start = time.perf_counter()
        result = yield
        for path, line in self.seen:
            self.lines.setdefault(path, {}).setdefault(line, []).append(len(self.tests))
        self.tests.append((item.nodeid, time.perf_counter() - start))
        return result

    def pytest_sessionfinish(self) -> None:
        sys.monitoring.set_events(sys.monitoring.COVERAGE_ID, sys.monitoring.events.NO_EVENTS)
        lines = {Path(path).relative_to(ROOT).as_posix(): found for path, found in self.lines.items()}
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps({"tests": self.tests, "lines": lines}))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Recorder(Path(os.environ["CUDIFF_EXECUTED"])))


class Executed(NamedTuple):
    """What the plugin wrote: tests, and of each path the numbers of the tests that execute a line."""

    tests: list[tuple[str, float]]
    lines: dict[str, dict[int, list[int]]]


def read(folder: Path) -> Executed:
    found = Executed([], {})
    for file in sorted(folder.glob("*.json")):
        part, before = json.loads(file.read_text()), len(found.tests)
        found.tests.extend(map(tuple, part["tests"]))
        for path, lines in part["lines"].items():
            of_file = found.lines.setdefault(path, {})
            for line, tests in lines.items():
                of_file.setdefault(int(line), []).extend(before + test for test in tests)
    return found
