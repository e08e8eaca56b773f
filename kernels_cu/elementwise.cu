// Row program without reductions: each thread computes V elements at a time, independently of all others.
//
// P: as in row_block.cu, with one stage.
// Launch: Threads threads, any number of blocks, each of which has neighbouring packs of V elements. V > 1 needs cols, all row
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

// The packs of V elements of all rows, in order. Of a shifted row the first one and the last may lie partly outside.
template <class P, int V>
struct Packs {
    static constexpr bool shifted = Span<P, V, i64>::has_singles;
    const P& p;
    i64 a_row, total;

    __device__ __forceinline__ explicit Packs(const P& program)
        : p(program), a_row(shifted ? 1 + (p.cols + V - 2) / V : p.cols / V), total(p.rows * a_row) {}

    // Where pack k is: its row, and its number there. Divisions take as long as many elements, those of 64 bits most.
    __device__ __forceinline__ void find(i64 k, i64& row, i64& number) const {
        row = p.rows == 1 ? 0 : total < (i64(1) << 31) ? static_cast<u32>(k) / static_cast<u32>(a_row) : k / a_row;
        number = k - row * a_row;
    }
    __device__ __forceinline__ void compute(i64 row, i64 number) const {
        i64 col = number * V;
        if constexpr (shifted) {
            const int before = p.template misaligned<V>(row);
            col -= before > 0 ? V - before : 0;
            if (col < 0 || col + V > p.cols) {
                const i64 end = col + V < p.cols ? col + V : p.cols;
#pragma unroll 1
                for (col = col < 0 ? 0 : col; col < end; ++col) {
                    compute_elements<1>(p, row, col);
                }
                return;
            }
        }
        compute_elements<V>(p, row, col);
    }
};

template <class P, int Threads, int V>
__device__ __forceinline__ void elementwise(const P& p) {
    const Packs<P, V> packs(p);
    const i64 threads = static_cast<i64>(gridDim.x) * Threads;
    const i64 a_thread = packs.total <= threads ? 1 : (packs.total + threads - 1) / threads;
    const i64 first = blockIdx.x * (Threads * a_thread) + threadIdx.x, of_block = (blockIdx.x + 1) * (Threads * a_thread);
    const i64 end = of_block < packs.total ? of_block : packs.total;
    i64 row, number, rows_on = 0, numbers_on = 0;  // from a pack of this thread to its next
    packs.find(first, row, number);
    if (a_thread > 1) {
        packs.find(Threads, rows_on, numbers_on);
    }
#pragma unroll 1
    for (i64 k = first; k < end; k += Threads) {
        packs.compute(row, number);
        row += rows_on;
        number += numbers_on;
        if (number >= packs.a_row) {
            number -= packs.a_row;
            ++row;
        }
    }
}
