// Moving elements: copies between strided views, and rows gathered and scattered by an index.
//
//   copy, add       out[view] = x[view], or +=; both views have one shape of fewer than 2^32 units. A unit is an element, in
//                   the _packed forms 16 bytes, of which both views consist and to which they are aligned. Strides count units
//                   and may be 0 or negative. 16-bit T are added in float.
//   copy_turned, add_turned   the same of elements, where out's stride along the last axis is 1, and x's along the last but one
//   join            out (rows, pitch): from column `start` on, parts (rows, width of each) side by side. Units as above; fewer
//                   than 2^32 of them are written.
//   fit             out (batches, rows, columns), contiguous, from a multiple of 16 bytes on, = x (batches, own_rows, own_columns)
//                   cut at the ends of rows and columns, or with zeros behind. x's rows lie `pitch` elements apart, its batches
//                   `batch`. out has n elements, fewer than 2^31. A thread writes packs, whatever columns is.
//   fill            out[i] = value
//   one_hot         rows of one 1 each
//   take            rows of x by an index: out[i] = x[index[i]]
//   take_axis       the same along another axis: out[l][i][w] = x[l][index[i]][w], or x[l][index[l][i][w]][w] if `along`
//   scan_sums, sum_parts, sum_runs, axis_sums, last   scatter; see there
//   turn            out (C, taps, K) = x (K, taps, C) with K and C swapped and the taps reversed. x[k][tap] lies at
//                   k · pitch + tap · tap_pitch.
// Rows have `width` elements. index is int32; a negative one counts from the end (in scan_sums if `from_end`, not in
// sum_runs). take and take_axis read zeros for an index out of range; the others ignore it. scan_sums, sum_runs and axis_sums sum
// integers in i64, others in float.
// Launch: scan_sums and axis_sums as they say; copy_turned and add_turned 32 × 8 threads, a block a tile of 64 × 64; turn 32 × 8 threads, grid (ceil(C / 32), ceil(K / 32), taps). All others are grid-stride loops:
// any launch shape.
#include "common.cuh"

struct Views { int dims, sizes[6]; i64 out[6], x[6]; };

template <typename V> __device__ __forceinline__ V plus(V a, V b) { return a + b; }
template <> __device__ __forceinline__ bf16 plus(bf16 a, bf16 b) { return from_float<bf16>(to_float(a) + to_float(b)); }
template <> __device__ __forceinline__ half plus(half a, half b) { return from_float<half>(to_float(a) + to_float(b)); }
template <typename V> __device__ __forceinline__ Pack<V> plus(Pack<V> a, Pack<V> b) {
#pragma unroll
    for (int k = 0; k < Pack<V>::SIZE; k++) a.v[k] = plus(a.v[k], b.v[k]);
    return a;
}

constexpr int AT_ONCE = 4;  // units that a thread reads before it writes: one of 2 bytes alone leaves the memory idle
template <bool ACCUMULATE, typename Unit>
__device__ __forceinline__ void move(Unit* out, const Unit* x, u32 n, const Views& views) {
    u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x; first < n; first += AT_ONCE * threads) {
        Unit units[AT_ONCE];
        i64 to[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            if (first + u * threads >= n) break;
            u32 i = (u32)(first + u * threads);
            i64 from = to[u] = 0;
#pragma unroll
            for (int d = 5; d >= 0; d--) {
                if (d < views.dims) {
                    u32 rest = d ? i / (u32)views.sizes[d] : 0, k = i - rest * (u32)views.sizes[d];
                    to[u] += k * views.out[d];
                    from += k * views.x[d];
                    i = rest;
                }
            }
            if constexpr (ACCUMULATE) units[u] = plus(out[to[u]], x[from]);
            else units[u] = x[from];
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            if (first + u * threads < n) out[to[u]] = units[u];
    }
}

extern "C" __global__ void copy(T* out, const T* x, u32 n, Views views) {
    wait_for_previous();
    move<false>(out, x, n, views);
}
extern "C" __global__ void add(T* out, const T* x, u32 n, Views views) {
    wait_for_previous();
    move<true>(out, x, n, views);
}
extern "C" __global__ void copy_packed(uint4* out, const uint4* x, u32 n, Views views) {
    wait_for_previous();
    move<false>(out, x, n, views);
}
extern "C" __global__ void add_packed(Pack<T>* out, const Pack<T>* x, u32 n, Views views) {
    wait_for_previous();
    move<true>(out, x, n, views);
}

constexpr int SIDE = 64, PITCH = SIDE + (sizeof(T) < 4 ? 4 / sizeof(T) : 1);  // of a tile; no bank conflicts by rows or by columns
template <bool ACCUMULATE> __device__ __forceinline__ void move_turned(T* out, const T* x, const Views& views) {
    __shared__ T tile[SIDE][PITCH];
    int last = views.dims - 1, height = views.sizes[last - 1], width = views.sizes[last];
    u32 i = blockIdx.x, across = CEIL_DIV(width, SIDE), down = CEIL_DIV(height, SIDE);
    int left = i % across * SIDE, top = i / across % down * SIDE;
    i /= across * down;
#pragma unroll
    for (int d = 3; d >= 0; d--) {
        if (d < last - 1) {
            u32 rest = i / (u32)views.sizes[d], k = i - rest * (u32)views.sizes[d];
            out += k * views.out[d], x += k * views.x[d];
            i = rest;
        }
    }
    x += left * views.x[last] + top, out += top * views.out[last - 1] + left;
    height = min(height - top, SIDE), width = min(width - left, SIDE);
#pragma unroll
    for (int row = threadIdx.y; row < SIDE; row += 8)
#pragma unroll
        for (int column = threadIdx.x; column < SIDE; column += 32)
            if (row < width && column < height) tile[row][column] = x[row * views.x[last] + column];
    __syncthreads();
#pragma unroll
    for (int row = threadIdx.y; row < SIDE; row += 8)
#pragma unroll
        for (int column = threadIdx.x; column < SIDE; column += 32)
            if (row < height && column < width) {
                T* target = out + row * views.out[last - 1] + column;
                *target = ACCUMULATE ? plus(*target, tile[column][row]) : tile[column][row];
            }
}
extern "C" __global__ void copy_turned(T* out, const T* x, Views views) {
    wait_for_previous();
    move_turned<false>(out, x, views);
}
extern "C" __global__ void add_turned(T* out, const T* x, Views views) {
    wait_for_previous();
    move_turned<true>(out, x, views);
}

// first[i]: the column of part i among the parts; behind the last part's comes the width of all.
struct Parts { const void* parts[16]; u32 first[17]; int count; };

template <typename Unit>
__device__ __forceinline__ void join_parts(Unit* out, u32 rows, u32 pitch, u32 start, const Parts& parts) {
    u32 width = parts.first[parts.count], units = rows * width;
    u64 threads = (u64)gridDim.x * blockDim.x;
    for (u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x; first < units; first += AT_ONCE * threads) {
        Unit values[AT_ONCE];
        i64 to[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++) {
            if (first + u * threads >= units) break;
            u32 unit = (u32)(first + u * threads), row = unit / width, column = unit - row * width;
            int i = 0;
            while (column >= parts.first[i + 1]) i++;
            to[u] = (i64)row * pitch + start + column;
            column -= parts.first[i];
            values[u] = static_cast<const Unit*>(parts.parts[i])[(i64)row * (parts.first[i + 1] - parts.first[i]) + column];
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; u++)
            if (first + u * threads < units) out[to[u]] = values[u];
    }
}
extern "C" __global__ void join(T* out, u32 rows, u32 pitch, u32 start, const __grid_constant__ Parts parts) {
    wait_for_previous();
    join_parts(out, rows, pitch, start, parts);
}
extern "C" __global__ void join_packed(uint4* out, u32 rows, u32 pitch, u32 start, const __grid_constant__ Parts parts) {
    wait_for_previous();
    join_parts(out, rows, pitch, start, parts);
}

extern "C" __global__ void fit(T* out, const T* x, u32 n, u32 rows, u32 columns, u32 own_rows, u32 own_columns, i64 pitch,
                               i64 batch) {
    wait_for_previous();
    constexpr u32 SIZE = Pack<T>::SIZE;
    for (u32 first = (blockIdx.x * blockDim.x + threadIdx.x) * SIZE; first < n; first += gridDim.x * blockDim.x * SIZE) {
        u32 row = first / columns, column = first - row * columns, of = row / rows;
        row -= of * rows;
        const T* from = x + of * batch + row * pitch;
        Pack<T> pack;
#pragma unroll
        for (u32 k = 0; k < SIZE; k++) {
            pack.v[k] = first + k < n && row < own_rows && column < own_columns ? from[column] : T{};
            if (++column < columns) continue;
            column = 0, from += pitch;
            if (++row == rows) row = 0, from = x + ++of * batch;
        }
        if (first + SIZE <= n) store_pack(out + first, pack);
        else for (u32 k = 0; first + k < n; k++) out[first + k] = pack.v[k];
    }
}

extern "C" __global__ void fill(T* out, float value, i64 n) {
    wait_for_previous();
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (i64)gridDim.x * blockDim.x) out[i] = from_float<T>(value);
}

__device__ __forceinline__ i64 wrap(int index, i64 rows) { return index < 0 ? index + rows : index; }

// out[i][:] = x[index[i]][:] for `count` rows i of `width` units.
template <typename Unit>
__device__ __forceinline__ void take_rows(const Unit* x, const int* index, Unit* out, i64 rows, i64 width, i64 count) {
    i64 n = count * width;
    for (i64 e = (i64)blockIdx.x * blockDim.x + threadIdx.x; e < n; e += (i64)gridDim.x * blockDim.x) {
        i64 i = n <= 0xffffffffll ? (u32)e / (u32)width : e / width, row = wrap(index[i], rows);
        out[e] = row >= 0 && row < rows ? x[row * width + e - i * width] : Unit{};
    }
}
extern "C" __global__ void take(const T* x, const int* index, T* out, i64 rows, i64 width, i64 count) {
    wait_for_previous();
    if (((u64)x | (u64)out | width * sizeof(T)) % 16) take_rows(x, index, out, rows, width, count);
    else take_rows((const uint4*)x, index, (uint4*)out, rows, (i64)(width * sizeof(T) / 16), count);
}
// out (n, count) = 1 where the column is the row's label, else 0; a label that is `ignored` has no column.
extern "C" __global__ void one_hot(T* out, const int* labels, i64 n, int count, i64 ignored) {
    wait_for_previous();
    i64 size = n * count;
    for (i64 e = (i64)blockIdx.x * blockDim.x + threadIdx.x; e < size; e += (i64)gridDim.x * blockDim.x) {
        i64 i = size <= 0xffffffffll ? (u32)e / (u32)count : e / count;
        int label = labels[i];
        out[e] = from_float<T>(label != ignored && e - i * count == label ? 1.0f : 0.0f);
    }
}
template <typename Unit>
__device__ __forceinline__ void take_planes(
    const Unit* __restrict__ x, const int* __restrict__ index, Unit* __restrict__ out, int along, i64 lead, i64 rows, i64 width,
    i64 count
) {
    i64 n = lead * count * width;
    bool small = n <= 0xffffffffll;
#pragma unroll 4
    for (i64 e = (i64)blockIdx.x * blockDim.x + threadIdx.x; e < n; e += (i64)gridDim.x * blockDim.x) {
        i64 k = width == 1 ? e : small ? (u32)e / (u32)width : e / width, l = small ? (u32)k / (u32)count : k / count;
        i64 row = wrap(index[along ? e : k - l * count], rows);
        out[e] = row >= 0 && row < rows ? x[(l * rows + row) * width + e - k * width] : Unit{};
    }
}
extern "C" __global__ void take_axis(
    const T* x, const int* index, T* out, int along, i64 lead, i64 rows, i64 width, i64 count
) {
    wait_for_previous();
    if (along || ((u64)x | (u64)out | width * sizeof(T)) % 16) take_planes(x, index, out, along, lead, rows, width, count);
    else take_planes((const uint4*)x, index, (uint4*)out, 0, lead, rows, (i64)(width * sizeof(T) / 16), count);
}
template <typename V> struct Total { using type = float; };
template <> struct Total<int> { using type = i64; };
template <> struct Total<u8> { using type = i64; };
template <> struct Total<i64> { using type = i64; };
__device__ __forceinline__ i64 widen(int x) { return x; }
__device__ __forceinline__ i64 widen(u8 x) { return x; }
__device__ __forceinline__ i64 widen(i64 x) { return x; }
template <typename V> __device__ __forceinline__ float widen(V x) { return to_float(x); }
template <typename V> __device__ __forceinline__ V narrow(i64 x) { return (V)x; }
template <typename V> __device__ __forceinline__ V narrow(float x) { return from_float<V>(x); }

// dx[row][:] = (or +=) sum of dout[i][:] over all i with index[i] = row, in the order of i. A negative row
// counts from the end if `from_end`; other rows that are not in dx are left out. A block has the same number of elements of dx as
// every other, at most 16 a thread, and a part of the index. It looks through LOOKED entries a thread at once, and lists those of
// its rows in their order, so that no atomics are needed.
constexpr int LOOKED = 4, LISTED = 1024;
struct Entry { u32 place; int row; }; // its place in the part, and its row, counted from the block's first
struct Listing { Entry entries[LISTED]; u32 matches[32]; }; // of each 32 entries that are looked at, a bit an entry

// totals[k] += what the n listed entries add to the block's element threadIdx.x + k * blockDim.x. `start`: that of the block's
// first row, at most 0. size: the block's elements.
template <int EACH, typename V>
__device__ __forceinline__ void add_listed(V (&totals)[EACH], const Entry* entries, int n, const T* dout, i64 start, i64 width, int size) {
    constexpr int ROWS = 16 / EACH;
    for (int i = 0; i < n; i += ROWS) {
        V values[ROWS][EACH];
#pragma unroll
        for (int u = 0; u < ROWS; u++) {
            Entry entry = entries[min(i + u, n - 1)];
            i64 of_row = start + entry.row * width;
            int from = i + u < n ? (int)max(of_row, 0ll) : size, to = (int)min(of_row + width, (i64)size);
            const T* own = dout + entry.place * width + threadIdx.x - of_row;
#pragma unroll
            for (int k = 0; k < EACH; k++, own += blockDim.x) {
                int e = threadIdx.x + k * blockDim.x;
                values[u][k] = e >= from && e < to ? widen(*own) : 0;
            }
        }
#pragma unroll
        for (int u = 0; u < ROWS; u++)
#pragma unroll
            for (int k = 0; k < EACH; k++) totals[k] += values[u][k];
    }
}

template <int EACH>
__device__ __forceinline__ void scan(
    Listing& listing, const T* dout, const int* index, void* dx, int accumulate, int from_end, i64 rows, i64 width, i64 count
) {
    using V = typename Total<T>::type;
    V totals[EACH] = {};
    i64 elements = rows * width, each = CEIL_DIV(CEIL_DIV(elements, (i64)gridDim.x), 32) * 32, first = blockIdx.x * each;
    int size = (int)max(min(each, elements - first), 0ll);
    i64 top = first / width, bottom = (first + size - 1) / width, start = top * width - first;
    i64 part = CEIL_DIV(count, (i64)gridDim.y), begin = blockIdx.y * part;
    count = min(part, count - begin), index += begin;
    int threads = blockDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = threads / 32, listed = 0;
    int next[LOOKED];
    auto look = [&](i64 at) {
#pragma unroll
        for (int j = 0; j < LOOKED; j++) {
            i64 i = at + j * threads + threadIdx.x;
            next[j] = i < count ? index[i] : 0;
        }
    };
    look(0);
    for (i64 at = 0; at < count; at += LOOKED * threads) {
        int own[LOOKED];
        u32 matches[LOOKED], any = 0;
#pragma unroll
        for (int j = 0; j < LOOKED; j++) {
            i64 row = next[j];
            if (row < 0 && from_end) row += rows;
            own[j] = (int)(row - top);
            any |= matches[j] = __ballot_sync(~0u, row >= top && row <= bottom && at + j * threads + threadIdx.x < count);
        }
        look(at + LOOKED * threads);
        if (!__syncthreads_or(any)) continue;
        if (lane == 0)
#pragma unroll
            for (int j = 0; j < LOOKED; j++) listing.matches[j * warps + warp] = matches[j];
        __syncthreads();
        int before = lane < LOOKED * warps ? __popc(listing.matches[lane]) : 0, found = before;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            int others = __shfl_up_sync(~0u, before, offset);
            if (lane >= offset) before += others;
        }
        int all = __shfl_sync(~0u, before, 31);
        before -= found;
        if (listed + all > LISTED) {
            add_listed(totals, listing.entries, listed, dout + begin * width, start, width, size);
            __syncthreads();
            listed = 0;
        }
#pragma unroll
        for (int j = 0; j < LOOKED; j++) {
            int place = listed + __shfl_sync(~0u, before, j * warps + warp) + __popc(matches[j] & ((1u << lane) - 1));
            if (matches[j] >> lane & 1) listing.entries[place] = {(u32)(at + j * threads + threadIdx.x), own[j]};
        }
        listed += all;
    }
    __syncthreads();
    add_listed(totals, listing.entries, listed, dout + begin * width, start, width, size);
    if (gridDim.y > 1) {
        V* sums = static_cast<V*>(dx) + blockIdx.y * elements;
#pragma unroll
        for (int k = 0; k < EACH; k++)
            if (threadIdx.x + k * threads < size) sums[first + threadIdx.x + k * threads] = totals[k];
        return;
    }
#pragma unroll
    for (int k = 0; k < EACH; k++)
        if (threadIdx.x + k * threads < size) {
            T* target = static_cast<T*>(dx) + first + threadIdx.x + k * threads;
            *target = narrow<T>(accumulate ? widen(*target) + totals[k] : totals[k]);
        }
}

// dx: T [rows][width], or where the index is in gridDim.y parts each one's sums, Total, which sum_parts adds. Launch: a multiple
// of 32 threads, at most 256.
extern "C" __global__ void scan_sums(
    const T* dout, const int* index, void* dx, int accumulate, int from_end, i64 rows, i64 width, i64 count
) {
    wait_for_previous();
    __shared__ Listing listing;
    int each = (int)CEIL_DIV(CEIL_DIV(rows * width, (i64)gridDim.x), (i64)blockDim.x);
    if (each <= 1) scan<1>(listing, dout, index, dx, accumulate, from_end, rows, width, count);
    else if (each <= 4) scan<4>(listing, dout, index, dx, accumulate, from_end, rows, width, count);
    else scan<16>(listing, dout, index, dx, accumulate, from_end, rows, width, count);
}
// dx[e] = (or +=) the sum of sums[part][e], Total, over the parts, for n elements.
extern "C" __global__ void sum_parts(const void* sums, T* dx, int accumulate, i64 n, int parts) {
    wait_for_previous();
    using V = typename Total<T>::type;
    for (i64 e = (i64)blockIdx.x * blockDim.x + threadIdx.x; e < n; e += (i64)gridDim.x * blockDim.x) {
        V total = 0;
#pragma unroll 8
        for (int part = 0; part < parts; part++) total += static_cast<const V*>(sums)[part * n + e];
        dx[e] = narrow<T>(accumulate ? widen(dx[e]) + total : total);
    }
}
// The first place in `sorted`, of `count` numbers, of one that is not below `row`.
__device__ __forceinline__ i64 place_of(i64 row, const int* sorted, i64 count) {
    i64 first = 0, stop = count;
    while (first < stop) {
        i64 middle = (first + stop) / 2;
        if (sorted[middle] < row) first = middle + 1;
        else stop = middle;
    }
    return first;
}
// The same sums, bit for bit, from the sorted index: order[j] is the i of sorted[j], ascending among equal ones. Each element
// of dx finds its row's run in `sorted` by bisection, and reads only that.
extern "C" __global__ void sum_runs(
    const T* dout, const int* order, const int* sorted, T* dx, int accumulate, i64 rows, i64 width, i64 count
) {
    wait_for_previous();
    for (i64 e = (i64)blockIdx.x * blockDim.x + threadIdx.x; e < rows * width; e += (i64)gridDim.x * blockDim.x) {
        i64 row = e / width, column = e % width, stop = place_of(row + 1, sorted, count);
        typename Total<T>::type total = 0;
#pragma unroll 8
        for (i64 j = place_of(row, sorted, count); j < stop; j++) total += widen(dout[order[j] * width + column]);
        dx[e] = narrow<T>(accumulate ? widen(dx[e]) + total : total);
    }
}
// dx[l][r][w] = (or +=) the sum of dout[l][k][w] over all k with index[k] = r, or index[l][k][w] = r if `along`, in the order of
// k. A block adds up a tile of dx in shared memory: `leads` of l, `tall` rows, `wide` of w, TILE bytes of Total at most, and
// either tall = rows and wide = width or leads = 1. It is each tile's whole index that is read, a warp's part of the l and w by
// one warp; where these are fewer than the warps, several read the same, each for every share-th row. No two warps have one
// element, and a warp adds entries of one element in their order, so that no atomics are needed.
// dx: T, or where the index is in gridDim.y parts each one's sums, Total, which sum_parts adds. Launch: grid (number of tiles,
// parts), a multiple of 32 threads, at most 256.
constexpr int TILE = 32768, READ = 4;
extern "C" __global__ void axis_sums(
    const T* dout, const int* index, void* dx, int accumulate, int along, i64 lead, i64 rows, i64 width, i64 count, int leads,
    int tall, int wide
) {
    wait_for_previous();
    using V = typename Total<T>::type;
    constexpr int SIZE = Pack<T>::SIZE;
    __shared__ __align__(16) V totals[TILE / sizeof(V)];
    i64 down = CEIL_DIV(rows, (i64)tall), across = CEIL_DIV(width, (i64)wide), tile = blockIdx.x;
    i64 top = tile % down * tall, left = tile / down % across * wide, first = tile / (down * across) * leads;
    leads = (int)min((i64)leads, lead - first), tall = (int)min((i64)tall, rows - top), wide = (int)min((i64)wide, width - left);
    i64 part = CEIL_DIV(count, (i64)gridDim.y), begin = blockIdx.y * part;
    part = max(min(part, count - begin), 0ll);
    int threads = blockDim.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = threads / 32, size = leads * tall * wide;
    for (int e = threadIdx.x; e < size; e += threads) totals[e] = 0;
    __syncthreads();

    int lead_groups = min(leads, warps), groups = min(wide, warps / lead_groups), share = warps / (lead_groups * groups);
    int lead_group = warp % lead_groups, group = warp / lead_groups % groups, own = warp / (lead_groups * groups);
    int l0 = leads * lead_group / lead_groups, w0 = wide * group / groups;
    u32 planes = leads * (lead_group + 1) / lead_groups - l0, columns = wide * (group + 1) / groups - w0;
    i64 entries = own < share ? planes * part * columns : 0;
    bool small = entries <= 0xffffffffll;
    for (i64 at = 0; at < entries; at += READ * 32) {
        i64 from[READ];
        int to[READ];
#pragma unroll
        for (int j = 0; j < READ; j++) {
            i64 i = at + j * 32 + lane, k = columns == 1 ? i : small ? (u32)i / columns : i / columns, l = 0;
            int w = w0 + (int)(i - k * columns);
            if (planes > 1) l = small ? (u32)k / (u32)part : k / part, k -= l * part;
            from[j] = ((first + l0 + l) * count + begin + k) * width + left + w;
            i64 row = i < entries ? wrap(index[along ? from[j] : begin + k], rows) : -1;
            bool chosen = row >= top && row < top + tall && (share == 1 || (u32)(row - top) % (u32)share == own);
            to[j] = chosen ? (int)(((l0 + l) * tall + row - top) * wide + w) : -1;
        }
        V values[READ];
#pragma unroll
        for (int j = 0; j < READ; j++) values[j] = to[j] >= 0 ? widen(dout[from[j]]) : 0;
#pragma unroll
        for (int j = 0; j < READ; j++) {
            u32 same = __match_any_sync(~0u, to[j]);
            int before = to[j] >= 0 ? __popc(same & ((1u << lane) - 1)) : -1;
            for (int turn = 0; __any_sync(~0u, before >= turn); turn++) {
                if (before == turn) totals[to[j]] += values[j];
                __syncwarp();
            }
        }
    }
    __syncthreads();

    int run = wide == width ? size : wide;  // elements of the tile that are beside each other in dx
    i64 start = (first * rows + top) * width + left;
    auto place = [&](int e) { return start + (run == size ? e : e / wide * width + e % wide); };
    if (gridDim.y > 1) {
        V* sums = static_cast<V*>(dx) + blockIdx.y * lead * rows * width;
        for (int e = threadIdx.x; e < size; e += threads) sums[place(e)] = totals[e];
        return;
    }
    T* out = static_cast<T*>(dx);
    int step = run % SIZE || ((u64)(out + start) | (run == size ? 0 : width * sizeof(T))) % 16 ? 1 : SIZE;
    for (int e = threadIdx.x * step; e < size; e += threads * step) {
        T* target = out + place(e);
        if (step == 1) *target = narrow<T>(accumulate ? widen(*target) + totals[e] : totals[e]);
        else {
            Pack<T> pack = accumulate ? load_pack(target) : Pack<T>{};
#pragma unroll
            for (int j = 0; j < SIZE; j++) pack.v[j] = narrow<T>(accumulate ? widen(pack.v[j]) + totals[e + j] : totals[e + j]);
            store_pack(target, pack);
        }
    }
}
// out[row] = 1 + the largest i with index[i] = row. out holds zeros before. An atomic maximum of integers is deterministic.
extern "C" __global__ void last(const int* index, int* out, i64 rows, i64 count) {
    wait_for_previous();
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (i64)gridDim.x * blockDim.x) {
        int row = index[i];
        if (row >= 0 && row < rows) atomicMax(&out[row], (int)i + 1);
    }
}

extern "C" __global__ void turn(T* out, const T* x, i64 pitch, i64 tap_pitch, int K, int taps, int C) {
    wait_for_previous();
    __shared__ T tile[32][33];  // one column of padding: no bank conflicts by rows or by columns
    int k0 = blockIdx.y * 32, c0 = blockIdx.x * 32, tap = blockIdx.z;
    for (int i = threadIdx.y; i < 32; i += blockDim.y)
        if (k0 + i < K && c0 + threadIdx.x < C) tile[i][threadIdx.x] = x[(k0 + i) * pitch + tap * tap_pitch + c0 + threadIdx.x];
    __syncthreads();
    for (int i = threadIdx.y; i < 32; i += blockDim.y)
        if (c0 + i < C && k0 + threadIdx.x < K) out[((i64)(c0 + i) * taps + taps - 1 - tap) * K + k0 + threadIdx.x] = tile[threadIdx.x][i];
}
