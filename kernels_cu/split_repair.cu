// Repair of a product after split_gemm.cu, whose struct P it shares: compute in float32 what that kernel could not give
// (split_exact.cuh), and give it to the row program: rows and columns with infinities or NaN, and the elements that are noted in
// `flags` (split_doubts.cuh).
//
// a (m, k), b (n, k): any strides.
// Launch: 256 threads, any number of blocks.
#pragma once

#include "split_exact.cuh"
#include "stages.cuh"

// Run the row program on one element of the product, by one thread.
template <class P>
__device__ __forceinline__ void finish_element(const P& p, i64 row, i64 col, float element) {
    typename P::Row r;
    auto tile = p.template tile<1>(At<0>());
    p.begin(row, r);
    p.template load<1>(At<0>(), row, col, tile);
    p.template load_columns<1>(At<0>(), col, tile);
    tile.product.v[0] = element;
    p.template store<1>(At<0>(), row, col, compute_held<P, 1>(p, tile, row, col, r).out);
}

// Repair the doubtful elements of a warp's part of a tile. Those of a lane, 32 at a time, are repaired by one warp.
template <class P>
__device__ __forceinline__ void repair_part(const P& p, const TileOrder& order, i64 part) {
    const int lane = threadIdx.x % 32, words = words_of_lane(static_cast<int>(p.width));
    const u32* const bits = p.flags + (static_cast<i64>(order.count()) * warps_a_tile + part * 32 * words);
    i64 first_row, first_col;
    order.at(static_cast<u32>(part / warps_a_tile), first_row, first_col);
    first_row += part % warps_a_tile * rows_a_warp;
    const u32 lanes = p.flags[part];
    for (int at = threadIdx.x / 32; at < 32 * words; at += Repair::threads / 32) {
        const int of_lane = at / words;
        u32 rest = lanes >> of_lane & 1 ? bits[at] : 0;
        for (int k = at % words * 32; rest != 0; ++k, rest >>= 1) {
            if (rest & 1) {
                const i64 row = first_row + of_lane / 4 + row_of_sum(k);
                const i64 col = first_col + of_lane % 4 * 2 + column_of_sum(k);
                const float element = exact_element(p.a, row, p.b, col, p.depth);
                if (lane == 0) {
                    finish_element(p, row, col, element);
                }
            }
        }
    }
}

// Repair the parts of tiles that have doubtful elements; a block looks at as many at a time as it has threads.
template <class P>
__device__ __forceinline__ void repair_doubtful(const P& p, u32* marks) {
    const TileOrder order(p.rows, p.cols, tile_rows, static_cast<int>(p.width));
    const i64 parts = static_cast<i64>(order.count()) * warps_a_tile;
    for (i64 first = blockIdx.x; first < parts; first += static_cast<i64>(gridDim.x) * Repair::threads) {
        const i64 own = first + static_cast<i64>(threadIdx.x) * gridDim.x;
        const u32 mask = __ballot_sync(0xffffffffu, own < parts && p.flags[own] != 0);
        if (threadIdx.x % 32 == 0) {
            marks[threadIdx.x / 32] = mask;
        }
        __syncthreads();
        for (int at = 0; at < Repair::threads; ++at) {
            const u32 rest = marks[at / 32] >> at % 32;
            if (rest == 0) {
                at |= 31;
            } else if (rest & 1) {
                repair_part(p, order, first + static_cast<i64>(at) * gridDim.x);
            }
        }
        __syncthreads();
    }
}

// The kernel: repair doubtful elements, then marked rows of either operand.
template <class P>
__device__ __forceinline__ void split_repair(const P& p) {
    // Tiles of both operands, the 16 chosen rows, and a mask of marked rows for each warp.
    SHARED_BYTES(memory, Repair::bytes + 16 * 8 + 8 * 4);
    i64* chosen = reinterpret_cast<i64*>(memory + Repair::bytes);
    u32* marks = reinterpret_cast<u32*>(chosen + 16);
    if (threadIdx.x < 16) {
        chosen[threadIdx.x] = -1;
    }
    const bool any = any_of_block(p.a.any_marked(Repair::threads) | p.b.any_marked(Repair::threads), marks);
    repair_doubtful(p, marks);
    if (any) {
        repair_marked(memory, chosen, marks, p.a, p.b, p.depth, [&](i64 row, i64 col, float element) {
            finish_element(p, row, col, element);
        });
    }
}
