// Group norm's forward on Hopper by clusters, in one launch: group_norm.cu takes two or three.
//
// Layout, dtypes and arguments are as in group_norm.cu; VEC=1 only. Global memory is read once. Every sum has a fixed order.
//
// How it works
//   Clusters   A cluster takes the pixels of one image, and a chunk of its channels that is whole groups. Box i of an image
//              goes to block i % CLUSTER.
//   Sums       TMA copies a block's pixels to shared memory, box after box. The block sums those that have arrived while the
//              others are on their way. Then the blocks send each other their sums.
//   Results    Each block normalizes its pixels from shared memory.
//
// Launch
//   Grid       (N, chunks, CLUSTER) blocks of THREADS threads. chunks * ACROSS packs of V channels = C exactly, ACROSS <= 32,
//              and C1 is a multiple of a chunk's channels.
//   Maps       x {C1, S, N}, x2 {C2, S, N} (or x's), box {WIDTH, STEP, 1}, not swizzled.
//   Shared     `boxes` boxes, as many as a block has at most, and no more than BOXES; 4 WIDTH (2 WARPS + 3 CLUSTER + 3) bytes.
constexpr int THREADS = 512;
#include "cluster.cuh"
#include "group_norm_boxes.cuh"
#include "channel_statistics.cuh"
#include "dropout.cuh"

// How many of an image's S pixels block `rank` of a cluster has.
__device__ __forceinline__ int pixels_of(int rank, int S) {
    int boxes = CEIL_DIV((u32)S, STEP), own = (u32)(boxes - rank + CLUSTER - 1) / CLUSTER;
    return own * STEP - ((boxes - 1) % CLUSTER == rank ? boxes * STEP - S : 0);
}

// Writes y, mean and rstd. `share` is 1 / (elements of a group). mask: as in `normalize`.
extern "C" __global__ __launch_bounds__(THREADS, 2) CLUSTER_DIMS void forward(
    const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap map2, T* __restrict__ y, float* mean, float* rstd,
    const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ scale, const float* __restrict__ shift,
    int groups, int S, int C1, int C2, int silu, int boxes, double share, float eps,
    u8* mask, float kept_scale, DRAWS) {
    extern __shared__ __align__(128) T memory[];
    __shared__ u64 barriers[1 + BOXES];  // the exchange's, then one for each box
    int C = C1 + C2, size = C / (u32)groups, pitch;
    Place place(blockIdx.x, blockIdx.z, CLUSTER, blockIdx.y, S);
    u32 full = shared_address(barriers);
    Boxes<1> kept = {memory, boxes, full + 8};
    float* warp_sums = reinterpret_cast<float*>(kept.end());
    float* received = warp_sums + 2 * WARPS * WIDTH;  // [block][3][WIDTH]: sums, squares, centres
    float* table = received + 3 * CLUSTER * WIDTH;    // [3][WIDTH], Affine's
    bool second = place.c0 >= C1;
    if (threadIdx.x == 0) prefetch(second ? map2 : map), open_exchange(full, 3 * 4 * CLUSTER * WIDTH);
    if (threadIdx.x < 32) kept.init();
    cluster_arrive_relaxed();
    __syncthreads();
    wait_for_previous();
    if (threadIdx.x == 0)
        for (int i = 0; i < boxes; i++) kept.send({second ? &map2 : &map}, {place.c0 - (second ? C1 : 0)}, place, i);
    Channel channel(place.n, place.c0, WIDTH, C, size, weight, bias, scale, shift);
    T* target = place.element(y, y, S, C, 0, pitch);
    cluster_wait();
    auto publish = [&](int j, float v) {  // send to all blocks of the cluster, as this block's number j
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) send(received + 3 * place.part * WIDTH + j, rank, v, full);
    };

    int at = place.row * WIDTH + place.offset;
    float centre[V], sum[V] = {}, square[V] = {}, v[V];  // sums around the block's first pixel: see channel_statistics.cuh
    kept.wait(0);
    to_floats(load_raw(memory + place.offset), centre);
    if (channel.here) publish(2 * WIDTH + channel.j, to_float(memory[channel.j]));
#pragma unroll 1
    for (int i = 0; i < boxes; i++) {
        kept.wait(i);
        if (i >= place.count) continue;
        to_floats(load_raw(kept.box(0, i) + at), v);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float d = v[k] - centre[k];
            sum[k] += d;
            square[k] += d * d;
        }
    }
    add_warp(warp_sums, place, sum, square);
    __syncthreads();
    if (threadIdx.x < 2 * WIDTH) publish(threadIdx.x, sum_of_warps(warp_sums, threadIdx.x));
    receive(full);
    if (channel.here) {
        int leader = channel.j / (u32)size * size;
        double sum = 0.0, square = 0.0;  // around 0, in double: their difference cancels
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++) {
            float pixels = pixels_of(rank, S);
#pragma unroll 2
            for (int j = leader; j < leader + size; j++) {
                const float* number = received + 3 * rank * WIDTH + j;
                double2 raw = CentredStatistics{pixels, number[2 * WIDTH], number[0], number[WIDTH]}.raw();
                sum += raw.x, square += raw.y;
            }
        }
        double average = sum * share;
        float r = rsqrtf((float)fmax(fma(-average, average, square * share), 0.0) + eps);
        Affine::fill(table, WIDTH, channel, (float)average, r);
        i64 group = (i64)place.n * groups + channel.group;
        if (place.part == 0 && channel.j == leader) mean[group] = average, rstd[group] = r;
    }
    __syncthreads();

    Affine affine(table, WIDTH, place.offset);
    u32 now = DROPS ? *step : 0;
    u8* own_mask = row_of(mask, place.n, (i64)S * C);
    u32 bits = place.in_image(C);  // an image that fits in shared memory has fewer than 2^32 elements
#pragma unroll(DROPS ? 1 : 2)  // of two registers spill
    for (int i = 0; i < place.count; i++, target += pitch, bits += pitch) {
        to_floats(load_raw(kept.box(0, i) + at), v);
        apply(affine, v, silu);
        if constexpr (DROPS)
            drop<V>(draw_mask(own_mask, bits, place.n, now, seed, stream, first, threshold), kept_scale, v);
        store<V>(target, v);
    }
}
