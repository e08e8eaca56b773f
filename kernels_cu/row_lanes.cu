// Row program, a row for each group of G lanes of a warp, held in registers. For short rows.
//
// Computes P (an emitted struct: see row_block.cu) over rows x cols elements, cols <= G * Items * V.
// Launch: Threads threads a block, a multiple of 32; ceil(rows / (Threads / G)) blocks.
// V > 1 needs cols, all row strides and all pointers to be multiples of V elements.
#pragma once

#include "stages.cuh"

template <class P, int Threads, int G, int Items, int V>
__device__ __forceinline__ void row_lanes(const P& p) {
    const Lanes<G> team;
    const i64 row = static_cast<i64>(blockIdx.x) * (Threads / G) + threadIdx.x / G;
    // Groups share warps only in their shuffles, which name their own lanes: a group without a row can leave.
    if (row < p.rows) {
        resident_row<P, Items, V>(p, team, row);
    }
}
