// The epilogue of gemm.cu: a row program on the sums of a tile, in the registers of the warps that computed them. P and Shape
// are described there. All lanes of a warp call finish_rows together.
#pragma once

#include "gemm_results.cuh"
#include "gemm_scales.cuh"
#include "prefetches.cuh"

// How many chunks ahead matrices are fetched: up to two, if those of all warps fit into what shared memory leaves of the L1
// cache.
template <class Shape, class P>
__device__ constexpr int chunks_ahead() {
    constexpr int chunk = Shape::consumers / 32 * 16 * Shape::chunk * P::read, fitting = 24576;  // bytes
    return P::read == 0 ? 0 : chunk * 2 <= fitting ? 2 : chunk <= fitting ? 1 : 0;
}

// Fetch what the first chunks of 16 rows of a tile read of matrices, before there are sums.
template <class Shape, class P>
__device__ __forceinline__ void prefetch_chunks(const P& p, i64 row, i64 col) {
#pragma unroll
    for (int c = 0; c < chunks_ahead<Shape, P>(); ++c) {
        p.matrices(At<0>(), PrefetchChunk<Shape::chunk>{row, col + c * Shape::chunk, p.rows, p.cols});
    }
}

// Set a value to a sum, rounded to the value's type.
template <class T>
__device__ __forceinline__ void set_narrowed(T& to, float sum) {
    to = narrow<T>(sum);
}

// Compute V elements at (row, col), and stage their results at (down, across) of the warp's panel.
template <class P, int Panel, int V, bool Shifted, class Tile>
__device__ __forceinline__ void compute_staged(
    const P& p, const Tile& tile, i64 row, i64 col, const typename P::Row& r, typename P::Element* e, char* panel,
    int down, int across) {
    const Computed<P, V> found = compute_held<P, V>(p, tile, row, col, r);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        e[v] = found.e[v];
    }
    p.results(At<0>(), found.out, StageResult<Panel, Shifted>{panel, row, down, across});
}

// The values of columns that a thread needs for a chunk, loaded while the one before is computed; but beside guards, whose call
// saves registers, where they are needed: ahead, some would be spilled.
template <class P, int Chunk, int V>
struct ChunkColumns {
    static constexpr int held = Chunk / 4;  // elements of a row that a thread has
    static constexpr bool ahead = P::column_bytes > 0 && !P::has_exact(0);
    decltype(static_cast<const P*>(nullptr)->template tile<V>(At<0>())) tiles[held];

    // Load those of the chunk at a column if the matrix has all of it; finish_chunk loads those of others.
    __device__ __forceinline__ void load(const P& p, i64 col) {
        if (ahead && col + Chunk <= p.cols) {
#pragma unroll
            for (int i = 0; i < held; i += V) {
                p.template load_columns<V>(At<0>(), col + threadIdx.x % 4 * 2 + i / 2 * 8 + i % 2, tiles[i]);
            }
        }
    }
};

// Run the epilogue on a chunk of the two rows that a thread has: pairs of columns, eight apart, from the column `first` on.
// The matrix has `left` columns from there, and those rows that are `inside`; if the chunk is Whole, it has all, and `columns` has
// their values. Results are staged in the warp's panel, from the column `across` on.
template <class Shape, int Chunk, int V, bool Whole, class P, class Columns, class Totals>
__device__ __forceinline__ void finish_chunk(
    const P& p, const float (&part)[Chunk / 2], const Columns& columns, char* panel, int across, const i64 (&rows)[2],
    const bool (&inside)[2], i64 first, int left, const typename P::Row (&r)[2], Totals (&totals)[2]) {
    typedef decltype(p.template tile<V>(At<0>())) Tile;
    constexpr int held = Chunk / 4;  // elements of a row that a thread has
    const int lane = threadIdx.x % 32;
    const auto offset = [](int i) { return i / 2 * 8 + i % 2; };
    const auto has_column = [&](int i) { return Whole || offset(i) < left; };
    const auto has_row = [&](int h) { return Whole || inside[h]; };
    Tile tiles[2][held];
    typename P::Element e[2][held];
#pragma unroll
    for (int i = 0; i < held; i += V) {
        if (has_column(i)) {
            if constexpr (Whole && Columns::ahead) {
                tiles[0][i] = columns.tiles[i];
            } else {
                p.template load_columns<V>(At<0>(), first + offset(i), tiles[0][i]);
            }
            tiles[1][i] = tiles[0][i];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (has_row(h)) {
                    p.template load<V>(At<0>(), rows[h], first + offset(i), tiles[h][i]);
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < held; i += V) {
            if (has_row(h) && has_column(i)) {
#pragma unroll
                for (int v = 0; v < V; ++v) {
                    set_narrowed(tiles[h][i].product.v[v], part[i / 2 * 4 + h * 2 + i % 2 + v]);
                }
                compute_staged<P, Shape::panel, V, Shape::shifted>(
                    p, tiles[h][i], rows[h], first + offset(i), r[h], &e[h][i], panel, lane / 4 + 8 * h,
                    across + lane % 4 * 2 + offset(i));
            }
        }
    }
    if constexpr (P::reduces(0)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (has_row(h)) {
#pragma unroll
                for (int i = 0; i < held; ++i) {
                    if (has_column(i)) {
                        p.peek(At<0>(), e[h][i], totals[h]);
                    }
                }
                totals[h].settle();
#pragma unroll
                for (int i = 0; i < held; ++i) {
                    if (has_column(i)) {
                        p.template add<1>(At<0>(), &e[h][i], first + offset(i), totals[h]);
                    }
                }
            }
        }
    }
}

// Run the epilogue of the 16 rows of a tile that a warp has, from (first_row, first_col) on: a thread has two rows, see
// multiply_add, and the four lanes of a row merge their totals. Chunks of a loop that is not unrolled share their code. Plain,
// of operands with scales alone, tells that all of these rows and columns are inside, and that no scales of theirs need care.
// part_number is which 16 rows of the tile they are, see WarpScales.
template <class Shape, int V, bool Plain, class P>
__device__ __forceinline__ void finish_rows(
    const P& p, const float (&sum)[Shape::columns / 2], StagedPanels<Shape>& panels, i64 first_row, i64 first_col,
    const typename Shape::Scales& scales, const u32* of_columns, int part_number) {
    constexpr bool careful = P::scaled && !Plain;
    constexpr int chunk = careful ? 16 : Shape::chunk;  // fewer columns leave registers for what care takes
    const int lane = threadIdx.x % 32;
    const i64 m = p.rows, n = p.cols;
    if (first_row >= m) {
        return;
    }
    const i64 rows[2] = {first_row + lane / 4, first_row + lane / 4 + 8};
    const bool inside[2] = {rows[0] < m, rows[1] < m};
    typename P::Row r[2];
    decltype(p.totals(At<0>())) totals[2];
    SplitRow of_rows[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (inside[h]) {
            p.begin(rows[h], r[h]);
        }
        if constexpr (P::scaled) {
            of_rows[h] = scales.of_row(part_number, h);
        }
    }
    ChunkColumns<P, chunk, V> columns, next;
    next.load(p, first_col);
#pragma unroll(careful ? 1 : Shape::unroll)
    for (int c = 0; c < Shape::columns / chunk; ++c) {
        const i64 chunk_col = first_col + c * chunk;
        if (chunk_col >= n) {
            break;
        }
        constexpr int ahead = careful ? 0 : chunks_ahead<Shape, P>();
        if (ahead > 0 && c + ahead < Shape::columns / chunk) {
            p.matrices(At<0>(), PrefetchChunk<chunk>{first_row, chunk_col + ahead * chunk, m, n});
        }
        columns = next;
        if ((c + 1) * chunk < Shape::columns) {
            next.load(p, chunk_col + chunk);
        }
        float part[chunk / 2];
        take_chunk<0>(c, sum, part);
        const i64 first = chunk_col + lane % 4 * 2;
        if constexpr (P::scaled) {
            undo_scales<chunk, careful>(p, of_rows, of_columns + c * chunk, first_row, chunk_col, part);
        }
        const int across = c * chunk % Shape::panel;
        if (P::staged > 0 && across == 0) {
            panels.begin();
        }
        if (Plain || (first_row + 16 <= m && chunk_col + chunk <= n)) {
            finish_chunk<Shape, chunk, V, true>(
                p, part, columns, panels.current(), across, rows, inside, first, chunk, r, totals);
        } else {
            const int left = static_cast<int>(n - chunk_col < chunk ? n - chunk_col : chunk) - lane % 4 * 2;
            finish_chunk<Shape, chunk, Shape::odd ? 1 : V, false>(
                p, part, columns, panels.current(), across, rows, inside, first, left, r, totals);
        }
        const bool is_last = (c + 1) * chunk == Shape::columns || chunk_col + chunk >= n;
        if (P::staged > 0 && (is_last || across + chunk == Shape::panel)) {
            store_panel<Shape>(p, panels, first_row, chunk_col - across, c * chunk < Shape::panel, is_last);
        }
    }
    if constexpr (P::reduces(0)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (inside[h]) {
                Lanes<4>().reduce(totals[h]);
                if (lane % 4 == 0) {
                    p.partial[rows[h] * p.shares + first_col / Shape::columns] = totals[h];
                }
            }
        }
    }
    __syncwarp(0xffffffffu);  // products need all lanes together
}
