// Running totals along rows: y[row][col] is x[row][0] + ... + x[row][col], or their product.
//
// x: (rows, cols), any strides. y: (rows, cols), C-contiguous. The order of operations depends on the columns alone.
// Consecutive columns are read at once: each warp scans 32 of them by shuffles, and combines them with all that lies before.
// scan_by_warps, a row for each warp: Threads threads, ceil(rows / (Threads / 32)) blocks.
// scan_by_blocks, a row for each block: Threads threads, `rows` blocks; threads of one block call it together.
#pragma once

#include "types.cuh"

// Operations, each with its identity. That of sums is -0.0, which leaves every number as it is, -0.0 too.
struct Plus {
    template <typename T>
    __device__ __forceinline__ static T identity() { return T(-0.0); }
    template <typename T>
    __device__ __forceinline__ static T combine(T a, T b) { return a + b; }
};

struct Times {
    template <typename T>
    __device__ __forceinline__ static T identity() { return T(1); }
    template <typename T>
    __device__ __forceinline__ static T combine(T a, T b) { return a * b; }
};

constexpr u32 whole_warp = 0xffffffffu;

// Combine the values of the lanes up to one's own. All lanes of a warp call it.
template <class Op, typename T>
__device__ __forceinline__ T scan_warp(T v) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const T before = __shfl_up_sync(whole_warp, v, by);
        v = lane >= by ? Op::combine(before, v) : v;
    }
    return v;
}

template <typename T, class Op, int Threads>
__device__ __forceinline__ void scan_by_warps(
    const T* x, i64 row_stride, i64 col_stride, T* y, i64 rows, i64 cols) {
    const int lane = threadIdx.x % 32;
    const i64 row = static_cast<i64>(blockIdx.x) * (Threads / 32) + threadIdx.x / 32;
    if (row >= rows) {
        return;
    }
    const T* const from = x + row * row_stride;
    T* const to = y + row * cols;
    T carry = Op::template identity<T>();
    for (i64 start = 0; start < cols; start += 32) {
        const i64 col = start + lane;
        const T mine = col < cols ? from[col * col_stride] : Op::template identity<T>();
        const T total = Op::combine(carry, scan_warp<Op>(mine));
        if (col < cols) {
            to[col] = total;
        }
        carry = __shfl_sync(whole_warp, total, 31);
    }
}

// A thread has Items columns, Threads apart, so that the block's warps leave 32 totals, which each warp then scans, one a lane.
template <typename T, class Op, int Threads>
__device__ __forceinline__ void scan_by_blocks(
    const T* x, i64 row_stride, i64 col_stride, T* y, i64 rows, i64 cols) {
    constexpr int Warps = Threads / 32, Items = 32 / Warps;
    static_assert(Warps * Items == 32, "one total a lane");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 row = blockIdx.x;
    const T* const from = x + row * row_stride;
    T* const to = y + row * cols;
    // Two sets of totals alternate: one is written again only after the barrier of the other, which every thread
    // reaches after its last read of the first.
    SHARED_BYTES(scratch, 2 * 32 * 8);
    T* totals = reinterpret_cast<T*>(scratch);
    T carry = Op::template identity<T>();
    for (i64 start = 0; start < cols; start += Threads * Items) {
        T mine[Items];
#pragma unroll
        for (int k = 0; k < Items; ++k) {
            const i64 col = start + k * Threads + threadIdx.x;
            mine[k] = col < cols ? from[col * col_stride] : Op::template identity<T>();
        }
#pragma unroll
        for (int k = 0; k < Items; ++k) {
            mine[k] = scan_warp<Op>(mine[k]);
            if (lane == 31) {
                totals[k * Warps + warp] = mine[k];
            }
        }
        __syncthreads();
        const T so_far = Op::combine(carry, scan_warp<Op>(totals[lane]));
#pragma unroll
        for (int k = 0; k < Items; ++k) {
            const int place = k * Warps + warp;
            const T before = __shfl_sync(whole_warp, so_far, place > 0 ? place - 1 : 0);
            const i64 col = start + k * Threads + threadIdx.x;
            if (col < cols) {
                to[col] = Op::combine(place > 0 ? before : carry, mine[k]);
            }
        }
        carry = __shfl_sync(whole_warp, so_far, 31);
        totals = reinterpret_cast<T*>(scratch) + (totals == reinterpret_cast<T*>(scratch) ? 32 : 0);
    }
}
