// The backward pass of attention on Hopper for few tokens of narrow heads: all gradients in one launch, scores computed once.
//
// Arguments
//   Layouts and lse are as in attention.cu. out is contiguous. D is at most DP. There are at most 64 TILES queries and 64 TILES
//   keys.
//   Maps                     {D, heads, tokens, N}, box {32, 1, 64, 1}.
//   sums_q, sums_k, sums_v   float (N, 4 CLUSTER, ...), or null: for each channel the sums of dq, dk and dv over the tokens of
//                            each warp, before rounding. A row is `token` elements long. A head's sums lie `head` elements
//                            after those of the head before.
//
// How it works
//   Tiles      A block has the keys of KEY_TILES tiles and walks over the tiles of queries, all of which lie in its shared
//              memory.
//   Products   The scores are transposed: the rows of p and ds are keys. From registers they are the left operands of dv and
//              dk. ds goes through shared memory to be the left operand of dq.
//   Clusters   A block's part of a tile's dq takes the place of the tile's q and dout. Each block of the cluster takes some of
//              the tiles, and adds the blocks' parts of them in the order of ranks.
//
// Launch
//   Grid       (CLUSTER, heads, N) blocks of 128 threads.
//   Shared     8.5 KiB for each of TILES tiles of queries, 16 KiB for each tile of the block's keys, 128 bytes of barriers.
#include "attention_sm90.cuh"

constexpr int KEY_TILES = TILES == 1 ? 1 : 2, CLUSTER = TILES / KEY_TILES;
#include "cluster.cuh"

constexpr int BLOCKS = KEY_TILES == 1 ? 4 : 3;  // that fit a multiprocessor by their registers
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
// ds_tile; there the other queries are zeros.
template <int QUERIES>
__device__ __forceinline__ void attended(float (&dk)[DP / 2], float (&dv)[DP / 2], u32 k_tile, u32 v_tile, u32 q_tile,
                                         u32 dout_tile, u32 ds_tile, const float* lse, const float* delta, int left, float scale2,
                                         bool add) {
    float p[QUERIES / 2], ds[QUERIES / 2];
    u32 weights[QUERIES / 16][4], dscores[QUERIES / 16][4], all[4][4] = {};
    wgmma_fence();
    multiply_tokens<QUERIES / 2, 64>(p, k_tile, q_tile);
    multiply_tokens<QUERIES / 2, 64>(ds, v_tile, dout_tile);
    wgmma_commit();
    wgmma_wait<0>();
    if (left < 64)  // other keys are zeros: their scores would be 0, not -inf, and count in sums_k and sums_v
#pragma unroll
        for (int e = 0; e < QUERIES / 2; e++)
            if ((int)(WARP_ROW + e / 2 % 2 * 8 + GROUP) >= left) p[e] = -infinity();
    weigh_again(p, lse, scale2);
    differentiate(ds, p, delta);
    round_fragments(p, weights);
    round_fragments(ds, dscores);
    wgmma_fence();
    multiply_weights<QUERIES / 16, 64>(dv, weights, dout_tile, add);
    multiply_weights<QUERIES / 16, 64>(dk, dscores, q_tile, add);
    wgmma_commit();
#pragma unroll
    for (int e = 0; e < QUERIES / 4; e++) all[e / 4][e % 4] = dscores[e / 4][e % 4];
    store_fragments(ds_tile, all);
    wgmma_wait<0>();  // the next scores take these registers
}

extern "C" __global__ void __launch_bounds__(128, BLOCKS) __cluster_dims__(CLUSTER, 1, 1)
backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
         const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap dq, const __grid_constant__ TensorMap dk,
         const __grid_constant__ TensorMap dv, const T* out, const float* lse, int Tq, int Tk, int D, float scale,
         float* sums_q, float* sums_k, float* sums_v, int token, int head) {
    extern __shared__ __align__(1024) u8 shared[];
    constexpr u32 K_TILES = TILES * 2 * TILE, V_TILES = K_TILES + KEY_TILES * TILE, DS_TILES = V_TILES + KEY_TILES * TILE;
    constexpr u32 ROWS = DS_TILES + KEY_TILES * D_SCORES, BARRIERS = ROWS + TILES * 512;
    u32 base = shared_address(shared), k_tiles = base + K_TILES, v_tiles = base + V_TILES, ds_tiles = base + DS_TILES;
    float* row_lse = reinterpret_cast<float*>(shared + ROWS);
    float* row_delta = row_lse + TILES * 64;
    int heads = gridDim.y, rank = blockIdx.x, h = blockIdx.y, n = blockIdx.z, tiles = CEIL_DIV(Tq, 64);
    int first = rank * KEY_TILES * 64;
    float scale2 = scale * LOG2E;
    Ring queries(base, 2 * TILE, TILES, base + BARRIERS);
    u32 keys = base + BARRIERS + 16 * TILES;
    if (threadIdx.x == 0) {
        barrier_init(keys, 1), queries.init(1);
        prefetch(q), prefetch(k), prefetch(v), prefetch(dout);
    }
    wait_for_previous();
    if (threadIdx.x == 0) {
        barrier_expect(keys, KEY_TILES * 2 * TILE);
        for (int m = 0; m < KEY_TILES; m++) {
            tma_load(k_tiles + m * TILE, k, keys, 0, h, first + m * 64, n);
            tma_load(v_tiles + m * TILE, v, keys, 0, h, first + m * 64, n);
        }
        for (int i = 0; i < tiles; i++) {
            u32 full = queries.full(i), to = base + i * 2 * TILE;
            barrier_expect(full, 2 * TILE);
            tma_load(to, q, full, 0, h, i * 64, n);
            tma_load(to + TILE, dout, full, 0, h, i * 64, n);
        }
    }
    __syncthreads();

    // delta: the sum over channels of dout · out, by four threads for a row
    constexpr int ROUNDS = TILES * 2;
    Pack<T> outs[ROUNDS];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        int row = i * 32 + threadIdx.x / 4, d = threadIdx.x % 4 * 8;
        outs[i] = row < Tq && d < D ? load_pack(out + (((i64)n * Tq + row) * heads + h) * D + d) : Pack<T>{};
    }
    for (int i = threadIdx.x; i < tiles * 64; i += 128) row_lse[i] = lse[((i64)n * heads + h) * tiles * 64 + i];
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
        if (i / 2 >= tiles) break;
        barrier_wait(queries.full(i / 2), 0);
        int row = i % 2 * 32 + threadIdx.x / 4;
        Pack<T> x = load_pack(reinterpret_cast<const T*>(shared + i / 2 * 2 * TILE + TILE + place<DP>(row, threadIdx.x % 4)));
        float sum = 0.0f;
#pragma unroll
        for (int e = 0; e < 8; e++) sum += to_float(x.v[e]) * to_float(outs[i].v[e]);
        sum = sum_quad(sum);
        if (threadIdx.x % 4 == 0) row_delta[i / 2 * 64 + row] = sum;
    }
    __syncthreads();

    float dk_acc[KEY_TILES][DP / 2], dv_acc[KEY_TILES][DP / 2];
    barrier_wait(keys, 0);
#pragma unroll 1
    for (int i = 0; i < tiles; i++) {
        u32 q_tile = base + i * 2 * TILE, dout_tile = q_tile + TILE;
#pragma unroll
        for (int m = 0; m < KEY_TILES; m++) {
            u32 k_tile = k_tiles + m * TILE, v_tile = v_tiles + m * TILE, ds_tile = ds_tiles + m * D_SCORES;
            const float *own_lse = row_lse + i * 64, *own_delta = row_delta + i * 64;
            int left = Tk - first - m * 64;
            if (Tq - i * 64 > FEW)
                attended<64>(dk_acc[m], dv_acc[m], k_tile, v_tile, q_tile, dout_tile, ds_tile, own_lse, own_delta, left, scale2, i > 0);
            else
                attended<FEW>(dk_acc[m], dv_acc[m], k_tile, v_tile, q_tile, dout_tile, ds_tile, own_lse, own_delta, left, scale2, i > 0);
        }
        fence_writes();
        __syncthreads();
        float part[DP / 2];
        wgmma_fence();
#pragma unroll
        for (int m = 0; m < KEY_TILES; m++) {
            u64 a = tile_descriptor(ds_tiles + m * D_SCORES), b = tile_descriptor<REST_BYTES>(k_tiles + m * TILE);
#pragma unroll
            for (int j = 0; j < 4; j++)
                wgmma<true, true>((T*)nullptr, part, a + j * DEPTH_STEP<true>, b + j * DEPTH_STEP<true, REST_BYTES>, m > 0 || j > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        __syncthreads();  // all warps have read ds, q and dout
        float2* parts = reinterpret_cast<float2*>(shared + i * 2 * TILE) + threadIdx.x;
#pragma unroll
        for (int e = 0; e < DP / 4; e++) parts[e * 128] = make_float2(part[2 * e], part[2 * e + 1]);
    }

    i64 own_sum = ((i64)(n * CLUSTER + rank) * 4 + threadIdx.x / 32) * token + h * head;
    auto leave_sums = [&](float* sums, float (&columns)[DP / 4], float factor) {
        int d = GROUP / 2 * 8 + 2 * QUAD + GROUP % 2;
        float sum = warp_column_sum(columns);
        if (d < D) sums[own_sum + d] = factor * sum;
    };
    if (sums_q) {
        float columns_k[DP / 4] = {}, columns_v[DP / 4] = {};
#pragma unroll
        for (int m = 0; m < KEY_TILES; m++) add_columns(columns_k, dk_acc[m]), add_columns(columns_v, dv_acc[m]);
        leave_sums(sums_k, columns_k, scale);
        leave_sums(sums_v, columns_v, 1.0f);
    }
    u32 rounded[DP / 16][4];
#pragma unroll
    for (int m = 0; m < KEY_TILES; m++) {  // the gradients take the places of keys and values
        round_fragments(dk_acc[m], rounded, scale);
        store_fragments(k_tiles + m * TILE, rounded);
        round_fragments(dv_acc[m], rounded);
        store_fragments(v_tiles + m * TILE, rounded);
    }
    fence_writes();
    cluster_sync();
    if (threadIdx.x == 0)
        for (int m = 0; m < KEY_TILES; m++) {
            tma_store(dk, k_tiles + m * TILE, 0, h, first + m * 64, n);
            tma_store(dv, v_tiles + m * TILE, 0, h, first + m * 64, n);
        }
    __syncwarp();
    float columns_q[DP / 4] = {};
    for (int i = rank; i < tiles; i += CLUSTER) {
        const float2* parts = reinterpret_cast<const float2*>(shared + i * 2 * TILE) + threadIdx.x;
        float sum[DP / 2] = {};
#pragma unroll
        for (int e = 0; e < DP / 4; e++)
            for (int from = 0; from < CLUSTER; from++) {
                float2 part = load_cluster(parts + e * 128, from);
                sum[2 * e] += part.x, sum[2 * e + 1] += part.y;
            }
        add_columns(columns_q, sum);
        round_fragments(sum, rounded, scale);
        __syncthreads();  // all warps have read this block's part, which lies here
        store_fragments(base + i * 2 * TILE, rounded);
        fence_writes();
        __syncthreads();
        if (threadIdx.x == 0) tma_store(dq, base + i * 2 * TILE, 0, h, i * 64, n);
        __syncwarp();
    }
    if (sums_q) leave_sums(sums_q, columns_q, scale);
    if (threadIdx.x == 0) tma_store_wait();
    __syncwarp();
    if (CLUSTER > 1) cluster_sync();  // a block stays until the others have read its parts
}
