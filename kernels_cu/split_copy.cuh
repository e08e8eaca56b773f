// The warp of split_gemm.cu that copies the operands of a split product, and what it tells those that multiply them.
//
// Shape is SplitGemm, and P the struct described there.
#pragma once

#include "ring.cuh"
#include "split_doubts.cuh"

// min(n, most).
__device__ __forceinline__ int at_most(i64 n, int most) { return n < most ? static_cast<int>(n) : most; }

// What is said with a stage, in bits: which operands have a lo that is not zero in this block, and whether all blocks of the tile
// say the same.
constexpr u32 lo_of_a = 1, lo_of_b = 2, lo_of_both = lo_of_a | lo_of_b, alike_in_tile = 4;
// What the epilogue of a tile has to take care of: of nothing; of factors, as the product of a row's and a column's may overflow or
// be subnormal; or of that and of sums, which may be inaccurate, or of marked rows or columns.
enum class Care : u32 { of_nothing, of_factors, of_sums };
// What the copying warp tells the consumers: `says` with each stage; and for the epilogue of a tile what to take care of, and the
// inverse scales of its columns: their factors alone if of nothing, else what SplitRow describes. Each lane that has written of
// the latter arrives at `written`, each consumer thread that has read it at `read`.
template <int Columns, int Stages>
struct Messages {
    u64 written, read;
    float columns[Columns];  // pairs are read at once
    Care care;
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

// Where lo of an operand is not zero in a tile: in no block of 64 columns, in all, or where its marks (lo_marks) say.
enum class Lo { nowhere, everywhere, by_marks };
// The same from SplitRow::findings of each lane's rows.
__device__ __forceinline__ Lo lo_of(u32 findings) {
    const bool any = __any_sync(0xffffffffu, (findings & SplitRow::somewhere) != 0);
    const bool all = __any_sync(0xffffffffu, (findings & SplitRow::everywhere) != 0);
    return all ? Lo::everywhere : any ? Lo::by_marks : Lo::nowhere;
}

// What the copying warp finds in the inverse scales of a tile at (row, col): where lo of either operand, A or B, is not zero; and
// for the epilogue what it has to take care of, and the columns' scales, of which a lane has every 32nd. All are loaded at once,
// without branches: beyond the last row or column a lane loads the last one's again.
template <int Columns>
struct TileScales {
    static constexpr int rows_a_lane = tile_rows / 32, columns_a_lane = (Columns + 31) / 32;
    Lo a, b;
    Care care;
    float columns[columns_a_lane];

    __device__ __forceinline__ TileScales(const Matrix& left, const Matrix& right, i64 row, i64 col) {
        const int lane = threadIdx.x % 32, last_row = at_most(left.rows - row, tile_rows) - 1;
        const int last_column = at_most(right.rows - col, Columns) - 1;
        float rows[rows_a_lane];
#pragma unroll
        for (int j = 0; j < rows_a_lane; ++j) {
            rows[j] = left.inverse[row + min(lane + 32 * j, last_row)];
        }
#pragma unroll
        for (int j = 0; j < columns_a_lane; ++j) {
            columns[j] = right.inverse[col + min(lane + 32 * j, last_column)];
        }
        u32 of_rows = 0, of_columns = 0;
#pragma unroll
        for (const float of_row : rows) {
            of_rows |= SplitRow::of(of_row).findings();
        }
#pragma unroll
        for (const float of_column : columns) {
            of_columns |= SplitRow::of(of_column).findings();
        }
        a = lo_of(of_rows);
        b = lo_of(of_columns);
        const bool any_extreme = __any_sync(0xffffffffu, ((of_rows | of_columns) & SplitRow::extreme) != 0);
        const bool any_doubtful = __any_sync(0xffffffffu, ((of_rows | of_columns) & SplitRow::most) != 0);
        care = any_doubtful ? Care::of_sums : any_extreme ? Care::of_factors : Care::of_nothing;
    }
};

// Write the message for the epilogue of a tile, this block's number `told` counted from 1, by a warp, once the epilogue before has
// read its own: before the barrier's first phase the one of parity 1 has ended. Columns beyond the last one have its scale: their
// sums are not stored.
template <int Columns, int Stages>
__device__ __forceinline__ void tell(Messages<Columns, Stages>& messages, const TileScales<Columns>& scales, u32 told) {
    const int lane = threadIdx.x % 32;
    barrier_wait(messages.read_barrier(), told & 1);
    if (lane == 0) {
        messages.care = scales.care;
    }
#pragma unroll
    for (int j = 0; j < TileScales<Columns>::columns_a_lane; ++j) {
        if (lane + 32 * j < Columns) {
            const float column = scales.columns[j];
            messages.columns[lane + 32 * j] = scales.care == Care::of_nothing ? SplitRow::of(column).factor() : column;
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
        mark = lo == Lo::by_marks ? *marks : 0;
    }
    // Whether lo is to be copied and multiplied. Then load the next mark, to arrive while this stage is waited for.
    __device__ __forceinline__ bool has_lo(bool is_last) {
        if (lo != Lo::by_marks) {
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

// Copy the operands of all tiles of this block, by a warp, of which one lane copies. What has to be known of a tile is found while
// the tile before it is multiplied, once the first stages of that are on their way: between two tiles the tensor cores would run
// out of stages meanwhile.
template <class Shape, int Columns, int Stages, class P>
__device__ __forceinline__ void copy_operands(
    Ring<Shape, Stages> ring, Messages<Columns, Stages>& messages, const P& p, u32 blocks) {
    const TileOrder order(p.rows, p.cols, tile_rows, Columns);
    if (blockIdx.x >= order.count()) {
        return;
    }
    u32 told = 1;
    i64 row, col;  // of `next`
    order.at(blockIdx.x, row, col);
    TileScales<Columns> next(p.a, p.b, row, col);
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < order.count(); tile += gridDim.x) {
        const TileScales<Columns> own = next;
        Strip<Shape, Shape::groups_a> strip_a(p.tiles_a, p.a.inverse, p.rows, row, own.a);
        Strip<Shape, Shape::groups_b> strip_b(p.tiles_b, p.b.inverse, p.cols, col, own.b);
        // The larger operand first: the other one is in the L2 cache more often.
        const auto copy_block = [&](bool with_a, bool with_b, bool alike) {
            barrier_wait(ring.empty(), ring.parity ^ 1);
            messages.says[ring.stage] = lo_of_a * with_a + lo_of_b * with_b + alike_in_tile * alike;
            barrier_arrive_expect(ring.full(), strip_a.bytes * (1 + with_a) + strip_b.bytes * (1 + with_b));
            strip_b.copy(ring.b(), Shape::part_b, with_b, ring.full());
            strip_a.copy(ring.a(), Shape::part_a, with_a, ring.full());
        };
        const auto advance = [&] {
            strip_a.advance();
            strip_b.advance();
            ring.advance();
        };
        const auto copy_blocks = [&](u32 first, u32 end) {
            if (own.a != Lo::by_marks && own.b != Lo::by_marks) {  // one lane alone: it need not wait for votes
                if (threadIdx.x % 32 == 0) {
#pragma unroll 1
                    for (u32 block = first; block < end; ++block) {
                        copy_block(own.a == Lo::everywhere, own.b == Lo::everywhere, true);
                        advance();
                    }
                } else {
                    ring.skip(end - first);
                }
                rejoin_lanes();
            } else {
#pragma unroll 1
                for (u32 block = first; block < end; ++block) {
                    const bool is_last = block + 1 == blocks;
                    const bool with_a = strip_a.has_lo(is_last), with_b = strip_b.has_lo(is_last);
                    if (threadIdx.x % 32 == 0) {
                        copy_block(with_a, with_b, false);
                    }
                    advance();
                }
            }
        };
        // Twice, in a loop that is not unrolled: the code of copy_blocks is there once.
#pragma unroll 1
        for (u32 first = 0, end = min(blocks, static_cast<u32>(Stages)); first < blocks; first = end, end = blocks) {
            copy_blocks(first, end);
            if (first == 0) {
                tell(messages, own, told++);
                if (tile + gridDim.x < order.count()) {
                    order.at(tile + gridDim.x, row, col);
                    next = TileScales<Columns>(p.a, p.b, row, col);
                }
            }
        }
    }
}
