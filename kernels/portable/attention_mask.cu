// attention's mask, packed for its kernels: a bit for each pair of a query and a key, and what each tile of 64 by 64 pairs has.
//
// pack  writes bits and states. A warp has a tile, a lane 16 neighbouring keys of 8 queries.
//
// Arguments
//   mask    bool; element (n, h, query, key) is mask[n by_image + h by_head + query by_query + key by_key]. Read in packs of 16
//           bytes where a row's keys lie together and every row begins at a multiple of 16 bytes, single elements elsewhere.
//   bits    u64 (heads of all masks, tiles of keys, queries rounded up to 64): bit i is for key 64 tile + i. Pairs that do not
//           exist have 0.
//   states  u8 (heads of all masks, States::size): TileState, of the pairs that exist.
//
// Launch: 32 threads, a block for each tile of each mask.
#define MASKED 1
#include "attention_mask.cuh"

// Of every eighth query from `query` on a bit for each of 16 keys from `key` on. What does not exist is read as the last that
// does: no load waits for a branch.
template <bool PACKS>
__device__ __forceinline__ void load_pairs(u32 (&attends)[8], const u8* mask, int query, int key, int Tq, int Tk, i64 by_query,
                                           i64 by_key) {
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const u8* keys = mask + min(query + 8 * i, Tq - 1) * by_query;
        Pack<u8> pairs;
        if constexpr (PACKS) {
            pairs = load_pack(keys + min(key, Tk - 16));
        } else {
#pragma unroll
            for (int k = 0; k < 16; k++) pairs.v[k] = keys[min(key + k, Tk - 1) * by_key];
        }
        attends[i] = 0;
#pragma unroll
        for (int k = 0; k < 16; k++) attends[i] |= (u32)(pairs.v[k] != 0) << k;
    }
}

extern "C" __global__ void pack(u64* bits, u8* states, const u8* mask, int heads, int Tq, int Tk, i64 by_image, i64 by_head,
                                i64 by_query, i64 by_key) {
    wait_for_previous();
    States at = {CEIL_DIV(Tq, 64), CEIL_DIV(Tk, 64)};
    int key_tile = blockIdx.x % at.key_tiles, query_tile = blockIdx.x / at.key_tiles % at.query_tiles;
    int head = blockIdx.x / at.key_tiles / at.query_tiles;
    int query = query_tile * 64 + LANE / 4, key = key_tile * 64 + LANE % 4 * 16;
    mask += head / heads * by_image + head % heads * by_head;
    bits += ((i64)head * at.key_tiles + key_tile) * at.query_tiles * 64 + query;
    states += (i64)head * at.size();
    u32 attends[8];
    bool packs = by_key == 1 && ((u64)mask | by_query | Tk) % 16 == 0;
    if (packs) load_pairs<true>(attends, mask, query, key, Tq, Tk, by_query, by_key);
    else load_pairs<false>(attends, mask, query, key, Tq, Tk, by_query, by_key);
    bool any = false, incomplete = false;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        u32 exist = query + 8 * i < Tq && key < Tk ? (1u << min(Tk - key, 16)) - 1 : 0;
        attends[i] &= exist;
        reinterpret_cast<u16*>(bits + 8 * i)[LANE % 4] = (u16)attends[i];
        any |= attends[i] != 0, incomplete |= attends[i] != exist;
    }
    u8 state = !__any_sync(~0u, any) ? NONE : __any_sync(~0u, incomplete) ? SOME : ALL;
    // Of a row of states this block writes its own, and behind the last tile's all.
    int key_states = key_tile + 1 == at.key_tiles ? States::pitch(at.key_tiles) - key_tile : 1;
    int query_states = query_tile + 1 == at.query_tiles ? States::pitch(at.query_tiles) - query_tile : 1;
    if (LANE < key_states) states[at.of_queries(query_tile) + key_tile + LANE] = LANE ? NONE : state;
    if (LANE < query_states) states[at.of_keys(key_tile) + query_tile + LANE] = LANE ? NONE : state;
}
