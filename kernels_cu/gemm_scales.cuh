// The scales of float32 operands that gemm.cu multiplies as one f16 part each (split_pieces.cuh): they are undone on the sums of a
// tile, and sums that small elements of the operands make inaccurate are computed again in float32.
//
// Sums of infinities and NaN are those of the operands themselves: no element but 0 is 0 in a part.
#pragma once

#include "split_exact.cuh"

// Whether the scales of some rows can be undone by one factor: none has small elements, and no factor, nor a product of two,
// overflows or is subnormal.
struct Care {
    u32 small, least, most;

    __device__ __forceinline__ Care() : small(0), least(127u << 23), most(127u << 23) {}
    __device__ __forceinline__ void add(float inverse) {
        const SplitRow row = SplitRow::of(inverse);
        small |= row.bits & SplitRow::most;
        least = min(least, row.exponent() << 23);
        most = max(most, row.exponent() << 23);
    }
    __device__ __forceinline__ bool needed() const { return small != 0 || least < (127u - 63) << 23 || most > (127u + 63) << 23; }
};

// Whether a warp has to take care in a tile: of `Parts` times 16 rows, 64 apart, from `row` on, and of Columns columns.
template <int Parts, int Columns, class P>
__device__ __forceinline__ bool needs_care(const P& p, i64 row, i64 col) {
    const int lane = threadIdx.x % 32;
    const i64 own = row + lane % 16 + lane / 16 % Parts * 64;
    Care care;
    if (own < p.left.rows) {
        care.add(p.left.inverse[own]);
    }
#pragma unroll
    for (int i = 0; i < Columns; i += 32) {
        if (col + i + lane < p.right.rows) {
            care.add(p.right.inverse[col + i + lane]);
        }
    }
    return __ballot_sync(0xffffffffu, care.needed()) != 0;
}

// Set one of the sums of a thread. Registers cannot be indexed.
template <int Count>
__device__ __forceinline__ void set_sum(float (&sum)[Count], int at, float value) {
#pragma unroll
    for (int k = 0; k < Count; ++k) {
        sum[k] = k == at ? value : sum[k];
    }
}

// Compute again those sums of a warp's chunk of Columns columns that its lanes have bits for, one after the other by the warp.
template <int Columns, class P>
__device__ __forceinline__ void compute_again(
    const P& p, i64 row, i64 col, const Doubts<Columns>& doubts, float (&sum)[Columns / 2]) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int word = 0; word < Doubts<Columns>::words; ++word) {
        u32 own = 0;
#pragma unroll
        for (int w = 0; w < Doubts<Columns>::words; ++w) {
            own = w == word ? doubts.bits[w] : own;
        }
        u32 lanes = __ballot_sync(0xffffffffu, own != 0);
        for (int other = 0; lanes != 0; ++other, lanes >>= 1) {
            u32 bits = __shfl_sync(0xffffffffu, own, other);
            for (int k = word * 32; bits != 0; ++k, bits >>= 1) {
                if (bits & 1) {
                    const i64 at_row = row + other / 4 + row_of_sum(k), at_col = col + other % 4 * 2 + column_of_sum(k);
                    const float element = exact_element(p.left, at_row, p.right, at_col, p.depth);
                    set_sum(sum, lane == other ? k : -1, element);
                }
            }
        }
    }
}

// Undo the scales of a warp's chunk of a tile, 16 rows of Columns columns from (row, col) on. With Care they may be any, see
// needs_care, and rows and columns may be beyond the last. A thread has pairs of columns of two rows, whose scales are of_rows;
// see multiply_add.
template <int Columns, bool Care, class P>
__device__ __forceinline__ void undo_scales(
    const P& p, const SplitRow (&of_rows)[2], i64 row, i64 col, float (&sum)[Columns / 2]) {
    const int lane = threadIdx.x % 32;
    const i64 first = col + lane % 4 * 2;
    const float factors[2] = {of_rows[0].factor(), of_rows[1].factor()};
    Doubts<Columns> doubts;
#pragma unroll
    for (int k = 0; k < Columns / 2; k += 4) {
        const i64 at = first + column_of_sum(k);
        // There are scales of 8 rows at least, and any will do beyond the last column.
        const Pack<float, 2> two = load_pack<2>(p.right.inverse + (!Care || at < p.right.rows ? at : 0));
#pragma unroll
        for (int j = k; j < k + 4; ++j) {
            const SplitRow of_row = of_rows[row_of_sum(j) / 8], of_col = SplitRow::of(two.v[j % 2]);
            if constexpr (Care) {
                const bool inside = row + lane / 4 + row_of_sum(j) < p.left.rows && at + j % 2 < p.right.rows;
                doubts.add(j, inside && fabsf(sum[j]) < of_row.accurate_from() + of_col.accurate_from());
                sum[j] = scaled(sum[j], of_row, of_col);
            } else {
                sum[j] = exact_multiply_add(sum[j], factors[row_of_sum(j) / 8] * of_col.factor(), -0.0f);
            }
        }
    }
    if constexpr (Care) {
        compute_again<Columns>(p, row, col, doubts, sum);
    }
}
