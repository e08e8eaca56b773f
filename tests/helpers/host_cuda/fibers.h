// The part of shim.cpp that holds the state of a launch, and switches between the fibers of its threads.
namespace {

constexpr size_t kStack = 256 << 10;
constexpr size_t kGuard = 64;

enum class State { Ready, Waiting, Done };

// A product of a warpgroup, as far as one thread computes it.
struct Issued {
    Product product;
    float* sums;
    Word64 a, b;
    int add;
};

// An asynchronous copy of a thread.
struct Copied {
    void* to;
    const void* from;
    unsigned bytes;
};

// A box in shared memory that a thread has asked to be stored in a matrix; the words are those of its tensor map.
struct Stored {
    Site site;
    Word64 words[7];
    int element, line;
    unsigned from;
    std::vector<char> before;  // what the box holds, until the store has read it
};

// Where a fiber, or the scheduler, goes on. GCC's __builtin_setjmp fills it and makes no system call, as swapcontext does
// twice for each switch, of which a launch has millions.
struct Place {
    void* words[5];
};

struct Block;

struct Fiber {
    Place place;
    Place begin;  // of a kernel
    char* stack;
    unsigned number;  // in the cluster
    unsigned lane;
    unsigned lanes;  // of its warp
    Fiber* warp;     // its first thread
    Block* block;
    Index thread;
    unsigned met;  // of the first thread of a warp: the lanes that wait in a collective
    std::vector<std::vector<Issued>> groups;  // of products: those in flight, and the one that is still open
    std::vector<std::vector<Copied>> copies;  // likewise
    std::vector<std::vector<Stored>> stores;  // likewise
    unsigned fences, commits;                 // of stores, so far
    // Of the first thread of a warp: the boxes that its lanes have stored, as they were at its last fence; by their places.
    std::map<unsigned, std::vector<char>> fenced;
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
Place scheduler;
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

[[noreturn]] void go_to(Place& place) { __builtin_longjmp(place.words, 1); }

// Leave a fiber, and come back here once the scheduler resumes it. Callers must take all registers for changed.
[[gnu::noipa]] void leave(Place& here_after) {
    if (__builtin_setjmp(here_after.words) == 0) go_to(scheduler);
}

[[gnu::noipa]] void enter(Place& place) {
    if (__builtin_setjmp(scheduler.words) == 0) go_to(place);
}

ucontext_t creator;

// What a fiber runs: it waits at the beginning of a kernel as soon as it is made, and goes there again for every launch.
void fiber_main() {
    Fiber& own = *current;
    if (__builtin_setjmp(own.begin.words) == 0) setcontext(&creator);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
#endif
    entry(program);
    if (current->stores.size() > 1 || !current->stores[0].empty()) {
        fail("a thread that leaves the kernel while stores read its shared memory", HOST_SITE);
    }
    current->state = State::Done;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(nullptr, scheduler_bottom, scheduler_size);
#endif
    go_to(scheduler);
}

unsigned block_of(const Fiber& fiber) { return fiber.number / threads_a_block; }

void resume(Fiber& fiber) {
    current = &fiber;
    here = fiber.block;
    blockIdx = here->at;
    threadIdx = fiber.thread;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&scheduler_fake, fiber.stack, kStack);
#endif
    enter(fiber.place);
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
    leave(current->place);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake, &scheduler_bottom, &scheduler_size);
#endif
}

// Leave the block for good; its fibers are never resumed.
[[noreturn]] void abandon() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(nullptr, scheduler_bottom, scheduler_size);
#endif
    go_to(scheduler);
}

void make_fiber() {
    Fiber fiber{};
    fiber.number = static_cast<unsigned>(fibers.size());
    fiber.stack = static_cast<char*>(
        mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (fiber.stack == MAP_FAILED) {
        perror("host_cuda: stack of a fiber");
        abort();
    }
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = fiber.stack;
    context.uc_stack.ss_size = kStack;
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
    current = &fiber;
    swapcontext(&creator, &context);
    current = nullptr;
    fibers.push_back(fiber);
}

void prepare(unsigned threads) {
    while (fibers.size() < threads) make_fiber();
    for (unsigned k = 0; k < threads; ++k) {
        Fiber& fiber = fibers[k];
        const unsigned number = k % threads_a_block;
        fiber.place = fiber.begin;
        fiber.lane = k % 32;
        fiber.lanes = std::min(32u, threads_a_block - number / 32 * 32);
        fiber.warp = &fiber - number % 32;
        fiber.block = &blocks[block_of(fiber)];
        fiber.thread = Index{number % blockDim.x, number / blockDim.x % blockDim.y, number / blockDim.x / blockDim.y};
        fiber.met = 0;
        fiber.state = State::Ready;
        if (fiber.groups.size() != 1 || !fiber.groups[0].empty()) fiber.groups.assign(1, {});
        if (fiber.copies.size() != 1 || !fiber.copies[0].empty()) fiber.copies.assign(1, {});
        if (fiber.stores.size() != 1 || !fiber.stores[0].empty()) fiber.stores.assign(1, {});
        fiber.fences = fiber.commits = 0;
        fiber.fenced.clear();
    }
}

}  // namespace
