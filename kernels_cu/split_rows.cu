// Rows of float32, split into f16 halves for split_gemm.cu: x = inverse (hi + 2^-11 lo), a power of two for each row.
//
// x is (rows, cols) with any row stride and unit column stride. Scaling brings a row's largest element to [2^14, 2^15), as
// far as a float can; `inverse` has what split_tiles.cuh says of a row. Elements of at least 2^-14 after scaling keep 22
// bits, smaller ones are right to 2^-36 and are counted. A row with infinities or NaN is marked and has halves 0.
//
// Layout of `tiles`, which knows nothing of the product's tiles: element k of a row is, in bytes, at
//   ((k / 64 * groups + row / 8) * 2 + part) * 1024 + row % 8 * 128 + (k % 64 / 8 ^ row % 8) * 16 + k % 8 * 2
// with groups = ceil(rows / 8), and part 0 for hi, 1 for lo. Rows are padded to 8 and columns to 64 by zeros, so there
// are ceil(cols / 64) * groups * 2048 bytes, aligned to 16.
// Launch: Threads * Rows threads, ceil(ceil(rows / 8) * 8 / Rows) blocks. Threads a power of two; Rows 1 if it is > 32.
// Columns up to Threads * Held * 8 are read once, those beyond twice.
#pragma once

#include "split_tiles.cuh"

// 8 neighbouring elements, as bits: a piece of a row of an atom.
struct Piece {
    u32 bits[8];

    __device__ __forceinline__ void load(const float* row, i64 col, i64 cols, bool aligned) {
        if (aligned && col + 8 <= cols) {
            const uint4 low = *reinterpret_cast<const uint4*>(row + col);
            const uint4 high = *reinterpret_cast<const uint4*>(row + col + 4);
            bits[0] = low.x, bits[1] = low.y, bits[2] = low.z, bits[3] = low.w;
            bits[4] = high.x, bits[5] = high.y, bits[6] = high.z, bits[7] = high.w;
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                bits[j] = col + j < cols ? __float_as_uint(row[col + j]) : 0u;
            }
        }
    }
    __device__ __forceinline__ u32 top() const {
        u32 largest = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            largest = max(largest, bits[j] & 0x7fffffffu);
        }
        return largest;
    }
};

// The halves of a piece; returns how many of its elements are small.
__device__ __forceinline__ u32 split(const Piece& piece, float scale, bool fine, uint4& hi, uint4& lo) {
    u32 h[4], l[4], small = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float x = fine ? exact_multiply_add(__uint_as_float(piece.bits[j]), scale, -0.0f) : 0.0f;
        small += (piece.bits[j] & 0x7fffffffu) != 0 && fabsf(x) < 0x1p-14f;
        const f16 near = narrow<f16>(x);
        const f16 rest = narrow<f16>((x - widen(near)) * 2048.0f);
        h[j / 2] = j % 2 ? h[j / 2] | static_cast<u32>(near.bits) << 16 : near.bits;
        l[j / 2] = j % 2 ? l[j / 2] | static_cast<u32>(rest.bits) << 16 : rest.bits;
    }
    hi = make_uint4(h[0], h[1], h[2], h[3]);
    lo = make_uint4(l[0], l[1], l[2], l[3]);
    return small;
}

// What all threads of a row make of their numbers, in shared memory for teams larger than a warp.
template <int Threads, class Combine>
__device__ __forceinline__ u32 of_row(u32 number, u32* slots, Combine combine) {
#pragma unroll
    for (int mask = 1; mask < Threads && mask < 32; mask *= 2) {
        number = combine(number, __shfl_xor_sync(0xffffffffu, number, mask));
    }
    if (Threads > 32) {
        if (threadIdx.x % 32 == 0) {
            slots[threadIdx.x / 32] = number;
        }
        __syncthreads();
        number = slots[0];
#pragma unroll
        for (int w = 1; w < Threads / 32; ++w) {
            number = combine(number, slots[w]);
        }
    }
    return number;
}

template <int Threads, int Rows, int Held>
__device__ __forceinline__ void split_rows(
    const float* x, i64 stride, char* tiles, float* inverse, i64 rows, i64 cols) {
    static_assert(Threads <= 32 || Rows == 1, "teams larger than a warp are blocks");
    const int rank = threadIdx.x % Threads;
    const i64 row = static_cast<i64>(blockIdx.x) * Rows + threadIdx.x / Threads;
    const i64 pieces = (cols + 63) / 64 * 8, groups = (rows + 7) / 8;
    const i64 columns = row < rows ? cols : 0;  // padding has none
    const float* from = x + row * stride;
    const bool aligned = reinterpret_cast<i64>(from) % 16 == 0;

    SHARED_BYTES(scratch, 2 * 32 * 4);
    u32* const slots = reinterpret_cast<u32*>(scratch);

    // Magnitudes as bits: their order is that of the numbers, and flushing subnormal numbers does not touch them.
    Piece held[Held];
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < Held; ++i) {
        held[i].load(from, static_cast<i64>(i * Threads + rank) * 8, columns, aligned);
    }
#pragma unroll
    for (int i = 0; i < Held; ++i) {
        top = max(top, held[i].top());
    }
    for (i64 p = Held * Threads + rank; p < pieces; p += Threads) {
        Piece piece;
        piece.load(from, p * 8, columns, aligned);
        top = max(top, piece.top());
    }
    top = of_row<Threads>(top, slots, [](u32 a, u32 b) { return max(a, b); });
    const int exponent = top >> 23;
    const int shift = top == 0 ? 0 : min(14 + 127 - exponent, 126);
    const bool fine = exponent < 255;
    const float scale = __uint_as_float(static_cast<u32>(127 + shift) << 23);
    u32 small = 0;
    char* to = tiles + row / 8 * 2048 + row % 8 * 128;
    const auto store = [&](const Piece& piece, i64 p) {
        uint4 hi, lo;
        small += split(piece, scale, fine, hi, lo);
        char* at = to + p / 8 * groups * 2048 + (p ^ row) % 8 * 16;
        *reinterpret_cast<uint4*>(at) = hi;
        *reinterpret_cast<uint4*>(at + 1024) = lo;
    };
#pragma unroll
    for (int i = 0; i < Held; ++i) {
        const int p = i * Threads + rank;
        if (p < pieces && row < groups * 8) {
            store(held[i], p);
        }
    }
    for (i64 p = Held * Threads + rank; p < pieces && row < groups * 8; p += Threads) {
        Piece piece;
        piece.load(from, p * 8, columns, aligned);
        store(piece, p);
    }
    small = of_row<Threads>(small, slots + 32, [](u32 a, u32 b) { return a + b; });
    if (rank == 0 && row < rows) {
        const SplitRow known = !fine ? SplitRow::marked() : top == 0 ? SplitRow::none() : SplitRow::finite(shift, small);
        inverse[row] = __uint_as_float(known.bits);
    }
}
