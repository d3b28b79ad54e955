// Dropout: out (rows, size) of type T = x * scale where the element is kept, else 0; the same kernel is its backward.
//
// Overwrites out or, with `accumulate`, adds to it. The step is copied to used_step where that is not null.
// One thread makes 8 elements: launch (ceil(size / (8 * blockDim.x)), up to 65535 rows; the rest are looped over).
#include "dropout.cuh"

struct __align__(8 * sizeof(T)) Eight { T v[8]; };

extern "C" __global__ void dropout(T* out, const T* x, int rows, int size, DRAWS, u32* used_step, float scale,
                                   int accumulate) {
    wait_for_previous();
    int group = blockIdx.x * blockDim.x + threadIdx.x, start = 8 * group;
    u32 now = *step;
    if (used_step && group == 0 && blockIdx.y == 0) *used_step = now;
    if (start >= size) return;
    bool whole = size % 8 == 0 && ((u64)x | (u64)out) % sizeof(Eight) == 0;
    for (int row = blockIdx.y; row < rows; row += gridDim.y) {
        u32 kept = draw_byte(group, row, now, seed, stream, first, threshold);
        i64 at = (i64)row * size + start;
        Eight in, sum;
        if (whole) in = *(const Eight*)(x + at);
        if (whole && accumulate) sum = *(const Eight*)(out + at);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (start + j >= size) break;
            float value = kept >> j & 1 ? to_float(whole ? in.v[j] : x[at + j]) * scale : 0.0f;
            if (accumulate) value += to_float(whole ? sum.v[j] : out[at + j]);
            if (whole) sum.v[j] = from_float<T>(value);
            else out[at + j] = from_float<T>(value);
        }
        if (whole) *(Eight*)(out + at) = sum;
    }
}
