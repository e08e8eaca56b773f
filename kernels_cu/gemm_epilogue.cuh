// The epilogue of gemm.cu: a row program on the sums of a tile, in the registers of the warps that computed them. P and Shape
// are described there. All lanes of a warp call finish_rows together.
#pragma once

#include "gemm_scales.cuh"
#include "stages.cuh"
#include "tensor_cores.cuh"

// A warp's chunk of one result in shared memory: 16 rows of Chunk elements of `Bytes` bytes, from byte 16 Chunk `first` on.
// Its 16-byte pieces are swizzled, so that accesses along rows and along columns have no bank conflicts.
template <int Chunk, int Bytes>
struct Staging {
    static constexpr int pieces = Chunk * Bytes / 16;
    char* at;

    __device__ __forceinline__ Staging(char* staging, int first) : at(staging + first * 16 * Chunk) {}
    __device__ __forceinline__ char* piece(int row, int p) const {
        return at + (row * pieces + (p ^ (row * (Bytes / 2) & (pieces - 1)))) * 16;
    }
    __device__ __forceinline__ char* element(int row, int col) const {
        return piece(row, col * Bytes / 16) + col * Bytes % 16;
    }
};

// Stages V elements of a result, from (row, col) of a warp's chunk on, for CopyResult.
template <int Chunk>
struct StageResult {
    char* staging;
    int row, col;

    template <int First, class T, int V>
    __device__ __forceinline__ void operator()(At<First>, const Pack<T, V>& pack) const {
        const Staging<Chunk, sizeof(T)> to(staging, First);
        store_pack<V>(reinterpret_cast<T*>(to.element(row, col)), pack);
    }
};

// Copies a warp's chunk of one result from shared memory to memory; its first element goes to (row, col). Lanes write
// neighbouring packs, each as wide as the alignment of all rows allows: 16 bytes, a pair of 16-bit elements, or an element.
// The stride is n, so that a row is whole packs.
template <int Chunk>
struct CopyResult {
    char* staging;
    i64 row, col, m, n;

    template <int First, class T>
    __device__ __forceinline__ void operator()(At<First>, T* to, i64 stride) const {
        constexpr int bytes = sizeof(T), elements = 16 / bytes, pair = bytes < 4 ? 4 / bytes : 1;
        const Staging<Chunk, bytes> from(staging, First);
        const i64 bits = reinterpret_cast<i64>(to) | stride * bytes;
        to += row * stride + col;
        if (bits % 16 == 0) {
            copy<elements, Chunk>(from, to, stride);
        } else if (pair > 1 && bits % 4 == 0) {
            copy<pair, 4>(from, to, stride);
        } else {
            copy<1, 4>(from, to, stride);
        }
    }

    template <int V, int Unroll, class T>
    __device__ __forceinline__ void copy(const Staging<Chunk, sizeof(T)>& from, T* to, i64 stride) const {
#pragma unroll(Unroll)
        for (int i = 0; i < 16 * Chunk / V / 32; ++i) {
            const int pack = i * 32 + threadIdx.x % 32, down = pack / (Chunk / V), across = pack % (Chunk / V) * V;
            if (row + down < m && col + across < n) {
                const T* const at = reinterpret_cast<const T*>(from.element(down, across));
                store_global<V>(to + down * stride + across, load_pack<V>(at));
            }
        }
    }
};

// Set a value to a sum, rounded to the value's type.
template <class T>
__device__ __forceinline__ void set_narrowed(T& to, float sum) {
    to = narrow<T>(sum);
}

// Compute V elements at (row, col), and stage their results at (down, across) of the warp's chunk.
template <class P, int Chunk, int V, class Tile>
__device__ __forceinline__ void compute_staged(
    const P& p, const Tile& tile, i64 row, i64 col, const typename P::Row& r, typename P::Element* e, char* staging,
    int down, int across) {
    const Computed<P, V> found = compute_held<P, V>(p, tile, row, col, r);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        e[v] = found.e[v];
    }
    p.results(At<0>(), found.out, StageResult<Chunk>{staging, down, across});
}

// Run the epilogue on a chunk of the two rows that a thread has: pairs of columns, eight apart, from the column `first` on.
// The matrix has `left` columns from there, and those rows that are `inside`; if the chunk is Whole, it has all.
template <int Chunk, int V, bool Whole, class P, class Totals>
__device__ __forceinline__ void finish_chunk(
    const P& p, const float (&part)[Chunk / 2], char* staging, const i64 (&rows)[2], const bool (&inside)[2],
    i64 first, int left, const typename P::Row (&r)[2], Totals (&totals)[2]) {
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
            p.template load_columns<V>(At<0>(), first + offset(i), tiles[0][i]);
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
                compute_staged<P, Chunk, V>(
                    p, tiles[h][i], rows[h], first + offset(i), r[h], &e[h][i], staging, lane / 4 + 8 * h,
                    lane % 4 * 2 + offset(i));
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
    const P& p, const float (&sum)[Shape::columns / 2], char* staging, i64 first_row, i64 first_col,
    const typename Shape::Scales& scales, int part_number) {
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
#pragma unroll(careful ? 1 : Shape::unroll)
    for (int c = 0; c < Shape::columns / chunk; ++c) {
        const i64 chunk_col = first_col + c * chunk;
        if (chunk_col >= n) {
            break;
        }
        float part[chunk / 2];
        take_chunk<0>(c, sum, part);
        const i64 first = chunk_col + lane % 4 * 2;
        if constexpr (P::scaled) {
            const u32* const of_columns = reinterpret_cast<const u32*>(staging + Shape::staged) + c * chunk;
            undo_scales<chunk, careful>(p, of_rows, of_columns, first_row, chunk_col, part);
        }
        if (Plain || (first_row + 16 <= m && chunk_col + chunk <= n)) {
            finish_chunk<chunk, V, true>(p, part, staging, rows, inside, first, chunk, r, totals);
        } else {
            const int left = static_cast<int>(n - chunk_col < chunk ? n - chunk_col : chunk) - lane % 4 * 2;
            finish_chunk<chunk, V, false>(p, part, staging, rows, inside, first, left, r, totals);
        }
        if constexpr (P::staged > 0) {
            __syncwarp(0xffffffffu);
            p.targets(At<0>(), CopyResult<chunk>{staging, first_row, chunk_col, m, n});
            __syncwarp(0xffffffffu);
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
