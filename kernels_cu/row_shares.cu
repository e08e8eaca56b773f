// Reductions along few long rows: several blocks share a row, and leave their totals for a second kernel to merge.
//
// P: as in row_block.cu with one stage that stores no full results; it also has
//   partial, shares                          totals of each row's shares (rows x shares); their number
// Launch of row_shares: Threads threads, (shares, any number of) blocks; those along y stride over the rows. V > 1 as in
//   row_stream.cu.
// merge_shares (stages.cuh) merges the totals, and computes what follows them.
#pragma once

#include "streamed_stages.cuh"

// Leave the totals of share blockIdx.x of each row in `partial`.
template <class P, int Threads, int Items, int V>
__device__ __forceinline__ void row_shares(const P& p) {
    typedef Block<Threads, P::slot> Team;
    SHARED_BYTES(scratch, Team::bytes);
    const Team team(scratch);
    for (i64 row = blockIdx.y; row < p.rows; row += gridDim.y) {
        typename P::Row r;
        p.begin(row, r);
        auto totals = p.totals(At<0>());
        stream_share<P, 0, Items, V>(p, team, row, r, totals, blockIdx.x, p.shares);
        team.reduce_first(totals);
        if (team.rank() == 0) {
            p.partial[row * p.shares + blockIdx.x] = totals;
        }
    }
}
