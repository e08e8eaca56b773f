"""Running error analysis: what a chain gives, together with a bound for how far any sound evaluation may be off.

A `Value` holds for each element the exact value ``v`` (in float64), a bound ``e`` of the absolute error that a computed
value may carry, and a magnitude ``m >= |v|``: what the linear part of the chain would give with every sign made
positive. Rounding in linear maps is bounded relative to ``m``, because sums may be taken in any order and moved through
matrix products; everything else relative to ``|v|``.

- Pointwise: the operator is evaluated at every corner of the box ``v ± e`` of its operands; the largest deviation is
  carried on, and the operator's own rounding added. Exact for monotonic operators, and for the rest as long as ``e`` is
  small against the scale on which they bend, which `_settled` checks.
- Sum of n: ``Σ e + (n + 2) u Σ m``; product of matrices: ``e|b| + |a|e + (K + 2) u m``.
- ``e = inf`` says that nothing can be claimed: a comparison that rounding decides, a quotient whose divisor may vanish,
  a value that may or may not overflow. Everything else is exact in kind: where ``v`` is ±inf or NaN, so is the result.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from support import compute, dtype_of, info, kinds, unit

from cupyfuse.ir.operators import POINTWISE, UNDERFLOW_ERROR
from cupyfuse.selftest.measure import QUICK_ERROR

F = Any  # float64 arrays

# Library functions are good to a few units in the last place: CUDA documents, and NumPy shows, at most 8.
LIBRARY = 16.0


def tiny(dtype: str) -> float:
    """What may be flushed to zero: numbers below the normal ones of the type that is computed in."""
    return float(info(compute(dtype)).smallest_normal)


@dataclass(frozen=True)
class Value:
    """Exact values, error bounds and magnitudes of one array; for a mask, `e` is 0 or inf."""

    v: F
    e: F
    m: F
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.v.shape)

    @property
    def ndim(self) -> int:
        return int(self.v.ndim)

    def view(self, change: Any) -> Value:
        """The same elements arranged in another way."""
        return Value(change(self.v), change(self.e), change(self.m), self.dtype)

    def stored(self) -> Value:
        """After a store in its own dtype."""
        return self if self.dtype == "bool" else rounded(self.v, self.e, self.m, self.dtype, unit(self.dtype), True)


def exact(array: Any, dtype: str) -> Value:
    v = np.asarray(array)
    if dtype == "bool":
        return Value(v, np.zeros(v.shape), v.astype(np.float64), dtype)
    v = v.astype(np.float64)
    size = np.abs(v)
    # The GPU takes float32's subnormal numbers for zero.
    return Value(v, np.where(size < tiny(dtype), size, 0.0), size, dtype)


def constant(value: float, dtype: str) -> Value:
    """A Python number, rounded to the type that is computed in."""
    v = np.asarray(float(value))
    return Value(v, np.abs(v) * unit(compute(dtype)), np.abs(v), dtype)


def rounded(v: F, e: F, m: F, dtype: str, u: float, store: bool = False) -> Value:
    """The value with the rounding of one operation added, and `e = inf` where nothing can be claimed."""
    v, e = np.asarray(v), np.asarray(e, np.float64)
    m = np.maximum(np.abs(v), np.broadcast_to(np.nan_to_num(m, nan=np.inf), v.shape))
    floor = 0.0 if u == 0 else float(info(dtype).smallest_subnormal) if store else tiny(dtype)
    with np.errstate(all="ignore"):
        scale = np.where(np.isfinite(v), np.abs(v) if store else m, 0.0)
        e = np.where(np.isnan(e), np.inf, e + u * scale + floor)
        return Value(v, _settled(v, e, m, dtype), np.where(np.isfinite(v), m, np.inf), dtype)


def _settled(v: F, e: F, m: F, dtype: str) -> F:
    top = float(info(dtype).max) * (1 - 4 * unit(dtype))
    finite = np.isfinite(v)
    overflows = finite & (np.maximum(np.abs(v) + e, m) > top)
    loose = finite & (e > 0.05 * (1 + np.abs(v)))
    return np.where(overflows | loose, np.inf, np.where(finite, e, np.where(np.isinf(e), np.inf, 0.0)))


# Pointwise ----------------------------------------------------------------------------------------------------------


def _corners(operands: Sequence[Value]) -> Any:
    for signs in itertools.product((-1, 1), repeat=len(operands)):
        yield [
            (o.v ^ np.isinf(o.e) if sign > 0 else o.v) if o.dtype == "bool"
            else o.v + sign * np.where(np.isfinite(o.e) & np.isfinite(o.v), o.e, 0)
            for o, sign in zip(operands, signs, strict=True)
        ]  # fmt: skip


def pointwise(name: str, *operands: Value, dtype: str) -> Value:
    """One operator of the table; `dtype` is that of its result."""
    row = POINTWISE[name]
    if name == "where":
        return _where(*operands, dtype=dtype)
    with np.errstate(all="ignore"):
        values = [np.asarray(o.v) for o in operands]
        v = np.asarray(row.numpy(*values))
        deviation = np.zeros(v.shape)
        for corner in _corners(operands):
            there = np.asarray(row.numpy(*[np.asarray(c) for c in corner]))
            if row.result == "bool":
                deviation = np.where(there != v, np.inf, deviation)
            else:
                same = kinds(there) == kinds(v)
                distance = np.abs(np.where(np.isfinite(v), there - v, 0))
                deviation = np.where(same, np.maximum(deviation, distance), np.inf)
        unknown = np.zeros(v.shape, bool)
        for o in operands:
            unknown = unknown | (np.isinf(o.e) & (o.dtype != "bool" or name.startswith("logical")))
        if row.result == "bool" and len(operands) == 2 and not name.startswith("logical"):
            slack = operands[0].e + operands[1].e
            unknown = unknown | ((slack > 0) & (np.abs(operands[0].v - operands[1].v) <= slack))
        if name in ("sin", "cos", "tan"):
            unknown = unknown | (operands[0].e > 0.1)
        if name == "power":  # a negative number has real powers for integers alone
            base, exponent = operands
            integer = np.abs(exponent.v - np.rint(exponent.v)) <= exponent.e
            unknown = unknown | ((base.v - base.e < 0) & (exponent.e > 0) & integer)
            # The zeroth power of NaN is 1, and so is 1 to the power of NaN.
            unknown = unknown | (np.isnan(base.v) & _may_be(exponent, 0)) | (np.isnan(exponent.v) & _may_be(base, 1))
        if name in ("divide", "reciprocal"):
            divisor = operands[-1]
            unknown = unknown | _may_be(divisor, 0)
        e = np.where(unknown, np.inf, deviation)
        if name in ("maximum", "minimum"):
            zeros = (values[0] == 0) & (values[1] == 0) & (np.signbit(values[0]) != np.signbit(values[1]))
            e = _either_zero(e, zeros, dtype)
        if row.result == "bool":
            certain = e if not name.startswith("logical") else np.where(deviation > 0, np.inf, 0.0)
            return Value(v.astype(bool), certain, v.astype(np.float64), "bool")
        m = _magnitude(name, operands, v)
        # An ulp is at most two units of roundoff. Arithmetic may come in a rewritten form, of twice as many roundings.
        rounding = 0.0 if row.exact else 2.0 if name in _LINEAR else max(LIBRARY, 2 * row.ulps)
        extra = np.abs(np.asarray(row.scale(*values), np.float64)) if row.scale else 0.0
        own = np.where(np.isfinite(extra), extra, 0.0) * rounding * unit(compute(dtype))
        own = own + np.where(extra > float(info(dtype).max) / 64, np.inf, 0)
        own = own + (0.0 if rounding <= 2.0 else UNDERFLOW_ERROR * tiny(dtype))
        if row.quick and compute(dtype) != dtype:
            own = own + QUICK_ERROR * np.abs(v)
        return rounded(v, e + np.where(np.isfinite(v), own, 0), m, dtype, rounding * unit(compute(dtype)))


def _may_be(x: Value, number: float) -> F:
    """Where rounding decides whether a value is this number."""
    return (x.e > 0) & (np.abs(x.v - number) <= x.e)


_LINEAR = ("add", "subtract", "multiply", "divide", "square", "sqrt", "reciprocal")


def _magnitude(name: str, operands: Sequence[Value], v: F) -> F:
    m = [o.m for o in operands]
    if name in ("add", "subtract"):
        return m[0] + m[1]
    if name in ("multiply", "square"):
        return m[0] * m[-1]
    if name == "divide":
        return m[0] / np.abs(operands[1].v)
    return m[0] if name == "negative" else np.abs(v)


def _either_zero(e: F, where: F, dtype: str) -> F:
    """The bound of a zero whose sign is open, as of the larger one of 0 and -0: dividing by it claims nothing."""
    return np.where(where, np.maximum(e, tiny(dtype)), e)


def _where(condition: Value, a: Value, b: Value, dtype: str) -> Value:
    e = np.where(condition.v, a.e, b.e)
    v = np.where(condition.v, a.v, b.v)
    other = np.where(condition.v, b.v, a.v)
    with np.errstate(all="ignore"):
        undecided = np.isinf(condition.e) & ~((v == other) & (a.e == 0) & (b.e == 0))
    e = np.where(undecided, np.inf, e)
    return rounded(v, e, np.abs(v), dtype, 0.0)


def cast(x: Value, dtype: str) -> Value:
    if x.dtype == "bool":
        return Value(x.v.astype(np.float64), x.e, x.v.astype(np.float64), dtype)
    return rounded(x.v, x.e, x.m, dtype, unit(dtype), True)


# Reductions ---------------------------------------------------------------------------------------------------------


def _unknown(x: Value, axis: Any) -> F:
    return np.isinf(x.e).any(axis=axis, keepdims=True)


def may_overflow(v: F, e: F, m: F, dtype: str) -> F:
    """The bound of a sum, infinite where finite terms are so large that some order of them overflows on the way."""
    limit = float(info(compute(dtype)).max) / 2
    return np.where(~(m <= limit) & (np.isinf(m) | ~np.isnan(v)), np.inf, e)


def _count(x: Value, axis: Any) -> int:
    """How many elements a reduction along one axis, several, or all of them combines."""
    if axis is None:
        return int(x.v.size)
    return int(np.prod([x.v.shape[k] for k in (axis if isinstance(axis, tuple) else (axis,))]))


def total(x: Value, axis: Any) -> Value:
    n, u = _count(x, axis), unit(compute(x.dtype))
    with np.errstate(all="ignore"):
        v = x.v.sum(axis=axis, keepdims=True)
        m = np.where(np.isfinite(x.v), x.m, 0).sum(axis=axis, keepdims=True)
        e = np.where(_unknown(x, axis), np.inf, np.where(np.isinf(x.e), 0, x.e).sum(axis=axis, keepdims=True))
        return rounded(v, may_overflow(v, e, m, x.dtype), m, x.dtype, (n + 2) * u)


def mean(x: Value, axis: Any) -> Value:
    n = _count(x, axis)
    s = total(x, axis)
    return pointwise("divide", s, exact(np.asarray(float(n)), x.dtype), dtype=x.dtype)


def extreme(x: Value, axis: Any, name: str) -> Value:
    v = getattr(x.v, name)(axis=axis, keepdims=True)
    zeros = x.v == 0
    signs = (zeros & np.signbit(x.v)).any(axis=axis, keepdims=True) & (zeros & ~np.signbit(x.v)).any(
        axis=axis, keepdims=True
    )
    e = _either_zero(x.e.max(axis=axis, keepdims=True), (v == 0) & signs, x.dtype)
    return rounded(v, e, np.abs(v), x.dtype, 0.0)


def product(x: Value, axis: Any) -> Value:
    """Bound products along axes: relative errors add up, unless a partial product can overflow or underflow."""
    with np.errstate(all="ignore"):
        v = x.v.prod(axis=axis, keepdims=True)
        ratio = np.where(x.e == 0, 0, x.e / np.abs(x.v)).sum(axis=axis, keepdims=True)
        largest = np.maximum(np.abs(x.v), 1).prod(axis=axis, keepdims=True)
        least = np.minimum(np.where(x.v == 0, 1, np.abs(x.v)), 1).prod(axis=axis, keepdims=True)
        bad = _unknown(x, axis) | ~(ratio < 0.01) | (np.isfinite(v) & (largest > float(info(x.dtype).max) / 2))
        bad |= np.isfinite(v) & (least < tiny(x.dtype) * 2)
        # A zero times an infinity is NaN, but a product that first underflowed or overflowed may differ in kind.
        bad |= ~np.isfinite(v) & ((largest > float(info(x.dtype).max) / 2) & ~np.isinf(x.v).any(axis, keepdims=True))
        bad |= np.isinf(x.v).any(axis=axis, keepdims=True) & (least < tiny(x.dtype) * 2)
        e = np.where(bad, np.inf, np.abs(v) * 2 * ratio)
        return rounded(v, e, np.abs(v), x.dtype, (_count(x, axis) + 2) * unit(compute(x.dtype)))


def variance(x: Value, axis: Any) -> Value:
    """Bound variances along axes, by the errors of the elements and of their mean."""
    n, u = _count(x, axis), unit(compute(x.dtype))
    with np.errstate(all="ignore"):
        centre = mean(x, axis)
        distance = np.abs(x.v - centre.v)
        spread = x.e + centre.e + 2 * u * (np.abs(x.v) + np.abs(centre.v))
        v = np.square(distance).mean(axis=axis, keepdims=True)
        e = (2 * distance * spread + np.square(spread)).mean(axis=axis, keepdims=True)
        overflows = np.isfinite(v) & (v * n > float(info(x.dtype).max) / 2)
        e = np.where(_unknown(x, axis) | np.isinf(centre.e) | overflows, np.inf, e)
        return rounded(v, np.where(np.isfinite(v), e, np.where(np.isinf(e), e, 0)), v, x.dtype, 2 * (n + 8) * u)


def logsumexp(x: Value, axis: Any) -> Value:
    """Bound logsumexp along an axis."""
    u = unit(compute(x.dtype))
    with np.errstate(all="ignore"):
        top = x.v.max(axis=axis, keepdims=True)
        shift = np.where(np.isfinite(top), top, 0)
        sums = np.exp(x.v - shift).sum(axis=axis, keepdims=True)
        v = np.where(np.isfinite(top), shift + np.log(sums), top)
        # d logsumexp = Σ softmax · dx, so the largest error bounds it; exponents round relative to their arguments.
        e = x.e.max(axis=axis, keepdims=True)
        e = e + LIBRARY * u * (2 + _count(x, axis) + np.abs(shift) + np.abs(v))
        return rounded(v, e, np.abs(v), x.dtype, 0.0)


def softmax(x: Value, axis: Any) -> Value:
    """Bound softmax along an axis; exponentials have the error of their rounded arguments."""
    u, n = unit(compute(x.dtype)), _count(x, axis)
    with np.errstate(all="ignore"):
        top = x.v.max(axis=axis, keepdims=True)
        part = np.exp(x.v - top)
        v = part / part.sum(axis=axis, keepdims=True)
        worst = x.e.max(axis=axis, keepdims=True)
        depth = np.where(np.isfinite(x.v), np.abs(x.v) + np.abs(top), 0)
        relative = np.expm1(2 * worst + 4 * u * (depth + depth.max(axis=axis, keepdims=True))) + (n + 2 * LIBRARY) * u
        e = np.where(np.isinf(worst), np.inf, np.where(np.isfinite(v), v * relative, 0) + 4 * n * tiny(x.dtype))
        return rounded(v, e, np.abs(v), x.dtype, 0.0)


def log_softmax(x: Value, axis: Any) -> Value:
    u = unit(compute(x.dtype))
    with np.errstate(all="ignore"):
        lse = logsumexp(x, axis)
        v = x.v - lse.v
        size = np.where(np.isfinite(x.v), np.abs(x.v), 0) + np.where(np.isfinite(lse.v), np.abs(lse.v), 0)
        return rounded(v, x.e + lse.e + LIBRARY * u * size, np.abs(v), x.dtype, 0.0)


def matmul(a: Value, b: Value, dtype: str) -> Value:
    """`a @ b`; a 16-bit product may be stored, and so rounded, before anything reads it."""
    return bilinear(np.matmul, a, b, dtype, a.v.shape[-1])


def bilinear(product: Callable[[Any, Any], Any], a: Value, b: Value, dtype: str, terms: int) -> Value:
    """Sums of so many products of an element of `a` and one of `b`, which `product` takes of two arrays."""
    u = unit(compute(dtype))
    with np.errstate(all="ignore"):
        v = product(a.v, b.v)
        unknown = product(np.isinf(a.e) * 1.0, np.ones(b.shape)) + product(np.ones(a.shape), np.isinf(b.e) * 1.0)
        af, bf = (np.where(np.isfinite(x.v), np.abs(x.v), 0) for x in (a, b))
        ae, be = (np.where(np.isfinite(x.e), x.e, 0) for x in (a, b))
        am, bm = (np.where(np.isfinite(x.m), x.m, 0) for x in (a, b))
        # An infinity times a number whose sign is open; and times 0, which some BLAS skip and leave no NaN of.
        open_a, open_b = ((np.abs(x.v) <= x.e).astype(float) for x in (a, b))
        wild = product((~np.isfinite(a.v)).astype(float), open_b) + product(open_a, (~np.isfinite(b.v)).astype(float))
        m = product(am, bm)
        e = product(ae, bf) + product(af, be) + product(ae, be)
        e = may_overflow(v, np.where((unknown > 0) | (wild > 0), np.inf, e), m, dtype)
        result = rounded(v, e, m, dtype, (terms + 2) * u)
    return result.stored() if compute(dtype) != dtype else result


def check(actual: Any, value: Value, where: str) -> float:
    """Assert that a result lies within its bound; returns the share of elements for which something is claimed."""
    __tracebackhide__ = True
    expected = value if value.dtype == "bool" else value.stored()
    assert actual.dtype == dtype_of(value.dtype), f"{where}: dtype {actual.dtype}, expected {value.dtype}"
    assert actual.shape == value.shape, f"{where}: shape {actual.shape}, expected {value.shape}"
    claimed = ~np.isinf(expected.e)
    got = actual.astype(np.float64)
    right = kinds(got) == kinds(expected.v)
    with np.errstate(all="ignore"):
        near = ~np.isfinite(expected.v) | (np.abs(got - expected.v) <= np.where(claimed, expected.e, 0))
    bad = claimed & ~(right & near)
    if bad.any():
        i = tuple(int(k) for k in np.argwhere(bad)[0])
        raise AssertionError(
            f"{where}: {bad.sum()} of {bad.size} elements wrong, first at {i}: got {got[i]!r}, "
            f"expected {np.asarray(expected.v, np.float64)[i]!r} within {expected.e[i]:.3g}"
        )
    return float(claimed.mean()) if claimed.size else 1.0
