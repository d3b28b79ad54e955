// Layer norm: y = xhat * weight + bias, xhat = (x - mean) * rstd over each row. x, y, dy, dx (M, C): T, row-major.
//
// weight, bias (M / rows, C), those of `rows` rows each, mean, rstd (M) float32. y, mean, rstd overwritten; dx
// overwritten, or accumulated where `add`.
// VEC=1: C and every T address are multiples of a 16-byte pack.
// Launch: normalize and input_gradients: M blocks, threads a multiple of 32; column_sums: (32, 8) threads.
#include "reduce.cuh"
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;

// The second and third pass find the row in cache. The variance is of deviations, so a large mean costs no digits.
extern "C" __global__ void normalize(T* y, float* mean, float* rstd, const T* x, const float* weight, const float* bias, int rows, int C, float eps) {
    wait_for_previous();
    i64 group = (i64)(blockIdx.x / rows) * C;
    weight += group, bias += group;
    const T* row = x + (i64)blockIdx.x * C;
    int first = threadIdx.x * V, step = blockDim.x * V;
    float sum = 0.0f, square = 0.0f, v[V];
    for (int c = first; c < C; c += step) {
        load<V>(row + c, v);
#pragma unroll
        for (int k = 0; k < V; k++) sum += v[k];
    }
    float mu = block_reduce<Sum>(sum) / C;
    for (int c = first; c < C; c += step) {
        load<V>(row + c, v);
#pragma unroll
        for (int k = 0; k < V; k++) square += (v[k] - mu) * (v[k] - mu);
    }
    float r = rsqrtf(block_reduce<Sum>(square) / C + eps);
    for (int c = first; c < C; c += step) {
        load<V>(row + c, v);
#pragma unroll
        for (int k = 0; k < V; k++) v[k] = (v[k] - mu) * r * weight[c + k] + bias[c + k];
        store<V>(y + (i64)blockIdx.x * C + c, v);
    }
    if (threadIdx.x == 0) mean[blockIdx.x] = mu, rstd[blockIdx.x] = r;
}

// dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * weight.
extern "C" __global__ void input_gradients(T* dx, int add, const T* dy, const T* x, const float* mean, const float* rstd,
                                           const float* weight, int rows, int C) {
    wait_for_previous();
    weight += (i64)(blockIdx.x / rows) * C;
    i64 start = (i64)blockIdx.x * C;
    int first = threadIdx.x * V, step = blockDim.x * V;
    float mu = mean[blockIdx.x], r = rstd[blockIdx.x], sum = 0.0f, product = 0.0f, v[V], g[V];
    for (int c = first; c < C; c += step) {
        load<V>(x + start + c, v);
        load<V>(dy + start + c, g);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float term = g[k] * weight[c + k];
            sum += term;
            product += term * (v[k] - mu) * r;
        }
    }
    sum = block_reduce<Sum>(sum) / C;
    product = block_reduce<Sum>(product) / C;
    for (int c = first; c < C; c += step) {
        load<V>(x + start + c, v);
        load<V>(dy + start + c, g);
#pragma unroll
        for (int k = 0; k < V; k++) v[k] = r * (g[k] * weight[c + k] - sum - (v[k] - mu) * r * product);
        store<V>(dx + start + c, v, add);
    }
}

// totals (M / rows, tiles, C) = sums of dy and dy * xhat over a tile of rows. Grid (M / rows * CEIL_DIV(C, 32), tiles).
extern "C" __global__ void column_sums(float2* totals, const T* dy, const T* x, const float* mean, const float* rstd, int rows, int C) {
    wait_for_previous();
    __shared__ float2 sums[8][32];
    int chunks = CEIL_DIV(C, 32), group = blockIdx.x / chunks, c = blockIdx.x % chunks * 32 + threadIdx.x;
    int tile = CEIL_DIV(rows, (int)gridDim.y);
    i64 start = (i64)group * rows, end = start + min((i64)rows, (i64)(blockIdx.y + 1) * tile);
    float2 sum = make_float2(0.0f, 0.0f);
    if (c < C) {
#pragma unroll 4
        for (i64 m = start + (i64)blockIdx.y * tile + threadIdx.y; m < end; m += 8) {
            float g = to_float(dy[m * C + c]);
            sum.x += g;
            sum.y += g * (to_float(x[m * C + c]) - mean[m]) * rstd[m];
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || c >= C) return;
    for (int y = 1; y < 8; y++) {
        sum.x += sums[y][threadIdx.x].x;
        sum.y += sums[y][threadIdx.x].y;
    }
    totals[((i64)group * gridDim.y + blockIdx.y) * C + c] = sum;
}
