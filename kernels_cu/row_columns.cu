// Row program that also reduces down the columns: teams of a block compute one row after the other in registers, and each thread adds
// up the columns of its packs over all of them. A block leaves the totals of each column, which column_merge finishes.
//
// P: as in row_block.cu, with one tile and rows that are not shifted, and
//   column_stage, ColumnTotals               the stage whose elements columns reduce; the totals of one column
//   peek(At<stages>, e, totals), add<1>(At<stages>, e, row, totals)   accumulate an element
//   wide_columns                             whether results of columns have more than 16 bits
//   partial, shares                          totals of each block's rows (shares x cols); the number of blocks
//   finish(totals, col)                      computes and writes the results of a column
// Launch: Threads threads, `shares` blocks. G threads are a team, a power of two up to 32 or a multiple of 32, which divides Threads;
//   cols <= G * Items * V. V > 1 as in row_block.cu.
#pragma once

#include "column_merge.cuh"
#include "held_row.cuh"

// A row in registers, whose elements are added to the totals of the columns of a thread's packs.
template <class P, int Items, int V>
struct SummedRow : HeldRow<P, Items, V> {
    static constexpr bool sums_columns = true;
    typename P::ColumnTotals* sums;  // Items * V

    template <int S>
    __device__ __forceinline__ void add_columns(const P& p, int i, typename P::Element* e) const {
        if constexpr (S == P::column_stage) {
#pragma unroll
            for (int j = 0; j < V; ++j) {
                auto& totals = sums[i * V + j];
                p.peek(At<P::stages>(), e[j], totals);
                totals.settle();
                p.template add<1>(At<P::stages>(), e + j, this->row, totals);
            }
        }
    }
};

// Several teams merge their totals in shared memory in a fixed order. A single team leaves its own, added to what it left before if
// `again`, and its sums begin at zero.
template <class P, int Threads, int G, int Items, int V, class Team>
__device__ __forceinline__ void leave_columns(const P& p, const Team& team, typename P::ColumnTotals (&sums)[Items * V], bool again) {
    typedef typename P::ColumnTotals Totals;
    Totals* const left = p.partial + blockIdx.x * p.cols;
    if constexpr (Threads == G) {
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const int col = (i * G + team.rank()) * V;
            if (col < p.cols) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    if (again) {
                        sums[i * V + j].merge(left[col + j]);
                    }
                    left[col + j] = sums[i * V + j];
                    sums[i * V + j] = Totals();
                }
            }
        }
    } else {
        SHARED_BYTES(memory, G * Items * V * sizeof(Totals));
        Totals* const shared = reinterpret_cast<Totals*>(memory);
        for (int k = 0; k < Threads / G; ++k) {
            if (threadIdx.x / G == k) {
#pragma unroll
                for (int i = 0; i < Items * V; ++i) {
                    Totals& to = shared[(i / V * G + team.rank()) * V + i % V];
                    if (k == 0) {
                        to = sums[i];
                    } else {
                        to.merge(sums[i]);
                    }
                }
            }
            __syncthreads();
        }
        for (int col = threadIdx.x; col < p.cols; col += Threads) {
            left[col] = shared[col];
        }
    }
}

// The lanes of a warp, or the threads of a block, that share a row; `memory` holds what blocks need.
template <class P, int Threads, int G>
__device__ __forceinline__ auto team_of(char* memory) {
    if constexpr (G <= 32) {
        return Lanes<G>();
    } else {
        return Block<G, P::slot, Threads / G>(memory);
    }
}

// A team loads its next row before it computes one; `load` leaves values of columns in `next` as they are. All teams of a block take
// as many turns, as `leave_columns` waits for all threads: a missing row has no elements. A single team, of wide rows, leaves
// its sums every 32 rows, unless their results are of 16 bits: the rounding error of one long sum grows with the number of rows.
template <class P, int Threads, int G, int Items, int V>
__device__ __forceinline__ void row_columns(const P& p) {
    static_assert(!P::shifted && P::one_tile, "rows begin with whole packs, which all stages read");
    constexpr int teams = Threads / G, turns = 32;
    SHARED_BYTES(scratch, G <= 32 ? 16 : 2 * (Threads / 32) * P::slot);
    const auto team = team_of<P, Threads, G>(scratch);
    const i64 step = static_cast<i64>(gridDim.x) * teams;
    typename P::ColumnTotals sums[Items * V];
    SummedRow<P, Items, V> next;
    next.sums = sums;
    i64 first = static_cast<i64>(blockIdx.x) * teams;
    next.load(p, team, first + threadIdx.x / G);
    next.load_columns(p, team);
    constexpr bool by_parts = Threads == G && P::ColumnTotals::sums_alone && P::wide_columns;
    int turn = 0;
    for (; first < p.rows; first += step, ++turn) {
        if constexpr (by_parts) {
            if (turn % turns == 0 && turn > 0) {
                leave_columns<P, Threads, G, Items, V>(p, team, sums, turn > turns);
            }
        }
        SummedRow<P, Items, V> row = next;
        if (first + step < p.rows) {
            next.load(p, team, first + step + threadIdx.x / G);
        }
        loaded_row<P, Items, V>(p, team, row.row, row.span, row.r, row);
    }
    leave_columns<P, Threads, G, Items, V>(p, team, sums, by_parts && turn > turns);
}
