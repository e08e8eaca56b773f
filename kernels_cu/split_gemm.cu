// C = A B' on Hopper's fp16 tensor cores, as accurate as in float32: the sum over k of Ahi Bhi + 2^-11 (Ahi Blo + Alo Bhi),
// times the inverse scales of the row of A and the row of B. A row program without reductions takes its elements from there.
//
// P: an emitted struct as in row_block.cu with one stage, whose tile has a member `product` that is not loaded but set here.
//   It also has
//     tiles_a, tiles_b                      A (m, k) and B (n, k), k > 0: split into hi and lo f16 parts by split_rows.cu, in
//                                           atoms whose layout suits tiles of any size (split_pieces.cuh)
//     a, b, depth                           the operands themselves, with the inverse scales; and k
//     flags, width                          for split_repair.cu (Doubts), and this kernel's Columns
// split_repair.cu writes again what this kernel cannot give: rows and columns with infinities or NaN, and elements that may be
// inaccurate because of small elements of the operands.
// An element of C has the same bits whatever m, n and Columns are.
//
// A block computes tiles of 128 x Columns, 64 rows for each of two consumer warpgroups. A warp of a third warpgroup copies the
// operands, 64 columns per stage, up to `Stages` stages ahead, and tells the consumers what goes with them. Tensor cores round
// sums towards zero, so they sum 64 columns at a time, the corrections first; the sum over k is rounded to nearest in other
// registers. The consumers take turns: while one adds, the tensor cores work for the other.
// Where lo of all rows of a tile is zero in these columns, as it is of numbers that were bf16 or f16, it is neither copied nor
// multiplied. This changes no bit: products with zero are zeros, which change no sum, and the sign of a sum that is zero is
// lost where it is added to +0.
// Launch: 384 threads, any number of blocks (one per multiprocessor), SplitGemm<Columns, Stages>::shared bytes. Columns is a
//   multiple of 8, up to 192, for which `multiply_add` is emitted. The row program runs on Chunk columns at once, a divisor
//   of Columns: their inputs take registers. Unroll is 1, or the number of chunks: then each has code of its own for whole tiles
//   with nothing to take care of (Care). V is 2 where pointers, row strides and columns of what P loads and stores are multiples
//   of 2 elements, else 1.
#pragma once

#include "launch_order.cuh"
#include "split_copy.cuh"
#include "stages.cuh"

// The sizes of a product's tiles and of its shared memory.
template <int Columns, int Stages>
struct SplitGemm {
    static constexpr int group = 1024;  // bytes of 8 rows x 64 columns, of hi or of lo
    static constexpr int rows_a_warpgroup = 64;
    static constexpr int groups_a = tile_rows / 8, groups_b = Columns / 8;
    static constexpr int part_a = groups_a * group, part_b = groups_b * group;
    static constexpr int bytes_a = 2 * part_a, stage = bytes_a + 2 * part_b;  // hi and lo of A, then of B
    static constexpr int consumers = 256, consumer_warps = consumers / 32;
    // The messages are behind the ring.
    static constexpr int shared = Ring<SplitGemm, Stages>::bytes + 16 + (1 + Columns + Stages) * 4;
};

// The two rows of a tile that a thread has, 8 rows apart; see multiply_add.
struct ThreadRows {
    i64 first;
    SplitRow split[2];

    __device__ __forceinline__ ThreadRows(const Matrix& a, i64 row)
        : first(row + threadIdx.x / 32 * rows_a_warp + threadIdx.x % 32 / 4) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            split[h] = first + 8 * h < a.rows ? SplitRow::of(a.inverse[first + 8 * h]) : SplitRow::none();
        }
    }
};

// Which elements of a chunk of columns are beyond the last row or column, as bits.
template <int Chunk, class P>
__device__ __forceinline__ u32 find_outside(const P& p, const ThreadRows& rows, i64 col) {
    const int columns = at_most(p.cols - col, Chunk);
    u32 outside = 0;
#pragma unroll
    for (int k = 0; k < Chunk / 2; ++k) {
        outside |= static_cast<u32>(rows.first + row_of_sum(k) >= p.rows || column_of_sum(k) >= columns) << k;
    }
    return outside;
}

// Which sums of a chunk of columns may be inaccurate, as bits: none of marked rows and columns, which are repaired as a whole.
// Columns beyond the last one count like it.
template <int Count>
__device__ __forceinline__ u32 find_doubts(
    const float (&sum)[Count], const float (&columns)[Count / 2], const ThreadRows& rows) {
    u32 doubts = 0;
#pragma unroll
    for (int k = 0; k < Count; ++k) {
        const SplitRow of_row = rows.split[row_of_sum(k) / 8], of_col = SplitRow::of(columns[own_column_of_sum(k)]);
        doubts |= static_cast<u32>(fabsf(sum[k]) < of_row.accurate_from() + of_col.accurate_from()) << k;
    }
    return doubts;
}

// Undo the scales of the sums of a chunk of columns. If Plain, `columns` are factors (Messages), and one multiplication by the
// product of the row's and the column's factor does it, with the same bits.
template <bool Plain, int Count>
__device__ __forceinline__ void undo_split_scales(
    float (&sum)[Count], const float (&columns)[Count / 2], const ThreadRows& rows) {
#pragma unroll
    for (int k = 0; k < Count; ++k) {
        const SplitRow of_row = rows.split[row_of_sum(k) / 8];
        const float of_col = columns[own_column_of_sum(k)];
        if constexpr (Plain) {
            sum[k] = exact_multiply_add(sum[k], of_row.factor() * of_col, -0.0f);
        } else {
            sum[k] = scaled(sum[k], of_row, SplitRow::of(of_col));
        }
    }
}

// Run the row program on a chunk of columns from `col` on, in packs of V: on all of them, or if Some, on those that are not
// `outside`.
template <int V, bool Some, int Count, class P>
__device__ __forceinline__ void finish_chunk(
    const P& p, const float (&product)[Count], i64 first_row, i64 col, u32 outside, const typename P::Row (&r)[2]) {
    static_assert(!Some || V == 1, "a bit for each element");
    typedef decltype(p.template tile<V>(At<0>())) Tile;
    Tile tiles[Count / V];
#pragma unroll
    for (int k = 0; k < Count; k += V) {
        if (!Some || !(outside >> k & 1)) {
            Tile& tile = tiles[k / V];
            p.template load<V>(At<0>(), first_row + row_of_sum(k), col + column_of_sum(k), tile);
            p.template load_columns<V>(At<0>(), col + column_of_sum(k), tile);
#pragma unroll
            for (int v = 0; v < V; ++v) {
                tile.product.v[v] = product[k + v];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < Count; k += V) {
        if (!Some || !(outside >> k & 1)) {
            const i64 row = first_row + row_of_sum(k), at = col + column_of_sum(k);
            p.template store<V>(At<0>(), row, at, compute_held<P, V>(p, tiles[k / V], row, at, r[row_of_sum(k) / 8]).out);
        }
    }
}

// Give a warp's part of the tile at `col` to the row program from the accumulators, once the tile's message is written, and note
// what is to be repaired element by element. A thread has pairs of neighbouring columns of two rows. `whole`: no row or column of
// the part is beyond the last one. If Plain, that is so, and there is nothing to take care of: only then each chunk may have code
// of its own.
template <int Columns, int V, int Chunk, int Unroll, bool Plain, int Stages, class P>
__device__ __forceinline__ void finish_chunks(
    const P& p, const float (&sum)[Columns / 2], const Messages<Columns, Stages>& messages, const ThreadRows& rows, i64 col,
    Doubts<Columns>& noted, bool whole = Plain) {
    constexpr int chunks = Columns / Chunk, count = Chunk / 2;
    const int pair = threadIdx.x % 4 * 2;
    i64 first_col = col + pair;
    known_from_here(first_col);  // or the compiler adds up the address of each store from the start
    typename P::Row r[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (rows.first + 8 * h < p.rows) {
            p.begin(rows.first + 8 * h, r[h]);
        }
    }
#pragma unroll(Plain ? Unroll : 1)
    for (int c = 0; c < chunks; ++c) {
        float part[count];
        take_chunk<0>(c, sum, part);
        const i64 chunk_col = first_col + c * Chunk;
        float columns[count / 2];  // what the message tells of the thread's
#pragma unroll
        for (int i = 0; i < count / 2; i += 2) {
            const Pack<float, 2> two = load_pack<2>(messages.columns + pair + c * Chunk + column_of_sum(2 * i));
            columns[i] = two.v[0];
            columns[i + 1] = two.v[1];
        }
        const u32 outside = whole ? 0 : find_outside<Chunk>(p, rows, chunk_col);
        if (!Plain && messages.care == Care::of_sums) {
            noted.add(c * count, find_doubts(part, columns, rows) & ~outside);
        }
        undo_split_scales<Plain>(part, columns, rows);
        if (outside == 0) {  // without branches between the packs
            finish_chunk<V, false>(p, part, rows.first, chunk_col, 0, r);
        } else {
            finish_chunk<1, true>(p, part, rows.first, chunk_col, outside, r);
        }
    }
}

// The same, Plain where it may be, and write what is noted to `flags`.
template <int Columns, int V, int Chunk, int Unroll, int Stages, class P>
__device__ __forceinline__ void finish_tile(
    const P& p, const float (&sum)[Columns / 2], const Messages<Columns, Stages>& messages, i64 tile, const ThreadRows& rows,
    i64 col) {
    const int lane = threadIdx.x % 32;
    const bool whole = col + Columns <= p.cols && rows.first - lane / 4 + rows_a_warp <= p.rows;  // of all lanes
    Doubts<Columns> noted;
    if (whole && messages.care == Care::of_nothing) {
        finish_chunks<Columns, V, Chunk, Unroll, true>(p, sum, messages, rows, col, noted);
    } else {
        finish_chunks<Columns, V, Chunk, Unroll, false>(p, sum, messages, rows, col, noted, whole);
    }
    if (noted.any()) {
        const TileOrder order(p.rows, p.cols, tile_rows, Columns);
        noted.write(p.flags, order.count(), tile * warps_a_tile + threadIdx.x / 32);
    }
    const u32 lanes = __ballot_sync(0xffffffffu, noted.any());
    if (lane == 0) {
        p.flags[tile * warps_a_tile + threadIdx.x / 32] = lanes;
    }
}

// Compute this block's tiles, by the consumer warpgroups.
template <class Shape, int Columns, int V, int Chunk, int Unroll, int Stages, class P>
__device__ __forceinline__ void multiply(
    Ring<Shape, Stages> ring, const Messages<Columns, Stages>& messages, const P& p, u32 blocks) {
    // In units of operand_at, 16 bytes: from hi to lo, and to the next 16 columns.
    constexpr u32 a_lo = Shape::part_a / 16, b_lo = Shape::part_b / 16, next = 32 / 16;
    const TileOrder order(p.rows, p.cols, tile_rows, Columns);
    // The shuffle tells the compiler that the value is uniform in a warp.
    const u32 warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const u32 rows = warpgroup * (Shape::rows_a_warpgroup / 8 * Shape::group);
    float part[Columns / 2], sum[Columns / 2];  // over 64 columns, over all
    i64 last = -1, row = p.rows, col = 0;       // the tile in `sum`: none yet
    ThreadRows of_rows(p.a, row);
    u64 a, b;
    u32 says, heard = 0;

    // The named barrier 1 + w is the turn of warpgroup w.
    const auto take_turn = [&] { named_sync(1 + warpgroup, Shape::consumers); };
    const auto pass_turn = [&] { named_arrive(2 - warpgroup, Shape::consumers); };
    // Begin with the corrections of a block, or with hi hi' if there are none; finish_block adds hi hi' to corrections. By the
    // operands that have a lo: A: lo hi'; B: hi lo'; both: hi lo', then lo hi'. `both`, a constant once inlined, tells that both
    // have one, without a message to wait for.
    const auto begin_block = [&](bool both) {
        a = operand_at(ring.a() + rows, Shape::group);
        b = operand_at(ring.b(), Shape::group);
        barrier_wait(ring.full(), ring.parity);
        if (!both) {
            says = messages.hear(ring.stage);
        }
        const u32 with_lo = both ? lo_of_both : says & lo_of_both;
        const u64 left = a + (with_lo == lo_of_a ? a_lo : 0), right = b + (with_lo & lo_of_b ? b_lo : 0);
        take_turn();
        products_begin(part);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            multiply_add<f16, 0, 0>(part, left + i * next, right + i * next, i > 0);
        }
        products_commit();
        if (with_lo == lo_of_both) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                multiply_add<f16, 0, 0>(part, a + a_lo + i * next, b + i * next, 1);
            }
            products_commit();
        }
        pass_turn();
    };
    const auto finish_block = [&](bool both) {
        products_wait(part);
        if (both || (says & lo_of_both) != 0) {
#pragma unroll
            for (int i = 0; i < Columns / 2; ++i) {
                part[i] *= 0x1p-11f;
            }
            take_turn();
            products_begin(part);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                multiply_add<f16, 0, 0>(part, a + i * next, b + i * next, 1);
            }
            products_commit();
            pass_turn();
            products_wait(part);
        }
        if (threadIdx.x % 32 == 0) {
            barrier_arrive(ring.empty());
        }
        ring.advance();
    };

    const auto finish_last = [&] {
        barrier_wait(messages.written_barrier(), heard++ & 1);
        finish_tile<Columns, V, Chunk, Unroll>(p, sum, messages, last, of_rows, col);
    };

    // All blocks of a tile but the first.
    const auto add_blocks = [&](bool both) {
#pragma unroll 1
        for (u32 block = 1; block < blocks; ++block) {
            begin_block(both);
            finish_block(both);
#pragma unroll
            for (int i = 0; i < Columns / 2; ++i) {
                sum[i] += part[i];
            }
        }
    };

#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) {
        part[i] = sum[i] = 0.0f;
    }
    if (warpgroup == 1) {
        pass_turn();
    }
#pragma unroll 1
    for (u32 tile = blockIdx.x; tile < order.count(); tile += gridDim.x) {
        begin_block(false);
        if (last >= 0) {  // the previous tile, while the tensor cores work on this one
            finish_last();
            barrier_arrive(messages.read_barrier());
        }
        finish_block(false);
#pragma unroll
        for (int i = 0; i < Columns / 2; ++i) {
            sum[i] = part[i] + 0.0f;  // never -0
        }
        if (says == (lo_of_both | alike_in_tile)) {
            add_blocks(true);
        } else {
            add_blocks(false);
        }
        last = tile;
        order.at(tile, row, col);
        of_rows = ThreadRows(p.a, row);
    }
    if (last >= 0) {
        finish_last();
    }
    if (warpgroup == 0) {
        take_turn();  // pairs with the other warpgroup's last pass_turn
    }
}

// The kernel: one warp copies, eight compute.
template <int Columns, int Stages, int V, int Chunk, int Unroll, class P>
__device__ __forceinline__ void split_gemm(const P& p) {
    typedef SplitGemm<Columns, Stages> Shape;
    SHARED_DYNAMIC(shared);
    const Ring<Shape, Stages> ring(shared);
    auto& messages = *reinterpret_cast<Messages<Columns, Stages>*>(ring.behind(shared));
    const u32 blocks = static_cast<u32>((p.depth + 63) / 64);
    if (threadIdx.x == 0) {
        barrier_init(messages.written_barrier(), 32);
        barrier_init(messages.read_barrier(), Shape::consumers);
        ring.init();
    }
    __syncthreads();
    follow_earlier_launches();
    if (threadIdx.x >= Shape::consumers) {
        shrink_registers<56>();
        if (threadIdx.x < Shape::consumers + 32) {
            copy_operands<Shape, Columns>(ring, messages, p, blocks);
        }
    } else {
        grow_registers<224>();
        multiply<Shape, Columns, V, Chunk, Unroll>(ring, messages, p, blocks);
    }
}
