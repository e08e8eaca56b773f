// Whether matrices may hold other values than when something was last prepared from them: a hash of a sample of their
// elements, compared with the hash that was kept.
//
// Each row is sampled in `places` runs of 32 bytes (whole sectors of memory), spread evenly and shifted from row to row,
// so that a change of a column is seen as well as one of a row; rows of no more runs than that are read whole. A thread
// hashes 16 bytes with their position. The hashes are added as integers, which gives the same sum in any order. `token`
// stands for what the host knows to have changed: it is part of the hash.
//
// `state` belongs to one stream (or one captured graph), `kept` to what was prepared and to all streams. state->changed
// tells the launches behind this one whether to prepare: kept->hash is another, or the values were prepared since by
// another stream, which may still be writing them. Both are zeros at first: changed. The last block to finish resets
// what the next launch adds to.
// Launch: Threads threads, any number of blocks.
#pragma once

#include "types.cuh"

typedef unsigned long long u64;

// Strides are in bytes. `places` is how many runs of 32 bytes are read of a row, at most all of them.
struct Sampled {
    const char* data;
    i64 row_stride, col_stride, rows, cols, itemsize, places;
};

struct FingerprintState {
    u64 sum;
    u32 ticket, changed;
    u64 generation;  // of what this stream has prepared
};

struct FingerprintKept {
    u64 hash, generation;
};

// The finalizer of MurmurHash3: every bit of x decides on every bit of the result, and no two x have the same.
__device__ __forceinline__ u64 mixed(u64 x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

__device__ __forceinline__ u64 bits_at(const char* at, i64 itemsize) {
    return itemsize == 8   ? *reinterpret_cast<const u64*>(at)
           : itemsize == 4 ? *reinterpret_cast<const u32*>(at)
           : itemsize == 2 ? *reinterpret_cast<const unsigned short*>(at)
                           : *reinterpret_cast<const unsigned char*>(at);
}

// The hash of piece n of a matrix, half a run; zeros stand for what is beyond the row.
__device__ __forceinline__ u64 hash_of_piece(const Sampled& m, i64 n, i64 first) {
    const i64 width = 16 / m.itemsize, runs = (m.cols + 2 * width - 1) / (2 * width);
    const i64 place = n / 2 % m.places, row = n / 2 / m.places;
    const i64 run = m.places == runs ? place : (place * runs / m.places + row) % runs;
    const i64 col = (2 * run + n % 2) * width;
    const char* at = m.data + row * m.row_stride + col * m.col_stride;
    u64 low = 0, high = 0;
    if (col + width <= m.cols && m.col_stride == m.itemsize && reinterpret_cast<i64>(at) % 16 == 0) {
        const uint4 words = *reinterpret_cast<const uint4*>(at);
        low = words.x | static_cast<u64>(words.y) << 32;
        high = words.z | static_cast<u64>(words.w) << 32;
    } else {
        for (i64 k = 0; k < width && col + k < m.cols; ++k) {
            const u64 bits = bits_at(at + k * m.col_stride, m.itemsize) << k * m.itemsize % 8 * 8;
            low |= k * m.itemsize < 8 ? bits : 0;
            high |= k * m.itemsize < 8 ? 0 : bits;
        }
    }
    return mixed(mixed(mixed(first + n + 1) ^ low) ^ high);
}

template <int Threads, int Count>
__device__ __forceinline__ void fingerprint(
    const Sampled (&matrices)[Count], u64 token, FingerprintState* state, FingerprintKept* kept) {
    const i64 step = static_cast<i64>(gridDim.x) * Threads;
    u64 sum = 0;
    i64 first = 0;  // pieces of the matrices before
#pragma unroll
    for (int k = 0; k < Count; ++k) {
        const i64 pieces = matrices[k].rows * matrices[k].places * 2;
        // Threads that have no piece of one matrix have one of the next.
        const i64 mine = (static_cast<i64>(blockIdx.x) * Threads + threadIdx.x + step - first % step) % step;
        for (i64 n = mine; n < pieces; n += step) {
            sum += hash_of_piece(matrices[k], n, first);
        }
        first += pieces;
    }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    }
    SHARED_BYTES(scratch, Threads / 32 * 8);
    u64* const slots = reinterpret_cast<u64*>(scratch);
    if (threadIdx.x % 32 == 0) {
        slots[threadIdx.x / 32] = sum;
    }
    __syncthreads();
    if (threadIdx.x != 0) {
        return;
    }
    sum = 0;
    for (int w = 0; w < Threads / 32; ++w) {
        sum += slots[w];
    }
    atomicAdd(&state->sum, sum);
    __threadfence();
    if (atomicAdd(&state->ticket, 1u) + 1 < gridDim.x) {
        return;
    }
    __threadfence();
    sum = atomicExch(&state->sum, 0ull);
    state->ticket = 0;
    u64 hash = mixed(sum ^ mixed(token + 0x9e3779b97f4a7c15ull));
    hash = hash == 0 ? 1 : hash;  // zero is that of nothing
    u64 generation;
    if (*static_cast<volatile u64*>(&kept->hash) != hash) {
        // In this order: who finds the new hash also finds the new generation.
        generation = atomicAdd(&kept->generation, 1ull) + 1;
        __threadfence();
        atomicExch(&kept->hash, hash);
        state->changed = 1;
    } else {
        __threadfence();
        generation = *static_cast<volatile u64*>(&kept->generation);
        state->changed = generation != state->generation;
    }
    state->generation = generation;
}
