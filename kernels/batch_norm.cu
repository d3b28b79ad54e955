// Batch norm's own part beside the group norm kernels: the running statistics. All float32 (C); one thread a channel.
// variants:
#include "common.cuh"

// Running mean and variance move by the share `momentum` towards the batch's; `unbias` is n / (n - 1). Updated in place.
extern "C" __global__ void update_running(float* running_mean, float* running_var, const float* mean, const float* rstd,
                                          int C, float momentum, float unbias, float eps) {
    wait_for_previous();
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    float var = unbias * (1.0f / (rstd[c] * rstd[c]) - eps);
    running_mean[c] += momentum * (mean[c] - running_mean[c]);
    running_var[c] += momentum * (var - running_var[c]);
}

// mean, rstd (overwritten) from the running statistics: copies, so that a later update does not reach a saved tape.
extern "C" __global__ void read_running(float* mean, float* rstd, const float* running_mean, const float* running_var, int C, float eps) {
    wait_for_previous();
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= C) return;
    mean[c] = running_mean[c];
    rstd[c] = rsqrtf(running_var[c] + eps);
}
