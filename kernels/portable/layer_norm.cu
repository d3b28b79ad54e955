// Layer norm: y = xhat * weight + bias, xhat = (x - mean) * rstd over each row. x, y, dy, dx (M, C): T, row-major.
//
// weight, bias (M / rows, C), those of `rows` rows each, mean, rstd (M) float32. y, mean, rstd overwritten; dx
// overwritten, or accumulated where `add`.
// VEC=1: C and every T address are multiples of a 16-byte pack. WARPS share a row, and each thread holds PACKS packs of it:
// WARPS * 32 * PACKS packs are at least a row.
// Launch: normalize and input_gradients: (32 * WARPS, rows at once) threads, 4 rows at most, one where WARPS > 1. WARPS
// are 8 at most: each of 256 threads may have 255 registers. column_sums: (columns, lanes) threads, at most 256.
#include "reduce.cuh"
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;
constexpr int AT_ONCE = PACKS * V <= 64 ? PACKS : 1;  // more of a row than that lies in memory of the thread's own

// The row of this thread, and the column of its n-th pack.
__device__ __forceinline__ i64 own_row() { return (i64)blockIdx.x * blockDim.y + threadIdx.y; }
__device__ __forceinline__ int column(int n) { return (n * 32 * WARPS + threadIdx.x) * V; }

// Of a row; beyond its end 0. All loads are under way at once.
__device__ __forceinline__ void load_row(const T* row, int C, float (&values)[PACKS][V]) {
#pragma unroll AT_ONCE
    for (int n = 0; n < PACKS; n++) {
#pragma unroll
        for (int k = 0; k < V; k++) values[n][k] = 0.0f;
        if (column(n) < C) load<V>(row + column(n), values[n]);
    }
}

// Over the threads of a row. A warp of its own needs no barrier.
__device__ __forceinline__ float row_sum(float x) {
    if constexpr (WARPS == 1) return warp_reduce<Sum>(x);
    else return block_reduce<Sum>(x);
}

// The variance is of deviations, so a large mean costs no digits.
extern "C" __global__ void normalize(T* y, float* mean, float* rstd, const T* x, const float* weight, const float* bias, i64 M, int rows, int C, float eps) {
    wait_for_previous();
    i64 row = own_row();
    if (row >= M) return;
    weight += row / rows * C, bias += row / rows * C;
    float v[PACKS][V], sum = 0.0f, square = 0.0f;
    load_row(x + row * C, C, v);
#pragma unroll AT_ONCE
    for (int n = 0; n < PACKS; n++)
#pragma unroll
        for (int k = 0; k < V; k++) sum += v[n][k];
    float mu = row_sum(sum) / C;
#pragma unroll AT_ONCE
    for (int n = 0; n < PACKS; n++)
#pragma unroll
        for (int k = 0; k < V; k++) square += column(n) < C ? (v[n][k] - mu) * (v[n][k] - mu) : 0.0f;
    float r = rsqrtf(row_sum(square) / C + eps);
#pragma unroll AT_ONCE
    for (int n = 0; n < PACKS; n++) {
        float w[V], b[V];
        if (column(n) >= C) break;
        load<V>(weight + column(n), w);
        load<V>(bias + column(n), b);
#pragma unroll
        for (int k = 0; k < V; k++) v[n][k] = (v[n][k] - mu) * r * w[k] + b[k];
        store<V>(y + row * C + column(n), v[n]);
    }
    if (threadIdx.x == 0) mean[row] = mu, rstd[row] = r;
}

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * weight.
extern "C" __global__ void input_gradients(T* dx, int add, const T* dy, const T* x, const float* mean, const float* rstd,
                                           const float* weight, i64 M, int rows, int C) {
    wait_for_previous();
    i64 row = own_row();
    if (row >= M) return;
    weight += row / rows * C;
    float mu = mean[row], r = rstd[row], sum = 0.0f, product = 0.0f, xhat[PACKS][V], g[PACKS][V];
    load_row(x + row * C, C, xhat);
    load_row(dy + row * C, C, g);
#pragma unroll AT_ONCE
    for (int n = 0; n < PACKS; n++) {
        float w[V];
        if (column(n) >= C) break;
        load<V>(weight + column(n), w);
#pragma unroll
        for (int k = 0; k < V; k++) {
            xhat[n][k] = (xhat[n][k] - mu) * r;
            g[n][k] *= w[k];
            sum += g[n][k];
            product += g[n][k] * xhat[n][k];
        }
    }
    sum = row_sum(sum) / C;
    product = row_sum(product) / C;
#pragma unroll AT_ONCE
    for (int n = 0; n < PACKS; n++) {
        if (column(n) >= C) break;
#pragma unroll
        for (int k = 0; k < V; k++) g[n][k] = r * (g[n][k] - sum - xhat[n][k] * product);
        store<V>(dx + row * C + column(n), g[n], add);
    }
}

// totals (M / rows, tiles, C) = sums of dy and dy * xhat over a tile of rows. Grid (M / rows * chunks, tiles), where
// chunks of columns * V columns are a row.
extern "C" __global__ void column_sums(float2* totals, const T* dy, const T* x, const float* mean, const float* rstd, int rows, int C) {
    wait_for_previous();
    __shared__ float2 sums[256][V];
    int chunks = CEIL_DIV(C, (int)blockDim.x * V), group = blockIdx.x / chunks, thread = threadIdx.y * blockDim.x + threadIdx.x;
    int c = (blockIdx.x % chunks * blockDim.x + threadIdx.x) * V, tile = CEIL_DIV(rows, (int)gridDim.y);
    i64 start = (i64)group * rows, end = start + min((i64)rows, (i64)(blockIdx.y + 1) * tile);
    float2 sum[V];
#pragma unroll
    for (int k = 0; k < V; k++) sum[k] = make_float2(0.0f, 0.0f);
    if (c < C) {
#pragma unroll 4
        for (i64 m = start + (i64)blockIdx.y * tile + threadIdx.y; m < end; m += blockDim.y) {
            float g[V], v[V], mu = mean[m], r = rstd[m];
            load<V>(dy + m * C + c, g);
            load<V>(x + m * C + c, v);
#pragma unroll
            for (int k = 0; k < V; k++) {
                sum[k].x += g[k];
                sum[k].y += g[k] * (v[k] - mu) * r;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < V; k++) sums[thread][k] = sum[k];
    __syncthreads();
    if (threadIdx.y || c >= C) return;
    for (int y = 1; y < blockDim.y; y++) {
#pragma unroll
        for (int k = 0; k < V; k++) {
            sum[k].x += sums[y * blockDim.x + thread][k].x;
            sum[k].y += sums[y * blockDim.x + thread][k].y;
        }
    }
#pragma unroll
    for (int k = 0; k < V; k++) totals[((i64)group * gridDim.y + blockIdx.y) * C + c + k] = sum[k];
}
