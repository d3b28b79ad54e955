// Products of up to 8 rows with every row of a large matrix, which is read once: gemm.cu, grouped_linear.cu.
#pragma once
#include "reduce.cuh"
#include "vector.cuh"

// A warp multiplies one row of b by all rows of a, two if there are more than two of a, which it then reads half as
// often. It loads up to STEPS vectors of each row of b at once.
template <int ROWS, int V, class Keep>
__device__ __forceinline__ void multiply_rows(const float* a, const float* b, const float* bias, int rows, int columns,
                                              int depth, i64 lda, i64 ldb, Keep keep) {
    constexpr int COLUMNS = ROWS > 2 ? 2 : 1, STEPS = ROWS > 2 ? 4 : 8;
    int lane = threadIdx.x % 32, first = (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32) * COLUMNS;
    if (first >= columns) return;
    float sums[ROWS][COLUMNS] = {};
    const float *own_a[ROWS], *own_b[COLUMNS];
#pragma unroll
    for (int m = 0; m < ROWS; m++) own_a[m] = a + min(m, rows - 1) * lda;
#pragma unroll
    for (int n = 0; n < COLUMNS; n++) own_b[n] = b + min(first + n, columns - 1) * ldb;
#pragma unroll 1
    for (int start = lane * V; start < depth; start += STEPS * 32 * V) {
        float y[STEPS][COLUMNS][V] = {};
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int n = 0; n < COLUMNS; n++)
                if (start + s * 32 * V < depth) load<V>(own_b[n] + start + s * 32 * V, y[s][n]);
#pragma unroll
        for (int s = 0; s < STEPS; s++)
#pragma unroll
            for (int m = 0; m < ROWS; m++) {
                float x[V] = {};
                if (start + s * 32 * V < depth) load<V>(own_a[m] + start + s * 32 * V, x);
#pragma unroll
                for (int n = 0; n < COLUMNS; n++)
#pragma unroll
                    for (int i = 0; i < V; i++) sums[m][n] += x[i] * y[s][n][i];
            }
    }
    float own_bias = bias ? bias[min(first + lane % COLUMNS, columns - 1)] : 0.0f;
#pragma unroll
    for (int m = 0; m < ROWS; m++)
#pragma unroll
        for (int n = 0; n < COLUMNS; n++) {
            float total = warp_reduce<Sum>(sums[m][n]);
            if (lane == m * COLUMNS + n && m < rows && first + n < columns) keep(m, first + n, total + own_bias);
        }
}

// keep(row, column, a[row] · b[column] + bias[column]) for all `rows` of a, at most 8, and all `columns` rows of b, of
// `depth` elements: once for each pair, in one thread. bias may be null. V: elements that are loaded at once. A warp of
// the grid's x-axis has one column, of more than two rows two.
template <int V, class Keep>
__device__ __forceinline__ void multiply_few_rows(const float* a, const float* b, const float* bias, int rows,
                                                  int columns, int depth, i64 lda, i64 ldb, Keep keep) {
    if (rows == 1) multiply_rows<1, V>(a, b, bias, rows, columns, depth, lda, ldb, keep);
    else if (rows == 2) multiply_rows<2, V>(a, b, bias, rows, columns, depth, lda, ldb, keep);
    else  // four rows at a time: eight leave registers for few loads of b, 77 µs where four take 22 of 4096 x 4096
        for (int m = 0; m < rows; m += 4)
            multiply_rows<4, V>(a + m * lda, b, bias, min(4, rows - m), columns, depth, lda, ldb,
                                [&](int row, int column, float value) { keep(m + row, column, value); });
}
