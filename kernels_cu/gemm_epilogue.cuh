// The epilogue of gemm.cu: a row program on the sums of a tile, in the registers of the warps that computed them. P and Shape
// are described there. All lanes of a warp call finish_rows together.
#pragma once

#include "gemm_scales.cuh"
#include "stages.cuh"
#include "tensor_cores.cuh"

// A warp's chunk of one result in shared memory: 16 rows of Chunk elements, whose 16-byte pieces are swizzled. If Shifted, they
// are not swizzled, and a row has 8 more elements: it is staged as many elements late as it begins behind a multiple of 8 in
// memory, so that a pack of 16 bytes here is one there. What a chunk leaves of a pack is kept for the next chunk. `first` is
// the result's first byte among those of an element. Accesses along rows and along columns have no bank conflicts.
template <int Chunk, class T, bool Shifted>
struct Staging {
    static constexpr int bytes = sizeof(T), pieces = Chunk * bytes / 16, line = Chunk + (Shifted ? 8 : 0);
    char* at;

    __device__ __forceinline__ Staging(char* staging, int first) : at(staging + 16 * line * first) {}
    __device__ __forceinline__ T* element(int row, int col) const {
        const int piece = col * bytes / 16, place = Shifted ? piece : piece ^ (row * (bytes / 2) & (pieces - 1));
        return reinterpret_cast<T*>(at + row * line * bytes + place * 16 + col * bytes % 16);
    }
};

// Where rows of a result begin in memory. Unless Shifted, the stride is a multiple of 16 bytes, and so is their length.
template <class T, bool Shifted>
struct Shifts {
    u32 first, stride;
    bool aligned;  // all rows begin at multiples of 16 bytes

    __device__ __forceinline__ Shifts(const T* to, i64 rows_stride)
        : first(static_cast<u32>(reinterpret_cast<u64>(to) / sizeof(T))), stride(static_cast<u32>(rows_stride)),
          aligned((reinterpret_cast<u64>(to) | (Shifted ? static_cast<u64>(rows_stride) * sizeof(T) : 0)) % 16 == 0) {}
    // Elements by which the columns of a tile begin behind a multiple of 8 in a row; 0 if all are aligned.
    __device__ __forceinline__ int of_row(i64 row) const {
        return !Shifted || aligned ? 0 : static_cast<int>((first + static_cast<u32>(row) * stride) % 8);
    }
};

// Stages V elements of a result, from (row, col) of a warp's chunk on, for CopyResult. That row is `of_matrix` in the matrix.
template <int Chunk, bool Shifted>
struct StageResult {
    char* staging;
    i64 of_matrix;
    int row, col;

    template <int First, class T, int V>
    __device__ __forceinline__ void operator()(At<First>, const Pack<T, V>& pack, const T* to, i64 stride) const {
        const int shift = Shifts<T, Shifted>(to, stride).of_row(of_matrix);
        T* const at = Staging<Chunk, T, Shifted>(staging, First).element(row, col + shift);
        if (shift % V == 0) {
            store_pack<V>(at, pack);
        } else {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                at[v] = pack.v[v];
            }
        }
    }
};

// Copies a warp's chunk of one result from shared memory to memory; its first element goes to (row, col). Lanes write
// neighbouring packs of 16 bytes. If Shifted, packs at the ends of a tile's rows may be stored by elements, and those cut by
// the end of a chunk are left to the next: `is_first` and `is_last` tell where a tile begins and ends. Otherwise all are
// stored by elements if the result does not begin at a multiple of 16 bytes. Rows that are padded are aligned, but may end in a pack.
template <int Chunk, bool Shifted>
struct CopyResult {
    char* staging;
    i64 row, col, m, n;
    bool is_first, is_last;

    template <int First, class T>
    __device__ __forceinline__ void operator()(At<First>, T* to, i64 stride) const {
        constexpr int V = 16 / sizeof(T);
        const Staging<Chunk, T, Shifted> from(staging, First);
        const Shifts<T, Shifted> shifts(to, stride);
        const int rows = static_cast<int>(m - row < 16 ? m - row : 16);
        const int cols = static_cast<int>(n - col < Chunk ? n - col : Chunk);
        to += row * stride + col;
        if (Shifted || shifts.aligned) {
            copy<V, Chunk>(from, shifts, to, stride, rows, cols);
        } else {
            copy<1, 4>(from, shifts, to, stride, rows, cols);
        }
        if (Shifted && (shifts.aligned ? is_last && cols % V != 0 : is_first || is_last)) {
            copy_ends<V>(from, shifts, to, stride, rows, cols);
        }
        if (Shifted && !is_last && !shifts.aligned) {
            keep_ends<V>(from);
        }
    }

    template <int V, int Unroll, class T>
    __device__ __forceinline__ void copy(
        const Staging<Chunk, T, Shifted>& from, const Shifts<T, Shifted>& shifts, T* to, i64 stride, int rows, int cols) const {
#pragma unroll(Unroll)
        for (int i = 0; i < 16 * Chunk / V / 32; ++i) {
            const int pack = i * 32 + threadIdx.x % 32, down = pack / (Chunk / V), staged = pack % (Chunk / V) * V;
            const int across = staged - shifts.of_row(row + down);
            if (down < rows && across + V <= cols && (!Shifted || across >= 0 || !is_first)) {
                store_global<V>(to + down * stride + across, load_pack<V>(from.element(down, staged)));
            }
        }
    }

    // The elements of a tile's rows that are before its first whole pack, or behind its last one.
    template <int V, class T>
    __device__ __forceinline__ void copy_ends(
        const Staging<Chunk, T, Shifted>& from, const Shifts<T, Shifted>& shifts, T* to, i64 stride, int rows, int cols) const {
#pragma unroll 1
        for (int lane = threadIdx.x % 32; lane < 16 * 8; lane += 32) {
            const int down = lane / 8, shift = shifts.of_row(row + down);
            const int before = is_first ? (V - shift % V) % V : -shift;  // the column of the first whole pack
            const int whole = (cols + shift) / V * V, from_end = (whole < Chunk ? whole : Chunk) - shift + lane % 8;
            if (is_first && down < rows && lane % 8 < before && lane % 8 < cols) {
                to[down * stride + lane % 8] = *from.element(down, lane % 8 + shift);
            }
            if (is_last && down < rows && from_end >= before && from_end < cols) {
                to[down * stride + from_end] = *from.element(down, from_end + shift);
            }
        }
    }

    // Move the elements behind the chunk's last pack to where the next chunk starts.
    template <int V, class T>
    __device__ __forceinline__ void keep_ends(const Staging<Chunk, T, Shifted>& from) const {
        const int lane = threadIdx.x % 32, down = lane / (8 / V), at = lane % (8 / V) * V;
        __syncwarp(0xffffffffu);
        if (down < 16) {
            store_pack<V>(from.element(down, at), load_pack<V>(from.element(down, Chunk + at)));
        }
    }
};

// Fetches a warp's chunk of a matrix that the epilogue reads: 16 rows of Chunk elements, from (row, col) on.
template <int Chunk>
struct PrefetchChunk {
    i64 row, col, m, n;

    template <class T>
    __device__ __forceinline__ void operator()(const T* from, i64 stride) const {
        constexpr int sector = 32 / sizeof(T), sectors = Chunk / sector;
#pragma unroll
        for (int i = threadIdx.x % 32; i < 16 * sectors; i += 32) {
            const i64 at_row = row + i / sectors, at_col = col + i % sectors * sector;
            if (at_row < m && at_col < n) {
                prefetch_sector(from + at_row * stride + at_col);
            }
        }
    }
};

// How many chunks ahead matrices are fetched: up to two, if those of all warps fit into what shared memory leaves of the L1
// cache.
template <class Shape, class P>
__device__ constexpr int chunks_ahead() {
    constexpr int chunk = Shape::consumers / 32 * 16 * Shape::chunk * P::read, fitting = 24576;  // bytes
    return P::read == 0 ? 0 : chunk * 2 <= fitting ? 2 : chunk <= fitting ? 1 : 0;
}

// Fetch what the first chunks of 16 rows of a tile read, before there are sums.
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

// Compute V elements at (row, col), and stage their results at (down, across) of the warp's chunk.
template <class P, int Chunk, int V, bool Shifted, class Tile>
__device__ __forceinline__ void compute_staged(
    const P& p, const Tile& tile, i64 row, i64 col, const typename P::Row& r, typename P::Element* e, char* staging,
    int down, int across) {
    const Computed<P, V> found = compute_held<P, V>(p, tile, row, col, r);
#pragma unroll
    for (int v = 0; v < V; ++v) {
        e[v] = found.e[v];
    }
    p.results(At<0>(), found.out, StageResult<Chunk, Shifted>{staging, row, down, across});
}

// Run the epilogue on a chunk of the two rows that a thread has: pairs of columns, eight apart, from the column `first` on.
// The matrix has `left` columns from there, and those rows that are `inside`; if the chunk is Whole, it has all.
template <int Chunk, int V, bool Shifted, bool Whole, class P, class Totals>
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
                compute_staged<P, Chunk, V, Shifted>(
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
        constexpr int ahead = careful ? 0 : chunks_ahead<Shape, P>();
        if (ahead > 0 && c + ahead < Shape::columns / chunk) {
            p.matrices(At<0>(), PrefetchChunk<chunk>{first_row, chunk_col + ahead * chunk, m, n});
        }
        float part[chunk / 2];
        take_chunk<0>(c, sum, part);
        const i64 first = chunk_col + lane % 4 * 2;
        if constexpr (P::scaled) {
            const u32* const of_columns = reinterpret_cast<const u32*>(staging + Shape::staged) + c * chunk;
            undo_scales<chunk, careful>(p, of_rows, of_columns, first_row, chunk_col, part);
        }
        if (Plain || (first_row + 16 <= m && chunk_col + chunk <= n)) {
            finish_chunk<chunk, V, Shape::shifted, true>(p, part, staging, rows, inside, first, chunk, r, totals);
        } else {
            const int left = static_cast<int>(n - chunk_col < chunk ? n - chunk_col : chunk) - lane % 4 * 2;
            finish_chunk<chunk, Shape::odd ? 1 : V, Shape::shifted, false>(
                p, part, staging, rows, inside, first, left, r, totals);
        }
        if constexpr (P::staged > 0) {
            __syncwarp(0xffffffffu);
            const bool is_last = (c + 1) * chunk == Shape::columns || chunk_col + chunk >= n;
            p.targets(At<0>(), CopyResult<chunk, Shape::shifted>{staging, first_row, chunk_col, m, n, c == 0, is_last});
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
