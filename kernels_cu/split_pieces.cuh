// The split of float32 rows into f16, with a power of two `inverse` for each row: x = inverse (hi + 2^-11 lo) in two parts,
// or x = inverse hi in one, which keeps 11 bits.
//
// Scaling brings a row's largest element to [2^14, 2^15), or as near as a scale of 2^126 can. Elements of at least 2^-14 after
// scaling keep 22 bits in two parts and 11 in one; smaller ones have an absolute error of up to 2^-36, in one part 2^-24, and are
// counted in `inverse` (see split_tiles.cuh). In two parts a row with infinities or NaN is marked, and its parts are 0. In one
// part infinities and NaN stay what they are, so that the product has them where it should: beside them the others are scaled by
// their own largest one, and no number but 0 becomes 0, which an infinity would make NaN.
//
// Layout of one part: row-major, rows padded to 64 columns with zeros.
// Layout of two parts, independent of the tiles of a product: element k of a row is at byte
//   ((k / 64 * 2 + part) * groups + row / 8) * 1024 + row % 8 * 128 + (k % 64 / 8 ^ row % 8) * 16 + k % 8 * 2
// with groups = ceil(rows / 8), and part 0 for hi, 1 for lo. Rows are padded to 8 and columns to 64 with zeros: in all
// ceil(cols / 64) * groups * 2048 bytes, aligned to 16. Where lo is not zero is noted behind the scales (split_tiles.cuh).
#pragma once

#include "split_tiles.cuh"

// The magnitude of an element as bits, which a row's scale is chosen by: in one part that of an infinity or NaN does not count.
template <int Parts>
__device__ __forceinline__ u32 magnitude(u32 bits) {
    const u32 found = bits & 0x7fffffffu;
    return Parts == 1 && found >= 0x7f800000u ? 0 : found;
}

// 8 consecutive elements of a row, as bits; once split, 16 bytes of an atom.
struct Piece {
    u32 bits[8];

    __device__ __forceinline__ void set(const uint4& low, const uint4& high) {
        bits[0] = low.x, bits[1] = low.y, bits[2] = low.z, bits[3] = low.w;
        bits[4] = high.x, bits[5] = high.y, bits[6] = high.z, bits[7] = high.w;
    }
    __device__ __forceinline__ void load(const float* row, i64 col, i64 cols, bool aligned) {
        if (aligned && col + 8 <= cols) {
            set(*reinterpret_cast<const uint4*>(row + col), *reinterpret_cast<const uint4*>(row + col + 4));
        } else {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                bits[j] = col + j < cols ? __float_as_uint(row[col + j]) : 0u;
            }
        }
    }
    // Keep the elements in shared memory, in 16 bytes at each of two places 4096 bytes apart, and take them from there.
    __device__ __forceinline__ void keep(char* at) const {
        *reinterpret_cast<uint4*>(at) = make_uint4(bits[0], bits[1], bits[2], bits[3]);
        *reinterpret_cast<uint4*>(at + 4096) = make_uint4(bits[4], bits[5], bits[6], bits[7]);
    }
    __device__ __forceinline__ void take(const char* at) {
        set(*reinterpret_cast<const uint4*>(at), *reinterpret_cast<const uint4*>(at + 4096));
    }
    // The largest magnitude, as bits.
    template <int Parts>
    __device__ __forceinline__ u32 top() const {
        u32 largest = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            largest = max(largest, magnitude<Parts>(bits[j]));
        }
        return largest;
    }
};

// The address of piece p of a row in a split operand of `groups` groups of 8 rows, with `pieces` pieces a row; that of lo is
// groups * 1024 bytes behind.
template <int Parts>
__device__ __forceinline__ char* piece_at(char* tiles, i64 row, i64 p, i64 groups, i64 pieces) {
    return Parts == 1 ? tiles + (row * pieces + p) * 16
                      : tiles + (p / 8 * 2 * groups + row / 8) * 1024 + row % 8 * 128 + (p ^ row) % 8 * 16;
}

// The scale of a row whose largest magnitude has these bits. In one part `magnitude` leaves out infinities and NaN: each row is
// finite to it, and one that has nothing else beside zeros is zero.
struct RowScale {
    bool zero, is_finite;  // of all its elements
    int shift;
    float factor;

    __device__ __forceinline__ explicit RowScale(u32 top)
        : zero(top == 0),
          is_finite(top >> 23 < 255),
          shift(top == 0 ? 0 : min(14 + 127 - static_cast<int>(top >> 23), 126)),
          factor(__uint_as_float(static_cast<u32>(127 + shift) << 23)) {}

    // The row's entry in `inverse`, given its RowFindings.
    template <int Parts>
    __device__ __forceinline__ float inverse(u32 found) const {
        const SplitRow row =
            !is_finite ? SplitRow::marked() : zero ? SplitRow::none() : SplitRow::finite<Parts>(shift, found);
        return __uint_as_float(row.bits);
    }
};

// Whether any of 8 f16 numbers is not zero.
__device__ __forceinline__ bool any_number(const uint4& bits) {
    return ((bits.x | bits.y | bits.z | bits.w) & 0x7fff7fffu) != 0;
}

// Split a piece into hi and lo parts, or into hi alone; returns the number of small elements.
template <int Parts>
__device__ __forceinline__ u32 split(const Piece& piece, const RowScale& scale, uint4& hi, uint4& lo) {
    u32 h[4], l[4], small = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        // A product that keeps subnormal numbers.
        const float x =
            scale.is_finite ? exact_multiply_add(__uint_as_float(piece.bits[j]), scale.factor, -0.0f) : 0.0f;
        const bool is_zero = (piece.bits[j] & 0x7fffffffu) == 0;
        small += !is_zero && fabsf(x) < 0x1p-14f;
        f16 near = narrow<f16>(x);
        if (Parts == 1 && !is_zero && (near.bits & 0x7fffu) == 0) {
            near.bits |= 1;  // an infinity times it is an infinity, not NaN
        }
        const f16 rest = narrow<f16>((x - widen(near)) * 2048.0f);
        h[j / 2] = j % 2 ? h[j / 2] | static_cast<u32>(near.bits) << 16 : near.bits;
        l[j / 2] = j % 2 ? l[j / 2] | static_cast<u32>(rest.bits) << 16 : rest.bits;
    }
    hi = make_uint4(h[0], h[1], h[2], h[3]);
    lo = make_uint4(l[0], l[1], l[2], l[3]);
    return small;
}
