// Barriers of some threads of a block, by name, and of a warp; and barriers in shared memory, of Hopper and later GPUs: threads
// arrive at them, and copies complete them.
//
// Those in shared memory are 8 bytes, passed by their shared address, which is the same in each block of a cluster.
#pragma once

#include "types.cuh"

// Named barriers 1 to 15 of a block, for `threads` threads: arrive and wait, or arrive only.
__device__ __forceinline__ void named_sync(u32 name, u32 threads) {
#ifdef __CUDA_ARCH__
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
#else
    host_cuda::named_barrier(HOST_SITE, name, threads, true);
#endif
}
__device__ __forceinline__ void named_arrive(u32 name, u32 threads) {
#ifdef __CUDA_ARCH__
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
#else
    host_cuda::named_barrier(HOST_SITE, name, threads, false);
#endif
}

// Have the lanes of a warp go on together, where some had work of their own. No result depends on it, but votes of lanes that come
// one after the other take much longer.
__device__ __forceinline__ void rejoin_lanes() { __syncwarp(0xffffffffu); }

// The 32-bit address of shared memory that instructions take.
__device__ __forceinline__ u32 shared_address(const void* p) {
#ifdef __CUDA_ARCH__
    return static_cast<u32>(__cvta_generic_to_shared(p));
#else
    return host_cuda::offset_in_shared(p);
#endif
}

// Initialise a barrier for so many arrivals a phase.
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
#ifdef __CUDA_ARCH__
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#else
    host_cuda::phase_init(barrier, arrivals);
#endif
}

// Make initialised barriers visible; after the last barrier_init, by the same thread, before the block synchronises.
__device__ __forceinline__ void barrier_init_fence() {
#ifdef __CUDA_ARCH__
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Arrive, and let the phase wait for `bytes` of bulk copies.
__device__ __forceinline__ void barrier_arrive_expect(u32 barrier, u32 bytes) {
#ifdef __CUDA_ARCH__
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#else
    host_cuda::phase_expect(barrier, bytes);
    host_cuda::phase_arrive(HOST_SITE, barrier);
#endif
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
#ifdef __CUDA_ARCH__
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#else
    host_cuda::phase_arrive(HOST_SITE, barrier);
#endif
}

// Wait for the end of the phase with this parity; before a barrier's first phase, parity 1 has ended.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#ifdef __CUDA_ARCH__
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#else
    host_cuda::phase_wait(HOST_SITE, barrier, parity);
#endif
}

// Arrive at the barrier with this address of another block of the cluster, or the own one. It tells that this warp has read
// what the other block's copies overwrite next, and publishes no writes: a release at the scope of the cluster would wait for
// a fence of the whole GPU.
__device__ __forceinline__ void barrier_arrive_in(u32 barrier, u32 block) {
#ifdef __CUDA_ARCH__
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(barrier),
        "r"(block)
        : "memory");
#else
    host_cuda::phase_arrive(HOST_SITE, barrier, block);
#endif
}
