// Comparisons of two broadcast operands, and logic on them, in which all but 0 is true: out[i] is 1 or 0.
// a, b: T; null stands for the number, `number` where T is a floating type, `whole` where it is not. Floats compare as
// float, integers as 64 bits. out: u8 (n), overwritten. Layout: see broadcast.cuh.
// Launch: any shape (grid-stride).
#include "broadcast.cuh"

__device__ __forceinline__ float widened(float x) { return x; }
__device__ __forceinline__ float widened(bf16 x) { return to_float(x); }
__device__ __forceinline__ float widened(half x) { return to_float(x); }
__device__ __forceinline__ i64 widened(u8 x) { return x; }
__device__ __forceinline__ i64 widened(int x) { return x; }
__device__ __forceinline__ i64 widened(i64 x) { return x; }
__device__ __forceinline__ float chosen(float, float number, i64) { return number; }
__device__ __forceinline__ i64 chosen(i64, float, i64 whole) { return whole; }

typedef decltype(widened(T{})) Wide;

// out[i] = f(x[i], y[i]); operands that lie as out does are read in packs.
template <class F>
__device__ __forceinline__ void compare(u8* out, const T* x, const T* y, Wide scalar, i64 n, const Layout& layout, F f) {
    constexpr int SIZE = Pack<T>::SIZE;
    struct __align__(SIZE) Bytes { u8 v[SIZE]; };
    i64 packs = layout.dims || (u64)out % SIZE || ((u64)x | (u64)y) % 16 ? 0 : n / SIZE;
    for (i64 p = (i64)blockIdx.x * blockDim.x + threadIdx.x; p < packs; p += (i64)gridDim.x * blockDim.x) {
        Pack<T> a = x ? load_pack(x + p * SIZE) : Pack<T>{}, b = y ? load_pack(y + p * SIZE) : Pack<T>{};
        Bytes bytes;
#pragma unroll
        for (int k = 0; k < SIZE; k++) bytes.v[k] = f(x ? widened(a.v[k]) : scalar, y ? widened(b.v[k]) : scalar);
        *reinterpret_cast<Bytes*>(out + p * SIZE) = bytes;
    }
    i64 done = packs * SIZE;
    for_each_pair(n - done, layout, [=](i64 i, i64 at_x, i64 at_y) {
        out[done + i] = f(x ? widened(x[done + at_x]) : scalar, y ? widened(y[done + at_y]) : scalar);
    });
}

#define COMPARE(name, value)                                                                                             \
    extern "C" __global__ void name(u8* out, const T* x, const T* y, float number, i64 whole, i64 n, Layout layout) {    \
        wait_for_previous();                                                                                             \
        compare(out, x, y, chosen(Wide{}, number, whole), n, layout, [](Wide a, Wide b) { return value; });              \
    }

COMPARE(less, a < b)
COMPARE(less_equal, a <= b)
COMPARE(greater, a > b)
COMPARE(greater_equal, a >= b)
COMPARE(equal, a == b)
COMPARE(not_equal, a != b)
COMPARE(logical_and, a != 0 && b != 0)
COMPARE(logical_or, a != 0 || b != 0)
COMPARE(logical_xor, (a != 0) != (b != 0))
