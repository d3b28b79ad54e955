// A byte of a frame: (1 - share) v + share last, v = 127.5 x + 127.5, cut to 0..255, to nearest even. NaN becomes 0.
#pragma once
#include "common.cuh"

__device__ __forceinline__ u8 blended(float x, u8 last, float share) {
    float value = __fadd_rn(__fmul_rn(x, 127.5f), 127.5f);  // not fused: halves round as in NumPy
    value = (1.0f - share) * value + share * (float)last;
    return (u8)rintf(fminf(fmaxf(value, 0.0f), 255.0f));
}
