// Split of a row-major float32 operand into one or two f16 parts: x = inverse (hi + 2^-11 lo), a power of two for each row.
//
// x: (rows, cols), any row stride, unit column stride.
// tiles, inverse: the split operand, see split_pieces.cuh.
// Columns up to Threads * Held * 8 are read once, those beyond twice.
// Launch: Threads * Rows threads, any number of blocks: those beyond ceil(rows / 8) * 8 / Rows have no work. Threads is a power
//   of two; Rows divides 8, and is 1 if Threads > 32.
#pragma once

#include "split_pieces.cuh"

// Reduce a number of each thread of a row to one that all have; for more threads than a warp's through `slots`, 32 words that no
// thread still reads.
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

// Split one row, or padding behind the rows. Each of `Threads` threads keeps its first `Held` pieces of it in registers between
// the two passes. `slots` are 64 words, half of them for each of two reductions. The call for the next row may use them at
// once: no thread gets past the barrier of one reduction before all have read what the one before it left in the other half.
template <int Threads, int Held, int Parts>
__device__ __forceinline__ void split_row(
    const float* x, i64 stride, char* tiles, float* inverse, i64 row, i64 rows, i64 cols, u32* slots) {
    static_assert(Threads % 8 == 0, "neighbouring threads have the 8 pieces of 64 columns");
    static_assert(Held <= 32, "with_lo has a bit for each");
    const int rank = threadIdx.x % Threads;
    const i64 pieces = (cols + 63) / 64 * 8, groups = (rows + 7) / 8;
    const i64 columns = row < rows ? cols : 0;  // padding rows read nothing
    const float* from = x + row * stride;
    const bool aligned = reinterpret_cast<i64>(from) % 16 == 0;

    // Compare magnitudes as bits: their order is that of the numbers, and subnormal numbers are not flushed.
    Piece held[Held];
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < Held; ++i) {
        held[i].load(from, static_cast<i64>(i * Threads + rank) * 8, columns, aligned);
    }
#pragma unroll
    for (int i = 0; i < Held; ++i) {
        top = max(top, held[i].template top<Parts>());
    }
    for (i64 p = Held * Threads + rank; p < pieces; p += Threads) {
        Piece piece;
        piece.load(from, p * 8, columns, aligned);
        top = max(top, piece.template top<Parts>());
    }
    top = of_row<Threads>(top, slots, [](u32 a, u32 b) { return max(a, b); });
    const RowScale scale(top);
    u32 found = 0;  // see RowFindings
    u8* const marks = lo_marks(inverse, groups) + row;
    u32 with_lo = 0;  // a bit for each piece that a thread holds: whether lo of the 64 columns around it is not zero
    const auto store = [&](const Piece& piece, i64 p) {
        uint4 hi, lo;
        found = RowFindings::both(found, split<Parts>(piece, scale, hi, lo));
        char* at = piece_at<Parts>(tiles, row, p, groups, pieces);
        *reinterpret_cast<uint4*>(at) = hi;
        if (Parts == 2) {
            *reinterpret_cast<uint4*>(at + groups * 1024) = lo;
            const u32 neighbours = 0xffu << threadIdx.x % 32 / 8 * 8;
            const u32 any = __ballot_sync(neighbours, any_number(lo)) & neighbours;
            found |= RowFindings::of_block(any != 0);
            return any != 0;
        }
        return false;
    };
    const auto mark = [&](i64 p, bool has_lo) {
        if (Parts == 2 && rank % 8 == 0) {
            marks[p * groups] = has_lo;
        }
    };
#pragma unroll
    for (int i = 0; i < Held; ++i) {
        const int p = i * Threads + rank;
        if (p < pieces) {
            with_lo |= static_cast<u32>(store(held[i], p)) << i;
        }
    }
    for (i64 p = Held * Threads + rank; p < pieces; p += Threads) {
        Piece piece;
        piece.load(from, p * 8, columns, aligned);
        mark(p, store(piece, p));
    }
    found = of_row<Threads>(found, slots + 32, [](u32 a, u32 b) { return RowFindings::both(a, b); });
    const float entry = scale.inverse<Parts>(found);
    if (!SplitRow::of(entry).lo_everywhere()) {  // else marks are not read (Lo::everywhere)
#pragma unroll
        for (int i = 0; i < Held; ++i) {
            const int p = i * Threads + rank;
            if (p < pieces) {
                mark(p, with_lo >> i & 1);
            }
        }
    }
    if (rank == 0 && row < rows) {
        inverse[row] = entry;
    }
}

template <int Threads, int Rows, int Held, int Parts>
__device__ __forceinline__ void split_rows(
    const float* x, i64 stride, char* tiles, float* inverse, i64 rows, i64 cols) {
    static_assert(Threads <= 32 || Rows == 1, "teams larger than a warp are blocks");
    static_assert(8 % Rows == 0, "rows with their padding fill whole blocks");
    SHARED_BYTES(scratch, 2 * 32 * 4);
    u32* const slots = reinterpret_cast<u32*>(scratch);
    const i64 padded = (rows + 7) / 8 * 8;
#pragma unroll 1
    for (i64 first = static_cast<i64>(blockIdx.x) * Rows; first < padded; first += static_cast<i64>(gridDim.x) * Rows) {
        const i64 row = first + threadIdx.x / Threads;
        split_row<Threads, Held, Parts>(x, stride, tiles, inverse, row, rows, cols, slots);
    }
}
