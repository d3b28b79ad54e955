// Where the elements of two operands that NumPy's rules broadcast against each other lie. Layout.dims = 0: both are
// contiguous in out's shape; otherwise element strides over out's merged axes (0 where broadcast; n < 2^32).
#pragma once
#include "common.cuh"

struct Layout { int dims, packed, sizes[6], a[6], b[6]; };

__device__ __forceinline__ void locate(const Layout& layout, u32 i, i64& a, i64& b) {
    a = b = 0;
#pragma unroll
    for (int d = 5; d >= 0; d--) {
        if (d < layout.dims) {
            u32 rest = i / (u32)layout.sizes[d], k = i - rest * (u32)layout.sizes[d];
            a += (i64)k * layout.a[d];
            b += (i64)k * layout.b[d];
            i = rest;
        }
    }
}

// f(i, place in a, place in b) for each of n elements of out; any launch shape.
template <typename F> __device__ __forceinline__ void for_each_pair(i64 n, const Layout& layout, F f) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        i64 at_a = i, at_b = i;
        if (layout.dims > 0) locate(layout, (u32)i, at_a, at_b);
        f(i, at_a, at_b);
    }
}
