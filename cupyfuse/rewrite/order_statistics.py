"""Medians and quantiles from sorted rows: one sort, a library step, for all those of an array.

For GPUs alone: there libraries sort to find a quantile, on a CPU they partition, in less time.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.library import ORDER_STATISTICS, LibraryCall, Operand
from ..ir.quantiles import Place, place_of, reduced_axes
from ..ir.rebuild import rebuild
from ..ir.slices import slice_view
from .notes import Note


def sort_once(graph: Graph) -> tuple[Graph, list[Note]]:
    """Replace medians, quantiles and percentiles of float32 and float64 arrays by interpolation in sorted rows.

    `quantile(x, q) = lower + (upper - lower) weight`, of the elements of `sort(x)` around the place of `q`, as NumPy
    computes it, and NaN where the last element is NaN: exact for all values. It saves a sort, or several, and the
    launches of the library's own interpolation. Functions that ignore NaN, axes that lie between others, and quantiles
    that are not known before a call are left alone; so is a median that would have a sort of its own, for which the
    library partitions in about half the time.
    """
    notes: list[Note] = []
    alone = _lone_medians(graph)
    several: dict[Node, list[Node]] = {}  # the quantiles of each result of more than one

    def rule(node: Node) -> Node:
        if node.op == "slice" and node.inputs[0] in several:
            return _one_of(node, several[node.inputs[0]])
        call = node.call
        if call is None or not _is_candidate(node) or id(call) in alone:
            return node
        given = _arguments(call)
        rows = None if given is None else _rows(node.inputs[0], call.shapes[0], given["axis"])
        if given is None or rows is None or rows.shape[1] < 2:
            return node
        sort = LibraryCall("sort", (Operand(0),), {"axis": -1}, (rows.shape,), (rows.shape,), (rows.dtype,))
        ordered = Node("library", (rows,), rows.shape, rows.dtype, call=sort)  # equal ones become one
        notes.append(Note("a quantile lies between two elements of a sorted row", repr(call), "a sort of its own"))
        found = _of_function(call.function, given, ordered, node.dtype)
        result = g.reshape(_stacked(found), node.shape)
        if len(found) > 1:
            several[result] = found
        return result

    return rebuild(graph, rule), notes


_FLOATS = ("float32", "float64")
_MOST_PLACES = 8  # quantiles of one call: each element of the result chooses among all
_SIGNATURES = {name: inspect.signature(getattr(np, name)) for name in ORDER_STATISTICS}


def _is_candidate(node: Node) -> bool:
    known = node.call is not None and node.call.function in _SIGNATURES
    return known and bool(node.size) and node.inputs[0].dtype in _FLOATS


def _lone_medians(graph: Graph) -> set[int]:
    """Find the medians that no other order statistic of the same rows is beside: the identities of their calls."""
    calls: dict[tuple[Node, tuple[int, ...]], list[LibraryCall]] = {}
    for node in graph.order:
        given = _arguments(node.call) if node.call is not None and _is_candidate(node) else None
        if given is not None and node.call is not None:
            axes = reduced_axes(given["axis"], len(node.call.shapes[0]))
            calls.setdefault((node.inputs[0], axes), []).append(node.call)
    return {id(found[0]) for found in calls.values() if len(found) == 1 and found[0].function == "median"}


def _arguments(call: LibraryCall) -> dict[str, Any] | None:
    """Return the arguments of a call by name, with the defaults of others.

    None if it is not of one whole array, if quantiles are weighted or not known before a call, and where it names its
    method as older versions of NumPy do.
    """
    bound = _SIGNATURES[call.function].bind(*call.arguments, **call.options)
    bound.apply_defaults()
    given = bound.arguments
    others = any(given.get(name) is not None for name in ("weights", "interpolation"))
    if len(call.shapes) != 1 or not isinstance(given["a"], Operand) or others:
        return None
    return given if call.function == "median" or _places(given["q"]) is not None else None


def _places(q: Any) -> list[Any] | None:
    """Return a number, or each of a list of at most `_MOST_PLACES`, as NumPy converts them: integers if all are.

    None for anything else, and for an empty list.
    """
    values = np.asarray(q if isinstance(q, (list, tuple)) else [q])
    one = type(q) in (int, float)
    is_list = isinstance(q, (list, tuple)) and values.ndim == 1 and values.dtype.kind in "if"
    return values.tolist() if one or (is_list and 0 < len(values) <= _MOST_PLACES) else None


def _rows(node: Node, shape: tuple[int, ...], axis: Any) -> Node | None:
    """Return an array as a matrix whose rows lie along the axes to reduce; None if that takes a copy.

    `node` has the elements of the array in C order, `shape` is the array's own.
    """
    ndim = len(shape)
    axes = reduced_axes(axis, ndim)
    length = math.prod(shape[p] for p in axes)
    others = math.prod(n for p, n in enumerate(shape) if p not in axes)
    if axes == tuple(range(ndim - len(axes), ndim)):
        return g.reshape(node, (others, length))
    return g.transpose(g.reshape(node, (length, others))) if axes == tuple(range(len(axes))) else None


def _of_function(function: str, given: dict[str, Any], ordered: Node, dtype: str) -> list[Node]:
    """Compute a median, or some quantiles, from sorted rows (rows, n): of each a column (rows, 1) of a dtype."""
    rows, n = ordered.shape

    def at(place: int) -> Node:
        return slice_view(ordered, (0, 1, rows), (place, 1, 1))

    def or_nan(found: Node) -> Node:
        return g.cast(g.pointwise("where", g.pointwise("isnan", at(n - 1)), at(n - 1), found), dtype)

    if function == "median":
        return [or_nan(_middle(at, n))]
    places = _places(given["q"])
    assert places is not None
    quantiles = [q / 100 if function == "percentile" else q for q in places]
    return [or_nan(_between(at, place_of(n, q, given["method"]), dtype)) for q in quantiles]


def _stacked(columns: list[Node]) -> Node:
    """Return columns (rows, 1) as the rows of a matrix, (their number, rows); a single one as it is."""
    if len(columns) == 1:
        return columns[0]
    number, result = g.positions(len(columns), 1), columns[-1]
    for k in reversed(range(len(columns) - 1)):
        result = g.pointwise("where", g.pointwise("equal", number, g.const(k)), columns[k], result)
    return g.transpose(result)


def _one_of(node: Node, columns: list[Node]) -> Node:
    """Return the column of which a slice of the stacked ones has all elements; the slice itself if there is none."""
    (row, down), (col, across) = node.dims
    (rows, cols), width, count = node.shape, node.inputs[0].shape[1], columns[0].size
    side_by_side = (rows == 1 or (cols == width and down == 1)) and (cols == 1 or across == 1)
    start = row * width + col
    if not side_by_side or node.size != count or start % count:
        return node
    return g.reshape(columns[start // count], node.shape)


def _middle(at: Callable[[int], Node], n: int) -> Node:
    """Return the middle element of `n`, or the mean of the two in the middle."""
    if n % 2:
        return at(n // 2)
    return g.pointwise("divide", g.pointwise("add", at(n // 2 - 1), at(n // 2)), g.const(2.0))


def _between(at: Callable[[int], Node], place: Place, dtype: str) -> Node:
    """Interpolate between two elements; the weight is of the dtype of the result."""
    below, above, weight = place
    if weight is None:
        return at(below)
    difference = g.cast(g.pointwise("subtract", at(above), at(below)), dtype)
    if weight >= 0.5:
        return g.pointwise("subtract", at(above), g.pointwise("multiply", difference, g.const(1 - weight)))
    return g.pointwise("add", at(below), g.pointwise("multiply", difference, g.const(weight)))
