// The stages of a row program that loads the row again for each of them, as a whole or the share of one of several blocks.
#pragma once

#include "stages.cuh"

// Compute share number `share` of `shares` of a row in stage S, Items packs at a time, and accumulate its elements. Single
// elements belong to the first share.
template <class P, int S, int Items, int V, class Team, class Totals>
__device__ __forceinline__ void stream_share(
    const P& p, const Team& team, i64 row, const typename P::Row& r, Totals& totals, i64 share, i64 shares) {
    typedef decltype(p.template tile<V>(At<S>())) Tile;
    const Span<P, V, i64> span(p, row);
    auto single = p.template tile<1>(At<S>());
    const bool has_single = share == 0 && span.has_single(team.rank());
    if constexpr (Span<P, V, i64>::has_singles) {
        if (has_single) {
            p.template load<1>(At<S>(), row, span.single(team.rank()), single);
        }
    }
    const i64 step = static_cast<i64>(team.size()) * V;
    // Whole packs; the last shares have fewer, or none.
    const i64 length = shares == 1 ? span.packed : (span.packed + shares * V - 1) / (shares * V) * V;
    const i64 first = share * length, last = first + length < span.packed ? first + length : span.packed;
    for (i64 start = first + static_cast<i64>(team.rank()) * V; start < last; start += Items * step) {
        Tile tiles[Items];
        typename P::Element e[Items * V];
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            if (start + i * step < last) {
                p.template load<V>(At<S>(), row, span.column(start + i * step), tiles[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const i64 col = span.column(start + i * step);
            if (start + i * step < last) {
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
            totals.settle(true);
#pragma unroll
            for (int i = 0; i < Items; ++i) {
                if (start + i * step < last) {
                    p.template add<V>(At<S>(), &e[i * V], span.column(start + i * step), totals);
                }
            }
        }
    }
    if constexpr (Span<P, V, i64>::has_singles) {
        if (has_single) {
            const i64 col = span.single(team.rank());
            p.template load_columns<1>(At<S>(), col, single);
            typename P::Element e;
            accumulate_pack<P, S, 1>(p, single, row, col, r, &e, totals);
        }
    }
}

// Stage S and the stages after it, each of which loads the row again.
template <class P, int S, int Items, int V, class Team>
__device__ __forceinline__ void streamed_stage(const P& p, const Team& team, i64 row, typename P::Row& r) {
    auto totals = p.totals(At<S>());
    stream_share<P, S, Items, V>(p, team, row, r, totals, 0, 1);
    if constexpr (P::reduces(S)) {
        finish_stage<P, S>(p, team, row, totals, r);
    }
    if constexpr (S + 1 < P::stages) {
        streamed_stage<P, S + 1, Items, V>(p, team, row, r);
    }
}
