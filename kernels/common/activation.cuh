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
__device__ __forceinline__ float normal_cdf(float x) { return 0.5f * (1.0f + erff(x * 0.70710678f)); }
__device__ __forceinline__ float normal_pdf(float x) { return 0.39894228f * exp2_fast(-0.72134752f * x * x); }

// Each activation is x times a gate. GELU by tanh is x · sigmoid(2u), 2u = sqrt(8 / pi) · (x + 0.044715 x³), as
// (1 + tanh u) / 2 is sigmoid(2u); 2u is x · ln 2 · tanh_rate.
__device__ __forceinline__ float tanh_rate(float x) { return 2.3022082f + 0.10294324f * x * x; }

template <int KIND> __device__ __forceinline__ float gate_of(float x) {
    if (KIND == SILU) return sigmoid_base_2(1.44269504f * x);
    if (KIND == GELU) return normal_cdf(x);
    return sigmoid_base_2(x * tanh_rate(x));
}

template <int KIND> __device__ __forceinline__ float activate(float x) { return x * gate_of<KIND>(x); }

struct Activated { float value, slope; };

template <int KIND> __device__ __forceinline__ Activated activate_with_slope(float x) {
    float gate = gate_of<KIND>(x), value = x * gate;
    if (KIND == GELU) return {value, gate + x * normal_pdf(x)};
    float inner = KIND == SILU ? 1.0f : 2.0794415f * tanh_rate(x) - 3.1915382f;  // the derivative of what the sigmoid is of
    return {value, fmaf(fmaf(-value, gate, value), inner, gate)};
}
