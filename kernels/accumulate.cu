// How the tape adds up what no operation did: gradients of one tensor, and rows of partial sums.
// variants: TOTAL=float,bf16,half TERM=float,bf16,half
// total: TOTAL, accumulated in place; term: TERM; n elements. Any launch shape (grid-stride).
#include "common.cuh"

extern "C" __global__ void add_into(TOTAL* __restrict__ total, const TERM* __restrict__ term, i64 n) {
    wait_for_previous();
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x)
        total[i] = from_float<TOTAL>(to_float(total[i]) + to_float(term[i]));
}

// out (count / width, width) = or, where `add`, += the sum over the rows of source (count / width, rows, width, step)
// [..., 0], in a fixed order. out lies in parts of `columns` elements that start `pitch` apart. `lanes` threads share
// the rows of `pack` results: 1, or 4 where step is 1, width, columns and pitch are multiples of 4 and both arrays start
// at multiples of 16 bytes.
struct RowSum {
    const float* source;
    float* out;
    int rows, count, width, step, columns, pitch, add, lanes, pack;
    int first_block;  // of those that do this job, 256 / lanes · pack results each; the largest int where there is no job
};
struct RowSums { RowSum jobs[64]; };
template <int V> struct __align__(4 * V) Floats { float v[V]; };

template <int V> __device__ __forceinline__ void sum_rows_of(const RowSum& job, Floats<4>* parts) {
    int across = 256 / job.lanes, lane = threadIdx.x / across;
    int i = ((blockIdx.x - job.first_block) * across + threadIdx.x % across) * V;
    Floats<V> sum = {};
    if (i < job.count) {
        i64 pitch = (i64)job.width * job.step;
        const float* source = job.source + i / job.width * job.rows * pitch + i % job.width * job.step;
        for (int start = lane; start < job.rows; start += 4 * job.lanes) {
            Floats<V> terms[4] = {};  // all under way before the first is added
#pragma unroll
            for (int u = 0; u < 4; u++) {
                int row = start + u * job.lanes;
                if (row < job.rows) terms[u] = *reinterpret_cast<const Floats<V>*>(source + row * pitch);
            }
#pragma unroll
            for (int u = 0; u < 4; u++)
#pragma unroll
                for (int k = 0; k < V; k++) sum.v[k] += terms[u].v[k];
        }
    }
#pragma unroll
    for (int k = 0; k < V; k++) parts[threadIdx.x].v[k] = sum.v[k];
    __syncthreads();
    if (lane || i >= job.count) return;
    auto* out = reinterpret_cast<Floats<V>*>(job.out + (i64)(i / job.columns) * job.pitch + i % job.columns);
    Floats<V> total = {};
    if (job.add) total = *out;
#pragma unroll
    for (int k = 0; k < V; k++) {
        for (int other = 1; other < job.lanes; other++) sum.v[k] += parts[other * across + threadIdx.x].v[k];
        total.v[k] += sum.v[k];
    }
    *out = total;
}

// Launch: 256 threads, as many blocks as the jobs have together.
extern "C" __global__ __launch_bounds__(256) void sum_rows(const __grid_constant__ RowSums sums) {
    wait_for_previous();
    __shared__ Floats<4> parts[256];
    int found = 0;
    for (int half = 32; half > 0; half /= 2)
        if (sums.jobs[found + half].first_block <= blockIdx.x) found += half;
    const RowSum& job = sums.jobs[found];
    if (job.pack == 4) sum_rows_of<4>(job, parts);
    else sum_rows_of<1>(job, parts);
}
