// The factors that undo the scales of C = A B', a product of operands that were split into one f16 part.
//
// A (m, k), B (n, k): any strides. C: (m, n) float32, contiguous. C as it should be is
//   ((C * row_factor[row]) * column_factor[col]) * row_rest[row],
// powers of two, in an order in which nothing overflows or underflows unless the result does, if all column factors are
// between 2^-63 and 2^63. If one is not, or if elements may need a repair, C itself is replaced and all factors are 1: the scales
// are undone, and elements that are not accurate are recomputed in float32 (split_exact.cuh). An element is accurate if the small
// elements of the operands change it by less than the rounding of the others to 11 bits (split_tiles.cuh). For the replacement a
// warp takes 16 rows of a tile of 128 x 128, and a lane four neighbouring columns.
// Launch: 256 threads, any number of blocks.
#pragma once

#include "split_exact.cuh"

// Where the factors are written.
struct Factors {
    float *row, *row_rest, *column;
};

// Two to the power of n.
__device__ __forceinline__ float power_of_two(int n) { return __uint_as_float(static_cast<u32>(127 + n) << 23); }

// Whether a thread of a block finds, in its share of the rows, one that may need a repair, or a factor beyond 2^most or 2^-most:
// beyond 2^127 none is.
__device__ __forceinline__ bool any_careful(const Matrix& x, int most) {
    bool any = false;
#pragma unroll 4
    for (i64 row = threadIdx.x * 4; row < x.rows; row += Repair::threads * 4) {
        const Pack<float, 4> four = load_pack<4>(x.inverse + row);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const SplitRow of = SplitRow::of(four.v[j]);
            const int power = static_cast<int>(of.exponent()) - 127;
            any |= row + j < x.rows && (of.accurate_from() > 0.0f || power > most || power < -most);
        }
    }
    return any;
}

// Write all factors: those that undo the scales, or ones.
__device__ __forceinline__ void write_factors(const Matrix& a, const Matrix& b, const Factors& factors, bool ones) {
    const i64 step = static_cast<i64>(gridDim.x) * Repair::threads;
    const i64 first = static_cast<i64>(blockIdx.x) * Repair::threads + threadIdx.x;
    for (i64 row = first; row < a.rows; row += step) {
        const int power = ones ? 0 : static_cast<int>(SplitRow::of(a.inverse[row]).exponent()) - 127;
        factors.row[row] = power_of_two(power / 2);
        factors.row_rest[row] = power_of_two(power - power / 2);
    }
    for (i64 col = first; col < b.rows; col += step) {
        factors.column[col] = power_of_two(ones ? 0 : static_cast<int>(SplitRow::of(b.inverse[col]).exponent()) - 127);
    }
}

// Undo the scales of one row of a tile, of which a lane has four columns, and recompute its elements that are not accurate.
__device__ __forceinline__ void finish_row(
    const Matrix& a, const Matrix& b, i64 cols, float* c, i64 row, i64 col, const SplitRow (&of_col)[4], bool packs) {
    const SplitRow of_row = SplitRow::of(a.inverse[row]);
    float* const at = c + row * b.rows + col;
    Pack<float, 4> sums;
    u32 flagged = 0, kept = 0;  // bits of elements to recompute, and of those not to write
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const bool inside = col + j < b.rows;
        const float sum = inside ? at[j] : 0.0f;
        const bool small = inside && fabsf(sum) < of_row.accurate_from() + of_col[j].accurate_from();
        flagged |= static_cast<u32>(small) << j;
        kept |= static_cast<u32>(small || !inside) << j;
        sums.v[j] = scaled(sum, of_row, of_col[j]);
    }
    if (packs && kept == 0) {
        store_global<4>(at, sums);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (!(kept >> j & 1)) {
                at[j] = sums.v[j];
            }
        }
    }
#pragma unroll 1
    for (int j = 0; j < 4; ++j) {
        u32 lanes = __ballot_sync(0xffffffffu, flagged >> j & 1);
        const i64 first = col - static_cast<i64>(threadIdx.x % 32) * 4 + j;
        for (int l = 0; lanes != 0; ++l, lanes >>= 1) {
            if (lanes & 1) {
                const float element = exact_element(a, row, b, first + l * 4, cols);
                if (threadIdx.x % 32 == 0) {
                    c[row * b.rows + first + l * 4] = element;
                }
            }
        }
    }
}

__device__ __forceinline__ void split_finish(
    const Matrix& a, const Matrix& b, float* c, i64 cols, const Factors& factors) {
    constexpr int width = 128;
    SHARED_BYTES(marks, 8 * 4);  // a mask for each warp
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool careful = any_of_block(any_careful(a, 127) | any_careful(b, 63), reinterpret_cast<u32*>(marks));
    write_factors(a, b, factors, careful);
    if (!careful) {
        return;
    }
    const TileOrder order(a.rows, b.rows, tile_rows, width);
    const bool packs = b.rows % 4 == 0 && reinterpret_cast<i64>(c) % 16 == 0;
    for (u32 tile = blockIdx.x; tile < order.count(); tile += gridDim.x) {
        i64 first, col;
        order.at(tile, first, col);
        col += lane * 4;
        SplitRow of_col[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            of_col[j] = col + j < b.rows ? SplitRow::of(b.inverse[col + j]) : SplitRow::none();
        }
        for (i64 row = first + warp * rows_a_warp; row < first + (warp + 1) * rows_a_warp && row < a.rows; ++row) {
            finish_row(a, b, cols, c, row, col, of_col, packs);
        }
    }
}
