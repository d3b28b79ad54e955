// The epilogue of conv2d_sm90: a warpgroup finishes the results of an output tile. It adds what is added to the products, rounds,
// sums, and writes the results to shared memory. A thread has two channels, in pairs of neighbouring pixels. The constants are those
// of conv2d_sm90.cu, which includes it behind them.
#pragma once
#include "affine.cuh"
#include "channel_statistics.cuh"
#include "wgmma.cuh"

typedef StatisticsOf<T>::Type Statistics;
constexpr int OFFSETS = SKIP ? 1 : IMAGES;  // without emb they are all the same

// A thread's place in its warpgroup.
struct Place {
    int warp, lane;
    u32 at_result;  // its row for ldmatrix and stmatrix; of floats its first pixel and channel
    __device__ __forceinline__ Place(u32 result) : warp(threadIdx.x / 32 % 4), lane(threadIdx.x % 32), at_result(result) {
        if constexpr (LOW) {
            at_result += (lane / 16 * 8 + lane % 8) * ROW_BYTES + ((warp * 2 + lane / 8 % 2 ^ lane % 8) << 4);
        } else {
            int pixel = lane % 4 * 2, chunk = warp % 2 * 4 + lane / 16;
            at_result += warp / 2 * CHUNK_BYTES + pixel * ROW_BYTES + ((chunk ^ pixel) << 4) + lane / 4 % 4 * 4;
        }
    }
    // Its i-th channel, of the tile's 64 from k0 on.
    __device__ __forceinline__ int channel(int k0, int i) const { return k0 + warp * 16 + i * 8 + lane / 4; }
};

// The norm's maps of 64 channels of each image of a tile, by a warpgroup.
__device__ __forceinline__ void fill_maps(float2* maps, int n0, int images, int k0, int K, const float* weight, const float* bias,
                                          const float* scale, const float* shift, const float* mean, const float* rstd,
                                          int groups) {
    for (int j = threadIdx.x % 128; j < images * 64; j += 128) {
        int n = n0 + j / 64, k = k0 + j % 64;
        if (k >= K) continue;
        int group = n * groups + k / (K / groups);
        maps[j] = affine_of(Modulation(n, k, K, weight, bias, scale, shift), mean[group], rstd[group]);
    }
}

constexpr bool READS_BIASES = SKIP || STREAM_K;  // for each tile: SKIP is short of registers

// What is added to this thread's two channels of each image of a tile. biases: of these channels, unless READS_BIASES.
__device__ __forceinline__ void load_offsets(float (&offset)[OFFSETS][2], const float (&biases)[2], const Place& place, int n,
                                             int images, int k0, int K, const float* bias, const float* skip_bias,
                                             const float* emb) {
#pragma unroll
    for (int i = 0; i < OFFSETS * 2; i++) {
        int image = i / 2, k = place.channel(k0, i % 2);
        float& sum = offset[image][i % 2];
        sum = biases[i % 2];
        if (READS_BIASES && bias && k < K) sum = bias[k];
        if (SKIP && skip_bias && k < K) sum += skip_bias[k];
        if (!SKIP && emb && k < K && image < images) sum += emb[(n + image) * K + k];
    }
}

// How much of a tile lies inside of its images.
struct Inside {
    int images, rows;  // images that there are; rows of an image, from the first that this block finishes
    int pixels;        // WHOLE_ROWS: pixels from the thread's first on
    int w, W, pitch;   // the column of the thread's pixel, of W; pixels from a row to the next
};

// Adds a value to the sums: under NORM `other` is the norm's input, else it is the value itself.
__device__ __forceinline__ void add(RawStatistics& total, float v, float other) { total.sum += v, total.square += v * other; }
__device__ __forceinline__ void add(CentredStatistics& total, float v, float) { total.add(v); }

// The sums of one image of a tile, of the thread's two channels.
struct TileSums {
    Statistics* sums;
    i64 first;  // the place in `sums`, counted in rows of K, of the tile's first image
    int k0, K, images;
    Statistics total[2] = {};
    // Adds up the warp's sums of the i-th channel, stores them as those of `image`, and begins the next image's.
    __device__ __forceinline__ void leave(const Place& place, int image, int i) {
#pragma unroll
        for (int other = 1; other < 4; other *= 2) total[i].add(shuffle(total[i], other));
        int k = place.channel(k0, i);
        if (place.lane % 4 == 0 && k < K && image < images) sums[(first + image * CLUSTER) * K + k] = total[i];
        total[i] = {};
    }
};

__device__ __forceinline__ float2 relu(float2 v) { return make_float2(v.x < 0.0f ? 0.0f : v.x, v.y < 0.0f ? 0.0f : v.y); }

// Finishes the SHARE rows at the beginning of `acc`: v + offset, or under SLOPE v · silu'(z) with z by `norm_maps`, those of each
// image's 64 channels. Leaves the sums of all images but the last.
__device__ __forceinline__ void finish_rows(const float (&acc)[PIXELS / 2], float (&offset)[OFFSETS][2], const float2* norm_maps,
                                            const Place& place, Inside inside, TileSums& sums) {
    float gain[2] = {};
    u32 ahead[4] = {};  // the next two rows' words: a step does not wait for a read of its own
    if constexpr (LOW && READS) ldmatrix_transposed(ahead, place.at_result);
#pragma unroll
    for (int row = 0; row < SHARE; row += 2) {
        u32 words[4];  // two pixels each, alternately of two channels; two words a row
        u32 at_row = place.at_result + row * 8 * ROW_BYTES;
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = ahead[i];
        if constexpr (LOW && READS)
            if (row + 2 < SHARE) ldmatrix_transposed(ahead, at_row + 16 * ROW_BYTES);
#pragma unroll
        for (int i = 0; i < 4 && row + i / 2 < SHARE; i++) {
            int image = min((row + i / 2) / IMAGE_ROWS, IMAGES - 1);
            bool begins_image = row + i / 2 == image * IMAGE_ROWS;
            float& beside = offset[image % OFFSETS][i % 2];
            if (SUMS && begins_image && image > 0) sums.leave(place, image - 1, i % 2);
            if (SLOPE && begins_image) {
                float2 map = norm_maps[place.channel(image * 64, i % 2)];
                gain[i % 2] = map.x, beside = map.y;
            }
            const float* products = acc + 4 * row + 2 * i;
            float2 v = make_float2(products[0], products[1]), other;
            if constexpr (NORM) {
                other = unpack_pair<T>(words[i]);
                if (SLOPE) v.x *= silu_slope(fmaf(gain[i % 2], other.x, beside));
                if (SLOPE) v.y *= silu_slope(fmaf(gain[i % 2], other.y, beside));
                words[i] = pack_pair<T>(v.x, v.y);
            } else {
                v.x += beside, v.y += beside;
                if constexpr (LOW) {
                    float2 more = ADDS ? unpack_pair<T>(words[i]) : make_float2(0.0f, 0.0f);
                    v.x += more.x, v.y += more.y;
                    if (RELU) v = relu(v);
                    words[i] = pack_pair<T>(v.x, v.y);
                    v = unpack_pair<T>(words[i]);
                } else {
                    u32 first = (at_row ^ i % 2 * 32) + i / 2 * 8 * ROW_BYTES, second = (first ^ 16) + ROW_BYTES;
                    if (ADDS) v.x += __uint_as_float(load_shared(first)), v.y += __uint_as_float(load_shared(second));
                    if (RELU) v = relu(v);
                    store_shared(first, v.x), store_shared(second, v.y);
                }
                other = v;
            }
            bool counts = SUMS && image < inside.images && row + i / 2 - image * IMAGE_ROWS < inside.rows, next = counts;
            int& w = inside.w, pixel = (row + i / 2) * 8;
            if (WHOLE_ROWS) counts = SUMS && pixel < inside.pixels, next = SUMS && pixel + 1 < inside.pixels;
            if (counts && w < inside.W) add(sums.total[i % 2], v.x, other.x);  // branches for both pixels took 3 % of a step
            if (next && (w + 1 < inside.W || (WHOLE_ROWS && w + 1 == inside.pitch))) add(sums.total[i % 2], v.y, other.y);
            if (WHOLE_ROWS && i % 2 == 1) w = w + 8 < inside.pitch ? w + 8 : w + 8 - inside.pitch;
        }
        if constexpr (LOW) stmatrix_transposed(at_row, words);
    }
}
