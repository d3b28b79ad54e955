// Flash attention by mma.sync: out = softmax(scale q k^T) v for each image and head. There is no Tq x Tk matrix in memory, and
// there are no atomics.
//
//   forward      writes out, lse.            A block owns BM queries and walks over the keys (online softmax).
//   backward_q   writes dq, delta.           A block owns BM queries, and recomputes scores from lse.
//   backward_kv  reads delta; writes dk, dv. A block owns BM keys and walks over the queries, on transposed scores.
// All outputs are overwritten.
//
// Arguments
//   q, k, v, dq, dk, dv   T. Element d of head h of token i of image n is base[(n T + i) token + h head + d], where T is Tq or
//                         Tk. The three may interleave in one array.
//   out, dout    T (N, Tq, heads, D), contiguous.
//   lse, delta   float (N, heads, TP), TP = Tq rounded up to 64. lse: log2 of each softmax denominator. delta: the sum over d
//                of dout · out. From Tq on lse is +inf and delta 0, in rows that a block covers.
//   bits, states, by_image, by_head   the mask, where MASKED is 1: see attention_mask.cuh. Tiles without any pair are skipped.
//                A query that attends to no key has a result and gradients of 0.
// Rows are read 16 bytes at a time where base, strides and D allow it, else element by element.
//
// Constants: T; DP = D rounded up to 16; MT 16-row tiles a warp; WARPS of a block, BM = 16 WARPS MT; BN rows per step; STAGES
// of cp.async; MASKED 0 or 1; TF32_PRODUCTS for float: 3 splits operands into two tf32 numbers each, 1 rounds them to tf32.
// Launch: 32 WARPS threads, (ceil(T / BM), heads, N) blocks, dynamic shared memory as cudiff/cuda/kernels/attention/portable.py
// computes it.
// On Hopper attention_sm90.cu, attention_short_sm90.cu and attention_wide_sm90.cu take what they can: heads of up to 128
// channels in 16 bits, aligned.
#include "attention.cuh"

// s += q k^T for the warp's queries and a step's keys.
__device__ __forceinline__ void multiply_scores(float (&s)[MT][NT][2][4], const Operand& queries, const T* k_rows) {
#pragma unroll
    for (int d = 0; d < DT; d++) {
        Tile a[MT];
#pragma unroll
        for (int m = 0; m < MT; m++) a[m] = queries.get(m, d);
#pragma unroll
        for (int j = 0; j < NT; j++) {
            Tile b = load_b(k_rows + 16 * j * PITCH + 16 * d);
#pragma unroll
            for (int m = 0; m < MT; m++) multiply(s[m][j], a[m], b);
        }
    }
}

// A step of the online softmax. row_max is raised to the largest score so far, and acc and row_sum are scaled down to it. The
// scores s become weights, exp(scale (s - row_max)), and are added to row_sum.
__device__ __forceinline__ void add_scores(float (&s)[MT][NT][2][4], float (&acc)[MT][DT][2][4], float (&row_max)[MT][2],
                                           float (&row_sum)[MT][2], float scale2) {
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half_tile = 0; half_tile < 2; half_tile++) {  // this lane's rows GROUP and GROUP + 8
            int e = 2 * half_tile;
            float top = row_max[m][half_tile];
#pragma unroll
            for (int j = 0; j < NT; j++)
                top = fmaxf(top, fmaxf(fmaxf(s[m][j][0][e], s[m][j][0][e + 1]), fmaxf(s[m][j][1][e], s[m][j][1][e + 1])));
            top = max_quad(top);
            float one = MASKED && top == -infinity() ? 0.0f : top;  // the score of the weight 1; finite, else weights are NaN
            float shrink = exp2_fast((row_max[m][half_tile] - one) * scale2), sum = 0.0f;
            row_max[m][half_tile] = top;
#pragma unroll
            for (int j = 0; j < NT; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& x = s[m][j][i >> 1][e + (i & 1)];
                    x = exp2_fast(x * scale2 - one * scale2);
                    sum += x;
                }
            row_sum[m][half_tile] = row_sum[m][half_tile] * shrink + sum;
#pragma unroll
            for (int d = 0; d < DT; d++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[m][d][i >> 1][e + (i & 1)] *= shrink;
        }
}

// Scores of the pairs that do not attend become -inf. The scores are of 16 queries from `query` on, and of 16 keys from `key` on.
__device__ __forceinline__ void mask_keys(float (&s)[2][4], const Mask& pairs, int query, int key) {
    TileState state = pairs.state(query / 64, key / 64);
    if (state == ALL) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        u32 keys = state == NONE ? 0 : (u32)(pairs.rows(key / 64, query + GROUP + 8 * r)[0] >> key % 64) >> 2 * QUAD;
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (!(keys >> 8 * (i >> 1) + (i & 1) & 1)) s[i >> 1][2 * r + (i & 1)] = -infinity();
    }
}
// The same of transposed scores, whose rows are the keys.
__device__ __forceinline__ void mask_queries(float (&s)[2][4], const Mask& pairs, int query, int key) {
    TileState state = pairs.state(query / 64, key / 64);
    if (state == ALL) return;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int column = query + 8 * (i >> 1) + 2 * QUAD + (i & 1);
        u32 keys = state == NONE ? 0 : (u32)(pairs.rows(key / 64, column)[0] >> key % 64) >> GROUP;
        if (!(keys & 1)) s[i >> 1][i & 1] = -infinity();
        if (!(keys & 1 << 8)) s[i >> 1][2 + (i & 1)] = -infinity();
    }
}

// acc += weights v for a step's values.
__device__ __forceinline__ void multiply_weights(float (&acc)[MT][DT][2][4], const float (&weights)[MT][NT][2][4],
                                                 const T* v_rows) {
#pragma unroll
    for (int j = 0; j < NT; j++) {
        Tile a[MT];
#pragma unroll
        for (int m = 0; m < MT; m++) a[m] = to_a(weights[m][j]);
#pragma unroll
        for (int d = 0; d < DT; d++) {
            Tile b = load_b_transposed(v_rows + 16 * j * PITCH + 16 * d);
#pragma unroll
            for (int m = 0; m < MT; m++) multiply(acc[m][d], a[m], b);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
forward(T* out, float* lse, const T* q, const T* k, const T* v, int Tq, int Tk, int D, int token, int head, float scale,
        const u64* bits, const u8* states, int by_image, int by_head) {
    wait_for_previous();
    extern __shared__ __align__(16) unsigned char memory[];
    T* q_rows = (T*)memory;
    T* stages = q_rows + BM * PITCH;
    int heads = gridDim.y, h = blockIdx.y, n = blockIdx.z, TP = CEIL_DIV(Tq, 64) * 64;
    int first = blockIdx.x * BM, warp_row = (threadIdx.x >> 5) * WM;
    q += ((i64)n * Tq + first) * token + (i64)h * head;
    k += (i64)n * Tk * token + (i64)h * head;
    v += (i64)n * Tk * token + (i64)h * head;
    out += (((i64)n * Tq + first) * heads + h) * D;
    lse += ((i64)n * heads + h) * TP;
    bool aligned = is_aligned(token, D, q, k, v, out);
    float scale2 = scale * LOG2E;

    Mask pairs(bits, states, by_image, by_head, n, h, Tq, Tk);
    int steps = CEIL_DIV(Tk, BN);
    Walk own_walk(pairs, pairs.at.of_queries(first / 64));
    auto next = [&](int step) { return own_walk.next<BN>(step, steps); };
    auto load = [&](int step, int i) {
        T* k_rows = stages + i % STAGES * (2 * BN * PITCH);
        load_rows<BN>(k_rows, k + (i64)step * BN * token, Tk - step * BN, token, D, aligned);
        load_rows<BN>(k_rows + BN * PITCH, v + (i64)step * BN * token, Tk - step * BN, token, D, aligned);
    };
    load_rows<BM>(q_rows, q, Tq - first, token, D, aligned);
    int begins = next(0);
    begin(begins, steps, load);

    Operand queries(q_rows + warp_row * PITCH);
    float acc[MT][DT][2][4] = {}, row_max[MT][2], row_sum[MT][2] = {};
#pragma unroll
    for (int m = 0; m < MT; m++) row_max[m][0] = row_max[m][1] = -infinity();

    walk(begins, steps, next, load, [&](int step, int i) {
        const T* k_rows = stages + i % STAGES * (2 * BN * PITCH);
        const T* v_rows = k_rows + BN * PITCH;
        float s[MT][NT][2][4] = {};
        multiply_scores(s, queries, k_rows);
        if ((step + 1) * BN > Tk)
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int j = 0; j < NT; j++) mask(s[m][j], step * BN + 16 * j, Tk);
        if (MASKED)
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int j = 0; j < NT; j++) mask_keys(s[m][j], pairs, first + warp_row + 16 * m, step * BN + 16 * j);
        add_scores(s, acc, row_max, row_sum, scale2);
        multiply_weights(acc, s, v_rows);
    });

#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half_tile = 0; half_tile < 2; half_tile++) {
            float sum = sum_quad(row_sum[m][half_tile]);
            bool none = MASKED && sum == 0.0f;  // of the keys has a weight: the result is 0
#pragma unroll
            for (int d = 0; d < DT; d++)
#pragma unroll
                for (int i = 0; i < 4; i++) acc[m][d][i >> 1][2 * half_tile + (i & 1)] /= none ? 1.0f : sum;
            int row = first + warp_row + 16 * m + 8 * half_tile + GROUP;
            if (QUAD == 0 && row < TP)
                lse[row] = row < Tq && !none ? row_max[m][half_tile] * scale2 + log2f(sum) : infinity();
        }
    store_rows(out + (i64)warp_row * heads * D, acc, 1.0f, q_rows + warp_row * PITCH, Tq - first - warp_row, heads * D, D, aligned);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
backward_q(T* dq, float* delta, const float* lse, const T* q, const T* k, const T* v, const T* out, const T* dout, int Tq, int Tk,
           int D, int token, int head, float scale, const u64* bits, const u8* states, int by_image, int by_head) {
    wait_for_previous();
    extern __shared__ __align__(16) unsigned char memory[];
    T* q_rows = (T*)memory;
    T* dout_rows = q_rows + BM * PITCH;
    T* stages = dout_rows + BM * PITCH;
    int heads = gridDim.y, h = blockIdx.y, n = blockIdx.z, TP = CEIL_DIV(Tq, 64) * 64;
    int first = blockIdx.x * BM, warp_row = (threadIdx.x >> 5) * WM;
    i64 own = ((i64)n * Tq + first) * token + (i64)h * head;
    q += own, dq += own;
    k += (i64)n * Tk * token + (i64)h * head;
    v += (i64)n * Tk * token + (i64)h * head;
    out += (((i64)n * Tq + first) * heads + h) * D;
    dout += (((i64)n * Tq + first) * heads + h) * D;
    lse += ((i64)n * heads + h) * TP;
    delta += ((i64)n * heads + h) * TP;
    bool aligned = is_aligned(token, D, q, dq, k, v, out, dout);
    float scale2 = scale * LOG2E;

    Mask pairs(bits, states, by_image, by_head, n, h, Tq, Tk);
    int steps = CEIL_DIV(Tk, BN);
    Walk own_walk(pairs, pairs.at.of_queries(first / 64));
    auto next = [&](int step) { return own_walk.next<BN>(step, steps); };
    auto load = [&](int step, int i) {
        T* k_rows = stages + i % STAGES * (2 * BN * PITCH);
        load_rows<BN>(k_rows, k + (i64)step * BN * token, Tk - step * BN, token, D, aligned);
        load_rows<BN>(k_rows + BN * PITCH, v + (i64)step * BN * token, Tk - step * BN, token, D, aligned);
    };
    load_rows<BM>(q_rows, q, Tq - first, token, D, aligned);
    load_rows<BM>(dout_rows, dout, Tq - first, heads * D, D, aligned);
    int begins = next(0);
    begin(begins, steps, load);

    float row_lse[MT][2], row_delta[MT][2];
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int half_tile = 0; half_tile < 2; half_tile++) {
            int r = warp_row + 16 * m + 8 * half_tile + GROUP, row = first + r;
            float sum = 0.0f;
            if (row < Tq)
                for (int column = QUAD * PACK; column < D; column += 4 * PACK) {
                    Pack<T> x = load_elements(out + (i64)r * heads * D + column, D - column, aligned);
#pragma unroll
                    for (int e = 0; e < PACK; e++) sum += to_float(x.v[e]) * to_float(dout_rows[r * PITCH + column + e]);
                }
            sum = sum_quad(sum);
            row_delta[m][half_tile] = sum;
            row_lse[m][half_tile] = row < TP ? lse[row] : infinity();
            if (QUAD == 0 && row < TP) delta[row] = sum;
        }

    Operand queries(q_rows + warp_row * PITCH), douts(dout_rows + warp_row * PITCH);
    float acc[MT][DT][2][4] = {};
    walk(begins, steps, next, load, [&](int step, int i) {
        const T* k_rows = stages + i % STAGES * (2 * BN * PITCH);
        const T* v_rows = k_rows + BN * PITCH;
        int columns = min(BN, Tk - step * BN);
#pragma unroll 1
        for (int j = 0; j < columns; j += 16) {
            if constexpr (!Operand::RESIDENT) __syncwarp();  // keeps get()'s loads in this loop: hoisted, they would spill
            float s[MT][2][4] = {}, dp[MT][2][4] = {};
#pragma unroll
            for (int d = 0; d < DT; d++) {
                Tile b = load_b(k_rows + j * PITCH + 16 * d), b2 = load_b(v_rows + j * PITCH + 16 * d);
#pragma unroll
                for (int m = 0; m < MT; m++) multiply(s[m], queries.get(m, d), b), multiply(dp[m], douts.get(m, d), b2);
            }
            Tile ds[MT];
#pragma unroll
            for (int m = 0; m < MT; m++) {
                if (j + 16 > columns) mask(s[m], j, columns);
                if (MASKED) mask_keys(s[m], pairs, first + warp_row + 16 * m, step * BN + j);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float p = exp2_fast(s[m][i >> 2][i & 3] * scale2 - row_lse[m][i >> 1 & 1]);
                    s[m][i >> 2][i & 3] = p * (dp[m][i >> 2][i & 3] - row_delta[m][i >> 1 & 1]);
                }
                ds[m] = to_a(s[m]);
            }
#pragma unroll
            for (int d = 0; d < DT; d++) {
                Tile b = load_b_transposed(k_rows + j * PITCH + 16 * d);
#pragma unroll
                for (int m = 0; m < MT; m++) multiply(acc[m][d], ds[m], b);
            }
        }
    });
    store_rows(dq + (i64)warp_row * token, acc, scale, q_rows + warp_row * PITCH, Tq - first - warp_row, token, D, aligned);
}

// Scores are transposed here: keys are the rows of every product. So p and ds become A fragments without a transpose.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
backward_kv(T* dk, T* dv, const float* delta, const float* lse, const T* q, const T* k, const T* v, const T* dout, int Tq, int Tk,
            int D, int token, int head, float scale, const u64* bits, const u8* states, int by_image, int by_head) {
    wait_for_previous();
    extern __shared__ __align__(16) unsigned char memory[];
    constexpr int STAGE = 2 * BN * PITCH * sizeof(T) + 2 * BN * sizeof(float);
    T* k_rows = (T*)memory;
    T* v_rows = k_rows + BM * PITCH;
    unsigned char* stages = (unsigned char*)(v_rows + BM * PITCH);
    int heads = gridDim.y, h = blockIdx.y, n = blockIdx.z, TP = CEIL_DIV(Tq, 64) * 64;
    int first = blockIdx.x * BM, warp_row = (threadIdx.x >> 5) * WM;
    i64 own = ((i64)n * Tk + first) * token + (i64)h * head;
    k += own, v += own;
    q += (i64)n * Tq * token + (i64)h * head;
    dout += ((i64)n * Tq * heads + h) * D;
    lse += ((i64)n * heads + h) * TP;
    delta += ((i64)n * heads + h) * TP;
    bool aligned = is_aligned(token, D, k, v, dk + own, dv + own, q, dout);
    float scale2 = scale * LOG2E;

    Mask pairs(bits, states, by_image, by_head, n, h, Tq, Tk);
    int steps = CEIL_DIV(Tq, BN);
    Walk own_walk(pairs, pairs.at.of_keys(first / 64));
    auto next = [&](int step) { return own_walk.next<BN>(step, steps); };
    auto load = [&](int step, int i) {
        T* q_rows = (T*)(stages + i % STAGES * STAGE);
        T* dout_rows = q_rows + BN * PITCH;
        float* row_lse = (float*)(dout_rows + BN * PITCH);
        load_rows<BN>(q_rows, q + (i64)step * BN * token, Tq - step * BN, token, D, aligned);
        load_rows<BN>(dout_rows, dout + (i64)step * BN * heads * D, Tq - step * BN, heads * D, D, aligned);
        int row = 4 * threadIdx.x;
        if (row < 2 * BN) cp_async(shared_address(row_lse + row), (row < BN ? lse : delta - BN) + step * BN + row, true);
    };
    load_rows<BM>(k_rows, k, Tk - first, token, D, aligned);
    load_rows<BM>(v_rows, v, Tk - first, token, D, aligned);
    int begins = next(0);
    begin(begins, steps, load);

    Operand keys(k_rows + warp_row * PITCH), values(v_rows + warp_row * PITCH);
    float dk_acc[MT][DT][2][4] = {}, dv_acc[MT][DT][2][4] = {};
    walk(begins, steps, next, load, [&](int step, int i) {
        const T* q_rows = (const T*)(stages + i % STAGES * STAGE);
        const T* dout_rows = q_rows + BN * PITCH;
        const float* row_lse = (const float*)(dout_rows + BN * PITCH);
        const float* row_delta = row_lse + BN;
        int columns = min(BN, Tq - step * BN);
#pragma unroll 1
        for (int j = 0; j < columns; j += 16) {
            if constexpr (!Operand::RESIDENT) __syncwarp();  // keeps get()'s loads in this loop: hoisted, they would spill
            float p[MT][2][4] = {}, ds[MT][2][4] = {};
#pragma unroll
            for (int d = 0; d < DT; d++) {
                Tile b = load_b(q_rows + j * PITCH + 16 * d), b2 = load_b(dout_rows + j * PITCH + 16 * d);
#pragma unroll
                for (int m = 0; m < MT; m++) multiply(p[m], keys.get(m, d), b), multiply(ds[m], values.get(m, d), b2);
            }
            if (MASKED)
#pragma unroll
                for (int m = 0; m < MT; m++) mask_queries(p[m], pairs, step * BN + j, first + warp_row + 16 * m);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int column = j + 8 * (i >> 1) + 2 * QUAD + (i & 1);
                float l = row_lse[column], mean = row_delta[column];
#pragma unroll
                for (int m = 0; m < MT; m++)
#pragma unroll
                    for (int e = i & 1; e < 4; e += 2) {  // rows GROUP and GROUP + 8
                        float x = exp2_fast(p[m][i >> 1][e] * scale2 - l);
                        p[m][i >> 1][e] = x;
                        ds[m][i >> 1][e] = x * (ds[m][i >> 1][e] - mean);
                    }
            }
            Tile p_tile[MT], ds_tile[MT];
#pragma unroll
            for (int m = 0; m < MT; m++) p_tile[m] = to_a(p[m]), ds_tile[m] = to_a(ds[m]);
#pragma unroll
            for (int d = 0; d < DT; d++) {
                Tile b = load_b_transposed(dout_rows + j * PITCH + 16 * d);
#pragma unroll
                for (int m = 0; m < MT; m++) multiply(dv_acc[m][d], p_tile[m], b);
            }
#pragma unroll
            for (int d = 0; d < DT; d++) {
                Tile b = load_b_transposed(q_rows + j * PITCH + 16 * d);
#pragma unroll
                for (int m = 0; m < MT; m++) multiply(dk_acc[m][d], ds_tile[m], b);
            }
        }
    });
    store_rows(dk + own + (i64)warp_row * token, dk_acc, scale, k_rows + warp_row * PITCH, Tk - first - warp_row, token, D, aligned);
    store_rows(dv + own + (i64)warp_row * token, dv_acc, 1.0f, v_rows + warp_row * PITCH, Tk - first - warp_row, token, D, aligned);
}
