// The PTX instructions that kernels name, by their text: ptx<"instruction ...">(operands in the order of the asm statement).
//
// Asynchronous copies and products are made at once. Sizes of matrices and lanes of fragments: PTX ISA 8.8, 9.7.14 and 9.7.15.
#pragma once
#include "cuda.h"

namespace emulator {

template <size_t N> struct Text {
    char characters[N];
    constexpr Text(const char (&text)[N]) { std::copy_n(text, N, characters); }
    constexpr bool has(const char* part) const {
        for (size_t i = 0; i + 1 < N; i++) {
            size_t j = 0;
            while (part[j] && i + j < N && characters[i + j] == part[j]) j++;
            if (!part[j]) return true;
        }
        return false;
    }
    constexpr int number_after(const char* part) const {
        for (size_t i = 0; i + 1 < N; i++) {
            size_t j = 0;
            while (part[j] && i + j < N && characters[i + j] == part[j]) j++;
            if (!part[j]) {
                int number = 0;
                for (i += j; characters[i] >= '0' && characters[i] <= '9'; i++) number = 10 * number + characters[i] - '0';
                return number;
            }
        }
        return 0;
    }
};

// ---- numbers
static inline float from_half(uint16_t x) { return (float)bits<_Float16>(x); }
static inline uint16_t to_half(float x) { return bits<uint16_t>((_Float16)x); }
static inline uint16_t to_bf16(float x) {
    uint32_t word = bits<uint32_t>(x);
    return x == x ? (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16) : (uint16_t)0x7fff;
}
static inline float from_bf16(uint16_t x) { return bits<float>((uint32_t)x << 16); }
// Rounded to the nearest, of two the larger in size; a NaN stays one.
static inline uint32_t to_tf32(float x) {
    uint32_t word = bits<uint32_t>(x);
    return (word & 0x7fffffff) > 0x7f800000 ? 0x7fffffff : (word & 0x7fffffff) == 0x7f800000 ? word : (word + 0x1000) & ~0x1fffu;
}
static inline float from_tf32(uint32_t word) { return bits<float>(word & ~0x1fffu); }
static inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? copysignf(0.0f, x) : x; }

enum class Kind { BF16, HALF, TF32 };
template <Kind KIND> float element(uint32_t word, int which) {
    if constexpr (KIND == Kind::TF32) return from_tf32(word);
    uint16_t part = (uint16_t)(word >> 16 * which);
    return KIND == Kind::BF16 ? from_bf16(part) : from_half(part);
}

// ---- shared memory; the upper 8 bits of an address are of another block of the cluster, counted from 1
static inline unsigned char* at(uint32_t address) {
    Block* block = self->block;
    if (address >> 24) block += (int)(address >> 24) - 1 - block->rank;
    return block->shared + (address & 0xffffff);
}
template <typename T> T load_at(uint32_t address) {
    T value;
    memcpy(&value, at(address), sizeof(T));
    return value;
}
template <typename T> void store_at(uint32_t address, T value) { memcpy(at(address), &value, sizeof(T)); }

// ---- barriers in shared memory: of so many arrivals and of bytes that arrive
struct Counter {
    uint16_t arrivals, pending;
    int32_t bytes : 31;
    uint32_t phase : 1;
    void change(int arrived, int more) {
        pending -= arrived, bytes += more;
        progress = true;
        if (!pending && !bytes) pending = arrivals, phase ^= 1;
    }
};
static_assert(sizeof(Counter) == 8);
static Counter& counter(uint32_t address) { return *(Counter*)at(address); }
static inline void wait_phase(uint32_t address, uint32_t parity) {
    while (counter(address).phase == parity) poll();
}

// ---- matrices of 8 rows of 16 bytes
struct Matrices { uint32_t address; uint32_t* words[4]; };
template <bool TRANSPOSED, bool STORE> void matrices(uint32_t address, uint32_t* a, uint32_t* b, uint32_t* c, uint32_t* d) {
    Matrices own{address, {a, b, c, d}};
    meet_lanes(&own, ~0u, [](const void* const* operands, uint32_t) {
        for (int matrix = 0; matrix < 4; matrix++)
            for (int row = 0; row < 8; row++) {
                uint32_t from = ((const Matrices*)operands[8 * matrix + row])->address;
                if (from % 16) failure = "a row of a matrix does not begin at a multiple of 16 bytes";
                for (int column = 0; column < 8; column++) {
                    int lane = TRANSPOSED ? 4 * column + row / 2 : 4 * row + column / 2, half = TRANSPOSED ? row % 2 : column % 2;
                    uint16_t* word = (uint16_t*)((const Matrices*)operands[lane])->words[matrix] + half;
                    uint16_t* element = (uint16_t*)at(from) + column;
                    STORE ? *element = *word : *word = *element;
                }
            }
    });
}

// ---- products of a warp: 16 rows, 8 columns
struct Product { float* c; const uint32_t *a, *b; };
template <Kind KIND, int WORDS> void multiply(float* c, const uint32_t* a, const uint32_t* b) {  // WORDS of k by four lanes
    Product own{c, a, b};
    meet_lanes(&own, ~0u, [](const void* const* operands, uint32_t) {
        constexpr int PER_WORD = KIND == Kind::TF32 ? 1 : 2, DEPTH = 4 * WORDS * PER_WORD;
        float a[16][DEPTH], b[8][DEPTH];
        for (int lane = 0; lane < 32; lane++) {
            const Product& own = *(const Product*)operands[lane];
            for (int word = 0; word < WORDS; word++)
                for (int i = 0; i < PER_WORD; i++) {
                    int k = (4 * word + lane % 4) * PER_WORD + i;
                    for (int half = 0; half < 2; half++) a[lane / 4 + 8 * half][k] = element<KIND>(own.a[2 * word + half], i);
                    b[lane / 4][k] = element<KIND>(own.b[word], i);
                }
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                float sum = 0.0f;
                for (int k = 0; k < DEPTH; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[lane % 4 * 2 + i % 2][k];
                ((const Product*)operands[lane])->c[i] += sum;
            }
    });
}

// ---- products of a warpgroup: 64 rows
// Element (row, depth) of a swizzled tile: `descriptor` as in wgmma.cuh. Rows of a K-major tile, depth in 128, 64 or
// 32 bytes; an MN-major one has the depth as its rows and 64, 32 or 16 of the others in each.
struct Tile {
    const unsigned char* shared = self->block->shared;
    uint32_t start, block, eight, row_bytes;
    Tile(uint64_t descriptor)
        : start((uint32_t)(descriptor & 0x3fff) << 4), block((uint32_t)(descriptor >> 16 & 0x3fff) << 4),
          eight((uint32_t)(descriptor >> 32 & 0x3fff) << 4), row_bytes(256 >> (descriptor >> 62)) {}
    uint32_t swizzled(uint32_t address) const {
        return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
    }
    const unsigned char* element(int row, int k, bool mn_major, int size) const {
        if (!mn_major) return shared + swizzled(start + row / 8 * eight + row % 8 * row_bytes + k * size);
        int across = row_bytes / size;
        return shared + swizzled(start + row / across * block + k / 8 * eight + k % 8 * row_bytes + row % across * size);
    }
};
template <Kind KIND> float read(const unsigned char* p) {
    if constexpr (KIND == Kind::TF32) return from_tf32(*(const uint32_t*)p);
    return KIND == Kind::BF16 ? from_bf16(*(const uint16_t*)p) : from_half(*(const uint16_t*)p);
}
template <Kind KIND> constexpr int DEPTH = KIND == Kind::TF32 ? 8 : 16;

#pragma GCC push_options
#pragma GCC optimize("O3")
struct GroupProduct { float** c; uint64_t a, b; const uint32_t* registers; bool a_mn, b_mn, add; };
template <Kind KIND, int N> void multiply_group(float** c, uint64_t a, const uint32_t* registers, uint64_t b, bool a_mn, bool b_mn, bool add) {
    GroupProduct own{c, a, b, registers, a_mn, b_mn, add};
    meet_group(&own, [](const void* const* operands) {
        constexpr int K = DEPTH<KIND>, SIZE = KIND == Kind::TF32 ? 4 : 2;
        auto lane = [&](int i) -> const GroupProduct& { return *(const GroupProduct*)operands[i]; };
        Tile tile_a(lane(0).a), tile_b(lane(0).b);
        static float a[64][K], b[K][N];
        for (int k = 0; k < K; k++)
            for (int n = 0; n < N; n++) b[k][n] = read<KIND>(tile_b.element(n, k, lane(0).b_mn, SIZE));
        if (lane(0).registers) {
            for (int i = 0; i < 128; i++)
                for (int j = 0; j < 8; j++)
                    a[i / 32 * 16 + i % 32 / 4 + j / 2 % 2 * 8][i % 4 * 2 + j % 2 + j / 4 * 8] = element<KIND>(lane(i).registers[j / 2], j % 2);
        } else {
            for (int row = 0; row < 64; row++)
                for (int k = 0; k < K; k++) a[row][k] = read<KIND>(tile_a.element(row, k, lane(0).a_mn, SIZE));
        }
        for (int row = 0; row < 64; row++) {
            float sums[N] = {};
            for (int k = 0; k < K; k++) {
                float factor = a[row][k];
                for (int n = 0; n < N; n++) sums[n] += factor * b[k][n];
            }
            for (int n = 0; n < N; n++) {
                const GroupProduct& own = lane(row / 16 * 32 + row % 8 * 4 + n % 8 / 2);
                float& c = *own.c[n / 8 * 4 + row % 16 / 8 * 2 + n % 2];
                c = own.add ? c + sums[n] : sums[n];
            }
        }
    });
}

#pragma GCC pop_options

// ---- bulk copies: boxes of a tensor map as tests/host.py makes it
struct Map {
    int rank, kind, swizzle, sizes, size;
    char* pointer;
    int64_t shape[5], strides[5], box[8];  // innermost last
    Map(uint64_t address) {
        const uint64_t* words = (const uint64_t*)address;
        rank = words[0] >> 16 & 15, kind = words[0] >> 8 & 255, swizzle = words[0] & 255, sizes = words[0] >> 20 & 15;
        size = kind == 7 || kind == 11 ? 4 : 2;
        pointer = (char*)words[1];
        for (int i = 0; i < rank; i++) shape[i] = words[2 + i], strides[i] = i + 1 < rank ? words[2 + rank + i] : size;
        for (int i = 0; i < sizes; i++) box[i] = words[1 + 2 * rank + i / 6] >> 10 * (i % 6) & 1023;
        if (words[0] >> 56 != 0x3a) failure = "a copy by something that is no tensor map";
    }
    uint32_t place(uint32_t target, int64_t bytes) const {
        uint32_t address = target + (uint32_t)bytes;
        return address ^ (address >> 7 & ((1 << swizzle) - 1)) << 4;  // 0: none, 1 to 3: rows of 32, 64 and 128 bytes
    }
    char* element(const int64_t* index) const {
        char* found = pointer;
        for (int i = 0; i < rank; i++) {
            if (index[i] < 0 || index[i] >= shape[i]) return nullptr;
            found += index[i] * strides[i];
        }
        return found;
    }
    void load(uint32_t target, const char* from, int64_t bytes) const {
        uint32_t word = 0;
        if (from) memcpy(&word, from, size);
        if (kind == 11) word = to_tf32(bits<float>(word));
        memcpy(at(place(target, bytes)), &word, size);
    }
};
template <int RANK> using Index = std::array<int, RANK>;
// `first`: innermost first, as instructions give it.
template <bool STORE> int copy_box(uint64_t map_at, uint32_t shared, const int* first) {
    Map map(map_at);
    int64_t count = 1, index[5];
    for (int i = 0; i < map.rank; i++) {
        count *= map.box[i];
        if (STORE && first[i] < 0) failure = "a bulk store begins before its tensor";  // an illegal instruction on an H200
    }
    for (int64_t n = 0; n < count; n++) {
        int64_t rest = n;
        for (int i = map.rank - 1; i >= 0; i--) index[i] = first[map.rank - 1 - i] + rest % map.box[i], rest /= map.box[i];
        char* element = map.element(index);
        if (!STORE) map.load(shared, element, n * map.size);
        else if (element) memcpy(element, at(map.place(shared, n * map.size)), map.size);
    }
    return (int)(count * map.size);
}
// Channels of `box[0]` pixels in a row of images, of a map of windows; see tma_load_pixels in wgmma.cuh.
template <bool STORE> int copy_pixels(uint64_t map_at, uint32_t shared, const int* first, int right, int down) {
    Map map(map_at);
    int64_t pixels = map.box[0], channels = map.box[1];
    int64_t top = map.box[2] - 128, left = map.box[3] - 128;  // from there to the last row and column, in steps
    int64_t bottom = map.shape[1] - 1 + map.box[4] - 128, end = map.shape[2] - 1 + map.box[5] - 128;
    int64_t w = first[1], h = first[2], n = first[3];
    for (int64_t pixel = 0; pixel < pixels; pixel++) {
        for (int64_t channel = 0; channel < channels; channel++) {
            int64_t index[4] = {n, h + down, w + right, first[0] + channel}, bytes = (pixel * channels + channel) * map.size;
            char* element = map.element(index);
            if (!STORE) map.load(shared, element, bytes);
            else if (element) memcpy(element, at(map.place(shared, bytes)), map.size);
        }
        if ((w += map.box[7]) > end) {
            w = left;
            if ((h += map.box[6]) > bottom) h = top, n++;
        }
    }
    return (int)(pixels * channels * map.size);
}

template <Text TEXT, typename... Operands> inline void ptx(Operands&&... operands) {
    auto all = std::forward_as_tuple(operands...);
#define OPERAND(i) std::get<i>(all)
#define IS(part) else if constexpr (TEXT.has(part))
    if constexpr (TEXT.has("griddepcontrol") || TEXT.has("fence") || TEXT.has("setmaxnreg") || TEXT.has("prefetch") ||
                  TEXT.has("wgmma.commit") || TEXT.has("wgmma.wait") || TEXT.has("cp.async.commit_group") ||
                  TEXT.has("cp.async.wait_group")) {
    }
    IS("cp.async.bulk.commit_group") self->stores.commit();
    IS("cp.async.bulk.wait_group") {
        if (self->stores.groups.size() > OPERAND(0) || !TEXT.has(".read")) come_last();
        self->stores.read(OPERAND(0));
        if (!TEXT.has(".read")) self->stores.write();
    }
    IS("cvt.f32.f16") OPERAND(0) = from_half(OPERAND(1));
    IS("cvt.rn.bf16x2.f32") OPERAND(0) = (uint32_t)to_bf16(OPERAND(1)) << 16 | to_bf16(OPERAND(2));
    IS("cvt.rn.f16x2.f32") OPERAND(0) = (uint32_t)to_half(OPERAND(1)) << 16 | to_half(OPERAND(2));
    IS("cvt.rn.bf16.f32") OPERAND(0) = to_bf16(OPERAND(1));
    IS("cvt.rn.f16.f32") OPERAND(0) = to_half(OPERAND(1));
    IS("cvt.rna.tf32.f32") OPERAND(0) = to_tf32(OPERAND(1));
    IS("ex2.approx.ftz.f32") OPERAND(0) = flushed(exp2f(flushed(OPERAND(1))));
    IS("rcp.approx.ftz.f32") OPERAND(0) = flushed(1.0f / flushed(OPERAND(1)));
    IS("tanh.approx.f32") OPERAND(0) = tanhf(OPERAND(1));
    IS("st.shared.f32") store_at<float>(OPERAND(0), OPERAND(1));
    IS("st.shared.b16") store_at<uint16_t>(OPERAND(0), OPERAND(1));
    IS("st.shared.v4.b32") store_at<uint4>(OPERAND(0), {OPERAND(1), OPERAND(2), OPERAND(3), OPERAND(4)});
    IS("ld.shared.b32") OPERAND(0) = load_at<uint32_t>(OPERAND(1));
    IS("ld.shared.v2.b32") {
        uint2 both = load_at<uint2>(OPERAND(2));
        OPERAND(0) = both.x, OPERAND(1) = both.y;
    }
    IS("cp.async.cg.shared.global") {
        uint4 value = {0, 0, 0, 0};
        if (OPERAND(2)) value = *(const uint4*)OPERAND(1);
        if (OPERAND(0) % 16 || (OPERAND(2) && (uintptr_t)OPERAND(1) % 16)) failure = "cp.async at no multiple of 16 bytes";
        store_at(OPERAND(0), value);
    }
    IS("ldmatrix.sync.aligned.m8n8.x4.trans") matrices<true, false>(OPERAND(4), &OPERAND(0), &OPERAND(1), &OPERAND(2), &OPERAND(3));
    IS("ldmatrix.sync.aligned.m8n8.x4.shared") matrices<false, false>(OPERAND(4), &OPERAND(0), &OPERAND(1), &OPERAND(2), &OPERAND(3));
    IS("stmatrix") {
        uint32_t words[4] = {OPERAND(1), OPERAND(2), OPERAND(3), OPERAND(4)};
        matrices<TEXT.has(".trans"), true>(OPERAND(0), words, words + 1, words + 2, words + 3);
    }
    IS("mma.sync.aligned.m16n8k8.row.col.f32.f16") {
        uint32_t a[2] = {OPERAND(4), OPERAND(5)}, b[1] = {OPERAND(6)};
        multiply<Kind::HALF, 1>(&OPERAND(0), a, b);
    }
    IS("mma.sync") {
        constexpr Kind KIND = TEXT.has(".bf16.") ? Kind::BF16 : TEXT.has(".tf32.") ? Kind::TF32 : Kind::HALF;
        uint32_t a[4] = {OPERAND(4), OPERAND(5), OPERAND(6), OPERAND(7)}, b[2] = {OPERAND(8), OPERAND(9)};
        multiply<KIND, 2>(&OPERAND(0), a, b);
    }
    IS("wgmma.mma_async") {
        constexpr Kind KIND = TEXT.has(".bf16.") ? Kind::BF16 : TEXT.has(".tf32.") ? Kind::TF32 : Kind::HALF;
        constexpr int N = TEXT.number_after(".m64n"), C = N / 2, OTHERS = sizeof...(Operands) - C;
        float* c[C];
        [&]<size_t... I>(std::index_sequence<I...>) { ((c[I] = &OPERAND(I)), ...); }(std::make_index_sequence<C>());
        if constexpr (OTHERS == 7) {  // A in registers: four words, b, whether b is MN-major, add
            uint32_t a[4] = {OPERAND(C), OPERAND(C + 1), OPERAND(C + 2), OPERAND(C + 3)};
            multiply_group<KIND, N>(c, 0, a, OPERAND(C + 4), false, OPERAND(C + 5), OPERAND(C + 6));
        } else {  // a, b, whether they are MN-major, add
            bool majors = KIND != Kind::TF32;
            multiply_group<KIND, N>(c, OPERAND(C), nullptr, OPERAND(C + 1), majors && OPERAND(C + 2), majors && OPERAND(C + 3), OPERAND(C + 4));
        }
    }
    IS("mbarrier.init") {
        counter(OPERAND(0)) = {(uint16_t)OPERAND(1), (uint16_t)OPERAND(1), 0, 0};
    }
    IS("mbarrier.arrive.expect_tx") counter(OPERAND(0)).change(1, (int)OPERAND(1));
    IS("mbarrier.arrive") counter(OPERAND(0)).change(1, 0);
    IS("mbarrier.try_wait.parity") wait_phase(OPERAND(0), OPERAND(1));
    IS("bar.sync") {
        if constexpr (sizeof...(Operands) == 2) meet(self->block->barriers[OPERAND(0)], OPERAND(1));
        else if constexpr (TEXT.has("bar.sync %0")) meet(self->block->barriers[OPERAND(0)], TEXT.number_after(", "));
        else meet(self->block->barriers[TEXT.number_after("bar.sync ")], OPERAND(0));
    }
    IS("bar.red.or.pred") {
        int any = (int)OPERAND(1);
        meet_group(&any, [](const void* const* operands) {
            int all = 0;
            for (int i = 0; i < 128; i++) all |= *(const int*)operands[i];
            for (int i = 0; i < 128; i++) *(int*)operands[i] = all;
        });
        OPERAND(0) = (uint32_t)any;
    }
    IS("bar.arrive") arrive(self->block->barriers[OPERAND(0)], OPERAND(1));
    IS("barrier.cluster.arrive") arrive_cluster();
    IS("barrier.cluster.wait") wait_cluster();
    IS("mapa") OPERAND(0) = (OPERAND(1) & 0xffffff) | (uint32_t)(OPERAND(2) + 1) << 24;
    IS("ld.shared::cluster.v2.f32") {
        float2 both = load_at<float2>(OPERAND(2));
        OPERAND(0) = both.x, OPERAND(1) = both.y;
    }
    IS("st.shared::cluster.v4.f32") store_at<float4>(OPERAND(0), {OPERAND(1), OPERAND(2), OPERAND(3), OPERAND(4)});
    IS("st.async") {
        if constexpr (TEXT.has("v4.f32")) {
            store_at<float4>(OPERAND(0), {OPERAND(1), OPERAND(2), OPERAND(3), OPERAND(4)});
            counter(OPERAND(5)).change(0, -16);
        } else {
            store_at<float>(OPERAND(0), OPERAND(1));
            counter(OPERAND(2)).change(0, -4);
        }
    }
    IS("st.relaxed.gpu.global.v2.b64") {
        ((u64*)OPERAND(0))[0] = OPERAND(1), ((u64*)OPERAND(0))[1] = OPERAND(2);
    }
    IS("ld.relaxed.gpu.global.v2.b64") {
        poll();
        OPERAND(0) = ((const u64*)OPERAND(2))[0], OPERAND(1) = ((const u64*)OPERAND(2))[1];
    }
    IS("ld.acquire.gpu.global.u32") {
        poll();
        OPERAND(0) = *(const uint32_t*)OPERAND(1);
    }
    IS("red.release.gpu.global.add.u32") ++*(uint32_t*)OPERAND(0);
    IS("ld.relaxed.gpu.global.u32") OPERAND(0) = *(const uint32_t*)OPERAND(1);
    IS(".im2col_no_offs") {
        Index<4> first = {OPERAND(1), OPERAND(2), OPERAND(3), OPERAND(4)};
        self->stores.open.push_back([map = OPERAND(0), from = OPERAND(5), first] { copy_pixels<true>(map, from, first.data(), 0, 0); });
    }
    IS(".im2col") {
        int first[4] = {OPERAND(2), OPERAND(3), OPERAND(4), OPERAND(5)};
        int bytes = copy_pixels<false>(OPERAND(1), OPERAND(0), first, OPERAND(7), OPERAND(8));
        counter(OPERAND(6)).change(0, -bytes);
    }
    IS("cp.async.bulk.tensor.4d.global.shared") {
        Index<4> first = {OPERAND(1), OPERAND(2), OPERAND(3), OPERAND(4)};
        self->stores.open.push_back([map = OPERAND(0), from = OPERAND(5), first] { copy_box<true>(map, from, first.data()); });
    }
    IS("cp.async.bulk.tensor.3d.global.shared") {
        Index<3> first = {OPERAND(1), OPERAND(2), OPERAND(3)};
        self->stores.open.push_back([map = OPERAND(0), from = OPERAND(4), first] { copy_box<true>(map, from, first.data()); });
    }
    IS("cp.async.bulk.tensor") {
        constexpr int RANK = TEXT.number_after("bulk.tensor.");
        int first[RANK];
        [&]<size_t... I>(std::index_sequence<I...>) { ((first[I] = OPERAND(2 + I)), ...); }(std::make_index_sequence<RANK>());
        int bytes = copy_box<false>(OPERAND(1), OPERAND(0), first);
        counter(OPERAND(2 + RANK)).change(0, -bytes);
    }
    IS("cp.async.bulk.global.shared::cta") {
        self->stores.open.push_back([to = OPERAND(0), from = OPERAND(1), bytes = OPERAND(2)] {
            std::vector<unsigned char> read(at(from), at(from) + bytes);
            self->stores.writes.push_back([to, read] { memcpy((void*)to, read.data(), read.size()); });
        });
    }
    IS("cp.reduce.async.bulk.global.shared::cta") {
        self->stores.open.push_back([to = (float*)OPERAND(0), from = OPERAND(1), count = OPERAND(2) / 4] {
            std::vector<float> read((const float*)at(from), (const float*)at(from) + count);
            self->stores.writes.push_back([to, read] { for (size_t i = 0; i < read.size(); i++) to[i] += read[i]; });
        });
    }
    IS("cp.async.bulk.shared::cluster.global") {
        memcpy(at(OPERAND(0)), (const void*)OPERAND(1), OPERAND(2));
        counter(OPERAND(3)).change(0, -(int)OPERAND(2));
    }
    else static_assert(sizeof...(Operands) > 100, "this instruction is not emulated");
#undef OPERAND
#undef IS
}

}  // namespace emulator
