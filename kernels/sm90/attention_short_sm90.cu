// The backward pass of attention on Hopper for few tokens of narrow heads: all gradients in one launch, scores computed once.
//
// Arguments
//   Layouts and lse are as in attention.cu. out is contiguous. D is at most DP. There are at most 64 TILES queries and, where
//   GROUPS is TILES, keys.
//   Maps                     {D, heads, tokens, N}, box {32, 1, 64, 1}.
//   sums_q, sums_k, sums_v   float (N, 4 TILES, ...), or null: the sums of dq, dk and dv over the tokens, for each channel, in
//                            4 TILES parts. A row is `token` elements long. A head's sums lie `head_pitch` elements after those of
//                            the head before. There are more than 64 TILES - 64 queries.
//
// How it works
//   Block      A block has a head of an image. All its queries lie in shared memory.
//   Keys       In a round each of GROUPS warpgroups has a tile of 64 keys, and walks over the tiles of queries. The scores are
//              transposed: the rows of p and ds are its keys. From registers they are the left operands of dv and dk.
//   Queries    ds goes to shared memory too. There a warpgroup multiplies ds of a tile of queries and of the round's keys by these
//              keys: dq. With as many warpgroups as tiles there is one round: all ds stay there, and each multiplies a tile at the
//              end. With fewer, a tile of queries is multiplied by its owner as soon as all have left its ds, and between rounds
//              dq waits in shared memory.
//   Sums       No reduction over keys is needed. A query's weights add up to 1, so those of dv are those of dout. To all keys of a
//              head one may add the same vector without changing a weight, so those of dk are 0.
//
// Launch
//   Grid       (heads, N) blocks of 128 GROUPS threads. GROUPS is at most TILES.
//   Shared     8.5 KiB for each of TILES tiles, 8 KiB for each warpgroup and for each tile of ds, 128 bytes of barriers. With
//              fewer warpgroups than tiles 8 KiB more for each tile.
#include "attention_sm90.cuh"

constexpr int THREADS = 128 * GROUPS, BLOCKS = GROUPS == 1 ? 4 : GROUPS == 2 ? 2 : 1;  // that fit a multiprocessor by registers
constexpr int D_SCORES = 64 * 128;               // bytes of a tile of ds
constexpr bool ONE_ROUND = GROUPS == TILES;      // then all ds stay in shared memory until the end
constexpr int DS_TILES = ONE_ROUND ? TILES : 1;  // of a warpgroup
// Where things lie in shared memory, behind the tiles of queries: tiles of keys, ds, barriers, lse and delta, dq after a round.
constexpr u32 KEYS = TILES * 2 * TILE, SCORES = KEYS + GROUPS * 2 * TILE, BARRIERS = SCORES + GROUPS * DS_TILES * D_SCORES;
constexpr u32 ROWS = BARRIERS + 128, SO_FAR = ROWS + TILES * 512;

// Named barriers; warpgroup_meets uses 1 to GROUPS. At WRITTEN the owner waits until all have left ds, at read_at(step) all others
// wait until it has read them. Two steps take different ones: an owner may come to the next step's before all have left its own.
constexpr int WRITTEN = 1 + GROUPS;
__device__ __forceinline__ int read_at(int step) { return 2 + GROUPS + step % 2; }
__device__ __forceinline__ void wait_at(int barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
__device__ __forceinline__ void arrive_at(int barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}

// Add to sums[2 j + e] column 8 j + 2 QUAD + e of a product, summed over this thread's two rows.
template <int COUNT>
__device__ __forceinline__ void add_columns(float (&sums)[COUNT / 2], const float (&c)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) sums[i] += c[i / 2 * 4 + i % 2] + c[i / 2 * 4 + 2 + i % 2];
}
// The sum of sums[GROUP] over the warp's threads of the same QUAD. At each step two lanes each take half of what both have left.
__device__ __forceinline__ float lane_sum(float (&sums)[8]) {
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

// Add a pair to two sums.
__device__ __forceinline__ void add_pair(float& first, float& second, u32 pair) {
    float2 x = unpack_pair<T>(pair);
    first += x.x, second += x.y;
}

// Leave in shared memory lse of all queries and, of the warpgroup's own, delta: the sum over channels of dout · out, by four
// threads for a row, which lie `pitch` elements apart. The loads are under way together. Write the sums of dv and dk.
__device__ __forceinline__ void leave_rows(const u8* shared, float* row_lse, float* row_delta, u32 barriers, const T* out,
                                           const float* lse, int Tq, int D, int pitch, int group, float* sums_k, float* sums_v,
                                           int token) {
    constexpr int OWN = CEIL_DIV(TILES, GROUPS), LSES = CEIL_DIV(TILES, 2 * GROUPS);
    int tiles = CEIL_DIV(Tq, 64), thread = threadIdx.x % 128;
    uint4 outs[OWN][2];
    float own_lse[LSES];
#pragma unroll
    for (int i = 0; i < 2 * OWN; i++) {
        int row = (group + i / 2 * GROUPS) * 64 + i % 2 * 32 + thread / 4, d = thread % 4 * 8;
        outs[i / 2][i % 2] = load_if(row < Tq && d < D, out + (i64)row * pitch + d);
    }
#pragma unroll
    for (int i = 0; i < LSES; i++)
        if (threadIdx.x + i * THREADS < tiles * 64) own_lse[i] = lse[threadIdx.x + i * THREADS];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        int tile = group + i * GROUPS;
        if (tile >= tiles) break;
        barrier_wait(barriers + 8 * tile, 0);
        float columns[8] = {};
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = half * 32 + thread / 4;
            uint4 x = *reinterpret_cast<const uint4*>(shared + tile * 2 * TILE + TILE + place<DP>(row, thread % 4));
            float sum = 0.0f;
            add_products(sum, x, outs[i][half]);
            sum = sum_quad(sum);
            if (thread % 4 == 0) row_delta[tile * 64 + row] = sum;
            add_pair(columns[0], columns[1], x.x), add_pair(columns[2], columns[3], x.y);
            add_pair(columns[4], columns[5], x.z), add_pair(columns[6], columns[7], x.w);
        }
        if (!sums_v) continue;
        float sum = lane_sum(columns);
        i64 at = (i64)(tile * 4 + thread / 32) * token + QUAD * 8 + GROUP;
        if (QUAD * 8 + GROUP < D) sums_k[at] = 0.0f, sums_v[at] = sum;
    }
#pragma unroll
    for (int i = 0; i < LSES; i++)
        if (threadIdx.x + i * THREADS < tiles * 64) row_lse[threadIdx.x + i * THREADS] = own_lse[i];
}

// Add to dk and dv of 64 keys, of which `left` exist, what the first QUERIES tokens of a tile of queries give them. Write ds to
// ds_tile once `until_free` has returned; there the other queries are zeros. v lies behind k, dout behind q.
template <int QUERIES, class UntilFree>
__device__ __forceinline__ void attended(float (&dk)[DP / 2], float (&dv)[DP / 2], u32 k_tile, u32 q_tile, u32 ds_tile,
                                         const float* lse, const float* delta, int left, float scale2, bool add,
                                         UntilFree until_free) {
    float p[QUERIES / 2], ds[QUERIES / 2];
    u32 weights[QUERIES / 16][4], dscores[QUERIES / 16][4], all[4][4] = {};
    wgmma_fence();
    multiply_tokens<QUERIES / 2, 64>(p, k_tile, q_tile);
    wgmma_commit();
    multiply_tokens<QUERIES / 2, 64>(ds, k_tile + TILE, q_tile + TILE);
    wgmma_commit();
    wgmma_wait<1>();
    if (left < 64)  // other keys are zeros: with scores of 0 their weights might be infinite, and dq NaN
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
    until_free();
    store_fragments(ds_tile, all);
    wgmma_wait<0>();  // the next scores take these registers
}

// The head of an image that a block has.
struct OwnHead {
    int h, n, D, token;  // its number, its image's; its channels; elements of a row of sums
};

// Start copying a tile of 64 tokens of two arrays, one behind the other.
__device__ __forceinline__ void load_tokens(u32 barrier, u32 to, const TensorMap& a, const TensorMap& b, OwnHead head, int tile) {
    barrier_expect(barrier, 2 * TILE);
    tma_load(to, a, barrier, 0, head.h, tile * 64, head.n);
    tma_load(to + TILE, b, barrier, 0, head.h, tile * 64, head.n);
}

// Store a product of 64 tokens by way of `buffer`, and its sums, where `sums` is not null.
__device__ __forceinline__ void store_tokens(const TensorMap& map, const float (&c)[DP / 2], float factor, u32 buffer, OwnHead head,
                                             int tile, float* sums = nullptr) {
    int thread = threadIdx.x % 128;
    u32 rounded[DP / 16][4];
    round_fragments(c, rounded, factor);
    store_fragments(buffer, rounded);
    fence_writes();
    warpgroup_meets();
    if (thread == 0) tma_store(map, buffer, 0, head.h, tile * 64, head.n);
    __syncwarp();
    if (!sums) return;
    float columns[DP / 4] = {};
    add_columns(columns, c);
    int d = GROUP / 2 * 8 + 2 * QUAD + GROUP % 2;
    float sum = lane_sum(columns);
    if (d < head.D) sums[(i64)(tile * 4 + thread / 32) * head.token + d] = factor * sum;
}

// Add to dq of a tile of queries what a tile of keys gives them, by their ds; or begin dq by that.
__device__ __forceinline__ void multiply_keys(float (&dq)[DP / 2], u32 ds, u32 keys, bool add) {
    u64 a = tile_descriptor(ds), b = tile_descriptor<REST_BYTES>(keys);
#pragma unroll
    for (int j = 0; j < 4; j++)
        wgmma<true, true>((T*)nullptr, dq, a + j * DEPTH_STEP<true>, b + j * DEPTH_STEP<true, REST_BYTES>, add || j > 0);
}

// dq of a tile of queries: what the first `count` tiles of a round's keys give it, added to `so_far`, this thread's part of dq
// after the rounds before. The first round does not read so_far.
__device__ __forceinline__ void add_round(float (&dq)[DP / 2], const float4* so_far, int round, int count, u32 base) {
#pragma unroll
    for (int j = 0; j < DP / 8; j++) reinterpret_cast<float4*>(dq)[j] = round > 0 ? so_far[j * 128] : float4{};
    wgmma_fence();
#pragma unroll 1
    for (int m = 0; m < count; m++) multiply_keys(dq, base + SCORES + m * D_SCORES, base + KEYS + m * 2 * TILE, true);
    wgmma_commit();
    wgmma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
backward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
         const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap dq, const __grid_constant__ TensorMap dk,
         const __grid_constant__ TensorMap dv, const T* out, const float* lse, int Tq, int Tk, int D, float scale,
         float* sums_q, float* sums_k, float* sums_v, int token, int head_pitch) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared), barriers = base + BARRIERS;
    float* row_lse = reinterpret_cast<float*>(shared + ROWS);
    float* row_delta = row_lse + TILES * 64;
    OwnHead head = {(int)blockIdx.x, (int)blockIdx.y, D, token};
    int heads = gridDim.x, thread = threadIdx.x % 128;
    int group = __shfl_sync(~0u, threadIdx.x / 128, 0);  // so that ptxas knows that a warp takes one way
    int tiles = CEIL_DIV(Tq, 64), key_tiles = CEIL_DIV(Tk, 64), rounds = ONE_ROUND ? 1 : CEIL_DIV(key_tiles, GROUPS);
    u32 own_k = base + KEYS + group * 2 * TILE, own_ds = base + SCORES + group * DS_TILES * D_SCORES;
    u32 keys_here = barriers + 8 * (TILES + group);
    if (threadIdx.x == 0) {
        for (int i = 0; i < TILES + GROUPS; i++) barrier_init(barriers + 8 * i, 1);  // of tiles of queries, of keys
        fence_barriers();
        prefetch(q), prefetch(k), prefetch(v), prefetch(dout);
    }
    __syncthreads();
    wait_for_previous();
    if (thread == 0) {
        for (int i = group; i < tiles; i += GROUPS) load_tokens(barriers + 8 * i, base + i * 2 * TILE, q, dout, head, i);
        if (ONE_ROUND || group < key_tiles) load_tokens(keys_here, own_k, k, v, head, group);
    }
    __syncwarp();

    i64 own_rows = ((i64)head.n * heads + head.h) * tiles * 64, own_sums = (i64)head.n * TILES * 4 * token + head.h * head_pitch;
    const T* own_out = out + ((i64)head.n * Tq * heads + head.h) * D;
    if (sums_q) sums_q += own_sums, sums_k += own_sums, sums_v += own_sums;
    leave_rows(shared, row_lse, row_delta, barriers, own_out, lse + own_rows, Tq, D, heads * D, group, sums_k, sums_v, token);
    __syncthreads();

    float dk_acc[DP / 2], dv_acc[DP / 2];
#pragma unroll 1
    for (int round = 0; round < rounds; round++) {
        int key_tile = round * GROUPS + group, left = Tk - key_tile * 64;
        if (ONE_ROUND || left > 0) barrier_wait(keys_here, round % 2);
#pragma unroll 1
        for (int i = 0; i < tiles; i++) {
            bool owner = i % GROUPS == group;
            int step = round * tiles + i;
            u32 q_tile = base + i * 2 * TILE, ds_tile = own_ds + (ONE_ROUND ? i * D_SCORES : 0);
            auto until_free = [&] {  // ds_tile
                if (ONE_ROUND) return;
                if (i > 0) {
                    if ((i - 1) % GROUPS != group) wait_at(read_at(step - 1));
                } else if (round > 0) {  // dk and dv lay there
                    if (thread == 0) tma_store_wait();
                    warpgroup_meets();
                }
            };
            barrier_wait(barriers + 8 * i, 0);
            if (!ONE_ROUND && left <= 0)
                until_free();
            else if (Tq - i * 64 > FEW)
                attended<64>(dk_acc, dv_acc, own_k, q_tile, ds_tile, row_lse + i * 64, row_delta + i * 64, left, scale * LOG2E,
                             i > 0, until_free);
            else
                attended<FEW>(dk_acc, dv_acc, own_k, q_tile, ds_tile, row_lse + i * 64, row_delta + i * 64, left, scale * LOG2E,
                              i > 0, until_free);
            if (ONE_ROUND) continue;
            fence_writes();
            if (!owner) {
                arrive_at(WRITTEN);
                continue;
            }
            wait_at(WRITTEN);
            float dq_acc[DP / 2];
            float4* so_far = reinterpret_cast<float4*>(shared + SO_FAR) + i * (DP / 8) * 128 + thread;
            add_round(dq_acc, so_far, round, min(GROUPS, key_tiles - round * GROUPS), base);
            warpgroup_meets();
            arrive_at(read_at(step));
            if (round < rounds - 1)
#pragma unroll
                for (int j = 0; j < DP / 8; j++) so_far[j * 128] = reinterpret_cast<float4*>(dq_acc)[j];
            else
                store_tokens(dq, dq_acc, scale, q_tile, head, i, sums_q);  // nobody reads the queries again
        }
        if constexpr (ONE_ROUND) {
            fence_writes();
            __syncthreads();  // all have left ds, and read q, dout and v
            float dq_acc[DP / 2];
            wgmma_fence();
#pragma unroll
            for (int m = 0; m < GROUPS; m++)
                multiply_keys(dq_acc, base + SCORES + (m * DS_TILES + group) * D_SCORES, base + KEYS + m * 2 * TILE, m > 0);
            wgmma_commit();
            store_tokens(dk, dk_acc, scale, own_k + TILE, head, group);
            store_tokens(dv, dv_acc, 1.0f, base + group * 2 * TILE, head, group);
            wgmma_wait<0>();
            if (group < tiles) store_tokens(dq, dq_acc, scale, base + group * 2 * TILE + TILE, head, group, sums_q);
        } else {
            if ((tiles - 1) % GROUPS != group) wait_at(read_at(round * tiles + tiles - 1));
            if (left <= 0) continue;
            if (thread == 0 && left > 64 * GROUPS) load_tokens(keys_here, own_k, k, v, head, key_tile + GROUPS);
            __syncwarp();
            store_tokens(dk, dk_acc, scale, own_ds, head, key_tile);
            store_tokens(dv, dv_acc, 1.0f, own_ds + TILE, head, key_tile);
        }
    }
    if (thread == 0) tma_store_wait();
}
