// The ring buffer in shared memory through which operands go from the copying thread to the tensor cores.
#pragma once

#include "tensor_cores.cuh"

// Stages of both operands, aligned to 1024 bytes, followed by two barriers per stage: `full`, which the copies complete, and
// `empty`, at which each consumer warp arrives.
//
// Shape has stage and bytes_a, the bytes of a stage and of the first operand in it, and consumer_warps, the arrivals that
// empty a stage. It needs `bytes` of shared memory.
template <class Shape, int Stages>
struct Ring {
    static constexpr int bytes = 1023 + Stages * (Shape::stage + 16);  // with alignment
    u32 first, stage = 0, parity = 0;

    __device__ __forceinline__ explicit Ring(const char* shared)
        : first((shared_address(shared) + 1023) / 1024 * 1024) {}
    // Addresses in shared memory: of the current stage's operands and of its two barriers.
    __device__ __forceinline__ u32 a() const { return first + stage * Shape::stage; }
    __device__ __forceinline__ u32 b() const { return a() + Shape::bytes_a; }
    __device__ __forceinline__ u32 full() const { return first + Stages * Shape::stage + stage * 16; }
    __device__ __forceinline__ u32 empty() const { return full() + 8; }
    __device__ __forceinline__ void advance() {
        stage = stage + 1 == Stages ? 0 : stage + 1;
        parity ^= stage == 0;
    }
    // Go on `stages` stages, which others use.
    __device__ __forceinline__ void skip(u32 stages) {
        stage += stages;
        parity ^= stage / Stages & 1;
        stage %= Stages;
    }
    // What follows the ring in the same memory, aligned to 16 bytes or more, up to 1024.
    __device__ __forceinline__ char* behind(char* shared, u32 alignment = 16) const {
        const u32 end = Stages * (Shape::stage + 16);
        return shared + (first - shared_address(shared)) + (end + alignment - 1) / alignment * alignment;
    }
    // Initialise the barriers, by one thread, before all other use.
    __device__ __forceinline__ void init() const {
#pragma unroll
        for (int s = 0; s < Stages; ++s) {
            barrier_init(first + Stages * Shape::stage + s * 16, 1);
            barrier_init(first + Stages * Shape::stage + s * 16 + 8, Shape::consumer_warps);
        }
        barrier_init_fence();
    }
};
