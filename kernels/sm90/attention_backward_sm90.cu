// Attention's backward on Hopper for long sequences: the scores are computed once for all three gradients.
//
//   delta     writes rows: of each query lse, and delta, the sum over channels of out · dout. Zeroes turns.
//   backward  writes dk and dv, and the sums of dq.
//   finish    writes dq, rounded.
//
// Arguments
//   Layouts and lse are as in attention.cu, T and DP as in attention_sm90.cuh, sums_q, sums_k, sums_v, `token` and `head` as in
//   attention_sm90.cu. A tile is of 64 queries; their number is even, and the last one may have none.
//   rows       float (N, heads, tiles, 2, 64).
//   sums       float4 (N, heads, tiles, DP / 8, 128): what each thread of a warpgroup holds of a product.
//   turns      u32 (N, heads, tiles): how many blocks have added their part to a tile of sums.
//   blocks     those of a head: each has KEYS keys. The grid is a multiple of it, as many heads are computed at once.
//
// How it works
//   Step       A block walks over the queries, two tiles at a step. Each of its two warpgroups that multiply has 64 keys. The scores
//              are transposed: from registers p and ds are the left operands of dv and dk.
//   dq         ds goes to shared memory too. At the end of a step a warpgroup multiplies ds of all KEYS keys and one of the tiles by
//              the keys: a part of dq. A warp of the producer's warpgroup adds it to the sums.
//   Turns      Parts of a tile are added in a fixed order, so that the sums have the same bits in every run. The blocks of a head
//              begin at different tiles. So each finds the part that comes before its own in place, and seldom waits.
//   Order      A block waits for others of its head: the launch is cooperative. A block computes several heads one after the other.
//
// Launch
//   delta      (tiles, heads, N) blocks of 128 threads.
//   backward   Maps {D, heads, tokens, N}, boxes as in attention_sm90.cu, of KEYS tokens of k and v, of 64 of the others. Shared:
//              KEY_STAGES of two tiles of KEYS, STAGES of two tiles of 64 and 1 KiB, 32 KiB, two float tiles of 64, 512 bytes.
//   finish     (tiles that have queries, heads, N) blocks of 128 threads. Shared: a tile of 64.
#include "attention_sm90.cuh"

constexpr int KEYS = 128, CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int STAGES = 2, KEY_STAGES = DP <= 96 ? 2 : 1;
constexpr int KEY_TILE = KEYS * DP * 2, ROWS = 128 * sizeof(float), STAGE = 2 * TILE + 1024;
constexpr int SCORES = KEYS * 64 * 2;     // bytes of ds of a tile
constexpr int PART = 64 * DP * 4;         // bytes of a part of dq
constexpr bool AHEAD = DP <= 96;          // the second tile's scores are begun before the first one's products are waited for
constexpr int FEWER = DP <= 96 ? 40 : 24, MORE = DP <= 96 ? 232 : 240;  // registers of a producer's thread and of the others

extern "C" __global__ void __launch_bounds__(128, 4)
delta(float* rows, u32* turns, const float* lse, const T* out, const T* dout, int Tq, int D) {
    wait_for_previous();
    int heads = gridDim.y, first = blockIdx.x * 64;
    i64 head = (i64)blockIdx.z * heads + blockIdx.y;
    rows += (head * gridDim.x + blockIdx.x) * 128;
    if (threadIdx.x == 0) turns[head * gridDim.x + blockIdx.x] = 0;
    if (threadIdx.x < 64) rows[threadIdx.x] = first < Tq ? lse[head * (CEIL_DIV(Tq, 64) * 64) + first + threadIdx.x] : infinity();
    constexpr int PACKS = CEIL_DIV(DP, 32);
    uint4 packs[2][2][PACKS];  // of rows 32 apart, out and dout. Four threads hold a row
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int row = first + i * 32 + threadIdx.x / 4, d = p * 32 + QUAD * 8;
            i64 at = (((i64)blockIdx.z * Tq + row) * heads + blockIdx.y) * D + d;
            bool there = row < Tq && d < D;
            packs[i][0][p] = load_if(there, out + at);
            packs[i][1][p] = load_if(there, dout + at);
        }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float total = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) add_products(total, packs[i][0][p], packs[i][1][p]);
        total = sum_quad(total);
        if (QUAD == 0) rows[64 + i * 32 + threadIdx.x / 4] = total;
    }
}

// A block's walk over its heads, and over the steps of each.
struct Walk {
    int steps, blocks, block, head;
    __device__ __forceinline__ Walk(int Tq, int blocks)
        : steps(CEIL_DIV(Tq, 128)), blocks(blocks), block(blockIdx.x % blocks), head(blockIdx.x / blocks) {}
    __device__ __forceinline__ void next_head() { head += gridDim.x / blocks; }
    __device__ __forceinline__ int first_step() const { return block * steps / blocks; }
    __device__ __forceinline__ int after(int step) const { return step + 1 == steps ? 0 : step + 1; }
    // A tile's place among those of all heads.
    __device__ __forceinline__ u32 index(int step, int tile) const { return (head * steps + step) * 2 + tile; }
    // How many blocks add to a step's tiles before this one does. The last block that begins at the step or before it is the first
    // to add, then comes the one that begins before that one, and so on.
    __device__ __forceinline__ u32 before(int step) const {
        int last = CEIL_DIV((step + 1) * blocks, steps) - 1;
        return last < block ? last - block + blocks : last - block;
    }
};

// What lies in shared memory. `scores` is a buffer that both warpgroups fill and both read. Of `parts` each has one.
struct Shared {
    static constexpr u32 KEY_BYTES = KEY_STAGES * 2 * KEY_TILE, BYTES = KEY_BYTES + STAGES * STAGE + 2 * SCORES + 2 * PART;
    Ring keys, queries, scores;
    u32 parts, barriers;
    __device__ __forceinline__ Shared(u32 base)
        : keys(base, 2 * KEY_TILE, KEY_STAGES, base + BYTES), queries(base + KEY_BYTES, STAGE, STAGES, base + BYTES + 64),
          scores(base + KEY_BYTES + STAGES * STAGE, 2 * SCORES, 1, base + BYTES + 128), parts(base + BYTES - 2 * PART),
          barriers(base + BYTES + 192) {}
    __device__ __forceinline__ u32 part_full(int group) const { return barriers + 16 * group; }
    __device__ __forceinline__ u32 part_empty(int group) const { return part_full(group) + 8; }
    __device__ __forceinline__ void init() const {
        keys.init(2), queries.init(8);
        barrier_init(scores.full(0), 8), barrier_init(scores.empty(0), 8);
        for (int group = 0; group < 2; group++) barrier_init(part_full(group), 128), barrier_init(part_empty(group), 1);
        fence_barriers();
        // Scores and parts are free at first, so that all waits of a step are for one parity.
        for (int warp = 0; warp < 8; warp++) barrier_arrive(scores.empty(0));
        for (int group = 0; group < 2; group++) barrier_arrive(part_empty(group));
    }
};

// Else what follows of x would be computed before a loop and lie in registers through it, of which there are too few.
__device__ __forceinline__ void opaque(int& x) { asm volatile("" : "+r"(x)); }

// One thread of the producer's warpgroup loads all tiles: a head's keys and values, by this,
__device__ __forceinline__ void load_keys(Shared& at, const Walk& walk, const TileMap& k, const TileMap& v, int heads, int D) {
    Head head(walk.head % heads, D);
    u32 full = at.keys.acquire(2 * KEY_TILE);
    load_tile<KEYS>(at.keys.buffer(), k, full, head, walk.block * KEYS, walk.head / heads);
    load_tile<KEYS>(at.keys.buffer() + KEY_TILE, v, full, head, walk.block * KEYS, walk.head / heads);
    at.keys.advance();
}
// and by this a step's two tiles of queries and of the result's gradients, each with its rows.
__device__ __forceinline__ void load_queries(const Shared& at, const Walk& walk, int step, u32 parity, const TileMap& q,
                                             const TileMap& dout, const float* rows, int heads, int D) {
    int item = walk.head;
    opaque(item);
    Head head(item % heads, D);
#pragma unroll 1
    for (int tile = 0; tile < 2; tile++) {
        u32 full = at.queries.full(tile), stage = at.queries.buffers + tile * STAGE;
        barrier_wait(at.queries.empty(tile), parity ^ 1);
        barrier_expect(full, 2 * TILE + ROWS);
        load_tile(stage, q, full, head, step * 128 + tile * 64, item / heads);
        load_tile(stage + TILE, dout, full, head, step * 128 + tile * 64, item / heads);
        bulk_load(stage + 2 * TILE, rows + (i64)walk.index(step, tile) * 128, ROWS, full);
    }
}
// Two other threads of it add parts of dq, each those of one warpgroup, when it is this block's turn.
__device__ __forceinline__ void add_part(const Shared& at, const Walk& walk, int step, u32 parity, int group, float* sums, u32* turns) {
    barrier_wait(at.part_full(group), parity);
    u32 index = walk.index(step, group), before = walk.before(step), now, part = at.parts + group * PART;
    if (before == 0) {
        bulk_store(sums + (i64)index * (PART / 4), part, PART);
    } else {
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turns + index) : "memory");
        while (now != before);
        fence_global_writes();
        bulk_add(sums + (i64)index * (PART / 4), part, PART);
    }
    tma_store_wait();
    barrier_arrive(at.part_empty(group));
    tma_store_done();
    fence_global_writes();
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(turns + index) : "memory");
}

// The rows of transposed fragments, which are keys, become zeros from `left` on.
__device__ __forceinline__ void clear_rows(u32 (&a)[4][4], int left) {
#pragma unroll
    for (int i = 0; i < 16; i++)
        if ((int)(WARP_ROW + i % 2 * 8 + GROUP) >= left) a[i / 4][i % 4] = 0;
}

// WIDTH columns of dq from FIRST on: ds of a tile and KEYS keys, transposed as it lies in shared memory, times the keys.
template <int FIRST, int WIDTH>
__device__ __forceinline__ void multiply_scores(float (&dq)[DP / 2], u32 scores, u32 keys) {
    constexpr int ROW_BYTES = WIDTH < 64 ? WIDTH * 2 : 128;
    float(&columns)[WIDTH / 2] = reinterpret_cast<float(&)[WIDTH / 2]>(dq[FIRST / 2]);
    u64 a = tile_descriptor(scores), b = tile_descriptor<ROW_BYTES>(keys + FIRST / 64 * KEYS * 128, KEYS * 128);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        wgmma<true, true>((T*)nullptr, columns, a + k * DEPTH_STEP<true>, b + k * DEPTH_STEP<true, ROW_BYTES>, k > 0);
}

// A warpgroup's products: with its 64 keys, and with 64 queries of a step.
struct Products { float dk[DP / 2], dv[DP / 2], p[32], ds[32]; };

// Starts the products p of keys and queries, and ds of values and the result's gradients, of the tile in a stage.
__device__ __forceinline__ void score(Products& of, u32 k_tile, u32 stage, int group) {
    wgmma_fence();
    multiply_tokens<32, 64, KEYS>(of.p, k_tile, stage, 0, group * 64);
    wgmma_commit();
    multiply_tokens<32, 64, KEYS>(of.ds, k_tile + KEY_TILE, stage + TILE, 0, group * 64);
    wgmma_commit();
}

// Waits for these products, and starts adding to dk and dv what the tile gives. Leaves ds in `scores`. rows: lse and delta.
__device__ __forceinline__ void attended(Products& of, u32 stage, const float* rows, u32 scores, int left, float scale2) {
    u32 weights[4][4], dscores[4][4];
    wgmma_wait<1>();
    weigh_again(of.p, rows, scale2);
    wgmma_wait<0>();
    differentiate(of.ds, of.p, rows + 64);
    round_fragments(of.p, weights);
    round_fragments(of.ds, dscores);
    if (left < 64) clear_rows(dscores, left);  // of keys that are zeros, whose weights may be infinite
    wgmma_fence();
    multiply_weights<4, 64>(of.dv, weights, stage + TILE, true);
    multiply_weights<4, 64>(of.dk, dscores, stage, true);
    wgmma_commit();
    store_fragments(scores, dscores);
    fence_writes();
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
backward(const __grid_constant__ TileMap q, const __grid_constant__ TileMap k, const __grid_constant__ TileMap v,
         const __grid_constant__ TileMap dout, const __grid_constant__ TileMap dk, const __grid_constant__ TileMap dv, float* sums,
         u32* turns, const float* rows, int images, int heads, int Tq, int Tk, int blocks, int D, float scale, float* sums_k,
         float* sums_v, int token, int head) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared);
    Shared at(base);
    Walk walk(Tq, blocks);
    int group = threadIdx.x / 128, all = images * heads;
    if (threadIdx.x == 0) {
        at.init();
        prefetch(q), prefetch(k), prefetch(v), prefetch(dout);
    }
    __syncthreads();
    wait_for_previous();
    if (group == 2) {
        set_registers<FEWER, false>();
        int warp = threadIdx.x % 128 / 32;
        if (LANE != 0 || warp == 3) return;
        for (u32 parity = 0; walk.head < all; walk.next_head()) {
            if (warp == 0) load_keys(at, walk, k, v, heads, D);
            int step = walk.first_step();
#pragma unroll 1
            for (int i = 0; i < walk.steps; i++, step = walk.after(step), parity ^= 1)
                if (warp == 0) load_queries(at, walk, step, parity, q, dout, rows, heads, D);
                else add_part(at, walk, step, parity, warp - 1, sums, turns);
        }
        return;
    }
    set_registers<MORE, true>();
    int first = walk.block * KEYS + group * 64;
    u32 part = at.parts + group * PART, scores = at.scores.buffers + group * (SCORES / 2), done = 0;  // steps of all heads
    for (; walk.head < all; walk.next_head()) {
        Products of;
        clear(of.dk), clear(of.dv);
        at.keys.wait();
        u32 k_tile = at.keys.buffer();
#pragma unroll 1
        for (u32 end = done + walk.steps; done != end; done++) {
            u32 parity = done & 1;
            auto begin = [&](int tile) {
                barrier_wait(at.queries.full(tile), parity);
                score(of, k_tile, at.queries.buffers + tile * STAGE, group);
            };
            auto attend = [&](int tile) {
                u32 stage = at.queries.buffers + tile * STAGE;
                attended(of, stage, reinterpret_cast<const float*>(shared + (stage - base) + 2 * TILE), scores + tile * SCORES, Tk - first,
                         scale * LOG2E);
            };
            auto release = [&](u32 barrier) {  // each warp has read its rows for itself
                if (LANE == 0) barrier_arrive(barrier);
            };
            begin(0);
            barrier_wait(at.scores.empty(0), parity);
            attend(0);
            if (AHEAD) begin(1), wgmma_wait<2>();
            else wgmma_wait<0>();
            release(at.queries.empty(0));
            if (!AHEAD) begin(1);
            attend(1);
            release(at.scores.full(0));
            wgmma_wait<0>();
            release(at.queries.empty(1));

            float dq[DP / 2];
            barrier_wait(at.scores.full(0), parity);
            wgmma_fence();
            if constexpr (FULL > 0) multiply_scores<0, FULL * 64>(dq, at.scores.buffers + group * SCORES, k_tile);
            if constexpr (REST > 0) multiply_scores<FULL * 64, REST>(dq, at.scores.buffers + group * SCORES, k_tile);
            wgmma_commit();
            wgmma_wait<0>();
            release(at.scores.empty(0));
            barrier_wait(at.part_empty(group), parity);
            float4* part_of_thread = reinterpret_cast<float4*>(shared + (part - base)) + threadIdx.x % 128;
#pragma unroll
            for (int j = 0; j < DP / 8; j++)
                part_of_thread[j * 128] = make_float4(dq[4 * j], dq[4 * j + 1], dq[4 * j + 2], dq[4 * j + 3]);
            fence_writes();
            barrier_arrive(at.part_full(group));
        }
        at.keys.release();
        barrier_wait(at.part_empty(group), done & 1);
        int key = first, n = walk.head / heads;
        opaque(key);
        Head own(walk.head % heads, D);
        store_tile(dk, of.dk, scale, part, own, key, n);
        store_tile(dv, of.dv, 1.0f, part + TILE, own, key, n);
        if (sums_k && key < Tk) {
            i64 to = ((i64)n * CEIL_DIV(Tk, 64) + key / 64) * token + own.h * head;
            leave_sums(sums_k + to, part, Tk - key, D), leave_sums(sums_v + to, part + TILE, Tk - key, D);
        }
        finish_stores();
        warpgroup_meets();
    }
}

extern "C" __global__ void __launch_bounds__(128)
finish(const __grid_constant__ TileMap dq, const float4* sums, int tiles, int Tq, int D, float scale, float* sums_q, int token,
       int head) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared);
    wait_for_previous();
    int first = blockIdx.x * 64, n = blockIdx.z;
    Head own(blockIdx.y, D);
    sums += (((i64)n * gridDim.y + own.h) * tiles + blockIdx.x) * (DP / 8 * 128) + threadIdx.x;
    float acc[DP / 2];
#pragma unroll
    for (int j = 0; j < DP / 8; j++) {
        float4 sum = __ldcg(sums + j * 128);
        acc[4 * j] = sum.x, acc[4 * j + 1] = sum.y, acc[4 * j + 2] = sum.z, acc[4 * j + 3] = sum.w;
    }
    store_tile(dq, acc, scale, base, own, first, n);
    if (sums_q) leave_sums(sums_q + ((i64)n * gridDim.x + blockIdx.x) * token + own.h * head, base, Tq - first, D);
    finish_stores();
}
