// Which keys a query attends to, as attention_mask.cu packs it: a bit for each pair, and what a tile of 64 by 64 pairs has.
#pragma once
#include "flash.cuh"

enum TileState { NONE, SOME, ALL };  // of a tile's pairs, those that attend

// The mask of one head of an image. Without MASKED every query attends to every key.
struct Mask {
    const u64* bits;   // (tiles of 64 keys, TP queries): of a query, a bit for each key of a tile
    const u8* states;  // (tiles of 64 queries, tiles of 64 keys): TileState
    int TP, query_tiles, key_tiles;

    // by_image, by_head: masks from one image's to the next, and from one head's; 0 where all share it.
    __device__ __forceinline__ Mask(const u64* bits, const u8* states, int by_image, int by_head, int n, int h, int Tq, int Tk) {
        if constexpr (MASKED) {
            query_tiles = CEIL_DIV(Tq, 64), key_tiles = CEIL_DIV(Tk, 64), TP = query_tiles * 64;
            i64 head = (i64)n * by_image + h * by_head;
            this->bits = bits + head * key_tiles * TP;
            this->states = states + head * query_tiles * key_tiles;
        }
    }
    // Tiles beyond the last are NONE.
    __device__ __forceinline__ TileState state(int query_tile, int key_tile) const {
        if (!MASKED) return ALL;
        if (query_tile >= query_tiles || key_tile >= key_tiles) return NONE;
        return (TileState)states[query_tile * key_tiles + key_tile];
    }
    // The bits of queries from `query` on, for the keys of a tile.
    __device__ __forceinline__ const u64* rows(int key_tile, int query) const { return bits + (i64)key_tile * TP + query; }

    // The first step from `step` on in which one of TOKENS queries, from `first` on, attends to any of the step's KEYS; else `steps`.
    template <int TOKENS, int KEYS> __device__ __forceinline__ int next_keys(int first, int step, int steps) const {
        return next(step, steps, [&](int step, int i) { return state(first / 64 + i, step * KEYS / 64); }, CEIL_DIV(TOKENS, 64));
    }
    // The same of steps of QUERIES, for TOKENS keys.
    template <int TOKENS, int QUERIES> __device__ __forceinline__ int next_queries(int first, int step, int steps) const {
        return next(step, steps, [&](int step, int i) { return state(step * QUERIES / 64, first / 64 + i); }, CEIL_DIV(TOKENS, 64));
    }

  private:
    template <class State> static __device__ __forceinline__ int next(int step, int steps, State state, int tiles) {
        if constexpr (MASKED)
            for (; step < steps; step++)
                for (int i = 0; i < tiles; i++)
                    if (state(step, i) != NONE) return step;
        return step;
    }
};
