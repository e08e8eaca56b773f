"""Matrix products of traced arrays: of vectors, matrices, and batches of matrices."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.batches import Batches
from ..ir.products import batched_matmul
from .axes import Axes
from .broadcasting import matrix_node
from .folds import cheapest, in_fold
from .library import call_library
from .operations import apply, as_tracer, recorded, reduce, trace_of
from .tracer import Tracer
from .user_code import user_line


@recorded
def matmul(a: Any, b: Any) -> Tracer:
    """Multiply vectors, matrices and batches as `numpy.matmul`; a product with a vector becomes a weighted sum."""
    trace = trace_of((a, b))
    a, b = as_tracer(a, trace), as_tracer(b, trace)
    for operand in (a, b):
        if operand.ndim == 0:
            raise ValueError(
                f"matmul: operands need at least 1 dimension, got shapes {a.shape} and {b.shape}\n  at {user_line()}"
            )
    if not dtypes.is_float(g.promoted_dtype((a._node, b._node))):
        return call_library("matmul", [a, b])
    depth = b.shape[max(b.ndim - 2, 0)]
    if a.shape[-1] != depth:
        raise ValueError(
            f"matmul: the last dimension of {a.shape} must equal the {'first' if b.ndim <= 2 else 'last but one'} of "
            f"{b.shape} ({a.shape[-1]} != {depth})\n  at {user_line()}"
        )
    # A vector gets a second axis, and the product is a weighted sum.
    if b.ndim == 1:
        row = trace.array(b._node, b._axes.picked((None,) * (a.ndim > 1) + (0,)))
        return reduce("sum", apply("multiply", a, row), a.ndim - 1)
    if a.ndim == 1:
        column = trace.array(a._node, a._axes.picked((0, None)))
        return reduce("sum", apply("multiply", column, b), b.ndim - 2)
    if any(n != 1 for n in b.shape[:-2]):
        return _multiply_batches(a, b)
    if a.ndim == 2 == b.ndim and a._axes.is_matrix_like and b._axes.is_matrix_like:
        return trace.array(g.matmul(matrix_node(a), matrix_node(b)), (0, 1))
    # b is one matrix: the rows of all matrices of a are multiplied at once.
    matrix = trace.array(b._node, b._axes.picked((b.ndim - 2, b.ndim - 1)))
    shape = (1,) * (b.ndim - a.ndim) + a.shape[:-1] + b.shape[-1:]
    return trace.array(
        g.matmul(in_fold(a, Axes.by_rows(a.shape)), in_fold(matrix, Axes.by_rows(matrix.shape))), Axes.by_rows(shape)
    )


def _multiply_batches(a: Tracer, b: Tracer) -> Tracer:
    """Multiply batches of matrices as one product of the graph; one matrix for all batches is not repeated."""
    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(
            f"matmul: the batches of shapes {a.shape} and {b.shape} cannot be broadcast together\n  at {user_line()}"
        ) from None
    dtype = g.promoted_dtype((a._node, b._node))
    nodes, transposed, shared = [], [], []
    for x in (a.astype(dtype, copy=False), b.astype(dtype, copy=False)):
        matrix = x.shape[-2:]
        is_shared = all(n == 1 for n in x.shape[:-2])
        shape = (*((1,) * len(batch) if is_shared else batch), *matrix)
        leading, (row, col) = tuple(range(len(batch))), (len(batch), len(batch) + 1)
        plain, transpose = Axes(shape, (*leading, row), (col,)), Axes(shape, (*leading, col), (row,))
        fold = cheapest([x], [plain, transpose])
        nodes.append(g.broadcast(in_fold(x, fold), fold.node_shape))
        transposed.append(fold is transpose)
        shared.append(is_shared)
    count, rows, depth, cols = int(np.prod(batch)), a.shape[-2], a.shape[-1], b.shape[-1]
    left, right = transposed
    batches = Batches(count, rows, depth, cols, (left, right), (shared[0], shared[1]))
    return a._trace.array(batched_matmul(nodes[0], nodes[1], batches), Axes.by_rows((*batch, rows, cols)))


def dot(a: Any, b: Any) -> Tracer:
    """Multiply as `numpy.dot`; numbers are arrays in promotion."""
    trace = trace_of((a, b))
    a, b = (o if isinstance(o, Tracer) else as_tracer(np.asarray(o), trace) for o in (a, b))
    if not (a.ndim and b.ndim):
        return apply("multiply", a._as_result(), b._as_result())
    if b.ndim <= 2:
        return matmul(a, b)
    # The sum is along the last axis but one of b: its other axes become columns of one matrix.
    others = (*range(b.ndim - 2), b.ndim - 1)
    columns = trace.array(b._node, b._axes.picked((b.ndim - 2, *others)))
    shape = tuple(b.shape[p] for p in others)
    product = matmul(a, trace.reshape(columns, (b.shape[-2], math.prod(shape)), "C"))
    return trace.reshape(product, (*a.shape[:-1], *shape), "C").copy()
