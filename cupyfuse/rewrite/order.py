"""The order in which identities are applied."""

from __future__ import annotations

from ..ir.graph import Graph, Node
from ..ir.rebuild import rebuild
from .activations import expand_power, recognize_activations
from .broadcasts import sink_broadcasts, transpose_products
from .cleanup import (
    cancel_transposes,
    convert_matmul_operands,
    drop_custom_derivatives,
    drop_no_ops,
    drop_redundant_guards,
    push_transposes,
    share_common_subexpressions,
)
from .concats import repeat_columns, sink_concats
from .notes import Note
from .order_statistics import sort_once
from .pools import pool_products
from .reductions import (
    drop_unit_reductions,
    lower_logsumexp,
    lower_mean,
    recognize_expsum,
)
from .row_sums import choose_before_reductions, recognize_distances, recognize_entropy, sum_of_choices
from .scales import fold_scale_chains
from .scans import scan_rows
from .sums import collapse_sums
from .variances import one_pass_variances, recognize_variance


def compute_pieces(graph: Graph) -> Graph:
    """Apply the identities of matrices side by side, exact as each says; what several pieces need is computed once."""
    return share_common_subexpressions(rebuild(sink_concats(graph), repeat_columns))


def simplify(graph: Graph, on_gpu: bool = True) -> tuple[Graph, list[Note]]:
    """Apply every identity; return the simplified graph and notes of what was done.

    Activations are recognised for kernels alone: NumPy takes longer for some of them than for what they are written as.
    """
    notes: list[Note] = []

    def drop_and_note(node: Node) -> Node:
        result = drop_unit_reductions(node)
        if result is not node:
            rows, cols = node.inputs[0].shape
            what, saved = f"{node.op} of {rows} x {cols} along axis {node.axis}", f"{2 * node.nbytes} bytes"
            notes.append(Note("a reduction along an axis of length 1 is the identity", what, saved))
        return result

    for rule in (drop_custom_derivatives, drop_no_ops, expand_power, cancel_transposes, convert_matmul_operands):
        graph = rebuild(graph, rule)
    graph = compute_pieces(graph)
    graph = recognize_activations(graph, notes) if on_gpu else graph
    graph = transpose_products(sink_broadcasts(graph, notes))
    graph = pool_products(share_common_subexpressions(graph), notes)
    graph = rebuild(graph, drop_and_note)
    for rule in (lower_mean, lower_logsumexp, recognize_expsum):
        graph = rebuild(graph, rule)
    graph = share_common_subexpressions(graph)
    for rule in (recognize_distances, recognize_entropy, sum_of_choices, choose_before_reductions):
        graph = rebuild(graph, rule)
    graph = share_common_subexpressions(graph)
    # Down the columns a second pass reads everything again; along the rows a kernel has the row at hand.
    graph = one_pass_variances(graph, lambda x, axis: axis == 0)
    graph = collapse_sums(graph, notes)
    graph = push_transposes(rebuild(graph, drop_unit_reductions))
    graph = fold_scale_chains(share_common_subexpressions(graph), notes)
    return drop_redundant_guards(share_common_subexpressions(graph)), notes


def replace_library_calls(graph: Graph) -> tuple[Graph, list[Note]]:
    """Apply the identities that replace library steps on a GPU, exact as each says; return notes of what was done."""
    notes: list[Note] = []
    for rule in (sort_once, scan_rows):
        graph, noted = rule(graph)
        notes += noted
    return graph, notes


def merge_passes(graph: Graph) -> Graph:
    """Apply the identities that compute in one pass along an axis what is written as several; leave products alone.

    logsumexp of float64 remains, as its lowered form takes two passes.
    """

    def lower_one_pass(node: Node) -> Node:
        return node if node.dtype == "float64" else lower_logsumexp(node)

    for rule in (drop_custom_derivatives, drop_no_ops, cancel_transposes, lower_mean, lower_one_pass):
        graph = rebuild(graph, rule)
    graph = share_common_subexpressions(graph)
    graph = share_common_subexpressions(rebuild(graph, recognize_expsum))
    for rule in (recognize_distances, recognize_entropy, sum_of_choices, choose_before_reductions):
        graph = rebuild(graph, rule)
    return rebuild(share_common_subexpressions(graph), recognize_variance)
