// Row program, the row in shared memory between one read and one write: of one block, or of the blocks of a cluster.
//
// P: as in row_stream.cu, and
//   Held<V>, held<V>(row, col, memory, count)   where `count` packs of each full input from (row, col) on are, as they are loaded
//   hold<V>(row, col, held, at)              copies V elements of each there, asynchronously
//   take<V>(At<S>, held, at, tile)           reads those of stage S
//   Single, hold(row, col, single), take(At<S>, single, tile)   the same of one element of each, in registers
//   at_row(row)                              the program with the addresses of a row
// Each thread reads what it has copied itself: it waits for no other one. A single element stays in its thread's registers.
// Launch: Threads threads; a multiple of Blocks blocks, in clusters of Blocks (grid-stride loop over rows); cols <= Blocks *
//   Threads * Packs * V, of which a thread computes Items packs at a time, a divisor of Packs; dynamic shared memory for
//   Threads * Packs packs of each full input, and 128 bytes for each. V > 1 as in row_block.cu.
#pragma once

#include "cluster_team.cuh"
#include "copies.cuh"
#include "stages.cuh"

// The packs of a row that a thread holds in shared memory, `Threads` apart. Where the code is repeated for all of them, each is
// computed as soon as it has arrived.
template <class P, int Threads, int Packs, int Items, int V>
struct HeldPacks {
    static constexpr bool indexed = true, has_columns = false;
    typename P::template Held<V> held;
    typename P::Single single;

    template <class Team>
    __device__ __forceinline__ void copy(const P& p, const Team& team, i64 row, const Span<P, V, int>& span) {
        if constexpr (Span<P, V, int>::has_singles) {
            if (span.has_single(team.rank())) {
                p.hold(row, span.single(team.rank()), single);
            }
        }
#pragma unroll
        for (int i = 0; i < Packs; ++i) {
            const int k = (i * team.size() + team.rank()) * V;
            if (k < span.packed) {
                p.template hold<V>(row, span.column(k), held, i * Threads + threadIdx.x);
            }
            copies_commit();
        }
    }
    // Read pack i, and the single element, for stage S.
    template <int S, class Tile>
    __device__ __forceinline__ void take(const P& p, int i, Tile& tile) const {
        if (S == 0 && (Items == Packs || i == 0)) {
            copies_wait(Items == Packs ? Packs - 1 - i : 0);
        }
        p.take(At<S>(), held, i * Threads + threadIdx.x, tile);
    }
    template <int S, class Tile>
    __device__ __forceinline__ void take_single(const P& p, Tile& tile) const {
        p.take(At<S>(), single, tile);
    }
};

template <class P, int Threads, int Packs, int Items, int V, int Blocks>
__device__ __forceinline__ void row_shared(const P& p) {
    static_assert(Packs % Items == 0, "a thread computes Items packs at a time");
    SHARED_DYNAMIC(memory);
    typedef Cluster<Threads, Blocks, P::slot> Team;
    SHARED_BYTES(scratch, Team::bytes);
    const Team team(scratch);
    const i64 first = blockIdx.x / Blocks;
    for (i64 row = first; row < p.rows; row += gridDim.x / Blocks) {
        if (row != first) {
            __syncthreads();  // its packs may begin elsewhere in a line, where others have some of the row before
        }
        const P of_row = p.at_row(row);
        const Span<P, V, int> span(of_row, row);
        HeldPacks<P, Threads, Packs, Items, V> packs = {
            of_row.template held<V>(row, span.column(0), memory, Threads * Packs), {}};
        packs.copy(of_row, team, row, span);
        if (row == first) {
            team.meet();
        }
        typename P::Row r;
        p.begin(row, r);
        packed_stage<P, 0, Packs, Items, V>(of_row, team, row, span, r, packs);
        if (team.rank() == 0) {
            p.commit(row, r);
        }
    }
}
