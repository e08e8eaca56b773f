// Row program for short rows: G lanes of a warp per row, Rows rows in their registers at a time.
//
// P: as in row_block.cu; cols <= G * Items * V. Rows > 1 needs P::packed: it has more of the matrix on its way to a lane.
// Launch: Threads threads, a multiple of 32; ceil(rows / (Threads / G * Rows)) blocks. V > 1 needs cols, all row strides and all
//   pointers to be multiples of V elements.
#pragma once

#include "stages.cuh"

template <class P, int Threads, int G, int Items, int V, int Rows>
__device__ __forceinline__ void row_lanes(const P& p) {
    static_assert(!P::shifted || V == 1 || G >= (P::apart ? 3 : 2) * (V - 1), "each single element of a row needs a lane");
    const Lanes<G> team;
    const i64 row = static_cast<i64>(blockIdx.x) * (Threads / G * Rows) + threadIdx.x / G;
    // A group without a row does nothing: shuffles name only the lanes of their own group.
    resident_rows<P, Items, V, Rows>(p, team, row, Threads / G);
}
