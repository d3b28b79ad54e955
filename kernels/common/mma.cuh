// cp.async, ldmatrix and mma.sync, the tensor-core instructions of sm_80 and newer: one function each.
//
// Turing (sm_75) has ldmatrix, and mma.sync of half with half the depth (m16n8k8). It emulates the rest: copies to shared
// memory go through registers; products of bf16 and float are warp shuffles and fused multiply-adds. float then keeps all its
// bits: it is not rounded to tf32.
//
// Shared memory is addressed by 32-bit byte addresses (shared_address). Lane i holds of each fragment, with g = i / 4 and
// t = i % 4:
//   16-bit m16n8k16  A  a0 (row g, k 2t..2t+1)  a1 (row g+8, k 2t..)  a2 (row g, k 2t+8..)  a3 (row g+8, k 2t+8..)
//                    B  b0 (k 2t.., column g)  b1 (k 2t+8.., column g)
//   tf32   m16n8k8   A  a0 (row g, k t)  a1 (row g+8, k t)  a2 (row g, k t+4)  a3 (row g+8, k t+4)
//                    B  b0 (k t, column g)  b1 (k t+4, column g)
//   both             C  c0, c1 (row g, columns 2t, 2t+1)  c2, c3 (row g+8, the same columns)
#pragma once
#include "common.cuh"

#if defined(TF32_PRODUCTS) && __CUDA_ARCH__ < 800
#undef TF32_PRODUCTS
#define TF32_PRODUCTS 1
#endif

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void store_shared(u32 address, float x) {
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, bf16 x) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(x.bits) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, half x) {
    asm volatile("st.shared.b16 [%0], %1;" ::"r"(address), "h"(x.bits) : "memory");
}
__device__ __forceinline__ u32 load_shared(u32 address) {
    u32 v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ void load_shared(u32& v, u32& w, u32 address) {
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(v), "=r"(w) : "r"(address) : "memory");
}

// Start copying 16 bytes to shared memory. Where not `valid`, zeros are written and `source` is not read. Turing copies at
// once.
__device__ __forceinline__ void cp_async(u32 address, const void* source, bool valid) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(source), "r"(valid ? 16 : 0) : "memory");
#else
    uint4 v = valid ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Wait until at most PENDING of this thread's groups of copies are in flight.
template <int PENDING> __device__ __forceinline__ void cp_async_wait() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Load four matrices of 8 rows of 16 bytes. Lane i gives the address of row i % 8 of matrix i / 8. Lane i receives in r[j]
// bytes 4 (i % 4) to 4 (i % 4) + 3 of row i / 4 of matrix j.
__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
// The same for 8 × 8 matrices of 16-bit elements, transposed: lane i gets column i / 4 of rows 2 (i % 4) and 2 (i % 4) + 1.
__device__ __forceinline__ void ldmatrix_transposed(u32* r, u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// Two elements in one register, `low` first in memory.
template <typename U> __device__ __forceinline__ u32 pack_pair(float low, float high) {
    return from_float<U>(low).bits | (u32)from_float<U>(high).bits << 16;
}
#if __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ u32 pack_pair<bf16>(float low, float high) {
    u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
template <> __device__ __forceinline__ u32 pack_pair<half>(float low, float high) {
    u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    return y;
}
#endif
template <typename U> __device__ __forceinline__ float2 unpack_pair(u32 pair) {
    return make_float2(to_float(U{(u16)pair}), to_float(U{(u16)(pair >> 16)}));
}

// x rounded to tf32, which has 10 bits of mantissa. On Turing x itself.
__device__ __forceinline__ u32 round_tf32(float x) {
#if __CUDA_ARCH__ >= 800
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
#else
    return __float_as_uint(x);
#endif
}

// c += a·b for one 16 × 8 tile; T is the type of a and b, float meaning tf32.
template <typename T> __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1);

#if __CUDA_ARCH__ >= 800
#define DEFINE_MMA(T, INSTRUCTION)                                                                                       \
    template <> __device__ __forceinline__ void mma<T>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {               \
        asm(INSTRUCTION " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                                         \
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                             \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                             \
    }
DEFINE_MMA(bf16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
DEFINE_MMA(half, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
DEFINE_MMA(float, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")
#else
// The elements of a 32-bit word of a fragment: two of bf16, or a float and 0.
__device__ __forceinline__ float2 elements(u32 word, float) { return make_float2(__uint_as_float(word), 0.0f); }
__device__ __forceinline__ float2 elements(u32 word, bf16) { return unpack_pair<bf16>(word); }

// The lanes 4g to 4g + 3 hold the words of rows g and g + 8 of A and of column g of B. Each lane gets what it needs by
// shuffles.
template <typename T> __device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    int lane = threadIdx.x % 32, row = lane & ~3, columns = lane % 4 * 8;
#pragma unroll 1
    for (int k = 0; k < 4; k++) {
        float2 x[4], y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[i] = elements(__shfl_sync(~0u, a[i], row + k), T());
            y[i] = elements(__shfl_sync(~0u, i < 2 ? b0 : b1, columns + i % 2 * 4 + k), T());
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {  // of row i / 2, column i % 2
            c[i] += x[i / 2].x * y[i % 2].x + x[i / 2 + 2].x * y[i % 2 + 2].x;
            if (sizeof(T) == 2) c[i] += x[i / 2].y * y[i % 2].y + x[i / 2 + 2].y * y[i % 2 + 2].y;
        }
    }
}
template <> __device__ __forceinline__ void mma<half>(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#pragma unroll
    for (int k = 0; k < 2; k++)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(k ? b1 : b0));
}
#endif
