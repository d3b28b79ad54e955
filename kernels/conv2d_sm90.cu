// Convolution of stride 1 that keeps the image's size, on Hopper: TMA brings the operands, wgmma multiplies them.
// architectures: sm_90a
// variants: PASS=FPROP T=bf16 BM=256 BN=64 GROUPS=2 BLOCKS=1 R=3
// variants: PASS=FPROP,DGRAD T=bf16 BM=256 BN=128 GROUPS=2 BLOCKS=1 R=3
// variants: PASS=FPROP,DGRAD T=bf16,half BM=128 BN=96 GROUPS=2 BLOCKS=1 R=3
// variants: PASS=FPROP,DGRAD T=bf16 BM=64 BN=64 GROUPS=1 BLOCKS=2 R=1,3
// variants: PASS=FPROP,DGRAD T=bf16 BM=128 BN=64 GROUPS=1,2 BLOCKS=2 R=1,3
//
// x: T (N, H, W, C); out, addend: T (N, H, W, K), addend null or `out` itself; bias: float (K) or null; emb: float (N, K)
// or null; partials: float2 (N, tiles, K) or null, receives each tile's sums of the rounded out and of its squares.
//   FPROP  out[pixel][k] = patch of x[pixel][r,s,c] · weight[k][r,s,c] + bias[k] + emb[n][k] + addend[pixel][k]
//   DGRAD  the same with weight[c][R-1-r][S-1-s][k]: x is dout, out is dx, K the channels of dx
// R (a constant) and S are odd; C and K are multiples of 8; out has less than 2^32 elements.
//
// A block computes BM pixels of one image, `rows` rows of `width` pixels (W, or the next multiple of 8), by BN channels.
// The depth is walked in chunks of 64 channels. For a chunk and a horizontal tap s, one slab of rows + R - 1 image rows,
// shifted by s and padded with zeros by TMA, serves all vertical taps: tap r starts r · width lines further down. Slabs
// and weight tiles (64 channels of one tap) have a ring each.
// Maps: x {C, W, H, N}, box {64, width, rows + R - 1, 1}; FPROP weight {C, R·S, K}, box {64, 1, BN}; DGRAD weight
// {K, R·S, C}, box {64, 1, 64}.
// BLOCKS share a multiprocessor, so that one multiplies while another reads its first or writes its results.
// Launch: GROUPS consumer warpgroups and one that produces; grid (N · tiles, ceil(K / BN)), tiles = ceil(H / rows).
#include "wgmma.cuh"

enum Pass { FPROP, DGRAD };

constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128;
constexpr int MI = BM / GROUPS / 64;                   // m64 blocks of a warpgroup
constexpr int LINE = 128, CHUNK = 64;                  // bytes and channels of a line of shared memory
constexpr int B_BYTES = (PASS == DGRAD ? CEIL_DIV(BN, 64) * 64 : BN) * LINE;

// Lanes a and b exchange: the one with `upper` set gives its low word and gets it replaced, the other its high word.
__device__ __forceinline__ void exchange(u32& low, u32& high, int distance) {
    bool upper = threadIdx.x & distance;
    u32 received = __shfl_xor_sync(~0u, upper ? low : high, distance);
    low = upper ? received : low, high = upper ? high : received;
}

// The four lanes of a quad hold four words each: word j of lane t goes to word t of lane j.
__device__ __forceinline__ void transpose_quad(uint4& words) {
    exchange(words.x, words.y, 1), exchange(words.z, words.w, 1);
    exchange(words.x, words.z, 2), exchange(words.y, words.w, 2);
}

// Two neighbouring elements plus products and offsets, rounded; totals: sum and square of the first, of the second.
__device__ __forceinline__ u32 add_and_round(u32 pair, float first, float second, float2 offset, bool inside, float* totals) {
    T a = from_float<T>(first + offset.x + to_float(T{(u16)pair}));
    T b = from_float<T>(second + offset.y + to_float(T{(u16)(pair >> 16)}));
    float x = inside ? to_float(a) : 0.0f, y = inside ? to_float(b) : 0.0f;
    totals[0] += x, totals[1] += x * x, totals[2] += y, totals[3] += y * y;
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
conv2d_sm90(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight, const float* bias,
            const float* emb, const T* addend, T* out, float2* partials, int H, int W, int C, int K, int S,
            int rows, int width, int a_stages, int b_stages) {
    extern __shared__ __align__(1024) u8 shared[];
    u32 base = shared_address(shared);
    u32 slab_bytes = (rows + R - 1) * width * LINE, weights = base + a_stages * slab_bytes;
    u32 barriers = weights + b_stages * B_BYTES;
    Ring a(base, slab_bytes, a_stages, barriers), b(weights, B_BYTES, b_stages, barriers + 16 * a_stages);
    if (threadIdx.x == 0) a.init(GROUPS), b.init(GROUPS);
    __syncthreads();

    int tiles = CEIL_DIV(H, rows), n = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    int h0 = tile * rows, k0 = blockIdx.y * BN, chunks = CEIL_DIV(C, CHUNK);
    if (threadIdx.x >= CONSUMERS) {
        if (threadIdx.x > CONSUMERS) return;
        for (int i = 0; i < chunks * S; i++, a.advance()) {
            int c = i / S * CHUNK, s = i % S;
            tma_load(a.buffer(), x, a.acquire(), c, s - S / 2, h0 - R / 2, n);
            for (int r = 0; r < R; r++, b.advance()) {
                u32 full = b.acquire();
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
    float acc[MI][BN / 2] = {};
    Ring a_read = a, b_read = b;
    for (int i = 0; i < chunks * S; i++, a.advance()) {
        a.wait();
#pragma unroll
        for (int r = 0; r < R; r++, b.advance()) {
            b.wait();
            wgmma_fence();
            u64 at_a = tile_descriptor(a.buffer() + (r * width + group * MI * 64) * LINE);
            u64 at_b = tile_descriptor(b.buffer(), 64 * LINE);
#pragma unroll
            for (int m = 0; m < MI; m++)
#pragma unroll
                for (int k = 0; k < CHUNK / 16; k++)
                    wgmma<false, PASS == DGRAD>((T*)nullptr, acc[m], at_a + m * (64 * LINE >> 4) + k * DEPTH_STEP<false>,
                                                at_b + k * DEPTH_STEP<PASS == DGRAD>);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (i == 0) continue;
        a_read.release();
#pragma unroll
        for (int r = 0; r < R; r++) b_read.release();
    }
    wgmma_wait<0>();

    auto consumers_meet = [] { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); };
    float2* sums = reinterpret_cast<float2*>(shared);  // [warp][BN]
    if (partials) consumers_meet();
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad_lane = lane % 4;
#pragma unroll
    for (int q = 0; q < BN / 32; q++) {  // 32 columns: this lane has 8 of each row, and stores 8 that follow each other
        int k = k0 + q * 32 + quad_lane * 8;
        float total[16] = {};
        auto offset = [&](int j) {
            int at = k0 + q * 32 + j * 8 + quad_lane * 2;
            float2 sum = bias && at < K ? *reinterpret_cast<const float2*>(bias + at) : make_float2(0.0f, 0.0f);
            if (emb && at < K) {
                float2 more = *reinterpret_cast<const float2*>(emb + n * K + at);
                sum.x += more.x, sum.y += more.y;
            }
            return sum;
        };
#pragma unroll
        for (int m = 0; m < MI * 2; m++) {
            int p = group * MI * 64 + m / 2 * 64 + warp % 4 * 16 + m % 2 * 8 + lane / 4;
            int row = p / width, w = p % width;
            bool inside = row < rows && h0 + row < H && w < W;
            u32 at = ((n * H + h0 + row) * W + w) * K + k;
            uint4 pairs = make_uint4(0, 0, 0, 0);
            if (addend) {
                if (inside && k < K) pairs = *reinterpret_cast<const uint4*>(addend + at);
                transpose_quad(pairs);
            }
            const float* c = acc[m / 2] + 16 * q + m % 2 * 2;
            pairs.x = add_and_round(pairs.x, c[0], c[1], offset(0), inside, total);
            pairs.y = add_and_round(pairs.y, c[4], c[5], offset(1), inside, total + 4);
            pairs.z = add_and_round(pairs.z, c[8], c[9], offset(2), inside, total + 8);
            pairs.w = add_and_round(pairs.w, c[12], c[13], offset(3), inside, total + 12);
            transpose_quad(pairs);
            if (inside && k < K) *reinterpret_cast<uint4*>(out + at) = pairs;
        }
        if (partials) {
            add_rows(total);
            sums[warp * BN + q * 32 + lane / 8 * 8 + quad_lane * 2 + lane / 4 % 2] = make_float2(total[0], total[1]);
        }
    }
    if (!partials) return;
    consumers_meet();
    for (int j = threadIdx.x; j < BN && k0 + j < K; j += CONSUMERS) {
        float2 total = sums[j];
        for (int i = 1; i < CONSUMERS / 32; i++) total.x += sums[i * BN + j].x, total.y += sums[i * BN + j].y;
        partials[((i64)n * tiles + tile) * K + k0 + j] = total;
    }
}
