// How the tape adds up what no operation did: gradients of one tensor, and rows of partial sums.
// variants: TOTAL=float,bf16,half TERM=float,bf16,half
// total: TOTAL, accumulated in place; term: TERM; n elements. Any launch shape (grid-stride).
#include "common.cuh"

extern "C" __global__ void add_into(TOTAL* __restrict__ total, const TERM* __restrict__ term, i64 n) {
    wait_for_previous();
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        total[i] = from_float<TOTAL>(to_float(total[i]) + to_float(term[i]));
}

// out (columns / width, width) = or, where `add`, += the sum over the rows of source (columns / width, rows, width, step)
// [..., 0], in a fixed order.
struct RowSum {
    const float* source;
    float* out;
    int rows, columns, width, step, add;
    int first_block;  // of those that do this job, 32 columns each; the largest int where there is no job
};
struct RowSums { RowSum jobs[64]; };

// Launch: (32, 8) threads, a block for each 32 columns of each job.
extern "C" __global__ __launch_bounds__(256) void sum_rows(const __grid_constant__ RowSums sums) {
    wait_for_previous();
    __shared__ float parts[8][32];
    int found = 0;
    for (int half = 32; half > 0; half /= 2)
        if (sums.jobs[found + half].first_block <= blockIdx.x) found += half;
    const RowSum& job = sums.jobs[found];
    int column = (blockIdx.x - job.first_block) * 32 + threadIdx.x;
    float sum = 0.0f;
    if (column < job.columns) {
        i64 pitch = (i64)job.width * job.step;
        const float* source = job.source + column / job.width * job.rows * pitch + column % job.width * job.step;
#pragma unroll 4
        for (int row = threadIdx.y; row < job.rows; row += 8) sum += source[row * pitch];
    }
    parts[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y || column >= job.columns) return;
    for (int y = 1; y < 8; y++) sum += parts[y][threadIdx.x];
    job.out[column] = (job.add ? job.out[column] : 0.0f) + sum;
}
