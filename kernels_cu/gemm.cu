// A product of 16-bit matrices on Hopper's tensor cores, with a row program of one stage as its epilogue: C = A B' in float32
// stays in registers, and the program's element function takes it from there.
//
// A (m, k) and B (n, k), m, n, k > 0: T (f16 or bf16), read through tensor maps, which need rows of 16 bytes times a whole
//   number. A turned operand is stored as (k, m) or (k, n).
// P: an emitted struct as in row_block.cu with one stage, whose tile has a member `product` that is not loaded but set here,
//   rounded where it is of a 16-bit type; and with
//     a, b, depth                           the tensor maps (cuda/tensor_map.py), and k
//     partial, shares                       the totals of each row and column of tiles: shares totals for each row
//     staged                                bytes of one element of all full results together
//     results(At<0>, out, visit)            visits each full result of `out`, with its first byte in `staged`
//     targets(At<0>, visit)                 visits where they go: first byte in `staged`, pointer, row stride, which is n
// Reductions leave their totals in p.partial; gemm_merge finishes the rows. Results go through shared memory to whole lines.
//
// A block computes tiles of 128 x Columns, 64 rows for each of two consumer warpgroups. One thread of a third warpgroup
// copies the operands, 64 columns per stage, up to Stages stages ahead, also into the next tile while this one's epilogue
// runs. The blocks of a cluster compute tiles below each other: each copies its part of B to all of them.
// Tensor cores sum over all of k, as cuBLAS does. An element has the same bits whatever m and n are.
// Launch: 384 threads, any number of clusters of Cluster blocks, Gemm<...>::shared bytes. Columns is a multiple of
//   64 Cluster, up to 256, for which `multiply_add` is emitted. V is 2 where pointers, row strides and columns of what P
//   loads are multiples of 2 elements, else 1.
#pragma once

#include "ring.cuh"
#include "stages.cuh"
#include "tile_order.cuh"

template <class T, int Columns, int Stages, int Cluster, int TurnedA, int TurnedB, int Chunk, int Staged>
struct Gemm {
    typedef T Element;
    static constexpr int rows = 128, columns = Columns, cluster = Cluster, turned_a = TurnedA, turned_b = TurnedB;
    static constexpr int line = 128;                                     // bytes of 64 elements
    static constexpr int box = 64 * line;                                // of a turned operand: 64 rows, 64 columns
    static constexpr int bytes_a = rows * line, stage = bytes_a + Columns * line;
    static constexpr int consumers = 256, consumer_warps = consumers / 32 * Cluster, threads = 384;
    static constexpr int chunk = Chunk;                                  // columns of a tile that the epilogue has at once
    static constexpr int staged = 16 * Chunk * Staged;                   // bytes of a warp's chunk of results
    static constexpr int shared = Ring<Gemm, Stages>::bytes + consumers / 32 * staged;
    typedef Ring<Gemm, Stages> Stream;

    static __device__ __forceinline__ TileOrder order(i64 m, i64 n) { return TileOrder(m, n, Cluster * rows, Columns); }
    static __device__ __forceinline__ u64 first_a(const Stream& ring, u32 warpgroup) {
        return TurnedA ? transposed_operand_at(ring.a() + warpgroup * box, box)
                       : operand_at(ring.a() + warpgroup * (bytes_a / 2), 8 * line);
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

// Sum the products of one tile; the tensor cores work on a stage while the next one is issued.
template <class Shape>
__device__ __forceinline__ void sum_products(
    typename Shape::Stream& ring, float (&sum)[Shape::columns / 2], u32 warpgroup, u32 blocks) {
    u32 read = 0;  // the barrier of the stage that the tensor cores still read
    products_begin(sum);
#pragma unroll 1
    for (u32 block = 0; block < blocks; ++block) {
        const u64 a = Shape::first_a(ring, warpgroup), b = Shape::first_b(ring);
        barrier_wait(ring.full(), ring.parity);
        products_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            multiply_add<typename Shape::Element, Shape::turned_a, Shape::turned_b>(
                sum, a + i * Shape::next_a, b + i * Shape::next_b, block > 0 || i > 0);
        }
        products_commit();
        products_wait_for_all_but<1>();
        if (block > 0) {
            hand_back<Shape>(read);
        }
        read = ring.empty();
        ring.advance();
    }
    products_wait(sum);
    hand_back<Shape>(read);
}

// Where a warp's chunk of results waits: 16 rows of Chunk elements of `Bytes` bytes, from byte 16 Chunk `first` on, their
// 16-byte pieces in an order in which neither rows nor columns meet in a bank.
template <int Chunk, int Bytes>
struct Staging {
    static constexpr int pieces = Chunk * Bytes / 16;
    char* at;

    __device__ __forceinline__ Staging(char* staging, int first) : at(staging + first * 16 * Chunk) {}
    __device__ __forceinline__ char* piece(int row, int p) const {
        return at + (row * pieces + (p ^ (row * (Bytes / 2) & (pieces - 1)))) * 16;
    }
    __device__ __forceinline__ char* element(int row, int col) const {
        return piece(row, col * Bytes / 16) + col * Bytes % 16;
    }
};

// Puts V elements of a result, from (row, col) of a warp's chunk on, where the copy finds them.
template <int Chunk>
struct StageResult {
    char* staging;
    int row, col;

    template <int First, class T, int V>
    __device__ __forceinline__ void operator()(At<First>, const Pack<T, V>& pack) const {
        const Staging<Chunk, sizeof(T)> to(staging, First);
        store_pack<V>(reinterpret_cast<T*>(to.element(row, col)), pack);
    }
};

// Copies a warp's chunk of one result from shared memory, whose first element goes to (row, col), by lines.
template <int Chunk>
struct CopyResult {
    char* staging;
    i64 row, col, m, n;

    template <int First, class T>
    __device__ __forceinline__ void operator()(At<First>, T* to, i64 stride) const {
        constexpr int pieces = Staging<Chunk, sizeof(T)>::pieces, elements = 16 / sizeof(T);
        const Staging<Chunk, sizeof(T)> from(staging, First);
        const bool aligned = (reinterpret_cast<i64>(to) | stride * static_cast<i64>(sizeof(T))) % 16 == 0;
#pragma unroll
        for (int i = 0; i < pieces / 2; ++i) {
            const int at = i * 32 + threadIdx.x % 32;
            const int down = at / pieces, across = at % pieces;
            const i64 left = n - (col + across * elements);  // columns from here on
            if (row + down < m && left > 0) {
                T* const target = to + (row + down) * stride + col + across * elements;
                const Pack<T, elements> pack =
                    load_pack<elements>(reinterpret_cast<const T*>(from.piece(down, across)));
                if (aligned) {
                    store_pack<elements>(target, pack);
                } else {
#pragma unroll
                    for (int e = 0; e < elements; ++e) {
                        if (e < left) {
                            target[e] = pack.v[e];
                        }
                    }
                }
            }
        }
    }
};

// Round a sum as it would be if it were stored.
template <class T>
__device__ __forceinline__ void set_narrowed(T& to, float sum) {
    to = narrow<T>(sum);
}

// Compute V elements, and stage their results.
template <class P, int Chunk, int V, class Tile>
__device__ __forceinline__ void compute_staged(
    const P& p, const Tile& tile, i64 row, i64 col, const typename P::Row& r, typename P::Element* e, char* staging,
    int down, int across) {
    auto out = p.template out<V>(At<0>());
    bool finite = true;
#pragma unroll
    for (int v = 0; v < V; ++v) {
        finite &= p.template element<V>(At<0>(), tile, v, row, col + v, r, e[v], out);
    }
    if constexpr (P::has_exact(0)) {
        if (!finite) {
#pragma unroll
            for (int v = 0; v < V; ++v) {
                p.template exact_element<V>(At<0>(), tile, v, row, col + v, r, e[v], out);
            }
        }
    }
    p.results(At<0>(), out, StageResult<Chunk>{staging, down, across});
}

// Run the epilogue of the 16 rows of a tile that a warp has, from (first_row, first_col) on: a thread has pairs of columns of
// two rows, see multiply_add, and the four lanes of a row merge their totals. All chunks go through one copy of the code.
template <class Shape, int V, class P>
__device__ __forceinline__ void finish_rows(
    const P& p, const float (&sum)[Shape::columns / 2], char* staging, i64 first_row, i64 first_col) {
    typedef decltype(p.template tile<V>(At<0>())) Tile;
    typedef decltype(p.totals(At<0>())) Totals;
    constexpr int chunk = Shape::chunk, held = chunk / 4;  // columns, and elements of a row that a thread has of them
    const int lane = threadIdx.x % 32;
    const i64 m = p.rows, n = p.cols;
    if (first_row >= m) {
        return;
    }
    const auto row_of = [&](int h) { return first_row + lane / 4 + 8 * h; };
    const auto column_of = [&](int i) { return i / 2 * 8 + lane % 4 * 2 + i % 2; };  // in the chunk
    typename P::Row r[2];
    Totals totals[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (row_of(h) < m) {
            p.begin(row_of(h), r[h]);
        }
    }
#pragma unroll 1
    for (int c = 0; c < Shape::columns / chunk; ++c) {
        const i64 chunk_col = first_col + c * chunk;
        if (chunk_col >= n) {
            break;
        }
        float part[chunk / 2];
#pragma unroll
        for (int k = 0; k < Shape::columns / chunk; ++k) {
            if (k == c) {
#pragma unroll
                for (int i = 0; i < chunk / 2; ++i) {
                    part[i] = sum[k * (chunk / 2) + i];
                }
            }
        }
        typename P::Element e[2][held];
#pragma unroll
        for (int i = 0; i < held; i += V) {
            const i64 col = chunk_col + column_of(i);
            if (col < n) {
                Tile tile;
                p.template load_columns<V>(At<0>(), col, tile);
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    if (row_of(h) < m) {
                        p.template load<V>(At<0>(), row_of(h), col, tile);
#pragma unroll
                        for (int v = 0; v < V; ++v) {
                            set_narrowed(tile.product.v[v], part[i / 2 * 4 + h * 2 + i % 2 + v]);
                        }
                        compute_staged<P, chunk, V>(
                            p, tile, row_of(h), col, r[h], &e[h][i], staging, lane / 4 + 8 * h, column_of(i));
                    }
                }
            }
        }
        if constexpr (P::reduces(0)) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (row_of(h) < m) {
#pragma unroll
                    for (int i = 0; i < held; ++i) {
                        if (chunk_col + column_of(i) < n) {
                            p.peek(At<0>(), e[h][i], totals[h]);
                        }
                    }
                    totals[h].settle();
#pragma unroll
                    for (int i = 0; i < held; ++i) {
                        if (chunk_col + column_of(i) < n) {
                            p.add(At<0>(), e[h][i], totals[h]);
                        }
                    }
                }
            }
        }
        if constexpr (P::staged > 0) {
            __syncwarp(0xffffffffu);
            p.targets(At<0>(), CopyResult<chunk>{staging, first_row, chunk_col, m, n});
            __syncwarp(0xffffffffu);
        }
    }
    if constexpr (P::reduces(0)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (row_of(h) < m) {
                Lanes<4>().reduce(totals[h]);
                if (lane % 4 == 0) {
                    p.partial[row_of(h) * p.shares + first_col / Shape::columns] = totals[h];
                }
            }
        }
    }
    __syncwarp(0xffffffffu);  // products need all lanes together
}

// Compute this block's tiles, by the consumer warpgroups.
template <class Shape, int V, class P>
__device__ __forceinline__ void compute_tiles(const P& p, typename Shape::Stream ring, char* staging, u32 blocks) {
    const TileOrder order = Shape::order(p.rows, p.cols);
    // The shuffles tell the compiler that the values are uniform in a warp.
    const u32 warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    const u32 rank = Shape::cluster == 1 ? 0 : cluster_rank();
    float sum[Shape::columns / 2];
#pragma unroll
    for (int i = 0; i < Shape::columns / 2; ++i) {
        sum[i] = 0.0f;
    }
#pragma unroll 1
    for (u32 tile = blockIdx.x / Shape::cluster; tile < order.count(); tile += gridDim.x / Shape::cluster) {
        i64 row, col;
        order.at(tile, row, col);
        sum_products<Shape>(ring, sum, warp / 4, blocks);
        finish_rows<Shape, V>(p, sum, staging + warp * Shape::staged, row + rank * Shape::rows + warp * 16, col);
    }
}

template <class Shape, int V, class P>
__device__ __forceinline__ void gemm(const P& p) {
    SHARED_DYNAMIC(shared);
    const typename Shape::Stream ring(shared);
    const u32 blocks = static_cast<u32>((p.depth + 63) / 64);
    if (threadIdx.x == 0) {
        ring.init();
    }
    if (Shape::cluster == 1) {
        __syncthreads();
    } else {
        cluster_sync();
    }
    if (threadIdx.x >= Shape::consumers) {
        shrink_registers<40>();
        if (threadIdx.x == Shape::consumers) {
            stream_operands<Shape>(ring, p.a, p.b, p.rows, p.cols, blocks);
        }
    } else {
        grow_registers<232>();
        compute_tiles<Shape, V>(p, ring, ring.behind(shared), blocks);
    }
    if (Shape::cluster > 1) {
        cluster_sync();  // others still arrive at barriers of this block
    }
}

// Finish the rows from the totals of their tiles, a warp for each row, in an order that depends on the columns alone.
// Launch: Threads threads, any number of blocks.
template <class P, int Threads>
__device__ __forceinline__ void gemm_merge(const P& p) {
    const Lanes<32> team;
    const i64 step = static_cast<i64>(gridDim.x) * (Threads / 32);
    for (i64 row = static_cast<i64>(blockIdx.x) * (Threads / 32) + threadIdx.x / 32; row < p.rows; row += step) {
        typename P::Row r;
        p.begin(row, r);
        auto totals = p.totals(At<0>());
        for (i64 share = team.rank(); share < p.shares; share += team.size()) {
            totals.merge(p.partial[row * p.shares + share]);
        }
        finish_stage<P, 0>(p, team, row, totals, r);
        if (team.rank() == 0) {
            p.commit(row, r);
        }
    }
}
