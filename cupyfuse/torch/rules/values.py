"""`Value`: a traced tensor of any rank, and pointwise operators on such values.

Graphs know rows x columns alone. A value of more dimensions is held by a tracer of its elements in C order in at most
two: leading dimensions folded into rows, all of them into a vector, or what a transpose or a reduction has left. Each
operation looks for folds of its operands under which it works along rows or columns. Folding an argument costs nothing;
a computed value had better stay as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from ... import trace
from ...dtypes import is_float
from ...errors import TraceError
from ...ir import graph as g
from ...ir.operators import POINTWISE
from ...ir.parts import Reshaped
from ...trace import Trace, Tracer
from ...trace.broadcasting import align as align_nodes
from ...trace.broadcasting import expand
from .promotion import default_float, promote

Shape = tuple[int, ...]
Fold = tuple[int, int]


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
        The same elements in the same order, in at most two dimensions.
    shape : tuple of int
        PyTorch's.
    """

    __slots__ = ("shape", "tracer")

    def __init__(self, tracer: Tracer, shape: Sequence[int]):
        shape = tuple(shape)
        if math.prod(shape) != tracer.size:
            raise AssertionError(f"a tracer of shape {tracer.shape} cannot hold a value of shape {shape}")
        if tracer.shape != shape and len(shape) <= 2 and without_ones(tracer.shape) == without_ones(shape):
            tracer = tracer.reshape(shape)
        elif tracer.ndim > 2:
            tracer = tracer.reshape(without_ones(tracer.shape))
        self.tracer, self.shape = tracer, shape

    @classmethod
    def argument(cls, trace: Trace, name: str, shape: Sequence[int], dtype: str) -> Value:
        """Add an input of any rank to a trace, which holds it as a matrix: all dimensions but the last are rows."""
        shape = tuple(shape)
        held = shape if len(shape) <= 2 else (math.prod(shape[:-1]), shape[-1])
        return cls(trace.argument(name, held, dtype), shape)

    @property
    def dtype(self) -> str:
        return self.tracer._node.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __repr__(self) -> str:
        return f"<value, shape {self.shape}, {self.dtype}, held as {self.tracer.shape}>"

    def astype(self, dtype: str | None) -> Value:
        return self if dtype in (None, self.dtype) else Value(self.tracer.astype(dtype), self.shape)

    def view(self, shape: Sequence[int]) -> Value:
        """Return the same elements in C order under another shape."""
        return Value(self.tracer, shape)

    def per_dim(self, dim: int, ndim: int) -> Value:
        """View a vector as dimension `dim` of `ndim`, for broadcasting."""
        return self.view((*self.shape, *(1,) * (ndim - dim - 1)))

    def as_matrix(self, fold: Fold | None = None) -> Tracer:
        """Return a tracer of this value's own shape, of at most two dimensions, or of a fold of it."""
        if fold is None:
            return self.tracer if self.tracer.shape == self.shape else self.tracer.reshape(self.shape)
        if self.tracer.shape == fold:
            return self.tracer
        recomputed = _recompute(self.tracer, fold) if self.fold_cost(fold) else None
        return self.tracer.reshape(fold) if recomputed is None else recomputed

    def fold_cost(self, fold: Fold) -> int:
        """Rank what `as_matrix(fold)` takes: nothing, a view of an argument (1), recomputation (10), memory (100)."""
        if without_ones(self.tracer.shape) == without_ones(fold):
            return 0
        return 1 if _is_argument(self.tracer) else 10 if _recompute(self.tracer, fold) is not None else 100

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


def without_ones(shape: Iterable[int]) -> Shape:
    """Return a shape without its dimensions of length one."""
    return tuple(n for n in shape if n != 1)


def _is_argument(tracer: Tracer) -> bool:
    node = tracer._node
    while node.op in ("reshape", "transpose"):
        node = node.inputs[0]
    return node.op == "input"


def _recompute(tracer: Tracer, fold: Fold) -> Tracer | None:
    """Recompute a tracer under another fold; None unless it is pointwise work on arguments."""
    rows, cols = tracer._axes.rows, tracer._axes.cols
    if list(rows + cols) != sorted(rows + cols):
        return None
    node = Reshaped(fold).again(tracer._node)
    return None if node is None else tracer._trace.array(node, (0, 1))


# Broadcasting -------------------------------------------------------------------------------------------------------


def broadcast_shapes(shapes: Iterable[Shape], operation: str) -> Shape:
    """Return the shape that shapes broadcast to; raise a `TraceError` in the name of the operation if they do not."""
    shapes = list(shapes)
    rank = max(map(len, shapes))
    result = []
    for sizes in zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True):
        different = set(sizes) - {1}
        if len(different) > 1:
            refuse(operation, f"shapes {', '.join(map(str, shapes))} do not broadcast")
        result.append(different.pop() if different else 1)
    return tuple(result)


class _Alignment(NamedTuple):
    """Folds of operands with which their matrices broadcast as the operands do, and that of the result."""

    operands: list[Fold]
    result: Fold

    def cost(self, values: Sequence[Value]) -> int:
        return sum(v.fold_cost(fold) for v, fold in zip(values, self.operands, strict=True))


def align(values: Sequence[Value], operation: str, shape: Shape | None = None) -> tuple[list[Tracer], Shape, Fold]:
    """Fold values into matrices that broadcast as the values do, by the folds that cost least.

    Returns
    -------
    The matrices, the broadcast shape (`shape` if given), and its fold into rows x columns

    Raises
    ------
    TraceError
        A value varies along some of the leading dimensions only, which are neither rows nor columns of any fold.
    """
    shape = broadcast_shapes([v.shape for v in values], operation) if shape is None else shape
    candidates = _alignments(values, shape)
    if not candidates:
        shapes = ", ".join(str(v.shape) for v in values)
        refuse(operation, f"among shapes {shapes} one broadcasts along a leading dimension")
    cheapest = min(candidates, key=lambda candidate: candidate.cost(values))  # the first of several
    return [v.as_matrix(f) for v, f in zip(values, cheapest.operands, strict=True)], shape, cheapest.result


def _alignments(values: Sequence[Value], shape: Shape) -> list[_Alignment]:
    """List the ways to align values that broadcast to a shape.

    The last dimension as columns comes first, then everything as rows, then other numbers of leading dimensions as
    rows, at last the fold of a value that was computed.
    """
    rank = len(shape)
    found: list[_Alignment] = []
    for k in sorted(range(rank + 1), key=lambda k: (k != rank - 1, k != rank, k)):
        folds = [fold for v in values if (fold := _fold_within(v.shape, shape, k)) is not None]
        if len(folds) == len(values):
            found.append(_Alignment(folds, (math.prod(shape[:k]), math.prod(shape[k:]))))
    computed = _common_fold(values, shape)
    if computed is not None:
        found.append(_Alignment([(1, 1) if v.size == 1 else computed for v in values], computed))
    return found


def _common_fold(values: Sequence[Value], shape: Shape) -> Fold | None:
    """Return the fold of a computed value, if all others have its shape or one element and so can follow it."""
    if any(v.shape != shape and v.size != 1 for v in values):
        return None
    for v in values:
        if v.size != 1 and len(v.tracer.shape) == 2 and not _is_argument(v.tracer):
            return v.tracer.shape[0], v.tracer.shape[1]
    return None


def _fold_within(shape: Shape, result: Shape, k: int) -> Fold | None:
    """Return the fold of an operand whose result has its first `k` dimensions as rows; None if there is none."""
    padded = (1,) * (len(result) - len(shape)) + shape
    sizes = []
    for part, whole in ((padded[:k], result[:k]), (padded[k:], result[k:])):
        if part == whole:
            sizes.append(math.prod(whole))
        elif set(part) <= {1}:
            sizes.append(1)
        else:
            return None
    return sizes[0], sizes[1]


def expand_to(value: Value, shape: Shape) -> Value:
    """Broadcast a value to a shape."""
    if value.shape == shape:
        return value
    if broadcast_shapes([value.shape, shape], "expand") != shape:
        refuse("expand", f"a value of shape {value.shape} does not expand to {shape}")
    (tracer,), _, fold = align([value], "expand", shape)
    return Value(expand(tracer, fold), shape)


# Operators ----------------------------------------------------------------------------------------------------------

_ON_INTEGERS = ("add", "subtract", "multiply", "negative", "where")


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
    tracers, shape, _ = align([o for o in cast if isinstance(o, Value)], op)
    given = iter(tracers)
    result = trace.apply(op, *(next(given) if isinstance(o, Value) else _as_number(o, dtype) for o in cast))
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
    tracer = value.tracer
    return Value(tracer._trace.array(g.stop_gradient(tracer._node), tracer._axes), value.shape)


def with_slopes(value: Value, *pairs: tuple[Value, Operand]) -> Value:
    """Replace a value's partial derivatives by those of the pairs (x, slope), which broadcast to it.

    It is for operations that PyTorch differentiates by a formula of their own.
    """
    parts = [part for pair in pairs for part in pair]
    tracers, shape, _ = align([value, *(p for p in parts if isinstance(p, Value))], "with_slopes", value.shape)
    nodes, axes = align_nodes(tracers, "with_slopes")
    given = iter(nodes)
    first = next(given)
    inner = [next(given) if isinstance(p, Value) else g.const(p) for p in parts]
    node = g.custom_derivative(first, *zip(inner[::2], inner[1::2], strict=True))
    return Value(tracers[0]._trace.array(node, axes), shape)
