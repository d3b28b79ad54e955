// What both files of group norm share: which channels and pixels a thread has, the affine map, SiLU, sums by channel.
// A launch is of THREADS threads, grid (N * tiles, chunks): a block covers `across` packs of V channels by
// THREADS / across pixels, and walks through one image by strides of `tiles` times as many, so that the image's blocks read
// what lies side by side at about the same time: its tile. chunks * across packs cover the channels.
#pragma once
#include "affine.cuh"
#include "vector.cuh"

constexpr int THREADS = 256;
constexpr int V = VEC ? Pack<T>::SIZE : 1;

// The channels and pixels of one thread. What is never negative is divided as u32: half the instructions.
struct Lane {
    int n, tile, c0, c;     // image, tile, first channel of the block's chunk and of this thread's V
    int pixel, step, count; // pixels pixel + i * step of all images, for i < count; an idle thread has c = c0
    __device__ __forceinline__ Lane(int S, int C, int tiles, int across) {
        int y = threadIdx.x / (u32)across, rows = THREADS / (u32)across;
        n = blockIdx.x / (u32)tiles;
        tile = blockIdx.x - n * tiles;
        c0 = blockIdx.y * across * V;
        c = c0 + (threadIdx.x - y * across) * V;
        bool active = y < rows && c < C;
        if (!active) c = c0;
        int first = tile * rows + y;
        pixel = n * S + first;
        step = tiles * rows;
        count = active && first < S ? CEIL_DIV((u32)(S - first), (u32)step) : 0;
    }
    // From the last pixel to the first: what was last used before is still in the GPU's cache.
    __device__ __forceinline__ void turn_back() {
        pixel += (count - 1) * step;
        step = -step;
    }
};

// Where the lane's first element lies, in x or in x2 (null where that is); `pitch` becomes the elements to the next one.
template <typename P>
__device__ __forceinline__ P* first_element(P* x, P* x2, const Lane& lane, int C1, int C2, int& pitch) {
    bool first = lane.c < C1;
    int width = first ? C1 : C2;
    P* source = first ? x : x2;
    pitch = lane.step * width;
    return source ? source + (i64)lane.pixel * width + lane.c - (first ? 0 : C1) : nullptr;
}

// V elements as they lie in memory: in words, as copies of 16-bit elements would cost an instruction each.
template <bool> struct Chosen { typedef uint4 Raw; };
template <> struct Chosen<false> { typedef T Raw; };
typedef Chosen<VEC>::Raw Raw;
__device__ __forceinline__ Raw load_raw(const T* p) { return *reinterpret_cast<const Raw*>(p); }

// The elements of a word. Of bf16 by one instruction each: taken as 16 bits, the upper half costs two.
template <typename S> __device__ void split(u32 word, float* values);
template <> __device__ __forceinline__ void split<float>(u32 word, float* values) { values[0] = __uint_as_float(word); }
template <> __device__ __forceinline__ void split<bf16>(u32 word, float* values) {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000);
}
template <> __device__ __forceinline__ void split<half>(u32 word, float* values) {
    values[0] = to_float(half{(u16)word});
    values[1] = to_float(half{(u16)(word >> 16)});
}
__device__ __forceinline__ void to_floats(T raw, float* values) { values[0] = to_float(raw); }
__device__ __forceinline__ void to_floats(const uint4& raw, float* values) {
    u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int k = 0; k < 4; k++) split<T>(words[k], values + k * (4 / sizeof(T)));
}

// Rows of them from ARRAYS arrays: the next BATCH rows are on their way while row() uses these, so that enough bytes are
// in flight. An array may be null; then its elements are not set.
template <int ARRAYS, int BATCH> struct Rows {
    const T* start[ARRAYS];
    int pitch[ARRAYS], count;
    Raw next[BATCH][ARRAYS];

    __device__ __forceinline__ void fetch(int first) {
#pragma unroll
        for (int u = 0; u < BATCH; u++)
#pragma unroll
            for (int a = 0; a < ARRAYS; a++)
                if (first + u < count && start[a]) next[u][a] = load_raw(start[a] + (i64)(first + u) * pitch[a]);
    }
    template <typename Row> __device__ __forceinline__ void each(Row row) {  // after fetch(0)
        for (int i = 0; i < count; i += BATCH) {
            Raw now[BATCH][ARRAYS];
#pragma unroll
            for (int u = 0; u < BATCH; u++)
#pragma unroll
                for (int a = 0; a < ARRAYS; a++) now[u][a] = next[u][a];
            fetch(i + BATCH);
#pragma unroll
            for (int u = 0; u < BATCH; u++)
                if (i + u < count) row(i + u, now[u]);
        }
    }
};

// The channel of the block's chunk that this thread prepares for all of them; `here` where there is one. A thread has V of
// them, and many threads the same: to read the parameters by each cost as many instructions as a dozen pixels.
struct Channel {
    int j, c, group;  // which of the chunk, of all, and its group
    bool here;
    Modulation own;
    __device__ __forceinline__ Channel(const Lane& lane, int width, int C, int size, const float* weight, const float* bias,
                                       const float* scale, const float* shift) {
        j = threadIdx.x, c = lane.c0 + j, group = c / (u32)size;
        here = j < width && c < C;
        if (here) own = Modulation(lane.n, c, C, weight, bias, scale, shift);
    }
};

// SCALE * z = gain * (x - centre) + offset for V channels, from a table in shared memory, three rows of `width` floats that
// each Channel fills.
struct Affine {
    float centre[V], gain[V], offset[V];
    __device__ __forceinline__ static void fill(float* table, int width, const Channel& channel, float mean, float rstd) {
        float2 map = affine_of(channel.own, mean, rstd);
        table[channel.j] = mean;
        table[width + channel.j] = map.x;
        table[2 * width + channel.j] = map.y;
    }
    __device__ __forceinline__ Affine(const float* table, int width, const Lane& lane) {
        load<V>(table + lane.c - lane.c0, centre);
        load<V>(table + width + lane.c - lane.c0, gain);
        load<V>(table + 2 * width + lane.c - lane.c0, offset);
#pragma unroll
        for (int k = 0; k < V; k++) centre[k] = centre_of(centre[k]);
    }
};

// mean and rstd of a group from its channels' moments: mean and sum of squared deviations of S pixels each.
__device__ __forceinline__ float2 group_statistics(const float2* moments, int size, int S, float eps) {
    float centre = moments[0].x, shift = 0.0f, squares = 0.0f;
    for (int k = 0; k < size; k++) shift += moments[k].x - centre;
    float average = centre + shift / size;
    for (int k = 0; k < size; k++) squares += moments[k].y + S * (moments[k].x - average) * (moments[k].x - average);
    return make_float2(average, rsqrtf(squares / ((float)S * size) + eps));
}

// From x in v: v = x - centre, y, and the slope of y by z.
__device__ __forceinline__ void linearize(const Affine& affine, float (&v)[V], float (&y)[V], float (&slope)[V], bool silu) {
#pragma unroll
    for (int k = 0; k < V; k++) {
        v[k] -= affine.centre[k];
        activate(fmaf(affine.gain[k], v[k], affine.offset[k]), silu, y[k], slope[k]);
    }
}
// y of x in v.
__device__ __forceinline__ void apply(const Affine& affine, float (&v)[V], bool silu) {
    float y[V], slope[V];
    linearize(affine, v, y, slope, silu);
#pragma unroll
    for (int k = 0; k < V; k++) v[k] = y[k];
}

// Adds a over the block's pixels in a fixed order; store(channel within the chunk, sum). `scratch`: shared, V * THREADS.
// A warp takes a channel of every pack: a lane sums every 32 / across-th row, then the lanes of a pack are summed.
template <typename Store>
__device__ __forceinline__ void block_sums(int across, float* scratch, const float (&a)[V], Store store) {
    __syncthreads();
#pragma unroll
    for (int k = 0; k < V; k++) scratch[k * THREADS + threadIdx.x] = a[k];
    __syncthreads();
    int lane = threadIdx.x % 32, used = 32 / across * across, filled = THREADS / across * across;
    for (int k = threadIdx.x / 32; k < V; k += THREADS / 32) {
        float own = 0.0f;
#pragma unroll 8
        for (int i = lane; i < filled; i += used) own += lane < used ? scratch[k * THREADS + i] : 0.0f;
        float sum = own;
        for (int i = across; i < used; i += across) sum += __shfl_sync(~0u, own, lane + i);
        if (lane < across) store(lane * V + k, sum);
    }
}
