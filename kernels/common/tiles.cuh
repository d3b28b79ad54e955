// How group_norm.cu's kernels share out an image: the channels and pixels of each thread, its loads, and sums by channel.
//
// Launch: THREADS threads, grid (N * tiles, chunks). A block works on one chunk of one image's channels, `across` packs of V;
// the chunks together cover all channels. At a time it covers THREADS / across neighbouring pixels. Its next pixels lie `tiles`
// times as many further on, so that all blocks of an image read neighbouring memory at about the same time. The pixels that
// a block covers are its tile.
#pragma once
#include "group_norm.cuh"

constexpr int THREADS = 256;

// The channels and pixels of one thread. Numbers that are never negative are divided as u32, in half the instructions.
struct Lane {
    int n, tile, c0, c;     // image; tile; first channel of the block's chunk; first of this thread's V channels
    int pixel, step, count; // pixels pixel + i * step, counted over all images, for i < count; an idle thread has c = c0
    __device__ __forceinline__ Lane(int S, int C, int tiles, int across) {
        int y = threadIdx.x / (u32)across, rows = THREADS / (u32)across;
        n = blockIdx.x / (u32)tiles;
        tile = blockIdx.x - n * tiles;
        c0 = blockIdx.y * across * V;
        c = c0 + (threadIdx.x - y * across) * V;
        bool active = y < rows && c < C;
        if (!active) c = c0;
        int first = tile * rows + y;
        pixel = n * S + first;
        step = tiles * rows;
        count = active && first < S ? CEIL_DIV((u32)(S - first), (u32)step) : 0;
    }
    // The number of its first element in an image of C channels.
    __device__ __forceinline__ i64 in_image(int S, int C) const { return (i64)(pixel - n * S) * C + c; }
    // Walk from the last pixel to the first: the pixels that the previous kernel used last are still in L2.
    __device__ __forceinline__ void reverse() {
        pixel += (count - 1) * step;
        step = -step;
    }
};

// The lane's first element, in x or x2: null where that array is null. `pitch` receives the distance in elements to its next
// pixel.
template <typename P>
__device__ __forceinline__ P* first_element(P* x, P* x2, const Lane& lane, int C1, int C2, int& pitch) {
    bool first = lane.c < C1;
    int width = first ? C1 : C2;
    P* source = first ? x : x2;
    pitch = lane.step * width;
    return source ? source + (i64)lane.pixel * width + lane.c - (first ? 0 : C1) : nullptr;
}

// A thread's rows, V elements of each of its pixels, from ARRAYS arrays. The next BATCH rows are loaded while row() uses the
// current ones, so that enough bytes are in flight. An array may be null; its elements are then undefined.
template <int ARRAYS, int BATCH> struct Rows {
    const T* start[ARRAYS];
    int pitch[ARRAYS], count;
    Raw next[BATCH][ARRAYS];

    __device__ __forceinline__ void fetch(int first) {
#pragma unroll
        for (int u = 0; u < BATCH; u++)
#pragma unroll
            for (int a = 0; a < ARRAYS; a++)
                if (first + u < count && start[a]) next[u][a] = load_raw(start[a] + (i64)(first + u) * pitch[a]);
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

// Sums a over the block's threads of the same channel, in a fixed order, and calls store(channel within the chunk, sum).
// `scratch`: V * THREADS floats of shared memory. A warp sums the k-th channel of every pack: each lane adds every
// (32 / across)-th row of its pack, then warp shuffles add the lanes of a pack.
template <typename Store>
__device__ __forceinline__ void block_sums(int across, float* scratch, const float (&a)[V], Store store) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < V; k++) scratch[k * THREADS + threadIdx.x] = a[k];
    __syncthreads();
    int lane = threadIdx.x % 32, used = 32 / across * across, filled = THREADS / across * across;
    for (int k = threadIdx.x / 32; k < V; k += THREADS / 32) {
        float own = 0.0f;
#pragma unroll 8
        for (int i = lane; i < filled; i += used) own += lane < used ? scratch[k * THREADS + i] : 0.0f;
        float sum = own;
        for (int i = across; i < used; i += across) sum += __shfl_sync(~0u, own, lane + i);
        if (lane < across) store(lane * V + k, sum);
    }
}
