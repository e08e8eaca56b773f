// Row program without reductions: each thread computes V elements at a time, independently of all others.
//
// P: as in row_block.cu, with one stage.
// Launch: Threads threads, any number of blocks (grid-stride loop over packs of V elements). V > 1 needs cols, all row
//   strides and all pointers to be multiples of V elements.
#pragma once

#include "stages.cuh"

template <class P, int Threads, int V>
__device__ __forceinline__ void elementwise(const P& p) {
    const i64 packs = p.cols / V;
    const i64 total = p.rows * packs;
    const bool small = total < (i64(1) << 31);
    for (i64 k = static_cast<i64>(blockIdx.x) * Threads + threadIdx.x; k < total;
         k += static_cast<i64>(gridDim.x) * Threads) {
        // 64-bit division is many times slower than 32-bit.
        const i64 row = small ? static_cast<i64>(static_cast<u32>(k) / static_cast<u32>(packs)) : k / packs;
        const i64 col = (k - row * packs) * V;
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
}
