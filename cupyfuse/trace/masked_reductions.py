"""Reductions of the elements that a mask selects."""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from .. import dtypes
from ..ir.library import selected_call
from .axes import normalize_axes
from .broadcasting import expand
from .library import call_library
from .operations import apply, reduce
from .tracer import Tracer
from .user_code import fail

METHODS = ("sum", "prod", "any", "all", "mean", "var", "std", "max", "min")
FUNCTIONS = {getattr(np, name): name for name in (*METHODS, "ptp")}
# Bound at import: a trace replaces them in the module `numpy`.
AVERAGE, DOT, MATMUL, NORM = np.average, np.dot, np.matmul, np.linalg.norm
OF_SHAPE = np.size, np.shape, np.ndim
_OPTIONS = {"var": ("ddof",), "std": ("ddof",), "norm": ("ord",), "average": ("weights",)}
# Functions that leave out NaN, by those that compute the same of all elements.
ORDERED: dict[Any, Any] = {np.median: np.nanmedian, np.percentile: np.nanpercentile, np.quantile: np.nanquantile}


class Reductions:
    """What reduces masked elements; `Masked` implements the rest."""

    __slots__ = ()
    axis: int
    base: Tracer
    ndim: Any
    whole: Any
    _filled: Any
    _is_bool: Any
    _of: Any

    def _reduce(self, name: str, axis: Any = None, *rest: Any, keepdims: Any = False, **options: Any) -> Any:
        """Reduce all elements, or along one axis: that of the selected elements, or one of theirs."""
        unknown = [*rest, *(label for label in options if label not in _OPTIONS.get(name, ()))]
        if unknown:
            refuse(f"{name} of masked elements with {unknown[0]!r}")
        axes = normalize_axes(axis, self.ndim, name)
        if len(axes) != 1 and len(axes) != self.ndim:
            refuse(f"{name} of masked elements along axis {axis}")
        axis = axes[0] if len(axes) == 1 and axis is not None else None
        if axis is None or axis == self.axis:
            found = getattr(self, f"_{name}")(axis, **options)
            if keepdims:
                kept = range(self.ndim) if axis is None else (axis,)
                found = found[tuple(None if k in kept else slice(None) for k in range(self.ndim))]
            return found
        # Each selected element is reduced by itself, and so may be all the others.
        along = axis if axis < self.axis else axis + self.base.ndim - 1
        function = NORM if name == "norm" else getattr(np, name)
        whole = function(self.whole, axis=along, keepdims=bool(keepdims), **options)
        return type(self)(whole, self.base, self.axis - (axis < self.axis and not keepdims))  # type: ignore[call-arg]

    def _along(self, axis: Any) -> tuple[int, ...] | None:
        """Return the axes of the whole array along which selected elements are reduced."""
        return None if axis is None else tuple(range(self.axis, self.axis + self.base.ndim))

    def _mask_first(self, x: Tracer) -> Tracer:
        """Return an array like the whole one with the axes along the mask before all others."""
        along = range(self.axis, self.axis + self.base.ndim)
        return x.transpose((*along, *(p for p in range(x.ndim) if p not in along)))

    # Of all elements, or along the axis of the selected ones

    def _sum(self, axis: Any) -> Tracer:
        return reduce("sum", self._filled(False if self._is_bool else 0), self._along(axis))

    def _prod(self, axis: Any) -> Tracer:
        return reduce("prod", self._filled(True if self._is_bool else 1), self._along(axis))

    def _any(self, axis: Any) -> Tracer:
        return self._filled(False if self._is_bool else 0).any(self._along(axis))

    def _all(self, axis: Any) -> Tracer:
        return self._filled(True if self._is_bool else 1).all(self._along(axis))

    @property
    def _float_dtype(self) -> str:
        """The dtype in which means, variances and quantiles are computed."""
        name = self.whole._node.dtype
        if dtypes.is_complex(name):
            fail("a mean or variance of masked complex numbers", "it is fused for reals; choose with np.where")
        return name if dtypes.is_float(name) else "float64"

    def _as_floats(self) -> Any:
        return self._of(self.whole.astype(self._float_dtype))

    def _mean(self, axis: Any) -> Tracer:
        return (self._as_floats()._sum(axis) / self._count(axis).astype("float64")).astype(self._float_dtype)

    def _var(self, axis: Any, ddof: float = 0) -> Tracer:
        wide = self._as_floats()
        mean = wide._mean(axis)
        if axis is not None:
            mean = mean[(slice(None),) * self.axis + (None,) * self.base.ndim]
        deviations = self._of((wide.whole - mean) ** 2)
        # As NumPy's, NaN or infinity for no more elements than ddof.
        degrees = apply("maximum", self._count(axis).astype("float64") - float(ddof), 0.0)
        return (deviations._sum(axis) / degrees).astype(self._float_dtype)

    def _std(self, axis: Any, ddof: float = 0) -> Tracer:
        return apply("sqrt", self._var(axis, ddof))

    def _max(self, axis: Any) -> Tracer:
        return self._extreme("max", axis)

    def _min(self, axis: Any) -> Tracer:
        return self._extreme("min", axis)

    def _ptp(self, axis: Any) -> Tracer:
        return self._max(axis) - self._min(axis)

    def _extreme(self, op: str, axis: Any) -> Tracer:
        """Return the largest or smallest element; NaN if none is selected, where NumPy raises an error.

        No integer says that none is selected: of integers it is a library step, which raises NumPy's error.
        """
        if not dtypes.is_float(self.whole._node.dtype):
            operands = [self._mask_first(self.whole), self.base, None if axis is None else 0]
            found: Tracer = call_library(selected_call(op), operands)
            return found
        found = reduce(op, self._filled(-np.inf if op == "max" else np.inf), self._along(axis))
        return apply("where", self._count(axis) > 0, found, np.nan)

    def _norm(self, axis: Any, ord: Any = None) -> Tracer:
        if self.ndim > 1 and not (axis is None and ord is None):
            refuse("a norm of masked rows")
        if ord is not None and not (isinstance(ord, (int, float)) and ord > 0):
            refuse(f"a norm of masked elements with ord={ord!r}")
        norm: Tracer = NORM(self._filled(0).ravel(), ord)  # type: ignore[assignment]
        return norm

    def _order_statistic(self, func: Any, *args: Any, axis: Any = None, **options: Any) -> Tracer:
        """Return a median, percentile or quantile; others than the selected ones become NaN, left out."""
        if func.__name__ == "median" and args:
            axis, *args = args  # type: ignore[assignment]
        is_theirs = axis is None or normalize_axes(axis, self.ndim) == (self.axis,)
        if len(args) > (func.__name__ != "median") or not is_theirs:
            refuse(f"np.{func.__name__} of masked elements along an axis other than theirs")
        wide = self._as_floats()
        first = self._mask_first(wide._filled(np.nan))
        rows = first.reshape(self.base.size, *first.shape[self.base.ndim :])
        found = ORDERED[func](rows, *args, axis=None if axis is None else 0, **options)
        is_nan = self._of(apply("isnan", wide.whole))._any(axis)  # NaN among the selected elements
        return apply("where", is_nan, np.nan, found)

    def _count(self, axis: Any) -> Tracer:
        """Count the selected elements; along an axis, those of the mask."""
        selected = reduce("sum", self.base, None)
        return selected * (self.whole.size // self.base.size) if axis is None and self.base.size else selected

    def _average(self, axis: Any = None, weights: Any = None) -> Any:
        """Compute `numpy.average`; weights that sum to zero give NaN or infinity instead of ZeroDivisionError."""
        if weights is None:
            return self._mean(axis)
        if not isinstance(weights, Reductions) or weights.ndim not in (1, self.ndim):
            refuse("np.average of masked elements with weights that are no elements of the same mask")
        if weights.ndim != self.ndim:
            if axis is None:
                refuse("np.average of masked elements with weights of another shape")
            weights = weights[(slice(None), *[None] * (self.ndim - self.axis - 1))]  # type: ignore[index]
        products = self._as_floats() * weights
        total = self._of(expand(weights.whole, self.whole.shape)).astype(products.dtype)
        return products._sum(axis) / total._sum(axis)


def refuse(operation: str) -> NoReturn:
    """Raise a TraceError for an operation on masked elements."""
    fail(
        operation,
        "their number depends on values; pointwise work with numbers and with elements of the same mask, reductions, "
        "medians, quantiles and x[mask] = ... are traced; otherwise choose with np.where",
    )
