// The doubtful elements of a product, which are computed again: by split_repair.cu what split_gemm.cu leaves to it, or in the
// epilogue of gemm.cu (gemm_scales.cuh).
//
// Of split_gemm.cu, in memory: a word for each warp's part of a tile, with a bit for each lane that has such elements; then, for
// each lane of each of those warps, `words` words with a bit for each of its elements, of which only those of such lanes are
// written.
#pragma once

#include "split_tiles.cuh"

// An operand, and the inverse row scales of its split, which in two parts mark rows.
struct Matrix {
    const float* elements;
    i64 row_stride, col_stride;
    const float* inverse;
    i64 rows;

    __device__ __forceinline__ bool marked(i64 row) const { return row < rows && SplitRow::of(inverse[row]).is_marked(); }

    // Whether a thread of so many finds a marked row in its share. The scales are padded to 8 rows.
    __device__ __forceinline__ bool any_marked(int threads) const {
        bool any = false;
#pragma unroll 4
        for (i64 row = threadIdx.x * 4; row < rows; row += threads * 4) {
            const Pack<float, 4> four = load_pack<4>(inverse + row);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                any |= row + j < rows && SplitRow::of(four.v[j]).is_marked();
            }
        }
        return any;
    }
};

// Where the accumulators of a thread are in its part of a tile, see multiply_add: the k-th in this row and from this column on.
// The lane adds lane / 4 rows and lane % 4 * 2 columns.
__device__ __forceinline__ constexpr int row_of_sum(int k) { return k / 2 % 2 * 8; }
__device__ __forceinline__ constexpr int column_of_sum(int k) { return k / 4 * 8 + k % 2; }
// Which of a thread's columns, pairs that are eight apart, it is in.
__device__ __forceinline__ constexpr int own_column_of_sum(int k) { return k / 4 * 2 + k % 2; }
__device__ __forceinline__ constexpr int words_of_lane(int columns) { return (columns / 2 + 31) / 32; }

// Bits for the accumulators of a thread.
template <int Columns>
struct Doubts {
    static constexpr int words = words_of_lane(Columns);
    u32 bits[words];

    __device__ __forceinline__ Doubts() {
#pragma unroll
        for (int w = 0; w < words; ++w) {
            bits[w] = 0;
        }
    }
    // Set the bits from the k-th on, at most 32 of them, where `more` has one.
    __device__ __forceinline__ void add(int k, u32 more) {
        const u64 shifted = static_cast<u64>(more) << k % 32;
#pragma unroll
        for (int w = 0; w < words; ++w) {  // registers cannot be indexed
            bits[w] |= k / 32 == w ? static_cast<u32>(shifted) : k / 32 + 1 == w ? static_cast<u32>(shifted >> 32) : 0;
        }
    }
    __device__ __forceinline__ bool any() const {
        u32 all = 0;
#pragma unroll
        for (int w = 0; w < words; ++w) {
            all |= bits[w];
        }
        return all != 0;
    }
    // Write the words of a lane, of a warp's part of one of so many tiles.
    __device__ __forceinline__ void write(u32* flags, i64 tiles, i64 part) const {
#pragma unroll
        for (int w = 0; w < words; ++w) {
            flags[tiles * warps_a_tile + (part * 32 + threadIdx.x % 32) * words + w] = bits[w];
        }
    }
};
