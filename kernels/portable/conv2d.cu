// Convolution on tensor cores by cp.async and mma.sync, as implicit GEMM: the patches are never stored in memory.
//
//   PASS   result              = sum over     of a                            times b
//   FPROP  out[pixel][k]         (r, s, c)    patch of x[pixel][r,s,c]        weight[k][r,s,c]
//   DGRAD  dx[pixel][c]          (r, s, k)    patch of dout[pixel][r,s,k]     weight[k][r,s,c]
//   WGRAD  dweight[k][r,s,c]     pixels       dout[pixel][k]                  patch of x[pixel][r,s,c]
// The result is a matrix with these two indices as row and column; the index that is summed over is the depth of the product.
//
// x, dx: T (N, H, W, C). out, dout: T (N, Ho, Wo, K). weight: T (K, R, S, C). The result of WGRAD, dweight: float (K, R, S, C).
//
// Constants
//   DILATED    1 for DGRAD with a stride that is not 1.
//   UPSAMPLE   1 where FPROP or WGRAD read x upsampled: 2H × 2W pixels, of which each 2 × 2 are one pixel of x. Else 0.
//   PAIR       1 where FPROP's or WGRAD's x is two arrays: channels 0 to C1 are x, the rest x2, T (N, H, W, C - C1). Else 0.
//   NORM       0: none. 1: DGRAD of a convolution of silu(z), z group norm's map (affine.cuh). 2: of a convolution of z itself.
//              The norm's input has channels 0 to C1 in `normed`, T (N, H, W, C1), the rest in x2, T (N, H, W, C - C1).
//   A_VEC, B_VEC   1 where no 16-byte chunk of a or b straddles two pixels or rows: arrays are aligned to 16 bytes, and
//              these are multiples of a chunk: for a the channels of the image that is gathered, or of dout in WGRAD; for b
//              R·S·C in FPROP and C in the others; C1 where x is two arrays.
//
// Arguments
//   a, b          the operands, C-contiguous: x and weight, dout and weight, or dout and x.
//   destination   OUT, rows of ldo elements, overwritten. Under NORM it is d_preact, the gradient of z: the result, under
//                 NORM=1 times silu's slope. OUT is then T.
//   bias, emb, addend   as in gemm.cuh's Output; all null under NORM.
//   sums          null, or for FPROP as in Output. Under NORM not null: float2 of the same shape, the sums of d_preact and of
//                 d_preact · (x - centre) before rounding.
// An upsampled side of an image plus a padding is at most 32,767. Under NORM C and C1 are even, images are aligned to two
// elements, the rows of a warp are of one image, and the depth is not split.
//
// Launch: gridDim.x = ceil(rows / BM) · ceil(columns / BN), columns fastest. gridDim.y: splits of the depth, `k_tiles` tiles
// each. Split s writes to destination + s · rows · ldo, and gemm.cu sums the splits (then OUT=float, without additions).
// Threads and shared memory as in gemm.cuh.
//
// Other kernels take: conv2d_sm90.cu and conv2d_wgrad*_sm90.cu, on Hopper, stride 1 with the image's size kept, in 16 bits or
// tf32, as far as they can; gemm_sm90.cu, on Hopper, other strides and paddings of 16 bits in FPROP and DGRAD;
// conv2d_few_channels.cu, everywhere, 3x3 and 1x1 of 16 bits from or to a few channels, not upsampled.
#include "affine.cuh"
#include "gemm.cuh"

enum Pass { FPROP, DGRAD, WGRAD };

struct Shape {
    int N, H, W, C, Ho, Wo, K, R, S, stride_h, stride_w, pad_h, pad_w;
    u32 inverse_h = inverse_of(stride_h), inverse_w = inverse_of(stride_w);

    __device__ __forceinline__ static u32 inverse_of(int stride) { return 0x7fffffffu / stride + 1; }  // ceil(2^31 / stride)
};

// The image x: one array, or under PAIR two.
struct Sources {
    const T *x, *x2;
    int C, C1;
    __device__ __forceinline__ const T* at(int pixel, int c) const {
        if (PAIR && c >= C1) return x2 + (i64)pixel * (C - C1) + c - C1;
        return x + (i64)pixel * (PAIR ? C1 : C) + c;
    }
};

// i / stride for 0 <= i < 2^15, by a multiplication. Each copy of 16 bytes needs two: real divisions would take more
// instructions.
__device__ __forceinline__ int divided(int i, u32 inverse) { return (u64)(u32)i * inverse >> 31; }

// The pixels of an image that the taps of the convolution read for one pixel of the result (of dout in WGRAD).
struct Window {
    int row, column, image;  // row and column under tap (0, 0); the image's first pixel

    __device__ __forceinline__ bool at(int r, int s, const Shape& shape, int& pixel) const {
        int y = (PASS == DGRAD ? row - r : row + r) >> UPSAMPLE, x = (PASS == DGRAD ? column - s : column + s) >> UPSAMPLE;
        int height = PASS == DGRAD ? shape.Ho : shape.H, width = PASS == DGRAD ? shape.Wo : shape.W;
        bool inside = y >= 0 && x >= 0;
        if constexpr (DILATED) {
            int whole_y = y, whole_x = x;
            y = divided(y, shape.inverse_h), x = divided(x, shape.inverse_w);
            inside = inside && y * shape.stride_h == whole_y && x * shape.stride_w == whole_x;
        }
        pixel = image + y * width + x;
        return inside && y < height && x < width;
    }
};

// Operand A of FPROP and DGRAD, K-major. A row is a pixel of the result, the depth is (r, s, channel).
template <bool VEC> struct PatchLoader {
    using Tile = ::Tile<true, BM>;
    const Sources image;
    const Shape& shape;
    Odometer tap;
    u32 corner[Tile::COPIES];  // row << 16 | column, as 16-bit signed numbers
    int start[Tile::COPIES];

    __device__ __forceinline__ PatchLoader(const Sources& image, const Shape& shape, int first, int k)
        : image(image), shape(shape), tap(k + Tile::chunk() * PACK, shape.S, image.C, BK) {
        int height = PASS == DGRAD ? shape.H : shape.Ho, width = PASS == DGRAD ? shape.W : shape.Wo;
        int pixels = PASS == DGRAD ? shape.Ho * shape.Wo : shape.H * shape.W;
#pragma unroll
        for (int i = 0; i < Tile::COPIES; i++) {
            int m = first + Tile::first_row() + i * Tile::ROW_STEP, n = m / (height * width);
            int h = m / width % height, w = m % width;
            int row = PASS == DGRAD ? h + shape.pad_h : h * shape.stride_h - shape.pad_h;
            int column = PASS == DGRAD ? w + shape.pad_w : w * shape.stride_w - shape.pad_w;
            corner[i] = n < shape.N ? (u32)row << 16 | (column & 0xffff) : 0x80008000u;  // far outside
            start[i] = n * pixels;
        }
    }
    __device__ __forceinline__ void load(u32 tile) {
        Odometer at = tap;
#pragma unroll 2
        for (int e = 0; e < (VEC ? 1 : PACK); e++, at.next())
#pragma unroll
            for (int i = 0; i < Tile::COPIES; i++) {
                Window window = {(int)corner[i] >> 16, (short)corner[i], start[i]};
                int pixel;
                bool inside = window.at(at.high, at.middle, shape, pixel) && at.high < shape.R;
                copy<VEC>(Tile::target(tile, i), e, image.at(pixel, at.low), inside);
            }
        tap.advance();
    }
};

// Operand B of DGRAD. A row is a depth (r, s, k), and c is contiguous.
template <bool VEC> struct WeightLoader {
    using Tile = ::Tile<false, BN>;
    const T* weight;
    i64 pitch;  // from one k to the next
    int channels, left;
    Odometer row;  // high: past the last tap, middle: tap, low: k

    __device__ __forceinline__ WeightLoader(const T* weight, const Shape& shape, int first, int k)
        : pitch((i64)shape.R * shape.S * shape.C), channels(shape.C),
          row(k + Tile::first_row(), shape.R * shape.S, shape.K, Tile::ROW_STEP) {
        int c = first + Tile::chunk() * PACK;
        this->weight = weight + c, left = channels - c;
    }
    __device__ __forceinline__ void load(u32 tile) {
        Odometer at = row;
#pragma unroll 2
        for (int e = 0; e < (VEC ? 1 : PACK); e++) {
            at = row;
#pragma unroll
            for (int i = 0; i < Tile::COPIES; i++, at.advance()) {
                const T* source = weight + at.low * pitch + at.middle * channels + e;
                copy<VEC>(Tile::target(tile, i), e, source, at.high == 0 && e < left);
            }
        }
        row = at;
    }
};

// Operand B of WGRAD. A row is a depth (n, ho, wo), and (r, s, c) is contiguous.
template <bool VEC> struct PixelLoader {
    using Tile = ::Tile<false, BN>;
    const Sources x;
    const Shape& shape;
    Odometer tap, pixel;

    __device__ __forceinline__ PixelLoader(const Sources& x, const Shape& shape, int first, int k)
        : x(x), shape(shape), tap(first + Tile::chunk() * PACK, shape.S, shape.C, 0),
          pixel(k + Tile::first_row(), shape.Ho, shape.Wo, Tile::ROW_STEP) {}
    __device__ __forceinline__ void load(u32 tile) {
        Odometer from = tap, at = pixel;
#pragma unroll 2
        for (int e = 0; e < (VEC ? 1 : PACK); e++, from.next()) {
            at = pixel;
#pragma unroll
            for (int i = 0; i < Tile::COPIES; i++, at.advance()) {
                Window window = {at.middle * shape.stride_h - shape.pad_h, at.low * shape.stride_w - shape.pad_w, at.high * shape.H * shape.W};
                int place;
                bool inside = window.at(from.high, from.middle, shape, place) && from.high < shape.R && at.high < shape.N;
                copy<VEC>(Tile::target(tile, i), e, x.at(place, from.low), inside);
            }
        }
        pixel = at;
    }
};

// The epilogue of NORM: write d_preact and its sums. The operands' tiles are no longer needed; the norm's maps take their
// place.
__device__ __forceinline__ void store_d_preact(const Accumulators& acc, const Output& output, int m, int n, const T* x, const T* x2,
                                         int C1, AFFINE) {
    static_assert(!NORM || sizeof(OUT) == sizeof(T), "d_preact is stored as the norm's input is");
    extern __shared__ __align__(1024) u8 shared[];
    struct Maps { float centre[WM * BN], gain[WM * BN], offset[WM * BN]; };  // of the channels of each warp's rows
    Maps& maps = *reinterpret_cast<Maps*>(shared);
    int row_tiles = output.rows / Output::ROWS, first = m / Output::ROWS, C = output.columns;
    cp_async_wait<0>();
    __syncthreads();
    for (int i = threadIdx.x; i < WM * BN; i += THREADS) {
        int row_tile = first + i / BN, image = row_tile * Output::ROWS / output.rows_per_image, c = n + i % BN;
        if (row_tile >= row_tiles || c >= C) continue;
        int group = image * groups + c / (C / groups);
        float2 map = affine_of(Modulation(image, c, C, weight, bias, scale, shift), mean[group], rstd[group]);
        maps.centre[i] = centre_of(mean[group]), maps.gain[i] = map.x, maps.offset[i] = map.y;
    }
    __syncthreads();
    int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, row_tile = first + warp / WN;
    if (row_tile >= row_tiles) return;
    m = row_tile * Output::ROWS + (lane >> 2);
#pragma unroll
    for (int j = 0; j < NI; j++) {
        int in_tile = warp % WN * (BN / WN) + j * 8 + (lane & 3) * 2, c = n + in_tile, place = warp / WN * BN + in_tile;
        bool inside = c < C;
        const T* source = c < C1 ? x + c : x2 + c - C1;
        int pitch = c < C1 ? C1 : C - C1;
        float2 centre = *(const float2*)&maps.centre[place], gain = *(const float2*)&maps.gain[place],
               offset = *(const float2*)&maps.offset[place], total[2] = {};
        Output::Pair read[2 * MI];
#pragma unroll
        for (int i = 0; i < 2 * MI; i++)
            read[i] = inside ? *reinterpret_cast<const Output::Pair*>(source + (i64)(m + i * 8) * pitch) : Output::Pair{};
#pragma unroll
        for (int i = 0; i < 2 * MI; i++) {
            float2 d_preact = make_float2(acc[i / 2][j][i % 2 * 2], acc[i / 2][j][i % 2 * 2 + 1]);
            float2 other = make_float2(to_float(read[i].first) - centre.x, to_float(read[i].second) - centre.y);
            if (NORM == 1) d_preact.x *= silu_slope(fmaf(gain.x, other.x, offset.x));
            if (NORM == 1) d_preact.y *= silu_slope(fmaf(gain.y, other.y, offset.y));
            total[0].x += d_preact.x, total[0].y += d_preact.x * other.x;
            total[1].x += d_preact.y, total[1].y += d_preact.y * other.y;
            Output::Pair rounded = {from_float<OUT>(d_preact.x), from_float<OUT>(d_preact.y)};
            if (inside) *reinterpret_cast<Output::Pair*>(output.out + (m + i * 8) * output.ld + c) = rounded;
        }
#pragma unroll
        for (int e = 0; e < 2; e++) output.leave<false>(total[e], 0.0f, row_tile, c + e);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
conv2d(const T* a, const T* b, const float* bias, const float* emb, const OUT* addend, OUT* destination, i64 ldo,
       int rows_per_image, int k_tiles, int N, int H, int W, int C, int Ho, int Wo, int K, int R, int S, int stride_h,
       int stride_w, int pad_h, int pad_w, const T* x2, int C1, void* sums, const T* normed, const float* norm_weight,
       const float* norm_bias, const float* scale, const float* shift, const float* mean, const float* rstd, int groups) {
    wait_for_previous();
    const Shape shape = {N, H, W, C, Ho, Wo, K, R, S, stride_h, stride_w, pad_h, pad_w};
    int taps = R * S, pixels = PASS == DGRAD ? H * W : Ho * Wo;
    int rows = PASS == WGRAD ? K : N * pixels;
    int columns = PASS == FPROP ? K : PASS == DGRAD ? C : taps * C;
    int depth = PASS == FPROP ? taps * C : PASS == DGRAD ? taps * K : N * pixels;
    int tiles_n = CEIL_DIV(columns, BN);
    int m0 = blockIdx.x / tiles_n * BM, n0 = blockIdx.x % tiles_n * BN, k0 = blockIdx.y * k_tiles * BK;
    k_tiles = min(k_tiles, CEIL_DIV(depth - k0, BK));
    Accumulators acc = {};
    if constexpr (PASS == FPROP) {
        PatchLoader<A_VEC> load_a({a, x2, C, C1}, shape, m0, k0);
        MatrixLoader<true, BN, B_VEC> load_b(b, depth, n0, K, k0, depth);
        multiply(acc, load_a, load_b, k_tiles);
    } else if constexpr (PASS == DGRAD) {
        PatchLoader<A_VEC> load_a({a, nullptr, K, K}, shape, m0, k0);
        WeightLoader<B_VEC> load_b(b, shape, n0, k0);
        multiply(acc, load_a, load_b, k_tiles);
    } else {
        MatrixLoader<false, BM, A_VEC> load_a(a, K, m0, K, k0, depth);
        PixelLoader<B_VEC> load_b({b, x2, C, C1}, shape, n0, k0);
        multiply(acc, load_a, load_b, k_tiles);
    }
    destination += (i64)blockIdx.y * rows * ldo;
    if constexpr (PASS != FPROP) emb = nullptr;  // it is null anyway; the compiler now removes the code that reads it
    Output output = {destination, bias, emb, addend, rows, columns, ldo, rows_per_image, sums};
    if constexpr (NORM)
        store_d_preact(acc, output, m0, n0, normed, x2, C1, norm_weight, norm_bias, scale, shift, mean, rstd, groups);
    else output.store<PASS == FPROP && sizeof(OUT) == sizeof(T)>(acc, m0, n0);
}
