// The scales of float32 operands that gemm.cu multiplies as one f16 part each (split_pieces.cuh): they are undone on the sums
// of a tile, and sums that small elements of the operands make inaccurate are computed again in float32.
//
// Infinities and NaN need nothing: the parts have them where the operands do, and no element but 0 is 0 in a part, so that the
// sums have them where the product does.
#pragma once

#include "split_exact.cuh"

// Load a word where the code says so: the compiler may not move it behind a loop of products.
__device__ __forceinline__ u32 load_here(const float* from) {
#ifdef __CUDA_ARCH__
    u32 word;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(word) : "l"(__cvta_generic_to_global(from)));
    return word;
#else
    return __float_as_uint(*from);
#endif
}

// The scales of a warp's part of a tile: Parts times 16 rows, 64 apart, and Columns columns. They are fetched before the sums
// are computed, which hides how long that takes; then those of columns are kept in shared memory, of which each warp has
// its own, and those of rows in the registers of its lanes.
template <int Parts, int Columns>
struct WarpScales {
    static constexpr int bytes = Columns * 4;
    u32 row, columns[Columns / 32];  // of a lane; of a single part two lanes have the same row

    template <class P>
    __device__ __forceinline__ void fetch(const P& p, i64 first_row, i64 first_col) {
        const int lane = threadIdx.x % 32;
        const i64 own = first_row + lane % 16 + lane / 16 % Parts * 64;
        row = own < p.left.rows ? load_here(p.left.inverse + own) : SplitRow::none().bits;
#pragma unroll
        for (int i = 0; i < Columns / 32; ++i) {
            const i64 col = first_col + i * 32 + lane;
            columns[i] = col < p.right.rows ? load_here(p.right.inverse + col) : SplitRow::none().bits;
        }
    }
    // Put the scales of columns into `memory`; return whether one of the warp's takes care: a row or column has small elements, or
    // its factor is beyond 2^63 or 2^-63, so that a product of two may overflow or be subnormal. The warp has read what was there:
    // products that all of its lanes start together come in between.
    __device__ __forceinline__ bool keep(char* memory) {
        const int lane = threadIdx.x % 32;
        u32 small = row & SplitRow::most, least = row & SplitRow::powers, most = least;
#pragma unroll
        for (int i = 0; i < Columns / 32; ++i) {
            small |= columns[i] & SplitRow::most;
            least = min(least, columns[i] & SplitRow::powers);
            most = max(most, columns[i] & SplitRow::powers);
        }
        const bool care = small != 0 || least < (127u - 63) << 23 || most > (127u + 63) << 23;
        const u32 lanes = __ballot_sync(0xffffffffu, care);
#pragma unroll
        for (int i = 0; i < Columns / 32; ++i) {
            reinterpret_cast<u32*>(memory)[i * 32 + lane] = columns[i];
        }
        __syncwarp(0xffffffffu);
        return lanes != 0;
    }
    // The scale of row lane / 4 + 8 h of a part.
    __device__ __forceinline__ SplitRow of_row(int part, int h) const {
        return SplitRow{__shfl_sync(0xffffffffu, row, part % Parts * 16 + threadIdx.x % 32 / 4 + 8 * h)};
    }
};

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

// Undo the scales of a warp's chunk of a tile, 16 rows of Columns columns from (row, col) on. With Care they may be any, and rows
// and columns may be beyond the last; without, `keep` has found that one factor undoes both scales of each sum, which has to
// be computed again nowhere. A thread has pairs of columns of two rows, whose scales are of_rows; see multiply_add. Those of the
// chunk's columns are in `of_columns`.
template <int Columns, bool Care, class P>
__device__ __forceinline__ void undo_scales(
    const P& p, const SplitRow (&of_rows)[2], const u32* of_columns, i64 row, i64 col, float (&sum)[Columns / 2]) {
    const int lane = threadIdx.x % 32;
    const float factors[2] = {of_rows[0].factor(), of_rows[1].factor()};
    Doubts<Columns> doubts;
#pragma unroll
    for (int k = 0; k < Columns / 2; k += 4) {
        const int at = lane % 4 * 2 + column_of_sum(k);
        const Pack<u32, 2> two = load_pack<2>(of_columns + at);
#pragma unroll
        for (int j = k; j < k + 4; ++j) {
            const SplitRow of_row = of_rows[row_of_sum(j) / 8], of_col{two.v[j % 2]};
            if constexpr (Care) {
                const bool inside = row + lane / 4 + row_of_sum(j) < p.left.rows && col + at + j % 2 < p.right.rows;
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
