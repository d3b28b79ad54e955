// Products of matrices of 16 bits on Hopper: TMA brings tiles, wgmma multiplies them.
//
//   v = sum over k of a[m][k] · b[n][k] + bias[n]
//   out[m][n] = v, or
//       v + other[m][n]                                      under ADDS,
//       other[m][n] + by_image[m / rows_per_image][n] · v        under GATES,
//       f(v)                                                 under ACTIVATION=f,
//       v · f'(other[m][n])                                  under SLOPE=f,
//
// for each matrix of a batch. a: T (M, depth), or (depth, M) under A_MN; b: T (N, depth), or (depth, N) under B_MN. out: OUT
// (M, N): T, or float. other: T (M, N), may be `out` itself; bias: float (N) or null; gate: float (images, N). Of float there is
// none: out is `floats`, with rows of `pitch` elements, and is added to if `add`; under TURNED it is (N, M). The lengths of rows of
// out are multiples of 8; all rows start at multiples of 16 bytes. f: as activation.cuh numbers them. a's depth from `split` on
// (depth, or a multiple of 64) is a2's; columns of a rounded out from N1 on (N, or a multiple of 64) are out2's. Under KEEPS, beside
// ACTIVATION or GATES, out2 gets all of v. Under SUMS, beside SLOPE and of one matrix, `floats` (M / 64 rounded up, N) gets the
// sums over each 64 rows of what out has.
//
// WINDOWS: a convolution of R by S taps, one matrix. a is images of `depth` channels. Each has H by W windows, whose pixels are the
// taps: the first begins at row `top` and column `left`, which may lie outside, the others so many rows `down` and columns `across`
// from there. Beyond the image there are zeros. The M rows are the windows. Pixels of out, out2 and other, which are images of H by
// W, may lie at any strides. b is T (N, R, S, depth), or under B_MN (depth, R, S, N) whose taps come from last to first: so is the
// gradient of a convolution's input. Taps lie at any strides too. by_image, float (images, N) or null, is added to v.
//
// A tile of the result has 128 rows and BN columns. Two warpgroups compute 64 rows each, so that both read b's tile from shared
// memory: with 256 columns a block brings 1/85 byte for a flop, where a warpgroup alone would bring 1/51. A third gives its
// registers to the others; one of its threads brings operands, 64 deep, through a ring of STAGES, and biases through another.
// Blocks stay and walk over tiles, so that the next tile's operands arrive while one is finished. Tiles are taken in bands of
// BAND rows of tiles, column by column: those under way together share rows of a and of b in the GPU's cache.
// A tile is rounded in panels of 64 columns, which TMA stores from shared memory behind the next products. What of `other` is read
// is brought there before. Floats are stored from registers: four lanes write the 32 bytes of a sector, or eight under TURNED.
//
// Where few tiles would leave multiprocessors idle, CLUSTER blocks along the grid's z share one, a part of the depth each. A block
// sends each other the sums of that one's columns, WIDTH of them, adds what it gets in the order of the blocks, and finishes them.
//
// Maps: a {depth, M, batches}, box {64, 128, 1}, or under A_MN {M, depth, batches}, box {64, 64, 1}; b {depth, N, batches}, box
// {64, BN, 1}, or under B_MN {N, depth, batches}, box {64, 64, 1}; out and other {N, M, batches}, box {64, 64, 1}. Under WINDOWS
// those of a are of 64 channels of 128 windows, of out and other 64 of 64 pixels, and b has two axes S and R in place of batches.
// WIDTH is a multiple of 64, or of 8 where floats are stored. Launch: 384 threads, grid (any number, or in clusters one for
// each tile; 1; CLUSTER). A cluster has no more blocks than the depth has steps of 64. Shared memory: STAGES of 128 rows of a and
// BN of b, under B_MN a multiple of 64, of 128 bytes; unless of floats 2 PANELS of 8 KiB, and 2 · BN floats of biases; 256 bytes
// of barriers.
#include "activation.cuh"
#include "cluster.cuh"

constexpr int ROWS = 128, DEPTH = 64, ROW_BYTES = 128, PANEL_BYTES = 64 * ROW_BYTES;  // a panel: 64 rows of 64 elements
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int B_PANELS = CEIL_DIV(BN, 64);  // under B_MN
constexpr int A_BYTES = ROWS * ROW_BYTES, B_BYTES = B_MN ? B_PANELS * PANEL_BYTES : BN * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int WIDTH = BN / CLUSTER;  // columns of a tile that a block finishes
constexpr bool ROUNDS = sizeof(OUT) == 2;
constexpr bool READS = ADDS || GATES || SLOPE;  // `other`
constexpr int PANELS = READS ? WIDTH / 64 + KEEPS : KEEPS || WIDTH > 64 ? 2 : 1;  // of a warpgroup's results in shared memory
constexpr int RESULT_BYTES = ROUNDS ? PANELS * PANEL_BYTES : 0;
constexpr int BAND = 16;

struct Sizes {
    int M, N, depth, batches, split, R, S, H, W, top, left, down, across;
    __device__ __forceinline__ int steps() const { return WINDOWS ? CEIL_DIV(depth, DEPTH) * R * S : CEIL_DIV(depth, DEPTH); }
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

// The window that a row is of.
struct Window {
    int image, h, w;
    __device__ __forceinline__ Window(int row, const Sizes& sizes)
        : image(row / (sizes.H * sizes.W)), h(row % (sizes.H * sizes.W) / sizes.W), w(row % sizes.W) {}
};

// One thread brings operands of the steps from `first` to `last`, and biases, in the order in which they are read.
__device__ __forceinline__ void bring(Ring ring, Ring biases, const TensorMap& a, const TensorMap& a2, const TensorMap& b,
                                      const float* bias, const Sizes& sizes, int first, int last) {
    int chunks = CEIL_DIV(sizes.depth, DEPTH);
    for (int i = blockIdx.x; i < sizes.tiles(); i += gridDim.x) {
        Tile tile(i, sizes);
        Window window(tile.m0, sizes);
        int h = window.h * sizes.down + sizes.top, w = window.w * sizes.across + sizes.left;
#pragma unroll 1
        for (int step = first; step < last; step++) {
            int tap = WINDOWS ? step / chunks : 0, k = (step - tap * chunks) * DEPTH, r = tap / sizes.S, s = tap % sizes.S;
            const TensorMap& source = k < sizes.split ? a : a2;
            int k_a = k < sizes.split ? k : k - sizes.split;
            u32 full = ring.acquire(STAGE_BYTES), at_a = ring.buffer(), at_b = at_a + A_BYTES;
            if constexpr (WINDOWS) {
                tma_load_pixels(at_a, source, full, k_a, w, h, window.image, s, r);
            } else if constexpr (A_MN) {
                for (int panel = 0; panel < ROWS / 64; panel++)
                    tma_load(at_a + panel * PANEL_BYTES, a, full, tile.m0 + panel * 64, k, tile.batch);
            } else {
                tma_load(at_a, source, full, k_a, tile.m0, tile.batch);
            }
            if constexpr (B_MN) {
#pragma unroll 1
                for (int panel = 0; panel < B_PANELS; panel++) {
                    int n = tile.n0 + panel * 64;
                    if constexpr (WINDOWS) tma_load(at_b + panel * PANEL_BYTES, b, full, n, k, sizes.S - 1 - s, sizes.R - 1 - r);
                    else tma_load(at_b + panel * PANEL_BYTES, b, full, n, k, tile.batch);
                }
            } else if constexpr (WINDOWS) {
                tma_load(at_b, b, full, k, tile.n0, s, r);
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

// Where a thread's two rows of a warpgroup's find what an image has for all of its rows, from the thread's first column on.
struct ByImage {
    const float* rows[2];
    int columns;  // from there to the last
    __device__ __forceinline__ ByImage(const float* values, int rows_per_image, int m0, int n0, int M, int N) {
        int lane = threadIdx.x % 32, row = m0 + threadIdx.x % 128 / 32 * 16 + lane / 4, column = n0 + lane % 4 * 2;
        columns = N - column;
        for (int h = 0; h < 2; h++) rows[h] = values + (i64)(min(row + 8 * h, M - 1) / rows_per_image) * N + column;
    }
    __device__ __forceinline__ float2 at(int h, int column) const {
        return column < columns ? *reinterpret_cast<const float2*>(rows[h] + column) : float2();
    }
};

// Round the warpgroup's 64 rows in panels that TMA stores: of v first, under KEEPS, then of what becomes of it.
__device__ __forceinline__ void store_rounded(const TensorMap& out, const TensorMap& out2, u32 result, float (&acc)[BN / 2],
                                              const float* bias, const ByImage& by_image, bool adds_emb, const Sizes& sizes,
                                              int m0, int n0, int N1, int batch) {
    int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    bool leads = threadIdx.x % 128 == 0;
    Window window(m0, sizes);
#pragma unroll
    for (int part = 0; part < WIDTH / 64 * (KEEPS + 1); part++) {
        int panel = part / (KEEPS + 1);
        bool keeps = KEEPS && part % 2 == 0, first = keeps || !KEEPS;  // of this panel: v lacks what is added to it
        u32 at_panel = result + (!READS ? part % PANELS : keeps ? PANELS - 1 : panel) * PANEL_BYTES;
        if (!READS || (keeps && part > 0)) {
            if (leads && part == 0) tma_store_wait();  // three panels of a tile in two places: the last lies in the first
            if (leads && part > 0) tma_store_wait<READS ? 1 : PANELS - 1>();  // for the panel that lies here
            warpgroup_meets();
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {  // 16 columns
            float* v = acc + panel * 32 + j * 8;
            u32 at = at_panel + swizzled<ROW_BYTES>(row, j * 2 + lane / 16), words[4];
            if (READS && !keeps) ldmatrix(words, at);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float2 sum = make_float2(v[2 * i], v[2 * i + 1]);
                if (bias && first) {
                    float2 more = *reinterpret_cast<const float2*>(bias + panel * 64 + j * 16 + i / 2 * 8 + lane % 4 * 2);
                    sum.x += more.x, sum.y += more.y;
                }
                if (WINDOWS && adds_emb && first) {
                    float2 more = by_image.at(i % 2, panel * 64 + j * 16 + i / 2 * 8);
                    sum.x += more.x, sum.y += more.y;
                }
                if (GATES && !keeps) {
                    float2 gate = by_image.at(i % 2, panel * 64 + j * 16 + i / 2 * 8);
                    sum.x *= gate.x, sum.y *= gate.y;
                }
                if (READS && !SLOPE && !keeps) {
                    float2 more = unpack_pair<T>(words[i]);
                    sum.x += more.x, sum.y += more.y;
                }
                if constexpr (SLOPE) {
                    float2 x = unpack_pair<T>(words[i]);
                    sum.x *= activation_slope<SLOPE>(x.x), sum.y *= activation_slope<SLOPE>(x.y);
                }
                if (keeps) v[2 * i] = sum.x, v[2 * i + 1] = sum.y;
                if (ACTIVATION && !keeps) sum.x = activate<ACTIVATION>(sum.x), sum.y = activate<ACTIVATION>(sum.y);
                words[i] = pack_pair<T>(sum.x, sum.y);
            }
            stmatrix(at, words[0], words[1], words[2], words[3]);
        }
        fence_writes();
        warpgroup_meets();
        int column = n0 + panel * 64;
        bool second = column >= N1 && column < sizes.N;
        const TensorMap& target = keeps || second ? out2 : out;
        if (second) column -= N1;
        if (leads && WINDOWS) tma_store_pixels(target, at_panel, column, window.w, window.h, window.image);
        else if (leads) tma_store(target, at_panel, column, m0, batch);
    }
}

// The sums over so many rows of the panels that lie in shared memory. The next tile's may come there after it.
__device__ __forceinline__ void leave_sums(float* sums, u32 result, int m0, int n0, int M, int N) {
#pragma unroll 1
    for (int panel = 0; panel < WIDTH / 64; panel++) {
        float2 sum = panel_sums<T>(result + panel * PANEL_BYTES, M - m0);
        int column = n0 + panel * 64 + PANEL_COLUMN;
        if (threadIdx.x % 32 < 8 && column < N) *reinterpret_cast<float2*>(sums + (i64)(m0 / 64) * N + column) = sum;
    }
    warpgroup_meets();
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
gemm_sm90(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap a2, const __grid_constant__ TensorMap b,
          const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap out2, const __grid_constant__ TensorMap other,
          const float* bias, const float* by_image, int rows_per_image, float* floats, i64 pitch, int add, int M, int N, int depth,
          int batches, int split, int N1, int R, int S, int H, int W, int top, int left, int down, int across) {
    extern __shared__ __align__(1024) u8 shared[];
    Sizes sizes = {M, N, depth, batches, split, R, S, H, W, top, left, down, across};
    u32 base = shared_address(shared), results = base + STAGES * STAGE_BYTES, bias_buffers = results + 2 * RESULT_BYTES;
    u32 barriers = bias_buffers + (ROUNDS ? 2 * BN * sizeof(float) : 0), others = barriers + 192, exchange = barriers + 208;
    Ring ring(base, STAGE_BYTES, STAGES, barriers), biases(bias_buffers, BN * sizeof(float), 2, barriers + 128);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; i++) barrier_init(others + 8 * i, 1);
        ring.init(2), biases.init(2);
        open_exchange(exchange, ROWS * BN * sizeof(float));
        prefetch(a), prefetch(b);
        if (split < depth) prefetch(a2);
        if (ROUNDS) prefetch(out);
        if (READS) prefetch(other);
        if (KEEPS) prefetch(out2);
    }
    int rank = CLUSTER > 1 ? blockIdx.z : 0, group = threadIdx.x / 128;
    int first = sizes.steps() * rank / CLUSTER, last = sizes.steps() * (rank + 1) / CLUSTER;
    wait_for_previous();
    __syncthreads();
    if (group == 2) {
        set_registers<40, false>();
        if (threadIdx.x == CONSUMERS) bring(ring, biases, a, a2, b, bias, sizes, first, last);
        return;  // which counts as arrival in a cluster
    }
    set_registers<232, true>();
    bool leads = threadIdx.x % 128 == 0;
    u32 result = results + group * RESULT_BYTES, own_other = others + 8 * group, phase = 0;
    for (int i = blockIdx.x; i < sizes.tiles(); i += gridDim.x, phase ^= 1) {
        Tile tile(i, sizes);
        int m0 = tile.m0 + group * 64, n0 = tile.n0 + rank * WIDTH;
        if (READS && leads) {
            tma_store_wait();  // of the last tile
            barrier_expect(own_other, WIDTH / 64 * PANEL_BYTES);
            Window window(m0, sizes);
            for (int panel = 0; panel < WIDTH / 64; panel++) {
                u32 target = result + panel * PANEL_BYTES;
                int n = n0 + panel * 64;
                if constexpr (WINDOWS) tma_load_pixels(target, other, own_other, n, window.w, window.h, window.image, 0, 0);
                else tma_load(target, other, own_other, n, m0, tile.batch);
            }
        }
        float acc[BN / 2];
        multiply(acc, ring, last - first, group);
        if constexpr (CLUSTER > 1) add_up(acc, reinterpret_cast<float4*>(shared), exchange, rank);
        if constexpr (ROUNDS) {
            if (READS) barrier_wait(own_other, phase);
            if (bias) biases.wait();
            u32 at_bias = biases.buffer() - base + rank * WIDTH * sizeof(float);
            const float* own_bias = bias ? reinterpret_cast<const float*>(shared + at_bias) : nullptr;
            ByImage values(by_image, rows_per_image, m0, n0, M, N);
            store_rounded(out, out2, result, acc, own_bias, values, by_image, sizes, m0, n0, N1, tile.batch);
            if (SUMS && m0 < M) leave_sums(floats, result, m0, n0, M, N);
            if (bias) biases.release();
        } else {
            store_floats(floats + (i64)tile.batch * (TURNED ? N : M) * pitch, pitch, acc, m0, n0, M, N, add);
        }
    }
    if (ROUNDS && leads) tma_store_wait();
}
