// Embedding: out (count, dim) = rows of weight (num, dim) by indices (count) int32; -1 gives zeros, other strays NaN.
// All of type T, row-major; out is overwritten. Its gradient is a sum of rows: see shape.cu.
#include "common.cuh"

// One thread an element of out.
extern "C" __global__ void gather(T* out, const int* indices, const T* weight, i64 size, int num, int dim) {
    wait_for_previous();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    i64 n = size <= 0xffffffffll ? (u32)i / (u32)dim : i / dim;
    int index = indices[n];
    bool inside = index >= 0 && index < num;
    out[i] = inside ? weight[index * (i64)dim + i - n * dim] : from_float<T>(index == -1 ? 0.0f : __int_as_float(0x7fc00000));
}
