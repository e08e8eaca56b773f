// Hopper's tensor cores and bulk copies (sm_90a): thin wrappers of one or a few instructions.
//
// Warpgroup products read both operands from shared memory, in atoms of 8 lines of 64 16-bit elements: 1024 bytes, aligned to
// 1024, with the 128-byte swizzle: 16-byte piece p of line r is at r * 128 + (p ^ r) * 16. A line is a row of the operand and
// 64 of its columns k; of a transposed operand it is one k and 64 rows.
#pragma once

#include "barriers.cuh"

// Threads of a block -------------------------------------------------------------------------------------------------

// Set the registers per thread; called by all threads of a warpgroup.
template <int Registers>
__device__ __forceinline__ void grow_registers() {
#ifdef __CUDA_ARCH__
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}
template <int Registers>
__device__ __forceinline__ void shrink_registers() {
#ifdef __CUDA_ARCH__
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
#endif
}

// Bulk copies --------------------------------------------------------------------------------------------------------

// Copy a multiple of 16 bytes from global to shared memory asynchronously; completion is counted by the barrier.
__device__ __forceinline__ void bulk_copy(u32 to, const char* from, u32 bytes, u32 barrier) {
#ifdef __CUDA_ARCH__
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
        : "memory");
#else
    memcpy(host_cuda::dynamic_shared_memory() + to, from, bytes);
    host_cuda::phase_complete(barrier, bytes);
#endif
}

// A matrix as the copy engine sees it, made on the host (cuda/tensor_map.py), and passed in a __grid_constant__ struct.
struct alignas(128) TensorMap {
    u64 words[16];
};

// Copy the box at (line, element) of a matrix to shared memory; completion is counted by the barrier. What lies beyond the
// matrix arrives as zeros, and counts.
__device__ __forceinline__ void tensor_copy(u32 to, const TensorMap& from, int element, int line, u32 barrier) {
#ifdef __CUDA_ARCH__
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&from), "r"(element), "r"(line), "r"(barrier)
        : "memory");
#else
    host_cuda::tensor_copy(HOST_SITE, to, from.words, element, line, barrier, 1u << host_cuda::rank_in_cluster());
#endif
}

// The same to this address in each block of the cluster whose bit is set, counted by the barrier of that block.
__device__ __forceinline__ void tensor_copy_to(
    u32 to, const TensorMap& from, int element, int line, u32 barrier, unsigned short blocks) {
#ifdef __CUDA_ARCH__
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&from), "r"(element), "r"(line), "r"(barrier), "h"(blocks)
        : "memory");
#else
    host_cuda::tensor_copy(HOST_SITE, to, from.words, element, line, barrier, blocks);
#endif
}

// Copy a box in shared memory, aligned to 128 bytes, to (line, element) of a matrix asynchronously, in this thread's group of
// stores. What lies beyond the matrix is left out.
__device__ __forceinline__ void tensor_store(const TensorMap& to, int element, int line, const char* from) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&to), "r"(element),
                 "r"(line), "r"(shared_address(from))
                 : "memory");
#else
    host_cuda::tensor_store(HOST_SITE, to.words, element, line, shared_address(from));
#endif
}

// Let stores that begin later, by any thread that this one meets first, copy what this one has written to shared memory so far.
__device__ __forceinline__ void stores_fence() {
#ifdef __CUDA_ARCH__
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    host_cuda::stores_fence();
#endif
}

// End a group of this thread's stores.
__device__ __forceinline__ void stores_commit() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
    host_cuda::stores_commit();
#endif
}

// Wait until all of this thread's groups but the last `Left` have read shared memory, which may then be written.
template <int Left>
__device__ __forceinline__ void stores_wait_until_read() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Left) : "memory");
#else
    host_cuda::stores_wait(Left);
#endif
}

// Wait until all of this thread's stores are in memory.
__device__ __forceinline__ void stores_wait() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#else
    host_cuda::stores_wait(0);
#endif
}

// Fetch a tensor map that copies will need soon.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
#endif
}

// Fetch the 32 bytes around an address to the L1 cache.
__device__ __forceinline__ void prefetch_sector(const void* at) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L1 [%0];" ::"l"(__cvta_generic_to_global(at)));
#else
    static_cast<void>(*static_cast<const volatile char*>(at));
#endif
}

// Warpgroup products -------------------------------------------------------------------------------------------------

// The descriptor of an operand whose first atom is at `address`, with `stride` bytes to the next 8 rows. Adding n moves it by
// 16 n bytes: 2 for the next 16 columns of the same atoms.
__device__ __forceinline__ u64 operand_at(u32 address, u32 stride) {
    return static_cast<u64>(1) << 62 | static_cast<u64>(stride >> 4) << 32 | (address & 0x3ffff) >> 4;
}

// The same of a transposed operand, whose atoms of 8 columns follow each other, with `stride` bytes to the next 64 rows.
// Adding 128 moves it by 16 columns.
__device__ __forceinline__ u64 transposed_operand_at(u32 address, u32 stride) {
    return operand_at(address, 1024) | static_cast<u64>(stride >> 4) << 16;
}

#ifdef __CUDA_ARCH__
// Keep the compiler from moving accesses to the accumulators across this point.
template <int R>
__device__ __forceinline__ void keep(float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; ++i) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}
__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int R>
__device__ __forceinline__ void products_begin(float (&d)[R]) {
    keep(d);
    products_fence();
}

// End a group of products; wait until at most `Left` groups are in flight.
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Left>
__device__ __forceinline__ void products_wait_for_all_but() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}
// Wait for all groups, after which d may be read.
template <int R>
__device__ __forceinline__ void products_wait(float (&d)[R]) {
    products_wait_for_all_but<0>();
    keep(d);
}
#else
inline void products_fence() { host_cuda::converged(HOST_SITE); }
template <int R>
void products_begin(float (&)[R]) {
    products_fence();
}
inline void products_commit() { host_cuda::products_commit(); }
template <int Left>
void products_wait_for_all_but() {
    host_cuda::products_wait(Left);
    __syncwarp(0xffffffffu);
}
template <int R>
void products_wait(float (&)[R]) {
    products_wait_for_all_but<0>();
}
#endif

// d = a b' + d, or a b' if add is 0, by a warpgroup: (64 x 16) (2 R x 16)', T (f16 or bf16) into float32; a, b as from
// operand_at, or from transposed_operand_at if TurnedA or TurnedB is 1. Thread t holds in d[4 j + 2 h + i]
// row t / 32 * 16 + t % 32 / 4 + 8 h, column 8 j + t % 4 * 2 + i. The instruction names every register, so each width is a
// specialisation, which cuda/warpgroup.py emits.
#ifdef __CUDA_ARCH__
template <class T, int TurnedA, int TurnedB, int R>
__device__ __forceinline__ void multiply_add(float (&d)[R], u64 a, u64 b, int add);
#else
// As late as on a GPU: the operands are read when the group is waited for.
template <class T, int TurnedA, int TurnedB, int R>
void multiply_add(float (&d)[R], u64 a, u64 b, int add) {
    host_cuda::products_issue({__is_same(T, bf16), TurnedA != 0, TurnedB != 0, R}, d, a, b, add);
}
#endif

// Copy the chunk `c` of the sums of a tile's columns, which is `Next` or a later one. Registers cannot be indexed, so each
// chunk has a branch of its own.
template <int Next, int Sums, int Held>
__device__ __forceinline__ void take_chunk(int c, const float (&sums)[Sums], float (&part)[Held]) {
    if (c == Next) {
#pragma unroll
        for (int i = 0; i < Held; ++i) {
            part[i] = sums[Next * Held + i];
        }
    } else if constexpr ((Next + 1) * Held < Sums) {
        take_chunk<Next + 1>(c, sums, part);
    }
}
