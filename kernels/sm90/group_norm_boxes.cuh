// Group norm with an image's pixels kept in shared memory: how blocks share them, and sums over them. TMA copies them there
// in boxes of STEP pixels by a chunk of channels, ACROSS packs of V (at most 32). Box i of an image goes to block i % parts of
// its `parts` blocks. TMA copies, as threads that copied would wait for their copies instead of summing. Whoever includes this
// has THREADS.
#pragma once
#include "group_norm.cuh"
#include "wgmma.cuh"

constexpr int WIDTH = ACROSS * V;  // channels of a chunk
constexpr int MOST = 32 / ACROSS < 2 * V ? 32 / ACROSS : 2 * V;
constexpr int WARP_ROWS = MOST >= 16 ? 16 : MOST >= 8 ? 8 : MOST >= 4 ? 4 : MOST >= 2 ? 2 : 1;  // pixels that a warp has at once
constexpr int WARPS = THREADS / 32, STEP = WARPS * WARP_ROWS, BOX = STEP * WIDTH;
constexpr int BOXES = 64;  // of a block at most

// A thread's channels, and its pixel of every box.
struct Place {
    int n, part, parts, c0, offset;  // image; block among those that share it; first channel of the chunk; this thread's within it
    int pixel, row, count;           // of the first box: within the image, within the box; how many of the block's boxes have one
    __device__ __forceinline__ Place(int n, int part, int parts, int chunk, int S)
        : n(n), part(part), parts(parts), c0(chunk * WIDTH) {
        int lane = threadIdx.x % 32;
        offset = lane % ACROSS * V;
        row = threadIdx.x / 32 * WARP_ROWS + lane / ACROSS;
        pixel = part * STEP + row;
        count = lane < WARP_ROWS * ACROSS && pixel < S ? CEIL_DIV((u32)(S - pixel), (u32)(parts * STEP)) : 0;
    }
    // Where they lie in x, or in x2 (null where that is), of so many channels each; `pitch` becomes the elements to the next one.
    template <typename P> __device__ __forceinline__ P* element(P* x, P* x2, int S, int C1, int C2, int& pitch) const {
        bool second = c0 >= C1;
        P* source = second ? x2 : x;
        int width = second ? C2 : C1;
        pitch = parts * STEP * width;
        return source ? source + ((i64)n * S + pixel) * width + c0 - (second ? C1 : 0) + offset : nullptr;
    }
};

// A block's boxes in shared memory, of the arrays one behind the other, each with a barrier.
template <int ARRAYS> struct Boxes {
    T* memory;
    int count;  // of an array
    u32 barriers;
    __device__ __forceinline__ T* box(int a, int i) const { return memory + (a * count + i) * BOX; }
    __device__ __forceinline__ T* end() const { return memory + ARRAYS * count * BOX; }
    // A warp readies the barriers; then its first thread may send.
    __device__ __forceinline__ void init() const {
        for (int i = threadIdx.x % 32; i < count; i += 32) barrier_init(barriers + 8 * i, 1);
        fence_barriers();
        __syncwarp();
    }
    // Have box i of all arrays copied, from channels c on. One thread at a time: where many asked at once, all boxes came late.
    __device__ __forceinline__ void send(const TensorMap* const (&maps)[ARRAYS], const int (&c)[ARRAYS], const Place& place,
                                         int i) const {
        barrier_expect(barriers + 8 * i, ARRAYS * BOX * sizeof(T));
#pragma unroll
        for (int a = 0; a < ARRAYS; a++)
            tma_load(shared_address(box(a, i)), *maps[a], barriers + 8 * i, c[a], (i * place.parts + place.part) * STEP, place.n);
    }
    __device__ __forceinline__ void wait(int i) const { barrier_wait(barriers + 8 * i, 0); }
};

// sums[warp][c] and sums[warp][WIDTH + c] = the warp's sums of a and b, of channel c. A row is a pixel's lanes. At each step two
// rows share what both have left, half each.
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
