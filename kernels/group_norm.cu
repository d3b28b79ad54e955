// Group norm: y = silu(z), z = gamma * xhat + offset, xhat = (x - mean) * rstd; batch norm too (N = 1, G = C).
//
// x (N, S, C1) and x2 (N, S, C2; null where C2 = 0) are read as one array of C = C1 + C2 channels, S pixels an image;
// y and dy (N, S, C). All T, channels last. float32: weight, bias (C); scale, shift (N, C) or null; mean, rstd (N, G);
// gamma = weight * (1 + scale), offset = bias * (1 + scale) + shift. Outputs overwrite; gradients with an `add` flag
// accumulate where it is set. Sums go by tiles of pixels into partials, float2 (N, tiles, C), then in tile order: two
// runs give the same bits.
// VEC=1: C1, C2 and every T address are multiples of a 16-byte pack.
// The tiled kernels are launched as group_norm.cuh says. Where clusters exist, group_norm_sm90.cu takes most shapes.
// variants: T=float,bf16,half VEC=0,1
#include "group_norm.cuh"

// partials = sums of x - x[n, 0, c] and of its square, of one source: shifted, as E[x^2] - E[x]^2 cancels for a large mean.
extern "C" __global__ __launch_bounds__(THREADS, 3) void statistics(const T* __restrict__ x, float2* partials, int S, int C, int tiles, int across) {
    Lane lane(S, C, tiles, across);
    float first[V], sum[V] = {}, square[V] = {};
    if (lane.count) {
        i64 pitch;
        const T* source = first_element(x, x, lane, S, C, 0, pitch);
        load<V>(x + (i64)lane.n * S * C + lane.c, first);
#pragma unroll 4
        for (int i = 0; i < lane.count; i++) {
            float v[V];
            load<V>(source + i * pitch, v);
#pragma unroll
            for (int k = 0; k < V; k++) {
                float d = v[k] - first[k];
                sum[k] += d;
                square[k] += d * d;
            }
        }
    }
    __shared__ float2 sums[V * THREADS];
    block_sums(lane, across, C, sums, partials + ((i64)lane.n * tiles + lane.tile) * C + blockIdx.y * across * V, sum, square);
}

// mean, rstd from both sources' partials. Those with x null (a producer's epilogue made them) are not shifted.
// Launch: N blocks, C * 8 bytes of shared memory.
extern "C" __global__ __launch_bounds__(THREADS, 4) void finish_statistics(
    const float2* partials, const T* x, int tiles, int C1, const float2* partials2, const T* x2, int tiles2, int C2,
    float* mean, float* rstd, int S, int groups, float eps) {
    extern __shared__ float2 moments[];  // each channel's mean and sum of squared deviations
    int n = blockIdx.x, C = C1 + C2, size = C / groups;
    for (int c = threadIdx.x; c < C; c += THREADS) {
        bool second = c >= C1;
        int own = second ? c - C1 : c, width = second ? C2 : C1, count = second ? tiles2 : tiles;
        const float2* p = (second ? partials2 : partials) + (i64)n * count * width + own;
        const T* source = second ? x2 : x;
        double sum = 0.0, square = 0.0;
#pragma unroll 4
        for (int t = 0; t < count; t++) {
            float2 term = p[(i64)t * width];
            sum += term.x;
            square += term.y;
        }
        float first = source ? to_float(source[(i64)n * S * width + own]) : 0.0f;
        moments[c] = make_float2(first + (float)(sum / S), (float)fmax(square - sum * sum / S, 0.0));
    }
    __syncthreads();
    for (int g = threadIdx.x; g < groups; g += THREADS) {
        float2 found = group_statistics(moments + g * size, size, S, eps);
        mean[(i64)n * groups + g] = found.x;
        rstd[(i64)n * groups + g] = found.y;
    }
}

// y, of one or two sources.
extern "C" __global__ __launch_bounds__(THREADS, 2) void normalize(
    T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu) {
    int C = C1 + C2;
    Lane lane(S, C, tiles, across);
    if (!lane.count) return;
    i64 pitch, out_pitch;
    const T* source = first_element(x, x2, lane, S, C1, C2, pitch);
    T* target = first_element(y, y, lane, S, C, 0, out_pitch);
    Affine affine(lane, C, weight, bias, scale, shift, mean + (i64)lane.n * groups, rstd + (i64)lane.n * groups, groups);
#pragma unroll 2
    for (int i = 0; i < lane.count; i++) {
        float v[V];
        load<V>(source + i * pitch, v);
#pragma unroll
        for (int k = 0; k < V; k++) v[k] = affine.gain[k] * (v[k] - affine.mean[k]) + affine.offset[k];
        activate(v, silu);
        store<V>(target + i * out_pitch, v);
    }
}

// partials = sums of dz and of dz * (x - mean).
extern "C" __global__ __launch_bounds__(THREADS, 2) void backward_sums(
    float2* partials, const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu) {
    int C = C1 + C2;
    Lane lane(S, C, tiles, across);
    float sum[V] = {}, product[V] = {};
    if (lane.count) {
        i64 pitch, out_pitch;
        const T* source = first_element(x, x2, lane, S, C1, C2, pitch);
        const T* dout = first_element(dy, dy, lane, S, C, 0, out_pitch);
        Affine affine(lane, C, weight, bias, scale, shift, mean + (i64)lane.n * groups, rstd + (i64)lane.n * groups, groups);
#pragma unroll 2
        for (int i = 0; i < lane.count; i++) {
            float v[V], dz[V];
            load<V>(source + i * pitch, v);
            load<V>(dout + i * out_pitch, dz);
            before_silu(affine, v, dz, silu);
#pragma unroll
            for (int k = 0; k < V; k++) {
                sum[k] += dz[k];
                product[k] += dz[k] * v[k];
            }
        }
    }
    __shared__ float2 sums[V * THREADS];
    block_sums(lane, across, C, sums, partials + ((i64)lane.n * tiles + lane.tile) * C + blockIdx.y * across * V, sum, product);
}

// totals (N, C): sums of dz and dz * xhat over an image, times 1 + scale. means (N, G): of gamma * dz and gamma * dz * xhat over a group.
// dscale, dshift (N, C) or null. Launch: N blocks, C * 8 bytes of shared memory.
extern "C" __global__ __launch_bounds__(THREADS, 4) void finish_sums(
    const float2* partials, float2* totals, float2* means, float* dscale, int add_scale, float* dshift, int add_shift,
    AFFINE, int S, int C, int tiles) {
    extern __shared__ float2 weighted[];
    int n = blockIdx.x, size = C / groups;
    for (int c = threadIdx.x; c < C; c += THREADS) {
        const float2* p = partials + (i64)n * tiles * C + c;
        float2 total = make_float2(0.0f, 0.0f);
        for (int t = 0; t < tiles; t++) {
            float2 term = p[(i64)t * C];
            total.x += term.x;
            total.y += term.y;
        }
        i64 i = (i64)n * C + c;
        total.y *= rstd[(i64)n * groups + c / size];
        float factor = scale ? 1.0f + scale[i] : 1.0f;
        totals[i] = make_float2(factor * total.x, factor * total.y);
        weighted[c] = make_float2(weight[c] * totals[i].x, weight[c] * totals[i].y);
        if (dscale) dscale[i] = (add_scale ? dscale[i] : 0.0f) + weight[c] * total.y + bias[c] * total.x;
        if (dshift) dshift[i] = (add_shift ? dshift[i] : 0.0f) + total.x;
    }
    __syncthreads();
    for (int g = threadIdx.x; g < groups; g += THREADS) {
        float2 sum = make_float2(0.0f, 0.0f);
        for (int k = g * size; k < (g + 1) * size; k++) {
            sum.x += weighted[k].x;
            sum.y += weighted[k].y;
        }
        float count = (float)S * size;
        means[(i64)n * groups + g] = make_float2(sum.x / count, sum.y / count);
    }
}

// dx, dx2 (either may be null) = gain * dz - rstd * (means.x + xhat * means.y); means null: the statistics are constants.
extern "C" __global__ __launch_bounds__(THREADS, 2) void input_gradients(
    T* dx, int add, T* dx2, int add2, const float2* means, const T* __restrict__ dy, const T* __restrict__ x,
    const T* __restrict__ x2, AFFINE, EXTENT, int silu) {
    int C = C1 + C2;
    Lane lane(S, C, tiles, across);
    if (!lane.count) return;
    i64 pitch, out_pitch;
    T* target = first_element(dx, dx2, lane, S, C1, C2, pitch);
    if (!target) return;
    const T* source = first_element(x, x2, lane, S, C1, C2, pitch);
    const T* dout = first_element(dy, dy, lane, S, C, 0, out_pitch);
    bool accumulate = lane.c < C1 ? add : add2;
    Affine affine(lane, C, weight, bias, scale, shift, mean + (i64)lane.n * groups, rstd + (i64)lane.n * groups, groups);
    float constant[V] = {}, slope[V] = {};
    if (means) {
#pragma unroll
        for (int k = 0; k < V; k++) {
            i64 g = (i64)lane.n * groups + (lane.c + k) / (C / groups);
            constant[k] = rstd[g] * means[g].x;
            slope[k] = rstd[g] * rstd[g] * means[g].y;
        }
    }
#pragma unroll 2
    for (int i = 0; i < lane.count; i++) {
        float v[V], dz[V];
        load<V>(source + i * pitch, v);
        load<V>(dout + i * out_pitch, dz);
        before_silu(affine, v, dz, silu);
#pragma unroll
        for (int k = 0; k < V; k++) v[k] = affine.gain[k] * dz[k] - constant[k] - slope[k] * v[k];
        store<V>(target + i * pitch, v, accumulate);
    }
}
