// Undo the scales of a product of operands that were split into one f16 part: C times the inverse scales of the row of A and
// of the row of B.
//
// C: (m, n) float32, contiguous; replaced. split_repair.cu recomputes rows with infinities or NaN, and the elements marked in
// `flags`, as after split_gemm.cu: here an element is accurate if small elements of the operands, each with an absolute
// error of at most 2^-25 times less than 2^15, change it by less than the rounding of the others to 11 bits.
// A warp takes 16 rows of a tile of 128 x 128, four neighbouring columns a lane.
// Launch: 256 threads, any number of blocks.
#pragma once

#include "split_tiles.cuh"

constexpr int scale_columns = 128;

__device__ __forceinline__ void split_scale(const Target& to) {
    constexpr int ahead = 4;  // rows in flight
    const TileOrder order(to.m, to.n, scale_columns);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const bool packs = to.n % 4 == 0 && reinterpret_cast<i64>(to.c) % 16 == 0;
    for (u32 tile = blockIdx.x; tile < order.count(); tile += gridDim.x) {
        i64 first, col;
        order.at(tile, first, col);
        first += warp * rows_a_warp;
        col += lane * 4;
        SplitRow of_col[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            of_col[j] = col + j < to.n ? SplitRow::of(to.inverse_b[col + j]) : SplitRow::none();
        }
        bool flagged = false;
#pragma unroll 1
        for (int start = 0; start < rows_a_warp; start += ahead) {
            Pack<float, 4> values[ahead];
            SplitRow of_row[ahead];
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const i64 row = first + start + i;
                const float* from = to.c + row * to.n + col;
                of_row[i] = row < to.m ? SplitRow::of(to.inverse_a[row]) : SplitRow::none();
                if (packs && row < to.m && col < to.n) {
                    values[i] = load_pack<4>(from);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        values[i].v[j] = row < to.m && col + j < to.n ? from[j] : 0.0f;
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const i64 row = first + start + i;
                float* at = to.c + row * to.n + col;
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const float sum = values[i].v[j];
                    flagged |= fabsf(sum) < of_row[i].accurate_from() + of_col[j].accurate_from();
                    values[i].v[j] = scaled(sum, of_row[i].exponent() + of_col[j].exponent());
                }
                if (packs && row < to.m && col < to.n) {
                    store_pack<4>(at, values[i]);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        if (row < to.m && col + j < to.n) {
                            at[j] = values[i].v[j];
                        }
                    }
                }
            }
        }
        const u32 lanes = __ballot_sync(0xffffffffu, flagged);
        if (lane == 0) {
            to.flags[static_cast<i64>(tile) * warps_a_tile + warp] = lanes;
        }
    }
}
