// What EDM's loss gives its network and asks of it: images y and noise z, mixed in two ways for each image's noise level.
// variants: T=float,bf16,half VEC=0,1
//
// log_sigma[n] = mean + std * draw[n], c = 1 / sqrt(sigma^2 + sigma_data^2);
// x = c * (y + sigma * z), target = c * (sigma / sigma_data * y - sigma_data * z).
// images, noise, x, target: T (N, size); draw and log_sigma: float (N); outputs overwrite.
// VEC=1: size and every T address are multiples of a 16-byte pack.
// Launch: grid (any, N), any block.
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;

extern "C" __global__ void mix(T* x, T* target, float* log_sigma, const T* __restrict__ images, const T* __restrict__ noise,
                               const float* __restrict__ draw, float mean, float std, float sigma_data, i64 size) {
    wait_for_previous();
    i64 n = blockIdx.y, start = n * size;
    float level = mean + std * draw[n], sigma = expf(level), c = 1.0f / sqrtf(sigma * sigma + sigma_data * sigma_data);
    if (blockIdx.x == 0 && threadIdx.x == 0) log_sigma[n] = level;
    for (i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * V; i < size; i += (i64)gridDim.x * blockDim.x * V) {
        float y[V], z[V], in[V], out[V];
        load<V>(images + start + i, y);
        load<V>(noise + start + i, z);
#pragma unroll
        for (int k = 0; k < V; k++) {
            in[k] = c * y[k] + sigma * c * z[k];
            out[k] = sigma * c / sigma_data * y[k] - sigma_data * c * z[k];
        }
        store<V>(x + start + i, in);
        store<V>(target + start + i, out);
    }
}
