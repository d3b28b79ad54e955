// The sum of the parts of a product whose depth was split, in their order, and what its epilogue adds.
// variants: OUT=float,bf16,half
//
// out[row][column] = sum over splits of partials[split][row][column], + bias[column] + emb[row / rows_per_image][column]
// + addend[row][column]. partials: float (splits, rows, columns); out: OUT with rows of ldo elements, overwritten; addend:
// OUT like out, or null, or out itself; bias (columns,) and emb: float or null. Any launch shape (grid-stride).
#include "common.cuh"

extern "C" __global__ void sum_splits(const float* __restrict__ partials, const float* __restrict__ bias, const float* __restrict__ emb,
                                      const OUT* addend, OUT* out, int splits, i64 rows, int columns, i64 ldo, int rows_per_image) {
    i64 count = rows * columns;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        float sum = 0.0f;
#pragma unroll 4
        for (int s = 0; s < splits; s++) sum += partials[s * count + i];
        i64 row = i / columns;
        int column = i - row * columns;
        if (bias) sum += bias[column];
        if (emb) sum += emb[row / rows_per_image * columns + column];
        if (addend) sum += to_float(addend[row * ldo + column]);
        out[row * ldo + column] = from_float<OUT>(sum);
    }
}
