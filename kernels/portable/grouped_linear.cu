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
// ALIGNED=1: E, every K and every address are multiples of 16 bytes. The other constants are gemm.cuh's, with T and OUT float.
//
// A block computes one tile of one group's result. Sums are in a fixed order.
// Launch: grid (tiles down, tiles across, groups) for the largest group, threads and shared memory as in gemm.cuh. dweight has
// one more tile across. few_rows 256 threads, grid (ceil(K / 8), 1, groups), of more than two rows half as many. Where a group
// is smaller, its blocks beyond have nothing to do.
#include "few_rows.cuh"
#include "gemm.cuh"

constexpr int V = ALIGNED ? 4 : 1;

// In `dx` and `dweight` out is d_preact. In `dweight` weight and bias are dweight and dbias.
struct Group {
    float *weight, *bias, *out, *z;
    int K, add_weight, add_bias;
};
struct Table {
    Group groups[64];
};

// A matrix in global memory, whose depth is its last axis or its first.
template <bool DEPTH_LAST> struct Matrix {
    const float* data;
    int height, width;
    template <int EXTENT> __device__ __forceinline__ MatrixLoader<DEPTH_LAST, EXTENT, ALIGNED> loader(int first) const {
        return {data, width, first, DEPTH_LAST ? height : width, 0, DEPTH_LAST ? width : height};
    }
};

// acc = the tile of a · b at (row, column).
template <bool A_DEPTH_LAST, bool B_DEPTH_LAST>
__device__ __forceinline__ void multiply_tile(Accumulators& acc, Matrix<A_DEPTH_LAST> a, Matrix<B_DEPTH_LAST> b, int row, int column) {
    auto load_a = a.template loader<BM>(row);
    auto load_b = b.template loader<BN>(column);
    multiply(acc, load_a, load_b, CEIL_DIV(A_DEPTH_LAST ? a.width : a.height, BK));
}

// Store a tile at (row, column): out (height, width) = or += acc + bias.
__device__ __forceinline__ void store_tile(Accumulators& acc, float* out, bool add, const float* bias, int row, int column, int height,
                                           int width) {
    Output{out, bias, nullptr, add ? out : nullptr, height, width, width, 1, nullptr}.store(acc, row, column);
}

extern "C" __global__ void __launch_bounds__(THREADS)
forward(const __grid_constant__ Table table, const float* x, int N, int E, int silu) {
    wait_for_previous();
    const Group& group = table.groups[blockIdx.z];
    int row = blockIdx.x * BM, column = blockIdx.y * BN;
    if (column >= group.K) return;
    Accumulators acc = {};
    multiply_tile<true, true>(acc, {x, N, E}, {group.weight, group.K, E}, row, column);
    if (group.z) store_tile(acc, group.z, false, group.bias, row, column, N, group.K);
    if (silu) {
        int first = column + threadIdx.x / 32 % WN * (BN / WN) + threadIdx.x % 4 * 2;
#pragma unroll
        for (int j = 0; j < NI; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int k = first + j * 8 + e;
                float bias = k < group.K ? group.bias[k] : 0.0f;
#pragma unroll
                for (int i = 0; i < 2 * MI; i++) {
                    float& z = acc[i / 2][j][i % 2 * 2 + e];
                    z += bias, z *= sigmoid(z);
                }
            }
    }
    store_tile(acc, group.out, false, silu ? nullptr : group.bias, row, column, N, group.K);
}

// A tile of `forward` would multiply rows that are none, and wait for its copies with few of them under way.
extern "C" __global__ void __launch_bounds__(256)
few_rows(const __grid_constant__ Table table, const float* x, int N, int E, int silu) {
    wait_for_previous();
    const Group& group = table.groups[blockIdx.z];
    multiply_few_rows<V>(x, group.weight, group.bias, N, group.K, E, E, E, [&](int n, int k, float z) {
        i64 i = (i64)n * group.K + k;
        if (group.z) group.z[i] = z;
        group.out[i] = silu ? z * sigmoid(z) : z;
    });
}

extern "C" __global__ void __launch_bounds__(THREADS) dx(const __grid_constant__ Table table, float* partials, int N, int E) {
    wait_for_previous();
    const Group& group = table.groups[blockIdx.z];
    int row = blockIdx.x * BM, column = blockIdx.y * BN;
    Accumulators acc = {};
    multiply_tile<true, false>(acc, {group.out, N, group.K}, {group.weight, group.K, E}, row, column);
    store_tile(acc, partials + (i64)blockIdx.z * N * E, false, nullptr, row, column, N, E);
}

// The last column of tiles computes the gradients of the biases.
extern "C" __global__ void __launch_bounds__(THREADS) dweight(const __grid_constant__ Table table, const float* x, int N, int E) {
    wait_for_previous();
    const Group& group = table.groups[blockIdx.z];
    int row = blockIdx.x * BM, column = blockIdx.y * BN;
    if (row >= group.K) return;
    if (column >= E) {
        int k = row + threadIdx.x;
        if (!group.bias || threadIdx.x >= BM || k >= group.K) return;
        float sum = 0.0f;
#pragma unroll 16
        for (int n = 0; n < N; n++) sum += group.out[(i64)n * group.K + k];
        group.bias[k] = (group.add_bias ? group.bias[k] : 0.0f) + sum;
    } else if (group.weight) {
        Accumulators acc = {};
        multiply_tile<false, false>(acc, {group.out, N, group.K}, {x, N, E}, row, column);
        store_tile(acc, group.weight, group.add_weight, nullptr, row, column, group.K, E);
    }
}
