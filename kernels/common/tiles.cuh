// Tiles of an image, as group_norm.cu walks through them: which channels and pixels a thread has, its rows, sums by channel.
// A launch is of THREADS threads, grid (N * tiles, chunks): a block covers `across` packs of V channels by
// THREADS / across pixels, and walks through one image by strides of `tiles` times as many, so that the image's blocks read
// what lies side by side at about the same time: its tile. chunks * across packs cover the channels.
#pragma once
#include "group_norm.cuh"

constexpr int THREADS = 256;

// The channels and pixels of one thread. What is never negative is divided as u32: half the instructions.
struct Lane {
    int n, tile, c0, c;     // image, tile, first channel of the block's chunk and of this thread's V
    int pixel, step, count; // pixels pixel + i * step of all images, for i < count; an idle thread has c = c0
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
    // From the last pixel to the first: what was last used before is still in the GPU's cache.
    __device__ __forceinline__ void reverse() {
        pixel += (count - 1) * step;
        step = -step;
    }
};

// Where the lane's first element lies, in x or in x2 (null where that is); `pitch` becomes the elements to the next one.
template <typename P>
__device__ __forceinline__ P* first_element(P* x, P* x2, const Lane& lane, int C1, int C2, int& pitch) {
    bool first = lane.c < C1;
    int width = first ? C1 : C2;
    P* source = first ? x : x2;
    pitch = lane.step * width;
    return source ? source + (i64)lane.pixel * width + lane.c - (first ? 0 : C1) : nullptr;
}

// Rows of V elements from ARRAYS arrays: the next BATCH rows are on their way while row() uses these, so that enough bytes are
// in flight. An array may be null; then its elements are not set.
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

// Adds a over the block's pixels in a fixed order; store(channel within the chunk, sum). `scratch`: shared, V * THREADS.
// A warp takes a channel of every pack: a lane sums every 32 / across-th row, then the lanes of a pack are summed.
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
