// Load and store V consecutive elements as floats: in packs of 16 bytes where V is a multiple of a pack (the address must then
// be a multiple of 16 bytes), one by one otherwise. Kernels with a constant VEC have V = Pack<T>::SIZE or 1.
#pragma once
#include "common.cuh"

template <int V, typename S> __device__ __forceinline__ void load(const S* p, float (&values)[V]) {
    constexpr int SIZE = Pack<S>::SIZE;
    if constexpr (V % SIZE == 0) {
#pragma unroll
        for (int j = 0; j < V; j += SIZE) {
            Pack<S> pack = load_pack(p + j);
#pragma unroll
            for (int k = 0; k < SIZE; k++) values[j + k] = to_float(pack.v[k]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < V; k++) values[k] = to_float(p[k]);
    }
}

// p[k] = values[k], or += where `accumulate`.
template <int V, typename S> __device__ __forceinline__ void store(S* p, float (&values)[V], bool accumulate = false) {
    if (accumulate) {
        float before[V];
        load<V>(p, before);
#pragma unroll
        for (int k = 0; k < V; k++) values[k] += before[k];
    }
    constexpr int SIZE = Pack<S>::SIZE;
    if constexpr (V % SIZE == 0) {
#pragma unroll
        for (int j = 0; j < V; j += SIZE) {
            Pack<S> pack;
#pragma unroll
            for (int k = 0; k < SIZE; k++) pack.v[k] = from_float<S>(values[j + k]);
            store_pack(p + j, pack);
        }
    } else {
#pragma unroll
        for (int k = 0; k < V; k++) p[k] = from_float<S>(values[k]);
    }
}
