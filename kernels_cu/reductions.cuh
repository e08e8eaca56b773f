// Accumulators of reductions.
//
// Elements come in tiles: a thread calls peek(x) for each element of a tile, settle() once, then add_pack(accumulator, x, at)
// (add_pack.cuh) for each pack of neighbours, of which `at` is the first one's position along the reduced axis. That calls
// add(x, at) for each element, or adds up the pack first. Only what extends a Top or a Bottom looks ahead, to move to another
// extreme once per tile instead of once per element. Before anything is added start() takes the place of settle(): no sum has
// to be moved.
//
// settle(true) moves a ShareSum even if the extreme is not new, or not by much: without a branch, behind which the compiler does
// not move loads.
//
// Lanes of a warp combine in two butterfly rounds: lead(mask) with every mask, settle(true) once, exchange(mask, upper) with every
// mask. Both read the lane whose index differs in `mask`; `upper` tells that the own index is the larger one. All lanes of
// `members` have to call them together, and hold the same bits afterwards.
// merge(other) adds a whole accumulator; in a fixed order it gives fixed bits.
#pragma once

#include "quick.cuh"

// What accumulators that do not look ahead have in common.
struct NoLookAhead {
    template <class T>
    __device__ __forceinline__ void peek(T) {}
    __device__ __forceinline__ void settle(bool = false) {}
    __device__ __forceinline__ void start() {}
    __device__ __forceinline__ void lead(int, u32) {}
};

template <class T>
struct Sum : NoLookAhead {
    T v = T(0);
    __device__ __forceinline__ void add(T x, i64) { v += x; }
    __device__ __forceinline__ void merge(const Sum& o) { v += o.v; }
    __device__ __forceinline__ void exchange(int mask, bool, u32 members) { v += __shfl_xor_sync(members, v, mask); }
    __device__ __forceinline__ T total() const { return v; }
};

template <class T>
struct Product : NoLookAhead {
    T v = T(1);
    __device__ __forceinline__ void add(T x, i64) { v *= x; }
    __device__ __forceinline__ void merge(const Product& o) { v *= o.v; }
    __device__ __forceinline__ void exchange(int mask, bool, u32 members) { v *= __shfl_xor_sync(members, v, mask); }
    __device__ __forceinline__ T total() const { return v; }
};

template <class T>
struct Max : NoLookAhead {
    T v = -infinity<T>();
    __device__ __forceinline__ void add(T x, i64) { v = nan_max(v, x); }
    __device__ __forceinline__ void merge(const Max& o) { v = nan_max(v, o.v); }
    __device__ __forceinline__ void exchange(int mask, bool, u32 members) {
        v = nan_max(v, __shfl_xor_sync(members, v, mask));
    }
    __device__ __forceinline__ T extreme() const { return v; }
};

template <class T>
struct Min : NoLookAhead {
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

// What `Base`, a Top, holds, and s = sum of exp(x - m), in one pass (online softmax, Milakov and Gimelshein 2018).
template <class Base>
struct ExpSum : Base {
    typedef typename Base::Value T;
    T s = T(0);

    // (-inf) - (-inf) would be NaN: while all elements are -inf, exponentials are relative to 0.
    static __device__ __forceinline__ T base(T m) { return m == -infinity<T>() ? T(0) : m; }

    __device__ __forceinline__ void settle(bool always = false) {
        if (this->ahead != this->m) {
            s *= exp_of_move(this->m - base(this->ahead));
            Base::settle(always);
        }
    }
    __device__ __forceinline__ T term(T x) const { return exp_in_sum(x - base(this->m)); }
    __device__ __forceinline__ void add(T x, i64) { s += term(x); }
    __device__ __forceinline__ void exchange(int mask, bool, u32 members) { s += __shfl_xor_sync(members, s, mask); }
    __device__ __forceinline__ void merge(const ExpSum& o) {
        const T top = nan_max(this->m, o.m);
        s = s * exp_of_move(this->m - base(top)) + o.s * exp_of_move(o.m - base(top));
        Base::merge(o);
    }
    // Relative to an infinite or NaN top the sum is NaN, as (inf - inf) makes it.
    __device__ __forceinline__ T total() const { return isfinite(this->m) ? s : this->m - this->m; }
};

// What shares of 16 bits are relative to: 2^(x log2(e) - shift), one fused multiply-add, of the shift m log2(e), rounded. All of them
// are exp(x - m) times a common factor, 1 for small m and up to 2^64 at 1.2e9, which a quotient of two does not have. From 1.2e9 on
// floats are so far apart that the maximum alone counts, and `scale` is 1.
struct ShareBase {
    static constexpr float lowest = -3.402823466e38f;  // the base while all elements are -inf: -inf - -inf would be NaN
    static constexpr float slack = 3.0f;               // terms may reach 2^slack before the base has to follow
    float scale = 1.0f, shift = lowest;

    static __device__ __forceinline__ ShareBase near(float m) {
        ShareBase base;
        base.scale = fabsf(m) < 1.2e9f ? 1.44269504f : 1.0f;
        base.shift = fmaxf(m * base.scale, lowest);
        return base;
    }
    __device__ __forceinline__ float exponent(float x) const { return fmaf(x, scale, -shift); }
    // Whether an element is so far above the base that this should follow; NaN is.
    __device__ __forceinline__ bool is_below(float x) const { return !(exponent(x) <= slack); }
    // What takes a sum from this base to a higher one. Two on both sides of 1.2e9 are so far apart that nothing is left.
    __device__ __forceinline__ float factor(const ShareBase& to) const {
        return scale == to.scale ? exp2f(shift - to.shift) : 0.0f;
    }
};

// As an ExpSum, of float, for shares of 16 bits: what `Base`, a Top, holds, and the sum s of terms relative to `from`, a base that
// follows the maximum where it has risen far.
template <class Base>
struct ShareSum : Base {
    ShareBase from;
    float s = 0.0f;

    __device__ __forceinline__ void settle(bool always = false) {
        if (always || from.is_below(this->ahead)) {
            move(ShareBase::near(this->ahead));
        }
        Base::settle(always);
    }
    __device__ __forceinline__ void start() {
        from = ShareBase::near(this->ahead);
        Base::start();
    }
    __device__ __forceinline__ float term(float x) const { return shifted_exp(x, from.scale, from.shift); }
    __device__ __forceinline__ void exchange(int mask, bool, u32 members) { s += __shfl_xor_sync(members, s, mask); }
    __device__ __forceinline__ void merge(const ShareSum& o) {
        const ShareBase to = ShareBase::near(nan_max(this->m, o.m));
        move(to);
        s += o.s * o.from.factor(to);
        Base::merge(o);
    }
    // The sum of exp(x - m), as of an ExpSum.
    __device__ __forceinline__ float total() const {
        return isfinite(this->m) ? s * exp2f(-from.exponent(this->m)) : this->m - this->m;
    }
    // An element's share is its term, or shifted_exp(x, scale(), shift()), times this.
    __device__ __forceinline__ float share() const {
        return isfinite(this->m) ? approximate_reciprocal(s) : this->m - this->m;
    }
    __device__ __forceinline__ float scale() const { return from.scale; }
    __device__ __forceinline__ float shift() const { return from.shift; }

private:
    __device__ __forceinline__ void move(const ShareBase& to) {
        s *= from.factor(to);
        from = to;
    }
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
        d += x - Base::base(this->m);
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
    T e = T(0);

    // The sum relative to `to` of what sums to `e`, and whose exponentials sum to `s`, relative to `m`. Where the maximum
    // rises so far that no exponential is left, none of it is left, but for NaN.
    static __device__ __forceinline__ T moved(T e, T s, T m, T to) {
        const T factor = exp_of_move(m - Base::base(to));
        const T rise = factor == T(0) ? T(0) : (m - to) * s;
        return m == -infinity<T>() ? e : factor * (e + rise);
    }

    __device__ __forceinline__ void settle(bool always = false) {
        if (this->ahead != this->m) {
            e = moved(e, this->s, this->m, this->ahead);
        }
        Base::settle(always);
    }
    __device__ __forceinline__ void add(T x, i64 at) {
        const T distance = x - Base::base(this->m);
        e += distance * exp_in_sum(distance);
        Base::add(x, at);
    }
    __device__ __forceinline__ void exchange(int mask, bool upper, u32 members) {
        e += __shfl_xor_sync(members, e, mask);
        Base::exchange(mask, upper, members);
    }
    __device__ __forceinline__ void merge(const ExpDistances& o) {
        const T top = nan_max(this->m, o.m);
        e = moved(e, this->s, this->m, top) + moved(o.e, o.s, o.m, top);
        Base::merge(o);
    }
    __device__ __forceinline__ T exp_distances() const { return isfinite(this->m) ? e : this->m - this->m; }
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
struct Moments : NoLookAhead {
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
    // Add `count` elements of these moments, `share` of all there are then.
    __device__ __forceinline__ void add_group(T count, T share, T distance, T deviations) {
        mean += distance * share;
        m2 += deviations + distance * (n * share) * distance;  // in this order 0 of no elements before, not 0 times infinity
        n += count;
    }
    __device__ __forceinline__ void merge(const Moments& o) {
        if (n == T(0)) {
            *this = o;
        } else if (o.n > T(0)) {
            add_group(o.n, o.n / (n + o.n), (o.first - first) + (o.mean - mean), o.m2);
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

// Add x to a sum of many: `excess` is how much too large roundings have made it so far (Kahan 1965); 0 of infinite sums.
template <class T>
__device__ __forceinline__ void add_compensated(T& sum, T x, T& excess) {
    const T next = x - excess, both = sum + next, error = (both - sum) - next;
    excess = isfinite(error) ? error : T(0);
    sum = both;
}
// Merge the next of many totals, whose sums, of squares too, are compensated: `excess` begins as that of no elements, of which all
// but the sums stays so.
template <class Accumulator>
__device__ __forceinline__ void merge_next(Accumulator& to, const Accumulator& o, Accumulator&) {
    to.merge(o);
}
template <class T>
__device__ __forceinline__ void merge_next(Sum<T>& to, const Sum<T>& o, Sum<T>& excess) {
    add_compensated(to.v, o.v, excess.v);
}
template <class T>
__device__ __forceinline__ void merge_next(Moments<T>& to, const Moments<T>& o, Moments<T>& excess) {
    const T before = to.m2;
    to.m2 = T(0);
    to.merge(o);
    const T more = to.m2;
    to.m2 = before;
    add_compensated(to.m2, more, excess.m2);
}
