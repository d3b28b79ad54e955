// A frame of bytes: out[i] = `blended` of x[i] and last[i].
// x: T; last, out: bytes; contiguous, n elements, any alignment; out is overwritten, and may be last. share: one float.
// Launch: 256 threads, one element each (any shape works: grid-stride).
#include "blend.cuh"

extern "C" __global__ void blend(const T* __restrict__ x, const u8* last, const float* share, u8* out, i64 n) {
    wait_for_previous();
    float of_last = *share;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        out[i] = blended(to_float(x[i]), last[i], of_last);
}
