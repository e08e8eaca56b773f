// A product of 16-bit matrices on Hopper's tensor cores, with a row program of one stage as its epilogue: C = A B' in float32
// stays in registers, and the program's element function takes it from there.
//
// A (m, k) and B (n, k), m, n, k > 0: T (f16 or bf16), read through tensor maps, which need rows of a multiple of 16 bytes.
//   Where TurnedA or TurnedB is 1 the operand is stored transposed, as (k, m) or (k, n).
//   Or one f16 part each of float32 operands, with scales that the epilogue undoes (gemm_scales.cuh).
// P: an emitted struct as in row_block.cu with one stage, whose tile has a member `product` that is not loaded but set here,
//   rounded where it is of a 16-bit type; and with
//     a, b, depth                           the tensor maps (cuda/tensor_map.py), and k
//     scaled                                whether A and B are parts (split_pieces.cuh); then also
//     left, right                           the operands, with the inverse scales (Matrix in split_doubts.cuh)
//     partial, shares                       the totals of each row in each column of tiles: `shares` totals a row
//     staged                                bytes of one element of all full results together, each of 2 or 4
//     results(At<0>, out, visit)            visits each full result of `out`, with its first byte in `staged`
//     targets(At<0>, visit)                 visits where they go: first byte in `staged`, pointer, row stride; unless Shifted
//                                           also the tensor map, with boxes of 16 rows and Panel columns
//     read, matrices(At<0>, visit)          bytes of one element of all matrices that are loaded; visits their pointer, row stride
//     vectors(At<0>, visit)                 visits the pointer of each input with an element for each column
// Reductions leave their totals in p.partial; merge_shares finishes the rows. Results are staged in shared memory
// (gemm_results.cuh).
//
// A block computes tiles of 128 x Columns with two consumer warpgroups: 64 rows of a tile each, or, if Alternating, tiles in
// turn, so that the tensor cores work for one while the other runs its epilogue. One thread of a third warpgroup copies the
// operands, 64 columns per stage, up to Stages stages ahead, also into the next tile. The blocks of a cluster compute tiles
// below each other: each copies its part of B to all of them.
// Tensor cores sum over all of k, as cuBLAS does. An element has the same bits whatever m and n are.
// Launch: 384 threads, any number of clusters of Cluster blocks, Gemm<...>::shared bytes. Columns is a multiple of
//   64 Cluster, up to 256 or, if Alternating, 128, for which `multiply_add` is emitted. V is 2 where pointers and row
//   strides of what P loads are multiples of 2 elements, else 1.
#pragma once

#include "clusters.cuh"
#include "gemm_epilogue.cuh"
#include "launch_order.cuh"
#include "ring.cuh"
#include "tile_order.cuh"

// The sizes of a product's tiles and of its shared memory, and the descriptors of its operands there.
template <
    class T, int Columns, int Stages, int Cluster, int Alternating, int TurnedA, int TurnedB, int Chunk, int Panel,
    int Panels, int Staged, int Unroll, int Shifted, int Odd, int Scaled>
struct Gemm {
    typedef T Element;
    static constexpr bool alternating = Alternating;
    static constexpr int parts = Alternating ? 2 : 1;                    // of 64 rows, that a warpgroup computes of a tile
    static constexpr int rows = 128, columns = Columns, cluster = Cluster, turned_a = TurnedA, turned_b = TurnedB;
    static constexpr int line = 128;                                     // bytes of 64 elements
    static constexpr int box = 64 * line;                                // of a transposed operand: 64 rows, 64 columns
    static constexpr int bytes_a = rows * line, stage = bytes_a + Columns * line;
    static constexpr int consumers = 256, threads = 384;
    static constexpr int consumer_warps = consumers / 32 / parts * Cluster;
    static constexpr int chunk = Chunk;                                  // columns of a tile that the epilogue has at once
    static constexpr int panel = Panel, panels = Panels;                 // columns that are stored at once; see StagedPanels
    static constexpr int unroll = Unroll;                                // chunks with code of their own
    static constexpr bool shifted = Shifted;                             // rows of results may begin at any element
    static constexpr bool odd = Odd;                                     // so are columns: the last one is not read in a pack
    static constexpr int panel_bytes = 16 * (Panel + 8 * Shifted) * Staged;  // of a warp's panel of all results: see Staging
    typedef WarpScales<parts, Columns> Scales;
    static constexpr int panels_bytes = Panels * panel_bytes;                // the scales of columns are behind these
    static constexpr int warp_bytes = panels_bytes + (Scaled ? Scales::bytes : 0);
    typedef Ring<Gemm, Stages> Stream;
    static constexpr int shared = Stream::bytes + panel_alignment - 16 + consumers / 32 * warp_bytes;

    static __device__ __forceinline__ TileOrder order(i64 m, i64 n) { return TileOrder(m, n, Cluster * rows, Columns); }
    static __device__ __forceinline__ u64 first_a(const Stream& ring, u32 part) {
        return TurnedA ? transposed_operand_at(ring.a() + part * box, box)
                       : operand_at(ring.a() + part * (bytes_a / 2), 8 * line);
    }
    static __device__ __forceinline__ u64 first_b(const Stream& ring) {
        return TurnedB ? transposed_operand_at(ring.b(), box) : operand_at(ring.b(), 8 * line);
    }
    // From the descriptor of 16 columns to that of the next.
    static constexpr u32 next_a = TurnedA ? 128 : 2, next_b = TurnedB ? 128 : 2;
};

// Copy the operands of all tiles of this block, by one thread.
template <class Shape>
__device__ __forceinline__ void stream_operands(
    typename Shape::Stream ring, const TensorMap& a, const TensorMap& b, i64 m, i64 n, u32 blocks) {
    constexpr int share = Shape::columns / Shape::cluster;  // columns of C whose part of B this block copies
    constexpr unsigned short everyone = (1 << Shape::cluster) - 1;
    const TileOrder order = Shape::order(m, n);
    const u32 rank = Shape::cluster == 1 ? 0 : cluster_rank();
    const auto copy_shared = [&](u32 to, int element, int line) {
        if (Shape::cluster == 1) {
            tensor_copy(to, b, element, line, ring.full());
        } else {
            tensor_copy_to(to, b, element, line, ring.full(), everyone);
        }
    };
#pragma unroll 1
    for (u32 tile = blockIdx.x / Shape::cluster; tile < order.count(); tile += gridDim.x / Shape::cluster) {
        i64 first_row, first_col;
        order.at(tile, first_row, first_col);
        const int row = static_cast<int>(first_row) + static_cast<int>(rank) * Shape::rows;
        const int col = static_cast<int>(first_col) + static_cast<int>(rank) * share;
#pragma unroll 1
        for (u32 block = 0; block < blocks; ++block) {
            const int k = static_cast<int>(block) * 64;
            barrier_wait(ring.empty(), ring.parity ^ 1);
            barrier_arrive_expect(ring.full(), Shape::stage);
            if (Shape::turned_a) {
#pragma unroll
                for (int i = 0; i < Shape::rows / 64; ++i) {
                    tensor_copy(ring.a() + i * Shape::box, a, row + i * 64, k, ring.full());
                }
            } else {
                tensor_copy(ring.a(), a, k, row, ring.full());
            }
            const u32 to = ring.b() + rank * (share * Shape::line);
            if (Shape::turned_b) {
#pragma unroll
                for (int i = 0; i < share / 64; ++i) {
                    copy_shared(to + i * Shape::box, col + i * 64, k);
                }
            } else {
                copy_shared(to, k, col);
            }
            ring.advance();
        }
    }
}

// Tell the blocks that fill a stage of this one that this warp has read it.
template <class Shape>
__device__ __forceinline__ void hand_back(u32 empty) {
    const u32 lane = threadIdx.x % 32;
    if (Shape::cluster == 1) {
        if (lane == 0) {
            barrier_arrive(empty);
        }
    } else if (lane < Shape::cluster) {
        barrier_arrive_in(empty, lane);
    }
}

// Sum the products of one tile; the tensor cores work on a stage while the next one is issued. Calls `issued` after the last.
template <class Shape, class Issued>
__device__ __forceinline__ void sum_products(
    typename Shape::Stream& ring, float (&sum)[Shape::parts][Shape::columns / 2], u32 warpgroup, u32 blocks,
    const Issued& issued) {
    const u32 first_part = Shape::alternating ? 0 : warpgroup;
    u32 read = 0;  // the barrier of the stage that the tensor cores still read
#pragma unroll
    for (int part = 0; part < Shape::parts; ++part) {
        products_begin(sum[part]);
    }
#pragma unroll 1
    for (u32 block = 0; block < blocks; ++block) {
        const u64 b = Shape::first_b(ring);
        barrier_wait(ring.full(), ring.parity);
        products_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int part = 0; part < Shape::parts; ++part) {
                const u64 a = Shape::first_a(ring, first_part + part);
                multiply_add<typename Shape::Element, Shape::turned_a, Shape::turned_b>(
                    sum[part], a + i * Shape::next_a, b + i * Shape::next_b, block > 0 || i > 0);
            }
        }
        products_commit();
        products_wait_for_all_but<1>();
        if (block > 0) {
            hand_back<Shape>(read);
        }
        read = ring.empty();
        ring.advance();
    }
    issued();
#pragma unroll
    for (int part = 0; part < Shape::parts; ++part) {
        products_wait(sum[part]);
    }
    hand_back<Shape>(read);
}

// Compute this block's tiles, by the consumer warpgroups. Alternating ones take turns at the ring: a warpgroup begins when the
// other one has waited for all stages of the tile before. Parity cannot tell a stage's round from the one after the next, so
// that one which waited two rounds ahead would find the stage full.
template <class Shape, int V, class P>
__device__ __forceinline__ void compute_tiles(const P& p, typename Shape::Stream ring, char* staging, u32 blocks) {
    const TileOrder order = Shape::order(p.rows, p.cols);
    // The shuffles tell the compiler that the values are uniform in a warp.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warpgroup = warp / 4;
    const u32 rank = Shape::cluster == 1 ? 0 : cluster_rank();
    const u32 step = gridDim.x / Shape::cluster;
    const auto take_turn = [&] { named_sync(1 + warpgroup, Shape::consumers); };
    const auto pass_turn = [&] {
        if (Shape::alternating) {
            named_arrive(2 - warpgroup, Shape::consumers);
        }
    };
    char* const own = staging + warp * Shape::warp_bytes;
    StagedPanels<Shape> panels{own};
    float sum[Shape::parts][Shape::columns / 2];
#pragma unroll
    for (int part = 0; part < Shape::parts; ++part) {
#pragma unroll
        for (int i = 0; i < Shape::columns / 2; ++i) {
            sum[part][i] = 0.0f;
        }
    }
    if (Shape::alternating && warpgroup == 1) {
        ring.skip(blocks);
        pass_turn();
    }
#pragma unroll 1
    for (u32 first = blockIdx.x / Shape::cluster; first < order.count(); first += Shape::parts * step) {
        const u32 tile = Shape::alternating ? first + warpgroup * step : first;
        if (Shape::alternating) {
            take_turn();
            if (tile >= order.count()) {
                pass_turn();
                break;
            }
        }
        i64 row, col;
        order.at(tile, row, col);
        row += rank * Shape::rows + (Shape::alternating ? warp % 4 : warp) * 16;
        typename Shape::Scales scales;
        if constexpr (P::scaled) {
            scales.fetch(p, row, col);
        }
#pragma unroll
        for (int part = 0; part < Shape::parts; ++part) {
            prefetch_chunks<Shape>(p, row + part * 64, col);
        }
        p.vectors(At<0>(), PrefetchColumns<Shape::columns>{col, p.cols});
        sum_products<Shape>(ring, sum, warpgroup, blocks, pass_turn);
        if (Shape::alternating) {
            ring.skip(blocks);
        }
        // `keep` stores scales, which both branches below read.
        const u32* const of_columns = reinterpret_cast<const u32*>(own + Shape::panels_bytes);
        const bool plain = P::scaled && !scales.keep(own + Shape::panels_bytes) && col + Shape::columns <= p.cols;
#pragma unroll
        for (int part = 0; part < Shape::parts; ++part) {
            const i64 first = row + part * 64;
            if constexpr (P::scaled) {
                if (plain && first + 16 <= p.rows) {
                    finish_rows<Shape, V, true>(p, sum[part], panels, first, col, scales, of_columns, part);
                    continue;
                }
            }
            finish_rows<Shape, V, false>(p, sum[part], panels, first, col, scales, of_columns, part);
        }
    }
    stores_wait();
    if (Shape::alternating && warpgroup == 0) {
        take_turn();  // pairs with the other warpgroup's last pass_turn
    }
}

// The kernel: one thread copies, eight warps compute.
template <class Shape, int V, class P>
__device__ __forceinline__ void gemm(const P& p) {
    SHARED_DYNAMIC(shared);
    const typename Shape::Stream ring(shared);
    const u32 blocks = static_cast<u32>((p.depth + 63) / 64);
    if (threadIdx.x == Shape::consumers) {
        prefetch_tensor_map(p.a);
        prefetch_tensor_map(p.b);
        ring.init();
    }
    if (Shape::cluster == 1) {
        __syncthreads();
    } else {
        cluster_sync();
    }
    follow_earlier_launches();
    if (threadIdx.x >= Shape::consumers) {
        shrink_registers<40>();
        if (threadIdx.x == Shape::consumers) {
            stream_operands<Shape>(ring, p.a, p.b, p.rows, p.cols, blocks);
        }
    } else {
        grow_registers<232>();
        compute_tiles<Shape, V>(p, ring, ring.behind(shared, panel_alignment), blocks);
    }
    if (Shape::cluster > 1) {
        cluster_sync();  // others still arrive at barriers of this block
    }
}
