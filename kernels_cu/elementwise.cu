// Row program without reductions: each thread computes V elements at a time, independently of all others.
//
// P: as in row_block.cu, with one stage.
// Launch: Threads threads, any number of blocks, each of which has neighbouring packs of V elements. V > 1 needs cols, all row
//   strides and all pointers to be multiples of V elements, or if P::shifted, rows that begin alike (Span).
#pragma once

#include "stages.cuh"

// V elements of N rows, `apart` from each other; `columns` holds what elements of all rows depend on.
template <class P, int N, int V, class Tile>
__device__ __forceinline__ void compute_rows(const P& p, const Tile& columns, i64 row, i64 apart, i64 col) {
    Tile tiles[N];
    typename P::Row r[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        tiles[i] = columns;
        p.begin(row + i * apart, r[i]);
        p.template load<V>(At<0>(), row + i * apart, col, tiles[i]);
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        typename P::Element e[V];
        compute_pack<P, 0, V>(p, tiles[i], row + i * apart, col, r[i], e);
        if (col == 0) {
            p.commit(row + i * apart, r[i]);
        }
    }
}

// V elements of one row.
template <class P, int V>
__device__ __forceinline__ void compute_row(const P& p, i64 row, i64 col) {
    auto columns = p.template tile<V>(At<0>());
    p.template load_columns<V>(At<0>(), col, columns);
    compute_rows<P, 1, V>(p, columns, row, 0, col);
}

// The packs of V elements of all rows, in order. A shifted row has as many as it touches where it begins with the last element
// of one (_thread_blocks counts the same); its first one and its last may lie partly outside, or if P::apart be read so.
template <class P, int V>
struct Packs {
    static constexpr bool shifted = Span<P, V, i64>::has_singles;
    const P& p;
    i64 packs_a_row, total;

    __device__ __forceinline__ explicit Packs(const P& program)
        : p(program), packs_a_row(shifted ? 1 + (p.cols + V - 2) / V : p.cols / V), total(p.rows * packs_a_row) {}

    // a / b, of no more than there are packs. Divisions take as long as many elements, those of 64 bits most.
    __device__ __forceinline__ i64 quotient(i64 a, i64 b) const {
        return total < (i64(1) << 31) ? static_cast<u32>(a) / static_cast<u32>(b) : a / b;
    }
    // Where pack k is: its row, and its number there; beyond `total`, where nothing is computed, they may be wrong.
    __device__ __forceinline__ void find(i64 k, i64& row, i64& number) const {
        row = p.rows == 1 ? 0 : quotient(k, packs_a_row);
        number = k - row * packs_a_row;
    }
    __device__ __forceinline__ void compute(i64 row, i64 number) const {
        i64 col = number * V;
        if constexpr (shifted) {
            const int before = p.template misaligned<V>(row);
            col -= before > 0 ? V - before : 0;
            constexpr int reach = P::apart ? 2 * V - 1 : V;  // as in Span
            if (col < 0 || col + reach > p.cols) {
                const i64 end = col + V < p.cols ? col + V : p.cols;
#pragma unroll 1
                for (col = col < 0 ? 0 : col; col < end; ++col) {
                    compute_row<P, 1>(p, row, col);
                }
                return;
            }
        }
        compute_row<P, V>(p, row, col);
    }
};

// V elements of every apart-th row from `row` on. What depends on the column alone is loaded once, and two rows at a time: with one a
// thread waits up to 8 % longer for its loads. Neighbouring rows take up to 6 % longer than rows that the whole grid is apart.
template <class P, int V>
__device__ __forceinline__ void compute_columns(const P& p, i64 row, i64 apart, i64 col) {
    auto columns = p.template tile<V>(At<0>());
    p.template load_columns<V>(At<0>(), col, columns);
#pragma unroll 1
    for (; row + apart < p.rows; row += 2 * apart) {
        compute_rows<P, 2, V>(p, columns, row, apart, col);
    }
    if (row < p.rows) {
        compute_rows<P, 1, V>(p, columns, row, apart, col);
    }
}

// Threads have a pack each, or several: those of the same columns in rows that are as far apart as all threads reach; or, where rows
// begin at different places in a pack or are too few for that, every Threads-th of a block's, in the order of the rows.
template <class P, int Threads, int V>
__device__ __forceinline__ void elementwise(const P& p) {
    const Packs<P, V> packs(p);
    const i64 threads = static_cast<i64>(gridDim.x) * Threads;
    i64 row, number;
    if (!packs.shifted && threads >= packs.packs_a_row) {
        const i64 apart = threads >= packs.total ? p.rows : packs.quotient(threads, packs.packs_a_row);
        packs.find(blockIdx.x * static_cast<i64>(Threads) + threadIdx.x, row, number);
        if (row < apart && number < packs.packs_a_row) {
            compute_columns<P, V>(p, row, apart, number * V);
        }
        return;
    }
    const i64 packs_a_thread = packs.total <= threads ? 1 : (packs.total + threads - 1) / threads;
    const i64 a_block = Threads * packs_a_thread;
    const i64 first = blockIdx.x * a_block + threadIdx.x, end_of_block = (blockIdx.x + 1) * a_block;
    const i64 end = end_of_block < packs.total ? end_of_block : packs.total;
    i64 row_step = 0, number_step = 0;  // to the next pack of this thread, one row more where it wraps
    packs.find(first, row, number);
    if (packs_a_thread > 1) {
        packs.find(Threads, row_step, number_step);
    }
#pragma unroll 1
    for (i64 k = first; k < end; k += Threads) {
        packs.compute(row, number);
        row += row_step;
        number += number_step;
        if (number >= packs.packs_a_row) {
            number -= packs.packs_a_row;
            ++row;
        }
    }
}
