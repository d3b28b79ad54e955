// Flash attention on Hopper: attention.cu's three passes, by TMA and wgmma.
//
// For each image and head out = softmax(scale q k^T) v.
//
//   forward      writes out, lse.            A warpgroup has 64 queries and walks over the keys (online softmax).
//   backward_q   writes dq, delta.           A warpgroup has 64 queries, and recomputes the weights from lse.
//   backward_kv  reads delta; writes dk, dv. A warpgroup has 64 keys and walks over the queries. Its scores are transposed.
//
// Arguments
//   Layouts, lse and delta are as in attention.cu, T and DP as in attention_sm90.cuh. Base, strides and D are multiples of 16
//   bytes. D is at most DP.
//   sums_q, sums_k, sums_v   float, or null: the sums of dq, dk and dv over each tile of 64 tokens, for each channel. They are
//                            written where DP is over 32. `token` floats lie from a tile's sums to the next, and `head` from a
//                            head's to the next.
//   bits, states, by_image, by_head   the mask, where MASKED is 1: see attention_mask.cuh. Tiles without any pair are skipped.
//                            A query that attends to no key has a result and gradients of 0.
//
// How it works
//   Steps      A step is a tile of 64 tokens of the other side, two arrays of them: k and v, or q and dout. Thread 0 loads the
//              tiles into a ring of STAGES.
//   Products   The result of a product is rounded in registers, and is the left operand of the next product.
//   Overlap    In the backward, the scores become weights while dout is multiplied by v. Else a warpgroup waits for each
//              product. The other warpgroups of its multiprocessor compute meanwhile. By registers 6 warpgroups of forward fit
//              where DP is 32, 5 with a mask, 4 up to 80, 3 beyond; 3 of backward_q; 3 of backward_kv, 2 where DP is 128.
//   Halves     Where DP is 80 or 96, backward_kv takes the queries of a step in two halves. With all 64 at once only two
//              warpgroups would fit, not three.
//
// Launch
//   Grid       (ceil(tokens / 64 / GROUPS), heads, N) blocks of GROUPS warpgroups; backward GROUPS is 1. tokens is Tq, or Tk in
//              backward_kv.
//   Maps       {D, heads, tokens, N}, a box of 64 tokens for each kind of panel: {64, 1, 64, 1} and {REST, 1, 64, 1}.
//   Shared     GROUPS tiles, or 2 backward; STAGES of two tiles, in backward_kv 1024 bytes more each; 128 bytes of barriers.
#include "attention_mask.cuh"
#include "attention_sm90.cuh"

static_assert(!MASKED || GROUPS == 1, "a block's queries are of one tile of the mask");
constexpr int THREADS = GROUPS * 128;
constexpr int BLOCKS = (DP == 32 ? 6 - MASKED : DP <= 80 ? 4 : 3) / GROUPS;  // that fit by registers
constexpr int KV_BLOCKS = DP <= 96 ? 3 : 2;
constexpr int AT_ONCE = DP == 80 || DP == 96 ? 32 : 64;  // queries that backward_kv multiplies at once

// Release the stage of a step, which THREADS threads have read together. Thread 0 then loads a later step into it, if any is left.
template <int THREADS, class Load> __device__ __forceinline__ void reuse_stage(Ring& ring, Load& load) {
    if constexpr (THREADS == 32) __syncwarp();  // its first lane releases it for all, which must have read
    ring.release<THREADS>();
    if (threadIdx.x == 0) load();
    __syncwarp();
}

// The mask of a tile's keys for this lane's two rows, of the 64 from `first` on: bits. Loaded while the scores are computed.
__device__ __forceinline__ void load_mask(u64 (&attends)[2], const Mask& pairs, TileState state, int first, int key_tile) {
    if (!MASKED) return;
#pragma unroll
    for (int r = 0; r < 2; r++)
        attends[r] = state == SOME ? pairs.rows(key_tile, first + WARP_ROW + 8 * r + GROUP)[0] : ~0ull;
}
// Scores of the pairs that do not attend become -inf. The keys are a tile's, or its first 2 COUNT.
template <int COUNT> __device__ __forceinline__ void mask_keys(float (&s)[COUNT], const u64 (&attends)[2]) {
    if (!MASKED || (attends[0] & attends[1]) == ~0ull) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u64 row = attends[r] >> 2 * QUAD;
#pragma unroll
        for (int i = 2 * r; i < COUNT; i += 4) {
            if (!(row >> i / 4 * 8 & 1)) s[i] = -infinity();
            if (!(row >> i / 4 * 8 & 2)) s[i + 1] = -infinity();
        }
    }
}
// The same of transposed scores: rows are the keys of a tile. `bits` are of the 2 COUNT queries, in shared memory.
template <int COUNT> __device__ __forceinline__ void mask_queries(float (&s)[COUNT], const u64* bits) {
    const u32* half_rows = reinterpret_cast<const u32*>(bits) + WARP_ROW / 32;
    int key = WARP_ROW % 32 + GROUP;
#pragma unroll
    for (int i = 0; i < COUNT; i += 4)
#pragma unroll
        for (int c = 0; c < 2; c++) {
            u32 keys = half_rows[2 * (i * 2 + 2 * QUAD + c)] >> key;
            if (!(keys & 1)) s[i + c] = -infinity();
            if (!(keys & 1 << 8)) s[i + 2 + c] = -infinity();
        }
}

// A block's tile of queries. With a mask the last ones begin first: by a causal mask they have most keys.
__device__ __forceinline__ int last_first() { return MASKED ? gridDim.x - 1 - blockIdx.x : blockIdx.x; }

// A row's `top` before its first score. It is finite where MASKED: a row of which no score counts has weights of 0, not NaN.
__device__ __forceinline__ float lowest() { return MASKED ? -3.0e38f : -infinity(); }

// A step of the online softmax: adds to acc and sum what 64 queries get from the first KEYS tokens of a tile of keys, and of
// the tile of values behind it. `left` tokens exist; those after them are masked. The queries lie from `first` on.
template <int KEYS>
__device__ __forceinline__ void attend(float (&acc)[DP / 2], float (&top)[2], float (&sum)[2], u32 queries, u32 tile, int left,
                                       float scale2, bool begins, const Mask& pairs, TileState state, int first, int step) {
    float s[KEYS / 2];
    u32 weights[KEYS / 16][4];
    u64 attends[2];
    load_mask(attends, pairs, state, first, step);
    auto score = [&](bool) {
        wgmma_fence();
        multiply_tokens<KEYS / 2, 64>(s, queries, tile);
        wgmma_commit();
        wgmma_wait<0>();
        if (left < KEYS) mask(s, left);
        mask_keys(s, attends);
    };
    weigh(s, top, sum, scale2, begins, score, [&](int r, float factor) { scale_row(acc, r, factor); });
    round_fragments(s, weights);
    wgmma_fence();
    multiply_weights<KEYS / 16, 64>(acc, weights, tile + TILE, MASKED || !begins);
    wgmma_commit();
    wgmma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
forward(const __grid_constant__ TileMap q, const __grid_constant__ TileMap k, const __grid_constant__ TileMap v,
        const __grid_constant__ TileMap out, float* lse, int Tq, int Tk, int D, float scale, const u64* bits, const u8* states,
        int by_image, int by_head) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared), stages = base + GROUPS * TILE, barriers = stages + STAGES * 2 * TILE;
    u32 q_barrier = barriers + 16 * STAGES;
    int heads = gridDim.y, h = blockIdx.y, n = blockIdx.z, TP = CEIL_DIV(Tq, 64) * 64, steps = CEIL_DIV(Tk, 64);
    int tile = last_first(), group = threadIdx.x / 128, first = (tile * GROUPS + group) * 64;
    u32 own = base + group * TILE;
    float scale2 = scale * LOG2E;
    Head at(h, D);
    lse += ((i64)n * heads + h) * TP;
    Mask pairs(bits, states, by_image, by_head, n, h, Tq, Tk);
    Walk walk(pairs, pairs.at.of_queries(tile)), loading = walk;
    Ring ring(stages, 2 * TILE, STAGES, barriers), loads = ring;
    int ahead = 0;  // the steps before it are loaded or skipped
    auto load = [&] {
        ahead = loading.next<64>(ahead, steps);
        if (ahead >= steps) return;
        u32 full = loads.acquire(2 * TILE);
        load_tile(loads.buffer(), k, full, at, ahead * 64, n);
        load_tile(loads.buffer() + TILE, v, full, at, ahead * 64, n);
        loads.advance(), ahead++;
    };
    if (threadIdx.x == 0) {
        barrier_init(q_barrier, 1), ring.init(GROUPS);
        prefetch(q), prefetch(k), prefetch(v);
    }
    wait_for_previous();
    if (threadIdx.x == 0) {
        barrier_expect(q_barrier, GROUPS * TILE);
        for (int i = 0; i < GROUPS; i++) load_tile(base + i * TILE, q, q_barrier, at, first + i * 64, n);
        for (int i = 0; i < STAGES; i++) load();
    }
    __syncthreads();

    barrier_wait(q_barrier, 0);
    float acc[DP / 2];
    float top[2] = {lowest(), lowest()}, sum[2] = {};  // of rows GROUP and GROUP + 8: score * scale2 of the weight 1; this
                                                       // lane's part of the denominator
    if (MASKED) clear(acc);
    bool begins = true;
    for (int step = walk.next<64>(0, steps); step < steps; step = walk.next<64>(step + 1, steps), begins = false) {
        int left = Tk - step * 64;
        ring.wait();
        if (left > FEW) attend<64>(acc, top, sum, own, ring.buffer(), left, scale2, begins, pairs, walk.state(step), first, step);
        else attend<FEW>(acc, top, sum, own, ring.buffer(), left, scale2, begins, pairs, walk.state(step), first, step);
        reuse_stage<128>(ring, load);
    }
    finish_rows(acc, top, sum, lse, first, Tq, TP);
    store_tile(out, acc, 1.0f, own, at, first, n);
    finish_stores();
}

// Load the block's own two tiles, of the maps own and own2, to `base`, and start loading the first steps. A stage is
// released by so many `readers`, warps or warpgroups.
template <class Load>
__device__ __forceinline__ void begin_backward(const Ring& ring, int readers, u32 own_barrier, u32 base, const TileMap& own,
                                               const TileMap& own2, const TileMap& other, const TileMap& other2, Head head,
                                               int first, int n, Load& load) {
    if (threadIdx.x == 0) {
        barrier_init(own_barrier, 1), ring.init(readers);
        prefetch(own), prefetch(own2), prefetch(other), prefetch(other2);
    }
    wait_for_previous();
    if (threadIdx.x == 0) {
        barrier_expect(own_barrier, 2 * TILE);
        load_tile(base, own, own_barrier, head, first, n);
        load_tile(base + TILE, own2, own_barrier, head, first, n);
        for (int i = 0; i < STAGES; i++) load();
    }
    __syncthreads();
}

// A lane holds parts of two of its warp's 16 rows of `out`, GROUP and GROUP + 8. The four lanes of a row hold its packs of 8
// channels by turns: PACKS each, as they lie in tiles.
constexpr int PACKS = CEIL_DIV(DP, 32);

// Load this lane's packs, of the 64 rows from `first` on, and its rows' lse. Beyond Tq rows and a head's D channels are zeros.
__device__ __forceinline__ void load_rows(uint4 (&packs)[2][PACKS], float (&row_lse)[2], const T* out, const float* lse, int n,
                                          Head head, int heads, int first, int Tq, int D) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first + WARP_ROW + 8 * r + GROUP;
        const T* source = out + (((i64)n * Tq + row) * heads + head.h) * D;
        row_lse[r] = lse[row];
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int d = p * 32 + QUAD * 8 - head.zeros;
            packs[r][p] = load_if(row < Tq && d >= 0 && d < D, source + d);
        }
    }
}

// row_delta = for each of this lane's two rows the sum over channels of out · dout. It is also written to `delta`. `tile` is
// that of dout.
__device__ __forceinline__ void find_delta(float (&row_delta)[2], float* delta, const uint4 (&packs)[2][PACKS], const u8* tile) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = WARP_ROW + 8 * r + GROUP;
        float total = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int chunk = p * 4 + QUAD;
            if (chunk >= DP / 8) continue;
            add_products(total, packs[r][p], *reinterpret_cast<const uint4*>(tile + place<DP>(row, chunk)));
        }
        row_delta[r] = sum_quad(total);
        if (QUAD == 0) delta[row] = row_delta[r];
    }
}

// Where the sums of a block's tile begin, in floats. token, head: floats from a tile's sums to the next, and from a head's.
__device__ __forceinline__ i64 own_sums(int n, int h, int tile, int token, int head) {
    return ((i64)n * gridDim.x + tile) * token + h * head;
}

extern "C" __global__ void __launch_bounds__(128, 3)
backward_q(const __grid_constant__ TileMap q, const __grid_constant__ TileMap k, const __grid_constant__ TileMap v,
           const __grid_constant__ TileMap dout, const __grid_constant__ TileMap dq, float* delta, const float* lse,
           const T* out, int Tq, int Tk, int D, float scale, float* sums_q, int token, int head, const u64* bits,
           const u8* states, int by_image, int by_head) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared), stages = base + 2 * TILE, barriers = stages + STAGES * 2 * TILE;
    u32 own_barrier = barriers + 16 * STAGES;
    int heads = gridDim.y, h = blockIdx.y, n = blockIdx.z, TP = CEIL_DIV(Tq, 64) * 64, steps = CEIL_DIV(Tk, 64);
    int tile = last_first(), first = tile * 64;
    float scale2 = scale * LOG2E;
    Head at(h, D);
    lse += ((i64)n * heads + h) * TP;
    delta += ((i64)n * heads + h) * TP;
    Mask pairs(bits, states, by_image, by_head, n, h, Tq, Tk);
    Walk walk(pairs, pairs.at.of_queries(tile)), loading = walk;
    Ring ring(stages, 2 * TILE, STAGES, barriers), loads = ring;
    int ahead = 0;  // the steps before it are loaded or skipped
    auto load = [&] {
        ahead = loading.next<64>(ahead, steps);
        if (ahead >= steps) return;
        u32 full = loads.acquire(2 * TILE);
        load_tile(loads.buffer(), k, full, at, ahead * 64, n);
        load_tile(loads.buffer() + TILE, v, full, at, ahead * 64, n);
        loads.advance(), ahead++;
    };
    begin_backward(ring, 1, own_barrier, base, q, dout, k, v, at, first, n, load);

    uint4 own_out[2][PACKS];
    float row_lse[2], row_delta[2];
    load_rows(own_out, row_lse, out, lse, n, at, heads, first, Tq, D);
    barrier_wait(own_barrier, 0);
    find_delta(row_delta, delta + first, own_out, shared + TILE);
    u32 weights[4][4];
    float s[32], dp[32], acc[DP / 2];
    if (MASKED) clear(acc);
    for (int step = walk.next<64>(0, steps); step < steps; step = walk.next<64>(step + 1, steps)) {
        ring.wait();
        wgmma_fence();
        multiply_tokens(s, base, ring.buffer());
        wgmma_commit();
        multiply_tokens(dp, base + TILE, ring.buffer() + TILE);
        wgmma_commit();
        u64 attends[2];
        load_mask(attends, pairs, walk.state(step), first, step);
        wgmma_wait<1>();
        if ((step + 1) * 64 > Tk) mask(s, Tk - step * 64);
        mask_keys(s, attends);
#pragma unroll
        for (int i = 0; i < 32; i++) s[i] = exp2_fast(s[i] * scale2 - row_lse[i / 2 % 2]);
        wgmma_wait<0>();
#pragma unroll
        for (int i = 0; i < 32; i++) s[i] *= dp[i] - row_delta[i / 2 % 2];
        round_fragments(s, weights);
        wgmma_fence();
        multiply_weights(acc, weights, ring.buffer(), MASKED || step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        reuse_stage<128>(ring, load);
    }
    store_tile(dq, acc, scale, base, at, first, n);
    if (DP > 32 && sums_q) leave_sums(sums_q + own_sums(n, h, tile, token, head), base, Tq - first, D);
    finish_stores();
}

// Scores are transposed here: the keys are the rows of every product. So p and ds are A fragments as they are.
extern "C" __global__ void __launch_bounds__(128, KV_BLOCKS)
backward_kv(const __grid_constant__ TileMap q, const __grid_constant__ TileMap k, const __grid_constant__ TileMap v,
            const __grid_constant__ TileMap dout, const __grid_constant__ TileMap dk, const __grid_constant__ TileMap dv,
            const float* delta, const float* lse, int Tq, int Tk, int D, float scale, float* sums_k, float* sums_v, int token,
            int head, const u64* bits, const u8* states, int by_image, int by_head) {
    extern __shared__ __align__(1024) u8 shared[];
    constexpr u32 ROW_BYTES = 64 * sizeof(float), MASK_BYTES = MASKED ? 64 * sizeof(u64) : 0;  // of a step's queries
    constexpr u32 STAGE = 2 * TILE + 1024, BYTES = 2 * TILE + 2 * ROW_BYTES + MASK_BYTES;
    u32 base = shared_address(shared), stages = base + 2 * TILE, barriers = stages + STAGES * STAGE;
    u32 own_barrier = barriers + 16 * STAGES;
    int heads = gridDim.y, h = blockIdx.y, n = blockIdx.z, TP = CEIL_DIV(Tq, 64) * 64, steps = CEIL_DIV(Tq, 64);
    int first = blockIdx.x * 64;
    float scale2 = scale * LOG2E;
    Head at(h, D);
    lse += ((i64)n * heads + h) * TP;
    delta += ((i64)n * heads + h) * TP;
    Mask pairs(bits, states, by_image, by_head, n, h, Tq, Tk);
    Walk walk(pairs, pairs.at.of_keys(blockIdx.x)), loading = walk;
    Ring ring(stages, STAGE, STAGES, barriers), loads = ring;
    int ahead = 0;
    auto load = [&] {
        ahead = loading.next<64>(ahead, steps);
        if (ahead >= steps) return;
        u32 full = loads.acquire(BYTES), rows = loads.buffer() + 2 * TILE;
        load_tile(loads.buffer(), q, full, at, ahead * 64, n);
        load_tile(loads.buffer() + TILE, dout, full, at, ahead * 64, n);
        bulk_load(rows, lse + ahead * 64, ROW_BYTES, full);
        bulk_load(rows + ROW_BYTES, delta + ahead * 64, ROW_BYTES, full);
        if (MASKED) bulk_load(rows + 2 * ROW_BYTES, pairs.rows(blockIdx.x, ahead * 64), MASK_BYTES, full);
        loads.advance(), ahead++;
    };
    begin_backward(ring, 4, own_barrier, base, k, v, q, dout, at, first, n, load);

    float dk_acc[DP / 2], dv_acc[DP / 2];
    if (MASKED) clear(dk_acc), clear(dv_acc);
    barrier_wait(own_barrier, 0);
    for (int step = walk.next<64>(0, steps); step < steps; step = walk.next<64>(step + 1, steps)) {
        ring.wait();
        u32 q_tile = ring.buffer(), dout_tile = q_tile + TILE;
        const float* rows = reinterpret_cast<const float*>(shared + (q_tile - base) + 2 * TILE);
#pragma unroll
        for (int i = 0; i < 64; i += AT_ONCE) {
            float p[AT_ONCE / 2], ds[AT_ONCE / 2];
            u32 weights[AT_ONCE / 16][4], dscores[AT_ONCE / 16][4];
            wgmma_fence();
            multiply_tokens<AT_ONCE / 2, 64>(p, base, q_tile, i);
            wgmma_commit();
            multiply_tokens<AT_ONCE / 2, 64>(ds, base + TILE, dout_tile, i);
            wgmma_commit();
            wgmma_wait<1>();
            if (MASKED && walk.state(step) == SOME) mask_queries(p, reinterpret_cast<const u64*>(rows + 128) + i);
            weigh_again(p, rows + i, scale2);
            wgmma_wait<0>();
            differentiate(ds, p, rows + 64 + i);
            round_fragments(p, weights);
            round_fragments(ds, dscores);
            wgmma_fence();
            multiply_weights<AT_ONCE / 16, 64>(dv_acc, weights, dout_tile, MASKED || step > 0 || i > 0, i);
            multiply_weights<AT_ONCE / 16, 64>(dk_acc, dscores, q_tile, MASKED || step > 0 || i > 0, i);
            wgmma_commit();
            wgmma_wait<0>();  // the next scores take the registers of these weights
        }
        reuse_stage<32>(ring, load);  // each warp has read lse and delta for itself: it releases alone
    }
    store_tile(dk, dk_acc, scale, base, at, first, n);
    store_tile(dv, dv_acc, 1.0f, base + TILE, at, first, n);
    if (DP > 32 && sums_k) {
        leave_sums(sums_k + own_sums(n, h, blockIdx.x, token, head), base, Tk - first, D);
        leave_sums(sums_v + own_sums(n, h, blockIdx.x, token, head), base + TILE, Tk - first, D);
    }
    finish_stores();
}
