// Convolution on Hopper, of stride 1 and with the image's size kept: TMA loads the operands, wgmma multiplies them. It is FPROP
// and DGRAD of conv2d.cu. WGRAD is conv2d_wgrad_sm90.cu, and of floats conv2d_wgrad_tf32_sm90.cu.
//
//   FPROP  v[pixel][k] = patch of x[pixel][r,s,c] · weight[k][r,s,c] + bias[k] + emb[n][k]
//   DGRAD  the same with weight[c][R-1-r][S-1-s][k]. Then x is dout, out is dx, and K is the number of dx's channels.
//
// and, by the kernel's constants,
//
//   out = v
//   out = v + addend               ADDS
//   out = max(0, v or v + addend)  RELU
//   out = v · silu'(z)             NORM=1, of 16-bit DGRAD: the convolution's input was silu(z), where z is group norm's map
//                                  (affine.cuh) of `addend`, and of `addend2` from channel K1 on. out is d_preact, the gradient
//                                  of z. There is no out2; bias and emb are null.
//   out = v                        NORM=2: the same where the input was z itself, whose slope is 1.
//   out = v + addend[pixel] · skip_weight[k] + skip_bias[k]
//                                  SKIP, of 16-bit FPROP without ADDS and RELU: a 1×1 convolution is added. emb is null: with
//                                  both biases and emb, registers spilled.
//
// UPSAMPLE, of FPROP: x is (N, H / 2, W / 2, C), and the convolution is of an image in which each pixel of x is four pixels.
//
// Arguments
//   x         T (N, H, W, C). From channel `split` on it is x2; split is C, or a multiple of CHUNK.
//   weight    T (K, R, S, C), or (C, R, S, K) under DGRAD. R (a constant) and S are odd. wgmma takes tf32 operands only as
//             FPROP has them: a dgrad of floats is FPROP of the flipped weight.
//   out       T (N, H, W, K). From channel K1 on it is out2; K1 is K, or a multiple of 64.
//   addend    T (N, H, W, K). May be `out` itself. Under SKIP T (N, H, W, D), and from channel D1 on it is addend2; D is a
//             multiple of 8, D1 is D or a multiple of CHUNK.
//   bias, skip_bias   float (K), or null.
//   emb       float (N, K), or null.
//   sums      (N, tiles · CLUSTER, K), of each output tile, or of each block's share of it, or of each image of it.
//             STATISTICS: the channel statistics of the rounded out, StatisticsOf<T>.
//             NORM: float2, the sums of d_preact and of d_preact · addend, before rounding.
// C and K are multiples of 8, or of 4 floats. No size is 0.
//
// How it works
//   Tiles      An output tile is 8 pixels wide, `rows` high, and has at most PIXELS pixels. An image has `tiles` of them. A
//              warpgroup computes 64 channels of a tile: its products have 64 rows, the channels, and PIXELS columns. The
//              results of a thread belong to two channels. With 256 columns the operands are read from shared memory least
//              often. With fewer, shared memory's speed is the bound: 128 columns reach 0.92 of the speed of 256, and 64
//              columns 0.63 (TILES in convolution/plans_sm90.py).
//   IMAGES     A tile may have several images of up to 8 columns, one below the other: smaller tiles would read the weights
//              more often. A halo tile has R / 2 rows of zeros between two images, the padding of both. The rows of results
//              there are computed, but not stored.
//   WHOLE_ROWS A tile may have whole rows of an image: 8 divides few widths. S / 2 pixels of zeros after each row of a halo tile
//              pad its right and the next row's left, and an output tile has as many there, which are not stored. So the operand
//              of each tap is a run of pixels.
//   Depth      The depth is walked in chunks of 64 channels, or 32 of floats. A stage of ring a is a halo tile: a chunk of
//              rows + R - 1 by 8 + S - 1 pixels, padded with zeros by TMA. It serves all taps of the chunk, which differ only
//              in where their operand starts. A stage of ring b has the weights of R vertical taps. Multiplying these is a
//              step. The last chunk leaves out SPARED of its four k-steps, which are zeros: 48 channels take three.
//   SKIP       The skip path's channels follow those of x, in chunks of one tap. Their halo tiles are the output tile's own
//              pixels, rows by 8.
//   UPSAMPLE   A halo tile is loaded row by row, and TMA makes two columns of one by an axis of stride 0. Where the first
//              column would be the second of a pair, a row has one more column `before` it, and one more at its end.
//   Blocks     Blocks are persistent: each walks over consecutive tiles, one an iteration, so that its products hardly pause.
//              The producer, one thread of a third warpgroup, loads halo tiles and weights. The two consumer warpgroups
//              alternate (ping-pong): one multiplies while the other runs its epilogue. Weights that all fit in shared memory
//              are loaded once.
//   Epilogue   The warpgroup adds, rounds and sums its results, and writes them to shared memory, from which TMA stores them.
//              The addend is loaded to the same place during the products.
//   STREAM_K   Tiles are cut along the depth (arXiv 2301.03598), so that each block has as many steps as any other. `together`
//              neighbours have a tile each, of the same channels, and walk through the same weights, which are then read from
//              memory once. They have what follows for the next `together` blocks: further steps, tiles, channels. A block that
//              does not begin a tile leaves its sums in `parts`, and a tagged slot in `exchange`. The block that began the tile
//              adds them, in the order of the blocks, and finishes the tile. They come by ring b, after the last weights. What it
//              waits for is the first thing that other blocks do.
//   Clusters   Where there are fewer tiles than multiprocessors, the CLUSTER blocks along the grid's z split the depth of a
//              tile, and each has one iteration. A block multiplies its part of the steps. It sends each block the sums of
//              the rows which that one finishes, SHARE = PIXELS / 8 / CLUSTER, and adds what it receives in the order of the
//              blocks.
//
// Launch
//   Grid       (any number of blocks; ceil(K / 64); CLUSTER), in clusters (tiles of all images; ceil(K / 64); CLUSTER), with no
//              more blocks to a cluster than steps. tiles = ceil(W / 8) · ceil(H / rows), of IMAGES images. 384 threads, of
//              which the last 127 only give their registers to the consumers.
//              STREAM_K: a cooperative launch of no more blocks than there are multiprocessors, and steps of all tiles. `together`
//              divides the blocks and the tiles.
//   parts      STREAM_K: float4 (blocks, PIXELS / 8, 128).
//   Maps       x {C, W, H, N}, box {CHUNK, 8 + S - 1, rows + R - 1, 1}; under UPSAMPLE {C, 2, W / 2, H / 2, N}, box
//              {CHUNK, 2, (8 + S - 1) / 2 + before, 1, 1}.
//              weight {C, R·S, K}, under DGRAD {K, R·S, C}, box {CHUNK, 1, 64}. skip_weight {D, 1, K}, the same box.
//              last_weight has fewer rows in a box: those that there are of the last 64 of K, under DGRAD those that are read
//              of the last chunk of C; last_skip_weight likewise. For TMA a row beyond an array takes longer than one of it.
//              out, addend {K, W, H, N}, box {CHUNK, 8, min(rows, SHARE), 1}; under SKIP addend {D, W, H, N}, box
//              {CHUNK, 8, rows, 1}.
//              Those of float x and weight round to tf32.
//              Under WHOLE_ROWS boxes have W + S / 2 columns, x's rows + R - 1 rows, and the others `rows`.
//   IMAGES     above 1 only without CLUSTER and UPSAMPLE, of images of one tile, of rows = H ≤ IMAGE_ROWS - R / 2.
//   WHOLE_ROWS only without these three, of 8 ≤ W and rows · (W + S / 2) ≤ PIXELS. tiles = ceil(H / rows).
//   Shared     1024 bytes of barriers, and IMAGES times as many for NORM's maps; `a_stages` halo tiles, at least two unless a
//              block has one chunk in all; `b_stages` times the weights of R taps, at least two unless an iteration has one
//              step; the results of one iteration, or of two if a block has several, each of an even number of rows; in
//              clusters an exchange workspace of 256 · PIXELS bytes.
#include "affine.cuh"
#include "cluster.cuh"
#include "wgmma.cuh"

enum Pass { FPROP, DGRAD };

constexpr int CONSUMERS = 256, THREADS = CONSUMERS + 128;
constexpr bool LOW = sizeof(T) == 2;
constexpr bool READS = ADDS || NORM, SUMS = STATISTICS || NORM, SLOPE = NORM == 1;
constexpr int ROW_BYTES = 128, CHUNK = ROW_BYTES / sizeof(T);  // bytes and channels of a row of shared memory
constexpr int K_STEPS = ROW_BYTES / 32;  // of a chunk
constexpr int TAP_BYTES = 64 * ROW_BYTES, WEIGHT_BYTES = R * TAP_BYTES;
constexpr int SHARE = PIXELS / 8 / CLUSTER;  // rows of a tile that a block finishes
constexpr int CHUNK_BYTES = CEIL_DIV(SHARE, 2) * 2 * 8 * ROW_BYTES;  // stmatrix writes two rows
constexpr int RESULT_BYTES = 64 / CHUNK * CHUNK_BYTES;
constexpr int IMAGE_ROWS = (PIXELS / 8 + R / 2) / IMAGES;  // of a tile, from an image to the next: its own, and of zeros R / 2
#include "conv2d_epilogue.cuh"
#include "stream_k.cuh"

struct OutputTile {
    int n, h0, w0;
    __device__ __forceinline__ OutputTile(int index, int tiles, int across, int rows) : n(index / tiles * IMAGES) {
        int in_image = index % tiles;
        h0 = in_image / across * rows, w0 = in_image % across * 8;
    }
};

// Add up the depth's splits: sends each block of the cluster its SHARE rows, and leaves in acc's first 4 · SHARE elements the
// sums of this block's own, added in the order of the blocks. They arrive in `exchange`, float4 [from][SHARE][128]; `barrier`
// counts the bytes.
__device__ __forceinline__ void add_up(float (&acc)[PIXELS / 2], float4* exchange, u32 barrier) {
    exchange += threadIdx.x;
    cluster_wait();
#pragma unroll
    for (int row = 0; row < PIXELS / 8; row++) {
        float4 v = make_float4(acc[4 * row], acc[4 * row + 1], acc[4 * row + 2], acc[4 * row + 3]);
        send(exchange + (blockIdx.z * SHARE + row % SHARE) * 128, row / SHARE, v, barrier);
    }
    receive(barrier);
#pragma unroll
    for (int row = 0; row < SHARE; row++) sum_terms(acc + 4 * row, exchange + row * 128, SHARE * 128);
}

// A block's share of one output tile: a run of steps of its depth.
struct Part {
    int tile;                 // counted over all images
    int k0;                   // first channel of the result
    int first, middle, last;  // steps: x's first .. middle - 1, SKIP's middle .. last - 1
    int others;               // how many of the next blocks have the rest of a tile that this one begins
};

// The shares of a block, one after the other.
struct Work {
    i64 all;                  // tiles of all images; STREAM_K: steps of all channels, and of the tiles of every `together`th block
    int at, to;               // of those, this block's
    int all_tiles, tiles, across, rows;  // tiles; of an image; side by side in it; rows of a tile
    int steps, own;           // of a tile: all, and x's
    int first, last, k0;      // of each tile, but for STREAM_K
    int together;             // blocks that read the same weights at the same time
    bool resident;            // weights are loaded once
    __device__ __forceinline__ i64 beginning(int block) const { return all * block / (int)(gridDim.x / together); }
    __device__ __forceinline__ Part next() {
        Part part = {at, k0, first, last, last, 0};
        if constexpr (STREAM_K) {
            int block = blockIdx.x / together, tile = at / steps, pitch = all_tiles / together;
            part.tile = tile % pitch * together + blockIdx.x % together, part.k0 = tile / pitch * 64;
            part.first = at - tile * steps, part.last = min(steps, part.first + to - at);
            at += part.last - part.first;
            if (part.first == 0)
                for (i64 there = at; there < (i64)(tile + 1) * steps; there = beginning(block + 1 + part.others)) part.others++;
        } else {
            at++;
        }
        part.middle = SKIP ? min(max(part.first, own), part.last) : part.last;
        return part;
    }
};

// The producer: loads halo tiles into ring a and weights into ring b, in the order in which the consumers read them.
__device__ __forceinline__ void load_operands(Work work, Ring& a, Ring& b, const TensorMap& x, const TensorMap& x2,
                                              const TensorMap& weight, const TensorMap& last_weight, const TensorMap& addend,
                                              const TensorMap& addend2, const TensorMap& skip_weight,
                                              const TensorMap& last_skip_weight, int split, int D1, int S, int K, int pitch,
                                              int width, const float4* parts, const Exchange* exchange, u32 launch) {
    for (bool loads_weights = true; work.at < work.to; loads_weights = !work.resident) {
        Part part = work.next();
        OutputTile tile(part.tile, work.tiles, work.across, work.rows);
#pragma unroll 1
        for (int step = part.first, s = part.first % S, c = part.first / S * CHUNK; step < part.middle; step++) {
            if (s == 0 || step == part.first) {
                u32 full = a.acquire(IMAGES * (work.rows + R - 1) * pitch * ROW_BYTES);
                const TensorMap& map = c < split ? x : x2;
                int channel = c < split ? c : c - split, w = tile.w0 - S / 2, h = tile.h0 - R / 2;
                if constexpr (UPSAMPLE) {
                    for (int row = 0; row < work.rows + R - 1; row++)
                        tma_load(a.buffer() + row * pitch * ROW_BYTES, map, full, channel, 0, w >> 1, h + row >> 1, tile.n);
                } else {
                    for (int image = 0; image < IMAGES; image++)
                        tma_load(a.buffer() + image * IMAGE_ROWS * pitch * ROW_BYTES, map, full, channel, w, h, tile.n + image);
                }
                a.advance();
            }
            if (loads_weights) {
                int box = PASS == FPROP ? min(64, K - part.k0) : step < work.own - S ? 64 : 64 - 16 * SPARED;  // rows
                const TensorMap& map = box == 64 ? weight : last_weight;
                u32 full = b.acquire(R * box * ROW_BYTES);
                for (int r = 0; r < R; r++) {
                    if (PASS == FPROP) tma_load(b.buffer() + r * TAP_BYTES, map, full, c, r * S + s, part.k0);
                    else tma_load(b.buffer() + r * TAP_BYTES, map, full, part.k0, (R - 1 - r) * S + S - 1 - s, c);
                }
                b.advance();
            }
            if (++s == S) s = 0, c += CHUNK;
        }
#pragma unroll 1
        for (int step = part.middle; step < part.last; step++) {
            int c = (step - work.own) * CHUNK;
            u32 full = a.acquire(IMAGES * work.rows * width * ROW_BYTES);
            for (int image = 0; image < IMAGES; image++)
                tma_load(a.buffer() + image * IMAGE_ROWS * 8 * ROW_BYTES, c < D1 ? addend : addend2, full, c < D1 ? c : c - D1,
                         tile.w0, tile.h0, tile.n + image);
            a.advance();
            if (loads_weights) {
                int box = min(64, K - part.k0);
                full = b.acquire(box * ROW_BYTES);
                tma_load(b.buffer(), box == 64 ? skip_weight : last_skip_weight, full, c, 0, part.k0);
                b.advance();
            }
        }
        for (int other = 1; STREAM_K && other <= part.others; other++)
            load_left(b, parts, exchange, blockIdx.x + other * work.together, launch);
    }
}

// The products of a part, by a warpgroup: it issues those of a step while those of the step before are under way, and then gives
// back the stages of the step before.
struct Products {
    float (&acc)[PIXELS / 2];
    Ring &a, &b, a_read, b_read;  // the next stages, and the oldest that are still read
    int S, first, i, s;           // columns of taps; the first step, the next one, and its column
    bool resident;
    __device__ __forceinline__ Products(float (&acc)[PIXELS / 2], Ring& a, Ring& b, const Part& part, int S, bool resident)
        : acc(acc), a(a), b(b), a_read(a), b_read(b), S(S), first(part.first), i(first), s(first % S), resident(resident) {}

    // Issues the k-steps of one tap of a chunk.
    __device__ __forceinline__ void multiply(u32 tap, u32 pixels, int pitch, int k_steps, bool adds) {
        u64 at_weight = tile_descriptor(tap), at_x = tile_descriptor(pixels, 16, pitch * ROW_BYTES);
#pragma unroll
        for (int k = 0; k < k_steps; k++)
            wgmma<PASS == DGRAD, false>((T*)nullptr, acc, at_weight + k * DEPTH_STEP<PASS == DGRAD>,
                                        at_x + k * DEPTH_STEP<false>, adds || k > 0);
    }
    // x's steps up to `end`. begin() is called once the first halo tile has arrived.
    template <typename Begin> __device__ __forceinline__ void walk(int end, int k_steps, int pitch, int before, Begin begin) {
        for (; i < end; i++, s = s + 1 < S ? s + 1 : 0) {
            if (s == 0 || i == first) a.wait();
            if (i == first) begin();
            b.wait();
            wgmma_fence();
#pragma unroll
            for (int r = 0; r < R; r++)
                multiply(b.buffer() + r * TAP_BYTES, a.buffer() + (r * pitch + before + s) * ROW_BYTES, WHOLE_ROWS ? 8 : pitch,
                         k_steps, i > first || r > 0);
            wgmma_commit();
            b.advance();
            if (s == S - 1) a.advance();
            wgmma_wait<1>();  // until only this step's products are under way: the stage before was read
            if (i > first) {
                if (!resident) b_read.release();
                if (s == 0) a_read.release();
            }
        }
    }
    // SKIP's steps up to `end`. A loop of its own: with a branch in the loop above, products would wait for each other.
    __device__ __forceinline__ void walk_skip_path(int end) {
#pragma unroll 1
        for (; i < end; i++) {
            a.wait();
            b.wait();
            wgmma_fence();
            multiply(b.buffer(), a.buffer(), 8, K_STEPS, i > first);
            wgmma_commit();
            a.advance(), b.advance();
            wgmma_wait<1>();
            if (i > first) {
                if (!resident) b_read.release();
                a_read.release();
            }
        }
    }
    __device__ __forceinline__ void end() {
        wgmma_wait<0>();
        a_read.release();
        if (resident) b = b_read;  // the next iteration reads the same stages again
        else b_read.release();
    }
};

// Prefetch the weights that a block reads first. Blocks may start while the kernel before them still runs. That kernel may still
// write weights: they are only prefetched into L2, where a write still reaches them. One of the blocks that read a tap prefetches
// it.
__device__ __forceinline__ void prefetch_weights(const Work& work, const TensorMap& weight, const TensorMap& last_weight,
                                                 int b_stages, int S, int K) {
    int end = min(min(work.own, work.last), work.first + b_stages) * R;
    for (int tap = work.first * R + blockIdx.x; tap < end; tap += gridDim.x) {
        int r = tap % R, s = tap / R % S, c = tap / R / S * CHUNK;
        if (PASS == FPROP) tma_prefetch(K - work.k0 < 64 ? last_weight : weight, c, r * S + s, work.k0);
        else tma_prefetch(weight, work.k0, (R - 1 - r) * S + S - 1 - s, c);
    }
}

// Start copying a tile's rows from h0 on, of 64 channels from k on, from an array to `result` in shared memory.
__device__ __forceinline__ void load_tile(u32 result, const TensorMap& map, u32 barrier, int k, const OutputTile& tile, int h0,
                                          int images) {
    for (int c = 0; c < 64; c += CHUNK)
        for (int image = 0; image < images; image++)
            tma_load(result + c / CHUNK * CHUNK_BYTES + image * IMAGE_ROWS * 8 * ROW_BYTES, map, barrier, k + c, tile.w0, h0,
                     tile.n + image);
}

// The same from `result` to an array.
__device__ __forceinline__ void store_tile(u32 result, const TensorMap& map, int k, const OutputTile& tile, int h0, int images) {
    for (int c = 0; c < 64; c += CHUNK)
        for (int image = 0; image < images; image++)
            tma_store(map, result + c / CHUNK * CHUNK_BYTES + image * IMAGE_ROWS * 8 * ROW_BYTES, k + c, tile.w0, h0,
                      tile.n + image);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) CLUSTER_DIMS
conv2d_sm90(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap x2,
            const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap last_weight,
            const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap out2, const __grid_constant__ TensorMap addend,
            const __grid_constant__ TensorMap addend2, const __grid_constant__ TensorMap skip_weight,
            const __grid_constant__ TensorMap last_skip_weight, const float* bias, const float* skip_bias, const float* emb,
            Statistics* sums, const float* norm_weight, const float* norm_bias, const float* scale, const float* shift,
            const float* mean, const float* rstd, int N, int H, int W, int C, int K, int S, int D, int rows, int a_stages,
            int b_stages, int split, int K1, int D1, int groups, float4* parts, Exchange* exchange, int together) {
    extern __shared__ __align__(1024) u8 shared[];
    int before = UPSAMPLE ? S / 2 % 2 : 0, more = WHOLE_ROWS ? S / 2 : 0;
    int pitch = WHOLE_ROWS ? W + more : 8 + S - 1 + 2 * before, width = WHOLE_ROWS ? pitch : 8;  // pixels of a halo tile's row, and
    int halo = ((WHOLE_ROWS ? rows : PIXELS / 8) + R - 1) * pitch;                               // of an output tile's
    u32 halo_bytes = CEIL_DIV((halo + more) * ROW_BYTES, 1024) * 1024;
    u32 base = shared_address(shared), order = base, addends = base + 16, arrivals = base + 32, barriers = base + 40;
    u32 halos = base + 1024 + IMAGES * 1024, weights = halos + a_stages * halo_bytes, results = weights + b_stages * WEIGHT_BYTES;
    Ring a(halos, halo_bytes, a_stages, barriers), b(weights, WEIGHT_BYTES, b_stages, barriers + 16 * a_stages);
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; i++) barrier_init(order + 8 * i, 1);
        a.init(1), b.init(1);
        open_exchange(arrivals, PIXELS * 64 * sizeof(float));
        prefetch(x), prefetch(weight), prefetch(out);
        if (split < C) prefetch(x2);
        if (READS || SKIP) prefetch(addend);
        if (SKIP) prefetch(skip_weight);
    }
    if constexpr (WHOLE_ROWS) {  // the zeros after a halo tile's last row
        u8* after = shared + (halos - base) + halo * ROW_BYTES;
        for (int i = threadIdx.x; i < a_stages * more * 8; i += THREADS)
            reinterpret_cast<float4*>(after + i / (more * 8) * halo_bytes)[i % (more * 8)] = {};
        fence_writes();
    }
    cluster_arrive_relaxed();

    int chunks = CEIL_DIV(C, CHUNK), across = WHOLE_ROWS ? 1 : CEIL_DIV(W, 8), tiles = across * CEIL_DIV(H, rows);
    int own = chunks * S, skips = SKIP ? CEIL_DIV(D, CHUNK) : 0, steps = own + skips;  // x's steps, then SKIP's
    int rank = blockIdx.z % CLUSTER, first = steps * rank / CLUSTER, last = steps * (rank + 1) / CLUSTER;
    bool resident = !STREAM_K && b_stages == last - first;
    int all_tiles = CEIL_DIV(N, IMAGES) * tiles;
    i64 all = STREAM_K ? (i64)(all_tiles / together) * CEIL_DIV(K, 64) * steps : all_tiles;
    Work work = {all, 0, 0, all_tiles, tiles, across, rows, steps, own, first, last, (int)blockIdx.y * 64, together, resident};
    work.at = work.beginning(blockIdx.x / together), work.to = work.beginning(blockIdx.x / together + 1);
    if (!STREAM_K && threadIdx.x == CONSUMERS) prefetch_weights(work, weight, last_weight, b_stages, S, K);
    wait_for_previous();
    u32 launch = STREAM_K ? exchange->launch() : 0;
    __syncthreads();
    if (threadIdx.x >= CONSUMERS) {
        set_registers<40, false>();
        if (threadIdx.x > CONSUMERS) return;
        if (STREAM_K) exchange->arrive();
        load_operands(work, a, b, x, x2, weight, last_weight, addend, addend2, skip_weight, last_skip_weight, split, D1, S, K,
                      pitch, width, parts, exchange, launch);
        return;
    }

    set_registers<232, true>();
    int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    bool leads = threadIdx.x % 128 == 0;
    float2* norm_maps = reinterpret_cast<float2*>(shared + 1024) + IMAGES * 64 * group;  // of 64 channels of each image of the tile
    bool finishes_one = STREAM_K && all <= (i64)(gridDim.x / together) * steps;  // at most: then there is one place for results
    u32 result = results + (finishes_one ? 0 : group) * RESULT_BYTES;
    u32 own_order = order + 8 * group, own_addend = addends + 8 * group;
    Place place(result);
    float biases[2] = {};  // of this lane's two channels
#pragma unroll
    for (int i = 0; !READS_BIASES && i < 2; i++)
        if (int k = place.channel(work.k0, i); bias && k < K) biases[i] = bias[k];
    u32 addend_phase = 0;
    for (int iteration = 0; work.at < work.to; iteration++) {
        Part part = work.next();
        int k0 = part.k0, first = part.first, middle = part.middle, last = part.last;
        if (iteration % 2 != group) {
            a.skip(STREAM_K ? (middle > first ? (middle - 1) / S - first / S + 1 : 0) + last - middle : chunks + skips);
            if (!resident) b.skip(last - first);
            continue;
        }
        bool begins = !STREAM_K || first == 0;
        OutputTile tile(part.tile, tiles, across, rows);
        int h0 = tile.h0 + rank * SHARE;  // the first row that this block finishes
        u32 phase = iteration / 2 & 1;
        int images = min(IMAGES, N - tile.n);
        if (SLOPE) fill_maps(norm_maps, tile.n, images, k0, K, norm_weight, norm_bias, scale, shift, mean, rstd, groups);
        float offset[OFFSETS][2];
        load_offsets(offset, biases, place, tile.n, images, k0, K, bias, skip_bias, emb);
        // The warpgroups multiply by turns. At its turn a warpgroup knows that all stages before its own were filled: the other
        // has waited for them. Ring::skip requires this.
        barrier_wait(own_order, phase ^ (group == 0));
        float acc[PIXELS / 2];
        Products products(acc, a, b, part, S, resident);
        auto begin = [&] {
            if (!READS || !begins || !leads) return;
            tma_store_wait();  // until TMA has read the last result, whose place the addend takes
            barrier_expect(own_addend, images * (64 / CHUNK) * min(rows, SHARE) * width * ROW_BYTES);
            bool second = NORM && k0 >= K1;
            load_tile(result, second ? addend2 : addend, own_addend, k0 - (second ? K1 : 0), tile, h0, images);
        };
        if (SPARED > 0) products.walk(min(own - S, middle), K_STEPS, pitch, before, begin);
        products.walk(middle, K_STEPS - SPARED, pitch, before, begin);
        products.walk_skip_path(last);
        if (leads) barrier_arrive(order + 8 * (1 - group));
        products.end();
        if constexpr (STREAM_K) {
            if (!begins) {
                leave(acc, parts, exchange, launch);
                continue;
            }
#pragma unroll 1
            for (int other = 0; other < part.others; other++) add_left(acc, b, shared, base);
        }
        if constexpr (CLUSTER > 1) add_up(acc, reinterpret_cast<float4*>(shared + (results + RESULT_BYTES - base)), arrivals);

        if (!READS && leads) tma_store_wait();
        if (SLOPE || !READS) warpgroup_meets();
        if (READS) barrier_wait(own_addend, addend_phase), addend_phase ^= 1;
        int rows_inside = min(rows, H - tile.h0) - rank * SHARE;
        Inside inside = {images, rows_inside, rows_inside * pitch - lane % 4 * 2, tile.w0 + lane % 4 * 2, W, pitch};
        TileSums tile_sums = {sums, (i64)part.tile * IMAGES * CLUSTER + rank, k0, K, images};
        finish_rows(acc, offset, norm_maps, place, inside, tile_sums);
        fence_writes();
        warpgroup_meets();
        if (leads) {
            bool second = !NORM && k0 >= K1;
            store_tile(result, second ? out2 : out, k0 - (second ? K1 : 0), tile, h0, images);
        }
#pragma unroll
        for (int i = 0; SUMS && i < 2; i++) tile_sums.leave(place, IMAGES - 1, i);
    }
    if (leads) tma_store_wait();
}
