// Random fills: out (rows, size), row-major, overwritten. normal and uniform write float32, randint int32.
//
// Element e of row n is lane e % 4 of Philox counter (e / 4, first + n, step, stream) under the key `seed`. seed (low
// word, high word), step and first are read from their pointers where these are not null: a captured graph sees them move.
// One thread makes 4 elements: launch at least rows * ceil(size / 4) threads, one-dimensional.
#include "philox.cuh"

struct Group { i64 row, start; int count; uint4 bits; };

#define COUNTER u64 seed, const u32* seed_pointer, u32 stream, u32 step, const u32* step_pointer, u32 first, const u32* first_pointer
#define COUNTED seed, seed_pointer, stream, step, step_pointer, first, first_pointer

// The four random words this thread turns into elements [start, start + count) of `row`; count is 0 past the end.
__device__ __forceinline__ Group draw(i64 rows, i64 size, COUNTER) {
    i64 groups = CEIL_DIV(size, 4);
    i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    Group group;
    group.row = index / groups;
    i64 c0 = index - group.row * groups;
    group.start = 4 * c0;
    group.count = group.row < rows ? (int)min((i64)4, size - group.start) : 0;
    if (seed_pointer) seed = seed_pointer[0] | (u64)seed_pointer[1] << 32;
    if (step_pointer) step = *step_pointer;
    if (first_pointer) first = *first_pointer;
    group.bits = philox((u32)c0, first + (u32)group.row, step, stream, seed);
    return group;
}

template <typename T>
__device__ __forceinline__ void store(T* out, i64 size, const Group& group, T x0, T x1, T x2, T x3) {
    T* p = out + group.row * size + group.start;
    if (group.count > 0) p[0] = x0;
    if (group.count > 1) p[1] = x1;
    if (group.count > 2) p[2] = x2;
    if (group.count > 3) p[3] = x3;
}

extern "C" __global__ void normal(float* out, i64 rows, i64 size, COUNTER) {
    wait_for_previous();
    Group group = draw(rows, size, COUNTED);
    float2 a = to_normal(group.bits.x, group.bits.y), b = to_normal(group.bits.z, group.bits.w);
    store(out, size, group, a.x, a.y, b.x, b.y);
}

extern "C" __global__ void uniform(float* out, i64 rows, i64 size, COUNTER) {
    wait_for_previous();
    Group group = draw(rows, size, COUNTED);
    uint4 bits = group.bits;
    store(out, size, group, to_uniform(bits.x), to_uniform(bits.y), to_uniform(bits.z), to_uniform(bits.w));
}

// low + (bits * width >> 32), width at most 2^32.
__device__ __forceinline__ int to_integer(u32 bits, int low, u64 width) { return (int)((u32)low + (u32)((bits * width) >> 32)); }

extern "C" __global__ void randint(int* out, i64 rows, i64 size, COUNTER, int low, u64 width) {
    wait_for_previous();
    Group group = draw(rows, size, COUNTED);
    uint4 bits = group.bits;
    store(out, size, group, to_integer(bits.x, low, width), to_integer(bits.y, low, width), to_integer(bits.z, low, width),
          to_integer(bits.w, low, width));
}

// The next step: one thread.
extern "C" __global__ void advance(u32* step) {
    wait_for_previous();
    *step += 1;
}
