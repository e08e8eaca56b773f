"""Elements that a mask selects, whose number depends on values, so that only some operations can use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from .. import dtypes
from ..ir import graph as g
from .operations import apply, reduce
from .tracer import Tracer
from .user_code import fail

_REDUCTIONS = {getattr(np, name): name for name in ("sum", "mean", "var", "std", "max", "min")}


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
                if not o.has_mask(self.mask) or o.whole.shape != self.whole.shape:
                    _refuse("an operation on elements of different masks")
                wholes.append(o.whole)
            elif (o.ndim if isinstance(o, Tracer) else np.ndim(o)) <= self.whole.ndim - self.ndim:
                wholes.append(o)
            else:
                _refuse("an operation on masked elements and an array")
        return Masked(function(*wholes), self.mask, self.ndim)

    def __neg__(self) -> Masked:
        return self._apply(np.negative, (self,))

    def __abs__(self) -> Masked:
        return self._apply(np.absolute, (self,))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if method != "__call__" or options.get("out") is not None:
            _refuse(f"np.{ufunc.__name__} of masked elements with out= or as .{method}")
        call = self.whole._trace.call_ufunc
        return self._apply(lambda *x: call(ufunc.__name__, "__call__", x, dict(options)), inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        if func not in _REDUCTIONS or args[:1] != (self,):
            _refuse(f"np.{getattr(func, '__name__', func)} of masked elements")
        return getattr(self, _REDUCTIONS[func])(*args[1:], **options)

    @property
    def T(self) -> MaskedColumns:
        if self.whole.ndim != 2 or self.ndim != 1:
            _refuse(".T of masked elements")
        return MaskedColumns(self)

    def __matmul__(self, other: Any) -> Masked:
        if self.whole.ndim != 2 or self.ndim != 1 or isinstance(other, Masked):
            _refuse("this product of masked elements")
        product = np.matmul(self.whole, other)
        return Masked(product, self.mask if product.ndim == 2 else self.mask[:, 0], 1)

    def dot(self, other: Any) -> Masked:
        return self @ other

    def sum(self, axis: Any = None, keepdims: Any = False) -> Tracer:
        self._check_axis("sum", axis, keepdims)
        zero = False if self.whole._node.dtype == "bool" else 0
        chosen = apply("where", self.mask, self.whole, zero)
        return reduce("sum", chosen, None if axis is None else tuple(range(self.ndim)))

    @property
    def _float_dtype(self) -> str:
        """The dtype in which means and variances are computed."""
        name = self.whole._node.dtype
        if dtypes.is_complex(name):
            fail("a mean or variance of masked complex numbers", "it is fused for reals; choose with np.where")
        return name if dtypes.is_float(name) else "float64"

    def mean(self, axis: Any = None, keepdims: Any = False) -> Tracer:
        dtype = self._float_dtype
        total = Masked(self.whole.astype(dtype), self.mask, self.ndim).sum(axis, keepdims)
        return (total / self._count(axis).astype("float64")).astype(dtype)

    def var(self, axis: Any = None, keepdims: Any = False, ddof: float = 0) -> Tracer:
        self._check_axis("var", axis, keepdims)
        dtype = self._float_dtype
        wide = Masked(self.whole.astype(dtype), self.mask, self.ndim)
        deviations = wide._apply(lambda x: (x - wide.mean(axis)) ** 2, (wide,))
        return (deviations.sum(axis) / (self._count(axis) - ddof).astype("float64")).astype(dtype)

    def std(self, axis: Any = None, keepdims: Any = False, ddof: float = 0) -> Tracer:
        return apply("sqrt", self.var(axis, keepdims, ddof))

    def max(self, axis: Any = None, keepdims: Any = False) -> Tracer:
        return self._extreme("max", axis, keepdims)

    def min(self, axis: Any = None, keepdims: Any = False) -> Tracer:
        return self._extreme("min", axis, keepdims)

    def _extreme(self, op: str, axis: Any, keepdims: Any) -> Tracer:
        """Return the largest or smallest element; NaN if none is selected, where NumPy raises an error."""
        self._check_axis(op, axis, keepdims)
        if not dtypes.is_float(self.whole._node.dtype):
            _refuse(f"{op} of masked integers")
        others = apply("where", self.mask, self.whole, -np.inf if op == "max" else np.inf)
        found = reduce(op, others, None if axis is None else tuple(range(self.ndim)))
        return apply("where", self._count(axis) > 0, found, np.nan)

    def _count(self, axis: Any) -> Tracer:
        """Count the selected elements; with axis 0, those of the mask."""
        selected = reduce("sum", self.mask, None)
        return selected * (self.whole.size // self.mask.size) if axis is None and self.mask.size else selected

    @property
    def dtype(self) -> Any:
        return self.whole.dtype

    @property
    def shape(self) -> tuple[Any, ...]:
        return (self._count(0), *self.whole.shape[self.ndim :])

    @property
    def size(self) -> Tracer:
        return self._count(None)

    def _check_axis(self, name: str, axis: Any, keepdims: Any) -> None:
        if keepdims or not (axis is None or (axis == 0 and type(axis) is int)):
            _refuse(f"{name} of masked elements along axis {axis}" + " with keepdims" * bool(keepdims))

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
        left, right = (apply("where", m.mask, m.whole, 0) for m in (self.T, other))
        product: Tracer = np.matmul(left.T, right)
        return product

    dot = __matmul__


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
        "their number depends on values; pointwise work with numbers and with elements of the same mask, sums, means, "
        "variances, maxima, minima and x[mask] = ... are fused; otherwise choose with np.where",
    )


def _operator(name: str, reflected: bool) -> Callable[[Masked, Any], Masked]:
    """Return the method of a Python operator, which applies NumPy's ufunc of that name."""

    def method(self: Masked, other: Any) -> Masked:
        operands = (other, self) if reflected else (self, other)
        return self._apply(lambda a, b: getattr(np, name)(a, b), operands)

    return method


for _symbol, _name in {
    **{"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "pow": "power"},
    **{"gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "eq": "equal", "ne": "not_equal"},
}.items():
    setattr(Masked, f"__{_symbol}__", _operator(_name, reflected=False))
    if _symbol in ("add", "sub", "mul", "truediv", "pow"):
        setattr(Masked, f"__r{_symbol}__", _operator(_name, reflected=True))
