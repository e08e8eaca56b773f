// Row program for short rows: G lanes of a warp per row, which compute Turns rows one after the other. Rows of them are in their
// registers at a time, so that the next ones are on their way while one is computed.
//
// P: as in row_block.cu; cols <= G * Items * V.
// Launch: Threads threads, a multiple of 32; ceil(rows / (Threads / G * Turns)) blocks. V > 1 needs cols, all row strides and all
//   pointers to be multiples of V elements.
#pragma once

#include "stages.cuh"

// The rows of a group of lanes: one in each turn, as far as the matrix has them.
template <class P, int Step, int G, int V>
struct LaneRows {
    const P& p;
    i64 first;

    __device__ __forceinline__ explicit LaneRows(const P& program, int turns)
        : p(program), first(static_cast<i64>(blockIdx.x) * (Step * turns)) {}
    __device__ __forceinline__ i64 row(int turn) const { return first + turn * Step + threadIdx.x / G; }
    __device__ __forceinline__ bool has(int turn) const { return row(turn) < p.rows; }
    __device__ __forceinline__ bool warp_has(int turn) const {
        return first + turn * Step + threadIdx.x / 32 * (32 / G) < p.rows;
    }
    __device__ __forceinline__ Span<P, V, int> span(int turn) const { return Span<P, V, int>(p, row(turn), has(turn)); }
};

// The loop is not unrolled: each row is computed by the same instructions, so that its bits do not depend on its place. All lanes
// of a warp compute as long as one has a row, as they shuffle together; those without one load and store nothing.
template <class P, int Threads, int G, int Items, int V, int Rows, int Turns>
__device__ __forceinline__ void row_lanes(const P& p) {
    static_assert(!P::shifted || V == 1 || G >= (P::apart ? 3 : 2) * (V - 1), "each single element of a row needs a lane");
    static_assert(Rows <= Turns, "rows that are loaded are computed");
    // Values of columns stay in registers where they are few.
    constexpr bool columns = !Span<P, V, int>::has_singles && Items * V * P::column_bytes <= 64;
    const Lanes<G> team;
    const LaneRows<P, Threads / G, G, V> rows(p, Turns);
    Loaded<P, 0, Items, V> held;
    if constexpr (columns) {
        held.load_columns(p, team);
    }
    Coming<P, Items, V> coming[Rows];
#pragma unroll
    for (int k = 0; k < Rows; ++k) {
        coming[k].load(p, team, rows.row(k), rows.span(k));
    }
#pragma unroll 1
    for (int turn = 0; turn < Turns && rows.warp_has(turn); ++turn) {
        Loaded<P, 0, Items, V, columns> loaded;
        coming[0].give(loaded);
        if constexpr (columns) {
            loaded.take_columns(held);
        }
#pragma unroll
        for (int k = 0; k + 1 < Rows; ++k) {
            coming[k] = coming[k + 1];
        }
        if (turn + Rows < Turns) {
            coming[Rows - 1].load(p, team, rows.row(turn + Rows), rows.span(turn + Rows));
        }
        const bool is_row = rows.has(turn);
        loaded_row<P, Items, V>(p, team, is_row ? rows.row(turn) : p.rows - 1, rows.span(turn), loaded, is_row);
    }
}
