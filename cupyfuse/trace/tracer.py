"""`Tracer`: a traced array with Python's operators, NumPy's methods, and NumPy's and CuPy's protocols."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from .. import dtypes
from ..ir import graph as g
from .axes import Axes, normalize_axes
from .user_code import fail, user_line
from .value import TracedValue


class TraceProtocol(Protocol):
    """The operations that a tracer delegates to its trace; `Trace` implements them."""

    effects: dict[int, g.Node]
    strict: bool

    def array(self, node: g.Node, axes: Axes) -> Tracer: ...
    def tracer_of(self, value: Any) -> Tracer: ...
    def constant(self, value: Any) -> Tracer: ...
    def call(self, name: str, operands: Iterable[Any]) -> AbstractContextManager[Callable[[Any], Any]]: ...

    def apply(self, op: str, *operands: Any) -> Tracer: ...
    def reduce(self, op: str, x: Tracer, axis: Any, keepdims: bool = False, **options: Any) -> Tracer: ...
    def variance(self, x: Tracer, axis: Any, ddof: float, keepdims: bool, **options: Any) -> Tracer: ...
    def clip(self, x: Any, low: Any, high: Any, **options: Any) -> Tracer: ...
    def power(self, base: Any, exponent: Any) -> Tracer: ...
    def matmul(self, a: Any, b: Any) -> Tracer: ...
    def dot(self, a: Any, b: Any) -> Tracer: ...
    def mask_logic(self, op: str, symbol: str, *operands: Any) -> Tracer: ...
    def reshape(self, x: Tracer, shape: tuple[int, ...], order: str) -> Tracer: ...
    def expand(self, x: Tracer, shape: tuple[int, ...]) -> Tracer: ...
    def relabel(self, x: Tracer, axes: Axes) -> Tracer: ...
    def call_ufunc(self, name: str, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any: ...
    def call_function(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any: ...
    def call_library(self, function: str, arguments: Sequence[Any], options: dict[str, Any] | None = None) -> Any: ...
    def call_method(self, name: str, x: Tracer, *args: Any, **options: Any) -> Any: ...


class Tracer(TracedValue):
    """A traced array: each operation on it adds a node to the graph."""

    __slots__ = ("_is_array", "_origin", "_viewed")
    __array_priority__ = 1000.0
    __hash__ = object.__hash__

    _trace: TraceProtocol

    def __init__(self, trace: TraceProtocol, node: g.Node, axes: Axes):
        self._trace = trace
        self._node = node
        self._axes = axes
        # The argument that an in-place operation on this array changes.
        self._origin: g.Node | None = None
        self._viewed = False
        # Whether a value without dimensions is an array, which can be changed in place, instead of a NumPy scalar.
        self._is_array = False

    @property
    def _is_scalar(self) -> bool:
        return not self._axes and not self._is_array

    # isinstance tells a traced array from a traced scalar as NumPy's own.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return self.dtype.type if self._is_scalar else np.ndarray

    @property
    def T(self) -> Tracer:
        return self.transpose()

    @property
    def mT(self) -> Tracer:
        if self.ndim < 2:
            raise ValueError(f"mT: an array of {self.ndim} dimensions holds no matrices\n  at {user_line()}")
        return self.transpose((*range(self.ndim - 2), self.ndim - 1, self.ndim - 2))

    @property
    def real(self) -> Any:
        return self._trace.call_library("real", [self]) if dtypes.is_complex(self._node.dtype) else self

    @property
    def imag(self) -> Any:
        if dtypes.is_complex(self._node.dtype):
            return self._trace.call_library("imag", [self])
        return self._trace.call_function(np.zeros_like, (self,), {})

    # Operators
    def __add__(self, other: Any) -> Tracer:
        return self._trace.apply("add", self, other)

    def __radd__(self, other: Any) -> Tracer:
        return self._trace.apply("add", other, self)

    def __sub__(self, other: Any) -> Tracer:
        return self._trace.apply("subtract", self, other)

    def __rsub__(self, other: Any) -> Tracer:
        return self._trace.apply("subtract", other, self)

    def __mul__(self, other: Any) -> Tracer:
        return self._trace.apply("multiply", self, other)

    def __rmul__(self, other: Any) -> Tracer:
        return self._trace.apply("multiply", other, self)

    def __truediv__(self, other: Any) -> Tracer:
        return self._trace.apply("divide", self, other)

    def __rtruediv__(self, other: Any) -> Tracer:
        return self._trace.apply("divide", other, self)

    def __pow__(self, other: Any) -> Tracer:
        return self._trace.power(self, other)

    def __rpow__(self, other: Any) -> Tracer:
        return self._trace.power(other, self)

    def __matmul__(self, other: Any) -> Tracer:
        return self._trace.matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tracer:
        return self._trace.matmul(other, self)

    def __neg__(self) -> Tracer:
        return self._trace.apply("negative", self)

    def __pos__(self) -> Tracer:
        if self._node.dtype == "bool":
            fail("positive of masks (bool arrays)", "NumPy refuses it as well; a copy is .copy()")
        return self.copy()

    def __abs__(self) -> Tracer:
        return self._trace.apply("absolute", self)

    def __gt__(self, other: Any) -> Tracer:
        return self._trace.apply("greater", self, other)

    def __ge__(self, other: Any) -> Tracer:
        return self._trace.apply("greater_equal", self, other)

    def __lt__(self, other: Any) -> Tracer:
        return self._trace.apply("less", self, other)

    def __le__(self, other: Any) -> Tracer:
        return self._trace.apply("less_equal", self, other)

    def __eq__(self, other: Any) -> Tracer:  # type: ignore[override]
        return self._trace.apply("equal", self, other)

    def __ne__(self, other: Any) -> Tracer:  # type: ignore[override]
        return self._trace.apply("not_equal", self, other)

    def __and__(self, other: Any) -> Tracer:
        return self._trace.mask_logic("logical_and", "&", self, other)

    def __or__(self, other: Any) -> Tracer:
        return self._trace.mask_logic("logical_or", "|", self, other)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Tracer:
        return self._trace.mask_logic("logical_not", "~", self)

    def __mod__(self, other: Any) -> Tracer:
        return self._trace.apply("remainder", self, other)

    def __rmod__(self, other: Any) -> Tracer:
        return self._trace.apply("remainder", other, self)

    def __floordiv__(self, other: Any) -> Tracer:
        return self._trace.apply("floor_divide", self, other)

    def __rfloordiv__(self, other: Any) -> Tracer:
        return self._trace.apply("floor_divide", other, self)

    def __divmod__(self, other: Any) -> tuple[Tracer, Tracer]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Tracer, Tracer]:
        return other // self, other % self

    def __xor__(self, other: Any) -> Tracer:
        return self._trace.mask_logic("not_equal", "^", self, other)

    __rxor__ = __xor__

    def __lshift__(self, other: Any) -> Any:
        return self._trace.call_ufunc("left_shift", "__call__", (self, other), {})

    def __rlshift__(self, other: Any) -> Any:
        return self._trace.call_ufunc("left_shift", "__call__", (other, self), {})

    def __rshift__(self, other: Any) -> Any:
        return self._trace.call_ufunc("right_shift", "__call__", (self, other), {})

    def __rrshift__(self, other: Any) -> Any:
        return self._trace.call_ufunc("right_shift", "__call__", (other, self), {})

    # In-place operators change the tracer itself, since other names of the user's function may refer to it.
    def _assign(self, value: Any, assigned: bool = False) -> Tracer:
        new = self._trace.tracer_of(value)
        if self._is_scalar:
            raise TypeError(
                f"a NumPy scalar ({self._node.dtype}), as reductions to a single value return it, cannot be changed in "
                f"place\n  at {user_line()}"
            )
        if self._viewed:
            fail("an in-place change of an array with views", "write y = y + 1 instead of y += 1, or take views later")
        extra = new.ndim - self.ndim
        if assigned and extra > 0 and new.shape[:extra] == (1,) * extra:
            new = self._trace.array(new._node, new._axes[extra:])
        if new.shape != self.shape:
            new = self._trace.expand(new, self.shape)
        if not assigned and not dtypes.can_assign(new._node.dtype, self._node.dtype):
            fail(
                f"an in-place change of a {self._node.dtype} array to {new._node.dtype} values",
                "NumPy refuses it as well; convert the value with .astype first",
            )
        aligned = self._trace.relabel(new, self._axes)
        self._node = g.cast(aligned._node, self._node.dtype)
        if self._origin is not None:
            self._trace.effects[self._origin.argument] = self._node
        return self

    def _changed_to(self, value: Tracer) -> Tracer:
        """Return the result of an in-place operator: the array itself, or a new scalar, since scalars do not change."""
        return value if self._is_scalar else self._assign(value)

    def __iadd__(self, other: Any) -> Tracer:
        return self._changed_to(self + other)

    def __isub__(self, other: Any) -> Tracer:
        return self._changed_to(self - other)

    def __imul__(self, other: Any) -> Tracer:
        return self._changed_to(self * other)

    def __itruediv__(self, other: Any) -> Tracer:
        return self._changed_to(self / other)

    def __ipow__(self, other: Any) -> Tracer:
        return self._changed_to(self._trace.power(self, other))

    def __iand__(self, other: Any) -> Tracer:
        return self._changed_to(self & other)

    def __ior__(self, other: Any) -> Tracer:
        return self._changed_to(self | other)

    def __imod__(self, other: Any) -> Tracer:
        return self._changed_to(self % other)

    def __ifloordiv__(self, other: Any) -> Tracer:
        return self._changed_to(self // other)

    def __ixor__(self, other: Any) -> Tracer:
        return self._changed_to(self ^ other)

    def __ilshift__(self, other: Any) -> Tracer:
        return self._changed_to(self << other)

    def __irshift__(self, other: Any) -> Tracer:
        return self._changed_to(self >> other)

    def __imatmul__(self, other: Any) -> Tracer:
        return self._changed_to(self @ other)

    def __setitem__(self, index: Any, value: Any) -> None:
        whole = index if isinstance(index, tuple) else (index,)
        if not all(i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in whole):
            fail("assignment to part of an array", "choose with np.where, or assign the whole x[...]")
        self._assign(value, assigned=True)

    # Views
    def __getitem__(self, index: Any) -> Tracer:
        items = list(index) if isinstance(index, tuple) else [index]
        for item in items:
            if not (item is None or item is Ellipsis or (isinstance(item, slice) and item == slice(None))):
                fail(
                    f"indexing with {item!r}", "only None, ... and : are supported; slice the argument before the call"
                )
        present = sum(i is not None and i is not Ellipsis for i in items)
        if present > self.ndim or items.count(Ellipsis) > 1:
            raise IndexError(f"too many indices for an array of {self.ndim} dimensions\n  at {user_line()}")
        if Ellipsis not in items:
            items.append(Ellipsis)
        axes: list[int | None] = []
        rest = list(self._axes)
        for item in items:
            if item is None:
                axes.append(None)
            elif item is Ellipsis:
                count = self.ndim - present
                axes, rest = axes + rest[:count], rest[count:]
            else:
                axes.append(rest.pop(0))
        return self._view(tuple(axes))

    def _view(self, axes: Axes) -> Tracer:
        self._viewed = True
        view = self._trace.array(self._node, axes)
        view._viewed = True
        view._is_array = not self._is_scalar
        return view

    def transpose(self, *order: Any) -> Tracer:
        if len(order) == 1 and (order[0] is None or isinstance(order[0], (tuple, list))):
            order = tuple(order[0] or ())
        order = tuple(order) or tuple(reversed(range(self.ndim)))
        if sorted(i + self.ndim * (i < 0) for i in order) != list(range(self.ndim)):
            raise ValueError(f"axes {order} do not match an array of {self.ndim} dimensions\n  at {user_line()}")
        return self._view(tuple(self._axes[i] for i in order))

    def squeeze(self, axis: Any = None) -> Tracer:
        if axis is None:
            drop = {i for i, n in enumerate(self.shape) if n == 1}
        else:
            drop = set(normalize_axes(axis, self.ndim, "squeeze"))
            if any(self.shape[i] != 1 for i in drop):
                raise ValueError(
                    f"squeeze: axis {axis} of an array of shape {self.shape} is longer than one\n  at {user_line()}"
                )
        return self._view(tuple(a for i, a in enumerate(self._axes) if i not in drop))

    def reshape(self, *shape: Any, order: str = "C") -> Tracer:
        if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
            shape = tuple(shape[0])
        return self._trace.reshape(self, tuple(int(n) for n in shape), order)

    def ravel(self, order: str = "C") -> Tracer:
        return self._trace.reshape(self, (-1,), order)

    # Methods that are functions
    def astype(self, dtype: Any, *, copy: bool = True) -> Tracer:
        try:
            name = dtypes.name_of(dtype)
        except TypeError as error:
            fail(f"astype({dtype})", str(error))
        if name == self._node.dtype:
            return self.copy() if copy else self
        if dtypes.is_opaque(name) or dtypes.is_opaque(self._node.dtype):
            return self._trace.call_library("asarray", [self], {"dtype": dtypes.to_numpy(name)})
        return self._trace.array(g.cast(self._node, name), self._axes)._like(self)

    def copy(self, order: str = "C") -> Tracer:
        return self._trace.array(self._node, self._axes)._like(self)

    def __copy__(self) -> Tracer:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Tracer:
        return self.copy()

    def _like(self, other: Tracer) -> Tracer:
        self._is_array = other._is_array
        return self

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Tracer:
        return self._reduce_truth("sum" if 0 in self.shape else "max", axis, out, keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Tracer:
        return self._reduce_truth("prod" if 0 in self.shape else "min", axis, out, keepdims)

    def _reduce_truth(self, op: str, axis: Any, out: Any, keepdims: bool) -> Tracer:
        truth = self._trace.apply("where", self._trace.apply("not_equal", self, 0), 1.0, 0.0).astype("float32")
        return self._trace.apply("greater", self._trace.reduce(op, truth, axis, keepdims, out=out), 0.0)

    def flatten(self, order: str = "C") -> Tracer:
        return self.ravel(order).copy()

    def conjugate(self) -> Tracer:
        return self.conj()

    def conj(self) -> Tracer:
        return self._trace.call_ufunc("conjugate", "__call__", (self,), {})

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> Tracer:
        return self._trace.clip(self, min, max, out=out)

    def dot(self, other: Any) -> Tracer:
        return self._trace.dot(self, other)

    # The protocols of NumPy, CuPy and the array API standard
    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Return NumPy itself, whose functions dispatch to the trace, as the standard's namespace."""
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
            raise ValueError(f"api_version: expected at most '2024.12', got {api_version!r}")
        return np

    def to_device(self, device: Any, /, *, stream: Any = None) -> Tracer:
        if device != self.device or stream is not None:
            fail(f"to_device({device!r})", "arrays stay on the device of the arguments; move those before the call")
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        return self._trace.call_ufunc(ufunc.__name__, method, inputs, options)

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        return self._trace.call_function(func, args, options)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *inputs: Any, **options: Any) -> Any:
        return self._trace.call_ufunc(
            str(getattr(kernel, "name", kernel)).removeprefix("cupy_"), "__call__", inputs, options
        )
