// Group norm by clusters: what group_norm.cu does in two to four launches, in one. Layout, dtypes and arguments are as
// there; VEC=1 only.
//
// A cluster takes one image's pixels and a chunk of whole groups of its channels. Each block copies its rows to shared
// memory while it sums what has arrived, the blocks send each other their sums, and the second pass reads the rows from
// there: one pass over global memory. Every sum has a fixed order. In `backward` the kept dz is rounded to T, dx's
// operand; the sums are of what was not rounded.
// Launch: THREADS threads, grid (N * CLUSTER, chunks), chunks * ACROSS packs of V channels = C exactly, ACROSS <= 32;
// shared memory: `rows` packs of 16 bytes for each thread and each array read, where `rows` packs for each thread of the
// cluster cover an image's chunk; 4 V THREADS bytes; 8 CLUSTER + 20 bytes for each channel of a chunk; 4 SHARE CLUSTER bytes.
// architectures: sm_90a
// variants: T=float,bf16,half ACROSS=8 CLUSTER=1,2,4,8 VEC=1
// variants: T=bf16 ACROSS=4,6,10 CLUSTER=2,8 VEC=1
// variants: T=float ACROSS=32 CLUSTER=1 VEC=1
#include "cluster.cuh"
#include "group_norm.cuh"

constexpr int WIDTH = ACROSS * V;  // channels of a chunk
constexpr int SHARE = CEIL_DIV(WIDTH, CLUSTER);  // of them, whose last sum one block makes
constexpr int RESIDENT = CLUSTER == 1 ? 2 : 3;  // blocks a multiprocessor
constexpr int PARTS = 4;  // a block's copies arrive in so many parts

struct Shared {
    uint4* rows;              // this thread's packs lie THREADS apart
    float* scratch;           // for block_sums
    float *received, *last;   // what the blocks of the cluster have sent: two sums a channel each, and later one
    float2* channels;         // two numbers of each channel of the chunk
    float* table;             // three more
    u32 full, last_full;      // barriers of `received` and `last`
    __device__ __forceinline__ Shared(int packs) {
        extern __shared__ uint4 memory[];
        rows = memory + threadIdx.x;
        scratch = reinterpret_cast<float*>(memory + packs * THREADS);
        received = scratch + V * THREADS;
        channels = reinterpret_cast<float2*>(received + 2 * CLUSTER * WIDTH);
        last = reinterpret_cast<float*>(channels + WIDTH);
        table = last + SHARE * CLUSTER;
        __shared__ u64 barriers[2];
        full = shared_address(barriers), last_full = full + 8;
    }
    __device__ __forceinline__ T* pack(int i) const { return reinterpret_cast<T*>(rows + i * THREADS); }

    // Give all blocks of the cluster this one's sums of a and b over its pixels.
    __device__ __forceinline__ void give(int tile, const float (&a)[V], const float (&b)[V]) const {
        float* own = received + 2 * tile * WIDTH;
        block_sums(ACROSS, scratch, a, [&](int j, float sum) {
#pragma unroll
            for (int rank = 0; rank < CLUSTER; rank++) send(own + j, rank, sum, full);
        });
        block_sums(ACROSS, scratch, b, [&](int j, float sum) {
#pragma unroll
            for (int rank = 0; rank < CLUSTER; rank++) send(own + WIDTH + j, rank, sum, full);
        });
    }
    // Both sums of channel j over the image.
    __device__ __forceinline__ float2 total(int j) const {
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            sum.x += received[2 * rank * WIDTH + j];
            sum.y += received[(2 * rank + 1) * WIDTH + j];
        }
        return sum;
    }
};

// Rows [begin, end) of part 0, 1, ... PARTS - 1 of a thread's copies.
struct Part {
    int begin, end;
    __device__ __forceinline__ Part(int part, int rows, int count) {
        int length = CEIL_DIV(rows, PARTS);
        begin = part * length;
        end = min(count, begin + length);
    }
    __device__ __forceinline__ static void wait_for(int part) {
        if (part == 0) cp_async_wait<3>();
        else if (part == 1) cp_async_wait<2>();
        else if (part == 2) cp_async_wait<1>();
        else cp_async_wait<0>();
    }
};

// y, mean and rstd.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) __cluster_dims__(CLUSTER, 1, 1) void forward(
    T* __restrict__ y, float* mean, float* rstd, const T* __restrict__ x, const T* __restrict__ x2,
    const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ scale,
    const float* __restrict__ shift, int groups, int S, int C1, int C2, int silu, int rows, float eps) {
    int C = C1 + C2, size = C / groups;
    Lane lane(S, C, CLUSTER, ACROSS);
    Shared shared(rows);
    if (threadIdx.x == 0) open_mailbox(shared.full, 8 * CLUSTER * WIDTH);
    cluster_arrive_relaxed();
    wait_for_previous();
    int pitch, out_pitch;
    const T* source = first_element(x, x2, lane, C1, C2, pitch);
    T* target = first_element(y, y, lane, C, 0, out_pitch);
#pragma unroll 1
    for (int p = 0; p < PARTS; p++) {
        Part part(p, rows, lane.count);
#pragma unroll 1
        for (int i = part.begin; i < part.end; i++, source += pitch) cp_async(shared_address(shared.pack(i)), source, true);
        cp_async_commit();
    }

    float centre[V] = {}, sum[V] = {}, square[V] = {}, v[V];  // sums around the image's first pixel: group_norm.cu, statistics
    auto first_pixel = [&](int c) { return (c < C1 ? x + (i64)lane.n * S * C1 : x2 + (i64)lane.n * S * C2 - C1) + c; };
    if (lane.count) load<V>(first_pixel(lane.c), centre);
    for (int p = 0; p < PARTS; p++) {
        Part part(p, rows, lane.count);
        Part::wait_for(p);
#pragma unroll 2
        for (int i = part.begin; i < part.end; i++) {
            to_floats(load_raw(shared.pack(i)), v);
#pragma unroll
            for (int k = 0; k < V; k++) {
                float d = v[k] - centre[k];
                sum[k] += d;
                square[k] += d * d;
            }
        }
    }
    cluster_wait();
    shared.give(lane.tile, sum, square);
    Channel channel(lane, WIDTH, C, size, weight, bias, scale, shift);
    float first = channel.here ? to_float(*first_pixel(channel.c)) : 0.0f;
    receive(shared.full);
    if (channel.here) {
        float2 total = shared.total(channel.j);
        float average = total.x / S;
        shared.channels[channel.j] = make_float2(first + average, fmaxf(total.y - total.x * average, 0.0f));
    }
    __syncthreads();
    if (channel.here) {
        float2 found = group_statistics(shared.channels + channel.group * size - lane.c0, size, S, eps);
        Affine::fill(shared.table, WIDTH, channel, found.x, found.y);
        i64 group = (i64)lane.n * groups + channel.group;
        if (lane.tile == 0 && channel.c % size == 0) mean[group] = found.x, rstd[group] = found.y;
    }
    __syncthreads();

    Affine affine(shared.table, WIDTH, lane);
#pragma unroll 2
    for (int i = 0; i < lane.count; i++) {
        to_floats(load_raw(shared.pack(i)), v);
        apply(affine, v, silu);
        store<V>(target, v);
        target += out_pitch;
    }
}

// dx, dx2 (either may be null); y, the forward's output once more, or null; sums, sums2, float (N, C1) and (N, C2), or
// null, as in input_gradients; totals, float2 (N, C), and dscale, dshift as in finish_sums.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) __cluster_dims__(CLUSTER, 1, 1) void backward(
    T* dx, const T* addend, T* dx2, const T* addend2, T* y, float* sums, float* sums2, float2* totals, float* dscale, int add_scale, float* dshift,
    int add_shift, const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, int S, int C1, int C2, int silu,
    int rows) {
    int C = C1 + C2, size = C / groups;
    Lane lane(S, C, CLUSTER, ACROSS);
    Shared shared(2 * rows);
    if (threadIdx.x == 0) {
        open_mailbox(shared.full, 8 * CLUSTER * WIDTH);
        open_mailbox(shared.last_full, 4 * CLUSTER * max(0, min(SHARE, WIDTH - lane.tile * SHARE)));
    }
    cluster_arrive_relaxed();
    wait_for_previous();
    int pitch, out_pitch;
    const T* source = first_element(x, x2, lane, C1, C2, pitch);
    const T* dout = first_element(dy, dy, lane, C, 0, out_pitch);
#pragma unroll 1
    for (int p = 0; p < PARTS; p++) {
        Part part(p, rows, lane.count);
#pragma unroll 1
        for (int i = part.begin; i < part.end; i++, source += pitch, dout += out_pitch) {
            cp_async(shared_address(shared.pack(2 * i)), source, true);
            cp_async(shared_address(shared.pack(2 * i + 1)), dout, true);
        }
        cp_async_commit();
    }

    mean += (i64)lane.n * groups, rstd += (i64)lane.n * groups;
    {
        Channel channel(lane, WIDTH, C, size, weight, bias, scale, shift);
        if (channel.here) Affine::fill(shared.table, WIDTH, channel, mean[channel.group], rstd[channel.group]);
    }
    __syncthreads();
    T* again = y ? first_element(y, y, lane, C, 0, out_pitch) : nullptr;
    float v[V], dz[V];
    {
        float sum[V] = {}, product[V] = {}, output[V], slope[V];
        Affine affine(shared.table, WIDTH, lane);
#pragma unroll 1
        for (int p = 0; p < PARTS; p++) {
            Part part(p, rows, lane.count);
            Part::wait_for(p);
#pragma unroll 1
            for (int i = part.begin; i < part.end; i++) {
                to_floats(load_raw(shared.pack(2 * i)), v);
                linearize(affine, v, output, slope, silu);
                if (again) store<V>(again, output), again += out_pitch;
                to_floats(load_raw(shared.pack(2 * i + 1)), dz);
#pragma unroll
                for (int k = 0; k < V; k++) {
                    dz[k] *= slope[k];
                    sum[k] += dz[k];
                    product[k] += dz[k] * v[k];
                }
                store<V>(shared.pack(2 * i + 1), dz);
            }
        }
        cluster_wait();
        shared.give(lane.tile, sum, product);
    }
    T* target = first_element(dx, dx2, lane, C1, C2, pitch);
    Rows<1, 2> before;
    before.start[0] = first_element(addend, addend2, lane, C1, C2, before.pitch[0]);
    before.count = target ? lane.count : 0;
    before.fetch(0);

    Channel channel(lane, WIDTH, C, size, weight, bias, scale, shift);
    receive(shared.full);
    if (channel.here) {
        int c = channel.c;
        i64 i = (i64)lane.n * C + c;
        float2 total = shared.total(channel.j);
        float average = mean[channel.group];
        total.y = (total.y - (average - centre_of(average)) * total.x) * rstd[channel.group];
        shared.channels[channel.j] = make_float2(channel.own.gamma() * total.x, channel.own.gamma() * total.y);
        if (lane.tile == 0) {
            totals[i] = make_float2(channel.own.factor() * total.x, channel.own.factor() * total.y);
            if (dscale) dscale[i] = (add_scale ? dscale[i] : 0.0f) + weight[c] * total.y + bias[c] * total.x;
            if (dshift) dshift[i] = (add_shift ? dshift[i] : 0.0f) + total.x;
        }
    }
    __syncthreads();
    if (channel.here) {  // dx = gain * dz - (constant + slope * x)
        float2 sum = make_float2(0.0f, 0.0f);
        const float2* group = shared.channels + channel.group * size - lane.c0;
        for (int k = 0; k < size; k++) {
            sum.x += group[k].x;
            sum.y += group[k].y;
        }
        float r = rstd[channel.group], share = r / ((float)S * size), slope = sum.y * share * r;
        shared.table[channel.j] = sum.x * share - slope * mean[channel.group];
        shared.table[WIDTH + channel.j] = channel.own.gamma() * r;
        shared.table[2 * WIDTH + channel.j] = slope;
    }
    __syncthreads();

    float constant[V], gain[V], slope[V], sum[V] = {};
    load<V>(shared.table + lane.c - lane.c0, constant);
    load<V>(shared.table + WIDTH + lane.c - lane.c0, gain);
    load<V>(shared.table + 2 * WIDTH + lane.c - lane.c0, slope);
    before.each([&](int i, const Raw (&raw)[1]) {
        float term[V];
        to_floats(load_raw(shared.pack(2 * i)), v);
        to_floats(load_raw(shared.pack(2 * i + 1)), dz);
        to_floats(raw[0], term);
#pragma unroll
        for (int k = 0; k < V; k++) {
            v[k] = gain[k] * dz[k] - (constant[k] + slope[k] * v[k]);
            if (before.start[0]) v[k] += term[k];
            sum[k] += v[k];
        }
        store<V>(target, v);
        target += pitch;
    });
    if (!sums && !sums2) return;
    block_sums(ACROSS, shared.scratch, sum, [&](int j, float total) {
        send(shared.last + lane.tile * SHARE + j % SHARE, j / SHARE, total, shared.last_full);
    });
    receive(shared.last_full);
    int j = threadIdx.x;
    if (j < min(SHARE, WIDTH - lane.tile * SHARE)) {
        int c = lane.c0 + lane.tile * SHARE + j;
        float* out = c < C1 ? sums : sums2;
        float total = 0.0f;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) total += shared.last[rank * SHARE + j];
        if (out) out[(i64)lane.n * (c < C1 ? C1 : C2) + c - (c < C1 ? 0 : C1)] = total;
    }
}
