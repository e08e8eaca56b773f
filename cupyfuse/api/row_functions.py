"""Functions along axes: logsumexp and softmax as SciPy's, statistics as NumPy's."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import dtypes, trace
from ..trace import Tracer, apply, fail, reduce
from ..trace.exponentials import relative_to_max, stop_gradient
from . import arrays, lazy
from .checks import as_operand, check_number
from .eager import Arguments, copy_to, export, import_operand, promote_integers, traceable, with_axes_last
from .fuse import Fused

# Sums of exponentials -----------------------------------------------------------------------------------------------

_NUMBERS = (bool, int, float, complex)  # weakly typed: they take the dtype of the array beside them


def _logsumexp_eager(fused: Fused, arguments: Arguments, out: Any) -> Any:
    """Run logsumexp on real or complex arrays of any rank, promoted and broadcast as SciPy does."""
    imported, result = _logsumexp_of(fused, arguments)
    return copy_to(export(result, imported), out)


def _logsumexp_of(fused: Fused, arguments: Arguments) -> tuple[arrays.Imported, Any]:
    """Return the imported array of arguments, and the logsumexp of it."""
    a, b = arguments["a"], arguments["b"]
    factors = None if b is None or type(b) in _NUMBERS else import_operand(b, "b").array
    # A real number takes the float dtype of the array beside it; the kind of bfloat16 is "V".
    if factors is not None and type(a) in _NUMBERS[:3] and factors.dtype.kind in "fV":
        a = _array_module(factors).asarray(a, factors.dtype)
    imported = import_operand(a, "a")
    a = promote_integers(imported.array, factors)
    if factors is not None:
        if not any(map(lazy.is_lazy, (a, factors))) and arrays.is_cupy(a) != arrays.is_cupy(factors):
            raise TypeError("a and b are on different devices; move them to one, for example with cupy.asarray")
        b = factors = promote_integers(factors, imported.array)
    arguments |= {"a": a, "b": b}
    if _is_complex(a) or _is_complex(b):
        if any(map(lazy.is_lazy, (a, b))):
            raise TypeError("logsumexp: expected real Dask arrays, got complex ones; apply it to chunks by map_blocks")
        return imported, _complex_logsumexp(**arguments)
    names = ["a"] if factors is None else ["a", "b"]
    shape = np.broadcast_shapes(*(arguments[name].shape for name in names))
    if len(shape) > 2:
        arguments |= {name: _broadcast_to(arguments[name], shape) for name in names}
        return imported, with_axes_last(fused, arguments, names, shape)
    return imported, fused(**arguments)


def _is_complex(value: Any) -> bool:
    return isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c"


def _array_module(array: Any) -> Any:
    """Return NumPy or CuPy; for a Dask array that of its chunks."""
    return np if isinstance(getattr(array, "_meta", array), np.ndarray) else sys.modules["cupy"]


def _broadcast_to(array: Any, shape: tuple[int, ...]) -> Any:
    if lazy.is_lazy(array):
        return sys.modules["dask.array"].broadcast_to(array, shape)
    if isinstance(array, np.ndarray):
        return np.broadcast_to(array, shape, subok=True)
    return _array_module(array).broadcast_to(array, shape)


def _complex_logsumexp(a: Any, axis: Any, b: Any, keepdims: bool, return_sign: bool) -> Any:
    """Compute logsumexp of complex numbers by NumPy or CuPy, since no kernel computes with them.

    Exponentials are relative to the largest real part, which keeps the phase within (-pi, pi]. Where the result is not
    finite it is log(sum(b exp(a))) as written, as in SciPy.
    """
    xp = _array_module(a)
    dtype = np.result_type(a.dtype, 1.0 if b is None else getattr(b, "dtype", b))
    a = xp.broadcast_to(a, np.broadcast_shapes(a.shape, np.shape(b)) or (1,)).astype(dtype)
    axes = trace.normalize_axes(axis, a.ndim, "logsumexp")
    kept = tuple(1 if i in axes else n for i, n in enumerate(a.shape))

    def weighted_sum(a: Any) -> Any:
        # A factor of 1 would turn a complex infinity into NaN.
        return (xp.exp(a) if b is None else b * xp.exp(a)).sum(axis=axes, keepdims=True)

    with np.errstate(all="ignore"):
        if math.prod(a.shape[i] for i in axes) == 0:
            sums, result = xp.zeros(kept, dtype), xp.full(kept, -np.inf, dtype)
        else:
            relevant = a if b is None else xp.where(xp.asarray(b) == 0, xp.asarray(-np.inf, dtype), a)
            top = relevant.real.max(axis=axes, keepdims=True)
            top = xp.where(xp.isfinite(top), top, xp.zeros_like(top))
            sums = weighted_sum(relevant - top)
            result = xp.log(sums) + top
            finite = xp.isfinite(result)
            sums = xp.where(finite, sums, weighted_sum(a))
            result = xp.where(finite, result, xp.log(sums))
    results = [result.real, _phase(sums, xp)] if return_sign else [result]
    if not keepdims:
        results = [r.reshape(tuple(n for i, n in enumerate(kept) if i not in axes))[()] for r in results]
    return tuple(results) if return_sign else results[0]


def _phase(z: Any, xp: Any) -> Any:
    """Return z / |z|, and 0 for 0; an infinite part outweighs a finite one."""
    real, imaginary = (xp.where(xp.isinf(part), xp.sign(part), xp.zeros_like(part)) for part in (z.real, z.imag))
    z = xp.where(xp.isinf(z), real + 1j * imaginary, z)
    size = abs(z)
    return z / xp.where(size == 0, xp.ones_like(size), size)


def _weighted_logsumexp(a: Any, axis: Any, b: Any, keepdims: bool, return_sign: bool) -> Any:
    """Compute log(sum(b * exp(a))) on traced arrays."""
    current = next(value._trace for value in (a, b) if isinstance(value, Tracer))
    weights = as_operand("b", b, current)
    try:
        np.broadcast_shapes(np.shape(a), weights.shape)
    except ValueError:
        raise ValueError(
            f"b: expected a shape that broadcasts with that of a, {np.shape(a)}, got {weights.shape}"
        ) from None
    if not weights.ndim and not np.ndim(a):
        weights = weights[None]
    # Promote before the exponentials: the factors may have the wider dtype. A number takes that of the factors.
    dtype = (weights * a)._node.dtype
    a = apply("where", apply("equal", weights, 0.0), -np.inf, a).astype(dtype)
    if math.prod(a.shape[i] for i in trace.normalize_axes(axis, a.ndim)) == 0:
        total = reduce("sum", weights * a, axis, keepdims)
        return (total - np.inf, total) if return_sign else total - np.inf
    top = stop_gradient(apply("finite_or_zero", reduce("max", a, axis, keepdims=True)))
    total = reduce("sum", weights * apply("exp", a - top), axis, keepdims=True)
    size = apply("absolute", total) if return_sign else total
    result = apply("log", size) + top
    if not keepdims:
        dropped = trace.normalize_axes(axis, a.ndim)
        result, total = result.squeeze(dropped).copy()[()], total.squeeze(dropped)[()]  # scalars, not 0-d arrays
    return (result, apply("sign", total)) if return_sign else result


@functools.partial(traceable, eager=_logsumexp_eager, keeps_integers=True)
def logsumexp(a: Any, axis: Any = None, b: Any = None, keepdims: bool = False, return_sign: bool = False) -> Any:
    """Compute the log of the sum of exponentials, ``log(sum(b * exp(a)))``, with `scipy.special.logsumexp`'s semantics.

    Parameters
    ----------
    a : array
        Outside fused functions also complex.
    axis : None, int or tuple of int
        The axis or axes to sum over; None sums over all. Numbers have one axis, as in SciPy.
    b : array or number, optional
        Factors of the exponentials; they broadcast with `a` and may be negative. An element with factor zero adds
        nothing, even if it is infinite or NaN.
    keepdims : bool
        Keep the reduced axes with length one.
    return_sign : bool
        Return the sign of the sum as well.

    Returns
    -------
    array, or (array, array)
        The logarithm; NaN for negative sums, -inf for empty ones. With `return_sign`, the logarithm of the absolute
        value, and the sign: 1, 0 or -1, for complex numbers the phase.

    Raises
    ------
    ValueError
        Shapes do not broadcast, or `axis` names an axis twice.
    TypeError
        A dtype is not supported, or the arrays are on different devices.
    """
    if b is not None:
        return _weighted_logsumexp(promote_integers(a, b), axis, promote_integers(b, a), keepdims, return_sign)
    a = promote_integers(a)
    result = reduce("logsumexp", a if a.ndim else a[None], axis, keepdims)
    if not return_sign:
        return result
    sign = apply("where", apply("equal", result, -np.inf), 0.0, 1.0).astype(result._node.dtype)
    return result, apply("where", apply("isnan", result), result, sign)


def _axis_of_softmax(name: str, x: Any, axis: Any) -> Any:
    """Return the axis; raise an error that names the function where it is not defined, or there is no such axis."""
    if dtypes.is_complex(x._node.dtype):
        fail(f"{name} of {x._node.dtype} arrays", "it works on real floats; convert them with .astype first")
    axis = _axis_of(x, axis)
    trace.normalize_axes(axis, x.ndim, name)
    return axis


def _axis_of(x: Any, axis: Any) -> Any:
    """Return an axis; None for that of an array without dimensions, of which SciPy takes 0 and -1."""
    return None if not x.ndim and isinstance(axis, int) and axis in (0, -1) else axis


@traceable
def softmax(x: Any, axis: Any = None) -> Any:
    """Compute ``exp(x) / sum(exp(x))`` along an axis, with `scipy.special.softmax`'s semantics.

    Parameters
    ----------
    x : array
    axis : None, int or tuple of int
        None normalises over all elements.

    Returns
    -------
    array
        Of the shape of `x`; sums to 1 along `axis`. NaN along an axis with +inf or NaN, or with -inf only.

    Notes
    -----
    Differentiation treats the largest element, which exponentials are relative to, as a constant. That is exact: the
    result does not depend on it.
    """
    top, total = relative_to_max(x, _axis_of_softmax("softmax", x, axis))
    return apply("exp", x - top) / total


@traceable
def log_softmax(x: Any, axis: Any = None) -> Any:
    """Compute ``log(softmax(x))``, with `scipy.special.log_softmax`'s semantics.

    Parameters
    ----------
    x : array
    axis : None, int or tuple of int
        None normalises over all elements.

    Returns
    -------
    array
        Of the shape of `x`.

    Notes
    -----
    Differentiation treats the largest element as a constant, as in `softmax`.
    """
    top, total = relative_to_max(x, _axis_of_softmax("log_softmax", x, axis))
    return (x - apply("finite_or_zero", top)) - apply("log_relative", top, total)


# Statistics ---------------------------------------------------------------------------------------------------------


def _reduction(op: str, summary: str) -> Callable[..., Any]:
    """Return the public function of a reduction, with its docstring."""

    def function(a: Any, axis: Any = None, keepdims: bool = False) -> Any:
        return reduce(op, a, axis, keepdims)

    function.__name__ = function.__qualname__ = op
    function.__doc__ = f"""{summary}

    Parameters
    ----------
    a : array
    axis : None, int or tuple of int
        None reduces over all axes.
    keepdims : bool
        Keep the reduced axes with length one.

    Returns
    -------
    array
        Of integers and bools in the dtype of `numpy.{op}`.
    """
    return traceable(function, keeps_integers=True)


sum = _reduction("sum", "Sum along an axis; float32 and 16-bit floats accumulate in float32.")
prod = _reduction("prod", "Product along an axis.")
mean = _reduction("mean", "Arithmetic mean along an axis.")
max = _reduction("max", "Largest element along an axis; NaN if one is.")
min = _reduction("min", "Smallest element along an axis; NaN if one is.")


@traceable
def var(a: Any, axis: Any = None, ddof: float = 0, keepdims: bool = False) -> Any:
    """Variance along an axis with `ddof` fewer degrees of freedom, as `numpy.var`."""
    check_number("ddof", ddof)
    return trace.variance(a, axis, ddof, keepdims)


@traceable
def std(a: Any, axis: Any = None, ddof: float = 0, keepdims: bool = False) -> Any:
    """Standard deviation along an axis: the square root of `var`."""
    check_number("ddof", ddof)
    return apply("sqrt", trace.variance(a, axis, ddof, keepdims))
