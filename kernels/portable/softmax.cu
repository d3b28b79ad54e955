// Softmax, log-softmax and cross-entropy over the rows of x (M, K), row-major, T. out T; stats float2 (M): each row's
// maximum and its sum of exp(x - maximum), which the backward reads; losses, loss, dloss float32; labels int32 (M).
// Outputs overwrite; dx accumulates where `add`. NaN comes out of a row whose label lies outside 0 to K - 1.
// Launch, unless said otherwise: M blocks of a multiple of 32 threads.
#include "reduce.cuh"

__device__ __forceinline__ float2 row_stats(const T* row, int K) {
    float largest = Max::identity(), sum = 0.0f;
    for (int k = threadIdx.x; k < K; k += blockDim.x) largest = fmaxf(largest, to_float(row[k]));
    largest = block_reduce<Max>(largest);
    for (int k = threadIdx.x; k < K; k += blockDim.x) sum += expf(to_float(row[k]) - largest);
    return make_float2(largest, block_reduce<Sum>(sum));
}

extern "C" __global__ void softmax(T* out, float2* stats, const T* x, int K, int log) {
    wait_for_previous();
    const T* row = x + (i64)blockIdx.x * K;
    float2 own = row_stats(row, K);
    float factor = 1.0f / own.y, offset = logf(own.y);
    for (int k = threadIdx.x; k < K; k += blockDim.x) {
        float shifted = to_float(row[k]) - own.x;
        out[(i64)blockIdx.x * K + k] = from_float<T>(log ? shifted - offset : expf(shifted) * factor);
    }
    if (threadIdx.x == 0) stats[blockIdx.x] = own;
}

// dx = p * (dout - sum(p * dout)), or dout - p * sum(dout) where `log`.
extern "C" __global__ void softmax_backward(T* dx, int add, const T* dout, const T* x, const float2* stats, int K, int log) {
    wait_for_previous();
    i64 start = (i64)blockIdx.x * K;
    float2 own = stats[blockIdx.x];
    float factor = 1.0f / own.y, sum = 0.0f;
    for (int k = threadIdx.x; k < K; k += blockDim.x)
        sum += to_float(dout[start + k]) * (log ? 1.0f : expf(to_float(x[start + k]) - own.x) * factor);
    sum = block_reduce<Sum>(sum);
    for (int k = threadIdx.x; k < K; k += blockDim.x) {
        float p = expf(to_float(x[start + k]) - own.x) * factor, g = to_float(dout[start + k]);
        float value = log ? g - p * sum : p * (g - sum);
        dx[start + k] = from_float<T>(add ? to_float(dx[start + k]) + value : value);
    }
}

extern "C" __global__ void cross_entropy(float* losses, float2* stats, const T* x, const int* labels, int K) {
    wait_for_previous();
    const T* row = x + (i64)blockIdx.x * K;
    float2 own = row_stats(row, K);
    if (threadIdx.x) return;
    int label = labels[blockIdx.x];
    bool inside = label >= 0 && label < K;
    losses[blockIdx.x] = inside ? logf(own.y) - (to_float(row[label]) - own.x) : __int_as_float(0x7fc00000);
    stats[blockIdx.x] = own;
}

// loss = mean of losses (M), one block.
extern "C" __global__ void mean(float* loss, const float* losses, int M) {
    wait_for_previous();
    float sum = 0.0f;
    for (int m = threadIdx.x; m < M; m += blockDim.x) sum += losses[m];
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) *loss = sum / M;
}

// dx = (p - [k = label]) * dloss / M.
extern "C" __global__ void cross_entropy_backward(T* dx, int add, const float* dloss, const T* x, const float2* stats,
                                                  const int* labels, int K) {
    wait_for_previous();
    i64 start = (i64)blockIdx.x * K;
    float2 own = stats[blockIdx.x];
    float factor = *dloss / gridDim.x, p = factor / own.y;
    int label = labels[blockIdx.x];
    for (int k = threadIdx.x; k < K; k += blockDim.x) {
        float value = expf(to_float(x[start + k]) - own.x) * p - (k == label ? factor : 0.0f);
        dx[start + k] = from_float<T>(add ? to_float(dx[start + k]) + value : value);
    }
}
