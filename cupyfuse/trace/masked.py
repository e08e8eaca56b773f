"""Elements that a mask selects, whose number depends on values, so that only some operations can use them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np

from ..ir import graph as g
from ..ir.operators import COMPARISONS
from ..ir.rebuild import expression_key
from .broadcasting import expand
from .library import call_library
from .masked_reductions import DOT, FUNCTIONS, MATMUL, METHODS, OF_SHAPE, UFUNCS, Reductions, refuse
from .operations import apply, as_tracer
from .parts import full_index, is_index_array, is_position
from .promotion import checked_number
from .python_numbers import as_python, is_python
from .tracer import Tracer
from .user_code import fail, user_line

# Functions that compute each element by itself, and how many arguments they take then at least.
_POINTWISE: dict[Any, int] = {
    **{np.clip: 1, np.where: 3, np.round: 1, np.around: 1, np.nan_to_num: 1, np.fix: 1, np.isclose: 2},
    **{np.isposinf: 1, np.isneginf: 1},
}
# Functions that compute each element of their first argument by itself, from the others as a whole.
_OF_EACH = (np.interp, np.digitize, np.isin)
# Functions that fill as many elements with one number.
_FULL_LIKE = np.full_like
_UNIFORM = (np.zeros_like, np.ones_like, np.empty_like, _FULL_LIKE)
_ALLCLOSE, _ISCLOSE = np.allclose, np.isclose
_SIGNED = {"uint8": "int16", "uint16": "int32", "uint32": "int64"}  # which hold the numbers of unsigned dtypes


class Masked(Reductions):
    """`x[mask]`: the operand of pointwise work, of reductions, and of assignment to the same elements of an array.

    Attributes
    ----------
    whole : Tracer
        The array, whose elements outside of the mask are unused.
    base : Tracer
        The mask.
    axis : int
        The axis of the selected elements, and the first one of the array that the mask selects along.
    places_along : int, optional
        The axis along which the elements are the positions that the mask selects, as `np.nonzero` gives them.
    source : Masked, optional
        The elements whose memory NumPy's array shares, so that neither can be changed without the other.
    line : str
        File, line and text of the user's code that made it.
    """

    __slots__ = ("_is_viewed", "_whole", "axis", "base", "line", "places_along", "source", "taken")
    __array_priority__ = 1001.0
    _takes_over = True  # operations with traced arrays
    __hash__ = object.__hash__

    def __init__(
        self,
        whole: Tracer,
        base: Tracer,
        axis: int = 0,
        source: Masked | None = None,
        places_along: int | None = None,
    ):
        self._whole, self.base, self.axis, self.source, self.places_along = whole, base, axis, source, places_along
        self.line = user_line()
        self.taken = None if source is None else source.whole
        self._is_viewed = False  # whether an array may share the memory of NumPy's

    @property
    def whole(self) -> Tracer:
        if self.source is not None and self.source.whole is not self.taken:
            refuse("a part of masked elements that have changed since")
        return self._whole

    @property
    def mask(self) -> Tracer:
        """The mask with axes of length one for the array's other axes."""
        order = (*[None] * self.axis, *range(self.base.ndim), *[None] * self._trailing)
        return self.base._trace.array(self.base._node, self.base._axes.picked(order))

    @property
    def _trailing(self) -> int:
        """The number of axes after that of the selected elements."""
        return self.whole.ndim - self.base.ndim - self.axis

    def _of(self, whole: Tracer) -> Masked:
        """Return elements of another array, which may have more leading axes, selected by the same mask."""
        return Masked(whole, self.base, whole.ndim - self._trailing - self.base.ndim)

    def has_mask(self, mask: Tracer) -> bool:
        """Whether a mask is this one."""
        return self.base._axes == mask._axes and _are_equal(self.base._node, mask._node)

    def aligned(self, other: Tracer) -> Tracer | None:
        """Return an array that broadcasts along the whole one as NumPy's does along the selected elements, or None."""
        own = other.ndim - self._trailing - 1  # the axis along the selected elements
        if own < 0:
            return other
        if other.shape[own] != 1 or other.ndim > self.ndim:
            return None
        order = (*range(own), *[None] * self.base.ndim, *range(own + 1, other.ndim))
        return other._trace.array(other._node, other._axes.picked(order))

    def _apply(self, function: Callable[..., Any], operands: tuple[Any, ...]) -> Masked:
        """Apply a pointwise function to the whole arrays."""
        return self._of(function(*map(self._whole_of, operands)))

    def _whole_of(self, operand: Any) -> Any:
        """Return what stands for an operand in an operation on the whole array."""
        if isinstance(operand, Masked):
            if not operand.has_mask(self.base) or operand._trailing != self._trailing:
                refuse("an operation on elements of different masks")
            return operand.whole
        if _is_number(operand):  # which may be weak in promotion
            return operand
        array = self.aligned(as_tracer(operand, self.whole._trace))
        if array is None:
            refuse("an operation on masked elements and an array")
        return array

    def __neg__(self) -> Masked:
        return self._apply(np.negative, (self,))

    def __pos__(self) -> Masked:
        return self._apply(np.positive, (self,))

    def __invert__(self) -> Masked:
        return self._apply(np.invert, (self,))

    def __abs__(self) -> Masked:
        return self._apply(np.absolute, (self,))

    def astype(self, dtype: Any, *, copy: bool = True) -> Masked:
        if not copy and self.whole.dtype == dtype:
            return self
        return self._of(self.whole.astype(dtype))

    def copy(self, order: str = "C") -> Masked:
        return self._of(self.whole.copy())

    def clip(self, min: Any = None, max: Any = None) -> Masked:
        return self._apply(np.clip, (self, min, max))

    def round(self, decimals: int = 0) -> Masked:
        return self._of(np.round(self.whole, decimals))  # type: ignore[arg-type]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if ufunc is MATMUL and method == "__call__" and not options:
            return inputs[0] @ inputs[1]
        if method == "reduce" and ufunc.__name__ in UFUNCS:
            return self._reduce(UFUNCS[ufunc.__name__], **{"axis": 0} | options)
        if method != "__call__" or options.get("out") is not None:
            refuse(f"np.{ufunc.__name__} of masked elements with out= or as .{method}")
        call = self.whole.__array_ufunc__
        return self._apply(lambda *x: call(ufunc, "__call__", *x, **options), inputs)

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        if func is DOT and len(args) == 2 and not options:
            return args[0] @ args[1]
        if func in _POINTWISE and len(args) >= _POINTWISE[func] and all(map(_is_number, options.values())):
            return self._apply(lambda *x: func(*x, **options), args)
        if func is _ALLCLOSE:
            return as_python(self.__array_function__(_ISCLOSE, types, args, options).all())
        if args and args[0] is self:
            if func in FUNCTIONS:
                return self._reduce(FUNCTIONS[func], *args[1:], **options)
            if func in OF_SHAPE and len(args) == 1 and not options:
                return getattr(self, func.__name__)
            if func in _OF_EACH and not any(isinstance(a, Masked) for a in (*args[1:], *options.values())):
                return self._of(func(self.whole, *args[1:], **options))
            fill = [*args[1:2], options.get("fill_value")][0] if func is _FULL_LIKE else 0
            if func in _UNIFORM and options.get("shape") is None and _is_number(fill):
                return self._of(func(self.whole, *args[1:], **options))
        return self.whole._trace.call_function(func, args, options)

    @property
    def T(self) -> Masked:
        first, last = self.axis, self.whole.ndim - self._trailing
        axes = range(self.whole.ndim)
        order = (*reversed(axes[last:]), *axes[first:last], *reversed(axes[:first]))
        return Masked(self.whole.transpose(order).copy(), self.base, self._trailing, source=self)

    def __divmod__(self, other: Any) -> tuple[Masked, Masked]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Masked, Masked]:
        return other // self, other % self

    def __matmul__(self, other: Any) -> Any:
        if isinstance(other, Masked):
            return self._contract(other)
        matrix = as_tracer(other, self.whole._trace)
        if self.axis or self._trailing != 1 or matrix.ndim > 2:
            refuse("a product of masked elements with others than those of the same mask")
        return Masked(np.matmul(self.whole, matrix), self.base)

    def __rmatmul__(self, other: Any) -> NoReturn:
        refuse("a product of an array with masked elements")

    def _contract(self, other: Masked) -> Any:
        """Multiply a vector or matrix of selected columns with a vector or matrix of the same rows."""
        if self._trailing or self.axis > 1 or other.axis or other._trailing > 1 or not other.has_mask(self.base):
            refuse("a product of masked elements with others than those of the same mask")
        if self.ndim == 1 == other.ndim:
            products = self._apply(np.multiply, (self, other))
            dtype = products.whole._node.dtype
            return products.astype(_SIGNED.get(dtype, dtype))._sum(None).astype(dtype)
        left, right = (m._filled(False if m._is_bool else 0) for m in (self, other))
        n = self.base.size
        left, right = left.reshape(*left.shape[: self.axis], n), right.reshape(n, *right.shape[self.base.ndim :])
        return np.matmul(left, right)

    def dot(self, other: Any) -> Any:
        return self @ other

    # Parts
    def __getitem__(self, index: Any) -> Masked:
        if isinstance(index, Masked):
            return Masked(self.whole.copy(), self._narrowed(index))
        items = full_index(index, self.ndim)
        arrays = [i for i in items if is_index_array(i)]
        if not all(i is None or isinstance(i, slice) or is_position(i) or is_index_array(i) for i in items):
            refuse("this index of masked elements")
        if len(arrays) > 1 or (arrays and any(map(is_position, items))):
            refuse("an index of masked elements by an array beside others")
        own = [k for k, i in enumerate(items) if i is not None][self.axis : self.axis + 1]
        if own and is_position(items[own[0]]):
            return self._at(index)
        if not own or items[own[0]] != slice(None) or any(isinstance(i, Tracer) and not i.ndim for i in items):
            refuse("a part of masked elements")
        axis = sum(not is_position(i) for i in items[: own[0]])
        items[own[0] : own[0] + 1] = [slice(None)] * self.base.ndim
        return Masked(self.whole[(*items, Ellipsis)].copy(), self.base, axis, source=self)

    def _at(self, index: Any) -> Any:
        """Return the element, or the row, at a position among the selected ones, by a library step."""
        found = call_library("getitem", [self.elements, index])
        if found.ndim:
            self._is_viewed = True
            found._mark_shared()
        return found

    def ravel(self, order: str = "C") -> Masked:
        """Return all numbers in a vector: a mask of the whole array selects them in the same order."""
        if order not in ("C", "c"):
            refuse("an order of masked elements other than their own")
        whole: Tracer = self.whole.copy()
        return Masked(whole, expand(self.mask, whole.shape), source=self)

    def reshape(self, *shape: Any, order: str = "C") -> Masked:
        if shape not in ((-1,), ((-1,),)):
            refuse("a shape of masked elements other than (-1,)")
        return self.ravel(order)

    def flatten(self, order: str = "C") -> Masked:
        return self.ravel(order).copy()

    def __iter__(self) -> Iterator[Masked]:
        if not self.axis:
            refuse("an iteration over masked elements")
        return (self[k] for k in range(self.whole.shape[0]))

    def __setitem__(self, index: Any, value: Any) -> None:
        if not isinstance(index, Masked):
            refuse("this assignment to masked elements")
        mask = self._narrowed(index)
        part = Masked(self.whole, mask)
        if isinstance(value, Masked) and value.has_mask(mask) and value.whole.shape == self.whole.shape:
            value = value.whole
        elif not _is_number(value):
            refuse("an assignment of an array to masked elements")
        value = as_tracer(checked_number(self.whole._node.dtype, value), self.whole._trace)
        self._change(apply("where", part.mask, value.astype(self.whole.dtype), self.whole))

    def _change(self, whole: Tracer) -> None:
        """Take the elements of another array, in place."""
        if self.source is not None or self._is_viewed:
            refuse("a change in place of a part of masked elements")
        self._whole, self.places_along = whole, None

    def _narrowed(self, index: Masked) -> Tracer:
        """Return the mask of those selected elements that another mask selects among them."""
        shape = self.whole.shape[: index.whole.ndim]
        fits = index._is_bool and index.has_mask(self.base) and index.whole.shape == shape
        if index.axis != self.axis or not fits:
            refuse("an index of masked elements other than a mask of their own")
        return apply("logical_and", index.mask, index.whole)

    def _filled(self, value: Any) -> Tracer:
        """Return the whole array, with a value in place of the elements that are not selected."""
        return apply("where", self.mask, self.whole, value)

    @property
    def _is_bool(self) -> bool:
        return self.whole._node.dtype == "bool"

    @property
    def dtype(self) -> Any:
        return self.whole.dtype

    @property
    def ndim(self) -> int:
        return self.whole.ndim - self.base.ndim + 1

    @property
    def shape(self) -> tuple[Any, ...]:
        whole = self.whole.shape
        return (*whole[: self.axis], as_python(self._count(0)), *whole[self.axis + self.base.ndim :])

    @property
    def size(self) -> Tracer:
        return as_python(self._count(None))

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        refuse(f".{name} of masked elements")

    def __len__(self) -> int:
        if self.axis:
            return self.whole.shape[0]
        fail("len() of masked elements", "their number depends on values, and len() gives Python's numbers; use .size")

    def _unknown(self, *_: Any) -> NoReturn:
        refuse("a use of masked elements as a number or a truth value")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        refuse("a copy of masked elements by np.array or np.asarray")

    __bool__ = __float__ = __int__ = _unknown


def _is_number(value: Any) -> bool:
    """Whether a value has no axes."""
    if isinstance(value, (Masked, Tracer)):
        return isinstance(value, Tracer) and not value.ndim
    return is_python(value) or not np.ndim(value)


def _are_equal(a: g.Node, b: g.Node) -> bool:
    """Whether two nodes are the same computation of the same inputs."""
    first: dict[object, g.Node] = {}
    done: dict[g.Node, g.Node] = {}
    for node in g.topological((a, b)):
        same = g.with_inputs(node, [done[i] for i in node.inputs])
        done[node] = first.setdefault(expression_key(same), same)
    return done[a] is done[b]


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
        self._change(self._apply(lambda whole, value: change(whole.copy(), value), (self, other)).whole)
        return self

    return method


def _method(name: str) -> Callable[..., Any]:
    """Return the array method that is the reduction of a name."""

    def method(self: Masked, *args: Any, **options: Any) -> Any:
        return self._reduce(name, *args, **options)

    return method


for _name in METHODS:
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
