// Stream-K (arXiv 2301.03598): a block that did not begin an output tile leaves its sums in global memory, and the block that began
// it adds them. A thread of a warpgroup has 16 bytes of each of the tile's PIXELS / 8 rows. The sums come to shared memory by a ring
// whose stages have WEIGHT_BYTES.
#pragma once
#include "exchange.cuh"
#include "wgmma.cuh"

constexpr int STAGE_ROWS = WEIGHT_BYTES / (128 * 16);

// Leaves a tile's sums in `parts`, float4 (blocks, PIXELS / 8, 128). Called by a warpgroup.
__device__ __forceinline__ void leave(const float (&acc)[PIXELS / 2], float4* parts, Exchange* exchange, u32 launch) {
    parts += (i64)blockIdx.x * (PIXELS / 8 * 128) + threadIdx.x % 128;
#pragma unroll
    for (int row = 0; row < PIXELS / 8; row++)
        __stcg(parts + row * 128, make_float4(acc[4 * row], acc[4 * row + 1], acc[4 * row + 2], acc[4 * row + 3]));
    fence_global_writes();
    warpgroup_meets();
    if (threadIdx.x % 128 == 0) {
        __threadfence();
        exchange->slots[blockIdx.x].publish(0.0f, 0.0f, launch);
    }
}
// Asks for what block `from` has left, once it is there. The producer calls it, as soon as stages of ring b are free.
__device__ __forceinline__ void load_left(Ring& b, const float4* parts, const Exchange* exchange, int from, u32 launch) {
    float2 none;
    while (exchange->slots[from].read(none, launch)) {}
    __threadfence();
    fence_global_writes();
    parts += (i64)from * (PIXELS / 8 * 128);
    for (int row = 0; row < PIXELS / 8; row += STAGE_ROWS) {
        u32 bytes = min(STAGE_ROWS, PIXELS / 8 - row) * 128 * sizeof(float4), full = b.acquire(bytes);
        bulk_load(b.buffer(), parts + row * 128, bytes, full);
        b.advance();
    }
}
// Adds it. Called by the warpgroup that finishes the tile. shared: the block's shared memory, whose address is `base`.
__device__ __forceinline__ void add_left(float (&acc)[PIXELS / 2], Ring& b, const u8* shared, u32 base) {
#pragma unroll
    for (int first = 0; first < PIXELS / 8; first += STAGE_ROWS) {
        b.wait();
        const float4* left = reinterpret_cast<const float4*>(shared + (b.buffer() - base)) + threadIdx.x % 128;
#pragma unroll
        for (int row = first; row < first + STAGE_ROWS && row < PIXELS / 8; row++) {
            float4 v = left[(row - first) * 128];
            acc[4 * row] += v.x, acc[4 * row + 1] += v.y, acc[4 * row + 2] += v.z, acc[4 * row + 3] += v.w;
        }
        warpgroup_meets();
        b.release();
    }
}
