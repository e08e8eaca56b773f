// What the epilogue of a product reads beside it, fetched to the L1 cache ahead: visitors of pointers, for the lanes of a warp.
#pragma once

#include "tensor_cores.cuh"

// Fetches a warp's chunk of a matrix: 16 rows of Chunk elements, from (row, col) on.
template <int Chunk>
struct PrefetchChunk {
    i64 row, col, m, n;

    template <class T>
    __device__ __forceinline__ void operator()(const T* from, i64 stride) const {
        constexpr int sector = 32 / sizeof(T), sectors = Chunk / sector;
#pragma unroll
        for (int i = threadIdx.x % 32; i < 16 * sectors; i += 32) {
            const i64 at_row = row + i / sectors, at_col = col + i % sectors * sector;
            if (at_row < m && at_col < n) {
                prefetch_sector(from + at_row * stride + at_col);
            }
        }
    }
};

// Fetches the values of a tile's columns, from `col` on, of a vector.
template <int Columns>
struct PrefetchColumns {
    i64 col, n;

    template <class T>
    __device__ __forceinline__ void operator()(const T* from) const {
        constexpr int sector = 32 / sizeof(T);
#pragma unroll
        for (int i = threadIdx.x % 32 * sector; i < Columns; i += 32 * sector) {
            if (col + i < n) {
                prefetch_sector(from + col + i);
            }
        }
    }
};
