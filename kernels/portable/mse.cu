// Mean over all elements of weight[n] * (pred - target)^2. pred, target, dpred, dtarget (N, size): T, row-major.
//
// float32: weight (N) or null for ones; partials (N, tiles), the plain sums of squares of `chunk` elements each, always
// added in the same order; loss and dloss, scalars; inverse = 1 / (N * size). Outputs overwrite; gradients accumulate
// where their `add` is set. VEC=1: size, chunk and every T address are multiples of a 16-byte pack.
// Launch: squares and gradients N * tiles blocks of a multiple of 32 threads.
#include "reduce.cuh"
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;

extern "C" __global__ void squares(float* partials, const T* pred, const T* target, i64 size, int chunk, int tiles) {
    wait_for_previous();
    i64 begin = (i64)(blockIdx.x % tiles) * chunk, end = min(size, begin + chunk), start = (i64)(blockIdx.x / tiles) * size;
    float sum = 0.0f;
    for (i64 i = begin + threadIdx.x * V; i < end; i += blockDim.x * V) {
        float a[V], b[V];
        load<V>(pred + start + i, a);
        load<V>(target + start + i, b);
#pragma unroll
        for (int k = 0; k < V; k++) sum += (a[k] - b[k]) * (a[k] - b[k]);
    }
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// One block.
extern "C" __global__ void loss(float* loss, const float* partials, const float* weight, int N, int tiles, float inverse) {
    wait_for_previous();
    float sum = 0.0f;
    for (int i = threadIdx.x; i < N * tiles; i += blockDim.x) sum += (weight ? weight[i / tiles] : 1.0f) * partials[i];
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) *loss = sum * inverse;
}

// dpred and dtarget, either may be null.
extern "C" __global__ void gradients(T* dpred, int add, T* dtarget, int add_target, const float* dloss, const T* pred, const T* target,
                                     const float* weight, i64 size, int chunk, int tiles, float inverse) {
    wait_for_previous();
    i64 n = blockIdx.x / tiles, begin = (i64)(blockIdx.x % tiles) * chunk, end = min(size, begin + chunk), start = n * size;
    float factor = 2.0f * inverse * *dloss * (weight ? weight[n] : 1.0f);
    for (i64 i = begin + threadIdx.x * V; i < end; i += blockDim.x * V) {
        float a[V], b[V];
        load<V>(pred + start + i, a);
        load<V>(target + start + i, b);
#pragma unroll
        for (int k = 0; k < V; k++) {
            a[k] = factor * (a[k] - b[k]);
            b[k] = -a[k];
        }
        if (dpred) store<V>(dpred + start + i, a, add);
        if (dtarget) store<V>(dtarget + start + i, b, add_target);
    }
}

// One thread a sample.
extern "C" __global__ void weight_gradient(float* dweight, int add, const float* dloss, const float* partials, int N, int tiles, float inverse) {
    wait_for_previous();
    int n = blockIdx.x * blockDim.x + threadIdx.x;
    if (n >= N) return;
    float sum = 0.0f;
    for (int t = 0; t < tiles; t++) sum += partials[(i64)n * tiles + t];
    dweight[n] = (add ? dweight[n] : 0.0f) + *dloss * inverse * sum;
}
