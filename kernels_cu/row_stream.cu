// Row program, a block or a warp for each row: each stage reads the row again, mostly from the L2 cache. For rows that do not fit
// in registers, and for programs with one stage.
//
// P: as in row_block.cu, emitted so that each stage recomputes from the inputs what it needs.
// Launch: Threads threads: a block reads one row with all of them, or Rows = Threads / 32 rows at a time with a warp each. Any
//   number of blocks (grid-stride loop over rows), any cols. V > 1 needs cols, all row strides and all pointers to be multiples
//   of V elements.
#pragma once

#include "streamed_stages.cuh"

// Rows `first`, `first` + `step`, ..., one after the other, all by one team of threads.
template <class P, int Items, int V, class Team>
__device__ __forceinline__ void stream_rows(const P& p, const Team& team, i64 first, i64 step) {
    for (i64 row = first; row < p.rows; row += step) {
        typename P::Row r;
        p.begin(row, r);
        streamed_stage<P, 0, Items, V>(p, team, row, r);
        if (team.rank() == 0) {
            p.commit(row, r);
        }
    }
}

template <class P, int Threads, int Items, int V, int Rows>
__device__ __forceinline__ void row_stream(const P& p) {
    if constexpr (Rows == 1) {
        typedef Block<Threads, P::slot> Team;
        SHARED_BYTES(scratch, Team::bytes);
        const Team team(scratch);
        stream_rows<P, Items, V>(p, team, blockIdx.x, gridDim.x);
    } else {
        static_assert(Threads == 32 * Rows, "each row has a warp");
        const i64 first = static_cast<i64>(blockIdx.x) * Rows + threadIdx.x / 32;
        stream_rows<P, Items, V>(p, Lanes<32>(), first, static_cast<i64>(gridDim.x) * Rows);
    }
}
