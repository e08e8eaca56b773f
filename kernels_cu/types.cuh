// Element types, vector loads and stores, and the functions that emitted expressions call.
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

// The dynamic shared memory of the launch, aligned to 16.
#ifndef SHARED_DYNAMIC
#define SHARED_DYNAMIC(name) extern __shared__ __align__(16) char name[]
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
};
template <>
struct Narrow<bf16> {
    static __device__ __forceinline__ bf16 from(float x) {
#if __CUDA_ARCH__ >= 800
        u32 both;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
        bf16 z;
        z.bits = static_cast<unsigned short>(both);
        return z;
#else
        const u32 bits = __float_as_uint(x);
        // Rounding could carry a NaN's mantissa into the exponent: write the quiet NaN.
        const u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        bf16 y;
        y.bits = static_cast<unsigned short>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
        return y;
#endif
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

template <class T>
__device__ __forceinline__ T infinity();
template <>
__device__ __forceinline__ float infinity<float>() {
    return __int_as_float(0x7f800000);
}
template <>
__device__ __forceinline__ double infinity<double>() {
    return __longlong_as_double(0x7ff0000000000000LL);
}

// Maximum and minimum that propagate NaN, as NumPy's and PyTorch's do.
template <class T>
__device__ __forceinline__ T nan_max(T a, typename Same<T>::type b) {
    return (a > b || a != a) ? a : b;
}
template <class T>
__device__ __forceinline__ T nan_min(T a, typename Same<T>::type b) {
    return (a < b || a != a) ? a : b;
}
#if __CUDA_ARCH__ >= 800
template <>
__device__ __forceinline__ float nan_max<float>(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
template <>
__device__ __forceinline__ float nan_min<float>(float a, float b) {
    float c;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}
#endif

// Division of many elements by one divisor: multiply by its reciprocal, then correct by the exact remainder. Where this could
// fail (an extreme or NaN divisor, an infinite quotient) the result is not finite, and the caller divides.
template <class T>
__device__ __forceinline__ T reciprocal_of(T d) {
    return (fabs(d) > T(1e-30) && fabs(d) < T(1e30)) ? T(1) / d : infinity<T>() - infinity<T>();
}
template <class T>
__device__ __forceinline__ T divide_by(T x, typename Same<T>::type d, typename Same<T>::type reciprocal) {
    const T q = x * reciprocal;
    // The remainder of -0 is +0: take the sign of the quotient.
    return copysign(fma(fma(-q, d, x), reciprocal, q), q);
}

// Remainder and quotient as Python and NumPy define them: the remainder has the sign of the divisor. In double, where a
// remainder that is subnormal in float is not flushed to zero before its sign is asked.
template <class T>
__device__ __forceinline__ T remainder_of(T a, typename Same<T>::type b) {
    const double rest = fmod(static_cast<double>(a), static_cast<double>(b));
    if (b == T(0)) {
        return static_cast<T>(rest);
    }
    if (rest == 0.0) {
        return copysign(T(0), b);
    }
    return static_cast<T>((b < T(0)) != (rest < 0.0) ? rest + b : rest);
}
template <class T>
__device__ __forceinline__ T floor_quotient(T a, typename Same<T>::type b) {
    if (b == T(0)) {
        return a / b;
    }
    const double rest = fmod(static_cast<double>(a), static_cast<double>(b));
    double quotient = (static_cast<double>(a) - rest) / static_cast<double>(b);
    if (rest != 0.0 && (b < T(0)) != (rest < 0.0)) {
        quotient -= 1.0;
    }
    if (quotient == 0.0) {
        return copysign(T(0), a / b);
    }
    const double below = floor(quotient);
    return static_cast<T>(quotient - below > 0.5 ? below + 1.0 : below);
}

// Of integers as in NumPy: by zero 0; the smallest number by -1, which the hardware may trap, wraps around.
__device__ __forceinline__ i64 fmod(i64 a, i64 b) { return b == 0 || b == -1 ? 0 : a % b; }
__device__ __forceinline__ i64 remainder_of(i64 a, i64 b) {
    const i64 rest = fmod(a, b);
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
__device__ __forceinline__ i64 floor_quotient(i64 a, i64 b) {
    if (b == 0 || b == -1) {
        return b == 0 ? 0 : static_cast<i64>(0 - static_cast<u64>(a));
    }
    const i64 quotient = a / b, rest = a - quotient * b;
    return rest != 0 && (rest < 0) != (b < 0) ? quotient - 1 : quotient;
}

// Shifts as in NumPy: by a negative count, or at least the width, 0; to the right 0 or -1 by the sign.
__device__ __forceinline__ i64 shifted_left(i64 a, i64 count) {
    return static_cast<u64>(count) < 64 ? static_cast<i64>(static_cast<u64>(a) << count) : 0;
}
__device__ __forceinline__ i64 shifted_right(i64 a, i64 count) { return a >> (static_cast<u64>(count) < 64 ? count : 63); }

// top + log(total), rounded once: total is m 2^e, and e times the first bits of log(2) is exact.
__device__ __forceinline__ float plus_log(float top, float total) {
    if (!(total >= 1e-30f && total <= 1e38f)) {
        return top + logf(total);
    }
    const u32 bits = __float_as_uint(total);
    const int e = static_cast<int>(bits - 0x3f3504f3u) >> 23;  // m from sqrt(1/2) to sqrt(2)
    const float m = __uint_as_float(bits - (static_cast<u32>(e) << 23));
    const float high = static_cast<float>(e) * 0.693115234375f;
    const float low = static_cast<float>(e) * 3.1946184e-5f + logf(m);
    const float sum = top + high, back = sum - top;
    return sum + (((top - (sum - back)) + (high - back)) + low);
}
__device__ __forceinline__ double plus_log(double top, double total) { return top + log(total); }

// exp(d) for d <= 0 in a sum, where terms far below 1 weigh little: one rounding in d * log2(e) is allowed.
__device__ __forceinline__ float exp_in_sum(float d) { return exp2f(d * 1.44269504f); }
__device__ __forceinline__ double exp_in_sum(double d) { return exp(d); }

// x / n with an error of a bit or two, without the slow path of a rounded division; 0 where |n| is above 2^126.
__device__ __forceinline__ float quick_divide(float x, float n) { return __fdividef(x, n); }
__device__ __forceinline__ double quick_divide(double x, double n) { return x / n; }

// A value that is computed in any case: both sides of a choice take less than a branch whose sides a warp takes in turn.
__device__ __forceinline__ float in_any_case(float x) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+f"(x));
#endif
    return x;
}

// x Phi(x), the Gaussian error linear unit. Phi is 1/2 + x times a polynomial in x^2 for |x| < 1; farther out Phi(-a) is
// exp(-a^2 / 2) times a polynomial in 1 / (1 + 3/8 a), the form of Abramowitz and Stegun 7.1.26 (after Hastings). The
// coefficients are those of the least relative error: 2^-30, and 2^-28 up to a = 14.5, from where on the result is 0.
__device__ __forceinline__ float gelu(float x) {
    const float a = fabsf(x), squared = x * x, u = quick_divide(1.0f, fmaf(0.375f, a, 1.0f));
    float near = -7.65420828e-6f;
    near = fmaf(near, squared, 1.13486371e-4f);
    near = fmaf(near, squared, -1.18632999e-3f);
    near = fmaf(near, squared, 9.97332297e-3f);
    near = fmaf(near, squared, -6.64903596e-2f);
    near = fmaf(near, squared, 0.398942292f);
    float far = -0.0458391942f;
    far = fmaf(far, u, 0.184323832f);
    far = fmaf(far, u, -0.258925438f);
    far = fmaf(far, u, 0.110167861f);
    far = fmaf(far, u, -0.0129639227f);
    far = fmaf(far, u, 0.0967756510f);
    far = fmaf(far, u, 0.127115205f);
    far = fmaf(far, u, 0.149718717f);
    far = fmaf(far, u, 0.149599403f);
    const float tail = in_any_case(exp2f(squared * -0.721347520f) * (far * u)), middle = in_any_case(fmaf(near, x, 0.5f));
    return x * (a < 1.0f ? middle : x < 0.0f ? tail : 1.0f - tail);
}
__device__ __forceinline__ double gelu(double x) { return 0.5 * x * erfc(-x * 0.70710678118654752); }

// Functions for 16-bit results, whose rounding is a thousand times larger: relative errors below 1e-5.
__device__ __forceinline__ float quick_exp(float x) { return exp2f(x * 1.44269504f); }
// As `gelu`, with the tail alone, and coefficients of the least relative error up to |x| = 20.
__device__ __forceinline__ float quick_gelu(float x) {
    const float u = quick_divide(1.0f, fmaf(0.268700577f, fabsf(x), 1.0f));
    float sum = -0.06270942f;
    sum = fmaf(sum, u, 0.1680205f);
    sum = fmaf(sum, u, -0.03496008f);
    sum = fmaf(sum, u, 0.12391982f);
    sum = fmaf(sum, u, 0.0902961f);
    sum = fmaf(sum, u, 0.10828892f);
    sum = fmaf(sum, u, 0.10714364f);
    const float tail = exp2f(x * x * -0.721347520f) * (sum * u);
    return x * (x < 0.0f ? tail : 1.0f - tail);
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
