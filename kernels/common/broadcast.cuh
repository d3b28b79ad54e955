// The places of the elements of two operands a and b that are broadcast against each other by NumPy's rules.
//
// Layout.dims = 0: both are contiguous and have out's shape. Otherwise `sizes` are out's merged axes, and `a` and `b` are the
// operands' strides over them in elements, 0 where broadcast; out then has fewer than 2^32 elements.
#pragma once
#include "common.cuh"

struct Layout { int dims, packed, sizes[6], a[6], b[6]; };

__device__ __forceinline__ void locate(const Layout& layout, u32 i, i64& a, i64& b) {
    a = b = 0;
#pragma unroll
    for (int d = 5; d >= 0; d--) {
        if (d < layout.dims) {
            u32 rest = d ? i / (u32)layout.sizes[d] : 0, k = i - rest * (u32)layout.sizes[d];
            a += (i64)k * layout.a[d];
            b += (i64)k * layout.b[d];
            i = rest;
        }
    }
}

// Call f(i, place in a, place in b) for each of the n elements of out. A grid-stride loop: any launch shape.
template <typename F> __device__ __forceinline__ void for_each_pair(i64 n, const Layout& layout, F f) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        i64 at_a = i, at_b = i;
        if (layout.dims > 0) locate(layout, (u32)i, at_a, at_b);
        f(i, at_a, at_b);
    }
}
