// Functions that emitted expressions and accumulators call: with NumPy's rules where CUDA's differ, with fewer roundings, or with
// fewer instructions.
#pragma once

#include "types.cuh"

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

// 1 / x by one instruction, with a relative error of 2^-22 at most; and with one step of Newton's method, which rounds as a division
// does but for an ulp of few numbers.
__device__ __forceinline__ float approximate_reciprocal(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return 1.0f / x;
#endif
}
__device__ __forceinline__ float rounded_reciprocal(float d) {
    const float y = approximate_reciprocal(d);
    return fmaf(y, fmaf(-d, y, 1.0f), y);
}
__device__ __forceinline__ double rounded_reciprocal(double d) { return 1.0 / d; }

// Division of many elements by one divisor: multiply by its reciprocal, then correct by the exact remainder. Where this could
// fail (an extreme or NaN divisor, an infinite quotient) the result is not finite, and the caller divides.
template <class T>
__device__ __forceinline__ T reciprocal_of(T d) {
    return (fabs(d) > T(1e-30) && fabs(d) < T(1e30)) ? rounded_reciprocal(d) : infinity<T>() - infinity<T>();
}
template <class T>
__device__ __forceinline__ T divide_by(T x, typename Same<T>::type d, typename Same<T>::type reciprocal) {
    const T q = x * reciprocal;
    // The remainder of -0 is +0: take the sign of the quotient.
    return copysign(fma(fma(-q, d, x), reciprocal, q), q);
}

// The same of x above zero, or +0, whose quotient needs no sign.
template <class T>
__device__ __forceinline__ T divide_positive(T x, typename Same<T>::type d, typename Same<T>::type reciprocal) {
    const T q = x * reciprocal;
    return fma(fma(-q, d, x), reciprocal, q);
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
// exp(d) for d <= 0, by which a whole sum moves to another maximum, several times on its way to the row's. The hardware's
// exponential of a negative number is up to 5e-8 too small, for it truncates; 5e-8 log(2) makes up for that on average, and leaves 1
// at d = 0.
__device__ __forceinline__ float exp_of_move(float d) { return exp2f(fmaf(d, 1.44269504f, 5e-8f)); }
__device__ __forceinline__ double exp_of_move(double d) { return exp(d); }

// x / n with an error of a bit or two, without the slow path of a rounded division; 0 where |n| is above 2^126.
__device__ __forceinline__ float quick_divide(float x, float n) { return __fdividef(x, n); }
__device__ __forceinline__ double quick_divide(double x, double n) { return x / n; }

// Return x, and keep the compiler from computing it in one side of a branch alone: both sides of a choice take less time than a
// branch of which a warp takes one side after the other.
__device__ __forceinline__ float in_any_case(float x) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+f"(x));
#endif
    return x;
}

// 1 / (1 + exp(-x)). The divisor is from 1 to 2^127, so that one step of Newton's method rounds its reciprocal well: a rounded
// division would take twice the instructions. What is below 2^-126 is 0, as in all arithmetic of float32 here.
__device__ __forceinline__ float sigmoid(float x) {
    const float divisor = 1.0f + expf(nan_min(-x, 88.0f)), reciprocal = quick_divide(1.0f, divisor);
    return fmaf(reciprocal, fmaf(-divisor, reciprocal, 1.0f), reciprocal);
}
__device__ __forceinline__ double sigmoid(double x) { return 1.0 / (1.0 + exp(-x)); }

// x Phi(x), the Gaussian error linear unit. Phi is 1/2 + x times a polynomial in x^2 for |x| < 1; farther out Phi(-a) is
// exp(-a^2 / 2) times a polynomial in 1 / (1 + 3/8 a), the form of Abramowitz and Stegun 7.1.26 (after Hastings). The
// coefficients are those of the least relative error, rounded to float32, which alone makes one of 2^-23.7 in Phi; the rounded
// argument of the exponential one that grows with x^2. Beyond a = 14.5 the result is 0 or x.
__device__ __forceinline__ float gelu_middle(float squared) {
    float near = -7.65420828e-6f;
    near = fmaf(near, squared, 1.13486371e-4f);
    near = fmaf(near, squared, -1.18632999e-3f);
    near = fmaf(near, squared, 9.97332297e-3f);
    near = fmaf(near, squared, -6.64903596e-2f);
    return fmaf(near, squared, 0.398942292f);
}
__device__ __forceinline__ float gelu_tail(float u) {
    float far = -0.0458391942f;
    far = fmaf(far, u, 0.184323832f);
    far = fmaf(far, u, -0.258925438f);
    far = fmaf(far, u, 0.110167861f);
    far = fmaf(far, u, -0.0129639227f);
    far = fmaf(far, u, 0.0967756510f);
    far = fmaf(far, u, 0.127115205f);
    far = fmaf(far, u, 0.149718717f);
    return fmaf(far, u, 0.149599403f) * u;
}
__device__ __forceinline__ float gelu(float x) {
    const float a = fabsf(x), squared = x * x, u = quick_divide(1.0f, fmaf(0.375f, a, 1.0f));
    const float tail = in_any_case(exp2f(squared * -0.721347520f) * gelu_tail(u));
    const float middle = in_any_case(fmaf(gelu_middle(squared), x, 0.5f));
    return x * (a < 1.0f ? middle : x < 0.0f ? tail : 1.0f - tail);
}
__device__ __forceinline__ double gelu(double x) { return 0.5 * x * erfc(-x * 0.70710678118654752); }

// The derivative of gelu, Phi(x) + x phi(x), from the same parts.
__device__ __forceinline__ float gelu_slope(float x) {
    const float a = fabsf(x), squared = x * x, density = exp2f(squared * -0.721347520f), u = quick_divide(1.0f, fmaf(0.375f, a, 1.0f));
    const float tail = in_any_case(density * gelu_tail(u)), middle = in_any_case(fmaf(gelu_middle(squared), x, 0.5f));
    return fmaf(x * density, 0.398942280f, a < 1.0f ? middle : x < 0.0f ? tail : 1.0f - tail);
}
__device__ __forceinline__ double gelu_slope(double x) {
    return 0.5 * erfc(-x * 0.70710678118654752) + x * exp(-0.5 * x * x) * 0.39894228040143268;
}

// The derivative of x sigmoid(z), where z has the derivative `rate`: sigmoid(z) + sigmoid(z) sigmoid(-z) x rate. Both sigmoids come
// from one exponential.
__device__ __forceinline__ float gated_slope(float x, float z, float rate) {
    const float e = expf(-fabsf(z)), divisor = 1.0f + e, reciprocal = quick_divide(1.0f, divisor);
    const float large = fmaf(reciprocal, fmaf(-divisor, reciprocal, 1.0f), reciprocal), small = e * large;
    return fmaf(small * large * x, rate, z < 0.0f ? small : large);
}
__device__ __forceinline__ double gated_slope(double x, double z, double rate) {
    const double high = sigmoid(z);
    return high + high * sigmoid(-z) * x * rate;
}
