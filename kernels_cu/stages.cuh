// The stages of a row program over one row: each loads, computes, reduces and finishes.
//
// P is an emitted struct (see row_block.cu) and S a stage. A thread computes Items packs of V elements at a time.
//
// resident_row keeps elements in registers from stage to stage; streamed_stage loads the row again for each stage and
// recomputes what it needs. All threads of a team have to call them with the same row.
#pragma once

#include "teams.cuh"

// Compute V elements and store their results, without branches at first. A pack with a value that is not finite, where a
// rewritten form may differ from the original, is loaded again and recomputed as it was written.
template <class P, int S, int V, class Tile>
__device__ __forceinline__ void compute_pack(
    const P& p, const Tile& tile, i64 row, i64 col, const typename P::Row& r, typename P::Element* e) {
    auto out = p.template out<V>(At<S>());
    bool finite = true;
#pragma unroll
    for (int j = 0; j < V; ++j) {
        finite &= p.template element<V>(At<S>(), tile, j, row, col + j, r, e[j], out);
    }
    if constexpr (P::has_exact(S)) {
        if (!finite) {
            auto again = p.template tile<V>(At<S>());
            p.template load<V>(At<S>(), row, col, again);
            p.template load_columns<V>(At<S>(), col, again);
#pragma unroll
            for (int j = 0; j < V; ++j) {
                p.template exact_element<V>(At<S>(), again, j, row, col + j, r, e[j], out);
            }
        }
    }
    p.template store<V>(At<S>(), row, col, out);
}

// V elements of the first stage, and their results.
template <class P, int V>
struct Computed {
    typename P::Element e[V];
    typename P::template Out0<V> out;
};

// Compute V elements at (row, col) without rewrites: all V of them if one is not finite. The code is long and seldom runs, so it
// is a function; arguments by value stay in registers where it is not called.
template <class P, int V, class Tile>
__noinline__ __device__ Computed<P, V> compute_exact(
    const P& p, const Tile tile, i64 row, i64 col, const typename P::Row r, Computed<P, V> found) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
        p.template exact_element<V>(At<0>(), tile, v, row, col + v, r, found.e[v], found.out);
    }
    return found;
}

// Compute V elements of the first stage, as compute_pack does, of a tile that cannot be loaded again: a product is in it.
template <class P, int V, class Tile>
__device__ __forceinline__ Computed<P, V> compute_held(
    const P& p, const Tile& tile, i64 row, i64 col, const typename P::Row& r) {
    Computed<P, V> found;
    bool finite = true;
#pragma unroll
    for (int v = 0; v < V; ++v) {
        finite &= p.template element<V>(At<0>(), tile, v, row, col + v, r, found.e[v], found.out);
    }
    if constexpr (P::has_exact(0)) {
        if (!finite) {
            found = compute_exact<P, V>(p, tile, row, col, r, found);
        }
    }
    return found;
}

// Compute the per-row values in every thread that reads them; after the last stage that is the one that stores them.
template <class P, int S, class Team, class Totals>
__device__ __forceinline__ void finish_stage(
    const P& p, const Team& team, i64 row, Totals& totals, typename P::Row& r) {
    if constexpr (P::shared_finish(S)) {
        team.reduce(totals);
        p.finish(At<S>(), totals, team, row, r);
    } else {
        team.reduce_first(totals);
        if (team.first()) {
            p.finish(At<S>(), totals, team, row, r);
        }
    }
}

template <class P, int S, int Items, int V, class Team>
__device__ __forceinline__ void resident_stage(
    const P& p, const Team& team, i64 row, typename P::Row& r, typename P::Element (&e)[Items * V]);

// A stage whose tiles are loaded, and the stages after it. Columns: the per-column inputs have still to be loaded.
template <class P, int S, int Items, int V, bool Columns, class Team, class Tile>
__device__ __forceinline__ void resident_compute(
    const P& p, const Team& team, i64 row, typename P::Row& r, typename P::Element (&e)[Items * V], Tile (&tiles)[Items]) {
    const int cols = static_cast<int>(p.cols);
#pragma unroll
    for (int i = 0; i < Items; ++i) {
        const int col = (i * team.size() + team.rank()) * V;
        if (col < cols) {
            if constexpr (Columns) {
                p.template load_columns<V>(At<S>(), col, tiles[i]);
            }
            compute_pack<P, S, V>(p, tiles[i], row, col, r, &e[i * V]);
        }
    }
    if constexpr (P::reduces(S)) {
        auto totals = p.totals(At<S>());
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            if ((i * team.size() + team.rank()) * V < cols) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    p.peek(At<S>(), e[i * V + j], totals);
                }
            }
        }
        totals.settle();
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            if ((i * team.size() + team.rank()) * V < cols) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    p.add(At<S>(), e[i * V + j], totals);
                }
            }
        }
        finish_stage<P, S>(p, team, row, totals, r);
    }
    if constexpr (S + 1 < P::stages) {
        resident_stage<P, S + 1, Items, V>(p, team, row, r, e);
    }
}

// Stage S and the stages after it, elements in registers.
template <class P, int S, int Items, int V, class Team>
__device__ __forceinline__ void resident_stage(
    const P& p, const Team& team, i64 row, typename P::Row& r, typename P::Element (&e)[Items * V]) {
    typedef decltype(p.template tile<V>(At<S>())) Tile;
    const int cols = static_cast<int>(p.cols);
    Tile tiles[Items];
#pragma unroll
    for (int i = 0; i < Items; ++i) {
        const int col = (i * team.size() + team.rank()) * V;
        if (col < cols) {
            p.template load<V>(At<S>(), row, col, tiles[i]);
        }
    }
    resident_compute<P, S, Items, V, true>(p, team, row, r, e, tiles);
}

// One row, elements in registers.
template <class P, int Items, int V, class Team>
__device__ __forceinline__ void resident_row(const P& p, const Team& team, i64 row) {
    typename P::Row r;
    typename P::Element e[Items * V];
    p.begin(row, r);
    resident_stage<P, 0, Items, V>(p, team, row, r, e);
    if (team.rank() == 0) {
        p.commit(row, r);
    }
}

// Stage S and the stages after it, each of which reads the row again.
template <class P, int S, int Items, int V, class Team>
__device__ __forceinline__ void streamed_stage(const P& p, const Team& team, i64 row, typename P::Row& r) {
    typedef decltype(p.template tile<V>(At<S>())) Tile;
    const i64 cols = p.cols;
    auto totals = p.totals(At<S>());
    const i64 step = static_cast<i64>(team.size()) * V;
    for (i64 start = static_cast<i64>(team.rank()) * V; start < cols; start += Items * step) {
        Tile tiles[Items];
        typename P::Element e[Items * V];
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            if (start + i * step < cols) {
                p.template load<V>(At<S>(), row, start + i * step, tiles[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const i64 col = start + i * step;
            if (col < cols) {
                p.template load_columns<V>(At<S>(), col, tiles[i]);
                compute_pack<P, S, V>(p, tiles[i], row, col, r, &e[i * V]);
                if constexpr (P::reduces(S)) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        p.peek(At<S>(), e[i * V + j], totals);
                    }
                }
            }
        }
        if constexpr (P::reduces(S)) {
            totals.settle();
#pragma unroll
            for (int i = 0; i < Items; ++i) {
                if (start + i * step < cols) {
#pragma unroll
                    for (int j = 0; j < V; ++j) {
                        p.add(At<S>(), e[i * V + j], totals);
                    }
                }
            }
        }
    }
    if constexpr (P::reduces(S)) {
        finish_stage<P, S>(p, team, row, totals, r);
    }
    if constexpr (S + 1 < P::stages) {
        streamed_stage<P, S + 1, Items, V>(p, team, row, r);
    }
}
