// CUDA C as a dialect of C++, for running kernels on a CPU: what kernel sources use of the language, in macros and a few
// functions. shim.cpp runs the threads. g++ compiles with -fsanitize=alignment,bounds,...; shim.cpp reports findings.
#pragma once

// <math.h> without C++17's special functions, which no kernel calls: they bring in half of the headers that every unit
// would read.
#include <bits/c++config.h>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#include <math.h>
#include <string.h>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

namespace host_cuda {

struct Site {
    const char* file;
    int line;
};
struct Index {
    unsigned x, y, z;
};
typedef unsigned long long Word64;

enum class Kind { Barrier, Shuffle, Ballot, WarpBarrier, Converged, Phase, Named, Cluster };

void barrier(Site);
// Every lane of `members` hands in a word, and gets the one that lane `from` handed in (Ballot: one bit of each lane).
Word64 collect(Kind, Site, unsigned members, Word64 word, int from);
char* shared_memory(Site, size_t bytes);
char* dynamic_shared_memory();
int lane();
// Barriers in shared memory, named by their offset: a phase ends once all arrivals and all expected bytes are in.
unsigned offset_in_shared(const void* p);
void phase_init(unsigned barrier, unsigned arrivals);
void phase_expect(unsigned barrier, unsigned bytes);
void phase_complete(unsigned barrier, unsigned bytes);
void phase_arrive(Site, unsigned barrier);
void phase_arrive(Site, unsigned barrier, unsigned block);  // at the one of another block of the cluster
void phase_wait(Site, unsigned barrier, unsigned parity);
// bar.sync and, without waiting, bar.arrive.
void named_barrier(Site, unsigned name, unsigned threads, bool waits);
// Blocks of a cluster run together.
unsigned rank_in_cluster();
void cluster_barrier(Site);
// What is at `own` of this block's shared memory in that of another block of the cluster.
const void* shared_of(Site, const void* own, unsigned block);
// Write a word there, which counts at the barrier of that block.
void shared_store(Site, const void* own, unsigned block, unsigned word, unsigned barrier);
// A thread's asynchronous copies are made when their group is waited for, and not before.
void copy_issue(void* to, const void* from, unsigned bytes);
void copies_commit();
void copies_wait(unsigned left);
// Copy a box of a matrix that `runtime.py` describes to the blocks whose bits are set, swizzled by the bytes of its lines.
void tensor_copy(Site, unsigned to, const Word64* map, int element, int line, unsigned barrier, unsigned blocks);
// Stores of boxes are made when their group is waited for, and not before. All lanes of the warp have to have fenced what they wrote.
void tensor_store(Site, const Word64* map, int element, int line, unsigned from);
void stores_fence();
void stores_commit();
void stores_wait(unsigned left);
// What all lanes of a warp execute together: none of them may be in another collective.
void converged(Site);
// What the name of the tensor cores' instruction says: how many sums each thread holds, and what the operands are.
struct Product {
    bool bfloat16, turned_a, turned_b;
    int sums;
};
// Products are computed when their group is waited for, and not before; a and b as in tensor_cores.cuh.
void products_issue(Product, float* sums, Word64 a, Word64 b, int add);
void products_commit();
void products_wait(unsigned left);
[[noreturn]] void fail(const char* what, Site);

template <class T>
T shuffle(Site site, unsigned members, T value, int from) {
    static_assert(sizeof(T) <= sizeof(Word64), "shuffles move at most eight bytes");
    Word64 word = 0;
    memcpy(&word, &value, sizeof(T));
    word = collect(Kind::Shuffle, site, members, word, from);
    memcpy(&value, &word, sizeof(T));
    return value;
}

// Blocks and threads take turns, so a plain read and write are atomic.
template <class T, class U>
T exchanged(T* at, U with) {
    const T before = *at;
    *at = with;
    return before;
}

typedef void Entry(const void* program);
const char* launch(const char* kernel, Entry*, const void* program, Index grid, Index block, size_t dynamic_shared,
                   unsigned cluster, Word64 seed);

}  // namespace host_cuda

extern host_cuda::Index threadIdx, blockIdx, blockDim, gridDim;

#define HOST_SITE (host_cuda::Site{__FILE__, __LINE__})
#define SHARED_BYTES(name, bytes) char* const name = host_cuda::shared_memory(HOST_SITE, bytes)
#define SHARED_DYNAMIC(name) char* const name = host_cuda::dynamic_shared_memory()

#define __syncthreads() host_cuda::barrier(HOST_SITE)
#define __syncwarp(members) host_cuda::collect(host_cuda::Kind::WarpBarrier, HOST_SITE, members, 0, host_cuda::lane())
#define __shfl_sync(members, value, from) host_cuda::shuffle(HOST_SITE, members, value, from)
#define __shfl_xor_sync(members, value, mask) host_cuda::shuffle(HOST_SITE, members, value, host_cuda::lane() ^ (mask))
#define __shfl_down_sync(members, value, by) \
    host_cuda::shuffle(HOST_SITE, members, value, host_cuda::lane() + (by) < 32 ? host_cuda::lane() + (by) : host_cuda::lane())
#define __shfl_up_sync(members, value, by) \
    host_cuda::shuffle(HOST_SITE, members, value, host_cuda::lane() >= (by) ? host_cuda::lane() - (by) : host_cuda::lane())
#define __ballot_sync(members, vote) \
    static_cast<unsigned>(host_cuda::collect(host_cuda::Kind::Ballot, HOST_SITE, members, (vote) != 0, host_cuda::lane()))
#define __any_sync(members, vote) (__ballot_sync(members, vote) != 0)
#define __all_sync(members, vote) (__ballot_sync(members, vote) == (members))
#define __threadfence()

template <class T, class U>
T atomicAdd(T* at, U x) { return host_cuda::exchanged(at, *at + static_cast<T>(x)); }
template <class T, class U>
T atomicMax(T* at, U x) { return host_cuda::exchanged(at, *at > static_cast<T>(x) ? *at : static_cast<T>(x)); }
inline unsigned atomicInc(unsigned* at, unsigned top) { return host_cuda::exchanged(at, *at >= top ? 0u : *at + 1u); }
template <class T>
T atomicCAS(T* at, T old, T with) { return host_cuda::exchanged(at, *at == old ? with : *at); }
template <class T>
T atomicExch(T* at, T with) { return host_cuda::exchanged(at, with); }

struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

template <class To, class From>
inline To bits_as(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "the sizes differ");
    memcpy(&to, &from, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (shift & 31));
}
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline double __longlong_as_double(long long x) { return bits_as<double>(x); }
template <class T>
T min(T a, T b) { return b < a ? b : a; }
template <class T>
T max(T a, T b) { return a < b ? b : a; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }
inline float __fdividef(float a, float b) { return a / b; }
