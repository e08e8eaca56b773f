// The warp of split_gemm.cu that copies the operands of a split product, and what it tells those that multiply them.
//
// Shape is SplitGemm, and P the struct described there.
#pragma once

#include "ring.cuh"
#include "split_doubts.cuh"

// min(n, most).
__device__ __forceinline__ int at_most(i64 n, int most) { return n < most ? static_cast<int>(n) : most; }

// What the copying warp tells the consumers: with each stage, in `says`, which operands have a lo that is not zero, and whether
// that is so in all blocks of the tile; and for the epilogue of a tile the inverse scales of its columns, and whether a row
// or column of the tile has small elements or is marked. Each lane that has written of the latter arrives at `written`, each
// consumer thread that has read it at `read`.
constexpr u32 lo_of_a = 1, lo_of_b = 2, lo_of_both = lo_of_a | lo_of_b, alike_in_tile = 4;
template <int Columns, int Stages>
struct Messages {
    u64 written, read;
    u32 any_doubtful;
    float columns[Columns];
    u32 says[Stages];

    __device__ __forceinline__ u32 written_barrier() const { return shared_address(&written); }
    __device__ __forceinline__ u32 read_barrier() const { return shared_address(&read); }
    // What is said with a stage, to all lanes of a warp. The first lane alone reads it, which then hands the stage back.
    __device__ __forceinline__ u32 hear(u32 stage) const {
        u32 message = 0;
        if (threadIdx.x % 32 == 0) {
            message = says[stage];
        }
        return __shfl_sync(0xffffffffu, message, 0);
    }
};

// Where lo of an operand is not zero in a tile: in no block of 64 columns, in all, or where the marks say.
enum class Lo { nowhere, everywhere, marked };
// The same from what each lane found of its rows, see SplitRow.
__device__ __forceinline__ Lo lo_of(u32 findings) {
    const bool any = __any_sync(0xffffffffu, (findings & SplitRow::somewhere) != 0);
    const bool all = __any_sync(0xffffffffu, (findings & SplitRow::everywhere) != 0);
    return all ? Lo::everywhere : any ? Lo::marked : Lo::nowhere;
}

// The inverse scales of the rows and columns of a tile at (row, col), every 32nd for each lane of the copying warp. Those of the
// next tile are loaded while one is copied, all at once: beyond the last row or column it is the last one's that is loaded.
template <int Columns>
struct TileScales {
    static constexpr int row_count = tile_rows / 32, column_count = (Columns + 31) / 32;
    float rows[row_count], columns[column_count];

    __device__ __forceinline__ TileScales(const Matrix& a, const Matrix& b, i64 row, i64 col) {
        const int lane = threadIdx.x % 32, last_row = at_most(a.rows - row, tile_rows) - 1;
        const int last_column = at_most(b.rows - col, Columns) - 1;
#pragma unroll
        for (int j = 0; j < row_count; ++j) {
            rows[j] = a.inverse[row + min(lane + 32 * j, last_row)];
        }
#pragma unroll
        for (int j = 0; j < column_count; ++j) {
            columns[j] = b.inverse[col + min(lane + 32 * j, last_column)];
        }
    }
};

// What a tile's scales say of lo of both operands; and for the epilogue, which runs later.
template <int Columns>
struct TileFindings {
    Lo a, b;
    bool any_doubtful;
    float columns[TileScales<Columns>::column_count];

    __device__ __forceinline__ explicit TileFindings(const TileScales<Columns>& scales) {
        u32 of_rows = 0, of_columns = 0;
#pragma unroll
        for (const float row : scales.rows) {
            of_rows |= SplitRow::of(row).findings();
        }
#pragma unroll
        for (int j = 0; j < TileScales<Columns>::column_count; ++j) {
            columns[j] = scales.columns[j];
            of_columns |= SplitRow::of(columns[j]).findings();
        }
        a = lo_of(of_rows);
        b = lo_of(of_columns);
        any_doubtful = __any_sync(0xffffffffu, ((of_rows | of_columns) & SplitRow::most) != 0);
    }
};

// Write the message for the epilogue of a tile, by a warp, once the last epilogue, number `told`, has read its own. Columns beyond
// the last one have its scale: their sums are not stored.
template <int Columns, int Stages>
__device__ __forceinline__ void tell(Messages<Columns, Stages>& messages, const TileFindings<Columns>& found, u32 told) {
    const int lane = threadIdx.x % 32;
    barrier_wait(messages.read_barrier(), told & 1);
    if (lane == 0) {
        messages.any_doubtful = found.any_doubtful;
    }
#pragma unroll
    for (int j = 0; j < TileScales<Columns>::column_count; ++j) {
        if (lane + 32 * j < Columns) {
            messages.columns[lane + 32 * j] = found.columns[j];
        }
    }
    barrier_arrive(messages.written_barrier());
}

// The groups of 8 rows of an operand that a tile has, as the copying warp goes through the blocks of 64 columns.
template <class Shape, int Most>
struct Strip {
    static_assert(Most <= 32, "a group for each lane");
    i64 groups;        // of the whole operand
    const char* hi;    // of this block
    u32 bytes;         // of hi or of lo
    const u64* marks;  // of a group, one for each lane, of this block or the next
    u64 mark;          // of this block
    Lo lo;             // whether marks are needed at all

    // Rows beyond the last group keep stale data: those rows of C are not stored. Lanes beyond it have the last one too.
    __device__ __forceinline__ Strip(const char* parts, const float* inverse, i64 rows, i64 first, Lo where)
        : groups((rows + 7) / 8), hi(parts + first / 8 * Shape::group), lo(where) {
        const int count = at_most(groups - first / 8, Most), lane = threadIdx.x % 32;
        bytes = count * Shape::group;
        marks = lo_marks(inverse, groups) + first / 8 + (lane < count ? lane : count - 1);
        mark = lo == Lo::marked ? *marks : 0;
    }
    // Whether lo is to be copied and multiplied. Then load the next mark, to arrive while this stage is waited for.
    __device__ __forceinline__ bool has_lo(bool is_last) {
        if (lo != Lo::marked) {
            return lo == Lo::everywhere;
        }
        arrived(mark);
        const bool any = __any_sync(0xffffffffu, mark != 0);
        marks += is_last ? 0 : groups;
        mark = *marks;
        return any;
    }
    __device__ __forceinline__ void copy(u32 to, u32 part, bool with_lo, u32 barrier) const {
        bulk_copy(to, hi, bytes, barrier);
        if (with_lo) {
            bulk_copy(to + part, hi + groups * Shape::group, bytes, barrier);
        }
    }
    __device__ __forceinline__ void advance() { hi += 2 * groups * Shape::group; }
};

// Copy the operands of all tiles of this block, by a warp, of which one lane copies.
template <class Shape, int Columns, int Stages, class P>
__device__ __forceinline__ void copy_operands(
    Ring<Shape, Stages> ring, Messages<Columns, Stages>& messages, const P& p, u32 blocks) {
    const TileOrder order(p.rows, p.cols, tile_rows, Columns);
    if (blockIdx.x >= order.count()) {
        return;
    }
    u32 told = 1;  // before the barrier's first phase, the one of parity 1 has ended
    i64 row, col;
    order.at(blockIdx.x, row, col);
    TileScales<Columns> scales(p.a, p.b, row, col);
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < order.count(); tile += gridDim.x) {
        const TileFindings<Columns> own(scales);
        Strip<Shape, Shape::groups_a> strip_a(p.tiles_a, p.a.inverse, p.rows, row, own.a);
        Strip<Shape, Shape::groups_b> strip_b(p.tiles_b, p.b.inverse, p.cols, col, own.b);
        if (tile + gridDim.x < order.count()) {  // loaded while this tile is copied
            order.at(tile + gridDim.x, row, col);
            scales = TileScales<Columns>(p.a, p.b, row, col);
        }
        // The larger operand first: the other one is in the L2 cache more often.
        const auto copy_block = [&](const Ring<Shape, Stages>& to, bool with_a, bool with_b, bool alike) {
            barrier_wait(to.empty(), to.parity ^ 1);
            messages.says[to.stage] = lo_of_a * with_a + lo_of_b * with_b + alike_in_tile * alike;
            barrier_arrive_expect(to.full(), strip_a.bytes * (1 + with_a) + strip_b.bytes * (1 + with_b));
            strip_b.copy(to.b(), Shape::part_b, with_b, to.full());
            strip_a.copy(to.a(), Shape::part_a, with_a, to.full());
        };
        if (own.a != Lo::marked && own.b != Lo::marked) {  // one lane alone, which votes on nothing: stages wait for it
            if (threadIdx.x % 32 == 0) {
                Ring<Shape, Stages> to = ring;
#pragma unroll 1
                for (u32 block = 0; block < blocks; ++block) {
                    copy_block(to, own.a == Lo::everywhere, own.b == Lo::everywhere, true);
                    strip_a.advance();
                    strip_b.advance();
                    to.advance();
                }
            }
            ring.skip(blocks);
        } else {
#pragma unroll 1
            for (u32 block = 0; block < blocks; ++block) {
                const bool is_last = block + 1 == blocks, with_a = strip_a.has_lo(is_last), with_b = strip_b.has_lo(is_last);
                if (threadIdx.x % 32 == 0) {
                    copy_block(ring, with_a, with_b, false);
                }
                strip_a.advance();
                strip_b.advance();
                ring.advance();
            }
        }
        tell(messages, own, told++);
    }
}
