"""Work that waits for more of its kind: when it is done, on stand-ins for arrays on a GPU."""

from types import SimpleNamespace

import pytest

from cudiff.cuda.waiting import Kind, submit, together, waiting


def array(start, size=8):
    return SimpleNamespace(data=SimpleNamespace(ptr=start), nbytes=size)


@pytest.fixture
def done():
    return []


@pytest.fixture
def kind(done):
    return Kind(lambda jobs: done.append(jobs), jobs=3, held=100, rank=0)


def test_jobs_of_a_group_share_a_launch(kind, done):
    with waiting():
        for i in range(4):
            submit(kind, i, array(100 * i), group="a")
            submit(kind, -i, array(5000 + 100 * i), group="b")
        assert done == [[0, 1, 2], [0, -1, -2]]
    assert done == [[0, 1, 2], [0, -1, -2], [3], [-3]]


def test_nothing_waits_outside(kind, done):
    submit(kind, 1, array(0))
    assert done == [[1]]
    with together():
        submit(kind, 2, array(0))
        submit(kind, 3, array(100))
        with together():
            submit(kind, 4, array(200), group="other")
        assert done == [[1]]
    assert done == [[1], [2, 3], [4]]


def test_what_holds_too_much_is_done_oldest_first(kind, done):
    with waiting():
        submit(kind, 1, array(0), held=40, group="a")
        submit(kind, 2, array(100), held=40, group="b")
        submit(kind, 3, array(200), held=10, group="a")
        submit(kind, 4, array(300), held=40, group="c")
        assert done == [[1, 3]]
    assert done == [[1, 3], [2], [4]]


def test_a_result_that_is_needed_brings_all_about(kind, done):
    with waiting() as waits:
        submit(kind, 1, array(0), group="a")
        submit(kind, 2, array(100), group="b")
        waits.finish(array(8))
        assert done == []
        waits.finish(array(96))
        assert done == [[1], [2]]
        submit(kind, 3, array(200))
        submit(kind, 4, array(200))  # adds to the same
        assert done == [[1], [2], [3]]


def test_what_is_about_to_be_written_is_read_before(kind, done):
    with waiting() as waits:
        submit(kind, 1, array(0), (array(1000), None), group="a")
        submit(kind, 2, array(100), (array(2000),), group="b")
        assert waits.reads(array(1000)) and not waits.reads(array(1008)) and not waits.reads(None)
        waits.finish(array(1000))
        assert done == []
        waits.finish(array(1000), written=True)
        assert done == [[1]] and not waits.reads(array(1000))


def test_a_launch_may_leave_work_of_a_higher_rank(kind, done):
    sums = Kind(lambda jobs: done.append(jobs), jobs=3, held=100, rank=1)
    parts = Kind(lambda jobs: (done.append(jobs), submit(sums, "sum", array(0))), jobs=3, held=100, rank=0)
    with waiting() as waits:
        submit(sums, "other", array(500))
        submit(parts, "part", array(0))
        waits.finish(array(0))
        assert done == [["part"], ["other", "sum"]]
