// The stages of a row program over one row: read, compute, reduce, finish; again and again.
//
// resident_row keeps the elements in registers from stage to stage; streamed_row reads the row again for every stage and
// computes again what it needs. Both are called by all threads of a team with the same row.
#pragma once

#include "teams.cuh"

template <class P, int S, int Items, int V, class Team>
__device__ __forceinline__ void resident_stage(
    const P& p, const Team& team, i64 row, i64 cols, typename P::Row& r, typename P::Element (&e)[Items * V]) {
    typedef decltype(p.template load<V>(At<S>(), row, i64(0))) Tile;
    {
        Tile tiles[Items];
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const i64 col = (static_cast<i64>(i) * team.size() + team.rank()) * V;
            if (col < cols) {
                tiles[i] = p.template load<V>(At<S>(), row, col);
            }
        }
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const i64 col = (static_cast<i64>(i) * team.size() + team.rank()) * V;
            if (col < cols) {
                auto out = p.template out<V>(At<S>());
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    p.template element<V>(At<S>(), tiles[i], j, row, col + j, r, e[i * V + j], out);
                }
                p.template store<V>(At<S>(), row, col, out);
            }
        }
    }
    if constexpr (P::reduces(S)) {
        auto totals = p.totals(At<S>());
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            if ((static_cast<i64>(i) * team.size() + team.rank()) * V < cols) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    p.peek(At<S>(), e[i * V + j], totals);
                }
            }
        }
        totals.settle();
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            if ((static_cast<i64>(i) * team.size() + team.rank()) * V < cols) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    p.add(At<S>(), e[i * V + j], totals);
                }
            }
        }
        team.reduce(totals);
        p.finish(At<S>(), totals, team, row, r);
    }
    if constexpr (S + 1 < P::stages) {
        resident_stage<P, S + 1, Items, V>(p, team, row, cols, r, e);
    }
}

template <class P, int Items, int V, class Team>
__device__ __forceinline__ void resident_row(const P& p, const Team& team, i64 row, i64 cols) {
    typename P::Row r;
    typename P::Element e[Items * V];
    p.begin(row, r);
    resident_stage<P, 0, Items, V>(p, team, row, cols, r, e);
    if (team.rank() == 0) {
        p.commit(row, r);
    }
}

template <class P, int S, int Items, int V, class Team>
__device__ __forceinline__ void streamed_stage(const P& p, const Team& team, i64 row, i64 cols, typename P::Row& r) {
    typedef decltype(p.template load<V>(At<S>(), row, i64(0))) Tile;
    auto totals = p.totals(At<S>());
    const i64 step = static_cast<i64>(team.size()) * V;
    for (i64 start = static_cast<i64>(team.rank()) * V; start < cols; start += Items * step) {
        Tile tiles[Items];
        typename P::Element e[Items * V];
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            if (start + i * step < cols) {
                tiles[i] = p.template load<V>(At<S>(), row, start + i * step);
            }
        }
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const i64 col = start + i * step;
            if (col < cols) {
                auto out = p.template out<V>(At<S>());
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    p.template element<V>(At<S>(), tiles[i], j, row, col + j, r, e[i * V + j], out);
                    if constexpr (P::reduces(S)) {
                        p.peek(At<S>(), e[i * V + j], totals);
                    }
                }
                p.template store<V>(At<S>(), row, col, out);
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
        team.reduce(totals);
        p.finish(At<S>(), totals, team, row, r);
    }
    if constexpr (S + 1 < P::stages) {
        streamed_stage<P, S + 1, Items, V>(p, team, row, cols, r);
    }
}
