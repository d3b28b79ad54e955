// The sizes of a convolution with groups and dilation, and which pixels a tap connects.
#pragma once
#include "common.cuh"

// From x (N, H, W, C) to out (N, h, w, K). Pixel (i, j) of out reads row i * stride - padding + r * dilation of x for each tap
// (r, s) of R x S, and columns likewise; its channel k reads the channels of x in k's group.
struct Convolution {
    int N, H, W, C, h, w, K, R, S, stride_h, stride_w, padding_h, padding_w, dilation_h, dilation_w, groups;
};

// The row that tap `tap` connects with row i: the row of x for a row of out, or with BACKWARD the row of out for a row of x. -1
// where there is none in 0 to limit - 1. The same for columns.
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
