// Row program, the row in shared memory between one read and one write: of one block, or of the blocks of a cluster.
//
// P: as in row_stream.cu, and
//   Held<V>, held<V>(memory, count)          where `count` packs of each full input are, as they are loaded
//   hold<V>(row, col, held, at)              copies V elements of each there, asynchronously
//   take<V>(At<S>, held, at, tile)           reads those of stage S
// Each thread reads what it has copied itself: it waits for no other one. Single elements are not held: each stage loads them.
// Launch: Threads threads; at most rows * Blocks blocks, in clusters of Blocks (grid-stride loop over rows); cols <= Blocks *
//   Threads * Packs * V, of which a thread computes Items packs at a time; dynamic shared memory for Threads * Packs
//   packs. V > 1 as in row_block.cu.
#pragma once

#include "cluster_team.cuh"
#include "copies.cuh"
#include "stages.cuh"

// The packs of a row that a thread holds in shared memory, `Threads` apart. They are copied in groups, so that the first ones
// are computed while others are on their way. All threads have as many groups, some of them empty, and the first stage waits
// for all that have packs.
template <class P, int Threads, int Packs, int Items, int V>
struct HeldPacks {
    static constexpr int most_groups = 8;
    static constexpr int packs_a_group = (Packs + most_groups * Items - 1) / (most_groups * Items) * Items;
    static constexpr int groups = (Packs + packs_a_group - 1) / packs_a_group;
    typedef int Index;
    typename P::template Held<V> held;

    template <class Team>
    __device__ __forceinline__ void copy(const P& p, const Team& team, i64 row) const {
        const Span<P, V, int> span(p, row);
#pragma unroll 1
        for (int g = 0; g < groups; ++g) {
#pragma unroll
            for (int i = 0; i < packs_a_group; ++i) {
                const int number = g * packs_a_group + i;
                const int k = (number * team.size() + team.rank()) * V;
                if (k < span.packed) {
                    p.template hold<V>(row, span.column(k), held, number * Threads + threadIdx.x);
                }
            }
            copies_commit();
        }
    }
    template <int S>
    __device__ __forceinline__ void wait(int number) const {
        if (S == 0 && number % packs_a_group == 0) {
            copies_wait(groups - 1 - number / packs_a_group);
        }
    }
    template <int S, int, class Tile>
    __device__ __forceinline__ void read(const P& p, i64, i64, int number, Tile& tile) const {
        p.take(At<S>(), held, number * Threads + threadIdx.x, tile);
    }
};

template <class P, int Threads, int Packs, int Items, int V, int Blocks>
__device__ __forceinline__ void row_shared(const P& p) {
    SHARED_DYNAMIC(memory);
    typedef Cluster<Threads, Blocks, P::slot> Team;
    SHARED_BYTES(scratch, Team::bytes);
    const Team team(scratch);
    const HeldPacks<P, Threads, Packs, Items, V> packs = {P::template held<V>(memory, Threads * Packs)};
    const i64 first = blockIdx.x / Blocks;
    packs.copy(p, team, first);
    team.meet();
    for (i64 row = first; row < p.rows; row += gridDim.x / Blocks) {
        if (row != first) {
            packs.copy(p, team, row);
        }
        typename P::Row r;
        p.begin(row, r);
        streamed_stage<P, 0, Items, V>(p, team, packs, row, r);
        if (team.rank() == 0) {
            p.commit(row, r);
        }
    }
}
