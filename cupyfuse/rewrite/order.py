"""The order in which identities are applied."""

from __future__ import annotations

from collections.abc import Callable

from ..ir import graph as g
from ..ir.graph import Graph, Node
from .affine import fold_affine_chains
from .broadcasts import sink_broadcasts, transpose_products
from .cleanup import (
    cancel_transposes,
    convert_matmul_operands,
    drop_no_ops,
    drop_redundant_guards,
    drop_slopes,
    push_transposes,
    share_common_subexpressions,
)
from .notes import Note
from .pools import pool_products
from .reductions import drop_unit_reductions, lower_logsumexp, lower_mean, recognize_expsum
from .sums import collapse_sums


def _apply_to_all(graph: Graph, rule: Callable[[Node], Node], counts: dict[str, list[Node]] | None = None) -> Graph:
    def counted(node: Node) -> Node:
        result = rule(node)
        if result is not node and counts is not None:
            counts.setdefault(rule.__name__, []).append(node)
        return result

    return g.rewrite(graph, counted)


def simplify(graph: Graph) -> tuple[Graph, list[Note]]:
    """Apply every identity; return the simplified graph and notes of what was done."""
    counts: dict[str, list[Node]] = {}
    notes: list[Note] = []
    for rule in (drop_slopes, drop_no_ops, cancel_transposes, convert_matmul_operands):
        graph = _apply_to_all(graph, rule)
    graph = transpose_products(sink_broadcasts(share_common_subexpressions(graph), notes))
    graph = pool_products(share_common_subexpressions(graph), notes)
    graph = _apply_to_all(graph, drop_unit_reductions, counts)
    for node in counts.get("drop_unit_reductions", []):
        notes.append(
            Note(
                "a reduction along an axis of length 1 is the identity",
                f"{node.op} of {node.inputs[0].shape[0]} x {node.inputs[0].shape[1]} along axis {node.axis}",
                f"{2 * node.nbytes} bytes",
            )
        )
    for rule in (lower_mean, lower_logsumexp, recognize_expsum):
        graph = _apply_to_all(graph, rule)
    graph = share_common_subexpressions(graph)
    graph = collapse_sums(graph, notes)
    graph = push_transposes(_apply_to_all(graph, drop_unit_reductions))
    graph = fold_affine_chains(share_common_subexpressions(graph), notes)
    return drop_redundant_guards(share_common_subexpressions(graph)), notes
