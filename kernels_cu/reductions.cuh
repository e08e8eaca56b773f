// Accumulators of reductions.
//
// Elements come in tiles: a thread calls peek(x) for each element of a tile, settle() once, then add_pack(accumulator, x, at) for
// each pack of neighbours, of which `at` is the first one's position along the reduced axis. That calls add(x, at) for each
// element, or adds up the pack first. Only what extends a Top or a Bottom looks ahead, to move to another extreme once
// per tile instead of once per element. Before anything is added start() takes the place of settle(): no sum has to be moved.
//
// settle(true) moves even if the extreme is not new, or not new by much: without a branch, before which loads would have to wait.
//
// Lanes of a warp combine in two butterfly rounds: lead(mask) with every mask, settle(true) once, exchange(mask, upper) with every
// mask. Both read the lane whose index differs in `mask`; `upper` tells that the own index is the larger one. All lanes of
// `members` have to call them together, and hold the same bits afterwards.
// merge(other) adds a whole accumulator; in a fixed order it gives fixed bits.
#pragma once

#include "quick.cuh"

// What accumulators that do not look ahead have in common.
struct Unled {
    template <class T>
    __device__ __forceinline__ void peek(T) {}
    __device__ __forceinline__ void settle(bool = false) {}
    __device__ __forceinline__ void start() {}
    __device__ __forceinline__ void lead(int, u32) {}
};

template <class T>
struct Sum : Unled {
    T v = T(0);
    __device__ __forceinline__ void add(T x, i64) { v += x; }
    __device__ __forceinline__ void merge(const Sum& o) { v += o.v; }
    __device__ __forceinline__ void exchange(int mask, bool, u32 members) { v += __shfl_xor_sync(members, v, mask); }
    __device__ __forceinline__ T total() const { return v; }
};

template <class T>
struct Product : Unled {
    T v = T(1);
    __device__ __forceinline__ void add(T x, i64) { v *= x; }
    __device__ __forceinline__ void merge(const Product& o) { v *= o.v; }
    __device__ __forceinline__ void exchange(int mask, bool, u32 members) { v *= __shfl_xor_sync(members, v, mask); }
    __device__ __forceinline__ T total() const { return v; }
};

template <class T>
struct Max : Unled {
    T v = -infinity<T>();
    __device__ __forceinline__ void add(T x, i64) { v = nan_max(v, x); }
    __device__ __forceinline__ void merge(const Max& o) { v = nan_max(v, o.v); }
    __device__ __forceinline__ void exchange(int mask, bool, u32 members) {
        v = nan_max(v, __shfl_xor_sync(members, v, mask));
    }
    __device__ __forceinline__ T extreme() const { return v; }
};

template <class T>
struct Min : Unled {
    T v = infinity<T>();
    __device__ __forceinline__ void add(T x, i64) { v = nan_min(v, x); }
    __device__ __forceinline__ void merge(const Min& o) { v = nan_min(v, o.v); }
    __device__ __forceinline__ void exchange(int mask, bool, u32 members) {
        v = nan_min(v, __shfl_xor_sync(members, v, mask));
    }
    __device__ __forceinline__ T extreme() const { return v; }
};

// The maximum m, or minimum, that others extend by what is relative to it.
template <class T, bool Largest>
struct Extreme {
    typedef T Value;
    T m = best_of_none();
    T ahead = best_of_none();  // the extreme that settle() moves m to

    static __device__ __forceinline__ T best_of_none() { return Largest ? -infinity<T>() : infinity<T>(); }
    static __device__ __forceinline__ T best(T a, T b) { return Largest ? nan_max(a, b) : nan_min(a, b); }

    __device__ __forceinline__ void peek(T x) { ahead = best(ahead, x); }
    __device__ __forceinline__ void settle(bool = false) { m = ahead; }
    __device__ __forceinline__ void start() { m = ahead; }
    __device__ __forceinline__ void add(T, i64) {}
    __device__ __forceinline__ void lead(int mask, u32 members) {
        ahead = best(ahead, __shfl_xor_sync(members, ahead, mask));
    }
    __device__ __forceinline__ void exchange(int, bool, u32) {}
    __device__ __forceinline__ void merge(const Extreme& o) { m = ahead = best(m, o.m); }
    __device__ __forceinline__ T extreme() const { return m; }
};
template <class T>
using Top = Extreme<T, true>;
template <class T>
using Bottom = Extreme<T, false>;

// What exponentials in a sum are relative to: exp(x - m), but for a factor near 1 which all of them have. For float one fused
// multiply-add makes x log2(e) - shift, where shift is m log2(e), rounded. From 2^30 on, where the next float is so far that
// its exponential is 0, the rounding would be no factor near 1: there 1 takes the place of log2(e). While all elements are
// -inf, m is the least number that is not.
template <class T>
struct ExpBase;
template <>
struct ExpBase<float> {
    static constexpr float lowest = -3.402823466e38f, slack = 3.0f;
    static constexpr float unit = 0.693147181f;  // of an exponent
    float scale = 1.0f, shift = lowest;

    static __device__ __forceinline__ ExpBase near(float m) {
        ExpBase base;
        base.scale = fabsf(m) < 1.2e9f ? 1.44269504f : 1.0f;
        base.shift = fmaxf(m * base.scale, lowest);
        return base;
    }
    __device__ __forceinline__ float exponent(float x) const { return fmaf(x, scale, -shift); }
    __device__ __forceinline__ float relative(float x) const { return exp2f(exponent(x)); }
    // Whether an element is so far above the base that this should follow; NaN is.
    __device__ __forceinline__ bool is_below(float x) const { return !(exponent(x) <= slack); }
    __device__ __forceinline__ bool differs(const ExpBase& o) const { return shift != o.shift || scale != o.scale; }
    // What exponents change by from this base to a higher one, and what takes a sum there, and to m itself.
    __device__ __forceinline__ float rise(const ExpBase& to) const { return shift - to.shift; }
    __device__ __forceinline__ float factor(const ExpBase& to) const { return scale == to.scale ? exp2f(rise(to)) : 0.0f; }
    __device__ __forceinline__ float factor_to(float m) const { return exp2f(-exponent(m)); }
    __device__ __forceinline__ void be_exact() { scale = shift = 0.0f; }
    __device__ __forceinline__ bool is_huge() const { return scale == 1.0f; }
};
template <>
struct ExpBase<double> {
    static constexpr double lowest = -1.7976931348623157e308, unit = 1.0;
    double at = lowest;

    static __device__ __forceinline__ ExpBase near(double m) {
        ExpBase base;
        base.at = fmax(m, lowest);
        return base;
    }
    __device__ __forceinline__ double exponent(double x) const { return x - at; }
    __device__ __forceinline__ double relative(double x) const { return exp(exponent(x)); }
    __device__ __forceinline__ bool is_below(double x) const { return !(x <= at); }
    __device__ __forceinline__ bool differs(const ExpBase& o) const { return at != o.at; }
    __device__ __forceinline__ double rise(const ExpBase& to) const { return at - to.at; }
    __device__ __forceinline__ double factor(const ExpBase& to) const { return exp(rise(to)); }
    __device__ __forceinline__ double factor_to(double m) const { return exp(at - m); }
    __device__ __forceinline__ void be_exact() {}
};

// What `Base`, a Top, holds, and s = sum of exp(x - m), in one pass (online softmax, Milakov and Gimelshein 2018). The base of
// the exponentials follows the maximum where that has risen far.
template <class Base>
struct ExpSum : Base {
    typedef typename Base::Value T;
    typedef ExpBase<T> From;
    From from;
    T s = T(0);

    __device__ __forceinline__ void settle(bool always = false) {
        if (always || from.is_below(this->ahead)) {
            const From to = From::near(this->ahead);
            s *= from.factor(to);
            from = to;
        }
        Base::settle(always);
    }
    __device__ __forceinline__ void start() {
        from = From::near(this->ahead);
        Base::start();
    }
    __device__ __forceinline__ T term(T x) const { return from.relative(x); }
    __device__ __forceinline__ void add(T x, i64) { s += term(x); }
    __device__ __forceinline__ void exchange(int mask, bool, u32 members) { s += __shfl_xor_sync(members, s, mask); }
    __device__ __forceinline__ void merge(const ExpSum& o) {
        const From to = From::near(nan_max(this->m, o.m));
        s = s * from.factor(to) + o.s * o.from.factor(to);
        from = to;
        Base::merge(o);
    }
    // Relative to an infinite or NaN top the sum is NaN, as (inf - inf) makes it.
    __device__ __forceinline__ T total() const { return isfinite(this->m) ? s * from.factor_to(this->m) : this->m - this->m; }
    // An element's share is its term by share(), or shifted_exp(x, shift()) by shifted_share() where that is finite.
    __device__ __forceinline__ T share() const {
        return isfinite(this->m) ? approximate_reciprocal(s) : infinity<T>() - infinity<T>();
    }
    __device__ __forceinline__ T shifted_share() const { return from.is_huge() ? infinity<T>() - infinity<T>() : share(); }
    __device__ __forceinline__ T shift() const { return from.shift; }
};

// What `Base`, an ExpSum or an extension of it, holds, and the sum of x - m, of fewer than 2^32 elements. Where the maximum
// rises, so do all distances: they have one sign, and nothing cancels.
template <class Base>
struct Distances : Base {
    typedef typename Base::Value T;
    u32 n = 0;
    T d = T(0);

    // The sum of `count` distances from `m` as one of distances from `to`. While all elements are -inf it is 0 or -inf.
    static __device__ __forceinline__ T moved(T sum, u32 count, T m, T to) {
        return sum + (m == -infinity<T>() ? T(0) : static_cast<T>(count) * (m - to));
    }

    __device__ __forceinline__ void settle(bool always = false) {
        if (this->ahead != this->m) {
            d = moved(d, n, this->m, this->ahead);
        }
        Base::settle(always);
    }
    __device__ __forceinline__ void add(T x, i64 at) {
        n += 1;
        d += x - (this->m == -infinity<T>() ? T(0) : this->m);
        Base::add(x, at);
    }
    __device__ __forceinline__ void exchange(int mask, bool upper, u32 members) {
        n += __shfl_xor_sync(members, n, mask);
        d += __shfl_xor_sync(members, d, mask);
        Base::exchange(mask, upper, members);
    }
    __device__ __forceinline__ void merge(const Distances& o) {
        const T top = nan_max(this->m, o.m);
        d = moved(d, n, this->m, top) + moved(o.d, o.n, o.m, top);
        n += o.n;
        Base::merge(o);
    }
    __device__ __forceinline__ T distances() const { return isfinite(this->m) ? d : this->m - this->m; }
};

// What `Base`, an ExpSum or an extension of it, holds, and the sum of (x - m) exp(x - m), from which entropies are made.
template <class Base>
struct ExpDistances : Base {
    typedef typename Base::Value T;
    typedef typename Base::From From;
    T e = T(0);  // the sum of the exponents times the exponentials, relative to their base

    // The sum after a move by `rise`, of exponentials that sum to `s` and are multiplied by `factor`. Where the maximum rises so
    // far that no exponential is left, none of it is left, but for NaN.
    static __device__ __forceinline__ T moved(T e, T s, T rise, T factor) {
        return factor * (e + (factor == T(0) ? T(0) : rise * s));
    }

    __device__ __forceinline__ void settle(bool always = false) {
        const From to = From::near(this->ahead);
        if (always ? this->from.differs(to) : this->from.is_below(this->ahead)) {
            e = moved(e, this->s, this->from.rise(to), this->from.factor(to));
        }
        Base::settle(always);
    }
    __device__ __forceinline__ void add(T x, i64 at) {
        e += this->from.exponent(x) * this->term(x);
        Base::add(x, at);
    }
    __device__ __forceinline__ void exchange(int mask, bool upper, u32 members) {
        e += __shfl_xor_sync(members, e, mask);
        Base::exchange(mask, upper, members);
    }
    __device__ __forceinline__ void merge(const ExpDistances& o) {
        const From to = From::near(nan_max(this->m, o.m));
        e = moved(e, this->s, this->from.rise(to), this->from.factor(to)) +
            moved(o.e, o.s, o.from.rise(to), o.from.factor(to));
        Base::merge(o);
    }
    __device__ __forceinline__ T exp_distances() const {
        const From& from = this->from;
        const T m = this->m;
        return isfinite(m) ? moved(e, this->s, -from.exponent(m), from.factor_to(m)) * From::unit : m - m;
    }
};

// What `Base`, a Top or a Bottom or an extension of it, holds, and the first position of the extreme: of NaN if there is one.
// Of no elements it is the largest Place, an unsigned integer that no position reaches.
template <class Base, class Place>
struct FirstPlace : Base {
    typedef typename Base::Value T;
    static constexpr Place none = ~Place(0);
    Place first = none;

    static __device__ __forceinline__ bool same(T a, T b) { return a == b || (a != a && b != b); }
    static __device__ __forceinline__ Place earlier(Place a, Place b) { return b < a ? b : a; }

    __device__ __forceinline__ void settle(bool always = false) {
        first = same(this->m, this->ahead) ? first : none;
        Base::settle(always);
    }
    __device__ __forceinline__ void add(T x, i64 at) {
        first = same(x, this->m) ? earlier(first, static_cast<Place>(at)) : first;
        Base::add(x, at);
    }
    __device__ __forceinline__ void exchange(int mask, bool upper, u32 members) {
        first = earlier(first, __shfl_xor_sync(members, first, mask));
        Base::exchange(mask, upper, members);
    }
    __device__ __forceinline__ void merge(const FirstPlace& o) {
        const T both = Base::best(this->m, o.m);
        first = earlier(same(this->m, both) ? first : none, same(o.m, both) ? o.first : none);
        Base::merge(o);
    }
    __device__ __forceinline__ i64 place() const { return static_cast<i64>(first); }
};

// Count, mean and sum of squared deviations (Welford 1962; merged as in Chan, Golub and LeVeque 1979), of elements relative
// to the first one, so that a mean far larger than the spread loses no digits.
template <class T>
struct Moments : Unled {
    T n = T(0);
    T first = T(0);
    T mean = T(0);  // as m2, of the differences from `first`
    T m2 = T(0);
    __device__ __forceinline__ void add(T x, i64) {
        first = n == T(0) ? x : first;
        n += T(1);
        const T y = x - first;
        const T d = y - mean;
        mean += quick_divide(d, n);
        m2 += d * (y - mean);
    }
    __device__ __forceinline__ void merge(const Moments& o) {
        if (n == T(0)) {
            *this = o;
        } else if (o.n > T(0)) {
            const T both = n + o.n;
            const T d = (o.first - first) + (o.mean - mean);
            const T share = o.n / both;
            mean += d * share;
            m2 += o.m2 + d * d * (n * share);
            n = both;
        }
    }
    __device__ __forceinline__ void exchange(int mask, bool upper, u32 members) {
        Moments o;
        o.n = __shfl_xor_sync(members, n, mask);
        o.first = __shfl_xor_sync(members, first, mask);
        o.mean = __shfl_xor_sync(members, mean, mask);
        o.m2 = __shfl_xor_sync(members, m2, mask);
        if (upper) {
            o.merge(*this);
            *this = o;
        } else {
            merge(o);
        }
    }
    __device__ __forceinline__ T variance() const { return m2 / n; }
};

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
// Of V terms of an ExpSum. Overwrites them.
template <class Base, int V>
__device__ __forceinline__ void add_terms(ExpSum<Base>& to, typename Base::Value (&terms)[V]) {
    to.s += sum_in_pairs(terms);
}
// Of V terms exp(x - m) of the maximum, after start(), and of no others.
template <class Base, int V>
__device__ __forceinline__ void add_exact_terms(ExpSum<Base>& to, typename Base::Value (&terms)[V]) {
    to.from.be_exact();
    add_terms(to, terms);
}
// Of an ExpSum itself, whose Base adds nothing; what extends it adds element by element.
template <class Base, class X, int V>
__device__ __forceinline__ void add_pack(ExpSum<Base>& to, const X (&x)[V], i64) {
    typename Base::Value terms[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
        terms[j] = to.term(x[j]);
    }
    add_terms(to, terms);
}
