// The stages of a row program over one row: each loads, computes, reduces and finishes.
//
// P is an emitted struct (see row_block.cu) and S a stage. A thread computes Items packs of V elements at a time.
//
// resident_row keeps a row in registers from stage to stage: its elements, or if P::packed what was loaded. packed_stage computes
// again what it needs from what was loaded, there or elsewhere; streamed_stage (streamed_stages.cuh) loads the row again for each
// stage. All threads of a team have to call them with the same row.
#pragma once

#include "add_pack.cuh"
#include "teams.cuh"

// Where the packs of a row are: at aligned addresses. If P::shifted, up to V - 1 elements before the first pack and behind the
// last one are single; else there are none. Of rows that are read apart, a pack is read from two: V - 1 elements behind it have
// to be in the row, so that nothing behind an array is read. Index counts the columns.
//
// Unless P::columns_known_ahead, the addresses of packs of columns are computed for each row. The compiler would compute them once
// for all rows, and spill them: they are too many.
template <class P, int V, class Index>
struct Span {
    static constexpr bool has_singles = P::shifted && V > 1;
    bool exists;                 // else the row is missing, and the span empty
    Index before, packed, cols;  // single elements before the first pack; elements in packs; all

    __device__ __forceinline__ Span() {}
    __device__ __forceinline__ Span(const P& p, i64 row, bool exists = true)
        : exists(exists), before(0), packed(exists ? p.cols : 0), cols(packed) {
        if constexpr (has_singles) {
            if (exists) {
                before = p.template misaligned<V>(row);
                packed = (cols - before - (P::apart ? V - 1 : 0)) / V * V;
            }
        }
        if constexpr (!P::columns_known_ahead) {
            known_from_here(before);
        }
    }
    // The column of the k-th element in packs.
    __device__ __forceinline__ Index column(Index k) const { return before + k; }
    // Whether there is a k-th single element, and its column. A team has at least as many threads as a row has of them.
    __device__ __forceinline__ bool has_single(int k) const { return has_singles && k < cols - packed; }
    __device__ __forceinline__ Index single(int k) const { return k < before ? k : packed + k; }
};

// Compute V elements without branches, in rewritten forms. Return whether these hold: all values that they check are finite, of the
// elements and of the row (row_check). A sum tells it of the elements in fewer instructions; one that overflows costs time alone.
template <class P, int S, int V, class Tile, class Out>
__device__ __forceinline__ bool compute_elements(
    const P& p, const Tile& tile, i64 row, i64 col, const typename P::Row& r, typename P::Element* e, Out& out) {
    decltype(p.template element<V>(At<S>(), tile, 0, row, col, r, e[0], out)) values[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
        values[j] = p.template element<V>(At<S>(), tile, j, row, col + j, r, e[j], out);
    }
    return !P::has_exact(S) || (isfinite(sum_in_pairs(values)) && isfinite(p.row_check(At<S>(), r)));
}

// What happens to a pack with a value that is not finite, which has to be computed as it was written: its inputs are loaded again,
// so that they need no registers till then; they are kept; or it is left to the caller.
enum class Exact { loaded_again, kept, left };

// Compute V elements and store their results. Return false only with Exact::left, if a value is not finite: what was stored is then
// wrong, and the caller has to compute the pack again.
template <class P, int S, int V, Exact How = Exact::loaded_again, class Tile>
__device__ __forceinline__ bool compute_pack(
    const P& p, const Tile& tile, i64 row, i64 col, const typename P::Row& r, typename P::Element* e) {
    auto out = p.template out<V>(At<S>());
    const bool finite = compute_elements<P, S, V>(p, tile, row, col, r, e, out);
    if constexpr (P::has_exact(S) && How != Exact::left) {
        if (!finite) {
            auto again = p.template tile<V>(At<S>());
            if constexpr (How == Exact::kept) {
                again = tile;
            } else {
                p.template load_again<V>(At<S>(), row, col, again);
                p.template load_columns<V>(At<S>(), col, again);
            }
#pragma unroll
            for (int j = 0; j < V; ++j) {
                p.template exact_element<V>(At<S>(), again, j, row, col + j, r, e[j], out);
            }
        }
    }
    p.template store<V>(At<S>(), row, col, out);
    return finite || How != Exact::left;
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
    const bool finite = compute_elements<P, 0, V>(p, tile, row, col, r, found.e, found.out);
    if constexpr (P::has_exact(0)) {
        if (!finite) {
            found = compute_exact<P, V>(p, tile, row, col, r, found);
        }
    }
    return found;
}

// Compute the per-row values in every thread that reads them; after the last stage that is the one that stores them. If Led,
// the team has called lead() and start() before elements were added.
template <class P, int S, bool Led = false, class Team, class Totals>
__device__ __forceinline__ void finish_stage(
    const P& p, const Team& team, i64 row, Totals& totals, typename P::Row& r) {
    if constexpr (Team::leads) {
        if constexpr (!Led) {
            team.lead(totals);
            totals.settle(true);
        }
        team.gather(totals);
        p.finish(At<S>(), totals, team, row, r);
    } else if constexpr (P::shared_finish(S)) {
        team.reduce(totals);
        p.finish(At<S>(), totals, team, row, r);
    } else {
        team.reduce_first(totals);
        if (team.first()) {
            p.finish(At<S>(), totals, team, row, r);
        }
    }
}

// What a thread has loaded of a row for stage S, or for all stages of a program with one tile: packs, and a single element.
template <class P, int S, int Items, int V>
struct Loaded {
    decltype(static_cast<const P*>(nullptr)->template tile<V>(At<S>())) packs[Items];
    decltype(static_cast<const P*>(nullptr)->template tile<1>(At<S>())) single;

    // Registers are not indexed; values of columns are loaded by each stage; rows alone are reduced.
    static constexpr bool indexed = false, has_columns = false, sums_columns = false;

    // Read pack i, or the single element, for stage `Again`: as it was loaded in every stage if P::packed, else in the first.
    template <int Again, class Tile>
    __device__ __forceinline__ void take(const P&, int i, Tile& tile) {
        if constexpr (P::packed || (P::one_tile && Again == 0)) {
            P::keep(packs[i]);
        }
        tile = packs[i];
    }
    template <int Again, class Tile>
    __device__ __forceinline__ void take_single(const P&, Tile& tile) const {
        tile = single;
    }
    template <class Team>
    __device__ __forceinline__ void load(const P& p, const Team& team, i64 row, const Span<P, V, int>& span) {
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const int k = (i * team.size() + team.rank()) * V;
            if (k < span.packed) {
                p.template load<V>(At<S>(), row, span.column(k), packs[i]);
            }
        }
        if constexpr (Span<P, V, int>::has_singles) {
            if (span.has_single(team.rank())) {
                p.template load<1>(At<S>(), row, span.single(team.rank()), single);
            }
        }
    }
};

// The elements of a row that a thread has.
template <class P, int Items, int V>
struct Elements {
    typename P::Element packs[Items * V];
    typename P::Element single;
};

// Stage S, whose inputs are in `source`, and the stages after it, elements in registers.
template <class P, int S, int Items, int V, class Team, class Source>
__device__ __forceinline__ void resident_stage(
    const P& p, const Team& team, i64 row, const Span<P, V, int>& span, typename P::Row& r, Elements<P, Items, V>& e,
    Source& source) {
    const bool has_single = span.has_single(team.rank());
#pragma unroll
    for (int i = 0; i < Items; ++i) {
        const int k = (i * team.size() + team.rank()) * V;
        if (k < span.packed) {
            auto tile = p.template tile<V>(At<S>());
            source.template take<S>(p, i, tile);
            if constexpr (!Source::has_columns) {
                p.template load_columns<V>(At<S>(), span.column(k), tile);
            }
            compute_pack<P, S, V>(p, tile, row, span.column(k), r, &e.packs[i * V]);
            if constexpr (Source::sums_columns) {
                source.template add_columns<S>(p, i, &e.packs[i * V]);
            }
        }
    }
    if constexpr (Span<P, V, int>::has_singles) {
        if (has_single) {
            const int col = span.single(team.rank());
            auto tile = p.template tile<1>(At<S>());
            source.template take_single<S>(p, tile);
            p.template load_columns<1>(At<S>(), col, tile);
            compute_pack<P, S, 1>(p, tile, row, col, r, &e.single);
        }
    }
    if constexpr (P::reduces(S)) {
        auto totals = p.totals(At<S>());
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            if ((i * team.size() + team.rank()) * V < span.packed) {
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    p.peek(At<S>(), e.packs[i * V + j], totals);
                }
            }
        }
        if (has_single) {
            p.peek(At<S>(), e.single, totals);
        }
        if constexpr (Team::leads) {
            team.lead(totals);
        }
        totals.start();
#pragma unroll
        for (int i = 0; i < Items; ++i) {
            const int k = (i * team.size() + team.rank()) * V;
            if (k < span.packed) {
                p.template add<V>(At<S>(), &e.packs[i * V], span.column(k), totals);
            }
        }
        if (has_single) {
            p.template add<1>(At<S>(), &e.single, span.single(team.rank()), totals);
        }
        finish_stage<P, S, Team::leads>(p, team, row, totals, r);
    }
    if constexpr (S + 1 < P::stages && P::one_tile) {
        resident_stage<P, S + 1, Items, V>(p, team, row, span, r, e, source);
    } else if constexpr (S + 1 < P::stages) {
        Loaded<P, S + 1, Items, V> next;
        next.load(p, team, row, span);
        resident_stage<P, S + 1, Items, V>(p, team, row, span, r, e, next);
    }
}

// Compute a pack of V elements `e` at column `col`, store its results and accumulate its elements. Return what compute_pack does; if
// that is false, `totals` are wrong too.
template <class P, int S, int V, Exact How = Exact::loaded_again, class Tile, class Totals>
__device__ __forceinline__ bool accumulate_pack(
    const P& p, const Tile& tile, i64 row, i64 col, const typename P::Row& r, typename P::Element* e, Totals& totals) {
    const bool done = compute_pack<P, S, V, How>(p, tile, row, col, r, e);
    if constexpr (P::reduces(S)) {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            p.peek(At<S>(), e[j], totals);
        }
        totals.settle();
        p.template add<V>(At<S>(), e, col, totals);
    }
    return done;
}

// Compute and accumulate the Packs packs that a thread has in `source` as they were loaded, in turn; the code is repeated
// for Items of them. Return false if Exact::left, and one has to be computed as it was written.
template <class P, int S, int Packs, int Items, int V, Exact How, class Team, class Source, class Totals>
__device__ __forceinline__ bool accumulate_packs(
    const P& p, const Team& team, i64 row, const Span<P, V, int>& span, const typename P::Row& r, Source& source,
    Totals& totals) {
    bool done = true;
#pragma unroll 1
    for (int first = 0; first < Packs; first += Items) {
#pragma unroll
        for (int i = first; i < first + Items; ++i) {
            const int k = (i * team.size() + team.rank()) * V;
            if (k < span.packed) {
                auto tile = p.template tile<V>(At<S>());
                source.template take<S>(p, i, tile);
                if constexpr (!Source::has_columns) {
                    p.template load_columns<V>(At<S>(), span.column(k), tile);
                }
                typename P::Element e[V];
                done &= accumulate_pack<P, S, V, How>(p, tile, row, span.column(k), r, e, totals);
                if constexpr (Source::sums_columns) {
                    source.template add_columns<S>(p, i, e);
                }
            }
        }
    }
    return done;
}

// Stage S and the stages after it, each from what a thread has in `source`. If that can be indexed, a thread asks after its last
// pack whether all values are finite, without a branch for each.
template <class P, int S, int Packs, int Items, int V, class Team, class Source>
__device__ __forceinline__ void packed_stage(
    const P& p, const Team& team, i64 row, const Span<P, V, int>& span, typename P::Row& r, Source& source) {
    constexpr Exact how = Source::indexed ? Exact::left : Exact::loaded_again;
    auto totals = p.totals(At<S>());
    if (!accumulate_packs<P, S, Packs, Items, V, how>(p, team, row, span, r, source, totals)) {
        totals = p.totals(At<S>());
        if constexpr (P::has_exact(S) && Source::indexed) {
            accumulate_packs<P, S, Packs, 1, V, Exact::kept>(p, team, row, span, r, source, totals);
        }
    }
    if constexpr (Span<P, V, int>::has_singles) {
        if (span.has_single(team.rank())) {
            const int col = span.single(team.rank());
            auto tile = p.template tile<1>(At<S>());
            source.template take_single<S>(p, tile);
            p.template load_columns<1>(At<S>(), col, tile);
            typename P::Element e;
            accumulate_pack<P, S, 1>(p, tile, row, col, r, &e, totals);
        }
    }
    if constexpr (P::reduces(S)) {
        finish_stage<P, S>(p, team, row, totals, r);
    }
    if constexpr (S + 1 < P::stages) {
        packed_stage<P, S + 1, Packs, Items, V>(p, team, row, span, r, source);
    }
}

// One row in registers, of which the inputs of the first stage are in `source`. A team without a row computes nothing of elements.
template <class P, int Items, int V, class Team, class Source>
__device__ __forceinline__ void loaded_row(
    const P& p, const Team& team, i64 row, const Span<P, V, int>& span, typename P::Row& r, Source& source) {
    if constexpr (P::packed) {
        packed_stage<P, 0, Items, Items, V>(p, team, row, span, r, source);
    } else {
        Elements<P, Items, V> e;
        resident_stage<P, 0, Items, V>(p, team, row, span, r, e, source);
    }
    if (span.exists && team.rank() == 0) {
        p.commit(row, r);
    }
}

// One row in registers.
template <class P, int Items, int V, class Team>
__device__ __forceinline__ void resident_row(const P& p, const Team& team, i64 row) {
    typename P::Row r;
    p.begin(row, r);
    const Span<P, V, int> span(p, row);
    Loaded<P, 0, Items, V> loaded;
    loaded.load(p, team, row, span);
    loaded_row<P, Items, V>(p, team, row, span, r, loaded);
}

// Merge the totals that several blocks left of each row, a warp for a row, in an order that depends on their number alone, and
// compute what follows the reductions of a program of one stage.
// Launch: Threads threads, any number of blocks.
template <class P, int Threads>
__device__ __forceinline__ void merge_shares(const P& p) {
    const Lanes<32> team;
    const i64 step = static_cast<i64>(gridDim.x) * (Threads / 32);
    for (i64 row = static_cast<i64>(blockIdx.x) * (Threads / 32) + threadIdx.x / 32; row < p.rows; row += step) {
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
