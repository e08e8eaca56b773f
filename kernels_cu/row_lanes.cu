// Row program for short rows: G lanes of a warp per row, the row in registers.
//
// P: as in row_block.cu; cols <= G * Items * V.
// Launch: Threads threads, a multiple of 32; ceil(rows / (Threads / G * Rows)) blocks. V > 1 needs cols, all row strides and all
//   pointers to be multiples of V elements. Rows > 1 needs P::packed: a group loads so many rows before it computes them.
#pragma once

#include "stages.cuh"

template <class P, int Threads, int G, int Rows, int Items, int V>
__device__ __forceinline__ void row_lanes(const P& p) {
    static_assert(Rows == 1 || P::packed, "rows that wait for each other are held as they were loaded");
    const Lanes<G> team;
    constexpr int groups = Threads / G;
    const i64 first = static_cast<i64>(blockIdx.x) * (groups * Rows) + threadIdx.x / G;
    // A group without a row may return: shuffles name only the lanes of their own group.
    if constexpr (Rows == 1) {
        if (first < p.rows) {
            resident_row<P, Items, V>(p, team, first);
        }
    } else {
        Loaded<P, 0, Items, V> loaded[Rows];
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            const i64 row = first + i * groups;
            if (row < p.rows) {
                loaded[i].load(p, team, row, Span<P, V, int>(p, row));
            }
        }
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            const i64 row = first + i * groups;
            if (row < p.rows) {
                packed_row<P, Items, V>(p, team, row, loaded[i]);
            }
        }
    }
}
