// Split of a column-major float32 operand, bit for bit as split_rows.cu splits a transposed copy.
//
// x: (cols, rows) in memory, unit stride along a row: element k of row r of the operand is x[k * stride + r].
// tiles, inverse: the split operand, see split_pieces.cuh.
// A cluster takes 32 rows of the operand, one for each lane of its warps, in two passes: it finds the largest elements, then
// splits. In the second a warp takes 64 columns at a time and transposes them in shared memory, from where whole atoms are
// written. If Held, no warp has more than 64, and the first pass leaves them there, in the room of two parts. Else the second
// pass reads x again, mostly from the L2 cache. Lanes have Depth loads in flight, in the first pass of this case Ahead.
// Launch: Warps * 32 threads, ceil(rows / 32) clusters, Warps * Parts * 4096 bytes of dynamic shared memory.
#pragma once

#include "clusters.cuh"
#include "split_pieces.cuh"

template <int Warps, int Ahead, int Depth, int Parts, int Cluster, bool Held>
__device__ __forceinline__ void split_columns(
    const float* x, i64 stride, char* tiles, float* inverse, i64 rows, i64 cols) {
    static_assert(64 % Depth == 0 && Depth % 8 == 0, "whole pieces of blocks");
    static_assert(!Held || Parts == 2, "elements take as much room as two parts");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const u32 rank = Cluster == 1 ? 0 : cluster_rank();
    const int worker = rank * Warps + warp;  // among the warps of the cluster
    constexpr int workers = Cluster * Warps;
    const i64 first = static_cast<i64>(blockIdx.x / Cluster) * 32, row = first + lane;
    const i64 groups = (rows + 7) / 8, blocks = (cols + 63) / 64;
    const i64 columns = row < rows ? cols : 0;  // padding rows read nothing
    const float* from = x + row;
    SHARED_DYNAMIC(shared);
    SHARED_BYTES(scratch, 2 * Warps * 32 * 4);
    SHARED_BYTES(largest, 2 * 32 * 4);
    u32(*const slots)[Warps][32] = reinterpret_cast<u32(*)[Warps][32]>(scratch);
    u32(*const shares)[32] = reinterpret_cast<u32(*)[32]>(largest);  // what the block found, for the others of its cluster

    // Where the warp has piece n of the lane's row, in 16 bytes for each part: the parts are 4096 bytes apart. Those of 8
    // neighbouring lanes are in banks of their own.
    char* const own = shared + warp * Parts * 4096;
    const auto piece_of_lane = [&](int n) { return own + lane * 128 + (n ^ lane % 8) * 16; };
    // Load Depth elements of the lane's row, from column k on.
    const auto load = [&](Piece(&piece)[Depth / 8], i64 k) {
#pragma unroll
        for (int j = 0; j < Depth; ++j) {
            piece[j / 8].bits[j % 8] = k + j < columns ? __float_as_uint(from[(k + j) * stride]) : 0u;
        }
    };

    // Compare magnitudes as bits: their order is that of the numbers.
    u32 top = 0;
    if constexpr (Held) {
#pragma unroll
        for (int part = 0; part < 64; part += Depth) {
            Piece piece[Depth / 8];
            load(piece, static_cast<i64>(worker) * 64 + part);
#pragma unroll
            for (int j = 0; j < Depth / 8; ++j) {
                top = max(top, piece[j].template top<Parts>());
                piece[j].keep(piece_of_lane(part / 8 + j));
            }
        }
    } else {
        for (i64 begin = static_cast<i64>(worker) * Ahead; begin < columns; begin += workers * Ahead) {
            u32 bits[Ahead];
#pragma unroll
            for (int j = 0; j < Ahead; ++j) {
                bits[j] = begin + j < columns ? __float_as_uint(from[(begin + j) * stride]) : 0u;
            }
#pragma unroll
            for (int j = 0; j < Ahead; ++j) {
                top = max(top, magnitude<Parts>(bits[j]));
            }
        }
    }
    slots[0][warp][lane] = top;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < Warps; ++w) {
        top = max(top, slots[0][w][lane]);
    }
    if constexpr (Cluster > 1) {
        if (warp == 0) {
            shares[0][lane] = top;
        }
        cluster_sync();
#pragma unroll
        for (int block = 0; block < Cluster; ++block) {
            top = max(top, cluster_load(&shares[0][lane], block));
        }
    }
    const RowScale scale(top);

    u32 found = 0;  // see RowFindings
    const i64 pieces = min(static_cast<i64>(4), groups - first / 8) * 64;  // of 16 bytes, of one part in a block of columns
    for (i64 block = worker; block < blocks; block += workers) {
        bool any_lo = false;
#pragma unroll
        for (int part = 0; part < 64; part += Depth) {
            Piece piece[Depth / 8];
            if (Held) {
#pragma unroll
                for (int j = 0; j < Depth / 8; ++j) {
                    piece[j].take(piece_of_lane(part / 8 + j));
                }
            } else {
                load(piece, block * 64 + part);
            }
#pragma unroll
            for (int j = 0; j < Depth / 8; ++j) {
                uint4 hi, lo;
                found = RowFindings::both(found, split<Parts>(piece[j], scale, hi, lo));
                char* at = piece_of_lane(part / 8 + j);
                *reinterpret_cast<uint4*>(at) = hi;
                if (Parts == 2) {
                    *reinterpret_cast<uint4*>(at + 4096) = lo;
                    any_lo |= any_number(lo);
                }
            }
        }
        __syncwarp(0xffffffffu);
        char* const to = tiles + (block * 2 * groups + first / 8) * 1024;
        for (i64 p = lane; p < pieces; p += 32) {
            const i64 piece = block * 8 + (p ^ p / 8) % 8;
            char* const at = Parts == 2 ? to + p * 16 : piece_at<1>(tiles, first + p / 8, piece, groups, blocks * 8);
            *reinterpret_cast<uint4*>(at) = *reinterpret_cast<const uint4*>(own + p * 16);
            if (Parts == 2) {
                *reinterpret_cast<uint4*>(at + groups * 1024) = *reinterpret_cast<const uint4*>(own + 4096 + p * 16);
            }
        }
        found |= RowFindings::of_block(any_lo);
        if (Parts == 2 && row < groups * 8) {
            lo_marks(inverse, groups)[block * groups * 8 + row] = any_lo;
        }
        __syncwarp(0xffffffffu);
    }
    slots[1][warp][lane] = found;
    __syncthreads();
    if (warp == 0) {
        found = 0;
#pragma unroll
        for (int w = 0; w < Warps; ++w) {
            found = RowFindings::both(found, slots[1][w][lane]);
        }
        shares[1][lane] = found;
    }
    if constexpr (Cluster > 1) {
        cluster_sync();
        if (warp == 0 && rank == 0) {
#pragma unroll
            for (int block = 1; block < Cluster; ++block) {
                found = RowFindings::both(found, cluster_load(&shares[1][lane], block));
            }
        }
    }
    if (warp == 0 && rank == 0 && row < rows) {
        inverse[row] = scale.inverse<Parts>(found);
    }
    if constexpr (Cluster > 1) {
        cluster_sync();  // no block may leave before its shared memory has been read
    }
}
