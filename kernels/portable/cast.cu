// out[i] = x[i] in another type: to nearest even for floats, toward zero for integers; `truth`: whether x[i] is not 0; `index`:
// the int nearest to an i64, since of row numbers beyond 32 bits the lower half would be another row.
// x: FROM, out: TO, contiguous, n elements, overwritten. Any launch shape (grid-stride).
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
