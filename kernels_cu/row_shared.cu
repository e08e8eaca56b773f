// Row program, the row in shared memory between one read and one write: of one block, or of the blocks of a cluster.
//
// P: as in row_stream.cu, and
//   Held<V>, held<V>(memory, count)          where `count` packs of each full input are, as they are loaded
//   hold<V>(row, col, held, at)              copies V elements of each there, asynchronously
//   take<V>(At<S>, held, at, tile)           reads those of stage S
//   at_row(row)                              the program with the addresses of a row
// Each thread reads what it has copied itself: it waits for no other one. So it can copy the cluster's next row, if Ahead, as soon
// as its last stage has read a pack, while this row is written. Single elements are not held: each stage loads them.
// Launch: Threads threads; at most rows * Blocks blocks, in clusters of Blocks (grid-stride loop over rows); cols <= Blocks *
//   Threads * Packs * V, of which a thread computes Items packs at a time; dynamic shared memory for Threads * Packs
//   packs. V > 1 as in row_block.cu.
#pragma once

#include "cluster_team.cuh"
#include "copies.cuh"
#include "stages.cuh"

// The packs of a row that a thread holds in shared memory, `Threads` apart. They are copied in groups, so that the first ones
// are computed while others are on their way. All threads have as many groups, some of them empty, and the first stage waits
// for all that have packs. The last stage, if Ahead, replaces each group that it has read by that of row `next`.
template <class P, int Threads, int Packs, int Items, int V, bool Ahead>
struct HeldPacks {
    static constexpr int most_groups = 8;
    static constexpr int packs_a_group = (Packs + most_groups * Items - 1) / (most_groups * Items) * Items;
    static constexpr int groups = (Packs + packs_a_group - 1) / packs_a_group;
    typedef int Index;
    const P& program;  // of all rows; the stages get that of their row
    typename P::template Held<V> held;
    i64 next = 0;
    mutable int copied = 0;  // groups of `next` that are on their way, or there

    // Copy the groups of a row, from number `first` on.
    template <class Team>
    __device__ __forceinline__ void copy(const Team& team, i64 row, int first) const {
#pragma unroll 1
        for (int g = first; g < groups; ++g) {
            copy_group(team, row, g);
        }
    }
    template <int S>
    __device__ __forceinline__ void wait(int number) const {
        if (S == 0 && number % packs_a_group == 0) {
            // A program of one stage has copied as many groups of the next row as it has read of this one.
            copies_wait(Ahead && P::stages == 1 ? groups - 1 : groups - 1 - number / packs_a_group);
        }
    }
    template <int S, int, class Tile>
    __device__ __forceinline__ void read(const P& p, i64, i64, int number, Tile& tile) const {
        p.take(At<S>(), held, number * Threads + threadIdx.x, tile);
    }
    template <int S, class Team>
    __device__ __forceinline__ void release(const P&, const Team& team, int number) const {
        if (Ahead && S + 1 == P::stages && (number + Items) % packs_a_group == 0) {
            copy_group(team, next, copied);
            ++copied;
        }
    }

private:
    template <class Team>
    __device__ __forceinline__ void copy_group(const Team& team, i64 row, int g) const {
        if (!Ahead || row < program.rows) {
            const Span<P, V, int> span(program, row);
#pragma unroll
            for (int i = 0; i < packs_a_group; ++i) {
                const int number = g * packs_a_group + i;
                const int k = (number * team.size() + team.rank()) * V;
                if (k < span.packed) {
                    program.template hold<V>(row, span.column(k), held, number * Threads + threadIdx.x);
                }
            }
        }
        copies_commit();
    }
};

template <class P, int Threads, int Packs, int Items, int V, int Blocks, bool Ahead>
__device__ __forceinline__ void row_shared(const P& p) {
    SHARED_DYNAMIC(memory);
    typedef Cluster<Threads, Blocks, P::slot> Team;
    SHARED_BYTES(scratch, Team::bytes);
    const Team team(scratch);
    HeldPacks<P, Threads, Packs, Items, V, Ahead> packs = {p, P::template held<V>(memory, Threads * Packs)};
    const i64 first = blockIdx.x / Blocks;
    packs.copy(team, first, 0);
    team.meet();
    for (i64 row = first; row < p.rows; row += gridDim.x / Blocks) {
        if constexpr (Ahead) {
            packs.next = row + gridDim.x / Blocks;
            packs.copied = 0;
        } else if (row != first) {
            packs.copy(team, row, 0);
        }
        typename P::Row r;
        p.begin(row, r);
        streamed_stage<P, 0, Items, V>(p.at_row(row), team, packs, row, r);
        if constexpr (Ahead) {
            packs.copy(team, packs.next, packs.copied);
        }
        if (team.rank() == 0) {
            p.commit(row, r);
        }
    }
}
