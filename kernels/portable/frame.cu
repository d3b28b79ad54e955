// A frame: bytes of the estimate of an image, `blended` with those of `last`, and sums (N, rows) of the estimate over `row`
// elements each, which show values that are not finite. PREDICTS: what the network's output `out` is (denoised.cuh).
// Where `guidance` is not null, of u + guidance (c - u), c and u the estimates of images n and N + n of 2 N.
// bytes, last: bytes (N, rows, row). x, out: T, of as many elements an image, of N images or 2 N; WIDE: of out's twice as many
// channels as x's `channels` the first half counts. sigmas: float, one an image, of the images themselves, data.std times that
// of y. sums: float (N, rows). guidance, share: one float. Any alignment; outputs overwrite.
// Launch: grid N rows, a block of a multiple of 32 threads for each row.
#include "blend.cuh"
#include "denoised.cuh"
#include "reduce.cuh"

extern "C" __global__ void frame(u8* bytes, float* sums, const T* __restrict__ x, const T* __restrict__ out,
                                 const float* __restrict__ sigmas, const float* guidance, const u8* last, const float* share, Data data,
                                 int channels, int rows, i64 row) {
    wait_for_previous();
    int n = blockIdx.x / rows, N = gridDim.x / rows;
    i64 without = gridDim.x * row;  // from an image with a class to the same without
    Shares<Predicts::PREDICTS> shares(sigmas[n] / data.std, data), plain_shares(sigmas[guidance ? N + n : n] / data.std, data);
    auto estimate = [&](const Shares<Predicts::PREDICTS>& shares, i64 i) {
        return shares.estimate(to_float(x[i]), to_float(out[WIDE ? i + i / channels * channels : i]), data);
    };
    float sum = 0.0f;
    for (i64 i = blockIdx.x * row + threadIdx.x; i < (blockIdx.x + 1) * row; i += blockDim.x) {
        float image = estimate(shares, i);
        if (guidance) {
            float plain = estimate(plain_shares, without + i);
            image = plain + (image - plain) * *guidance;
        }
        bytes[i] = blended(image, last[i], *share);
        sum += image;
    }
    sum = block_reduce<Sum>(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
