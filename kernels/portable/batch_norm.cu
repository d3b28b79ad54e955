// Batch norm: z = weight * xhat + bias, xhat = (x - mean) * rstd, with statistics of each channel. y = z, or with WINDOW=2 a
// max pool of z and its ReLU: y = relu(the largest z of each 2x2 window). z is never stored; the backward recomputes it from x.
// d_preact is the gradient of z.
//
//   x, dx    T (N, H, W, C). With WINDOW=1 H is 1: any rows of C channels.
//   y, dy    T (N, H / WINDOW, W / WINDOW, C). The last row or column of an odd size is in no window.
//   weight, bias, mean, rstd, dweight, dbias, running_mean, running_var   float (C). The running statistics are updated in
//            place.
// Outputs are overwritten; gradients with an `add` flag accumulate where it is set. VEC=1: C and every T address are multiples
// of a 16-byte pack.
// Each tile of windows stores a row of sums: in the forward channel statistics (rows, C), as in channel_statistics.cuh; in the
// backward tile_sums, float2 (rows, C), of d_preact. The rows are added in a fixed order: two runs give the same bits.
// Launch of the kernels that read x: block (lanes, at most 32; rows, a power of two), at most 256 threads; a lane is a pack of
// channels; grid (tiles, ceil(packs / lanes)). Launch of the `finish_` kernels: block (4, 256), ceil(C / 4) blocks.
#include "channel_statistics.cuh"
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;
constexpr int TAPS = WINDOW * WINDOW;
constexpr int UNROLL = WINDOW > 1 ? 1 : 4;  // windows at a time, to keep enough loads in flight
constexpr int THREADS = 256, RESIDENT = 3;  // of a block; blocks a multiprocessor

#define AFFINE const float* __restrict__ weight, const float* __restrict__ bias, const float* __restrict__ mean, \
               const float* __restrict__ rstd
#define EXTENT int N, int H, int W, int C

// A thread's V channels from c on, and its windows: first, first + blockDim.y, ..., below end.
struct Share {
    int c, first, end;
    __device__ __forceinline__ Share(int windows, int C) {
        int each = CEIL_DIV(windows, gridDim.x);
        c = (blockIdx.y * blockDim.x + threadIdx.x) * V;
        first = blockIdx.x * each + threadIdx.y;
        end = c < C ? min(windows, (int)(blockIdx.x + 1) * each) : 0;
    }
};

// V elements as they lie in memory.
struct __align__(V * sizeof(T)) Raw { T v[V]; };
__device__ __forceinline__ Raw fetch(const T* p) {
    Raw raw;
    if constexpr (VEC) *reinterpret_cast<uint4*>(&raw) = *reinterpret_cast<const uint4*>(p);
    else raw.v[0] = *p;
    return raw;
}
__device__ __forceinline__ void put(T* p, const Raw& raw) {
    if constexpr (VEC) *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&raw);
    else *p = raw.v[0];
}

// Window i, of h * w an image: its first pixel in x, how many of its rows and columns lie in the image, and, if all do, its
// pixel in y.
struct Window {
    i64 pixel, out;
    int rows, columns;
    __device__ __forceinline__ Window(int i, int h, int w, int H, int W) : pixel(i), out(i), rows(1), columns(1) {
        if constexpr (WINDOW > 1) {
            int row_of_all = i / w, column = i - row_of_all * w, n = row_of_all / h, row = row_of_all - n * h;
            pixel = ((i64)n * H + row * WINDOW) * W + column * WINDOW;
            out = ((i64)n * (H / WINDOW) + row) * (W / WINDOW) + column;
            rows = min(WINDOW, H - row * WINDOW), columns = min(WINDOW, W - column * WINDOW);
        }
    }
    __device__ __forceinline__ bool whole() const { return rows * columns == TAPS; }
    __device__ __forceinline__ bool has(int tap) const { return tap / WINDOW < rows && tap % WINDOW < columns; }
    __device__ __forceinline__ i64 at(int tap, int W) const { return pixel + tap / WINDOW * W + tap % WINDOW; }
};

// For float32 the centre is the mean: gain * x + const would lose the digits of x where the mean is large. A 16-bit x has no
// such digits: there it is 0.
__device__ __forceinline__ float centre_of(float mean) { return sizeof(T) == 4 ? mean : 0.0f; }

// A channel's coefficients, shared by a block's threads: z = gain * (x - centre) + offset, and
// dx = gain * d_preact + slope * (x - centre) + constant. z is an explicit fmaf, so that the backward recomputes the same bits
// and finds the same largest z as the forward.
struct __align__(16) Channel {
    float gain, offset, slope, constant, centre;
    __device__ __forceinline__ float centred(T x) const { return to_float(x) - centre_of(centre); }
    __device__ __forceinline__ float z(T x) const { return fmaf(gain, centred(x), offset); }
};

// Prepares the block's channels, one by a thread, and returns those of this thread. `means` as in input_gradients.
__device__ __forceinline__ const Channel* prepare(AFFINE, const float2* means, int C) {
    __shared__ Channel channels[32 * V];
    int count = blockDim.x * V, first = blockIdx.y * count;
    for (int j = threadIdx.y * blockDim.x + threadIdx.x; j < min(count, C - first); j += blockDim.x * blockDim.y) {
        int c = first + j;
        float gain = weight[c] * rstd[c], average = mean[c], rest = average - centre_of(average);
        float2 m = means ? means[c] : make_float2(0.0f, 0.0f);
        float slope = -gain * rstd[c] * m.y;
        channels[j] = {gain, fmaf(-gain, rest, bias[c]), slope, -gain * m.x - slope * rest, average};
    }
    __syncthreads();
    return channels + threadIdx.x * V;
}

// The largest z of a channel in a window, NaN if any is NaN, and its tap: the first of equal numbers.
__device__ __forceinline__ float largest(const Channel& channel, const Raw (&x)[TAPS], int k, int& tap) {
    float z = channel.z(x[0].v[k]);
    tap = 0;
#pragma unroll
    for (int t = 1; t < TAPS; t++) {
        float other = channel.z(x[t].v[k]);
        if (other > z || other != other) z = other, tap = t;
    }
    return z;
}
// The gradient of that z.
__device__ __forceinline__ float d_preact_of(float z, T dy) { return WINDOW == 1 || z > 0.0f ? to_float(dy) : 0.0f; }

// Sums each channel's values over the block's threads, in a fixed order. Threads with threadIdx.y = 0 get the sums.
__device__ __forceinline__ void block_sums(float (&values)[V]) {
    __shared__ __align__(16) float of_threads[THREADS * V];
    float* own = of_threads + (threadIdx.y * blockDim.x + threadIdx.x) * V;
    __syncthreads();  // the previous sum has been read
    for (int half = blockDim.y / 2; half > 0; half /= 2) {
        if (threadIdx.y < 2 * half) store<V>(own, values);
        __syncthreads();
        if (threadIdx.y < half) {
            float other[V];
            load<V>(own + half * blockDim.x * V, other);
#pragma unroll
            for (int k = 0; k < V; k++) values[k] += other[k];
        }
    }
}
// tile_sums[tile, c] = the block's sums of a and of b.
__device__ __forceinline__ void store_tile_sums(float2* tile_sums, int c, int C, float (&a)[V], float (&b)[V]) {
    block_sums(a);
    block_sums(b);
    if (threadIdx.y || c >= C) return;
#pragma unroll
    for (int k = 0; k < V; k++) tile_sums[(i64)blockIdx.x * C + c + k] = make_float2(a[k], b[k]);
}

// Channel statistics of x. The centre is x's first pixel.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void statistics(CentredStatistics* statistics, const T* __restrict__ x,
                                                                           int pixels, int C) {
    wait_for_previous();
    Share share(pixels, C);
    float first[V] = {}, sum[V] = {}, square[V] = {};
    if (share.end) load<V>(x + share.c, first);
#pragma unroll 4
    for (int i = share.first; i < share.end; i += blockDim.y) {
        float v[V];
        load<V>(x + (i64)i * C + share.c, v);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float d = v[k] - first[k];
            sum[k] += d;
            square[k] += d * d;
        }
    }
    block_sums(sum);
    block_sums(square);
    if (threadIdx.y || share.c >= C) return;
    float count = max(0, share.end - share.first);
#pragma unroll
    for (int k = 0; k < V; k++) statistics[(i64)blockIdx.x * C + share.c + k] = {count, first[k], sum[k], square[k]};
}

// Sums over the rows of `statistics`, CentredStatistics or pairs of sums, for channel c = blockIdx.x * 4 + threadIdx.x. Threads
// with threadIdx.y = 0 get them.
__device__ __forceinline__ double2 column_sums(const void* statistics, bool centred, int rows, int c, int C) {
    __shared__ double2 of_threads[256][4];
    double2 sum = {0.0, 0.0};
#pragma unroll 8
    for (int row = threadIdx.y; row < (c < C ? rows : 0); row += 256) {
        i64 i = (i64)row * C + c;
        double2 term = centred ? ((const CentredStatistics*)statistics)[i].raw() : ((const RawStatistics*)statistics)[i].raw();
        sum.x += term.x;
        sum.y += term.y;
    }
    for (int half = 128; half > 0; half /= 2) {
        if (threadIdx.y < 2 * half) of_threads[threadIdx.y][threadIdx.x] = sum;
        __syncthreads();
        if (threadIdx.y < half) {
            sum.x += of_threads[threadIdx.y + half][threadIdx.x].x;
            sum.y += of_threads[threadIdx.y + half][threadIdx.x].y;
        }
    }
    return sum;
}

// mean and rstd from channel statistics (rows, C) of `pixels` pixels: CentredStatistics where `centred`, else RawStatistics.
// running += momentum * (new - running), where the new variance is unbiased; not where the mean or the variance is not finite.
extern "C" __global__ void finish_statistics(float* mean, float* rstd, float* running_mean, float* running_var,
                                             const void* statistics, int centred, int rows, int pixels, int C, float momentum, float eps) {
    wait_for_previous();
    int c = blockIdx.x * 4 + threadIdx.x;
    double2 sum = column_sums(statistics, centred, rows, c, C);
    if (threadIdx.y || c >= C) return;
    float average = (float)(sum.x / pixels);
    double squares = fmax(sum.y - sum.x * sum.x / pixels, 0.0);  // of the deviations
    mean[c] = average;
    rstd[c] = rsqrtf((float)(squares / pixels) + eps);
    if (!isfinite(average) || !isfinite((float)squares)) return;
    running_mean[c] += momentum * (average - running_mean[c]);
    running_var[c] += momentum * ((float)(squares / max(pixels - 1, 1)) - running_var[c]);
}

// mean and rstd from the running statistics. They are copies: a later update does not change a saved tape. A thread a channel.
extern "C" __global__ void read_running(float* mean, float* rstd, const float* running_mean, const float* running_var, int C,
                                        float eps) {
    wait_for_previous();
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    mean[c] = running_mean[c];
    rstd[c] = rsqrtf(running_var[c] + eps);
}

// y = z, or with WINDOW=2 the ReLU of a window's largest z.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void normalize(T* __restrict__ y, const T* __restrict__ x, AFFINE,
                                                                          EXTENT) {
    wait_for_previous();
    int h = H / WINDOW, w = W / WINDOW;
    Share share(N * h * w, C);
    const Channel* channels = prepare(weight, bias, mean, rstd, nullptr, C);
#pragma unroll UNROLL
    for (int i = share.first; i < share.end; i += blockDim.y) {
        Window window(i, h, w, H, W);
        Raw taps[TAPS];
#pragma unroll
        for (int t = 0; t < TAPS; t++) taps[t] = fetch(x + window.at(t, W) * C + share.c);
        float out[V];
#pragma unroll
        for (int k = 0; k < V; k++) {
            int tap;
            out[k] = largest(channels[k], taps, k, tap);
            if (WINDOW > 1 && out[k] < 0.0f) out[k] = 0.0f;
        }
        store<V>(y + i * (i64)C + share.c, out);
    }
}

// tile_sums: the sums of d_preact and of d_preact * (x - centre) over each tile.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void backward_sums(float2* tile_sums, const T* __restrict__ dy,
                                                                              const T* __restrict__ x, AFFINE, EXTENT) {
    wait_for_previous();
    int h = H / WINDOW, w = W / WINDOW;
    Share share(N * h * w, C);
    const Channel* channels = prepare(weight, bias, mean, rstd, nullptr, C);
    float sum[V] = {}, product[V] = {};
#pragma unroll UNROLL
    for (int i = share.first; i < share.end; i += blockDim.y) {
        Window window(i, h, w, H, W);
        Raw taps[TAPS], dout = fetch(dy + i * (i64)C + share.c);
#pragma unroll
        for (int t = 0; t < TAPS; t++) taps[t] = fetch(x + window.at(t, W) * C + share.c);
#pragma unroll
        for (int k = 0; k < V; k++) {
            int chosen;
            float d_preact = d_preact_of(largest(channels[k], taps, k, chosen), dout.v[k]);
            T source = taps[0].v[k];
#pragma unroll
            for (int t = 1; t < TAPS; t++)
                if (t == chosen) source = taps[t].v[k];
            sum[k] += d_preact;
            product[k] += d_preact * channels[k].centred(source);
        }
    }
    store_tile_sums(tile_sums, share.c, C, sum, product);
}

// From tile_sums (rows, C) of backward_sums: means, float2 (C), of d_preact and of d_preact * xhat over `pixels` pixels, and
// their sums, dbias and dweight, either of which may be null.
extern "C" __global__ void finish_gradients(float2* means, float* dweight, int add_weight, float* dbias, int add_bias,
                                            const float2* tile_sums, const float* mean, const float* rstd, int rows,
                                            int pixels, int C) {
    wait_for_previous();
    int c = blockIdx.x * 4 + threadIdx.x;
    double2 sum = column_sums(tile_sums, false, rows, c, C);
    if (threadIdx.y || c >= C) return;
    sum.y = (sum.y - (mean[c] - centre_of(mean[c])) * sum.x) * rstd[c];
    means[c] = make_float2((float)(sum.x / pixels), (float)(sum.y / pixels));
    if (dweight) dweight[c] = (add_weight ? dweight[c] : 0.0f) + (float)sum.y;
    if (dbias) dbias[c] = (add_bias ? dbias[c] : 0.0f) + (float)sum.x;
}

// dx = gain * (d_preact - means.x - xhat * means.y), gain = weight * rstd. Null means are taken as 0: then mean and rstd are
// constants. sums: float (tiles, C), dx summed over each tile before rounding.
extern "C" __global__ __launch_bounds__(THREADS, RESIDENT) void input_gradients(
    T* __restrict__ dx, float* sums, const float2* means, const T* __restrict__ dy, const T* __restrict__ x, AFFINE, EXTENT) {
    wait_for_previous();
    int h = CEIL_DIV(H, WINDOW), w = CEIL_DIV(W, WINDOW);
    Share share(N * h * w, C);
    const Channel* channels = prepare(weight, bias, mean, rstd, means, C);
    float sum[V] = {};
#pragma unroll UNROLL
    for (int i = share.first; i < share.end; i += blockDim.y) {
        asm volatile("" ::: "memory");  // reload channels in each round: all of them would not fit in registers
        Window window(i, h, w, H, W);
        Raw taps[TAPS] = {}, dout = {};
        if (window.whole()) dout = fetch(dy + window.out * C + share.c);
#pragma unroll
        for (int t = 0; t < TAPS; t++)
            if (window.has(t)) taps[t] = fetch(x + window.at(t, W) * C + share.c);
#pragma unroll
        for (int k = 0; k < V; k++) {  // the taps become dx
            int chosen;
            const Channel& channel = channels[k];
            float d_preact = d_preact_of(largest(channel, taps, k, chosen), dout.v[k]);
#pragma unroll
            for (int t = 0; t < TAPS; t++) {
                float value = fmaf(channel.slope, channel.centred(taps[t].v[k]), channel.constant);
                if (t == chosen) value = fmaf(channel.gain, d_preact, value);
                taps[t].v[k] = from_float<T>(value);
                if (window.has(t)) sum[k] += value;
            }
        }
#pragma unroll
        for (int t = 0; t < TAPS; t++)
            if (window.has(t)) put(dx + window.at(t, W) * C + share.c, taps[t]);
    }
    block_sums(sum);
    if (threadIdx.y || share.c >= C) return;
#pragma unroll
    for (int k = 0; k < V; k++) sums[(i64)blockIdx.x * C + share.c + k] = sum[k];
}
