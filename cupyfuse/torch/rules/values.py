"""`Value`: a traced tensor with PyTorch's promotion, and pointwise operators on such values.

Graphs know rows x columns alone: `trace` folds the dimensions of tensors into these. Here an operand that varies along
some of the rows only is refused, where NumPy's functions copy it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np

from ... import trace
from ...dtypes import is_float
from ...errors import TraceError
from ...ir import graph as g
from ...ir.kinds import is_leaf
from ...ir.operators import POINTWISE
from ...trace import Axes, Trace, Tracer, exponentials
from ...trace.broadcasting import align as align_nodes
from ...trace.broadcasting import expand
from ...trace.folds import CopyNeeded
from .promotion import default_float, promote

Shape = tuple[int, ...]


def refuse(operation: str, reason: str) -> NoReturn:
    """Raise a `TraceError`: the operation is left to PyTorch."""
    raise TraceError(f"cannot fuse {operation}: {reason}")


def _operator_method(op: str, reflected: bool = False) -> Callable[[Value, Operand], Value]:
    """Make a method of an operator of the table; `reflected` has the value as its second operand."""

    def method(self: Value, other: Operand) -> Value:
        return pointwise(op, other, self) if reflected else pointwise(op, self, other)

    return method


class Value:
    """A traced tensor, with PyTorch's shape and arithmetic.

    Attributes
    ----------
    tracer : Tracer
        The same elements in the same order, perhaps in another shape: no view is made before an operation needs it,
        which may be through memory.
    shape : tuple of int
        PyTorch's.
    """

    __slots__ = ("_settled", "shape", "tracer")

    def __init__(self, tracer: Tracer, shape: Sequence[int] | None = None):
        self.tracer, self.shape = tracer, tracer.shape if shape is None else tuple(shape)
        self._settled: Tracer | None = None

    @classmethod
    def argument(cls, trace: Trace, name: str, shape: Sequence[int], dtype: str) -> Value:
        """Add an input of any rank to a trace, which gets it as a matrix: all dimensions but the last are rows."""
        trace.copies = False
        axes = Axes.by_rows(tuple(shape))
        held = trace.argument(name, axes.shape if len(axes.shape) <= 2 else axes.node_shape, dtype)
        return cls(held if len(axes.shape) <= 2 else trace.array(held._node, axes))

    @property
    def settled(self) -> Tracer:
        """The value as a tracer of its own shape."""
        if self._settled is None:
            self._settled = self.tracer if self.tracer.shape == self.shape else self.tracer.reshape(self.shape)
        return self._settled

    @property
    def dtype(self) -> str:
        return self.tracer._node.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return self.tracer.size

    def __repr__(self) -> str:
        return f"<value, shape {self.shape}, {self.dtype}>"

    def astype(self, dtype: str | None) -> Value:
        return self if dtype in (None, self.dtype) else Value(self.tracer.astype(dtype), self.shape)

    def view(self, shape: Sequence[int]) -> Value:
        """Return the same elements in C order under another shape."""
        return Value(self.tracer, shape)

    def per_dim(self, dim: int, ndim: int) -> Value:
        """View a vector as dimension `dim` of `ndim`, for broadcasting."""
        return self.view((*self.shape, *(1,) * (ndim - dim - 1)))

    # Equality stays Python's.
    __add__, __radd__ = _operator_method("add"), _operator_method("add", reflected=True)
    __sub__, __rsub__ = _operator_method("subtract"), _operator_method("subtract", reflected=True)
    __mul__, __rmul__ = _operator_method("multiply"), _operator_method("multiply", reflected=True)
    __truediv__ = _operator_method("divide")
    __lt__, __le__ = _operator_method("less"), _operator_method("less_equal")
    __gt__, __ge__ = _operator_method("greater"), _operator_method("greater_equal")
    __and__ = _operator_method("logical_and")

    def __neg__(self) -> Value:
        return pointwise("negative", self)

    def __abs__(self) -> Value:
        return pointwise("absolute", self)


Operand = Value | float | int | bool


# Broadcasting -------------------------------------------------------------------------------------------------------


def broadcast_shapes(shapes: Iterable[Shape], operation: str) -> Shape:
    """Return the shape that shapes broadcast to; raise a `TraceError` in the name of the operation if they do not."""
    shapes = list(shapes)
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        refuse(operation, f"shapes {', '.join(map(str, shapes))} do not broadcast")


def _refuse_copy(operation: str, shapes: Iterable[Shape]) -> NoReturn:
    refuse(operation, f"among shapes {', '.join(map(str, shapes))} one broadcasts along a leading dimension")


def _alike(values: Sequence[Value], shape: Shape) -> list[Tracer]:
    """Return values that broadcast to a shape as tracers that do: in the shape of a computed one, if all can follow."""
    whole = [v for v in values if v.size != 1]
    computed = [v.tracer for v in whole if not is_leaf(v.tracer._node) and v.tracer._axes.in_order]
    if not computed or any(v.shape != shape for v in whole):
        return [v.settled for v in values]
    return [v.tracer.reshape(computed[0].shape if v in whole else ()) for v in values]


def expand_to(value: Value, shape: Shape) -> Value:
    """Broadcast a value to a shape."""
    if value.shape == shape:
        return value
    if broadcast_shapes([value.shape, shape], "expand") != shape:
        refuse("expand", f"a value of shape {value.shape} does not expand to {shape}")
    try:
        return Value(expand(value.settled, shape))
    except CopyNeeded:
        _refuse_copy("expand", (value.shape, shape))


# Operators ----------------------------------------------------------------------------------------------------------

_ON_INTEGERS = ("add", "subtract", "multiply", "negative", "where", "maximum", "minimum")


def pointwise(op: str, *operands: Operand, dtype: str = "") -> Value:
    """Apply an operator of the table to values and numbers, with PyTorch's broadcasting and promotion."""
    if not any(isinstance(o, Value) for o in operands):
        refuse(op, "no operand is a tensor")
    dtype = dtype or promote(*(operands[1:] if op == "where" else operands))
    computes = POINTWISE[op].result != "bool" or op.startswith("is")
    if computes:
        if not is_float(dtype) and POINTWISE[op].result == "float":
            dtype = default_float()
        if dtype == "bool" and op != "where":
            refuse(op, "arithmetic on masks")
        if dtype == "int64" and op not in _ON_INTEGERS:
            refuse(op, "arithmetic on integers")
    cast = [
        o.astype(dtype) if isinstance(o, Value) and not (op == "where" and k == 0) else o
        for k, o in enumerate(operands)
    ]
    values = [o for o in cast if isinstance(o, Value)]
    shape = broadcast_shapes([v.shape for v in values], op)
    try:
        given = iter(_alike(values, shape))
        result = trace.apply(op, *(next(given) if isinstance(o, Value) else _as_number(o, dtype) for o in cast))
    except CopyNeeded:
        _refuse_copy(op, (v.shape for v in values))
    if POINTWISE[op].result != "bool" and result._node.dtype != dtype:
        result = result.astype(dtype)  # of numbers alone, as in where(mask, 1.0, 0.0)
    return Value(result, shape)


def _as_number(value: Any, dtype: str) -> Any:
    """Convert a number to the operands' category, as PyTorch does: 1 beside floats is 1.0, True beside integers 1."""
    return float(value) if is_float(dtype) else int(value) if dtype == "int64" else value


def as_mask(value: Any) -> Any:
    """Compare each element, or a number, with zero; masks are returned as they are."""
    if isinstance(value, Value) and value.dtype != "bool":
        return pointwise("not_equal", value, 0)
    return value if isinstance(value, Value) else bool(value)


def require_float(value: Value, operation: str) -> Value:
    """Return a value of floats; refuse any other."""
    if not is_float(value.dtype):
        refuse(operation, f"an operand of {value.dtype}")
    return value


# Gradients ----------------------------------------------------------------------------------------------------------


def stop_gradient(value: Value) -> Value:
    """Return a value that is a constant for gradients, as `detach` does."""
    return Value(exponentials.stop_gradient(value.tracer), value.shape)


def with_slopes(value: Value, *pairs: tuple[Value, Operand]) -> Value:
    """Replace a value's partial derivatives by those of the pairs (x, slope), which broadcast to it.

    It is for operations that PyTorch differentiates by a formula of their own.
    """
    parts = [part for pair in pairs for part in pair]
    tracers = _alike([value, *(p for p in parts if isinstance(p, Value))], value.shape)
    nodes, axes = align_nodes(tracers, "with_slopes")
    given = iter(nodes)
    first = next(given)
    inner = [next(given) if isinstance(p, Value) else g.const(p) for p in parts]
    node = g.custom_derivative(first, *zip(inner[::2], inner[1::2], strict=True))
    return Value(tracers[0]._trace.array(node, axes), value.shape)
