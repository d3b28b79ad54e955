"""What backend.py refuses, and how it moves arrays; with a stand-in for a GPU."""

import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from cudiff import backend
from cudiff.backend import array_module, copy_into, to_device
from cudiff.cuda import compiler, select
from cudiff.cuda.compiler import compiles_ahead, compiling_ahead, cubin_folder
from cudiff.cuda.launch import blocks
from cudiff.errors import CudiffError
from tests.compile_kernels import compile_source
from tests.host import Array


def test_float64_stays_on_the_cpu(host_of):
    host_of(True)
    with pytest.raises(CudiffError, match="float64 arrays stay on the CPU"):
        to_device(np.zeros(2), "cuda")
    assert isinstance(to_device(np.zeros(2, np.float32), "cuda"), Array)


def test_an_unknown_device():
    with pytest.raises(CudiffError, match="unknown device 'tpu'"):
        array_module("tpu")


def test_copy_into_converts():
    out = np.zeros(3, np.float32)
    copy_into(out, np.array([1, 2, 3], np.int64))
    assert out.tolist() == [1, 2, 3] and out.dtype == np.float32


def test_kernels_are_compiled_ahead_inside_the_block_only():
    assert not compiles_ahead()
    with compiling_ahead():
        assert compiles_ahead()
    assert not compiles_ahead()


def test_blocks_cover_all_and_are_one_at_least():
    assert [blocks(count, 4) for count in (0, 1, 4, 5, 8, 9)] == [1, 1, 1, 2, 2, 3]


def driver(count=1, capability="90", error=None):
    """CuPy as far as `cuda_status` asks it."""

    def devices():
        if error:
            raise RuntimeError(error)
        return count

    runtime = SimpleNamespace(getDeviceCount=devices, getDeviceProperties=lambda device: {"name": b"H%d" % device})
    return SimpleNamespace(cuda=SimpleNamespace(
        runtime=runtime, Device=lambda: SimpleNamespace(compute_capability=capability)))


@pytest.mark.parametrize("cupy, usable, text", [
    (driver(), True, "H0"), (driver(capability="80"), True, "H0"), (driver(capability="120"), True, "H0"),
    (driver(capability="70"), False, "the GPU has compute capability 7.0: cudiff needs 7.5 (Turing) or newer"),
    (driver(count=0), False, "the driver reports no NVIDIA GPU"),
    (driver(error="no driver\nat all"), False, "CuPy finds no usable NVIDIA driver (no driver): install or update"),
    (None, False, "CuPy is not installed: pip install 'cudiff[cuda13]'"),
])
def test_why_there_is_no_gpu_is_said(monkeypatch, cupy, usable, text):
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    if cupy is None:
        monkeypatch.delitem(sys.modules, "cupy")
        monkeypatch.setattr(sys, "path", [])
    found = backend.cuda_status.__wrapped__()
    assert found[0] is usable and found[1].startswith(text)


def test_a_broken_cupy_is_told_from_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "cupy.py").write_text("raise ImportError('libnvrtc.so: cannot open\\nmore', name='cupy')")
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert backend.cuda_status.__wrapped__() == (
        False, "CuPy does not import (libnvrtc.so: cannot open): reinstall it with pip")


def test_caches_lie_where_the_environment_says(monkeypatch):
    for name in ("CUDIFF_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert backend.cache_folder("kernels") == Path.home() / ".cache" / "cudiff" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert backend.cache_folder("kernels") == Path("/x/cudiff/kernels")
    monkeypatch.setenv("CUDIFF_CACHE_DIR", "/c")
    assert backend.cache_folder("kernels") == Path("/c/kernels")
    monkeypatch.setenv("CUDIFF_CACHE_DIR", "~/c")  # as quotes or a container's settings leave it
    assert backend.cache_folder("kernels") == Path.home() / "c" / "kernels"
    monkeypatch.setenv("CUDIFF_CACHE_DIR", " ")
    assert backend.cache_folder("kernels") == Path("/x/cudiff/kernels")


def test_a_cpu_takes_what_was_staged():
    stage = backend.Staging("cpu")
    for value in (1, 2):
        stage.fill([np.full(3, value)])
        stage.upload()
        assert stage.take()[0].tolist() == [value] * 3
        stage.release()


@pytest.mark.parametrize("fits, sizes, advice", [
    (64, [50], "--batch-size 50 fits"), (12, [50, 25, 12], "--batch-size 12 fits"),
    (0, [50, 25, 12, 6, 3, 1], "even one image does not fit: use a smaller model"),
])
def test_the_largest_halving_that_fits_is_told(fits, sizes, advice):
    def attempt(size):
        tried.append(size)
        if size > fits:
            raise MemoryError

    tried = []
    error = backend.out_of_memory(101, attempt, "cpu")
    assert (str(error), tried) == (f"batch size 101 does not fit into memory: {advice}", sizes)


def test_cubins_are_kept_in_the_cache_or_in_a_folder_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path / "a" / "b"))
    for _ in range(2):  # made, then found
        assert cubin_folder.__wrapped__() == tmp_path / "a" / "b" / "kernels"
    assert (tmp_path / "a" / "b" / "kernels").is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUDIFF_CACHE_DIR", str(tmp_path / "file"))
    own = cubin_folder.__wrapped__()
    assert own.is_dir() and own.name.startswith("cudiff-kernels-")
    own.rmdir()


class Compiler:
    """NVRTC as far as `compile_text` asks it."""

    class NVRTCError(Exception):
        pass

    def __init__(self, log=""):
        self.log, self.programs, self.options = log, [], ()

    def createProgram(self, source, name, headers, includes):
        self.programs.append(source)
        return len(self.programs)

    def compileProgram(self, program, options):
        self.options = options
        if self.log:
            raise self.NVRTCError("it failed")

    def getCUBIN(self, program):
        return b"cubin of %d" % program

    def getProgramLog(self, program):
        return self.log or "0 bytes spilled"

    def destroyProgram(self, program):
        self.programs.pop()


@pytest.mark.parametrize("place", ["cudiff/kernels", "kernels", "elsewhere/kernels", "cudiff/cuda/kernels"])
def test_kernels_lie_in_the_package_or_beside_it(monkeypatch, tmp_path, place):
    monkeypatch.setattr(compiler, "__file__", str(tmp_path / "cudiff" / "cuda" / "compiler.py"))
    header = tmp_path / place / "common" / "common.cuh"
    header.parent.mkdir(parents=True)
    header.write_text("// a header\n")
    find = compiler.kernel_folder.__wrapped__
    if place in ("cudiff/kernels", "kernels"):
        assert find() == (tmp_path / place).resolve()
    else:
        with pytest.raises(CudiffError, match=r"the CUDA kernels are missing beside .*cudiff: reinstall cudiff"):
            find()


def test_a_kernel_file_is_the_only_one_of_its_name(monkeypatch, tmp_path):
    monkeypatch.setattr(compiler, "kernel_folder", lambda: tmp_path)
    for name in ("portable/a.cu", "sm90/a.cu", "sm90/b.cu"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    find = compiler.kernel_file.__wrapped__
    assert find("b.cu") == tmp_path / "sm90" / "b.cu"
    for name, count in ("a.cu", 2), ("c.cu", 0):
        with pytest.raises(CudiffError, match=f"^{count} files in .* are named {name}"):
            find(name)


def test_a_source_is_compiled_or_its_log_told(monkeypatch):
    compiler = Compiler()
    monkeypatch.setitem(sys.modules, "cupy_backends", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy_backends.cuda.libs", SimpleNamespace(nvrtc=compiler))
    assert compile_source("cast", "sm_80", {"N": 3, "FROM": "float"}) == (b"cubin of 1", "0 bytes spilled")
    assert {"-arch=sm_80", "-DN=3"} <= set(compiler.options) and not compiler.programs
    compiler.log = "cast.cu(3):\n  error:   no such type"
    told = r"^kernels/portable/cast\.cu does not compile for sm_80: cast\.cu.3.: error: no such"
    with pytest.raises(CudiffError, match=told):
        compile_source("cast", "sm_80", {})
    assert not compiler.programs


def test_a_type_is_a_typedef_and_a_number_is_none():
    source = compiler.source("cast", {"N": 3, "FROM": "float", "TO": "bf16"})
    assert "typedef float FROM;\ntypedef bf16 TO;\n" in source and "typedef 3" not in source


@pytest.mark.parametrize("path", sorted(compiler.kernel_folder().glob("*/*.cu")), ids=lambda path: path.stem)
def test_a_header_stands_once_in_a_source(path):
    """Under two others too: attention_sm90.cu has wgmma.cuh by two ways."""
    source = compiler.source(path.stem, {})
    assert '#include "' not in source
    for header in compiler.kernel_folder().glob("*/*.cuh"):
        body = header.read_text().split("\n\n")[-1].strip()  # the last of what it defines
        assert source.count(body) <= 1, header


def test_a_dtype_that_kernels_do_not_take_is_told():
    assert compiler.c_names("cast.cu", {"N": 3, "FROM": np.dtype(np.float32)}) == {"N": 3, "FROM": "float"}
    with pytest.raises(TypeError, match=r"cast\.cu takes .*, not complex64: convert it on the CPU first"):
        compiler.c_names("cast.cu", {"FROM": np.dtype(np.complex64)})


def test_a_kernel_is_chosen_anew_after_other_plans(monkeypatch):
    monkeypatch.setattr(select, "FAMILIES", {})
    problem, plans = namedtuple("Problem", "wanted")(frozenset()), [1, 2]
    row = select.Row("any", select.ANY, lambda problem: select.Offer(plan=plans.pop(0)), print, "all")
    table = select.Table("test", row)
    assert [table.select(problem, "sm_80").offer.plan for _ in range(2)] == [1, 1]
    table.forget()
    assert table.select(problem, "sm_80").offer.plan == 2
