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

#define COMPARE(name, value)                                                                                             \
    extern "C" __global__ void name(u8* out, const T* x, const T* y, float number, i64 whole, i64 n, Layout layout) {    \
        wait_for_previous();                                                                                             \
        auto scalar = chosen(decltype(widened(T{})){}, number, whole);                                                   \
        for_each_pair(n, layout, [=](i64 i, i64 at_x, i64 at_y) {                                                        \
            auto a = x ? widened(x[at_x]) : scalar, b = y ? widened(y[at_y]) : scalar;                                   \
            out[i] = (value) ? 1 : 0;                                                                                    \
        });                                                                                                              \
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
