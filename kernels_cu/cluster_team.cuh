// The threads of a cluster of blocks as a team; see teams.cuh.
#pragma once

#include "clusters.cuh"
#include "teams.cuh"

// Threads threads of each of the `Blocks` blocks of a cluster; a single block needs no cluster. Blocks have `Teams` times as many, and
// a cluster as many teams. `shared` holds `bytes`. All threads call meet() once, before the first reduction.
//
// Each block sends its totals to all, and waits for theirs, in two sets of slots that alternate: a block sends what
// overwrites a set only after it has got totals that others sent when all their threads had read that set, for the
// reduction within a block has a barrier. Warp 0 waits in every block: its arrival opens the phase of the block's barrier, and
// it may not exit before it has got what was sent to it. So threads arrive in the constructor and wait in meet(): copies are
// issued between.
template <int Threads, int Blocks, int Slot, int Teams = 1>
struct Cluster {
    static constexpr bool leads = false;
    typedef Block<Threads, Slot, Teams> Own;
    static constexpr int slots_at = Teams * Own::bytes;  // behind those of the block
    static constexpr int bytes_of_slots = 2 * Blocks * Slot, barriers_at = slots_at + Teams * bytes_of_slots;
    static constexpr int bytes = Blocks == 1 ? slots_at : barriers_at + Teams * 16;
    static_assert(Slot % 8 == 0, "the alignment of barriers");
    char* shared;
    Own block;
    mutable u32 round = 0;

    __device__ __forceinline__ explicit Cluster(char* memory) : shared(memory), block(memory) {
        if constexpr (Blocks > 1) {
            if (block.rank() == 0) {
                barrier_init(barrier(0), 1);
                barrier_init(barrier(1), 1);
                barrier_init_fence();
            }
            cluster_arrive();
        }
    }
    __device__ __forceinline__ void meet() const {
        if constexpr (Blocks > 1) {
            cluster_wait();
        }
    }
    __device__ __forceinline__ int rank() const { return (Blocks == 1 ? 0 : cluster_rank() * Threads) + block.rank(); }
    __device__ __forceinline__ int size() const { return Blocks * Threads; }
    __device__ __forceinline__ bool first() const { return rank() < 32; }

    template <class Totals>
    __device__ __forceinline__ void reduce(Totals& totals) const {
        combine(totals, true);
    }
    template <class Totals>
    __device__ __forceinline__ void reduce_first(Totals& totals) const {
        combine(totals, first());
    }

private:
    // The slot of a block in a set, and the barrier of the set.
    __device__ __forceinline__ char* slot(u32 set, u32 of) const {
        return shared + slots_at + block.number() * bytes_of_slots + (set * Blocks + of) * Slot;
    }
    __device__ __forceinline__ u32 barrier(u32 set) const {
        return shared_address(shared + barriers_at) + 16 * block.number() + 8 * set;
    }

    template <class Totals>
    __device__ __forceinline__ void combine(Totals& totals, bool wanted) const {
        if constexpr (Blocks == 1) {
            wanted ? block.reduce(totals) : block.reduce_first(totals);
        } else {
            static_assert(sizeof(Totals) % 4 == 0 && Blocks <= 32, "words of one block for each lane");
            block.reduce_first(totals);
            const u32 set = round % 2, parity = round / 2 % 2, lane = threadIdx.x % 32;
            ++round;
            if (block.first()) {
                if (lane == 0) {
                    barrier_arrive_expect(barrier(set), Blocks * sizeof(Totals));
                }
                if (lane < Blocks) {
                    const u32* const words = reinterpret_cast<const u32*>(&totals);
#pragma unroll
                    for (int i = 0; i < sizeof(Totals) / 4; ++i) {
                        cluster_store(reinterpret_cast<u32*>(slot(set, cluster_rank())) + i, lane, words[i], barrier(set));
                    }
                }
            }
            if (wanted || block.first()) {
                barrier_wait(barrier(set), parity);
                Totals mine;
                if (lane < Blocks) {
                    mine = *reinterpret_cast<const Totals*>(slot(set, lane));
                }
                Lanes<32>().reduce(mine);
                totals = mine;
            }
        }
    }
};
