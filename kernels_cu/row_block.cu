// Row program, one block per row: the row stays in registers between one read and one write.
//
// P: an emitted struct with
//   rows, cols                               the domain
//   stages, reduces(S), slot                 number of stages; whether stage S reduces; bytes of the largest totals
//   packed, keep(tile)                       whether each stage computes what it needs from the tile as loaded; see keep_packed
//   one_tile                                 whether all stages have Tile0
//   column_bytes, columns_known_ahead        bytes of an element of per-column inputs; whether the addresses of their packs
//                                            may be computed once for all rows
//   shifted, misaligned<V>(row)              whether rows may begin between packs; elements before the first pack
//   apart                                    whether those that are read may begin elsewhere than those that are written
//   shared_finish(S)                         whether all threads need the per-row values that follow stage S
//   Row, Element                             values of a row, and of an element between stages
//   totals(At<S>), tile<V>(At<S>), out<V>(At<S>)       empty accumulators, inputs and results of stage S
//   begin(row, r)                            loads the per-row inputs
//   load<V>(At<S>, row, col, tile)           loads V elements of each full input of stage S
//   load_again<V>(At<S>, row, col, tile)     the same once more, for exact_element
//   load_columns<V>(At<S>, col, tile)        the same for per-column inputs
//   hold_columns<V>(col, tile)               the same for all stages, aligned: where there are no single elements
//   take_columns<V>(from, to)                copies them
//   element<V>(At<S>, tile, j, row, col, r, e, out)    computes element j; not finite if it has to be recomputed by
//   exact_element(...)                       the same as it was written, without rewrites; present if has_exact(S)
//   row_check(At<S>, r)                      not finite if all elements of the row have to be computed so
//   store<V>(At<S>, row, col, out)           stores the stage's full results
//   peek(At<S>, e, totals), add<V>(At<S>, e, at, totals)  accumulate an element; V of them, from a position on,
//                                            whose terms `e` may keep
//   finish(At<S>, totals, team, row, r)      computes the per-row values that follow
//   commit(row, r)                           stores the per-row results
// Launch: Threads threads, any number of blocks (grid-stride loop over rows); cols <= Threads * Items * V. V > 1 needs cols,
//   all row strides and all pointers to be multiples of V elements.
#pragma once

#include "stages.cuh"

template <class P, int Threads, int Items, int V>
__device__ __forceinline__ void row_block(const P& p) {
    typedef Block<Threads, P::slot> Team;
    SHARED_BYTES(scratch, Team::bytes);
    const Team team(scratch);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        resident_row<P, Items, V>(p, team, row);
    }
}
