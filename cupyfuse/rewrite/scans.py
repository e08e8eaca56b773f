"""Running totals along rows, by a kernel of ours in the place of a library's."""

from __future__ import annotations

import math
from typing import Any

from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.library import LibraryCall, Operand
from ..ir.rebuild import rebuild
from .notes import Note

# Fewer rows than these, of more columns than these, are left to the library: a row is one block's, and most of a GPU
# would be idle.
_FEW_ROWS, _LONG = 64, 1 << 12
_FLOATS = ("float32", "float64")
_FUNCTIONS = {
    **{"cumsum": "cumsum", "nancumsum": "cumsum", "cumulative_sum": "cumsum"},
    **{"cumprod": "cumprod", "nancumprod": "cumprod", "cumulative_prod": "cumprod"},
}


def scan_rows(graph: Graph) -> tuple[Graph, list[Note]]:
    """Replace cumulative sums and products of floats along their last axis by scans of rows.

    `cumsum(x)[k] = x[0] + ... + x[k]`: rounding as that of any order of additions; infinities and NaN reach the same
    elements, unless partial results of finite ones overflow. It saves the passes over memory that libraries make.
    """
    notes: list[Note] = []

    def rule(node: Node) -> Node:
        call = node.call
        if call is None or call.function not in _FUNCTIONS or not _is_scan(call, node):
            return node
        (x,) = node.inputs
        shape = call.shapes[0]
        length = x.size if _axis(call) is None else shape[-1]
        matrix = (x.size // length, length)
        rows = g.transpose(x) if x.shape == matrix[::-1] and 1 in matrix else g.reshape(x, matrix)
        if rows.shape[0] < _FEW_ROWS and rows.shape[1] > _LONG:
            return node
        if call.function.startswith("nan"):
            none = g.const(1.0 if _FUNCTIONS[call.function] == "cumprod" else 0.0)
            rows = g.pointwise("where", g.pointwise("isnan", rows), none, rows)
        notes.append(Note("running totals along rows are one pass", repr(call), "the library's others"))
        return g.reshape(g.scan(_FUNCTIONS[call.function], rows), node.shape)

    return rebuild(graph, rule), notes


def _is_scan(call: LibraryCall, node: Node) -> bool:
    """Whether a call is of one whole array, along its last axis or flattened, in the array's own dtype."""
    options = {name: value for name, value in call.options.items() if name not in ("axis", "dtype", "include_initial")}
    given = (*call.arguments[:1], *options.values())
    if len(call.shapes) != 1 or not node.size or node.dtype not in _FLOATS or node.inputs[0].dtype != node.dtype:
        return False
    if not all(isinstance(a, Operand) for a in given) or len(given) != 1 or call.options.get("include_initial"):
        return False
    axis, ndim = _axis(call), len(call.shapes[0])
    return ndim > 0 and (axis is None or axis % ndim == ndim - 1) and node.size == math.prod(call.shapes[0])


def _axis(call: LibraryCall) -> Any:
    return call.arguments[1] if len(call.arguments) > 1 else call.options.get("axis")
