// Functions of two broadcast operands. NAME_forward writes out; NAME_da and NAME_db write or add (`accumulate`) the
// gradient of one operand in the shape of out, before the sum over broadcast axes.
// out, dout, da, db: T, contiguous, n elements. Where `wide` is not null the gradient goes there instead, in float: a sum
// over broadcast axes follows, which may cancel. a, b: T; null stands for the number `scalar`. Layout.dims = 0: a and b
// are contiguous in out's shape. Otherwise element strides over out's merged axes (0 where broadcast; n < 2^32), and
// `packed` says that packs of 16 bytes never cross a row and start aligned wherever the arrays do.
// where_*: mask u8, same shape as out.
// Launch: 256 threads, one pack each (any shape works: grid-stride).
#include "broadcast.cuh"

// N neighbours of an operand: the scalar, one value repeated, or a pack.
template <int N> __device__ __forceinline__ void load(const T* p, i64 i, bool repeat, float scalar, float (&v)[N]) {
    if (N > 1 && p && !repeat) {
        Pack<T> pack = load_pack(p + i);
#pragma unroll
        for (int k = 0; k < N; k++) v[k] = to_float(pack.v[k]);
    } else {
        float value = p ? to_float(p[i]) : scalar;
#pragma unroll
        for (int k = 0; k < N; k++) v[k] = value;
    }
}

template <int N, typename F>
__device__ __forceinline__ void combine(T* out, float* wide, int accumulate, i64 begin, i64 end, const T* dout, const T* a, const T* b,
                                        float scalar, const Layout& layout, F f) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    bool strided = layout.dims > 0;
    bool repeat_a = strided && layout.a[layout.dims - 1] == 0, repeat_b = strided && layout.b[layout.dims - 1] == 0;
    for (i64 i = begin + thread * N; i < end; i += threads * N) {
        i64 at_a = i, at_b = i;
        if (strided) locate(layout, (u32)i, at_a, at_b);
        float g[N], x[N], y[N], old[N];
        load<N>(dout, i, false, 0.0f, g);
        load<N>(a, at_a, repeat_a, scalar, x);
        load<N>(b, at_b, repeat_b, scalar, y);
        load<N>(accumulate ? out : nullptr, i, false, 0.0f, old);
        if (wide) {
#pragma unroll
            for (int k = 0; k < N; k++) wide[i + k] = f(g[k], x[k], y[k]);
        } else if constexpr (N > 1) {
            Pack<T> result;
#pragma unroll
            for (int k = 0; k < N; k++) result.v[k] = from_float<T>(old[k] + f(g[k], x[k], y[k]));
            store_pack(out + i, result);
        } else {
            out[i] = from_float<T>(old[0] + f(g[0], x[0], y[0]));
        }
    }
}

template <typename F>
__device__ __forceinline__ void binary(T* out, float* wide, int accumulate, i64 n, const T* dout, const T* a, const T* b, float scalar,
                                       const Layout& layout, F f) {
    constexpr int SIZE = Pack<T>::SIZE;
    bool aligned = ((u64)out | (u64)dout | (u64)a | (u64)b) % 16 == 0;
    i64 packed = aligned && (layout.dims == 0 || layout.packed) ? n / SIZE * SIZE : 0;
    combine<SIZE>(out, wide, accumulate, 0, packed, dout, a, b, scalar, layout, f);
    combine<1>(out, wide, accumulate, packed, n, dout, a, b, scalar, layout, f);
}

#define FORWARD(name, value)                                                                                       \
    extern "C" __global__ void name##_forward(const T* a, const T* b, float scalar, T* out, i64 n, Layout layout) { \
        wait_for_previous();                                                                                        \
        binary(out, nullptr, 0, n, nullptr, a, b, scalar, layout, [](float, float a, float b) { return value; });           \
    }
#define GRADIENT(name, value)                                                                                            \
    extern "C" __global__ void name(const T* dout, const T* a, const T* b, float scalar, T* dx, float* wide,             \
                                    int accumulate, i64 n, Layout layout) {                                              \
        wait_for_previous();                                                                                             \
        binary(dx, wide, accumulate, n, dout, a, b, scalar, layout, [](float dout, float a, float b) { return value; }); \
    }

// dout where a is larger, half of it for equals, else 0, of an infinite dout too.
__device__ __forceinline__ float of_larger(float dout, float a, float b) { return a > b ? dout : a == b ? 0.5f * dout : 0.0f; }

// x / length², 0 of no length; the square may overflow.
__device__ __forceinline__ float over_square(float x, float length) { return length == 0.0f ? 0.0f : x / length / length; }

__device__ __forceinline__ bool apart(float rest, float b) { return rest != 0.0f && (rest < 0.0f) != (b < 0.0f); }
// NumPy's //, which is exact where a / b is rounded up to a whole number, and its %, which has b's sign.
__device__ __forceinline__ float whole_quotient(float a, float b) {
    float rest = fmodf(a, b);
    return b == 0.0f ? a / b : rintf((a - rest) / b) - (apart(rest, b) ? 1.0f : 0.0f);
}
__device__ __forceinline__ float remainder_of(float a, float b) {
    float rest = fmodf(a, b);
    return apart(rest, b) ? rest + b : rest;
}

FORWARD(add, a + b)
FORWARD(subtract, a - b)
FORWARD(multiply, a * b)
GRADIENT(multiply_da, dout * b)
GRADIENT(multiply_db, dout * a)
FORWARD(divide, a / b)
GRADIENT(divide_da, dout / b)
GRADIENT(divide_db, -dout * (a / b) / b)
FORWARD(power, powf(a, b))
GRADIENT(power_da, b == 0.0f ? 0.0f : dout * (b * powf(a, b - 1.0f)))
GRADIENT(power_db, a == 0.0f && b >= 0.0f ? 0.0f : dout * (powf(a, b) * logf(a)))
FORWARD(arctan2, atan2f(a, b))
GRADIENT(arctan2_da, dout * over_square(b, hypotf(a, b)))
GRADIENT(arctan2_db, -dout * over_square(a, hypotf(a, b)))
FORWARD(hypot, hypotf(a, b))
GRADIENT(hypot_da, dout * a / hypotf(a, b))
GRADIENT(hypot_db, dout * b / hypotf(a, b))
FORWARD(floordivide, whole_quotient(a, b))
GRADIENT(floordivide_da, 0.0f)
GRADIENT(floordivide_db, 0.0f)
FORWARD(remainder, remainder_of(a, b))
GRADIENT(remainder_da, dout)
GRADIENT(remainder_db, -dout * whole_quotient(a, b))
FORWARD(maximum, a > b || a != a ? a : b)
GRADIENT(maximum_da, of_larger(dout, a, b))
GRADIENT(maximum_db, of_larger(dout, b, a))
FORWARD(minimum, a < b || a != a ? a : b)
GRADIENT(minimum_da, of_larger(dout, b, a))
GRADIENT(minimum_db, of_larger(dout, a, b))

// out = a + (b - a) * weight; a has out's shape, and `layout` is of b and weight. b of lerp_da and lerp_db is the weight.
extern "C" __global__ void lerp_forward(const T* a, const T* b, const T* weight, float scalar, T* out, i64 n, Layout layout) {
    wait_for_previous();
    binary(out, nullptr, 0, n, a, b, weight, scalar, layout, [](float a, float b, float weight) { return a + (b - a) * weight; });
}
GRADIENT(lerp_da, dout * (1.0f - b))
GRADIENT(lerp_db, dout * b)
GRADIENT(lerp_dweight, dout * (b - a))

// The mask of a pack of T.
struct __align__(Pack<T>::SIZE) Mask { u8 v[Pack<T>::SIZE]; };
__device__ __forceinline__ Pack<T> load_or(const T* p, i64 i, float scalar) {
    if (p) return load_pack(p + i);
    Pack<T> pack;
#pragma unroll
    for (int k = 0; k < Pack<T>::SIZE; k++) pack.v[k] = from_float<T>(scalar);
    return pack;
}
// How many of n elements are in packs, where all addresses allow them.
__device__ __forceinline__ i64 in_packs(i64 n, const u8* mask, u64 others) {
    return others % 16 || (u64)mask % Pack<T>::SIZE ? 0 : n / Pack<T>::SIZE * Pack<T>::SIZE;
}

extern "C" __global__ void where_forward(const u8* mask, const T* a, const T* b, float scalar_a, float scalar_b, T* out, i64 n) {
    wait_for_previous();
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    i64 packed = in_packs(n, mask, (u64)a | (u64)b | (u64)out);
    for (i64 i = thread * Pack<T>::SIZE; i < packed; i += threads * Pack<T>::SIZE) {
        Mask chosen = *reinterpret_cast<const Mask*>(mask + i);
        Pack<T> x = load_or(a, i, scalar_a), y = load_or(b, i, scalar_b);
#pragma unroll
        for (int k = 0; k < Pack<T>::SIZE; k++) x.v[k] = chosen.v[k] ? x.v[k] : y.v[k];
        store_pack(out + i, x);
    }
    for (i64 i = packed + thread; i < n; i += threads) {
        const T* from = mask[i] ? a : b;
        out[i] = from ? from[i] : from_float<T>(mask[i] ? scalar_a : scalar_b);
    }
}
// dx = dout where (mask != 0) == chosen, else 0.
extern "C" __global__ void where_backward(const u8* mask, const T* dout, T* dx, int chosen, int accumulate, i64 n) {
    wait_for_previous();
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    i64 packed = in_packs(n, mask, (u64)dout | (u64)dx);
    auto value = [=](u8 mask, T dout, T dx) {
        float own = (mask != 0) == (chosen != 0) ? to_float(dout) : 0.0f;
        return from_float<T>(accumulate ? to_float(dx) + own : own);
    };
    for (i64 i = thread * Pack<T>::SIZE; i < packed; i += threads * Pack<T>::SIZE) {
        Mask own = *reinterpret_cast<const Mask*>(mask + i);
        Pack<T> from = load_pack(dout + i), to = load_or(accumulate ? dx : nullptr, i, 0.0f);
#pragma unroll
        for (int k = 0; k < Pack<T>::SIZE; k++) to.v[k] = value(own.v[k], from.v[k], to.v[k]);
        store_pack(dx + i, to);
    }
    for (i64 i = packed + thread; i < n; i += threads) dx[i] = value(mask[i], dout[i], accumulate ? dx[i] : T{});
}
