"""Readers of files against 200 damaged ones a format; `python -m tests.fuzz` is the long form."""

import sys

import pytest

from cudiff.errors import CudiffError
from tests.fuzz import attempt, run, sample
from tests.fuzz_formats import FORMATS

HELD = (  # formats whose readers keep to the rule
    "npz", "idx", "idx.gz", "data.bin", "bmp", "gif", "jpeg", "png", "ppm", "tiff", "webp",
)  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="the memory's peak is read in /proc")
@pytest.mark.parametrize("name", HELD)
def test_damaged_files_are_read_or_refused(name):
    result = run(name, 200)
    assert not result.failures
    assert result.read + result.refused == 200
    assert result.read >= len(FORMATS[name].seeds()) // 2 and result.refused >= 40  # neither all whole nor all noise


def test_inputs_repeat_and_differ():
    assert sample("npz", 77) == sample("npz", 77) != sample("npz", 78)


def test_the_rule_sees_what_breaks_it(tmp_path):
    def raising(error):
        def reader(path):
            raise error

        return reader

    assert attempt(raising(CudiffError("one line: do this")), tmp_path) == ("refused", None)
    assert attempt(lambda path: 1, tmp_path) == ("read", None)
    for error in (ValueError("no"), MemoryError(), CudiffError(""), CudiffError("x" * 5000)):
        assert attempt(raising(error), tmp_path)[1]
