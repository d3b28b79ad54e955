// Products of matrices of 16 bits on Hopper: TMA brings tiles, wgmma multiplies them.
//
//   out[m][n] = sum over k of a[m][k] · b[n][k] + bias[n] + addend[m][n] if ADDS
//
// for each matrix of a batch. a: T (M, depth), or (depth, M) under A_MN; b: T (N, depth), or (depth, N) under B_MN. out: OUT
// (M, N): T, or float. addend: T (M, N), may be `out` itself; bias: float (N) or null. Of float there is neither: out is
// `floats`, with rows of `pitch` elements, and is added to if `add`; under TURNED it is (N, M). The lengths of rows are multiples
// of 8.
//
// A tile of the result has 128 rows and BN columns. Two warpgroups compute 64 rows each, so that both read b's tile from shared
// memory: with 256 columns a block brings 1/85 byte for a flop, where a warpgroup alone would bring 1/51. A third gives its
// registers to the others; one of its threads brings operands, 64 deep, through a ring of STAGES, and biases through another.
// Blocks stay and walk over tiles, so that the next tile's operands arrive while one is finished. Tiles are taken in bands of
// BAND rows of tiles, column by column: those under way together share rows of a and of b in the GPU's cache.
// A tile is rounded in panels of 64 columns, which TMA stores from shared memory behind the next products. The addend is brought
// there before. Floats are stored from registers: four lanes write the 32 bytes of a sector, or eight under TURNED.
//
// Where few tiles would leave multiprocessors idle, CLUSTER blocks along the grid's z share one, a part of the depth each. A block
// sends each other the sums of that one's columns, WIDTH of them, adds what it gets in the order of the blocks, and finishes them.
//
// Maps: a {depth, M, batches}, box {64, 128, 1}, or under A_MN {M, depth, batches}, box {64, 64, 1}; b {depth, N, batches}, box
// {64, BN, 1}, or under B_MN {N, depth, batches}, box {64, 64, 1}; out and addend {N, M, batches}, box {64, 64, 1}.
// WIDTH is a multiple of 64, or of 8 where floats are stored. Launch: 384 threads, grid (any number, or in clusters one for
// each tile; 1; CLUSTER). A cluster has no more blocks than the depth has steps of 64. Shared memory: STAGES of 128 rows of a and
// BN of b, under B_MN a multiple of 64, of 128 bytes; unless of floats 2 PANELS of 8 KiB, and 2 · BN floats of biases; 256 bytes
// of barriers.
#include "cluster.cuh"

constexpr int ROWS = 128, DEPTH = 64, ROW_BYTES = 128, PANEL_BYTES = 64 * ROW_BYTES;  // a panel: 64 rows of 64 elements
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int B_PANELS = CEIL_DIV(BN, 64);  // under B_MN
constexpr int A_BYTES = ROWS * ROW_BYTES, B_BYTES = B_MN ? B_PANELS * PANEL_BYTES : BN * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int WIDTH = BN / CLUSTER;  // columns of a tile that a block finishes
constexpr bool ROUNDS = sizeof(OUT) == 2;
constexpr int PANELS = ADDS || WIDTH == 64 ? WIDTH / 64 : 2;  // of a warpgroup's results in shared memory
constexpr int RESULT_BYTES = ROUNDS ? PANELS * PANEL_BYTES : 0;
constexpr int BAND = 16;

struct Sizes {
    int M, N, depth, batches;
    __device__ __forceinline__ int steps() const { return CEIL_DIV(depth, DEPTH); }
    __device__ __forceinline__ int tiles() const { return CEIL_DIV(M, ROWS) * CEIL_DIV(N, BN) * batches; }
};

// Where a tile begins.
struct Tile {
    int m0, n0, batch;
    __device__ __forceinline__ Tile(int index, const Sizes& sizes) {
        int down = CEIL_DIV(sizes.M, ROWS), across = CEIL_DIV(sizes.N, BN);
        batch = index / (down * across);
        index -= batch * down * across;
        int band = index / (BAND * across), height = min(BAND, down - band * BAND);
        index -= band * BAND * across;
        m0 = (band * BAND + index % height) * ROWS;
        n0 = index / height * BN;
    }
};

// One thread brings operands of the steps from `first` to `last`, and biases, in the order in which they are read.
__device__ __forceinline__ void bring(Ring ring, Ring biases, const TensorMap& a, const TensorMap& b, const float* bias,
                                      const Sizes& sizes, int first, int last) {
    for (int i = blockIdx.x; i < sizes.tiles(); i += gridDim.x) {
        Tile tile(i, sizes);
        for (int k = first * DEPTH; k < last * DEPTH; k += DEPTH) {
            u32 full = ring.acquire(STAGE_BYTES), at_a = ring.buffer(), at_b = at_a + A_BYTES;
            if constexpr (A_MN) {
                for (int panel = 0; panel < ROWS / 64; panel++)
                    tma_load(at_a + panel * PANEL_BYTES, a, full, tile.m0 + panel * 64, k, tile.batch);
            } else {
                tma_load(at_a, a, full, k, tile.m0, tile.batch);
            }
            if constexpr (B_MN) {
#pragma unroll 1
                for (int panel = 0; panel < B_PANELS; panel++)
                    tma_load(at_b + panel * PANEL_BYTES, b, full, tile.n0 + panel * 64, k, tile.batch);
            } else {
                tma_load(at_b, b, full, k, tile.n0, tile.batch);
            }
            ring.advance();
        }
        if (bias) {
            u32 bytes = min(BN, sizes.N - tile.n0) * sizeof(float), full = biases.acquire(bytes);
            bulk_load(biases.buffer(), bias + tile.n0, bytes, full);
            biases.advance();
        }
    }
}

// acc = the products of so many steps.
__device__ __forceinline__ void multiply(float (&acc)[BN / 2], Ring& ring, int steps, int group) {
    Ring read = ring;
    for (int step = 0; step < steps; step++) {
        ring.wait();
        u64 a = tile_descriptor(ring.buffer() + group * PANEL_BYTES);
        u64 b = tile_descriptor(ring.buffer() + A_BYTES, B_MN ? PANEL_BYTES : 16);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < DEPTH / 16; k++)
            wgmma<A_MN, B_MN>((T*)nullptr, acc, a + k * DEPTH_STEP<A_MN>, b + k * DEPTH_STEP<B_MN>, step > 0 || k > 0);
        wgmma_commit();
        ring.advance();
        wgmma_wait<1>();  // all but this step's products are done
        if (step > 0) read.release();
    }
    wgmma_wait<0>();
    read.release();
}

// The first columns of acc become the sums, over the cluster's blocks in their order, of those that this block finishes. They come
// to `exchange`, float4 [from][WIDTH / 8][CONSUMERS], whose bytes `barrier` counts.
__device__ __forceinline__ void add_up(float (&acc)[BN / 2], float4* exchange, u32 barrier, int rank) {
    constexpr int SHARE = WIDTH / 8;
    exchange += threadIdx.x;
    cluster_arrive_relaxed(), cluster_wait();  // all have read the operands that lay there
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
        float4 v = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
        send(exchange + (rank * SHARE + j % SHARE) * CONSUMERS, j / SHARE, v, barrier);
    }
    receive(barrier);
#pragma unroll
    for (int j = 0; j < SHARE; j++) sum_terms(acc + 4 * j, exchange + j * CONSUMERS, SHARE * CONSUMERS);
}

// Round the warpgroup's 64 rows, with what is added to them, in panels that TMA stores.
__device__ __forceinline__ void store_rounded(const TensorMap& out, u32 result, const float (&acc)[BN / 2], const float* bias,
                                              int m0, int n0, int batch) {
    int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    bool leads = threadIdx.x % 128 == 0;
#pragma unroll
    for (int panel = 0; panel < WIDTH / 64; panel++) {
        u32 at_panel = result + panel % PANELS * PANEL_BYTES;
        if constexpr (!ADDS) {
            if (leads) tma_store_wait<PANELS - 1>();  // for the panel that lies here
            warpgroup_meets();
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {  // 16 columns
            const float* v = acc + panel * 32 + j * 8;
            u32 at = at_panel + swizzled<ROW_BYTES>(row, j * 2 + lane / 16), words[4];
            if constexpr (ADDS) ldmatrix(words, at);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float2 sum = make_float2(v[2 * i], v[2 * i + 1]);
                if (bias) {
                    float2 more = *reinterpret_cast<const float2*>(bias + panel * 64 + j * 16 + i / 2 * 8 + lane % 4 * 2);
                    sum.x += more.x, sum.y += more.y;
                }
                if constexpr (ADDS) {
                    float2 more = unpack_pair<T>(words[i]);
                    sum.x += more.x, sum.y += more.y;
                }
                words[i] = pack_pair<T>(sum.x, sum.y);
            }
            stmatrix(at, words[0], words[1], words[2], words[3]);
        }
        fence_writes();
        warpgroup_meets();
        if (leads) tma_store(out, at_panel, n0 + panel * 64, m0, batch);
    }
}

// Store the warpgroup's 64 rows of floats, or add them to what is there.
__device__ __forceinline__ void store_floats(float* out, i64 pitch, const float (&acc)[BN / 2], int m0, int n0, int M, int N,
                                             bool add) {
    int lane = threadIdx.x % 32, row = m0 + threadIdx.x % 128 / 32 * 16 + lane / 4, column = n0 + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int m = row + 8 * h, n = column + 8 * j;
            if (m >= M || n >= N) continue;
            float2 v = make_float2(acc[4 * j + 2 * h], acc[4 * j + 2 * h + 1]);
            if constexpr (TURNED) {
                float *first = out + n * pitch + m, *second = first + pitch;
                if (add) v.x += *first, v.y += *second;
                *first = v.x, *second = v.y;
            } else {
                float2* to = reinterpret_cast<float2*>(out + m * pitch + n);
                if (add) v.x += to->x, v.y += to->y;
                *to = v;
            }
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_DIMS
gemm_sm90(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const __grid_constant__ TensorMap out,
          const __grid_constant__ TensorMap addend, const float* bias, float* floats, i64 pitch, int add, int M, int N, int depth,
          int batches) {
    extern __shared__ __align__(1024) u8 shared[];
    Sizes sizes = {M, N, depth, batches};
    u32 base = shared_address(shared), results = base + STAGES * STAGE_BYTES, bias_buffers = results + 2 * RESULT_BYTES;
    u32 barriers = bias_buffers + (ROUNDS ? 2 * BN * sizeof(float) : 0), addends = barriers + 192, exchange = barriers + 208;
    Ring ring(base, STAGE_BYTES, STAGES, barriers), biases(bias_buffers, BN * sizeof(float), 2, barriers + 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) barrier_init(addends + 8 * i, 1);
        ring.init(2), biases.init(2);
        open_exchange(exchange, ROWS * BN * sizeof(float));
        prefetch(a), prefetch(b);
        if (ROUNDS) prefetch(out);
        if (ADDS) prefetch(addend);
    }
    int rank = CLUSTER > 1 ? blockIdx.z : 0, group = threadIdx.x / 128;
    int first = sizes.steps() * rank / CLUSTER, last = sizes.steps() * (rank + 1) / CLUSTER;
    wait_for_previous();
    __syncthreads();
    if (group == 2) {
        set_registers<40, false>();
        if (threadIdx.x == CONSUMERS) bring(ring, biases, a, b, bias, sizes, first, last);
        return;  // which counts as arrival in a cluster
    }
    set_registers<232, true>();
    bool leads = threadIdx.x % 128 == 0;
    u32 result = results + group * RESULT_BYTES, own_addend = addends + 8 * group, phase = 0;
    for (int i = blockIdx.x; i < sizes.tiles(); i += gridDim.x, phase ^= 1) {
        Tile tile(i, sizes);
        int m0 = tile.m0 + group * 64, n0 = tile.n0 + rank * WIDTH;
        if (ADDS && leads) {
            tma_store_wait();  // of the last tile
            barrier_expect(own_addend, RESULT_BYTES);
            for (int panel = 0; panel < PANELS; panel++)
                tma_load(result + panel * PANEL_BYTES, addend, own_addend, n0 + panel * 64, m0, tile.batch);
        }
        float acc[BN / 2];
        multiply(acc, ring, last - first, group);
        if constexpr (CLUSTER > 1) add_up(acc, reinterpret_cast<float4*>(shared), exchange, rank);
        if constexpr (ROUNDS) {
            if (ADDS) barrier_wait(own_addend, phase);
            if (bias) biases.wait();
            u32 at_bias = biases.buffer() - base + rank * WIDTH * sizeof(float);
            store_rounded(out, result, acc, bias ? reinterpret_cast<const float*>(shared + at_bias) : nullptr, m0, n0, tile.batch);
            if (bias) biases.release();
        } else {
            store_floats(floats + (i64)tile.batch * (TURNED ? N : M) * pitch, pitch, acc, m0, n0, M, N, add);
        }
    }
    if (ROUNDS && leads) tma_store_wait();
}
