"""`Bounded`: an array that NumPy code computes with, and that carries its exact values and error bounds (`bounds`).

Call a function with `Bounded` arguments, and with `BoundedFunctions` in the place of `cupyfuse`: its results hold what
the function should give. Basic slices are views of all that an array carries, so that aliasing is NumPy's own. Bools
and integers are exact, unless rounding decided them: then `e` is infinite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import bounds
import numpy as np
from bounds import Value
from support import compute, dtype_of, unit

Array = np.ndarray[Any, Any]
FLOATS = ("float16", "bfloat16", "float32", "float64")


@functools.cache
def _loop(ufunc: np.ufunc, kinds: tuple[Any, ...]) -> tuple[str, ...]:
    """The dtypes in which NumPy computes: of its operands, and of its result. Numbers are weak beside bfloat16 too."""
    narrow, half = dtype_of("bfloat16"), np.dtype("float16")
    if narrow in kinds and half in kinds:
        kinds = tuple(np.dtype("float32") if k == narrow else k for k in kinds)
    found = ufunc.resolve_dtypes((*(half if k == narrow else k for k in kinds), *[None] * ufunc.nout))
    return tuple("bfloat16" if narrow in kinds and d == half else d.name for d in found)


class Bounded(np.lib.mixins.NDArrayOperatorsMixin):
    """Values, error bounds and magnitudes, as arrays of their own."""

    def __init__(self, v: Any, e: Any, m: Any, dtype: str):
        self.v, self.e, self.m, self.name = np.asarray(v), np.asarray(e), np.asarray(m), dtype
        self.is_scalar = False  # as results without dimensions are, which nothing is a view of

    @staticmethod
    def argument(array: Array) -> Bounded:
        name = array.dtype.name
        new = Bounded.of(bounds.exact(array, name)) if name in FLOATS else Bounded.exact(array)
        return new._array()

    @staticmethod
    def exact(array: Any, unknown: Any = False) -> Bounded:
        """Bools and integers; unknown where rounding decides."""
        v = np.array(array)
        e = np.where(np.broadcast_to(unknown, v.shape), np.inf, 0.0)
        return Bounded(v, e, np.abs(v.astype(np.float64)), v.dtype.name)._result()

    @staticmethod
    def of(value: Value) -> Bounded:
        """Of 16 bits: either rounded to the dtype or not."""
        if value.dtype == "bool":
            return Bounded.exact(value.v, np.isinf(value.e))
        value = value.stored() if compute(value.dtype) != value.dtype else value
        shape = value.v.shape
        parts = (np.array(np.broadcast_to(p, shape)) for p in (value.v, value.e, value.m))
        return Bounded(*parts, value.dtype)._result()

    def _result(self) -> Bounded:
        self.is_scalar = not self.ndim
        return self

    def _array(self) -> Bounded:
        self.is_scalar = False
        return self

    @property
    def value(self) -> Value:
        return Value(self.v, self.e, self.m, self.name)

    def as_value(self, dtype: str) -> Value:
        """The values as floats of a dtype, which an operation computes in."""
        if self.name in FLOATS:
            return self.value if dtype == self.name else bounds.cast(self.value, dtype)
        return self._exact_as(dtype)

    def _exact_as(self, dtype: str) -> Value:
        v = self.v.astype(np.float64)
        return bounds.rounded(v, self.e, np.abs(v), dtype, unit(dtype), True)

    # Shapes and parts
    shape = property(lambda self: self.v.shape)
    ndim = property(lambda self: self.v.ndim)
    size = property(lambda self: self.v.size)
    dtype = property(lambda self: dtype_of(self.name))
    T = property(lambda self: self.arranged(np.transpose))
    mT = property(lambda self: self.swapaxes(-1, -2))

    def __len__(self) -> int:
        return len(self.v)

    def arranged(self, change: Callable[[Any], Any]) -> Bounded:
        """Apply a change of shape or order to values, errors and magnitudes alike; views stay views, but of scalars."""
        parts = (p.copy() if self.is_scalar else p for p in (self.v, self.e, self.m))
        new = Bounded(*map(change, parts), self.name)
        new.is_scalar = self.is_scalar and not new.ndim
        return new

    def __getitem__(self, index: Any) -> Bounded:
        plain, unknown = _plain_index(index)
        part = self.arranged(lambda a: a[plain])
        items = plain if isinstance(plain, tuple) else (plain,)
        part.is_scalar = not part.ndim and not any(i is Ellipsis for i in items)
        if unknown is not None and unknown.any():
            part.e = np.full_like(part.e, np.inf)
        return part

    def __setitem__(self, index: Any, value: Any) -> None:
        plain, unknown = _plain_index(index)
        new = converted(value, self.name)
        for held, given in ((self.v, new.v), (self.e, new.e), (self.m, new.m)):
            held[plain] = given
        if unknown is not None:
            self.e[unknown] = np.inf

    def _changed(self, ufunc: np.ufunc, other: Any) -> Bounded:
        self[...] = ufunc(self, other)
        return self

    def __iadd__(self, other: Any) -> Bounded:
        return self._changed(np.add, other)

    def __isub__(self, other: Any) -> Bounded:
        return self._changed(np.subtract, other)

    def __imul__(self, other: Any) -> Bounded:
        return self._changed(np.multiply, other)

    def __itruediv__(self, other: Any) -> Bounded:
        return self._changed(np.divide, other)

    def __pow__(self, exponent: Any) -> Any:
        return np.square(self) if exponent == 2 else np.power(self, exponent)

    def __matmul__(self, other: Any) -> Any:
        return np.matmul(self, other)

    def astype(self, dtype: Any) -> Bounded:
        new = converted(self, np.dtype(dtype).name)
        new = new.copy() if new is self else new
        new.is_scalar = self.is_scalar
        return new

    def copy(self) -> Bounded:
        return self.arranged(np.array)

    def transpose(self, *order: Any) -> Bounded:
        return self.arranged(lambda a: a.transpose(*order))

    def reshape(self, *shape: Any, order: Any = "C") -> Bounded:
        return self.arranged(lambda a: a.reshape(*shape, order=order))

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(name)
        return functools.partial(getattr(np, name), self)

    # NumPy's protocols
    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        out = options.pop("out", None)
        assert method == "__call__" and not options, (ufunc, method, options)
        result = matmul(*inputs) if ufunc is np.matmul else pointwise(ufunc, *inputs)
        if out is None:
            return result
        out[0][...] = result
        return out[0]

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        from bounded_functions import FUNCTIONS, arrangement

        rule = FUNCTIONS.get(func)
        return rule(*args, **options) if rule else arrangement(func, args, options)


_METHODS = ("sum", "mean", "max", "min", "prod", "var", "std", "any", "all", "argmax", "argmin", "cumsum", "swapaxes")
_METHODS += ("ravel", "squeeze", "clip", "dot", "diagonal", "repeat", "trace", "round", "take")


def _plain_index(index: Any) -> tuple[Any, Any]:
    """An index without bounds, and of a mask where it is unknown: it has these elements, so that it is not empty."""
    if isinstance(index, Bounded) and index.name == "bool":
        unknown = np.isinf(index.e)
        return index.v | unknown, unknown
    if isinstance(index, tuple):
        return tuple(i.v if isinstance(i, Bounded) else i for i in index), None
    return (index.v if isinstance(index, Bounded) else index), None


def converted(x: Any, name: str) -> Bounded:
    """An array, or a number, as `astype` converts it."""
    if not isinstance(x, Bounded):
        x = Bounded.argument(np.asarray(x, dtype_of(name)))
    if x.name == name:
        return x
    if name in FLOATS:
        return Bounded.of(bounds.cast(x.value, name) if x.name in FLOATS else x._exact_as(name))
    with np.errstate(all="ignore"):
        if x.name not in FLOATS:
            return Bounded.exact(x.v.astype(name), np.isinf(x.e))
        if name == "bool":
            return Bounded.exact(x.v != 0, np.isinf(x.e) | ((x.e > 0) & (np.abs(x.v) <= x.e)))
        limits = np.iinfo(name)
        known = np.isfinite(x.v) & np.isfinite(x.e)
        v, e = np.where(known, x.v, 0), np.where(known, x.e, 0)
        known &= (np.trunc(v - e) == np.trunc(v + e)) & (v - e > limits.min) & (v + e < limits.max)
        return Bounded.exact(np.where(known, v, 0).astype(name), ~known)


def _kind(x: Any) -> Any:
    if isinstance(x, Bounded):
        return x.dtype
    return type(x) if type(x) in (bool, int, float) else np.asarray(x).dtype


def operand(x: Any, dtype: str) -> Value:
    """What an operation that computes in a float dtype takes."""
    if isinstance(x, Bounded):
        return x.as_value(dtype)
    return bounds.constant(x, dtype) if np.ndim(x) == 0 else Bounded.argument(np.asarray(x)).as_value(dtype)


def unknown_of(*operands: Any) -> Any:
    return functools.reduce(np.logical_or, [np.isinf(x.e) for x in operands if isinstance(x, Bounded)], False)


def plain(x: Any) -> Any:
    return x.v if isinstance(x, Bounded) else x


# Python's numbers are weak beside arrays, for ufuncs alone.
_NUMBERS = {bool: np.dtype(bool), int: int, float: float}


def pointwise(ufunc: np.ufunc, *inputs: Any) -> Bounded:
    """Apply a ufunc in the dtypes that NumPy computes in."""
    kinds = tuple(_NUMBERS.get(k, k) for k in map(_kind, inputs))
    *loop, result = _loop(ufunc, kinds)
    name = {"true_divide": "divide"}.get(ufunc.__name__, ufunc.__name__)
    if not all(d in FLOATS for d in loop):
        cast = [converted(x, d).v for x, d in zip(inputs, loop, strict=True)]
        with np.errstate(all="ignore"):
            new = Bounded.exact(ufunc(*cast), unknown_of(*inputs))
        return converted(new, result)
    values = [operand(x, d) for x, d in zip(inputs, loop, strict=True)]
    if name in ("isnan", "isinf", "isfinite", "signbit"):
        return Bounded.exact(ufunc(values[0].v), np.isinf(values[0].e))
    if name in ("logical_and", "logical_or", "logical_not"):
        return pointwise(ufunc, *(converted(x, "bool") for x in inputs))
    if name in ("fmod", "remainder", "floor_divide"):
        return _remainder(name, ufunc, values, result)
    return Bounded.of(bounds.pointwise(name, *values, dtype=result))


def _remainder(name: str, ufunc: np.ufunc, values: list[Value], dtype: str) -> Bounded:
    """Nothing is claimed where the quotient may be another integer."""
    a, b = values
    with np.errstate(all="ignore"):
        quotient = bounds.pointwise("divide", a, b, dtype=dtype)
        near = np.abs(quotient.v - np.rint(quotient.v)) <= quotient.e + 1e-3
        settled = np.isfinite(quotient.v) & np.isfinite(quotient.e) & ~near & (np.abs(quotient.v) < 1e6)
        v = ufunc(a.v, b.v)
        e = np.zeros(v.shape) if name == "floor_divide" else a.e + (np.abs(quotient.v) + 1) * b.e
        e = e + 4 * unit(compute(dtype)) * (np.abs(a.v) + np.abs(b.v)) * (name != "floor_divide")
        e = np.where(settled, e, np.inf)
        return Bounded.of(bounds.rounded(v, e, np.abs(a.v) + np.abs(b.v), dtype, unit(compute(dtype))))


def promoted(*kinds: Any) -> str:
    """The dtype of a result that is computed without a ufunc's loops, of dtypes and of Python's numbers."""
    narrow, half = dtype_of("bfloat16"), np.dtype("float16")
    if narrow in kinds:
        swapped = np.dtype("float32") if half in kinds else half
        found = np.result_type(*(swapped if k == narrow else k for k in kinds))
        return "bfloat16" if found == half else found.name
    return np.result_type(*kinds).name


def matmul(a: Any, b: Any) -> Bounded:
    return bilinear(np.matmul, a, b, a.shape[-1])


def bilinear(function: Callable[[Any, Any], Any], a: Any, b: Any, terms: int) -> Bounded:
    """A sum of products of elements of two arrays, of so many terms."""
    dtype = promoted(a.dtype, b.dtype)
    if dtype not in FLOATS:
        v = function(a.v.astype(dtype), b.v.astype(dtype))
        return Bounded.exact(
            v, function(np.isinf(a.e), np.ones(b.shape, bool)) | function(np.ones(a.shape, bool), np.isinf(b.e))
        )
    values = a.as_value(dtype), b.as_value(dtype)
    return Bounded.of(bounds.bilinear(function, *values, dtype, terms))
