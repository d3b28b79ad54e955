// How the tape adds up what no operation did: gradients of one tensor, and rows of partial sums.
// variants: TOTAL=float,bf16,half TERM=float,bf16,half
// total: TOTAL, accumulated in place; term: TERM; n elements. Any launch shape (grid-stride).
#include "common.cuh"

extern "C" __global__ void add_into(TOTAL* __restrict__ total, const TERM* __restrict__ term, i64 n) {
    wait_for_previous();
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        total[i] = from_float<TOTAL>(to_float(total[i]) + to_float(term[i]));
}

// out (columns) = or, where `add`, += the sum of source (rows, columns, step)[:, :, 0] over its rows, in a fixed order.
struct RowSum {
    const float* source;
    float* out;
    int rows, columns, step, add;
};
struct RowSums { RowSum jobs[64]; };

// A row of the grid does one job. Launch: (32, 8) threads, grid (CEIL_DIV(most columns, 32), jobs).
extern "C" __global__ __launch_bounds__(256) void sum_rows(const __grid_constant__ RowSums sums) {
    wait_for_previous();
    __shared__ float parts[8][32];
    const RowSum& job = sums.jobs[blockIdx.y];
    int column = blockIdx.x * 32 + threadIdx.x;
    if (blockIdx.x * 32 >= job.columns) return;
    float sum = 0.0f;
    if (column < job.columns) {
        i64 pitch = (i64)job.columns * job.step;
        const float* source = job.source + (i64)column * job.step;
#pragma unroll 4
        for (int row = threadIdx.y; row < job.rows; row += 8) sum += source[row * pitch];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || column >= job.columns) return;
    for (int y = 1; y < 8; y++) sum += parts[y][threadIdx.x];
    job.out[column] = (job.add ? job.out[column] : 0.0f) + sum;
}
