"""Elements gathered by integer labels, one along an axis for each index of the other axes; and labels of classes.

Labels are compared with the positions along the axis, and all other elements are summed as zeros: infinities and NaN
among them stay out, and the gradient goes to the chosen element alone. A label out of range gives NaN, where NumPy and
PyTorch raise an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import dtypes
from ..ir import graph as g
from .axes import Axes, normalize_axes
from .broadcasting import expand
from .exponentials import stop_gradient
from .library import call_library
from .operations import apply, as_tracer, reduce
from .tracer import TraceProtocol, Tracer
from .user_code import user_line


def gather(x: Tracer, items: Sequence[Any]) -> Tracer | None:
    """Return `x[np.arange(n), labels]`, one element of each row, or None if the index is not of that form.

    The labels may index any axis; the others are indexed by ranges over their full length.
    """
    labels = [p for p, i in enumerate(items) if isinstance(i, Tracer)]
    if len(items) != x.ndim or len(labels) != 1 or not dtypes.is_float(x._node.dtype):
        return None
    (axis,) = labels
    others = [p for p in range(x.ndim) if p != axis]
    index: Tracer = items[axis]
    if not dtypes.is_integer(index._node.dtype) or any(isinstance(items[p], (slice, type(None))) for p in others):
        return None
    ranges = [np.asarray(items[p]) for p in others]
    if any(r.dtype.kind == "b" for r in ranges):  # a mask stands for the places where it is true
        return None
    try:
        shape = np.broadcast_shapes(index.shape, *(r.shape for r in ranges))
    except ValueError:
        raise IndexError(f"indexing arrays could not be broadcast together\n  at {user_line()}") from None
    expected = tuple(x.shape[p] for p in others)
    if not shape or shape != expected or not all(_is_range(r, d, shape) for d, r in enumerate(ranges)):
        return None
    return pick(x, expand(index, shape)[(*[slice(None)] * axis, None)], axis).squeeze(axis)


def _is_range(indices: np.ndarray[Any, Any], axis: int, shape: tuple[int, ...]) -> bool:
    """Whether indices, broadcast to a shape, are 0, 1, 2, ... along an axis."""
    expected = np.arange(shape[axis]).reshape([-1 if d == axis else 1 for d in range(len(shape))])
    return indices.dtype.kind in "iu" and bool((np.broadcast_to(indices, shape) == expected).all())


def pick(x: Tracer, index: Tracer, axis: int) -> Tracer:
    """Return the element at a label along an axis, which keeps length one; a negative label counts from the end."""
    x._trace.note_error("x[index]")
    index = index.astype("int64", copy=False)
    return choose(x, apply("where", index < 0, index + x.shape[axis], index), axis)


def choose(x: Tracer, label: Tracer, axis: int) -> Tracer:
    """Return the element at a label along an axis, which keeps length one."""
    n = x.shape[axis]
    is_chosen = apply("equal", positions(x._trace, x.ndim, axis, n, g.label_dtype(n)), label)
    found = reduce("sum", apply("where", is_chosen, x, 0.0), axis, keepdims=True)
    return apply("where", apply("logical_and", label >= 0, label < n), found, np.nan).astype(x._node.dtype)


def positions(trace: TraceProtocol, ndim: int, axis: int, n: int, dtype: str = "int64", along: int = 1) -> Tracer:
    """Return 0, 1, 2, ... along one axis of an array of `ndim` dimensions, which are rows of its node or columns."""
    rows, cols = ((axis,), ()) if along == 0 else ((), (axis,))
    return trace.array(
        g.positions(n, along, dtype), Axes(tuple(n if p == axis else 1 for p in range(ndim)), rows, cols)
    )


def take_along_axis(arr: Any, indices: Any, axis: Any = -1) -> Tracer:
    """Gather as `numpy.take_along_axis`: one float of each row natively, else by a library step."""
    x = arr if isinstance(arr, Tracer) else as_tracer(arr, indices._trace)
    if axis is None:
        return call_library("take_along_axis", [x, indices], {"axis": None})
    (p,) = normalize_axes(axis, x.ndim, "take_along_axis")
    native = isinstance(indices, Tracer) and dtypes.is_integer(indices._node.dtype) and dtypes.is_float(x._node.dtype)
    if not native or indices.ndim != x.ndim or indices.shape[p] != 1:
        return call_library("take_along_axis", [x, indices], {"axis": axis})
    return pick(x, indices, p)


# Labels of classes --------------------------------------------------------------------------------------------------


class Labels:
    """Labels of classes along an axis of an array; those equal to `ignore_index` do not count.

    Values for each label have length one along that axis.

    Parameters
    ----------
    like : Tracer
        Array with the classes along `axis`.
    target : Tracer
        Integers, of its shape without that axis.
    weight : Tracer or None
        Of each class, as long as the axis; it has no gradient.

    Attributes
    ----------
    weight : Tracer or None
        The class weight at each label, 0 for labels that do not count.
    """

    def __init__(self, like: Tracer, target: Tracer, weight: Tracer | None, ignore_index: int, axis: int):
        self.axis, self.dtype = axis, like._node.dtype
        self._index = target.astype("int64", copy=False)[(*[slice(None)] * axis, None)]
        self._counted = apply("not_equal", self._index, ignore_index)
        self.weight = None if weight is None else self.masked(self.pick(constant_along(weight, axis, like.ndim)))

    def pick(self, values: Tracer) -> Tracer:
        """Return the value of the class at each label; NaN for labels out of range."""
        return choose(values, self._index, self.axis)

    def masked(self, values: Any) -> Tracer:
        """Return values with 0 for labels that do not count."""
        return apply("where", self._counted, values, 0.0).astype(self.dtype, copy=False)

    def weighted(self, values: Tracer) -> Tracer:
        """Return values times the weights of their labels, with 0 for labels that do not count."""
        return self.masked(values if self.weight is None else values * self.weight)

    def reduced(self, values: Tracer, reduction: str) -> Tracer:
        """Reduce masked values; "mean" divides by the sum of the weights, and is NaN if no label counts."""
        if reduction == "none":
            return values.squeeze(self.axis)
        # As rows, so that one step sums both the values and the weights.
        total = reduce("sum", _as_row(values), None)
        if reduction == "sum":
            return total
        weights = self.masked(1.0) if self.weight is None else self.weight
        return total / reduce("sum", _as_row(weights), None)


def _as_row(x: Tracer) -> Tracer:
    """Transpose the node of a column vector to one row, without changing the array."""
    node, axes = x._node, x._axes
    if node.shape[1] != 1:
        return x
    return x._trace.array(g.transpose(node), Axes(axes.shape, axes.cols, axes.rows))


def constant_along(vector: Tracer, axis: int, ndim: int) -> Tracer:
    """Return a vector along an axis of an array of `ndim` dimensions, as a constant for gradients."""
    broadcast: Tracer = stop_gradient(vector)[tuple(slice(None) if p == axis else None for p in range(ndim))]
    return broadcast
