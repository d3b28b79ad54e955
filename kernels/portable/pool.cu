// Sums and maxima over windows, channels last, and their gradients.
//
//   large   T (N, H, W, C).
//   small   T (N, h, w, C): one element for each window. The corner of window (i, j) is (i * STRIDE_H - PADDING_H,
//           j * STRIDE_W - PADDING_W). What lies outside of `large` counts as nothing.
//   place   u8 (N, h, w, C): row * WINDOW_W + column of the maximum in its window, or NOWHERE.
//   sums    (gridDim.x, C): what a block stored, summed for each channel. SUMS=1: the sum, float. SUMS=2: StatisticsOf<T>.
//           SUMS=0: null.
// Outputs are overwritten; those with `add` accumulate where it is set. Sums are in float and in a fixed order. VEC=1: C and
// every T address are multiples of a 16-byte pack.
// Launch: block (lanes, columns), at most 256 threads; a lane is a pack of channels. gridDim.y = ceil(packs / lanes). gridDim.x
// = N * h rows of windows, or for kernels that write `large` N * ceil((H + PADDING_H) / STRIDE_H) bands of STRIDE_H rows.
// With launch bounds of one block a multiprocessor the compiler spills no registers.
#include "channel_statistics.cuh"
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;
constexpr int MOST = CEIL_DIV(WINDOW_W, STRIDE_W);  // windows of a row that hold one position
constexpr int ROWS = STRIDE_H <= 3 ? STRIDE_H : 1;  // of a band that are summed at a time
constexpr int UNROLL = WINDOW_H <= 3 && WINDOW_W <= 3 && STRIDE_H <= 3 && STRIDE_W <= 3 ? 3 : 1;  // more would spill registers
struct __align__(V) Places { u8 v[V]; };
constexpr u8 NOWHERE = 255;  // no place of a window of up to 255

#define EXTENT int H, int W, int h, int w, int C

struct Total {
    float sum;
    __device__ __forceinline__ void add(float x) { sum += x; }
    __device__ __forceinline__ void add(const Total& other) { sum += other.sum; }
};
template <int, typename S> struct SumsOf { typedef Total Type; };
template <typename S> struct SumsOf<2, S> { typedef typename StatisticsOf<S>::Type Type; };
typedef SumsOf<SUMS, T>::Type Sums;

// The sums of what a thread stores, and a block's.
struct Stored {
    // In shared memory channel k of all threads lies side by side, channel k + 1 so much further on that a warp, which
    // then reads all V channels of some threads, has no bank conflicts.
    static constexpr int PITCH = 256 + CEIL_DIV(128, (int)sizeof(Sums) * V);
    Sums sums[V] = {};

    __device__ __forceinline__ void add(const float (&values)[V]) {
#pragma unroll
        for (int k = 0; SUMS > 0 && k < V; k++) sums[k].add(to_float(from_float<T>(values[k])));
    }
    __device__ __forceinline__ void write(Sums* out, int C) {
        if constexpr (SUMS == 0) return;
        __shared__ Sums of_threads[V * PITCH];
        int lanes = blockDim.x * V, thread = threadIdx.y * blockDim.x + threadIdx.x, first = blockIdx.y * lanes;
#pragma unroll
        for (int k = 0; k < V; k++) of_threads[k * PITCH + thread] = sums[k];
        __syncthreads();
        for (int i = thread; i < min(lanes, C - first); i += blockDim.x * blockDim.y) {
            const Sums* column = of_threads + i % V * PITCH + i / V;
            Sums total = {};
#pragma unroll 8
            for (int y = 0; y < blockDim.y; y++) total.add(column[y * blockDim.x]);
            out[(i64)blockIdx.x * C + first + i] = total;
        }
    }
};

// This thread's first channel, and how many of `count` columns it works on: all, or none beyond the channels.
__device__ __forceinline__ int channel() { return (blockIdx.y * blockDim.x + threadIdx.x) * V; }
__device__ __forceinline__ int columns(int count, int C) { return channel() < C ? count : 0; }

// small = factor * sum of the window.
extern "C" __global__ void __launch_bounds__(256, 1)
sum_windows(T* __restrict__ small, int add, Sums* sums, const T* __restrict__ large, float factor, EXTENT) {
    wait_for_previous();
    int c = channel(), top = (int)(blockIdx.x % h) * STRIDE_H - PADDING_H;
    large += (i64)(blockIdx.x / h) * H * W * C + c, small += (i64)blockIdx.x * w * C + c;
    Stored stored;
#pragma unroll 2
    for (int j = threadIdx.y; j < columns(w, C); j += blockDim.y) {
        float sum[V] = {};
#pragma unroll UNROLL
        for (int r = 0; r < WINDOW_H; r++)
#pragma unroll UNROLL
            for (int s = 0; s < WINDOW_W; s++) {
                int row = top + r, column = j * STRIDE_W - PADDING_W + s;
                if (row < 0 || row >= H || column < 0 || column >= W) continue;
                float v[V];
                load<V>(large + ((i64)row * W + column) * C, v);
#pragma unroll
                for (int k = 0; k < V; k++) sum[k] += v[k];
            }
#pragma unroll
        for (int k = 0; k < V; k++) sum[k] *= factor;
        store<V>(small + (i64)j * C, sum, add);
        stored.add(sum);
    }
    stored.write(sums, C);
}

// For each element of band i, sums over the windows that contain it. A thread computes STRIDE_W columns by ROWS rows at a time.
// The element at (a, b) from the corner of window (i, j) lies in window (i - k, j - l) if k * STRIDE_H + a < WINDOW_H and
// l * STRIDE_W + b < WINDOW_W.
//   gather(sums, row, column, window)   adds one window. (row, column) is the first of these elements in the window; `window`
//                                       is the window's place.
//   keep(place, sum)                    gets an element's place and its sum.
template <class Gather, class Keep> __device__ __forceinline__ void sum_over_windows(int i, EXTENT, Gather gather, Keep keep) {
    for (int j = threadIdx.y; j < columns(CEIL_DIV(W + PADDING_W, STRIDE_W), C); j += blockDim.y)
#pragma unroll UNROLL
        for (int first = 0; first < STRIDE_H; first += ROWS) {
            float sum[ROWS][STRIDE_W][V] = {};
#pragma unroll UNROLL
            for (int k = 0; k * STRIDE_H + first < WINDOW_H; k++)
#pragma unroll UNROLL
                for (int l = 0; l < MOST; l++) {
                    if (i < k || i - k >= h || j < l || j - l >= w) continue;
                    gather(sum, k * STRIDE_H + first, l * STRIDE_W, ((i64)(i - k) * w + j - l) * C);
                }
#pragma unroll
            for (int a = 0; a < ROWS; a++)
#pragma unroll
                for (int b = 0; b < STRIDE_W; b++) {
                    int row = i * STRIDE_H - PADDING_H + first + a, column = j * STRIDE_W - PADDING_W + b;
                    if (row >= 0 && row < H && column >= 0 && column < W) keep(((i64)row * W + column) * C, sum[a][b]);
                }
        }
}

// large = factor * sum of the windows that hold the element.
extern "C" __global__ void __launch_bounds__(256, 1)
spread_windows(T* __restrict__ large, int add, Sums* sums, const T* __restrict__ small, float factor, EXTENT) {
    wait_for_previous();
    int bands = CEIL_DIV(H + PADDING_H, STRIDE_H), c = channel();
    i64 n = blockIdx.x / bands;
    large += n * H * W * C + c, small += n * h * w * C + c;
    Stored stored;
    auto gather = [&](float (&sum)[ROWS][STRIDE_W][V], int row, int column, i64 window) {
        float v[V];
        load<V>(small + window, v);
#pragma unroll
        for (int a = 0; a < ROWS; a++)
#pragma unroll
            for (int b = 0; b < STRIDE_W; b++)
#pragma unroll
                for (int e = 0; e < V; e++) sum[a][b][e] += row + a < WINDOW_H && column + b < WINDOW_W ? v[e] : 0.0f;
    };
    sum_over_windows(blockIdx.x % bands, H, W, h, w, C, gather, [&](i64 element, float (&sum)[V]) {
#pragma unroll
        for (int e = 0; e < V; e++) sum[e] *= factor;
        store<V>(large + element, sum, add);
        stored.add(sum);
    });
    stored.write(sums, C);
}

// small = maximum of the window, NaN where it holds one; place = that of the first, or of the last NaN. `relu`: 0, and NOWHERE,
// where the maximum is no more than 0.
extern "C" __global__ void __launch_bounds__(256, 1)
max_windows(T* small, u8* place, int relu, const T* __restrict__ large, EXTENT) {
    wait_for_previous();
    int c = channel(), top = (int)(blockIdx.x % h) * STRIDE_H - PADDING_H;
    large += (i64)(blockIdx.x / h) * H * W * C + c;
    for (int j = threadIdx.y; j < columns(w, C); j += blockDim.y) {
        float largest[V];
        Places found;
#pragma unroll
        for (int k = 0; k < V; k++) {
            largest[k] = relu ? 0.0f : __int_as_float(0xff800000);  // -infinity
            found.v[k] = relu ? NOWHERE : 0;
        }
#pragma unroll UNROLL
        for (int r = 0; r < WINDOW_H; r++)
#pragma unroll UNROLL
            for (int s = 0; s < WINDOW_W; s++) {
                int row = top + r, column = j * STRIDE_W - PADDING_W + s;
                if (row < 0 || row >= H || column < 0 || column >= W) continue;
                float v[V];
                load<V>(large + ((i64)row * W + column) * C, v);
#pragma unroll
                for (int k = 0; k < V; k++)
                    if (v[k] > largest[k] || v[k] != v[k]) {
                        largest[k] = v[k];
                        found.v[k] = r * WINDOW_W + s;
                    }
            }
        i64 out = ((i64)blockIdx.x * w + j) * C + c;
        store<V>(small + out, largest);
        *reinterpret_cast<Places*>(place + out) = found;
    }
}

// dlarge = sum of dsmall of the windows whose maximum the element is.
extern "C" __global__ void __launch_bounds__(256, 1)
max_windows_backward(T* dlarge, int add, Sums* sums, const T* __restrict__ dsmall, const u8* __restrict__ place, EXTENT) {
    wait_for_previous();
    int bands = CEIL_DIV(H + PADDING_H, STRIDE_H), c = channel();
    i64 n = blockIdx.x / bands;
    dlarge += n * H * W * C + c, dsmall += n * h * w * C + c, place += n * h * w * C + c;
    Stored stored;
    auto gather = [&](float (&sum)[ROWS][STRIDE_W][V], int row, int column, i64 window) {
        float v[V];
        load<V>(dsmall + window, v);
        Places found = *reinterpret_cast<const Places*>(place + window);
#pragma unroll
        for (int a = 0; a < ROWS; a++)
#pragma unroll
            for (int b = 0; b < STRIDE_W; b++)
#pragma unroll
                for (int e = 0; e < V; e++)
                    sum[a][b][e] += column + b < WINDOW_W && found.v[e] == (row + a) * WINDOW_W + column + b ? v[e] : 0.0f;
    };
    sum_over_windows(blockIdx.x % bands, H, W, h, w, C, gather, [&](i64 element, float (&sum)[V]) {
        store<V>(dlarge + element, sum, add);
        stored.add(sum);
    });
    stored.write(sums, C);
}
