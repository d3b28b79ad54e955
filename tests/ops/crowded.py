"""Group norm's backward on a GPU whose places others hold: `python -m tests.ops.crowded`, in a process of its own.

Two streams, of lower and of higher priority, run backwards of one image. All blocks of such a launch wait for each
other, and they are nearly as many as the multiprocessors. Before them a kernel fills the GPU; its blocks end one after
the other. The lower stream's backward is launched before the first of them ends, the higher one's while they end:
launches that take places as they come free would each hold some and wait for the rest. Prints "equal" where all results
are those of a backward that was alone; where blocks wait for ever, so does the process.
"""

import time

import cupy
import numpy as np

from cudiff.backend import bfloat16, float32
from cudiff.cuda.device import current_device
from cudiff.cuda.kernels.norm import sm90
from cudiff.ops.group_norm import group_norm
from cudiff.tensor import Tensor
from tests.ops.test_group_norm_sm90 import forced

ROUNDS, LAUNCHES = 20, 4
FIRST, STEP = 3_000_000, 20_000  # nanoseconds after which blocks of the filling kernel end
NEEDS = (True, False, True, True, False, False)
FILLER = cupy.RawKernel(r"""
extern "C" __global__ void fill(long long first, long long step) {
    extern __shared__ char held[];
    long long from, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(from));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - from < first + blockIdx.x * step);
}""", "fill")


def main() -> None:
    rng = np.random.default_rng(0)
    parts = current_device().multiprocessors - 4
    sm90.sharing = forced(1, parts, 0)
    x, dy = (Tensor(rng.standard_normal((1, parts, 64, 64)), device="cuda", dtype=bfloat16, requires_grad=True)
             for _ in range(2))
    weight, bias = (Tensor(rng.standard_normal(64), device="cuda", dtype=float32, requires_grad=True) for _ in range(2))
    node, _ = group_norm(x, weight, bias, silu=True)._source

    def backward() -> tuple:
        return node.function.backward_cuda(node.ctx, dy.data, needs=NEEDS, into=(None,) * 6)

    alone = [a.tobytes() for a in backward() if a is not None]
    FILLER.max_dynamic_shared_size_bytes = 160 << 10  # beside which nothing of group norm's backward has room
    low, high, filling = (cupy.cuda.Stream(non_blocking=True, priority=p) for p in (0, -5, -5))
    graphs, recorded, pools = {}, [], []
    for stream in (low, high):
        pools.append(pool := cupy.cuda.MemoryPool())
        with cupy.cuda.using_allocator(pool.malloc), stream:
            backward()
            stream.synchronize()
            stream.begin_capture()
            recorded += [backward() for _ in range(LAUNCHES)]
            graphs[stream] = stream.end_capture()
    results = backward()
    cupy.cuda.Device().synchronize()
    for i in range(ROUNDS):
        with filling:
            FILLER((current_device().multiprocessors,), (64,), (np.int64(FIRST), np.int64(STEP)), shared_mem=160 << 10)
        if i % 2:
            with low:  # eagerly too
                results = backward()
        graphs[low].launch(low)
        time.sleep(1e-9 * (FIRST + current_device().multiprocessors // 2 * STEP))
        graphs[high].launch(high)
        cupy.cuda.Device().synchronize()
        for found in (results, *recorded):
            assert [a.tobytes() for a in found if a is not None] == alone
    print("equal")


if __name__ == "__main__":
    main()
