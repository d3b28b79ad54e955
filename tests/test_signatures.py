"""What kernels take is read from their sources, and a launch that does not fit is refused: here without a GPU."""

import re
from textwrap import dedent
from types import SimpleNamespace

import numpy as np
import pytest

from cudiff.backend import bfloat16
from cudiff.cuda import compiler, device, launch
from cudiff.cuda.compiler import kernel_folder
from cudiff.cuda.signature import Parameter, Signature, Source
from tests.compile_kernels import VARIANTS, compile_source, compiled_parameters, declared_parameters, variants
from tests.host import H200

STEMS = [path.stem for path in sorted(kernel_folder().glob("*/*.cu"))]


def test_the_table_of_variants_has_the_files_and_their_constants():
    assert list(VARIANTS) == STEMS
    for stem, rows in VARIANTS.items():
        source = re.sub(r"//.*", "", "".join(compiler._expanded(stem)))
        for name in {name for row in rows for name in row}:
            assert re.search(rf"\b{name}\b", source), f"{stem} has no constant {name}"


def parameters(text, constants=None):
    source = Source("file", text)
    return [(p.name, p.type, p.pointer, p.bytes) for p in source.signature("f", constants or {}).parameters]


@pytest.mark.parametrize("stem", STEMS)
def test_every_kernel_is_read_for_every_variant(stem):
    assert compiler.declarations(stem).kernels
    for constants in variants(stem, "sm_90a"):
        for name in compiler.declarations(stem).kernels:
            signature = compiler.declarations(stem).signature(name, constants)
            assert signature.parameters and all(p.type not in constants for p in signature.parameters)


@pytest.mark.parametrize("stem", ["arithmetic", "grouped_linear", "pool", "random"])
def test_the_compiler_has_the_same_parameters(stem, nvrtc):
    """Of all files this is seen where they are compiled, by tests/compile_kernels.py."""
    constants = variants(stem, "sm_80")[0]
    cubin, _ = compile_source(stem, "sm_80", constants)
    assert compiled_parameters(cubin) == declared_parameters(stem, constants)


def test_a_kernel_is_compiled_without_others_of_its_macro(nvrtc):
    """With what the same call defines, and with those that are written out."""
    constants = variants("elementwise", "sm_80")[0]
    written_out = {"relu_backward_sums", "clip_forward", "clip_backward"}
    for name, others in (("exp_backward", {"exp_forward"}), ("log_forward", {"log_backward"}), ("clip_forward", set())):
        call = compiler.declarations("elementwise").call_of(name)
        cubin, _ = compiler.compile_text("file", compiler.source("elementwise", constants, call), "sm_80", constants)
        assert set(compiled_parameters(cubin)) == {name} | others | written_out


@pytest.mark.parametrize("stem", ["arithmetic", "compare", "elementwise", "integer"])
def test_every_kernel_has_a_source_of_its_own(stem):
    """Where calls of macros take more lines than one, one of them would lose its end."""
    whole = compiler.source(stem, {})
    for name in compiler.declarations(stem).kernels:
        text = compiler.source(stem, {}, compiler.declarations(stem).call_of(name))
        assert name in Source("file", text).kernels
        lost = set(whole.splitlines()) - set(text.splitlines())
        assert lost and all(re.fullmatch(r"[A-Z]+\(\w+, .*\)", line) for line in lost), lost


def test_parameters_of_every_form():
    text = dedent("""
    #define REST int n, \\
        const u8* mask  // of both
    struct __align__(64) Map { u64 words[16]; };
    struct Job { Map map; float *out, *in; i64 pitch; int first, sizes[COUNT]; };
    struct Jobs { Job at[2]; __device__ int size() const { return 0; } };
    extern "C" __global__ void __launch_bounds__(256, COUNT > 1 ? 2 : 1) // of 256
    f(const __grid_constant__ Jobs jobs, T* __restrict__ out, const void* any, REST, double share) {
    """)
    job = 128 + 2 * 8 + 8 + 4 + 3 * 4
    size = 2 * -(-job // 64) * 64
    assert parameters(text, {"T": "bf16", "COUNT": 3}) == [
        ("jobs", "Jobs", False, size), ("out", "bf16", True, 8), ("any", "void", True, 8), ("n", "int", False, 4),
        ("mask", "u8", True, 8), ("share", "double", False, 8),
    ]


def test_kernels_that_a_macro_defines():
    source = Source("file", dedent("""
    #define PAIR(name, value) \\
        extern "C" __global__ void name##_forward(float* x) { return value; } \\
        extern "C" __global__ void name(int n, float* name_of_x) { return value; }
    PAIR(exp, a + b)
    PAIR(log, max(a, b))
    """))
    assert source.kernels == ["exp_forward", "exp", "log_forward", "log"]
    assert [p.name for p in source.signature("log", {}).parameters] == ["n", "name_of_x"]


def gpu_array(dtype):
    return SimpleNamespace(dtype=np.dtype(dtype), data=SimpleNamespace(ptr=1 << 40))


F32, I32, I64 = gpu_array(np.float32), gpu_array(np.int32), gpu_array(np.int64)
CROSS_ENTROPY = dict(stem="softmax", name="cross_entropy", T="bf16")
COPY = dict(stem="shape", name="copy", T="half")
VIEWS = np.zeros(128, np.uint8)


def check(kernel, args):
    constants = dict(kernel)
    kinds, _ = launch.pack(args)
    compiler.declarations(constants.pop("stem")).signature(constants.pop("name"), constants).check(kinds)


@pytest.mark.parametrize("kernel, args", [
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), I32, 3, 10, 1, 8)),
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), None, 3, np.int32(10), 1, 8)),
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), I32, 3, True, 1, 8)),
    (COPY, (gpu_array(np.float16), gpu_array(np.float16), np.uint32(1), VIEWS)),
    (dict(stem="shape", name="copy_packed", T="half"), (I64, I64, np.uint32(1), VIEWS)),
    (dict(stem="random", name="advance"), (I32,)),
    (dict(stem="random", name="advance"), (gpu_array(np.uint32),)),
    (dict(stem="batch", name="normalize_images", T="float"), (F32, gpu_array(np.uint8), np.int64(1))),
    (dict(stem="cast", name="cast", FROM="u8", TO="i64"), (gpu_array(bool), I64, np.int64(1))),
])
def test_what_a_kernel_takes(kernel, args):
    check(kernel, args)


@pytest.mark.parametrize("kernel, args, message", [
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), I64, 3, 10, 1, 8),
     "kernels/portable/softmax.cu: cross_entropy takes an array of int32 for 'labels', not an array of int64"),
    (CROSS_ENTROPY, (F32, F32, F32, I32, 3, 10, 1, 8), "takes an array of bfloat16 for 'x', not an array of float32"),
    (CROSS_ENTROPY, (F32, I32, gpu_array(bfloat16), I32, 3, 10, 1, 8), "array of float32 for 'stats', not"),
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), I32, 3, 10, 1), "takes 8 arguments, not 7"),
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), I32, 3, np.int64(10), 1, 8), "for 'K', not np.int64"),
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), I32, 3, 10.0, 1, 8), "for 'K', not a Python float"),
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), I32, 3, I32, 1, 8), "for 'K', not an array of int32"),
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), 0, 3, 10, 1, 8), "for 'labels', not a Python int"),
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), I32, 3, None, 1, 8), "for 'K', not None"),
    (CROSS_ENTROPY, (F32, F32, gpu_array(bfloat16), np.zeros(3, np.int32), 3, 10, 1, 8), "for 'labels', not 12 bytes"),
    (dict(stem="cast", name="cast", FROM="int", TO="float"), (I32, F32, 5), "takes np.int64 for 'n', not a Python int"),
    (dict(stem="shape", name="fill", T="float"), (F32, 1, np.int64(5)), "takes a Python float or np.float32 for 'valu"),
    (dict(stem="shape", name="fill", T="float"), (F32, np.float64(1), np.int64(5)), "for 'value', not np.float64"),
    (COPY, (gpu_array(np.float16), gpu_array(np.float16), 1, VIEWS), "takes np.uint32 for 'n', not a Python int"),
    (COPY, (gpu_array(np.float16), gpu_array(np.float16), np.uint32(1), VIEWS[1:]), "of 128 bytes for 'views'"),
    (COPY, (gpu_array(np.float16), gpu_array(np.float16), np.uint32(1), gpu_array(np.uint8)), "a struct of 128 bytes"),
])
def test_what_a_kernel_does_not_take(kernel, args, message):
    with pytest.raises(TypeError) as error:
        check(kernel, args)
    assert message in str(error.value)


class Driver:
    """Stands for the driver: notes what a launch of two words would have got."""

    def __init__(self, monkeypatch):
        self.launched = []
        cupy = SimpleNamespace(cuda=SimpleNamespace(
            runtime=SimpleNamespace(
                free=lambda address: None, getDevice=lambda: 0, getDeviceProperties=lambda device: {"name": b"GPU"},
            ),
            get_current_stream=lambda: SimpleNamespace(ptr=0),
            Device=lambda device=0: SimpleNamespace(id=device, compute_capability="80", attributes=H200),
        ))
        for loaded in (device, launch):
            monkeypatch.setattr(loaded, "get_cupy", lambda: cupy)
        monkeypatch.setattr(launch, "library", lambda: SimpleNamespace(cuLaunchKernelEx=self.launch))
        vars(launch._thread).clear(), device.device.cache_clear()

    def launch(self, config, function, addresses, extra):
        self.launched.append(len(addresses._obj))
        return 0


@pytest.fixture
def fake_driver(monkeypatch):
    yield Driver(monkeypatch)
    vars(launch._thread).clear(), device.device.cache_clear()


def fill_kernel():
    function = SimpleNamespace(shared_size_bytes=0, kernel=SimpleNamespace(ptr=0))
    return launch.Kernel(function, compiler.declarations("shape").signature("fill", {"T": "int"}))


def test_a_launch_is_checked_for_each_kernel_and_combination(fake_driver):
    fill, count = fill_kernel(), np.int64(5)
    for _ in range(2):
        fill((1,), (1,), (I32, 1.0, count))
        with pytest.raises(TypeError, match="an array of int32 for 'out', not an array of int64"):
            fill((1,), (1,), (I64, 1.0, count))
    other = launch.Kernel(fill._function, compiler.declarations("shape").signature("fill", {"T": "i64"}))
    other((1,), (1,), (I64, 1.0, count))
    with pytest.raises(TypeError, match="an array of int64 for 'out', not an array of int32"):
        other((1,), (1,), (I32, 1.0, count))
    assert fake_driver.launched == [3, 3, 3]


def test_a_launch_is_checked_once(fake_driver, monkeypatch):
    fill, checked = fill_kernel(), []
    monkeypatch.setattr(type(fill.signature), "check", lambda self, kinds: checked.append(kinds))
    for _ in range(3):
        fill((1,), (1,), (I32, 1.0, np.int64(5)))
    assert len(checked) == 1


def test_later_numbers_are_converted_and_what_is_none_is_refused(fake_driver):
    fill = fill_kernel()
    for count in (np.int64(5), 5):
        fill((1,), (1,), (I32, 1.0, count))
    for wrong in (None, b"12345678", I32, 0.5):
        with pytest.raises(TypeError, match=r"takes np\.int64 for "):
            fill((1,), (1,), (I32, 1.0, wrong))
    assert fake_driver.launched == [3, 3]


def test_the_number_that_does_not_fit_is_named():
    """Not one before it that does."""
    words = [Parameter(name, "int", False, 4) for name in "abc"]
    found = Signature("x.cu", "run", tuple(words))
    for values, name in (((-1, 2**31, 5), "b"), ((-(2**31), 2**31 - 1, -(2**31) - 1), "c")):
        assert f"takes 32 bits for '{name}'" in str(found.out_of_range(values))


@pytest.mark.parametrize("columns", [2**31, -(2**31) - 1])
def test_a_python_int_beyond_32_bits_is_refused(fake_driver, columns):
    function = SimpleNamespace(shared_size_bytes=0, kernel=SimpleNamespace(ptr=0))
    cross_entropy = launch.Kernel(function, compiler.declarations("softmax").signature("cross_entropy", {"T": "float"}))
    with pytest.raises(OverflowError, match=f"cross_entropy takes 32 bits for 'K': {columns} does not fit"):
        cross_entropy((1,), (1,), (F32, F32, F32, I32, 3, columns, 1, 8))
    assert not fake_driver.launched


@pytest.mark.parametrize("error, stem, name, args, constants, message", [
    (ValueError, "cast", "casts", None, {}, "has no kernel 'casts' but cast"),
    (AssertionError, "cast", "cast", None, {"TO": None}, "has not the constants"),
    (AssertionError, "cast", "cast", None, {"VEC": 1}, "has not the constants"),
    (TypeError, "cast", "cast", None, {"TO": np.dtype(np.float64)}, "takes float32, .*, not float64"),
    (TypeError, "cast", "cast", lambda x, y: (x, y), {}, "takes 3 arguments, not 2"),
    (TypeError, "cast", "cast", lambda x, y: (x, y, 6), {}, "takes np.int64 for 'n', not a Python int"),
    (TypeError, "cast", "cast", lambda x, y: (y, y, np.int64(6)), {}, "takes an array of int32 for 'x'"),
    (AssertionError, "cast", "cast", lambda x, y: (x.T, y, np.int64(6)), {}, "cast got a view for 'x'"),
])
def test_the_stand_in_refuses_what_a_gpu_would_get_wrong(host_of, error, stem, name, args, constants, message):
    host = host_of(False)
    x, y = host.zeros((2, 3), np.int32), host.zeros((2, 3), np.float32)
    given = {"FROM": np.dtype(np.int32), "TO": np.dtype(np.float32), **constants}
    given = {key: value for key, value in given.items() if value is not None}
    with pytest.raises(error, match=message):
        launch.launch(stem, name, 1, 256, args(x, y) if args else (x, y, np.int64(6)), **given)
    assert not host.launches
    launch.launch("cast", "cast", 1, 256, (x, y, np.int64(6)), FROM=np.dtype(np.int32), TO=np.dtype(np.float32))
    assert host.launches == [("cast", "cast")]
