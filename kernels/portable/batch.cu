// A training batch: x, T (batch, height, width, channels), and its labels.
//
//   draw_batch        samples of uint8 images, as numbers in [-1, 1].
//   draw_latents      samples of latents, T, unchanged but as float: x is float here.
//   normalize_images  only x, from n elements of uint8 images that are a batch already.
//
// draw_batch and draw_latents draw samples first, first + 1, ... of the `of` samples of a step. Sample s has count =
// *step * of + s. Its image is shuffled_index(count % n, epoch count / n) of cudiff/ops/batch.py, here with the same bits. With
// `flip` it is mirrored where the top bit of Philox counter (0, count, stream) is set. x and out_labels are overwritten; labels
// and out_labels may be null. Launch: (ceil(pixels * channels / 1024), batch), any block.
// normalize_images: one thread makes a pack, or with VEC=0 an element. VEC=1: n and the address of images are multiples of a
// pack's elements, x's address of its 16 bytes.
#include "philox.cuh"
#include "vector.cuh"

#define GOLDEN 0x9E3779B9u

__device__ __forceinline__ u32 mix32(u32 x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

// A Feistel network over `bits` bits, repeated until its result lies in [0, n): see shuffled_index. Each round starts from the
// result of the one before, so that an index in [0, n) always leads to one in [0, n).
__device__ __forceinline__ u32 shuffled_index(u32 index, i64 n, int bits, u32 key) {
    int low = (bits + 1) / 2;
    u32 right_mask = (1u << low) - 1, left_mask = (1u << (bits - low)) - 1;
    do {
        u32 left = index >> low, right = index & right_mask;
#pragma unroll
        for (u32 r = 0; r < 8; r += 2) {
            left ^= mix32(right ^ (key + r * GOLDEN)) & left_mask;
            right ^= mix32(left ^ (key + (r + 1) * GOLDEN)) & right_mask;
        }
        index = left << low | right;
    } while (index >= n);
    return index;
}

// A byte in [-1, 1].
__device__ __forceinline__ float unit(u8 byte) { return (float)byte / 127.5f - 1.0f; }

__device__ __forceinline__ float number(u8 byte) { return unit(byte); }
__device__ __forceinline__ float number(T latent) { return to_float(latent); }

template <typename Out, typename In>
__device__ __forceinline__ void draw(Out* x, int* out_labels, const In* images, const int* labels, const u32* step, u32 first, u32 of, i64 n,
                                     int height, int width, int channels, int bits, u32 order_key, u64 seed, u32 stream, int flip) {
    int i = blockIdx.y, size = height * width * channels;
    u64 count = (u64)*step * of + first + i;
    u64 epoch = count / n;
    u32 index = shuffled_index((u32)(count - epoch * n), n, bits, mix32(order_key ^ (u32)epoch));
    if (flip) flip = philox(0, (u32)count, (u32)(count >> 32), stream, seed).x >> 31;
    if (labels && blockIdx.x == 0 && threadIdx.x == 0) out_labels[i] = labels[index];
    const In* image = images + (i64)index * size;
    for (int e = blockIdx.x * blockDim.x + threadIdx.x; e < size; e += gridDim.x * blockDim.x) {
        int source = e;
        if (flip) {
            int pixel = e / channels, column = pixel % width;
            source = e + (width - 1 - 2 * column) * channels;
        }
        x[(i64)i * size + e] = from_float<Out>(number(image[source]));
    }
}

extern "C" __global__ void draw_batch(T* x, int* out_labels, const u8* images, const int* labels, const u32* step, u32 first, u32 of, i64 n,
                                      int height, int width, int channels, int bits, u32 order_key, u64 seed, u32 stream, int flip) {
    wait_for_previous();
    draw(x, out_labels, images, labels, step, first, of, n, height, width, channels, bits, order_key, seed, stream, flip);
}

extern "C" __global__ void draw_latents(float* x, int* out_labels, const T* latents, const int* labels, const u32* step, u32 first, u32 of, i64 n,
                                        int height, int width, int channels, int bits, u32 order_key, u64 seed, u32 stream, int flip) {
    wait_for_previous();
    draw(x, out_labels, latents, labels, step, first, of, n, height, width, channels, bits, order_key, seed, stream, flip);
}

extern "C" __global__ void normalize_images(T* __restrict__ x, const u8* __restrict__ images, i64 n) {
    wait_for_previous();
    constexpr int V = VEC ? Pack<T>::SIZE : 1;
    struct __align__(V) Bytes { u8 v[V]; };
    i64 i = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * V;
    if (i >= n) return;
    Bytes bytes = *reinterpret_cast<const Bytes*>(images + i);
    float values[V];
#pragma unroll
    for (int k = 0; k < V; k++) values[k] = unit(bytes.v[k]);
    store<V>(x + i, values);
}
