// What every attention kernel uses: log2(e), a lane's place in a fragment, and reductions over the four lanes that hold a row.
#pragma once
#include "common.cuh"

constexpr float LOG2E = 1.4426950408889634f;

#define LANE (threadIdx.x & 31)
#define GROUP (LANE >> 2)
#define QUAD (LANE & 3)

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float sum_quad(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float max_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
