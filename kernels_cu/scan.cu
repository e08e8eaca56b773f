// Running totals along rows: y[row][col] is x[row][0] + ... + x[row][col], or their product.
//
// x: (rows, cols), any strides. y: (rows, cols), C-contiguous. The order of operations depends on the columns alone.
// Threads consecutive columns are read at once: each warp scans its own, and adds what lies before them.
// Launch of scan_by_warps: Threads threads, ceil(rows / (Threads / 32)) blocks; of scan_by_blocks: Threads threads, `rows` blocks.
#pragma once

#include "types.cuh"

// -0 leaves every number as it is, -0 too.
struct Plus {
    template <typename T>
    __device__ __forceinline__ static T none() { return T(-0.0); }
    template <typename T>
    __device__ __forceinline__ static T of(T a, T b) { return a + b; }
};

struct Times {
    template <typename T>
    __device__ __forceinline__ static T none() { return T(1); }
    template <typename T>
    __device__ __forceinline__ static T of(T a, T b) { return a * b; }
};

constexpr u32 whole_warp = 0xffffffffu;

// Combine the values of the lanes up to one's own.
template <class Op, typename T>
__device__ __forceinline__ T scan_warp(T v) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int by = 1; by < 32; by *= 2) {
        const T before = __shfl_up_sync(whole_warp, v, by);
        v = lane >= by ? Op::of(before, v) : v;
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
    T carry = Op::template none<T>();
    for (i64 start = 0; start < cols; start += 32) {
        const i64 col = start + lane;
        const T mine = col < cols ? from[col * col_stride] : Op::template none<T>();
        const T total = Op::of(carry, scan_warp<Op>(mine));
        if (col < cols) {
            to[col] = total;
        }
        carry = __shfl_sync(whole_warp, total, 31);
    }
}

// A thread has Items columns, Threads apart, so that the block's warps leave a total for each lane of a warp.
template <typename T, class Op, int Threads>
__device__ __forceinline__ void scan_by_blocks(
    const T* x, i64 row_stride, i64 col_stride, T* y, i64 rows, i64 cols) {
    constexpr int Warps = Threads / 32, Items = 32 / Warps;
    static_assert(Warps * Items == 32, "each warp scans the totals, one a lane");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 row = blockIdx.x;
    const T* const from = x + row * row_stride;
    T* const to = y + row * cols;
    // Two sets of totals alternate: one is written again only after the barrier of the other, which every thread
    // reaches after its last read of the first.
    SHARED_BYTES(scratch, 2 * 32 * 8);
    T* totals = reinterpret_cast<T*>(scratch);
    T carry = Op::template none<T>();
    for (i64 start = 0; start < cols; start += Threads * Items) {
        T mine[Items];
#pragma unroll
        for (int k = 0; k < Items; ++k) {
            const i64 col = start + k * Threads + threadIdx.x;
            mine[k] = col < cols ? from[col * col_stride] : Op::template none<T>();
        }
#pragma unroll
        for (int k = 0; k < Items; ++k) {
            mine[k] = scan_warp<Op>(mine[k]);
            if (lane == 31) {
                totals[k * Warps + warp] = mine[k];
            }
        }
        __syncthreads();
        const T so_far = Op::of(carry, scan_warp<Op>(totals[lane]));
#pragma unroll
        for (int k = 0; k < Items; ++k) {
            const int place = k * Warps + warp;
            const T before = __shfl_sync(whole_warp, so_far, place > 0 ? place - 1 : 0);
            const i64 col = start + k * Threads + threadIdx.x;
            if (col < cols) {
                to[col] = Op::of(place > 0 ? before : carry, mine[k]);
            }
        }
        carry = __shfl_sync(whole_warp, so_far, 31);
        totals = reinterpret_cast<T*>(scratch) + (totals == reinterpret_cast<T*>(scratch) ? 32 : 0);
    }
}
