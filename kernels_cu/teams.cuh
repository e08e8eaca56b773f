// Teams: the threads that share a row, and how they combine accumulators.
//
// After reduce(totals), every thread of the team holds the same totals; after reduce_first(totals), which blocks and clusters have,
// only the threads with first(), rank 0 among them. All threads of the team have to call both. `Totals` has lead(), settle() and
// exchange() (see reductions.cuh). A team that `leads` can combine what they look ahead for before elements are added, by lead(totals), and the
// rest afterwards, by gather(totals).
#pragma once

#include "barriers.cuh"
#include "reductions.cuh"

// A single thread.
struct Solo {
    __device__ __forceinline__ int rank() const { return 0; }
    __device__ __forceinline__ int size() const { return 1; }
    template <class Totals>
    __device__ __forceinline__ void reduce(Totals&) const {}
};

// G consecutive lanes of a warp, G a power of two. A team may reduce() alone; all teams of a warp have to lead() and gather()
// together, which takes fewer instructions than to name the lanes of one.
template <int G>
struct Lanes {
    static constexpr bool leads = true;
    static constexpr u32 all = 0xffffffffu;
    __device__ __forceinline__ int rank() const { return threadIdx.x % G; }
    __device__ __forceinline__ int size() const { return G; }
    __device__ __forceinline__ u32 members() const {
        return G == 32 ? all : ((1u << (G % 32)) - 1u) << (threadIdx.x % 32 / G * G);
    }
    template <class Totals>
    __device__ __forceinline__ void lead(Totals& totals, u32 members = all) const {
#pragma unroll
        for (int mask = 1; mask < G; mask *= 2) {
            totals.lead(mask, members);
        }
    }
    template <class Totals>
    __device__ __forceinline__ void gather(Totals& totals, u32 members = all) const {
#pragma unroll
        for (int mask = 1; mask < G; mask *= 2) {
            totals.exchange(mask, (threadIdx.x & mask) != 0, members);
        }
    }
    template <class Totals>
    __device__ __forceinline__ void reduce(Totals& totals) const {
        lead(totals, members());
        totals.settle(true);
        gather(totals, members());
    }
};

// A whole block of Threads threads, Threads a multiple of 32, or one of the `Teams` teams that a block has then. `shared` holds
// `bytes` for each of them: two slots of `Slot` bytes for each warp.
template <int Threads, int Slot, int Teams = 1>
struct Block {
    static_assert(Teams < 16, "each team has a named barrier");
    static constexpr bool leads = false;
    static constexpr int warps = Threads / 32, bytes = 2 * warps * Slot;
    char* shared;
    mutable int turn = 0;

    __device__ __forceinline__ explicit Block(char* memory) : shared(memory + number() * bytes) {}
    __device__ __forceinline__ static int number() { return Teams == 1 ? 0 : threadIdx.x / Threads; }  // of the team in its block
    __device__ __forceinline__ static int rank() { return Teams == 1 ? threadIdx.x : threadIdx.x % Threads; }
    __device__ __forceinline__ int size() const { return Threads; }
    __device__ __forceinline__ static bool first() { return rank() < 32; }
    __device__ __forceinline__ static void sync() {
        if constexpr (Teams == 1) {
            __syncthreads();
        } else {
            named_sync(1 + number(), Threads);
        }
    }

    template <class Totals>
    __device__ __forceinline__ void reduce(Totals& totals) const {
        combine(totals, true);
    }
    template <class Totals>
    __device__ __forceinline__ void reduce_first(Totals& totals) const {
        combine(totals, first());
    }

private:
    template <class Totals>
    __device__ __forceinline__ void combine(Totals& totals, bool wanted) const {
        static_assert(sizeof(Totals) <= Slot, "the scratch slots are too small for these totals");
        Lanes<32>().reduce(totals);
        if (Threads == 32) {
            return;
        }
        // Two sets of slots alternate: a set is written again only after the barrier of the other one, which every thread
        // reaches after its last read of the first.
        char* slots = shared + turn * warps * Slot;
        turn ^= 1;
        if (threadIdx.x % 32 == 0) {
            *reinterpret_cast<Totals*>(slots + rank() / 32 * Slot) = totals;
        }
        sync();
        if (wanted) {
            const int lane = threadIdx.x % 32;
            Totals mine;
            if (lane < warps) {
                mine = *reinterpret_cast<const Totals*>(slots + lane * Slot);
            }
            Lanes<32>().reduce(mine);
            totals = mine;
        }
    }
};
