// Asynchronous copies from global to shared memory, which each thread waits for itself (sm_80 and later).
#pragma once

#include "types.cuh"

// Copy V elements, which begin at a multiple of V, to this thread's part of shared memory; fewer than 4 bytes at once, which the
// instruction does not take. 16 bytes do not go through the L1 cache: nobody else reads them.
template <int V, class T>
__device__ __forceinline__ void copy_pack(Pack<T, V>& to, const T* from) {
    constexpr int bytes = sizeof(T) * V;
    if constexpr (bytes < 4) {
        to = load_pack<V>(from);
        return;
    }
#ifdef __CUDA_ARCH__
    const u32 address = static_cast<u32>(__cvta_generic_to_shared(&to));
    if constexpr (bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
    } else if constexpr (bytes >= 4) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(bytes) : "memory");
    }
#else
    host_cuda::copy_issue(&to, from, bytes);
#endif
}

// Where `count` packs that begin at `from` are held, from `memory` on, which is moved behind them: at the same place within a line
// of 128 bytes, where a copy takes up to 10 % less time than at another one.
template <class Held>
__device__ __forceinline__ Held* held_from(char*& memory, int count, const void* from) {
    char* const first = memory + reinterpret_cast<u64>(from) % 128 / sizeof(Held) * sizeof(Held);
    memory += count * sizeof(Held) + 128;
    return reinterpret_cast<Held*>(first);
}

// Where `count` packs are held from `memory` on, which is moved behind them.
template <class Held>
__device__ __forceinline__ Held* packs_from(char*& memory, int count) {
    Held* const first = reinterpret_cast<Held*>(memory);
    memory += (count * sizeof(Held) + 127) / 128 * 128;
    return first;
}

// End a group of this thread's copies.
__device__ __forceinline__ void copies_commit() {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    host_cuda::copies_commit();
#endif
}

// Wait for all groups of this thread's copies but the last `left`, or the last 7 if that is more: then it can read what they wrote.
__device__ __forceinline__ void copies_wait(int left) {
#ifdef __CUDA_ARCH__
    switch (left) {
        case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
        case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
        case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
        case 3: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
        case 4: asm volatile("cp.async.wait_group 4;" ::: "memory"); break;
        case 5: asm volatile("cp.async.wait_group 5;" ::: "memory"); break;
        case 6: asm volatile("cp.async.wait_group 6;" ::: "memory"); break;
        default: asm volatile("cp.async.wait_group 7;" ::: "memory");
    }
#else
    host_cuda::copies_wait(left);
#endif
}
