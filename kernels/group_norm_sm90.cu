// Group norm by clusters: what group_norm.cu does in two to four launches, in one. Layout, dtypes and arguments are as
// there; VEC=1 only.
//
// A cluster takes one image's pixels and a chunk of whole groups of its channels. Each block has its pixels copied to shared
// memory, box after box, and sums what has arrived while the rest is on its way; the blocks send each other their sums, and
// the second pass reads the pixels from there: one pass over global memory. TMA copies, as threads that copied would stand in
// line with their copies instead of summing. Every sum has a fixed order. In `backward` the kept dz is rounded to T, dx's
// operand; the sums are of what was not rounded.
// Launch: THREADS threads, grid (N, chunks, CLUSTER), chunks * ACROSS packs of V channels = C exactly, ACROSS <= 32, and C1 a
// multiple of a chunk. Maps: x {C1, S, N}, x2 {C2, S, N} (or x's), dy {C, S, N}, boxes {WIDTH, STEP, 1}, not swizzled. The blocks
// of a cluster take an image's boxes in turn, each `boxes` of them, at most BOXES.
// Dynamic shared memory: boxes, of each array; 4 WIDTH (2 WARPS + 3 CLUSTER + 5) bytes; 4 SHARE CLUSTER bytes.
// architectures: sm_90a
// variants: T=float,bf16,half ACROSS=8 CLUSTER=1,2,4,8 VEC=1
// variants: T=bf16 ACROSS=1,4,5,6,16,32 CLUSTER=2,8 VEC=1
// variants: T=float ACROSS=1,32 CLUSTER=1 VEC=1
constexpr int THREADS = 512;
#include "cluster.cuh"
#include "group_norm.cuh"

constexpr int WIDTH = ACROSS * V;                // channels of a chunk
constexpr int SHARE = CEIL_DIV(WIDTH, CLUSTER);  // of them, whose last sum one block makes
constexpr int ROOM = 32 / ACROSS < 2 * V ? 32 / ACROSS : 2 * V;
constexpr int LINES = ROOM >= 16 ? 16 : ROOM >= 8 ? 8 : ROOM >= 4 ? 4 : ROOM >= 2 ? 2 : 1;  // pixels that a warp has at once
constexpr int WARPS = THREADS / 32, STEP = WARPS * LINES;
constexpr int BOXES = 64;

// A thread's channels, and its pixel of every box.
struct Place {
    int n, tile, c0, offset;  // image, block of the cluster, first channel of the chunk; this thread's first within the chunk
    int pixel, row, count;    // of the first box: within the image, within the box; of how many of the block's boxes it has one
    __device__ __forceinline__ Place(int S) {
        int lane = threadIdx.x % 32;
        n = blockIdx.x, tile = blockIdx.z, c0 = blockIdx.y * WIDTH;
        offset = lane % ACROSS * V;
        row = threadIdx.x / 32 * LINES + lane / ACROSS;
        pixel = tile * STEP + row;
        count = lane < LINES * ACROSS && pixel < S ? CEIL_DIV(S - pixel, CLUSTER * STEP) : 0;
    }
    // Where they lie in x, or in x2 (null where that is), of so many channels each; `pitch` becomes the elements to the next one.
    template <typename P> __device__ __forceinline__ P* element(P* x, P* x2, int S, int C1, int C2, int& pitch) const {
        bool second = c0 >= C1;
        P* source = second ? x2 : x;
        int width = second ? C2 : C1;
        pitch = CLUSTER * STEP * width;
        return source ? source + ((i64)n * S + pixel) * width + c0 - (second ? C1 : 0) + offset : nullptr;
    }
};

struct Shared {
    T* boxes;                 // of the arrays, one behind the other
    int at;                   // where in a box this thread's channels of its pixel lie
    float* sums;              // two of each warp and channel
    float *received, *last;   // what the blocks of the cluster have sent: up to three numbers a channel each, and later one
    float2* channels;         // two numbers of each channel of the chunk
    float* table;             // three more
    int each;                 // boxes of an array
    u32 full, last_full;      // barriers of `received` and `last`; behind them those of the boxes
    __device__ __forceinline__ Shared(const Place& place, int arrays, int each) : each(each) {
        extern __shared__ __align__(128) T memory[];
        boxes = memory, at = place.row * WIDTH + place.offset;
        sums = reinterpret_cast<float*>(boxes + arrays * each * STEP * WIDTH);
        received = sums + 2 * WARPS * WIDTH;
        channels = reinterpret_cast<float2*>(received + 3 * CLUSTER * WIDTH);
        table = reinterpret_cast<float*>(channels + WIDTH);
        last = table + 3 * WIDTH;
        __shared__ u64 barriers[2 + BOXES];
        full = shared_address(barriers), last_full = full + 8;
    }
    __device__ __forceinline__ u32 arrived(int box) const { return full + 16 + 8 * box; }
    __device__ __forceinline__ T* box(int a, int i) const { return boxes + (a * each + i) * (STEP * WIDTH); }
    __device__ __forceinline__ T* pack(int a, int i) const { return box(a, i) + at; }

    // The barriers, of which `full` counts so many numbers of each block and channel. Then all may fetch().
    __device__ __forceinline__ void begin(int numbers) const {
        if (threadIdx.x == 0) {
            for (int i = 0; i < each; i++) barrier_init(arrived(i), 1);
            open_mailbox(full, numbers * 4 * CLUSTER * WIDTH);
            fence_barriers();
        }
        cluster_arrive_relaxed();
        __syncthreads();
    }
    // The boxes of all arrays are on their way, from channels c on. One thread sends for them, one after the other: where many
    // did, all boxes came late.
    template <int ARRAYS>
    __device__ __forceinline__ void fetch(const TensorMap* const (&maps)[ARRAYS], const int (&c)[ARRAYS], const Place& place) const {
        if (threadIdx.x) return;
#pragma unroll 1
        for (int i = 0; i < each; i++) {
            barrier_expect(arrived(i), ARRAYS * STEP * WIDTH * sizeof(T));
#pragma unroll
            for (int a = 0; a < ARRAYS; a++)
                tma_load(shared_address(box(a, i)), *maps[a], arrived(i), c[a], (i * CLUSTER + place.tile) * STEP, place.n);
        }
    }

    // sums[warp][c] and sums[warp][WIDTH + c] = the warp's sums of a and b, of channel c. Lines that meet share what is to be
    // added, so that the next two share half of it.
    __device__ __forceinline__ void add_warp(const Place& place, const float (&a)[V], const float (&b)[V]) const {
        float mine[2 * V];
#pragma unroll
        for (int k = 0; k < V; k++) mine[k] = a[k], mine[V + k] = b[k];
        int lane = threadIdx.x % 32, line = lane / ACROSS;
#pragma unroll
        for (int half = LINES / 2, left = V; half; half /= 2, left /= 2) {
            bool upper = line & half;
            int other = upper ? lane - half * ACROSS : lane + half * ACROSS;
#pragma unroll
            for (int k = 0; k < V; k++) {
                if (k >= left) break;
                float given = __shfl_sync(~0u, upper ? mine[k] : mine[k + left], other);
                mine[k] = (upper ? mine[k + left] : mine[k]) + given;
            }
        }
        if (line >= LINES) return;
        constexpr int OWN = 2 * V / LINES;
        int first = line * OWN;
        float* target = sums + threadIdx.x / 32 * 2 * WIDTH + place.offset + (first < V ? first : WIDTH + first - V);
#pragma unroll
        for (int k = 0; k < OWN; k++) target[k + (k >= V ? WIDTH - V : 0)] = mine[k];
    }
    __device__ __forceinline__ float sum_of_warps(int j) const {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) sum += sums[warp * 2 * WIDTH + j];
        return sum;
    }
    // Number j of block `rank`.
    __device__ __forceinline__ float* number(int rank, int j) const { return received + 3 * rank * WIDTH + j; }
    __device__ __forceinline__ void give_all(const Place& place, int j, float v) const {
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) send(number(place.tile, j), rank, v, full);
    }
    // Give all blocks of the cluster this one's sums of a and b over its pixels: numbers c and WIDTH + c.
    __device__ __forceinline__ void give(const Place& place, float (&a)[V], float (&b)[V]) const {
        add_warp(place, a, b);
        __syncthreads();
        if (threadIdx.x < 2 * WIDTH) give_all(place, threadIdx.x, sum_of_warps(threadIdx.x));
    }
};

// Pixels of S that block `rank` of a cluster has.
__device__ __forceinline__ int pixels_of(int rank, int S) {
    int boxes = CEIL_DIV((u32)S, STEP), own = (u32)(boxes - rank + CLUSTER - 1) / CLUSTER;
    return own * STEP - ((boxes - 1) % CLUSTER == rank ? boxes * STEP - S : 0);
}

// y, mean and rstd; `share` is 1 / elements of a group.
extern "C" __global__ __launch_bounds__(THREADS, 2) CLUSTER_DIMS void forward(
    const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap map2, T* __restrict__ y, float* mean, float* rstd,
    const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ scale, const float* __restrict__ shift,
    int groups, int S, int C1, int C2, int silu, int boxes, double share, float eps) {
    int C = C1 + C2, size = C / (u32)groups, pitch;
    Place place(S);
    Shared shared(place, 1, boxes);
    bool second = place.c0 >= C1;
    const TensorMap* source = second ? &map2 : &map;
    if (threadIdx.x == 0) prefetch(*source);
    shared.begin(3);
    wait_for_previous();
    shared.fetch<1>({source}, {place.c0 - (second ? C1 : 0)}, place);
    Channel channel(place.n, place.c0, WIDTH, C, size, weight, bias, scale, shift);
    T* target = place.element(y, y, S, C, 0, pitch);
    cluster_wait();

    float centre[V], sum[V] = {}, square[V] = {}, v[V];  // sums around the block's first pixel: see group_norm.cu, statistics
    barrier_wait(shared.arrived(0), 0);
    to_floats(load_raw(shared.boxes + place.offset), centre);
    if (channel.here) shared.give_all(place, 2 * WIDTH + channel.j, to_float(shared.boxes[channel.j]));
#pragma unroll 1
    for (int i = 0; i < boxes; i++) {
        barrier_wait(shared.arrived(i), 0);
        if (i >= place.count) continue;
        to_floats(load_raw(shared.pack(0, i)), v);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float d = v[k] - centre[k];
            sum[k] += d;
            square[k] += d * d;
        }
    }
    shared.give(place, sum, square);
    receive(shared.full);
    if (channel.here) {
        int leader = channel.j / (u32)size * size;
        double sum = 0.0, square = 0.0;  // around 0: double, as what is left of them cancels
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            double pixels = pixels_of(rank, S);
#pragma unroll 2
            for (int j = leader; j < leader + size; j++) {
                const float* number = shared.number(rank, j);
                double around = number[2 * WIDTH], shift = pixels * around;
                square += number[WIDTH] + around * (2.0 * number[0] + shift);
                sum += number[0] + shift;
            }
        }
        double average = sum * share;
        float r = rsqrtf((float)fmax(fma(-average, average, square * share), 0.0) + eps);
        Affine::fill(shared.table, WIDTH, channel, (float)average, r);
        i64 group = (i64)place.n * groups + channel.group;
        if (place.tile == 0 && channel.j == leader) mean[group] = average, rstd[group] = r;
    }
    __syncthreads();

    Affine affine(shared.table, WIDTH, place.offset);
#pragma unroll 2
    for (int i = 0; i < place.count; i++, target += pitch) {
        to_floats(load_raw(shared.pack(0, i)), v);
        apply(affine, v, silu);
        store<V>(target, v);
    }
}

// dx, dx2 (either may be null); y, the forward's output once more, or null; sums, sums2, float (N, C1) and (N, C2), or
// null, as in input_gradients; totals, float2 (N, C), and dscale, dshift as in finish_sums.
extern "C" __global__ __launch_bounds__(THREADS, 1) CLUSTER_DIMS void backward(
    const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap map2, const __grid_constant__ TensorMap dy_map, T* dx,
    const T* addend, T* dx2, const T* addend2, T* y, float* sums, float* sums2, float2* totals, float* dscale, int add_scale,
    float* dshift, int add_shift, AFFINE, int S, int C1, int C2, int silu, int boxes) {
    int C = C1 + C2, size = C / groups, pitch;
    Place place(S);
    Shared shared(place, 2, boxes);
    bool second = place.c0 >= C1;
    const TensorMap* source = second ? &map2 : &map;
    if (threadIdx.x == 0) {
        prefetch(*source), prefetch(dy_map);
        open_mailbox(shared.last_full, 4 * CLUSTER * max(0, min(SHARE, WIDTH - place.tile * SHARE)));
    }
    shared.begin(2);
    wait_for_previous();
    // What is asked for behind the boxes would come behind them.
    Channel channel(place.n, place.c0, WIDTH, C, size, weight, bias, scale, shift);
    float average = 0.0f, r = 0.0f;
    if (channel.here) average = mean[(i64)place.n * groups + channel.group], r = rstd[(i64)place.n * groups + channel.group];
    shared.fetch<2>({source, &dy_map}, {place.c0 - (second ? C1 : 0), place.c0}, place);
    if (channel.here) Affine::fill(shared.table, WIDTH, channel, average, r);
    cluster_wait();
    __syncthreads();

    float v[V], dz[V], centre[V];
    {
        T* again = place.element(y, y, S, C, 0, pitch);
        float sum[V] = {}, product[V] = {}, output[V], slope[V];
        Affine affine(shared.table, WIDTH, place.offset);
#pragma unroll
        for (int k = 0; k < V; k++) centre[k] = affine.centre[k];
#pragma unroll 1
        for (int i = 0; i < boxes; i++) {
            barrier_wait(shared.arrived(i), 0);
            if (i >= place.count) continue;
            to_floats(load_raw(shared.pack(0, i)), v);
            linearize(affine, v, output, slope, silu);
            if (again) store<V>(again, output), again += pitch;
            to_floats(load_raw(shared.pack(1, i)), dz);
#pragma unroll
            for (int k = 0; k < V; k++) {
                dz[k] *= slope[k];
                sum[k] += dz[k];
                product[k] += dz[k] * v[k];
            }
            store<V>(shared.pack(1, i), dz);
        }
        shared.give(place, sum, product);
    }

    receive(shared.full);
    if (channel.here) {
        i64 i = (i64)place.n * C + channel.c;
        float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            total.x += *shared.number(rank, channel.j);
            total.y += *shared.number(rank, WIDTH + channel.j);
        }
        total.y = (total.y - (average - centre_of(average)) * total.x) * r;
        shared.channels[channel.j] = make_float2(channel.own.gamma() * total.x, channel.own.gamma() * total.y);
        if (place.tile == 0) {
            totals[i] = make_float2(channel.own.factor() * total.x, channel.own.factor() * total.y);
            if (dscale) dscale[i] = (add_scale ? dscale[i] : 0.0f) + channel.own.weight * total.y + channel.own.bias * total.x;
            if (dshift) dshift[i] = (add_shift ? dshift[i] : 0.0f) + total.x;
        }
    }
    __syncthreads();
    if (channel.here) {  // dx = gain * dz - (constant + slope * (x - centre))
        float2 sum = make_float2(0.0f, 0.0f);
        const float2* group = shared.channels + channel.j / size * size;
        for (int k = 0; k < size; k++) {
            sum.x += group[k].x;
            sum.y += group[k].y;
        }
        float share = r / ((float)S * size), slope = sum.y * share * r;
        shared.table[channel.j] = sum.x * share - slope * (average - centre_of(average));
        shared.table[WIDTH + channel.j] = channel.own.gamma() * r;
        shared.table[2 * WIDTH + channel.j] = slope;
    }
    __syncthreads();
    T* target = place.element(dx, dx2, S, C1, C2, pitch);
    if (!target && !sums && !sums2) return;
    const T* before = place.element(addend, addend2, S, C1, C2, pitch);
    float constant[V], gain[V], slope[V], sum[V] = {};
    load<V>(shared.table + place.offset, constant);
    load<V>(shared.table + WIDTH + place.offset, gain);
    load<V>(shared.table + 2 * WIDTH + place.offset, slope);
#pragma unroll 2
    for (int i = 0; i < (target ? place.count : 0); i++) {
        to_floats(load_raw(shared.pack(0, i)), v);
        to_floats(load_raw(shared.pack(1, i)), dz);
        float term[V] = {};
        if (before) load<V>(before, term), before += pitch;
#pragma unroll
        for (int k = 0; k < V; k++) {
            v[k] = gain[k] * dz[k] - (constant[k] + slope[k] * (v[k] - centre[k])) + term[k];
            sum[k] += v[k];
        }
        store<V>(target, v), target += pitch;
    }
    if (!sums && !sums2) return;
    shared.add_warp(place, sum, sum);  // it adds two; one is wanted
    __syncthreads();
    int j = threadIdx.x;
    if (j < WIDTH) send(shared.last + place.tile * SHARE + j % SHARE, j / SHARE, shared.sum_of_warps(j), shared.last_full);
    receive(shared.last_full);
    if (j < min(SHARE, WIDTH - place.tile * SHARE)) {
        int c = place.c0 + place.tile * SHARE + j;
        float* out = c < C1 ? sums : sums2;
        float total = 0.0f;
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) total += shared.last[rank * SHARE + j];
        if (out) out[(i64)place.n * (c < C1 ? C1 : C2) + c - (c < C1 ? 0 : C1)] = total;
    }
}
