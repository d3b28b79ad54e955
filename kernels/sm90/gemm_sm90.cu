// Matrix multiplication on Hopper: TMA loads tiles of 16-bit operands, wgmma multiplies them, the epilogue finishes the result.
//
// For each matrix of a batch
//
//   v[m][n] = sum over k of a[m][k] · b[n][k] + bias[n]
//
// and, by the kernel's constants,
//
//   out = v
//   out = v + other                   ADDS
//   out = other + gate · v            GATES: gate is by_image[m / rows_per_image][n]
//   out = f(v)                        ACTIVATION=f: numbered as in activation.cuh
//   out = v · other                   MULTIPLIES
//
// Arguments
//   a         T (M, depth), or (depth, M) under A_MN. From column `split` of the depth on it is a2; split is depth, or a
//             multiple of 64.
//   b         T (N, depth), or (depth, N) under B_MN.
//   bias      float (N), or null.
//   other     T (M, N). May be `out` itself.
//   by_image  float (images, N).
//   out       OUT=T: T (M, N). From column N1 on it is out2; N1 is N, or a multiple of 64.
//             OUT=float: `floats`, (M, N) in rows of `pitch` elements, or (N, M) under TRANSPOSED. Added to if `add`. There is
//             no `other` then.
//   out2      under KEEPS: v beside GATES, f'(v) beside ACTIVATION, for the backward to multiply by.
//   floats    under SUMS, beside MULTIPLIES and of one matrix: (ceil(M / 64), N), the sums of each 64 rows of out.
//   parts     of the depth, each with a result of its own: out is (batches, parts, M, N). 1 unless OUT=float and CLUSTER=1.
// Row lengths of out are multiples of 8. All rows start at multiples of 16 bytes.
//
// WINDOWS: a convolution of R × S taps, as a product of one matrix.
//   a         images of `depth` channels. Row m of the product is a window, of which each image has H × W. A window's first
//             tap is pixel (top + h · down, left + w · across), which may lie outside of the image: zeros. Its other taps
//             follow side by side.
//   b         T (N, R, S, depth), or (depth, R, S, N) with the taps in reverse under B_MN: the gradient of a convolution's
//             input. Taps may have any strides.
//   out, out2, other   images of H × W pixels at any strides.
//   by_image  null, or added to v.
// WINDOWS and A_MN: the gradient of a convolution's weights. With OUT=float and TRANSPOSED, out is (N, R, S, channels).
//   a         the convolution's images, of channels = M / (R · S). The depth is their windows.
//   b         (depth, N): the gradient of its result.
//
// How it works
//   Tiles      A block computes 128 rows and BN columns at a time. Each of two consumer warpgroups has 64 of the rows, and
//              both read the same tile of b from shared memory. With 256 columns a block loads 1/85 byte for a flop; a
//              warpgroup with tiles of its own would load 1/51.
//   Producer   One thread of a third warpgroup loads operands, 64 of the depth a step, into a ring of STAGES, and biases
//              into a ring of two. The rest of its warpgroup gives its registers to the consumers.
//   Order      Blocks are persistent: each walks over tiles, so that the next tile's operands arrive during an epilogue.
//              Tiles are taken column by column within bands of BAND rows of tiles: tiles computed at the same time share
//              rows of a and of b in L2.
//   Epilogue   A warpgroup rounds its results into panels of 64 columns in shared memory. TMA stores them while the next
//              tile is multiplied. A tile of `other` is loaded into those panels first. Floats are stored from registers: four
//              lanes write the 32 bytes of a sector, or eight under TRANSPOSED.
//   Clusters   Where there are fewer tiles than multiprocessors, the CLUSTER blocks along the grid's z split the depth of a
//              tile. Each finishes WIDTH = BN / CLUSTER of its columns: it receives the other blocks' sums of these, and adds
//              them in the order of the blocks.
//   Parts      Split K for results of floats: blocks take a part of a tile's depth each, the first parts of all tiles first.
//              accumulate.cu adds the parts' results up.
//
// Launch
//   Grid       any number of blocks; in clusters (tiles, 1, CLUSTER), each for one tile of at least CLUSTER steps. 384 threads.
//   Maps       a {depth, M, batches}, box {64, 128, 1}; under A_MN {M, depth, batches}, box {64, 64, 1}.
//              b {depth, N, batches}, box {64, BN, 1}; under B_MN {N, depth, batches}, box {64, 64, 1}. last_b is b's for the last
//              N % BN rows, which make its box, but under B_MN. For TMA a row beyond an array takes longer than one of it.
//              out, other {N, M, batches}, box {64, 64, 1}.
//              Under WINDOWS those of a are of 64 channels of 128 windows, those of out and other of 64 channels of 64
//              pixels, and b has the axes S and R in place of batches. With A_MN those of a are of 64 windows, b's without windows.
//   Columns    WIDTH is a multiple of 64, or of 8 where floats are stored.
//   Shared     STAGES · 128 bytes · (128 + BN, under B_MN rounded up to 64), with at most 8 STAGES; unless floats are stored,
//              2 · PANELS of 8 KiB and 2 · BN floats of biases; 256 bytes of barriers.
#include "activation.cuh"
#include "cluster.cuh"

constexpr int ROWS = 128, DEPTH = 64, ROW_BYTES = 128, PANEL_BYTES = 64 * ROW_BYTES;  // a panel: 64 rows of 64 elements
constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr int B_PANELS = CEIL_DIV(BN, 64);  // under B_MN
constexpr int A_BYTES = ROWS * ROW_BYTES, B_BYTES = B_MN ? B_PANELS * PANEL_BYTES : BN * ROW_BYTES, STAGE_BYTES = A_BYTES + B_BYTES;
constexpr int WIDTH = BN / CLUSTER;  // columns of a tile that a block finishes
constexpr bool ROUNDS = sizeof(OUT) == 2;
constexpr bool WGRAD = WINDOWS && A_MN;
constexpr bool READS = ADDS || GATES || MULTIPLIES;  // `other`
// A warpgroup's panels in shared memory: all of a tile's where `other` lies there first, with one more under KEEPS, and where they
// are three or fewer. Else two are written in turns: while TMA reads one, the other is written.
constexpr int PARTS = WIDTH / 64 * (KEEPS + 1);  // panels that a tile stores
constexpr int PANELS = READS ? WIDTH / 64 + KEEPS : PARTS <= 3 ? PARTS : 2;
constexpr int RESULT_BYTES = ROUNDS ? PANELS * PANEL_BYTES : 0;
constexpr int BAND = 16;

struct Sizes {
    int M, N, depth, batches, parts, split, R, S, H, W, top, left, down, across;
    __device__ __forceinline__ int channels() const { return M / (R * S); }  // of WGRAD
    __device__ __forceinline__ int chunks() const { return CEIL_DIV(WGRAD ? channels() : depth, DEPTH); }  // of 64 channels
    __device__ __forceinline__ int steps() const { return WINDOWS && !A_MN ? chunks() * R * S : CEIL_DIV(depth, DEPTH); }
    // Rows of tiles. Those of WGRAD are two chunks of taps.
    __device__ __forceinline__ int rows() const { return WGRAD ? CEIL_DIV(chunks() * R * S, ROWS / 64) : CEIL_DIV(M, ROWS); }
    __device__ __forceinline__ int tiles() const { return rows() * CEIL_DIV(N, BN) * batches * parts; }
};

// The first row and column of tile `index`, in the order in which tiles are taken, its result, its matrix of the batch, and its
// steps along the depth: those of its part, or of block `rank` of the cluster.
struct Tile {
    int m0, n0, result, batch, first, last;
    __device__ __forceinline__ Tile(int index, const Sizes& sizes, int rank) {
        int rows = sizes.rows(), columns = CEIL_DIV(sizes.N, BN);  // of tiles
        result = index / (rows * columns);
        index -= result * rows * columns;
        batch = result / sizes.parts;
        int part = CLUSTER > 1 ? rank : result - batch * sizes.parts, parts = CLUSTER > 1 ? CLUSTER : sizes.parts;
        int steps = sizes.steps();
        first = steps * part / parts, last = steps * (part + 1) / parts;
        int band = index / (BAND * columns), height = min(BAND, rows - band * BAND);
        index -= band * BAND * columns;
        m0 = (band * BAND + index % height) * ROWS;
        n0 = index / height * BN;
    }
};

// The image of a row of WINDOWS, and the place of its window there.
struct Window {
    int image, h, w;
    __device__ __forceinline__ Window(int row, const Sizes& sizes)
        : image(row / (sizes.H * sizes.W)), h(row % (sizes.H * sizes.W) / sizes.W), w(row % sizes.W) {}
};

// What 64 rows of a tile of WGRAD are: the channels from `channel` on, under a tap. A last tile may have a tap too many.
struct Tap {
    int index, channel, r, s;
    __device__ __forceinline__ Tap(int row, const Sizes& sizes)
        : index(row / 64 / sizes.chunks()), channel(row / 64 % sizes.chunks() * 64), r(index / sizes.S), s(index % sizes.S) {}
};

// The producer: loads the operands of each tile's steps, then its biases, in the order in which the consumers read them.
__device__ __forceinline__ void produce(Ring ring, Ring biases, const TensorMap& a, const TensorMap& a2, const TensorMap& whole_b,
                                        const TensorMap& last_b, const float* bias, const Sizes& sizes, int rank) {
    int chunks = sizes.chunks();
    for (int i = blockIdx.x; i < sizes.tiles(); i += gridDim.x) {
        Tile tile(i, sizes, rank);
        Window window(tile.m0, sizes);
        int h = window.h * sizes.down + sizes.top, w = window.w * sizes.across + sizes.left;
        Tap taps[] = {{tile.m0, sizes}, {tile.m0 + 64, sizes}};  // of WGRAD
        int columns = min(BN, sizes.N - tile.n0), b_panels = CEIL_DIV(columns, 64);  // under B_MN
        int a_panels = A_MN && !WGRAD && sizes.M - tile.m0 <= 64 ? 1 : ROWS / 64;    // under A_MN
        u32 bytes = a_panels * PANEL_BYTES + (B_MN ? b_panels * PANEL_BYTES : columns * ROW_BYTES);
        const TensorMap& b = columns == BN ? whole_b : last_b;
#pragma unroll 1
        for (int step = tile.first; step < tile.last; step++) {
            int tap = WINDOWS && !A_MN ? step / chunks : 0, k = (step - tap * chunks) * DEPTH, r = tap / sizes.S, s = tap % sizes.S;
            const TensorMap& source = k < sizes.split ? a : a2;
            int k_a = k < sizes.split ? k : k - sizes.split;
            u32 full = ring.acquire(bytes), at_a = ring.buffer(), at_b = at_a + A_BYTES;
            if constexpr (WGRAD) {
                Window first(k, sizes);
                int from_w = first.w * sizes.across + sizes.left, from_h = first.h * sizes.down + sizes.top;
#pragma unroll
                for (int panel = 0; panel < ROWS / 64; panel++)
                    tma_load_pixels(at_a + panel * PANEL_BYTES, a, full, taps[panel].channel, from_w, from_h, first.image,
                                    taps[panel].s, taps[panel].r);
            } else if constexpr (WINDOWS) {
                tma_load_pixels(at_a, source, full, k_a, w, h, window.image, s, r);
            } else if constexpr (A_MN) {
                for (int panel = 0; panel < a_panels; panel++)
                    tma_load(at_a + panel * PANEL_BYTES, a, full, tile.m0 + panel * 64, k, tile.batch);
            } else {
                tma_load(at_a, source, full, k_a, tile.m0, tile.batch);
            }
            if constexpr (B_MN) {
#pragma unroll 1
                for (int panel = 0; panel < b_panels; panel++) {
                    int n = tile.n0 + panel * 64;
                    if constexpr (WINDOWS && !A_MN)
                        tma_load(at_b + panel * PANEL_BYTES, b, full, n, k, sizes.S - 1 - s, sizes.R - 1 - r);
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

// acc = the products of the ring's next `steps` stages, for the 64 rows of warpgroup `group`.
__device__ __forceinline__ void multiply(float (&acc)[BN / 2], Ring& ring, int steps, int group) {
    Ring read = ring;  // a step behind: the stage that is released next
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
        wgmma_wait<1>();  // until only this step's products are under way: the stage before was read
        if (step > 0) read.release();
    }
    wgmma_wait<0>();
    read.release();
}

// Add up the depth's splits: sends each block of the cluster its WIDTH columns, and leaves in acc's first WIDTH / 2 elements
// the sums of this block's own. They arrive in `exchange`, float4 [from][WIDTH / 8][CONSUMERS]; `barrier` counts the bytes.
__device__ __forceinline__ void add_splits(float (&acc)[BN / 2], float4* exchange, u32 barrier, int rank) {
    constexpr int SHARE = WIDTH / 8;
    exchange += threadIdx.x;
    cluster_arrive_relaxed(), cluster_wait();  // all blocks have read the operands that lay there
#pragma unroll
    for (int j = 0; j < BN / 8; j++) {
        float4 v = make_float4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
        send(exchange + (rank * SHARE + j % SHARE) * CONSUMERS, j / SHARE, v, barrier);
    }
    receive(barrier);
#pragma unroll
    for (int j = 0; j < SHARE; j++) sum_terms(acc + 4 * j, exchange + j * CONSUMERS, SHARE * CONSUMERS);
}

// by_image for the two rows of a warpgroup's tile whose results a thread holds, from the thread's first column on.
struct ByImage {
    const float* rows[2];
    int columns;  // that are left from there
    __device__ __forceinline__ ByImage(const float* values, int rows_per_image, int m0, int n0, int M, int N) {
        int lane = threadIdx.x % 32, row = m0 + threadIdx.x % 128 / 32 * 16 + lane / 4, column = n0 + lane % 4 * 2;
        columns = N - column;
        for (int h = 0; h < 2; h++) rows[h] = values + (i64)(min(row + 8 * h, M - 1) / rows_per_image) * N + column;
    }
    __device__ __forceinline__ float2 at(int h, int column) const {
        return column < columns ? *reinterpret_cast<const float2*>(rows[h] + column) : float2();
    }
};

__device__ __forceinline__ void add(float2& to, float2 x) { to.x += x.x, to.y += x.y; }

// What two columns of a row leave in out2 under KEEPS. v, which has its bias, becomes f(v) under ACTIVATION: one evaluation of
// the gate gives value and slope.
__device__ __forceinline__ float2 keep(float2& v) {
    if (!ACTIVATION) return v;
    Activated x = activate_with_slope<ACTIVATION>(v.x), y = activate_with_slope<ACTIVATION>(v.y);
    v = make_float2(x.value, y.value);
    return make_float2(x.slope, y.slope);
}

// The epilogue of two columns of a row: v, which has its bias and under KEEPS went through `keep`, becomes out. other: two
// elements of T.
__device__ __forceinline__ void finish(float2& v, u32 other, float2 gate) {
    if (GATES) v.x *= gate.x, v.y *= gate.y;
    if (ADDS || GATES) add(v, unpack_pair<T>(other));
    if constexpr (MULTIPLIES) {
        float2 factor = unpack_pair<T>(other);
        v.x *= factor.x, v.y *= factor.y;
    }
    if (ACTIVATION && !KEEPS) v.x = activate<ACTIVATION>(v.x), v.y = activate<ACTIVATION>(v.y);
}

// Round a warpgroup's 64 rows into panels, which TMA stores: WIDTH / 64 of out, each under KEEPS after one of out2.
__device__ __forceinline__ void store_rounded(const TensorMap& out, const TensorMap& out2, u32 result, float (&acc)[BN / 2],
                                              const float* bias, const ByImage& by_image, bool adds_emb, const Sizes& sizes,
                                              int m0, int n0, int N1, int batch) {
    int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane % 16;
    bool leads = threadIdx.x % 128 == 0;
    Window window(m0, sizes);
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        int panel = part / (KEEPS + 1);
        bool keeps = KEEPS && part % 2 == 0, first = keeps || !KEEPS;  // this part stores out2; it is the first to need v
        int place = !READS ? part % PANELS : keeps ? PANELS - 1 : panel;
        u32 at_panel = result + place * PANEL_BYTES;
        if (READS ? keeps && part > 0 : part == 0 || PANELS < PARTS) {  // until TMA has read what was stored from this place
            if (leads && part == 0) tma_store_wait();  // of the last tile
            if (leads && part > 0) tma_store_wait<READS ? 1 : PANELS - 1>();
            warpgroup_meets();
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {  // 16 columns
            float* v = acc + panel * 32 + j * 8;
            u32 at = at_panel + swizzled<ROW_BYTES>(row, j * 2 + lane / 16), words[4];
            if (READS && !keeps) ldmatrix(words, at);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int column = panel * 64 + j * 16 + i / 2 * 8;
                float2 sum = make_float2(v[2 * i], v[2 * i + 1]);
                if (bias && first) add(sum, *reinterpret_cast<const float2*>(bias + column + lane % 4 * 2));
                if (WINDOWS && adds_emb && first) add(sum, by_image.at(i % 2, column));
                if (keeps) {
                    float2 kept = keep(sum);
                    v[2 * i] = sum.x, v[2 * i + 1] = sum.y;
                    sum = kept;
                } else {
                    finish(sum, words[i], GATES ? by_image.at(i % 2, column) : float2());
                }
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

// Write the sums of the columns of a warpgroup's panels, of those of its rows that lie in the matrix. Afterwards the next
// tile's panels may be written.
__device__ __forceinline__ void store_sums(float* sums, u32 result, int m0, int n0, int M, int N) {
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
            if constexpr (TRANSPOSED) {
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
          const __grid_constant__ TensorMap last_b, const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap out2,
          const __grid_constant__ TensorMap other, const float* bias, const float* by_image, int rows_per_image, float* floats,
          i64 pitch, int add, int M, int N, int depth, int batches, int parts, int split, int N1, int R, int S, int H, int W,
          int top, int left, int down, int across) {
    extern __shared__ __align__(1024) u8 shared[];
    Sizes sizes = {M, N, depth, batches, parts, split, R, S, H, W, top, left, down, across};
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
    wait_for_previous();
    __syncthreads();
    if (group == 2) {
        set_registers<40, false>();
        if (threadIdx.x == CONSUMERS) produce(ring, biases, a, a2, b, last_b, bias, sizes, rank);
        return;  // which counts as arrival in a cluster
    }
    set_registers<232, true>();
    bool leads = threadIdx.x % 128 == 0;
    u32 result = results + group * RESULT_BYTES, own_other = others + 8 * group, phase = 0;
    for (int i = blockIdx.x; i < sizes.tiles(); i += gridDim.x, phase ^= 1) {
        Tile tile(i, sizes, rank);
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
        multiply(acc, ring, tile.last - tile.first, group);
        if constexpr (CLUSTER > 1) add_splits(acc, reinterpret_cast<float4*>(shared), exchange, rank);
        if constexpr (ROUNDS) {
            if (READS) barrier_wait(own_other, phase);
            if (bias) biases.wait();
            u32 at_bias = biases.buffer() - base + rank * WIDTH * sizeof(float);
            const float* own_bias = bias ? reinterpret_cast<const float*>(shared + at_bias) : nullptr;
            ByImage values(by_image, rows_per_image, m0, n0, M, N);
            store_rounded(out, out2, result, acc, own_bias, values, by_image != nullptr, sizes, m0, n0, N1, tile.batch);
            if (SUMS && m0 < M) store_sums(floats, result, m0, n0, M, N);
            if (bias) biases.release();
        } else {
            int first = m0, end = M;  // rows of the result
            if constexpr (WGRAD) {
                Tap tap(m0, sizes);
                first = tap.index * sizes.channels() + tap.channel, end = min(M, (tap.index + 1) * sizes.channels());
            }
            store_floats(floats + (i64)tile.result * (TRANSPOSED ? N : M) * pitch, pitch, acc, first, n0, end, N, add);
        }
    }
    if (ROUNDS && leads) tma_store_wait();
}
