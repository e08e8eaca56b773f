// Row program, one block per row: each stage reads the row again, mostly from the L2 cache. For rows that do not fit in
// registers, and for programs with one stage.
//
// P: as in row_block.cu, emitted so that each stage recomputes from the inputs what it needs.
// Launch: Threads threads, any number of blocks (grid-stride loop over rows), any cols. V > 1 needs cols, all row strides and
//   all pointers to be multiples of V elements.
#pragma once

#include "stages.cuh"

template <class P, int Threads, int Items, int V>
__device__ __forceinline__ void row_stream(const P& p) {
    typedef Block<Threads, P::slot> Team;
    SHARED_BYTES(scratch, Team::bytes);
    const Team team(scratch);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        typename P::Row r;
        p.begin(row, r);
        streamed_stage<P, 0, Items, V>(p, team, row, r);
        if (team.rank() == 0) {
            p.commit(row, r);
        }
    }
}
