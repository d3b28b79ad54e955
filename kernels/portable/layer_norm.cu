// Layer norm: y = xhat * weight + bias, xhat = (x - mean) * rstd over each row.
//
//   x, y, dy, dx   T (M, C), row-major. y is overwritten; dx is overwritten, or accumulated where `add`.
//   weight, bias   float (M / rows, C): each `rows` consecutive rows of x share one row. Under PLUS_ONE the weight is 1 + what
//                  lies there.
//   mean, rstd     float (M), overwritten. M is at most 2^31 - 2048.
// VEC=1: C and every T address are multiples of a 16-byte pack. WARPS warps share a row, and each thread holds PACKS packs of
// it: WARPS * 32 * PACKS packs are at least a row.
// Launch: (32 * WARPS, ROWS) threads. WARPS is at most 8: each of 256 threads may have 255 registers. Grid: (M / rows) * tiles.
// Rows of more than 40 elements a thread do not fit in these. Theirs are the kernels from `moments` on, whose launch stands there.
#include "reduce.cuh"
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;
constexpr int ROWS = WARPS == 1 ? 4 : 1;  // that a block works on at a time
constexpr int ELEMENTS = PACKS * V;  // of a row, that a thread holds

// Blocks that a multiprocessor's registers are to suffice for, at least. normalize needs fewer, so that more may fit.
#if __CUDA_ARCH__ == 900
constexpr bool LIMITED = VEC && sizeof(T) == 2 && WARPS == 1;
#else
constexpr bool LIMITED = false;  // sm_86 would spill
#endif
constexpr int AT_ONCE = !LIMITED ? 1 : ELEMENTS > 24 ? 3 : ELEMENTS > 16 ? 4 : ELEMENTS > 8 ? 5 : 7;

// The column of this thread's n-th pack.
__device__ __forceinline__ int column(int n) { return (n * 32 * WARPS + threadIdx.x) * V; }

// V elements as they lie in memory.
template <bool> struct RawOf { using Type = T; };
template <> struct RawOf<true> { using Type = uint4; };
using Raw = RawOf<VEC>::Type;
__device__ __forceinline__ Raw load_raw(const T* p) { return *reinterpret_cast<const Raw*>(p); }
__device__ __forceinline__ void unpack(const Raw& raw, float (&values)[V]) {
#pragma unroll
    for (int k = 0; k < V; k++) values[k] = to_float(reinterpret_cast<const T*>(&raw)[k]);
}

// The weight of V columns.
__device__ __forceinline__ void load_weight(const float* p, float (&w)[V]) {
    load<V>(p, w);
#pragma unroll
    for (int k = 0; k < V; k++)
        if (PLUS_ONE) w[k] += 1.0f;
}
// d times the weight, of which w lies in memory: for weights that are read for every row, an operation less.
__device__ __forceinline__ float weighted(float d, float w) { return PLUS_ONE ? fmaf(d, w, d) : d * w; }

// Bring a row to L2 without waiting for it. Called by all threads of the row.
__device__ __forceinline__ void prefetch_row(const T* row, int C) {
    constexpr int LINE = 128 / sizeof(T);
    for (int c = threadIdx.x * LINE; c < C; c += 32 * WARPS * LINE) prefetch_line(row + c);
}

// The sum of x over the threads of a row. Where a warp has a row of its own, no barrier is needed.
__device__ __forceinline__ float row_sum(float x) {
    if constexpr (WARPS == 1) return warp_reduce<Sum>(x);
    else return block_reduce<Sum>(x);
}

// The rows of a block: those of tile blockIdx.x % tiles of a group, which shares a row of weights. A warp, or WARPS of them, takes
// every ROWS-th.
struct Tile {
    int group, first, last;
    __device__ __forceinline__ Tile(int rows, int tiles) : group(blockIdx.x / tiles) {
        int length = (rows - 1) / tiles + 1, start = blockIdx.x % tiles * length;  // rows + tiles may be too much for an int
        first = group * rows + start + threadIdx.y, last = group * rows + start + min(length, rows - start);
    }
};

// The variance is computed from the deviations from the mean, so that a large mean costs no digits. A tile's weight and bias are
// held in registers: they are four times a row's 16-bit elements. The next row is loaded while this one is finished. 65,536 rows
// of 768 bf16 and 32,768 rows of 1152 take 55 and 44 us on an H200; with a row for each warp they took 71 and 56.
extern "C" __global__ void __launch_bounds__(32 * WARPS * ROWS, AT_ONCE)
normalize(T* y, float* mean, float* rstd, const T* x, const float* weight, const float* bias, int rows, int tiles, int C, float eps) {
    wait_for_previous();
    Tile tile(rows, tiles);
    weight += (i64)tile.group * C, bias += (i64)tile.group * C;
    float w[PACKS][V], b[PACKS][V];
    Raw raw[PACKS];
    auto load_raws = [&](int row) {
#pragma unroll
        for (int n = 0; n < PACKS; n++)
            if (column(n) < C && row < tile.last) raw[n] = load_raw(x + (i64)row * C + column(n));
    };
    load_raws(tile.first);
#pragma unroll
    for (int n = 0; n < PACKS; n++)
        if (column(n) < C) load_weight(weight + column(n), w[n]), load<V>(bias + column(n), b[n]);
    for (int row = tile.first; row < tile.last; row += ROWS) {
        float v[PACKS][V], sum = 0.0f, square = 0.0f;
#pragma unroll
        for (int n = 0; n < PACKS; n++) {
            unpack(raw[n], v[n]);
#pragma unroll
            for (int k = 0; k < V; k++) sum += column(n) < C ? v[n][k] : 0.0f;
        }
        load_raws(row + ROWS);
        float mu = row_sum(sum) / C;
#pragma unroll
        for (int n = 0; n < PACKS; n++)
#pragma unroll
            for (int k = 0; k < V; k++) square += column(n) < C ? (v[n][k] - mu) * (v[n][k] - mu) : 0.0f;
        float r = rsqrtf(row_sum(square) / C + eps);
#pragma unroll
        for (int n = 0; n < PACKS; n++) {
            if (column(n) >= C) break;
#pragma unroll
            for (int k = 0; k < V; k++) v[n][k] = (v[n][k] - mu) * r * w[n][k] + b[n][k];
            store<V>(y + (i64)row * C + column(n), v[n]);
        }
        if (threadIdx.x == 0) mean[row] = mu, rstd[row] = r;
    }
}

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * weight. bias_sums, weight_sums: float (M / rows, tiles, C), the
// sums of dy and of dy * xhat over each tile of rows. dx may be null, and so may both of these.
// A row's elements are held as they lie in memory. Loads of x and dy are in flight at once. What is added to dx comes to L2
// meanwhile, and to registers once the first pass has left some. 32,768 rows of 1152 bf16 then take 88 us on an H200, as three
// blocks fit a multiprocessor, and 65,536 of 768 take 107; with all three loaded at first 98, as two fit, and 113.
extern "C" __global__ void __launch_bounds__(32 * WARPS * ROWS, AT_ONCE)
backward(T* dx, int add, float* bias_sums, float* weight_sums, const T* dy, const T* x, const float* mean, const float* rstd,
         const float* weight, int rows, int tiles, int C) {
    wait_for_previous();
    Tile tile(rows, tiles);
    float2 total[PACKS][V] = {};
    weight += (i64)tile.group * C;
    for (int row = tile.first; row < tile.last; row += ROWS) {
        Raw raw_x[PACKS], raw_dy[PACKS], before[PACKS];
        float mu = mean[row], r = rstd[row], sum = 0.0f, product = 0.0f;
#pragma unroll
        for (int n = 0; n < PACKS; n++) {
            if (column(n) >= C) break;
            raw_x[n] = load_raw(x + (i64)row * C + column(n));
            raw_dy[n] = load_raw(dy + (i64)row * C + column(n));
        }
        if (VEC && add) prefetch_row(dx + (i64)row * C, C);  // on sm_100 it makes others spill
#pragma unroll
        for (int n = 0; n < PACKS; n++) {
            float w[V], xhat[V], d[V];
            if (column(n) >= C) break;
            load<V>(weight + column(n), w);
            unpack(raw_x[n], xhat);
            unpack(raw_dy[n], d);
#pragma unroll
            for (int k = 0; k < V; k++) {
                xhat[k] = (xhat[k] - mu) * r;
                total[n][k].x += d[k];
                total[n][k].y += d[k] * xhat[k];
                sum += weighted(d[k], w[k]);
                product += weighted(d[k], w[k]) * xhat[k];
            }
        }
        if (!dx) continue;
        if (add)
#pragma unroll
            for (int n = 0; n < PACKS; n++) {
                if (column(n) >= C) break;
                before[n] = load_raw(dx + (i64)row * C + column(n));
            }
        sum = row_sum(sum) / C;
        product = row_sum(product) / C;
#pragma unroll
        for (int n = 0; n < PACKS; n++) {
            float w[V], xhat[V], d[V], gradient[V] = {};
            if (column(n) >= C) break;
            load<V>(weight + column(n), w);
            unpack(raw_x[n], xhat);
            unpack(raw_dy[n], d);
            if (add) unpack(before[n], gradient);
#pragma unroll
            for (int k = 0; k < V; k++) gradient[k] += r * (weighted(d[k], w[k]) - sum - (xhat[k] - mu) * r * product);
            store<V>(dx + (i64)row * C + column(n), gradient);
        }
    }
    if (!bias_sums) return;
    bias_sums += (i64)blockIdx.x * C, weight_sums += (i64)blockIdx.x * C;
    __shared__ float2 others[ROWS][V][32];
#pragma unroll
    for (int n = 0; n < PACKS; n++) {
        float of_bias[V], of_weight[V];
        if constexpr (ROWS > 1) {
            __syncthreads();  // the previous pack has been read
#pragma unroll
            for (int k = 0; k < V; k++) others[threadIdx.y][k][threadIdx.x % 32] = total[n][k];
            __syncthreads();
            for (int y = 1; threadIdx.y == 0 && y < ROWS; y++)
#pragma unroll
                for (int k = 0; k < V; k++) {
                    total[n][k].x += others[y][k][threadIdx.x].x;
                    total[n][k].y += others[y][k][threadIdx.x].y;
                }
        }
        if (threadIdx.y || column(n) >= C) continue;
#pragma unroll
        for (int k = 0; k < V; k++) of_bias[k] = total[n][k].x, of_weight[k] = total[n][k].y;
        store<V>(bias_sums + column(n), of_bias);
        store<V>(weight_sums + column(n), of_weight);
    }
}

// Rows that no block holds: first two means of each row, then all else by tiles of columns, of which a thread has V. WARPS and
// PACKS do not matter.
// moments, products: grid M, a multiple of 32 threads. columns, backward_columns: grid ((M / rows) * tiles, column tiles), 256
// threads; a column tile has 256 * V columns.
extern "C" __global__ void __launch_bounds__(1024) moments(float* mean, float* rstd, const T* x, int C, float eps) {
    wait_for_previous();
    x += (i64)blockIdx.x * C;
    int first = threadIdx.x * V, step = blockDim.x * V;
    float v[V], sum = 0.0f, square = 0.0f;
#pragma unroll 4
    for (int c = first; c < C; c += step) {
        load<V>(x + c, v);
#pragma unroll
        for (int k = 0; k < V; k++) sum += v[k];
    }
    float mu = block_reduce<Sum>(sum) / C;
#pragma unroll 4
    for (int c = first; c < C; c += step) {
        load<V>(x + c, v);
#pragma unroll
        for (int k = 0; k < V; k++) square += (v[k] - mu) * (v[k] - mu);
    }
    float r = rsqrtf(block_reduce<Sum>(square) / C + eps);
    if (threadIdx.x == 0) mean[blockIdx.x] = mu, rstd[blockIdx.x] = r;
}

// means: float2 (M), mean(g) and mean(g * xhat).
extern "C" __global__ void __launch_bounds__(1024)
products(float2* means, const T* dy, const T* x, const float* mean, const float* rstd, const float* weight, int rows, int C) {
    wait_for_previous();
    int row = blockIdx.x;
    x += (i64)row * C, dy += (i64)row * C, weight += (i64)(row / rows) * C;
    float mu = mean[row], r = rstd[row], sum = 0.0f, product = 0.0f;
#pragma unroll 2
    for (int c = threadIdx.x * V; c < C; c += blockDim.x * V) {
        float v[V], d[V], w[V];
        load<V>(x + c, v);
        load<V>(dy + c, d);
        load<V>(weight + c, w);
#pragma unroll
        for (int k = 0; k < V; k++) {
            sum += weighted(d[k], w[k]);
            product += weighted(d[k], w[k]) * (v[k] - mu) * r;
        }
    }
    sum = block_reduce<Sum>(sum) / C;
    product = block_reduce<Sum>(product) / C;
    if (threadIdx.x == 0) means[row] = {sum, product};
}

constexpr int AHEAD = 4;  // rows that a thread loads at once
// The rows of a tile, loaded AHEAD at once: raw[u] is of row + u.
__device__ __forceinline__ void load_rows(Raw (&raw)[AHEAD], const T* x, int row, int last, int C, int c) {
#pragma unroll
    for (int u = 0; u < AHEAD; u++)
        if (row + u < last) raw[u] = load_raw(x + (i64)(row + u) * C + c);
}

extern "C" __global__ void __launch_bounds__(256)
columns(T* y, const float* mean, const float* rstd, const T* x, const float* weight, const float* bias, int rows, int tiles, int C) {
    wait_for_previous();
    Tile tile(rows, tiles);
    int c = (blockIdx.y * blockDim.x + threadIdx.x) * V;
    if (c >= C) return;
    float w[V], b[V];
    load_weight(weight + (i64)tile.group * C + c, w);
    load<V>(bias + (i64)tile.group * C + c, b);
    for (int row = tile.first; row < tile.last; row += AHEAD) {
        Raw raw[AHEAD];
        load_rows(raw, x, row, tile.last, C, c);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (row + u >= tile.last) break;
            float v[V], mu = mean[row + u], r = rstd[row + u];
            unpack(raw[u], v);
#pragma unroll
            for (int k = 0; k < V; k++) v[k] = (v[k] - mu) * r * w[k] + b[k];
            store<V>(y + (i64)(row + u) * C + c, v);
        }
    }
}

// As `backward`, of whose sums bias_sums and weight_sums are.
extern "C" __global__ void __launch_bounds__(256)
backward_columns(T* dx, int add, float* bias_sums, float* weight_sums, const T* dy, const T* x, const float* mean,
                 const float* rstd, const float2* means, const float* weight, int rows, int tiles, int C) {
    wait_for_previous();
    Tile tile(rows, tiles);
    int c = (blockIdx.y * blockDim.x + threadIdx.x) * V;
    if (c >= C) return;
    float w[V], of_bias[V] = {}, of_weight[V] = {};
    load_weight(weight + (i64)tile.group * C + c, w);
    for (int row = tile.first; row < tile.last; row += AHEAD) {
        Raw raw_x[AHEAD], raw_dy[AHEAD];
        load_rows(raw_x, x, row, tile.last, C, c);
        load_rows(raw_dy, dy, row, tile.last, C, c);
#pragma unroll
        for (int u = 0; u < AHEAD; u++) {
            if (row + u >= tile.last) break;
            float v[V], d[V], mu = mean[row + u], r = rstd[row + u];
            unpack(raw_x[u], v);
            unpack(raw_dy[u], d);
#pragma unroll
            for (int k = 0; k < V; k++) {
                v[k] = (v[k] - mu) * r;
                of_bias[k] += d[k];
                of_weight[k] += d[k] * v[k];
            }
            if (!dx) continue;
            float2 of_row = means[row + u];
#pragma unroll
            for (int k = 0; k < V; k++) v[k] = r * (d[k] * w[k] - of_row.x - v[k] * of_row.y);
            store<V>(dx + (i64)(row + u) * C + c, v, add);
        }
    }
    if (!bias_sums) return;
    store<V>(bias_sums + (i64)blockIdx.x * C + c, of_bias);
    store<V>(weight_sums + (i64)blockIdx.x * C + c, of_weight);
}
