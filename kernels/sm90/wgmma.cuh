// Hopper's asynchronous instructions (sm_90a): mbarriers in shared memory, the bulk tensor copy (TMA), and wgmma.
//
// Tiles in shared memory have rows of 128 bytes (64 elements of 16 bits, or 32 floats). Their 16-byte chunks are XOR-swizzled
// by address bits 7 to 9, as TMA writes and wgmma reads them. Rows of 64 bytes (ROW_BYTES) are swizzled by bits 7 and 8,
// rows of 32 by bit 7. Every tile starts at a multiple of 1024 bytes. Copies into it, and operands read from it, may start
// at any of its rows. A tile is K-major where its rows run along the depth of the product, and MN-major where they run along the
// product's rows or columns.
#pragma once
#include "mma.cuh"

struct __align__(64) TensorMap { u64 words[16]; };  // a CUtensorMap, made by cudiff/cuda/tensor_map.py

__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
                 ::"r"(barrier), "r"(parity) : "memory");
}

// Makes the mbarriers that this thread has initialised visible: to itself, to copies, and to threads that synchronize with it
// after this.
__device__ __forceinline__ void fence_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// A barrier of the threads of one warpgroup.
__device__ __forceinline__ void warpgroup_meets() { asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory"); }

// The same. Returns whether `holds` is true for any of them.
__device__ __forceinline__ bool any_of_warpgroup(bool holds) {
    u32 any;
    asm volatile("{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, %2, 128, p;\nselp.u32 %0, 1, 0, q;\n}"
                 : "=r"(any) : "r"((u32)holds), "r"(1 + threadIdx.x / 128) : "memory");
    return any;
}

// Gives each thread of a warpgroup COUNT registers from here on; every warp calls it. With MORE the count rises: the call waits
// until others have given so many back.
template <int COUNT, bool MORE> __device__ __forceinline__ void set_registers() {
    if (MORE) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Prefetch the map for later copies.
__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"((u64)&map) : "memory");
}

// Copy the map's box at these element coordinates, innermost first, to `target`. What lies outside of the tensor is zeros.
// `barrier` counts the box's bytes.
__device__ __forceinline__ void tma_load(u32 target, const TensorMap& map, u32 barrier, int i0, int i1, int i2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
                 ::"r"(target), "l"((u64)&map), "r"(i0), "r"(i1), "r"(i2), "r"(barrier) : "memory");
}
__device__ __forceinline__ void tma_load(u32 target, const TensorMap& map, u32 barrier, int i0, int i1, int i2, int i3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
                 ::"r"(target), "l"((u64)&map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(barrier) : "memory");
}
__device__ __forceinline__ void tma_load(u32 target, const TensorMap& map, u32 barrier, int i0, int i1, int i2, int i3, int i4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, %6}], [%7];"
                 ::"r"(target), "l"((u64)&map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(i4), "r"(barrier) : "memory");
}
// The im2col mode: copy the channels from i0 on of as many pixels as the map says. They are counted from (w, h) of image n on:
// along the row, in the map's steps and between its corners, then through the next rows and images. Each pixel is read `right`
// and `down` from its place. Beyond the image there are zeros.
__device__ __forceinline__ void tma_load_pixels(u32 target, const TensorMap& map, u32 barrier, int i0, int w, int h, int n,
                                                int right, int down) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
                 "[%6], {%7, %8};"
                 ::"r"(target), "l"((u64)&map), "r"(i0), "r"(w), "r"(h), "r"(n), "r"(barrier), "h"((u16)right), "h"((u16)down)
                 : "memory");
}

// Prefetch the box into L2.
__device__ __forceinline__ void tma_prefetch(const TensorMap& map, int i0, int i1, int i2) {
    asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global.tile [%0, {%1, %2, %3}];"
                 ::"l"((u64)&map), "r"(i0), "r"(i1), "r"(i2) : "memory");
}

// Copy `bytes` bytes, a multiple of 16, from `source` to `target`; `barrier` counts them.
__device__ __forceinline__ void bulk_load(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(target), "l"(source), "r"(bytes), "r"(barrier) : "memory");
}

// Start copying a box from shared memory to the map's tensor; what lies behind its end is not written. A coordinate below 0 is an
// illegal instruction. Before this every thread that wrote to `source` calls fence_writes(), and all synchronize. After it the
// caller needs tma_store_wait().
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 source, int i0, int i1, int i2, int i3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 ::"l"((u64)&map), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(source) : "memory");
    tma_store_commit();
}
__device__ __forceinline__ void tma_store(const TensorMap& map, u32 source, int i0, int i1, int i2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];"
                 ::"l"((u64)&map), "r"(i0), "r"(i1), "r"(i2), "r"(source) : "memory");
    tma_store_commit();
}
// The same in the im2col mode, for the pixels that tma_load_pixels counts from (w, h) of image n on.
__device__ __forceinline__ void tma_store_pixels(const TensorMap& map, u32 source, int i0, int w, int h, int n) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
                 ::"l"((u64)&map), "r"(i0), "r"(w), "r"(h), "r"(n), "r"(source) : "memory");
    tma_store_commit();
}
// Wait until TMA has read all but the PENDING newest of this thread's stores. Their shared memory may then be written again.
template <int PENDING = 0> __device__ __forceinline__ void tma_store_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// Start copying `bytes` bytes, a multiple of 16, from shared memory to `target`; bulk_add adds floats to those there. What is said
// of tma_store holds. tma_store_done waits until all of this thread's stores are in global memory.
__device__ __forceinline__ void bulk_store(float* target, u32 source, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target), "r"(source), "r"(bytes) : "memory");
    tma_store_commit();
}
__device__ __forceinline__ void bulk_add(float* target, u32 source, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;"
                 ::"l"(target), "r"(source), "r"(bytes) : "memory");
    tma_store_commit();
}
__device__ __forceinline__ void tma_store_done() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(0) : "memory"); }
// Copies may read the memory that this thread has written, or has seen written.
__device__ __forceinline__ void fence_global_writes() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void fence_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Store four matrices of 8 rows of 16 bytes, held as ldmatrix loads them. Lane i gives the address of row i % 8 of matrix
// i / 8.
__device__ __forceinline__ void stmatrix(u32 address, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// The same with each matrix transposed, held as ldmatrix_transposed loads them.
__device__ __forceinline__ void stmatrix_transposed(u32 address, const u32* r) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

// A pipeline: `stages` buffers that one producer thread fills in turn, and that a number of warpgroups (or warps) read. Each
// side advances a Ring of its own over the same shared memory. The barriers are `stages` "full" ones, then as many "empty"
// ones, 8 bytes each.
struct Ring {
    u32 buffers, bytes, barriers;
    int stages, stage = 0;
    u32 phase = 0;

    __device__ __forceinline__ Ring(u32 buffers, u32 bytes, int stages, u32 barriers)
        : buffers(buffers), bytes(bytes), barriers(barriers), stages(stages) {}
    __device__ __forceinline__ void init(int consumers) const {
        for (int i = 0; i < stages; i++) barrier_init(full(i), 1), barrier_init(empty(i), consumers);
        fence_barriers();
    }
    __device__ __forceinline__ u32 full(int i) const { return barriers + 8 * i; }
    __device__ __forceinline__ u32 empty(int i) const { return barriers + 8 * (stages + i); }
    __device__ __forceinline__ u32 buffer() const { return buffers + stage * bytes; }
    __device__ __forceinline__ void advance() {
        if (++stage == stages) stage = 0, phase ^= 1;
    }
    // Skip buffers that others read. Before a thread waits for a later one, it must know that all before that were filled: a
    // parity does not tell a phase from the one two before.
    __device__ __forceinline__ void skip(int count) {
        for (stage += count; stage >= stages; stage -= stages) phase ^= 1;
    }
    // Producer: wait until the current buffer is free, and announce the bytes to come. Returns the barrier that counts them.
    __device__ __forceinline__ u32 acquire(u32 expected) const {
        barrier_wait(empty(stage), phase ^ 1);
        barrier_expect(full(stage), expected);
        return full(stage);
    }
    // Consumer: wait for the current buffer's data. After reading: release the buffer, by one of THREADS threads that have read
    // together, and advance.
    __device__ __forceinline__ void wait() const { barrier_wait(full(stage), phase); }
    template <int THREADS = 128> __device__ __forceinline__ void release() {
        if (threadIdx.x % THREADS == 0) barrier_arrive(empty(stage));
        advance();
    }
};

// The byte offset in a tile of 16-byte chunk `chunk` of row `row`.
template <int ROW_BYTES> __device__ __forceinline__ u32 swizzled(int row, int chunk) {
    return row * ROW_BYTES + ((chunk ^ (row * ROW_BYTES / 128) % (ROW_BYTES / 16)) << 4);
}
// The sums over the first `rows` rows of a tile of 64 rows of 16-bit columns. A warpgroup computes them, after it has
// synchronized, each warp those of 16 columns. A lane returns those of columns PANEL_COLUMN and PANEL_COLUMN + 1; four lanes have
// the same. These read rows whose chunks lie in different banks, where rows have 128 bytes.
#define PANEL_COLUMN (threadIdx.x % 128 / 32 * 16 + threadIdx.x % 8 * 2)
template <class T, int ROW_BYTES = 128> __device__ __forceinline__ float2 panel_sums(u32 tile, int rows) {
    int column = PANEL_COLUMN, start = threadIdx.x % 32 / 8 * 2;
    float2 sum = {};
#pragma unroll 4
    for (int i = 0; i < 16; i++) {
        int row = i / 2 * 8 + start + i % 2;
        float2 v = unpack_pair<T>(load_shared(tile + swizzled<ROW_BYTES>(row, column / 8) + column % 8 * 2));
        if (row < rows) sum.x += v.x, sum.y += v.y;
    }
#pragma unroll
    for (int lanes = 8; lanes < 32; lanes *= 2) {
        sum.x += __shfl_xor_sync(~0u, sum.x, lanes);
        sum.y += __shfl_xor_sync(~0u, sum.y, lanes);
    }
    return sum;
}
// The matrix descriptor of a swizzled tile at `address`.
//   block   the leading byte offset, of an MN-major tile: bytes from one block of columns, as wide as a row, to the next.
//   eight   the stride byte offset: bytes from eight rows to the next eight.
template <int ROW_BYTES = 128> __device__ __forceinline__ u64 tile_descriptor(u32 address, u32 block = 16, u32 eight = 8 * ROW_BYTES) {
    return (u64)((address & 0x3ffff) >> 4) | (u64)(block >> 4) << 16 | (u64)(eight >> 4) << 32 |
           (ROW_BYTES == 128 ? 1ull : ROW_BYTES == 64 ? 2ull : 3ull) << 62;
}
// What to add to a descriptor for the next k-step: 16 elements of 16 bits, or 8 floats.
template <bool MN_MAJOR, int ROW_BYTES = 128> constexpr u64 DEPTH_STEP = (MN_MAJOR ? 16 * ROW_BYTES : 16 * 2) >> 4;

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// One k-step of a warpgroup: c = a·b, or c + a·b where `add`, of 64 rows and 16 elements of the depth. The columns are as many
// as c holds: 16, 32, 64 or 128; with A in shared memory also 96, 112, 136, 160, 192, 208, 216, 224 and 256.
// S is the operands' type. float means tf32: a k-step is 8 deep, operands are K-major only, and their low 13 bits are ignored.
// No other instruction may touch c from the first product to wgmma_wait, not even to zero it: ptxas would wait after each
// product (C75xx in its log).
// The accumulator: lane (g = lane / 4, t = lane % 4) of warp w holds columns 8 j + 2 t and 8 j + 2 t + 1, of row 16 w + g in
// c[4 j] and c[4 j + 1], and of row 16 w + g + 8 in c[4 j + 2] and c[4 j + 3].
#define NAMES_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define NAMES_32 NAMES_16 \
    ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_48 NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define NAMES_56 NAMES_48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define NAMES_64 NAMES_56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_68 NAMES_64 ",%64,%65,%66,%67"
#define NAMES_80 NAMES_68 ",%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define NAMES_96 NAMES_80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_104 NAMES_96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define NAMES_108 NAMES_104 ",%104,%105,%106,%107"
#define NAMES_112 NAMES_108 ",%108,%109,%110,%111"
#define NAMES_128 NAMES_112 \
    ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define FOUR(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define EIGHT(i) FOUR(i), FOUR(i + 4)
#define C_8 EIGHT(0)
#define C_16 C_8, EIGHT(8)
#define C_32 C_16, EIGHT(16), EIGHT(24)
#define C_48 C_32, EIGHT(32), EIGHT(40)
#define C_56 C_48, EIGHT(48)
#define C_64 C_56, EIGHT(56)
#define C_68 C_64, FOUR(64)
#define C_80 C_64, EIGHT(64), EIGHT(72)
#define C_96 C_80, EIGHT(80), EIGHT(88)
#define C_104 C_96, EIGHT(96)
#define C_108 C_104, FOUR(104)
#define C_112 C_104, EIGHT(104)
#define C_128 C_112, EIGHT(112), EIGHT(120)

#define DEFINE_WGMMA(S, KIND, N, COUNT, A, B, MAJORS, ADD)                                                           \
    template <bool A_MN_MAJOR, bool B_MN_MAJOR> __device__ __forceinline__ void wgmma(const S*, float (&c)[COUNT], u64 a, u64 b, bool add) { \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" NAMES_##COUNT "}, %" #A ", %" #B ", add, 1, 1" MAJORS ";\n}" \
                     : C_##COUNT : "l"(a), "l"(b), "n"(A_MN_MAJOR), "n"(B_MN_MAJOR), "r"((int)add));                 \
    }
// The same with A in registers, held as `a` of mma.cuh's fragments for the warp's 16 rows: a rounded accumulator is the A of
// the next product.
#define DEFINE_WGMMA_REGISTERS(S, KIND, N, COUNT, A0, A1, A2, A3, B, TRANSPOSE_B, ADD)                               \
    template <bool B_MN_MAJOR> __device__ __forceinline__ void wgmma(const S*, float (&c)[COUNT], const u32 (&a)[4], u64 b, bool add) { \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #ADD ", 0;\n"                                           \
                     "wgmma.mma_async.sync.aligned.m64n" #N KIND " {" NAMES_##COUNT "}, "                             \
                     "{%" #A0 ",%" #A1 ",%" #A2 ",%" #A3 "}, %" #B ", add, 1, 1, %" #TRANSPOSE_B ";\n}"              \
                     : C_##COUNT : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(B_MN_MAJOR), "r"((int)add)); \
    }
#define DEFINE_WGMMAS(S, KIND, MAJORS)                            \
    DEFINE_WGMMA(S, KIND, 16, 8, 8, 9, MAJORS(10, 11), 12)        \
    DEFINE_WGMMA(S, KIND, 32, 16, 16, 17, MAJORS(18, 19), 20)     \
    DEFINE_WGMMA(S, KIND, 64, 32, 32, 33, MAJORS(34, 35), 36)     \
    DEFINE_WGMMA(S, KIND, 96, 48, 48, 49, MAJORS(50, 51), 52)     \
    DEFINE_WGMMA(S, KIND, 112, 56, 56, 57, MAJORS(58, 59), 60)    \
    DEFINE_WGMMA(S, KIND, 128, 64, 64, 65, MAJORS(66, 67), 68)    \
    DEFINE_WGMMA(S, KIND, 136, 68, 68, 69, MAJORS(70, 71), 72)    \
    DEFINE_WGMMA(S, KIND, 160, 80, 80, 81, MAJORS(82, 83), 84)    \
    DEFINE_WGMMA(S, KIND, 192, 96, 96, 97, MAJORS(98, 99), 100)   \
    DEFINE_WGMMA(S, KIND, 208, 104, 104, 105, MAJORS(106, 107), 108) \
    DEFINE_WGMMA(S, KIND, 216, 108, 108, 109, MAJORS(110, 111), 112) \
    DEFINE_WGMMA(S, KIND, 224, 112, 112, 113, MAJORS(114, 115), 116) \
    DEFINE_WGMMA(S, KIND, 256, 128, 128, 129, MAJORS(130, 131), 132)
#define DEFINE_WGMMAS_REGISTERS(S, KIND)                                \
    DEFINE_WGMMA_REGISTERS(S, KIND, 16, 8, 8, 9, 10, 11, 12, 13, 14)    \
    DEFINE_WGMMA_REGISTERS(S, KIND, 32, 16, 16, 17, 18, 19, 20, 21, 22) \
    DEFINE_WGMMA_REGISTERS(S, KIND, 64, 32, 32, 33, 34, 35, 36, 37, 38) \
    DEFINE_WGMMA_REGISTERS(S, KIND, 128, 64, 64, 65, 66, 67, 68, 69, 70)
#define BFLOAT16 "k16.f32.bf16.bf16"
#define FLOAT16 "k16.f32.f16.f16"
#define EITHER_MAJOR(A, B) ", %" #A ", %" #B
#define K_MAJOR_ONLY(A, B)
DEFINE_WGMMAS(bf16, BFLOAT16, EITHER_MAJOR)
DEFINE_WGMMAS(half, FLOAT16, EITHER_MAJOR)
DEFINE_WGMMAS(float, "k8.f32.tf32.tf32", K_MAJOR_ONLY)
DEFINE_WGMMAS_REGISTERS(bf16, BFLOAT16)
DEFINE_WGMMAS_REGISTERS(half, FLOAT16)
