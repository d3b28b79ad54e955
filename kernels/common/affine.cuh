// Group norm's affine map of a channel, z = gamma * xhat + offset with xhat = (x - mean) * rstd, and the SiLU that follows it.
// Used by group_norm.cuh, and by convolutions whose result is the gradient of silu(z).
#pragma once
#include "common.cuh"

#define AFFINE const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ scale, \
               const float* __restrict__ shift, const float* __restrict__ mean, const float* __restrict__ rstd, int groups

// gamma and offset of channel c of image n. The constructor only loads; the member functions are the first to use what it
// loaded, so that a kernel can start other loads before these have arrived.
struct Modulation {
    float weight = 0.0f, bias = 0.0f, scale = 0.0f, shift = 0.0f;
    Modulation() = default;
    __device__ __forceinline__ Modulation(int n, int c, int C, const float* weights, const float* biases, const float* scales,
                                          const float* shifts) {
        i64 i = (i64)n * C + c;
        weight = weights[c], bias = biases[c];
        if (scales) scale = scales[i];
        if (shifts) shift = shifts[i];
    }
    __device__ __forceinline__ float factor() const { return 1.0f + scale; }
    __device__ __forceinline__ float gamma() const { return weight * factor(); }
    __device__ __forceinline__ float offset() const { return fmaf(bias, factor(), shift); }
};

// The map is SCALE * z = gain * (x - centre) + offset.
//   float32  centre is the mean: gain * x + const would lose the digits of x where the mean is large. SCALE is 1, and SiLU is
//            computed to float's precision.
//   16 bits  x has no such digits: centre is 0. SiLU uses the hardware's tanh, whose error (5e-4) is below the rounding to 16
//            bits. As sigmoid(z) = (1 + tanh(z / 2)) / 2, SCALE is 1/2. This takes half the instructions, which are what
//            limits these kernels.
// Every multiply-add on the way to y is an explicit fmaf. The compiler would fuse some in one kernel and not in another: the
// y that the backward recomputes would then differ in its bits from the forward's.
constexpr bool EXACT = sizeof(T) == 4;
constexpr float SCALE = EXACT ? 1.0f : 0.5f;
__device__ __forceinline__ float centre_of(float mean) { return EXACT ? mean : 0.0f; }
// (gain, offset) of SCALE * z = gain * (x - centre) + offset.
__device__ __forceinline__ float2 affine_of(const Modulation& own, float mean, float rstd) {
    float gain = SCALE * own.gamma() * rstd;
    return make_float2(gain, fmaf(-gain, mean - centre_of(mean), SCALE * own.offset()));
}

// From h = SCALE * z: y = silu(z), or z if not `silu`, and its derivative `slope` = dy/dz.
__device__ __forceinline__ void activate(float h, bool silu, float& y, float& slope) {
    y = h / SCALE, slope = 1.0f;
    if (!silu) return;
    if constexpr (EXACT) {
        float e, s;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(h * -1.44269504f));
        asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(e + 1.0f));
        y = h * s;
        slope = s + y - y * s;
    } else {
        float t;
        asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(h));
        y = fmaf(h, t, h);
        slope = fmaf(fmaf(h, fmaf(-t, t, 1.0f), t), 0.5f, 0.5f);
    }
}
__device__ __forceinline__ float silu_slope(float h) {
    float y, slope;
    activate(h, true, y, slope);
    return slope;
}
