// Element types, and vector loads and stores.
//
// Values are stored as bool, an integer type, f16, bf16, float or double, and computed as bool, i64, float or double: widen()
// goes from the first to the second; narrow() goes back, rounding to nearest, ties to even; integers wrap.
// The 16-bit types are plain bits, so that no header of the CUDA toolkit is needed. Code under `#else` of __CUDA_ARCH__ is for
// the tests, which also run the kernels on a CPU.
#pragma once

// Static shared memory of a block, aligned to 16; a macro, since the tests on a CPU define their own.
#ifndef SHARED_BYTES
#define SHARED_BYTES(name, bytes) __shared__ alignas(16) char name[bytes]
#endif

// The dynamic shared memory of the launch, aligned to a line of 128 bytes.
#ifndef SHARED_DYNAMIC
#define SHARED_DYNAMIC(name) extern __shared__ __align__(128) char name[]
#endif

typedef long long i64;
typedef unsigned long long u64;
typedef unsigned int u32;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef unsigned char u8;
typedef unsigned short u16;

struct f16 {
    unsigned short bits;
};
struct bf16 {
    unsigned short bits;
};

// T where it is not to be deduced from an argument, so that the other arguments are converted.
template <class T>
struct Same {
    typedef T type;
};

__device__ __forceinline__ float widen(f16 x) {
    float y;
#ifdef __CUDA_ARCH__
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
#else
    y = bits_as<_Float16>(x.bits);
#endif
    return y;
}
__device__ __forceinline__ float widen(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ bool widen(bool x) { return x; }
__device__ __forceinline__ i64 widen(i64 x) { return x; }
__device__ __forceinline__ i64 widen(i32 x) { return x; }
__device__ __forceinline__ i64 widen(i16 x) { return x; }
__device__ __forceinline__ i64 widen(i8 x) { return x; }
__device__ __forceinline__ i64 widen(u32 x) { return x; }
__device__ __forceinline__ i64 widen(u16 x) { return x; }
__device__ __forceinline__ i64 widen(u8 x) { return x; }

// Whether x == n, where n is known to be an i32: what depends on x alone is computed once where x is the same for many n.
__device__ __forceinline__ bool equals_int(i64 x, i64 n) {
    return static_cast<i32>(n) == static_cast<i32>(x) && x == static_cast<i32>(x);
}

template <class T>
struct Narrow {
    template <class U>
    static __device__ __forceinline__ T from(U x) {
        return static_cast<T>(x);
    }
};
template <>
struct Narrow<f16> {
    static __device__ __forceinline__ f16 from(float x) {
        f16 y;
#ifdef __CUDA_ARCH__
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
        y.bits = bits_as<unsigned short>(static_cast<_Float16>(x));
#endif
        return y;
    }
    static __device__ __forceinline__ f16 from(double x) {
        f16 y;
#ifdef __CUDA_ARCH__
        asm("cvt.rn.f16.f64 %0, %1;" : "=h"(y.bits) : "d"(x));
#else
        y.bits = bits_as<unsigned short>(static_cast<_Float16>(x));
#endif
        return y;
    }
    // Both, a in the lower half.
    static __device__ __forceinline__ u32 pair(float a, float b) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
        return both;
#else
        return from(a).bits | static_cast<u32>(from(b).bits) << 16;
#endif
    }
};
template <>
struct Narrow<bf16> {
    static __device__ __forceinline__ bf16 from(float x) {
        bf16 y;
#if __CUDA_ARCH__ >= 800
        y.bits = static_cast<unsigned short>(pair(x, 0.0f));
#else
        const u32 bits = __float_as_uint(x);
        // Rounding could carry a NaN's mantissa into the exponent: write the quiet NaN.
        const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        y.bits = static_cast<unsigned short>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
#endif
        return y;
    }
    static __device__ __forceinline__ bf16 from(double x) {
        // Round to odd first, so that the second rounding sees which side of a tie the double was on.
        const float near = static_cast<float>(x);
        u32 bits = __float_as_uint(near);
        if (static_cast<double>(near) != x && x == x) {
            const bool away = fabs(static_cast<double>(near)) > fabs(x);
            bits = (away ? bits - 1u : bits) | 1u;
        }
        return from(__uint_as_float(bits));
    }
    // Both, a in the lower half.
    static __device__ __forceinline__ u32 pair(float a, float b) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
        return both;
#else
        return from(a).bits | static_cast<u32>(from(b).bits) << 16;
#endif
    }
};
template <class T, class U>
__device__ __forceinline__ T narrow(U x) {
    return Narrow<T>::from(x);
}

// Keep the compiler from using what was loaded before this point, so that nothing waits for it there.
__device__ __forceinline__ void arrived(u64& loaded) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+l"(loaded));
#endif
}

// Keep the compiler from computing before this point what depends on a number.
__device__ __forceinline__ void known_from_here(int& number) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(number));
#endif
}
__device__ __forceinline__ void known_from_here(i64& number) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+l"(number));
#endif
}

// Return a pointer, and keep the compiler from computing it again where it is used.
template <class T>
__device__ __forceinline__ T* computed_once(T* pointer) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+l"(pointer));
#endif
    return pointer;
}

// A positive number, and what the host computed to divide by it (`divisor` in cuda/structs.py). Where it and the dividend are
// below 2^31, a quotient takes a multiplication; a division takes as long as some twenty instructions.
struct Divisor {
    i64 value;
    u64 inverse;  // in its low half 2^32 (2^shift / value - 1) rounded up, in its high half the shift; quotients are exact

    __device__ __forceinline__ u32 quotient(u32 number) const {
        const u64 high = static_cast<u64>(number) * static_cast<u32>(inverse) >> 32;
        return (static_cast<u32>(high) + number) >> static_cast<u32>(inverse >> 32);
    }
};

// The row in memory of a row of a value in which rows come again, or are in another order (`ir/repeats.py`). Neither
// `times` nor `inner` is larger than `block`.
__device__ __forceinline__ i64 repeated_row(
    i64 row, const Divisor& block, const Divisor& times, const Divisor& inner, i64 apart, i64 between, i64 within) {
    if (((row | block.value) >> 31) == 0) {
        const u32 number = static_cast<u32>(row), here = times.quotient(number), rows = static_cast<u32>(inner.value);
        const u32 rest = number - here * static_cast<u32>(times.value);
        return block.quotient(number) * apart + (here - inner.quotient(here) * rows) * between + rest * within;
    }
    return row / block.value * apart + row / times.value % inner.value * between + row % times.value * within;
}

// a b + c, rounded once; subnormal numbers count even with -ftz=true.
__device__ __forceinline__ float exact_multiply_add(float a, float b, float c) {
#ifdef __CUDA_ARCH__
    return __fmaf_ieee_rn(a, b, c);
#else
    return fmaf(a, b, c);
#endif
}

// V consecutive elements of a row: at most 16 bytes, moved by one access.
template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
    T v[V];
};

// The type of an access of so many bytes.
template <int Bytes>
struct Word;
template <>
struct Word<1> {
    typedef unsigned char type;
};
template <>
struct Word<2> {
    typedef unsigned short type;
};
template <>
struct Word<4> {
    typedef unsigned int type;
};
template <>
struct Word<8> {
    typedef uint2 type;
};
template <>
struct Word<16> {
    typedef uint4 type;
};

// Element j of a pack, widened. Both bf16 of a word take one instruction each.
template <class T, int V>
__device__ __forceinline__ auto widen(const Pack<T, V>& pack, int j) {
    return widen(pack.v[j]);
}
template <int V>
__device__ __forceinline__ float widen(const Pack<bf16, V>& pack, int j) {
    if constexpr (V % 2 == 0) {
        u32 both;
        memcpy(&both, &pack.v[j - j % 2], sizeof both);
        return __uint_as_float(j % 2 == 0 ? both << 16 : both & 0xffff0000u);
    }
    return widen(pack.v[j]);
}

// V float results, which `rounded` converts to T, of 16 bits, in pairs, by one instruction each. Those in a Pack are rounded already.
template <class T, int V>
struct Unrounded {
    float v[V];
};
template <int V, class T>
__device__ __forceinline__ Pack<T, V> rounded(const Unrounded<T, V>& results) {
    Pack<T, V> pack;
    if constexpr (V % 2 == 0) {
        u32 words[V / 2];
#pragma unroll
        for (int i = 0; i < V / 2; ++i) {
            words[i] = Narrow<T>::pair(results.v[2 * i], results.v[2 * i + 1]);
        }
        memcpy(&pack, words, sizeof pack);
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j) {
            pack.v[j] = narrow<T>(results.v[j]);
        }
    }
    return pack;
}
template <int V, class T>
__device__ __forceinline__ const Pack<T, V>& rounded(const Pack<T, V>& results) {
    return results;
}

template <int V, class T>
__device__ __forceinline__ Pack<T, V> load_pack(const T* from) {
    typedef typename Word<sizeof(T) * V>::type W;
    union Bits {
        W word;
        Pack<T, V> pack;
        __device__ Bits() {}
    } bits;
    bits.word = *reinterpret_cast<const W*>(from);
    return bits.pack;
}

// The same of 16 bytes that the L2 cache evicts last (sm_80 and later): results that are written beside them leave it first, in a
// steady stream. The number is the policy that `createpolicy.fractional.L2::evict_last` makes of 1.0.
template <int V, class T>
__device__ __forceinline__ Pack<T, V> load_evict_last(const T* from) {
    static_assert(sizeof(T) * V == 16, "narrower accesses take longer so");
#ifdef __CUDA_ARCH__
    u32 words[4];
    asm volatile("ld.global.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(__cvta_generic_to_global(from)), "l"(0x14F0000000000000ull));
    Pack<T, V> pack;
    memcpy(&pack, words, sizeof pack);
    return pack;
#else
    return load_pack<V>(from);
#endif
}

// The same from any address, one element after the other.
template <int V, class T>
__device__ __forceinline__ Pack<T, V> load_each(const T* from) {
    Pack<T, V> pack;
#pragma unroll
    for (int j = 0; j < V; ++j) {
        pack.v[j] = from[j];
    }
    return pack;
}

// A pack from any address, from the two aligned ones that it lies in. Up to V - 1 neighbours on both sides are read, too, even if
// another thread writes them, and dropped.
template <int V, class T>
__device__ __forceinline__ Pack<T, V> load_between(const T* from) {
    constexpr int bytes = sizeof(T) * V, words = bytes / 4;
    if constexpr (bytes < 4) {
        return load_each<V>(from);
    } else {
        const u64 first = reinterpret_cast<u64>(from) & ~static_cast<u64>(bytes - 1);
        const u64 last = (reinterpret_cast<u64>(from) + bytes - 1) & ~static_cast<u64>(bytes - 1);
        const Pack<T, V> packs[2] = {
            load_pack<V>(reinterpret_cast<const T*>(first)), load_pack<V>(reinterpret_cast<const T*>(last))};
        const u32 offset = static_cast<u32>(reinterpret_cast<u64>(from) - first);
        u32 w[2 * words];
        memcpy(w, packs, sizeof w);
        // Move the words to the front by 2, 1, and parts of one.
#pragma unroll
        for (int step = words / 2; step > 0; step /= 2) {
#pragma unroll
            for (int i = 0; i + step < 2 * words; ++i) {
                w[i] = offset / 4 & step ? w[i + step] : w[i];
            }
        }
#pragma unroll
        for (int i = 0; i < words; ++i) {
            w[i] = __funnelshift_r(w[i], w[i + 1], offset % 4 * 8);
        }
        Pack<T, V> pack;
        memcpy(&pack, w, sizeof pack);
        return pack;
    }
}

template <int V, class T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T, V>& pack) {
    typedef typename Word<sizeof(T) * V>::type W;
    union Bits {
        W word;
        Pack<T, V> pack;
        __device__ Bits() {}
    } bits;
    bits.pack = pack;
    *reinterpret_cast<W*>(to) = bits.word;
}

// The same to global memory, by exactly one instruction: in unrolled loops the compiler makes several of a store_pack.
template <int V, class T>
__device__ __forceinline__ void store_global(T* to, const Pack<T, V>& pack) {
#ifdef __CUDA_ARCH__
    constexpr int bytes = sizeof(T) * V;
    if constexpr (bytes >= 8) {
        u32 words[bytes / 4];
        memcpy(words, &pack, bytes);
        if constexpr (bytes == 16) {
            asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]),
                         "r"(words[1]), "r"(words[2]), "r"(words[3])
                         : "memory");
        } else {
            asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(words[0]), "r"(words[1])
                         : "memory");
        }
        return;
    }
#endif
    store_pack<V>(to, pack);
}

// A pack whose pairs of elements change places. One element alone is loaded from where the other one is.
template <class T, int V>
__device__ __forceinline__ Pack<T, V> swap_pairs(const Pack<T, V>& pack) {
    Pack<T, V> swapped;
#pragma unroll
    for (int v = 0; v < V; ++v) {
        swapped.v[v] = pack.v[V == 1 ? v : v ^ 1];
    }
    return swapped;
}

// Keep the compiler from widening elements before this point: it would hold wide ones beside those of the pack.
template <class T, int V>
__device__ __forceinline__ void keep_packed(Pack<T, V>& pack) {
#ifdef __CUDA_ARCH__
    if constexpr (sizeof(pack) % 4 == 0) {
        u32* const words = reinterpret_cast<u32*>(&pack);
#pragma unroll
        for (int i = 0; i < sizeof(pack) / 4; ++i) {
            asm volatile("" : "+r"(words[i]));
        }
    }
#endif
}

// The index of a stage as a type, for overloads.
template <int S>
struct At {};

// The largest of the sizes, at least 8.
template <class... Sizes>
__host__ __device__ constexpr int largest_of(Sizes... sizes) {
    int most = 8;
    ((most = static_cast<int>(sizes) > most ? static_cast<int>(sizes) : most), ...);
    return most;
}
