"""Devices under test: `cpu` always; `cuda` is the same test on the other backend, marked `gpu`."""

import gc
import os
import signal
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from cudiff.backend import cuda_available, cuda_status
from tests import emulator
from tests.guards import Guards
from tests.host import forget, pretend


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Of several processes one without tests takes some of another's: many that compile kernels follow each other."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


EMULATED = emulator.begin() if os.environ.get("CUDIFF_EMULATE") == "1" else None
"""Stands for CuPy in all tests, if set: those marked `gpu` run on the CPU."""


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture
def hopper():
    """Skips where Hopper's own kernels do not run."""
    from cudiff.cuda import select

    if select.current_target().architecture != "sm_90a":
        pytest.skip("these kernels are for sm_90a, without CUDIFF_PORTABLE=1")


@pytest.fixture
def for_any_gpu(monkeypatch):
    """for_any_gpu() has Hopper take the kernels for any GPU, until the test ends."""
    from cudiff.cuda import select

    def choose():
        monkeypatch.setenv("CUDIFF_PORTABLE", "1")
        monkeypatch.setattr(select, "_target", select._target.__wrapped__)  # which is asked once

    return choose


@pytest.fixture
def streams():
    """Skips on the emulator of tests/emulator, whose kernels run one after another."""
    if EMULATED:
        pytest.skip("the emulator has no streams")


@pytest.fixture
def nvrtc():
    """Skips where NVRTC, which compiles kernels without a GPU, is not installed."""
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc", reason="CuPy is not installed: it brings NVRTC")


@pytest.fixture
def host_of(monkeypatch):
    """host_of(hopper, turing=False): a stand-in for a GPU, of Hopper, older or a T4, until the test ends."""
    yield partial(pretend, monkeypatch)
    monkeypatch.undo()
    forget()


@pytest.fixture
def rng(request):
    """Fresh random numbers, reproducible for each test by its name."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """`$CUDIFF_DATA`: real data sets for the tests that need them."""
    folder = os.environ.get("CUDIFF_DATA")
    if not folder:
        pytest.skip("CUDIFF_DATA is not set: no real data sets here")
    return Path(folder)


def pytest_collection_modifyitems(items):
    if not cuda_available():
        skip = pytest.mark.skip(reason=f"no GPU: {cuda_status()[1]}")
        for item in items:
            if item.get_closest_marker("gpu"):  # keywords also hold the names of folders
                item.add_marker(skip)


def pytest_collection_finish():
    """What is collected stays until the end: the garbage collector need not go through it again and again."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_works():
    """A script's shell has what it starts in the background ignore Ctrl-C, which tests raise."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def guards():
    """Every CuPy allocation starts as NaN bytes and lies between guards; None without a GPU."""
    if not cuda_available() or EMULATED:
        yield EMULATED
        return
    import cupy

    guards = Guards(cupy.cuda)
    cupy.cuda.set_allocator(guards.allocate)
    yield guards
    cupy.cuda.set_allocator(guards.pool.malloc)


@pytest.fixture(autouse=True)
def nothing_is_written_outside_of_arrays(guards):
    yield
    if guards and (broken := guards.broken()):
        pytest.fail(f"{broken[0]} ({len(broken)} such writes)", pytrace=False)
