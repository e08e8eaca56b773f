// Row program for short rows: G lanes of a warp per row, Rows rows in their registers at a time.
//
// P: as in row_block.cu; cols <= G * Items * V.
// Launch: Threads threads, a multiple of 32; ceil(rows / (Threads / G * Rows)) blocks. V > 1 needs cols, all row strides and all
//   pointers to be multiples of V elements.
#pragma once

#include "stages.cuh"

// The values of columns that a lane needs for its packs, in whichever stage. They are the same in each row if there are no single
// elements; if they are few, they are loaded once, while a row is on its way.
template <class P, int Items, int V>
struct Columns {
    static constexpr bool are_held = !Span<P, V, int>::has_singles && Items * V * P::column_bytes <= (P::packed ? 32 : 64);
    typename P::template Tile0<V> packs[Items];

    template <class Team>
    __device__ __forceinline__ Columns(const P& p, const Team& team) {
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const int col = (i * team.size() + team.rank()) * V;
            if (are_held && col < p.cols) {
                p.template load_all_columns<V>(col, packs[i]);
            }
        }
    }
};

// A row in registers, and values of columns if they are held. Of a row that is missing it is values of the last row alone.
template <class P, int Items, int V>
struct LaneRow : Loaded<P, 0, Items, V> {
    typedef Loaded<P, 0, Items, V> Base;
    static constexpr bool has_columns = Columns<P, Items, V>::are_held;
    i64 row;
    Span<P, V, int> span;
    typename P::Row r;
    const Columns<P, Items, V>* columns;

    template <class Team>
    __device__ __forceinline__ void load(const P& p, const Team& team, i64 at, bool is_row) {
        row = is_row ? at : p.rows - 1;
        span = Span<P, V, int>(p, row, is_row);
        p.begin(row, r);
        Base::load(p, team, row, span);
    }
    template <int S, class Tile>
    __device__ __forceinline__ void take(const P& p, int i, Tile& tile) {
        Base::template take<S>(p, i, tile);
        if constexpr (has_columns) {
            P::take_columns(columns->packs[i], tile);
        }
    }
    template <class Team>
    __device__ __forceinline__ void compute(const P& p, const Team& team, const Columns<P, Items, V>& values) {
        columns = &values;
        loaded_row<P, Items, V>(p, team, row, span, r, *this);
    }
};

// Where several rows are a warp's, all its lanes compute as long as one has a row, as they shuffle together; those without one
// load and store nothing. They load before a warp without any row ends: behind that, the compiler would load many packs where they
// are needed. It does not where packs stay as they were loaded and a warp has one row, and registers suffice for more of them so.
template <class P, int Threads, int G, int Items, int V, int Rows>
__device__ __forceinline__ void row_lanes(const P& p) {
    static_assert(!P::shifted || V == 1 || G >= (P::apart ? 3 : 2) * (V - 1), "each single element of a row needs a lane");
    constexpr int step = Threads / G;
    const Lanes<G> team;
    const i64 first = static_cast<i64>(blockIdx.x) * (step * Rows), own = first + threadIdx.x / G;
    LaneRow<P, Items, V> rows[Rows];
    if constexpr (P::packed && G == 32 && Rows == 1) {
        if (own < p.rows) {
            rows[0].load(p, team, own, true);
            rows[0].compute(p, team, Columns<P, Items, V>(p, team));
        }
    } else {
#pragma unroll
        for (int k = 0; k < Rows; ++k) {
            rows[k].load(p, team, own + k * step, own + k * step < p.rows);
        }
        const Columns<P, Items, V> columns(p, team);
        const i64 warp = first + threadIdx.x / 32 * (32 / G);  // the first row of the warp
#pragma unroll
        for (int k = 0; k < Rows; ++k) {
            if (warp + k * step < p.rows) {
                rows[k].compute(p, team, columns);
            }
        }
    }
}
