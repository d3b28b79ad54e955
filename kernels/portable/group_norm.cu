// Group norm: y = silu(z) or z, z = gamma * xhat + offset, xhat = (x - mean) * rstd. d_preact is the gradient of z.
//
//   gamma = weight * (1 + scale), offset = bias * (1 + scale) + shift
//
//   x, x2                   T (N, S, C1) and (N, S, C2), read as one array of C = C1 + C2 channels; S is the pixels of an
//                           image. x2 is null where C2 = 0.
//   y, dy                   T (N, S, C).
//   weight, bias            float (C).
//   scale, shift            float (N, C), or null.
//   mean, rstd              float (N, G).
// Outputs are overwritten; gradients with an `add` flag accumulate where it is set. VEC=1: C1, C2 and every T address are
// multiples of a 16-byte pack. DROPS=1: dropout follows, with a mask as in dropout.cuh.
//
// Sums        Each tile of pixels stores its sums: in the forward channel statistics (N, tiles, C), as in
//             channel_statistics.cuh; in the backward tile_sums, float2 (N, tiles, C), of d_preact. They are added in the order
//             of the tiles: two runs give the same bits. Where tiles and a group's channels are few, every block of `normalize`
//             and `input_gradients` adds those of its groups itself. Otherwise `finish_statistics` and `finish_sums` do it once.
// Launch      The tiled kernels are launched as tiles.cuh says.
// Shared      Dynamic shared memory. finish_statistics, and `normalize` where it is given channel statistics: 16 bytes for each
//             channel of a block's groups, or for each thread if those are more. finish_sums, and `input_gradients` where it is
//             given tile_sums: 8 bytes for each channel of a block's groups and each thread. `input_gradients` always 16 packs a
//             thread more, on Turing 8.
// On Hopper group_norm_sm90.cu takes what fits in shared memory, group_norm_backward_sm90.cu where it is estimated to be
// faster.
#include "mma.cuh"
#include "channel_statistics.cuh"
#include "dropout.cuh"
#include "tiles.cuh"

extern __shared__ __align__(16) float2 channels[];  // sized as above
constexpr int WIDTH = 32 * V;                       // channels of a chunk, at most

#define EXTENT int S, int C1, int C2, int tiles, int across

// Store the block's sums of a and of b as tile_sums of its tile.
__device__ __forceinline__ void store_tile_sums(float2* tile_sums, const Lane& lane, int C, int tiles, int across, float* scratch,
                                               const float (&a)[V], const float (&b)[V]) {
    float2* out = tile_sums + ((i64)lane.n * tiles + lane.tile) * C + lane.c0;
    block_sums(across, scratch, a, [&](int j, float sum) { if (lane.c0 + j < C) out[j].x = sum; });
    block_sums(across, scratch, b, [&](int j, float sum) { if (lane.c0 + j < C) out[j].y = sum; });
}

// Channel statistics of one of the sources x and x2. The centre is the image's first pixel.
extern "C" __global__ __launch_bounds__(THREADS, 2) void statistics(const T* __restrict__ x, CentredStatistics* statistics, int S,
                                                                    int C, int tiles, int across) {
    wait_for_previous();
    __shared__ float scratch[V * THREADS];
    Lane lane(S, C, tiles, across);
    Rows<1, 4> rows;
    rows.start[0] = first_element(x, x, lane, C, 0, rows.pitch[0]);
    rows.count = lane.count;
    rows.fetch(0);
    const T* centre = x + (i64)lane.n * S * C;
    float first[V] = {}, sum[V] = {}, square[V] = {};
    if (lane.count) load<V>(centre + lane.c, first);
    rows.each([&](int, const Raw (&raw)[1]) {
        float v[V];
        to_floats(raw[0], v);
#pragma unroll
        for (int k = 0; k < V; k++) {
            float d = v[k] - first[k];
            sum[k] += d;
            square[k] += d * d;
        }
    });
    int at_once = THREADS / (u32)across, rest = S % lane.step - lane.tile * at_once;
    float count = S / lane.step * at_once + max(0, min(at_once, rest));
    CentredStatistics* out = statistics + ((i64)lane.n * tiles + lane.tile) * C + lane.c0;
    centre += lane.c0;
    block_sums(across, scratch, sum, [&](int j, float sum) {
        if (lane.c0 + j < C) out[j] = {count, to_float(centre[j]), sum, 0.0f};
    });
    block_sums(across, scratch, square, [&](int j, float square) {
        if (lane.c0 + j < C) out[j].square = square;
    });
}

// The channel statistics of both sources: CentredStatistics where `centred`, else RawStatistics.
#define STATISTICS const void* statistics, int centred, int tiles1, const void* statistics2, int centred2, int tiles2
#define GIVEN statistics, centred, tiles1, statistics2, centred2, tiles2, C1, C2
struct Given {
    const void* statistics;
    int centred, tiles1;
    const void* statistics2;
    int centred2, tiles2, C1, C2;
};

// The tiles of one channel that one of `helpers` threads adds up: every helpers-th.
struct Tiles {
    const void* p;
    bool centred;
    int count, pitch;
    __device__ __forceinline__ Tiles(const Given& given, int n, int c, int helper, int helpers) {
        bool second = c >= given.C1;
        int channels = second ? given.C2 : given.C1, tiles = second ? given.tiles2 : given.tiles1;
        centred = second ? given.centred2 : given.centred;
        if (second) c -= given.C1;
        i64 first = (i64)n * (tiles * channels) + (helper * channels + c);
        p = (const u8*)(second ? given.statistics2 : given.statistics) + first * (centred ? sizeof(CentredStatistics) : sizeof(RawStatistics));
        count = helpers == 1 ? tiles : CEIL_DIV((u32)max(0, tiles - helper), (u32)helpers);
        pitch = helpers * channels;
    }
};

__device__ __forceinline__ void add(float2& sum, float2 term) { sum.x += term.x, sum.y += term.y; }
__device__ __forceinline__ void add(double2& sum, double2 term) { sum.x += term.x, sum.y += term.y; }
__device__ __forceinline__ void add(RawStatistics& sum, const RawStatistics& term) { sum.add(term); }
__device__ __forceinline__ void add(double2& sum, const CentredStatistics& term) { add(sum, term.raw()); }

// p[0] + p[pitch] + ... + p[(count - 1) * pitch]. AT_ONCE loads are in flight.
template <typename Sum, typename Term> __device__ __forceinline__ Sum sum_of(const Term* p, int count, int pitch) {
    constexpr int AT_ONCE = 128 / sizeof(Term);
    Sum sum = {};
#pragma unroll 1
    for (; count > 0; count -= AT_ONCE) {
        Term terms[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++, p += pitch) terms[u] = u < count ? *p : Term{};
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) add(sum, terms[u]);
    }
    return sum;
}

// The groups that have channels c0 to c1: all their channels, from `begin` to begin + width, and how many threads share the
// tiles of each (helpers).
struct Groups {
    int begin, width, helpers;
    __device__ __forceinline__ Groups(int c0, int c1, int size, int tiles) {
        begin = c0 / (u32)size * size;
        width = CEIL_DIV(c1, (u32)size) * size - begin;
        helpers = tiles > 16 ? max(1, min(THREADS / (u32)width, CEIL_DIV(tiles, 16))) : 1;
    }
};

// The channel statistics of one image, for the channels of the groups that a block needs.
struct ImageStatistics : Groups {
    double2* sums;  // double, because E[x^2] - E[x]^2 cancels
    __device__ __forceinline__ ImageStatistics(int c0, int c1, int size, int tiles) : Groups(c0, c1, size, tiles) {
        sums = reinterpret_cast<double2*>(channels);
    }
    // The tiles that this thread adds up. Computed before wait_for_previous.
    __device__ __forceinline__ Tiles own(const Given& given, int n) const {
        int helper = helpers == 1 ? 0 : threadIdx.x / (u32)width;
        return Tiles(given, n, begin + threadIdx.x - helper * width, helper, helpers);
    }
    __device__ __forceinline__ void find(const Given& given, int n, Tiles own) {
#pragma unroll 1
        for (int i = threadIdx.x; i < width * helpers; i += THREADS, own = Tiles(given, n, begin + i, 0, 1)) {
            if (own.centred) sums[i] = sum_of<double2>((const CentredStatistics*)own.p, own.count, own.pitch);
            else sums[i] = sum_of<RawStatistics>((const RawStatistics*)own.p, own.count, own.pitch).raw();
        }
        __syncthreads();
        if (helpers == 1) return;
        int i = threadIdx.x;
        if (i < width) sums[i] = sum_of<double2>(sums + i, helpers, width);
        __syncthreads();
    }
    // After find(). `share` is 1 / (elements of a group).
    __device__ __forceinline__ float2 mean_and_rstd(int group, int size, double share, float eps) const {
        double2 sum = sum_of<double2>(sums + group * size - begin, size, 1);
        double mean = sum.x * share;
        return make_float2((float)mean, rsqrtf((float)fmax(fma(-mean, mean, sum.y * share), 0.0) + eps));
    }
};

// mean, rstd. Launch: grid (N, chunks). A block has a chunk of `across` groups, at most THREADS.
extern "C" __global__ __launch_bounds__(THREADS, 2) void finish_statistics(STATISTICS, int C1, int C2, float* mean, float* rstd,
                                                                           int groups, int across, double share, float eps) {
    int size = (C1 + C2) / (u32)groups, n = blockIdx.x, first = blockIdx.y * across, end = min(groups, first + across);
    Given given = {GIVEN};
    ImageStatistics image(first * size, end * size, size, max(tiles1, tiles2));
    Tiles own = image.own(given, n);
    wait_for_previous();
    image.find(given, n, own);
    int g = first + threadIdx.x;
    if (g >= end) return;
    float2 found = image.mean_and_rstd(g, size, share, eps);
    mean[(i64)n * groups + g] = found.x;
    rstd[(i64)n * groups + g] = found.y;
}

// y, of one or two sources. Either mean and rstd are given, or channel statistics; then new_mean and new_rstd are written too.
// mask: under DROPS that of dropout, which is written and applied to y.
// Small launches spend most of their time before the first y. So all that can be computed before wait_for_previous is, and
// all loads are issued at once.
extern "C" __global__ __launch_bounds__(THREADS, 2) void normalize(
    T* y, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu, STATISTICS, float* new_mean, float* new_rstd,
    double share, float eps, u8* mask, float kept_scale, DRAWS) {
    __shared__ __align__(16) float table[3 * WIDTH];
    int C = C1 + C2, size = C / (u32)groups, pitch;
    Lane lane(S, C, tiles, across);
    lane.reverse();
    Given given = {GIVEN};
    ImageStatistics image(lane.c0, min(C, lane.c0 + across * V), size, max(tiles1, tiles2));
    Tiles own = image.own(given, lane.n);
    Rows<1, 4> rows;
    rows.start[0] = first_element(x, x2, lane, C1, C2, rows.pitch[0]);
    rows.count = lane.count;
    if (int c = lane.c0 + threadIdx.x; threadIdx.x < across * V && c < C) {
        prefetch_line(weight + c), prefetch_line(bias + c);
        if (scale) prefetch_line(scale + (i64)lane.n * C + c);
        if (shift) prefetch_line(shift + (i64)lane.n * C + c);
    }
    wait_for_previous();
    rows.fetch(0);
    Channel channel(lane.n, lane.c0, across * V, C, size, weight, bias, scale, shift);
    if (statistics) image.find(given, lane.n, own);
    if (channel.here) {
        i64 group = (i64)lane.n * groups + channel.group;
        float2 found;
        if (statistics) found = image.mean_and_rstd(channel.group, size, share, eps);
        else found = make_float2(mean[group], rstd[group]);
        Affine::fill(table, WIDTH, channel, found.x, found.y);
        if (statistics && lane.tile == 0 && channel.c == channel.group * size) new_mean[group] = found.x, new_rstd[group] = found.y;
    }
    __syncthreads();
    Affine affine(table, WIDTH, lane.c - lane.c0);
    T* target = first_element(y, y, lane, C, 0, pitch);
    u32 now = DROPS ? *step : 0;
    u8* own_mask = row_of(mask, lane.n, (i64)S * C);
    i64 own_bits = lane.in_image(S, C);
    rows.each([&](int i, const Raw (&raw)[1]) {
        float v[V];
        to_floats(raw[0], v);
        apply(affine, v, silu);
        if constexpr (DROPS)
            drop<V>(draw_mask(own_mask, own_bits + (i64)i * pitch, lane.n, now, seed, stream, first, threshold), kept_scale, v);
        store<V>(target + (i64)i * pitch, v);
    });
}

// From x and dy: v = x - centre, the output y, and d_preact, which is dy times dy/dz, or under SILU_DONE dy itself. own_mask:
// under DROPS dropout's, of dy and y.
enum { SILU = 1, SILU_DONE = 2 };
template <int ARRAYS>
__device__ __forceinline__ void differentiate(const Affine& affine, const Raw (&raw)[ARRAYS], float (&v)[V], float (&y)[V],
                                              float (&d_preact)[V], int silu, MaskReader& own_mask, float kept_scale) {
    float slope[V];
    to_floats(raw[0], v);
    to_floats(raw[1], d_preact);
    if (silu == SILU_DONE) return linearize(affine, v, y, slope, true);
    linearize(affine, v, y, slope, silu);
    if constexpr (DROPS) {
        u32 kept = own_mask.take();
        drop<V>(kept, kept_scale, d_preact);
        drop<V>(kept, kept_scale, y);
    }
#pragma unroll
    for (int k = 0; k < V; k++) d_preact[k] *= slope[k];
}

// tile_sums: the sums of d_preact and of d_preact * (x - centre) over each tile.
extern "C" __global__ __launch_bounds__(THREADS, 2) void backward_sums(
    float2* tile_sums, const T* __restrict__ dy, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu,
    const u8* mask, float kept_scale) {
    wait_for_previous();
    __shared__ float scratch[V * THREADS];
    __shared__ __align__(16) float table[3 * WIDTH];
    int C = C1 + C2, size = C / groups;
    Lane lane(S, C, tiles, across);
    Rows<2, 2> rows;
    rows.start[0] = first_element(x, x2, lane, C1, C2, rows.pitch[0]);
    rows.start[1] = first_element(dy, dy, lane, C, 0, rows.pitch[1]);
    rows.count = lane.count;
    rows.fetch(0);
    MaskReader own_mask(row_of(mask, lane.n, (i64)S * C), lane.in_image(S, C), rows.pitch[1], DROPS ? lane.count : 0);
    Channel channel(lane.n, lane.c0, across * V, C, size, weight, bias, scale, shift);
    i64 group = (i64)lane.n * groups + channel.group;
    if (channel.here) Affine::fill(table, WIDTH, channel, mean[group], rstd[group]);
    __syncthreads();
    Affine affine(table, WIDTH, lane.c - lane.c0);
    float sum[V] = {}, product[V] = {};
    rows.each([&](int, const Raw (&raw)[2]) {
        float v[V], y[V], d_preact[V];
        differentiate(affine, raw, v, y, d_preact, silu, own_mask, kept_scale);
#pragma unroll
        for (int k = 0; k < V; k++) {
            sum[k] += d_preact[k];
            product[k] += d_preact[k] * v[k];
        }
    });
    store_tile_sums(tile_sums, lane, C, tiles, across, scratch, sum, product);
}

// The gradients of parameters, from the sums over an image. totals: float2 (N, C), the sums of d_preact and of d_preact * xhat,
// times 1 + scale; their sums over N are the gradients of bias and weight. dscale, dshift: float (N, C), or null.
#define TOTALS float2* totals, float* dscale, int add_scale, float* dshift, int add_shift
#define GIVEN_TOTALS totals, dscale, add_scale, dshift, add_shift
#define GIVEN_AFFINE weight, bias, scale, shift, mean, rstd, groups

// A channel's gamma and offset, and the statistics of its group.
struct Normed : Modulation {
    float mean, rstd;
    __device__ __forceinline__ Normed(int n, int c, int C, int size, const float* weight, const float* bias, const float* scale,
                                      const float* shift, const float* means, const float* rstds, int groups)
        : Modulation(n, c, C, weight, bias, scale, shift) {
        i64 group = (i64)n * groups + c / (u32)size;
        mean = means[group], rstd = rstds[group];
    }
};

// The sums of gamma * d_preact and of gamma * d_preact * xhat over an image's pixels. Where `first`, find() also writes the
// totals of channels c0 to c1.
struct Gradients : Groups {
    float2* sums;  // of each channel from `begin` on; before it lie THREADS float2 for the helpers' shares
    __device__ __forceinline__ Gradients(int c0, int c1, int size, int tiles, float2* memory) : Groups(c0, c1, size, tiles),
                                                                                              sums(memory + THREADS) {}
    __device__ __forceinline__ void find(int n, const float2* tile_sums, int tiles, int c0, int c1, bool first, TOTALS, AFFINE,
                                         int C) {
        float2* shares = sums - THREADS;
        int size = C / (u32)groups;
        auto finish = [&](int c, const Normed& own, float2 total) {
            i64 i = (i64)n * C + c;
            total.y = (total.y - (own.mean - centre_of(own.mean)) * total.x) * own.rstd;
            sums[c - begin] = make_float2(own.gamma() * total.x, own.gamma() * total.y);
            if (!first || c < c0 || c >= c1) return;
            totals[i] = make_float2(own.factor() * total.x, own.factor() * total.y);
            if (dscale) dscale[i] = (add_scale ? dscale[i] : 0.0f) + own.weight * total.y + own.bias * total.x;
            if (dshift) dshift[i] = (add_shift ? dshift[i] : 0.0f) + total.x;
        };
        const float2* p = tile_sums + (i64)n * tiles * C + begin;
        if (helpers == 1) {
            for (int j = threadIdx.x; j < width; j += THREADS) {  // all loads are issued at once
                Normed own(n, begin + j, C, size, GIVEN_AFFINE);
                finish(begin + j, own, sum_of<float2>(p + j, tiles, C));
            }
        } else {
            int helper = threadIdx.x / (u32)width, j = threadIdx.x - helper * width;
            Normed own(n, begin + j, C, size, GIVEN_AFFINE);
            if (helper < helpers) {
                int count = CEIL_DIV((u32)max(0, tiles - helper), (u32)helpers);
                shares[threadIdx.x] = sum_of<float2>(p + helper * C + j, count, helpers * C);
            }
            __syncthreads();
            if (helper == 0) finish(begin + j, own, sum_of<float2>(shares + j, helpers, width));
        }
        __syncthreads();
    }
    // Their means over a group of `count` elements. After find().
    __device__ __forceinline__ float2 means(int group, int size, float count) const {
        float2 sum = sum_of<float2>(sums + group * size - begin, size, 1);
        return make_float2(sum.x / count, sum.y / count);
    }
};

// means (N, G), and the totals. Launch: grid (N, ceil(groups / across)); a block has `across` groups.
extern "C" __global__ __launch_bounds__(THREADS, 2) void finish_sums(const float2* tile_sums, float2* means, TOTALS, AFFINE, int S,
                                                                     int C, int tiles, int across) {
    wait_for_previous();
    int n = blockIdx.x, size = C / (u32)groups, first = blockIdx.y * across, end = min(groups, first + across);
    Gradients gradients(first * size, end * size, size, tiles, channels);
    gradients.find(n, tile_sums, tiles, first * size, end * size, true, GIVEN_TOTALS, GIVEN_AFFINE, C);
    for (int g = first + threadIdx.x; g < end; g += THREADS)
        means[(i64)n * groups + g] = gradients.means(g, size, (float)S * size);
}

// Like Rows, but each thread's rows are loaded into its own part of shared memory. Rows in flight then take no registers, and
// there can be more of them.
template <int ARRAYS, int DEPTH> struct Stream {
    const T* next[ARRAYS];  // the row to load next
    int pitch[ARRAYS], count[ARRAYS];
    Raw* slots;             // this thread's first of DEPTH * ARRAYS slots, THREADS apart

    __device__ __forceinline__ void fetch(int a, int i) {  // row i of array a
        if (i >= count[a]) return;
        int slot = ((u32)i % DEPTH * ARRAYS + a) * THREADS;
        if constexpr (VEC) cp_async(shared_address(slots) + slot * (int)sizeof(Raw), next[a], true);
        else slots[slot] = *reinterpret_cast<const Raw*>(next[a]);
        next[a] += pitch[a];
    }
    // begin_early loads the first rows of array 0, begin those of the others.
    __device__ __forceinline__ void begin_early() {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) fetch(0, i);
    }
    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int i = 0; i < DEPTH; i++) {
#pragma unroll
            for (int a = 1; a < ARRAYS; a++) fetch(a, i);
            cp_async_commit();
        }
    }
    template <typename Row> __device__ __forceinline__ void each(Row row) {  // for the rows of array 0
#pragma unroll 1
        for (int i = 0; i < count[0]; i++) {
            cp_async_wait<DEPTH - 1>();
            Raw raw[ARRAYS];
#pragma unroll
            for (int a = 0; a < ARRAYS; a++) raw[a] = slots[((u32)i % DEPTH * ARRAYS + a) * THREADS];
            row(raw);
#pragma unroll
            for (int a = 0; a < ARRAYS; a++) fetch(a, i + DEPTH);
            cp_async_commit();
        }
    }
};
#if __CUDA_ARCH__ >= 800
constexpr int DEPTH = 4;
#else
constexpr int DEPTH = 2;  // shared memory has no room for more
#endif

// dx, dx2 = gain * d_preact - rstd * (means.x + xhat * means.y) + addend, addend2. gain is gamma * rstd.
//   dx, dx2          either may be null.
//   addend, addend2  gradients from elsewhere, or null. May be dx and dx2 themselves. Without x2 both are added to dx.
//   means            of gamma * d_preact and gamma * d_preact * xhat over a group, or null: then they come from tile_sums, of
//                    `sum_tiles` tiles, and the totals are written too.
//   sums, sums2      float (N, tiles, C1) and (N, tiles, C2), or null: dx and dx2, addends included, summed over each tile's
//                    pixels before rounding. They are partials of a bias' gradient.
//   y                the recomputed output, or null. May be dy itself.
//   silu             0, SILU, or SILU_DONE where dy is d_preact.
//   mask             under DROPS dropout's, of y; not with SILU_DONE.
// The previous kernel writes none of x, the parameters, mean and rstd. They are read before wait_for_previous.
extern "C" __global__ __launch_bounds__(THREADS, 2) void input_gradients(
    T* dx, const T* addend, T* dx2, const T* addend2, T* y, float* sums, float* sums2, const float2* means, const float2* tile_sums,
    int sum_tiles, TOTALS, const T* dy, const T* __restrict__ x, const T* __restrict__ x2, AFFINE, EXTENT, int silu,
    const u8* mask, float kept_scale) {
    __shared__ float scratch[V * THREADS];
    __shared__ __align__(16) float table[5 * WIDTH];
    int C = C1 + C2, size = C / groups, pitch;
    Lane lane(S, C, tiles, across);
    lane.reverse();
    Stream<4, DEPTH> rows;
    rows.slots = reinterpret_cast<Raw*>(channels) + threadIdx.x;
    T* recomputed = first_element(y, y, lane, C, 0, rows.pitch[1]);
    T* target = first_element(dx, dx2, lane, C1, C2, pitch);
    rows.next[0] = first_element(x, x2, lane, C1, C2, rows.pitch[0]);
    rows.next[1] = first_element(dy, dy, lane, C, 0, rows.pitch[1]);
    rows.next[2] = first_element(addend, addend2, lane, C1, C2, rows.pitch[2]);
    rows.next[3] = C2 ? nullptr : first_element(addend2, addend2, lane, C1, 0, rows.pitch[3]);
    bool wanted = target, recomputes = recomputed, adds = wanted && rows.next[2], adds_more = wanted && rows.next[3];
    rows.count[0] = rows.count[1] = wanted || recomputes ? lane.count : 0;
    rows.count[2] = adds ? lane.count : 0;
    rows.count[3] = adds_more ? lane.count : 0;
    Channel channel(lane.n, lane.c0, across * V, C, size, weight, bias, scale, shift);
    float average = 0.0f, r = 0.0f;
    if (channel.here) average = mean[(i64)lane.n * groups + channel.group], r = rstd[(i64)lane.n * groups + channel.group];
    rows.begin_early();
    MaskReader own_mask(row_of(mask, lane.n, (i64)S * C), lane.in_image(S, C), rows.pitch[1], DROPS ? rows.count[1] : 0);
    int end = min(C, lane.c0 + across * V);
    Gradients gradients(lane.c0, end, size, sum_tiles, channels + 4 * DEPTH * THREADS * sizeof(Raw) / sizeof(float2));
    wait_for_previous();
    rows.begin();
    if (tile_sums) gradients.find(lane.n, tile_sums, sum_tiles, lane.c0, end, lane.tile == 0, GIVEN_TOTALS, GIVEN_AFFINE, C);
    if (channel.here) {
        float2 m = tile_sums ? gradients.means(channel.group, size, (float)S * size) : means[(i64)lane.n * groups + channel.group];
        Affine::fill(table, WIDTH, channel, average, r);
        table[3 * WIDTH + channel.j] = r * m.x - r * r * m.y * (average - centre_of(average));
        table[4 * WIDTH + channel.j] = r * r * m.y;
    }
    __syncthreads();
    Affine affine(table, WIDTH, lane.c - lane.c0);
    float constant[V], slope[V], gain[V], sum[V] = {};
    load<V>(table + 3 * WIDTH + lane.c - lane.c0, constant);
    load<V>(table + 4 * WIDTH + lane.c - lane.c0, slope);
#pragma unroll
    for (int k = 0; k < V; k++) gain[k] = affine.gain[k] / SCALE;
    rows.each([&](const Raw (&raw)[4]) {
        float v[V], output[V], d_preact[V];
        differentiate(affine, raw, v, output, d_preact, silu, own_mask, kept_scale);
        if (recomputes) store<V>(recomputed, output), recomputed += rows.pitch[1];
        if (!wanted) return;
#pragma unroll
        for (int k = 0; k < V; k++) v[k] = fmaf(gain[k], d_preact[k], -fmaf(slope[k], v[k], constant[k]));
#pragma unroll
        for (int a = 2; a < 4; a++) {
            if (!(a == 2 ? adds : adds_more)) continue;
            float before[V];
            to_floats(raw[a], before);
#pragma unroll
            for (int k = 0; k < V; k++) v[k] += before[k];
        }
#pragma unroll
        for (int k = 0; k < V; k++) sum[k] += v[k];
        store<V>(target, v), target += pitch;
    });
    if (!sums && !sums2) return;
    block_sums(across, scratch, sum, [&](int j, float total) {
        int c = lane.c0 + j;
        float* out = c < C1 ? sums : sums2;
        if (c < C && out) out[blockIdx.x * (i64)(c < C1 ? C1 : C2) + c - (c < C1 ? 0 : C1)] = total;
    });
}
