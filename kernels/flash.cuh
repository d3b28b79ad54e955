// Small arithmetic that every attention kernel shares: powers of two, pairs of rounded numbers.
#pragma once
#include "common.cuh"

constexpr float LOG2E = 1.4426950408889634f;

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// Two elements in one register, `low` first in memory.
template <typename U> __device__ u32 pack_pair(float low, float high);
template <> __device__ __forceinline__ u32 pack_pair<bf16>(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <> __device__ __forceinline__ u32 pack_pair<half>(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
