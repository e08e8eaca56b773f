// Repair of C = A B' after split_gemm.cu: recompute in float32 what the hi/lo split cannot give (split_exact.cuh): rows with
// infinities or NaN, and the elements that split_gemm.cu flagged.
//
// A (m, k), B (n, k): any strides. C: (m, n), contiguous; only repaired elements are written.
// Launch: 256 threads, any number of blocks.
#pragma once

#include "split_exact.cuh"

// Repair the flagged elements of a warp's part of a tile. An element is flagged if its sum, which is C without the scales, is
// below the bounds of both rows together; where C has underflowed, the sum is too small as well.
__device__ __forceinline__ void repair_part(
    const Matrix& a, const Matrix& b, i64 cols, float* c, const TileOrder& order, i64 part) {
    const int lane = threadIdx.x % 32, width = order.columns;
    i64 first_row, first_col;
    order.at(static_cast<u32>(part / warps_a_tile), first_row, first_col);
    first_row += part % warps_a_tile * rows_a_warp;
    // Every warp looks at 32 elements at a time, and repairs the flagged ones together.
    for (int at = threadIdx.x - lane; at < rows_a_warp * width; at += Repair::threads) {
        const i64 row = first_row + (at + lane) / width, col = first_col + (at + lane) % width;
        bool flagged = false;
        if (at + lane < rows_a_warp * width && row < a.rows && col < b.rows && !a.marked(row) && !b.marked(col)) {
            const SplitRow of_a = SplitRow::of(a.inverse[row]), of_b = SplitRow::of(b.inverse[col]);
            const float sum = scaled(c[row * b.rows + col], 2 * 254 - of_a.exponent() - of_b.exponent());
            flagged = fabsf(sum) < of_a.accurate_from() + of_b.accurate_from();
        }
        u32 lanes = __ballot_sync(0xffffffffu, flagged);
        for (int l = 0; lanes != 0; ++l, lanes >>= 1) {
            if (lanes & 1) {
                repair_element(a, first_row + (at + l) / width, b, first_col + (at + l) % width, cols, c);
            }
        }
    }
}

// Repair the parts of tiles that have flags; a block looks at as many flags at a time as it has threads.
__device__ __forceinline__ void repair_flagged(
    const Matrix& a, const Matrix& b, i64 cols, float* c, const u32* flags, u32* marks, int width) {
    const TileOrder order(a.rows, b.rows, tile_rows, width);
    const i64 parts = static_cast<i64>(order.count()) * warps_a_tile;
    for (i64 first = blockIdx.x; first < parts; first += static_cast<i64>(gridDim.x) * Repair::threads) {
        const i64 own = first + static_cast<i64>(threadIdx.x) * gridDim.x;
        const u32 mask = __ballot_sync(0xffffffffu, own < parts && flags[own] != 0);
        if (threadIdx.x % 32 == 0) {
            marks[threadIdx.x / 32] = mask;
        }
        __syncthreads();
        for (int at = 0; at < Repair::threads; ++at) {
            const u32 rest = marks[at / 32] >> at % 32;
            if (rest == 0) {
                at |= 31;
            } else if (rest & 1) {
                repair_part(a, b, cols, c, order, first + static_cast<i64>(at) * gridDim.x);
            }
        }
        __syncthreads();
    }
}

// The kernel: repair flagged elements, then marked rows of either operand.
__device__ __forceinline__ void split_repair(
    const Matrix& a, const Matrix& b, float* c, i64 cols, const u32* flags, i64 width) {
    // Tiles of both operands, the 16 chosen rows, and a mask of marked rows for each warp.
    SHARED_BYTES(memory, Repair::bytes + 16 * 8 + 8 * 4);
    i64* chosen = reinterpret_cast<i64*>(memory + Repair::bytes);
    u32* marks = reinterpret_cast<u32*>(chosen + 16);
    if (threadIdx.x < 16) {
        chosen[threadIdx.x] = -1;
    }
    const bool any = any_of_block(a.any_marked(Repair::threads) | b.any_marked(Repair::threads), marks);
    repair_flagged(a, b, cols, c, flags, marks, static_cast<int>(width));
    if (!any) {
        return;
    }
    Repair repair(memory);
    repair_rows(repair, chosen, marks, a, b, cols, c, b.rows, 1);
    repair_rows(repair, chosen, marks, b, a, cols, c, 1, b.rows);
}
