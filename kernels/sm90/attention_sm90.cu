// Flash attention on Hopper: attention.cu's passes by TMA and wgmma. Layouts, lse and delta as there.
//
//   forward      writes out, lse.            A warpgroup owns 64 queries and walks over the keys (online softmax).
//   backward_q   writes dq, delta.           A warpgroup owns 64 queries, recomputes scores from lse.
//   backward_kv  reads delta; writes dk, dv. A warpgroup owns 64 keys and walks over the queries, on transposed scores.
// Where DP is over 32 the backwards also leave the sums over each tile of 64 tokens of what they write, unless their place is null.
// Base, strides and D are multiples of 16 bytes; D is at most DP. Maps: {D, heads, tokens, N}, boxes {64, 1, 64, 1}, or
// {32, 1, 64, 1} where DP is 32.
// A step is 64 tokens of the other side, in a ring of STAGES, of which backward_q has one: two or three were slower. What a
// product gave is rounded in registers and is the left side of the next. A warpgroup waits for each product: the others of
// the multiprocessor, 4 or 6 in forward and 2 or 3 backward, compute meanwhile.
// Launch: GROUPS warpgroups (1 backward), (ceil(T / 64 / GROUPS), heads, N) blocks. Shared memory: GROUPS tiles (2
// backward), STAGES of two tiles (and of 1024 bytes in backward_kv), 128 bytes of barriers.
#include "attention_sm90.cuh"

constexpr int THREADS = GROUPS * 128, BLOCKS = (DP == 32 ? 6 : DP <= 80 ? 4 : 3) / GROUPS;  // that fit by their registers
constexpr int KV_BLOCKS = DP <= 64 ? 3 : 2;

// The stage that held `step` was read, by THREADS that read together: load(step + STAGES) takes it, where there are so many
// steps.
template <int THREADS, class Load> __device__ __forceinline__ void reuse_stage(Ring& ring, int step, int steps, Load load) {
    if constexpr (THREADS == 32) __syncwarp();  // its first lane speaks for what all have read
    ring.release<THREADS>();
    if (threadIdx.x == 0 && step + STAGES < steps) load(step + STAGES);
    __syncwarp();
}

// Add what 64 queries find at the first KEYS of a tile of keys, and of the tile of values behind it, of which `left` are there.
template <int KEYS>
__device__ __forceinline__ void attend(float (&acc)[DP / 2], float (&top)[2], float (&sum)[2], u32 queries, u32 tile, int left,
                                       float scale2, bool add) {
    float s[KEYS / 2];
    u32 weights[KEYS / 16][4];
    wgmma_fence();
    multiply_tokens<KEYS / 2, 64>(s, queries, tile);
    wgmma_commit();
    wgmma_wait<0>();
    if (left < KEYS) mask(s, left);

    raise_top(s, top, scale2, [&](int r, float factor) { sum[r] *= factor, scale_row(acc, r, factor); });
    weigh(s, top, sum, scale2);
    round_fragments(s, weights);
    wgmma_fence();
    multiply_weights<KEYS / 16, 64>(acc, weights, tile + TILE, add);
    wgmma_commit();
    wgmma_wait<0>();
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
forward(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
        const __grid_constant__ TensorMap out, float* lse, int Tq, int Tk, float scale) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared), stages = base + GROUPS * TILE, barriers = stages + STAGES * 2 * TILE;
    u32 q_barrier = barriers + 16 * STAGES;
    int heads = gridDim.y, h = blockIdx.y, n = blockIdx.z, TP = CEIL_DIV(Tq, 64) * 64, steps = CEIL_DIV(Tk, 64);
    int group = threadIdx.x / 128, first = (blockIdx.x * GROUPS + group) * 64;
    u32 own = base + group * TILE;
    float scale2 = scale * LOG2E;
    lse += ((i64)n * heads + h) * TP;
    Ring ring(stages, 2 * TILE, STAGES, barriers), loads = ring;
    auto load = [&](int step) {
        u32 full = loads.acquire(2 * TILE);
        load_tile(loads.buffer(), k, full, h, step * 64, n);
        load_tile(loads.buffer() + TILE, v, full, h, step * 64, n);
        loads.advance();
    };
    if (threadIdx.x == 0) {
        barrier_init(q_barrier, 1), ring.init(GROUPS);
        prefetch(q), prefetch(k), prefetch(v);
    }
    wait_for_previous();
    if (threadIdx.x == 0) {
        barrier_expect(q_barrier, GROUPS * TILE);
        for (int i = 0; i < GROUPS; i++) load_tile(base + i * TILE, q, q_barrier, h, first + i * 64, n);
        for (int step = 0; step < min(STAGES, steps); step++) load(step);
    }
    __syncthreads();

    barrier_wait(q_barrier, 0);
    float acc[DP / 2];
    float top[2] = {-infinity(), -infinity()}, sum[2] = {};  // of rows GROUP and GROUP + 8: log2 of the weight 1, and
                                                             // this lane's part of the denominator
    for (int step = 0; step < steps; step++) {
        int left = Tk - step * 64;
        ring.wait();
        if (left > FEW) attend<64>(acc, top, sum, own, ring.buffer(), left, scale2, step > 0);
        else attend<FEW>(acc, top, sum, own, ring.buffer(), left, scale2, step > 0);
        reuse_stage<128>(ring, step, steps, load);
    }
    finish_rows(acc, top, sum, lse, first, Tq, TP);
    store_tile(out, acc, 1.0f, own, h, first, n);
}

// Bring the block's own tiles to `base`, those of the maps own and own2, and start the first steps. `readers` release a stage.
template <class Load>
__device__ __forceinline__ void begin_backward(const Ring& ring, int readers, u32 own_barrier, u32 base, const TensorMap& own,
                                               const TensorMap& own2, const TensorMap& other, const TensorMap& other2, int h,
                                               int first, int n, int steps, Load& load) {
    if (threadIdx.x == 0) {
        barrier_init(own_barrier, 1), ring.init(readers);
        prefetch(own), prefetch(own2), prefetch(other), prefetch(other2);
    }
    wait_for_previous();
    if (threadIdx.x == 0) {
        barrier_expect(own_barrier, 2 * TILE);
        load_tile(base, own, own_barrier, h, first, n);
        load_tile(base + TILE, own2, own_barrier, h, first, n);
        for (int step = 0; step < min(STAGES, steps); step++) load(step);
    }
    __syncthreads();
}

// The rows GROUP and GROUP + 8 of a warp's 16 of `out`, of each of which four lanes hold a pack of 8 channels in turn.
constexpr int PACKS = CEIL_DIV(DP, 32);

// This lane's packs of the 64 rows from `first` on, zeros beyond them; and the rows' lse.
__device__ __forceinline__ void load_rows(Pack<T> (&packs)[2][PACKS], float (&row_lse)[2], const T* out, const float* lse, int n,
                                          int h, int heads, int first, int Tq, int D) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = first + WARP_ROW + 8 * r + GROUP;
        const T* source = out + (((i64)n * Tq + row) * heads + h) * D;
        row_lse[r] = lse[row];
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int d = p * 32 + QUAD * 8;
            packs[r][p] = row < Tq && d < D ? load_pack(source + d) : Pack<T>{};
        }
    }
}

// The rows' delta, the sum over their channels of out times dout, of which `tile` is the tile; also written.
__device__ __forceinline__ void find_delta(float (&row_delta)[2], float* delta, const Pack<T> (&packs)[2][PACKS], const u8* tile) {
    constexpr int CHUNKS = ROW_BYTES / 16;  // of a panel's row
#pragma unroll
    for (int r = 0; r < 2; r++) {
        int row = WARP_ROW + 8 * r + GROUP;
        float total = 0.0f;
#pragma unroll
        for (int p = 0; p < PACKS; p++) {
            int chunk = p * 4 + QUAD;
            const u8* source = tile + chunk / CHUNKS * 64 * ROW_BYTES + swizzled<ROW_BYTES>(row, chunk % CHUNKS);
            Pack<T> dout = load_pack(reinterpret_cast<const T*>(source));
#pragma unroll
            for (int e = 0; e < 8; e++) total += to_float(packs[r][p].v[e]) * to_float(dout.v[e]);
        }
        row_delta[r] = sum_quad(total);
        if (QUAD == 0) delta[row] = row_delta[r];
    }
}

// Where the sums of a block's tile of a gradient begin. token, head: floats from a tile, and from a head, to the next.
__device__ __forceinline__ i64 own_sums(int n, int h, int token, int head) { return ((i64)n * gridDim.x + blockIdx.x) * token + h * head; }

// Over the first `rows` rows of a tile that was stored, for each of its D channels.
__device__ __forceinline__ void leave_sums(float* sums, u32 tile, int rows, int D) {
#pragma unroll
    for (int p = 0; p < PANELS; p++) {
        float2 sum = panel_sums<T>(tile + p * 64 * ROW_BYTES, rows);
        int d = p * 64 + PANEL_COLUMN;
        if (threadIdx.x % 32 < 8 && d < D) *reinterpret_cast<float2*>(sums + d) = sum;
    }
}

extern "C" __global__ void __launch_bounds__(128, 3)
backward_q(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
           const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap dq, float* delta, const float* lse,
           const T* out, int Tq, int Tk, int D, float scale, float* sums_q, int token, int head) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared), stages = base + 2 * TILE, barriers = stages + STAGES * 2 * TILE;
    u32 own_barrier = barriers + 16 * STAGES;
    int heads = gridDim.y, h = blockIdx.y, n = blockIdx.z, TP = CEIL_DIV(Tq, 64) * 64, steps = CEIL_DIV(Tk, 64);
    int first = blockIdx.x * 64;
    float scale2 = scale * LOG2E;
    lse += ((i64)n * heads + h) * TP;
    delta += ((i64)n * heads + h) * TP;
    Ring ring(stages, 2 * TILE, STAGES, barriers), loads = ring;
    auto load = [&](int step) {
        u32 full = loads.acquire(2 * TILE);
        load_tile(loads.buffer(), k, full, h, step * 64, n);
        load_tile(loads.buffer() + TILE, v, full, h, step * 64, n);
        loads.advance();
    };
    begin_backward(ring, 1, own_barrier, base, q, dout, k, v, h, first, n, steps, load);

    Pack<T> own_out[2][PACKS];
    float row_lse[2], row_delta[2];
    load_rows(own_out, row_lse, out, lse, n, h, heads, first, Tq, D);
    barrier_wait(own_barrier, 0);
    find_delta(row_delta, delta + first, own_out, shared + TILE);
    u32 weights[4][4];
    float s[32], dp[32], acc[DP / 2];
    for (int step = 0; step < steps; step++) {
        ring.wait();
        wgmma_fence();
        multiply_tokens(s, base, ring.buffer());
        multiply_tokens(dp, base + TILE, ring.buffer() + TILE);
        wgmma_commit();
        wgmma_wait<0>();
        if ((step + 1) * 64 > Tk) mask(s, Tk - step * 64);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            int r = i / 2 % 2;
            s[i] = exp2_fast(s[i] * scale2 - row_lse[r]) * (dp[i] - row_delta[r]);
        }
        round_fragments(s, weights);
        wgmma_fence();
        multiply_weights(acc, weights, ring.buffer(), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        reuse_stage<128>(ring, step, steps, load);
    }
    store_tile(dq, acc, scale, base, h, first, n);
    if (DP > 32 && sums_q) leave_sums(sums_q + own_sums(n, h, token, head), base, Tq - first, D);
}

// Scores are transposed here: keys are the rows of every product, so that p and ds are A fragments without a transpose.
extern "C" __global__ void __launch_bounds__(128, KV_BLOCKS)
backward_kv(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v,
            const __grid_constant__ TensorMap dout, const __grid_constant__ TensorMap dk, const __grid_constant__ TensorMap dv,
            const float* delta, const float* lse, int Tq, int Tk, int D, float scale, float* sums_k, float* sums_v, int token, int head) {
    extern __shared__ __align__(1024) u8 shared[];
    constexpr u32 STAGE = 2 * TILE + 1024, BYTES = 2 * TILE + 2 * 64 * sizeof(float);
    u32 base = shared_address(shared), stages = base + 2 * TILE, barriers = stages + STAGES * STAGE;
    u32 own_barrier = barriers + 16 * STAGES;
    int heads = gridDim.y, h = blockIdx.y, n = blockIdx.z, TP = CEIL_DIV(Tq, 64) * 64, steps = CEIL_DIV(Tq, 64);
    int first = blockIdx.x * 64;
    float scale2 = scale * LOG2E;
    lse += ((i64)n * heads + h) * TP;
    delta += ((i64)n * heads + h) * TP;
    Ring ring(stages, STAGE, STAGES, barriers), loads = ring;
    auto load = [&](int step) {
        u32 full = loads.acquire(BYTES), rows = loads.buffer() + 2 * TILE;
        load_tile(loads.buffer(), q, full, h, step * 64, n);
        load_tile(loads.buffer() + TILE, dout, full, h, step * 64, n);
        bulk_load(rows, lse + step * 64, 64 * sizeof(float), full);
        bulk_load(rows + 64 * sizeof(float), delta + step * 64, 64 * sizeof(float), full);
        loads.advance();
    };
    begin_backward(ring, 4, own_barrier, base, k, v, q, dout, h, first, n, steps, load);

    u32 weights[4][4], dscores[4][4];
    float p[32], ds[32], dk_acc[DP / 2], dv_acc[DP / 2];
    barrier_wait(own_barrier, 0);
    for (int step = 0; step < steps; step++) {
        ring.wait();
        wgmma_fence();
        multiply_tokens(p, base, ring.buffer());
        multiply_tokens(ds, base + TILE, ring.buffer() + TILE);
        wgmma_commit();
        wgmma_wait<0>();
        const float* rows = reinterpret_cast<const float*>(shared + (ring.buffer() - base) + 2 * TILE);
        differentiate(p, ds, rows, rows + 64, scale2);
        round_fragments(p, weights);
        round_fragments(ds, dscores);
        wgmma_fence();
        multiply_weights(dv_acc, weights, ring.buffer() + TILE, step > 0);
        multiply_weights(dk_acc, dscores, ring.buffer(), step > 0);
        wgmma_commit();
        wgmma_wait<0>();  // the registers of the next scores are these weights'
        reuse_stage<32>(ring, step, steps, load);  // rows are read by each warp alone, products by all together
    }
    store_tile(dk, dk_acc, scale, base, h, first, n);
    store_tile(dv, dv_acc, 1.0f, base + TILE, h, first, n);
    if (DP == 32 || !sums_k) return;
    leave_sums(sums_k + own_sums(n, h, token, head), base, Tk - first, D);
    leave_sums(sums_v + own_sums(n, h, token, head), base + TILE, Tk - first, D);
}
