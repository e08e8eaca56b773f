"""Reductions of the elements that a mask selects."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import numpy as np

from .. import dtypes
from ..ir.library import Elements
from .axes import normalize_axes
from .broadcasting import expand
from .library import call_library
from .operations import apply, reduce
from .tracer import Tracer
from .user_code import fail, user_line

METHODS = ("sum", "prod", "any", "all", "mean", "var", "std", "max", "min", "argmax", "argmin")
_LEAVING_NAN_OUT = ("nansum", "nanprod", "nanmean", "nanvar", "nanstd", "nanmax", "nanmin")
_POSITIONS = ("argmax", "argmin", "nanargmax", "nanargmin")
_QUANTILES = ("median", "percentile", "quantile", "nanmedian", "nanpercentile", "nanquantile")
_OTHERS = ("ptp", "count_nonzero", "average")
# Bound at import: a trace replaces them in the module `numpy`.
DOT, MATMUL, NORM = np.dot, np.matmul, np.linalg.norm
FUNCTIONS: dict[Any, str] = {
    **{getattr(np, n): n for n in (*METHODS, *_LEAVING_NAN_OUT, *_POSITIONS, *_QUANTILES, *_OTHERS)},
    NORM: "norm",
}
# Ufuncs whose method `reduce` is a reduction.
UFUNCS = {
    **{"add": "sum", "multiply": "prod", "maximum": "max", "minimum": "min"},
    **{"logical_and": "all", "logical_or": "any"},
}
OF_SHAPE = np.size, np.shape, np.ndim
# The methods by which a quantile is one of the elements, and has their dtype.
_OF_ELEMENTS = ("inverted_cdf", "closest_observation", "lower", "higher", "nearest")
_BY_NAME = {name: function for function, name in FUNCTIONS.items()}
_SIGNATURES = {name: inspect.signature(function) for name, function in _BY_NAME.items()}
# Options beside `axis` and `keepdims`.
_OPTIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sum", "prod", "nansum", "nanprod"), ("dtype", "initial", "where")),
    **dict.fromkeys(("mean", "nanmean"), ("dtype", "where")),
    **dict.fromkeys(("max", "min", "nanmax", "nanmin"), ("initial", "where")),
    **dict.fromkeys(("any", "all"), ("where",)),
    **dict.fromkeys(("var", "std"), ("ddof", "where")),
    **dict.fromkeys(("nanvar", "nanstd"), ("dtype", "ddof", "correction", "where")),
    **dict.fromkeys(("percentile", "quantile", "nanpercentile", "nanquantile"), ("q", "method")),
    "norm": ("ord",),
    "average": ("weights",),
}


def _given(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a reduction, behind the elements, that are not the defaults; refuse unknown ones."""
    signature = _SIGNATURES[name]
    try:
        given = signature.bind(None, *args, **options).arguments
    except TypeError as error:
        raise TypeError(f"{name}: {error}\n  at {user_line()}") from error
    _, *labels = given
    found = {label: given[label] for label in labels if given[label] is not signature.parameters[label].default}
    found = {label: value for label, value in found.items() if value is not (True if label == "where" else np._NoValue)}
    for label in found:
        if label not in ("axis", "keepdims", *_OPTIONS.get(name, ())):
            refuse(f"{name} of masked elements with {label}=")
    return found


class Reductions:
    """What reduces masked elements; `Masked` implements the rest."""

    __slots__ = ()
    axis: int
    base: Tracer
    mask: Any
    ndim: Any
    whole: Any
    _filled: Any
    _is_bool: Any
    _of: Any
    _whole_of: Any

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what `isinstance` reads
        return np.ndarray

    @property
    def elements(self) -> Elements:
        """The operand of a library step that takes these elements."""
        return Elements(self._mask_first(self.whole), self.base, self.axis)

    def _reduce(self, name: str, *args: Any, **options: Any) -> Any:
        """Reduce all elements, or along one axis: that of the selected elements, or one of theirs."""
        options = _given(name, args, options)
        axis, keepdims = options.pop("axis", None), bool(options.pop("keepdims", False))
        axes = normalize_axes(axis, self.ndim, name)
        if len(axes) != 1 and len(axes) != self.ndim:
            refuse(f"{name} of masked elements along axis {axis}")
        axis = axes[0] if len(axes) == 1 and axis is not None else None
        if axis is None or axis == self.axis:
            found = self._reduced(name, axis, options)
            if keepdims:
                kept = range(self.ndim) if axis is None else (axis,)
                found = found[tuple(None if k in kept else slice(None) for k in range(self.ndim))]
            return found
        # Each selected element is reduced by itself, and so may be all the others.
        if "where" in options:
            options["where"] = expand(self._whole_of(options["where"]), self.whole.shape)
        along = axis if axis < self.axis else axis + self.base.ndim - 1
        whole = _BY_NAME[name](self.whole, axis=along, keepdims=keepdims, **options)
        return type(self)(whole, self.base, self.axis - (axis < self.axis and not keepdims))  # type: ignore[call-arg]

    def _reduced(self, name: str, axis: Any, options: dict[str, Any]) -> Any:
        """Reduce all elements, or along the axis of the selected ones."""
        if name in _QUANTILES:
            return self._quantile(name, axis, **options)
        is_complex = dtypes.is_complex(self.whole._node.dtype)
        if name in _POSITIONS or (is_complex and name in ("mean", "var", "std") and "where" not in options):
            return call_library(name, [self.elements], {"axis": axis} | options)
        if "where" in options:
            options["where"] = apply("logical_and", self.mask, self._whole_of(options["where"]))
            return _BY_NAME[name](self.whole, axis=self._along(axis), **options)
        if name in _LEAVING_NAN_OUT:
            if self.whole.dtype.kind not in "biu":
                return _BY_NAME[name](self._filled(np.nan), axis=self._along(axis), **options)
            name = name.removeprefix("nan")
        return getattr(self, f"_{name}")(axis, **options)

    def _along(self, axis: Any) -> tuple[int, ...] | None:
        """Return the axes of the whole array along which selected elements are reduced."""
        return None if axis is None else tuple(range(self.axis, self.axis + self.base.ndim))

    def _mask_first(self, x: Tracer) -> Tracer:
        """Return an array like the whole one with the axes along the mask before all others."""
        along = range(self.axis, self.axis + self.base.ndim)
        return x.transpose((*along, *(p for p in range(x.ndim) if p not in along)))

    # Of all elements, or along the axis of the selected ones

    def _sum(self, axis: Any, **options: Any) -> Any:
        return _BY_NAME["sum"](self._filled(False if self._is_bool else 0), axis=self._along(axis), **options)

    def _prod(self, axis: Any, **options: Any) -> Any:
        return _BY_NAME["prod"](self._filled(True if self._is_bool else 1), axis=self._along(axis), **options)

    def _any(self, axis: Any) -> Tracer:
        return self._filled(False if self._is_bool else 0).any(self._along(axis))

    def _all(self, axis: Any) -> Tracer:
        return self._filled(True if self._is_bool else 1).all(self._along(axis))

    @property
    def _float_dtype(self) -> str:
        """The dtype in which means, variances and quantiles are computed."""
        name = self.whole._node.dtype
        if dtypes.is_complex(name):
            fail("this mean or quantile of masked complex numbers", "it is fused for reals; choose with np.where")
        return name if dtypes.is_float(name) else "float64"

    def _as_floats(self) -> Any:
        return self._of(self.whole.astype(self._float_dtype))

    def _mean(self, axis: Any, dtype: Any = None) -> Any:
        kind = self._float_dtype if dtype is None else dtypes.name_of(dtype)
        if not dtypes.is_float(kind):
            refuse(f"mean of masked elements with dtype={kind}")
        wide: Any = self._of(self.whole.astype(dtypes.compute_dtype(kind)))
        return (wide._sum(axis) / self._count(axis).astype("float64")).astype(kind)

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

    def _max(self, axis: Any, initial: Any = None) -> Any:
        return self._extreme("max", axis, initial)

    def _min(self, axis: Any, initial: Any = None) -> Any:
        return self._extreme("min", axis, initial)

    def _ptp(self, axis: Any) -> Any:
        return self._max(axis) - self._min(axis)

    def _extreme(self, op: str, axis: Any, initial: Any) -> Any:
        """Return the largest or smallest element; NaN if none is selected, where NumPy raises an error.

        No integer says that none is selected: of integers it is a library step, which raises NumPy's error.
        """
        if initial is not None:
            return _BY_NAME[op](self.whole, axis=self._along(axis), initial=initial, where=self.mask)
        if not dtypes.is_float(self.whole._node.dtype):
            return call_library(op, [self.elements], {"axis": axis})
        found = reduce(op, self._filled(-np.inf if op == "max" else np.inf), self._along(axis))
        return apply("where", self._count(axis) > 0, found, np.nan)

    def _count_nonzero(self, axis: Any) -> Any:
        return self._of(apply("not_equal", self.whole, 0))._sum(axis)

    def _norm(self, axis: Any, ord: Any = None) -> Any:
        """Compute the norm of the vectors along an axis, or of all elements as one vector."""
        if axis is None and ord is not None and self.ndim > 1:
            refuse("a norm of a matrix of masked elements")
        if not (ord is None or isinstance(ord, (int, float))):
            raise ValueError(f"Invalid norm order {ord!r} for vectors\n  at {user_line()}")
        wide: Any = self._of(self.whole.astype("float64")) if self.whole.dtype.kind in "biu" else self
        sizes = abs(wide)
        if ord in (None, 2):
            return apply("sqrt", (sizes**2)._sum(axis))
        if ord == 0:
            return sizes._count_nonzero(axis).astype(sizes.dtype)
        if ord == 1:
            return sizes._sum(axis)
        if ord in (np.inf, -np.inf):
            return sizes._extreme("max", axis, 0) if ord > 0 else sizes._extreme("min", axis, None)
        return apply("power", (sizes ** float(ord))._sum(axis), 1.0 / float(ord))

    def _quantile(self, name: str, axis: Any, q: Any = None, **options: Any) -> Any:
        """Return a median, percentile or quantile; others than the selected ones become NaN, left out."""
        if self.whole.dtype.kind in "biu" and options.get("method", "linear") in _OF_ELEMENTS:
            refuse(f"{name} of masked integers that is one of them")
        wide = self._as_floats()
        first = self._mask_first(wide._filled(np.nan))
        rows = first.reshape(self.base.size, *first.shape[self.base.ndim :])
        leaves_nan_out = name.startswith("nan")
        function = _BY_NAME[name if leaves_nan_out else f"nan{name}"]
        found = function(rows, *([] if q is None else [q]), axis=None if axis is None else 0, **options)
        if leaves_nan_out:
            return found
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
