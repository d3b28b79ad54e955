// What the blocks of one launch leave each other in global memory: slots of the exchange workspace (cudiff/cuda/exchange.py), tagged
// with the launch's number. Blocks that wait for each other are launched cooperatively.
#pragma once
#include "common.cuh"

struct TaggedSlot {
    ulonglong2 sums;
    __device__ __forceinline__ static u64 tagged(float sum, u32 launch) { return (u64)launch << 32 | __float_as_uint(sum); }
    __device__ __forceinline__ void publish(float a, float b, u32 launch) {
        asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};"
                     ::"l"(this), "l"(tagged(a, launch)), "l"(tagged(b, launch)) : "memory");
    }
    // Returns 0 where both tags are of this launch; then `found` has the sums.
    __device__ __forceinline__ u32 read(float2& found, u32 launch) const {
        u64 a, b;
        asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];" : "=l"(a), "=l"(b) : "l"(this) : "memory");
        found = make_float2(__uint_as_float((u32)a), __uint_as_float((u32)b));
        return ((u32)(a >> 32) ^ launch) | ((u32)(b >> 32) ^ launch);
    }
};

struct Exchange {
    u32 launches, arrived, unused[2];
    TaggedSlot slots[1];
    __device__ __forceinline__ u32 launch() const {
        u32 before;
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(before) : "l"(&launches) : "memory");
        return before + 1;
    }
    // Called by one thread of each block, once all have used what they read of `launches`. The last block
    // raises it.
    __device__ __forceinline__ void arrive() {
        if (atomicAdd(&arrived, 1) == gridDim.x - 1) arrived = 0, launches++;
    }
};
