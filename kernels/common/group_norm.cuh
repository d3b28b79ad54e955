// What the group norm kernels share: elements as floats, and a thread's channels: their affine maps and SiLU.
#pragma once
#include "affine.cuh"
#include "vector.cuh"

constexpr int V = VEC ? Pack<T>::SIZE : 1;

// V elements as they lie in memory. They are held as 32-bit words: copying 16-bit elements would take an instruction each.
template <bool> struct Chosen { typedef uint4 Raw; };
template <> struct Chosen<false> { typedef T Raw; };
typedef Chosen<VEC>::Raw Raw;
__device__ __forceinline__ Raw load_raw(const T* p) { return *reinterpret_cast<const Raw*>(p); }

// The elements of a word as floats. bf16 takes one instruction each; to take the upper half as a 16-bit number would take two.
template <typename S> __device__ void split(u32 word, float* values);
template <> __device__ __forceinline__ void split<float>(u32 word, float* values) { values[0] = __uint_as_float(word); }
template <> __device__ __forceinline__ void split<bf16>(u32 word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000);
}
template <> __device__ __forceinline__ void split<half>(u32 word, float* values) {
    values[0] = to_float(half{(u16)word});
    values[1] = to_float(half{(u16)(word >> 16)});
}
__device__ __forceinline__ void to_floats(T raw, float* values) { values[0] = to_float(raw); }
__device__ __forceinline__ void to_floats(const uint4& raw, float* values) {
    u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int k = 0; k < 4; k++) split<T>(words[k], values + k * (4 / sizeof(T)));
}

// One channel of the block's chunk, whose map this thread prepares for the whole block; `here` if there is one for it. Many
// threads work on the same V channels. If each read their parameters itself, that cost as many instructions as a dozen pixels.
struct Channel {
    int j, c, group;  // its number in the chunk, its number among all channels, its group
    bool here;
    Modulation own;
    __device__ __forceinline__ Channel(int n, int c0, int width, int C, int size, const float* weight, const float* bias,
                                       const float* scale, const float* shift) {
        j = threadIdx.x, c = c0 + j, group = c / (u32)size;
        here = j < width && c < C;
        if (here) own = Modulation(n, c, C, weight, bias, scale, shift);
    }
};

// SCALE * z = gain * (x - centre) + offset for V channels. fill() writes a Channel's map to a table in shared memory, three
// rows of `width` floats; the constructor reads V of them.
struct Affine {
    float centre[V], gain[V], offset[V];
    __device__ __forceinline__ static void fill(float* table, int width, const Channel& channel, float mean, float rstd) {
        float2 map = affine_of(channel.own, mean, rstd);
        table[channel.j] = mean;
        table[width + channel.j] = map.x;
        table[2 * width + channel.j] = map.y;
    }
    __device__ __forceinline__ Affine(const float* table, int width, int first) {
        load<V>(table + first, centre);
        load<V>(table + width + first, gain);
        load<V>(table + 2 * width + first, offset);
#pragma unroll
        for (int k = 0; k < V; k++) centre[k] = centre_of(centre[k]);
    }
};

// v holds x. Replaces it by x - centre, and computes y and its derivative `slope` = dy/dz.
__device__ __forceinline__ void linearize(const Affine& affine, float (&v)[V], float (&y)[V], float (&slope)[V], bool silu) {
#pragma unroll
    for (int k = 0; k < V; k++) {
        v[k] -= affine.centre[k];
        activate(fmaf(affine.gain[k], v[k], affine.offset[k]), silu, y[k], slope[k]);
    }
}
// v holds x. Replaces it by y.
__device__ __forceinline__ void apply(const Affine& affine, float (&v)[V], bool silu) {
    float y[V], slope[V];
    linearize(affine, v, y, slope, silu);
#pragma unroll
    for (int k = 0; k < V; k++) v[k] = y[k];
}
