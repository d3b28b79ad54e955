// The backward pass of attention on Hopper for few tokens of narrow heads: all gradients in one launch, scores computed once.
//
// Arguments
//   Layouts and lse are as in attention.cu. out is contiguous. D is at most DP. There are at most 64 TILES queries and 64 TILES
//   keys.
//   Maps                     {D, heads, tokens, N}, box {32, 1, 64, 1}.
//   sums_q, sums_k, sums_v   float (N, 4 TILES, ...), or null: for each channel the sums of dq, dk and dv over the tokens of
//                            each warp, before rounding. A row is `token` elements long. A head's sums lie `head` elements
//                            after those of the head before.
//
// How it works
//   Block      A block has a head of an image: TILES warpgroups, each with a tile of 64 keys and one of 64 queries.
//   Keys       A warpgroup walks over all queries, which lie in shared memory. The scores are transposed: the rows of p and ds
//              are its keys. From registers they are the left operands of dv and dk. ds goes to shared memory too.
//   Queries    Then a warpgroup multiplies ds of its own queries and of all keys by the keys: dq.
//
// Launch
//   Grid       (heads, N) blocks of 128 TILES threads.
//   Shared     16.5 KiB for each of TILES tiles, 8 KiB for each pair of them, 128 bytes of barriers.
#include "attention_sm90.cuh"

constexpr int THREADS = 128 * TILES, BLOCKS = TILES == 1 ? 4 : TILES == 2 ? 2 : 1;  // that fit a multiprocessor by registers
constexpr int D_SCORES = 64 * 128;  // bytes of a tile of ds

// Add to sums[2 j + e] column 8 j + 2 QUAD + e of a product, summed over this thread's two rows.
template <int COUNT>
__device__ __forceinline__ void add_columns(float (&sums)[COUNT / 2], const float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) sums[i] += c[i / 2 * 4 + i % 2] + c[i / 2 * 4 + 2 + i % 2];
}
// From such sums of a warp's threads, of 32 columns: the warp's sum of column 8 (GROUP / 2) + 2 QUAD + GROUP % 2. At each step
// two lanes each take half of the columns that both have left.
__device__ __forceinline__ float warp_column_sum(float (&sums)[8]) {
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
        bool upper = GROUP & half;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float given = upper ? sums[i] : sums[i + half];
            sums[i] = (upper ? sums[i + half] : sums[i]) + __shfl_xor_sync(0xffffffffu, given, 4 * half);
        }
    }
    return sums[0];
}

// Add to dk and dv of 64 keys, of which `left` exist, what the first QUERIES tokens of a tile of queries give them. Write ds to
// ds_tile; there the other queries are zeros. v lies behind k, dout behind q.
template <int QUERIES>
__device__ __forceinline__ void attended(float (&dk)[DP / 2], float (&dv)[DP / 2], u32 k_tile, u32 q_tile, u32 ds_tile,
                                         const float* lse, const float* delta, int left, float scale2, bool add) {
    float p[QUERIES / 2], ds[QUERIES / 2];
    u32 weights[QUERIES / 16][4], dscores[QUERIES / 16][4], all[4][4] = {};
    wgmma_fence();
    multiply_tokens<QUERIES / 2, 64>(p, k_tile, q_tile);
    wgmma_commit();
    multiply_tokens<QUERIES / 2, 64>(ds, k_tile + TILE, q_tile + TILE);
    wgmma_commit();
    wgmma_wait<1>();
    if (left < 64)  // other keys are zeros: their scores would be 0, not -inf, and count in sums_k and sums_v
#pragma unroll
        for (int e = 0; e < QUERIES / 2; e++)
            if ((int)(WARP_ROW + e / 2 % 2 * 8 + GROUP) >= left) p[e] = -infinity();
    weigh_again(p, lse, scale2);
    wgmma_wait<0>();
    differentiate(ds, p, delta);
    round_fragments(p, weights);
    round_fragments(ds, dscores);
    wgmma_fence();
    multiply_weights<QUERIES / 16, 64>(dv, weights, q_tile + TILE, add);
    multiply_weights<QUERIES / 16, 64>(dk, dscores, q_tile, add);
    wgmma_commit();
#pragma unroll
    for (int e = 0; e < QUERIES / 4; e++) all[e / 4][e % 4] = dscores[e / 4][e % 4];
    store_fragments(ds_tile, all);
    wgmma_wait<0>();  // the next scores take these registers
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
         const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap dq, const __grid_constant__ TensorMap dk,
         const __grid_constant__ TensorMap dv, const T* out, const float* lse, int Tq, int Tk, int D, float scale,
         float* sums_q, float* sums_k, float* sums_v, int token, int head) {
    extern __shared__ __align__(1024) u8 shared[];
    constexpr u32 KEYS = TILES * 2 * TILE, SCORES = 2 * KEYS, ROWS = SCORES + TILES * TILES * D_SCORES, BARRIERS = ROWS + TILES * 512;
    u32 base = shared_address(shared), barriers = base + BARRIERS;
    float* row_lse = reinterpret_cast<float*>(shared + ROWS);
    float* row_delta = row_lse + TILES * 64;
    int heads = gridDim.x, h = blockIdx.x, n = blockIdx.y, group = threadIdx.x / 128, thread = threadIdx.x % 128;
    int tiles = CEIL_DIV(Tq, 64), first = group * 64;
    u32 own_q = base + group * 2 * TILE, own_dout = own_q + TILE, own_k = own_q + KEYS, own_v = own_k + TILE;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2 * TILES; i++) barrier_init(barriers + 8 * i, 1);  // of queries, of keys
        fence_barriers();
        prefetch(q), prefetch(k), prefetch(v), prefetch(dout);
    }
    __syncthreads();
    wait_for_previous();
    if (thread == 0) {
        auto load = [&](u32 barrier, u32 to, const TensorMap& a, const TensorMap& b) {
            barrier_expect(barrier, 2 * TILE);
            tma_load(to, a, barrier, 0, h, first, n);
            tma_load(to + TILE, b, barrier, 0, h, first, n);
        };
        load(barriers + 8 * group, own_q, q, dout);
        load(barriers + 8 * (TILES + group), own_k, k, v);
    }
    __syncwarp();

    // delta of the warpgroup's queries: the sum over channels of dout · out, by four threads for a row
    Pack<T> outs[2];
    int d = thread % 4 * 8;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = first + i * 32 + thread / 4;
        outs[i] = row < Tq && d < D ? load_pack(out + (((i64)n * Tq + row) * heads + h) * D + d) : Pack<T>{};
    }
    if (threadIdx.x < tiles * 64) row_lse[threadIdx.x] = lse[((i64)n * heads + h) * tiles * 64 + threadIdx.x];
    barrier_wait(barriers + 8 * group, 0);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        int row = i * 32 + thread / 4;
        Pack<T> x = load_pack(reinterpret_cast<const T*>(shared + (own_dout - base) + place<DP>(row, thread % 4)));
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; e++) sum += to_float(x.v[e]) * to_float(outs[i].v[e]);
        sum = sum_quad(sum);
        if (thread % 4 == 0) row_delta[first + row] = sum;
    }
    __syncthreads();

    float dk_acc[DP / 2], dv_acc[DP / 2];
    barrier_wait(barriers + 8 * (TILES + group), 0);
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        u32 q_tile = base + i * 2 * TILE, ds_tile = base + SCORES + (i * TILES + group) * D_SCORES;
        barrier_wait(barriers + 8 * i, 0);
        if (Tq - i * 64 > FEW)
            attended<64>(dk_acc, dv_acc, own_k, q_tile, ds_tile, row_lse + i * 64, row_delta + i * 64, Tk - first,
                         scale * LOG2E, i > 0);
        else
            attended<FEW>(dk_acc, dv_acc, own_k, q_tile, ds_tile, row_lse + i * 64, row_delta + i * 64, Tk - first,
                          scale * LOG2E, i > 0);
    }
    fence_writes();
    __syncthreads();  // all have read q, dout and v, and left ds

    float dq_acc[DP / 2];
    wgmma_fence();
#pragma unroll
    for (int m = 0; m < TILES; m++) {
        u64 a = tile_descriptor(base + SCORES + (group * TILES + m) * D_SCORES);
        u64 b = tile_descriptor<REST_BYTES>(base + KEYS + m * 2 * TILE);
#pragma unroll
        for (int j = 0; j < 4; j++)
            wgmma<true, true>((T*)nullptr, dq_acc, a + j * DEPTH_STEP<true>, b + j * DEPTH_STEP<true, REST_BYTES>, m > 0 || j > 0);
    }
    wgmma_commit();
    auto store = [&](const TensorMap& map, const float (&c)[DP / 2], float factor, u32 buffer, float* sums) {
        u32 rounded[DP / 16][4];
        round_fragments(c, rounded, factor);
        store_fragments(buffer, rounded);
        fence_writes();
        warpgroup_meets();
        if (thread == 0) tma_store(map, buffer, 0, h, first, n);
        __syncwarp();
        if (!sums) return;
        float columns[DP / 4] = {};
        add_columns(columns, c);
        int d = GROUP / 2 * 8 + 2 * QUAD + GROUP % 2;
        float sum = warp_column_sum(columns);
        if (d < D) sums[((i64)(n * TILES + group) * 4 + thread / 32) * token + h * head + d] = factor * sum;
    };
    store(dk, dk_acc, scale, own_q, sums_k);
    store(dv, dv_acc, 1.0f, own_dout, sums_v);
    wgmma_wait<0>();
    if (group >= tiles)
#pragma unroll
        for (int i = 0; i < DP / 2; i++) dq_acc[i] = 0.0f;  // what ds would be was not written
    store(dq, dq_acc, scale, own_v, sums_q);
    if (thread == 0) tma_store_wait();
}
