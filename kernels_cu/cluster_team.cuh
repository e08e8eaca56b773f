// The threads of a cluster of blocks as a team; see teams.cuh.
#pragma once

#include "clusters.cuh"
#include "teams.cuh"

// All threads of a cluster of `Blocks` blocks of Threads threads. `shared` holds 2 * 32 slots for the blocks, and 2 more.
template <int Threads, int Blocks, int Slot>
struct Cluster {
    Block<Threads, Slot> block;
    mutable int turn = 0;

    __device__ __forceinline__ explicit Cluster(char* memory) : block(memory) {}
    __device__ __forceinline__ int rank() const { return cluster_rank() * Threads + threadIdx.x; }
    __device__ __forceinline__ int size() const { return Blocks * Threads; }
    __device__ __forceinline__ bool first() const { return cluster_rank() == 0 && threadIdx.x < 32; }

    template <class Totals>
    __device__ __forceinline__ void reduce(Totals& totals) const {
        combine(totals, true);
    }
    template <class Totals>
    __device__ __forceinline__ void reduce_first(Totals& totals) const {
        combine(totals, first());
    }

private:
    // Each block leaves its totals in its own memory, for all others to read. Two slots alternate: one is written again only
    // after the barrier of the other, which every thread reaches after its last read of the first.
    template <class Totals>
    __device__ __forceinline__ void combine(Totals& totals, bool wanted) const {
        static_assert(sizeof(Totals) % 4 == 0 && Blocks <= 32, "words of one block for each lane");
        block.reduce_first(totals);
        char* const slot = block.shared + (2 * 32 + turn) * Slot;
        turn ^= 1;
        if (threadIdx.x == 0) {
            *reinterpret_cast<Totals*>(slot) = totals;
        }
        cluster_sync();
        if (wanted) {
            const u32 lane = threadIdx.x % 32;
            Totals mine;
            if (lane < Blocks) {
                u32* const words = reinterpret_cast<u32*>(&mine);
#pragma unroll
                for (int i = 0; i < sizeof(Totals) / 4; ++i) {
                    words[i] = cluster_load(reinterpret_cast<const u32*>(slot) + i, lane);
                }
            }
            Lanes<32>().reduce(mine);
            totals = mine;
        }
    }
};
