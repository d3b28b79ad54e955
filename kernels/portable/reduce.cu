// Reductions and cumulative sums over the middle axis of x, seen as [outer][reduce][inner], and their gradients.
//
//   out = scale * reduction of x, or += where `accumulate`; the *_whole kernels take no notice of `scale` and `accumulate`
//
//   x, dout, dx   T; variance_backward's dout OUT.
//   out           OUT [outer][gridDim.y][inner]. Blocks with blockIdx.y = y reduce the y-th chunk, `chunk` long, of the middle
//                 axis. Where there are several, a second launch reduces their results.
// Everything is accumulated in float; in the *_whole kernels, whose T and OUT hold integers, in 64-bit integers. The order
// depends on the shape and on VEC. NaN wins over every number in maximum and minimum.
// VEC=1: inner and the address of x are multiples of a 16-byte pack; each thread reads one pack at a time. In the *_backward
// kernels also where inner is 1 and `reduce` is such a multiple; dx's address is.
// Launch: block (columns, lanes, rows), powers of two, product at most 256; gridDim.x = CEIL_DIV(outer, rows) *
// CEIL_DIV(inner, columns * V). cumsum as it says. The *_backward kernels are grid-stride loops: any launch shape.
#include "common.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;
struct __align__(V * sizeof(T)) Columns { T v[V]; };

struct Add {
    static __device__ float identity() { return 0.0f; }
    static __device__ float apply(float a, float b) { return a + b; }
};
struct Multiply {
    static __device__ float identity() { return 1.0f; }
    static __device__ float apply(float a, float b) { return a * b; }
};
struct AddWhole {
    static __device__ i64 identity() { return 0; }
    static __device__ i64 apply(i64 a, i64 b) { return a + b; }
};
struct LargerWhole {
    static __device__ i64 identity() { return -0x7fffffffffffffffll - 1; }
    static __device__ i64 apply(i64 a, i64 b) { return a > b ? a : b; }
};
struct SmallerWhole {
    static __device__ i64 identity() { return 0x7fffffffffffffffll; }
    static __device__ i64 apply(i64 a, i64 b) { return a < b ? a : b; }
};
struct Larger {
    static __device__ float identity() { return __int_as_float(0xff800000); }
    static __device__ float apply(float a, float b) { return a > b || a != a ? a : b; }
};
struct Smaller {
    static __device__ float identity() { return __int_as_float(0x7f800000); }
    static __device__ float apply(float a, float b) { return a < b || a != a ? a : b; }
};

template <typename X> __device__ __forceinline__ i64 whole(X x) { return (i64)to_float(x); }
template <> __device__ __forceinline__ i64 whole<i64>(i64 x) { return x; }
template <> __device__ __forceinline__ i64 whole<int>(int x) { return x; }
template <typename X> __device__ __forceinline__ X whole_as(i64 x) { return from_float<X>((float)x); }
template <> __device__ __forceinline__ i64 whole_as<i64>(i64 x) { return x; }
template <> __device__ __forceinline__ int whole_as<int>(i64 x) { return (int)x; }

constexpr int LOADS = sizeof(Columns) > 2 ? 4 : 8; // that a thread makes at once

// Reduces value(x, column, r) over the middle axis. `column` is the index in [outer][inner], r that in [reduce].
template <typename Op, typename F>
__device__ __forceinline__ void reduce_middle(const T* __restrict__ x, OUT* __restrict__ out, float scale, int accumulate,
                                              i64 outer, i64 reduce, i64 inner, i64 chunk, F value) {
    using Total = decltype(Op::identity());
    __shared__ Total partial[V][256];
    i64 column_blocks = CEIL_DIV(inner, (i64)blockDim.x * V);
    i64 i = (blockIdx.x % column_blocks * blockDim.x + threadIdx.x) * V;
    i64 o = blockIdx.x / column_blocks * blockDim.z + threadIdx.z;
    i64 begin = (i64)blockIdx.y * chunk, end = begin + chunk < reduce ? begin + chunk : reduce;
    bool inside = i < inner && o < outer;
    Total total[V];
#pragma unroll
    for (int k = 0; k < V; k++) total[k] = Op::identity();
    if (inside) {
        i64 column = o * inner + i;
        const T* p = x + o * reduce * inner + i;
#pragma unroll LOADS
        for (i64 r = begin + threadIdx.y; r < end; r += blockDim.y) {
            Columns own = *reinterpret_cast<const Columns*>(p + r * inner);
#pragma unroll
            for (int k = 0; k < V; k++) total[k] = Op::apply(total[k], value(own.v[k], column + k, r));
        }
    }
    int slot = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
#pragma unroll
    for (int k = 0; k < V; k++) partial[k][slot] = total[k];
    __syncthreads();
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
        if (threadIdx.y < half)
#pragma unroll
            for (int k = 0; k < V; k++) partial[k][slot] = Op::apply(partial[k][slot], partial[k][slot + half * blockDim.x]);
        __syncthreads();
    }
    if (!inside || threadIdx.y) return;
    OUT* target = out + (o * gridDim.y + blockIdx.y) * inner + i;
#pragma unroll
    for (int k = 0; k < V; k++) {
        if constexpr (sizeof(Total) == 8) {
            target[k] = whole_as<OUT>(partial[k][slot]);
        } else {
            float result = scale * partial[k][slot];
            target[k] = from_float<OUT>(accumulate ? to_float(target[k]) + result : result);
        }
    }
}

#define SHAPE OUT *out, float scale, int accumulate, i64 outer, i64 reduce, i64 inner, i64 chunk
#define REST out, scale, accumulate, outer, reduce, inner, chunk

extern "C" __global__ void sum(const T* x, SHAPE) {
    wait_for_previous();
    reduce_middle<Add>(x, REST, [](T x, i64, i64) { return to_float(x); });
}
extern "C" __global__ void sum_whole(const T* x, SHAPE) {
    wait_for_previous();
    reduce_middle<AddWhole>(x, REST, [](T x, i64, i64) { return whole(x); });
}
extern "C" __global__ void product(const T* x, SHAPE) {
    wait_for_previous();
    reduce_middle<Multiply>(x, REST, [](T x, i64, i64) { return to_float(x); });
}
extern "C" __global__ void maximum(const T* x, SHAPE) {
    wait_for_previous();
    reduce_middle<Larger>(x, REST, [](T x, i64, i64) { return to_float(x); });
}
extern "C" __global__ void minimum(const T* x, SHAPE) {
    wait_for_previous();
    reduce_middle<Smaller>(x, REST, [](T x, i64, i64) { return to_float(x); });
}
extern "C" __global__ void maximum_whole(const T* x, SHAPE) {
    wait_for_previous();
    reduce_middle<LargerWhole>(x, REST, [](T x, i64, i64) { return whole(x); });
}
extern "C" __global__ void minimum_whole(const T* x, SHAPE) {
    wait_for_previous();
    reduce_middle<SmallerWhole>(x, REST, [](T x, i64, i64) { return whole(x); });
}
// Where the first largest element lies, or the first smallest: the lower 32 bits of out, which is i64. The upper ones are less the
// better the element, and least of NaN, so that minimum_whole reduces several chunks' results.
extern "C" __global__ void position(const T* x, int largest, SHAPE) {
    wait_for_previous();
    reduce_middle<SmallerWhole>(x, REST, [=](T x, i64, i64 r) {
        float value = to_float(x) + 0.0f; // -0 and 0 are equal
        int bits = __float_as_int(value), order = bits ^ (bits >> 31 & 0x7fffffff);
        i64 upper = value != value ? -0x80000000ll : largest ? ~order : order;
        return (i64)((u64)upper << 32) | r;
    });
}
// How often `extreme`, T [outer][inner], occurs in its column.
extern "C" __global__ void count(const T* x, const T* extreme, SHAPE) {
    wait_for_previous();
    reduce_middle<Add>(x, REST, [=](T x, i64 c, i64) { return to_float(x) == to_float(extreme[c]) ? 1.0f : 0.0f; });
}
// Sum of squared distances from `mean`, float [outer][inner].
extern "C" __global__ void square_deviation(const T* x, const float* mean, SHAPE) {
    wait_for_previous();
    reduce_middle<Add>(x, REST, [=](T x, i64 c, i64) {
        float d = to_float(x) - mean[c];
        return d * d;
    });
}

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(bf16 x) { return to_float(x); }
__device__ __forceinline__ float wide(half x) { return to_float(x); }
template <typename X> __device__ __forceinline__ i64 wide(X x) { return whole(x); }
template <typename X> __device__ __forceinline__ X narrow(float x) { return from_float<X>(x); }
template <typename X> __device__ __forceinline__ X narrow(i64 x) { return whole_as<X>(x); }

// x summed with the lanes before it in its warp.
template <typename S> __device__ __forceinline__ S warp_scan(S x, int lane) {
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        S before = __shfl_up_sync(~0u, x, offset);
        if (lane >= offset) x += before;
    }
    return x;
}

// out[r] = the sum of x[0] to x[r], or of x[r] to the last where `reverse`, over the middle axis. Blocks with blockIdx.y = y have
// the y-th chunk in this direction; they add what before[y - 1] holds, if it is given, and write their last sum to sums[y], if
// that is. Both are [outer][gridDim.y][inner], of float or i64. out may be null.
// A block goes through its chunk by tiles of ITEMS elements a lane. Of one column a lane's elements lie `lanes` apart, so that a
// warp reads adjacent ones; of several, and where there are fewer than 32 lanes, they are adjacent.
// Launch: block (columns, lanes, rows), powers of two of product at most 512, at most 64 rows; of one column at most
// 128 lanes, else 16.
constexpr int ITEMS = 8;
extern "C" __global__ void cumsum(const T* x, OUT* out, const void* before, void* sums, int reverse, i64 outer, i64 count,
                                  i64 inner, i64 chunk) {
    wait_for_previous();
    using S = decltype(wide(T{}));
    __shared__ S shared[512];
    int columns = blockDim.x, lanes = blockDim.y, lane = threadIdx.y, in_warp = lane % 32, warp = lane / 32, warps = lanes / 32;
    S* totals = shared + threadIdx.z * lanes * columns + threadIdx.x;
    u32 column_blocks = inner > 1 ? (u32)CEIL_DIV(inner, (i64)columns) : 1;
    i64 i = (i64)(blockIdx.x % column_blocks) * columns + threadIdx.x, o = (i64)(blockIdx.x / column_blocks) * blockDim.z + threadIdx.z;
    i64 begin = blockIdx.y * chunk, end = min(begin + chunk, count), own = (o * gridDim.y + blockIdx.y) * inner + i;
    bool inside = i < inner && o < outer, apart = warps > 0;
    i64 first = o * count * inner + i;
    int step = apart ? lanes : 1, at = apart ? lane : lane * ITEMS;
    S carry = before && inside && blockIdx.y ? static_cast<const S*>(before)[own - inner] : 0;
    for (i64 tile = begin + at; tile < end + at; tile += lanes * ITEMS) {
        S values[ITEMS], sum = 0, all = 0;
#pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            i64 r = tile + j * step;
            values[j] = inside && r < end ? wide(x[first + (reverse ? count - 1 - r : r) * inner]) : 0;
        }
        if (apart) {
#pragma unroll
            for (int j = 0; j < ITEMS; j++) values[j] = warp_scan(values[j], in_warp);
            __syncthreads();
            if (in_warp == 31)
#pragma unroll
                for (int j = 0; j < ITEMS; j++) totals[j * warps + warp] = values[j];
            __syncthreads();
            all = warp_scan(in_warp < ITEMS * warps ? totals[in_warp] : S(0), in_warp);
            sum = __shfl_up_sync(~0u, all, 1);
            all = __shfl_sync(~0u, all, 31);
#pragma unroll
            for (int j = 0; j < ITEMS; j++) {
                S earlier = __shfl_sync(~0u, sum, j * warps + warp);
                values[j] += j + warp ? carry + earlier : carry;
            }
        } else {
#pragma unroll
            for (int j = 1; j < ITEMS; j++) values[j] += values[j - 1];
            __syncthreads();
            totals[lane * columns] = values[ITEMS - 1];
            __syncthreads();
            for (int other = 0; other < lanes; other++) {
                if (other == lane) sum = all;
                all += totals[other * columns];
            }
#pragma unroll
            for (int j = 0; j < ITEMS; j++) values[j] += carry + sum;
        }
        carry += all;
#pragma unroll
        for (int j = 0; j < ITEMS; j++) {
            i64 r = tile + j * step;
            if (out && inside && r < end) out[first + (reverse ? count - 1 - r : r) * inner] = narrow<OUT>(values[j]);
        }
    }
    if (sums && inside && lane == 0) static_cast<S*>(sums)[own] = carry;
}

// The column, in [outer][inner], of element e of x. Divides in 32 bits where they suffice.
__device__ __forceinline__ i64 column_of(i64 e, i64 reduce, i64 inner, i64 n) {
    if (n <= 0xffffffffll) return (u32)e / (u32)(reduce * inner) * inner + (u32)e % (u32)inner;
    return e / (reduce * inner) * inner + e % inner;
}

// dx[e] = value(x[e], column), or += where `accumulate`. x may be null.
template <typename F>
__device__ __forceinline__ void spread_to(T* dx, const T* x, int accumulate, i64 outer, i64 reduce, i64 inner, F value) {
    i64 n = outer * reduce * inner, next = inner > 1;  // neighbours have neighbouring columns, or one
    for (i64 e = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * V; e < n; e += (i64)gridDim.x * blockDim.x * V) {
        i64 column = column_of(e, reduce, inner, n);
        Columns own = x ? *reinterpret_cast<const Columns*>(x + e) : Columns{};
        Columns result = accumulate ? *reinterpret_cast<const Columns*>(dx + e) : Columns{};
#pragma unroll
        for (int k = 0; k < V; k++) {
            float v = value(to_float(own.v[k]), column + k * next);
            result.v[k] = from_float<T>(accumulate ? to_float(result.v[k]) + v : v);
        }
        *reinterpret_cast<Columns*>(dx + e) = result;
    }
}

extern "C" __global__ void sum_backward(const T* dout, T* dx, float scale, int accumulate, i64 outer, i64 reduce, i64 inner) {
    wait_for_previous();
    spread_to(dx, nullptr, accumulate, outer, reduce, inner, [=](float, i64 c) { return scale * to_float(dout[c]); });
}
// The elements equal to the extreme share its gradient; `ties` (float) counts them.
extern "C" __global__ void extreme_backward(const T* dout, const T* x, const T* extreme, const float* ties, T* dx,
                                            int accumulate, i64 outer, i64 reduce, i64 inner) {
    wait_for_previous();
    spread_to(dx, x, accumulate, outer, reduce, inner, [=](float x, i64 c) {
        return x == to_float(extreme[c]) ? to_float(dout[c]) / ties[c] : 0.0f;
    });
}
// scale is 2 / (reduce - ddof).
extern "C" __global__ void variance_backward(const OUT* dout, const T* x, const float* mean, T* dx, float scale,
                                             int accumulate, i64 outer, i64 reduce, i64 inner) {
    wait_for_previous();
    spread_to(dx, x, accumulate, outer, reduce, inner, [=](float x, i64 c) { return scale * to_float(dout[c]) * (x - mean[c]); });
}
