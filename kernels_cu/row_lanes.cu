// Row program for short rows: G lanes of a warp per row, the row in registers.
//
// P: as in row_block.cu; cols <= G * Items * V.
// Launch: Threads threads, a multiple of 32; ceil(rows / (Threads / G)) blocks. V > 1 needs cols, all row strides and all
//   pointers to be multiples of V elements.
#pragma once

#include "stages.cuh"

template <class P, int Threads, int G, int Items, int V>
__device__ __forceinline__ void row_lanes(const P& p) {
    static_assert(!P::shifted || V == 1 || G >= 2 * (V - 1), "each single element of a row needs a lane");
    const Lanes<G> team;
    const i64 row = static_cast<i64>(blockIdx.x) * (Threads / G) + threadIdx.x / G;
    // A group without a row may return: shuffles name only the lanes of their own group.
    if (row < p.rows) {
        resident_row<P, Items, V>(p, team, row);
    }
}
