"""Whether a plan may store its 16-bit products rounded, as the code as written does.

As written, every operation rounds its result to its dtype; a plan rounds what it stores. Where it stores a product as
the code as written does, with its bias if a linear layer adds one, both go on from the same numbers, and the plan
rounds nothing behind them but the result: no other 16-bit number is nearer to what these numbers give. It is asked for
more, that the code as written rounds something in between: a softmax of a product alone stays as accurate as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.operators import POINTWISE, REDUCTIONS
from ..ir.rebuild import rebuild
from ..trace import Call


def mark_products(graph: Graph) -> Graph:
    """Let the 16-bit products of a simplified graph be stored rounded, where `may_store_rounded`."""

    def marked(node: Node) -> Node:
        return replace(node, rounds=True) if is_16_bit_product(node) else node

    return rebuild(graph, marked)


def may_store_rounded(graph: Graph, calls: Sequence[Call]) -> bool:
    """Whether all 16-bit products of a function as written may be stored rounded, with their bias if they have one.

    Each operation as written is a call, whatever it computes inside, such as a softmax. A product, or its sum with a
    bias, has to be what a call gives to another one. Every result that depends on it has to depend on a further value
    of its size that an operation rounds, and on one behind that which rounds again, the result itself at the latest.
    Operations that round nothing do not count.
    """
    products = [n for n in graph.order if is_16_bit_product(n)]
    if not products or not calls:
        return False
    written = _AsWritten(graph, calls)
    return all(map(written.rounds_more_behind, products))


def is_16_bit_product(node: Node) -> bool:
    return node.op == "matmul" and node.dtype in ("float16", "bfloat16")


def bias_added(product: Node, readers: Sequence[Node]) -> Node | None:
    """Return the sum with a vector of columns that is all that a product is read for; None if there is no such one."""
    if len(readers) != 1 or readers[0].op != "add" or readers[0].dtype != product.dtype:
        return None
    others = [i for i in readers[0].inputs if i is not product]
    return readers[0] if len(others) == 1 and others[0].shape[0] == 1 < product.shape[0] else None


class _AsWritten:
    """The calls of a function as written, and who reads what."""

    def __init__(self, graph: Graph, calls: Sequence[Call]):
        self._results = set(graph.roots)
        self._readers = g.users(graph.roots)
        self._call: dict[Node, int] = {}
        for number, call in enumerate(calls):
            for node in call.nodes:
                self._call.setdefault(node, number)

    def rounds_more_behind(self, product: Node) -> bool:
        """Whether a product, or its sum with a bias, is stored, and more is rounded behind it before each result."""
        value = bias_added(product, self._readers.get(product, [])) or product
        if value in self._results or not self._is_stored(value):
            return False
        behind = self._behind([value])
        further = [n for n in behind if n.shape == value.shape and n.pointwise and self._is_rounded(n)]
        again = [n for n in self._behind(further) if self._is_rounded(n)]
        return behind & self._results <= {*again, *self._behind(again)}

    def _is_stored(self, node: Node) -> bool:
        """Whether a value is a result, or what a call gives to another one."""
        call = self._call.get(node)
        return call is not None and (
            node in self._results or any(self._call.get(r) != call for r in self._readers.get(node, ()))
        )

    def _is_rounded(self, node: Node) -> bool:
        return _rounds(node) and self._is_stored(node)

    def _behind(self, nodes: Iterable[Node]) -> set[Node]:
        """Return all values that depend on some, but not these themselves."""
        readers = [r for n in nodes for r in self._readers.get(n, ())]
        return set(g.topological(readers, lambda n: self._readers.get(n, [])))


def _rounds(node: Node) -> bool:
    """Whether a value is rounded to 16 bits where it is stored: no choice among operands, nor one times 2 or a half."""
    if dtypes.compute_dtype(node.dtype) == node.dtype:
        return False
    if node.op in POINTWISE:
        factors = (
            [i for i in node.inputs if i.op == "const" and not i.name] if node.op in ("multiply", "divide") else []
        )
        powers = any(abs(math.frexp(float(i.value))[0]) in (0.0, 0.5) for i in factors)
        return POINTWISE[node.op].ulps > 0 and not powers
    return node.reduction and REDUCTIONS[node.op].ulps > 0
