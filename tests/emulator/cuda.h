// What CUDA C has beside C++: qualifiers, vectors, intrinsics.
#pragma once
#include "threads.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))

typedef unsigned long long u64;

struct __align__(8) float2 { float x, y; };
struct __align__(16) float4 { float x, y, z, w; };
struct __align__(16) double2 { double x, y; };
struct __align__(16) ulonglong2 { u64 x, y; };
struct __align__(8) uint2 { unsigned x, y; };
struct __align__(16) uint4 { unsigned x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline double2 make_double2(double x, double y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

namespace emulator {
template <typename To, typename From> To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}
}  // namespace emulator
static inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
static inline float __int_as_float(int x) { return emulator::bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
static inline int __float_as_int(float x) { return emulator::bits<int>(x); }

template <typename A, typename B> inline auto min(A a, B b) { return b < a ? b : a; }
template <typename A, typename B> inline auto max(A a, B b) { return a < b ? b : a; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }
using std::isfinite;
static inline double cospi(double x) { return cos(M_PI * x); }
static inline void sincospif(float x, float* s, float* c) { *s = (float)sin(M_PI * (double)x), *c = (float)cos(M_PI * (double)x); }
#define __expf expf  // glibc has functions of this name
#define __logf logf
static inline float __fdividef(float x, float y) { return x / y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((u64)x * y >> 32); }
static inline u64 __umul64hi(u64 x, u64 y) { return (u64)((unsigned __int128)x * y >> 64); }
template <typename T> inline T __ldcg(const T* p) { return *p; }
template <typename T> inline void __stcg(T* p, T value) { *p = value; }
template <typename T> inline T __ldg(const T* p) { return *p; }
static inline void __threadfence() {}
static inline void __nanosleep(unsigned) { emulator::poll(); }
static inline unsigned __cvta_generic_to_shared(const void* p) { return (unsigned)((const unsigned char*)p - emulator::self->block->shared); }

template <typename T> inline T atomicAdd(T* p, T value) { T before = *p; *p += value; return before; }
template <typename T> inline T atomicMax(T* p, T value) { T before = *p; *p = max(before, value); return before; }
static inline unsigned atomicInc(unsigned* p, unsigned last) { unsigned before = *p; *p = before >= last ? 0 : before + 1; return before; }
static inline unsigned atomicAdd(unsigned* p, int value) { return atomicAdd(p, (unsigned)value); }

static inline void __syncthreads() { emulator::meet(emulator::self->block->barriers[0], emulator::self->block->alive); }
static inline void __syncwarp(unsigned mask = ~0u) { emulator::meet_lanes(nullptr, mask, [](const void* const*, uint32_t) {}); }

namespace emulator {
template <typename T> struct Shuffle { T value; int from; };
// Each lane gets the value of lane `from`; its own where that takes no part.
template <typename T> T shuffle(unsigned mask, T value, int from) {
    Shuffle<T> own{value, from};
    meet_lanes(&own, mask, [](const void* const* operands, uint32_t lanes) {
        T values[32];
        for (int i = 0; i < 32; i++)
            if (lanes >> i & 1) values[i] = ((const Shuffle<T>*)operands[i])->value;
        for (int i = 0; i < 32; i++)
            if (lanes >> i & 1) {
                Shuffle<T>& lane = *(Shuffle<T>*)operands[i];
                if (lanes >> (lane.from & 31) & 1) lane.value = values[lane.from & 31];
            }
    });
    return own.value;
}
}  // namespace emulator
template <typename T> inline T __shfl_sync(unsigned mask, T value, int from) { return emulator::shuffle(mask, value, from); }
template <typename T> inline T __shfl_xor_sync(unsigned mask, T value, int by) { return emulator::shuffle(mask, value, emulator::self->lane ^ by); }
template <typename T> inline T __shfl_up_sync(unsigned mask, T value, int by) {
    int lane = emulator::self->lane;
    return emulator::shuffle(mask, value, lane < by ? lane : lane - by);
}
static inline int __ffs(unsigned bits) { return __builtin_ffs((int)bits); }
static inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
// A thread that takes its vote back does so before it comes to the next call, where all threads meet.
static inline int __syncthreads_or(int holds) {
    int& votes = emulator::self->block->votes;
    votes += holds != 0;
    __syncthreads();
    int any = votes != 0;
    __syncthreads();
    votes -= holds != 0;
    return any;
}
static inline unsigned __ballot_sync(unsigned mask, int holds) {
    emulator::meet_lanes(&holds, mask, [](const void* const* operands, uint32_t lanes) {
        unsigned bits = 0;
        for (int i = 0; i < 32; i++)
            if (lanes >> i & 1) bits |= (unsigned)(*(const int*)operands[i] != 0) << i;
        for (int i = 0; i < 32; i++)
            if (lanes >> i & 1) *(int*)operands[i] = (int)bits;
    });
    return (unsigned)holds;
}
static inline unsigned __match_any_sync(unsigned mask, int value) {
    emulator::meet_lanes(&value, mask, [](const void* const* operands, uint32_t lanes) {
        int values[32];
        for (int i = 0; i < 32; i++)
            if (lanes >> i & 1) values[i] = *(const int*)operands[i];
        for (int i = 0; i < 32; i++) {
            unsigned same = 0;
            for (int k = 0; k < 32; k++) same |= (unsigned)((lanes >> i & lanes >> k & 1) && values[i] == values[k]) << k;
            if (lanes >> i & 1) *(int*)operands[i] = (int)same;
        }
    });
    return (unsigned)value;
}
static inline int __any_sync(unsigned mask, int holds) {
    emulator::meet_lanes(&holds, mask, [](const void* const* operands, uint32_t lanes) {
        int any = 0;
        for (int i = 0; i < 32; i++) any |= (lanes >> i & 1) && *(const int*)operands[i];
        for (int i = 0; i < 32; i++)
            if (lanes >> i & 1) *(int*)operands[i] = any;
    });
    return holds;
}
