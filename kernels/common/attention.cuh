// What the passes of attention.cu share: tiles of operands, products, copies of rows to and from shared memory, and the loop
// over the steps. The constants are those of attention.cu. A row in shared memory has PITCH elements, of which DP are filled.
#pragma once
#include "attention_mask.cuh"
#include "mma.cuh"

constexpr int THREADS = 32 * WARPS, WM = 16 * MT, BM = WARPS * WM;
constexpr bool LOW = sizeof(T) == 2;
constexpr int PACK = 16 / sizeof(T), STEPS = LOW ? 1 : 2;  // mma instructions for a depth of 16
constexpr int PITCH = DP + 8;                              // of rows in shared memory: ldmatrix has no bank conflicts
constexpr int CHUNKS = DP / PACK, DT = DP / 16, NT = BN / 16;
// Blocks of a multiprocessor, at least: 1 gives float all registers, 0 leaves it to the compiler, which spills some with a mask.
constexpr int BLOCKS = LOW ? 2 * MASKED : 1;

static_assert(!MASKED || BM <= 64, "a block's rows are of one tile of the mask");

// A warp's 16 x 16 tile of an operand: r[step] is an A fragment, or the B fragments of two tiles of 8 columns.
// For float, the places t and t + 4 of a fragment's depth hold the elements 2t and 2t + 1, in A and B alike. The order does
// not change the sum, and so each lane's accumulators are the elements that it needs of an A fragment (to_a).
struct Tile { u32 r[STEPS][4]; };

__device__ __forceinline__ u32 as_bits(float x) { return __float_as_uint(x); }

// An A fragment of rows at p: (row m, depth k).
__device__ __forceinline__ Tile load_a(const T* p) {
    Tile a;
    if constexpr (LOW) {
        ldmatrix(a.r[0], shared_address(p + (LANE & 15) * PITCH + (LANE >> 4) * 8));
    } else {
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            const float* x = (const float*)p + GROUP * PITCH + 8 * s + 2 * QUAD;
            float2 top = *(const float2*)x, bottom = *(const float2*)(x + 8 * PITCH);
            a.r[s][0] = as_bits(top.x), a.r[s][1] = as_bits(bottom.x), a.r[s][2] = as_bits(top.y), a.r[s][3] = as_bits(bottom.y);
        }
    }
    return a;
}
// B fragments of rows at p: (column n, depth k), as the keys lie for q k^T.
__device__ __forceinline__ Tile load_b(const T* p) {
    Tile b;
    if constexpr (LOW) {
        ldmatrix(b.r[0], shared_address(p + ((LANE & 7) + (LANE >> 4) * 8) * PITCH + (LANE & 8)));
    } else {
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float2 x = *(const float2*)((const float*)p + (8 * j + GROUP) * PITCH + 8 * s + 2 * QUAD);
                b.r[s][2 * j] = as_bits(x.x), b.r[s][2 * j + 1] = as_bits(x.y);
            }
    }
    return b;
}
// B fragments of rows at p: (depth k, column n), as the values lie for p v.
__device__ __forceinline__ Tile load_b_transposed(const T* p) {
    Tile b;
    if constexpr (LOW) {
        ldmatrix_transposed(b.r[0], shared_address(p + (LANE & 15) * PITCH + (LANE >> 4) * 8));
    } else {
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                b.r[s][j] = as_bits(((const float*)p)[(8 * s + 2 * QUAD + (j & 1)) * PITCH + 8 * (j >> 1) + GROUP]);
    }
    return b;
}
// An A fragment of the accumulators of two tiles of 8 columns, rounded to T.
__device__ __forceinline__ Tile to_a(const float (&c)[2][4]) {
    Tile a;
#pragma unroll
    for (int s = 0; s < STEPS; s++)
        if constexpr (LOW) {
            a.r[s][0] = pack_pair<T>(c[0][0], c[0][1]), a.r[s][1] = pack_pair<T>(c[0][2], c[0][3]);
            a.r[s][2] = pack_pair<T>(c[1][0], c[1][1]), a.r[s][3] = pack_pair<T>(c[1][2], c[1][3]);
        } else {
            a.r[s][0] = as_bits(c[s][0]), a.r[s][1] = as_bits(c[s][2]), a.r[s][2] = as_bits(c[s][1]), a.r[s][3] = as_bits(c[s][3]);
        }
    return a;
}

// Split x into two tf32 numbers: high + low is x to 21 bits.
__device__ __forceinline__ void split(u32 x, u32& high, u32& low) {
    high = round_tf32(__uint_as_float(x));
    low = round_tf32(__uint_as_float(x) - __uint_as_float(high));
}
// c += a b. The tensor core truncates its sums. With TF32_PRODUCTS 3 it therefore starts from zero, and its sums are added to
// c by float additions.
__device__ __forceinline__ void multiply(float (&c)[2][4], const Tile& a, const Tile& b) {
    if constexpr (LOW) {
        mma<T>(c[0], a.r[0], b.r[0][0], b.r[0][1]);
        mma<T>(c[1], a.r[0], b.r[0][2], b.r[0][3]);
        return;
    }
    float sum[2][4] = {};
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        u32 a_high[4], a_low[4], b_high[4], b_low[4];
#pragma unroll
        for (int i = 0; i < 4; i++) split(a.r[s][i], a_high[i], a_low[i]), split(b.r[s][i], b_high[i], b_low[i]);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if constexpr (TF32_PRODUCTS == 3) {
                mma<T>(sum[j], a_low, b_high[2 * j], b_high[2 * j + 1]);
                mma<T>(sum[j], a_high, b_low[2 * j], b_low[2 * j + 1]);
            }
            mma<T>(TF32_PRODUCTS == 3 ? sum[j] : c[j], a_high, b_high[2 * j], b_high[2 * j + 1]);
        }
    }
    if constexpr (TF32_PRODUCTS == 3)
#pragma unroll
        for (int i = 0; i < 8; i++) c[i >> 2][i & 3] += sum[i >> 2][i & 3];
}

// The A operand that a warp uses in every step: its WM rows in shared memory. Its fragments stay in registers where they fit.
struct Operand {
    static constexpr bool RESIDENT = MT * DP * sizeof(T) <= 128;
    Tile tiles[RESIDENT ? MT : 1][RESIDENT ? DT : 1];
    const T* rows;

    __device__ __forceinline__ Operand(const T* rows) : rows(rows) {
        if constexpr (RESIDENT) {
#pragma unroll
            for (int m = 0; m < MT; m++)
#pragma unroll
                for (int d = 0; d < DT; d++) tiles[m][d] = load_a(rows + 16 * m * PITCH + 16 * d);
        }
    }
    __device__ __forceinline__ Tile get(int m, int d) const {
        if constexpr (RESIDENT) return tiles[m][d];
        else return load_a(rows + 16 * m * PITCH + 16 * d);
    }
};

// A pack of p[0 .. count - 1] and zeros; a whole one where `aligned`.
__device__ __forceinline__ Pack<T> load_elements(const T* p, int count, bool aligned) {
    if (aligned) return load_pack(p);
    Pack<T> pack = {};
#pragma unroll
    for (int e = 0; e < PACK; e++)
        if (e < count) pack.v[e] = p[e];
    return pack;
}
// The block copies ROWS rows of D elements to shared memory. Rows from `rows` on do not exist and are filled with zeros, as are
// the columns from D to DP.
template <int ROWS>
__device__ __forceinline__ void load_rows(T* tile, const T* source, int rows, int stride, int D, bool aligned) {
    if (aligned) {
#pragma unroll
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            int row = i / CHUNKS, column = i % CHUNKS * PACK;
            cp_async(shared_address(tile + row * PITCH + column), source + (i64)row * stride + column, row < rows && column < D);
        }
    } else {
#pragma unroll 1
        for (int i = threadIdx.x; i < ROWS * CHUNKS; i += THREADS) {
            int row = i / CHUNKS, column = i % CHUNKS * PACK;
            int count = row < rows ? D - column : 0;
            store_pack(tile + row * PITCH + column, load_elements(source + (i64)row * stride + column, count, false));
        }
    }
}
struct __align__(2 * sizeof(T)) Two { T low, high; };

// The warp writes factor * c, its WM rows, of which the first `rows` exist. It goes through `buffer`, WM rows of shared memory
// that are its own, so that global stores are coalesced.
__device__ __forceinline__ void store_rows(T* target, const float (&c)[MT][DT][2][4], float factor, T* buffer, int rows, int stride,
                                           int D, bool aligned) {
    __syncwarp();
#pragma unroll
    for (int m = 0; m < MT; m++)
#pragma unroll
        for (int d = 0; d < DT; d++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float* x = &c[m][d][i >> 1][2 * (i & 1)];
                Two two = {from_float<T>(factor * x[0]), from_float<T>(factor * x[1])};
                *(Two*)(buffer + (16 * m + GROUP + 8 * (i & 1)) * PITCH + 16 * d + 8 * (i >> 1) + 2 * QUAD) = two;
            }
    __syncwarp();
#pragma unroll 1
    for (int i = LANE; i < WM * CHUNKS; i += 32) {
        int row = i / CHUNKS, column = i % CHUNKS * PACK;
        if (row >= rows || column >= D) continue;
        T* p = target + (i64)row * stride + column;
        if (aligned) store_pack(p, load_pack(buffer + row * PITCH + column));
        else
            for (int e = 0; e < min(PACK, D - column); e++) p[e] = buffer[row * PITCH + column + e];
    }
}

template <class... Pointers> __device__ __forceinline__ bool is_aligned(int token, int D, Pointers... p) {
    return (((u64)p | ...) | (u64)(token | D) * sizeof(T)) % 16 == 0;
}

// Wait for the rows that a block owns, whose copies have been started. With two stages, start the copies of the first step, if
// there is one.
template <class Load> __device__ __forceinline__ void begin(int first, int steps, Load load) {
    cp_async_commit();
    if (STAGES == 2 && first < steps) load(first, 0);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
}
// The loop over the steps, from `first` on. load(step, i) starts the copies of the i-th step taken into stage i % STAGES,
// compute(step, i) uses them. With two stages (double buffering) the next step is loaded during compute. next(step) is the first
// step to take from `step` on.
template <class Next, class Load, class Compute>
__device__ __forceinline__ void walk(int first, int steps, Next next, Load load, Compute compute) {
    int taken = 0;
#pragma unroll 1
    for (int step = first; step < steps;) {
        int after = next(step + 1), i = MASKED ? taken++ : step;
        if (STAGES == 1) load(step, i);
        else if (after < steps) load(after, i + 1);
        cp_async_commit();
        cp_async_wait<STAGES - 1>();
        __syncthreads();
        compute(step, i);
        __syncthreads();
        step = after;
    }
}

// Set the scores of columns from `limit` on to -inf. c starts at `column`.
__device__ __forceinline__ void mask(float (&c)[2][4], int column, int limit) {
#pragma unroll
    for (int i = 0; i < 8; i++)
        if (column + 8 * (i >> 2) + 2 * QUAD + (i & 1) >= limit) c[i >> 2][i & 3] = -infinity();
}
