"""Tracing: run the user's function once on stand-ins and write down what it does.

A `Tracer` behaves like an array of known shape and dtype. Each operation on it adds a node to the graph. What the graph
does not know of (one-dimensional arrays, transposes, new axes) is kept here: `axes` says for every axis of the user's
array which axis of the two-dimensional node it is (0 rows, 1 columns), or None for an axis of length one that is
neither.
"""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, NoReturn

import numpy as np

from . import dtypes
from . import graph as g
from .errors import TraceAttributeError, TraceError

Axes = tuple["int | None", ...]
_SKIPPED = (os.path.dirname(os.path.abspath(__file__)) + os.sep, os.path.dirname(np.__file__) + os.sep)


class ScalarArgument(float):
    """A float argument of the fused function: a number to Python, a kernel parameter to the emitted code."""

    __slots__ = ("name",)
    name: str

    def __new__(cls, value: float, name: str) -> ScalarArgument:
        self = super().__new__(cls, value)
        self.name = name
        return self


def user_line() -> str:
    """File, line and text of the innermost frame that is neither ours nor NumPy's."""
    import linecache

    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not os.path.abspath(filename).startswith(_SKIPPED) and not filename.startswith("<__array_function__"):
            text = linecache.getline(filename, frame.f_lineno).strip()
            return f"{filename}:{frame.f_lineno}" + (f": {text}" if text else "")
        frame = frame.f_back  # type: ignore[assignment]
    return "an unknown line"


def fail(operation: str, reason: str) -> NoReturn:
    raise TraceError(f"cannot fuse {operation}: {reason}\n  at {user_line()}")


@dataclass(frozen=True)
class Call:
    """One array operation as the user wrote it, with what it costs when run on its own."""

    name: str
    reads: int
    writes: int
    flops: int


class Trace:
    """What one run of the function has recorded besides the nodes themselves."""

    def __init__(self) -> None:
        self.inputs: list[g.Node] = []
        self.effects: dict[int, g.Node] = {}
        self.calls: list[Call] = []
        self._quiet = False

    @contextmanager
    def call(self, name: str, operands: Iterable[Any]) -> Iterator[Callable[[Any], Any]]:
        """Record the outermost of nested operations; the body hands its result to the function it is given."""
        if self._quiet:
            yield lambda result: result
            return
        before = [o._node for o in operands if isinstance(o, Tracer)]
        results: list[g.Node] = []

        def done(result: Tracer) -> Tracer:
            results.append(result._node)
            return result

        self._quiet = True
        try:
            yield done
        finally:
            self._quiet = False
        fresh = [n for n in g.topological(results, lambda n: () if n in before else n.inputs) if n not in before]
        if results:
            reads = sum(n.nbytes for n in set(before) if n.op != "const")
            self.calls.append(Call(name, reads, sum(n.nbytes for n in results), sum(g.flops(n) for n in fresh)))

    def argument(self, name: str, shape: tuple[int, ...], dtype: str) -> Tracer:
        """A stand-in for one array argument of rank 0, 1 or 2."""
        if len(shape) > 2:
            raise TraceError(
                f"argument {name!r} has {len(shape)} dimensions, shape {shape}: fused functions take arrays of at most "
                "2; reshape it to (rows, columns) first, for example x.reshape(-1, x.shape[-1])"
            )
        node_shape = ((1, 1), (1, *shape), shape)[len(shape)]
        node = g.Node("input", (), node_shape, dtype, {"arg": len(self.inputs), "name": name, "ndim": len(shape)})  # type: ignore[arg-type]
        self.inputs.append(node)
        axes: Axes = ((), (1,), (0, 1))[len(shape)]
        tracer = Tracer(self, node, axes)
        tracer._origin = node
        return tracer


class Tracer:
    """A stand-in for an array while a function is being traced."""

    __slots__ = ("_axes", "_node", "_origin", "_trace", "_viewed")
    __array_priority__ = 1000.0
    __hash__ = object.__hash__

    def __init__(self, trace: Trace, node: g.Node, axes: Axes):
        self._trace = trace
        self._node = node
        self._axes = axes
        # The argument whose memory this is in the user's eyes: changing it in place changes the argument.
        self._origin: g.Node | None = None
        self._viewed = False

    # What an array tells of itself
    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if a is None else self._node.shape[a] for a in self._axes)

    @property
    def ndim(self) -> int:
        return len(self._axes)

    @property
    def size(self) -> int:
        return self._node.size

    @property
    def dtype(self) -> Any:
        return dtypes.to_numpy(self._node.dtype)

    @property
    def T(self) -> Tracer:
        return self.transpose()

    def __len__(self) -> int:
        if not self._axes:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"<traced array, shape {self.shape}, {self._node.dtype}>"

    # What would need the values
    def __bool__(self) -> NoReturn:
        fail(
            "a Python branch on an array's values",
            "they are not known while the function is traced; choose with np.where(condition, a, b), or branch on "
            "shapes, dtypes and plain Python arguments",
        )

    def _needs_value(self, *_: Any, **__: Any) -> NoReturn:
        fail(
            "a conversion of a traced array to a Python or NumPy value",
            "values are not known while the function is traced; use NumPy or cupyfuse functions on the array itself",
        )

    __float__ = __int__ = __index__ = __complex__ = __array__ = __iter__ = item = tolist = __dlpack__ = _needs_value

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TraceAttributeError(
            f"cannot fuse the array attribute or method .{name}: it is not supported in a fused function\n"
            f"  at {user_line()}"
        )

    # Operators
    def __add__(self, other: Any) -> Tracer:
        return apply("add", self, other)

    def __radd__(self, other: Any) -> Tracer:
        return apply("add", other, self)

    def __sub__(self, other: Any) -> Tracer:
        return apply("subtract", self, other)

    def __rsub__(self, other: Any) -> Tracer:
        return apply("subtract", other, self)

    def __mul__(self, other: Any) -> Tracer:
        return apply("multiply", self, other)

    def __rmul__(self, other: Any) -> Tracer:
        return apply("multiply", other, self)

    def __truediv__(self, other: Any) -> Tracer:
        return apply("divide", self, other)

    def __rtruediv__(self, other: Any) -> Tracer:
        return apply("divide", other, self)

    def __pow__(self, other: Any) -> Tracer:
        return power(self, other)

    def __rpow__(self, other: Any) -> Tracer:
        return power(other, self)

    def __matmul__(self, other: Any) -> Tracer:
        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tracer:
        return matmul(other, self)

    def __neg__(self) -> Tracer:
        return apply("negative", self)

    def __pos__(self) -> Tracer:
        return self.copy()

    def __abs__(self) -> Tracer:
        return apply("absolute", self)

    def __gt__(self, other: Any) -> Tracer:
        return apply("greater", self, other)

    def __ge__(self, other: Any) -> Tracer:
        return apply("greater_equal", self, other)

    def __lt__(self, other: Any) -> Tracer:
        return apply("less", self, other)

    def __le__(self, other: Any) -> Tracer:
        return apply("less_equal", self, other)

    def __eq__(self, other: Any) -> Tracer:  # type: ignore[override]
        return apply("equal", self, other)

    def __ne__(self, other: Any) -> Tracer:  # type: ignore[override]
        return apply("not_equal", self, other)

    def __and__(self, other: Any) -> Tracer:
        return _mask_logic("logical_and", "&", self, other)

    def __or__(self, other: Any) -> Tracer:
        return _mask_logic("logical_or", "|", self, other)

    __rand__, __ror__ = __and__, __or__

    def __invert__(self) -> Tracer:
        return _mask_logic("logical_not", "~", self)

    def _unsupported(self, *_: Any) -> NoReturn:
        fail("one of the operators // % ^ << >> divmod", "it is not supported in a fused function")

    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _unsupported
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = _unsupported
    __ifloordiv__ = __imod__ = __ixor__ = __ilshift__ = __irshift__ = _unsupported

    # In-place operators change the array that every name in the user's function refers to.
    def _become(self, value: Any, assigned: bool = False) -> Tracer:
        new = as_tracer(value, self._trace)
        if self._viewed:
            fail("an in-place change of an array with views", "write y = y + 1 instead of y += 1, or take views later")
        if new.shape != self.shape:
            new = broadcast_to(new, self.shape)
        kinds = {"bool": 0, "int64": 1}
        if not assigned and kinds.get(new._node.dtype, 2) > kinds.get(self._node.dtype, 2):
            fail(
                f"an in-place change of a {self._node.dtype} array to {new._node.dtype} values",
                "NumPy refuses it as well; convert the value with .astype first",
            )
        aligned = _relabel(new, self._axes)
        self._node = g.cast(aligned._node, self._node.dtype)
        if self._origin is not None:
            self._trace.effects[self._origin.attrs["arg"]] = self._node
        return self

    def __iadd__(self, other: Any) -> Tracer:
        return self._become(self + other)

    def __isub__(self, other: Any) -> Tracer:
        return self._become(self - other)

    def __imul__(self, other: Any) -> Tracer:
        return self._become(self * other)

    def __itruediv__(self, other: Any) -> Tracer:
        return self._become(self / other)

    def __ipow__(self, other: Any) -> Tracer:
        return self._become(power(self, other))

    def __iand__(self, other: Any) -> Tracer:
        return self._become(self & other)

    def __ior__(self, other: Any) -> Tracer:
        return self._become(self | other)

    def __imatmul__(self, other: Any) -> Tracer:
        return self._become(self @ other)

    def __setitem__(self, index: Any, value: Any) -> None:
        whole = index if isinstance(index, tuple) else (index,)
        if not all(i is Ellipsis or (isinstance(i, slice) and i == slice(None)) for i in whole):
            fail("assignment to part of an array", "choose with np.where, or assign the whole x[...]")
        self._become(value, assigned=True)

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
        view = Tracer(self._trace, self._node, axes)
        view._viewed = True
        return view

    def transpose(self, *order: Any) -> Tracer:
        if len(order) == 1 and (order[0] is None or isinstance(order[0], (tuple, list))):
            order = tuple(order[0] or ())
        order = tuple(order) or tuple(reversed(range(self.ndim)))
        if sorted(i % max(self.ndim, 1) for i in order) != list(range(self.ndim)):
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
        return reshape(self, tuple(int(n) for n in shape), order)

    def ravel(self) -> Tracer:
        return reshape(self, (-1,), "C")

    # Methods that are functions
    def astype(self, dtype: Any, *, copy: bool = True) -> Tracer:
        try:
            name = dtypes.name_of(dtype)
        except TypeError as error:
            fail(f"astype({dtype})", str(error))
        if not copy and name == self._node.dtype:
            return self
        return Tracer(self._trace, g.cast(self._node, name), self._axes)

    def copy(self) -> Tracer:
        return Tracer(self._trace, self._node, self._axes)

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Tracer:
        return reduce("sum", self, axis, keepdims, dtype=dtype, out=out)

    def prod(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Tracer:
        return reduce("prod", self, axis, keepdims, dtype=dtype, out=out)

    def mean(self, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Tracer:
        return reduce("mean", self, axis, keepdims, dtype=dtype, out=out)

    def max(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Tracer:
        return reduce("max", self, axis, keepdims, out=out)

    def min(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Tracer:
        return reduce("min", self, axis, keepdims, out=out)

    def var(
        self, axis: Any = None, dtype: Any = None, out: Any = None, ddof: float = 0, keepdims: bool = False
    ) -> Tracer:
        return variance(self, axis, ddof, keepdims, dtype=dtype, out=out)

    def std(
        self, axis: Any = None, dtype: Any = None, out: Any = None, ddof: float = 0, keepdims: bool = False
    ) -> Tracer:
        return apply("sqrt", variance(self, axis, ddof, keepdims, dtype=dtype, out=out))

    def any(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Tracer:
        truth = apply("where", apply("not_equal", self, 0), 1.0, 0.0).astype("float32")
        if 0 in self.shape:
            return apply("greater", reduce("sum", truth, axis, keepdims, out=out), 0.0)
        return apply("greater", reduce("max", truth, axis, keepdims, out=out), 0.0)

    def all(self, axis: Any = None, out: Any = None, keepdims: bool = False) -> Tracer:
        truth = apply("where", apply("not_equal", self, 0), 1.0, 0.0).astype("float32")
        if 0 in self.shape:
            return apply("greater", reduce("prod", truth, axis, keepdims, out=out), 0.0)
        return apply("greater", reduce("min", truth, axis, keepdims, out=out), 0.0)

    def clip(self, min: Any = None, max: Any = None, out: Any = None) -> Tracer:
        return clip(self, min, max, out=out)

    def dot(self, other: Any) -> Tracer:
        return matmul(self, other)

    # NumPy's and CuPy's protocols
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        from .trace_numpy import call_ufunc

        return call_ufunc(ufunc.__name__, method, inputs, options)

    def __array_function__(self, func: Any, types: Any, args: Any, options: Any) -> Any:
        from .trace_numpy import call_function

        return call_function(func, args, options)

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *inputs: Any, **options: Any) -> Any:
        from .trace_numpy import call_ufunc

        return call_ufunc(str(getattr(kernel, "name", kernel)).removeprefix("cupy_"), "__call__", inputs, options)


# The algebra of shapes ----------------------------------------------------------------------------------------------


def as_tracer(value: Any, trace: Trace) -> Tracer:
    """A tracer for a number; arrays have to be arguments."""
    if isinstance(value, Tracer):
        if value._trace is not trace:
            fail("an array of another fused function's trace", "pass it as an argument instead of through a closure")
        return value
    if isinstance(value, ScalarArgument):
        node = g.const(float(value))
        node.attrs["name"] = value.name
        return Tracer(trace, node, ())
    if isinstance(value, (bool, int, float)) and not isinstance(value, np.generic):
        return Tracer(trace, g.const(value), ())
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        try:
            dtype = dtypes.name_of(value.dtype)
        except TypeError as error:
            fail(f"an operation with a {value.dtype} number", f"{error}; or make it a Python number with .item()")
        return Tracer(trace, g.cast(g.const(value.item()), dtype), ())
    if hasattr(value, "shape"):
        fail(
            f"an operation with a captured array of shape {tuple(value.shape)}",
            "only arguments of the fused function can be arrays; make it an argument (bind() can fix it)",
        )
    fail(f"an operation with a {type(value).__name__}", "an array or a number is expected")


def recorded(function: Callable[..., Tracer]) -> Callable[..., Tracer]:
    """Record calls of a function on traced arrays under its own name, as one operation."""
    name = function.__name__

    @wraps(function)
    def call(*operands: Any, **options: Any) -> Tracer:
        named = operands[0] if name in ("apply", "reduce") else name
        trace = _trace_of((*operands, *options.values()))
        with trace.call(named, (*operands, *options.values())) as done:
            return done(function(*operands, **options))

    return call


def _trace_of(values: Iterable[Any]) -> Trace:
    for value in values:
        if isinstance(value, Tracer):
            return value._trace
    raise AssertionError("no traced operand")


@recorded
def apply(op: str, *operands: Any) -> Tracer:
    """Apply a pointwise operator with NumPy's broadcasting and promotion."""
    trace = _trace_of(operands)
    if op in ("subtract", "negative") and all(
        getattr(getattr(o, "_node", None), "dtype", "bool") == "bool" for o in operands
    ):
        fail(f"{op} of masks (bool arrays)", "use ~, ^ or np.logical_not, as NumPy asks for")
    nodes, axes = align([as_tracer(o, trace) for o in operands], op)
    try:
        return Tracer(trace, g.pointwise(op, *nodes), axes)
    except TraceError as error:
        fail(op, str(error))


def align(operands: list[Tracer], operation: str) -> tuple[list[g.Node], Axes]:
    """Bring operands to a common meaning of rows and columns; returns their nodes and the result's axes."""
    rank = max(t.ndim for t in operands)
    shapes = [t.shape for t in operands]
    try:
        result = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"{operation}: operands could not be broadcast together with shapes {' '.join(map(str, shapes))}\n"
            f"  at {user_line()}"
        ) from None
    if sum(n != 1 for n in result) > 2:
        fail(operation, f"its result has shape {result}; at most two dimensions may differ from 1")
    assigned: list[int | None] = [None] * rank
    # Matrices keep their orientation before vectors, computed values before arguments, which can turn at no cost.
    order = sorted(
        range(len(operands)),
        key=lambda i: (-sum(n != 1 for n in shapes[i]), g.is_leaf(operands[i]._node)),
    )
    nodes = [t._node for t in operands]
    for i in order:
        labels = _labels(operands[i], rank)
        if not _consistent(labels, assigned):
            labels = {p: 1 - a for p, a in labels.items()}
            if not _consistent(labels, assigned):
                fail(operation, f"its operands of shapes {shapes} mix rows and columns")
            nodes[i] = g.transpose(nodes[i])
        for p, a in labels.items():
            assigned[p] = a
    return nodes, _complete(assigned, operands)


def _labels(tracer: Tracer, rank: int) -> dict[int, int]:
    offset = rank - tracer.ndim
    return {offset + p: a for p, a in enumerate(tracer._axes) if a is not None and tracer._node.shape[a] != 1}


def _consistent(labels: dict[int, int], assigned: list[int | None]) -> bool:
    for p, a in labels.items():
        taken = assigned[p]
        if (taken is not None and taken != a) or (taken is None and a in assigned):
            return False
    return True


def _complete(assigned: list[int | None], operands: list[Tracer]) -> Axes:
    """Keep, for axes of length one, the label that an operand of full rank gives them."""
    for tracer in operands:
        if tracer.ndim == len(assigned):
            for p, a in enumerate(tracer._axes):
                if assigned[p] is None and a is not None and a not in assigned:
                    assigned[p] = a
    return tuple(assigned)


def _relabel(tracer: Tracer, axes: Axes) -> Tracer:
    """The same array with the given axes, transposing its node where they ask for it."""
    want = {p: a for p, a in enumerate(axes) if a is not None and tracer.shape[p] != 1}
    have = _labels(tracer, len(axes))
    node = tracer._node if have == want else g.transpose(tracer._node)
    return Tracer(tracer._trace, node, axes)


def broadcast_to(tracer: Tracer, shape: tuple[int, ...]) -> Tracer:
    """`numpy.broadcast_to`: made by adding zeros of that shape is not exact for -0.0, so a cast node carries it."""
    try:
        fits = np.broadcast_shapes(tracer.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"an array of shape {tracer.shape} cannot be broadcast to {shape}\n  at {user_line()}")
    if sum(n != 1 for n in shape) > 2:
        fail("broadcast_to", f"at most two dimensions of {shape} may differ from 1")
    rank = len(shape)
    assigned: list[int | None] = [None] * rank
    for p, a in _labels(tracer, rank).items():
        assigned[p] = a
    free = [a for a in (1, 0) if a not in assigned]
    for p in reversed(range(rank)):
        if shape[p] != 1 and assigned[p] is None:
            assigned[p] = free.pop(0)
    sizes = {a: shape[p] for p, a in enumerate(assigned) if a is not None}
    node = g.Node("cast", (tracer._node,), (sizes.get(0, 1), sizes.get(1, 1)), tracer._node.dtype)
    return Tracer(tracer._trace, node, tuple(assigned))


def normalize_axes(axis: Any, ndim: int, operation: str = "axis") -> tuple[int, ...]:
    """The axes that an `axis` argument names, counted from the front."""
    if axis is None:
        return tuple(range(ndim))
    axes = axis if isinstance(axis, tuple) else (axis,)
    result = []
    for a in axes:
        try:
            a = operator.index(a)
        except TypeError:
            raise TypeError(f"{operation}: axis {a!r} is not an integer\n  at {user_line()}") from None
        if not -ndim <= a < ndim:
            raise np.exceptions.AxisError(
                f"{operation}: axis {a} is out of bounds for an array of {ndim} dimensions\n  at {user_line()}"
            )
        result.append(a % ndim)
    if len(set(result)) != len(result):
        raise ValueError(f"{operation}: duplicate value in 'axis'\n  at {user_line()}")
    return tuple(result)


def _refuse(operation: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            fail(f"{operation} with {name}=", "that option is not supported in a fused function")


@recorded
def reduce(op: str, x: Tracer, axis: Any, keepdims: bool = False, dtype: Any = None, **options: Any) -> Tracer:
    """Reduce along one axis, several, or all of them."""
    _refuse(op, **options)
    positions = normalize_axes(axis, x.ndim, op)
    if dtype is not None:
        x = x.astype(dtype)
    elif x._node.dtype == "bool" and op in ("sum", "prod"):
        return reduce(op, x.astype("float64"), axis, keepdims).astype("int64")
    elif not dtypes.is_float(x._node.dtype):
        x = x.astype("float64") if op == "mean" else x
    if not dtypes.is_float(x._node.dtype):
        fail(op, f"a float operand is expected, got {x._node.dtype}; convert it with .astype first")
    if op == "logsumexp" and any(x.shape[p] == 0 for p in positions):
        return reduce("sum", x, axis, keepdims) - np.inf
    if op in ("max", "min", "expsum") and any(x.shape[p] == 0 for p in positions):
        raise ValueError(f"{op}: zero-size array to a reduction operation which has no identity\n  at {user_line()}")
    labels = sorted({x._axes[p] for p in positions} - {None}, reverse=True)  # type: ignore[type-var]
    node = x._node
    if op == "mean" and len(labels) == 2:
        total = g.reduce("sum", g.reduce("sum", node, 1), 0)
        node = g.pointwise("divide", total, g.const(float(x._node.size)))
    elif op == "expsum" and not labels:
        node = g.pointwise("exp", g.pointwise("subtract", node, node))
    else:
        for label in labels:
            node = g.reduce(op, node, label)  # type: ignore[arg-type]
    return Tracer(x._trace, node, _reduced_axes(x, positions, keepdims))


def _reduced_axes(x: Tracer, positions: tuple[int, ...], keepdims: bool) -> Axes:
    if keepdims:
        return x._axes
    return tuple(a for p, a in enumerate(x._axes) if p not in positions)


def count(x: Tracer, axis: Any) -> int:
    """Number of elements that a reduction along `axis` combines."""
    total = 1
    for p in normalize_axes(axis, x.ndim):
        total *= x.shape[p]
    return total


@recorded
def variance(x: Tracer, axis: Any, ddof: float = 0, keepdims: bool = False, **options: Any) -> Tracer:
    """Mean squared distance from the mean, with `ddof` fewer degrees of freedom."""
    _refuse("var", **options)
    positions = normalize_axes(axis, x.ndim)
    n = count(x, axis)
    if len(positions) == 1 and x._axes[positions[0]] == 0 and x.shape[positions[0]] > 1:
        result = reduce("moment2", x, axis, keepdims)
    else:
        centred = x - reduce("mean", x, axis, keepdims=True)
        result = reduce("mean", apply("square", centred), axis, keepdims)
    if ddof == 0:
        return result
    degrees = max(n - ddof, 0)
    return result * (n / degrees) if degrees else result * float(n) / 0.0


def clip(x: Any, low: Any = None, high: Any = None, **options: Any) -> Tracer:
    _refuse("clip", **options)
    if low is None and high is None:
        return x.copy()
    if low is None:
        return apply("minimum", x, high)
    if high is None:
        return apply("maximum", x, low)
    return apply("clip", x, low, high)


def power(base: Any, exponent: Any) -> Tracer:
    """NumPy's power, with its short forms for the exponents 2, 1/2, 1, -1."""
    if isinstance(exponent, (int, float)) and not isinstance(exponent, (bool, ScalarArgument)):
        short: dict[float, Callable[[], Tracer]] = {
            2.0: lambda: apply("square", base),
            1.0: lambda: base.copy(),
            0.5: lambda: apply("sqrt", base),
            -1.0: lambda: apply("reciprocal", base),
        }
        if float(exponent) in short and isinstance(base, Tracer):
            return short[float(exponent)]()
    return apply("power", base, exponent)


def _mask_logic(op: str, symbol: str, *operands: Any) -> Tracer:
    for o in operands:
        if not isinstance(o, bool) and not (isinstance(o, Tracer) and o._node.dtype == "bool"):
            fail(f"the operator {symbol}", "it works on masks (comparisons); got another dtype")
    return apply(op, *operands)


def reshape(x: Tracer, shape: tuple[int, ...], order: str = "C") -> Tracer:
    """Reshape to another arrangement of the same axes, to a vector, or to a matrix."""
    known = 1
    for n in shape:
        known *= n if n != -1 else 1
    if -1 in shape:
        shape = tuple(x.size // max(known, 1) if n == -1 else n for n in shape)
    total = 1
    for n in shape:
        total *= n
    if total != x.size:
        raise ValueError(f"cannot reshape an array of shape {x.shape} into shape {shape}\n  at {user_line()}")
    if order != "C":
        fail(f"reshape with order={order!r}", "only C order is supported")
    if [n for n in shape if n != 1] == [n for n in x.shape if n != 1]:
        kept = [a for a, n in zip(x._axes, x.shape, strict=True) if n != 1]
        return x._view(tuple(kept.pop(0) if n != 1 else None for n in shape))
    solid = [n for n in shape if n != 1]
    if len(solid) > 2:
        fail(f"reshape to {shape}", "at most two dimensions may differ from 1")
    if _labels(x, x.ndim) and list(_labels(x, x.ndim).values()) == [1, 0]:
        x = Tracer(x._trace, g.transpose(x._node), tuple(None if a is None else 1 - a for a in x._axes))
    rows, cols = (solid[0], solid[1]) if len(solid) == 2 else (1, solid[0] if solid else 1)
    labels = [0, 1] if len(solid) == 2 else [1]
    x._viewed = True
    result = Tracer(
        x._trace, g.reshape(x._node, (rows, cols)), tuple(labels.pop(0) if n != 1 and labels else None for n in shape)
    )
    result._viewed = True
    return result


@recorded
def matmul(a: Any, b: Any) -> Tracer:
    """`numpy.matmul` for vectors and matrices; a product with a vector is a weighted sum of rows or columns."""
    trace = _trace_of((a, b))
    a, b = as_tracer(a, trace), as_tracer(b, trace)
    for operand in (a, b):
        if operand.ndim not in (1, 2):
            raise ValueError(
                f"matmul: operands need 1 or 2 dimensions, got shapes {a.shape} and {b.shape}\n  at {user_line()}"
            )
        if not dtypes.is_float(operand._node.dtype):
            fail("matmul", f"float operands are expected, got {operand._node.dtype}")
    if a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"matmul: the last dimension of {a.shape} must equal the first of {b.shape} "
            f"({a.shape[-1]} != {b.shape[0]})\n  at {user_line()}"
        )
    if a.ndim == 1 and b.ndim == 1:
        return reduce("sum", apply("multiply", a, b), 0)
    if b.ndim == 1:
        return reduce("sum", apply("multiply", a, b[None, :]), 1)
    if a.ndim == 1:
        return reduce("sum", apply("multiply", a[:, None], b), 0)
    return Tracer(trace, g.matmul(_matrix(a), _matrix(b)), (0, 1))


def _matrix(x: Tracer) -> g.Node:
    """The node of a rank-2 tracer with its first axis as rows."""
    labels = _labels(x, 2)
    turned = any(p != a for p, a in labels.items())
    node = x._node
    if turned or (not labels and node.shape != x.shape):
        node = g.transpose(node)
    return node
