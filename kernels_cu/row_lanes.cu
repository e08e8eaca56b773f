// Row program for short rows: G lanes of a warp per row, Rows rows in their registers at a time.
//
// P: as in row_block.cu; cols <= G * Items * V.
// Launch: Threads threads, a multiple of 32; ceil(rows / (Threads / G * Rows)) blocks. V > 1 needs cols, all row strides and all
//   pointers to be multiples of V elements.
#pragma once

#include "held_row.cuh"

// All lanes of a warp compute if any has a row, as they shuffle together. A lane without one reads the per-row inputs of the last
// row, runs `finish` on empty totals, and stores nothing. Loads are issued before warps without rows exit, else the compiler moves
// many to where they are used. Packed rows, alone in their warps, exit first: their loads stay, and leave more registers.
template <class P, int Threads, int G, int Items, int V, int Rows>
__device__ __forceinline__ void row_lanes(const P& p) {
    static_assert(!P::shifted || V == 1 || G >= (P::apart ? 3 : 2) * (V - 1), "each single element of a row needs a lane");
    constexpr int step = Threads / G;
    const Lanes<G> team;
    const i64 first = static_cast<i64>(blockIdx.x) * (step * Rows);
    const i64 warp = first + threadIdx.x / 32 * (32 / G);  // the first row of the warp
    if constexpr (P::packed && G == 32 && Rows == 1) {
        if (warp >= p.rows) {
            return;
        }
    }
    HeldRow<P, Items, V> rows[Rows];
#pragma unroll
    for (int k = 0; k < Rows; ++k) {
        rows[k].load(p, team, first + k * step + threadIdx.x / G);
    }
    rows[0].load_columns(p, team);
#pragma unroll
    for (int k = 1; k < Rows; ++k) {
        rows[k].take_columns(rows[0]);
    }
#pragma unroll
    for (int k = 0; k < Rows; ++k) {
        if (warp + k * step < p.rows) {
            loaded_row<P, Items, V>(p, team, rows[k].row, rows[k].span, rows[k].r, rows[k]);
        }
    }
}
