// How packs of neighbouring elements are added to accumulators: element by element, or what a pack adds up to.
#pragma once

#include "reductions.cuh"

// Sum V numbers as a balanced tree, in which each goes through log2(V) roundings instead of up to V - 1. Overwrites x.
template <class T, int V>
__device__ __forceinline__ T sum_in_pairs(T (&x)[V]) {
    static_assert((V & (V - 1)) == 0, "halves of halves");
#pragma unroll
    for (int n = V / 2; n > 0; n /= 2) {
#pragma unroll
        for (int j = 0; j < n; ++j) {
            x[j] += x[j + n];
        }
    }
    return x[0];
}

// Add V elements at neighbouring positions, from `at` on.
template <class Accumulator, class X, int V>
__device__ __forceinline__ void add_pack(Accumulator& to, const X (&x)[V], i64 at) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
        to.add(x[j], at + j);
    }
}
template <class T, class X, int V>
__device__ __forceinline__ void add_pack(Sum<T>& to, const X (&x)[V], i64 at) {
    T terms[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
        terms[j] = x[j];
    }
    to.add(sum_in_pairs(terms), at);
}
// Their mean and squared deviations from it, in pairs, then merged: fewer roundings than element by element, and operations.
template <class T, class X, int V>
__device__ __forceinline__ void add_pack(Moments<T>& to, const X (&x)[V], i64 at) {
    if constexpr (V == 1) {
        to.add(x[0], at);
    } else {
        to.first = to.n == T(0) ? static_cast<T>(x[0]) : to.first;
        T differences[V], terms[V];
#pragma unroll
        for (int j = 0; j < V; ++j) {
            differences[j] = x[j] - to.first;
            terms[j] = differences[j] * (T(1) / T(V));  // before they are added, which large ones would overflow
        }
        const T mean = sum_in_pairs(terms);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            terms[j] = (differences[j] - mean) * (differences[j] - mean);
        }
        to.add_group(T(V), quick_divide(T(V), to.n + T(V)), mean - to.mean, sum_in_pairs(terms));
    }
}
// Add V terms of an ExpSum, computed where the maximum was known, or of a ShareSum, relative to its base. Overwrites them.
template <class Accumulator, int V>
__device__ __forceinline__ void add_terms(Accumulator& to, typename Accumulator::Value (&terms)[V]) {
    to.s += sum_in_pairs(terms);
}
template <class Accumulator, class X, int V>
__device__ __forceinline__ void add_exponentials(Accumulator& to, const X (&x)[V]) {
    typename Accumulator::Value terms[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
        terms[j] = to.term(x[j]);
    }
    add_terms(to, terms);
}
// Of these two themselves, whose Base adds nothing; what extends an ExpSum adds element by element.
template <class Base, class X, int V>
__device__ __forceinline__ void add_pack(ExpSum<Base>& to, const X (&x)[V], i64) {
    add_exponentials(to, x);
}
template <class Base, class X, int V>
__device__ __forceinline__ void add_pack(ShareSum<Base>& to, const X (&x)[V], i64) {
    add_exponentials(to, x);
}
