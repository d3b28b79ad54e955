// The estimate of an image, D(x; sigma) = c_skip x + c_out F, of what a network's output F is: cudiff/diffusion/prediction.py has
// the table, EDM (arXiv 2206.00364, Table 1) that of EDM, of images y = (image - mean) / std whose deviation is sigma_data.
#pragma once
#include "common.cuh"

enum class Predicts { EDM, EPS, X0, V, FLOW };

struct Data { float sigma_data, mean, std; };

__device__ __forceinline__ float c_in_of(float sigma, Data data) { return 1.0f / sqrtf(sigma * sigma + data.sigma_data * data.sigma_data); }

// What of x and of the network's output is in the estimate of the image.
template <Predicts KIND> struct Shares {
    float c_skip, c_out;

    // sigma is that of y; what is not EDM has y = image: mean 0, std 1.
    __device__ __forceinline__ Shares(float sigma, Data data) {
        if (KIND == Predicts::EDM) {
            float c_in = c_in_of(sigma, data);
            c_skip = data.sigma_data * c_in * (data.sigma_data * c_in), c_out = data.sigma_data * sigma * c_in;
        }
        if (KIND == Predicts::EPS) c_skip = 1.0f, c_out = -sigma;
        if (KIND == Predicts::X0) c_skip = 0.0f, c_out = 1.0f;
        if (KIND == Predicts::V) c_skip = 1.0f / (sigma * sigma + 1.0f), c_out = -sigma / sqrtf(sigma * sigma + 1.0f);
        if (KIND == Predicts::FLOW) c_skip = 1.0f / (sigma + 1.0f), c_out = -sigma / (sigma + 1.0f);
    }
    __device__ __forceinline__ float estimate(float x, float out, Data data) const {
        if (KIND == Predicts::X0) return out;  // of an x that is not finite too
        return data.mean + c_skip * (x - data.mean) + data.std * c_out * out;
    }
};
