"""The emulator of tests/emulator: what threads do together, and that it sees a kernel go wrong."""

import shutil
from textwrap import dedent

import ml_dtypes
import numpy as np
import pytest

from cudiff import Tensor, softmax
from cudiff.cuda.compiler import expanded, with_types
from tests.emulator import Emulator, call, compiled
from tests.host import forget, pretend

pytestmark = pytest.mark.skipif(not shutil.which("g++"), reason="the emulator needs g++")


@pytest.fixture
def host(monkeypatch):
    yield pretend(monkeypatch, False, kind=Emulator)
    monkeypatch.undo()
    forget()


def launched(host, text, grid, block, *args, shared=0, cooperative=False, constants=None, arch=900):
    """What went wrong in a launch of the kernel f of this text."""
    constants = constants or {}
    library = compiled("test", with_types(*expanded(dedent(text)), constants), constants, arch)
    return call(library, "f", (grid,), (block,), args, shared, cooperative)


def test_blocks_threads_and_the_blocks_own_memory(host):
    """Sums of a block, through static and dynamic shared memory."""
    x, out = host.arange(512, dtype=np.float32), host.empty(4, np.float32)
    text = """
    extern __shared__ float others[];
    extern "C" __global__ void __launch_bounds__(128) f(float* out, const float* x) {
        __shared__ float own[64];
        int i = threadIdx.x;
        (i < 64 ? own[i] : others[i - 64]) = x[blockIdx.x * 128 + i];
        for (int half = 32; half > 0; half /= 2) {
            __syncthreads();
            if (i < half) own[i] += own[i + half];
            if (i >= 64 && i < 64 + half) others[i - 64] += others[i - 64 + half];
        }
        __syncthreads();
        if (i == 0) out[blockIdx.x] = own[0] + others[0];
    }"""
    assert launched(host, text, 4, 128, out, x, shared=256) is None
    assert out.tolist() == x.reshape(4, 128).sum(1).tolist()
    assert launched(host, text, 4, 256, out, x, shared=256) == "a block has more threads than its launch bounds"
    assert launched(host, text, 4, 128, out, x, shared=128) == "it writes outside of its shared memory"


def test_a_barrier_that_is_missing_is_seen(host):
    """Warps take turns in an order that changes."""
    text = """
    extern "C" __global__ void f(float* out) {
        __shared__ float own[256];
        own[threadIdx.x] = threadIdx.x;
        BARRIER;
        out[blockIdx.x * 256 + threadIdx.x] = own[255 - threadIdx.x];
    }"""
    right = np.tile(np.arange(256)[::-1], 8)
    for barrier, same in [("__syncthreads()", True), ("", False)]:
        out = host.empty(2048, np.float32)
        assert launched(host, text.replace("BARRIER", barrier), 8, 256, out) is None
        assert np.array_equal(out, right) == same


def test_threads_that_wait_for_ever_are_told(host):
    text = """
    #include "wgmma.cuh"
    extern "C" __global__ void f(int waits) {
        __shared__ __align__(8) u64 barrier;
        u32 address = shared_address(&barrier);
        if (threadIdx.x == 0) barrier_init(address, 32), fence_barriers();
        __syncthreads();
        barrier_arrive(address);
        barrier_wait(address, waits);
    }"""
    assert launched(host, text, 1, 32, 0) is None
    assert launched(host, text, 1, 64, 1) is None  # two phases have passed
    assert launched(host, text, 1, 32, 1) == "its threads wait for each other for ever"


@pytest.mark.parametrize("before_reuse, before_reading, right", [
    ("tma_store_wait();", "tma_store_done();", True), ("", "tma_store_done();", False),
    ("tma_store_wait();", "", False),
])
def test_a_wait_for_a_bulk_store_that_is_missing_is_seen(host, before_reuse, before_reading, right):
    """Another warp overwrites what is stored, and a third reads what was written."""
    text = """
    #include "wgmma.cuh"
    extern "C" __global__ void f(float* out, float* stored) {
        __shared__ __align__(16) float own[4];
        __shared__ int said;
        volatile int* step = &said;
        if (threadIdx.x < 4) own[threadIdx.x] = 1.0f;
        if (threadIdx.x == 0) said = 0;
        __syncthreads();
        if (threadIdx.x == 0) {
            bulk_store(stored, shared_address(own), 16);
            BEFORE_REUSE
            *step = 1;
            BEFORE_READING
            *step += 1;
            tma_store_done();
        }
        if (threadIdx.x == 32) {
            while (*step < 1) __nanosleep(20);
            own[0] = 2.0f;
        }
        if (threadIdx.x == 64) {
            while (*step < 2) __nanosleep(20);
            out[0] = stored[0];
        }
    }"""
    out, stored = host.empty(1, np.float32), host.empty(4, np.float32)
    text = text.replace("BEFORE_REUSE", before_reuse).replace("BEFORE_READING", before_reading)
    assert launched(host, text, 1, 96, out, stored) is None
    assert (out.item() == 1.0) == right


def test_blocks_of_a_cooperative_launch_wait_for_each_other(host):
    text = """
    extern "C" __global__ void f(u32* arrived, int* out) {
        if (threadIdx.x == 0) {
            atomicAdd(arrived, 1);
            while (*(volatile u32*)arrived < gridDim.x) __nanosleep(20);
        }
        __syncthreads();
        out[blockIdx.x] = 1;
    }"""
    arrived, out = host.zeros(1, np.uint32), host.zeros(8, np.int32)
    assert launched(host, text, 8, 64, arrived, out, cooperative=True) is None
    assert out.all()
    assert "wait for each other" in launched(host, text, 8, 64, host.zeros(1, np.uint32), out)


@pytest.mark.parametrize("T, dtype, depth", [("bf16", ml_dtypes.bfloat16, 16), ("half", np.float16, 16)])
@pytest.mark.parametrize("arch", [900, 750])
def test_a_warps_product_is_that_of_its_fragments(host, rng, T, dtype, depth, arch):
    """Through ldmatrix; on Turing by its own instructions."""
    a, b = rng.standard_normal((16, depth)).astype(dtype), rng.standard_normal((8, depth)).astype(dtype)
    x, y, out = host.empty(a.shape, dtype), host.empty(b.shape, dtype), host.empty((16, 8), np.float32)
    x[...], y[...] = a, b
    text = """
    #include "mma.cuh"
    extern "C" __global__ void f(float* out, const T* a, const T* b) {
        __shared__ __align__(16) T tiles[32 * 16];
        for (int i = threadIdx.x; i < 384; i += 32) tiles[i] = i < 256 ? a[i] : b[i - 256];
        for (int i = 384 + threadIdx.x; i < 512; i += 32) tiles[i] = T{0};
        __syncwarp();
        u32 own[4], others[4];
        int row = threadIdx.x % 16, half = threadIdx.x / 16;
        ldmatrix(own, shared_address(tiles + row * 16 + half * 8));
        ldmatrix(others, shared_address(tiles + 256 + row * 16 + half * 8));
        float c[4] = {0, 0, 0, 0};
        mma<T>(c, own, others[0], others[2]);
        int g = threadIdx.x / 4, t = threadIdx.x % 4 * 2;
        out[g * 8 + t] = c[0], out[g * 8 + t + 1] = c[1], out[g * 8 + 64 + t] = c[2], out[g * 8 + 64 + t + 1] = c[3];
    }"""
    assert launched(host, text, 1, 32, out, x, y, constants={"T": T}, arch=arch) is None
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64).T, rtol=1e-5, atol=1e-5)


def test_an_operation_is_computed_by_its_kernels(host, rng):
    x = rng.standard_normal((5, 70)).astype(np.float32)
    y = softmax(Tensor(x, device="cuda"))
    assert host.launches == [("softmax", "softmax")]
    np.testing.assert_allclose(y.numpy(), softmax(Tensor(x)).numpy(), rtol=1e-5)
    assert host.broken() == []


def test_a_read_behind_an_array_is_seen(host):
    """Also what is not used. The next launch finds all as it was."""
    text = """
    extern "C" __global__ void f(float* out, const float* x, int count) {
        float read = x[threadIdx.x];
        out[threadIdx.x] = threadIdx.x < count ? read : 0.0f;
    }"""
    x, out = host.arange(4, dtype=np.float32), host.empty(32, np.float32)
    for threads, told in ((4, None), (32, "it reads or writes behind an array"), (4, None)):
        out[:] = np.nan
        assert launched(host, text, 1, threads, out, x, 4) == told
        assert told or out[:4].tolist() == [0, 1, 2, 3]


def test_a_write_beside_an_array_is_seen(host):
    out = host.empty(3, np.float32)
    text = 'extern "C" __global__ void f(float* out) { out[threadIdx.x] = 1; }'
    assert launched(host, text, 1, 4, out) is None
    assert host.broken() == ["a kernel wrote beside an array of 12 bytes"]
