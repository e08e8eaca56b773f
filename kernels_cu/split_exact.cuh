// Products in float32 of the rows and elements that split operands cannot give.
//
// Rows that a split in two parts marked (infinities or NaN) are gathered sixteen at a time and multiplied with all rows of the
// other operand, by split_repair.cu. Single elements are summed by a warp each, there and, of operands in one part, in
// split_finish.cu and gemm_scales.cuh. Both sum in the same order, so that no element depends on which others are repaired.
// Subnormal numbers count.
#pragma once

#include "split_doubts.cuh"

// The sum of what the lanes of a warp have.
__device__ __forceinline__ float sum_of_lanes(float sum) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        sum = exact_multiply_add(__shfl_xor_sync(0xffffffffu, sum, mask), 1.0f, sum);
    }
    return sum;
}

// The product of 16 marked rows of one operand with 16 rows of the other, in tiles of 128 columns, by a block of 256 threads.
struct Repair {
    static constexpr int group = 16, depth = 128, pitch = depth + 4, threads = 256;
    static constexpr int per_thread = group * depth / threads;  // elements of an operand that a thread moves
    static constexpr int bytes = 2 * group * pitch * 4;

    float (*left)[pitch];             // tile of the chosen rows, in shared memory
    float (*right)[pitch];            // tile of the other operand
    float prefetched[2][per_thread];  // the next tiles of both

    __device__ __forceinline__ explicit Repair(char* memory)
        : left(reinterpret_cast<float (*)[pitch]>(memory)), right(left + group) {}

    __device__ __forceinline__ static float element(const Matrix& x, i64 row, i64 k, i64 cols) {
        return row >= 0 && row < x.rows && k < cols ? x.elements[row * x.row_stride + k * x.col_stride] : 0.0f;
    }

    // Load the next tiles to registers.
    __device__ __forceinline__ void fetch(
        const Matrix& x, const i64* chosen, const Matrix& other, i64 first, i64 start, i64 cols) {
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            const int at = i * threads + threadIdx.x, row = at / depth;
            const i64 k = start + at % depth;
            prefetched[0][i] = element(x, chosen[row], k, cols);
            prefetched[1][i] = element(other, first + row, k, cols);
        }
    }

    // Store the tiles from registers to shared memory.
    __device__ __forceinline__ void put() {
#pragma unroll
        for (int i = 0; i < per_thread; ++i) {
            const int at = i * threads + threadIdx.x;
            left[at / depth][at % depth] = prefetched[0][i];
            right[at / depth][at % depth] = prefetched[1][i];
        }
    }

    // Multiply 16 chosen rows of x (-1: none) with 16 rows of `other` from `first`: 4 x 8 per warp, of which each lane
    // sums every 32nd group of four elements. Lanes call store(row of x, row of other, element).
    template <class Store>
    __device__ __forceinline__ void multiply(
        const Matrix& x, const i64* chosen, const Matrix& other, i64 first, i64 cols, const Store& store) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        const int top = warp / 2 * 4, begin = warp % 2 * 8;
        float sums[4][8];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                sums[i][j] = 0.0f;
            }
        }
        for (i64 start = -depth; start < cols; start += depth) {
            if (start >= 0) {
                __syncthreads();  // all threads have read the previous tiles
                put();
                __syncthreads();
            }
            if (start + depth < cols) {
                fetch(x, chosen, other, first, start + depth, cols);
            }
            if (start < 0) {
                continue;
            }
            Pack<float, 4> a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                a[i] = load_pack<4>(&left[top + i][4 * lane]);
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const Pack<float, 4> b = load_pack<4>(&right[begin + j][4 * lane]);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int q = 0; q < 4; ++q) {
                        sums[i][j] = exact_multiply_add(a[i].v[q], b.v[q], sums[i][j]);
                    }
                }
            }
        }
        // Each lane takes one of the 32 elements.
        float element = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float sum = sum_of_lanes(sums[i][j]);
                element = lane == 8 * i + j ? sum : element;
            }
        }
        const i64 row = chosen[top + lane / 8], other_row = first + begin + lane % 8;
        if (row >= 0 && other_row < other.rows) {
            store(row, other_row, element);
        }
    }
};

// Whether something holds for any thread of a block; `marks` has a word for each warp.
__device__ __forceinline__ bool any_of_block(bool own, u32* marks) {
    const u32 mask = __ballot_sync(0xffffffffu, own);
    if (threadIdx.x % 32 == 0) {
        marks[threadIdx.x / 32] = mask;
    }
    __syncthreads();
    u32 all = 0;
    for (int w = 0; w < Repair::threads / 32; ++w) {
        all |= marks[w];
    }
    __syncthreads();
    return all != 0;
}

// Multiply every marked row of x with all rows of `other`, and give the elements to `store` as Repair::multiply does.
template <class Store>
__device__ __forceinline__ void repair_rows(
    Repair& repair, i64* chosen, u32* marks, const Matrix& x, const Matrix& other, i64 cols, const Store& store) {
    int count = 0;
    for (i64 from = 0; from < x.rows; from += Repair::threads) {
        const u32 mask = __ballot_sync(0xffffffffu, x.marked(from + threadIdx.x));
        if (threadIdx.x % 32 == 0) {
            marks[threadIdx.x / 32] = mask;
        }
        __syncthreads();
        const bool last = from + Repair::threads >= x.rows;
        for (int at = 0; at <= Repair::threads; ++at) {
            if (at < Repair::threads) {
                const u32 rest = marks[at / 32] >> at % 32;
                if (rest == 0) {
                    at |= 31;
                } else if (rest & 1) {
                    if (threadIdx.x == 0) {
                        chosen[count] = from + at;
                    }
                    ++count;
                }
            }
            if (count == Repair::group || (at == Repair::threads && last && count > 0)) {
                __syncthreads();
                for (i64 first = static_cast<i64>(blockIdx.x) * Repair::group; first < other.rows;
                     first += static_cast<i64>(gridDim.x) * Repair::group) {
                    repair.multiply(x, chosen, other, first, cols, store);
                }
                __syncthreads();
                if (threadIdx.x < Repair::group) {
                    chosen[threadIdx.x] = -1;
                }
                __syncthreads();
                count = 0;
            }
        }
        __syncthreads();
    }
}

// Multiply the marked rows of both operands with all rows of the other one; store(row of a, row of b, element) gets each
// element once. The code is in the kernel once, for both turns and for whole groups and the last: it is long, and seldom runs.
template <class Store>
__device__ __forceinline__ void repair_marked(
    char* memory, i64* chosen, u32* marks, const Matrix& a, const Matrix& b, i64 cols, const Store& store) {
    Repair repair(memory);
#pragma unroll 1
    for (int turn = 0; turn < 2; ++turn) {
        const Matrix x = turn == 0 ? a : b, other = turn == 0 ? b : a;
        repair_rows(repair, chosen, marks, x, other, cols, [&](i64 at_x, i64 at_other, float element) {
            const i64 row = turn == 0 ? at_x : at_other, col = turn == 0 ? at_other : at_x;
            if (turn == 0 || !a.marked(row)) {
                store(row, col, element);
            }
        });
    }
}

// Recompute one element, by a warp that sums in the order of Repair::multiply; all of its lanes get it.
__device__ __forceinline__ float exact_element(const Matrix& a, i64 row, const Matrix& b, i64 col, i64 cols) {
    const int lane = threadIdx.x % 32;
    float sum = 0.0f;
    for (i64 start = 0; start < cols; start += Repair::depth) {
#pragma unroll
        for (int q = 0; q < 4; ++q) {
            const i64 k = start + 4 * lane + q;
            sum = exact_multiply_add(Repair::element(a, row, k, cols), Repair::element(b, col, k, cols), sum);
        }
    }
    return sum_of_lanes(sum);
}
