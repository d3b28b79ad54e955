// Reductions over a warp and a block, in a fixed order: the same input gives the same bits.
#pragma once
#include "common.cuh"

struct Sum { __device__ static float apply(float a, float b) { return a + b; } __device__ static float identity() { return 0.0f; } };
struct Max { __device__ static float apply(float a, float b) { return fmaxf(a, b); } __device__ static float identity() { return __int_as_float(0xff800000); } };

template <typename Op> __device__ __forceinline__ float warp_reduce(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset >>= 1) x = Op::apply(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Every thread of the block gets the result. blockDim.x is a multiple of 32, at most 1024. May be called several times.
template <typename Op> __device__ __forceinline__ float block_reduce(float x) {
    __shared__ float warps[32];
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    x = warp_reduce<Op>(x);
    __syncthreads();
    if (lane == 0) warps[warp] = x;
    __syncthreads();
    return warp_reduce<Op>(lane < (blockDim.x >> 5) ? warps[lane] : Op::identity());
}
