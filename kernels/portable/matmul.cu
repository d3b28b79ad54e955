// Batched product of matrices on tensor cores: out[batch] = A[batch] · B[batch] + bias + emb + addend.
//
//   a       T (m, k) where A_K_MAJOR, else (k, m), rows of lda elements.
//   b       T (n, k) where B_K_MAJOR, else (k, n), rows of ldb elements. Batches of a and b are batch_a and batch_b elements
//           apart; 0: one for all.
//   bias    float (n,), or null.
//   emb     float (images, n), or null. Row m of the result gets emb[m / rows_per_image].
//   addend  OUT like out, or null. May be `out` itself.
//   out     OUT (batches, m, n), rows of ldo elements, overwritten.
// A_VEC, B_VEC: rows and batches start at multiples of 16 bytes, and rows hold whole chunks of 16 bytes.
// Launch: gridDim.x = batches · ceil(m / BM) · ceil(n / BN), n fastest. gridDim.y: splits of k, `k_tiles` tiles each. Split s
// writes to out + s · batches · m · ldo, and gemm.cu sums the splits (then OUT=float, without additions). Threads and shared
// memory as in gemm.cuh.
#include "gemm.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul(const T* a, const T* b, const float* bias, const float* emb, const OUT* addend, OUT* out, i64 ldo, int rows_per_image,
       int k_tiles, int m, int n, int k, i64 lda, i64 ldb, i64 batch_a, i64 batch_b) {
    wait_for_previous();
    int tiles_n = CEIL_DIV(n, BN), tiles = tiles_n * CEIL_DIV(m, BM), batches = gridDim.x / tiles;
    int batch = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    int m0 = tile / tiles_n * BM, n0 = tile % tiles_n * BN, k0 = blockIdx.y * k_tiles * BK;
    MatrixLoader<A_K_MAJOR, BM, A_VEC> load_a(a + batch * batch_a, lda, m0, m, k0, k);
    MatrixLoader<B_K_MAJOR, BN, B_VEC> load_b(b + batch * batch_b, ldb, n0, n, k0, k);
    Accumulators acc = {};
    multiply(acc, load_a, load_b, min(k_tiles, CEIL_DIV(k - k0, BK)));
    out += ((i64)blockIdx.y * batches + batch) * m * ldo;
    if (addend) addend += (i64)batch * m * ldo;
    Output output = {out, bias, emb, addend, m, n, ldo, rows_per_image, nullptr};
    output.store(acc, m0, n0);
}
