// Thread block clusters (sm_90 and newer): CLUSTER blocks that run at the same time and reach each other's shared memory
// (distributed shared memory).
#pragma once
#include "wgmma.cuh"

// The attribute of a kernel whose clusters lie along the grid's z. There is none for one block: even a cluster of one is
// launched in another way than a block.
#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(1, 1, CLUSTER)
#else
#define CLUSTER_DIMS
#endif

// Arrive and wait are the halves of a barrier of all threads of the cluster. What a thread wrote before it arrived, all see
// after they have waited. Every thread of a warp takes part. For a cluster of one block it is the block's own barrier.
__device__ __forceinline__ void cluster_arrive() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    else __syncthreads();
}
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}
// Arrive without making writes visible: so without waiting for all that the block has stored in global memory.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    if constexpr (CLUSTER > 1) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// The address in block `rank`'s shared memory that corresponds to `address` in this block's.
__device__ __forceinline__ u32 cluster_address(u32 address, int rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// Load a float2 from block `rank`'s shared memory, from where `p` lies in this block's.
__device__ __forceinline__ float2 load_cluster(const float2* p, int rank) {
    if constexpr (CLUSTER == 1) return *p;
    float2 v;
    asm volatile("ld.shared::cluster.v2.f32 {%0, %1}, [%2];"
                 : "=f"(v.x), "=f"(v.y) : "r"(cluster_address(shared_address(p), rank)) : "memory");
    return v;
}

// Store v to block `rank`'s shared memory, where `p` lies in this block's.
__device__ __forceinline__ void store_cluster(float4* p, int rank, float4 v) {
    if constexpr (CLUSTER == 1) {
        *p = v;
        return;
    }
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                 ::"r"(cluster_address(shared_address(p), rank)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// A block's exchange workspace is a part of its shared memory to which the cluster's blocks write. An mbarrier counts the bytes
// that arrive there; it is used once. Thread 0 opens the workspace, then all threads call cluster_arrive_relaxed(). Before they
// send to a block they call cluster_wait().
__device__ __forceinline__ void open_exchange(u32 barrier, u32 bytes) {
    if constexpr (CLUSTER == 1) return;
    barrier_init(barrier, 1);
    fence_barriers();
    barrier_expect(barrier, bytes);
}
// Write v to block `rank`'s exchange workspace, where `p` lies in this block's. That block's `barrier` counts the bytes.
__device__ __forceinline__ void send(float4* p, int rank, float4 v, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(cluster_address(shared_address(p), rank)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w),
                 "r"(cluster_address(barrier, rank)) : "memory");
}
__device__ __forceinline__ void send(float* p, int rank, float v, u32 barrier) {
    if constexpr (CLUSTER == 1) {
        *p = v;
    } else {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];"
                     ::"r"(cluster_address(shared_address(p), rank)), "f"(v), "r"(cluster_address(barrier, rank)) : "memory");
    }
}
// sum[0..3] = the sums of the float4 that the blocks sent, added in the order of the blocks. They lie `pitch` apart, from
// `terms` on.
__device__ __forceinline__ void sum_terms(float* sum, const float4* terms, int pitch) {
    for (int i = 0; i < 4; i++) sum[i] = 0.0f;
#pragma unroll
    for (int from = 0; from < CLUSTER; from++) {
        float4 term = terms[from * pitch];
        sum[0] += term.x, sum[1] += term.y, sum[2] += term.z, sum[3] += term.w;
    }
}
// Wait until all bytes have arrived. All threads call it.
__device__ __forceinline__ void receive(u32 barrier) {
    if constexpr (CLUSTER == 1) __syncthreads();
    else barrier_wait(barrier, 0);
}
