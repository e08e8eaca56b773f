// The order of a product's tiles: down a band of rows first, so that concurrent tiles share rows of both operands in L2.
#pragma once

#include "types.cuh"

// A product's tiles of `rows` x `columns`, `down` x `across` of them, numbered in this order.
struct TileOrder {
    static constexpr u32 band = 8;
    u32 down, across;
    int rows, columns;  // of a tile

    __device__ __forceinline__ TileOrder(i64 m, i64 n, int height, int width)
        : down(static_cast<u32>((m + height - 1) / height)),
          across(static_cast<u32>((n + width - 1) / width)),
          rows(height),
          columns(width) {}
    __device__ __forceinline__ u32 count() const { return down * across; }
    __device__ __forceinline__ void at(u32 tile, i64& row, i64& col) const {
        const u32 first = tile / (band * across), within = tile % (band * across);
        const u32 height = min(down - first * band, band);
        row = static_cast<i64>(first * band + within % height) * rows;
        col = static_cast<i64>(within / height) * columns;
    }
};
