// The weight gradient of a convolution of stride 1 that keeps the image's size, on Hopper (TMA, wgmma).
// architectures: sm_90a
// variants: T=bf16,half R=3 COLUMNS=1 PIXELS=64,128
// variants: T=bf16,half R=1 COLUMNS=1,2,3 PIXELS=128
//
// x: T (N, H, W, C); dout: T (N, H, W, K); out, addend: float (K, R, S, C), addend null or `out` itself; their rows k lie
// `pitch` elements apart.
//   out[k][r,s,c] = sum over pixels of dout[pixel][k] · patch of x[pixel][r,s,c] + addend[k][r,s,c]
// S is odd. C and K are those of out; x and dout have as many channels, or zeros beyond, to a multiple of 8.
//
// A block computes 64 output channels by 64 · COLUMNS input channels by the R vertical taps of one horizontal tap; R or
// COLUMNS is 1. The depth is the pixels, `rows` image rows of `width` (W, or the next multiple of 8) at a time: a tile of
// dout, and for each 64 input channels a slab of rows + R - 1 rows of x, shifted by s and padded with zeros by TMA. Both
// are MN-major; the blocks of 64 columns of the product are the R taps, one image row apart in the slab, or the slabs.
// The steps of one tile are unrolled (PIXELS is a constant): in a loop the compiler would wait for each product.
// Maps: x {C, W, H, N}, box {64, width, rows + R - 1, 1}; dout {K, W, H, N}, box {64, width, rows, 1}; rows · width =
// PIXELS, a multiple of 16.
// Launch: a warpgroup that consumes and one that produces; grid (ceil(K / 64) · ceil(C / 64 / COLUMNS), S, splits).
// Split z takes `per_split` steps of the depth and writes to out + z · (size of out), to be summed by gemm.cu.
// Shared memory: `stages` steps, two at least, and their barriers.
#include "wgmma.cuh"

constexpr int CONSUMERS = 128, THREADS = CONSUMERS + 128;
constexpr int LINE = 128, N_TILE = 64 * R * COLUMNS;

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d_wgrad_sm90(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dout, const float* addend,
                  float* out, i64 pitch, int N, int H, int C, int K, int S, int rows, int width, int per_split, int stages) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared);
    constexpr u32 tile = PIXELS * LINE;
    u32 slab = tile + (R - 1) * width * LINE, bytes = tile + COLUMNS * slab;
    Ring ring(base, bytes, stages, base + stages * bytes);
    if (threadIdx.x == 0) {
        ring.init(1);
        prefetch(x), prefetch(dout);
    }
    wait_for_previous();
    __syncthreads();

    int blocks_k = CEIL_DIV(K, 64), k0 = blockIdx.x % blocks_k * 64, c0 = blockIdx.x / blocks_k * 64 * COLUMNS;
    int s = blockIdx.y, per_image = CEIL_DIV(H, rows);
    int first = blockIdx.z * per_split, last = min(first + per_split, N * per_image);
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x > CONSUMERS) return;
        for (int i = first; i < last; i++, ring.advance()) {
            int n = i / per_image, h0 = i % per_image * rows;
            u32 full = ring.acquire(bytes);
            tma_load(ring.buffer(), dout, full, k0, 0, h0, n);
            for (int j = 0; j < COLUMNS; j++)
                tma_load(ring.buffer() + tile + j * slab, x, full, c0 + j * 64, s - S / 2, h0 - R / 2, n);
        }
        return;
    }

    Ring read = ring;
    float acc[N_TILE / 2];
    for (int i = first; i < last; i++) {
        ring.wait();
        u64 a = tile_descriptor(ring.buffer());
        u64 b = tile_descriptor(ring.buffer() + tile, COLUMNS > 1 ? slab : width * LINE);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < PIXELS / 16; k++)
            wgmma<true, true>((T*)nullptr, acc, a + k * DEPTH_STEP<true>, b + k * DEPTH_STEP<true>, i > first || k > 0);
        wgmma_commit();
        wgmma_wait<1>();
        if (i > first) read.release();
        ring.advance();
    }
    wgmma_wait<0>();

    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k = k0 + warp * 16 + lane / 4;
    out += blockIdx.z * K * pitch;
    bool pairs = (C | pitch) % 2 == 0 && (u64)out % 8 == 0;
#pragma unroll
    for (int j = 0; j < N_TILE / 8; j++) {
        int r = COLUMNS > 1 ? 0 : j / 8, c = c0 + (COLUMNS > 1 ? j : j % 8) * 8 + lane % 4 * 2;
        if (c >= C) continue;
#pragma unroll
        for (int half_tile = 0; half_tile < 2; half_tile++) {
            if (k + half_tile * 8 >= K) continue;
            i64 at = (k + half_tile * 8) * pitch + (r * S + s) * C + c;
            float2 sum = make_float2(acc[4 * j + 2 * half_tile], acc[4 * j + 2 * half_tile + 1]);
            if (pairs) {
                float2 more = addend ? *reinterpret_cast<const float2*>(addend + at) : make_float2(0.0f, 0.0f);
                *reinterpret_cast<float2*>(out + at) = make_float2(sum.x + more.x, sum.y + more.y);
            } else {
                out[at] = sum.x + (addend ? addend[at] : 0.0f);
                if (c + 1 < C) out[at + 1] = sum.y + (addend ? addend[at + 1] : 0.0f);
            }
        }
    }
}
