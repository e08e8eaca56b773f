// Shared by the kernels of split operands, of one part or two: the size of tiles, and what describes a split row.
#pragma once

#include "tile_order.cuh"

constexpr int tile_rows = 128, warps_a_tile = 8, rows_a_warp = 16;

// What is found of a row while it is split: the number of elements that are too small beside the largest one for all bits, and
// flags: whether lo is not zero somewhere in a block of 64 columns, and whether there is a block where it is.
struct RowFindings {
    static constexpr u32 most = 0x3fffffffu, has_lo = 1u << 31, lacks_lo = 1u << 30;

    static __device__ __forceinline__ u32 of_block(bool any_lo) { return any_lo ? has_lo : lacks_lo; }
    static __device__ __forceinline__ u32 both(u32 a, u32 b) { return ((a | b) & ~most) | min((a & most) + (b & most), most); }
};

// A split row, described in the bits of a float: the exponent is that of the inverse scale; the mantissa counts the elements
// that are too small, under two bits that tell whether lo is not zero somewhere, and in each block of 64 columns. A row of zeros
// is negative. In two parts a row that has to be repaired, as it has infinities, NaN or too many small elements to count, is NaN;
// in one part, of more small elements than can be counted no sum is accurate.
struct SplitRow {
    static constexpr u32 powers = 0x7f800000u, somewhere = 1u << 22, everywhere = 1u << 21, most = everywhere - 1;
    u32 bits;

    static __device__ __forceinline__ SplitRow of(float inverse) { return SplitRow{__float_as_uint(inverse)}; }
    static __device__ __forceinline__ SplitRow none() { return SplitRow{0x80000000u | 127u << 23}; }
    static __device__ __forceinline__ SplitRow marked() { return SplitRow{0x7fffffffu}; }
    template <int Parts>
    static __device__ __forceinline__ SplitRow finite(int shift, u32 found) {
        const u32 all_small = found & RowFindings::most, small = Parts == 1 ? min(all_small, most) : all_small;
        const u32 any = found & RowFindings::has_lo ? somewhere : 0;
        const u32 all = any != 0 && (found & RowFindings::lacks_lo) == 0 ? everywhere : 0;
        return small > most ? marked() : SplitRow{static_cast<u32>(127 - shift) << 23 | any | all | small};
    }

    __device__ __forceinline__ bool is_marked() const { return (bits & powers) == powers; }
    // What it adds to the findings of several rows, which are ORed: `somewhere`, `everywhere`, in the bits of `most` whether
    // elements of it may have to be repaired, and whether its factor is `extreme`, a bit of findings alone: above 2^63 or below
    // 2^-63, so that a product of two may overflow or be subnormal.
    static constexpr u32 extreme = 1u << 23;
    __device__ __forceinline__ u32 findings() const {
        const u32 found = (bits & (somewhere | everywhere | most)) | (exponent() - (127 - 63) > 2 * 63 ? extreme : 0);
        return bits >> 31 ? 0 : is_marked() ? most : found;
    }
    // Whether lo is not zero in each block of the row.
    __device__ __forceinline__ bool lo_everywhere() const { return (findings() & everywhere) != 0; }
    __device__ __forceinline__ u32 exponent() const { return bits >> 23 & 0xffu; }
    __device__ __forceinline__ float factor() const { return __uint_as_float(bits & powers); }
    // That exponent in two halves, rounded down and up, each in its place in a float's bits.
    __device__ __forceinline__ u32 half() const { return (bits & 0x7f000000u) >> 1; }
    __device__ __forceinline__ u32 other_half() const { return (bits & powers) - half(); }
    // The least magnitude at which a sum is accurate. Each small element errs by at most 2^-36 and is multiplied with less
    // than 2^15: a sum of at least 4 for each of them has a relative error below 2^-23 from them; in one part, where one errs by
    // at most 2^-24, below 2^-11. Where they are too many to count it is infinite. Of a marked row, of zeros, and of one beyond the
    // last it is so negative that also with that of another row, at most 2^23 where it is finite, no sum is below it.
    __device__ __forceinline__ float accurate_from() const {
        const bool none = bits >> 31 || is_marked();
        const u32 small = bits & most;
        return none ? -1e30f : small == most ? __uint_as_float(0x7f800000u) : 4.0f * static_cast<float>(small);
    }
};

// Where lo of an operand is not zero: a byte for each row and 64 columns, behind the scales, which are padded to 8 rows.
// That of a row and block of columns is at block * groups * 8 + row, so that a word of 8 bytes is of a group of rows. Rows that
// have lo everywhere may have none.
__device__ __forceinline__ u8* lo_marks(float* inverse, i64 groups) { return reinterpret_cast<u8*>(inverse + groups * 8); }
__device__ __forceinline__ const u64* lo_marks(const float* inverse, i64 groups) {
    return reinterpret_cast<const u64*>(inverse + groups * 8);
}

// x times the inverse scales of its row and column. Half of both exponents at a time, so that no intermediate result overflows
// or underflows unless the final one does: the factors, 2^-126 to 2^127, are about equal. That of rows is rounded up where that of
// columns is rounded down, so that neither factor is 0, which would make an infinity NaN.
__device__ __forceinline__ float scaled(float x, SplitRow row, SplitRow col) {
    const float first = exact_multiply_add(x, __uint_as_float(row.other_half() + col.half()), -0.0f);
    return exact_multiply_add(first, __uint_as_float(row.half() + col.other_half()), -0.0f);
}
