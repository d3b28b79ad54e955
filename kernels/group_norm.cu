// Group norm: y = silu(z), z = gamma * xhat + offset, xhat = (x - mean) * rstd; batch norm too (N = 1, G = C).
//
// x (N, S, C1) and x2 (N, S, C2; null where C2 = 0) are read as one array of C = C1 + C2 channels, S pixels an image;
// y and dy (N, S, C). All T, channels last. float32: weight, bias (C); scale, shift (N, C) or null; mean, rstd (N, G);
// gamma = weight * (1 + scale), offset = bias * (1 + scale) + shift. Outputs overwrite; gradients with an `add` flag
// accumulate where it is set. Sums go by tiles of pixels into partials, float2 (N, tiles, C), then in tile order: two
// runs give the same bits. Where few tiles make an image, `normalize` and `input_gradients` add them up themselves, every
// block for its image; else `finish_statistics` and `finish_sums` do it once.
// VEC=1: C1, C2 and every T address are multiples of a 16-byte pack.
// The tiled kernels are launched as group_norm.cuh says. Those that are given partials need 8 bytes of dynamic shared memory
// for each channel and each group, the finish_ kernels for each channel.
// variants: T=float,bf16,half VEC=0,1
#include "group_norm.cuh"

// V elements as they lie in memory, and rows of them from ARRAYS arrays: the next BATCH rows are on their way while row()
// uses these, so that enough bytes are in flight. An array may be null; then its elements are not set.
struct __align__(VEC ? 16 : sizeof(T)) Raw { T v[V]; };

__device__ __forceinline__ Raw load_raw(const T* p) {
    Raw raw;
    if constexpr (VEC) *reinterpret_cast<uint4*>(&raw) = *reinterpret_cast<const uint4*>(p);
    else raw.v[0] = *p;
    return raw;
}

template <int ARRAYS, int BATCH> struct Rows {
    const T* start[ARRAYS];
    i64 pitch[ARRAYS];
    int count;
    Raw next[BATCH][ARRAYS];

    __device__ __forceinline__ void fetch(int first) {
#pragma unroll
        for (int u = 0; u < BATCH; u++)
#pragma unroll
            for (int a = 0; a < ARRAYS; a++)
                if (first + u < count && start[a]) next[u][a] = load_raw(start[a] + (first + u) * pitch[a]);
    }
    template <typename Row> __device__ __forceinline__ void each(Row row) {  // after fetch(0)
        for (int i = 0; i < count; i += BATCH) {
            Raw now[BATCH][ARRAYS];
#pragma unroll
            for (int u = 0; u < BATCH; u++)
#pragma unroll
                for (int a = 0; a < ARRAYS; a++) now[u][a] = next[u][a];
            fetch(i + BATCH);
#pragma unroll
            for (int u = 0; u < BATCH; u++)
                if (i + u < count) row(i + u, now[u]);
        }
    }
};

__device__ __forceinline__ void to_floats(const Raw& raw, float (&v)[V]) {
#pragma unroll
    for (int k = 0; k < V; k++) v[k] = to_float(raw.v[k]);
}

extern __shared__ float2 channels[];  // C of them, then room for two floats a group

// partials = sums of x - x[n, 0, c] and of its square, of one source: shifted, as E[x^2] - E[x]^2 cancels for a large mean.
extern "C" __global__ __launch_bounds__(THREADS, 2) void statistics(const T* __restrict__ x, float2* partials, int S, int C, int tiles, int across) {
    wait_for_previous();
    __shared__ float2 scratch[V * THREADS];
    Lane lane(S, C, tiles, across);
    Rows<1, 4> rows;
    rows.start[0] = first_element(x, x, lane, S, C, 0, rows.pitch[0]);
    rows.count = lane.count;
    rows.fetch(0);
    float first[V] = {}, sum[V] = {}, square[V] = {};
    if (lane.count) load<V>(x + (i64)lane.n * S * C + lane.c, first);
    rows.each([&](int, const Raw (&raw)[1]) {
        float v[V];
        to_floats(raw[0], v);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float d = v[k] - first[k];
            sum[k] += d;
            square[k] += d * d;
        }
    });
    float2* out = partials + ((i64)lane.n * tiles + lane.tile) * C + blockIdx.y * across * V;
    block_sums(lane, across, C, scratch, sum, square, [&](int j, float2 total) { out[j] = total; });
}

// Both sources' partials. Where `shifted` is not null it is the source around whose first pixel they were taken; a
// producer's epilogue takes them around 0.
#define PARTIALS const float2* partials, const T* shifted, int tiles1, const float2* partials2, const T* shifted2, int tiles2

// mean and rstd of image n's groups, for every thread of the block.
__device__ __forceinline__ void image_statistics(int n, PARTIALS, int C1, int C2, int S, int groups, float eps, float* mean, float* rstd) {
    int C = C1 + C2, size = C / groups;
    for (int c = threadIdx.x; c < C; c += THREADS) {
        bool second = c >= C1;
        int own = second ? c - C1 : c, width = second ? C2 : C1, count = second ? tiles2 : tiles1;
        const float2* p = (second ? partials2 : partials) + (i64)n * count * width + own;
        const T* source = second ? shifted2 : shifted;
        double sum = 0.0, square = 0.0;
#pragma unroll 8
        for (int t = 0; t < count; t++) {
            float2 term = p[(i64)t * width];
            sum += term.x;
            square += term.y;
        }
        float first = source ? to_float(source[(i64)n * S * width + own]) : 0.0f;
        channels[c] = make_float2(first + (float)(sum / S), (float)fmax(square - sum * sum / S, 0.0));
    }
    __syncthreads();
    for (int g = threadIdx.x; g < groups; g += THREADS) {
        float2 found = group_statistics(channels + g * size, size, S, eps);
        mean[g] = found.x;
        rstd[g] = found.y;
    }
    __syncthreads();
}

// mean, rstd. Launch: N blocks.
extern "C" __global__ __launch_bounds__(THREADS, 2) void finish_statistics(PARTIALS, int C1, int C2, float* mean, float* rstd, int S,
                                                                           int groups, float eps) {
    wait_for_previous();
    i64 first = (i64)blockIdx.x * groups;
    image_statistics(blockIdx.x, partials, shifted, tiles1, partials2, shifted2, tiles2, C1, C2, S, groups, eps, mean + first, rstd + first);
}

// y, of one or two sources. Statistics come as mean and rstd, or as partials: then also new_mean and new_rstd are written.
extern "C" __global__ __launch_bounds__(THREADS, 2) void normalize(
    T* y, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu, PARTIALS, float* new_mean, float* new_rstd,
    float eps) {
    wait_for_previous();
    int C = C1 + C2;
    Lane lane(S, C, tiles, across);
    i64 pitch, of_image = (i64)lane.n * groups;
    T* target = first_element(y, y, lane, S, C, 0, pitch);
    Rows<1, 4> rows;
    rows.start[0] = first_element(x, x2, lane, S, C1, C2, rows.pitch[0]);
    rows.count = lane.count;
    rows.fetch(0);
    if (partials) {
        float *own_mean = reinterpret_cast<float*>(channels + C), *own_rstd = own_mean + groups;
        image_statistics(lane.n, partials, shifted, tiles1, partials2, shifted2, tiles2, C1, C2, S, groups, eps, own_mean, own_rstd);
        if (lane.tile == 0 && blockIdx.y == 0)
            for (int g = threadIdx.x; g < groups; g += THREADS) new_mean[of_image + g] = own_mean[g], new_rstd[of_image + g] = own_rstd[g];
        mean = own_mean, rstd = own_rstd;
    } else {
        mean += of_image, rstd += of_image;
    }
    if (!lane.count) return;
    Affine affine(lane, C, weight, bias, scale, shift, mean, rstd, groups);
    rows.each([&](int i, const Raw (&raw)[1]) {
        float v[V];
        to_floats(raw[0], v);
#pragma unroll
        for (int k = 0; k < V; k++) v[k] = affine.gain[k] * (v[k] - affine.mean[k]) + affine.offset[k];
        activate(v, silu);
        store<V>(target + i * pitch, v);
    });
}

// partials = sums of dz and of dz * (x - mean).
extern "C" __global__ __launch_bounds__(THREADS, 2) void backward_sums(
    float2* partials, const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu) {
    wait_for_previous();
    __shared__ float2 scratch[V * THREADS];
    int C = C1 + C2;
    Lane lane(S, C, tiles, across);
    Rows<2, 2> rows;
    rows.start[0] = first_element(x, x2, lane, S, C1, C2, rows.pitch[0]);
    rows.start[1] = first_element(dy, dy, lane, S, C, 0, rows.pitch[1]);
    rows.count = lane.count;
    rows.fetch(0);
    float sum[V] = {}, product[V] = {};
    if (lane.count) {
        Affine affine(lane, C, weight, bias, scale, shift, mean + (i64)lane.n * groups, rstd + (i64)lane.n * groups, groups);
        rows.each([&](int, const Raw (&raw)[2]) {
            float v[V], dz[V];
            to_floats(raw[0], v);
            to_floats(raw[1], dz);
            before_silu(affine, v, dz, silu);
#pragma unroll
            for (int k = 0; k < V; k++) {
                sum[k] += dz[k];
                product[k] += dz[k] * v[k];
            }
        });
    }
    float2* out = partials + ((i64)lane.n * tiles + lane.tile) * C + blockIdx.y * across * V;
    block_sums(lane, across, C, scratch, sum, product, [&](int j, float2 total) { out[j] = total; });
}

// What the sums of an image become beside dx: totals (N, C), sums of dz and dz * xhat over an image, times 1 + scale;
// dscale, dshift (N, C) or null.
#define TOTALS float2* totals, float* dscale, int add_scale, float* dshift, int add_shift

// means of gamma * dz and of gamma * dz * xhat over each group of image n, for every thread of the block; the totals where `first`.
// mean, rstd: those of the image.
__device__ __forceinline__ void image_sums(int n, const float2* partials, int tiles, bool first, TOTALS, AFFINE, int S, int C, float2* means) {
    int size = C / groups;
    for (int c = threadIdx.x; c < C; c += THREADS) {
        const float2* p = partials + (i64)n * tiles * C + c;
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll 8
        for (int t = 0; t < tiles; t++) {
            float2 term = p[(i64)t * C];
            total.x += term.x;
            total.y += term.y;
        }
        i64 i = (i64)n * C + c;
        total.y *= rstd[c / size];
        float factor = scale ? 1.0f + scale[i] : 1.0f;
        float2 modulated = make_float2(factor * total.x, factor * total.y);
        channels[c] = make_float2(weight[c] * modulated.x, weight[c] * modulated.y);
        if (!first) continue;
        totals[i] = modulated;
        if (dscale) dscale[i] = (add_scale ? dscale[i] : 0.0f) + weight[c] * total.y + bias[c] * total.x;
        if (dshift) dshift[i] = (add_shift ? dshift[i] : 0.0f) + total.x;
    }
    __syncthreads();
    for (int g = threadIdx.x; g < groups; g += THREADS) {
        float2 sum = make_float2(0.0f, 0.0f);
        for (int k = g * size; k < (g + 1) * size; k++) {
            sum.x += channels[k].x;
            sum.y += channels[k].y;
        }
        float count = (float)S * size;
        means[g] = make_float2(sum.x / count, sum.y / count);
    }
    __syncthreads();
}

// means (N, G), and the totals. Launch: N blocks.
extern "C" __global__ __launch_bounds__(THREADS, 2) void finish_sums(const float2* partials, float2* means, TOTALS, AFFINE, int S, int C,
                                                                     int tiles) {
    wait_for_previous();
    i64 first = (i64)blockIdx.x * groups;
    image_sums(blockIdx.x, partials, tiles, true, totals, dscale, add_scale, dshift, add_shift, weight, bias, scale, shift,
               mean + first, rstd + first, groups, S, C, means + first);
}

// dx, dx2 (either may be null) = gain * dz - rstd * (means.x + xhat * means.y). The means come as `means`, or as partials:
// then the totals are written too; neither: the statistics are constants. sums, sums2, float (N, tiles, C1 and C2), or
// null: dx and dx2, with what they had before, summed over each tile's pixels before rounding.
extern "C" __global__ __launch_bounds__(THREADS, 2) void input_gradients(
    T* dx, int add, T* dx2, int add2, float* sums, float* sums2, const float2* means, const float2* partials, TOTALS,
    const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu) {
    wait_for_previous();
    __shared__ float2 scratch[V * THREADS];
    int C = C1 + C2;
    Lane lane(S, C, tiles, across);
    i64 pitch;
    T* target = first_element(dx, dx2, lane, S, C1, C2, pitch);
    Rows<3, 1> rows;
    rows.start[0] = first_element(x, x2, lane, S, C1, C2, rows.pitch[0]);
    rows.start[1] = first_element(dy, dy, lane, S, C, 0, rows.pitch[1]);
    rows.start[2] = (lane.c < C1 ? add : add2) ? target : nullptr;
    rows.pitch[2] = pitch;
    rows.count = target ? lane.count : 0;
    rows.fetch(0);
    mean += (i64)lane.n * groups, rstd += (i64)lane.n * groups;
    if (partials) {
        float2* own = channels + C;
        image_sums(lane.n, partials, tiles, lane.tile == 0 && blockIdx.y == 0, totals, dscale, add_scale, dshift, add_shift, weight, bias,
                   scale, shift, mean, rstd, groups, S, C, own);
        means = own;
    } else if (means) {
        means += (i64)lane.n * groups;
    }
    float sum[V] = {};
    if (rows.count) {
        Affine affine(lane, C, weight, bias, scale, shift, mean, rstd, groups);
        float constant[V] = {}, slope[V] = {};
        if (means) {
#pragma unroll
            for (int k = 0; k < V; k++) {
                int g = (lane.c + k) / (C / groups);
                constant[k] = rstd[g] * means[g].x;
                slope[k] = rstd[g] * rstd[g] * means[g].y;
            }
        }
        rows.each([&](int i, const Raw (&raw)[3]) {
            float v[V], dz[V];
            to_floats(raw[0], v);
            to_floats(raw[1], dz);
            before_silu(affine, v, dz, silu);
#pragma unroll
            for (int k = 0; k < V; k++) {
                v[k] = affine.gain[k] * dz[k] - constant[k] - slope[k] * v[k];
                if (rows.start[2]) v[k] += to_float(raw[2].v[k]);
                sum[k] += v[k];
            }
            store<V>(target + i * pitch, v);
        });
    }
    if (!sums && !sums2) return;
    block_sums(lane, across, C, scratch, sum, sum, [&](int j, float2 total) {
        int c = blockIdx.y * across * V + j;
        float* out = c < C1 ? sums : sums2;
        if (out) out[blockIdx.x * (i64)(c < C1 ? C1 : C2) + c - (c < C1 ? 0 : C1)] = total.x;
    });
}
