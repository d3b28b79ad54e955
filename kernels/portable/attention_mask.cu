// attention's mask, packed for its kernels: a bit for each pair of a query and a key, and what each tile of 64 by 64 pairs has.
//
// pack  writes bits and states. A block has a tile.
//
// Arguments
//   mask    bool; element (n, h, query, key) is mask[n by_image + h by_head + query by_query + key by_key].
//   bits    u64 (heads of all masks, tiles of keys, queries rounded up to 64): bit i is for key 64 tile + i. Pairs that do not
//           exist have 0.
//   states  u8 (heads of all masks, States::size): TileState, of the pairs that exist.
//
// Launch: 256 threads, a block for each tile of each mask.
#define MASKED 1
#include "attention_mask.cuh"

extern "C" __global__ void pack(u64* bits, u8* states, const u8* mask, int heads, int Tq, int Tk, i64 by_image, i64 by_head,
                                i64 by_query, i64 by_key) {
    wait_for_previous();
    States at = {CEIL_DIV(Tq, 64), CEIL_DIV(Tk, 64)};
    int key_tile = blockIdx.x % at.key_tiles, query_tile = blockIdx.x / at.key_tiles % at.query_tiles;
    int head = blockIdx.x / at.key_tiles / at.query_tiles;
    mask += head / heads * by_image + head % heads * by_head;
    bits += ((i64)head * at.key_tiles + key_tile) * at.query_tiles * 64 + query_tile * 64;
    states += (i64)head * at.size();
    u32 attends = 0, exist = 0;  // of this lane's 16 pairs: two keys of 8 queries
    int warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 16; i++) {  // all loads before the first ballot
        int query = query_tile * 64 + warp + i / 2 * 8, key = key_tile * 64 + i % 2 * 32 + LANE;
        bool exists = query < Tq && key < Tk;
        exist |= (u32)exists << i;
        if (exists) attends |= (u32)(mask[query * by_query + key * by_key] != 0) << i;
    }
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
        u32 low = __ballot_sync(~0u, attends >> i & 1), high = __ballot_sync(~0u, attends >> i & 2);
        if (LANE == 0) bits[warp + i / 2 * 8] = low | (u64)high << 32;
    }
    bool any = __syncthreads_or(attends != 0), incomplete = __syncthreads_or(attends != exist);
    u8 state = !any ? NONE : incomplete ? SOME : ALL;
    int i = threadIdx.x;
    int keys = key_tile + 1 == at.key_tiles ? States::pitch(at.key_tiles) - key_tile : 1;  // of the row, which this block writes
    int queries = query_tile + 1 == at.query_tiles ? States::pitch(at.query_tiles) - query_tile : 1;
    if (i < keys) states[at.of_queries(query_tile) + key_tile + i] = i ? NONE : state;
    if (i < queries) states[at.of_keys(key_tile) + query_tile + i] = i ? NONE : state;
}
