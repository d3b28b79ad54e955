// Group norm with an image's pixels kept in shared memory: how blocks share an image, and how they sum over its pixels.
//
// A box is STEP pixels by a chunk of channels, ACROSS packs of V (at most 32 packs). TMA copies boxes to shared memory: threads
// that copied would wait for their copies instead of summing. `parts` blocks share an image, and box i of the image goes to
// block i % parts. A file that includes this one defines THREADS.
#pragma once
#include "group_norm.cuh"
#include "wgmma.cuh"

constexpr int WIDTH = ACROSS * V;  // channels of a chunk
constexpr int MOST = 32 / ACROSS < 2 * V ? 32 / ACROSS : 2 * V;
constexpr int WARP_ROWS = MOST >= 16 ? 16 : MOST >= 8 ? 8 : MOST >= 4 ? 4 : MOST >= 2 ? 2 : 1;  // pixels a warp has at once
constexpr int WARPS = THREADS / 32, STEP = WARPS * WARP_ROWS, BOX = STEP * WIDTH;
constexpr int BOXES = 64;  // of a block at most

// A thread's channels, and its pixel in each box of its block.
struct Place {
    int n, part, parts, c0, offset;  // image; block, of how many; first channel of the chunk; this thread's in the chunk
    int pixel, row, count;           // its pixel in the first box, in the image and in the box; boxes where it has a pixel
    __device__ __forceinline__ Place(int n, int part, int parts, int chunk, int S)
        : n(n), part(part), parts(parts), c0(chunk * WIDTH) {
        int lane = threadIdx.x % 32;
        offset = lane % ACROSS * V;
        row = threadIdx.x / 32 * WARP_ROWS + lane / ACROSS;
        pixel = part * STEP + row;
        count = lane < WARP_ROWS * ACROSS && pixel < S ? CEIL_DIV((u32)(S - pixel), (u32)(parts * STEP)) : 0;
    }
    // The number of its first element in an image of C channels.
    __device__ __forceinline__ i64 in_image(int C) const { return (i64)pixel * C + c0 + offset; }
    // Where the thread's first pixel lies in x, of C1 channels, or in x2, of C2; null where that array is. `pitch` becomes the
    // elements from there to the pixel in the next box.
    template <typename P> __device__ __forceinline__ P* element(P* x, P* x2, int S, int C1, int C2, int& pitch) const {
        bool second = c0 >= C1;
        P* source = second ? x2 : x;
        int width = second ? C2 : C1;
        pitch = parts * STEP * width;
        return source ? source + ((i64)n * S + pixel) * width + c0 - (second ? C1 : 0) + offset : nullptr;
    }
};

// A block's boxes in shared memory: all of the first array, then all of the next. Box i of all arrays has one barrier.
template <int ARRAYS> struct Boxes {
    T* memory;
    int count;  // boxes of an array
    u32 barriers;
    __device__ __forceinline__ T* box(int a, int i) const { return memory + (a * count + i) * BOX; }
    __device__ __forceinline__ T* end() const { return memory + ARRAYS * count * BOX; }
    // Initialise the barriers, by one warp. Then its first thread may send.
    __device__ __forceinline__ void init() const {
        for (int i = threadIdx.x % 32; i < count; i += 32) barrier_init(barriers + 8 * i, 1);
        fence_barriers();
        __syncwarp();
    }
    // Start copying box i of all arrays, from channels c on. One thread calls it: where many did at once, all boxes came late.
    __device__ __forceinline__ void send(const TensorMap* const (&maps)[ARRAYS], const int (&c)[ARRAYS], const Place& place,
                                         int i) const {
        barrier_expect(barriers + 8 * i, ARRAYS * BOX * sizeof(T));
#pragma unroll
        for (int a = 0; a < ARRAYS; a++)
            tma_load(shared_address(box(a, i)), *maps[a], barriers + 8 * i, c[a], (i * place.parts + place.part) * STEP, place.n);
    }
    __device__ __forceinline__ void wait(int i) const { barrier_wait(barriers + 8 * i, 0); }
};

// sums[warp][c] and sums[warp][WIDTH + c] = the sums over a warp of a and of b, of channel c. A row is the lanes of a pixel. At
// each step two rows each take half of the sums that both have left.
__device__ __forceinline__ void add_warp(float* sums, const Place& place, const float (&a)[V], const float (&b)[V]) {
    float mine[2 * V];
#pragma unroll
    for (int k = 0; k < V; k++) mine[k] = a[k], mine[V + k] = b[k];
    int lane = threadIdx.x % 32, row = lane / ACROSS;
#pragma unroll
    for (int half = WARP_ROWS / 2, left = V; half; half /= 2, left /= 2) {
        bool upper = row & half;
        int other = upper ? lane - half * ACROSS : lane + half * ACROSS;
#pragma unroll
        for (int k = 0; k < V; k++) {
            if (k >= left) break;
            float given = __shfl_sync(~0u, upper ? mine[k] : mine[k + left], other);
            mine[k] = (upper ? mine[k + left] : mine[k]) + given;
        }
    }
    if (row >= WARP_ROWS) return;
    constexpr int OWN = 2 * V / WARP_ROWS;
    int first = row * OWN;
    float* target = sums + threadIdx.x / 32 * 2 * WIDTH + place.offset + (first < V ? first : WIDTH + first - V);
#pragma unroll
    for (int k = 0; k < OWN; k++) target[k + (k >= V ? WIDTH - V : 0)] = mine[k];
}
__device__ __forceinline__ float sum_of_warps(const float* sums, int j) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) sum += sums[warp * 2 * WIDTH + j];
    return sum;
}
