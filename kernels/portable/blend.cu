// A frame of bytes: out[i] = (1 - share) v + share last[i], v = 127.5 x[i] + 127.5, cut to 0..255, to nearest even.
// x: T, whose NaN becomes 0; last, out: bytes; contiguous, n elements, any alignment; out is overwritten, and may be last.
// share: one float.
// Launch: 256 threads, one element each (any shape works: grid-stride).
#include "common.cuh"

extern "C" __global__ void blend(const T* __restrict__ x, const u8* last, const float* share, u8* out, i64 n) {
    wait_for_previous();
    float of_last = *share;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        float value = __fadd_rn(__fmul_rn(to_float(x[i]), 127.5f), 127.5f);  // not fused: halves round as in NumPy
        value = (1.0f - of_last) * value + of_last * (float)last[i];
        out[i] = (u8)rintf(fminf(fmaxf(value, 0.0f), 255.0f));
    }
}
