"""Elements that a mask selects, whose number depends on values, so that only some operations can use them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.library import selected_call
from ..ir.operators import COMPARISONS
from .axes import normalize_axes
from .library import call_library
from .operations import apply, reduce
from .tracer import Tracer
from .user_code import fail

_METHODS = ("sum", "prod", "any", "all", "mean", "var", "std", "max", "min")
_REDUCTIONS = {getattr(np, name): name for name in (*_METHODS, "ptp")}
_NORM = np.linalg.norm  # another function stands for it while a trace runs
_OPTIONS = {"var": ("ddof",), "std": ("ddof",), "norm": ("ord",)}
# Functions that leave out NaN, by those that compute the same of all elements.
_ORDERED: dict[Any, Callable[..., Any]] = {
    np.median: np.nanmedian,
    np.percentile: np.nanpercentile,
    np.quantile: np.nanquantile,
}


class Masked:
    """`x[mask]`: the operand of pointwise work, of reductions, and of assignment to the same elements of an array.

    Attributes
    ----------
    whole : Tracer
        The array, whose elements outside of the mask are unused.
    mask : Tracer
        The mask, with axes of length one for the array's other axes.
    ndim : int
        Axes of the mask itself.
    """

    __slots__ = ("mask", "ndim", "whole")
    __array_priority__ = 1001.0
    __hash__ = object.__hash__

    def __init__(self, whole: Tracer, mask: Tracer, ndim: int):
        self.whole, self.mask, self.ndim = whole, mask, ndim

    def has_mask(self, mask: Tracer) -> bool:
        """Whether a mask, with all axes of its array, is this one."""
        return self.mask._axes == mask._axes and _are_equal(self.mask._node, mask._node)

    def _apply(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Masked:
        """Apply a pointwise function to the whole arrays."""
        wholes = []
        for o in operands:
            if isinstance(o, Masked):
                if not o.has_mask(self.mask) or o.whole.ndim != self.whole.ndim:
                    _refuse("an operation on elements of different masks")
                wholes.append(o.whole)
            elif (o.ndim if isinstance(o, Tracer) else np.ndim(o)) <= self.whole.ndim - self.ndim:
                wholes.append(o)
            else:
                _refuse("an operation on masked elements and an array")
        return Masked(function(*wholes), self.mask, self.ndim)

    def __neg__(self) -> Masked:
        return self._apply(np.negative, (self,))

    def __pos__(self) -> Masked:
        return self._apply(np.positive, (self,))

    def __invert__(self) -> Masked:
        return self._apply(np.invert, (self,))

    def __abs__(self) -> Masked:
        return self._apply(np.absolute, (self,))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options.get("out") is not None:
            _refuse(f"np.{ufunc.__name__} of masked elements with out= or as .{method}")
        call = self.whole._trace.call_ufunc
        return self._apply(lambda *x: call(ufunc.__name__, "__call__", x, dict(options)), inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        if func is np.dot and len(args) == 2 and not options:
            return args[0] @ args[1]
        if args and args[0] is self:
            if func in _ORDERED:
                return self._order_statistic(func, *args[1:], **options)
            if func is _NORM:
                return self._reduce("norm", **dict(zip(("ord", "axis"), args[1:], strict=False)) | options)
            if func in _REDUCTIONS:
                return self._reduce(_REDUCTIONS[func], *args[1:], **options)
        _refuse(f"np.{getattr(func, '__name__', func)} of masked elements")

    @property
    def T(self) -> MaskedColumns:
        if self.whole.ndim != 2 or self.ndim != 1:
            _refuse(".T of masked elements")
        return MaskedColumns(self)

    def __divmod__(self, other: Any) -> tuple[Masked, Masked]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Masked, Masked]:
        return other // self, other % self

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Masked) and self.whole.ndim == self.ndim:
            products = self._apply(np.multiply, (self, other))
            return products._sum(None).astype(products.whole.dtype)
        if self.whole.ndim != 2 or self.ndim != 1 or isinstance(other, Masked):
            _refuse("this product of masked elements")
        product = np.matmul(self.whole, other)
        return Masked(product, self.mask if product.ndim == 2 else self.mask[:, 0], 1)

    def dot(self, other: Any) -> Any:
        return self @ other

    def _reduce(self, name: str, axis: Any = None, *rest: Any, keepdims: Any = False, **options: Any) -> Any:
        """Reduce all elements, or along one axis: the first one is that of the selected elements."""
        unknown = [*rest, *(label for label in options if label not in _OPTIONS.get(name, ()))]
        if unknown:
            _refuse(f"{name} of masked elements with {unknown[0]!r}")
        ndim = self.whole.ndim - self.ndim + 1
        if type(axis) is tuple and len(axis) == 1:
            (axis,) = axis
        if type(axis) is not int and axis is not None:
            _refuse(f"{name} of masked elements along axis {axis}")
        if axis is None or normalize_axes(axis, ndim, name) == (0,):
            found = getattr(self, f"_{name}")(axis, **options)
            return found if not keepdims else found.reshape((1,) * ndim) if axis is None else found[None]
        # Each selected element is reduced by itself, and so may be all the others.
        along = axis % ndim + self.ndim - 1
        function = _NORM if name == "norm" else getattr(np, name)
        whole = function(self.whole, axis=along, keepdims=bool(keepdims), **options)
        return Masked(whole, self.mask if keepdims else self.mask.squeeze(along), self.ndim)

    def _filled(self, value: Any) -> Tracer:
        """Return the whole array, with a value in place of the elements that are not selected."""
        return apply("where", self.mask, self.whole, value)

    def _along(self, axis: Any) -> tuple[int, ...] | None:
        """Return the axes of the whole array along which selected elements are reduced."""
        return None if axis is None else tuple(range(self.ndim))

    @property
    def _is_bool(self) -> bool:
        return self.whole._node.dtype == "bool"

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

    def _as_floats(self) -> Masked:
        return Masked(self.whole.astype(self._float_dtype), self.mask, self.ndim)

    def _mean(self, axis: Any) -> Tracer:
        return (self._as_floats()._sum(axis) / self._count(axis).astype("float64")).astype(self._float_dtype)

    def _var(self, axis: Any, ddof: float = 0) -> Tracer:
        wide = self._as_floats()
        deviations = wide._apply(lambda x: (x - wide._mean(axis)) ** 2, (wide,))
        return (deviations._sum(axis) / (self._count(axis) - ddof).astype("float64")).astype(self._float_dtype)

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
            leading = self.mask[(slice(None),) * self.ndim + (0,) * (self.mask.ndim - self.ndim)]
            found: Tracer = call_library(selected_call(op), [self.whole, leading, None if axis is None else 0])
            return found
        self.whole._trace.note_raise()
        found = reduce(op, self._filled(-np.inf if op == "max" else np.inf), self._along(axis))
        return apply("where", self._count(axis) > 0, found, np.nan)

    def _norm(self, axis: Any, ord: Any = None) -> Tracer:
        if self.whole.ndim > self.ndim and not (axis is None and ord is None):
            _refuse("a norm of masked rows")
        if ord is not None and not (isinstance(ord, (int, float)) and ord > 0):
            _refuse(f"a norm of masked elements with ord={ord!r}")
        norm: Tracer = _NORM(self._filled(0).ravel(), ord)  # type: ignore[assignment]
        return norm

    def _order_statistic(self, func: Any, *args: Any, axis: Any = None, **options: Any) -> Tracer:
        """Return a median, percentile or quantile, which NumPy computes of the elements that are not NaN."""
        if len(args) > (func is not np.median) or (axis is not None and (type(axis) is not int or axis != 0)):
            _refuse(f"np.{func.__name__} of masked elements along an axis other than 0")
        wide = self._as_floats()
        rows = wide._filled(np.nan).reshape(-1, *self.whole.shape[self.ndim :])
        found = _ORDERED[func](rows, *args, axis=axis, **options)
        is_nan = wide._apply(np.isnan, (wide,))._any(axis)  # NaN among the selected elements
        return apply("where", is_nan, np.nan, found)

    def _count(self, axis: Any) -> Tracer:
        """Count the selected elements; with axis 0, those of the mask."""
        selected = reduce("sum", self.mask, None)
        return selected * (self.whole.size // self.mask.size) if axis is None and self.mask.size else selected

    @property
    def dtype(self) -> Any:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        return (_as_python(self._count(0)), *self.whole.shape[self.ndim :])

    @property
    def size(self) -> Tracer:
        return _as_python(self._count(None))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f".{name} of masked elements")

    def _unknown(self, *_: Any) -> NoReturn:
        _refuse("a use of masked elements")

    __bool__ = __len__ = __iter__ = __array__ = __float__ = __int__ = __getitem__ = __setitem__ = _unknown


class MaskedColumns:
    """The transpose of selected rows: `x[mask].T @ y[mask]` multiplies whole arrays with zeros for the other rows."""

    __array_priority__ = 1001.0
    __array_ufunc__ = None

    def __init__(self, rows: Masked):
        self.T = rows

    def __matmul__(self, other: Any) -> Tracer:
        if not isinstance(other, Masked) or not other.has_mask(
            self.T.mask if other.whole.ndim == 2 else self.T.mask[:, 0]
        ):
            _refuse("a product of masked elements with others than those of the same mask")
        left, right = (m._filled(False if m._is_bool else 0) for m in (self.T, other))
        product: Tracer = np.matmul(left.T, right)
        return product

    dot = __matmul__


def _as_python(number: Tracer) -> Tracer:
    """Mark a number as one that Python returns, not NumPy."""
    number._is_python = True
    return number


def _are_equal(a: g.Node, b: g.Node) -> bool:
    """Whether two nodes are the same computation of the same inputs."""
    first: dict[object, g.Node] = {}
    done: dict[g.Node, g.Node] = {}
    for node in g.topological((a, b)):
        same = g.with_inputs(node, [done[i] for i in node.inputs])
        done[node] = first.setdefault(g.expression_key(same), same)
    return done[a] is done[b]


def _refuse(operation: str) -> NoReturn:
    """Raise a TraceError for an operation on masked elements."""
    fail(
        operation,
        "their number depends on values; pointwise work with numbers and with elements of the same mask, reductions, "
        "medians, quantiles and x[mask] = ... are traced; otherwise choose with np.where",
    )


def _operator(name: str, reflected: bool) -> Callable[[Masked, Any], Masked]:
    """Return the method of a Python operator, which applies NumPy's ufunc of that name."""

    def method(self: Masked, other: Any) -> Masked:
        operands = (other, self) if reflected else (self, other)
        return self._apply(lambda a, b: getattr(np, name)(a, b), operands)

    return method


def _in_place(symbol: str) -> Callable[[Masked, Any], Masked]:
    """Return the method of an in-place operator, which keeps the dtype: `x[mask]` is an array of its own."""
    change = getattr(operator, f"i{symbol}")

    def method(self: Masked, other: Any) -> Masked:
        self.whole = self._apply(lambda whole, value: change(whole.copy(), value), (self, other)).whole
        return self

    return method


def _method(name: str) -> Callable[..., Any]:
    """Return the array method that is the reduction of a name."""

    def method(self: Masked, *args: Any, **options: Any) -> Any:
        return self._reduce(name, *args, **options)

    return method


for _name in _METHODS:
    setattr(Masked, _name, _method(_name))
_ARITHMETIC = {
    **{"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "pow": "power"},
    **{"floordiv": "floor_divide", "mod": "remainder", "lshift": "left_shift", "rshift": "right_shift"},
    **{"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"},
}
for _symbol, _name in (COMPARISONS | _ARITHMETIC).items():
    setattr(Masked, f"__{_symbol}__", _operator(_name, reflected=False))
for _symbol, _name in _ARITHMETIC.items():
    setattr(Masked, f"__r{_symbol}__", _operator(_name, reflected=True))
    setattr(Masked, f"__i{_symbol}__", _in_place(_symbol))
