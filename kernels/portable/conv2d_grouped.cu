// Convolutions with groups or dilation, on FMA units: for each group one tiled product of matrices. Large ones run as others on
// tensor cores instead (convolution/bundles.py, restated.py), but those with a dilation and a stride.
//
//   PASS   result             rows             columns             depth
//   FPROP  out[pixel][k]      pixels of out    k                   (r, s, c)
//   DGRAD  dx[pixel][c]       pixels of dx     c                   (r, s, k)
//   WGRAD  dweight[k][r,s,c]  k                (r, s, c)           pixels of dout
// c and k are channels of one group. Products and sums are float, in a fixed order.
//
//   a, b     x and weight in FPROP, dout and weight in DGRAD, dout and x in WGRAD. x (N, H, W, C), weight
//            (K, R, S, C / groups), dout (N, h, w, K): T, contiguous, any alignment.
//   result   overwritten. T; in WGRAD parts, float (gridDim.y, K, R, S, C / groups). Each part is the sum over `pixels` pixels,
//            a multiple of BK; the host adds the parts.
//   bias     float, one for each channel of the result, or null. Not in WGRAD.
//   addend   T like result, or null. May be `result` itself. Not in WGRAD.
// Launch: 256 threads. gridDim.x = groups * columns of tiles * rows of tiles of BM x BN; gridDim.y = 1, in WGRAD the parts.
#include "convolution.cuh"

enum Pass { FPROP, DGRAD, WGRAD };
constexpr int THREADS = 256, BK = 16;
constexpr int TM = BM == 16 ? 2 : 4, TN = BN == 16 ? 2 : 4;  // a thread's rows and columns
constexpr int ROW_STEP = BM / TM, COLUMN_STEP = BN / TN;
static_assert(ROW_STEP * COLUMN_STEP == THREADS, "a thread has TM x TN sums");
constexpr int PATCHES = PASS == WGRAD ? BN : BM;  // rows of a tile, each a pixel; in WGRAD columns, each a tap

struct Pixel { int image, row, column; };  // image -1: none
struct Tap { int r, s, channel; };         // within the group; channel -1: none

__device__ __forceinline__ Pixel pixel_of(int i, int limit, int height, int width) {
    int line = i / width;
    return i < limit ? Pixel{line / height, line % height, i - line * width} : Pixel{-1, 0, 0};
}
__device__ __forceinline__ Tap tap_of(int i, int limit, int S, int channels) {
    int tap = i / channels;
    return i < limit ? Tap{tap / S, tap % S, i - tap * channels} : Tap{0, 0, -1};
}

// tile[depth][row] = operand(row, depth) for all of a tile. Neighbouring threads read along the depth or along the rows,
// whichever is contiguous in memory.
template <int ROWS, bool ALONG_DEPTH, class Operand>
__device__ __forceinline__ void fill(float (&tile)[BK][ROWS + 2], Operand operand) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * BK; i += THREADS) {
        int row = ALONG_DEPTH ? i / BK : i % ROWS, depth = ALONG_DEPTH ? i % BK : i / ROWS;
        tile[depth][row] = operand(row, depth);
    }
}

extern "C" __global__ void __launch_bounds__(256, 1)
conv2d_grouped(void* result, const T* a, const T* b, const float* bias, const T* addend, int pixels, Convolution p) {
    wait_for_previous();
    __shared__ float rows_of_a[BK][BM + 2], columns_of_b[BK][BN + 2];
    __shared__ Pixel pixel[PASS == WGRAD ? BK : PATCHES];
    __shared__ Tap tap[PASS == WGRAD ? PATCHES : BK];
    int C = p.C / p.groups, K = p.K / p.groups, taps = p.R * p.S;
    // The sides of the image that the taps read, and of the one whose pixels are rows (in WGRAD depth) of the product.
    int height = PASS == DGRAD ? p.h : p.H, width = PASS == DGRAD ? p.w : p.W;
    int own_height = PASS == DGRAD ? p.H : p.h, own_width = PASS == DGRAD ? p.W : p.w;
    int own_pixels = p.N * own_height * own_width, read_channels = PASS == DGRAD ? K : C, patch = taps * read_channels;
    int rows = PASS == WGRAD ? K : own_pixels, columns = PASS == FPROP ? K : PASS == DGRAD ? C : patch;

    int group = blockIdx.x % p.groups, tile = blockIdx.x / p.groups, tiles = CEIL_DIV(columns, BN);
    int first_column = tile % tiles * BN, first_row = tile / tiles * BM;
    int begin = PASS == WGRAD ? blockIdx.y * pixels : 0;
    int end = PASS == WGRAD ? min(own_pixels, begin + pixels) : patch;
    for (int i = threadIdx.x; i < PATCHES; i += THREADS)
        if constexpr (PASS == WGRAD) tap[i] = tap_of(first_column + i, columns, p.S, C);
        else pixel[i] = pixel_of(first_row + i, rows, own_height, own_width);

    const T* image = PASS == WGRAD ? b : a;
    auto read = [&](Pixel at, Tap from) {
        if (at.image < 0 || from.channel < 0) return 0.0f;
        int row = connected<PASS == DGRAD>(at.row, from.r, p.stride_h, p.padding_h, p.dilation_h, height);
        int column = connected<PASS == DGRAD>(at.column, from.s, p.stride_w, p.padding_w, p.dilation_w, width);
        if (row < 0 || column < 0) return 0.0f;
        i64 place = ((i64)at.image * height + row) * width + column;
        return to_float(image[place * read_channels * p.groups + group * read_channels + from.channel]);
    };

    float sums[TM][TN] = {};
    int own_row = threadIdx.x / COLUMN_STEP, own_column = threadIdx.x % COLUMN_STEP;
    for (int depth = begin; depth < end; depth += BK) {
        if (threadIdx.x < BK)
            if constexpr (PASS == WGRAD) pixel[threadIdx.x] = pixel_of(depth + threadIdx.x, end, own_height, own_width);
            else tap[threadIdx.x] = tap_of(depth + threadIdx.x, end, p.S, read_channels);
        __syncthreads();
        if constexpr (PASS == WGRAD) {
            fill<BM, false>(rows_of_a, [&](int row, int d) {
                int k = first_row + row;
                return k < rows && depth + d < end ? to_float(a[(i64)(depth + d) * p.K + group * K + k]) : 0.0f;
            });
            fill<BN, false>(columns_of_b, [&](int column, int d) { return read(pixel[d], tap[column]); });
        } else {
            fill<BM, true>(rows_of_a, [&](int row, int d) { return read(pixel[row], tap[d]); });
            fill<BN, PASS == FPROP>(columns_of_b, [&](int column, int d) {
                Tap from = tap[d];
                int n = first_column + column;
                if (n >= columns || from.channel < 0) return 0.0f;
                int k = PASS == FPROP ? n : from.channel, c = PASS == FPROP ? from.channel : n;
                return to_float(b[((i64)(group * K + k) * taps + from.r * p.S + from.s) * C + c]);
            });
        }
        __syncthreads();
#pragma unroll 4
        for (int d = 0; d < BK; d++) {
            float left[TM], right[TN];
#pragma unroll
            for (int i = 0; i < TM; i++) left[i] = rows_of_a[d][own_row + i * ROW_STEP];
#pragma unroll
            for (int j = 0; j < TN; j++) right[j] = columns_of_b[d][own_column + j * COLUMN_STEP];
#pragma unroll
            for (int i = 0; i < TM; i++)
#pragma unroll
                for (int j = 0; j < TN; j++) sums[i][j] += left[i] * right[j];
        }
    }

#pragma unroll
    for (int i = 0; i < TM; i++)
#pragma unroll
        for (int j = 0; j < TN; j++) {
            int row = first_row + own_row + i * ROW_STEP, column = first_column + own_column + j * COLUMN_STEP;
            if (row >= rows || column >= columns) continue;
            if constexpr (PASS == WGRAD) {
                i64 place = ((i64)blockIdx.y * p.K + group * K + row) * columns + column;
                reinterpret_cast<float*>(result)[place] = sums[i][j];
            } else {
                int channel = group * columns + column;
                i64 place = (i64)row * columns * p.groups + channel;
                float sum = sums[i][j] + (bias ? bias[channel] : 0.0f);
                reinterpret_cast<T*>(result)[place] = from_float<T>(sum + (addend ? to_float(addend[place]) : 0.0f));
            }
        }
}
