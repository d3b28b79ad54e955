// What Hopper's attention kernels share: tiles of tokens by DP channels, products of them, and the online softmax.
//
// T is bf16 or half. DP is 32, 64, 80, 96 or 128: the channels of a head, D, rounded up to one of these. A tile has 64 tokens
// or more. TMA loads it in PANELS of 64 channels (32 where DP is 32), which lie one after the other in shared memory. A panel
// has a row of ROW_BYTES for each token. The last panel's channels from DP on are not used.
//
// The cache reads sectors of 32 bytes. Where D is an odd multiple of 8, every other head begins in the middle of a sector. So
// load_tile begins 8 channels before an odd head, where it loads zeros. If head 0 begins with a sector, then every panel but the
// first does, of all heads: of 72 channels, a token takes 5 sectors for 5.5.
#pragma once
#include "flash.cuh"
#include "wgmma.cuh"

constexpr int ROW_BYTES = DP == 32 ? 64 : 128, PANELS = CEIL_DIV(DP, 64), TILE = PANELS * 64 * ROW_BYTES;

// A last tile of at most FEW tokens is multiplied as a tile of FEW. Images of 14 × 14 and of 20 × 20 tokens leave 4 and 16.
constexpr int FEW = 16;

// A head, and the number of zeros before its channels in each row of a tile of load_tile's.
struct Head {
    int h, zeros;
    __device__ __forceinline__ Head(int h, int D) : h(h), zeros(D % 16 ? h % 2 * 8 : 0) {}
};

#define WARP_ROW (threadIdx.x / 32 % 4 * 16)  // where this warp's 16 rows start, of a warpgroup's 64

// Round a warpgroup's accumulators, times `factor`, to A fragments.
template <int COUNT>
__device__ __forceinline__ void round_fragments(const float (&c)[COUNT], u32 (&a)[COUNT / 8][4], float factor = 1.0f) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) a[i / 4][i % 4] = pack_pair<T>(c[2 * i] * factor, c[2 * i + 1] * factor);
}
// Store fragments to the warp's 16 rows of a tile of 64 tokens. The first `skipped` chunks, of 8 columns, become the last ones of
// the panels.
template <int BYTES, int COUNT>
__device__ __forceinline__ void store_fragments(u32 tile, const u32 (&a)[COUNT][4], int skipped = 0) {
    constexpr int OF_PANEL = BYTES / 16, CHUNKS = CEIL_DIV(2 * COUNT, OF_PANEL) * OF_PANEL;
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int chunk = (2 * k + LANE / 16 - skipped) & (CHUNKS - 1);
        stmatrix(tile + chunk / OF_PANEL * 64 * BYTES + swizzled<BYTES>(WARP_ROW + LANE % 16, chunk % OF_PANEL),
                 a[k][0], a[k][1], a[k][2], a[k][3]);
    }
}

// Start loading TOKENS tokens from `first` on, by a map whose boxes are panels. `barrier` counts their bytes, PANELS * TOKENS *
// ROW_BYTES.
template <int TOKENS = 64>
__device__ __forceinline__ void load_tile(u32 tile, const TensorMap& map, u32 barrier, Head head, int first, int n) {
#pragma unroll
    for (int p = 0; p < PANELS; p++)
        tma_load(tile + p * TOKENS * ROW_BYTES, map, barrier, p * 64 - head.zeros, head.h, first, n);
}
// Start storing factor * c of a warpgroup, without the columns of zeros, to the map's 64 tokens from `first` on. It goes through
// `buffer`, a tile of the warpgroup's own that it has read. There it lies from the first column on, until finish_stores.
__device__ __forceinline__ void store_tile(const TensorMap& map, const float (&c)[DP / 2], float factor, u32 buffer, Head head,
                                           int first, int n) {
    u32 a[DP / 16][4];
    round_fragments(c, a, factor);
    warpgroup_meets();
    store_fragments<ROW_BYTES>(buffer, a, head.zeros / 8);
    fence_writes();
    warpgroup_meets();
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int p = 0; p < PANELS; p++) tma_store(map, buffer + p * 64 * ROW_BYTES, p * 64, head.h, first, n);
    }
}
__device__ __forceinline__ void finish_stores() {
    if (threadIdx.x % 128 == 0) tma_store_wait();
}

// c = a b^T, a product along the channels, of a tile `a` of 64 tokens and the first 2 COUNT tokens of a tile `b` of TOKENS.
template <int COUNT, int TOKENS = 2 * COUNT> __device__ __forceinline__ void multiply_tokens(float (&c)[COUNT], u32 a, u32 b) {
    constexpr int OF_PANEL = ROW_BYTES / 32, PANEL_A = 64 * ROW_BYTES / 16, PANEL_B = TOKENS * ROW_BYTES / 16;
    u64 at_a = tile_descriptor<ROW_BYTES>(a), at_b = tile_descriptor<ROW_BYTES>(b);
#pragma unroll
    for (int k = 0; k < DP / 16; k++)
        wgmma<false, false>((T*)nullptr, c, at_a + k / OF_PANEL * PANEL_A + k % OF_PANEL * DEPTH_STEP<false>,
                            at_b + k / OF_PANEL * PANEL_B + k % OF_PANEL * DEPTH_STEP<false>, k > 0);
}
// c = a b, or c + a b where `add`, a product along b's tokens: weights `a` of 64 rows by 16 COUNT tokens, and these tokens, the
// first of a tile `b` of TOKENS.
template <int COUNT, int TOKENS = 16 * COUNT>
__device__ __forceinline__ void multiply_weights(float (&c)[DP / 2], const u32 (&a)[COUNT][4], u32 b, bool add) {
    u64 at_b = tile_descriptor<ROW_BYTES>(b, PANELS > 1 ? TOKENS * ROW_BYTES : 16);
#pragma unroll
    for (int k = 0; k < COUNT; k++) wgmma<true>((T*)nullptr, c, a[k], at_b + k * DEPTH_STEP<true, ROW_BYTES>, add || k > 0);
}

// The online softmax, on the scores s of 64 queries and 2 COUNT keys. A lane has parts of two rows, GROUP and GROUP + 8.
// Rows are scaled down only where a weight would exceed 2^SLACK, which is rare.
constexpr float SLACK = 8.0f;

// The scores of column `columns` and of those after it become -inf.
template <int COUNT> __device__ __forceinline__ void mask(float (&s)[COUNT], int columns) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (i / 4 * 8 + 2 * QUAD + i % 2 >= columns) s[i] = -infinity();
}
// A score has the weight 2^(score * scale2 - top). Where a row of the warp has a score of a weight over 2^SLACK, `top` of every
// row is raised to its largest score so far, and shrink(r, factor) is called for both rows of a lane: what was summed of row r
// is to be multiplied by the factor. Returns whether that was so.
template <int COUNT, class Shrink>
__device__ __forceinline__ bool raise_top(const float (&s)[COUNT], float (&top)[2], float scale2, Shrink shrink) {
    float high[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        high[r] = s[2 * r];
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) high[r] = fmaxf(high[r], fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
        high[r] = max_quad(high[r]) * scale2;
    }
    bool raised = __any_sync(~0u, high[0] > top[0] + SLACK || high[1] > top[1] + SLACK);
    if (raised)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float above = fmaxf(top[r], high[r]), factor = exp2_fast(top[r] - above);
            top[r] = above;
            shrink(r, factor);
        }
    return raised;
}
// Multiply row r of a product by a factor; r is 0 or 1, of the lane's two rows.
template <int COUNT> __device__ __forceinline__ void scale_row(float (&c)[COUNT], int r, float factor) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) c[i + 2 * r] *= factor, c[i + 2 * r + 1] *= factor;
}
// Turn scores into weights, and add these to `sum`, this lane's part of the denominators.
template <int COUNT>
__device__ __forceinline__ void weigh(float (&s)[COUNT], const float (&top)[2], float (&sum)[2], float scale2) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        s[i] = exp2_fast(s[i] * scale2 - top[i / 2 % 2]);
        sum[i / 2 % 2] += s[i];
    }
}
// The backward's scores p become weights. They are transposed: rows are keys. lse is that of the 2 COUNT queries, in shared memory.
template <int COUNT> __device__ __forceinline__ void weigh_again(float (&p)[COUNT], const float* lse, float scale2) {
#pragma unroll
    for (int j = 0; j < COUNT / 4; j++) {
        float2 row = *reinterpret_cast<const float2*>(lse + 8 * j + 2 * QUAD);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) p[i] = exp2_fast(p[i] * scale2 - (i % 2 ? row.y : row.x));
    }
}
// Products ds of dout and v become the gradients of the scores, without the scale. They lie as the weights p, delta as lse.
template <int COUNT> __device__ __forceinline__ void differentiate(float (&ds)[COUNT], const float (&p)[COUNT], const float* delta) {
#pragma unroll
    for (int j = 0; j < COUNT / 4; j++) {
        float2 row = *reinterpret_cast<const float2*>(delta + 8 * j + 2 * QUAD);
#pragma unroll
        for (int i = 4 * j; i < 4 * j + 4; i++) ds[i] = p[i] * (ds[i] - (i % 2 ? row.y : row.x));
    }
}

// Divide the sums of weighted values by the denominators, and write lse of the 64 rows from `first` on. There are Tq rows, and
// lse has TP: past Tq it is +inf.
__device__ __forceinline__ void finish_rows(float (&acc)[DP / 2], const float (&top)[2], const float (&sum)[2], float* lse,
                                            int first, int Tq, int TP) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float total = sum_quad(sum[r]), factor = 1.0f / total;
        scale_row(acc, r, factor);
        int row = first + WARP_ROW + 8 * r + GROUP;
        if (QUAD == 0 && row < TP) lse[row] = row < Tq ? top[r] + log2f(total) : infinity();
    }
}
