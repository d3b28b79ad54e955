// Softmax, log-softmax, logsumexp and cross-entropy over the middle axis of x, seen as [outer][K][inner], T. A row is the K elements of one
// place in [outer][inner]. out T; stats float2 [outer][inner]: each row's maximum and its sum of exp(x - maximum), which the
// backward reads. Cross-entropy is of rows (M, K), with losses, loss, dloss float32 and labels int32 (M).
// Outputs overwrite; dx accumulates where `add`. NaN comes out of a row whose label lies outside 0 to K - 1.
// Launch, unless said otherwise: block (columns, lanes, rows), powers of two of product 256 to 1024, at most 32 columns;
// CEIL_DIV(outer, rows) * CEIL_DIV(inner, columns) blocks. A row's elements are dealt to `lanes` threads; where inner is 1 and
// these are at most 32, the product is 256 and each has HELD at most.
#include "reduce.cuh"

constexpr int HELD = 8;  // elements that a thread loads at a time

// What a thread has of its row, which begins at `start` and whose elements are `inner` apart: every lanes-th from the lane-th on.
// size is K, or 0 for a row beside x. Short rows that lie one behind another are read and written through shared memory, by all
// threads of the block in packs: `start` is within the block's elements, `count` of them, which begin at `first`.
struct Part { i64 row, start, inner; int lane, lanes, size; bool is_short; i64 first; int count; };

__device__ __forceinline__ Part part_of(i64 outer, int K, i64 inner) {
    u32 block = blockIdx.x, column_block = 0;
    if (inner > 1) {
        u32 column_blocks = (u32)CEIL_DIV(inner, (i64)blockDim.x);
        column_block = block % column_blocks, block /= column_blocks;
    }
    int rows = blockDim.z, lane = threadIdx.y, lanes = blockDim.y;
    i64 top = (i64)block * rows, o = top + threadIdx.z, i = (i64)column_block * blockDim.x + threadIdx.x;
    int size = o < outer && i < inner ? K : 0;
    bool is_short = inner == 1 && lanes <= 32;
    i64 start = is_short ? threadIdx.z * K : o * K * inner + i;
    return {o * inner + i, start, inner, lane, lanes, size, is_short, top * K, (int)min((i64)rows, outer - top) * K};
}

struct __align__(16) Tile { T v[256 * HELD]; };

// to = from, n elements, by all threads of the block.
__device__ __forceinline__ void copy(T* to, const T* from, int n) {
    int threads = blockDim.y * blockDim.z, thread = threadIdx.z * blockDim.y + threadIdx.y;
    int packs = ((u64)to | (u64)from) % 16 ? 0 : n / Pack<T>::SIZE;
    for (int p = thread; p < packs; p += threads) store_pack(to + p * Pack<T>::SIZE, load_pack(from + p * Pack<T>::SIZE));
    for (int i = packs * Pack<T>::SIZE + thread; i < n; i += threads) to[i] = from[i];
}

// Where a thread finds its part of x: in the tile if the rows are short. The block has to synchronise before it reads.
__device__ __forceinline__ const T* staged(Tile& tile, const T* x, const Part& part) {
    if (!part.is_short) return x;
    copy(tile.v, x + part.first, part.count);
    return tile.v;
}
// Copies the tile's short rows, which all threads have written, to x.
__device__ __forceinline__ void unstage(T* x, const Tile& tile, const Part& part) {
    if (!part.is_short) return;
    __syncthreads();
    copy(x + part.first, tile.v, part.count);
}

// HELD of the part's elements, from the k-th of the row on; `none` behind its end.
__device__ __forceinline__ void load(float (&values)[HELD], const T* x, const Part& part, int k, float none) {
    const T* own = x + part.start + k * part.inner;
#pragma unroll
    for (int j = 0; j < HELD; j++, own += part.lanes * part.inner) values[j] = k + j * part.lanes < part.size ? to_float(*own) : none;
}

// Writes, or adds where `add`, HELD of the part's elements, from the k-th of the row on.
__device__ __forceinline__ void store(T* target, const float (&values)[HELD], const Part& part, int k, int add) {
    T* own = target + part.start + k * part.inner;
#pragma unroll
    for (int j = 0; j < HELD; j++, own += part.lanes * part.inner)
        if (k + j * part.lanes < part.size) *own = from_float<T>(add ? to_float(*own) + values[j] : values[j]);
}

// e^x; of 16-bit numbers by two instructions, whose error is below 1e-5.
__device__ __forceinline__ float exponential(float x) { return sizeof(T) == 2 ? __expf(x) : expf(x); }

// x reduced over threads of a warp whose numbers are equal modulo `inner`, in groups of `outer` adjacent threads.
template <typename Op> __device__ __forceinline__ float shuffle_reduce(float x, int outer, int inner) {
    for (int offset = outer / 2; offset >= inner; offset /= 2) x = Op::apply(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}

// x reduced over the lanes of a row, for each of them.
template <typename Op> __device__ __forceinline__ float row_reduce(float x) {
    __shared__ float warps[1024];
    int columns = blockDim.x, group = columns * blockDim.y;  // threads whose lanes belong together
    x = shuffle_reduce<Op>(x, min(group, 32), columns);
    if (group <= 32) return x;
    int thread = threadIdx.z * group + threadIdx.y * columns + threadIdx.x, lane = thread % 32, results = group / 32 * columns;
    __syncthreads();
    if (lane < columns) warps[thread / 32 * columns + lane] = x;
    __syncthreads();
    x = Op::identity();
    for (int i = lane; i < results; i += 32) x = Op::apply(x, warps[threadIdx.z * results + i]);
    return shuffle_reduce<Op>(x, 32, columns);
}

// The row's statistics, in one pass: a thread's sum is scaled down where its maximum grows. `values` are the last that it read.
// The maximum starts at the lowest number, as -inf - -inf would be NaN, and is at most `bound`.
constexpr float MOST = 3.402823466e38f;
__device__ __forceinline__ float2 row_stats(const T* x, const Part& part, float (&values)[HELD], float bound = -Max::identity()) {
    float largest = -MOST, sum = 0.0f;
    for (int k = part.lane; k < part.size; k += HELD * part.lanes) {
        load(values, x, part, k, Max::identity());
        float before = largest;
#pragma unroll
        for (int j = 0; j < HELD; j++) largest = fmaxf(largest, values[j]);
        largest = fminf(largest, bound);
        if (k != part.lane) sum *= exponential(before - largest);
#pragma unroll
        for (int j = 0; j < HELD; j++) sum += exponential(values[j] - largest);
    }
    float of_row = row_reduce<Max>(largest);
    return make_float2(of_row, row_reduce<Sum>(sum * exponential(largest - of_row)));
}

extern "C" __global__ void softmax(T* out, float2* stats, const T* x, i64 outer, int K, i64 inner, int log) {
    wait_for_previous();
    __shared__ Tile tile;
    Part part = part_of(outer, K, inner);
    float values[HELD];
    const T* from = staged(tile, x, part);
    __syncthreads();
    float2 own = row_stats(from, part, values);
    float factor = log ? 1.0f : 1.0f / own.y, offset = log ? logf(own.y) : 0.0f;
    T* to = part.is_short ? tile.v : out;
    for (int k = part.lane; k < part.size; k += HELD * part.lanes) {
        if (part.size > HELD * part.lanes) load(values, x, part, k, 0.0f);
#pragma unroll
        for (int j = 0; j < HELD; j++) values[j] = log ? values[j] - own.x - offset : exponential(values[j] - own.x) * factor;
        store(to, values, part, k, 0);
    }
    if (part.lane == 0 && part.size) stats[part.row] = own;
    unstage(out, tile, part);
}

// dx = p * (dout - sum(p * dout)), or dout - p * sum(dout) where `log`.
extern "C" __global__ void softmax_backward(T* dx, int add, const T* dout, const T* x, const float2* stats, i64 outer, int K,
                                            i64 inner, int log) {
    wait_for_previous();
    __shared__ Tile tiles[3];
    Part part = part_of(outer, K, inner);
    const T *x_from = staged(tiles[0], x, part), *dout_from = staged(tiles[1], dout, part);
    if (add) staged(tiles[2], dx, part);
    __syncthreads();
    float2 own = part.size ? stats[part.row] : make_float2(0.0f, 1.0f);
    float factor = 1.0f / own.y, sum = 0.0f, p[HELD], g[HELD];
    auto read = [&](int k) {
        load(p, x_from, part, k, Max::identity());
        load(g, dout_from, part, k, 0.0f);
#pragma unroll
        for (int j = 0; j < HELD; j++) p[j] = exponential(p[j] - own.x) * factor;
    };
    for (int k = part.lane; k < part.size; k += HELD * part.lanes) {
        read(k);
#pragma unroll
        for (int j = 0; j < HELD; j++) sum += log ? g[j] : p[j] * g[j];
    }
    sum = row_reduce<Sum>(sum);
    T* to = part.is_short ? tiles[2].v : dx;
    for (int k = part.lane; k < part.size; k += HELD * part.lanes) {
        if (part.size > HELD * part.lanes) read(k);
#pragma unroll
        for (int j = 0; j < HELD; j++) g[j] = log ? g[j] - p[j] * sum : p[j] * (g[j] - sum);
        store(to, g, part, k, add);
    }
    unstage(dx, tiles[2], part);
}

// out [outer][inner] = log(sum(exp(x))), infinite where x is.
extern "C" __global__ void logsumexp(T* out, float2* stats, const T* x, i64 outer, int K, i64 inner) {
    wait_for_previous();
    __shared__ Tile tile;
    Part part = part_of(outer, K, inner);
    float values[HELD];
    const T* from = staged(tile, x, part);
    __syncthreads();
    float2 own = row_stats(from, part, values, MOST);
    if (part.lane || !part.size) return;
    out[part.row] = from_float<T>(own.x + logf(own.y));
    stats[part.row] = own;
}

// dx = p * dout.
extern "C" __global__ void logsumexp_backward(T* dx, int add, const T* dout, const T* x, const float2* stats, i64 outer, int K,
                                              i64 inner) {
    wait_for_previous();
    __shared__ Tile tiles[2];
    Part part = part_of(outer, K, inner);
    const T* from = staged(tiles[0], x, part);
    if (add) staged(tiles[1], dx, part);
    __syncthreads();
    float2 own = part.size ? stats[part.row] : make_float2(0.0f, 1.0f);
    float factor = part.size ? to_float(dout[part.row]) / own.y : 0.0f, values[HELD];
    T* to = part.is_short ? tiles[1].v : dx;
    for (int k = part.lane; k < part.size; k += HELD * part.lanes) {
        load(values, from, part, k, 0.0f);
#pragma unroll
        for (int j = 0; j < HELD; j++) values[j] = exponential(values[j] - own.x) * factor;
        store(to, values, part, k, add);
    }
    unstage(dx, tiles[1], part);
}

extern "C" __global__ void cross_entropy(float* losses, float2* stats, const T* x, const int* labels, int M, int K) {
    wait_for_previous();
    __shared__ Tile tile;
    Part part = part_of(M, K, 1);
    float values[HELD];
    const T* from = staged(tile, x, part);
    __syncthreads();
    float2 own = row_stats(from, part, values);
    if (part.lane || !part.size) return;
    int label = labels[part.row];
    bool inside = label >= 0 && label < K;
    losses[part.row] = inside ? logf(own.y) - (to_float(from[part.start + label]) - own.x) : __int_as_float(0x7fc00000);
    stats[part.row] = own;
}

// loss = mean of losses (M), one block.
extern "C" __global__ void mean(float* loss, const float* losses, int M) {
    wait_for_previous();
    float sum = 0.0f;
    for (int m = threadIdx.x; m < M; m += blockDim.x) sum += losses[m];
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) *loss = sum / M;
}

// dx = (p - [k = label]) * dloss / M.
extern "C" __global__ void cross_entropy_backward(T* dx, int add, const float* dloss, const T* x, const float2* stats,
                                                  const int* labels, int M, int K) {
    wait_for_previous();
    __shared__ Tile tiles[2];
    Part part = part_of(M, K, 1);
    const T* from = staged(tiles[0], x, part);
    if (add) staged(tiles[1], dx, part);
    __syncthreads();
    float2 own = part.size ? stats[part.row] : make_float2(0.0f, 1.0f);
    float factor = *dloss / M, p = factor / own.y, values[HELD];
    int label = part.size ? labels[part.row] : 0;
    T* to = part.is_short ? tiles[1].v : dx;
    for (int k = part.lane; k < part.size; k += HELD * part.lanes) {
        load(values, from, part, k, 0.0f);
#pragma unroll
        for (int j = 0; j < HELD; j++)
            values[j] = exponential(values[j] - own.x) * p - (k + j * part.lanes == label ? factor : 0.0f);
        store(to, values, part, k, add);
    }
    unstage(dx, tiles[1], part);
}
