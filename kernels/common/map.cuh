// Elementwise loops: packs of 16 bytes where every address allows, single elements elsewhere.
#pragma once
#include "common.cuh"

// out[i] = f(a[i], b[i]), or += where `accumulate`; b may be null (f then gets 0). Any launch shape.
template <typename T, typename F>
__device__ __forceinline__ void map(T* out, int accumulate, i64 n, const T* a, const T* b, F f) {
    constexpr int SIZE = Pack<T>::SIZE;
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    i64 packs = ((u64)out | (u64)a | (u64)b) % 16 ? 0 : n / SIZE;
    for (i64 p = thread; p < packs; p += threads) {
        i64 i = p * SIZE;
        Pack<T> x = load_pack(a + i), y = b ? load_pack(b + i) : Pack<T>{}, z = accumulate ? load_pack(out + i) : Pack<T>{};
#pragma unroll
        for (int k = 0; k < SIZE; k++) {
            float value = f(to_float(x.v[k]), b ? to_float(y.v[k]) : 0.0f);
            z.v[k] = from_float<T>(accumulate ? to_float(z.v[k]) + value : value);
        }
        store_pack(out + i, z);
    }
    for (i64 i = packs * SIZE + thread; i < n; i += threads) {
        float value = f(to_float(a[i]), b ? to_float(b[i]) : 0.0f);
        out[i] = from_float<T>(accumulate ? to_float(out[i]) + value : value);
    }
}
