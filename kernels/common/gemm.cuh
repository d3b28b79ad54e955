// The tiled product of matrices behind matmul.cu and conv2d.cu: a block computes acc[BM][BN] += A[BM][k] · B[k][BN].
//
// A loader copies tiles of an operand to shared memory, whatever the operand is: a matrix, the patches of an image, ...
// Copies are multistage: cp.async keeps STAGES - 1 tiles of each operand in flight. A tile keeps the order of global memory. It
// is K-major (EXTENT rows of BK elements), or its other index is contiguous (BK rows of EXTENT elements). Its 16-byte chunks
// are XOR-swizzled, so that neither copies nor fragment loads have bank conflicts.
//
// Constants
//   T, OUT         types of the operands (float, bf16, half) and of the result
//   TF32_PRODUCTS  for float: 1 rounds operands to tf32, 3 splits each into two tf32 numbers (relative error near 1e-7)
//   BM, BN, BK     sizes of the tile; WM × WN warps share it
//   STAGES         tiles in shared memory
// Launch: WM·WN·32 threads, STAGES·(BM + BN)·BK·sizeof(T) bytes of dynamic shared memory.
#pragma once
#include "mma.cuh"
#include "channel_statistics.cuh"

constexpr int THREADS = WM * WN * 32;
constexpr int PACK = 16 / sizeof(T);       // elements of a 16-byte chunk
constexpr int STEP = 2 * PACK;             // depth of one mma
constexpr int MI = BM / WM / 16, NI = BN / WN / 8;  // 16 × 8 tiles of a warp
static_assert(NI % 2 == 0 && BK % STEP == 0, "fragments of B are loaded in pairs");

template <bool K_MAJOR, int EXTENT> struct Tile {
    static constexpr int ROWS = K_MAJOR ? EXTENT : BK;
    static constexpr int CHUNKS = (K_MAJOR ? BK : EXTENT) / PACK;
    static constexpr int COPIES = ROWS * CHUNKS / THREADS;   // chunks that a thread copies: all in one column of chunks, ...
    static constexpr int ROW_STEP = THREADS / CHUNKS;         // ... ROW_STEP rows apart
    static constexpr int PITCH = CHUNKS * 16, BYTES = ROWS * PITCH;
    static constexpr bool LDMATRIX = K_MAJOR || sizeof(T) == 2;
    static_assert(COPIES * THREADS == ROWS * CHUNKS && ROW_STEP % (LDMATRIX ? 8 : 4) == 0, "uneven copies");

    // ldmatrix reads a column of chunks in 8 rows; a 32-bit fragment load reads 8 elements of 4 rows. Neither may have bank
    // conflicts.
    __device__ __forceinline__ static int swizzle(int row) {
        if constexpr (LDMATRIX) return CHUNKS >= 8 ? row & 7 : (row / (8 / CHUNKS)) & (CHUNKS - 1);
        return ((row & 3) << 1) & (CHUNKS - 1);
    }
    __device__ __forceinline__ static u32 offset(int row, int chunk) { return row * PITCH + ((chunk ^ swizzle(row)) << 4); }
    __device__ __forceinline__ static int first_row() { return threadIdx.x / CHUNKS; }
    __device__ __forceinline__ static int chunk() { return threadIdx.x % CHUNKS; }
    // Shared memory address of this thread's copy i.
    __device__ __forceinline__ static u32 target(u32 tile, int i) { return tile + offset(first_row(), chunk()) + i * ROW_STEP * PITCH; }

    // The A fragment of rows m to m + 15 at depth k. `lane` gives ldmatrix one of its addresses, or loads its own elements.
    __device__ __forceinline__ static void load_a(u32 (&a)[4], u32 tile, int m, int k, int lane) {
        if constexpr (K_MAJOR) {
            ldmatrix(a, tile + m * PITCH + offset(lane & 15, k / PACK + (lane >> 4)));
        } else if constexpr (LDMATRIX) {
            ldmatrix_transposed(a, tile + k * PITCH + offset((lane & 7) + (lane >> 4) * 8, m / PACK + (lane >> 3 & 1)));
        } else {
            a[0] = element(tile, k, lane, m), a[1] = element(tile, k, lane, m + 8);
            a[2] = element(tile, k + 4, lane, m), a[3] = element(tile, k + 4, lane, m + 8);
        }
    }
    // The B fragments of columns n to n + 15: b[0..1] is that of the first 8 columns, b[2..3] that of the others.
    __device__ __forceinline__ static void load_b(u32 (&b)[4], u32 tile, int n, int k, int lane) {
        if constexpr (K_MAJOR) {
            ldmatrix(b, tile + n * PITCH + offset((lane & 7) + (lane >> 4) * 8, k / PACK + (lane >> 3 & 1)));
        } else if constexpr (LDMATRIX) {
            ldmatrix_transposed(b, tile + k * PITCH + offset(lane & 15, n / PACK + (lane >> 4)));
        } else {
            b[0] = element(tile, k, lane, n), b[1] = element(tile, k + 4, lane, n);
            b[2] = element(tile, k, lane, n + 8), b[3] = element(tile, k + 4, lane, n + 8);
        }
    }
    __device__ __forceinline__ static u32 element(u32 tile, int k, int lane, int first) {
        int i = first + (lane >> 2);
        return load_shared(tile + k * PITCH + offset(lane & 3, i / PACK) + i % PACK * 4);
    }
};

// Copy to a chunk of shared memory: under VEC the whole chunk, from 16 aligned bytes, else only its element e. Zeros if not
// `inside`.
template <bool VEC> __device__ __forceinline__ void copy(u32 chunk, int e, const T* source, bool inside) {
    if constexpr (VEC) cp_async(chunk, source, inside);
    else store_shared(chunk + e * (int)sizeof(T), inside ? *source : T{});
}

// Loads tiles of a matrix in global memory: (index, depth) if K_MAJOR, else (depth, index), with rows of `ld` elements. EXTENT
// of the index are in a tile. VEC: rows start at multiples of 16 bytes and hold whole chunks. Otherwise elements are read one
// by one.
template <bool K_MAJOR, int EXTENT, bool VEC> struct MatrixLoader {
    using Tile = ::Tile<K_MAJOR, EXTENT>;
    const T* source;
    i64 ld;
    int rows_left, elements;  // from this thread's first row and element to the ends of the matrix

    // This thread starts at index `first` of `extent`, and at `k` of `depth`.
    __device__ __forceinline__ MatrixLoader(const T* matrix, i64 ld, int first, int extent, int k, int depth) : ld(ld) {
        int row = Tile::first_row() + (K_MAJOR ? first : k), element = Tile::chunk() * PACK + (K_MAJOR ? k : first);
        source = matrix + row * ld + element;
        rows_left = (K_MAJOR ? extent : depth) - row, elements = (K_MAJOR ? depth : extent) - element;
    }
    __device__ __forceinline__ void load(u32 tile) {
#pragma unroll 2
        for (int e = 0; e < (VEC ? 1 : PACK); e++)
#pragma unroll
            for (int i = 0; i < Tile::COPIES; i++) {
                bool inside = i * Tile::ROW_STEP < rows_left && e < elements;
                copy<VEC>(Tile::target(tile, i), e, source + i * Tile::ROW_STEP * ld + e, inside);
            }
        source += K_MAJOR ? BK : BK * ld;
        (K_MAJOR ? elements : rows_left) -= BK;
    }
};

// An index split into three digits, (high, middle, low), such as (r, s, c) or (n, h, w). It advances by a fixed stride without
// a division in the main loop.
struct Odometer {
    int high, middle, low, middle_size, low_size, high_step, middle_step, low_step;

    __device__ __forceinline__ Odometer(int value, int middle_size, int low_size, int step) : middle_size(middle_size), low_size(low_size) {
        low = value % low_size, value /= low_size, middle = value % middle_size, high = value / middle_size;
        low_step = step % low_size, step /= low_size, middle_step = step % middle_size, high_step = step / middle_size;
    }
    __device__ __forceinline__ void advance() { add(high_step, middle_step, low_step); }
    __device__ __forceinline__ void next() { add(0, 0, 1); }
    __device__ __forceinline__ void add(int h, int m, int l) {
        low += l;
        if (low >= low_size) low -= low_size, middle++;
        middle += m;
        if (middle >= middle_size) middle -= middle_size, high++;
        high += h;
    }
};

#if TF32_PRODUCTS == 3
// Each x split into two tf32 numbers: value + rest is x to 21 bits.
template <int COUNT> struct Fragment {
    u32 value[COUNT], rest[COUNT];
    __device__ __forceinline__ Fragment(const u32 (&x)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            float f = __uint_as_float(x[i]);
            value[i] = round_tf32(f);
            rest[i] = round_tf32(f - __uint_as_float(value[i]));
        }
    }
};
// The tensor core truncates its sums: the three products start from zero, and a float addition adds their sum to c.
__device__ __forceinline__ void multiply_add(float (&c)[4], const Fragment<4>& a, const Fragment<4>& b, int j) {
    float sum[4] = {};
    mma<T>(sum, a.rest, b.value[j], b.value[j + 1]);
    mma<T>(sum, a.value, b.rest[j], b.rest[j + 1]);
    mma<T>(sum, a.value, b.value[j], b.value[j + 1]);
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] += sum[i];
}
#else
template <int COUNT> struct Fragment {
    u32 value[COUNT];
    __device__ __forceinline__ Fragment(const u32 (&x)[COUNT]) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) value[i] = sizeof(T) == 4 ? round_tf32(__uint_as_float(x[i])) : x[i];
    }
};
__device__ __forceinline__ void multiply_add(float (&c)[4], const Fragment<4>& a, const Fragment<4>& b, int j) {
    mma<T>(c, a.value, b.value[j], b.value[j + 1]);
}
#endif

using Accumulators = float[MI][NI][4];

template <class TileA, class TileB> __device__ __forceinline__ void multiply_stage(Accumulators& acc, u32 tile_a, u32 tile_b) {
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int m = warp / WN * (BM / WM), n = warp % WN * (BN / WN);
#pragma unroll(TF32_PRODUCTS == 3 ? 1 : BK / STEP)
    for (int k = 0; k < BK; k += STEP) {
        u32 raw_a[MI][4];
#pragma unroll
        for (int i = 0; i < MI; i++) TileA::load_a(raw_a[i], tile_a, m + i * 16, k, lane);
#pragma unroll
        for (int j = 0; j < NI; j += 2) {
            u32 raw_b[4];
            TileB::load_b(raw_b, tile_b, n + j * 8, k, lane);
            Fragment<4> b(raw_b);
#pragma unroll
            for (int i = 0; i < MI; i++) {
                Fragment<4> a(raw_a[i]);
                multiply_add(acc[i][j], a, b, 0);
                multiply_add(acc[i][j + 1], a, b, 2);
            }
        }
    }
}

// The main loop: acc += the product of the loaders' next k_tiles tiles.
template <class LoaderA, class LoaderB> __device__ __forceinline__ void multiply(Accumulators& acc, LoaderA& a, LoaderB& b, int k_tiles) {
    extern __shared__ __align__(1024) u8 shared[];
    using TileA = typename LoaderA::Tile;
    using TileB = typename LoaderB::Tile;
    constexpr int STAGE = TileA::BYTES + TileB::BYTES;
    u32 base = shared_address(shared), read = base, write = base;
#pragma unroll 1
    for (int k = 1 - STAGES; k < k_tiles; k++) {
        if (k >= 0) {
            cp_async_wait<STAGES - 2>();
            __syncthreads();
        }
        if (k + STAGES - 1 < k_tiles) a.load(write), b.load(write + TileA::BYTES);
        cp_async_commit();
        write = write == base + (STAGES - 1) * STAGE ? base : write + STAGE;
        if (k < 0) continue;
        multiply_stage<TileA, TileB>(acc, read, read + TileA::BYTES);
        read = read == base + (STAGES - 1) * STAGE ? base : read + STAGE;
    }
}

// The epilogue: out[row][column] = product + bias[column] + emb[row / rows_per_image][column] + addend[row][column], rounded
// once.
//   bias, emb  float, or null
//   addend     OUT, laid out like out, or null. May be `out` itself, to accumulate a gradient.
//   sums       of store<true>: (rows / ROWS, columns), or null. Channel statistics, StatisticsOf<OUT>, of each ROWS rows of
//              out, those of a warp, after rounding. rows is then a multiple of ROWS.
struct Output {
    static constexpr int ROWS = BM / WM;
    static constexpr bool CENTRED = StatisticsOf<OUT>::CENTRED;
    struct __align__(2 * sizeof(OUT)) Pair { OUT first, second; };
    OUT* out;
    const float *bias, *emb;
    const OUT* addend;
    int rows, columns;
    i64 ld;
    int rows_per_image;
    void* sums;

    __device__ __forceinline__ static Pair load(const OUT* p, bool pairs, bool both) {
        return pairs ? *reinterpret_cast<const Pair*>(p) : Pair{p[0], both ? p[1] : OUT{}};
    }
    __device__ __forceinline__ static void save(OUT* p, Pair v, bool pairs, bool both) {
        if (pairs) {
            *reinterpret_cast<Pair*>(p) = v;
        } else {
            p[0] = v.first;
            if (both) p[1] = v.second;
        }
    }
    // acc += emb; m, n: this thread's first row and column. A pass of its own has one division a row. In `store` it would be
    // one for each row and column: the largest kernel then had 171 KB in place of 115, and compiled in 4.7 s in place of 3.6.
    __device__ __forceinline__ void add_embedding(Accumulators& acc, int m, int n) const {
#pragma unroll
        for (int i = 0; i < 2 * MI; i++) {
            int row = m + i * 8;
            const float* shift = emb + (i64)(row / rows_per_image) * columns;
#pragma unroll
            for (int j = 0; j < NI; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (row < rows && n + j * 8 + e < columns) acc[i / 2][j][i % 2 * 2 + e] += shift[n + j * 8 + e];
        }
    }
    template <bool SUMS = false> __device__ __forceinline__ void store(Accumulators& acc, int m, int n) const {
        int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row_tile = m / ROWS + warp / WN;
        m = row_tile * ROWS + (lane >> 2), n += warp % WN * (BN / WN) + (lane & 3) * 2;
        if (emb) add_embedding(acc, m, n);
        bool pairs = (ld | columns) % 2 == 0 && ((u64)out | (u64)addend) % sizeof(Pair) == 0;
#pragma unroll
        for (int j = 0; j < NI; j++) {
            int column = n + j * 8;
            bool inside = column < columns, both = column + 1 < columns;
            float2 constant = make_float2(bias && inside ? bias[column] : 0.0f, bias && both ? bias[column + 1] : 0.0f);
            Pair stored[2 * MI] = {};  // first the addend, then the result
#pragma unroll
            for (int i = 0; addend && i < 2 * MI; i++)
                if (inside && m + i * 8 < rows) stored[i] = load(addend + (m + i * 8) * ld + column, pairs, both);
#pragma unroll
            for (int i = 0; i < 2 * MI; i++) {
                int row = m + i * 8;
                if (!inside || row >= rows) continue;
                float2 v = make_float2(acc[i / 2][j][i % 2 * 2] + constant.x, acc[i / 2][j][i % 2 * 2 + 1] + constant.y);
                stored[i] = {from_float<OUT>(v.x + to_float(stored[i].first)), from_float<OUT>(v.y + to_float(stored[i].second))};
                save(out + row * ld + column, stored[i], pairs, both);
            }
            if (!SUMS || !sums || row_tile * ROWS >= rows) continue;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float centre = CENTRED ? __shfl_sync(~0u, to_float(e ? stored[0].second : stored[0].first), lane & 3) : 0.0f;
                float2 total = {};
#pragma unroll
                for (int i = 0; i < 2 * MI; i++) {
                    float gap = to_float(e ? stored[i].second : stored[i].first) - centre;
                    total.x += gap, total.y += gap * gap;
                }
                leave<CENTRED>(total, centre, row_tile, column + e);
            }
        }
    }
    // Store the sums of one column over a warp's rows, of which each lane has a part: CentredStatistics around `centre` if
    // AROUND, else RawStatistics.
    template <bool AROUND> __device__ __forceinline__ void leave(float2 total, float centre, int row_tile, int column) const {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
            total.x += __shfl_xor_sync(~0u, total.x, mask);
            total.y += __shfl_xor_sync(~0u, total.y, mask);
        }
        if (threadIdx.x % 32 >= 4 || column >= columns) return;
        i64 place = (i64)row_tile * columns + column;
        if constexpr (AROUND) ((CentredStatistics*)sums)[place] = {ROWS, centre, total.x, total.y};
        else ((RawStatistics*)sums)[place] = {total.x, total.y};
    }
};
