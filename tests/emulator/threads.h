// CUDA's threads on one thread of a CPU: each has a stack of its own and runs until it waits for others.
//
// A launch runs its blocks one after the other, those of a cluster or of a cooperative launch together. Warps take turns in an
// order that is drawn anew each time, and four of them are left out for a time, so that what depends on it shows. Shared memory
// starts as NaN bytes and lies between guards, which are looked at when a block ends.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sys/mman.h>
#include <tuple>
#include <ucontext.h>
#include <utility>
#include <vector>

struct dim3 { unsigned x = 1, y = 1, z = 1; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int STACK = 1 << 18, ARENA = 1 << 18, BARRIERS = 16, GUARD = 64;
constexpr int BEHIND = 4096;  // bytes of guard behind dynamic shared memory: arrays there may begin with bytes that are not written
constexpr unsigned char POISON = 0xff, GUARDED = 0xa5;
constexpr int STUCK = 20000;  // turns without progress after which a launch is given up

struct Barrier { int arrived = 0; uint64_t generation = 0; };

// What the lanes of a warp do together: the last to arrive does it for all.
struct Warp {
    uint32_t alive = 0, arrived = 0, mask = 0;
    const void* operands[32] = {};
    void (*together)(const void* const* operands, uint32_t lanes) = nullptr;
    uint64_t generation = 0;
};

// Four warps, whose 128 lanes make one product together.
struct Group {
    const void* operands[128];
    Barrier barrier;
};

struct Block {
    dim3 index;
    int rank = 0, alive = 0, taken = 0, votes = 0;
    unsigned char* shared = nullptr;
    Barrier barriers[BARRIERS];
    std::vector<Warp> warps;
    std::vector<Group> groups;
    std::vector<std::pair<const void*, int>> statics;  // of each static variable, where it lies
};

// A thread's bulk stores read shared memory as late as they may: when the thread waits for them, and all others wait too. Those
// without a map write later yet: when the thread waits for that, or ends. So a wait that is missing shows; a thread that ends
// without is told.
struct Stores {
    std::vector<std::vector<std::function<void()>>> groups;  // committed, the oldest first
    std::vector<std::function<void()>> open, writes;  // writes: of stores that have read shared memory
    void commit() { groups.push_back(std::move(open)), open.clear(); }
    void read(size_t pending) {
        while (groups.size() > pending) {
            for (auto& store : groups.front()) store();
            groups.erase(groups.begin());
        }
    }
    void write() {
        for (auto& store : writes) store();
        writes.clear();
    }
};

struct Thread {
    jmp_buf at;
    Block* block = nullptr;
    Warp* warp = nullptr;
    dim3 index;
    int lane = 0;
    bool done = true;
    const uint64_t* awaited = nullptr;  // runs again once this is no longer `seen`
    uint64_t seen = 0, cluster_seen = 0;
    Stores stores;
};

static Thread* self = nullptr;
static unsigned char* dynamic_shared = nullptr;
static jmp_buf scheduler;
static bool progress = false;
static int stuck = 0;  // turns of all warps, the newest ones, in which nobody came any further
static const char* failure = nullptr;
static void (*body)(void**) = nullptr;
static void** arguments = nullptr;
static int alive = 0;  // threads, of all blocks that run together

// The barrier of a cluster's threads, of which each arrives, and then may leave or wait.
struct ClusterBarrier {
    Barrier barrier;
    int members = 0, leaving = 0;  // who is counted; of these, who arrived and left
};
static ClusterBarrier cluster;

__attribute__((noinline)) static void suspend() {
    if (!_setjmp(self->at)) _longjmp(scheduler, 1);
}
// Have others run, in a loop that looks at memory.
static inline void poll() { suspend(); }
// Have others run until all wait, each twice.
static inline void come_last() {
    stuck = 0;
    while (stuck < 2) poll();
    progress = true;
}

static inline void wait_for(const uint64_t& generation) {
    self->awaited = &generation, self->seen = generation;
    progress = true;
    suspend();
}
static void release(Barrier& barrier) { barrier.arrived = 0, barrier.generation++, progress = true; }

static void arrive(Barrier& barrier, int count) {
    if (++barrier.arrived >= count) release(barrier);
}
static void meet(Barrier& barrier, int count) {
    if (barrier.arrived + 1 >= count) release(barrier);
    else barrier.arrived++, wait_for(barrier.generation);
}

static void release_full_cluster() {
    if (!cluster.barrier.arrived || cluster.barrier.arrived < cluster.members) return;
    release(cluster.barrier);
    cluster.members -= cluster.leaving, cluster.leaving = 0;
}
static inline void arrive_cluster() {
    self->cluster_seen = cluster.barrier.generation;
    cluster.barrier.arrived++;
    release_full_cluster();
}
static inline void wait_cluster() {
    while (cluster.barrier.generation == self->cluster_seen) wait_for(cluster.barrier.generation);
}
static inline void leave_cluster() {
    (self->cluster_seen == cluster.barrier.generation ? ++cluster.leaving : --cluster.members);
    release_full_cluster();
}

static void complete(Warp& warp) {
    warp.together(warp.operands, warp.arrived);
    warp.arrived = 0, warp.generation++, progress = true;
}
// `together` is called once with the operands of all lanes of `mask`.
static void meet_lanes(const void* operands, uint32_t mask, void (*together)(const void* const*, uint32_t)) {
    Warp& warp = *self->warp;
    if (warp.arrived && (warp.together != together || warp.mask != mask)) failure = "the lanes of a warp do different things together";
    warp.operands[self->lane] = operands, warp.together = together, warp.mask = mask;
    warp.arrived |= 1u << self->lane;
    if (warp.arrived == (mask & warp.alive)) complete(warp);
    else wait_for(warp.generation);
}

// `together` is called once with the operands of all 128 lanes.
static inline void meet_group(const void* operands, void (*together)(const void* const*)) {
    int thread = (int)(self->warp - self->block->warps.data()) * 32 + self->lane;
    Group& group = self->block->groups[thread / 128];
    group.operands[thread % 128] = operands;
    if (group.barrier.arrived + 1 == 128) together(group.operands);
    meet(group.barrier, 128);
}

static void leave() {
    Block& block = *self->block;
    Warp& warp = *self->warp;
    if (!self->stores.open.empty() || !self->stores.groups.empty()) failure = "a thread ends before its bulk stores have been made";
    self->stores.write();
    self->done = true, progress = true;
    warp.alive &= ~(1u << self->lane), block.alive--, alive--;
    if (warp.arrived && warp.arrived == (warp.mask & warp.alive)) complete(warp);
    if (block.barriers[0].arrived && block.barriers[0].arrived >= block.alive) release(block.barriers[0]);
    leave_cluster();
}

static std::vector<Thread*> threads;  // a stack serves one launch after the other
static void enter() {
    for (;;) {
        suspend();
        body(arguments);
        leave();
    }
}
static void create() {
    constexpr int AT_ONCE = 1024;
    char* stacks = (char*)mmap(nullptr, (size_t)AT_ONCE * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) abort();
    for (int i = 0; i < AT_ONCE; i++) {
        threads.push_back(self = new Thread);
        ucontext_t context;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks + (size_t)i * STACK, context.uc_stack.ss_size = STACK, context.uc_link = nullptr;
        makecontext(&context, enter, 0);
        if (!_setjmp(scheduler)) setcontext(&context);
    }
}

static void resume(Thread* thread) {
    self = thread, thread->awaited = nullptr;
    threadIdx = thread->index, blockIdx = thread->block->index, dynamic_shared = thread->block->shared;
    if (!_setjmp(scheduler)) _longjmp(thread->at, 1);
}

// Where the static variable with this key lies in the block's shared memory; the first thread takes the room.
static void* static_shared(const void* key, int bytes, int alignment) {
    Block& block = *self->block;
    for (auto& [known, offset] : block.statics)
        if (known == key) return block.shared + offset;
    int offset = (block.taken + alignment - 1) / alignment * alignment;
    if (offset + bytes + GUARD > ARENA) abort();
    memset(block.shared + offset + bytes, GUARDED, GUARD);
    block.taken = offset + bytes + GUARD;
    block.statics.push_back({key, offset});
    return block.shared + offset;
}

static uint32_t drawn = 1;
static uint32_t draw() { return drawn = drawn * 1664525u + 1013904223u; }

static void run_together(std::vector<Block>& blocks, int shared) {
    int each = blockDim.x * blockDim.y * blockDim.z;
    size_t count = blocks.size() * each;
    while (threads.size() < count) create();
    static unsigned char* arenas = nullptr;
    static size_t arenas_bytes = 0;
    if (arenas_bytes < blocks.size() * (size_t)ARENA) {
        if (arenas) munmap(arenas, arenas_bytes);
        arenas_bytes = blocks.size() * (size_t)ARENA;
        arenas = (unsigned char*)mmap(nullptr, arenas_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }
    int per_block = (each + 31) / 32;
    for (size_t b = 0; b < blocks.size(); b++) {
        Block& block = blocks[b];
        block.alive = each, block.rank = (int)b, block.shared = arenas + b * ARENA;
        memset(block.shared, POISON, std::min(shared + (1 << 16), ARENA));
        memset(block.shared + shared, GUARDED, BEHIND);
        block.taken = shared + BEHIND;
        block.warps.resize(per_block), block.groups.resize((per_block + 3) / 4);
        for (int i = 0; i < each; i++) {
            Thread& thread = *threads[b * each + i];
            thread.block = &block, thread.warp = &block.warps[i / 32], thread.lane = i % 32, thread.done = false, thread.awaited = nullptr, thread.cluster_seen = ~0ull;
            thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / (blockDim.x * blockDim.y)};
            thread.warp->alive |= 1u << thread.lane;
        }
    }
    alive = (int)count, cluster = {{}, alive, 0};
    size_t warps = blocks.size() * per_block, none = (warps + 3) / 4, asleep = draw() / 7 % none;  // which four warps are
    for (stuck = 0; alive && !failure; stuck = progress ? 0 : stuck + 1) {
        if (stuck > STUCK) {
            failure = "its threads wait for each other for ever";
            break;
        }
        if (stuck) asleep = none;
        else if (draw() >> 24 == 0) asleep = draw() / 7 % none;
        progress = false;
        size_t first = draw() / 7 % warps, backwards = draw() >> 30 & 1;
        for (size_t turn = 0; turn < warps; turn++) {
            size_t warp = (first + (backwards ? warps - turn : turn)) % warps;
            if (warp / 4 == asleep) continue;
            size_t start = warp / per_block * each + warp % per_block * 32, end = std::min<size_t>(start + 32, (warp / per_block + 1) * each);
            for (bool again = true; again && !failure;) {
                bool before = progress;
                progress = false;
                for (size_t i = 0; i < end - start; i++) {
                    Thread* thread = threads[backwards ? end - 1 - i : start + i];
                    if (!thread->done && (!thread->awaited || *thread->awaited != thread->seen)) resume(thread);
                }
                again = progress;
                progress |= before;
            }
        }
    }
    if (failure) {  // the stacks are in the middle of a kernel
        threads.clear();
        return;
    }
    for (Block& block : blocks) {
        auto whole = [&](int offset, int bytes) {
            for (int i = 0; i < bytes; i++)
                if (block.shared[offset + i] != GUARDED) failure = "it writes outside of its shared memory";
        };
        whole(shared, BEHIND);
        if (block.taken > shared + BEHIND) whole(block.taken - GUARD, GUARD);
    }
}

static sigjmp_buf outside;  // of the kernel: where a launch goes on when a thread touches memory that it may not
static void touched(int) { siglongjmp(outside, 1); }

static void run_all(const unsigned* grid, int shared, dim3 set) {
    for (unsigned z = 0; z < grid[2]; z += set.z)
        for (unsigned y = 0; y < grid[1]; y += set.y)
            for (unsigned x = 0; x < grid[0] && !failure; x += set.x) {
                std::vector<Block> blocks(set.x * set.y * set.z);
                for (unsigned i = 0; i < blocks.size(); i++)
                    blocks[i].index = {x + i % set.x, y + i / set.x % set.y, z + i / (set.x * set.y)};
                run_together(blocks, shared);
            }
}

// Calls a kernel for all threads of a grid. Returns what went wrong, or null.
static const char* run(void (*kernel)(void**), void** args, const unsigned* grid, const unsigned* block, int shared, bool cooperative,
                       dim3 cluster) {
    body = kernel, arguments = args, failure = nullptr;
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
    dim3 set = cooperative ? gridDim : cluster;
    if (grid[0] % set.x || grid[1] % set.y || grid[2] % set.z) return "the grid is no multiple of its clusters";
    struct sigaction ours = {}, theirs;
    ours.sa_handler = touched;
    sigaction(SIGSEGV, &ours, &theirs);
    if (sigsetjmp(outside, 1)) failure = "it reads or writes behind an array", threads.clear();
    else run_all(grid, shared, set);
    sigaction(SIGSEGV, &theirs, nullptr);
    return failure;
}

template <typename... P> struct Call {
    template <size_t... I> static void apply(void (*kernel)(P...), void** args, std::index_sequence<I...>) { kernel(*(std::remove_const_t<P>*)args[I]...); }
};
template <typename... P> void call(void (*kernel)(P...), void** args) { Call<P...>::apply(kernel, args, std::index_sequence_for<P...>()); }

}  // namespace emulator

// What tests/emulator calls to launch a kernel of at most THREADS threads a block; behind these its cluster.
#define ENTRY(NAME, THREADS, ...)                                                                                            \
    extern "C" __attribute__((visibility("default"))) const char* emulate_##NAME(void** args, const unsigned* grid, const unsigned* block, int shared, bool cooperative) { \
        if (block[0] * block[1] * block[2] > THREADS) return "a block has more threads than its launch bounds";               \
        return emulator::run([](void** args) { emulator::call(NAME, args); }, args, grid, block, shared, cooperative, {__VA_ARGS__}); \
    }
