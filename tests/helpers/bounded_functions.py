"""NumPy's functions, and cupyfuse's, of `Bounded` arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bounds
import numpy as np
from bounded import FLOATS, Bounded, bilinear, converted, operand, plain, promoted, unknown_of
from bounds import Value
from language import ACTIVATIONS, REDUCTIONS
from support import compute, unit


def _first(x: Any) -> Bounded:
    return x if isinstance(x, Bounded) else Bounded.argument(np.asarray(x))


# Arrangements -------------------------------------------------------------------------------------------------------


def _component(value: Any, name: str) -> Any:
    """Arguments with the values, the bounds or the magnitudes of arrays in their place."""
    if isinstance(value, Bounded):
        part = getattr(value, name)
        return part.copy() if value.is_scalar else part
    if isinstance(value, (tuple, list)):
        return type(value)([_component(v, name) for v in value])
    return value


def _dtypes(value: Any) -> list[Any]:
    if isinstance(value, Bounded):
        return [value.dtype]
    return [d for v in value for d in _dtypes(v)] if isinstance(value, (tuple, list)) else []


def arrangement(func: Callable[..., Any], args: Any, options: Any) -> Any:
    """A function that only moves elements: what it does to the values it does to their bounds."""
    dtype = promoted(*_dtypes(args[:1]))
    given = [_promoted(args[0], dtype), *map(plain, args[1:])]
    found = [func(*_component(given, name), **options) for name in ("v", "e", "m")]
    if isinstance(found[0], (list, tuple)):
        return type(found[0])([Bounded(*parts, dtype) for parts in zip(*found, strict=True)])
    new = Bounded(*found, dtype)
    new.is_scalar = not new.ndim and isinstance(args[0], Bounded) and args[0].is_scalar
    return new


def _promoted(value: Any, dtype: str) -> Any:
    if isinstance(value, Bounded):
        return converted(value, dtype)
    return type(value)([_promoted(v, dtype) for v in value])


def _pad(x: Bounded, width: Any, mode: str = "constant") -> Bounded:
    return x.arranged(lambda a: np.pad(a, width, mode))


# Choices ------------------------------------------------------------------------------------------------------------


def _where(condition: Any, a: Any, b: Any) -> Bounded:
    kinds = [x if type(x) in (bool, int, float) else x.dtype for x in (a, b)]
    dtype = promoted(*kinds)
    mask = converted(condition, "bool")
    if dtype in FLOATS:
        value = bounds.pointwise("where", mask.value, operand(a, dtype), operand(b, dtype), dtype=dtype)
        return Bounded.of(value)._array()
    x, y = converted(a, dtype), converted(b, dtype)
    return Bounded.exact(
        np.where(mask.v, x.v, y.v), unknown_of(mask) | np.where(mask.v, np.isinf(x.e), np.isinf(y.e))
    )._array()


def _clip(x: Bounded, low: Any, high: Any) -> Any:
    if x.name not in FLOATS and type(low) is type(high) is int:
        return Bounded.exact(np.clip(x.v, low, high), np.isinf(x.e))
    return np.minimum(np.maximum(x, low), high)


def _nan_to_num(x: Bounded) -> Bounded:
    if x.name not in FLOATS:
        return x.copy()
    v, top = x.v, float(bounds.info(x.name).max)
    new = np.nan_to_num(v, posinf=top, neginf=-top)
    return Bounded.of(Value(new, np.where(np.isinf(x.e), np.inf, x.e), np.abs(new), x.name))


def _round(x: Bounded, decimals: int = 0) -> Bounded:
    if x.name not in FLOATS:
        return x.copy()
    with np.errstate(all="ignore"):
        v, slack = np.round(x.v, decimals), x.e + 4 * unit(compute(x.name)) * np.abs(x.v)
        same = np.round(x.v - slack, decimals) == np.round(x.v + slack, decimals)
        e = np.where(~np.isfinite(x.v) | same, np.where(np.isinf(x.e), np.inf, 0.0), np.inf)
        scale = 10.0**decimals * 2 > bounds.info(x.name).max / (1 + np.abs(np.where(np.isfinite(v), v, 0)))
        return Bounded.of(bounds.rounded(v, np.where(scale, np.inf, e), np.abs(v), x.name, 4 * unit(compute(x.name))))


# Reductions ---------------------------------------------------------------------------------------------------------


def _axes(axis: Any, ndim: int) -> tuple[int, ...]:
    given = range(ndim) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    return tuple(a % ndim for a in given) if ndim else ()


def _reduction(name: str) -> Callable[..., Bounded]:
    """Make the reduction of that name of bounded arrays; sums of integers are exact."""
    ufunc = getattr(np, name, None)

    def call(x: Any, axis: Any = None, keepdims: bool = False, **options: Any) -> Bounded:
        x = _first(x)
        if x.name not in FLOATS:
            if name in ("mean", "var", "std"):
                x = converted(x, "float64")
            elif name != "logsumexp":
                v = ufunc(x.v, axis=axis, keepdims=keepdims)
                return Bounded.exact(v, np.isinf(x.e).any(axis=axis, keepdims=keepdims))
        positions = _axes(axis, x.ndim)
        ddof = options.get("ddof", 0)
        value = REDUCTIONS[name](x.value, positions) if not ddof else _with_ddof(x, positions, name, ddof)
        if keepdims:
            return Bounded.of(value)
        shape = [n for p, n in enumerate(x.shape) if p not in positions]
        return Bounded.of(value.view(lambda a: np.broadcast_to(a, value.v.shape).reshape(shape)))

    return call


def _with_ddof(x: Bounded, positions: tuple[int, ...], name: str, ddof: int) -> Value:
    """Bound a variance or deviation that divides by n - ddof."""
    n = int(np.prod([x.shape[p] for p in positions]))
    with np.errstate(all="ignore"):
        factor = np.divide(float(n), float(max(n - ddof, 0)))
        value = bounds.variance(x.value, positions)
        value = bounds.pointwise("multiply", value, bounds.constant(factor, x.name), dtype=x.name)
    return value if name == "var" else bounds.pointwise("sqrt", value, dtype=x.name)


def _truth(name: str) -> Callable[..., Bounded]:
    """any, all and count_nonzero: where rounding decides an element, nothing is claimed."""
    function = getattr(np, name)

    def call(x: Bounded, axis: Any = None, keepdims: bool = False) -> Bounded:
        mask = converted(x, "bool")
        v = function(mask.v, axis=axis, keepdims=keepdims)
        return Bounded.exact(v, np.isinf(mask.e).any(axis=axis, keepdims=keepdims))

    return call


def _extreme_place(name: str) -> Callable[..., Bounded]:
    """argmax and argmin: known where the place is the same for all that the elements may be."""
    function = getattr(np, name)

    def call(x: Bounded, axis: Any = None, keepdims: bool = False) -> Bounded:
        v = function(x.v, axis=axis, keepdims=True)
        flat = x.arranged(lambda a: a.reshape(-1)) if axis is None else x
        k = 0 if axis is None else axis
        place = np.expand_dims(function(flat.v, axis=k), k)
        sign = 1.0 if name == "argmax" else -1.0
        with np.errstate(all="ignore"):
            low = np.take_along_axis(sign * flat.v.astype(float) - flat.e, place, k)
            other = sign * flat.v.astype(float) + flat.e
            here = np.arange(flat.shape[k]).reshape([-1 if p == k % flat.ndim else 1 for p in range(flat.ndim)])
            exact = (flat.e == 0) & (np.take_along_axis(flat.e, place, k) == 0)
            lost = (other >= low) & ~exact & (here != place)
            lost = lost.any(k, keepdims=True) | np.isinf(flat.e).any(k, keepdims=True)
            lost &= ~(
                np.isnan(np.take_along_axis(flat.v.astype(float), place, k)) & ~np.isinf(flat.e).any(k, keepdims=True)
            )
        shape = v.shape if keepdims else function(x.v, axis=axis).shape
        return Bounded.exact(v.reshape(shape), lost.reshape(shape))

    return call


def _softmax(name: str) -> Callable[..., Bounded]:
    def call(x: Bounded, axis: Any = None) -> Bounded:
        return Bounded.of(getattr(bounds, name)(x.value, _axes(axis, x.ndim)))

    return call


def _norm(x: Bounded, axis: Any = None, keepdims: bool = False) -> Any:
    return np.sqrt(np.sum(np.square(x), axis=axis, keepdims=keepdims))


# Products -----------------------------------------------------------------------------------------------------------


def _einsum(text: str, a: Bounded, b: Bounded) -> Bounded:
    left, right = text.split("->")[0].split(",")
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    summed = set(sizes) - set(text.split("->")[1])
    terms = int(np.prod([sizes[k] for k in summed]))
    result = bilinear(lambda x, y: np.einsum(text, x, y), a, b, terms)
    if summed - (set(left) & set(right)):  # one operand is summed first: infinity times a sum is not NaN
        result.e[~np.isfinite(result.v)] = np.inf
        with np.errstate(all="ignore"):
            sums = np.einsum(text, a.m, np.ones(b.shape)), np.einsum(text, np.ones(a.shape), b.m)
        result.e[~(np.maximum(*sums) <= float(bounds.info(bounds.compute(a.name)).max) / 2)] = np.inf
    return result


def _dot(a: Bounded, b: Bounded) -> Any:
    if not (a.ndim and b.ndim):
        return a * b
    return bilinear(np.dot, a, b, a.shape[-1])


def _tensordot(a: Bounded, b: Bounded, axes: int = 2) -> Bounded:
    terms = int(np.prod(a.shape[a.ndim - axes :]))
    return bilinear(lambda x, y: np.tensordot(x, y, axes), a, b, terms)._array()


# Library steps ------------------------------------------------------------------------------------------------------


def _sort(x: Bounded, axis: int = -1) -> Bounded:
    """What the elements may be off by, the sorted ones may."""
    e = np.broadcast_to(x.e.max(axis=axis, keepdims=True, initial=0.0), x.shape)
    m = np.broadcast_to(x.m.max(axis=axis, keepdims=True, initial=0.0), x.shape)
    return Bounded(np.sort(x.v, axis=axis), np.array(e), np.array(m), x.name)


def _cumsum(x: Bounded, axis: Any = None) -> Bounded:
    if x.name not in FLOATS:
        return Bounded.exact(np.cumsum(x.v, axis=axis), np.cumsum(np.isinf(x.e), axis=axis) > 0)
    n = x.size if axis is None else x.shape[axis]
    with np.errstate(all="ignore"):
        v = np.cumsum(x.v, axis=axis)
        m = np.cumsum(np.where(np.isfinite(x.v), x.m, 0), axis=axis)
        e = bounds.may_overflow(v, np.cumsum(x.e, axis=axis), m, x.name)
        # Of 16 bits: every partial sum is rounded to the dtype.
        return Bounded.of(bounds.rounded(v, e + 2 * n * unit(x.name) * m, m, x.name, (n + 2) * unit(x.name)))


def _diff(x: Bounded, axis: int = -1) -> Any:
    cut = [slice(None)] * x.ndim
    later, earlier = (cut.copy() for _ in "ab")
    later[axis], earlier[axis] = slice(1, None), slice(None, -1)
    return np.subtract(x[tuple(later)], x[tuple(earlier)])


def _median(x: Bounded, axis: Any = None, keepdims: bool = False) -> Bounded:
    if x.name not in FLOATS:
        x = converted(x, "float64")
    with np.errstate(all="ignore"):
        v = np.median(x.v, axis=axis, keepdims=keepdims)
        e, m = (a.max(axis=axis, keepdims=keepdims) for a in (x.e, x.m))
        wild = ~np.isfinite(x.v).all(axis=axis, keepdims=keepdims)
        return Bounded.of(bounds.rounded(v, np.where(wild, np.inf, e), m, x.name, 4 * unit(x.name)))


def _trace(x: Bounded) -> Any:
    return np.sum(np.diagonal(x), axis=-1)


def _filled(value: float) -> Callable[..., Bounded]:
    return lambda x, dtype=None: Bounded.argument(np.full(x.shape, value, x.dtype if dtype is None else dtype))


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    **{getattr(np, n): _reduction(n) for n in ("sum", "mean", "max", "min", "prod", "var", "std")},
    **{getattr(np, n): _truth(n) for n in ("any", "all", "count_nonzero")},
    **{getattr(np, n): _extreme_place(n) for n in ("argmax", "argmin")},
    np.where: _where,
    np.clip: _clip,
    np.round: _round,
    np.nan_to_num: _nan_to_num,
    np.pad: _pad,
    np.einsum: _einsum,
    np.dot: _dot,
    np.inner: lambda a, b: bilinear(np.inner, a, b, a.shape[-1]),
    np.outer: lambda a, b: bilinear(np.outer, a, b, 1),
    np.tensordot: _tensordot,
    np.linalg.norm: _norm,
    np.sort: _sort,
    np.cumsum: _cumsum,
    np.diff: _diff,
    np.median: _median,
    np.trace: _trace,
    np.zeros_like: _filled(0.0),
    np.ones_like: _filled(1.0),
    np.copy: lambda x: x.copy()._array(),
}


class BoundedFunctions:
    """cupyfuse's functions, under their names."""

    def __getattr__(self, name: str) -> Any:
        if name in ("softmax", "log_softmax"):
            return _softmax(name)
        if name == "logsumexp":
            return _reduction(name)
        numbers = ACTIVATIONS[name][1]
        return lambda x, *_: Bounded.of(
            bounds.pointwise(name, x.value, *(bounds.constant(n, x.name) for n in numbers), dtype=x.name)
        )
