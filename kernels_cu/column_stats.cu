// Reductions down the columns: one block for each strip of columns and each share of the rows.
//
// P: an emitted struct as in row_block.cu with one stage, whose reductions run over rows; finish(totals, col) computes and
//   writes the per-column results; wide_columns says whether any of these has more than 16 bits. The stage may store full results, too.
// Within a warp, Strip / V lanes read Items rows' part of the strip and the other lanes the rows after them; a lane accumulates
// V columns over all rows that it reads: Items of them, a power of two, in pairs. What depends on the column alone it loads and
// computes once; loaded for each row, behind a branch, it took twice the registers. Totals are of 16 times Items rows, and those then
// merged: one sum of 512 rows, one after the other, had up to 3.5 times the error of PyTorch's. More than four columns, or many
// reductions, have no registers for that. Results of 16 bits have no digits to lose, and their rows are added one after the other.
// Lanes, then warps, are merged in a fixed order. With several shares, the totals of each go to p.partial (shares x cols) and
// column_merge finishes.
// Launch: Threads threads; (ceil(cols / Strip), shares) blocks. Strip is a power of two, V <= Strip <= 32 V, Strip <= Threads.
//   V > 1 needs cols, all row strides and all pointers to be multiples of V elements.
#pragma once

#include "column_merge.cuh"
#include "stages.cuh"

// Add N rows from `row` on to the totals of V columns from `col` on; `columns` holds what elements of all rows depend on.
template <class P, int N, int V, class Tile>
__device__ __forceinline__ void add_rows(
    const P& p, const Tile& columns, i64 row, i64 col, typename P::ColumnTotals (&into)[V]) {
    Tile tiles[N];
    typename P::Element e[N * V];
    typename P::Row r[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        tiles[i] = columns;
        p.begin(row + i, r[i]);
        p.template load<V>(At<0>(), row + i, col, tiles[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        compute_pack<P, 0, V>(p, tiles[i], row + i, col, r[i], &e[i * V]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            p.peek(At<0>(), e[i * V + j], into[j]);
        }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
        into[j].settle(true);
        typename P::Element column[N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            column[i] = e[i * V + j];
        }
        if constexpr (P::wide_columns) {
            p.template add<N>(At<0>(), column, row, into[j]);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                p.template add<1>(At<0>(), &column[i], row + i, into[j]);
            }
        }
    }
}

template <class P, int Threads, int Strip, int Items, int V>
__device__ __forceinline__ void column_stats(const P& p) {
    typedef typename P::ColumnTotals Totals;
    constexpr int across = Strip / V;               // lanes along one row
    constexpr int down = 32 / across;               // rows that a warp reads at once
    constexpr int warps = Threads / 32;
    SHARED_BYTES(scratch, warps * Strip * sizeof(Totals));
    Totals(*shared)[Strip] = reinterpret_cast<Totals(*)[Strip]>(scratch);

    const i64 rows = p.rows, cols = p.cols;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 col = static_cast<i64>(blockIdx.x) * Strip + lane % across * V;
    const i64 share = (rows + gridDim.y - 1) / gridDim.y;
    const i64 first = static_cast<i64>(blockIdx.y) * share;
    const i64 last = first + share < rows ? first + share : rows;
    constexpr int step = warps * down * Items, turns = 16;

    typedef decltype(p.template tile<V>(At<0>())) Tile;
    Tile columns;  // what elements of all rows depend on
    if (col < cols) {
        p.template load_columns<V>(At<0>(), col, columns);
    }
    const auto accumulate = [&](i64 from, i64 to, Totals(&into)[V]) {
        i64 start = from + (warp * down + lane / across) * Items;
        for (; start + Items <= to; start += step) {
            add_rows<P, Items, V>(p, columns, start, col, into);
        }
        for (const i64 end = start + Items < to ? start + Items : to; start < end; ++start) {
            add_rows<P, 1, V>(p, columns, start, col, into);
        }
    };

    Totals totals[V];
    if (col < cols) {
        if constexpr (P::wide_columns && V <= 4 && V * sizeof(Totals) <= 96) {
            for (i64 from = first; from < last; from += turns * step) {
                Totals part[V];
                accumulate(from, from + turns * step < last ? from + turns * step : last, part);
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    totals[j].merge(part[j]);
                }
            }
        } else {
            accumulate(first, last, totals);
        }
    }
#pragma unroll
    for (int j = 0; j < V; ++j) {
#pragma unroll
        for (int mask = across; mask < 32; mask *= 2) {
            totals[j].lead(mask, 0xffffffffu);
        }
        totals[j].settle(true);
#pragma unroll
        for (int mask = across; mask < 32; mask *= 2) {
            totals[j].exchange(mask, (lane & mask) != 0, 0xffffffffu);
        }
        if (lane < across) {
            shared[warp][lane * V + j] = totals[j];
        }
    }
    __syncthreads();
    const i64 mine = static_cast<i64>(blockIdx.x) * Strip + threadIdx.x;
    if (threadIdx.x < Strip && mine < cols) {
        Merged<Totals> merged = {shared[0][threadIdx.x]};
        for (int w = 1; w < warps; ++w) {
            merged.add(shared[w][threadIdx.x]);
        }
        if (gridDim.y > 1) {
            p.partial[static_cast<i64>(blockIdx.y) * cols + mine] = merged.whole;
        } else {
            p.finish(merged.whole, mine);
        }
    }
}
