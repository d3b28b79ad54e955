"""Files that are replaced whole: what stands on the disk before the swap, and what is left open after it."""

import os
import stat
import threading

import pytest

from cudiff.errors import CudiffError
from cudiff.files import opened, replaced


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not tell what is open")
def test_nothing_is_left_open(tmp_path):
    before = descriptors()
    for content in ("one", "two"):
        with replaced(tmp_path / "a" / "file") as temporary:
            temporary.write_text(content)
    with opened(tmp_path / "a" / "file") as file:
        assert file.read() == b"two"
    with pytest.raises(CudiffError), opened(tmp_path):
        pass
    assert descriptors() == before


def test_a_file_and_then_its_folder_are_on_the_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file)))
    with replaced(tmp_path / "file") as temporary:
        temporary.write_text("whole")
    assert [one.st_ino for one in synced] == [os.stat(tmp_path / "file").st_ino, os.stat(tmp_path).st_ino]
    assert [stat.S_ISDIR(one.st_mode) for one in synced] == [False, True]


@pytest.mark.parametrize("writer", ["", "-2"])
def test_what_fails_leaves_the_file_that_was_there(tmp_path, writer):
    (tmp_path / "file").write_text("before")
    with pytest.raises(KeyboardInterrupt), replaced(tmp_path / "file", writer) as temporary:
        assert temporary == tmp_path / f".file{writer}.tmp"
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "before"


def test_of_several_that_replace_a_file_at_the_same_time_each_writes_its_own(tmp_path):
    """They had written into one, which then held parts of both, and one of them had failed."""
    with replaced(tmp_path / "file") as one:
        one.write_text("1")

        def another():
            with replaced(tmp_path / "file") as two:
                assert two != one and not two.exists()
                two.write_text("two")
            assert (tmp_path / "file").read_text() == "two"

        thread = threading.Thread(target=another)
        thread.start()
        thread.join()
        assert one.read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "1"


def test_a_block_that_writes_nothing_says_so(tmp_path):
    with pytest.raises(FileNotFoundError), replaced(tmp_path / "file"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not os.path.ismount("/proc"), reason="no /proc here")
def test_the_kernels_files_are_not_opened():
    """Some wait for ever, as /proc/kmsg does."""
    with pytest.raises(CudiffError, match=r"^/proc/version is not a file: check the path$"), opened("/proc/version"):
        pass


def test_what_a_block_raises_is_its_own(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^another$"), opened(tmp_path / "file"):
        raise ValueError("another")
    with pytest.raises(CudiffError, match=r"cannot read .*file \(Input/output error\)"), opened(tmp_path / "file"):
        raise OSError(5, "Input/output error")
