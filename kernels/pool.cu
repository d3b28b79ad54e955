// Sums and maxima over square windows, channels last: `small` (N, h, w, C) has an element for each window of `large`
// (N, H, W, C), whose corner is (i, j) * stride - padding; what lies outside of `large` counts as nothing. All T;
// place (N, h, w, C) u8 is the maximum's row * size + column in its window. Sums are in float and in a fixed order.
// Outputs overwrite; those with `add` accumulate where it is set.
// VEC=1: C and every T address are multiples of a 16-byte pack.
// Launch: a block for each row (n, i) of the output, any number of threads.
// variants: T=float,bf16,half VEC=0,1
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;
struct __align__(V) Places { u8 v[V]; };

#define EXTENT int H, int W, int h, int w, int C, int size, int stride, int padding

// The part [begin, end) of the window from `corner` that lies inside `length`.
struct Inside {
    int corner, begin, end;
    __device__ Inside(int index, int stride, int padding, int size, int length) {
        corner = index * stride - padding;
        begin = max(corner, 0);
        end = min(corner + size, length);
    }
};

// The windows [begin, end) that hold position p; `p` becomes the place in window 0's row.
struct Covering {
    int p, begin, end;
    __device__ Covering(int position, int stride, int padding, int size, int count) {
        p = position + padding;
        begin = p < size ? 0 : (p - size) / stride + 1;
        end = min(count, p / stride + 1);
    }
};

// small = factor * sum of the window.
extern "C" __global__ void sum_windows(T* small, int add, const T* __restrict__ large, float factor, EXTENT) {
    wait_for_previous();
    i64 n = blockIdx.x / h;
    Inside rows(blockIdx.x % h, stride, padding, size, H);
    for (int item = threadIdx.x; item < w * (C / V); item += blockDim.x) {
        int j = item / (C / V), c = item % (C / V) * V;
        Inside columns(j, stride, padding, size, W);
        float sum[V] = {};
        for (int r = rows.begin; r < rows.end; r++)
            for (int s = columns.begin; s < columns.end; s++) {
                float v[V];
                load<V>(large + ((n * H + r) * W + s) * C + c, v);
#pragma unroll
                for (int k = 0; k < V; k++) sum[k] += v[k];
            }
#pragma unroll
        for (int k = 0; k < V; k++) sum[k] *= factor;
        store<V>(small + ((i64)blockIdx.x * w + j) * C + c, sum, add);
    }
}

// large = factor * sum of the windows that hold the element.
extern "C" __global__ void spread_windows(T* large, int add, const T* __restrict__ small, float factor, EXTENT) {
    wait_for_previous();
    i64 n = blockIdx.x / H;
    Covering rows(blockIdx.x % H, stride, padding, size, h);
    for (int item = threadIdx.x; item < W * (C / V); item += blockDim.x) {
        int s = item / (C / V), c = item % (C / V) * V;
        Covering columns(s, stride, padding, size, w);
        float sum[V] = {};
        for (int i = rows.begin; i < rows.end; i++)
            for (int j = columns.begin; j < columns.end; j++) {
                float v[V];
                load<V>(small + ((n * h + i) * w + j) * C + c, v);
#pragma unroll
                for (int k = 0; k < V; k++) sum[k] += v[k];
            }
#pragma unroll
        for (int k = 0; k < V; k++) sum[k] *= factor;
        store<V>(large + ((i64)blockIdx.x * W + s) * C + c, sum, add);
    }
}

// small = maximum of the window, NaN where it holds one; place = that of the first.
extern "C" __global__ void max_windows(T* small, u8* place, const T* __restrict__ large, EXTENT) {
    wait_for_previous();
    i64 n = blockIdx.x / h;
    Inside rows(blockIdx.x % h, stride, padding, size, H);
    for (int item = threadIdx.x; item < w * (C / V); item += blockDim.x) {
        int j = item / (C / V), c = item % (C / V) * V;
        Inside columns(j, stride, padding, size, W);
        float largest[V];
        Places found = {};
#pragma unroll
        for (int k = 0; k < V; k++) largest[k] = __int_as_float(0xff800000);
        for (int r = rows.begin; r < rows.end; r++)
            for (int s = columns.begin; s < columns.end; s++) {
                float v[V];
                load<V>(large + ((n * H + r) * W + s) * C + c, v);
#pragma unroll
                for (int k = 0; k < V; k++)
                    if (v[k] > largest[k] || v[k] != v[k]) {
                        largest[k] = v[k];
                        found.v[k] = (r - rows.corner) * size + s - columns.corner;
                    }
            }
        i64 out = ((i64)blockIdx.x * w + j) * C + c;
        store<V>(small + out, largest);
        *reinterpret_cast<Places*>(place + out) = found;
    }
}

// dlarge = sum of dsmall of the windows whose maximum the element is.
extern "C" __global__ void max_windows_backward(T* dlarge, int add, const T* __restrict__ dsmall, const u8* __restrict__ place, EXTENT) {
    wait_for_previous();
    i64 n = blockIdx.x / H;
    Covering rows(blockIdx.x % H, stride, padding, size, h);
    for (int item = threadIdx.x; item < W * (C / V); item += blockDim.x) {
        int s = item / (C / V), c = item % (C / V) * V;
        Covering columns(s, stride, padding, size, w);
        float sum[V] = {};
        for (int i = rows.begin; i < rows.end; i++)
            for (int j = columns.begin; j < columns.end; j++) {
                i64 from = ((n * h + i) * w + j) * C + c;
                int own = (rows.p - i * stride) * size + columns.p - j * stride;
                float v[V];
                load<V>(dsmall + from, v);
                Places found = *reinterpret_cast<const Places*>(place + from);
#pragma unroll
                for (int k = 0; k < V; k++) sum[k] += found.v[k] == own ? v[k] : 0.0f;
            }
        store<V>(dlarge + ((i64)blockIdx.x * W + s) * C + c, sum, add);
    }
}
