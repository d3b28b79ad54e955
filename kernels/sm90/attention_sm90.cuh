// What Hopper's attention kernels share: tiles of tokens by DP channels, products of them, and the online softmax.
//
// T is bf16 or half. DP is 32, 64, 80, 96 or 128: the channels of a head, D, rounded up to one of these. A tile has 64 tokens
// or more. TMA loads it in panels, which lie one after the other in shared memory: FULL of 64 channels, and one of REST, if any.
// A panel has a row for each token.
//
// The cache reads sectors of 32 bytes. Where D is an odd multiple of 8, every other head begins in the middle of a sector. So
// load_tile begins 8 channels before an odd head, where it loads zeros. If head 0 begins with a sector, then every panel but the
// first does, of all heads: of 72 channels, a token takes 5 sectors for 5.5.
#pragma once
#include "flash.cuh"
#include "wgmma.cuh"

constexpr int FULL = DP / 64, REST = DP % 64;
constexpr int REST_BYTES = REST ? REST * 2 : 128;  // of a row of the last panel
constexpr int TILE = 64 * DP * 2;

// The maps of an array, whose boxes are its panels. Where there is one kind of panel, both maps are the same.
struct TileMap { TensorMap full, rest; };

__device__ __forceinline__ void prefetch(const TileMap& map) {
    prefetch(map.full);
    if (FULL && REST) prefetch(map.rest);
}

// A last tile of at most FEW tokens is multiplied as a tile of FEW. Images of 14 × 14 and of 20 × 20 tokens leave 4 and 16.
constexpr int FEW = 16;

// A head, and the number of zeros before its channels in each row of a tile of load_tile's.
struct Head {
    int h, zeros;
    __device__ __forceinline__ Head(int h, int D) : h(h), zeros(D % 16 ? h % 2 * 8 : 0) {}
};

// A pack of 8 elements at `p`, or zeros. Of a Pack each element takes an instruction to be chosen.
__device__ __forceinline__ uint4 load_if(bool there, const T* p) {
    uint4 pack = {};
    if (there) pack = *reinterpret_cast<const uint4*>(p);
    return pack;
}
// Add the products of two packs' elements.
__device__ __forceinline__ void add_products(float& sum, uint4 a, uint4 b) {
    const u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 u = unpack_pair<T>(x[i]), v = unpack_pair<T>(y[i]);
        sum += u.x * v.x;
        sum += u.y * v.y;
    }
}

#define WARP_ROW (threadIdx.x / 32 % 4 * 16)  // where this warp's 16 rows start, of a warpgroup's 64

template <int COUNT> __device__ __forceinline__ void clear(float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) c[i] = 0.0f;
}
// Round a warpgroup's accumulators, times `factor`, to A fragments.
template <int COUNT>
__device__ __forceinline__ void round_fragments(const float (&c)[COUNT], u32 (&a)[COUNT / 8][4], float factor = 1.0f) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) a[i / 4][i % 4] = pack_pair<T>(c[2 * i] * factor, c[2 * i + 1] * factor);
}
// The byte offset of a chunk of 8 columns, in a tile of 64 rows and WIDTH columns in panels.
template <int WIDTH> __device__ __forceinline__ u32 place(int row, int chunk) {
    constexpr int WHOLE = WIDTH / 64, LEFT = WIDTH % 64;  // panels of 64 columns, and the last one's columns
    if (LEFT && chunk >= WHOLE * 8) return WHOLE * 64 * 128 + swizzled<LEFT ? LEFT * 2 : 128>(row, chunk - WHOLE * 8);
    return chunk / 8 * 64 * 128 + swizzled<128>(row, chunk % 8);
}
// Store fragments to the warp's 16 rows of a tile of as many columns. The first `skipped` chunks become the last ones.
template <int COUNT> __device__ __forceinline__ void store_fragments(u32 tile, const u32 (&a)[COUNT][4], int skipped = 0) {
#pragma unroll
    for (int k = 0; k < COUNT; k++) {
        int chunk = 2 * k + LANE / 16 - skipped;
        if (chunk < 0) chunk += 2 * COUNT;
        stmatrix(tile + place<16 * COUNT>(WARP_ROW + LANE % 16, chunk), a[k][0], a[k][1], a[k][2], a[k][3]);
    }
}

// Start loading TOKENS tokens from `first` on, by a map whose boxes have as many. `barrier` counts their bytes, TOKENS * DP * 2.
template <int TOKENS = 64>
__device__ __forceinline__ void load_tile(u32 tile, const TileMap& map, u32 barrier, Head head, int first, int n) {
#pragma unroll
    for (int p = 0; p < FULL; p++) tma_load(tile + p * TOKENS * 128, map.full, barrier, p * 64 - head.zeros, head.h, first, n);
    if (REST) tma_load(tile + FULL * TOKENS * 128, map.rest, barrier, FULL * 64 - head.zeros, head.h, first, n);
}
// Start storing factor * c of a warpgroup, without the columns of zeros, to the map's 64 tokens from `first` on. It goes through
// `buffer`, a tile of the warpgroup's own that it has read. There it lies from the first column on, until finish_stores.
__device__ __forceinline__ void store_tile(const TileMap& map, const float (&c)[DP / 2], float factor, u32 buffer, Head head,
                                           int first, int n) {
    u32 a[DP / 16][4];
    round_fragments(c, a, factor);
    warpgroup_meets();
    store_fragments(buffer, a, head.zeros / 8);
    fence_writes();
    warpgroup_meets();
    if (threadIdx.x % 128 == 0) {
#pragma unroll
        for (int p = 0; p < FULL; p++) tma_store(map.full, buffer + p * 64 * 128, p * 64, head.h, first, n);
        if (REST) tma_store(map.rest, buffer + FULL * 64 * 128, FULL * 64, head.h, first, n);
    }
}
__device__ __forceinline__ void finish_stores() {
    if (threadIdx.x % 128 == 0) tma_store_wait();
}
// Write for each of D channels the sum over the first `rows` rows of a rounded tile, which lies where store_tile left it.
__device__ __forceinline__ void leave_sums(float* sums, u32 tile, int rows, int D) {
    auto leave = [&](int d, float2 sum) {
        if (threadIdx.x % 32 < 8 && d < D) *reinterpret_cast<float2*>(sums + d) = sum;
    };
#pragma unroll
    for (int p = 0; p < FULL; p++) leave(p * 64 + PANEL_COLUMN, panel_sums<T>(tile + p * 64 * 128, rows));
    if ((int)PANEL_COLUMN < REST) leave(FULL * 64 + PANEL_COLUMN, panel_sums<T, REST_BYTES>(tile + FULL * 64 * 128, rows));
}

// c = a b^T, a product along the channels, of 64 tokens of a tile `a` of ROWS, from its token `own` on, and 2 COUNT tokens of a
// tile `b` of TOKENS, from its token `first` on.
template <int COUNT, int TOKENS = 2 * COUNT, int ROWS = 64>
__device__ __forceinline__ void multiply_tokens(float (&c)[COUNT], u32 a, u32 b, int first = 0, int own = 0) {
    constexpr int PANEL_A = ROWS * 128, PANEL_B = TOKENS * 128;
    u64 at_a = tile_descriptor(a + own * 128), at_b = tile_descriptor(b + first * 128);
#pragma unroll
    for (int k = 0; k < FULL * 4; k++)
        wgmma<false, false>((T*)nullptr, c, at_a + k / 4 * (PANEL_A >> 4) + k % 4 * DEPTH_STEP<false>,
                            at_b + k / 4 * (PANEL_B >> 4) + k % 4 * DEPTH_STEP<false>, k > 0);
    u64 rest_a = tile_descriptor<REST_BYTES>(a + FULL * PANEL_A + own * REST_BYTES);
    u64 rest_b = tile_descriptor<REST_BYTES>(b + FULL * PANEL_B + first * REST_BYTES);
#pragma unroll
    for (int k = 0; k < REST / 16; k++)
        wgmma<false, false>((T*)nullptr, c, rest_a + k * DEPTH_STEP<false>, rest_b + k * DEPTH_STEP<false>, FULL > 0 || k > 0);
}
// c = a b, or c + a b where `add`, for WIDTH columns of c from FIRST on. They are panels of b, tokens by columns, which lie
// `panel` bytes apart.
template <int FIRST, int WIDTH, int COUNT>
__device__ __forceinline__ void multiply_panels(float (&c)[DP / 2], const u32 (&a)[COUNT][4], u32 b, u32 panel, bool add) {
    constexpr int ROW_BYTES = WIDTH < 64 ? WIDTH * 2 : 128;
    float(&columns)[WIDTH / 2] = reinterpret_cast<float(&)[WIDTH / 2]>(c[FIRST / 2]);
    u64 at = tile_descriptor<ROW_BYTES>(b, panel);
#pragma unroll
    for (int k = 0; k < COUNT; k++) wgmma<true>((T*)nullptr, columns, a[k], at + k * DEPTH_STEP<true, ROW_BYTES>, add || k > 0);
}
// c = a b, or c + a b where `add`, a product along b's tokens: weights `a` of 64 rows by 16 COUNT tokens, and these tokens, of
// a tile `b` of TOKENS from its token `first` on.
template <int COUNT, int TOKENS = 16 * COUNT>
__device__ __forceinline__ void multiply_weights(float (&c)[DP / 2], const u32 (&a)[COUNT][4], u32 b, bool add, int first = 0) {
    constexpr int PANEL = TOKENS * 128;
    if constexpr (FULL > 0) multiply_panels<0, FULL * 64>(c, a, b + first * 128, PANEL, add);
    if constexpr (REST > 0) multiply_panels<FULL * 64, REST>(c, a, b + FULL * PANEL + first * REST_BYTES, 16, add);
}

// The online softmax, on the scores s of 64 queries and 2 COUNT keys. A lane has parts of two rows, GROUP and GROUP + 8.
// Rows are scaled down only where a lane's weights add up to more than LARGE, which is rare.
constexpr float LARGE = 256.0f;

// The scores of column `columns` and of those after it become -inf.
template <int COUNT> __device__ __forceinline__ void mask(float (&s)[COUNT], int columns) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        if (i / 4 * 8 + 2 * QUAD + i % 2 >= columns) s[i] = -infinity();
}
// Multiply row r of a product by a factor; r is 0 or 1, of the lane's two rows.
template <int COUNT> __device__ __forceinline__ void scale_row(float (&c)[COUNT], int r, float factor) {
#pragma unroll
    for (int i = 0; i < COUNT; i += 4) c[i + 2 * r] *= factor, c[i + 2 * r + 1] *= factor;
}
// A score has the weight 2^(score * scale2 - top). Raises `top` of both rows to the largest score so far, and calls
// shrink(r, factor) for both: what was summed of row r is to be multiplied by the factor. Returns whether one was above the `top`
// of a row of the warp; else it does nothing.
template <int COUNT, class Shrink>
__device__ __forceinline__ bool raise_top(const float (&s)[COUNT], float (&top)[2], float scale2, Shrink shrink) {
    float high[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        high[r] = s[2 * r];
#pragma unroll
        for (int i = 0; i < COUNT; i += 4) high[r] = fmaxf(high[r], fmaxf(s[i + 2 * r], s[i + 2 * r + 1]));
        high[r] = fmaxf(top[r], max_quad(high[r]) * scale2);
    }
    bool raised = __any_sync(~0u, high[0] > top[0] || high[1] > top[1]);
    if (raised)
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float factor = exp2_fast(top[r] - high[r]);
            top[r] = high[r];
            shrink(r, factor);
        }
    return raised;
}
// Leaves the weights of a warpgroup's scores in s, and adds them to `sum`, this lane's part of the denominators. score(again)
// computes the scores. The first step of a walk over keys looks for the largest. A later one looks at the sums of its weights,
// which takes fewer instructions; where one is large, it computes the scores again, and looks for the largest. 16 heads of 4,096
// tokens take 299 µs for 309 of 64 channels, 379 for 401 of 128. Returns whether shrink(r, factor) was called, as by raise_top.
template <int COUNT, class Score, class Shrink>
__device__ __forceinline__ bool weigh(float (&s)[COUNT], float (&top)[2], float (&sum)[2], float scale2, bool begins, Score score,
                                      Shrink shrink) {
    bool raised = false;
    for (bool looks = begins, again = false;; looks = again = true) {
        score(again);
        if (looks) raised = raise_top(s, top, scale2, [&](int r, float factor) { sum[r] *= factor, shrink(r, factor); });
        float added[2] = {};
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            s[i] = exp2_fast(s[i] * scale2 - top[i / 2 % 2]);
            added[i / 2 % 2] += s[i];
        }
        if (looks || !any_of_warpgroup(added[0] > LARGE || added[1] > LARGE)) {
            sum[0] += added[0], sum[1] += added[1];
            return raised;
        }
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
        float total = sum_quad(sum[r]);
        bool none = total == 0.0f;  // of the keys has a weight, by a mask: the result is 0
        scale_row(acc, r, none ? 0.0f : 1.0f / total);
        int row = first + WARP_ROW + 8 * r + GROUP;
        if (QUAD == 0 && row < TP) lse[row] = row < Tq && !none ? top[r] + log2f(total) : infinity();
    }
}
