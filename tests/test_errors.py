"""What every error and every large request keeps to: one line, and no more memory than there is."""

import sys

import pytest

import cudiff.memory as memory
from cudiff.errors import CudiffError, printable


def test_an_error_is_one_line_whatever_a_name_holds():
    name = "a\nb\r\x1b[31m\x85\u2028\udcff.png"
    assert str(CudiffError(f"cannot read {name}: remove it")) == (
        r"cannot read a\nb\r\x1b[31m\x85\u2028\udcff.png: remove it"
    )
    assert printable("Bär 图 \\ 'x'") == "Bär 图 \\ 'x'"
    assert printable(name).encode()


def write(folder, **contents):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_text(content)


@pytest.mark.parametrize("group, expected", [("/", 700), ("/a/b", 150), ("/elsewhere", 700)])
def test_memory_left_is_the_least_of_the_machine_and_its_groups(tmp_path, monkeypatch, group, expected):
    """A group's files may lie below its path, or, in a container, at the root; cached files make room."""
    write(tmp_path, meminfo="MemTotal:  9 kB\nMemAvailable:  2 kB\n", cgroup=f"4:memory:{group}\n3:cpu:/\n0::/\n")
    version1 = tmp_path / "v1"
    write(
        version1, **{"memory.limit_in_bytes": "1000", "memory.usage_in_bytes": "500"},
        **{"memory.stat": "cache 3\ntotal_inactive_file 200"},
    )
    write(
        version1 / "a" / "b", **{"memory.limit_in_bytes": "400", "memory.usage_in_bytes": "300"},
        **{"memory.stat": "total_inactive_file 50"},
    )
    write(tmp_path / "v2", **{"memory.max": "max", "memory.current": "5", "memory.stat": "inactive_file 1"})
    files = {"": (tmp_path / "v2", *memory._FILES[""][1:]), "memory": (version1, *memory._FILES["memory"][1:])}
    monkeypatch.setattr(memory, "_FILES", files)
    lines = memory._lines
    monkeypatch.setattr(
        memory, "_lines", lambda path: lines(tmp_path / path.rsplit("/")[-1] if "/proc" in str(path) else path)
    )
    assert memory.memory_available() == expected
    memory.check_memory("this", expected, "take less")
    with pytest.raises(CudiffError, match=r"this would take 0.0 GiB of memory, and 0.0 GiB are free: take less"):
        memory.check_memory("this", expected + 1, "take less")


def test_memory_left_on_this_machine():
    assert 2**20 < memory.memory_available() <= sys.maxsize
