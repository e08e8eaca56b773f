// Row program, a block for each row, the row held in registers between one read and one write.
//
// P is an emitted struct with
//   rows, cols                               how many
//   stages, reduces(S), slot                 how many stages; whether stage S reduces; bytes of the largest totals
//   shared_finish(S)                         whether all threads need what finish computes after stage S
//   Row, Element                             values of a row, and of an element between stages
//   totals(At<S>), tile<V>(At<S>), out<V>(At<S>)       empty accumulators, inputs and results of stage S
//   begin(row, r)                            loads the per-row inputs
//   load<V>(At<S>, row, col, tile)           reads what stage S needs of V elements
//   load_columns<V>(At<S>, col, tile)        the same of per-column inputs
//   element<V>(At<S>, tile, j, row, col, r, e, out)    computes element j of them; false where it has to be done again by
//   exact_element(...)                       the same as it was written; present if has_exact(S)
//   store<V>(At<S>, row, col, out)           writes the stage's full-size results
//   peek, add(At<S>, e, totals)              hands an element to the reductions
//   finish(At<S>, totals, team, row, r)      computes the per-row values that follow
//   commit(row, r)                           writes the per-row results
// Launch: Threads threads a block; any number of blocks, each takes rows at a stride of gridDim.x; cols <= Threads * Items
// * V. V > 1 needs cols, all row strides and all pointers to be multiples of V elements.
#pragma once

#include "stages.cuh"

template <class P, int Threads, int Items, int V>
__device__ __forceinline__ void row_block(const P& p) {
    SHARED_BYTES(scratch, 2 * 32 * P::slot);
    const Block<Threads, P::slot> team(scratch);
    for (i64 row = blockIdx.x; row < p.rows; row += gridDim.x) {
        resident_row<P, Items, V>(p, team, row);
    }
}
