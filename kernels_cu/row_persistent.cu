// Row program, persistent blocks: the per-column inputs of the first stage stay in registers, and the next row is loaded
// while this one is computed. For programs with per-column inputs, which would otherwise be read again for every row.
//
// P: as in row_block.cu.
// Launch: Threads threads; as many blocks as the GPU holds at once (grid-stride loop over rows); cols <= Threads * Items * V.
//   V > 1 needs cols, all row strides and all pointers to be multiples of V elements.
#pragma once

#include "stages.cuh"

template <class P, int Threads, int Items, int V>
__device__ __forceinline__ void row_persistent(const P& p) {
    typedef decltype(p.template tile<V>(At<0>())) Tile;
    SHARED_BYTES(scratch, 2 * 32 * P::slot);
    const Block<Threads, P::slot> team(scratch);
    const int cols = static_cast<int>(p.cols);
    Tile next[Items];
#pragma unroll
    for (int i = 0; i < Items; ++i) {
        const int col = (i * Threads + team.rank()) * V;
        if (col < cols && blockIdx.x < p.rows) {
            p.template load_columns<V>(At<0>(), col, next[i]);
            p.template load<V>(At<0>(), blockIdx.x, col, next[i]);
        }
    }
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        Tile tiles[Items];
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const int col = (i * Threads + team.rank()) * V;
            tiles[i] = next[i];
            if (col < cols && row + gridDim.x < p.rows) {
                p.template load<V>(At<0>(), row + gridDim.x, col, next[i]);
            }
        }
        typename P::Row r;
        typename P::Element e[Items * V];
        p.begin(row, r);
        resident_compute<P, 0, Items, V, false>(p, team, row, r, e, tiles);
        if (team.rank() == 0) {
            p.commit(row, r);
        }
    }
}
