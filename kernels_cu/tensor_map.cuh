// A matrix as Hopper's copy engine sees it.
#pragma once

#include "types.cuh"

// Made on the host (cuda/tensor_map.py), and passed in a __grid_constant__ struct.
struct alignas(128) TensorMap {
    u64 words[16];
};
