// Activations and their slopes, for products that apply them to their results. Errors of a few units in float's last place.
#pragma once
#include "common.cuh"

enum Activation { NONE, SILU, GELU, GELU_TANH };

// 1 / (1 + 2^-x)
__device__ __forceinline__ float sigmoid_base_2(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(1.0f + exp2_fast(-x)));
    return y;
}
__device__ __forceinline__ float quick_sigmoid(float x) { return sigmoid_base_2(1.44269504f * x); }
__device__ __forceinline__ float normal_cdf(float x) { return 0.5f * (1.0f + erff(x * 0.70710678f)); }
__device__ __forceinline__ float normal_pdf(float x) { return 0.39894228f * exp2_fast(-0.72134752f * x * x); }

// GELU by tanh is x · sigmoid(2u), 2u = sqrt(8 / pi) · (x + 0.044715 x³), as (1 + tanh u) / 2 is sigmoid(2u).
__device__ __forceinline__ float gelu_gate(float x) { return sigmoid_base_2(x * (2.3022082f + 0.10294324f * x * x)); }

template <int KIND> __device__ __forceinline__ float activate(float x) {
    if (KIND == SILU) return x * quick_sigmoid(x);
    if (KIND == GELU) return x * normal_cdf(x);
    return x * gelu_gate(x);
}

template <int KIND> __device__ __forceinline__ float activation_slope(float x) {
    if (KIND == GELU) return normal_cdf(x) + x * normal_pdf(x);
    float gate = KIND == SILU ? quick_sigmoid(x) : gelu_gate(x);
    float inner = KIND == SILU ? 1.0f : 1.5957691f + 0.21406445f * x * x;
    return gate * (1.0f + x * (1.0f - gate) * inner);
}
