// Dropout: out (rows, size) of type T = x * scale where the element is kept, else 0; the same kernel is its backward.
//
// Element e of row n is kept where lane e % 4 of Philox counter (e / 4, first + n, *step, stream), >> 8, is at least
// `threshold`.
// Overwrites out or, with `accumulate`, adds to it. The step is copied to used_step where that is not null.
// One thread makes 4 elements: launch (ceil(size / (4 * blockDim.x)), up to 65535 rows; the rest are looped over).
#include "philox.cuh"

struct __align__(4 * sizeof(T)) Four { T v[4]; };

extern "C" __global__ void dropout(T* out, const T* x, int rows, int size, u64 seed, u32 stream, u32 first, const u32* step,
                                   u32* used_step, u32 threshold, float scale, int accumulate) {
    wait_for_previous();
    int group = blockIdx.x * blockDim.x + threadIdx.x, start = 4 * group;
    u32 now = *step;
    if (used_step && group == 0 && blockIdx.y == 0) *used_step = now;
    if (start >= size) return;
    bool whole = size % 4 == 0 && ((u64)x | (u64)out) % sizeof(Four) == 0;
    for (int row = blockIdx.y; row < rows; row += gridDim.y) {
        uint4 bits = philox(group, first + row, now, stream, seed);
        u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
        i64 at = (i64)row * size + start;
        Four in, sum;
        if (whole) in = *(const Four*)(x + at);
        if (whole && accumulate) sum = *(const Four*)(out + at);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (start + j >= size) break;
            float value = (words[j] >> 8) >= threshold ? to_float(whole ? in.v[j] : x[at + j]) * scale : 0.0f;
            if (accumulate) value += to_float(whole ? sum.v[j] : out[at + j]);
            if (whole) sum.v[j] = from_float<T>(value);
            else out[at + j] = from_float<T>(value);
        }
        if (whole) *(Four*)(out + at) = sum;
    }
}
