// The merge of what several blocks leave of each column.
#pragma once

#include "reductions.cuh"

// The totals of many parts of a column, in order; sums, of squares too, without what roundings make them too large.
template <class Totals>
struct Merged {
    Totals whole, excess;
    __device__ __forceinline__ void add(const Totals& part) { whole.merge(part, excess); }
};

// Merge the totals of all shares, which p.partial has as rows, and call p.finish for each column. Threads form groups of Width, a thread
// for each column: group k merges shares k, k + groups and so on, in order, then group 0 merges the groups in order.
// Launch: Threads threads, a multiple of Width; ceil(cols / Width) blocks.
template <class P, int Threads, int Width>
__device__ __forceinline__ void column_merge(const P& p) {
    typedef typename P::ColumnTotals Totals;
    static_assert(Threads % Width == 0, "whole groups");
    constexpr int groups = Threads / Width, ahead = sizeof(Totals) > 8 ? 4 : 16;  // loads in flight
    SHARED_BYTES(scratch, Threads * sizeof(Totals));
    Totals(*shared)[Width] = reinterpret_cast<Totals(*)[Width]>(scratch);
    const int place = threadIdx.x % Width, group = threadIdx.x / Width;
    const i64 col = static_cast<i64>(blockIdx.x) * Width + place;
    if (col < p.cols && group < p.shares) {
        Merged<Totals> merged = {p.partial[group * p.cols + col]};
        for (i64 share = group + groups; share < p.shares; share += ahead * groups) {
            Totals next[ahead];
#pragma unroll
            for (int k = 0; k < ahead; ++k) {
                if (share + k * groups < p.shares) {
                    next[k] = p.partial[(share + k * groups) * p.cols + col];
                }
            }
#pragma unroll
            for (int k = 0; k < ahead; ++k) {
                if (share + k * groups < p.shares) {
                    merged.add(next[k]);
                }
            }
        }
        shared[group][place] = merged.whole;
    }
    __syncthreads();
    if (col < p.cols && group == 0) {
        Merged<Totals> merged = {shared[0][place]};
        for (int k = 1; k < groups && k < p.shares; ++k) {
            merged.add(shared[k][place]);
        }
        p.finish(merged.whole, col);
    }
}
