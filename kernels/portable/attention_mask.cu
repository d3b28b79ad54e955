// attention's mask, packed for its kernels: a bit for each pair of a query and a key, and what each tile of 64 by 64 pairs has.
//
// pack  writes bits and states. A block has a tile.
//
// Arguments
//   mask    bool; element (n, h, query, key) is mask[n by_image + h by_head + query by_query + key by_key].
//   bits    u64 (heads of all masks, tiles of keys, queries rounded up to 64): bit i is for key 64 tile + i. Pairs that do not
//           exist have 0.
//   states  u8 (heads of all masks, tiles of queries, tiles of keys): TileState, of the pairs that exist.
//
// Launch: 128 threads, one block for each state; dynamic shared memory none.
#define MASKED 1
#include "attention_mask.cuh"

extern "C" __global__ void pack(u64* bits, u8* states, const u8* mask, int heads, int Tq, int Tk, i64 by_image, i64 by_head,
                                i64 by_query, i64 by_key) {
    wait_for_previous();
    int key_tiles = CEIL_DIV(Tk, 64), query_tiles = CEIL_DIV(Tq, 64);
    int key_tile = blockIdx.x % key_tiles, query_tile = blockIdx.x / key_tiles % query_tiles;
    int head = blockIdx.x / key_tiles / query_tiles;
    mask += head / heads * by_image + head % heads * by_head;
    bits += ((i64)head * key_tiles + key_tile) * query_tiles * 64;
    u32 attends = 0, exist = 0;  // of this lane's 32 pairs: two keys of 16 queries
    int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 32; i++) {  // all loads before the first ballot
        int query = query_tile * 64 + warp + i / 2 * 4, key = key_tile * 64 + i % 2 * 32 + LANE;
        bool exists = query < Tq && key < Tk;
        exist |= (u32)exists << i;
        if (exists) attends |= (u32)(mask[query * by_query + key * by_key] != 0) << i;
    }
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        u32 low = __ballot_sync(~0u, attends >> i & 1), high = __ballot_sync(~0u, attends >> i & 2);
        if (LANE == 0) bits[query_tile * 64 + warp + i / 2 * 4] = low | (u64)high << 32;
    }
    bool any = __syncthreads_or(attends != 0), incomplete = __syncthreads_or(attends != exist);
    if (threadIdx.x == 0) states[blockIdx.x] = !any ? NONE : incomplete ? SOME : ALL;
}
