"""Choice between reading views of computed values from memory and computing them again.

A view of a computed value, such as `y[1:]`, can be computed from views of what the value is computed from: nothing is
stored, but views that overlap compute their common elements several times. Which is better depends on all uses of the
value. While a function is traced all views are computed again; where that takes more than `MOST_FLOPS` times the FLOPs
as written, some of them become views of values in memory here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.kinds import is_product
from ..ir.parts import View, Viewed, operands_as_written
from .schedule import MOST_FLOPS, unfused_cost


def _without_cycles(graph: Graph, viewed: Viewed) -> Viewed:
    """Leave out views that their values are computed from: such a view was there before, and computes nothing again."""
    left = dict(viewed)
    while (node := _view_of_itself(graph, left)) is not None:
        del left[node]
    return left


def _view_of_itself(graph: Graph, viewed: Viewed) -> Node | None:
    """Find a view that the value it is a view of is computed from, if there is one."""
    done: set[Node] = set()
    path: dict[Node, Iterator[Node]] = {}  # from a root on, with the operands that are left to look at
    for root in graph.roots:
        if root not in done:
            path[root] = iter(operands_as_written(root, viewed))
        while path:
            node = next(reversed(path))
            operand = next(path[node], None)
            if operand is None:
                done.add(node)
                del path[node]
            elif operand in path:
                cycle = list(path)[list(path).index(operand) :]
                return next(n for n in cycle if n in viewed)
            elif operand not in done:
                path[operand] = iter(operands_as_written(operand, viewed))
    return None


def with_views_stored(graph: Graph, viewed: Viewed) -> Graph:
    """Return the graph as written: each value is computed once, and its views are views of it in memory."""
    if not viewed:
        return graph
    return _Rebuilt(graph, viewed).graph()


def within_flops(graph: Graph, viewed: Viewed, written: Graph) -> Graph:
    """Return a graph of at most `MOST_FLOPS` times the repeatable FLOPs of `written`.

    That is `graph`, if it has no more; else one in which the views of some values alone are computed again; else
    `written`.
    """
    most = MOST_FLOPS * unfused_cost(written).repeatable
    if not viewed or unfused_cost(graph).repeatable <= most:
        return graph
    chosen = _Chosen(graph, viewed, most).graph()
    return chosen if unfused_cost(chosen).repeatable <= most else written


class _Rebuilt:
    """A graph whose views of computed values are rebuilt, as views of values in memory."""

    def __init__(self, graph: Graph, viewed: Viewed):
        viewed = _without_cycles(graph, viewed)
        self.traced, self.viewed = graph, viewed
        self.done: dict[Node, Node] = {}  # of each node of the graph, the rebuilt one
        first: dict[tuple[Node, View], Node] = {}
        self.same = {node: first.setdefault(view, node) for node, view in viewed.items()}  # equal views are one
        self.roots = dict.fromkeys(self.same.get(n, n) for n in graph.roots)

    def graph(self) -> Graph:
        for node in g.topological(self.roots, self.operands):
            if node in self.viewed:
                self.done[node] = self.view(node)
            else:
                self.done[node] = g.with_inputs(node, [self.done[self.same.get(i, i)] for i in node.inputs])
        return self.traced.replace({n: self.done[self.same.get(n, n)] for n in self.traced.roots})

    def operands(self, node: Node) -> Iterable[Node]:
        """Return what a node is computed from as written, the first one for views that are equal."""
        return [self.same.get(i, i) for i in operands_as_written(node, self.viewed)]

    def view(self, node: Node) -> Node:
        """Build a view of a value that is built already."""
        (value,) = self.operands(node)
        return self.viewed[node][1].of_stored(self.done[value])


class _Chosen(_Rebuilt):
    """A graph in which the views of some values are computed again, and those of others are read from memory.

    Values are gone through in the order of their computation. The views of one are computed again if the graph then has
    at most so many FLOPs. Its FLOPs are those as written, and those of the views computed again so far, less those of
    values that only such views needed; products are not counted.
    """

    def __init__(self, graph: Graph, viewed: Viewed, most: float):
        super().__init__(graph, viewed)
        self.most = most
        order = list(g.topological(self.roots, self.operands))
        self.users: dict[Node, list[Node]] = {node: [] for node in order}
        self.views_of: dict[Node, list[Node]] = {}
        for node in order:
            for i in self.operands(node):
                self.users[i].append(node)
            if node in self.viewed:
                (value,) = self.operands(node)
                self.views_of.setdefault(value, []).append(node)
        self.flops_of = {
            n: 0 if n in self.viewed or is_product(n) else g.flops(n) for n in order
        }  # in the graph so far
        self.flops = sum(self.flops_of.values())
        self.have: set[Node] = set()  # rebuilt nodes
        self.unneeded: set[Node] = set()  # values that are computed for their views alone
        self.stored: set[Node] = set()  # nodes that are read from memory, as rebuilt

    def view(self, node: Node) -> Node:
        (value,) = self.operands(node)
        if value in self.views_of:
            self._choose(value, self.views_of.pop(value))
        return self.done[node] if node in self.done else super().view(node)

    def _choose(self, value: Node, views: list[Node]) -> None:
        """Build the views of a value if they may be computed again; otherwise note that it is read from memory."""
        built = self.done[value]
        self.have.update(self.done.values())
        found = {node: self.viewed[node][1].again(built, self.stored) for node in views}
        again = {node: view for node, view in found.items() if view is not None}
        fresh = {node: self._fresh(view) for node, view in again.items()}
        flops = {node: sum(map(g.flops, nodes)) for node, nodes in fresh.items()}
        unneeded = self._needed_by_views_alone(value, views)
        after = self.flops + sum(flops.values()) - sum(self.flops_of[n] for n in unneeded)
        if len(again) < len(views) or after > self.most:
            self.stored.add(built)
            return
        self.flops = after
        self.flops_of.update(flops)
        self.unneeded |= unneeded
        self.have.update(n for nodes in fresh.values() for n in nodes)
        self.done.update(again)

    def _fresh(self, view: Node) -> list[Node]:
        """List the nodes of a view that is computed again, but for those that the graph has anyway."""
        have = self.have
        nodes = g.topological([view], lambda n: () if n in have else n.inputs)
        return [n for n in nodes if n not in have]

    def _needed_by_views_alone(self, value: Node, views: list[Node]) -> set[Node]:
        """Find the values that nothing needs once the views of a value are computed again.

        A node is looked at each time that one of its users is found to be such a value.
        """
        gone: set[Node] = set()
        left = [value]
        while left:
            node = left.pop()
            users = self.users[node]
            if (
                node in gone
                or node in self.roots
                or not all(u in gone or u in self.unneeded or u in views for u in users)
            ):
                continue
            # A view that reads this node from memory keeps it.
            if all(self.viewed[v][1].copies(self.done[node], self.stored) for v in views):
                gone.add(node)
                left += self.operands(node)
        return gone - self.unneeded
