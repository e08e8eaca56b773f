// Row program, a cluster of blocks per row: the row stays in their registers between one read and one write.
//
// P: as in row_block.cu.
// Launch: Threads threads; a multiple of Blocks blocks, in clusters of Blocks (grid-stride loop over rows);
//   cols <= Blocks * Threads * Items * V. V > 1 as in row_block.cu.
#pragma once

#include "cluster_team.cuh"
#include "stages.cuh"

template <class P, int Threads, int Items, int V, int Blocks>
__device__ __forceinline__ void row_cluster(const P& p) {
    SHARED_BYTES(scratch, (2 * 32 + 2) * P::slot);
    const Cluster<Threads, Blocks, P::slot> team(scratch);
    for (i64 row = blockIdx.x / Blocks; row < p.rows; row += gridDim.x / Blocks) {
        resident_row<P, Items, V>(p, team, row);
    }
    cluster_sync();  // others may still read this block's totals
}
