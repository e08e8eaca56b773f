// The part of shim.cpp for what works asynchronously: barriers in shared memory, bulk copies, clusters, tensor cores.
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

// Addresses of shared memory tell the blocks of a cluster apart: those of a block are this many bytes from the last one's.
constexpr unsigned kWindow = 1 << 24;
unsigned within_block(unsigned address) { return address % kWindow; }

// Fail unless a block of the cluster is there still.
void check_present(Site site, unsigned block) {
    if (block >= blocks.size()) fail("a block that the cluster does not have", site);
    const Fiber* first = &fibers[block * threads_a_block];
    if (std::all_of(first, first + threads_a_block, [](const Fiber& f) { return f.state == State::Done; })) {
        fail("an access to the shared memory of a block that has left the kernel", site);
    }
}

// The barrier of a block of the cluster.
Phase& phase_of(Site site, unsigned barrier, unsigned block) {
    check_present(site, block);
    std::map<unsigned, Phase>& phases = blocks[block].phases;
    barrier = within_block(barrier);
    if (phases.count(barrier) == 0) fail("a barrier in shared memory that nobody has initialised", site);
    return phases[barrier];
}

void settle(unsigned barrier, unsigned block) {
    barrier = within_block(barrier);
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

// Dynamic shared memory comes first, then each static array, in the same order in all blocks.
unsigned offset_in_shared(const void* p) {
    constexpr unsigned space = 1 << 20;
    static std::vector<Site> sites;
    dynamic_shared_memory();
    for (const Shared& each : here->shared) {
        const char* from = each.memory + kGuard;
        if (p < from || p >= from + std::max<size_t>(each.bytes, 1)) continue;
        unsigned number = 0;
        if (!same(each.site, kDynamic)) {
            while (number < sites.size() && !same(sites[number], each.site)) ++number;
            if (number == sites.size()) sites.push_back(each.site);
            ++number;
        }
        return rank() * kWindow + number * space + static_cast<unsigned>(static_cast<const char*>(p) - from);
    }
    fail("an address of shared memory that is none", Site{"shared_address", 0});
}

void phase_init(unsigned barrier, unsigned arrivals) {
    here->phases[within_block(barrier)] = Phase{arrivals, arrivals, 0, 0};
}

void phase_expect(unsigned barrier, unsigned bytes) { here->phases[within_block(barrier)].bytes += bytes; }

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
    barrier = within_block(barrier);
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

const void* shared_of(Site site, const void* own, unsigned block) {
    check_present(site, block);
    for (const Shared& each : here->shared) {
        const char* from = each.memory + kGuard;
        if (own >= from && own < from + each.bytes) {
            return memory_of(blocks[block], each.site, each.bytes) + (static_cast<const char*>(own) - from);
        }
    }
    fail("an address of shared memory that is none", site);
}

void shared_store(Site site, const void* own, unsigned block, unsigned word, unsigned barrier) {
    memcpy(const_cast<void*>(shared_of(site, own, block)), &word, sizeof word);
    complete(site, barrier, block, sizeof word);
}

void copy_issue(void* to, const void* from, unsigned bytes) {
    current->copies.back().push_back(Copied{to, from, bytes});
}

void copies_commit() { current->copies.push_back({}); }

void copies_wait(unsigned left) {
    std::vector<std::vector<Copied>>& copies = current->copies;
    while (copies.size() > left + 1) {
        for (const Copied& each : copies.front()) memcpy(each.to, each.from, each.bytes);
        copies.erase(copies.begin());
    }
}

// A tensor map as runtime.py writes it: address, elements a line, lines, bytes from line to line, the box: elements, lines; itemsize.
struct Boxes {
    char* matrix;
    long long elements, lines, stride;
    unsigned wide, high, itemsize;

    Boxes(Site site, const Word64* map)
        : matrix(reinterpret_cast<char*>(map[0])), elements(map[1]), lines(map[2]), stride(map[3]),
          wide(static_cast<unsigned>(map[4])), high(static_cast<unsigned>(map[5])), itemsize(static_cast<unsigned>(map[6])) {
        if (map[0] % 16 != 0 || stride % 16 != 0) fail("a matrix that is not aligned to 16", site);
    }
    unsigned bytes() const { return wide * high * itemsize; }
    // Call visit(bytes in shared memory, element of the matrix or null) for each element of a box whose first one is at `at`.
    template <class Visit>
    void visit_elements(unsigned at, int element, int line, const Visit& visit) const {
        const unsigned width = wide * itemsize;
        for (unsigned r = 0; r < high; ++r) {
            for (unsigned c = 0; c < wide; ++c) {
                const long long x = element + static_cast<long long>(c), y = line + static_cast<long long>(r);
                unsigned byte = at + r * width + c * itemsize;
                byte ^= (byte >> 7 & (width / 16 - 1)) << 4;
                visit(byte, x >= 0 && x < elements && y >= 0 && y < lines ? matrix + y * stride + x * itemsize : nullptr);
            }
        }
    }
};

void tensor_copy(Site site, unsigned to, const Word64* map, int element, int line, unsigned barrier, unsigned blocks_) {
    const Boxes boxes(site, map);
    to = within_block(to);
    if (to % 1024 != 0) fail("a swizzled box has to be aligned to 1024 bytes", site);
    for (unsigned block = 0; block < 32; ++block) {
        if (!(blocks_ >> block & 1)) continue;
        phase_of(site, barrier, block);
        char* shared = memory_of(blocks[block], kDynamic, dynamic_bytes);
        if (to + boxes.bytes() > dynamic_bytes) fail("a box beyond the shared memory", site);
        boxes.visit_elements(to, element, line, [&](unsigned byte, const char* from) {
            from != nullptr ? memcpy(shared + byte, from, boxes.itemsize) : memset(shared + byte, 0, boxes.itemsize);
        });
        complete(site, barrier, block, boxes.bytes());
    }
}

void tensor_store(Site site, const Word64* map, int element, int line, unsigned from) {
    const Boxes boxes(site, map);
    from = within_block(from);
    if (from % 128 != 0) fail("a box that is stored has to be aligned to 128 bytes", site);
    if (from + boxes.bytes() > dynamic_bytes) fail("a box beyond the shared memory", site);
    for (unsigned k = 0; k < current->lanes; ++k) {
        if (current->warp[k].fences <= current->commits) fail("a store of what a lane has written before no fence", site);
    }
    const char* shared = dynamic_shared_memory() + from;
    Stored stored{site, {}, element, line, from, {shared, shared + boxes.bytes()}};
    memcpy(stored.words, map, sizeof stored.words);
    const auto known = current->warp->fenced.emplace(from, stored.before).first;
    if (known->second != stored.before) fail("a store of what a lane has written behind its fence", site);
    current->stores.back().push_back(stored);
}

void stores_fence() {
    ++current->fences;
    for (auto& box : current->warp->fenced) {
        memcpy(box.second.data(), dynamic_shared_memory() + box.first, box.second.size());
    }
}

void stores_commit() {
    ++current->commits;
    current->stores.push_back({});
}

void stores_wait(unsigned left) {
    std::vector<std::vector<Stored>>& stores = current->stores;
    while (stores.size() > left + 1) {
        for (const Stored& each : stores.front()) {
            const Boxes boxes(each.site, each.words);
            const char* shared = dynamic_shared_memory();
            if (memcmp(shared + each.from, each.before.data(), boxes.bytes()) != 0) {
                fail("shared memory that changes while a store reads it", each.site);
            }
            boxes.visit_elements(each.from, each.element, each.line, [&](unsigned byte, char* to) {
                if (to != nullptr) memcpy(to, shared + byte, boxes.itemsize);
            });
        }
        stores.erase(stores.begin());
    }
}

namespace {

constexpr int kDepth = 16;  // of a product of one instruction

float widened(unsigned short bits, bool bfloat16) {
    static const std::vector<float> halves = [] {
        std::vector<float> values(1 << 16);
        for (unsigned k = 0; k < values.size(); ++k) {
            values[k] = bits_as<_Float16>(static_cast<unsigned short>(k));
        }
        return values;
    }();
    return bfloat16 ? __uint_as_float(static_cast<unsigned>(bits) << 16) : halves[bits];
}

// The elements k = 0, 1, ... of a row of an operand.
void read_operand(float* to, int step, Word64 operand, bool turned, bool bfloat16, unsigned row) {
    const char* shared = dynamic_shared_memory();
    const unsigned base = static_cast<unsigned>(operand & 0x3fff) << 4;
    const unsigned stride = static_cast<unsigned>(operand >> 32 & 0x3fff) << 4;
    const unsigned far = static_cast<unsigned>(operand >> 16 & 0x3fff) << 4;
    for (unsigned k = 0; k < kDepth; ++k) {
        unsigned at = base + (turned ? row / 64 * far + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                                     : row / 8 * stride + row % 8 * 128 + k * 2);
        at ^= (at >> 7 & 7) << 4;
        if (at + 2 > dynamic_bytes) fail("an operand beyond the shared memory", Site{"a product of a warpgroup", 0});
        unsigned short bits;
        memcpy(&bits, shared + at, 2);
        to[k * step] = widened(bits, bfloat16);
    }
}

// A thread's sums: two rows of a, and the columns (rows of b) 8 j + 2 (thread % 4) and the next one.
void compute(const Issued& issued) {
    constexpr int kColumns = 64;  // a quarter of the widest product
    const Product& product = issued.product;
    const unsigned thread = threadIdx.x % 128;
    const int columns = product.sums / 2;
    float a[kDepth], b[kDepth][kColumns], sums[kColumns];
    for (int n = 0; n < columns; ++n) {
        read_operand(&b[0][n], kColumns, issued.b, product.turned_b, product.bfloat16, n / 2 * 8 + thread % 4 * 2 + n % 2);
    }
    for (int h = 0; h < 2; ++h) {
        read_operand(a, 1, issued.a, product.turned_a, product.bfloat16, thread / 32 * 16 + thread % 32 / 4 + h * 8);
        for (int n = 0; n < columns; ++n) sums[n] = issued.add ? issued.sums[n / 2 * 4 + 2 * h + n % 2] : 0.0f;
        for (int k = 0; k < kDepth; ++k) {
            for (int n = 0; n < columns; ++n) sums[n] += a[k] * b[k][n];
        }
        for (int n = 0; n < columns; ++n) issued.sums[n / 2 * 4 + 2 * h + n % 2] = sums[n];
    }
}

}  // namespace

void products_issue(Product product, float* sums, Word64 a, Word64 b, int add) {
    current->groups.back().push_back(Issued{product, sums, a, b, add});
}

void products_commit() { current->groups.push_back({}); }

void products_wait(unsigned left) {
    std::vector<std::vector<Issued>>& groups = current->groups;
    while (groups.size() > left + 1) {
        for (const Issued& each : groups.front()) compute(each);
        groups.erase(groups.begin());
    }
}
