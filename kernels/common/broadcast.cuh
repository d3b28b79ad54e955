// Where the elements of two operands that NumPy's rules broadcast against each other lie.
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
