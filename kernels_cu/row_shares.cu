// Reductions along few long rows: several blocks share a row, and leave their totals for a second kernel to merge.
//
// P: as in row_block.cu with one stage that stores no full results; it also has
//   partial, shares                          totals of each row's shares (rows x shares); their number
// Launch of row_shares: Threads threads, (shares, any number of) blocks; those along y stride over the rows. V > 1 as in
//   row_stream.cu.
// Launch of row_merge: 32 threads, any number of blocks (grid-stride loop over rows).
#pragma once

#include "stages.cuh"

// Leave the totals of share blockIdx.x of each row in `partial`.
template <class P, int Threads, int Items, int V>
__device__ __forceinline__ void row_shares(const P& p) {
    SHARED_BYTES(scratch, 2 * 32 * P::slot);
    const Block<Threads, P::slot> team(scratch);
    for (i64 row = blockIdx.y; row < p.rows; row += gridDim.y) {
        typename P::Row r;
        p.begin(row, r);
        auto totals = p.totals(At<0>());
        stream_share<P, 0, Items, V>(p, team, Arguments(), row, r, totals, blockIdx.x, p.shares);
        team.reduce_first(totals);
        if (team.rank() == 0) {
            p.partial[row * p.shares + blockIdx.x] = totals;
        }
    }
}

// Merge the totals of each row's shares, always in the same order, and compute what follows them.
template <class P>
__device__ __forceinline__ void row_merge(const P& p) {
    SHARED_BYTES(scratch, 2 * 32 * P::slot);
    const Block<32, P::slot> team(scratch);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        typename P::Row r;
        p.begin(row, r);
        auto totals = p.totals(At<0>());
        for (i64 share = team.rank(); share < p.shares; share += team.size()) {
            totals.merge(p.partial[row * p.shares + share]);
        }
        finish_stage<P, 0>(p, team, row, totals, r);
        if (team.rank() == 0) {
            p.commit(row, r);
        }
    }
}
