// Change detection: hash a sample of each matrix and compare with the hash that was stored when values were last computed
// from the matrices.
//
// Each row is sampled in `places` runs of 32 bytes (memory sectors), spread evenly and shifted from row to row, so that a
// changed column is seen as well as a changed row; shorter rows are read whole. A thread hashes half a run, a piece of 16
// bytes, with its position. Hashes are added as integers, whose sum does not depend on the order; 48 bits of it count, so
// that one atomic addition tells a block the sum so far and whether it is the last. `token` counts the changes that the
// host knows of and is part of the hash.
//
// `state` belongs to one stream (or one captured graph), `kept` is shared by all; both are zero at first, which means
// changed. state->changed tells the launches behind this one on the stream whether to recompute: the hash differs, or
// another stream has recomputed since and may still be writing. The last block to finish resets the sum.
// Launch: Threads threads, fewer than 2^16 blocks.
#pragma once

#include "types.cuh"

// A matrix to hash. Strides are in bytes; `places` is the number of runs that are read of each row.
struct Sampled {
    const char* data;
    i64 row_stride, col_stride, rows, cols, itemsize, places;
};

// The state of one stream.
struct FingerprintState {
    u64 sum;  // during a launch, else 0: 48 bits of the hashes, and below them the number of blocks that have added theirs
    u32 unused, changed;
    u64 generation;  // of the values that this stream last computed
};

// The state that all streams share: the hash at the last change, and the number of changes.
struct FingerprintKept {
    u64 hash, generation;
};

// The finalizer of MurmurHash3: a bijection in which every bit of x affects every bit of the result.
__device__ __forceinline__ u64 mixed(u64 x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

// The bits of one element, of 1, 2, 4 or 8 bytes.
__device__ __forceinline__ u64 bits_at(const char* at, i64 itemsize) {
    return itemsize == 8   ? *reinterpret_cast<const u64*>(at)
           : itemsize == 4 ? *reinterpret_cast<const u32*>(at)
           : itemsize == 2 ? *reinterpret_cast<const unsigned short*>(at)
                           : *reinterpret_cast<const unsigned char*>(at);
}

// The hash of piece n of a matrix, of which `first` pieces of other matrices precede; elements beyond the row count as zeros.
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

// The sum of a value over the threads of a block, in its first thread.
template <int Threads>
__device__ __forceinline__ u64 sum_over_block(u64 sum) {
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
        return 0;
    }
    sum = 0;
    for (int w = 0; w < Threads / 32; ++w) {
        sum += slots[w];
    }
    return sum;
}

// What a block's first thread reads of the states beside its pieces, so that at the end no memory but the sum's is waited for.
struct Known {
    u64 hash, generation;  // of FingerprintKept
    u64 own;               // generation of FingerprintState

    __device__ __forceinline__ void read_hash(const FingerprintKept* kept) {
        hash = *static_cast<const volatile u64*>(&kept->hash);
    }
    // Behind the hash, with a fence between: whoever has read a new hash must read its generation, too.
    __device__ __forceinline__ void read_generations(const FingerprintState* state, const FingerprintKept* kept) {
        __threadfence();
        generation = *static_cast<const volatile u64*>(&kept->generation);
        own = state->generation;
    }
};

// Compare the hash of all matrices with the one kept, and keep it; tell this stream whether to recompute.
__device__ __forceinline__ void note_change(
    u64 hash, const Known& known, FingerprintState* state, FingerprintKept* kept) {
    u64 generation = known.generation;
    if (known.hash != hash) {
        // The generation before the hash, for the same reason.
        generation = atomicAdd(&kept->generation, 1ull) + 1;
        __threadfence();
        atomicExch(&kept->hash, hash);
    }
    state->changed = generation != known.own;
    state->generation = generation;
}

// Hash the matrices: each thread some of their pieces. The last block to finish has the sum, and compares it.
template <int Threads, int Count>
__device__ __forceinline__ void fingerprint(
    const Sampled (&matrices)[Count], u64 token, FingerprintState* state, FingerprintKept* kept) {
    const i64 step = static_cast<i64>(gridDim.x) * Threads;
    Known known = {};
    if (threadIdx.x == 0) {
        known.read_hash(kept);
    }
    u64 sum = 0;
    i64 first = 0;  // pieces of the preceding matrices
#pragma unroll
    for (int k = 0; k < Count; ++k) {
        const i64 pieces = matrices[k].rows * matrices[k].places * 2;
        // Threads without a piece of this matrix get one of the next.
        const i64 mine = (static_cast<i64>(blockIdx.x) * Threads + threadIdx.x + step - first % step) % step;
        for (i64 n = mine; n < pieces; n += step) {
            sum += hash_of_piece(matrices[k], n, first);
        }
        first += pieces;
    }
    if (threadIdx.x == 0) {
        known.read_generations(state, kept);
    }
    sum = sum_over_block<Threads>(sum);
    if (threadIdx.x != 0) {
        return;
    }
    constexpr int count_bits = 16;
    sum = (sum << count_bits) + 1;
    sum += atomicAdd(&state->sum, sum);
    if ((sum & ((1ull << count_bits) - 1)) < gridDim.x) {
        return;
    }
    state->sum = 0;
    const u64 hash = mixed(sum >> count_bits ^ mixed(token + 0x9e3779b97f4a7c15ull));
    note_change(hash == 0 ? 1 : hash, known, state, kept);  // zero means: no hash yet
}
