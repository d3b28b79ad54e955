// Dropout's masks. A mask has a bit for every element: bit j of byte i of a row, such as an image, says whether the row's
// element 8 * i + j is kept. A row of `size` elements has ceil(size / 8) bytes.
#pragma once
#include "philox.cuh"

// seed, stream, step: see cudiff/ops/random.py. first: the sample of row 0. An element is dropped where its half of a word is
// below `threshold`.
#define DRAWS const u32* step, u64 seed, u32 stream, u32 first, u32 threshold

// Byte i of row n.
__device__ __forceinline__ u32 draw_byte(u32 i, int n, u32 step, u64 seed, u32 stream, u32 first, u32 threshold) {
    uint4 words = philox(i, first + n, step, stream, seed);
    u32 word[4] = {words.x, words.y, words.z, words.w}, kept = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        kept |= ((word[j] & 0xffff) >= threshold) << 2 * j;
        kept |= (word[j] >> 16 >= threshold) << (2 * j + 1);
    }
    return kept;
}

// The bits of the elements of a byte from e of row n on. `mask` is the row's. Who has the byte's first element stores it.
__device__ __forceinline__ u32 draw_mask(u8* mask, i64 e, int n, u32 step, u64 seed, u32 stream, u32 first, u32 threshold) {
    u32 byte = draw_byte(e >> 3, n, step, seed, stream, first, threshold);
    if (e % 8 == 0) mask[e >> 3] = byte;
    return byte >> e % 8;
}
__device__ __forceinline__ u32 load_mask(const u8* mask, i64 e) { return mask[e >> 3] >> e % 8; }

// The mask of row n, of `size` elements.
__device__ __forceinline__ u8* row_of(u8* mask, int n, i64 size) { return mask + n * ((size + 7) >> 3); }
__device__ __forceinline__ const u8* row_of(const u8* mask, int n, i64 size) { return row_of(const_cast<u8*>(mask), n, size); }

// v, times `scale` where it is kept, else 0.
template <int V> __device__ __forceinline__ void drop(u32 kept, float scale, float (&v)[V]) {
#pragma unroll
    for (int k = 0; k < V; k++) v[k] = kept >> k & 1 ? v[k] * scale : 0.0f;
}

// A thread's bits of `count` packs of up to 8 elements, `pitch` elements apart. Each is read while the pack before it is worked on.
struct MaskReader {
    const u8* mask;  // the row's
    i64 next;
    int pitch, left;
    u32 ahead = 0;
    __device__ __forceinline__ MaskReader(const u8* mask, i64 e, int pitch, int count)
        : mask(mask), next(e), pitch(pitch), left(count) {
        fetch();
    }
    __device__ __forceinline__ void fetch() {
        if (left > 0) ahead = load_mask(mask, next);
        next += pitch, left--;
    }
    __device__ __forceinline__ u32 take() {
        u32 kept = ahead;
        fetch();
        return kept;
    }
};
