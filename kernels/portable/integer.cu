// Arithmetic of integers, and of the bits of bools: out[i] = value(a, b), cut to T, so that it wraps around as NumPy's does.
// a, b: T; null stands for `number`. All is computed in 64 bits. out: T (n), overwritten. Layout: see broadcast.cuh.
// Launch: any shape (grid-stride).
#include "broadcast.cuh"

#define INTEGER(name, value)                                                                                        \
    extern "C" __global__ void name(T* out, const T* x, const T* y, i64 number, i64 n, Layout layout) {             \
        wait_for_previous();                                                                                        \
        for_each_pair(n, layout, [=](i64 i, i64 at_x, i64 at_y) {                                                   \
            i64 a = x ? (i64)x[at_x] : number, b = y ? (i64)y[at_y] : number;                                       \
            out[i] = (T)(value);                                                                                    \
        });                                                                                                         \
    }

// Rounded down, 0 where b is 0. The least integer has no opposite in 64 bits: it stays as it is.
__device__ __forceinline__ i64 whole_quotient(i64 a, i64 b) {
    if (b == 0) return 0;
    if (b == -1) return (i64)(0 - (u64)a);
    return a / b - (a % b != 0 && (a < 0) != (b < 0) ? 1 : 0);
}
// With b's sign, 0 where b is 0.
__device__ __forceinline__ i64 rest_of(i64 a, i64 b) {
    if (b == 0 || b == -1) return 0;
    i64 rest = a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
// By squaring; of a negative b the whole part of a ** b, and 0 where a is 0.
__device__ __forceinline__ i64 raised(i64 a, i64 b) {
    if (b < 0) return a == 1 || a == -1 ? (b % 2 == 0 ? 1 : a) : 0;
    u64 result = 1;
    for (u64 base = (u64)a; b > 0; b >>= 1, base *= base)
        if (b & 1) result *= base;
    return (i64)result;
}

// Unsigned where C leaves an overflow undefined.
INTEGER(add, (u64)a + (u64)b)
INTEGER(subtract, (u64)a - (u64)b)
INTEGER(multiply, (u64)a * (u64)b)
INTEGER(floor_divide, whole_quotient(a, b))
INTEGER(mod, rest_of(a, b))
INTEGER(power, raised(a, b))
INTEGER(maximum, a > b ? a : b)
INTEGER(minimum, a < b ? a : b)
INTEGER(bitwise_and, a & b)
INTEGER(bitwise_or, a | b)
INTEGER(bitwise_xor, a ^ b)
// Of one operand: b is the number 0.
INTEGER(absolute, a < 0 ? (u64)b - (u64)a : (u64)a)
INTEGER(sign, (a > b) - (a < b))
// As NumPy's, for any number of places: those shifted out are gone, and b < 0 counts as many.
INTEGER(left_shift, (u64)b < 64 ? (u64)a << b : 0)
INTEGER(right_shift, a >> ((u64)b < 64 ? b : 63))

// out = mask ? a : b, all of one shape; null stands for the number.
extern "C" __global__ void where(const u8* mask, const T* a, const T* b, i64 number_a, i64 number_b, T* out, i64 n) {
    wait_for_previous();
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) {
        const T* from = mask[i] ? a : b;
        out[i] = from ? from[i] : (T)(mask[i] ? number_a : number_b);
    }
}
