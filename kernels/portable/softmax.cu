// Softmax, log-softmax, logsumexp and cross-entropy over the middle axis of x, seen as [outer][K][inner], T. A row is the K elements
// of one place in [outer][inner]. out T; stats float2 [outer][inner]: each row's maximum and its sum of exp(x - maximum), which the
// backward reads. Cross-entropy is of rows (M, K), with losses, loss, dloss float32 and labels int32 (M).
// Outputs overwrite; dx accumulates where `add`. NaN comes out of a row whose label lies outside 0 to K - 1.
// Launch, unless said otherwise: block (columns, at_once * lanes), powers of two of product 256 or 512, at most 32 columns;
// CEIL_DIV(outer, rows) * CEIL_DIV(inner, columns) blocks. A row's elements are dealt to `lanes` threads. A block has `rows` rows in
// each column. They are at_once, unless inner is 1 and K at most STAGED / 8: then any multiple of it of which K elements each fit
// STAGED, lanes are at most 32, and the product is 256.
#include "reduce.cuh"

constexpr int HELD = 8;                                 // elements that a thread loads at a time
constexpr int STAGED = 4096 * sizeof(float) / sizeof(T);  // elements of a block's short rows

// What a thread has of a row, which begins at `start` and whose elements are `inner` apart: every lanes-th from the lane-th on.
// size is K, or 0 for a row beside x.
struct Part { i64 row, start, inner; int lane, lanes, size; };

// A block's rows, and its places. Short rows, which lie one behind another, are read and written through shared memory, by all
// threads in packs: `start` of a part is within the block's elements, `count` of them, which begin at `first`.
struct Block {
    i64 outer, inner, top, column, first;
    int K, lanes, rows, at_once, count;
    bool is_short;

    __device__ __forceinline__ Block(i64 outer, int K, i64 inner, int lanes, int rows)
        : outer(outer), inner(inner), K(K), lanes(lanes), rows(rows) {
        u32 block = blockIdx.x, column_block = 0;
        if (inner > 1) {
            u32 column_blocks = (u32)CEIL_DIV(inner, (i64)blockDim.x);
            column_block = block % column_blocks, block /= column_blocks;
        }
        at_once = blockDim.y / (u32)lanes;
        top = (i64)block * rows, column = (i64)column_block * blockDim.x + threadIdx.x;
        is_short = inner == 1 && K <= STAGED / 8;
        first = top * K, count = (int)min((i64)rows, outer - top) * K;
    }
    // This thread's part of one of at_once rows, from the block's row `pass` on.
    __device__ __forceinline__ Part part(int pass) const {
        int row = pass + threadIdx.y / (u32)lanes, lane = threadIdx.y % (u32)lanes;
        i64 o = top + row;
        int size = o < outer && column < inner ? K : 0;
        return {o * inner + column, is_short ? (i64)row * K : o * K * inner + column, inner, lane, lanes, size};
    }
};

struct __align__(16) Tile { T v[STAGED]; };

// to = from, n elements, by all threads of the block.
__device__ __forceinline__ void copy(T* to, const T* from, int n) {
    int packs = ((u64)to | (u64)from) % 16 ? 0 : n / Pack<T>::SIZE;
#pragma unroll 4
    for (int p = threadIdx.y; p < packs; p += blockDim.y) store_pack(to + p * Pack<T>::SIZE, load_pack(from + p * Pack<T>::SIZE));
    for (int i = packs * Pack<T>::SIZE + threadIdx.y; i < n; i += blockDim.y) to[i] = from[i];
}

// Where the block finds x: in the tile if the rows are short. It has to synchronise before it reads.
__device__ __forceinline__ const T* staged(Tile& tile, const T* x, const Block& block) {
    if (!block.is_short) return x;
    copy(tile.v, x + block.first, block.count);
    return tile.v;
}
// Copies the tile's short rows, which all threads have written, to x.
__device__ __forceinline__ void unstage(T* x, const Tile& tile, const Block& block) {
    if (!block.is_short) return;
    __syncthreads();
    copy(x + block.first, tile.v, block.count);
}

// HELD of the part's elements, from the k-th of the row on; `none` behind its end.
__device__ __forceinline__ void load(float (&values)[HELD], const T* x, const Part& part, int k, float none) {
    const T* own = x + part.start + k * part.inner;
#pragma unroll
    for (int j = 0; j < HELD; j++, own += part.lanes * part.inner) values[j] = k + j * part.lanes < part.size ? to_float(*own) : none;
}

// Writes HELD of the part's elements, from the k-th of the row on; plus those of `before`, which lie alike, if that is not null.
__device__ __forceinline__ void store(T* target, const float (&values)[HELD], const Part& part, int k, const T* before = nullptr) {
    i64 at = part.start + k * part.inner;
#pragma unroll
    for (int j = 0; j < HELD; j++, at += part.lanes * part.inner)
        if (k + j * part.lanes < part.size) target[at] = from_float<T>(before ? to_float(before[at]) + values[j] : values[j]);
}

// e^x; of 16-bit numbers by two instructions, whose error is below 1e-5.
__device__ __forceinline__ float exponential(float x) { return sizeof(T) == 2 ? __expf(x) : expf(x); }

// x reduced over threads of a warp whose numbers are equal modulo `inner`, in groups of `outer` adjacent threads.
template <typename Op> __device__ __forceinline__ float shuffle_reduce(float x, int outer, int inner) {
    for (int offset = outer / 2; offset >= inner; offset /= 2) x = Op::apply(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}

// x reduced over the lanes of a row, for each of them.
template <typename Op> __device__ __forceinline__ float row_reduce(float x, int lanes) {
    __shared__ float warps[512];
    int columns = blockDim.x, group = columns * lanes;  // threads whose lanes belong together
    x = shuffle_reduce<Op>(x, min(group, 32), columns);
    if (group <= 32) return x;
    int thread = threadIdx.y * columns + threadIdx.x, lane = thread % 32, results = group / 32 * columns;
    __syncthreads();
    if (lane < columns) warps[thread / 32 * columns + lane] = x;
    __syncthreads();
    x = Op::identity();
    for (int i = lane; i < results; i += 32) x = Op::apply(x, warps[thread / group * results + i]);
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
    float of_row = row_reduce<Max>(largest, part.lanes);
    return make_float2(of_row, row_reduce<Sum>(sum * exponential(largest - of_row), part.lanes));
}

extern "C" __global__ void softmax(T* out, float2* stats, const T* x, i64 outer, int K, i64 inner, int lanes, int rows, int log) {
    wait_for_previous();
    __shared__ Tile tile;
    Block block(outer, K, inner, lanes, rows);
    const T* from = staged(tile, x, block);
    T* to = block.is_short ? tile.v : out;
    __syncthreads();
    for (int pass = 0; pass < rows; pass += block.at_once) {
        Part part = block.part(pass);
        float values[HELD];
        float2 own = row_stats(from, part, values);
        float factor = log ? 1.0f : 1.0f / own.y, offset = log ? logf(own.y) : 0.0f;
        for (int k = part.lane; k < part.size; k += HELD * lanes) {
            if (part.size > HELD * lanes) load(values, from, part, k, 0.0f);
#pragma unroll
            for (int j = 0; j < HELD; j++) values[j] = log ? values[j] - own.x - offset : exponential(values[j] - own.x) * factor;
            store(to, values, part, k);
        }
        if (part.lane == 0 && part.size) stats[part.row] = own;
    }
    unstage(out, tile, block);
}

// dx = p * (dout - sum(p * dout)), or dout - p * sum(dout) where `log`.
extern "C" __global__ void softmax_backward(T* dx, int add, const T* dout, const T* x, const float2* stats, i64 outer, int K,
                                            i64 inner, int lanes, int rows, int log) {
    wait_for_previous();
    __shared__ Tile tiles[2];
    Block block(outer, K, inner, lanes, rows);
    const T *x_from = staged(tiles[0], x, block), *dout_from = staged(tiles[1], dout, block);
    T* to = block.is_short ? tiles[1].v : dx;  // each thread overwrites the elements of dout that it read
    const T* before = !add ? nullptr : block.is_short ? dx + block.first : dx;
    __syncthreads();
    for (int pass = 0; pass < rows; pass += block.at_once) {
        Part part = block.part(pass);
        float2 own = part.size ? stats[part.row] : make_float2(0.0f, 1.0f);
        float factor = 1.0f / own.y, sum = 0.0f, p[HELD], g[HELD];
        auto read = [&](int k) {
            load(p, x_from, part, k, Max::identity());
            load(g, dout_from, part, k, 0.0f);
#pragma unroll
            for (int j = 0; j < HELD; j++) p[j] = exponential(p[j] - own.x) * factor;
        };
        for (int k = part.lane; k < part.size; k += HELD * lanes) {
            read(k);
#pragma unroll
            for (int j = 0; j < HELD; j++) sum += log ? g[j] : p[j] * g[j];
        }
        sum = row_reduce<Sum>(sum, lanes);
        for (int k = part.lane; k < part.size; k += HELD * lanes) {
            if (part.size > HELD * lanes) read(k);
#pragma unroll
            for (int j = 0; j < HELD; j++) g[j] = log ? g[j] - p[j] * sum : p[j] * (g[j] - sum);
            store(to, g, part, k, before);
        }
    }
    unstage(dx, tiles[1], block);
}

// out [outer][inner] = log(sum(exp(x))), infinite where x is.
extern "C" __global__ void logsumexp(T* out, float2* stats, const T* x, i64 outer, int K, i64 inner, int lanes, int rows) {
    wait_for_previous();
    __shared__ Tile tile;
    Block block(outer, K, inner, lanes, rows);
    const T* from = staged(tile, x, block);
    __syncthreads();
    for (int pass = 0; pass < rows; pass += block.at_once) {
        Part part = block.part(pass);
        float values[HELD];
        float2 own = row_stats(from, part, values, MOST);
        if (part.lane || !part.size) continue;
        out[part.row] = from_float<T>(own.x + logf(own.y));
        stats[part.row] = own;
    }
}

// dx = p * dout.
extern "C" __global__ void logsumexp_backward(T* dx, int add, const T* dout, const T* x, const float2* stats, i64 outer, int K,
                                              i64 inner, int lanes, int rows) {
    wait_for_previous();
    __shared__ Tile tile;
    Block block(outer, K, inner, lanes, rows);
    const T* from = staged(tile, x, block);
    T* to = block.is_short ? tile.v : dx;  // each thread overwrites the elements of x that it read
    const T* before = !add ? nullptr : block.is_short ? dx + block.first : dx;
    __syncthreads();
    for (int pass = 0; pass < rows; pass += block.at_once) {
        Part part = block.part(pass);
        float2 own = part.size ? stats[part.row] : make_float2(0.0f, 1.0f);
        float factor = part.size ? to_float(dout[part.row]) / own.y : 0.0f, values[HELD];
        for (int k = part.lane; k < part.size; k += HELD * lanes) {
            load(values, from, part, k, 0.0f);
#pragma unroll
            for (int j = 0; j < HELD; j++) values[j] = exponential(values[j] - own.x) * factor;
            store(to, values, part, k, before);
        }
    }
    unstage(dx, tile, block);
}

extern "C" __global__ void cross_entropy(float* losses, float2* stats, const T* x, const int* labels, int M, int K, int lanes,
                                         int rows) {
    wait_for_previous();
    __shared__ Tile tile;
    Block block(M, K, 1, lanes, rows);
    const T* from = staged(tile, x, block);
    __syncthreads();
    for (int pass = 0; pass < rows; pass += block.at_once) {
        Part part = block.part(pass);
        float values[HELD];
        float2 own = row_stats(from, part, values);
        if (part.lane || !part.size) continue;
        int label = labels[part.row];
        bool inside = label >= 0 && label < K;
        losses[part.row] = inside ? logf(own.y) - (to_float(from[part.start + label]) - own.x) : __int_as_float(0x7fc00000);
        stats[part.row] = own;
    }
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
                                                  const int* labels, int M, int K, int lanes, int rows) {
    wait_for_previous();
    __shared__ Tile tile;
    Block block(M, K, 1, lanes, rows);
    const T* from = staged(tile, x, block);
    T* to = block.is_short ? tile.v : dx;  // each thread overwrites the elements of x that it read
    const T* before = !add ? nullptr : block.is_short ? dx + block.first : dx;
    __syncthreads();
    for (int pass = 0; pass < rows; pass += block.at_once) {
        Part part = block.part(pass);
        float2 own = part.size ? stats[part.row] : make_float2(0.0f, 1.0f);
        float factor = *dloss / M, p = factor / own.y, values[HELD];
        int label = part.size ? labels[part.row] : 0;
        for (int k = part.lane; k < part.size; k += HELD * lanes) {
            load(values, from, part, k, 0.0f);
#pragma unroll
            for (int j = 0; j < HELD; j++)
                values[j] = exponential(values[j] - own.x) * p - (k + j * lanes == label ? factor : 0.0f);
            store(to, values, part, k, before);
        }
    }
    unstage(dx, tile, block);
}
