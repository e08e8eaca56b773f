// The rows and columns of a product that fp16 halves cannot hold, computed from the float32 operands themselves.
//
// split_rows.cu marks them: the inverse scale of such a row of an operand is NaN. A (m, k) and B (n, k) have any strides;
// C is (m, n), contiguous. Elements of C that need no repair are not touched. Sixteen marked rows are gathered at a time
// and multiplied with all rows of the other operand; every element is summed in one order, whichever others are marked.
// Numbers below the normal ones count.
// Launch: 256 threads, any number of blocks.
#pragma once

#include "types.cuh"

struct Matrix {
    const float* elements;
    i64 row_stride, col_stride;
    const float* inverse;
    i64 rows;

    __device__ __forceinline__ bool marked(i64 row) const { return row < rows && inverse[row] != inverse[row]; }
};

struct Repair {
    static constexpr int group = 16, depth = 128, pitch = depth + 4, threads = 256;
    static constexpr int each = group * depth / threads;  // elements of an operand that a thread moves
    static constexpr int bytes = 2 * group * pitch * 4;

    float (*left)[pitch];   // of the marked rows
    float (*right)[pitch];  // of the other operand
    float ahead[2][each];   // what is to come next

    __device__ __forceinline__ explicit Repair(char* memory)
        : left(reinterpret_cast<float (*)[pitch]>(memory)), right(left + group) {}

    __device__ __forceinline__ static float element(const Matrix& x, i64 row, i64 k, i64 cols) {
        return row >= 0 && row < x.rows && k < cols ? x.elements[row * x.row_stride + k * x.col_stride] : 0.0f;
    }

    __device__ __forceinline__ void fetch(
        const Matrix& some, const i64* chosen, const Matrix& all, i64 first, i64 start, i64 cols) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int at = i * threads + threadIdx.x, row = at / depth;
            const i64 k = start + at % depth;
            ahead[0][i] = element(some, chosen[row], k, cols);
            ahead[1][i] = element(all, first + row, k, cols);
        }
    }

    __device__ __forceinline__ void put() {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const int at = i * threads + threadIdx.x;
            left[at / depth][at % depth] = ahead[0][i];
            right[at / depth][at % depth] = ahead[1][i];
        }
    }

    // Products of 16 chosen rows (-1: none) with 16 rows from `first`; each warp has 4 x 8 of them, each lane every 32nd
    // four elements of their sums. steps: how far apart the results lie, for the chosen rows and for the others.
    __device__ __forceinline__ void multiply(
        const Matrix& some, const i64* chosen, const Matrix& all, i64 first, i64 cols, float* c, i64 some_step, i64 all_step) {
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
        fetch(some, chosen, all, first, 0, cols);
        for (i64 start = 0; start < cols; start += depth) {
            __syncthreads();  // nobody reads what was there
            put();
            __syncthreads();
            if (start + depth < cols) {
                fetch(some, chosen, all, first, start + depth, cols);
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
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                float sum = sums[i][j];
#pragma unroll
                for (int mask = 16; mask > 0; mask /= 2) {
                    sum = exact_multiply_add(__shfl_xor_sync(0xffffffffu, sum, mask), 1.0f, sum);
                }
                const i64 row = chosen[top + i], other = first + begin + j;
                if (lane == 0 && row >= 0 && other < all.rows) {
                    c[row * some_step + other * all_step] = sum;
                }
            }
        }
    }
};

// Every marked row of `some` against all rows of `all`.
__device__ __forceinline__ void repair_rows(
    Repair& repair, i64* chosen, u32* marks, const Matrix& some, const Matrix& all, i64 cols, float* c, i64 some_step,
    i64 all_step) {
    int count = 0;
    const auto flush = [&] {
        for (i64 first = static_cast<i64>(blockIdx.x) * Repair::group; first < all.rows;
             first += static_cast<i64>(gridDim.x) * Repair::group) {
            repair.multiply(some, chosen, all, first, cols, c, some_step, all_step);
        }
        __syncthreads();
        if (threadIdx.x < Repair::group) {
            chosen[threadIdx.x] = -1;
        }
        __syncthreads();
        count = 0;
    };
    for (i64 from = 0; from < some.rows; from += Repair::threads) {
        const u32 mask = __ballot_sync(0xffffffffu, some.marked(from + threadIdx.x));
        if (threadIdx.x % 32 == 0) {
            marks[threadIdx.x / 32] = mask;
        }
        __syncthreads();
        for (int at = 0; at < Repair::threads; ++at) {
            const u32 rest = marks[at / 32] >> at % 32;
            if (rest == 0) {
                at |= 31;
            } else if (rest & 1) {
                if (threadIdx.x == 0) {
                    chosen[count] = from + at;
                }
                if (++count == Repair::group) {
                    __syncthreads();
                    flush();
                }
            }
        }
        __syncthreads();
    }
    if (count > 0) {
        flush();
    }
}

__device__ __forceinline__ void split_repair(const Matrix& a, const Matrix& b, float* c, i64 cols) {
    SHARED_BYTES(memory, Repair::bytes + 16 * 8 + 8 * 4);
    i64* chosen = reinterpret_cast<i64*>(memory + Repair::bytes);
    u32* marks = reinterpret_cast<u32*>(chosen + 16);
    bool any = false;
    for (i64 row = threadIdx.x; row < a.rows; row += Repair::threads) {
        any |= a.marked(row);
    }
    for (i64 row = threadIdx.x; row < b.rows; row += Repair::threads) {
        any |= b.marked(row);
    }
    const u32 mask = __ballot_sync(0xffffffffu, any);
    if (threadIdx.x % 32 == 0) {
        marks[threadIdx.x / 32] = mask;
    }
    if (threadIdx.x < 16) {
        chosen[threadIdx.x] = -1;
    }
    __syncthreads();
    u32 all = 0;
    for (int w = 0; w < Repair::threads / 32; ++w) {
        all |= marks[w];
    }
    __syncthreads();
    if (all == 0) {
        return;
    }
    Repair repair(memory);
    repair_rows(repair, chosen, marks, a, b, cols, c, b.rows, 1);
    repair_rows(repair, chosen, marks, b, a, cols, c, 1, b.rows);
}
