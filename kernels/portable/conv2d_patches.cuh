// Patches of an image of few channels in shared memory, and the weights that they are multiplied by. The constants are those of
// conv2d_few_channels.cu, which includes it behind them.
#pragma once
#include "common.cuh"

// The place of the weight of (tap, j, c): an offset and strides. `tap` is negative where the taps are reversed.
struct Weight {
    int first, tap, few, many;
    __device__ __forceinline__ int at(int d, int c) const { return first + d / FEW * tap + d % FEW * few + c * many; }
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

// A number of few, as an operand of a product: rounded to T.
__device__ __forceinline__ T operand(T x) { return x; }
template <typename U> __device__ __forceinline__ T operand(U x) { return from_float<T>(to_float(x)); }

// Walks from a pixel of a tile to those that follow at a fixed distance, without a division for each.
struct Walk {
    int y, x, down, across, W;
    __device__ __forceinline__ Walk(int m, int distance, int W) : y(m / W), x(m % W), down(distance / W), across(distance % W), W(W) {}
    __device__ __forceinline__ void advance() {
        y += down, x += across;
        if (x >= W) x -= W, y++;
    }
};

// Number e = x * FEW + j of row `y` of few, or zero outside the image and where not `wanted`.
__device__ __forceinline__ T around(const FEW_T* image, int y, int e, int H, int W, bool wanted) {
    return wanted && y >= 0 && y < H && e >= 0 && e < W * FEW ? operand(image[(i64)y * W * FEW + e]) : T{};
}

constexpr int AT_ONCE = 8;  // numbers of few that a thread loads before it stores the first

// For expand: few's rows under a tile's patches in shared memory, with zeros around the image. There are COPIES of them.
struct Patches {
    T* values;
    int pitch, size;

    __device__ __forceinline__ Patches(const FEW_T* few, const Tile& tile, int H, int W)
        : values((T*)dynamic), pitch(CEIL_DIV((W + 2 * HALO) * FEW, 2) * 2), size((tile.rows + 2 * HALO) * pitch) {
        few += (i64)tile.n * H * W * FEW;
        Walk walk(threadIdx.x, THREADS, pitch);
#pragma unroll 1
        for (int first = threadIdx.x; first < size; first += AT_ONCE * THREADS) {
            T numbers[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++, walk.advance())
                numbers[k] = around(few, tile.top + walk.y - HALO, walk.x - HALO * FEW, H, W, first + k * THREADS < size);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++) {
                int i = first + k * THREADS;
                if (i >= size) continue;
                values[i] = numbers[k];
                if (COPIES > 1 && i > 0) values[size + i - 1] = numbers[k];
            }
        }
    }
    // Where the patch of pixel (y, x) of the tile begins. Row r of the patch lies r pitches further on.
    __device__ __forceinline__ int corner(int y, int x) const { return y * pitch + x * FEW; }
};

// For wgrad, the patches transposed: the d-th numbers of the patches of all pixels in row y of the tile are contiguous.
struct TransposedPatches {
    static constexpr int COUNT = R * FEW;  // numbers of a patch in one row of few: one for each (s, j)
    T* values;
    int pitch;

    __device__ __forceinline__ TransposedPatches(const FEW_T* few, const Tile& tile, int H, int W, int width, int pitch)
        : values((T*)dynamic), pitch(pitch) {
        few += (i64)tile.n * H * W * FEW;
        int across = (width + 2 * HALO) * FEW;
        Walk ahead(threadIdx.x, THREADS, across), walk = ahead;
        int size = (tile.rows + 2 * HALO) * across;
#pragma unroll 1
        for (int first = threadIdx.x; first < size; first += AT_ONCE * THREADS) {
            T numbers[AT_ONCE];
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++, ahead.advance())
                numbers[k] = around(few, tile.top + ahead.y - HALO, ahead.x - HALO * FEW, H, W, first + k * THREADS < size);
#pragma unroll
            for (int k = 0; k < AT_ONCE; k++, walk.advance()) {
                if (first + k * THREADS >= size) continue;
                T* target = values + (walk.y * COUNT + walk.x % FEW) * pitch;
#pragma unroll
                for (int s = 0; s < R; s++) {
                    int x = walk.x / FEW - s;
                    if (x >= 0 && x < width) target[s * FEW * pitch + x] = numbers[k];
                }
            }
        }
    }
    __device__ __forceinline__ const T* at(int y, int d) const { return values + (y * COUNT + d) * pitch; }
};

// For expand: this thread's share of the weights of the block's channels, from `channel` on. All are loaded at once. In shared
// memory each channel has a row of EXPAND_PITCH, in the order of a patch's words.
struct Weights {
    static constexpr int COUNT = BN * EXPAND_STEPS * 16 / THREADS;
    T own[COUNT];
    bool by_channel;  // whether neighbouring threads have weights of one channel, else of neighbours: as they lie in memory

    __device__ __forceinline__ void place(int k, int& c, int& d) const {
        int i = k * THREADS + threadIdx.x;
        c = by_channel ? i / (EXPAND_STEPS * 16) : i % BN, d = by_channel ? i % (EXPAND_STEPS * 16) : i / BN;
    }
    __device__ __forceinline__ Weights(const T* weight, const Weight& at, int channel) : by_channel(at.many != 1) {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            int c, d;
            place(k, c, d);
            int row = d / (2 * ROW_PAIRS), e = d % (2 * ROW_PAIRS);
            own[k] = row < R && e < R * FEW ? weight[at.at(row * R * FEW + e, channel + c)] : T{};
        }
    }
    __device__ __forceinline__ void store(T* weights) const {
#pragma unroll
        for (int k = 0; k < COUNT; k++) {
            int c, d;
            place(k, c, d);
            weights[c * EXPAND_PITCH + d] = own[k];
        }
    }
};
