// Group norm by clusters: what group_norm.cu does in two to four launches, in one. The layout, the dtypes and the meaning
// of the arguments are its; VEC=1 only.
//
// A cluster takes one image's pixels and a chunk of whole groups of its channels. Each block copies the first `kept` of
// its rows to shared memory while it sums what has arrived, the blocks add their sums up through the cluster's shared
// memory, and the second pass reads the kept rows from there: one pass over global memory, not two. Every sum has a
// fixed order. In `backward` the kept dz is rounded to T, dx's operand; the sums are of what was not rounded.
// Launch: THREADS threads, grid (N * CLUSTER, chunks), tiles = CLUSTER, chunks * across packs = C exactly; shared memory:
// kept rows of THREADS packs of 16 bytes, of each array read, 8 V THREADS, 16 bytes a channel of a chunk, 8 a group.
// architectures: sm_90a
// variants: T=float,bf16,half CLUSTER=1,2 VEC=1
#include "cluster.cuh"
#include "group_norm.cuh"
#include "mma.cuh"

constexpr int PARTS = 4;  // a block's copies arrive in so many parts

struct Shared {
    uint4* rows;             // this thread's packs lie THREADS apart
    float2* scratch;         // for block_sums
    float2 *own, *whole;     // sums over this block's rows and over the image, a chunk's channels
    float *first, *second;   // two numbers of each group
    __device__ __forceinline__ Shared(int packs, int width, int groups) {
        extern __shared__ uint4 memory[];
        rows = memory + threadIdx.x;
        scratch = reinterpret_cast<float2*>(memory + packs * THREADS);
        own = scratch + V * THREADS;
        whole = own + width;
        first = reinterpret_cast<float*>(whole + width);
        second = first + groups;
    }
    __device__ __forceinline__ T* pack(int i) const { return reinterpret_cast<T*>(rows + i * THREADS); }
};

// Wait for part 0, 1, ... PARTS - 1 of the copies.
__device__ __forceinline__ void wait_for(int part) {
    if (part == 0) cp_async_wait<3>();
    else if (part == 1) cp_async_wait<2>();
    else if (part == 2) cp_async_wait<1>();
    else cp_async_wait<0>();
}

// The sum over the blocks of the cluster.
__device__ __forceinline__ float2 cluster_sum(const float2* own) {
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int rank = 0; rank < CLUSTER; rank++) {
        float2 term = load_cluster(own, rank);
        total.x += term.x;
        total.y += term.y;
    }
    return total;
}

// y, mean and rstd.
extern "C" __global__ __launch_bounds__(THREADS, 2) __cluster_dims__(CLUSTER, 1, 1) void forward(
    T* __restrict__ y, float* mean, float* rstd, const T* __restrict__ x, const T* __restrict__ x2,
    const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ scale,
    const float* __restrict__ shift, int groups, EXTENT, int silu, int kept, float eps) {
    wait_for_previous();
    int C = C1 + C2, width = across * V, c0 = blockIdx.y * width, size = C / groups;
    Lane lane(S, C, tiles, across);
    Shared shared(kept, width, groups);
    i64 pitch, out_pitch;
    const T* source = first_element(x, x2, lane, S, C1, C2, pitch);
    T* target = first_element(y, y, lane, S, C, 0, out_pitch);
    int held = min(lane.count, kept), length = CEIL_DIV(held, PARTS);
    for (int part = 0; part < PARTS; part++) {
        for (int i = part * length; i < min(held, (part + 1) * length); i++)
            cp_async(shared_address(shared.pack(i)), source + i * pitch, true);
        cp_async_commit();
    }

    float centre[V] = {}, sum[V] = {}, square[V] = {};  // sums around the image's first pixel: group_norm.cu, statistics
    auto channel = [&](int c) { return (c < C1 ? x + (i64)lane.n * S * C1 : x2 + (i64)lane.n * S * C2 - C1) + c; };
    if (lane.count) load<V>(channel(lane.c), centre);
    auto add = [&](const float (&v)[V]) {
#pragma unroll
        for (int k = 0; k < V; k++) {
            float d = v[k] - centre[k];
            sum[k] += d;
            square[k] += d * d;
        }
    };
    float v[V];
    for (int part = 0; part < PARTS; part++) {
        wait_for(part);
#pragma unroll 2
        for (int i = part * length; i < min(held, (part + 1) * length); i++) load<V>(shared.pack(i), v), add(v);
    }
#pragma unroll 4
    for (int i = held; i < lane.count; i++) load<V>(source + i * pitch, v), add(v);
    auto keep = [&](int j, float2 total) { shared.own[j] = total; };
    block_sums(lane, across, C, shared.scratch, sum, square, keep);
    cluster_sync();
    for (int j = threadIdx.x; j < width; j += THREADS) {
        float2 total = cluster_sum(shared.own + j);
        float average = total.x / S;
        shared.whole[j] = make_float2(to_float(*channel(c0 + j)) + average, fmaxf(total.y - total.x * average, 0.0f));
    }
    cluster_arrive();
    __syncthreads();
    for (int g = threadIdx.x; g < width / size; g += THREADS) {
        int group = c0 / size + g;
        float2 found = group_statistics(shared.whole + g * size, size, S, eps);
        shared.first[group] = found.x;
        shared.second[group] = found.y;
        if (lane.tile == 0) {
            mean[(i64)lane.n * groups + group] = found.x;
            rstd[(i64)lane.n * groups + group] = found.y;
        }
    }
    __syncthreads();

    if (lane.count) {
        Affine affine(lane, C, weight, bias, scale, shift, shared.first, shared.second, groups);
        auto write = [&](int i) {
#pragma unroll
            for (int k = 0; k < V; k++) v[k] = affine.gain[k] * (v[k] - affine.mean[k]) + affine.offset[k];
            activate(v, silu);
            store<V>(target + i * out_pitch, v);
        };
#pragma unroll 2
        for (int i = 0; i < held; i++) load<V>(shared.pack(i), v), write(i);
#pragma unroll 2
        for (int i = held; i < lane.count; i++) load<V>(source + i * pitch, v), write(i);
    }
    cluster_wait();  // a block stays until the others have read its sums
}

// dx, dx2 (either may be null); sums, sums2, float (N, C1) and (N, C2), or null, as in input_gradients; totals, float2
// (N, C), and dscale, dshift as in finish_sums.
extern "C" __global__ __launch_bounds__(THREADS, 2) __cluster_dims__(CLUSTER, 1, 1) void backward(
    T* dx, int add, T* dx2, int add2, float* sums, float* sums2, float2* totals, float* dscale, int add_scale, float* dshift,
    int add_shift, const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu,
    int kept) {
    wait_for_previous();
    int C = C1 + C2, width = across * V, c0 = blockIdx.y * width, size = C / groups;
    Lane lane(S, C, tiles, across);
    Shared shared(2 * kept, width, groups);
    i64 pitch, out_pitch;
    const T* source = first_element(x, x2, lane, S, C1, C2, pitch);
    const T* dout = first_element(dy, dy, lane, S, C, 0, out_pitch);
    int held = min(lane.count, kept), length = CEIL_DIV(held, PARTS);
    for (int part = 0; part < PARTS; part++) {
        for (int i = part * length; i < min(held, (part + 1) * length); i++) {
            cp_async(shared_address(shared.pack(2 * i)), source + i * pitch, true);
            cp_async(shared_address(shared.pack(2 * i + 1)), dout + i * out_pitch, true);
        }
        cp_async_commit();
    }

    mean += (i64)lane.n * groups, rstd += (i64)lane.n * groups;
    float first[V] = {}, second[V] = {}, v[V], dz[V];
    Lane within = lane;
    if (!lane.active) within.c = 0;  // so that a thread without work reads nothing outside
    Affine affine(within, C, weight, bias, scale, shift, mean, rstd, groups);
    auto add_up = [&] {
#pragma unroll
        for (int k = 0; k < V; k++) {
            first[k] += dz[k];
            second[k] += dz[k] * v[k];
        }
    };
    for (int part = 0; part < PARTS; part++) {
        wait_for(part);
        for (int i = part * length; i < min(held, (part + 1) * length); i++) {
            load<V>(shared.pack(2 * i), v);
            load<V>(shared.pack(2 * i + 1), dz);
            before_silu(affine, v, dz, silu);
            store<V>(shared.pack(2 * i + 1), dz);
            add_up();
        }
    }
    auto read = [&](int i) {
        load<V>(source + i * pitch, v);
        load<V>(dout + i * out_pitch, dz);
        before_silu(affine, v, dz, silu);
    };
#pragma unroll 2
    for (int i = held; i < lane.count; i++) read(i), add_up();
    auto keep = [&](int j, float2 total) { shared.own[j] = total; };
    block_sums(lane, across, C, shared.scratch, first, second, keep);
    cluster_sync();
    for (int j = threadIdx.x; j < width; j += THREADS) {
        int c = c0 + j;
        i64 i = (i64)lane.n * C + c;
        float2 total = cluster_sum(shared.own + j);
        total.y *= rstd[c / size];
        float factor = scale ? 1.0f + scale[i] : 1.0f;
        float2 modulated = make_float2(factor * total.x, factor * total.y);
        shared.whole[j] = make_float2(weight[c] * modulated.x, weight[c] * modulated.y);
        if (lane.tile) continue;
        totals[i] = modulated;
        if (dscale) dscale[i] = (add_scale ? dscale[i] : 0.0f) + weight[c] * total.y + bias[c] * total.x;
        if (dshift) dshift[i] = (add_shift ? dshift[i] : 0.0f) + total.x;
    }
    cluster_arrive();
    __syncthreads();
    for (int g = threadIdx.x; g < width / size; g += THREADS) {
        float2 sum = make_float2(0.0f, 0.0f);
        for (int k = g * size; k < (g + 1) * size; k++) {
            sum.x += shared.whole[k].x;
            sum.y += shared.whole[k].y;
        }
        int group = c0 / size + g;
        float share = rstd[group] / ((float)S * size);
        shared.first[group] = sum.x * share;
        shared.second[group] = sum.y * share * rstd[group];
    }
    __syncthreads();

    T* target = first_element(dx, dx2, lane, S, C1, C2, pitch);
    float sum[V] = {};
    if (lane.count && target) {
        bool accumulate = lane.c < C1 ? add : add2;
        float constant[V], slope[V];
#pragma unroll
        for (int k = 0; k < V; k++) {
            int group = (lane.c + k) / size;
            constant[k] = shared.first[group];
            slope[k] = shared.second[group];
        }
        auto write = [&](int begin, int end, bool here) {  // two rows at once, for the sake of what they add to
            for (int i = begin; i < end; i += 2) {
                Pack<T> before[2];
#pragma unroll
                for (int u = 0; u < 2; u++)
                    if (accumulate && i + u < end) before[u] = load_pack(target + (i + u) * pitch);
#pragma unroll
                for (int u = 0; u < 2; u++) {
                    if (i + u >= end) break;
                    if (here) {
                        load<V>(shared.pack(2 * (i + u)), v);
                        load<V>(shared.pack(2 * (i + u) + 1), dz);
#pragma unroll
                        for (int k = 0; k < V; k++) v[k] -= affine.mean[k];
                    } else {
                        read(i + u);
                    }
#pragma unroll
                    for (int k = 0; k < V; k++) {
                        v[k] = affine.gain[k] * dz[k] - constant[k] - slope[k] * v[k];
                        if (accumulate) v[k] += to_float(before[u].v[k]);
                        sum[k] += v[k];
                    }
                    store<V>(target + (i + u) * pitch, v);
                }
            }
        };
        write(0, held, true);
        write(held, lane.count, false);
    }
    cluster_wait();  // all have read the sums of the first pass
    if (!sums && !sums2) return;
    block_sums(lane, across, C, shared.scratch, sum, sum, keep);
    cluster_sync();
    for (int j = lane.tile * THREADS + threadIdx.x; j < width; j += CLUSTER * THREADS) {
        int c = c0 + j;
        float* out = c < C1 ? sums : sums2;
        if (out) out[(i64)lane.n * (c < C1 ? C1 : C2) + c - (c < C1 ? 0 : C1)] = cluster_sum(shared.own + j).x;
    }
    cluster_sync();
}
