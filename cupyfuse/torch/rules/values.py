"""`Value`: a traced value with the shape that PyTorch gives it, of any rank.

Graphs know rows x columns alone. A value of more dimensions is held by a tracer with the same elements in the same (C)
order under at most two dimensions: its leading dimensions folded into rows, all of them into a vector, or, after a
transpose or a reduction, whatever else is left. Each operation looks for a fold of its operands under which it works
along rows or columns; arguments fold at no cost, computed values preferably stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NoReturn

from ...errors import TraceError
from ...ir import graph as g
from ...trace import Trace, Tracer
from ...trace.broadcasting import repeated

Shape = tuple[int, ...]
Fold = tuple[int, int]


def refuse(operation: str, reason: str) -> NoReturn:
    raise TraceError(f"cannot fuse {operation}: {reason}")


class Value:
    """A traced value as PyTorch sees it.

    Attributes
    ----------
    tracer : Tracer
        The same elements in the same order, in at most two dimensions; a result of it is viewed as `shape`.
    shape : tuple of int
        PyTorch's.
    """

    __slots__ = ("shape", "tracer")

    def __init__(self, tracer: Tracer, shape: Sequence[int]):
        shape = tuple(shape)
        if math.prod(shape) != tracer.size:
            raise AssertionError(f"a tracer of shape {tracer.shape} cannot hold a value of shape {shape}")
        if tracer.shape != shape and len(shape) <= 2 and _solid(tracer.shape) == _solid(shape):
            tracer = tracer.reshape(shape)
        elif tracer.ndim > 2:
            tracer = tracer.reshape(_solid(tracer.shape))
        self.tracer, self.shape = tracer, shape

    @classmethod
    def argument(cls, trace: Trace, name: str, shape: Sequence[int], dtype: str) -> Value:
        """An input of any rank: leading dimensions of more than two are given folded into rows."""
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

    def astype(self, dtype: str) -> Value:
        return self if self.dtype == dtype else Value(self.tracer.astype(dtype), self.shape)

    def viewed(self, shape: Sequence[int]) -> Value:
        """The same elements in the same order under another shape."""
        return Value(self.tracer, shape)

    def folded(self, fold: Fold) -> Tracer:
        """A matrix of the same elements in the same order."""
        if self.tracer.shape == fold:
            return self.tracer
        again = _computed_so(self.tracer, fold) if self.cost(fold) else None
        return self.tracer.reshape(fold) if again is None else again

    def matrix(self) -> Tracer:
        """The tracer in this value's own shape, of at most two dimensions."""
        return self.tracer if self.tracer.shape == self.shape else self.tracer.reshape(self.shape)

    def cost(self, fold: Fold) -> int:
        """What it takes to fold it so: nothing, another look at an argument, work done twice, or a trip to memory."""
        if _solid(self.tracer.shape) == _solid(fold):
            return 0
        return 1 if _is_argument(self.tracer) else 10 if _computed_so(self.tracer, fold) is not None else 100


def _solid(shape: Iterable[int]) -> Shape:
    return tuple(n for n in shape if n != 1)


def _is_argument(tracer: Tracer) -> bool:
    node = tracer._node
    while node.op in ("reshape", "transpose"):
        node = node.inputs[0]
    return node.op == "input"


# As many operations on an argument are done again, rather than their result written and read under another fold.
_CHEAP = 8


def _computed_so(tracer: Tracer, fold: Fold) -> Tracer | None:
    """What was computed of arguments element by element, computed once more of those folded as asked for."""
    labels = [a for a in tracer._axes if a is not None]
    if labels != sorted(labels):
        return None
    done: dict[g.Node, g.Node] = {}
    for node in g.topological([tracer._node]):
        if node.size == 1 != math.prod(fold):
            done[node] = node
        elif node.op == "input":
            done[node] = g.reshape(node, fold)
        elif node.op == "reshape":
            done[node] = done[node.inputs[0]]
        elif node.pointwise and len(done) < _CHEAP and all(i.size in (1, node.size) for i in node.inputs):
            done[node] = g.with_inputs(node, [done[i] for i in node.inputs], fold)
        else:
            return None
    return tracer._trace.array(done[tracer._node], (0, 1))


# Broadcasting -------------------------------------------------------------------------------------------------------


def broadcast_shapes(shapes: Iterable[Shape], operation: str) -> Shape:
    shapes = list(shapes)
    rank = max(map(len, shapes))
    result = []
    for sizes in zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True):
        different = set(sizes) - {1}
        if len(different) > 1:
            refuse(operation, f"shapes {', '.join(map(str, shapes))} do not broadcast")
        result.append(different.pop() if different else 1)
    return tuple(result)


def aligned(values: Sequence[Value], operation: str, shape: Shape | None = None) -> tuple[list[Tracer], Shape, Fold]:
    """Tracers of the values that broadcast as the values do, the shape that this gives, and its fold.

    Raises
    ------
    TraceError
        A value varies along some of the leading dimensions only, which no fold makes rows or columns.
    """
    shape = broadcast_shapes([v.shape for v in values], operation) if shape is None else shape
    rank = len(shape)
    best: tuple[int, list[Fold], Fold] | None = None
    for k in sorted(range(rank + 1), key=lambda k: (k != rank - 1, k != rank, k)):
        whole = (math.prod(shape[:k]), math.prod(shape[k:]))
        folds = [_fold_within(v.shape, shape, k) for v in values]
        known = [f for f in folds if f is not None]
        if len(known) == len(folds):
            cost = sum(v.cost(f) for v, f in zip(values, known, strict=True))
            if best is None or cost < best[0]:
                best = cost, known, whole
    held = _common_fold(values, shape)
    if held is not None:
        known = [(1, 1) if v.size == 1 else held for v in values]
        cost = sum(v.cost(f) for v, f in zip(values, known, strict=True))
        if best is None or cost < best[0]:
            best = cost, known, held
    if best is None:
        shapes = ", ".join(str(v.shape) for v in values)
        refuse(operation, f"among shapes {shapes} one broadcasts along a leading dimension")
    _, folds_chosen, whole = best
    return [v.folded(f) for v, f in zip(values, folds_chosen, strict=True)], shape, whole


def _common_fold(values: Sequence[Value], shape: Shape) -> Fold | None:
    """The fold of a computed value that all others of one shape, or of one element, can take over."""
    if any(v.shape != shape and v.size != 1 for v in values):
        return None
    for v in values:
        if v.size != 1 and len(v.tracer.shape) == 2 and not _is_argument(v.tracer):
            return v.tracer.shape[0], v.tracer.shape[1]
    return None


def _fold_within(shape: Shape, result: Shape, k: int) -> Fold | None:
    """The fold of an operand where the result's first `k` dimensions are rows."""
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


def expanded(value: Value, shape: Shape, operation: str = "expand") -> Value:
    """The value repeated to a larger shape."""
    if value.shape == shape:
        return value
    if broadcast_shapes([value.shape, shape], operation) != shape:
        refuse(operation, f"a value of shape {value.shape} does not expand to {shape}")
    (tracer,), _, fold = aligned([value], operation, shape)
    return Value(repeated(tracer, fold), shape)


# Axes ---------------------------------------------------------------------------------------------------------------


def positions(dim: int | tuple[int, ...] | None, rank: int, operation: str) -> tuple[int, ...]:
    """The dimensions that a `dim` argument names, counted from the front; None names all of them."""
    if dim is None:
        return tuple(range(rank))
    found = []
    for d in dim if isinstance(dim, tuple) else (dim,):
        if rank == 0 and d in (0, -1):
            continue
        if not -rank <= d < rank:
            refuse(operation, f"dimension {d} is out of range for {rank} dimensions")
        found.append(d % rank)
    if len(set(found)) != len(found):
        refuse(operation, f"a dimension appears twice in {dim}")
    return tuple(sorted(found))


def lengthwise(value: Value, dims: tuple[int, ...], operation: str) -> tuple[Tracer, int | None]:
    """A matrix of the value, and the axis of it that stands for the given dimensions; None for both axes.

    Raises
    ------
    TraceError
        The dimensions are neither the first nor the last ones.
    """
    shape, rank = value.shape, value.ndim
    inside = {p for p in dims if shape[p] != 1}
    others = {p for p in range(rank) if shape[p] != 1} - inside
    if not others:
        held = value.tracer
        if held.ndim == 2 and len(_solid(held.shape)) == 2:
            return held, None
        return value.folded((1, value.size)), 1
    choices = []
    for k in range(rank + 1):
        front, back = set(range(k)), set(range(k, rank))
        fold = (math.prod(shape[:k]), math.prod(shape[k:]))
        if inside <= back and others <= front:
            choices.append((value.cost(fold), k != rank - 1, fold, 1))
        if inside <= front and others <= back:
            choices.append((value.cost(fold), k != 1, fold, 0))
    if not choices:
        refuse(operation, f"dimensions {dims} of a value of shape {shape} are neither the first nor the last ones")
    _, _, fold, axis = min(choices)
    return value.folded(fold), axis


def reduced_shape(shape: Shape, dims: tuple[int, ...], keepdim: bool) -> Shape:
    if keepdim:
        return tuple(1 if p in dims else n for p, n in enumerate(shape))
    return tuple(n for p, n in enumerate(shape) if p not in dims)


def permuted(value: Value, order: tuple[int, ...], operation: str = "permute") -> Value:
    """Dimensions in another order, where that exchanges rows and columns of some fold, or moves ones only."""
    rank, shape = value.ndim, tuple(value.shape[p] for p in order)
    if rank == 2 and order == (1, 0):
        return Value(value.matrix().transpose(), shape)
    moving = [p for p in order if value.shape[p] != 1]
    if moving == sorted(moving):
        return value.viewed(shape)
    turn = moving.index(min(moving))
    if moving[turn:] + moving[:turn] != sorted(moving):
        refuse(operation, f"the order {order} of a value of shape {value.shape} does not exchange rows and columns")
    k = moving[0]
    fold = (math.prod(value.shape[:k]), math.prod(value.shape[k:]))
    return Value(value.folded(fold).transpose(), shape)
