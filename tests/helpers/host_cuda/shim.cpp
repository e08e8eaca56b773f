// The threads of a block as fibers that take turns: each runs until it waits for others. See shim.h.
//
// The order is drawn from the seed, and is one of three kinds: rounds, in which every thread moves a step in a new order; and
// running ahead, in which one warp, or one block of a cluster, gets as far as it can before the next one starts. In half of
// the launches one of them is late: it moves a step where no other can. What a kernel computes must depend on none of this.
// Shared memory is NaN to begin with, and has guards before and behind it.
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
#include "fibers.h"

namespace {

// Waiting -----------------------------------------------------------------------------------------------------------

bool same(Site a, Site b) { return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0); }

// A thread of the current warp; null where the block has no such thread.
Fiber* member(unsigned lane) { return lane < current->warp->lanes ? current->warp + lane : nullptr; }

template <class Visit>
void for_each(unsigned members, Visit visit) {
    for (; members != 0; members &= members - 1) visit(__builtin_ctz(members));
}

// Whether this lane has met the current thread in its collective; what can never meet is noted.
bool meets(unsigned lane) {
    const Fiber* other = member(lane);
    const Fiber& own = *current;
    if (other == nullptr || other->state == State::Done) {
        note(own.site, "%s names lane %d, which %s", name_of(own.kind), static_cast<int>(lane),
             other ? "has left the kernel" : "the block does not have");
        abandon();
    }
    if (!(own.warp->met >> lane & 1)) return false;
    if (!(other->members >> own.lane & 1)) return false;  // it has still to meet others
    if (other->kind != own.kind || !same(other->site, own.site) || other->members != own.members) {
        note(own.site, "%s of lanes %08x meets %s of lanes %08x at %s:%d (lane %d)", name_of(own.kind), own.members,
             name_of(other->kind), other->members, short_name(other->site.file), other->site.line,
             static_cast<int>(lane));
        abandon();
    }
    return true;
}

// Once the last of its lanes has arrived, a collective is carried out for all of them.
bool completed(unsigned members) {
    Fiber* warp = current->warp;
    const unsigned missing = members & ~warp->met;
    // Most arrivals end here: the first lane, and the first one that is missing, say whether the others can come.
    if (missing != 0 && (!meets(__builtin_ctz(members)) || !meets(__builtin_ctz(missing)))) return false;
    bool all = true;
    for_each(members, [&](unsigned lane) { all = all && meets(lane); });
    if (!all) return false;
    if (current->kind == Kind::Ballot) {
        Word64 votes = 0;
        for_each(members, [&](unsigned lane) { votes |= (warp[lane].word & 1) << lane; });
        for_each(members, [&](unsigned lane) { warp[lane].word = votes; });
    } else {
        Word64 words[32];
        for_each(members, [&](unsigned lane) { words[lane] = warp[lane].word; });
        for_each(members, [&](unsigned lane) { warp[lane].word = words[warp[lane].from]; });
    }
    for_each(members, [&](unsigned lane) { warp[lane].state = State::Ready; });
    warp->met &= ~members;
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

void run_threads(unsigned threads, std::mt19937_64& random, unsigned team, bool one_is_late) {
    prepare(threads);
    const bool ahead = team > 1;
    std::vector<unsigned> order((threads + team - 1) / team);
    for (unsigned k = 0; k < order.size(); ++k) order[k] = k;
    std::shuffle(order.begin(), order.end(), random);
    const unsigned late = order[0];
    bool moved;
    const auto move = [&](unsigned at, bool far) {
        const unsigned from = at * team, to = std::min(threads, from + team);
        for (bool again = true; again && !failed;) {
            again = false;
            for (unsigned k = from; k < to && !failed; ++k) {
                if (fibers[k].state == State::Ready) {
                    resume(fibers[k]);
                    moved = true;
                    again = far;
                }
            }
        }
    };
    for (;;) {
        moved = false;
        for (unsigned at : order) {
            if (!one_is_late || at != late) move(at, ahead);
        }
        if (one_is_late && !moved) move(late, false);
        if (failed) return;
        const Fiber* first = &fibers[0];
        if (std::all_of(first, first + threads, [](const Fiber& f) { return f.state == State::Done; })) return;
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

int lane() { return static_cast<int>(current->lane); }

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
    for_each(current->warp->met, [&](unsigned other) {
        const Fiber& fiber = current->warp[other];
        if (fiber.members >> current->lane & 1) return;
        note(site, "%s, while lane %d is apart at %s:%d", name_of(Kind::Converged), static_cast<int>(other),
             short_name(fiber.site.file), fiber.site.line);
        abandon();
    });
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
    own.warp->met |= 1u << own.lane;
    if (!completed(members)) give_way();
    return own.word;
}

#include "hopper.h"

char* shared_memory(Site site, size_t bytes) { return memory_of(*here, site, bytes); }

char* dynamic_shared_memory() { return shared_memory(kDynamic, dynamic_bytes); }

namespace {

// Run the blocks of one cluster.
void run_cluster(unsigned threads, std::mt19937_64& random, unsigned team, bool one_is_late) {
    run_threads(threads * static_cast<unsigned>(blocks.size()), random, team, one_is_late);
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
    const unsigned team = seed % 3 == 0 ? 1 : cluster > 1 && seed % 3 == 1 ? threads_a_block : 32;
    const bool one_is_late = seed / 3 % 2 != 0;
    for (const Index& first : firsts) {
        if (failed) break;
        for (unsigned k = 0; k < cluster; ++k) blocks.push_back(Block{Index{first.x + k, first.y, 0}, {}, {}, {}});
        run_cluster(threads_a_block, random, team, one_is_late);
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
