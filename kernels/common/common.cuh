// Storage types and conversions, packs of 16 bytes, small arithmetic, and the wait that every kernel begins with.
//
// bf16 and half only store numbers; arithmetic is float. to_float() reads them, from_float<T>() rounds to nearest even.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct __align__(2) bf16 { u16 bits; };
struct __align__(2) half { u16 bits; };

#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ float to_float(half x) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x.bits));
    return f;
}
__device__ __forceinline__ float to_float(u8 x) { return (float)x; }
__device__ __forceinline__ float to_float(int x) { return (float)x; }
__device__ __forceinline__ float to_float(i64 x) { return (float)x; }

template <typename T> __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) {
    bf16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    u32 bits = __float_as_uint(x);
    y.bits = x == x ? (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : (u16)0x7fff;
#endif
    return y;
}
template <> __device__ __forceinline__ half from_float<half>(float x) {
    half y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> __device__ __forceinline__ u8 from_float<u8>(float x) { return (u8)x; }
template <> __device__ __forceinline__ int from_float<int>(float x) { return (int)x; }
template <> __device__ __forceinline__ i64 from_float<i64>(float x) { return (i64)x; }

// 16 bytes of T, loaded and stored by one instruction; the address must be a multiple of 16.
template <typename T> struct __align__(16) Pack {
    static constexpr int SIZE = 16 / sizeof(T);
    T v[SIZE];
};
template <typename T> __device__ __forceinline__ Pack<T> load_pack(const T* p) {
    uint4 raw = *reinterpret_cast<const uint4*>(p);
    return *reinterpret_cast<Pack<T>*>(&raw);
}
template <typename T> __device__ __forceinline__ void store_pack(T* p, const Pack<T>& pack) {
    *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&pack);
}

#ifdef TIMELINE  // for `bench.py --profile`: a counter, and behind it when each launch has seen the one before end
__device__ u64* timeline;
#endif

// Programmatic dependent launch: from sm_90 on a kernel may start while the previous one still runs (cudiff/cuda/launch.py).
// Every kernel calls this before a thread touches global memory that the previous kernel may write or still read. Before the
// call, only input_gradients in group_norm.cu reads global memory, which the previous kernel does not write; and conv2d_sm90.cu
// prefetches weights, and group_norm.cu a norm's parameters, into L2, where a later write still reaches them.
// The same call lets the next kernel start. An earlier trigger was slower: the next kernel's blocks filled the free places of
// some multiprocessors and waited there, crowded, while other multiprocessors were about to become free.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;\ngriddepcontrol.launch_dependents;" ::: "memory");
#endif
#ifdef TIMELINE
    if (blockIdx.x + blockIdx.y + blockIdx.z + threadIdx.x + threadIdx.y + threadIdx.z > 0) return;
    u64 nanoseconds;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
    timeline[1 + atomicAdd(timeline, 1)] = nanoseconds;
#endif
}

// Prefetches the cache line of an address into L2, where a later write still reaches it.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }

// 2^x. Results below 2^-126 become 0. exp2f and __expf scale them instead, which takes three instructions more.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }
