// Blocks of a cluster, of Hopper and later GPUs: their numbers, their barrier, and their shared memory.
#pragma once

#include "barriers.cuh"

// The number of this block in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
#ifdef __CUDA_ARCH__
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return host_cuda::rank_in_cluster();
#endif
}

// All threads of all blocks of the cluster arrive once, then wait for each other.
__device__ __forceinline__ void cluster_arrive() {
#ifdef __CUDA_ARCH__
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#ifdef __CUDA_ARCH__
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
    host_cuda::cluster_barrier(HOST_SITE);
#endif
}

// All threads of all blocks of the cluster meet. No block may exit while others can still access its shared memory: meet last.
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Write a word of shared memory, which is at `own` in this block, in a block of the cluster. It counts as 4 bytes at the barrier
// of that block, whose threads can read it when they have waited there. The barrier orders this word alone: other writes of
// this thread are not published, which would take a fence of the whole GPU.
__device__ __forceinline__ void cluster_store(u32* own, u32 block, u32 word, u32 barrier) {
#ifdef __CUDA_ARCH__
    asm volatile(
        "{\n"
        ".reg .b32 to, there;\n"
        "mapa.shared::cluster.u32 to, %0, %1;\n"
        "mapa.shared::cluster.u32 there, %3, %1;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %2, [there];\n"
        "}" ::"r"(shared_address(own)),
        "r"(block), "r"(word), "r"(barrier)
        : "memory");
#else
    host_cuda::shared_store(HOST_SITE, own, block, word, barrier);
#endif
}

// Read, in a block of the cluster, the word of static shared memory that is at `own` in this block.
__device__ __forceinline__ u32 cluster_load(const u32* own, u32 block) {
#ifdef __CUDA_ARCH__
    u32 word;
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %1, %2;\n"
        "ld.shared::cluster.u32 %0, [there];\n"
        "}"
        : "=r"(word)
        : "r"(static_cast<u32>(__cvta_generic_to_shared(own))), "r"(block)
        : "memory");
    return word;
#else
    return *static_cast<const u32*>(host_cuda::shared_of(HOST_SITE, own, block));
#endif
}
