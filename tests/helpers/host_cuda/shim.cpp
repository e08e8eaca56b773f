// The threads of a block as fibers that take turns: each runs until it waits for others. See shim.h.
//
// The order is drawn from the seed, and is one of two kinds: rounds, in which every thread moves a step in a new order; and
// running ahead, in which one warp gets as far as it can before the next one starts. What a kernel computes must depend on
// neither. Shared memory is NaN to begin with, and has guards before and behind it.
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

struct Fiber {
    ucontext_t context;
    char* stack;
    unsigned number;
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
// A barrier in shared memory: what the current phase still waits for.
struct Phase {
    unsigned arrivals, pending, parity;
    long long bytes;
};

std::vector<Shared> shared_blocks;
std::map<unsigned, Phase> phases;
std::map<unsigned, unsigned> arrived;  // at the named barriers
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

void resume(Fiber& fiber) {
    current = &fiber;
    threadIdx = Index{fiber.number % blockDim.x, fiber.number / blockDim.x % blockDim.y,
                      fiber.number / blockDim.x / blockDim.y};
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
    }
}

// Waiting -----------------------------------------------------------------------------------------------------------

bool same(Site a, Site b) { return a.line == b.line && strcmp(a.file, b.file) == 0; }

// The threads whose numbers are those of `members` in the current warp; null where the block has no such thread.
Fiber* member(int lane) {
    const unsigned number = current->number / 32 * 32 + lane;
    return number < blockDim.x * blockDim.y * blockDim.z ? &fibers[number] : nullptr;
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
            const bool alone = other->kind == Kind::Barrier || other->kind == Kind::Phase || other->kind == Kind::Named;
            if (other->state != State::Waiting || alone) return false;
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

// All threads wait: release them if it is at one barrier, else say who waits where.
void release(unsigned threads) {
    const Fiber *first = nullptr, *left = nullptr, *other = nullptr;
    for (unsigned k = 0; k < threads; ++k) {
        const Fiber& fiber = fibers[k];
        if (fiber.state == State::Done) {
            left = &fiber;
        } else if (first == nullptr) {
            first = &fiber;
        } else if (fiber.kind != first->kind || !same(fiber.site, first->site) || fiber.kind != Kind::Barrier) {
            other = &fiber;
        }
    }
    if (other != nullptr) {
        note(first->site, "thread %u waits here at %s, thread %u at %s:%d at %s: they never meet", first->number,
             name_of(first->kind), other->number, short_name(other->site.file), other->site.line, name_of(other->kind));
    } else if (left != nullptr || first->kind != Kind::Barrier) {
        note(first->site, "thread %u waits here at %s, which thread %u never reaches: it has left the kernel",
             first->number, name_of(first->kind), left ? left->number : first->number);
    } else {
        for (unsigned k = 0; k < threads; ++k) fibers[k].state = State::Ready;
    }
}

// Blocks ------------------------------------------------------------------------------------------------------------

void check_shared() {
    for (const Shared& block : shared_blocks) {
        for (size_t k = 0; k < kGuard; ++k) {
            if (block.memory[k] != 0x5a || block.memory[kGuard + block.bytes + k] != 0x5a) {
                note(block.site, "a write beyond the %zu bytes of this shared memory", block.bytes);
            }
        }
    }
}

void run_block(unsigned threads, std::mt19937_64& random, bool ahead) {
    prepare(threads);
    const unsigned warps = (threads + 31) / 32;
    std::vector<unsigned> order(ahead ? warps : threads);
    for (unsigned k = 0; k < order.size(); ++k) order[k] = k;
    std::shuffle(order.begin(), order.end(), random);
    for (;;) {
        bool moved = false, waiting = false;
        for (unsigned at : order) {
            const unsigned from = ahead ? at * 32 : at, to = ahead ? std::min(threads, from + 32) : at + 1;
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
    give_way();
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

void wake(Kind kind, unsigned what) {
    for (Fiber& fiber : fibers) {
        if (fiber.state == State::Waiting && fiber.kind == kind && fiber.members == what) fiber.state = State::Ready;
    }
}

void settle(unsigned barrier) {
    Phase& phase = phases[barrier];
    if (phase.pending == 0 && phase.bytes == 0) {
        phase.pending = phase.arrivals;
        phase.parity ^= 1;
        wake(Kind::Phase, barrier);
    }
}

}  // namespace

unsigned offset_in_shared(const void* p) {
    return static_cast<unsigned>(static_cast<const char*>(p) - dynamic_shared_memory());
}

void phase_init(unsigned barrier, unsigned arrivals) { phases[barrier] = Phase{arrivals, arrivals, 0, 0}; }

void phase_expect(unsigned barrier, unsigned bytes) { phases[barrier].bytes += bytes; }

void phase_complete(unsigned barrier, unsigned bytes) {
    phases[barrier].bytes -= bytes;
    settle(barrier);
}

void phase_arrive(Site site, unsigned barrier) {
    if (phases.count(barrier) == 0 || phases[barrier].pending == 0) {
        fail("an arrival at a barrier that expects no more", site);
    }
    --phases[barrier].pending;
    settle(barrier);
}

void phase_wait(Site site, unsigned barrier, unsigned parity) {
    while (phases[barrier].parity == parity) wait_for(Kind::Phase, site, barrier);
}

void named_barrier(Site site, unsigned name, unsigned threads, bool waits) {
    if (++arrived[name] == threads) {
        arrived[name] = 0;
        wake(Kind::Named, name);
    } else if (waits) {
        wait_for(Kind::Named, site, name);
    }
}

char* shared_memory(Site site, size_t bytes) {
    for (const Shared& block : shared_blocks) {
        if (same(block.site, site) && block.bytes == bytes) return block.memory + kGuard;
    }
    char* memory = static_cast<char*>(aligned_alloc(64, (bytes + 2 * kGuard + 63) / 64 * 64));
    memset(memory, 0x5a, kGuard);
    memset(memory + kGuard, 0xff, bytes);
    memset(memory + kGuard + bytes, 0x5a, kGuard);
    shared_blocks.push_back(Shared{site, bytes, memory});
    return memory + kGuard;
}

char* dynamic_shared_memory() { return shared_memory(Site{"dynamic shared memory", 0}, dynamic_bytes); }

const char* launch(const char* kernel_, Entry* entry_, const void* program_, Index grid, Index block, size_t dynamic_shared,
                   Word64 seed) {
    kernel = kernel_;
    entry = entry_;
    program = program_;
    dynamic_bytes = dynamic_shared;
    gridDim = grid;
    blockDim = block;
    failed = false;
    report[0] = 0;
    std::mt19937_64 random(seed);
    std::vector<Index> blocks;
    for (unsigned y = 0; y < grid.y; ++y) {
        for (unsigned x = 0; x < grid.x; ++x) blocks.push_back(Index{x, y, 0});
    }
    std::shuffle(blocks.begin(), blocks.end(), random);
#ifndef __SANITIZE_ADDRESS__
    struct sigaction action = {}, before[2];
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
#endif
    for (const Index& at : blocks) {
        blockIdx = at;
        run_block(block.x * block.y * block.z, random, seed & 1);
        check_shared();
        for (Shared& memory : shared_blocks) free(memory.memory);
        shared_blocks.clear();
        phases.clear();
        for (const auto& each : arrived) {
            if (each.second != 0) note(Site{"a named barrier", 0}, "%u arrivals are left over", each.second);
        }
        arrived.clear();
        if (failed) break;
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
