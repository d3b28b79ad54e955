// Group norm: y = silu(z), z = gamma * xhat + offset, xhat = (x - mean) * rstd; batch norm too (N = 1, G = C).
//
// x (N, S, C1) and x2 (N, S, C2; null where C2 = 0) are read as one array of C = C1 + C2 channels, S pixels an image;
// y and dy (N, S, C). All T, channels last. float32: weight, bias (C); scale, shift (N, C) or null; mean, rstd (N, G);
// gamma = weight * (1 + scale), offset = bias * (1 + scale) + shift. Outputs overwrite; gradients with an `add` flag
// accumulate where it is set. Sums go by tiles of pixels into partials, float2 (N, tiles, C), then in tile order: two
// runs give the same bits.
// VEC=1: C1, C2 and every T address are multiples of a 16-byte pack.
// Launch of the tiled kernels: 256 threads, grid (N * tiles, chunks). A block covers `across` packs of channels by
// 256 / across pixels and walks down its tile; chunks * across packs cover the channels.
// variants: T=float,bf16,half VEC=0,1
#include "vector.cuh"

constexpr int THREADS = 256;
constexpr int V = VEC ? Pack<T>::SIZE : 1;

#define EXTENT int S, int C1, int C2, int tiles, int across
#define AFFINE const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ scale, \
               const float* __restrict__ shift, const float* __restrict__ mean, const float* __restrict__ rstd, int groups

// The channels and pixels of one thread of a tiled kernel.
struct Lane {
    int n, tile, c, row, end, step;  // image, tile, first of V channels, pixels row, row + step, ... < end
    bool active;
    __device__ Lane(int S, int C, int tiles, int across) {
        int y = threadIdx.x / across, rows = CEIL_DIV(S, tiles);
        n = blockIdx.x / tiles;
        tile = blockIdx.x % tiles;
        c = (blockIdx.y * across + threadIdx.x % across) * V;
        step = THREADS / across;
        row = tile * rows + y;
        end = min(S, (tile + 1) * rows);
        active = y < step && c < C;
    }
};

// Where channel c of image n lies: in x or x2. `stride` becomes the elements between two pixels there.
template <typename P>
__device__ __forceinline__ P* channel(P* x, P* x2, const Lane& lane, int S, int C1, int C2, int& stride) {
    bool first = lane.c < C1;
    stride = first ? C1 : C2;
    P* source = first ? x : x2;
    return source ? source + (i64)lane.n * S * stride + lane.c - (first ? 0 : C1) : nullptr;
}

// z = gain * (x - mean) + offset for V channels. x - mean comes first: gain * x + const would lose a large mean's digits.
struct Affine {
    float mean[V], gain[V], offset[V];
    __device__ Affine(const Lane& lane, int C, AFFINE) {
        int size = C / groups, g = lane.c / size, left = size - lane.c % size;
#pragma unroll
        for (int k = 0; k < V; k++) {
            int c = lane.c + k;
            float factor = scale ? 1.0f + scale[(i64)lane.n * C + c] : 1.0f;
            this->mean[k] = mean[(i64)lane.n * groups + g];
            gain[k] = rstd[(i64)lane.n * groups + g] * weight[c] * factor;
            offset[k] = bias[c] * factor + (shift ? shift[(i64)lane.n * C + c] : 0.0f);
            if (--left == 0) g++, left = size;
        }
    }
};

__device__ __forceinline__ float quick_sigmoid(float z) { return __fdividef(1.0f, 1.0f + __expf(-z)); }

__device__ __forceinline__ float silu_slope(float z) {
    float s = quick_sigmoid(z);
    return s * (1.0f + z * (1.0f - s));
}

// Adds the block's pixels in order; out (C) receives both sums of each channel of the block.
__device__ __forceinline__ void store_sums(const Lane& lane, int across, int C, float2* out, const float (&a)[V], const float (&b)[V]) {
    __shared__ float2 sums[V][THREADS];
#pragma unroll
    for (int k = 0; k < V; k++) sums[k][threadIdx.x] = make_float2(a[k], b[k]);
    __syncthreads();
    for (int j = threadIdx.x; j < across * V; j += THREADS) {
        int k = j / across, x = j % across, c = (blockIdx.y * across + x) * V + k;
        if (c >= C) continue;
        float2 total = sums[k][x];
        for (int y = 1; y < lane.step; y++) {
            float2 term = sums[k][y * across + x];
            total.x += term.x;
            total.y += term.y;
        }
        out[c] = total;
    }
}

// partials = sums of x - x[n, 0, c] and of its square, of one source: shifted, as E[x^2] - E[x]^2 cancels for a large mean.
extern "C" __global__ __launch_bounds__(THREADS, 4) void statistics(const T* __restrict__ x, float2* partials, int S, int C, int tiles, int across) {
    Lane lane(S, C, tiles, across);
    float first[V], sum[V] = {}, square[V] = {};
    if (lane.active) {
        const T* image = x + (i64)lane.n * S * C + lane.c;
        load<V>(image, first);
#pragma unroll 4
        for (int row = lane.row; row < lane.end; row += lane.step) {
            float v[V];
            load<V>(image + (i64)row * C, v);
#pragma unroll
            for (int k = 0; k < V; k++) {
                float d = v[k] - first[k];
                sum[k] += d;
                square[k] += d * d;
            }
        }
    }
    store_sums(lane, across, C, partials + ((i64)lane.n * tiles + lane.tile) * C, sum, square);
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
        const float2* own = moments + g * size;
        float centre = own[0].x, shift = 0.0f, squares = 0.0f;
        for (int k = 0; k < size; k++) shift += own[k].x - centre;
        float average = centre + shift / size;
        for (int k = 0; k < size; k++) squares += own[k].y + S * (own[k].x - average) * (own[k].x - average);
        mean[(i64)n * groups + g] = average;
        rstd[(i64)n * groups + g] = rsqrtf(squares / ((float)S * size) + eps);
    }
}

// y, of one or two sources.
extern "C" __global__ __launch_bounds__(THREADS, 3) void normalize(
    T* __restrict__ y, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu) {
    int C = C1 + C2, stride;
    Lane lane(S, C, tiles, across);
    if (!lane.active) return;
    const T* source = channel(x, x2, lane, S, C1, C2, stride);
    T* target = y + (i64)lane.n * S * C + lane.c;
    Affine affine(lane, C, weight, bias, scale, shift, mean, rstd, groups);
#pragma unroll 2
    for (int row = lane.row; row < lane.end; row += lane.step) {
        float v[V];
        load<V>(source + (i64)row * stride, v);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float z = affine.gain[k] * (v[k] - affine.mean[k]) + affine.offset[k];
            v[k] = silu ? z * quick_sigmoid(z) : z;
        }
        store<V>(target + (i64)row * C, v);
    }
}

// partials = sums of dz and of dz * (x - mean).
extern "C" __global__ __launch_bounds__(THREADS, 2) void backward_sums(
    float2* partials, const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu) {
    int C = C1 + C2, stride;
    Lane lane(S, C, tiles, across);
    float sum[V] = {}, product[V] = {};
    if (lane.active) {
        const T* source = channel(x, x2, lane, S, C1, C2, stride);
        const T* dout = dy + (i64)lane.n * S * C + lane.c;
        Affine affine(lane, C, weight, bias, scale, shift, mean, rstd, groups);
#pragma unroll 2
        for (int row = lane.row; row < lane.end; row += lane.step) {
            float v[V], dz[V];
            load<V>(source + (i64)row * stride, v);
            load<V>(dout + (i64)row * C, dz);
#pragma unroll
            for (int k = 0; k < V; k++) {
                float centred = v[k] - affine.mean[k];
                if (silu) dz[k] *= silu_slope(affine.gain[k] * centred + affine.offset[k]);
                sum[k] += dz[k];
                product[k] += dz[k] * centred;
            }
        }
    }
    store_sums(lane, across, C, partials + ((i64)lane.n * tiles + lane.tile) * C, sum, product);
}

// totals (N, C): sums of dz and dz * xhat over an image. means (N, G): of gamma * dz and gamma * dz * xhat over a group.
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
        totals[i] = total;
        float gamma = weight[c] * (scale ? 1.0f + scale[i] : 1.0f);
        weighted[c] = make_float2(gamma * total.x, gamma * total.y);
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

// dbias, dweight (C), each or null: totals (N, C) times 1 + scale, summed over n. Launch: (32, 8) threads, grid CEIL_DIV(C, 32).
extern "C" __global__ __launch_bounds__(256) void weight_gradients(
    const float2* totals, const float* scale, float* dweight, int add_weight, float* dbias, int add_bias, int N, int C) {
    __shared__ float2 sums[8][32];
    int c = blockIdx.x * 32 + threadIdx.x;
    float2 sum = make_float2(0.0f, 0.0f);
    if (c < C) {
#pragma unroll 4
        for (int n = threadIdx.y; n < N; n += 8) {
            float2 total = totals[(i64)n * C + c];
            float factor = scale ? 1.0f + scale[(i64)n * C + c] : 1.0f;
            sum.x += factor * total.x;
            sum.y += factor * total.y;
        }
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || c >= C) return;
    for (int y = 1; y < 8; y++) {
        sum.x += sums[y][threadIdx.x].x;
        sum.y += sums[y][threadIdx.x].y;
    }
    if (dbias) dbias[c] = (add_bias ? dbias[c] : 0.0f) + sum.x;
    if (dweight) dweight[c] = (add_weight ? dweight[c] : 0.0f) + sum.y;
}

// dx, dx2 (either may be null) = gain * dz - rstd * (means.x + xhat * means.y); means null: the statistics are constants.
extern "C" __global__ __launch_bounds__(THREADS, 2) void input_gradients(
    T* dx, int add, T* dx2, int add2, const float2* means, const T* __restrict__ dy, const T* __restrict__ x,
    const T* __restrict__ x2, AFFINE, EXTENT, int silu) {
    int C = C1 + C2, stride;
    Lane lane(S, C, tiles, across);
    if (!lane.active) return;
    T* target = channel(dx, dx2, lane, S, C1, C2, stride);
    if (!target) return;
    const T* source = channel(x, x2, lane, S, C1, C2, stride);
    const T* dout = dy + (i64)lane.n * S * C + lane.c;
    bool accumulate = lane.c < C1 ? add : add2;
    Affine affine(lane, C, weight, bias, scale, shift, mean, rstd, groups);
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
    for (int row = lane.row; row < lane.end; row += lane.step) {
        float v[V], dz[V];
        load<V>(source + (i64)row * stride, v);
        load<V>(dout + (i64)row * C, dz);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float centred = v[k] - affine.mean[k];
            if (silu) dz[k] *= silu_slope(affine.gain[k] * centred + affine.offset[k]);
            v[k] = affine.gain[k] * dz[k] - constant[k] - slope[k] * centred;
        }
        store<V>(target + (i64)row * stride, v, accumulate);
    }
}
