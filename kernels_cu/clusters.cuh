// Blocks of a cluster, of Hopper and later GPUs: their numbers, their barrier, and their shared memory.
#pragma once

#include "types.cuh"

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

// All threads of all blocks of the cluster meet. No block may exit while others can still access its shared memory: meet last.
__device__ __forceinline__ void cluster_sync() {
#ifdef __CUDA_ARCH__
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
    host_cuda::cluster_barrier(HOST_SITE);
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
