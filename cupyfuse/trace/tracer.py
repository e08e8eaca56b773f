"""`Tracer`: a traced array with NumPy's attributes, methods and protocols, changes in place, and views."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.library import VIEW
from ..ir.operators import POINTWISE
from ..ir.parts import View
from .arithmetic import has_protocol
from .axes import Axes, AxisLabels, as_shape, normalize_axes
from .changes import Changes
from .python_numbers import as_python_like, class_of, item_of, list_of, rounded, weak_in_loop_dtypes
from .strides import are_contiguous, contiguous_strides, in_upper_case
from .user_code import fail, is_called_from_compiled_code, user_line
from .value import LONGEST_ITERATION, NUMPY_NUMBERS, filled_with
from .watched import Site

# Others stand for these in the module `numpy` while a trace runs.
_OF_NUMPY = frozenset(value for value in vars(np).values() if isinstance(value, np.ufunc))
_CLIP, _DOT, _COMPRESS, _ANY, _ALL = np.clip, np.dot, np.compress, np.any, np.all


class TraceProtocol(Protocol):
    """The operations that a tracer delegates to its trace; `Trace` implements them."""

    effects: dict[int, g.Node]
    copies: bool
    for_shards: bool
    folded: dict[tuple[object, ...], g.Node]
    stored: set[g.Node]
    viewed: dict[g.Node, tuple[g.Node, View]]
    strict: bool
    numpy_only: bool
    traced_sites: Container[Site]
    watches: bool
    assigned_sites: set[Site]
    has_created: bool

    def array(self, node: g.Node, axes: Axes | AxisLabels) -> Tracer: ...
    def tracer_of(self, value: Any) -> Tracer: ...
    def constant(self, value: Any) -> Tracer: ...
    def known(self, tracer: Tracer) -> Any: ...
    def call(self, name: str, operands: Iterable[Any]) -> AbstractContextManager[Callable[[Any], Any]]: ...
    def assignment(self, value: Any, written_bytes: int) -> AbstractContextManager[None]: ...
    def quiet(self) -> AbstractContextManager[None]: ...
    def note_raise(self, name: str, midway: bool = False) -> None: ...
    def note_error(self, name: str) -> None: ...

    def apply(self, op: str, *operands: Any) -> Tracer: ...
    def reduce(self, op: str, x: Tracer, axis: Any, keepdims: bool = False, **options: Any) -> Tracer: ...
    def variance(self, x: Tracer, axis: Any, ddof: float, keepdims: bool, **options: Any) -> Tracer: ...
    def clip(self, x: Any, low: Any, high: Any, **options: Any) -> Tracer: ...
    def power(self, base: Any, exponent: Any) -> Tracer: ...
    def matmul(self, a: Any, b: Any) -> Tracer: ...
    def dot(self, a: Any, b: Any) -> Tracer: ...
    def reshape(self, x: Tracer, shape: tuple[int, ...], order: str) -> Tracer: ...
    def expand(self, x: Tracer, shape: tuple[int, ...]) -> Tracer: ...
    def refolded(self, x: Tracer, fold: Axes) -> Tracer: ...
    def get(self, x: Tracer, index: Any) -> Any: ...
    def assign(self, x: Tracer, index: Any, value: Any) -> None: ...
    def flat(self, x: Tracer) -> Any: ...
    def call_ufunc(self, name: str, method: str, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any: ...
    def call_function(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any: ...
    def call_library(self, function: str, arguments: Sequence[Any], options: dict[str, Any] | None = None) -> Any: ...
    def call_method(self, name: str, x: Tracer, *args: Any, **options: Any) -> Any: ...


class Tracer(Changes):
    """A traced array: each operation on it adds a node to the graph."""

    __slots__ = ("_is_python", "_strides")
    __array_priority__ = 1000.0

    _trace: TraceProtocol

    def __init__(self, trace: TraceProtocol, node: g.Node, axes: Axes):
        self._trace = trace
        self._node = node
        self._axes = axes
        self._origin: g.Node | None = None  # the argument that a change in place of this array changes
        self._parent: Tracer | None = None  # of a view the array that it is a view of
        self._selection: Any = None  # of a view what `_get` and `_put` need
        self._views: list[Tracer] = []
        self._is_stale = False  # whether the value of a view has to be read again from the array it is a view of
        # This array and those reshaped from it, which NumPy may make views or copies; None if there are none.
        self._aliases: list[Tracer] | None = None
        self._shared = False  # whether another array may share this memory, so that no change in place is possible
        self._read_only = False
        self._is_array = False  # whether a 0-d value is an array, which can be changed in place, not a NumPy scalar
        self._is_python = False  # whether NumPy returns a Python number
        # In bytes, of arguments, copies and arrays that the function creates, and of views of these; None if unknown.
        self._strides: tuple[int, ...] | None = None

    @property
    def _is_scalar(self) -> bool:
        return not self._axes.shape and not self._is_array

    # What `isinstance` reads: np.ndarray, or the type of a NumPy scalar, or of a Python number.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        if self._is_python:
            return class_of(self)
        return self.dtype.type if self._is_scalar else np.ndarray

    __round__ = rounded
    tolist = list_of

    @property
    def T(self) -> Tracer:
        return self.transpose()

    @property
    def mT(self) -> Tracer:
        if self.ndim < 2:
            raise ValueError(f"mT: an array of {self.ndim} dimensions holds no matrices\n  at {user_line()}")
        return self.swapaxes(-2, -1)

    def __setitem__(self, index: Any, value: Any) -> None:
        is_part = isinstance(value, Tracer) and value._parent is not None and value._root is self._root
        if is_part and is_called_from_compiled_code(sys._getframe(1)):
            # It takes other ways with NumPy's own arrays than with objects that are like them.
            fail(
                "an exchange of rows by compiled code, as shuffle() of NumPy's random generators",
                "take them in another order, as in x[rng.permutation(len(x))]",
            )
        self._trace.assign(self, index, value)

    # Views
    def __getitem__(self, index: Any) -> Any:
        return self._trace.get(self, index)

    def __iter__(self) -> Iterator[Tracer]:
        if not self.ndim:
            raise TypeError(f"iteration over a 0-d array\n  at {user_line()}")
        return self._rows()

    def _rows(self) -> Iterator[Tracer]:
        """Yield the rows; of an array of many the first can be taken, as in `zip(range(3), x)`, but not all."""
        for i in range(len(self)):
            if i == LONGEST_ITERATION:
                fail(
                    f"an iteration over {len(self)} rows",
                    "each would be traced by itself; write it for the whole array, as in x.sum(axis=0)",
                )
            yield self[i]

    def _view(self, order: Sequence[int | None]) -> Tracer:
        """Return a view with permuted axes, without some of length one, and with new ones (None)."""
        view = self._make_view(_pick_axes, _put_back_axes, tuple(order))
        if self._strides is not None:
            view._strides = tuple(0 if p is None else self._strides[p] for p in order)
        return view

    def _is_contiguous(self, order: str) -> bool | None:
        """Whether the array is contiguous in the order "C" or "F"; None if unknown."""
        if self._strides is None or self.size <= 1:
            is_result = self._parent is None and self._origin is None
            return True if self.size <= 1 or (self.ndim == 1 and is_result) else None
        return are_contiguous(self._strides, self.shape, self.itemsize, order)

    def transpose(self, *order: Any) -> Tracer:
        if order in ((), (None,)):
            order = tuple(reversed(range(self.ndim)))
        elif len(order) == 1 and isinstance(order[0], (tuple, list)):
            order = tuple(order[0])
        if len(order) != self.ndim:
            raise ValueError(f"axes {order} do not match an array of {self.ndim} dimensions\n  at {user_line()}")
        return self._view(list(normalize_axes(order, self.ndim, "transpose")))

    def swapaxes(self, axis1: Any, axis2: Any) -> Tracer:
        order = list(range(self.ndim))
        (a,), (b,) = (normalize_axes(axis, self.ndim, "swapaxes") for axis in (axis1, axis2))
        order[a], order[b] = order[b], order[a]
        return self._view(order)

    def squeeze(self, axis: Any = None) -> Tracer:
        if axis is None:
            drop = {i for i, n in enumerate(self.shape) if n == 1}
        else:
            drop = set(normalize_axes(axis, self.ndim, "squeeze"))
            if any(self.shape[i] != 1 for i in drop):
                raise ValueError(
                    f"squeeze: axis {axis} of an array of shape {self.shape} is longer than one\n  at {user_line()}"
                )
        return self._view([i for i in range(self.ndim) if i not in drop])

    def reshape(self, *shape: Any, order: str = "C") -> Tracer:
        return self._trace.reshape(self, as_shape(shape[0] if len(shape) == 1 else shape), in_upper_case(order))

    def ravel(self, order: str = "C") -> Tracer:
        """Return a contiguous vector: a view of a contiguous array, else a copy."""
        order = in_upper_case(order)
        contiguous = self._is_contiguous("F" if order == "F" else "C")
        flat = self._trace.reshape(self.copy() if contiguous is False else self, (-1,), order)
        if contiguous is not None or flat._root is not self._root:
            return flat
        return self._add_alias(flat.copy())

    def view(self, dtype: Any = None) -> Tracer:
        is_class = isinstance(dtype, type) and issubclass(dtype, np.ndarray)
        if is_class and dtype is not np.ndarray:
            way_out = "traced arrays are plain ones; in place of a masked array use x[mask], where= or np.where"
            fail(f"an array of the class {dtype.__name__}", way_out)
        if dtype is not None and not is_class and np.dtype(dtype) != self.dtype:
            if np.dtype(dtype).itemsize != self.itemsize or "bfloat16" in (np.dtype(dtype).name, self._node.dtype):
                fail(
                    f".view({dtype})", "bytes are read as another dtype of NumPy's of the same size alone; use .astype"
                )
            viewed: Tracer = self._trace.call_library(VIEW, [self, np.dtype(dtype)])
            return viewed
        return self._view(range(self.ndim))

    def item(self, *index: Any) -> Any:
        return item_of(self, *index)

    def fill(self, value: Any) -> None:
        if type(value) in NUMPY_NUMBERS:  # which an assignment does not check
            value = filled_with(value, self.dtype)
        self[...] = value

    @property
    def flat(self) -> Any:
        return self._trace.flat(self)

    @flat.setter
    def flat(self, value: Any) -> None:
        self._trace.flat(self)[...] = value

    # Methods that are functions
    def astype(
        self, dtype: Any, order: str = "K", casting: Any = "unsafe", subok: bool = True, copy: bool = True
    ) -> Tracer:
        try:
            name = dtypes.name_of(dtype)
        except TypeError as error:
            fail(f"astype({dtype})", str(error))
        if casting != "unsafe" and not np.can_cast(self.dtype, new := dtypes.to_numpy(name), casting):
            found = f"Cannot cast array data from {self.dtype!r} to {new!r}"
            raise TypeError(f"{found} according to the rule {casting!r}\n  at {user_line()}")
        if name == self._node.dtype:
            return self.copy(order) if copy else self._in_order(order)
        if dtypes.is_opaque(name) or dtypes.is_opaque(self._node.dtype):
            converted: Tracer = self._trace.call_library("asarray", [self], {"dtype": dtypes.to_numpy(name)})
            return converted._with_kind_of(self)
        return self._trace.array(g.cast(self._node, name), self._axes)._with_kind_of(self)

    def copy(self, order: str = "C") -> Tracer:
        order = in_upper_case(order)
        copied = self._as_result()._with_kind_of(self)
        if order == "C" or (order != "F" and self._is_contiguous("C")):
            copied._strides = contiguous_strides(self.shape, self.itemsize)
        return copied

    def _in_order(self, order: Any) -> Tracer:
        """Return the array itself if it is contiguous in the order "C" or "F", else a copy that may be the array."""
        order = in_upper_case(order)
        contiguous = order not in ("C", "F") or self._is_contiguous(order)
        if contiguous:
            return self
        copied = self.copy(order)
        if contiguous is None:
            for array in (self, copied):
                array._mark_shared()
        return copied

    def __copy__(self) -> Tracer:
        return self.copy("K")

    def __deepcopy__(self, memo: Any) -> Tracer:
        return self.copy("K")

    def _as_result(self) -> Tracer:
        """Return the value as a result of an operation: a new array, or a scalar if it is 0-d."""
        return self._trace.array(self._node, self._axes)

    def _with_kind_of(self, other: Tracer) -> Tracer:
        """Return this value as an array or as a scalar, whichever another one is."""
        self._is_array = other._is_array
        return self

    # Over no elements sums and products have a value, extremes have none.
    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False, *, where: Any = True) -> Tracer:
        if out is not None or where is not True:
            return self._trace.call_function(_ANY, (self, axis, out, keepdims), {"where": where})
        return self._reduce_truth("sum" if 0 in self.shape else "max", axis, keepdims)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False, *, where: Any = True) -> Tracer:
        if out is not None or where is not True:
            return self._trace.call_function(_ALL, (self, axis, out, keepdims), {"where": where})
        return self._reduce_truth("prod" if 0 in self.shape else "min", axis, keepdims)

    def _reduce_truth(self, op: str, axis: Any, keepdims: bool) -> Tracer:
        """Reduce the elements' truth values, as 0 and 1."""
        truth = self._trace.apply("where", self._trace.apply("not_equal", self, 0), 1.0, 0.0).astype("float32")
        return self._trace.apply("greater", self._trace.reduce(op, truth, axis, keepdims), 0.0)

    def flatten(self, order: str = "C") -> Tracer:
        return self.copy().ravel(order).copy()

    def conj(self) -> Tracer:
        """Conjugate; a real array is returned itself, not a copy, unlike by `numpy.conj`."""
        if not dtypes.is_complex(self._node.dtype):
            return self
        return as_python_like(self._trace.call_ufunc("conjugate", "__call__", (self,), {}), self)

    conjugate = conj

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> Tracer:
        return self._with_out(_CLIP, (self, min, max), out)

    def dot(self, other: Any, out: Any = None) -> Tracer:
        return self._with_out(_DOT, (self, other), out)

    def compress(self, condition: Any, axis: Any = None, out: Any = None) -> Any:
        return self._with_out(_COMPRESS, (condition, self, axis), out)

    def _with_out(self, function: Any, arguments: tuple[Any, ...], out: Any) -> Any:
        return self._trace.call_function(function, arguments, {} if out is None else {"out": out})

    # The protocols of NumPy, CuPy and the array API standard
    def __array_namespace__(self, *, api_version: str | None = None) -> Any:
        """Return NumPy, whose functions dispatch to the trace."""
        if api_version not in (None, "2021.12", "2022.12", "2023.12", "2024.12"):
            raise ValueError(f"api_version: expected at most '2024.12', got {api_version!r}")
        return np

    def to_device(self, device: Any, /, *, stream: Any = None) -> Tracer:
        if device != self.device or stream is not None:
            fail(f"to_device({device!r})", "arrays stay on the device of the arguments; move those before the call")
        return self

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if any(has_protocol(type(i)) for i in inputs):
            return NotImplemented
        if ufunc.signature is not None and ufunc not in _OF_NUMPY:
            shapes = f"it takes arrays along some axes, {ufunc.signature}, as NumPy's own ufuncs alone may here"
            fail(f"the ufunc {ufunc.__name__}", f"{shapes}; call it outside of the fused function")
        if method == "__call__" and ufunc.__name__ not in POINTWISE:
            inputs = weak_in_loop_dtypes(ufunc, inputs)
        if method == "__call__" and ufunc not in _OF_NUMPY:
            inputs = _in_loop_dtypes(ufunc, inputs)
        return self._trace.call_ufunc(ufunc.__name__, method, inputs, options)

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        if any(map(has_protocol, types)):
            return NotImplemented
        return self._trace.call_function(func, args, options)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *inputs: Any, **options: Any) -> Any:
        return self._trace.call_ufunc(
            str(getattr(kernel, "name", kernel)).removeprefix("cupy_"), "__call__", inputs, options
        )


def _in_loop_dtypes(ufunc: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Convert traced operands to the dtypes in which a ufunc computes: SciPy's have no loops for float16 and integers.

    Those of bfloat16, which SciPy converts to float64, stay as they are.
    """
    traced = [i for i in inputs if isinstance(i, Tracer)]
    if any(t._node.dtype == "bfloat16" for t in traced):
        return inputs
    try:
        loops = ufunc.resolve_dtypes((*map(_type_in_loops, inputs), *[None] * ufunc.nout))
    except TypeError:
        return inputs
    if any(d.hasobject for d in loops):  # of np.frompyfunc
        return inputs
    found = zip(inputs, loops[: len(inputs)], strict=True)
    return tuple(i.astype(d) if isinstance(i, Tracer) and i.dtype != d else i for i, d in found)


def _type_in_loops(operand: Any) -> Any:
    """Return what decides a ufunc's loop: a dtype, or the type of a number of Python's, which takes the others' dtype.

    The class of a number that each call brings is the number's.
    """
    if isinstance(operand, Tracer):
        return operand.dtype
    kind = operand.__class__
    if kind in (int, float):
        return kind
    return np.dtype(kind) if issubclass(kind, np.generic) else np.asarray(operand).dtype


def _pick_axes(x: Tracer, order: Sequence[int | None]) -> Tracer:
    return x._trace.array(x._node, x._axes.picked(order))


def _put_back_axes(x: Tracer, order: Sequence[int | None], value: Tracer) -> Tracer:
    """Return an array like `x` whose view by `_pick_axes` is `value`."""
    aligned = x._trace.refolded(value, x._axes.picked(order))
    return x._trace.array(aligned._node, x._axes)
