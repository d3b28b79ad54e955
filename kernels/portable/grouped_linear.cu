// Grouped linear: several linear layers (the groups) of one input, in one launch.
//
//   forward   out[g] = z or silu(z), z = x · weight[g] transposed + bias[g]. z[g] receives z, unless null.
//   few_rows  the same, for N of at most 8.
//   dx        partials[g] = d_preact[g] · weight[g]; their sum over g is dx. d_preact[g] is the gradient of z.
//   dweight   dweight[g] = or += d_preact[g] transposed · x; dbias[g] = or += the sum of d_preact[g]'s rows. Null where
//             unwanted.
//
// x (N, E), weight[g] (K[g], E), bias[g] (K[g]), out[g] and z[g] (N, K[g]), partials (groups, N, E): float, row-major. out, z
// and partials are overwritten. A table passed by value holds the groups' addresses and sizes, at most 64 a launch.
// VEC=1: E, every K and every address are multiples of 16 bytes.
//
// A block computes one square tile of one group's result, on FMA units. Sums are in a fixed order.
// Launch: 256 threads, grid (tiles down, tiles across, groups) for the largest group; few_rows (ceil(K / 8), 1, groups), of more
// than two rows half as many. Where a group is smaller, its blocks beyond have nothing to do.
#include "few_rows.cuh"
#include "mma.cuh"
#include "vector.cuh"

constexpr int V = VEC ? 4 : 1, THREADS = 256;

// In `dx` and `dweight` out is d_preact. In `dweight` weight and bias are dweight and dbias.
struct Group {
    float *weight, *bias, *out, *z;
    int K, add_weight, add_bias;
};
struct Table {
    Group groups[64];
};

struct Matrix {
    const float* data;
    int height, width;
};

// The tile of a result has TILE rows and TILE columns. Each operand has TILE vectors, of which DEPTH elements at a time are in
// shared memory, in the order of global memory: the depth is the last axis or the first. A thread has 4 × 4 sums. A tile needs
// fewer threads than a block has where TILE is below 64: then SLICES of the threads split the depth.
template <int TILE> struct Tile {
    static constexpr int DEPTH = 2048 / TILE, ACROSS = TILE / 4, SLICES = THREADS / (ACROSS * ACROSS);
    static constexpr int PITCH = DEPTH + 4;    // of vectors: 16 bytes of eight vectors lie in different banks
    static constexpr int SUM_PITCH = TILE + 8; // of a result's rows: four rows start in different banks
};

// Copy elements `depth` to depth + DEPTH of TILE vectors, from `vector` on, to shared memory; zeros outside the matrix.
template <int TILE, bool DEPTH_LAST> __device__ __forceinline__ void copy(float* tile, Matrix m, int vector, int depth) {
    constexpr int DEPTH = Tile<TILE>::DEPTH, WIDTH = DEPTH_LAST ? DEPTH : TILE;
    constexpr int PITCH = DEPTH_LAST ? Tile<TILE>::PITCH : TILE;
    int top = DEPTH_LAST ? vector : depth, left = DEPTH_LAST ? depth : vector;
#pragma unroll
    for (int i = threadIdx.x * V; i < TILE * DEPTH; i += THREADS * V) {
        int row = top + i / WIDTH, column = left + i % WIDTH;
        bool inside = row < m.height && column < m.width;
        const float* source = m.data + (i64)row * m.width + column;
        float* target = tile + i / WIDTH * PITCH + i % WIDTH;
        if constexpr (VEC) cp_async(shared_address(target), source, inside);
        else *target = inside ? *source : 0.0f;
    }
}

// The i-th of thread t's four vectors of an operand. They are neighbours where vectors lie side by side in memory.
template <int TILE, bool DEPTH_LAST> __device__ __forceinline__ int vector_of(int t, int i) {
    return DEPTH_LAST ? t + i * Tile<TILE>::ACROSS : 4 * t + i;
}

// values[i][k] = element depth + k of vector i of thread t's four.
template <int TILE, bool DEPTH_LAST>
__device__ __forceinline__ void fragment(float (&values)[4][4], const float* tile, int t, int depth) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (DEPTH_LAST) {
            load<4>(tile + vector_of<TILE, true>(t, i) * Tile<TILE>::PITCH + depth, values[i]);
        } else {
            float row[4];
            load<4>(tile + (depth + i) * TILE + 4 * t, row);
#pragma unroll
            for (int j = 0; j < 4; j++) values[j][i] = row[j];
        }
    }
}

// The tile of a · b at (row, column), in shared memory: (SLICES, TILE, SUM_PITCH), still to be summed over the slices.
template <int TILE, bool A_DEPTH_LAST, bool B_DEPTH_LAST>
__device__ __forceinline__ const float* product(Matrix a, Matrix b, int row, int column, int depth) {
    constexpr int DEPTH = Tile<TILE>::DEPTH, ACROSS = Tile<TILE>::ACROSS, OWN = DEPTH / Tile<TILE>::SLICES;
    __shared__ __align__(16) float tiles[2][2][2048 + 4 * TILE];
    int slice = threadIdx.x / (ACROSS * ACROSS), down = threadIdx.x / ACROSS % ACROSS, across = threadIdx.x % ACROSS;
    auto stage = [&](int step) {
        if (step * DEPTH < depth) {
            copy<TILE, A_DEPTH_LAST>(tiles[step % 2][0], a, row, step * DEPTH);
            copy<TILE, B_DEPTH_LAST>(tiles[step % 2][1], b, column, step * DEPTH);
        }
        cp_async_commit();
    };
    float sum[4][4] = {};
    stage(0);
    for (int step = 0; step * DEPTH < depth; step++) {
        stage(step + 1);
        cp_async_wait<1>();
        __syncthreads();
#pragma unroll 2
        for (int d = 0; d < OWN; d += 4) {
            float x[4][4], y[4][4];
            fragment<TILE, A_DEPTH_LAST>(x, tiles[step % 2][0], down, slice * OWN + d);
            fragment<TILE, B_DEPTH_LAST>(y, tiles[step % 2][1], across, slice * OWN + d);
#pragma unroll
            for (int k = 0; k < 4; k++)
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int j = 0; j < 4; j++) sum[i][j] += x[i][k] * y[j][k];
        }
        __syncthreads();
    }
    float* sums = tiles[0][0];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float* row = sums + (slice * TILE + vector_of<TILE, A_DEPTH_LAST>(down, i)) * Tile<TILE>::SUM_PITCH;
        if constexpr (!B_DEPTH_LAST) store<4>(row + 4 * across, sum[i]);
        else
#pragma unroll
            for (int j = 0; j < 4; j++) row[vector_of<TILE, true>(across, j)] = sum[i][j];
    }
    __syncthreads();
    return sums;
}

// Write a tile of `product`: v is the sum over the slices, plus bias (width) unless null; out (height, width) = or += v, or
// silu(v) where `silu`. z receives v, unless null.
template <int TILE>
__device__ __forceinline__ void write(float* out, bool add, const float* sums, const float* bias, int row, int column,
                                      int height, int width, bool silu = false, float* z = nullptr) {
    for (int i = threadIdx.x * V; i < TILE * TILE; i += THREADS * V) {
        int m = row + i / TILE, n = column + i % TILE;
        if (m >= height || n >= width) continue;
        float total[V] = {}, part[V];
        if (bias) load<V>(bias + n, total);
#pragma unroll
        for (int slice = 0; slice < Tile<TILE>::SLICES; slice++) {
            load<V>(sums + (slice * TILE + i / TILE) * Tile<TILE>::SUM_PITCH + i % TILE, part);
#pragma unroll
            for (int k = 0; k < V; k++) total[k] += part[k];
        }
        i64 index = (i64)m * width + n;
        if (z) store<V>(z + index, total);
#pragma unroll
        for (int k = 0; silu && k < V; k++) total[k] *= sigmoid(total[k]);
        store<V>(out + index, total, add);
    }
}

// Tiles of 16; K is across.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
forward(const __grid_constant__ Table table, const float* x, int N, int E, int silu) {
    wait_for_previous();
    const Group& group = table.groups[blockIdx.z];
    int row = blockIdx.x * 16, column = blockIdx.y * 16;
    if (column >= group.K) return;
    const float* sums = product<16, true, true>({x, N, E}, {group.weight, group.K, E}, row, column, E);
    write<16>(group.out, false, sums, group.bias, row, column, N, group.K, silu, group.z);
}

// A tile of `forward` would multiply rows that are none, and wait for its copies with few of them under way.
extern "C" __global__ void __launch_bounds__(THREADS)
few_rows(const __grid_constant__ Table table, const float* x, int N, int E, int silu) {
    wait_for_previous();
    const Group& group = table.groups[blockIdx.z];
    multiply_few_rows<V>(x, group.weight, group.bias, N, group.K, E, E, E, [&](int n, int k, float z) {
        i64 i = (i64)n * group.K + k;
        if (group.z) group.z[i] = z;
        group.out[i] = silu ? z * sigmoid(z) : z;
    });
}

// Tiles of 32; E is across.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
dx(const __grid_constant__ Table table, float* partials, int N, int E) {
    wait_for_previous();
    const Group& group = table.groups[blockIdx.z];
    int row = blockIdx.x * 32, column = blockIdx.y * 32;
    Matrix d_preact = {group.out, N, group.K}, weight = {group.weight, group.K, E};
    const float* sums = product<32, true, false>(d_preact, weight, row, column, group.K);
    write<32>(partials + (i64)blockIdx.z * N * E, false, sums, nullptr, row, column, N, E);
}

// Tiles of 64; E is across. One more column of tiles computes the gradients of the biases.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
dweight(const __grid_constant__ Table table, const float* x, int N, int E) {
    wait_for_previous();
    const Group& group = table.groups[blockIdx.z];
    int row = blockIdx.x * 64, column = blockIdx.y * 64;
    if (row >= group.K) return;
    if (column >= E) {
        int k = row + threadIdx.x;
        if (!group.bias || threadIdx.x >= 64 || k >= group.K) return;
        float sum = 0.0f;
#pragma unroll 16
        for (int n = 0; n < N; n++) sum += group.out[(i64)n * group.K + k];
        group.bias[k] = (group.add_bias ? group.bias[k] : 0.0f) + sum;
    } else if (group.weight) {
        const float* sums = product<64, false, false>({group.out, N, group.K}, {x, N, E}, row, column, N);
        write<64>(group.weight, group.add_weight, sums, nullptr, row, column, group.K, E);
    }
}
