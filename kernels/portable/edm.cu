// EDM's preconditioning (arXiv 2206.00364, Table 1) for each image's noise level sigma[n], on images of any mean and
// standard deviation `data_std`: y below is (image - data_mean) / data_std, sigma that of y.
//
// c_in = 1 / sqrt(sigma^2 + sigma_data^2), c_skip = (sigma_data c_in)^2, c_out = sigma_data sigma c_in, c_noise = c_noise_scale
// log(sigma).
//   mix     for training: log(sigma[n]) = P_mean + P_std draw[n]; from images and noise z the network's input
//           x = c_in (y + sigma z), and what its output should be, target = c_in (sigma / sigma_data y - sigma_data z)
//   input   the network's input `scaled` = c_in x, x standardised as y is; c_noise may be null: with data_mean = 0 this
//           is then the gradient of x for that of scaled
//   output  the estimate of the image, data_mean + data_std (c_skip x + c_out out), x standardised; x or out may be null:
//           with data_mean = 0 this is then the gradient of out or x for that of the estimate
// Images, x, noise, out, target, scaled, denoised: T (N, size); draw, sigma, c_noise: float (N); outputs overwrite. `sigma` given
// to input and output is of the images, data_std times that of y.
// VEC=1: size and every T address are multiples of a 16-byte pack.
// Launch: grid (N, any), any block.
#include "denoised.cuh"
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;

// each(i) for this thread's places in the image blockIdx.x.
template <class Each> __device__ __forceinline__ void for_image(i64 size, Each each) {
    for (i64 i = ((i64)blockIdx.y * blockDim.x + threadIdx.x) * V; i < size; i += (i64)gridDim.y * blockDim.x * V)
        each(blockIdx.x * size + i);
}

__device__ __forceinline__ bool leads() { return blockIdx.y == 0 && threadIdx.x == 0; }

extern "C" __global__ void mix(T* x, T* target, float* c_noise, const T* __restrict__ images, const T* __restrict__ noise,
                               const float* __restrict__ draw, float P_mean, float P_std, float c_noise_scale, Data data, i64 size) {
    wait_for_previous();
    float level = P_mean + P_std * draw[blockIdx.x], sigma = expf(level), c_in = c_in_of(sigma, data);
    if (leads()) c_noise[blockIdx.x] = c_noise_scale * level;
    for_image(size, [&](i64 i) {
        float y[V], z[V], in[V], out[V];
        load<V>(images + i, y);
        load<V>(noise + i, z);
#pragma unroll
        for (int k = 0; k < V; k++) {
            y[k] = (y[k] - data.mean) / data.std;
            in[k] = c_in * y[k] + sigma * c_in * z[k];
            out[k] = sigma * c_in / data.sigma_data * y[k] - data.sigma_data * c_in * z[k];
        }
        store<V>(x + i, in);
        store<V>(target + i, out);
    });
}

extern "C" __global__ void input(T* scaled, float* c_noise, const T* __restrict__ x, const float* __restrict__ sigmas,
                                 float c_noise_scale, Data data, i64 size) {
    wait_for_previous();
    float sigma = sigmas[blockIdx.x] / data.std, c_in = c_in_of(sigma, data);
    if (c_noise && leads()) c_noise[blockIdx.x] = c_noise_scale * logf(sigma);
    for_image(size, [&](i64 i) {
        float v[V];
        load<V>(x + i, v);
#pragma unroll
        for (int k = 0; k < V; k++) v[k] = c_in * ((v[k] - data.mean) / data.std);
        store<V>(scaled + i, v);
    });
}

extern "C" __global__ void output(T* denoised, const T* __restrict__ x, const T* __restrict__ out, const float* __restrict__ sigmas,
                                  Data data, i64 size) {
    wait_for_previous();
    Shares<Predicts::EDM> shares(sigmas[blockIdx.x] / data.std, data);
    for_image(size, [&](i64 i) {
        float v[V] = {}, net[V] = {};
        if (x) load<V>(x + i, v);
        if (out) load<V>(out + i, net);
#pragma unroll
        for (int k = 0; k < V; k++) v[k] = shares.estimate(x ? v[k] : data.mean, net[k], data);
        store<V>(denoised + i, v);
    });
}
