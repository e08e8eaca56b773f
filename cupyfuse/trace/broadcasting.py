"""Broadcasting and reshaping of traced arrays: shapes, and how the user's axes map to rows and columns.

Where rows and columns of all operands are one axis each, operands agree by transposes alone; otherwise see `folds`.
"""

from __future__ import annotations

import math

import numpy as np

from ..ir import graph as g
from ..ir.kinds import is_leaf
from .axes import Axes, AxisLabels
from .folds import choose_fold, in_fold, refolded
from .strides import contiguous_strides
from .tracer import Tracer
from .user_code import fail, user_line

# Below, p is an axis of the user's array, and a its label: 0 for the rows of the node, 1 for the columns.


def align(operands: list[Tracer], operation: str) -> tuple[list[g.Node], Axes]:
    """Broadcast operands to common rows and columns; return their nodes and the axes of the result."""
    rank = max(t.ndim for t in operands)
    shapes = [t.shape for t in operands]
    try:
        result = np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(
            f"{operation}: operands could not be broadcast together with shapes {' '.join(map(str, shapes))}\n"
            f"  at {user_line()}"
        ) from None
    if sum(n != 1 for n in result) > 2 or not all(t._axes.is_matrix_like for t in operands):
        fold = choose_fold(sorted(operands, key=_precedence), result)
        return [in_fold(t, fold) for t in operands], fold
    assigned: list[int | None] = [None] * rank
    long = [p for p, n in enumerate(result) if n != 1]
    if len(long) == 2 and all(_transposes_freely(t) for t in operands):
        assigned[long[0]], assigned[long[1]] = 0, 1  # an outer operation of two vectors: as a matrix
    order = sorted(range(len(operands)), key=lambda i: _precedence(operands[i]))
    nodes = [t._node for t in operands]
    for i in order:
        own = axis_labels(operands[i], rank)
        if not _consistent(own, assigned):
            own = {p: 1 - a for p, a in own.items()}
            if not _consistent(own, assigned):
                fail(operation, f"its operands of shapes {shapes} mix rows and columns")
            nodes[i] = g.transpose(nodes[i])
        for p, a in own.items():
            assigned[p] = a
    labels = _label_unit_axes(assigned, operands)
    return nodes, Axes(result, *(tuple(p for p, a in enumerate(labels) if a == k) for k in (0, 1)))


def _precedence(x: Tracer) -> tuple[int, int]:
    """Rank an operand, lowest first: matrices keep their orientation before vectors, computed values before arguments.

    Transposing an argument is free, and pointwise work on arguments can be computed on their transposes.
    """
    return -sum(n != 1 for n in x.shape), 2 if is_leaf(x._node) else int(_is_cheap_vector(x._node))


def _transposes_freely(x: Tracer) -> bool:
    """Whether a value is a vector or one element, and an argument or cheap to compute from arguments."""
    return sum(n != 1 for n in x.shape) <= 1 and (is_leaf(x._node) or _is_cheap_vector(x._node))


_MOST_RECOMPUTED = 24  # nodes, arguments included, that may be computed once more for a transposed vector


def _is_cheap_vector(node: g.Node) -> bool:
    """Whether a value is a vector that a few pointwise operators compute from arguments."""
    if 1 not in node.shape:
        return False
    seen, rest = {node}, [node]
    while rest:
        each = rest.pop()
        if not (each.pointwise or each.op in ("input", "const", "positions", *g.VIEWS)):
            return False
        rest += set(each.inputs) - seen
        seen.update(each.inputs)
        if len(seen) > _MOST_RECOMPUTED:  # before a long chain is walked to its end, once for each of its operations
            return False
    return True


def axis_labels(tracer: Tracer, rank: int) -> dict[int, int]:
    """Map the user's axes longer than one to rows (0) or columns (1), in an array broadcast to `rank` dimensions."""
    offset = rank - tracer.ndim
    labels = enumerate(tracer._axes.labels)
    return {offset + p: a for p, a in labels if a is not None and tracer.shape[p] != 1}


def _consistent(labels: dict[int, int], assigned: list[int | None]) -> bool:
    """Whether an operand's rows and columns agree with those assigned to the result's axes so far."""
    for p, a in labels.items():
        current = assigned[p]
        if (current is not None and current != a) or (current is None and a in assigned):
            return False
    return True


def _label_unit_axes(assigned: list[int | None], operands: list[Tracer]) -> AxisLabels:
    """Give axes of length one, which no operand has assigned, the labels that operands of full rank have for them."""
    for tracer in operands:
        if tracer.ndim == len(assigned):
            for p, a in enumerate(tracer._axes.labels):
                if assigned[p] is None and a is not None and a not in assigned:
                    assigned[p] = a
    return tuple(assigned)


def broadcast_to(tracer: Tracer, shape: tuple[int, ...]) -> Tracer:
    """Broadcast an array to a shape, as a view of the same memory."""
    view = expand(tracer, shape)
    tracer._mark_shared()
    view._mark_shared()
    view._is_array = True
    held = contiguous_strides(tracer.shape, tracer.itemsize) if tracer._is_contiguous("C") else tracer._strides
    if held is not None:
        new = len(shape) - tracer.ndim
        view._strides = (0,) * new + tuple(
            s if m == n else 0 for s, m, n in zip(held, tracer.shape, shape[new:], strict=True)
        )
    return view


def expand(tracer: Tracer, shape: tuple[int, ...]) -> Tracer:
    """Broadcast a value to a shape, as a new array."""
    try:
        fits = np.broadcast_shapes(tracer.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"an array of shape {tracer.shape} cannot be broadcast to {shape}\n  at {user_line()}")
    rank = len(shape)
    if sum(n != 1 for n in shape) > 2 or not tracer._axes.is_matrix_like:
        fold = choose_fold([tracer], shape)
        return tracer._trace.array(g.broadcast(in_fold(tracer, fold), fold.node_shape), fold)
    assigned: list[int | None] = [None] * rank
    for p, a in axis_labels(tracer, rank).items():
        assigned[p] = a
    free = [a for a in (1, 0) if a not in assigned]
    for p in reversed(range(rank)):
        if shape[p] != 1 and assigned[p] is None:
            assigned[p] = free.pop(0)
    sizes = {a: shape[p] for p, a in enumerate(assigned) if a is not None}
    node = g.Node("broadcast", (tracer._node,), (sizes.get(0, 1), sizes.get(1, 1)), tracer._node.dtype)
    return tracer._trace.array(node, tuple(assigned))


def reshape(x: Tracer, shape: tuple[int, ...], order: str = "C") -> Tracer:
    """Reshape as `numpy.reshape`; the result may share memory with the array."""
    shape = _complete_shape(x, shape)
    if order == "F":
        return reshape(x.transpose(), shape[::-1]).transpose()
    if order != "C":
        fail(
            f"reshape with order={order!r}", "the orders C and F do not depend on how an array lies in memory; use one"
        )
    lengths = [n for n in shape if n != 1]
    if lengths == [n for n in x.shape if n != 1]:
        kept = iter(p for p, n in enumerate(x.shape) if n != 1)
        return x._view([next(kept) if n != 1 else None for n in shape])
    held = contiguous_strides(x.shape, x.itemsize) if x._is_contiguous("C") else x._strides
    if held is None:
        return x._add_alias(_reshaped(x, shape))
    strides = reshaped_strides(x.shape, held, shape)
    if strides is None:
        copied = _reshaped(x, shape)
        copied._strides, copied._is_array = contiguous_strides(shape, x.itemsize), True
        return copied
    view: Tracer = x._make_view(_reshaped, lambda array, _, value: _reshaped(value, array.shape), shape)
    view._strides = strides
    return view


def _complete_shape(x: Tracer, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape for all elements of an array, with the length that it has for -1."""
    rest = math.prod(n for n in shape if n != -1)
    complete = shape
    if shape.count(-1) == 1 and rest > 0:
        complete = tuple(x.size // rest if n == -1 else n for n in shape)
    if min(complete, default=0) < 0 or math.prod(complete) != x.size:
        raise ValueError(f"cannot reshape an array of shape {x.shape} into shape {shape}\n  at {user_line()}")
    return complete


def reshaped_strides(shape: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the strides of a view of an array in another shape, of as many elements; None where NumPy copies it."""
    if 0 in shape:
        return (0,) * len(new)
    blocks: list[tuple[int, int]] = []  # axes that lie behind each other as one: (length, stride)
    for n, stride in zip(shape, strides, strict=True):
        if n != 1 and blocks and blocks[-1][1] == n * stride:
            blocks[-1] = blocks[-1][0] * n, stride
        elif n != 1:
            blocks.append((n, stride))
    found = []
    length, step = 1, 0  # what is left of a block
    for n in reversed(new):
        if n != 1 and length == 1:
            length, step = blocks.pop()
        if length % n:
            return None
        found.append(step)
        length, step = length // n, step * n
    return tuple(reversed(found))


def _reshaped(x: Tracer, shape: tuple[int, ...]) -> Tracer:
    """Return the elements of an array in C order, in a new array of another shape."""
    if sum(n != 1 for n in shape) > 2 or not x._axes.is_matrix_like:
        return _reshape_folded(x, shape)
    return _reshape_matrix(x, shape)


def _reshape_matrix(x: Tracer, shape: tuple[int, ...]) -> Tracer:
    """Reshape between shapes of at most two axes longer than one: two become rows and columns, one the columns."""
    node = x._node
    if list(axis_labels(x, x.ndim).values()) == [1, 0]:  # the node holds the transpose of the user's matrix
        node = g.transpose(node)
    long = [p for p, n in enumerate(shape) if n != 1]
    rows = shape[long[0]] if len(long) == 2 else 1
    cols = shape[long[-1]] if long else 1
    labels = dict(zip(long, (0, 1) if len(long) == 2 else (1,), strict=False))
    return x._trace.array(g.reshape(node, (rows, cols)), tuple(labels.get(p) for p in range(len(shape))))


def _reshape_folded(x: Tracer, shape: tuple[int, ...]) -> Tracer:
    """Reshape an array to or from more than two axes; its node is kept where axes of the new shape fit its rows."""
    order = tuple(p for p, n in enumerate(x.shape) if n != 1)
    long = tuple(p for p, n in enumerate(shape) if n != 1)
    if not x._axes.in_order:
        transposed = [Axes(shape, long[k:], long[:k]) for k in range(len(long) + 1)] if x._axes.transposed else []
        fits = next((fold for fold in transposed if fold.node_shape == x._node.shape), None)
        if fits is not None:
            return x._trace.array(x._node, fits)
        x = refolded(x, Axes(x.shape, order[:-1], order[-1:]))
    splits = [Axes(shape, long[:k], long[k:]) for k in reversed(range(len(long) + 1))]
    same_node = next((fold for fold in splits if fold.node_shape == x._node.shape), None)
    fold = same_node or splits[min(1, len(splits) - 1)]
    return x._trace.array(g.reshape(x._node, fold.node_shape), fold)


def matrix_node(x: Tracer) -> g.Node:
    """Return the node of a matrix with its first axis along the rows."""
    transposed = any(p != a for p, a in axis_labels(x, 2).items())
    return g.transpose(x._node) if transposed else x._node
