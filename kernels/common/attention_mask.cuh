// Which keys a query attends to, as attention_mask.cu packs it: a bit for each pair, and what a tile of 64 by 64 pairs has.
#pragma once
#include "flash.cuh"

enum TileState { NONE, SOME, ALL };  // of a tile's pairs, those that attend

// The states of the tiles of an image's head, twice: a row for each tile of queries, then a row for each tile of keys. A row has a
// multiple of 8 bytes; NONE stands behind its last tile.
struct States {
    int query_tiles, key_tiles;
    static __device__ __forceinline__ int pitch(int tiles) { return CEIL_DIV(tiles, 8) * 8; }
    __device__ __forceinline__ int of_queries(int tile) const { return tile * pitch(key_tiles); }
    __device__ __forceinline__ int of_keys(int tile) const { return query_tiles * pitch(key_tiles) + tile * pitch(query_tiles); }
    __device__ __forceinline__ int size() const { return of_keys(key_tiles); }
};

// The mask of one head of an image. Without MASKED every query attends to every key.
struct Mask {
    const u64* bits;  // (tiles of 64 keys, TP queries): of a query, a bit for each key of a tile
    const u8* states;
    int TP;
    States at;

    // by_image, by_head: masks from one image's to the next, and from one head's; 0 where all share it.
    __device__ __forceinline__ Mask(const u64* bits, const u8* states, int by_image, int by_head, int n, int h, int Tq, int Tk) {
        if constexpr (MASKED) {
            at = {CEIL_DIV(Tq, 64), CEIL_DIV(Tk, 64)}, TP = at.query_tiles * 64;
            i64 head = (i64)n * by_image + h * by_head;
            this->bits = bits + head * at.key_tiles * TP;
            this->states = states + head * at.size();
        }
    }
    // Tiles beyond the last are NONE.
    __device__ __forceinline__ TileState state(int query_tile, int key_tile) const {
        if (!MASKED) return ALL;
        if (query_tile >= at.query_tiles || key_tile >= at.key_tiles) return NONE;
        return (TileState)states[at.of_queries(query_tile) + key_tile];
    }
    // The bits of queries from `query` on, for the keys of a tile.
    __device__ __forceinline__ const u64* rows(int key_tile, int query) const { return bits + (i64)key_tile * TP + query; }
};

// A walk over the tiles that have pairs with a block's own tile. The states of eight tiles are read at a time.
struct Walk {
    const u64* row;
    u64 eight;
    int loaded = -1;

    __device__ __forceinline__ Walk(const Mask& mask, int at) { if (MASKED) row = reinterpret_cast<const u64*>(mask.states + at); }
    // The first step from `step` on that has a pair, or the first after the last tile's. A step is TOKENS tokens.
    template <int TOKENS> __device__ __forceinline__ int next(int step, int steps) {
        if constexpr (MASKED)
            while (step < steps) {
                int tile = step * TOKENS / 64;
                if (tile / 8 != loaded) loaded = tile / 8, eight = row[loaded];
                if (state(tile) != NONE) break;
                step = (tile + 1) * (64 / TOKENS);
            }
        return step;
    }
    // Of a tile that next() has come to.
    __device__ __forceinline__ TileState state(int tile) const { return MASKED ? (TileState)(eight >> tile % 8 * 8 & 255) : ALL; }
};
