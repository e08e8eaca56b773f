// Row program, the row in shared memory between one read and one write: of one block, or of the blocks of a cluster.
//
// P: as in row_stream.cu, and
//   Held<V>, held<V>(row, col, memory, count)   where `count` packs of each full input from (row, col) on are, as they are loaded
//   held_bytes<V>(count)                     the bytes that they take
//   hold<V>(row, col, held, at)              copies V elements of each there, asynchronously
//   take<V>(At<S>, held, at, tile)           reads those of stage S
//   Single, hold(row, col, single), take(At<S>, single, tile)   the same of one element of each, in registers
//   at_row(row)                              the program with the addresses of a row
//   holds_columns                            whether per-column inputs are held, too, from row to row
//   Columns<V>, columns<V>(memory, count)    where `count` packs of each are; `memory` is moved behind them
//   hold<V>(col, columns, at), take<V>(At<S>, columns, at, tile)   copies V elements of each there, and reads those of stage S
// Rows are computed by teams: threads of one block, or as many of each block of a cluster; a block has threads of several teams
// where these share values of columns. Each thread reads what it has copied itself: it waits for no other one, but once for values
// of columns. A single element stays in its thread's registers.
// Launch: Teams * Threads threads; a multiple of Blocks blocks, in clusters of Blocks (grid-stride loop over rows): if rows are
//   shifted and columns held, as many clusters as rows, or a multiple of V, so that all rows of a cluster begin at the same place
//   in a pack. cols <= Blocks * Threads * Packs * V, of which a thread computes Items packs at a time, a divisor of Packs. Dynamic
//   shared memory for Threads * Packs packs of each full input, and 128 bytes for each, all that for each team; and for as many of
//   each per-column input that is held. V > 1 as in row_block.cu.
#pragma once

#include "cluster_team.cuh"
#include "copies.cuh"
#include "stages.cuh"

// The packs of a row that a thread holds in shared memory, `Threads` apart. Where the code is repeated for all of them, each is
// computed as soon as it has arrived.
template <class P, int Threads, int Packs, int Items, int V>
struct HeldPacks {
    static constexpr bool indexed = true, has_columns = P::holds_columns, sums_columns = false;
    typename P::template Held<V> held;
    typename P::template Columns<V> columns;
    typename P::Single single;

    // The place of pack i among those of this thread's part of a row.
    __device__ __forceinline__ static int place(int i) { return i * Threads + threadIdx.x % Threads; }

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
                p.template hold<V>(row, span.column(k), held, place(i));
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
        p.take(At<S>(), held, place(i), tile);
        p.take(At<S>(), columns, place(i), tile);
    }
    template <int S, class Tile>
    __device__ __forceinline__ void take_single(const P& p, Tile& tile) const {
        p.take(At<S>(), single, tile);
    }
};

// Copy the values of columns of the packs of a row, of each team as many; they arrive before what is copied later.
template <class P, int Threads, int Packs, int V, int Teams, class Team>
__device__ __forceinline__ void copy_columns(
    const P& p, const Team& team, i64 row, const typename P::template Columns<V>& columns) {
    const Span<P, V, int> span(p, row);
#pragma unroll
    for (int i = team.block.number(); i < Packs; i += Teams) {
        const int k = (i * team.size() + team.rank()) * V;
        if (k < span.packed) {
            p.template hold<V>(span.column(k), columns, i * Threads + team.block.rank());
        }
    }
    copies_commit();
}

template <class P, int Threads, int Packs, int Items, int V, int Blocks, int Teams>
__device__ __forceinline__ void row_shared(const P& p) {
    static_assert(Packs % Items == 0, "a thread computes Items packs at a time");
    SHARED_DYNAMIC(memory);
    typedef Cluster<Threads, Blocks, P::slot, Teams> Team;
    SHARED_BYTES(scratch, Team::bytes);
    const i64 clusters = gridDim.x / Blocks, first = blockIdx.x / Blocks;
    if (first >= p.rows) {
        return;
    }
    const Team team(scratch);
    char* free = memory;
    const auto columns = P::template columns<V>(free, Threads * Packs);
    free += team.block.number() * P::template held_bytes<V>(Threads * Packs);
    if constexpr (P::holds_columns) {
        copy_columns<P, Threads, Packs, V, Teams>(p, team, first, columns);
    }
    bool begins = true;
    for (i64 row = first + team.block.number() * clusters; begins || row < p.rows; row += Teams * clusters) {
        if (!begins) {
            team.block.sync();  // its packs may begin elsewhere in a line, where others have some of the row before
        }
        const bool exists = Teams == 1 || row < p.rows;
        const P of_row = p.at_row(exists ? row : first);
        const Span<P, V, int> span(of_row, row, exists);
        HeldPacks<P, Threads, Packs, Items, V> packs = {
            of_row.template held<V>(row, span.column(0), free, Threads * Packs), columns, {}};
        packs.copy(of_row, team, row, span);
        if (begins) {
            if constexpr (Teams > 1) {
                copies_wait(Packs);  // all but those of the row
                __syncthreads();
            }
            team.meet();
            begins = false;
        }
        if (exists) {
            typename P::Row r;
            p.begin(row, r);
            packed_stage<P, 0, Packs, Items, V>(of_row, team, row, span, r, packs);
            if (team.rank() == 0) {
                p.commit(row, r);
            }
        }
    }
}
