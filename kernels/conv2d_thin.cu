// Convolutions R x R (3 or 1) that keep the size, between an image of few channels ("thin") and one of many ("wide").
// variants: T=bf16 THIN_T=bf16 R=3 THIN=3 BN=32,64 MOMENTS=0,1,2 NORM=0
// variants: T=bf16 THIN_T=bf16 R=3 THIN=3 BN=96,128 MOMENTS=0 NORM=0
// variants: T=bf16 THIN_T=bf16 R=1 THIN=1,3 BN=64 MOMENTS=0,1 NORM=0
// variants: T=half THIN_T=half R=3 THIN=1,7 BN=32 MOMENTS=2 NORM=0
// variants: T=bf16 THIN_T=bf16 R=3 THIN=3,6 BN=64 MOMENTS=2 NORM=1
// variants: T=half THIN_T=half R=3 THIN=3,6 BN=64 MOMENTS=2 NORM=1
// variants: T=bf16 THIN_T=bf16 R=1 THIN=1 BN=32 MOMENTS=2 NORM=1
// variants: T=bf16 THIN_T=float R=3 THIN=3 BN=64 MOMENTS=2 NORM=0,1
//
// thin: THIN_T (N, H, W, THIN), T or float; wide: T (N, H, W, C), 16-byte aligned, C a multiple of BN. Products are of T: a
// float thin is rounded where it is read, and written as summed. The patch of a pixel has DEPTH numbers, (r, s, j): thin's
// R x R pixels around it. weight, T, holds (tap, j, c) at first + tap * .. + j * .. + c * .. (see Weight), so that the six
// passes, three of each kind of convolution, are three products:
//   spread  wide[p][c] = patch[p] · weight[c] + bias[c] + emb[n][c], or 0 where that is less and `relu`; partials (N, tiles,
//           C, MOMENTS) are float sums of what was stored, and with 2 moments of its squares. Thin is x of fprop, or dout of
//           dgrad. NORM, of dgrad where the input was silu(z), z group norm's map (affine.cuh) of x (N, H, W, C): wide = dz,
//           the product times silu's slope, and partials are sums of dz and of dz * x, before rounding; no bias, emb or relu.
//   gather  thin[p][j] = sum over taps (r, s) of wide[p + (r, s) - R / 2] · weight[tap][j] + bias[j]. Thin is out, or dx.
//   wgrad   partials[blockIdx.x] (a weight each, float) = sum over the tile's pixels of patch[p][tap, j] · wide[p][c]
// bias: float or null; emb: float (N, C) or null. All outputs are overwritten. Sums are float and in a fixed order.
//
// Fragments of mma.sync are filled without ldmatrix: which channel or pixel stands in which column or depth is free, and
// is chosen so that a thread's are neighbours in memory.
// Launch: 256 threads, gridDim.x = N * ceil(H / rows) tiles of `rows` rows of an image; spread and wgrad gridDim.y = C / BN,
// gather 1, with BN = C. Dynamic shared memory, by conv2d_thin.py: spread `rows_bytes`, gather `products_bytes`, wgrad the
// larger of `rows_bytes` and `sums_bytes`.
#include "affine.cuh"
#include "mma.cuh"
#include "vector.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int TAPS = R * R, HALO = R / 2;  // pixels around a tile
constexpr int DEPTH = TAPS * THIN, STEPS = CEIL_DIV(DEPTH, 16);
constexpr int OWN = BN / 4;  // channels of a thread in spread and gather: a quarter of a pixel's

// Which channel is number e of thread t in spread: four threads write 64 bytes of a pixel side by side.
__device__ __forceinline__ int own(int t, int e) { return e / 8 * 32 + t * 8 + e % 8; }

// Where the weight of (tap, j, c) lies; tap counts backwards where `tap` is negative.
struct Weight {
    int first, tap, thin, wide;
    __device__ __forceinline__ int at(int d, int c) const { return first + d / THIN * tap + d % THIN * thin + c * wide; }
};

// A block's rows of one image.
struct Tile {
    int n, top, rows;
    __device__ __forceinline__ Tile(int H, int most) {
        int tiles = CEIL_DIV(H, most);
        n = blockIdx.x / tiles, top = blockIdx.x % tiles * most, rows = min(most, H - top);
    }
};

extern __shared__ __align__(16) u8 dynamic[];

// A number of thin's as products take it.
__device__ __forceinline__ T operand(T x) { return x; }
template <typename U> __device__ __forceinline__ T operand(U x) { return from_float<T>(to_float(x)); }

// Thin's rows under a tile's patches, zeros around the image, in shared memory.
struct Patches {
    T* lines;
    int pitch, W;

    __device__ __forceinline__ Patches(const THIN_T* thin, const Tile& tile, int H, int W) : lines((T*)dynamic), pitch((W + 2 * HALO) * THIN), W(W) {
#pragma unroll 8
        for (int i = threadIdx.x; i < (tile.rows + 2 * HALO) * pitch; i += THREADS) {
            int row = tile.top + i / pitch - HALO, e = i % pitch - HALO * THIN;
            bool inside = row >= 0 && row < H && e >= 0 && e < W * THIN;
            lines[i] = inside ? operand(thin[((i64)tile.n * H + row) * W * THIN + e]) : T{};
        }
    }
    // Number d of the patch of pixel m of the tile lies at corner(m) + offset(d).
    __device__ __forceinline__ int corner(int m) const { return m / W * pitch + m % W * THIN; }
    __device__ __forceinline__ int offset(int d) const { return d / (R * THIN) * pitch + d % (R * THIN); }
    __device__ __forceinline__ u32 bits(int place, bool inside) const { return inside ? lines[place].bits : 0; }
};

extern "C" __global__ void __launch_bounds__(THREADS)
spread(const THIN_T* thin, const T* weight, const float* bias, const float* emb, int relu, T* wide, float* partials, const T* x,
       const float* norm_weight, const float* norm_bias, const float* scale, const float* shift, const float* mean,
       const float* rstd, Weight at, int H, int W, int C, int rows, int groups) {
    wait_for_previous();
    constexpr int LINE = STEPS * 16 + 10, COLUMNS = BN / 8;  // so that few of the lines read at one time share a bank
    __shared__ __align__(4) T weights[BN * LINE];
    __shared__ float sums[WARPS * BN * MOMENTS + 1];
    __shared__ __align__(16) float2 maps[NORM ? BN : 1];
    Tile tile(H, rows);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, channel = blockIdx.y * BN;
    float constant[OWN] = {};
#pragma unroll
    for (int e = 0; e < OWN; e++) {
        int c = channel + own(t, e);
        if (!NORM && bias) constant[e] = bias[c];
        if (!NORM && emb) constant[e] += emb[tile.n * C + c];
    }
#pragma unroll
    for (int i = threadIdx.x; i < BN * STEPS * 16; i += THREADS) {  // in the order in which they lie in memory
        int c = at.wide == 1 ? i % BN : i / (STEPS * 16), d = at.wide == 1 ? i / BN : i % (STEPS * 16);
        weights[c * LINE + d] = d < DEPTH ? weight[at.at(d, channel + c)] : T{};
    }
    for (int i = threadIdx.x; NORM && i < BN; i += THREADS) {
        int c = channel + i, group = tile.n * groups + c / (C / groups);
        maps[i] = affine_of(Modulation(tile.n, c, C, norm_weight, norm_bias, scale, shift), mean[group], rstd[group]);
    }
    Patches patches(thin, tile, H, W);
    __syncthreads();

    int offset[STEPS][4];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) offset[k][i] = patches.offset(k * 16 + 2 * t + i % 2 + i / 2 * 8);
    const u32* b = (const u32*)(weights + own(g >> 1, g & 1) * LINE + 2 * t);
    float sum[OWN] = {}, square[OWN] = {};

    int count = tile.rows * W;
    i64 first_pixel = ((i64)tile.n * H + tile.top) * W * C + channel;
    wide += first_pixel, x += NORM ? first_pixel : 0;
    for (int m = warp * 16 + g; m - g < count; m += WARPS * 16) {
        Pack<T> own_x[2][OWN / 8];
#pragma unroll
        for (int h = 0; NORM && h < 2; h++)
#pragma unroll
            for (int i = 0; i < OWN / 8; i++) own_x[h][i] = load_pack(x + (i64)min(m + 8 * h, count - 1) * C + own(t, 8 * i));
        int corner[2] = {patches.corner(min(m, count - 1)), patches.corner(min(m + 8, count - 1))};
        float acc[COLUMNS][4] = {};
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int d = k * 16 + 2 * t + i / 2 * 8;
                const int* o = offset[k] + i / 2 * 2;
                a[i] = patches.bits(corner[i % 2] + o[0], d < DEPTH) | patches.bits(corner[i % 2] + o[1], d + 1 < DEPTH) << 16;
            }
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {  // column 2t + i of product j is channel own(t, 2j + i)
                const u32* column = b + own(0, 2 * j) * (LINE / 2) + k * 8;
                mma<T>(acc[j], a, column[0], column[4]);
            }
        }
#pragma unroll
        for (int h = 0; h < 2; h++) {
            if (m + 8 * h >= count) continue;
#pragma unroll
            for (int first = 0; first < OWN; first += 8) {
                float values[8];
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    int e = first + i;
                    values[i] = acc[e / 2][h * 2 + e % 2] + constant[e];
                    if constexpr (NORM) {
                        float2 map = maps[own(t, e)];
                        float other = to_float(own_x[h][first / 8].v[i]);
                        values[i] *= silu_slope(fmaf(map.x, other, map.y));
                        sum[e] += values[i], square[e] += values[i] * other;
                        continue;
                    }
                    if (relu && values[i] < 0.0f) values[i] = 0.0f;
                    if constexpr (MOMENTS > 0) {
                        float rounded = to_float(from_float<T>(values[i]));
                        sum[e] += rounded, square[e] += rounded * rounded;
                    }
                }
                store<8>(wide + (i64)(m + 8 * h) * C + own(t, first), values);
            }
        }
    }
    if constexpr (MOMENTS > 0) {
#pragma unroll
        for (int e = 0; e < OWN; e++) {
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) {
                sum[e] += __shfl_xor_sync(0xffffffffu, sum[e], lanes);
                square[e] += __shfl_xor_sync(0xffffffffu, square[e], lanes);
            }
            if (g == 0) {
                float* to = sums + (warp * BN + own(t, e)) * MOMENTS;
                to[0] = sum[e];
                if (MOMENTS == 2) to[1] = square[e];
            }
        }
        __syncthreads();
        for (int i = threadIdx.x; i < BN * MOMENTS; i += THREADS) {
            float total = 0.0f;
            for (int w = 0; w < WARPS; w++) total += sums[w * BN * MOMENTS + i];
            partials[((i64)blockIdx.x * C + channel) * MOMENTS + i] = total;
        }
    }
}

// Every pixel of the tile's rows and of those around it is multiplied by all DEPTH columns of the weight, once; then the
// products that belong to a pixel of thin, one a tap, are added. Reading wide once a tap would cost more.
extern "C" __global__ void __launch_bounds__(THREADS)
gather(const T* wide, const T* weight, const float* bias, THIN_T* thin, Weight at, int H, int W, int rows) {
    wait_for_previous();
    constexpr int LINE = BN + 8, COLUMNS = CEIL_DIV(DEPTH, 8), PITCH = DEPTH | 1;
    __shared__ __align__(8) T weights[COLUMNS * 8 * LINE];
    float* products = (float*)dynamic;  // (rows + 2 * HALO, W, PITCH)
    Tile tile(H, rows);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = threadIdx.x; i < BN * COLUMNS * 8; i += THREADS) {
        int c = at.wide == 1 ? i % BN : i / (COLUMNS * 8), d = at.wide == 1 ? i / BN : i % (COLUMNS * 8);
        weights[d * LINE + c] = d < DEPTH ? weight[at.at(d, c)] : T{};
    }
    __syncthreads();

    uint2 b[BN / 16][COLUMNS];  // depth 2t, 2t + 1, 2t + 8, 2t + 9 of step k is channel t * OWN + 4k and the three after it
#pragma unroll
    for (int k = 0; k < BN / 16; k++)
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) b[k][j] = *(const uint2*)(weights + (j * 8 + g) * LINE + t * OWN + 4 * k);

    int top = max(tile.top - HALO, 0), count = (min(tile.top + tile.rows + HALO, H) - top) * W;
    wide += ((i64)tile.n * H + top) * W * BN + t * OWN;
#pragma unroll 2
    for (int m = warp * 16 + g; m - g < count; m += WARPS * 16) {
        uint4 pixel[2][OWN / 8];
#pragma unroll
        for (int h = 0; h < 2; h++)
#pragma unroll
            for (int i = 0; i < OWN / 8; i++) pixel[h][i] = ((const uint4*)(wide + (i64)min(m + 8 * h, count - 1) * BN))[i];
        float acc[COLUMNS][4] = {};
#pragma unroll
        for (int k = 0; k < BN / 16; k++) {
            const uint4 &upper = pixel[0][k / 2], &lower = pixel[1][k / 2];
            u32 a[4] = {k % 2 ? upper.z : upper.x, k % 2 ? lower.z : lower.x, k % 2 ? upper.w : upper.y, k % 2 ? lower.w : lower.y};
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) mma<T>(acc[j], a, b[k][j].x, b[k][j].y);
        }
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int place = m + i / 2 * 8, d = j * 8 + 2 * t + i % 2;
                if (place < count && d < DEPTH) products[place * PITCH + d] = acc[j][i];
            }
    }
    __syncthreads();

    thin += ((i64)tile.n * H + tile.top) * W * THIN;
    for (int i = threadIdx.x; i < tile.rows * W * THIN; i += THREADS) {
        int j = i % THIN, x = i / THIN % W, y = tile.top + i / THIN / W;
        float sum = bias ? bias[j] : 0.0f;
#pragma unroll
        for (int tap = 0; tap < TAPS; tap++) {
            int row = y + tap / R - HALO, column = x + tap % R - HALO;
            if (row < 0 || row >= H || column < 0 || column >= W) continue;
            sum += products[((row - top) * W + column) * PITCH + tap * THIN + j];
        }
        thin[i] = from_float<THIN_T>(sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
wgrad(const THIN_T* thin, const T* wide, float* partials, Weight at, int H, int W, int C, int rows) {
    wait_for_previous();
    constexpr int COLUMNS = BN / 8;  // and as many channels of a thread: those of lane group g are g * COLUMNS and after
    struct __align__(COLUMNS % 8 ? 8 : 16) Channels { u16 bits[COLUMNS]; };
    Tile tile(H, rows);
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, channel = blockIdx.y * BN;
    Patches patches(thin, tile, H, W);
    __syncthreads();

    int offset[STEPS][2];
#pragma unroll
    for (int k = 0; k < STEPS; k++)
#pragma unroll
        for (int h = 0; h < 2; h++) offset[k][h] = patches.offset(min(k * 16 + g + 8 * h, DEPTH - 1));
    float acc[STEPS][COLUMNS][4] = {};
    int count = tile.rows * W;
    wide += ((i64)tile.n * H + tile.top) * W * C + channel + g * COLUMNS;
#pragma unroll 2
    for (int m = warp * 16 + t * 4; m - t * 4 < count; m += WARPS * 16) {  // a thread's pixels: m and the three after it
        Channels pixel[4];
        int corner[4], y = m / W, x = m % W;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            pixel[i] = m + i < count ? *(const Channels*)(wide + (i64)(m + i) * C) : Channels{};
            corner[i] = min(y, tile.rows - 1) * patches.pitch + x * THIN;
            if (++x == W) x = 0, y++;
        }
#pragma unroll
        for (int k = 0; k < STEPS; k++) {
            u32 a[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int o = offset[k][i % 2], first = i / 2 * 2;
                a[i] = patches.bits(corner[first] + o, true) | patches.bits(corner[first + 1] + o, true) << 16;
            }
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
                mma<T>(acc[k][j], a, pixel[0].bits[j] | (u32)pixel[1].bits[j] << 16, pixel[2].bits[j] | (u32)pixel[3].bits[j] << 16);
        }
    }
    // The lower half of the warps adds what the upper half has, then the lower quarter, ...
    float* sums = (float*)dynamic;
    for (int half = WARPS / 2; half > 0; half /= 2) {
        float* part = sums + warp % half * STEPS * COLUMNS * 128 + lane;
        __syncthreads();
        if (warp >= half && warp < 2 * half)
#pragma unroll
            for (int e = 0; e < STEPS * COLUMNS * 4; e++) part[e * 32] = acc[e / 4 / COLUMNS][e / 4 % COLUMNS][e % 4];
        __syncthreads();
        if (warp < half)
#pragma unroll
            for (int e = 0; e < STEPS * COLUMNS * 4; e++) acc[e / 4 / COLUMNS][e / 4 % COLUMNS][e % 4] += part[e * 32];
    }
    // Column 2t + i of product j is channel (2t + i) * COLUMNS + j.
    constexpr int PITCH = BN + 1;
    __syncthreads();
    if (warp == 0)
#pragma unroll
        for (int k = 0; k < STEPS; k++)
#pragma unroll
            for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    int d = k * 16 + g + i / 2 * 8;
                    if (d < DEPTH) sums[d * PITCH + (2 * t + i % 2) * COLUMNS + j] = acc[k][j][i];
                }
    __syncthreads();
    partials += (i64)blockIdx.x * DEPTH * C;
    for (int i = threadIdx.x; i < BN * DEPTH; i += THREADS) {
        int c = at.wide == 1 ? i % BN : i / DEPTH, d = at.wide == 1 ? i / BN : i % DEPTH;
        partials[at.at(d, channel + c)] = sums[d * PITCH + c];
    }
}
