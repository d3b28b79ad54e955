// Weight gradients of convolutions on Hopper (TMA, wgmma), of stride 1 and with the image's size kept: WGRAD of conv2d.cu.
//
//   out[k][r,s,c] = sum over pixels of dout[pixel][k] · patch of x[pixel][r,s,c]
//
// or += where `add`. A launch has up to JOBS jobs, weight gradients whose images have one size.
//
// UPSAMPLE, where width is 8 or a multiple of 16: x is (N, H / 2, W / 2, C), and the convolution was of an image in which each
// pixel of x is four pixels.
//
// Arguments, of each job
//   x         T (N, H, W, C). From channel `split` on it is x2; split is a multiple of 64, or at least C.
//   dout      T (N, H, W, K).
//   out       float (K, R, S, C), whose rows k lie `pitch` elements apart. S is odd.
//   C, K      those of out. x and dout have as many channels, or zeros after these up to a multiple of 8.
//   first     the job's first block. It lies beyond the grid where there is no job.
//
// How it works
//   Tiles      A block computes 64 output channels by 64 · COLUMNS input channels, of R vertical taps of TAPS horizontal ones.
//              R or COLUMNS is 1.
//   Depth      The depth is the pixels. A step is `rows` image rows of `width` pixels, a multiple of 8: all of a row, or a part
//              of one where W is more. It has a tile of dout, and for each 64 input channels a halo tile, rows + R - 1 rows of x
//              that begin at the first of the block's horizontal taps. TMA pads both with zeros outside of the image. Both are
//              MN-major. The product's blocks of 64 columns are the R taps, one image row apart in the halo tile, or with COLUMNS
//              they are the halo tiles. The k-steps of a step are unrolled (PIXELS is a constant): in a loop the compiler would
//              wait for each product.
//   WHOLE_ROWS A step's rows are whole ones, so that the width need not be a multiple of 8. A tile's pixels follow each other, with
//              TAPS / 2 pixels of zeros after each row: in the halo tile they pad this row's right and the next row's left, in
//              the tile of dout they are multiplied with. Zeros follow the last row up to PIXELS.
//   Taps       TAPS is 1, or 3 where R = S = 3, and width is 8 or a multiple of 16, or under WHOLE_ROWS. Then each of three
//              warpgroups has one horizontal tap, and all read the same tile and halo tile. Otherwise shared memory's speed is
//              the bound.
//   UPSAMPLE   A halo tile is loaded row by row, and TMA makes two columns of one by an axis of stride 0. A row has two columns
//              more. Where the first pixel is the right one of a pair, one of the two lies before it.
//   Split K    The grid's z splits the depth. The CLUSTER blocks of a cluster, along z, add up their parts through shared
//              memory: each block receives some columns of the product from all blocks, and adds them in the order of the
//              blocks. Cluster i writes the sum to out + i · (size of out). If there are several clusters, another kernel adds
//              their sums.
//
// Launch
//   Grid       (blocks of all jobs, 1, splits), with no more splits than steps. A job has S / TAPS · ceil(K / 64) ·
//              ceil(C / 64 / COLUMNS) blocks.
//   Threads    160: a consumer warpgroup and a producer warp. For three taps 512: three consumer warpgroups and a producer
//              warpgroup, which gives its registers to the others.
//   Maps       x {C, W, H, N}, box {64, width + TAPS - 1, rows + R - 1, 1}; under UPSAMPLE {C, 2, W / 2, H / 2, N}, box
//              {64, 2, (width + TAPS + 1) / 2, 1, 1}. dout {K, W, H, N}, box {64, width, rows, 1}. rows · width = PIXELS, a
//              multiple of 16. WHOLE_ROWS: width = W + TAPS / 2, x's box has so many columns, and rows · width ≤ PIXELS.
//   Shared     `stages` steps, at least two, or the sums, 256 · N_TILE · TAPS bytes, if these are more; then the barriers.
#include "cluster.cuh"
#include "wgmma.cuh"

constexpr int CONSUMERS = 128 * TAPS, THREADS = CONSUMERS + (TAPS == 1 ? 32 : 128);
constexpr int ROW_BYTES = 128, N_TILE = 64 * R * COLUMNS;
constexpr u32 TILE = PIXELS * ROW_BYTES;  // bytes of dout's tile
constexpr int COUNT = N_TILE / 8, SHARE = COUNT / CLUSTER;  // columns of the product, and of those a block's own, in groups of 8
constexpr int BATCH = CEIL_DIV(SHARE, CEIL_DIV(SHARE, TAPS == 1 ? 8 : 4));  // groups whose loads are under way at once

struct Job {
    TensorMap x, x2, dout;
    float* out;
    i64 pitch;
    int first, add, C, K, split;
};
struct Jobs { Job at[JOBS]; };

// A step in shared memory: dout's tile, and behind it the halo tiles of x.
struct Step {
    int rows, width, pitch;          // image rows and pixels of one; 128-byte rows from a row of the halo tile to the next
    u32 given, filled, halo, bytes;  // what TMA writes of dout's tile, and of a halo tile; a halo tile's bytes, and a step's
    __device__ __forceinline__ Step(int rows, int width) : rows(rows), width(width) {
        pitch = WHOLE_ROWS ? width : width + TAPS - 1 + 2 * UPSAMPLE;
        given = rows * width * ROW_BYTES, filled = (rows + R - 1) * pitch * ROW_BYTES;
        u32 reached = WHOLE_ROWS ? (PIXELS + (R - 1) * pitch + TAPS - 1) * ROW_BYTES : filled;
        halo = CEIL_DIV(reached, 1024) * 1024, bytes = TILE + COLUMNS * halo;
    }
};

// What a block computes of its job, and from which steps.
struct Work {
    int k0, c0, s;            // first output channel, first input channel, first horizontal tap
    int first, last;          // steps
    int per_row, per_image;   // steps of an image row, and of an image
};

// WHOLE_ROWS: the zeros behind what TMA writes of each tile.
__device__ __forceinline__ void fill_zeros(u8* shared, const Step& step, int stages) {
    for (int stage = 0; stage < stages; stage++)
        for (int j = -1; j < COLUMNS; j++) {  // of dout's tile, and of each halo tile
            u32 first = stage * step.bytes + (j < 0 ? 0 : TILE + j * step.halo);
            u32 end = first + (j < 0 ? TILE : step.halo);
            for (u32 at = first + (j < 0 ? step.given : step.filled) + threadIdx.x * 16; at < end; at += THREADS * 16)
                *reinterpret_cast<float4*>(shared + at) = {};
        }
    fence_writes();
}

// The producer: loads the steps of a block.
__device__ __forceinline__ void load_steps(Ring ring, const Job& job, const Step& step, const Work& work, int S) {
    // Chunks of channels: for TMA one beyond x takes longer than one of it.
    int there = min(COLUMNS, CEIL_DIV(job.C - work.c0, 64));
    for (int i = work.first; i < work.last; i++, ring.advance()) {
        int n = i / work.per_image, h0 = i % work.per_image / work.per_row * step.rows, w0 = i % work.per_row * step.width;
        u32 full = ring.acquire(step.given + there * step.filled);
        tma_load(ring.buffer(), job.dout, full, work.k0, w0, h0, n);
        for (int j = 0, c = work.c0; j < there; j++, c += 64) {
            const TensorMap& map = c < job.split ? job.x : job.x2;
            u32 target = ring.buffer() + TILE + j * step.halo;
            int channel = c < job.split ? c : c - job.split, w = w0 + work.s - S / 2, h = h0 - R / 2;
            if constexpr (UPSAMPLE) {
                for (int row = 0; row < step.rows + R - 1; row++)
                    tma_load(target + row * step.pitch * ROW_BYTES, map, full, channel, 0, w >> 1, h + row >> 1, n);
            } else {
                tma_load(target, map, full, channel, w, h, n);
            }
        }
    }
}

// A warpgroup's products of all steps: 64 output channels by N_TILE columns.
__device__ __forceinline__ void multiply_steps(float (&acc)[N_TILE / 2], Ring ring, const Step& step, const Work& work, int S) {
    int group = threadIdx.x / 128, before = UPSAMPLE ? (work.s - S / 2) & 1 : 0;
    u64 depth[PIXELS / 16];  // where a k-step's pixels lie in the halo tile, as added to the descriptor
#pragma unroll
    for (int k = 0; k < PIXELS / 16; k++)
        depth[k] = WHOLE_ROWS || (TAPS == 1 && !UPSAMPLE)
            ? k * DEPTH_STEP<true>
            : (16 * k / step.width * step.pitch + 16 * k % step.width) * (ROW_BYTES / 16);
    Ring read = ring;
    for (int i = work.first; i < work.last; i++) {
        ring.wait();
        u64 a = tile_descriptor(ring.buffer());
        u64 b = tile_descriptor(ring.buffer() + TILE + (before + group) * ROW_BYTES,
                                COLUMNS > 1 ? step.halo : step.pitch * ROW_BYTES,
                                (!WHOLE_ROWS && step.width == 8 ? step.pitch : 8) * ROW_BYTES);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PIXELS / 16; k++)
            wgmma<true, true>((T*)nullptr, acc, a + k * DEPTH_STEP<true>, b + depth[k], i > work.first || k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > work.first) read.release();
        ring.advance();
    }
    wgmma_wait<0>();
}

// Adds up the cluster's products, and writes the block's own columns: a thread rows k and k + 8, two columns of each group. They go
// through shared memory also where a cluster is one block, so that this is a short loop: of a long one a multiprocessor would fetch
// each instruction once, and wait for it.
__device__ __forceinline__ void add_up(const float (&acc)[N_TILE / 2], u8* shared, const Job& job, const Work& work, int S) {
    int K = job.K, C = job.C, s = work.s + threadIdx.x / 128;
    int rank = blockIdx.z % CLUSTER, lane = threadIdx.x % 32, k = work.k0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    float4* exchange = reinterpret_cast<float4*>(shared) + threadIdx.x;  // [from][SHARE][CONSUMERS]
    i64 pitch = job.pitch;
    float* out = job.out + (blockIdx.z / CLUSTER * (i64)K + k) * pitch;
    bool add = job.add;
    bool pairs = (C | pitch) % 2 == 0 && (u64)out % 8 == 0;
    int at[BATCH];  // where the columns lie in a row of out, or -1 past the end
    float2 sums[BATCH][2];
    auto begin = [&](int i) {  // load what the sums are added to: all loads start before the first is needed
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
            int j = rank * SHARE + i + u, r = COLUMNS > 1 ? 0 : j / 8, c = work.c0 + (COLUMNS > 1 ? j : j % 8) * 8 + lane % 4 * 2;
            at[u] = i + u < SHARE && c < C ? (r * S + s) * C + c : -1;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                sums[u][h] = make_float2(0.0f, 0.0f);
                if (!add || at[u] < 0 || k + 8 * h >= K) continue;
                const float* from = out + 8 * h * pitch + at[u];
                if (pairs) sums[u][h] = *reinterpret_cast<const float2*>(from);
                else sums[u][h] = make_float2(from[0], c + 1 < C ? from[1] : 0.0f);
            }
        }
    };
    begin(0);
    if constexpr (CLUSTER > 1) cluster_sync();  // all blocks have read their last stages; the producers' exit counts as arrival
    else asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory");
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        float4 v = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
        store_cluster(exchange + (rank * SHARE + j % SHARE) * CONSUMERS, j / SHARE, v);
    }
    if constexpr (CLUSTER > 1) cluster_sync();
    for (int i = 0; i < SHARE; i += BATCH) {
        if (i > 0) begin(i);
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
            if (at[u] < 0) continue;
            float4 total = exchange[(i + u) * CONSUMERS];  // whole before it is added: as on two GPUs (optim/reduction.py)
#pragma unroll
            for (int from = 1; from < CLUSTER; from++) {
                float4 term = exchange[(from * SHARE + i + u) * CONSUMERS];
                total.x += term.x, total.y += term.y, total.z += term.z, total.w += term.w;
            }
            sums[u][0].x += total.x, sums[u][0].y += total.y, sums[u][1].x += total.z, sums[u][1].y += total.w;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                if (k + 8 * h >= K) continue;
                float* to = out + 8 * h * pitch + at[u];
                if (pairs) {
                    *reinterpret_cast<float2*>(to) = sums[u][h];
                } else {
                    to[0] = sums[u][h].x;
                    if (at[u] % C + 1 < C) to[1] = sums[u][h].y;
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, TAPS == 1 ? 2 : 1) CLUSTER_DIMS
conv2d_wgrad_sm90(const __grid_constant__ Jobs jobs, int N, int H, int W, int S, int rows, int width, int stages) {
    extern __shared__ __align__(1024) u8 shared[];
    int index = 0;
    while (index + 1 < JOBS && blockIdx.x >= jobs.at[index + 1].first) index++;
    const Job& job = jobs.at[index];
    u32 base = shared_address(shared);
    Step step(rows, width);
    // The sums reuse the memory of the steps, but not that of the barriers. These are not invalidated: sums there were lost.
    Ring ring(base, step.bytes, stages, base + max(stages * step.bytes, 256u * N_TILE * TAPS));
    if (threadIdx.x == 0) {
        ring.init(TAPS);
        prefetch(job.x), prefetch(job.dout);
        if (job.split < job.C) prefetch(job.x2);
    }
    if constexpr (WHOLE_ROWS) fill_zeros(shared, step, stages);
    wait_for_previous();
    __syncthreads();

    int blocks_k = CEIL_DIV(job.K, 64), item = blockIdx.x - job.first, column = item / blocks_k;
    int columns = CEIL_DIV(job.C, 64 * COLUMNS);
    int per_row = CEIL_DIV(W, width), per_image = CEIL_DIV(H, rows) * per_row;
    i64 steps = (i64)N * per_image;
    Work work = {item % blocks_k * 64, column % columns * 64 * COLUMNS, column / columns * TAPS,
                 (int)(steps * blockIdx.z / gridDim.z), (int)(steps * (blockIdx.z + 1) / gridDim.z), per_row, per_image};
    if (threadIdx.x >= CONSUMERS) {
        if (TAPS > 1) set_registers<40, false>();
        if (threadIdx.x == CONSUMERS) load_steps(ring, job, step, work, S);
        return;
    }
    if (TAPS > 1) set_registers<152, true>();
    float acc[N_TILE / 2];
    multiply_steps(acc, ring, step, work, S);
    add_up(acc, shared, job, work, S);
}
