// Mean over all elements of weight[n] * (pred - target)^2, or of Huber's loss of pred - target, which has no weight and N = 1:
// e^2 / 2 where e = |pred - target| is up to delta, delta * (e - delta / 2) beyond.
// pred, target, dpred, dtarget (N, size): T, row-major.
//
// float32: weight (N) or null for ones; partials (N, tiles), the plain sums of `chunk` elements' terms each, always
// added in the same order; loss and dloss, scalars; inverse = 1 / (N * size). Outputs overwrite; gradients accumulate
// where their `add` is set. VEC=1: size, chunk and every T address are multiples of a 16-byte pack.
// Launch: squares, gradients and Huber's N * tiles blocks of a multiple of 32 threads.
#include "reduce.cuh"
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;

// partials = the sums of term(pred - target).
template <typename F>
__device__ __forceinline__ void sum_terms(float* partials, const T* pred, const T* target, i64 size, int chunk, int tiles, F term) {
    i64 begin = (i64)(blockIdx.x % tiles) * chunk, end = min(size, begin + chunk), start = (i64)(blockIdx.x / tiles) * size;
    float sum = 0.0f;
    for (i64 i = begin + threadIdx.x * V; i < end; i += blockDim.x * V) {
        float a[V], b[V];
        load<V>(pred + start + i, a);
        load<V>(target + start + i, b);
#pragma unroll
        for (int k = 0; k < V; k++) sum += term(a[k] - b[k]);
    }
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

__device__ __forceinline__ float clamped(float x, float delta) { return x > delta ? delta : x < -delta ? -delta : x; }

extern "C" __global__ void squares(float* partials, const T* pred, const T* target, i64 size, int chunk, int tiles) {
    wait_for_previous();
    sum_terms(partials, pred, target, size, chunk, tiles, [](float error) { return error * error; });
}
extern "C" __global__ void huber(float* partials, const T* pred, const T* target, float delta, i64 size, int chunk, int tiles) {
    wait_for_previous();
    sum_terms(partials, pred, target, size, chunk, tiles, [=](float error) {
        float near = clamped(error, delta);
        return near * (error - 0.5f * near);
    });
}

// One block.
extern "C" __global__ void loss(float* loss, const float* partials, const float* weight, int N, int tiles, float inverse) {
    wait_for_previous();
    float sum = 0.0f;
    for (int i = threadIdx.x; i < N * tiles; i += blockDim.x) sum += (weight ? weight[i / tiles] : 1.0f) * partials[i];
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) *loss = sum * inverse;
}

// dpred = slope(pred - target), dtarget its opposite; either may be null.
template <typename F>
__device__ __forceinline__ void write_gradients(T* dpred, int add, T* dtarget, int add_target, const T* pred, const T* target, i64 size,
                                                int chunk, int tiles, F slope) {
    i64 begin = (i64)(blockIdx.x % tiles) * chunk, end = min(size, begin + chunk), start = (i64)(blockIdx.x / tiles) * size;
    for (i64 i = begin + threadIdx.x * V; i < end; i += blockDim.x * V) {
        float a[V], b[V];
        load<V>(pred + start + i, a);
        load<V>(target + start + i, b);
#pragma unroll
        for (int k = 0; k < V; k++) {
            a[k] = slope(a[k] - b[k]);
            b[k] = -a[k];
        }
        if (dpred) store<V>(dpred + start + i, a, add);
        if (dtarget) store<V>(dtarget + start + i, b, add_target);
    }
}

extern "C" __global__ void gradients(T* dpred, int add, T* dtarget, int add_target, const float* dloss, const T* pred, const T* target,
                                     const float* weight, i64 size, int chunk, int tiles, float inverse) {
    wait_for_previous();
    float factor = 2.0f * inverse * *dloss * (weight ? weight[blockIdx.x / tiles] : 1.0f);
    write_gradients(dpred, add, dtarget, add_target, pred, target, size, chunk, tiles, [=](float error) { return factor * error; });
}
extern "C" __global__ void huber_gradients(T* dpred, int add, T* dtarget, int add_target, const float* dloss, const T* pred,
                                           const T* target, float delta, i64 size, int chunk, int tiles, float inverse) {
    wait_for_previous();
    float factor = inverse * *dloss;
    write_gradients(dpred, add, dtarget, add_target, pred, target, size, chunk, tiles,
                    [=](float error) { return factor * clamped(error, delta); });
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
