// Convolution of stride 1 that keeps the image's size, on Hopper: TMA brings the operands, wgmma multiplies them.
// architectures: sm_90a
// variants: PASS=FPROP,DGRAD T=bf16 BM=256 BN=128,64 GROUPS=2 BLOCKS=1 R=3 WIDE=0,1 STATISTICS=0,1
// variants: PASS=FPROP,DGRAD T=bf16 BM=256 BN=128,64 GROUPS=2 BLOCKS=1 R=1 WIDE=0 STATISTICS=0,1
// variants: PASS=FPROP,DGRAD T=bf16,half BM=128 BN=128,96 GROUPS=2 BLOCKS=1 R=3 WIDE=0,1 STATISTICS=0,1
// variants: PASS=FPROP,DGRAD T=bf16 BM=128 BN=64 GROUPS=1 BLOCKS=2 R=3,1 WIDE=0,1 STATISTICS=0,1
// variants: PASS=FPROP,DGRAD T=bf16 BM=64 BN=64,96 GROUPS=1 BLOCKS=2 R=3,1 WIDE=0,1 STATISTICS=0,1
// variants: PASS=FPROP,DGRAD T=bf16 BM=64 BN=128 GROUPS=1 BLOCKS=1 R=3 WIDE=0 STATISTICS=0,1
//
// x: T (N, H, W, C); out, addend: T (N, H, W, K), addend null or `out` itself; bias: float (K) or null; emb: float (N, K)
// or null; partials: float2 (N, tiles, K), receives each tile's sums of the rounded out and of its squares if STATISTICS.
//   FPROP  out[pixel][k] = patch of x[pixel][r,s,c] · weight[k][r,s,c] + bias[k] + emb[n][k] + addend[pixel][k]
//   DGRAD  the same with weight[c][R-1-r][S-1-s][k]: x is dout, out is dx, K the channels of dx
// R (a constant) and S are odd; C and K are multiples of 8; out has less than 2^32 elements, and no size is 0. bias, emb
// and addend start where two of their elements can be loaded at once.
//
// A block computes BM pixels of one image, `rows` rows of `width` pixels (W, or the next multiple of 8), by BN channels.
// The depth is walked in chunks of 64 channels. For a chunk and a horizontal tap s, one slab of rows + R - 1 image rows,
// shifted by s and padded with zeros by TMA, serves all vertical taps: tap r starts r · width lines further down. Slabs
// and weight tiles (64 channels of one tap) have a ring each. WIDE=1 (width is a multiple of 64): a slab is S - 1 pixels
// wider and serves all taps, the horizontal ones one line further each.
// Maps: x {C, W, H, N}, box {64, width (+ S - 1), rows + R - 1, 1}; FPROP weight {C, R·S, K}, box {64, 1, BN}; DGRAD weight
// {K, R·S, C}, box {64, 1, 64}; out {K, W, H, N}, box {32, width, rows, 1}.
// BLOCKS share a multiprocessor, so that one multiplies while another reads its first or writes its results.
// Launch: GROUPS consumer warpgroups and one that produces; grid (N · tiles, ceil(K / BN)), tiles = ceil(H / rows). Shared
// memory: the two rings and their barriers, and no less than BM · BN results and 4 GROUPS · BN float2 sums; a ring has
// room for two slabs, the other for the weights of 2 R taps, or for all there are.
#include "wgmma.cuh"

enum Pass { FPROP, DGRAD };

constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int MI = BM / GROUPS / 64;                   // m64 blocks of a warpgroup
constexpr int LINE = 128, CHUNK = 64;                  // bytes and channels of a line of shared memory
constexpr int B_BYTES = (PASS == DGRAD ? CEIL_DIV(BN, 64) * 64 : BN) * LINE;

// Two neighbouring products plus offsets and elements, rounded; totals: sum and square of the first, of the second.
__device__ __forceinline__ u32 add_and_round(const float* products, float2 offset, u32 more, bool counts, float* totals) {
    T a = from_float<T>(products[0] + offset.x + to_float(T{(u16)more}));
    T b = from_float<T>(products[1] + offset.y + to_float(T{(u16)(more >> 16)}));
    if (STATISTICS) {
        float x = counts ? to_float(a) : 0.0f, y = counts ? to_float(b) : 0.0f;
        totals[0] += x, totals[1] += x * x, totals[2] += y, totals[3] += y * y;
    }
    return a.bits | (u32)b.bits << 16;
}

// Adds the values of the 8 lanes lane % 4 + 4 g; lane g is left with values 2 g and 2 g + 1 in the first two.
template <int COUNT = 8> __device__ __forceinline__ void add_rows(float (&values)[16]) {
    bool upper = threadIdx.x & 2 * COUNT;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        float sent = upper ? values[i] : values[i + COUNT], kept = upper ? values[i + COUNT] : values[i];
        values[i] = kept + __shfl_xor_sync(~0u, sent, 2 * COUNT);
    }
    if constexpr (COUNT > 2) add_rows<COUNT / 2>(values);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
conv2d_sm90(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
            const __grid_constant__ TensorMap out, const float* bias, const float* emb, const T* addend, float2* partials, int H, int W, int C, int K, int S,
            int rows, int width, int a_stages, int b_stages) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared);
    int pitch = width + (WIDE ? S - 1 : 0);  // lines from one row of the slab to the next
    u32 slab_bytes = CEIL_DIV((rows + R - 1) * pitch * LINE, 1024) * 1024, weights = base + a_stages * slab_bytes;
    u32 barriers = weights + b_stages * B_BYTES;
    Ring a(base, slab_bytes, a_stages, barriers), b(weights, B_BYTES, b_stages, barriers + 16 * a_stages);
    if (threadIdx.x == 0) {
        a.init(GROUPS), b.init(GROUPS);
        prefetch(x), prefetch(weight), prefetch(out);
    }
    wait_for_previous();
    __syncthreads();

    int tiles = CEIL_DIV(H, rows), n = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    int h0 = tile * rows, k0 = blockIdx.y * BN, chunks = CEIL_DIV(C, CHUNK);
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x > CONSUMERS) return;
        for (int i = 0; i < chunks * S; i++) {
            int c = i / S * CHUNK, s = i % S;
            if (!WIDE || s == 0) {
                tma_load(a.buffer(), x, a.acquire((rows + R - 1) * pitch * LINE), c, WIDE ? -(S / 2) : s - S / 2, h0 - R / 2, n);
                a.advance();
            }
            for (int r = 0; r < R; r++, b.advance()) {
                u32 full = b.acquire(B_BYTES);
                if constexpr (PASS == FPROP) {
                    tma_load(b.buffer(), weight, full, c, r * S + s, k0);
                } else {
                    for (int j = 0; j < CEIL_DIV(BN, 64); j++)
                        tma_load(b.buffer() + j * 64 * LINE, weight, full, k0 + j * 64, (R - 1 - r) * S + S - 1 - s, c);
                }
            }
        }
        return;
    }

    int group = threadIdx.x / 128;
    int lines[MI];  // of the slab, where each m64 block starts
#pragma unroll
    for (int m = 0; m < MI; m++) {
        int p = (group * MI + m) * 64;
        lines[m] = WIDE ? p / width * pitch + p % width : p;
    }
    float acc[MI][BN / 2];
    Ring a_read = a, b_read = b;
    for (int i = 0, s = 0; i < chunks * S; i++, s = s + 1 < S ? s + 1 : 0) {
        if (!WIDE || s == 0) a.wait();
#pragma unroll
        for (int r = 0; r < R; r++, b.advance()) {
            b.wait();
            wgmma_fence();
            u64 at_b = tile_descriptor(b.buffer(), 64 * LINE);
#pragma unroll
            for (int m = 0; m < MI; m++) {
                u64 at_a = tile_descriptor(a.buffer() + (lines[m] + r * pitch + (WIDE ? s : 0)) * LINE);
#pragma unroll
                for (int k = 0; k < CHUNK / 16; k++)
                    wgmma<false, PASS == DGRAD>((T*)nullptr, acc[m], at_a + k * DEPTH_STEP<false>,
                                                at_b + k * DEPTH_STEP<PASS == DGRAD>, i > 0 || r > 0 || k > 0);
            }
            wgmma_commit();
        }
        wgmma_wait<R>();  // all but these R taps' products are done
        if (i > 0) {
            if (!WIDE || s == 0) a_read.release();
#pragma unroll
            for (int r = 0; r < R; r++) b_read.release();
        }
        if (!WIDE || s == S - 1) a.advance();
    }
    wgmma_wait<0>();

    // Through shared memory, free now, to whole lines of the result: blocks of 32 channels, chunks swizzled as TMA reads.
    auto consumers_meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); };
    consumers_meet();
    float2* sums = reinterpret_cast<float2*>(shared + BM * BN * sizeof(T));  // [warp][BN]
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad_lane = lane % 4;
    int first_line = group * MI * 64 + warp % 4 * 16;
    u32 at[MI * 2], inside = 0;  // where each row of this lane lies in the result, and whether it does
#pragma unroll
    for (int m = 0; m < MI * 2; m++) {
        int p = first_line + m / 2 * 64 + m % 2 * 8 + lane / 4, row = p / width, w = p % width;
        at[m] = ((n * H + h0 + row) * W + w) * K + k0 + quad_lane * 2;
        inside |= (row < rows && h0 + row < H && w < W) << m;
    }
#pragma unroll
    for (int q = 0; q < BN / 32; q++) {
        float2 offset[4] = {};
        float total[16] = {};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int k = k0 + q * 32 + j * 8 + quad_lane * 2;
            if (bias && k < K) offset[j] = *reinterpret_cast<const float2*>(bias + k);
            if (emb && k < K) {
                float2 more = *reinterpret_cast<const float2*>(emb + n * K + k);
                offset[j].x += more.x, offset[j].y += more.y;
            }
        }
#pragma unroll
        for (int m = 0; m < MI; m++) {
            u32 words[8];
#pragma unroll
            for (int i = 0; i < 8; i++) {  // column block i / 2, upper or lower row
                int j = i / 2, row = 2 * m + i % 2;
                bool counts = inside >> row & 1;
                u32 more = 0;
                if (addend && counts && k0 + q * 32 + j * 8 < K) more = *reinterpret_cast<const u32*>(addend + at[row] + q * 32 + j * 8);
                words[i] = add_and_round(acc[m] + (4 * q + j) * 4 + i % 2 * 2, offset[j], more, counts, total + 4 * j);
            }
            int line = first_line + m * 64 + lane % 16, swizzle = line / 2 % 4, chunk = lane / 16;
            u32 target = base + q * (BM * 64) + line * 64;
            stmatrix(target + ((chunk ^ swizzle) << 4), words[0], words[1], words[2], words[3]);
            stmatrix(target + ((chunk + 2 ^ swizzle) << 4), words[4], words[5], words[6], words[7]);
        }
        if (STATISTICS) {
            add_rows(total);
            sums[warp * BN + q * 32 + lane / 8 * 8 + quad_lane * 2 + lane / 4 % 2] = make_float2(total[0], total[1]);
        }
    }
    fence_writes();
    consumers_meet();
    if (threadIdx.x == 0) {
        for (int q = 0; q < BN / 32; q++) tma_store(out, base + q * (BM * 64), k0 + q * 32, 0, h0, n);
        tma_store_wait();
    } else if (STATISTICS) {
        for (int j = threadIdx.x - 1; j < BN && k0 + j < K; j += CONSUMERS - 1) {
            float2 total = sums[j];
            for (int i = 1; i < CONSUMERS / 32; i++) total.x += sums[i * BN + j].x, total.y += sums[i * BN + j].y;
            partials[((i64)n * tiles + tile) * K + k0 + j] = total;
        }
    }
}
