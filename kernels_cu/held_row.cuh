// A row in the registers of those that compute it, loaded before it is needed.
#pragma once

#include "stages.cuh"

// A thread's packs of a row, and values of their columns, in whichever stage they are read: they are the same in each row without
// single elements and, if they are few, loaded once. For a missing row, `r` is that of the last row and the span is empty.
template <class P, int Items, int V>
struct HeldRow : Loaded<P, 0, Items, V> {
    static constexpr bool has_columns = !Span<P, V, int>::has_singles && Items * V * P::column_bytes <= 32;
    i64 row;
    Span<P, V, int> span;
    typename P::Row r;

    template <class Team>
    __device__ __forceinline__ void load(const P& p, const Team& team, i64 at) {
        const bool exists = at < p.rows;
        row = exists ? at : p.rows - 1;
        span = Span<P, V, int>(p, row, exists);
        p.begin(row, r);
        Loaded<P, 0, Items, V>::load(p, team, row, span);
    }
    template <class Team>
    __device__ __forceinline__ void load_columns(const P& p, const Team& team) {
        if constexpr (has_columns) {
#pragma unroll
            for (int i = 0; i < Items; ++i) {
                const int col = (i * team.size() + team.rank()) * V;
                if (col < p.cols) {
                    p.hold_columns(col, this->packs[i]);
                }
            }
        }
    }
    __device__ __forceinline__ void take_columns(const HeldRow& other) {
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            P::take_columns(other.packs[i], this->packs[i]);
        }
    }
};
