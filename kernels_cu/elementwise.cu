// Row program without reductions: each thread computes V elements at a time, independently of all others.
//
// P: as in row_block.cu, with one stage.
// Launch: Threads threads, any number of blocks (grid-stride loop over packs of V elements). V > 1 needs cols, all row
//   strides and all pointers to be multiples of V elements, or if P::shifted, rows that begin alike (Span).
#pragma once

#include "stages.cuh"

// Compute V elements at (row, col).
template <int V, class P>
__device__ __forceinline__ void compute_elements(const P& p, i64 row, i64 col) {
    typename P::Row r;
    typename P::Element e[V];
    p.begin(row, r);
    auto tile = p.template tile<V>(At<0>());
    p.template load<V>(At<0>(), row, col, tile);
    p.template load_columns<V>(At<0>(), col, tile);
    compute_pack<P, 0, V>(p, tile, row, col, r, e);
    if (col == 0) {
        p.commit(row, r);
    }
}

template <class P, int Threads, int V>
__device__ __forceinline__ void elementwise(const P& p) {
    constexpr bool shifted = Span<P, V, i64>::has_singles;
    // Of a shifted row the first pack and the last may lie partly outside, and then have single elements.
    const i64 packs = shifted ? 1 + (p.cols + V - 2) / V : p.cols / V;
    const i64 total = p.rows * packs;
    const bool small = total < (i64(1) << 31);
    for (i64 k = static_cast<i64>(blockIdx.x) * Threads + threadIdx.x; k < total;
         k += static_cast<i64>(gridDim.x) * Threads) {
        // 64-bit division is many times slower than 32-bit.
        const i64 row = small ? static_cast<i64>(static_cast<u32>(k) / static_cast<u32>(packs)) : k / packs;
        i64 col = (k - row * packs) * V;
        if constexpr (shifted) {
            const int before = p.template misaligned<V>(row);
            col -= before > 0 ? V - before : 0;
            if (col < 0 || col + V > p.cols) {
                const i64 end = col + V < p.cols ? col + V : p.cols;
                for (col = col < 0 ? 0 : col; col < end; ++col) {
                    compute_elements<1>(p, row, col);
                }
                continue;
            }
        }
        compute_elements<V>(p, row, col);
    }
}
