// Convolutions R x R (R = 3 or 1) that keep the image's size, between an image of few channels and one of many.
//
//   few     FEW_T (N, H, W, FEW): T or float. A float `few` is rounded to T where it is read, and written as summed.
//   many    T (N, H, W, C), aligned to 16 bytes; C is a multiple of BN.
//   weight  T. The weight of (tap, j, c) lies at first + tap * .. + j * .. + c * .. (see Weight).
//   bias    float, or null.
//   emb     float (N, C), or null.
// j is a channel of few, c one of many. The patch of pixel p has DEPTH numbers (r, s, j): the R x R pixels of few around p.
//
// Three kernels compute fprop, dgrad and wgrad in both directions, from few channels to many and from many to few:
//   expand    many[p][c] = patch[p] · weight[c] + bias[c] + emb[n][c]; under `relu` 0 where that is less. few is x of
//             fprop, or dout of dgrad.
//             sums: float (N, tiles, C, SUMS). Over each tile's pixels: for each channel the sum of what was stored, and with
//             SUMS=2 the sum of its squares (RawStatistics).
//             NORM: dgrad of a convolution of silu(z), z group norm's map (affine.cuh) of x (N, H, W, C). many is then the
//             gradient of z: the product times silu's slope. sums are of it and of it * x, before rounding. There is no
//             bias, emb or relu.
//   contract  few[p][j] = sum over taps (r, s) of many[p + (r, s) - R / 2] · weight[tap][j] + bias[j]. few is out, or dx.
//   wgrad     partials[blockIdx.x] = sum over the tile's pixels of patch[p][tap, j] · many[p][c]. Each has the layout of
//             the weight, in float.
// All outputs are overwritten. Sums are float and in a fixed order.
//
// Fragments of mma.sync are loaded without ldmatrix. Any channel or pixel may stand in any column or depth of a product: the
// kernels choose an order in which a thread's elements are neighbours in memory.
// Launch: 256 threads. gridDim.x = N * ceil(H / rows): a tile is `rows` rows of one image. gridDim.y = C / BN with BN = 32 or
// 64 in expand and wgrad, 1 with BN = C in contract, and with BN = 32 or 64 in contract_many, for C of more. Dynamic shared
// memory as few_channels.py computes it: expand `copies_bytes`, contract `products_bytes`, contract_many `weights_bytes` more,
// wgrad the larger of `patches_bytes` and `sums_bytes`; wgrad's pitch is `patches_pitch`.
#include "affine.cuh"
#include "mma.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int TAPS = R * R, HALO = R / 2;  // pixels around a tile
constexpr int DEPTH = TAPS * FEW, STEPS = CEIL_DIV(DEPTH, 16);
constexpr int OWN = BN / 4;  // channels of a thread in contract: a quarter of those of a pixel

// In expand a thread reads two numbers of a patch's row as one word. In an odd row the last word also holds the number after
// the row, which is masked. Where FEW is odd, half of the words would not be aligned. They are read from a second copy of few's
// rows, shifted by one number.
constexpr int ROW_PAIRS = CEIL_DIV(R * FEW, 2), EXPAND_STEPS = CEIL_DIV(R * ROW_PAIRS, 8), COPIES = 1 + FEW % 2;
constexpr int EXPAND_PITCH = EXPAND_STEPS * 16 + 10;  // of weights in shared memory: keeps bank conflicts few
// In expand and wgrad a warp works on 32 channels of 16 pixels at a time.
constexpr int CHANNEL_WARPS = BN / 32, PIXEL_WARPS = WARPS / CHANNEL_WARPS;

#include "conv2d_patches.cuh"

// The norm's maps of the block's channels, from `channel` on. What a warp reads at a time is contiguous.
__device__ __forceinline__ void fill_maps(float2* maps, int channel, int n, int C, int groups, const float* norm_weight,
                                          const float* norm_bias, const float* scale, const float* shift, const float* mean,
                                          const float* rstd) {
    for (int i = threadIdx.x; i < BN; i += THREADS) {
        int c = channel + i, group = n * groups + c / (C / groups), of_pair = ((i / 32 * 4 + i % 8 / 2) * 4 + i % 32 / 8) * 2;
        maps[of_pair + i % 2] = affine_of(Modulation(n, c, C, norm_weight, norm_bias, scale, shift), mean[group], rstd[group]);
    }
}

// For expand: a thread's sums of its eight channels.
struct ChannelSums {
    float sum[8] = {}, product[8] = {};
    // Adds two channels from e on: v, and its products with `other`.
    __device__ __forceinline__ void add(int e, float2 v, float2 other) {
        sum[e] += v.x, sum[e + 1] += v.y;
        product[e] += v.x * other.x, product[e + 1] += v.y * other.y;
    }
    // Adds up the threads of the warp that have the same channels. The first of them stores the sums.
    __device__ __forceinline__ void leave(float* to) {
#pragma unroll
        for (int e = 0; e < 8; e++) {
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) {
                sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], lanes);
                product[e] += __shfl_xor_sync(0xffffffffu, product[e], lanes);
            }
            if (threadIdx.x % 32 >= 4) continue;
            to[e * SUMS] = sum[e];
            if (SUMS == 2) to[e * SUMS + 1] = product[e];
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS)
expand(const FEW_T* few, const T* weight, const float* bias, const float* emb, int relu, T* many, float* sums, const T* x,
       const float* norm_weight, const float* norm_bias, const float* scale, const float* shift, const float* mean,
       const float* rstd, Weight at, int H, int W, int C, int rows, int groups) {
    wait_for_previous();
    __shared__ __align__(4) T weights[BN * EXPAND_PITCH];
    __shared__ float warp_sums[PIXEL_WARPS * BN * SUMS + 1];
    __shared__ __align__(16) float2 maps[NORM ? BN : 1];
    Tile tile(H, rows);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    int channel = blockIdx.y * BN, own = warp % CHANNEL_WARPS * 32 + t * 8;  // the first of this thread's eight
    Weights loaded(weight, at, channel);
    if constexpr (NORM) fill_maps(maps, channel, tile.n, C, groups, norm_weight, norm_bias, scale, shift, mean, rstd);
    float constant[8] = {};
#pragma unroll
    for (int e = 0; !NORM && e < 8; e++) {
        int c = channel + own + e;
        if (bias) constant[e] = bias[c];
        if (emb) constant[e] += emb[tile.n * C + c];
    }
    int count = tile.rows * W, first = warp / CHANNEL_WARPS * 16 + g, step = PIXEL_WARPS * 16;
    i64 place = (((i64)tile.n * H + tile.top) * W + first) * C + channel + own;
    many += place, x += NORM ? place : 0;
    Pack<T> others[2];
    auto fetch = [&](int h, int m) {  // load the norm's input for pixel m, long before it is used
        if (NORM && m < count) others[h] = load_pack(x + 8 * h * C);
    };
    fetch(0, first), fetch(1, first + 8);
    Patches patches(few, tile, H, W);
    loaded.store(weights);
    __syncthreads();

    int offset[EXPAND_STEPS][2];  // in words
    u32 keep[EXPAND_STEPS][2];
#pragma unroll
    for (int k = 0; k < EXPAND_STEPS; k++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int pair = k * 8 + t + 4 * i, row = pair / ROW_PAIRS, e = pair % ROW_PAIRS;
            offset[k][i] = min(row, R - 1) * patches.pitch / 2 + e;
            bool whole = COPIES == 1 && (k + 1) * 8 <= R * ROW_PAIRS;  // a compile-time constant
            keep[k][i] = whole || (row < R && 2 * e + 1 < R * FEW) ? ~0u : row < R ? 0xffff : 0;
        }
    // Column 2t + i of product j is channel 2j + i of thread t.
    const u32* column = (const u32*)(weights + (warp % CHANNEL_WARPS * 32 + g / 2 * 8 + g % 2) * EXPAND_PITCH) + t;
    ChannelSums of_thread;

    Walk walks[2] = {{first, step, W}, {first + 8, step, W}};
    for (int m = first; m - g < count; m += step, many += step * C) {
        const u32* corner[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
            int place = patches.corner(min(walks[h].y, tile.rows - 1), walks[h].x), odd = COPIES > 1 ? place % 2 : 0;
            corner[h] = (const u32*)(patches.values + place - odd + odd * patches.size);
            walks[h].advance();
        }
        x += step * C;
        float acc[4][4];
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[j][i] = constant[2 * j + i % 2];
#pragma unroll
        for (int k = 0; k < EXPAND_STEPS; k++) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) a[i] = corner[i % 2][offset[k][i / 2]] & keep[k][i / 2];
#pragma unroll
            for (int j = 0; j < 4; j++) mma<T>(acc[j], a, column[j * EXPAND_PITCH + k * 8], column[j * EXPAND_PITCH + k * 8 + 4]);
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (m + 8 * h >= count) continue;
            u32 stored[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float2 v = make_float2(acc[j][2 * h], acc[j][2 * h + 1]), other;
                if constexpr (NORM) {
                    other = make_float2(to_float(others[h].v[2 * j]), to_float(others[h].v[2 * j + 1]));
                    float4 map = ((const float4*)maps)[(warp % CHANNEL_WARPS * 4 + j) * 4 + t];
                    v.x *= silu_slope(fmaf(map.x, other.x, map.y)), v.y *= silu_slope(fmaf(map.z, other.y, map.w));
                    stored[j] = pack_pair<T>(v.x, v.y);
                } else {
                    if (relu) v = make_float2(v.x < 0.0f ? 0.0f : v.x, v.y < 0.0f ? 0.0f : v.y);
                    stored[j] = pack_pair<T>(v.x, v.y);
                    other = v = unpack_pair<T>(stored[j]);
                }
                if constexpr (SUMS > 0) of_thread.add(2 * j, v, other);
            }
            *(uint4*)(many + 8 * h * C) = make_uint4(stored[0], stored[1], stored[2], stored[3]);
            fetch(h, m + step + 8 * h);
        }
    }
    if constexpr (SUMS > 0) {
        of_thread.leave(warp_sums + (warp / CHANNEL_WARPS * BN + own) * SUMS);
        __syncthreads();
        for (int i = threadIdx.x; i < BN * SUMS; i += THREADS) {
            float total = 0.0f;
            for (int w = 0; w < PIXEL_WARPS; w++) total += warp_sums[w * BN * SUMS + i];
            sums[((i64)blockIdx.x * C + channel) * SUMS + i] = total;
        }
    }
}

constexpr int COLUMNS = CEIL_DIV(DEPTH, 8), PITCH = DEPTH | 1;  // of the products of a pixel, in contract

// Copy the weights of C channels, a row for each column, to shared memory.
__device__ __forceinline__ void load_weights(T* weights, int pitch, const T* weight, const Weight& at, int C) {
#pragma unroll 8
    for (int i = threadIdx.x; i < C * COLUMNS * 8; i += THREADS) {
        int c = at.many == 1 ? i % C : i / (COLUMNS * 8), d = at.many == 1 ? i / C : i % (COLUMNS * 8);
        weights[d * pitch + c] = d < DEPTH ? weight[at.at(d, c)] : T{};
    }
}

// few of a tile, from the products of its pixels and of those around it, whose first row is `top`.
__device__ __forceinline__ void add_taps(FEW_T* few, const float* products, const float* bias, Tile tile, int top, int H, int W) {
    few += ((i64)tile.n * H + tile.top) * W * FEW;
    for (int i = threadIdx.x; i < tile.rows * W * FEW; i += THREADS) {
        int j = i % FEW, x = i / FEW % W, y = tile.top + i / FEW / W;
        float sum = bias ? bias[j] : 0.0f;
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) {
            int row = y + tap / R - HALO, column = x + tap % R - HALO;
            if (row < 0 || row >= H || column < 0 || column >= W) continue;
            sum += products[((row - top) * W + column) * PITCH + tap * FEW + j];
        }
        few[i] = from_float<FEW_T>(sum);
    }
}

// Store a warp's products with 16 pixels, of which this thread has pixels m and m + 8.
__device__ __forceinline__ void store_products(float* products, const float (&acc)[COLUMNS][4], int m, int count) {
#pragma unroll
    for (int j = 0; j < COLUMNS; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int place = m + i / 2 * 8, d = j * 8 + 2 * (threadIdx.x % 4) + i % 2;
            if (place < count && d < DEPTH) products[place * PITCH + d] = acc[j][i];
        }
}

// acc += the products of 16 pixels, of which `upper` and `lower` are this thread's channels of pixels g and g + 8. b(k, j): the
// weights of channels 4k to 4k + 3 of these, of column 8j + g.
template <typename B>
__device__ __forceinline__ void multiply_pixels(float (&acc)[COLUMNS][4], const uint4* upper, const uint4* lower, B b) {
#pragma unroll
    for (int k = 0; k < BN / 16; k++) {
        const uint4 &u = upper[k / 2], &l = lower[k / 2];
        u32 a[4] = {k % 2 ? u.z : u.x, k % 2 ? l.z : l.x, k % 2 ? u.w : u.y, k % 2 ? l.w : l.y};
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            uint2 weights = b(k, j);
            mma<T>(acc[j], a, weights.x, weights.y);
        }
    }
}

// First each pixel of many, in the tile's rows and those around them, is multiplied by all DEPTH columns of the weight. The
// products go to shared memory. Then each pixel of few adds its products, one for each tap. To read `many` anew for each tap
// would cost more.
extern "C" __global__ void __launch_bounds__(THREADS)
contract(const T* many, const T* weight, const float* bias, FEW_T* few, Weight at, int H, int W, int rows) {
    wait_for_previous();
    constexpr int WEIGHT_PITCH = BN + 8;
    __shared__ __align__(8) T weights[COLUMNS * 8 * WEIGHT_PITCH];
    float* products = (float*)dynamic;  // (rows + 2 * HALO, W, PITCH)
    Tile tile(H, rows);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    load_weights(weights, WEIGHT_PITCH, weight, at, BN);
    __syncthreads();
    uint2 b[BN / 16][COLUMNS];  // depths 2t, 2t + 1, 2t + 8, 2t + 9 of step k are the four channels from t * OWN + 4k on
#pragma unroll
    for (int k = 0; k < BN / 16; k++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) b[k][j] = *(const uint2*)(weights + (j * 8 + g) * WEIGHT_PITCH + t * OWN + 4 * k);

    int top = max(tile.top - HALO, 0), count = (min(tile.top + tile.rows + HALO, H) - top) * W;
    many += ((i64)tile.n * H + top) * W * BN + t * OWN;
#pragma unroll 2
    for (int m = warp * 16 + g; m - g < count; m += WARPS * 16) {
        uint4 pixel[2][OWN / 8];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < OWN / 8; i++) pixel[h][i] = ((const uint4*)(many + (i64)min(m + 8 * h, count - 1) * BN))[i];
        float acc[COLUMNS][4] = {};
        multiply_pixels(acc, pixel[0], pixel[1], [&](int k, int j) { return b[k][j]; });
        store_products(products, acc, m, count);
    }
    __syncthreads();
    add_taps(few, products, bias, tile, top, H, W);
}

// The same for more channels, a multiple of BN. The weights stay in shared memory, behind the products. A pixel is read in parts
// of BN channels, of which the next is on its way.
extern "C" __global__ void __launch_bounds__(THREADS, 2)
contract_many(const T* many, const T* weight, const float* bias, FEW_T* few, Weight at, int H, int W, int C, int rows) {
    wait_for_previous();
    Tile tile(H, rows);
    int pitch = C + 4;  // keeps bank conflicts few
    float* products = (float*)dynamic;
    T* weights = (T*)(products + CEIL_DIV((rows + 2 * HALO) * W * PITCH, 2) * 2);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    load_weights(weights, pitch, weight, at, C);
    __syncthreads();
    int top = max(tile.top - HALO, 0), count = (min(tile.top + tile.rows + HALO, H) - top) * W;
    many += ((i64)tile.n * H + top) * W * C + t * OWN;
    for (int m = warp * 16 + g; m - g < count; m += WARPS * 16) {
        uint4 next[2][OWN / 8], now[2][OWN / 8];
        auto fetch = [&](int h, int c) {
            const uint4* pixel = (const uint4*)(many + (i64)min(m + 8 * h, count - 1) * C + c);
#pragma unroll
            for (int i = 0; i < OWN / 8; i++) now[h][i] = next[h][i], next[h][i] = pixel[i];
        };
        fetch(0, 0), fetch(1, 0);
        float acc[COLUMNS][4] = {};
#pragma unroll 1
        for (int c = 0; c < C; c += BN) {
            fetch(0, min(c + BN, C - BN)), fetch(1, min(c + BN, C - BN));
            const T* own = weights + g * pitch + c + t * OWN;
            multiply_pixels(acc, now[0], now[1], [&](int k, int j) { return *(const uint2*)(own + j * 8 * pitch + 4 * k); });
        }
        store_products(products, acc, m, count);
    }
    __syncthreads();
    add_taps(few, products, bias, tile, top, H, W);
}

extern "C" __global__ void __launch_bounds__(THREADS, FEW < 6 ? 2 : 1)  // for two blocks, 7 channels spill on sm_90a
wgrad(const FEW_T* few, const T* many, float* partials, Weight at, int H, int W, int C, int rows, int pitch) {
    wait_for_previous();
    constexpr int COLUMNS = 4;  // products of 8 channels each; a thread has COLUMNS channels, from g * COLUMNS on
    struct __align__(8) Channels { u16 bits[COLUMNS]; };
    Tile tile(H, rows);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, channel = blockIdx.y * BN;
    int pixel_warp = warp / CHANNEL_WARPS, channel_warp = warp % CHANNEL_WARPS;
    int width = CEIL_DIV(W, 4) * 4, count = tile.rows * width, step = PIXEL_WARPS * 16;
    int first = pixel_warp * 16 + t * 4;  // the first of this thread's four neighbouring pixels
    many += ((i64)tile.n * H + tile.top) * W * C + channel + channel_warp * 32 + g * COLUMNS;
    Channels pixels[2][4];
    Walk ahead(first, step, width), walk = ahead;
    auto fetch = [&](Channels(&four)[4], int m) {
        const T* pixel = many + (ahead.y * W + ahead.x) * C;
#pragma unroll
        for (int i = 0; i < 4; i++) four[i] = m < count && ahead.x + i < W ? *(const Channels*)(pixel + i * C) : Channels{};
        ahead.advance();
    };
    fetch(pixels[0], first), fetch(pixels[1], first + step);
    TransposedPatches patches(few, tile, H, W, width, pitch);
    __syncthreads();

    float acc[STEPS][COLUMNS][4] = {};
#pragma unroll 2
    for (int m = first, stage = 0; m - t * 4 < count; m += step, stage ^= 1) {
        Channels(&pixel)[4] = pixels[stage];
        int y = min(walk.y, tile.rows - 1);
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            uint2 upper = *(const uint2*)(patches.at(y, min(k * 16 + g, DEPTH - 1)) + walk.x);
            uint2 lower = *(const uint2*)(patches.at(y, min(k * 16 + g + 8, DEPTH - 1)) + walk.x);
            u32 a[4] = {upper.x, lower.x, upper.y, lower.y};
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                mma<T>(acc[k][j], a, pixel[0].bits[j] | (u32)pixel[1].bits[j] << 16, pixel[2].bits[j] | (u32)pixel[3].bits[j] << 16);
        }
        walk.advance();
        fetch(pixel, m + 2 * step);
    }
    // Add the sums of the warps that share channels, as a tree: the lower half adds those of the upper half, and so on.
    float* sums = (float*)dynamic;
    for (int half = PIXEL_WARPS / 2; half > 0; half /= 2) {
        float* of_pair = sums + (pixel_warp % half * CHANNEL_WARPS + channel_warp) * STEPS * COLUMNS * 128 + lane;
        __syncthreads();
        if (pixel_warp >= half && pixel_warp < 2 * half)
#pragma unroll
            for (int e = 0; e < STEPS * COLUMNS * 4; e++) of_pair[e * 32] = acc[e / 4 / COLUMNS][e / 4 % COLUMNS][e % 4];
        __syncthreads();
        if (pixel_warp < half)
#pragma unroll
            for (int e = 0; e < STEPS * COLUMNS * 4; e++) acc[e / 4 / COLUMNS][e / 4 % COLUMNS][e % 4] += of_pair[e * 32];
    }
    // Column 2t + i of product j is channel (2t + i) * COLUMNS + j.
    constexpr int PITCH = BN + 1;
    __syncthreads();
    if (pixel_warp == 0)
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int d = k * 16 + g + i / 2 * 8;
                    if (d < DEPTH) sums[d * PITCH + channel_warp * 32 + (2 * t + i % 2) * COLUMNS + j] = acc[k][j][i];
                }
    __syncthreads();
    partials += (i64)blockIdx.x * DEPTH * C;
    for (int i = threadIdx.x; i < BN * DEPTH; i += THREADS) {
        int c = at.many == 1 ? i % BN : i / DEPTH, d = at.many == 1 ? i / BN : i % DEPTH;
        partials[at.at(d, channel + c)] = sums[d * PITCH + c];
    }
}
