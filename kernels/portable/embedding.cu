// Embedding: out (count, dim) = rows of weight (num, dim) by indices (count) int32; -1 gives zeros, other strays NaN.
// All of type T, row-major. gather overwrites out; scatter_add overwrites dweight or, with `accumulate`, adds to it.
#include "common.cuh"

// One thread an element of out.
extern "C" __global__ void gather(T* out, const int* indices, const T* weight, i64 size, int num, int dim) {
    wait_for_previous();
    i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= size) return;
    int index = indices[i / dim];
    bool inside = index >= 0 && index < num;
    out[i] = inside ? weight[(i64)index * dim + i % dim] : from_float<T>(index == -1 ? 0.0f : __int_as_float(0x7fc00000));
}

// Block (row, part of the columns): a row sums its own hits in the order of the batch, so nothing is atomic.
extern "C" __global__ void scatter_add(T* dweight, const int* indices, const T* dout, int count, int dim, int accumulate) {
    wait_for_previous();
    int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= dim) return;
    T* target = dweight + (i64)blockIdx.x * dim + column;
    float sum = 0.0f;
    for (int n = 0; n < count; n++)
        if (indices[n] == blockIdx.x) sum += to_float(dout[(i64)n * dim + column]);
    *target = from_float<T>(accumulate ? to_float(*target) + sum : sum);
}
