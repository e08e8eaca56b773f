// The order of launches on a stream, whose blocks may begin before the launch before them has ended (programmatic
// dependent launch). Nothing says which earlier launches a kernel reads from, so each waits for all of them.
#pragma once

// Let the next launch begin once all blocks of this one have, and wait until all earlier launches have ended and what
// they wrote is visible. To be called by all threads, before they read or write global memory. Without effect where the
// launch was not allowed to begin early.
__device__ __forceinline__ void follow_earlier_launches() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
