"""Whether a plan may store its 16-bit products rounded, as the code as written does.

As written, every operation rounds its result to its dtype; a plan rounds what it stores. Where it stores a product as
the code as written does, with its bias if a linear layer adds one, both go on from the same numbers, and the plan
rounds nothing behind them but the results: no other number of the result's dtype is nearer to what these numbers give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.products import sum_with_row
from ..ir.rebuild import rebuild
from ..trace import Call


def mark_products(graph: Graph) -> Graph:
    """Let all 16-bit products of a simplified graph be stored rounded: for functions that `may_store_rounded`."""

    def marked(node: Node) -> Node:
        return replace(node, rounds=True) if is_16_bit_product(node) else node

    return rebuild(graph, marked)


def mark_saved_sums(graph: Graph, saved: int) -> Graph:
    """Let 16-bit products be stored rounded whose sum with a bias is among the last results, saved for gradients.

    Nobody but the backward pass reads these, which reads them rounded.
    """
    if not saved:
        return graph
    values, readers = set(graph.outputs[-saved:]), g.users(graph.roots)
    done: dict[Node, Node] = {}
    for node in graph.order:
        done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
        if is_16_bit_product(node) and bias_added(node, readers.get(node, [])) in values:
            done[node] = replace(done[node], rounds=True)
    return graph.replace(done)


def may_store_rounded(graph: Graph, calls: Sequence[Call]) -> bool:
    """Whether all 16-bit products of a function as written may be stored rounded, with their bias if they have one.

    Each operation as written is a call, whatever it computes inside, such as a softmax. A product, or its sum with a
    bias, has to be what a call gives to another one, and no result.
    """
    products = [n for n in graph.order if is_16_bit_product(n)]
    if not products or not calls:
        return False
    written = _AsWritten(graph, calls)
    return all(map(written.rounds, products))


def is_16_bit_product(node: Node) -> bool:
    """Whether a node is a matrix product of 16-bit operands."""
    return node.op == "matmul" and node.dtype in ("float16", "bfloat16")


def bias_added(product: Node, readers: Sequence[Node]) -> Node | None:
    """Return the sum with a vector of columns that is all that a product is read for; None if there is no such one."""
    return sum_with_row(product, readers) if product.shape[0] > 1 else None


class _AsWritten:
    """The calls of a function as written, and who reads what."""

    def __init__(self, graph: Graph, calls: Sequence[Call]):
        self._results = set(graph.roots)
        self._readers = g.users(graph.roots)
        self._call: dict[Node, int] = {}
        for number, call in enumerate(calls):
            for node in call.nodes:
                self._call.setdefault(node, number)

    def rounds(self, product: Node) -> bool:
        """Whether a product, or its sum with a bias, is rounded where a call gives it to another one, and no result."""
        value = bias_added(product, self._readers.get(product, [])) or product
        return value not in self._results and self._is_stored(value)

    def _is_stored(self, node: Node) -> bool:
        """Whether a value is what a call gives to another one."""
        call = self._call.get(node)
        return call is not None and any(self._call.get(r) != call for r in self._readers.get(node, ()))
