// Functions for 16-bit results, whose rounding is a thousand times larger than float32's: relative errors below 1e-5, in few
// instructions and without branches, so that the elements of a thread are computed in turns. Special values come out as of the
// exact functions. As everywhere, subnormal numbers are zeros on a GPU.
//
// The polynomials are those of the least relative error in the range that each is used in, their coefficients rounded to
// float32. Where a function is near zero, the approximate instructions have errors relative to 1, and a polynomial takes over.
#pragma once

#include "functions.cuh"

// log2(x) and the square root of x by one instruction each: the error of the first for x from 1/2 to 2, and the relative error of
// the second, is 2^-22 at most.
__device__ __forceinline__ float approximate_log2(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return log2f(x);
#endif
}
__device__ __forceinline__ float quick_sqrt(float x) {
#ifdef __CUDA_ARCH__
    float y;
    asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return sqrtf(x);
#endif
}

// a where the condition holds, else b, which is computed in any case.
__device__ __forceinline__ float quick_choice(bool condition, float a, float b) {
    const float other = in_any_case(b);
    return condition ? a : other;
}

__device__ __forceinline__ float quick_exp(float x) { return exp2f(x * 1.44269504f); }

// The same relative to the base of a ShareSum: exp(x - m) times a factor that all exponentials with the base have.
__device__ __forceinline__ float shifted_exp(float x, float scale, float shift) { return exp2f(fmaf(x, scale, -shift)); }

// Where 1 / x is subnormal, and zero on a GPU, so is the exact one.
__device__ __forceinline__ float quick_reciprocal(float x) { return approximate_reciprocal(x); }

// a / b for all b, in contrast to `quick_divide`: reciprocals of huge numbers would be flushed to zero. Those of one b are
// computed once for all a.
__device__ __forceinline__ float quick_quotient(float a, float b) {
#ifdef __CUDA_ARCH__
    const float scale = fabsf(b) > 1.0e37f ? 0.0625f : 1.0f;
    return a * scale * approximate_reciprocal(b * scale);
#else
    return a / b;
#endif
}

// The logarithm of x = 1 + d in units of which an octave has so many.
__device__ __forceinline__ float quick_log(float x, float d, float octave) {
    const float unit = octave * 1.44269504f;
    float near = -0.250783635f * unit;
    near = fmaf(near, d, 0.334116620f * unit);
    near = fmaf(near, d, -0.499999301f * unit);
    near = fmaf(near, d, 0.999999617f * unit);
    return fabsf(d) < 0.0625f ? near * d : approximate_log2(x) * octave;
}
__device__ __forceinline__ float quick_log(float x, float octave) { return quick_log(x, x - 1.0f, octave); }
// 1 + x is rounded, which counts near zero alone.
__device__ __forceinline__ float quick_log1p(float x) { return quick_log(1.0f + x, x, 0.693147181f); }

// log(1 + x) for x from 0 to 1.
__device__ __forceinline__ float quick_log1p_of_share(float x) {
    float sum = 0.0141410165f;
    sum = fmaf(sum, x, -0.0664017870f);
    sum = fmaf(sum, x, 0.149223862f);
    sum = fmaf(sum, x, -0.235038598f);
    sum = fmaf(sum, x, 0.331094494f);
    sum = fmaf(sum, x, -0.499869662f);
    sum = fmaf(sum, x, 0.999998732f);
    return sum * x;
}

__device__ __forceinline__ float quick_expm1(float x) {
    float near = 0.0416666567f;
    near = fmaf(near, x, 0.166796868f);
    near = fmaf(near, x, 0.500000206f);
    near = fmaf(near, x, 0.999999746f);
    return fabsf(x) < 0.125f ? near * x : quick_exp(x) - 1.0f;
}

__device__ __forceinline__ float quick_tanh(float x) {
    const float squared = x * x, far = 1.0f - 2.0f * approximate_reciprocal(1.0f + exp2f(x * 2.88539008f));
    return fabsf(x) < 0.25f ? x * fmaf(fmaf(0.128416130f, squared, -0.333219080f), squared, 0.999999604f) : far;
}

// Half of exp(|x|) is infinite where the results are, and no sooner.
__device__ __forceinline__ float quick_cosh(float x) {
    const float half = exp2f(fmaf(fabsf(x), 1.44269504f, -1.0f));
    return fmaf(0.25f, approximate_reciprocal(half), half);
}
__device__ __forceinline__ float quick_sinh(float x) {
    const float half = exp2f(fmaf(fabsf(x), 1.44269504f, -1.0f)), squared = x * x;
    const float far = copysignf(fmaf(-0.25f, approximate_reciprocal(half), half), x);
    return fabsf(x) < 0.5f ? x * fmaf(fmaf(0.00840779f, squared, 0.16665972f), squared, 1.00000010f) : far;
}

// Far from zero 1 - erfc(|x|), with a polynomial for log2(erfc).
__device__ __forceinline__ float quick_erf(float x) {
    const float a = fabsf(x), squared = x * x;
    float near = 0.00415881f;
    near = fmaf(near, squared, -0.02636023f);
    near = fmaf(near, squared, 0.11273735f);
    near = fmaf(near, squared, -0.37611930f);
    near = fmaf(near, squared, 1.12837909f);
    float far = -2.05809825e-03f;
    far = fmaf(far, a, 2.43357113e-02f);
    far = fmaf(far, a, -1.36760459e-01f);
    far = fmaf(far, a, -9.31457766e-01f);
    far = fmaf(far, a, -1.62107909f);
    far = fmaf(far, a, -1.39739319e-03f);
    return quick_choice(a < 0.75f, in_any_case(near * x), copysignf(1.0f - exp2f(far), x));
}

// log(exp(a) + exp(b)). The difference of equal infinities is NaN.
__device__ __forceinline__ float quick_logaddexp(float a, float b) {
    return quick_choice(a == b, a + 0.693147181f, nan_max(a, b) + quick_log1p_of_share(quick_exp(-fabsf(a - b))));
}
// log(1 + exp(x)).
__device__ __forceinline__ float quick_softplus(float x) {
    return nan_max(x, 0.0f) + quick_log1p_of_share(quick_exp(-fabsf(x)));
}
__device__ __forceinline__ float quick_log_sigmoid(float x) {
    return nan_min(x, 0.0f) - quick_log1p_of_share(quick_exp(-fabsf(x)));
}
// x tanh(log(1 + e)) = x e (e + 2) / (e (e + 2) + 2), for e = exp(x). Beyond x = 20 the factor is 1.
__device__ __forceinline__ float quick_mish(float x) {
    const float e = quick_exp(fminf(x, 20.0f)), n = e * (e + 2.0f);
    return x * (n * approximate_reciprocal(n + 2.0f));
}

// Of x >= 0, Phi(-x) exp(x^2 / 2), with coefficients of the least relative error up to x = 20.
__device__ __forceinline__ float quick_tail(float x) {
    const float u = quick_divide(1.0f, fmaf(0.268700577f, x, 1.0f));
    float sum = -0.06270942f;
    sum = fmaf(sum, u, 0.1680205f);
    sum = fmaf(sum, u, -0.03496008f);
    sum = fmaf(sum, u, 0.12391982f);
    sum = fmaf(sum, u, 0.0902961f);
    sum = fmaf(sum, u, 0.10828892f);
    sum = fmaf(sum, u, 0.10714364f);
    return sum * u;
}
// As `gelu`, with the tail alone.
__device__ __forceinline__ float quick_gelu(float x) {
    const float tail = exp2f(x * x * -0.721347520f) * quick_tail(fabsf(x));
    return x * (x < 0.0f ? tail : 1.0f - tail);
}
// The slope at -|x| is Phi(-|x|) - |x| phi(x), at |x| 1 minus that.
__device__ __forceinline__ float quick_gelu_slope(float x) {
    const float a = fabsf(x), excess = exp2f(x * x * -0.721347520f) * fmaf(a, 0.398942280f, -quick_tail(a));
    return x < 0.0f ? 0.0f - excess : 1.0f + excess;  // 0, not -0, far below zero
}
// As `gated_slope`, without Newton's step.
__device__ __forceinline__ float quick_gated_slope(float x, float z, float rate) {
    const float e = quick_exp(-fabsf(z)), large = approximate_reciprocal(1.0f + e), small = e * large;
    return fmaf(small * large * x, rate, z < 0.0f ? small : large);
}
