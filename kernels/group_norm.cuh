// What both files of group norm share: which channels and pixels a thread has, the affine map, SiLU, sums by channel.
// A launch is of THREADS threads, grid (N * tiles, chunks): a block covers `across` packs of V channels by
// THREADS / across pixels and walks down its tile of one image; chunks * across packs cover the channels.
#pragma once
#include "vector.cuh"

constexpr int THREADS = 256;
constexpr int V = VEC ? Pack<T>::SIZE : 1;

#define EXTENT int S, int C1, int C2, int tiles, int across
#define AFFINE const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ scale, \
               const float* __restrict__ shift, const float* __restrict__ mean, const float* __restrict__ rstd, int groups

// The channels and pixels of one thread.
struct Lane {
    int n, tile, c, row, step, count;  // image, tile, first of V channels, pixels row + i * step for i < count
    bool active;
    __device__ __forceinline__ Lane(int S, int C, int tiles, int across) {
        int y = threadIdx.x / across, rows = CEIL_DIV(S, tiles);
        n = blockIdx.x / tiles;
        tile = blockIdx.x % tiles;
        c = (blockIdx.y * across + threadIdx.x % across) * V;
        step = THREADS / across;
        row = tile * rows + y;
        active = y < step && c < C;
        count = active ? max(0, CEIL_DIV(min(S, (tile + 1) * rows) - row, step)) : 0;
    }
};

// Where the lane's first element lies, in x or in x2 (null where that is); `pitch` becomes the elements to the next one.
template <typename P>
__device__ __forceinline__ P* first_element(P* x, P* x2, const Lane& lane, int S, int C1, int C2, i64& pitch) {
    bool first = lane.c < C1;
    int width = first ? C1 : C2;
    P* source = first ? x : x2;
    pitch = (i64)lane.step * width;
    return source ? source + ((i64)lane.n * S + lane.row) * width + lane.c - (first ? 0 : C1) : nullptr;
}

// z = gain * (x - mean) + offset for V channels. x - mean comes first: gain * x + const would lose a large mean's digits.
// mean and rstd are those of the image's groups.
struct Affine {
    float mean[V], gain[V], offset[V];
    __device__ __forceinline__ Affine(const Lane& lane, int C, AFFINE) {
        int size = C / groups, g = lane.c / size, left = size - lane.c % size;
#pragma unroll
        for (int k = 0; k < V; k++) {
            int c = lane.c + k;
            float factor = scale ? 1.0f + scale[(i64)lane.n * C + c] : 1.0f;
            this->mean[k] = mean[g];
            gain[k] = rstd[g] * weight[c] * factor;
            offset[k] = bias[c] * factor + (shift ? shift[(i64)lane.n * C + c] : 0.0f);
            if (--left == 0) g++, left = size;
        }
    }
};

// mean and rstd of a group from its channels' moments: mean and sum of squared deviations of S pixels each.
__device__ __forceinline__ float2 group_statistics(const float2* moments, int size, int S, float eps) {
    float centre = moments[0].x, shift = 0.0f, squares = 0.0f;
    for (int k = 0; k < size; k++) shift += moments[k].x - centre;
    float average = centre + shift / size;
    for (int k = 0; k < size; k++) squares += moments[k].y + S * (moments[k].x - average) * (moments[k].x - average);
    return make_float2(average, rsqrtf(squares / ((float)S * size) + eps));
}

// s = 1 / (1 + exp(-z)): two share a reciprocal, as the special function unit (16 a clock) would else be the limit. The
// exponential stops at 2^60, where the product of two is finite still and s is 1e-18.
__device__ __forceinline__ void sigmoids(const float (&z)[V], float (&s)[V]) {
#pragma unroll
    for (int k = 0; k < V; k++) {
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(s[k]) : "f"(fminf(z[k] * -1.44269504f, 60.0f)));
        s[k] += 1.0f;
    }
#pragma unroll
    for (int k = 0; k < V; k += 2) {
        bool two = k + 1 < V;
        float inverse, other = two ? s[(k + 1) % V] : 1.0f;
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(s[k] * other));
        if (two) s[(k + 1) % V] = inverse * s[k];
        s[k] = inverse * other;
    }
}

// y = z, or silu(z).
__device__ __forceinline__ void activate(float (&z)[V], bool silu) {
    if (!silu) return;
    float s[V];
    sigmoids(z, s);
#pragma unroll
    for (int k = 0; k < V; k++) z[k] *= s[k];
}

// v = x - mean; dz = dy times the slope of SiLU at z, or dy itself.
__device__ __forceinline__ void before_silu(const Affine& affine, float (&v)[V], float (&dz)[V], bool silu) {
#pragma unroll
    for (int k = 0; k < V; k++) v[k] -= affine.mean[k];
    if (!silu) return;
    float z[V], s[V];
#pragma unroll
    for (int k = 0; k < V; k++) z[k] = affine.gain[k] * v[k] + affine.offset[k];
    sigmoids(z, s);
#pragma unroll
    for (int k = 0; k < V; k++) dz[k] *= s[k] + z[k] * s[k] * (1.0f - s[k]);
}

// Adds the block's pixels in a fixed order; store(channel within the chunk, both sums). `sums`: shared, V * THREADS.
template <typename Store>
__device__ __forceinline__ void block_sums(const Lane& lane, int across, int C, float2* sums, const float (&a)[V], const float (&b)[V],
                                           Store store) {
#pragma unroll
    for (int k = 0; k < V; k++) sums[k * THREADS + threadIdx.x] = make_float2(a[k], b[k]);
    __syncthreads();
    for (int j = threadIdx.x; j < across * V; j += THREADS) {
        int k = j / across, x = j % across;
        if ((blockIdx.y * across + x) * V >= C) continue;
        float2 total = sums[k * THREADS + x];
#pragma unroll 8
        for (int y = 1; y < lane.step; y++) {
            float2 term = sums[k * THREADS + y * across + x];
            total.x += term.x;
            total.y += term.y;
        }
        store(x * V + k, total);
    }
}
