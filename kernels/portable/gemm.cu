// Split K: sums the parts of a product whose depth was split, and applies the epilogue. And whole products of few rows.
//
//   sum_splits  out[row][column] = sum over splits of partials[split][row][column] + bias[column]
//                                  + emb[row / rows_per_image][column] + addend[row][column]
//   few_rows    out[row][column] = a[row] · b[column] + the same
//
//   partials    float (splits, rows, columns), with rows · columns < 2^32.
//   bias, emb   float (columns,) and (images, columns), or null.
//   addend      OUT like out, or null. May be `out` itself.
//   out         OUT, rows of ldo elements, overwritten.
//   a, b        float (rows, depth) and (columns, depth), rows of lda and ldb elements. At most 8 rows.
// Sums are in a fixed order. VEC=1: columns and ldo are multiples of 4, and all arrays are aligned to 4 elements; a thread of
// sum_splits then adds 4 columns. For few_rows depth, lda and ldb are such multiples, and a and b aligned.
// Launch: few_rows 256 threads, grid ceil(columns / 8), of more than two rows half as many. sum_splits (256 / lanes, lanes) threads, each adding every lanes-th split; grid ceil(rows · columns / (256 / lanes · (4 or 1))).
#include "few_rows.cuh"

constexpr int V = VEC ? 4 : 1, THREADS = 256;

template <typename S> struct __align__(V * sizeof(S)) Part { S v[V]; };

extern "C" __global__ void __launch_bounds__(THREADS)
sum_splits(const float* __restrict__ partials, const float* __restrict__ bias, const float* __restrict__ emb, const OUT* addend,
           OUT* out, int splits, i64 rows, int columns, i64 ldo, int rows_per_image) {
    wait_for_previous();
    __shared__ Part<float> sums[THREADS];
    i64 count = rows * columns, i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * V;
    Part<float> sum = {};
    if (i < count) {
#pragma unroll 4
        for (int s = threadIdx.y; s < splits; s += blockDim.y) {
            Part<float> part = *reinterpret_cast<const Part<float>*>(partials + s * count + i);
#pragma unroll
            for (int k = 0; k < V; k++) sum.v[k] += part.v[k];
        }
    }
    sums[threadIdx.y * blockDim.x + threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || i >= count) return;
    u32 row = (u32)i / columns, column = (u32)i % columns;
    Part<OUT> before = {}, result;
    if (addend) before = *reinterpret_cast<const Part<OUT>*>(addend + (i64)row * ldo + column);
#pragma unroll
    for (int k = 0; k < V; k++) {
        float total = sum.v[k];
        for (int lane = 1; lane < blockDim.y; lane++) total += sums[lane * blockDim.x + threadIdx.x].v[k];
        if (bias) total += bias[column + k];
        if (emb) total += emb[(i64)(row / rows_per_image) * columns + column + k];
        result.v[k] = from_float<OUT>(addend ? total + to_float(before.v[k]) : total);
    }
    *reinterpret_cast<Part<OUT>*>(out + (i64)row * ldo + column) = result;
}

extern "C" __global__ void __launch_bounds__(THREADS)
few_rows(const float* a, const float* b, const float* bias, const float* emb, const OUT* addend, OUT* out, int rows, int columns,
         int depth, i64 lda, i64 ldb, i64 ldo, int rows_per_image) {
    wait_for_previous();
    multiply_few_rows<V>(a, b, bias, rows, columns, depth, lda, ldb, [&](int row, int column, float total) {
        if (emb) total += emb[(i64)(row / rows_per_image) * columns + column];
        if (addend) total += to_float(addend[row * ldo + column]);
        out[row * ldo + column] = from_float<OUT>(total);
    });
}
