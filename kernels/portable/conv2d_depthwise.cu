// Depthwise convolutions with stride, padding and dilation: each channel has a kernel ROWS x COLUMNS (R x S) of its own.
//
//   fprop  out[pixel][c]     = sum over taps of x[pixel under the tap][c] * weight[c][r, s] + bias[c] + addend[pixel][c]
//   dgrad  dx[pixel][c]      = sum over taps of dout[pixel at the tap][c] * weight[c][r, s] + bias[c] + addend[pixel][c]
//   wgrad  dweight[c][r, s]  = sum over pixels of dout[pixel][c] * x[pixel under the tap][c]
//
//   x (N, H, W, C), weight (C, R, S, 1), dout (N, h, w, C)   T, contiguous
//   result   out or dx: T, overwritten
//   bias     float (C,), or null
//   addend   T like result, or null. May be `result` itself.
//   parts    of wgrad: float (gridDim.z, C, R, S), overwritten. Each is the sum over `lines` rows of the images of dout.
// Sums are in float, in a fixed order. A thread computes RUN results side by side, in wgrad of RUN pixels of dout, from values
// of x that it loads once: RUN=4 where columns have stride and dilation 1, else RUN=1. VEC=1: C is a multiple of a pack, and
// images start at multiples of 16 bytes; the weight need not.
// Launch: block (lanes, columns), at most 256 threads; a lane is a pack of channels. gridDim.y = ceil(packs / lanes). gridDim.x
// = the rows of all images of the result. In wgrad gridDim.x = R: a block has one row of taps, and those that read the same
// lines run at the same time; gridDim.z = ceil(N * h / lines).
// Dynamic shared memory of fprop and dgrad: R * S * lanes packs (elements with VEC=0).
#include "convolution.cuh"
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1, TAPS = ROWS * COLUMNS;
constexpr int READ = RUN + COLUMNS - 1;  // columns that the taps of RUN pixels side by side read

// The column that tap t of pixel j reads, or of RUN pixels from j on the t-th that any of their taps reads; -1 for none.
template <bool BACKWARD> __device__ __forceinline__ int column_of(int j, int t, const Convolution& p, int width) {
    if constexpr (RUN == 1) return connected<BACKWARD>(j, t, p.stride_w, p.padding_w, p.dilation_w, width);
    int column = j + t + (BACKWARD ? p.padding_w - (COLUMNS - 1) : -p.padding_w);
    return column < width ? column : -1;
}

template <bool BACKWARD>
__device__ __forceinline__ void convolve(T* result, const T* image, const T* weight, const float* bias, const T* addend,
                                         const Convolution& p) {
    if (blockIdx.x >= p.N * (BACKWARD ? p.H : p.h)) return;  // of no images: a grid has at least one block
    extern __shared__ __align__(16) u8 dynamic[];
    T* weights = reinterpret_cast<T*>(dynamic);  // (taps, channels of the block)
    int channels = blockDim.x * V, first = blockIdx.y * channels, thread = threadIdx.y * blockDim.x + threadIdx.x;
    for (int i = thread; i < min(channels, p.C - first) * TAPS; i += blockDim.x * blockDim.y)
        weights[i % TAPS * channels + i / TAPS] = weight[(i64)first * TAPS + i];
    __syncthreads();
    int c = first + threadIdx.x * V;
    if (c >= p.C) return;

    int height = BACKWARD ? p.h : p.H, width = BACKWARD ? p.w : p.W;  // of the image that the taps read
    int own_height = BACKWARD ? p.H : p.h, own_width = BACKWARD ? p.W : p.w;
    int n = blockIdx.x / own_height, i = blockIdx.x % own_height;
    float start[V] = {};
#pragma unroll
    for (int k = 0; k < V; k++) start[k] = bias ? bias[c + k] : 0.0f;
    for (int j = threadIdx.y * RUN; j < own_width; j += blockDim.y * RUN) {
        float sums[RUN][V];
#pragma unroll
        for (int o = 0; o < RUN; o++)
#pragma unroll
            for (int k = 0; k < V; k++) sums[o][k] = start[k];
        for (int r = 0; r < ROWS; r++) {
            int row = connected<BACKWARD>(i, r, p.stride_h, p.padding_h, p.dilation_h, height);
            if (row < 0) continue;
            const T* line = image + ((i64)n * height + row) * width * p.C + c;
            float factors[COLUMNS][V];
#pragma unroll
            for (int s = 0; s < COLUMNS; s++) {
                int tap = r * COLUMNS + (BACKWARD && RUN > 1 ? COLUMNS - 1 - s : s);
                load<V>(weights + tap * channels + threadIdx.x * V, factors[s]);
            }
#pragma unroll
            for (int t = 0; t < READ; t++) {
                int column = column_of<BACKWARD>(j, t, p, width);
                if (column < 0) continue;
                float values[V];
                load<V>(line + (i64)column * p.C, values);
#pragma unroll
                for (int o = max(0, t - COLUMNS + 1); o < min(RUN, t + 1); o++)
#pragma unroll
                    for (int k = 0; k < V; k++) sums[o][k] += values[k] * factors[t - o][k];
            }
        }
#pragma unroll
        for (int o = 0; o < RUN; o++) {
            if (j + o >= own_width) break;
            i64 place = ((i64)blockIdx.x * own_width + j + o) * p.C + c;
            if (addend) {
                float before[V];
                load<V>(addend + place, before);
#pragma unroll
                for (int k = 0; k < V; k++) sums[o][k] += before[k];
            }
            store<V>(result + place, sums[o]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
fprop(T* result, const T* image, const T* weight, const float* bias, const T* addend, Convolution p) {
    wait_for_previous();
    convolve<false>(result, image, weight, bias, addend, p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
dgrad(T* result, const T* image, const T* weight, const float* bias, const T* addend, Convolution p) {
    wait_for_previous();
    convolve<true>(result, image, weight, bias, addend, p);
}

extern "C" __global__ void __launch_bounds__(256, 1)
wgrad(float* parts, const T* dout, const T* x, int lines, Convolution p) {
    wait_for_previous();
    __shared__ float of_threads[256 * V];
    int channels = blockDim.x * V, first = blockIdx.y * channels, thread = threadIdx.y * blockDim.x + threadIdx.x;
    int c = first + threadIdx.x * V, r = blockIdx.x, begin = blockIdx.z * lines, end = min(p.N * p.h, begin + lines);
    float sums[COLUMNS][V] = {};
    for (int line = begin; line < end && c < p.C; line++) {
        int row = connected<false>(line % p.h, r, p.stride_h, p.padding_h, p.dilation_h, p.H);
        if (row < 0) continue;
        const T* from = x + ((i64)(line / p.h) * p.H + row) * p.W * p.C + c;
        for (int j = threadIdx.y * RUN; j < p.w; j += blockDim.y * RUN) {
            float gradients[RUN][V] = {};
#pragma unroll
            for (int o = 0; o < RUN; o++)
                if (j + o < p.w) load<V>(dout + ((i64)line * p.w + j + o) * p.C + c, gradients[o]);
#pragma unroll
            for (int t = 0; t < READ; t++) {
                int column = column_of<false>(j, t, p, p.W);
                if (column < 0) continue;
                float values[V];
                load<V>(from + (i64)column * p.C, values);
#pragma unroll
                for (int o = max(0, t - COLUMNS + 1); o < min(RUN, t + 1); o++)
#pragma unroll
                    for (int k = 0; k < V; k++) sums[t - o][k] += gradients[o][k] * values[k];
            }
        }
    }
#pragma unroll
    for (int s = 0; s < COLUMNS; s++) {
        __syncthreads();
#pragma unroll
        for (int k = 0; k < V; k++) of_threads[thread * V + k] = sums[s][k];
        __syncthreads();
        for (int i = thread; i < min(channels, p.C - first); i += blockDim.x * blockDim.y) {
            float total = 0.0f;
            for (int y = 0; y < blockDim.y; y++) total += of_threads[y * channels + i];
            parts[((i64)blockIdx.z * p.C + first + i) * TAPS + r * COLUMNS + s] = total;
        }
    }
}
