// The weight gradient of a convolution on Hopper, of float images in tf32, of stride 1 and with the image's size kept.
//
//   out[k][r,s,c] = sum over pixels of dout[pixel][k] · patch of x[pixel][r,s,c]
//
// or += where `add`.
//
// Arguments
//   x         float (N, H, W, C).
//   dout      float (N, H, W, K).
//   out       float (K, R, R, C), whose rows k lie `pitch` elements apart.
//   C, K      those of out. x and dout have as many channels, or zeros after these up to a multiple of 4.
//
// How it works
//   Products   These are mma.sync's, whose fragments may lie anywhere in shared memory. The depth is the pixels, while channels
//              are contiguous: wgmma takes tf32 operands only with the depth contiguous.
//   Tiles      A block computes 64 output channels by 32 · COLUMNS input channels, of all taps. R or COLUMNS is 1. Each of the
//              four warps of a group takes 8 of every 32 input channels.
//   Steps      A step is `rows` image rows of `width` pixels, a multiple of 8: all of a row, or a part of one where W is more. It
//              has a tile of dout, and for each 32 input channels a halo tile, rows + R - 1 rows of x. TMA pads both with zeros
//              outside of the image. From one row of a halo tile to the next are `pitch_x` pixels, a multiple of 8 and at least
//              width + R - 1. One halo tile serves all taps, each one pixel or one row further.
//   Depth      A k-step is 8 pixels, in the order 0, 2, 4, 6, 1, 3, 5, 7. So lanes that load together meet no bank of the
//              swizzled rows twice, wherever a tap starts.
//   Groups     Two groups of 128 threads take the steps by turns and add up at the end. Thread 0 also starts the copies: a
//              ninth warp would leave each thread 168 registers, too few.
//   Split K    Part y of the depth writes to out + y · (size of out). If there are several, another kernel adds them.
//
// Launch
//   Grid       (ceil(K / 64) · ceil(C / 32 / COLUMNS), splits). 256 threads.
//   Maps       x {C, W, H, N}, box {32, pitch_x, rows + R - 1, 1}; dout {K, W, H, N}, box {32, width, rows, 1}. They round to
//              tf32. rows · width = PIXELS, a multiple of 8.
//   Shared     `stages` steps, at least three, or the sums of a group, if these are more; then the steps' barriers.
#include "wgmma.cuh"

constexpr int GROUP = 128, THREADS = 2 * GROUP, ROW_BYTES = 128;
constexpr int TILES = R * R * COLUMNS;  // mma tiles of 8 columns of a warp's product
constexpr u32 TILE = PIXELS * ROW_BYTES;  // bytes of dout's tile, of 32 channels

// A lane's place: g and t are mma.sync's row and column of four.
struct Lane {
    int warp, g, t;
    // Where pixels 2 t and 2 t + 1 lie. at_a: channels 2 g and 2 g + 1 of dout. at_b: channel 8 warp + g of x, s pixels to the
    // right.
    u32 at_a[2], at_b[R][2];
    __device__ __forceinline__ Lane() : warp(threadIdx.x / 32 % 4), g(threadIdx.x % 32 / 4), t(threadIdx.x % 4) {
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            int row = 2 * t + odd;
            at_a[odd] = row * ROW_BYTES + ((g / 2 ^ row) << 4) + g % 2 * 8;
#pragma unroll
            for (int s = 0; s < R; s++)
                at_b[s][odd] = (row + s) * ROW_BYTES + ((2 * warp + g / 4 ^ (row + s) % 8) << 4) + g % 4 * 4;
        }
    }
};

// Adds the products of a step, whose tiles of dout lie at `a` and whose halo tiles lie `halo` bytes apart.
__device__ __forceinline__ void multiply_step(float (&acc)[4][TILES][4], const Lane& lane, u32 a, u32 halo, int width, int pitch_x) {
    u32 b = a + 2 * TILE;
    int column = 0;
#pragma unroll
    for (int p = 0; p < PIXELS; p += 8) {
        u32 of_dout[4][4];  // rows g and g + 8 of tile m are neighbouring channels, which one load reads
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                u32 row = a + m / 2 * TILE + p * ROW_BYTES;
                load_shared(of_dout[m][2 * odd], of_dout[m][2 * odd + 1], row + (lane.at_a[odd] ^ m % 2 * 64));
            }
#pragma unroll
        for (int j = 0; j < TILES; j++) {
            int r = COLUMNS > 1 ? 0 : j / R, s = COLUMNS > 1 ? 0 : j % R;
            u32 row = b + (COLUMNS > 1 ? j * halo : r * pitch_x * ROW_BYTES);
            u32 b0 = load_shared(row + lane.at_b[s][0]), b1 = load_shared(row + lane.at_b[s][1]);
#pragma unroll
            for (int m = 0; m < 4; m++) mma<float>(acc[m][j], of_dout[m], b0, b1);
        }
        b += 8 * ROW_BYTES, column += 8;
        if (column == width) b += (pitch_x - width) * ROW_BYTES, column = 0;
    }
}

// Writes a group's sums to `out`, the block's part of the depth.
__device__ __forceinline__ void write_sums(const float (&acc)[4][TILES][4], const Lane& lane, float* out, i64 pitch, int add, int k0,
                                           int c0, int C, int K) {
    bool pairs = (C | pitch) % 2 == 0 && (u64)out % 8 == 0;
#pragma unroll
    for (int j = 0; j < TILES; j++) {
        int tap = COLUMNS > 1 ? 0 : j, c = c0 + (COLUMNS > 1 ? j * 32 : 0) + lane.warp * 8 + 2 * lane.t;
        if (c >= C) continue;
#pragma unroll
        for (int m = 0; m < 8; m++) {  // each of the lane's channels of dout
            int k = k0 + m / 2 * 16 + 2 * lane.g + m % 2;
            if (k >= K) continue;
            i64 at = k * pitch + tap * C + c;
            const float* sum = acc[m / 2][j] + m % 2 * 2;
            if (pairs) {
                float2 more = add ? *reinterpret_cast<const float2*>(out + at) : make_float2(0.0f, 0.0f);
                *reinterpret_cast<float2*>(out + at) = make_float2(sum[0] + more.x, sum[1] + more.y);
            } else {
                out[at] = sum[0] + (add ? out[at] : 0.0f);
                if (c + 1 < C) out[at + 1] = sum[1] + (add ? out[at + 1] : 0.0f);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_wgrad_tf32_sm90(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dout, float* out,
                       i64 pitch, int add, int N, int H, int W, int C, int K, int rows, int width, int pitch_x, int stages) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared);
    u32 halo = (rows + R - 1) * pitch_x * ROW_BYTES, bytes = 2 * TILE + COLUMNS * halo;
    Ring ring(base, bytes, stages, base + max(stages * bytes, (u32)(GROUP * 16 * TILES * sizeof(float))));
    if (threadIdx.x == 0) {
        ring.init(GROUP / 32);
        prefetch(x), prefetch(dout);
    }
    wait_for_previous();
    __syncthreads();

    int blocks_k = CEIL_DIV(K, 64), k0 = blockIdx.x % blocks_k * 64, c0 = blockIdx.x / blocks_k * 32 * COLUMNS;
    int per_row = CEIL_DIV(W, width), per_image = CEIL_DIV(H, rows) * per_row;
    i64 steps = (i64)N * per_image;
    int first = steps * blockIdx.y / gridDim.y, last = steps * (blockIdx.y + 1) / gridDim.y;
    Ring write = ring;
    auto copy_step = [&](int i) {
        int n = i / per_image, h0 = i % per_image / per_row * rows, w0 = i % per_row * width;
        u32 full = write.acquire(bytes), target = write.buffer();
        for (int j = 0; j < 2; j++) tma_load(target + j * TILE, dout, full, k0 + j * 32, w0, h0, n);
        for (int j = 0; j < COLUMNS; j++)
            tma_load(target + 2 * TILE + j * halo, x, full, c0 + j * 32, w0 - R / 2, h0 - R / 2, n);
        write.advance();
    };
    if (threadIdx.x == 0)
        for (int i = first; i < min(first + stages - 3, last); i++) copy_step(i);

    int group = threadIdx.x / GROUP;
    Lane lane;
    float acc[4][TILES][4] = {};
    if (group == 1) ring.advance();
    for (int i = first + group; i < last; i += 2) {
        if (threadIdx.x == 0)  // into the stages of steps i - 3 and i - 2
            for (int next = i + stages - 3; next < min(i + stages - 1, last); next++) copy_step(next);
        ring.wait();
        multiply_step(acc, lane, ring.buffer(), halo, width, pitch_x);
        __syncwarp();
        Ring read = ring;
        ring.advance();
        if (i + 1 < last) ring.wait();  // for the other group's step: a parity cannot tell fills two apart
        read.release<32>();
        ring.advance();
    }

    float* sums = reinterpret_cast<float*>(shared) + threadIdx.x % GROUP;  // of one group; a thread's lie GROUP apart
    float(&own)[16 * TILES] = reinterpret_cast<float(&)[16 * TILES]>(acc);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 16 * TILES; i++)
        if (group == 1) sums[i * GROUP] = own[i];
    __syncthreads();
    if (group == 1) return;
#pragma unroll
    for (int i = 0; i < 16 * TILES; i++) own[i] += sums[i * GROUP];

    write_sums(acc, lane, out + blockIdx.y * K * pitch, pitch, add, k0, c0, C, K);
}
