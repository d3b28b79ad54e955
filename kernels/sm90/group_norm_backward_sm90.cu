// Group norm's backward on Hopper in one launch and one pass over global memory: group_norm.cu takes two launches and a sum
// over images.
//
// Layout, dtypes and arguments are as in group_norm.cu; VEC=1 only. Every sum has a fixed order.
//
// How it works
//   Blocks     `parts` blocks share the pixels of an image, of a chunk of channels that is whole groups.
//   Sums       TMA copies a block's pixels to shared memory, box after box. The block sums those that have arrived while others
//              are on their way. HELD further boxes, which do not fit there, go to registers. d_preact, the gradient of z, is
//              kept in place of dy, rounded to T: so dx reads it. The sums are of d_preact before rounding.
//   Exchange   The blocks publish their sums in the exchange workspace, in global memory, and receive those of the others.
//   Results    The second pass reads the pixels from where they are kept.
//   Slots      A tagged slot holds a channel's two sums. Each is in one word of 64 bits with its tag, the launch's number:
//              who reads the tag has the sum, without a fence or a counter. The tag is exchange->launches + 1. The last block
//              to have read `launches` raises it.
//   dweight, dbias   Where multiprocessors are left over, further blocks add up the slots of all images.
//
// Launch
//   Grid       N * chunks * parts blocks and the adding ones, of THREADS threads. chunks * ACROSS packs of V channels = C
//              exactly, ACROSS <= 32, and C1 is a multiple of a chunk's channels. Blocks that wait for each other must all run
//              at once: unless parts=1 and no blocks add, the launch is cooperative, of no more blocks than the GPU has
//              multiprocessors.
//   Maps       x {C1, S, N}, x2 {C2, S, N} (or x's), dy {C, S, N}, box {WIDTH, STEP, 1}, not swizzled.
//   Boxes      A block has `boxes` boxes in shared memory and HELD after them; the blocks of an image have all of its boxes.
//   exchange   slots (N, parts, C), zeroed once. The launches that share it follow each other. It is null where parts=1 and no
//              blocks add.
//   Shared     `boxes` boxes of x and of dy; 4 WIDTH (2 WARPS + 8) bytes.
constexpr int THREADS = 512;
#include "exchange.cuh"
#include "group_norm_boxes.cuh"
#include "dropout.cuh"

// Where the rows of a block's table begin, each of WIDTH channels. For the first pass the first three are Affine's: mean, gain,
// offset. For the second GAIN, SLOPE and CONSTANT are those of dx = GAIN * d_preact - (CONSTANT + SLOPE * (x - centre)).
enum Row { MEAN = 0, GAIN = WIDTH, SLOPE = 2 * WIDTH, RSTD = 3 * WIDTH, GAMMA = 4 * WIDTH, CONSTANT = 5 * WIDTH, ROWS = 6 * WIDTH };

constexpr int DEPTH = 5;  // boxes that are on their way at once: if all were, all would arrive together, and late

// Waits for a channel's sums over an image, and adds them. slots[0] is the first part's, slots[pitch] the next one's.
__device__ __forceinline__ float2 receive(const TaggedSlot* slots, int parts, int pitch, u32 launch) {
    constexpr int AT_ONCE = 4;
    float2 total = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (; parts > 0; parts -= AT_ONCE, slots += AT_ONCE * pitch) {
        float2 sums[AT_ONCE];
        u32 missing;
        do {
            missing = 0;
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) missing |= slots[min(u, parts - 1) * pitch].read(sums[u], launch);
        } while (missing);
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            if (u < parts) total.x += sums[u].x, total.y += sums[u].y;
    }
    return total;
}

// dweight and dbias. A lane has a channel, a warp every WARPS-th slot of it. `sums` is in shared memory, one for each thread.
__device__ __forceinline__ void add_images(const Exchange* exchange, int block, int blocks, float2* sums, float* dweight,
                                           int add_weight, float* dbias, int add_bias, AFFINE, int N, int C, int parts) {
    constexpr int AT_ONCE = 8;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, size = C / (u32)groups, slots = N * parts;
    u32 launch = exchange->launch();
    for (int first = block * 32; first < C; first += blocks * 32) {
        int c = first + lane;
        float2 sum = make_float2(0.0f, 0.0f);
        for (int begin = warp; begin < slots && c < C; begin += AT_ONCE * WARPS) {
            float2 found[AT_ONCE], normed[AT_ONCE];  // found: a slot's sums; normed: mean and rstd
            float factor[AT_ONCE];
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                int n = min(begin + u * WARPS, slots - 1) / (u32)parts;
                i64 group = (i64)n * groups + c / (u32)size;
                normed[u] = make_float2(mean[group], rstd[group]);
                factor[u] = scale ? 1.0f + scale[(i64)n * C + c] : 1.0f;
            }
            for (u32 missing = 1; missing;) {
                missing = 0;
#pragma unroll
                for (int u = 0; u < AT_ONCE; u++)
                    missing |= exchange->slots[(i64)min(begin + u * WARPS, slots - 1) * C + c].read(found[u], launch);
                if (missing) __nanosleep(200);
            }
#pragma unroll
            for (int u = 0; u < AT_ONCE; u++) {
                if (begin + u * WARPS >= slots) break;
                sum.x += factor[u] * found[u].x;
                float average = normed[u].x;
                sum.y += factor[u] * (found[u].y - (average - centre_of(average)) * found[u].x) * normed[u].y;
            }
        }
        __syncthreads();
        sums[threadIdx.x] = sum;
        __syncthreads();
        if (warp || c >= C) continue;
        for (int w = 1; w < WARPS; w++) sum.x += sums[w * 32 + lane].x, sum.y += sums[w * 32 + lane].y;
        if (dweight) dweight[c] = (add_weight ? dweight[c] : 0.0f) + sum.y;
        if (dbias) dbias[c] = (add_bias ? dbias[c] : 0.0f) + sum.x;
    }
}

// A thread's pixels of the HELD boxes after the first `boxes`, of `count` in all.
struct Held {
    Raw x[HELD + 1], d_preact[HELD + 1];
    u32 bits[HELD + 1] = {};  // of dropout's mask
    // Load x, and dy, which becomes d_preact.
    __device__ __forceinline__ void load(const T* from, const T* dy, int pitch, int dy_pitch, int boxes, int count) {
#pragma unroll
        for (int h = 0; h < HELD; h++) {
            x[h] = d_preact[h] = Raw{};
            if (boxes + h < count)
                x[h] = load_raw(from + (i64)(boxes + h) * pitch), d_preact[h] = load_raw(dy + (i64)(boxes + h) * dy_pitch);
        }
    }
    __device__ __forceinline__ void load_bits(const u8* mask, i64 e, int pitch, int boxes, int count) {
#pragma unroll
        for (int h = 0; h < HELD; h++)
            if (boxes + h < count) bits[h] = load_mask(mask, e + (i64)(boxes + h) * pitch);
    }
};

// Store element i of totals, dscale and dshift, (N, C) each, or null. `total` has a channel's sums over an image, of d_preact
// and of d_preact * xhat.
__device__ __forceinline__ void store_totals(const Modulation& own, float2 total, i64 i, float2* totals, float* dscale,
                                             int add_scale, float* dshift, int add_shift) {
    if (totals) totals[i] = make_float2(own.factor() * total.x, own.factor() * total.y);
    if (dscale) dscale[i] = (add_scale ? dscale[i] : 0.0f) + own.weight * total.y + own.bias * total.x;
    if (dshift) dshift[i] = (add_shift ? dshift[i] : 0.0f) + total.x;
}

// What the threads of a block share, and this thread's place.
struct Block {
    Place place;
    Boxes<2> boxes;            // of x or x2, and of dy, which becomes d_preact
    const TensorMap* maps[2];  // of these
    int first_channel[2];      // of the chunk in them
    int at;                    // this thread's elements in a box
    __device__ __forceinline__ void send(int i) const { boxes.send(maps, first_channel, place, i); }
};

// A thread's sums over its pixels of d_preact, and of d_preact * (x - centre).
struct Sums {
    float d_preact[V], product[V];
};

// Add a pixel to `sums`, and return its d_preact. y receives the output if `writes`. kept: its bits of dropout's mask.
__device__ __forceinline__ Raw add_pixel(Sums& sums, const Affine& affine, const Raw& x, const Raw& dy, u32 kept, float kept_scale,
                                         int silu, T* y, bool writes) {
    float v[V], d_preact[V], output[V], slope[V];
    to_floats(x, v);
    to_floats(dy, d_preact);
    linearize(affine, v, output, slope, silu);
    if constexpr (DROPS) drop<V>(kept, kept_scale, d_preact), drop<V>(kept, kept_scale, output);
    if (writes) store<V>(y, output);
#pragma unroll
    for (int k = 0; k < V; k++) {
        d_preact[k] *= slope[k];
        sums.d_preact[k] += d_preact[k];
        sums.product[k] += d_preact[k] * v[k];
    }
    Raw packed;
    store<V>(reinterpret_cast<T*>(&packed), d_preact);
    return packed;
}

// The first pass: add all pixels of a thread as their boxes arrive. d_preact takes dy's place. y: where the output of the first
// pixel goes.
__device__ __forceinline__ void add_pixels(Sums& sums, const Affine& affine, const Block& block, Held& held, MaskReader& bits,
                                           float kept_scale, int silu, T* y, int pitch, bool writes) {
    int boxes = block.boxes.count, count = block.place.count;
#pragma unroll 1
    for (int i = 0; i < boxes; i++) {
        if (HELD > 0 && i == boxes / 2) {
#pragma unroll
            for (int h = 0; h < HELD; h++)
                if (boxes + h < count)
                    held.d_preact[h] = add_pixel(sums, affine, held.x[h], held.d_preact[h], held.bits[h], kept_scale, silu,
                                                 y + (i64)(boxes + h) * pitch, writes);
        }
        block.boxes.wait(i);
        if (threadIdx.x == i % WARPS * 32 && i + DEPTH < boxes) block.send(i + DEPTH);
        if (i >= count) continue;
        T* own = block.boxes.box(1, i) + block.at;
        Raw& d_preact = *reinterpret_cast<Raw*>(own);
        d_preact = add_pixel(sums, affine, load_raw(block.boxes.box(0, i) + block.at), load_raw(own), bits.take(), kept_scale, silu,
                             y + (i64)i * pitch, writes);
    }
}

// The map from d_preact and x to dx of V channels: dx = gain * d_preact - (constant + slope * (x - centre)).
struct Gradient {
    float constant[V], gain[V], slope[V], centre[V];
    __device__ __forceinline__ Gradient(const float* table, int first, const float (&centre)[V]) {
        load<V>(table + CONSTANT + first, constant);
        load<V>(table + GAIN + first, gain);
        load<V>(table + SLOPE + first, slope);
#pragma unroll
        for (int k = 0; k < V; k++) this->centre[k] = centre[k];
    }
    // Write dx of a pixel. Unless `plain`, add element e of addend, which may be null, and add dx to `sum`.
    __device__ __forceinline__ void write(T* dx, const Raw& x, const Raw& d_preact_raw, const T* addend, i64 e, float (&sum)[V],
                                          bool plain) const {
        float v[V], d_preact[V], term[V] = {};
        to_floats(x, v);
        to_floats(d_preact_raw, d_preact);
        if (!plain && addend) load<V>(addend + e, term);
#pragma unroll
        for (int k = 0; k < V; k++) {
            v[k] = gain[k] * d_preact[k] - (constant[k] + slope[k] * (v[k] - centre[k]));
            if (!plain) sum[k] += v[k] += term[k];
        }
        store<V>(dx, v);
    }
};

// The second pass: write dx of all pixels of a thread, from where they are kept. dx: where its first pixel goes, or null.
__device__ __forceinline__ void write_pixels(float (&sum)[V], const Gradient& gradient, const Block& block, const Held& held, T* dx,
                                             const T* addend, int pitch, bool plain) {
    int boxes = block.boxes.count, count = dx ? block.place.count : 0;
#pragma unroll
    for (int h = 0; h < HELD; h++)
        if (boxes + h < count)
            gradient.write(dx + (i64)(boxes + h) * pitch, held.x[h], held.d_preact[h], addend, (i64)(boxes + h) * pitch, sum,
                           plain);
#pragma unroll 4
    for (int i = 0; i < min(boxes, count); i++, dx += pitch)
        gradient.write(dx, load_raw(block.boxes.box(0, i) + block.at), load_raw(block.boxes.box(1, i) + block.at), addend,
                       (i64)i * pitch, sum, plain);
}

// Writes
//   dx, dx2           either may be null.
//   y                 the recomputed output, or null. May be dy itself.
//   sums, sums2       float (N, parts, C1) and (N, parts, C2), or null, as in input_gradients.
//   totals            float2 (N, C), or null; it and dscale, dshift are as in finish_sums.
//   dweight, dbias    (C), or null; where blocks add.
// mask: under DROPS dropout's, of y.
extern "C" __global__ __launch_bounds__(THREADS, 1) void backward(
    const __grid_constant__ TensorMap map, const __grid_constant__ TensorMap map2, const __grid_constant__ TensorMap dy_map,
    const T* __restrict__ x, const T* __restrict__ x2, const T* dy, T* dx, const T* addend, T* dx2,
    const T* addend2, T* y, float* sums, float* sums2, float2* totals, float* dscale, int add_scale, float* dshift, int add_shift,
    float* dweight, int add_weight, float* dbias, int add_bias, AFFINE, Exchange* exchange, int N, int S, int C1, int C2, int silu,
    int parts, int boxes, const u8* mask, float kept_scale) {
    extern __shared__ __align__(128) T memory[];
    __shared__ u64 barriers[BOXES];
    int C = C1 + C2, size = C / (u32)groups, chunks = C / WIDTH, warp = threadIdx.x / 32, pitch, recomputed_pitch, dy_pitch;
    int image = blockIdx.x / (u32)parts, n = image / (u32)chunks, part = blockIdx.x - image * parts;
    if (n >= N) {
        wait_for_previous();
        int first = N * chunks * parts;
        add_images(exchange, blockIdx.x - first, gridDim.x - first, reinterpret_cast<float2*>(memory), dweight, add_weight, dbias,
                   add_bias, weight, bias, scale, shift, mean, rstd, groups, N, C, parts);
        __syncthreads();
        if (threadIdx.x == 0) exchange->arrive();
        return;
    }
    Place place(n, part, parts, image - n * chunks, S);
    bool second = place.c0 >= C1;
    const Block block = {place, {memory, boxes, shared_address(barriers)}, {second ? &map2 : &map, &dy_map},
                         {place.c0 - (second ? C1 : 0), place.c0}, place.row * WIDTH + place.offset};
    float* warp_sums = reinterpret_cast<float*>(block.boxes.end());
    float* table = warp_sums + 2 * WARPS * WIDTH;
    float2* channels = reinterpret_cast<float2*>(table + ROWS);
    constexpr int SENDER = WARPS - 1;  // the last warp: the first ones prepare the channels
    if (warp == SENDER) block.boxes.init();
    if (threadIdx.x == THREADS - 1) prefetch(*block.maps[0]), prefetch(dy_map);
    const T* from = place.element(x, x2, S, C1, C2, pitch);
    const T* from_dy = place.element(dy, dy, S, C, 0, dy_pitch);
    wait_for_previous();
    int j = threadIdx.x;  // channel of the chunk, for the threads that prepare one
    u32 launch = exchange && j < WIDTH ? exchange->launch() : 0;
    // These loads go before the boxes: what is asked for after the boxes would arrive after them.
    Channel channel(n, place.c0, WIDTH, C, size, weight, bias, scale, shift);
    float average = 0.0f, r = 0.0f;
    if (channel.here) average = mean[(i64)n * groups + channel.group], r = rstd[(i64)n * groups + channel.group];
    Held held;
    held.load(from, from_dy, pitch, dy_pitch, boxes, place.count);
    const u8* own_mask = row_of(mask, n, (i64)S * C);
    MaskReader bits(own_mask, place.in_image(C), dy_pitch, DROPS ? min(boxes, place.count) : 0);
    if (DROPS) held.load_bits(own_mask, place.in_image(C), dy_pitch, boxes, place.count);
    if (threadIdx.x == 32 * SENDER)
        for (int i = 0; i < min(boxes, DEPTH); i++) block.send(i);
    if (channel.here) {
        Affine::fill(table, WIDTH, channel, average, r);
        table[RSTD + j] = r;
        table[GAMMA + j] = channel.own.gamma();
    }
    __syncthreads();

    float centre[V];
    {
        T* recomputed = place.element(y, y, S, C, 0, recomputed_pitch);
        Sums of_thread = {};
        Affine affine(table, WIDTH, place.offset);
#pragma unroll
        for (int k = 0; k < V; k++) centre[k] = affine.centre[k];
        if (recomputed) add_pixels(of_thread, affine, block, held, bits, kept_scale, silu, recomputed, recomputed_pitch, true);
        else add_pixels(of_thread, affine, block, held, bits, kept_scale, silu, recomputed, recomputed_pitch, false);
        add_warp(warp_sums, place, of_thread.d_preact, of_thread.product);
    }
    __syncthreads();

    float2 total = make_float2(0.0f, 0.0f);
    float share = 0.0f, off_centre = 0.0f, gamma = 0.0f, rstd_j = 0.0f;  // computed before the slots arrive
    if (channel.here) {
        total = make_float2(sum_of_warps(warp_sums, j), sum_of_warps(warp_sums, WIDTH + j));
        TaggedSlot* slots = exchange ? exchange->slots + (i64)n * parts * C + place.c0 + j : nullptr;
        if (exchange) slots[part * C].publish(total.x, total.y, launch);
        off_centre = table[MEAN + j] - centre_of(table[MEAN + j]), rstd_j = table[RSTD + j], gamma = table[GAMMA + j];
        share = rstd_j / ((float)S * size);
        table[GAIN + j] = gamma * rstd_j;
        if (parts > 1) total = receive(slots, parts, C, launch);
        total.y = (total.y - off_centre * total.x) * rstd_j;
        channels[j] = make_float2(gamma * total.x, gamma * total.y);
    }
    __syncthreads();
    if (channel.here) {
        const float2* group = channels + j / (u32)size * size;
        float2 sum = make_float2(0.0f, 0.0f);
        for (int k = 0; k < size; k++) sum.x += group[k].x, sum.y += group[k].y;
        float slope = sum.y * share * rstd_j;
        table[SLOPE + j] = slope;
        table[CONSTANT + j] = sum.x * share - slope * off_centre;
        if (part == 0 && (totals || dscale || dshift)) {
            Modulation own(n, place.c0 + j, C, weight, bias, scale, shift);
            store_totals(own, total, (i64)n * C + place.c0 + j, totals, dscale, add_scale, dshift, add_shift);
        }
    }
    __syncthreads();
    if (exchange && threadIdx.x == THREADS - 1) exchange->arrive();
    T* target = place.element(dx, dx2, S, C1, C2, pitch);
    if (!target && !sums && !sums2) return;
    const T* before = place.element(addend, addend2, S, C1, C2, pitch);
    Gradient gradient(table, place.offset, centre);
    float sum[V] = {};
    float* out = second ? sums2 : sums;
    if (before || out) write_pixels(sum, gradient, block, held, target, before, pitch, false);
    else write_pixels(sum, gradient, block, held, target, before, pitch, true);
    if (!out) return;
    add_warp(warp_sums, place, sum, sum);  // it adds two arrays, of which one is used
    __syncthreads();
    if (channel.here) out[((i64)n * parts + part) * (second ? C2 : C1) + block.first_channel[0] + j] = sum_of_warps(warp_sums, j);
}
