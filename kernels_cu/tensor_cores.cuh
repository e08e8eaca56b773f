// Hopper's tensor cores, barriers and bulk copies (sm_90a): thin wrappers of one or a few instructions.
//
// Warpgroup products read both operands from shared memory, K-major, in atoms of 8 rows x 64 columns of f16: 1024 bytes,
// aligned to 1024, with the 128-byte swizzle: 16-byte piece p of row r is at r * 128 + (p ^ r) * 16. Barriers are 8 bytes of
// shared memory, passed by their shared address.
#pragma once

#include "types.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) {
#ifdef __CUDA_ARCH__
    return static_cast<u32>(__cvta_generic_to_shared(p));
#else
    return host_cuda::offset_in_shared(p);
#endif
}

// Barriers -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
#ifdef __CUDA_ARCH__
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#else
    host_cuda::phase_init(barrier, arrivals);
#endif
}

// After the last barrier_init, by the thread that did it, before the block meets.
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

// Threads of a block -------------------------------------------------------------------------------------------------

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

// Warpgroup products -------------------------------------------------------------------------------------------------

// The descriptor of an operand whose first atom is at `address`, with `stride` bytes to the next 8 rows. Adding n moves it by
// 16 n bytes: 2 for the next 16 columns of the same atoms.
__device__ __forceinline__ u64 operand_at(u32 address, u32 stride) {
    return static_cast<u64>(1) << 62 | static_cast<u64>(stride >> 4) << 32 | address >> 4;
}

#ifdef __CUDA_ARCH__
// Hand the accumulators from the compiler to the tensor cores, or back.
template <int R>
__device__ __forceinline__ void keep(float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; ++i) {
        asm volatile("" : "+f"(d[i])::"memory");
    }
}
template <int R>
__device__ __forceinline__ void products_begin(float (&d)[R]) {
    keep(d);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// End a group of products; wait until at most `Left` groups are in flight, after which d may be read.
__device__ __forceinline__ void products_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Left, int R>
__device__ __forceinline__ void products_wait(float (&d)[R]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
    keep(d);
}
#else
template <int R>
void products_begin(float (&)[R]) {}
inline void products_commit() {}
template <int Left, int R>
void products_wait(float (&)[R]) {
    __syncwarp(0xffffffffu);
}
#endif

// d = a b' + d, or a b' if add is 0, by a warpgroup: (64 x 16) (2 R x 16)', f16 into float32; a, b as from operand_at.
// Thread t holds in d[4 j + 2 h + i] row t / 32 * 16 + t % 32 / 4 + 8 h, column 8 j + t % 4 * 2 + i. The instruction
// names every register, so each width is a specialisation, which cuda/split.py emits.
#ifdef __CUDA_ARCH__
template <int R>
__device__ __forceinline__ void multiply_add(float (&d)[R], u64 a, u64 b, int add);
#else
template <int R>
void multiply_add(float (&d)[R], u64 a, u64 b, int add) {
    const int thread = threadIdx.x % 128;
    const char* shared = host_cuda::dynamic_shared_memory();
    const auto element = [&](u64 operand, int row, int k) {
        const u32 stride = static_cast<u32>(operand >> 32 & 0x3fff) << 4;
        u32 at = (static_cast<u32>(operand & 0x3fff) << 4) + row / 8 * stride + row % 8 * 128 + k * 2;
        at ^= (at >> 7 & 7) << 4;
        return widen(*reinterpret_cast<const f16*>(shared + at));
    };
    for (int r = 0; r < R; ++r) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + r / 2 % 2 * 8, col = r / 4 * 8 + thread % 4 * 2 + r % 2;
        float sum = add ? d[r] : 0.0f;
        for (int k = 0; k < 16; ++k) {
            sum += element(a, row, k) * element(b, col, k);
        }
        d[r] = sum;
    }
}
#endif
