// out[i] = x[i] in another type: to nearest even for floats, toward zero for integers; `truth`: whether x[i] is not 0; `index`:
// the int nearest to an i64, since of row numbers beyond 32 bits the lower half would be another row.
// x: FROM, out: TO, contiguous, n elements, overwritten. Any launch shape (grid-stride).
//
// split, join: the same of the columns of a matrix and of `parts` matrices of (rows, width), contiguous each.
//   split   out (parts, rows, width) = x (rows, parts, width)
//   join    out (rows, parts, width) = each (rows, width), or zeros where that is null
// pack: 1, or 8 where width is a multiple of 8 and all arrays start at multiples of 16 bytes.
// Launch: rows · parts blocks, of any number of threads.
#include "common.cuh"

template <typename X> constexpr bool integer = false;
template <> constexpr bool integer<int> = true;
template <> constexpr bool integer<u8> = true;
template <> constexpr bool integer<i64> = true;

template <typename To, typename From> __device__ __forceinline__ To convert(From x) {
    if constexpr (integer<From> && integer<To>) return (To)x;
    else return from_float<To>(to_float(x));
}

extern "C" __global__ void cast(const FROM* __restrict__ x, TO* __restrict__ out, i64 n) {
    wait_for_previous();
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        out[i] = convert<TO>(x[i]);
    }
}

template <typename X> __device__ __forceinline__ X in_32_bits(X x) { return x; }
template <> __device__ __forceinline__ i64 in_32_bits<i64>(i64 x) { return min(max(x, -0x80000000ll), 0x7fffffffll); }

extern "C" __global__ void index(const FROM* __restrict__ x, TO* __restrict__ out, i64 n) {
    wait_for_previous();
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        out[i] = convert<TO>(in_32_bits(x[i]));
}

extern "C" __global__ void truth(const FROM* __restrict__ x, TO* __restrict__ out, i64 n) {
    wait_for_previous();
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        out[i] = from_float<TO>(to_float(x[i]) != 0.0f ? 1.0f : 0.0f);
    }
}

template <typename X, int V> struct __align__(sizeof(X) * V > 16 ? 16 : sizeof(X) * V) Elements { X v[V]; };

template <int V> __device__ __forceinline__ void cast_row(const FROM* x, TO* out, int width) {
    for (int c = threadIdx.x * V; c < width; c += blockDim.x * V) {
        Elements<FROM, V> from = {};
        Elements<TO, V> to;
        if (x) from = *reinterpret_cast<const Elements<FROM, V>*>(x + c);
#pragma unroll
        for (int k = 0; k < V; k++) to.v[k] = convert<TO>(from.v[k]);
        *reinterpret_cast<Elements<TO, V>*>(out + c) = to;
    }
}

extern "C" __global__ void split(const FROM* __restrict__ x, TO* __restrict__ out, int parts, int width, int pack) {
    wait_for_previous();
    int rows = gridDim.x / parts, row = blockIdx.x / parts, part = blockIdx.x % parts;
    x += (i64)blockIdx.x * width, out += ((i64)part * rows + row) * width;
    if (pack == 8) cast_row<8>(x, out, width);
    else cast_row<1>(x, out, width);
}

struct Parts { const FROM* each[16]; };

extern "C" __global__ void join(const __grid_constant__ Parts from, TO* __restrict__ out, int parts, int width, int pack) {
    wait_for_previous();
    const FROM* x = from.each[blockIdx.x % parts];
    x += x ? (i64)(blockIdx.x / parts) * width : 0, out += (i64)blockIdx.x * width;
    if (pack == 8) cast_row<8>(x, out, width);
    else cast_row<1>(x, out, width);
}
