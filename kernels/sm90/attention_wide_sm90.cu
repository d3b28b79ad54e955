// Flash attention's forward on Hopper for long sequences. It computes what forward of attention_sm90.cu does, but runs one
// warpgroup's softmax beside another's products (Shah et al. 2024, FlashAttention-3).
//
// Arguments
//   Layouts, lse and D are as in attention_sm90.cu. `tiles` counts the tiles of GROUPS * 64 queries of all heads and images.
//   From tile `whole` on each is computed in GROUPS pieces of 64 queries, so that more blocks share the last ones.
//
// How it works
//   Producer   A block has GROUPS consumer warpgroups, each with 64 queries, and a producer warpgroup. One thread of that loads
//              tiles of KEYS keys and of KEYS values into rings of STAGES. The others only give their registers to the
//              consumers.
//   Pipeline   A warpgroup issues two products together: the scores of a tile of keys, and the weights of the tile before times
//              its values. While the second runs, it turns the scores into weights.
//   Turns      The warpgroups issue their products by turns, so that the softmax of one runs beside the products of another.
//   Order      Blocks are persistent: each walks over tiles of queries, then over pieces. What it needs next arrives meanwhile.
//
// Launch
//   Grid       any number of blocks of 128 GROUPS + 128 threads. GROUPS is 2, or 3 of heads of up to 64 channels, by registers.
//   Maps       {D, heads, tokens, N}, a box for each kind of panel: of 64 tokens of q and out, of KEYS of k and v.
//   Shared     GROUPS tiles of 64 tokens, STAGES of two tiles of KEYS, 256 bytes of barriers.
#include "attention_sm90.cuh"

constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + 128, KEY_TILE = KEYS * DP * 2;
constexpr int TURNS = 1 + GROUPS;  // the first named barrier of turns; warpgroup_meets uses 1 to GROUPS

// The turn of warpgroup g begins once all other consumer warpgroups have arrived at barrier TURNS + g. It ends with pass_turn.
__device__ __forceinline__ void wait_for_turn(int group) {
    if (GROUPS > 1) asm volatile("bar.sync %0, %1;" ::"r"(TURNS + group), "n"(CONSUMERS) : "memory");
}
__device__ __forceinline__ void pass_to(int group) {
    asm volatile("bar.arrive %0, %1;" ::"r"(TURNS + group), "n"(CONSUMERS) : "memory");
}
__device__ __forceinline__ void pass_turn(int group) {
#pragma unroll
    for (int i = 1; i < GROUPS; i++) pass_to((group + i) % GROUPS);
}

// The rings' places in shared memory, barriers last. `queries` has a buffer for each warpgroup.
struct Rings {
    Ring queries, keys, values;
    __device__ __forceinline__ Rings(u32 base)
        : queries(base, TILE, GROUPS, base + BYTES), keys(base + GROUPS * TILE, 2 * KEY_TILE, STAGES, base + BYTES + 64),
          values(base + GROUPS * TILE + KEY_TILE, 2 * KEY_TILE, STAGES, base + BYTES + 128) {}
    static constexpr u32 BYTES = GROUPS * TILE + STAGES * 2 * KEY_TILE;
};
// What a block computes at once: of a head of image n, the queries from `first` to before `end`, 64 for each warpgroup that has
// any. A piece may have none.
struct Place {
    Head head;
    int n, first, end;
    __device__ __forceinline__ Place(int piece, int whole, int heads, int Tq, int D)
        : Place(piece < whole ? piece : whole + (piece - whole) / GROUPS, heads, Tq, D) {
        if (piece >= whole) first += (piece - whole) % GROUPS * 64, end = min(first + 64, Tq);
    }
    __device__ __forceinline__ Place(int tile, int heads, int Tq, int D) : head(tile / across(Tq) % heads, D) {
        n = tile / across(Tq) / heads, first = tile % across(Tq) * GROUPS * 64, end = Tq;
    }
    static __device__ __forceinline__ int across(int Tq) { return CEIL_DIV(Tq, GROUPS * 64); }
};

// The producer: one thread loads all tiles, in the order in which the consumers read them.
__device__ __forceinline__ void produce(Rings rings, const TileMap& q, const TileMap& k, const TileMap& v, int pieces,
                                        int whole, int heads, int Tq, int Tk, int D) {
    auto load = [&](Ring& ring, const TileMap& map, Place at, int step) {
        load_tile<KEYS>(ring.buffer(), map, ring.acquire(KEY_TILE), at.head, step * KEYS, at.n);
        ring.advance();
    };
    int steps = CEIL_DIV(Tk, KEYS);
    for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        Place at(piece, whole, heads, Tq, D);
        if (at.first >= at.end) continue;
        load(rings.keys, k, at, 0);
        for (int group = 0; group < GROUPS; group++) {
            load_tile(rings.queries.buffer(), q, rings.queries.acquire(TILE), at.head, at.first + group * 64, at.n);
            rings.queries.advance();
        }
        for (int step = 1; step < steps; step++) {
            load(rings.keys, k, at, step);
            load(rings.values, v, at, step - 1);
        }
        load(rings.values, v, at, steps - 1);
    }
}

// acc = the sums of weighted values for a warpgroup's 64 queries; top and sum are those of the online softmax.
__device__ __forceinline__ void attend(float (&acc)[DP / 2], float (&top)[2], float (&sum)[2], Rings& rings, u32 own, int group,
                                       int Tk, float scale2) {
    int steps = CEIL_DIV(Tk, KEYS);
    float s[KEYS / 2], factors[2];
    u32 weights[KEYS / 16][4];
    auto score = [&](int step, bool computes) {
        if (computes) {
            wgmma_fence();
            multiply_tokens(s, own, rings.keys.buffer());
            wgmma_commit();
            wgmma_wait<0>();
        }
        if ((step + 1) * KEYS > Tk) mask(s, Tk - step * KEYS);
    };
    auto shrink = [&](int r, float factor) { factors[r] = factor; };
    rings.keys.wait();
    weigh(s, top, sum, scale2, true, [&](bool) { score(0, true); }, shrink);
    rings.keys.release();
    round_fragments(s, weights);
#pragma unroll 1
    for (int step = 1; step < steps; step++) {
        rings.keys.wait(), rings.values.wait();
        wait_for_turn(group);
        wgmma_fence();
        multiply_tokens(s, own, rings.keys.buffer());
        wgmma_commit();
        multiply_weights(acc, weights, rings.values.buffer(), step > 1);
        wgmma_commit();
        pass_turn(group);
        wgmma_wait<1>();
        bool shrinks = weigh(s, top, sum, scale2, false, [&](bool again) { score(step, again); }, shrink);
        rings.keys.release();
        wgmma_wait<0>();
        rings.values.release();
        if (shrinks) scale_row(acc, 0, factors[0]), scale_row(acc, 1, factors[1]);
        round_fragments(s, weights);
    }
    rings.values.wait();
    wgmma_fence();
    multiply_weights(acc, weights, rings.values.buffer(), steps > 1);
    wgmma_commit();
    wgmma_wait<0>();
    rings.values.release();
}

// A warpgroup without queries takes its turns and releases what the others read. It meets, since a wait is for the next phase of
// a barrier, which a warp left behind would miss.
__device__ __forceinline__ void stand_by(Rings& rings, int group, int Tk) {
    for (int step = 0; step < CEIL_DIV(Tk, KEYS); step++) {
        if (step > 0) wait_for_turn(group), pass_turn(group);
        rings.keys.wait(), rings.values.wait();
        warpgroup_meets();
        rings.keys.release(), rings.values.release();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward(const __grid_constant__ TileMap q, const __grid_constant__ TileMap k, const __grid_constant__ TileMap v,
        const __grid_constant__ TileMap out, float* lse, int tiles, int whole, int heads, int Tq, int Tk, int D,
        float scale) {
    extern __shared__ __align__(1024) u8 shared[];
    Rings rings(shared_address(shared));
    int group = threadIdx.x / 128, TP = CEIL_DIV(Tq, 64) * 64, pieces = whole + (tiles - whole) * GROUPS;
    if (threadIdx.x == 0) {
        rings.queries.init(1), rings.keys.init(GROUPS), rings.values.init(GROUPS);
        prefetch(q), prefetch(k), prefetch(v);
    }
    __syncthreads();
    wait_for_previous();
    if (group == GROUPS) {
        set_registers<24, false>();
        if (threadIdx.x == CONSUMERS) produce(rings, q, k, v, pieces, whole, heads, Tq, Tk, D);
        return;
    }
    set_registers<GROUPS == 2 ? 240 : 160, true>();
    for (int before = 0; before < group; before++) pass_to(before);  // so warpgroup 0 has the first turn
    u32 own = rings.queries.buffers + group * TILE, phase = 0;
    for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        Place at(piece, whole, heads, Tq, D);
        if (at.first >= at.end) continue;
        int first = at.first + group * 64;
        barrier_wait(rings.queries.full(group), phase);
        phase ^= 1;
        if (first < at.end) {
            float acc[DP / 2], top[2] = {-infinity(), -infinity()}, sum[2] = {};
            attend(acc, top, sum, rings, own, group, Tk, scale * LOG2E);
            finish_rows(acc, top, sum, lse + ((i64)at.n * heads + at.head.h) * TP, first, Tq, TP);
            store_tile(out, acc, 1.0f, own, at.head, first, at.n);
            finish_stores();
        } else {
            stand_by(rings, group, Tk);
        }
        if (threadIdx.x % 128 == 0) barrier_arrive(rings.queries.empty(group));  // TMA has read the results, which lay there
    }
}
