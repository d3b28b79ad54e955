// total[i] += term[i]: how the tape adds a gradient that an operation did not add itself.
// variants: TOTAL=float,bf16,half TERM=float,bf16,half
// total: TOTAL, accumulated in place; term: TERM; n elements. Any launch shape (grid-stride).
#include "common.cuh"

extern "C" __global__ void add_into(TOTAL* __restrict__ total, const TERM* __restrict__ term, i64 n) {
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        total[i] = from_float<TOTAL>(to_float(total[i]) + to_float(term[i]));
}
