// The threads of a block as fibers that take turns: each runs until it waits for others. See shim.h.
//
// The order is drawn from the seed, and is one of three kinds: rounds, in which every thread moves a step in a new order; and
// running ahead, in which one warp, or one block of a cluster, gets as far as it can before the next one starts. What a kernel
// computes must depend on none. Shared memory is NaN to begin with, and has guards before and behind it.
#include "shim.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

host_cuda::Index threadIdx, blockIdx, blockDim, gridDim;

namespace host_cuda {
namespace {

constexpr size_t kStack = 256 << 10;
constexpr size_t kGuard = 64;

enum class State { Ready, Waiting, Done };

// A product of a warpgroup, as far as one thread computes it.
struct Issued {
    Product* product;
    float* sums;
    Word64 a, b;
    int add;
};

struct Fiber {
    ucontext_t context;
    char* stack;
    unsigned number;  // in the cluster
    std::vector<std::vector<Issued>> groups;  // of products: those in flight, and the one that is still open
    State state;
    Kind kind;
    Site site;
    unsigned members;
    int from;
    Word64 word;
};

struct Shared {
    Site site;
    size_t bytes;
    char* memory;  // a guard, the bytes, a guard
};

std::vector<Fiber> fibers;
unsigned threads_a_block;
// A barrier in shared memory: what the current phase still waits for.
struct Phase {
    unsigned arrivals, pending, parity;
    long long bytes;
};

// What the threads of a block share.
struct Block {
    Index at;
    std::vector<Shared> shared;
    std::map<unsigned, Phase> phases;
    std::map<unsigned, unsigned> arrived;  // at the named barriers
    unsigned at_barrier = 0;               // threads at __syncthreads
};

std::vector<Block> blocks;  // of the cluster that runs
Block* here;                // that of the current thread
ucontext_t scheduler;
Fiber* current;
Entry* entry;
const void* program;
const char* kernel;
size_t dynamic_bytes;
bool failed;
char report[1024];

const char* name_of(Kind kind) {
    switch (kind) {
        case Kind::Barrier: return "__syncthreads";
        case Kind::Shuffle: return "a shuffle";
        case Kind::Ballot: return "a vote";
        case Kind::Phase: return "a barrier in shared memory";
        case Kind::Named: return "a named barrier";
        case Kind::Converged: return "an instruction of whole warps";
        case Kind::Cluster: return "a barrier of the cluster";
        default: return "__syncwarp";
    }
}

const char* short_name(const char* file) {
    const char* slash = strrchr(file, '/');
    return slash ? slash + 1 : file;
}

void note(Site site, const char* format, ...) {
    if (failed) return;
    failed = true;
    int used = snprintf(report, sizeof report, "%s: %s:%d: block (%u, %u): ", kernel, short_name(site.file), site.line,
                        blockIdx.x, blockIdx.y);
    if (current != nullptr) used += snprintf(report + used, sizeof report - used, "thread %u: ", current->number);
    va_list values;
    va_start(values, format);
    vsnprintf(report + used, sizeof report - used, format, values);
    va_end(values);
}

// Switching ---------------------------------------------------------------------------------------------------------

void* scheduler_fake;
const void* scheduler_bottom;
size_t scheduler_size;

void enter_fiber() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
#endif
    entry(program);
    current->state = State::Done;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(nullptr, scheduler_bottom, scheduler_size);
#endif
    setcontext(&scheduler);
}

unsigned block_of(const Fiber& fiber) { return fiber.number / threads_a_block; }

void resume(Fiber& fiber) {
    current = &fiber;
    here = &blocks[block_of(fiber)];
    blockIdx = here->at;
    const unsigned number = fiber.number % threads_a_block;
    threadIdx = Index{number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&scheduler_fake, fiber.stack, kStack);
#endif
    swapcontext(&scheduler, &fiber.context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(scheduler_fake, nullptr, nullptr);
#endif
    current = nullptr;
}

void give_way() {
#ifdef __SANITIZE_ADDRESS__
    void* fake;
    __sanitizer_start_switch_fiber(&fake, scheduler_bottom, scheduler_size);
#endif
    swapcontext(&current->context, &scheduler);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, &scheduler_bottom, &scheduler_size);
#endif
}

// Leave the block for good; its fibers are never resumed.
[[noreturn]] void abandon() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(nullptr, scheduler_bottom, scheduler_size);
#endif
    setcontext(&scheduler);
    abort();
}

void prepare(unsigned threads) {
    while (fibers.size() < threads) {
        Fiber fiber{};
        fiber.number = static_cast<unsigned>(fibers.size());
        fiber.stack = static_cast<char*>(
            mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        if (fiber.stack == MAP_FAILED) {
            perror("host_cuda: stack of a fiber");
            abort();
        }
        fibers.push_back(fiber);
    }
    for (unsigned k = 0; k < threads; ++k) {
        Fiber& fiber = fibers[k];
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, enter_fiber, 0);
        fiber.state = State::Ready;
        fiber.groups.assign(1, {});
    }
}

// Waiting -----------------------------------------------------------------------------------------------------------

bool same(Site a, Site b) { return a.line == b.line && strcmp(a.file, b.file) == 0; }

// The threads whose numbers are those of `members` in the current warp; null where the block has no such thread.
Fiber* member(int lane) {
    const unsigned first = block_of(*current) * threads_a_block;
    const unsigned number = (current->number - first) / 32 * 32 + lane;
    return number < threads_a_block ? &fibers[first + number] : nullptr;
}

// Once the last of its lanes has arrived, a collective is carried out for all of them.
bool completed(unsigned members) {
    for (int k = 0; k < 32; ++k) {
        if (members >> k & 1) {
            const Fiber* other = member(k);
            if (other == nullptr || other->state == State::Done) {
                note(current->site, "%s names lane %d, which %s", name_of(current->kind), k,
                     other ? "has left the kernel" : "the block does not have");
                abandon();
            }
            if (other->state != State::Waiting || other->kind >= Kind::Phase || other->kind == Kind::Barrier) return false;
            if (!(other->members >> lane() & 1)) return false;  // it has still to meet others
            if (other->kind != current->kind || !same(other->site, current->site) || other->members != members) {
                note(current->site, "%s of lanes %08x meets %s of lanes %08x at %s:%d (lane %d)",
                     name_of(current->kind), members, name_of(other->kind), other->members,
                     short_name(other->site.file), other->site.line, k);
                abandon();
            }
        }
    }
    Word64 words[32] = {}, votes = 0;
    for (int k = 0; k < 32; ++k) {
        if (members >> k & 1) {
            words[k] = member(k)->word;
            votes |= static_cast<Word64>(words[k] & 1) << k;
        }
    }
    for (int k = 0; k < 32; ++k) {
        if (members >> k & 1) {
            Fiber* other = member(k);
            other->word = other->kind == Kind::Ballot ? votes : words[other->from];
            other->state = State::Ready;
        }
    }
    return true;
}

// Release threads that all wait at one barrier of a kind.
bool released(Kind kind, unsigned from, unsigned to) {
    for (unsigned k = from; k < to; ++k) {
        const Fiber &fiber = fibers[k], &first = fibers[from];
        if (fiber.state != State::Waiting || fiber.kind != kind || !same(fiber.site, first.site)) return false;
    }
    for (unsigned k = from; k < to; ++k) fibers[k].state = State::Ready;
    return true;
}

// All threads wait: release those of the cluster if they have met, else say who waits where.
void release(unsigned threads) {
    if (released(Kind::Cluster, 0, threads)) return;
    const Fiber *first = nullptr, *left = nullptr, *other = nullptr;
    for (unsigned k = 0; k < threads; ++k) {
        const Fiber& fiber = fibers[k];
        if (fiber.state == State::Done) {
            left = &fiber;
        } else if (first == nullptr) {
            first = &fiber;
        } else if (fiber.kind != first->kind || !same(fiber.site, first->site) ||
                   (fiber.kind != Kind::Barrier && fiber.kind != Kind::Cluster)) {
            other = &fiber;
        }
    }
    if (other != nullptr) {
        note(first->site, "thread %u waits here at %s, thread %u at %s:%d at %s: they never meet", first->number,
             name_of(first->kind), other->number, short_name(other->site.file), other->site.line, name_of(other->kind));
    } else {
        note(first->site, "thread %u waits here at %s, which thread %u never reaches: it has left the kernel",
             first->number, name_of(first->kind), left ? left->number : first->number);
    }
}

// Blocks ------------------------------------------------------------------------------------------------------------

void check_shared() {
    for (const Shared& block : here->shared) {
        for (size_t k = 0; k < kGuard; ++k) {
            if (block.memory[k] != 0x5a || block.memory[kGuard + block.bytes + k] != 0x5a) {
                note(block.site, "a write beyond the %zu bytes of this shared memory", block.bytes);
            }
        }
    }
}

void run_threads(unsigned threads, std::mt19937_64& random, unsigned team) {
    prepare(threads);
    const bool ahead = team > 1;
    std::vector<unsigned> order((threads + team - 1) / team);
    for (unsigned k = 0; k < order.size(); ++k) order[k] = k;
    std::shuffle(order.begin(), order.end(), random);
    for (;;) {
        bool moved = false, waiting = false;
        for (unsigned at : order) {
            const unsigned from = at * team, to = std::min(threads, from + team);
            for (bool again = true; again;) {
                again = false;
                for (unsigned k = from; k < to; ++k) {
                    if (fibers[k].state == State::Ready) {
                        resume(fibers[k]);
                        if (failed) return;
                        moved = true;
                        again = ahead;
                    }
                    waiting |= fibers[k].state != State::Done;
                }
            }
        }
        if (!waiting) return;
        if (!moved) {
            release(threads);
            if (failed) return;
        }
        if (!ahead) std::shuffle(order.begin(), order.end(), random);
    }
}

#ifndef __SANITIZE_ADDRESS__
void on_signal(int number, siginfo_t* info, void*) {
    if (current == nullptr) {
        signal(number, SIG_DFL);
        raise(number);
    }
    note(Site{"an unknown line", 0}, "an access to address %p, beyond what the kernel was given", info->si_addr);
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, number);
    sigprocmask(SIG_UNBLOCK, &set, nullptr);
    abandon();
}
#endif

}  // namespace

int lane() { return static_cast<int>(current->number % 32); }

void fail(const char* what, Site site) {
    note(site, "%s", what);
    abandon();
}

void barrier(Site site) {
    current->state = State::Waiting;
    current->kind = Kind::Barrier;
    current->site = site;
    const unsigned from = block_of(*current) * threads_a_block;
    if (++here->at_barrier == threads_a_block) {
        here->at_barrier = 0;
        released(Kind::Barrier, from, from + threads_a_block);
    }
    give_way();
}

void converged(Site site) {
    for (int k = 0; k < 32; ++k) {
        const Fiber* other = member(k);
        const bool elsewhere = other != nullptr && other->state == State::Waiting && other->kind < Kind::Phase &&
                               !(other->members >> lane() & 1);
        if (elsewhere && other->kind != Kind::Barrier) {
            note(site, "%s, while lane %d is apart at %s:%d", name_of(Kind::Converged), k, short_name(other->site.file),
                 other->site.line);
            abandon();
        }
    }
    collect(Kind::Converged, site, 0xffffffffu, 0, lane());
}

Word64 collect(Kind kind, Site site, unsigned members, Word64 word, int from) {
    Fiber& own = *current;
    own.kind = kind;
    own.site = site;
    own.members = members;
    own.word = word;
    own.from = from;
    own.state = State::Waiting;
    if (!(members >> lane() & 1)) {
        note(site, "lane %d is not among the lanes %08x that it names", lane(), members);
        abandon();
    }
    if (from < 0 || from > 31 || !(members >> from & 1)) {
        note(site, "lane %d reads lane %d, which is not among the lanes %08x", lane(), from, members);
        abandon();
    }
    if (!completed(members)) give_way();
    return own.word;
}

namespace {

void wait_for(Kind kind, Site site, unsigned what) {
    current->state = State::Waiting;
    current->kind = kind;
    current->site = site;
    current->members = what;
    give_way();
}

// Wake the threads of a block that wait for this.
void wake(Kind kind, unsigned block, unsigned what) {
    for (unsigned k = block * threads_a_block; k < (block + 1) * threads_a_block; ++k) {
        Fiber& fiber = fibers[k];
        if (fiber.state == State::Waiting && fiber.kind == kind && fiber.members == what) fiber.state = State::Ready;
    }
}

unsigned rank() { return block_of(*current); }

// The barrier of a block of the cluster, which has to be there still.
Phase& phase_of(Site site, unsigned barrier, unsigned block) {
    if (block >= blocks.size()) fail("a block that the cluster does not have", site);
    const Fiber* first = &fibers[block * threads_a_block];
    if (std::all_of(first, first + threads_a_block, [](const Fiber& f) { return f.state == State::Done; })) {
        fail("an access to the shared memory of a block that has left the kernel", site);
    }
    std::map<unsigned, Phase>& phases = blocks[block].phases;
    if (phases.count(barrier) == 0) fail("a barrier in shared memory that nobody has initialised", site);
    return phases[barrier];
}

void settle(unsigned barrier, unsigned block) {
    Phase& phase = blocks[block].phases[barrier];
    if (phase.pending == 0 && phase.bytes == 0) {
        phase.pending = phase.arrivals;
        phase.parity ^= 1;
        wake(Kind::Phase, block, barrier);
    }
}

void complete(Site site, unsigned barrier, unsigned block, unsigned bytes) {
    phase_of(site, barrier, block).bytes -= bytes;
    settle(barrier, block);
}

char* memory_of(Block& block, Site site, size_t bytes) {
    for (const Shared& each : block.shared) {
        if (same(each.site, site) && each.bytes == bytes) return each.memory + kGuard;
    }
    char* memory = static_cast<char*>(aligned_alloc(64, (bytes + 2 * kGuard + 63) / 64 * 64));
    memset(memory, 0x5a, kGuard);
    memset(memory + kGuard, 0xff, bytes);
    memset(memory + kGuard + bytes, 0x5a, kGuard);
    block.shared.push_back(Shared{site, bytes, memory});
    return memory + kGuard;
}

constexpr Site kDynamic{"dynamic shared memory", 0};

}  // namespace

unsigned offset_in_shared(const void* p) {
    return static_cast<unsigned>(static_cast<const char*>(p) - dynamic_shared_memory());
}

void phase_init(unsigned barrier, unsigned arrivals) { here->phases[barrier] = Phase{arrivals, arrivals, 0, 0}; }

void phase_expect(unsigned barrier, unsigned bytes) { here->phases[barrier].bytes += bytes; }

void phase_complete(unsigned barrier, unsigned bytes) {
    complete(Site{"a bulk copy", 0}, barrier, rank(), bytes);
}

void phase_arrive(Site site, unsigned barrier) { phase_arrive(site, barrier, rank()); }

void phase_arrive(Site site, unsigned barrier, unsigned block) {
    Phase& phase = phase_of(site, barrier, block);
    if (phase.pending == 0) fail("an arrival at a barrier that expects no more", site);
    --phase.pending;
    settle(barrier, block);
}

void phase_wait(Site site, unsigned barrier, unsigned parity) {
    phase_of(site, barrier, rank());
    while (here->phases[barrier].parity == parity) wait_for(Kind::Phase, site, barrier);
}

void named_barrier(Site site, unsigned name, unsigned threads, bool waits) {
    if (++here->arrived[name] == threads) {
        here->arrived[name] = 0;
        wake(Kind::Named, rank(), name);
    } else if (waits) {
        wait_for(Kind::Named, site, name);
    }
}

unsigned rank_in_cluster() { return rank(); }

void cluster_barrier(Site site) { wait_for(Kind::Cluster, site, 0); }

void tensor_copy(Site site, unsigned to, const Word64* map, int element, int line, unsigned barrier, unsigned blocks_) {
    // As runtime.py writes it: address, elements a line, lines, bytes from line to line, and the box: elements, lines.
    const char* from = reinterpret_cast<const char*>(map[0]);
    const long long elements = map[1], lines = map[2], stride = map[3];
    const unsigned wide = map[4], high = map[5];
    if (to % 1024 != 0) fail("a swizzled box has to be aligned to 1024 bytes", site);
    if (reinterpret_cast<Word64>(from) % 16 != 0 || stride % 16 != 0) fail("a matrix that is not aligned to 16", site);
    for (unsigned block = 0; block < 32; ++block) {
        if (!(blocks_ >> block & 1)) continue;
        phase_of(site, barrier, block);
        char* shared = memory_of(blocks[block], kDynamic, dynamic_bytes);
        if (to + high * 128 > dynamic_bytes) fail("a box beyond the shared memory", site);
        for (unsigned r = 0; r < high; ++r) {
            for (unsigned c = 0; c < wide; ++c) {
                const long long x = element + static_cast<long long>(c), y = line + static_cast<long long>(r);
                unsigned at = to + r * 128 + c * 2;
                at ^= (at >> 7 & 7) << 4;
                if (x >= 0 && x < elements && y >= 0 && y < lines) {
                    memcpy(shared + at, from + y * stride + x * 2, 2);
                } else {
                    memset(shared + at, 0, 2);
                }
            }
        }
        complete(site, barrier, block, wide * high * 2);
    }
}

void products_issue(Product* product, float* sums, Word64 a, Word64 b, int add) {
    current->groups.back().push_back(Issued{product, sums, a, b, add});
}

void products_commit() { current->groups.push_back({}); }

void products_wait(unsigned left) {
    std::vector<std::vector<Issued>>& groups = current->groups;
    while (groups.size() > left + 1) {
        for (const Issued& each : groups.front()) each.product(each.sums, each.a, each.b, each.add);
        groups.erase(groups.begin());
    }
}

char* shared_memory(Site site, size_t bytes) { return memory_of(*here, site, bytes); }

char* dynamic_shared_memory() { return shared_memory(kDynamic, dynamic_bytes); }

namespace {

// Run the blocks of one cluster.
void run_cluster(unsigned threads, std::mt19937_64& random, unsigned team) {
    run_threads(threads * static_cast<unsigned>(blocks.size()), random, team);
    for (Block& block : blocks) {
        here = &block;
        blockIdx = block.at;
        check_shared();
        for (Shared& memory : block.shared) free(memory.memory);
        for (const auto& each : block.arrived) {
            if (each.second != 0) note(Site{"a named barrier", 0}, "%u arrivals are left over", each.second);
        }
    }
    blocks.clear();
}

}  // namespace

const char* launch(const char* kernel_, Entry* entry_, const void* program_, Index grid, Index block, size_t dynamic_shared,
                   unsigned cluster, Word64 seed) {
    kernel = kernel_;
    entry = entry_;
    program = program_;
    dynamic_bytes = dynamic_shared;
    gridDim = grid;
    blockDim = block;
    threads_a_block = block.x * block.y * block.z;
    failed = false;
    report[0] = 0;
    std::mt19937_64 random(seed);
    if (grid.x % cluster != 0) note(Site{"the launch", 0}, "%u blocks in clusters of %u", grid.x, cluster);
    std::vector<Index> firsts;
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; x += cluster) firsts.push_back(Index{x, y, 0});
    }
    std::shuffle(firsts.begin(), firsts.end(), random);
#ifndef __SANITIZE_ADDRESS__
    struct sigaction action = {}, before[2];
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
#endif
    // Who moves as far as it can: a thread one step, a warp, or a block of a cluster.
    const unsigned team = !(seed & 1) ? 1 : cluster > 1 && seed & 2 ? threads_a_block : 32;
    for (const Index& first : firsts) {
        if (failed) break;
        for (unsigned k = 0; k < cluster; ++k) blocks.push_back(Block{Index{first.x + k, first.y, 0}, {}, {}, {}});
        run_cluster(threads_a_block, random, team);
    }
#ifndef __SANITIZE_ADDRESS__
    sigaction(SIGSEGV, &before[0], nullptr);
    sigaction(SIGBUS, &before[1], nullptr);
#endif
    return failed ? report : nullptr;
}

// What -fsanitize=undefined calls on a finding: every description begins with where it is in the source. -----------------

struct Described {
    const char* file;
    unsigned line, column;
};

}  // namespace host_cuda

#define FINDING(name, what)                                                              \
    extern "C" void __ubsan_handle_##name(host_cuda::Described* at) {                    \
        host_cuda::fail(what, host_cuda::Site{at->file, static_cast<int>(at->line)});    \
    }
FINDING(type_mismatch_v1, "an access through a pointer that is null or not aligned to what it points to")
FINDING(out_of_bounds, "an index out of the bounds of an array")
FINDING(shift_out_of_bounds, "a shift by a negative number or by too many bits")
FINDING(add_overflow, "a sum of signed integers that overflows")
FINDING(sub_overflow, "a difference of signed integers that overflows")
FINDING(mul_overflow, "a product of signed integers that overflows")
FINDING(negate_overflow, "a negation that overflows")
FINDING(divrem_overflow, "a division by zero, or that overflows")
FINDING(load_invalid_value, "a truth value that is neither true nor false")
FINDING(missing_return, "a function that returns nothing where it should")
FINDING(builtin_unreachable, "code that is said to be unreachable")
