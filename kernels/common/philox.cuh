// Philox4x32-10 (Salmon et al. 2011), with the same bits as cudiff/ops/random.py; uniform and normal numbers from its 32-bit
// words.
#pragma once
#include "common.cuh"

__device__ __forceinline__ uint4 philox(u32 c0, u32 c1, u32 c2, u32 c3, u64 seed) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 high0 = __umulhi(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        u32 high1 = __umulhi(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

// A multiple of 2^-24 in [0, 1).
__device__ __forceinline__ float to_uniform(u32 bits) { return (float)(bits >> 8) * 5.9604644775390625e-8f; }

// Two independent normal numbers from two words (Box-Muller). logf and sincospif are accurate to 1 ulp; __logf and the other
// intrinsics are not.
__device__ __forceinline__ float2 to_normal(u32 bits1, u32 bits2) {
    float radius = sqrtf(-2.0f * logf(to_uniform(bits1) + 5.9604644775390625e-8f));
    float sine, cosine;
    sincospif(2.0f * to_uniform(bits2), &sine, &cosine);
    return make_float2(radius * cosine, radius * sine);
}
