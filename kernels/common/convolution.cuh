// The sizes of a convolution with groups and dilation, and which pixels a tap connects.
#pragma once
#include "common.cuh"

// x (N, H, W, C) to out (N, h, w, K): out[i, j, k] is made of x[i * stride - padding + r * dilation, likewise, c] for the taps
// (r, s) of R x S and the channels c of k's group.
struct Convolution {
    int N, H, W, C, h, w, K, R, S, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w, groups;
};

// The row (or column) of an image of `limit` that tap `tap` connects with row `i` of the other, or -1: of x for one of out,
// and with BACKWARD of out for one of x.
template <bool BACKWARD>
__device__ __forceinline__ int connected(int i, int tap, int stride, int padding, int dilation, int limit) {
    if constexpr (BACKWARD) {
        i += padding - tap * dilation;
        if (stride > 1 && i > 0) i = i % stride ? -1 : i / stride;
    } else {
        i = i * stride - padding + tap * dilation;
    }
    return i < limit ? max(i, -1) : -1;
}
