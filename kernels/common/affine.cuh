// Group norm's map of a channel, z = gamma * xhat + offset with xhat = (x - mean) * rstd, and SiLU behind it; shared by
// group_norm.cuh and by the convolution whose result is the gradient of silu(z).
#pragma once
#include "common.cuh"

#define AFFINE const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ scale, \
               const float* __restrict__ shift, const float* __restrict__ mean, const float* __restrict__ rstd, int groups

// What channel c of image n is modulated by: z = gamma * xhat + offset. What is read is first used in the functions, so that
// a kernel may ask for more before it has come.
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

// z = gain * (x - mean) + offset. float32 takes x - mean first, as gain * x + const would lose a large mean's digits, and
// computes SiLU to its own precision. A 16-bit x has no such digits: there const is one, and SiLU is made of the hardware's
// tanh, whose error (5e-4) is below their rounding; as sigmoid(z) = (1 + tanh(z / 2)) / 2 the map gives z / 2. Half the
// instructions are saved: these kernels are bound by them. What leads to y has no sum of a product but by fmaf: the compiler
// would fuse others here and not there, and backward's y would not have the forward's bits.
constexpr bool EXACT = sizeof(T) == 4;
constexpr float SCALE = EXACT ? 1.0f : 0.5f;
__device__ __forceinline__ float centre_of(float mean) { return EXACT ? mean : 0.0f; }
// Of SCALE * z = x * (x - centre) + y.
__device__ __forceinline__ float2 affine_of(const Modulation& own, float mean, float rstd) {
    float gain = SCALE * own.gamma() * rstd;
    return make_float2(gain, fmaf(-gain, mean - centre_of(mean), SCALE * own.offset()));
}

// y = z or silu(z) and its slope by z, from h = SCALE * z.
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
