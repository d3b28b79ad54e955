"""Readers of files against 200 damaged ones a format; `python -m tests.fuzz` is the long form."""

import gzip
import io
import os
import signal
import socket
import struct
import sys
import zipfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cudiff.checkpoint import load_checkpoint
from cudiff.config import load_toml
from cudiff.convert import read_unet_cu, read_weights
from cudiff.data import load_dataset
from cudiff.errors import CudiffError
from cudiff.pipeline import load
from cudiff.tensorfile import read_header
from cudiff.torchfile import read_torch
from tests.fuzz import attempt, run, sample
from tests.fuzz_damage import in_gzip, in_png, in_zip
from tests.fuzz_formats import FORMATS

linux = pytest.mark.skipif(sys.platform != "linux", reason="the memory's peak is read in /proc")


@linux
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_read_or_refused(name):
    result = run(name, 200)
    assert not result.failures
    assert result.read + result.refused == 200
    assert result.read >= len(FORMATS[name].seeds()) // 2 and result.refused >= 40  # neither all whole nor all noise


def test_inputs_repeat_and_differ():
    for name, form in FORMATS.items():
        assert sample(name, form, 77) == sample(name, form, 77) != sample(name, form, 78)


def test_damage_below_checksums_leaves_them_right():
    def chunks(png):
        at = 8
        while at < len(png):
            (size,) = struct.unpack_from(">I", png, at)
            yield png[at + 4 : at + 8 + size], png[at + 8 + size : at + 12 + size]
            at += 12 + size

    plain, damaged = FORMATS["png"].seeds()[0], set()
    for number in range(60):
        rng = np.random.default_rng(number)
        for name in ("npz", "pt"):
            content = in_zip(FORMATS[name].seeds()[0], rng)
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                assert archive.testzip() is None
            damaged.add(content)
        content = in_gzip(FORMATS["idx.gz"].seeds()[0], rng)
        damaged |= {content, gzip.decompress(content)}
        content = in_png(plain, rng)
        assert all(struct.pack(">I", zlib.crc32(body)) == checksum for body, checksum in chunks(content))
        damaged.add(content)
    assert len(damaged) > 200


def test_a_picture_may_take_what_its_own_header_says():
    for name, pictures in {"png": 1, "gif": 1, "webp": 2}.items():
        assert FORMATS[name].decoded(FORMATS[name].seeds()[0]) == pictures * 4 * 16 * 12
    for side, expected in [(8192, 4 * 8192**2), (8193, None)]:
        header = b"P5 %d %d 255\n" % (side, side)
        assert FORMATS["ppm"].decoded(header) == (expected or len(header))
    assert FORMATS["ppm"].decoded(b"P5 4") == 4


@linux
@pytest.mark.parametrize("name, message", [
    ("sleeps", "ends the process (-14)"), ("works", "takes 1."), ("allocates", "MiB, allowed are 64"),
    ("asks for all", "raises MemoryError"), ("starts", "does ['subprocess.Popen"),
    ("starts unseen", "does start a process"), ("dies", "ends the process (-9)"),
])  # fmt: skip
def test_what_breaks_the_rule_is_a_failure(name, message):
    result = run(name, 6, formats="tests.fuzz_cases", patience=2 if name == "sleeps" else 60)
    assert list(result.failures) == [4] and message in result.failures[4]
    assert result.read + result.refused >= 5


@linux
@pytest.mark.parametrize("kind", ["bmp", "gif", "jpeg", "png", "ppm", "tiff", "webp"])
def test_large_pictures_keep_to_the_rule(kind):
    result = run(f"large {kind}", 1, formats="tests.fuzz_cases")
    assert not result.failures and result.read == 1


def test_the_rule_sees_what_breaks_it(tmp_path):
    def raising(error):
        def reader(path):
            raise error

        return reader

    assert attempt(raising(CudiffError("one line: do this")), tmp_path) == ("refused", None)
    assert attempt(lambda path: 1, tmp_path) == ("read", None)
    for error in (ValueError("no"), MemoryError(), CudiffError(""), CudiffError("x" * 5000)):
        assert attempt(raising(error), tmp_path)[1]


@pytest.mark.parametrize("reader", [
    partial(load, device="cpu"), load_checkpoint, read_header, read_torch, read_unet_cu, read_weights, load_toml,
    load_dataset,
])  # fmt: skip
def test_pipes_and_devices_are_refused_at_once(reader, tmp_path):
    def late(*_):
        raise TimeoutError

    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        paths = [tmp_path / "pipe", tmp_path / "link", tmp_path / "socket", *map(Path, ("/dev/zero", "/dev/null"))]
        kept = signal.signal(signal.SIGALRM, late)
        try:
            for path in paths:
                signal.setitimer(signal.ITIMER_REAL, 5)
                with pytest.raises(CudiffError, match=r"is not a file|no regular file"):
                    reader(path)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, kept)
