// What the kernels of attention on Hopper share: tiles of 64 tokens by DP channels, and fragments of them.
//
// T: bf16 or half; DP: 32 or 64, the channels of a head or more. A tile has a row of ROW_BYTES a token, as TMA brings it.
#pragma once
#include "flash.cuh"
#include "wgmma.cuh"

constexpr int ROW_BYTES = DP * 2, TILE = 64 * ROW_BYTES;

#define WARP_ROW (threadIdx.x / 32 % 4 * 16)  // of a warpgroup's 64 rows, where this warp's 16 start

// A product of a warpgroup, times `factor` and rounded, as A fragments.
template <int COUNT>
__device__ __forceinline__ void round_fragments(const float (&c)[COUNT], u32 (&a)[COUNT / 8][4], float factor = 1.0f) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) a[i / 4][i % 4] = pack_pair<T>(c[2 * i] * factor, c[2 * i + 1] * factor);
}
// Fragments to the warp's 16 rows of a tile.
template <int BYTES, int COUNT>
__device__ __forceinline__ void store_fragments(u32 tile, const u32 (&a)[COUNT][4]) {
#pragma unroll
    for (int k = 0; k < COUNT; k++)
        stmatrix(tile + swizzled<BYTES>(WARP_ROW + LANE % 16, 2 * k + LANE / 16), a[k][0], a[k][1], a[k][2], a[k][3]);
}

// c = a b^T, of the tile `a` and a tile `b`, along the channels.
__device__ __forceinline__ void multiply_tokens(float (&c)[32], u32 a, u32 b) {
    u64 at_a = tile_descriptor<ROW_BYTES>(a), at_b = tile_descriptor<ROW_BYTES>(b);
#pragma unroll
    for (int k = 0; k < DP / 16; k++)
        wgmma<false, false>((T*)nullptr, c, at_a + k * DEPTH_STEP<false>, at_b + k * DEPTH_STEP<false>, k > 0);
}
// c = a b, or c + a b where `add`: 64 x 64 weights `a` and a tile `b`, along its tokens.
__device__ __forceinline__ void multiply_weights(float (&c)[DP / 2], const u32 (&a)[4][4], u32 b, bool add) {
    u64 at_b = tile_descriptor<ROW_BYTES>(b);
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<true>((T*)nullptr, c, a[k], at_b + k * DEPTH_STEP<true, ROW_BYTES>, add || k > 0);
}

// From scores in p and products of dout and v in ds, both transposed: the weights, and the scores' gradients but for the
// scale. lse and delta: those of the 64 queries, in shared memory.
__device__ __forceinline__ void differentiate(float (&p)[32], float (&ds)[32], const float* lse, const float* delta, float scale2) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float2 row_lse = *reinterpret_cast<const float2*>(lse + 8 * j + 2 * QUAD);
        float2 row_delta = *reinterpret_cast<const float2*>(delta + 8 * j + 2 * QUAD);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) {
            p[i] = exp2_fast(p[i] * scale2 - (i % 2 ? row_lse.y : row_lse.x));
            ds[i] = p[i] * (ds[i] - (i % 2 ? row_delta.y : row_delta.x));
        }
    }
}
