// Functions of one tensor: NAME_forward writes out[i] = value(x[i]); NAME_backward writes or adds (`accumulate`)
// dx[i] = gradient(dout[i], saved[i]), where saved is x or out, as the third argument of UNARY says.
// All arrays: T, contiguous, n elements, any alignment (16 bytes is fastest). Arithmetic in float.
// Launch: 256 threads, one pack of 16 bytes each (any shape works: grid-stride).
// NAME_with_slope, relu_backward_sums: see there.
#include "map.cuh"
#include "activation.cuh"
#include "vector.cuh"

#define UNARY(name, value, saved, gradient)                                                                    \
    extern "C" __global__ void name##_forward(const T* x, T* out, i64 n) {                                     \
        wait_for_previous();                                                                                   \
        map<T>(out, 0, n, x, nullptr, [](float x, float) { return value; });                                   \
    }                                                                                                          \
    extern "C" __global__ void name##_backward(const T* dout, const T* kept, T* dx, int accumulate, i64 n) {   \
        wait_for_previous();                                                                                   \
        map<T>(dx, accumulate, n, dout, kept, [](float dout, float saved) { return gradient; });               \
    }

__device__ __forceinline__ float silu_slope(float x) {
    float s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
}

UNARY(negative, -x, x, -dout)
UNARY(exp, expf(x), out, dout * out)
UNARY(log, logf(x), x, dout / x)
UNARY(sqrt, sqrtf(x), out, 0.5f * dout / out)
UNARY(cbrt, cbrtf(x), out, dout / (3.0f * out * out))
UNARY(sin, sinf(x), x, dout * cosf(x))
UNARY(cos, cosf(x), x, -dout * sinf(x))
UNARY(tanh, tanhf(x), x, dout * (1.0f - tanhf(x) * tanhf(x)))
UNARY(abs, fabsf(x), x, x > 0.0f ? dout : x < 0.0f ? -dout : 0.0f)
UNARY(square, x * x, x, 2.0f * dout * x)
UNARY(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x, x, 0.0f)
UNARY(floor, floorf(x), x, 0.0f)
UNARY(ceil, ceilf(x), x, 0.0f)
UNARY(round, rintf(x), x, 0.0f)
UNARY(log1p, log1pf(x), x, dout / (1.0f + x))
UNARY(expm1, expm1f(x), x, dout * expf(x))
UNARY(tan, tanf(x), x, dout * (1.0f + tanf(x) * tanf(x)))
UNARY(exp2, exp2f(x), out, dout * out * 0.69314718f)
UNARY(log2, log2f(x), x, dout / (x * 0.69314718f))
UNARY(log10, log10f(x), x, dout / (x * 2.30258509f))
UNARY(arcsin, asinf(x), x, dout / sqrtf((1.0f - x) * (1.0f + x)))
UNARY(arccos, acosf(x), x, -dout / sqrtf((1.0f - x) * (1.0f + x)))
UNARY(arctan, atanf(x), x, dout / (1.0f + x * x))
UNARY(sinh, sinhf(x), x, dout * coshf(x))
UNARY(cosh, coshf(x), x, dout * sinhf(x))
UNARY(arcsinh, asinhf(x), x, dout / sqrtf(1.0f + x * x))
UNARY(arccosh, acoshf(x), x, dout / sqrtf((x - 1.0f) * (x + 1.0f)))
UNARY(arctanh, atanhf(x), x, dout / ((1.0f - x) * (1.0f + x)))
UNARY(relu, x < 0.0f ? 0.0f : x, out, out > 0.0f ? dout : 0.0f)
UNARY(sigmoid, sigmoid(x), x, dout * sigmoid(x) * (1.0f - sigmoid(x)))
UNARY(softplus, fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))), x, dout * sigmoid(x))
UNARY(silu, x * sigmoid(x), x, dout * silu_slope(x))
UNARY(gelu, activate<GELU>(x), x, dout * activate_with_slope<GELU>(x).slope)
UNARY(gelu_tanh, activate<GELU_TANH>(x), x, dout * activate_with_slope<GELU_TANH>(x).slope)

// out = the activation of x, and slope = its derivative there; each may be x. N elements at a time.
template <int KIND, int N> __device__ __forceinline__ void with_slope(const T* x, T* out, T* slope, i64 begin, i64 end) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    for (i64 i = begin + thread * N; i < end; i += threads * N) {
        float values[N], slopes[N];
        load<N>(x + i, values);
#pragma unroll
        for (int k = 0; k < N; k++) {
            float v = values[k];  // SiLU as without its slope, to the bit
            Activated at = KIND == SILU ? Activated{v * sigmoid(v), silu_slope(v)} : activate_with_slope<KIND>(v);
            values[k] = at.value, slopes[k] = at.slope;
        }
        store<N>(out + i, values);
        store<N>(slope + i, slopes);
    }
}

#define ACTIVATION(name, kind)                                                                \
    extern "C" __global__ void name##_with_slope(const T* x, T* out, T* slope, i64 n) {       \
        wait_for_previous();                                                                  \
        constexpr int SIZE = Pack<T>::SIZE;                                                   \
        i64 packed = ((u64)x | (u64)out | (u64)slope) % 16 ? 0 : n / SIZE * SIZE;             \
        with_slope<kind, SIZE>(x, out, slope, 0, packed);                                     \
        with_slope<kind, 1>(x, out, slope, packed, n);                                        \
    }

ACTIVATION(silu, SILU)
ACTIVATION(gelu, GELU)
ACTIVATION(gelu_tanh, GELU_TANH)

// relu's backward for images (N, pixels, C): dx = dout where out > 0, and its sums (N, C), float, over each image's pixels.
// C is a multiple of a pack, every T address one of 16 bytes. Launch: (N, chunks), 256 threads: a thread a pack of 16
// bytes in each `lanes`-th pixel; a chunk is 256 / lanes packs. `lanes` is a power of two.
extern "C" __global__ void relu_backward_sums(const T* dout, const T* kept, T* dx, float* sums, int pixels, int C, int lanes) {
    wait_for_previous();
    constexpr int SIZE = Pack<T>::SIZE;
    __shared__ float shared[SIZE][256];
    int across = 256 / lanes, lane = threadIdx.x / across;
    int c = (blockIdx.y * across + threadIdx.x % across) * SIZE;
    float total[SIZE] = {};
    if (c < C) {
        i64 image = (i64)blockIdx.x * pixels * C + c;
#pragma unroll 4
        for (int pixel = lane; pixel < pixels; pixel += lanes) {
            i64 i = image + (i64)pixel * C;
            Pack<T> x = load_pack(dout + i), out = load_pack(kept + i);
#pragma unroll
            for (int k = 0; k < SIZE; k++) {
                if (!(to_float(out.v[k]) > 0.0f)) x.v[k] = from_float<T>(0.0f);
                total[k] += to_float(x.v[k]);
            }
            store_pack(dx + i, x);
        }
    }
#pragma unroll
    for (int k = 0; k < SIZE; k++) shared[k][threadIdx.x] = total[k];
    for (int half = lanes / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half)
#pragma unroll
            for (int k = 0; k < SIZE; k++) shared[k][threadIdx.x] += shared[k][threadIdx.x + half * across];
    }
    if (lane == 0 && c < C)
#pragma unroll
        for (int k = 0; k < SIZE; k++) sums[(i64)blockIdx.x * C + c + k] = shared[k][threadIdx.x];
}

extern "C" __global__ void clip_forward(const T* x, T* out, float low, float high, i64 n) {
    wait_for_previous();
    map<T>(out, 0, n, x, nullptr, [=](float x, float) { return x < low ? low : x > high ? high : x; });
}
extern "C" __global__ void clip_backward(const T* dout, const T* x, T* dx, float low, float high, int accumulate, i64 n) {
    wait_for_previous();
    map<T>(dx, accumulate, n, dout, x, [=](float dout, float x) { return x >= low && x <= high ? dout : 0.0f; });
}
