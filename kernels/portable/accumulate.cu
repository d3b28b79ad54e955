// Sums that the autograd tape makes itself: of several gradients of one tensor (add_into), and of rows of partial sums
// (sum_rows).
//
// add_into: total += term. total: TOTAL, n elements, in place. term: TERM. A grid-stride loop: any launch shape.
#include "common.cuh"

extern "C" __global__ void add_into(TOTAL* __restrict__ total, const TERM* __restrict__ term, i64 n) {
    wait_for_previous();
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        total[i] = from_float<TOTAL>(to_float(total[i]) + to_float(term[i]));
}

// A job of sum_rows, in a fixed order:
//   out[i][j] = (or += where `add`) sum over r of source[i][r][j][0], source (count / width, rows, width, step)
// out has `count` elements, in pieces of `columns` that start `pitch` elements apart. `lanes` threads, a power of two up to
// 256, share the rows of `pack` results. pack is 1, or 4 where step is 1, width, columns and pitch are multiples of 4 and both
// arrays start at multiples of 16 bytes.
struct RowSum {
    const float* source;
    float* out;
    int rows, count, width, step, columns, pitch, add, lanes, pack;
    int first_block;  // of this job, 256 / lanes · pack results a block; the largest int where there is no job
};
struct RowSums { RowSum jobs[64]; };
constexpr int TERMS = 8;  // that a thread loads before it adds the first
template <int V> struct __align__(4 * V) Floats { float v[V]; };

template <int V> __device__ __forceinline__ void sum_rows_of(const RowSum& job, Floats<4>* partials) {
    int across = 256 / job.lanes, lane = threadIdx.x / across;
    int i = ((blockIdx.x - job.first_block) * across + threadIdx.x % across) * V;
    Floats<V> sum = {};
    if (i < job.count) {
        i64 pitch = (i64)job.width * job.step;
        const float* source = job.source + i / job.width * job.rows * pitch + i % job.width * job.step;
        for (int start = lane; start < job.rows; start += TERMS * job.lanes) {
            Floats<V> terms[TERMS] = {};
#pragma unroll
            for (int u = 0; u < TERMS; u++) {
                int row = start + u * job.lanes;
                if (row < job.rows) terms[u] = *reinterpret_cast<const Floats<V>*>(source + row * pitch);
            }
#pragma unroll
            for (int u = 0; u < TERMS; u++)
#pragma unroll
                for (int k = 0; k < V; k++) sum.v[k] += terms[u].v[k];
        }
    }
    for (int half = job.lanes / 2; half > 0; half /= 2) {
        if (lane / half == 1)
#pragma unroll
            for (int k = 0; k < V; k++) partials[threadIdx.x].v[k] = sum.v[k];
        __syncthreads();
        if (lane < half)
#pragma unroll
            for (int k = 0; k < V; k++) sum.v[k] += partials[threadIdx.x + half * across].v[k];
    }
    if (lane || i >= job.count) return;
    auto* out = reinterpret_cast<Floats<V>*>(job.out + (i64)(i / job.columns) * job.pitch + i % job.columns);
    Floats<V> total = {};
    if (job.add) total = *out;
#pragma unroll
    for (int k = 0; k < V; k++) total.v[k] += sum.v[k];
    *out = total;
}

// Launch: 256 threads, as many blocks as the jobs have together. Launch bounds of four blocks a multiprocessor leave a thread
// enough registers for its terms. With eight, the compiler made each load wait for the previous one (a U-Net's sums: 99 us
// instead of 67).
extern "C" __global__ __launch_bounds__(256, 4) void sum_rows(const __grid_constant__ RowSums sums) {
    __shared__ Floats<4> partials[256];
    int found = 0;
    for (int half = 32; half > 0; half /= 2)
        if (sums.jobs[found + half].first_block <= blockIdx.x) found += half;
    const RowSum& job = sums.jobs[found];
    wait_for_previous();
    if (job.pack == 4) sum_rows_of<4>(job, partials);
    else sum_rows_of<1>(job, partials);
}
