"""Placement of a graph's values: the layer and the domain of the step that computes each."""

from __future__ import annotations

from collections.abc import Container, Iterable, Set
from typing import NamedTuple

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Graph, Node, Shape
from ...ir.kinds import is_leaf, is_product
from .memory import COPIES, base_of, is_exact
from .steps import separate_stages

# The kind of step of each operator that is a step of its own.
SINGLE_STEPS = {
    **dict.fromkeys(("matmul", "batched_matmul", "split_matmul", "accumulate"), "Gemm"),
    "split": "Split",
    **dict.fromkeys((*COPIES, "concat"), "Copy"),
    **dict.fromkeys(g.SCANS, "Scan"),
    "library": "Library",
}
_IN_MEMORY = {"input", *g.VIEWS, "factor", *SINGLE_STEPS}

StepKey = tuple[int, str, Shape]  # layer, kind ("row", "column" or an operator) and domain of a step


class ColumnGroup(NamedTuple):
    """The column step that computes a value, by its layer and its domain."""

    layer: int
    domain: Shape


class Placement:
    """The layer, and the step, that compute each value of a graph.

    A layer is a position in the order of steps: a step reads only what steps of lower layers have written. A domain is
    the rows and columns that a step runs over.

    Parameters
    ----------
    graph : Graph
    kept : set of Node
        Values that one step stores, and all later ones read; others are computed again wherever they are needed.

    Attributes
    ----------
    live_set : set of Node
        All values but those that only guards read.
    read_back : set of Node
        Stored values that column steps read rather than recompute.
    after_reduction : dict
        Whether a value depends on a reduction of its own step.
    layer : dict
    row_domain : dict
        The domain of the row program that computes a value.
    column_group : dict
        The column step that computes a value.
    column_layer : dict
        The last layer that a column step reads to compute a value.
    kept_layer : dict
        The last layer of the kept values that a row step computes with a value.
    """

    def __init__(self, graph: Graph, kept: Set[Node] = frozenset()):
        self.graph = graph
        self.kept = kept
        self.live_set = set(g.topological(graph.roots, g.eager_inputs))
        self.read_back: set[Node] = set()
        self._place_all()
        self.read_back = self._worth_reading_back()
        if self.read_back:
            self._place_all()

    def _place_all(self) -> None:
        """Choose the layer and the step of every value."""
        self.after_reduction: dict[Node, bool] = {}
        self.layer: dict[Node, int] = {}
        self.row_domain: dict[Node, Shape] = {}
        self.column_group: dict[Node, ColumnGroup] = {}
        self.column_layer: dict[Node, int] = {}
        self.kept_layer: dict[Node, int] = {}
        for node in g.topological(self.graph.roots):
            self._place(node)
            reads = self._column_step_reads(node)
            below = (self.column_layer[i] for i in node.inputs)
            self.column_layer[node] = self.layer[node] if reads else max(below, default=0)

    def in_memory(self, node: Node) -> bool:
        """Whether every reader finds the value in memory."""
        return node.op in _IN_MEMORY or node in self.column_group

    def _place(self, node: Node) -> None:
        """Choose the layer and the step that compute a value, whose operands are placed already."""
        self.after_reduction[node] = False
        if node.op in ("input", "const"):
            self.layer[node] = 0
        elif node.op in (*g.VIEWS, "factor"):
            self.layer[node] = self.layer[node.inputs[0]]
        elif node.op in SINGLE_STEPS:
            self.layer[node] = 1 + max(self.layer[i] for i in node.inputs)
        else:
            reduces_columns = node.reduction and node.axis == 0
            group = self._reducing_group(node) if reduces_columns else self._finishing_group(node)
            if group is None:
                self._place_in_row_program(node)
            else:
                self.column_group[node], self.layer[node] = group, group.layer

    def _place_in_row_program(self, node: Node) -> None:
        """Choose the domain and the layer of the row program that computes a value."""
        inputs = [i for i in g.eager_inputs(node) if i.op != "const"]
        reduced = [i for i in inputs if self.after_reduction[i]]
        self.row_domain[node] = node.inputs[0].shape if node.reduction else self._common_row_domain(node, reduced)
        same_step = any(self._joins(node, i) for i in reduced)
        self.after_reduction[node] = node.reduction or _is_guarded_sum(node) or same_step
        operands = [*inputs, *self.guard_only_reads(node, self.live_set)]
        self.layer[node], self.kept_layer[node] = self._row_layers(node, operands)

    def _row_layers(self, node: Node, operands: list[Node]) -> tuple[int, int]:
        """Return the layer of a value in a row program, and the last layer of the kept values computed along with it.

        The row program of the value computes an operand that it joins (see `_joins`), reads one that an earlier step
        has written, and recomputes any other from what is in memory.
        """
        layer, kept_layer = 1, 0
        for i in operands:
            same_program = not self.in_memory(i) and self._joins(node, i)
            stored = self.in_memory(i) or self.after_reduction[i] or i in self.kept
            last_kept = self.layer[i] if i in self.kept else self.kept_layer.get(i, 0)  # at the operand or beneath it
            if same_program:
                layer = max(layer, self.layer[i])
                kept_layer = max(kept_layer, last_kept)
            else:
                written = self.layer[i] + 1 if stored else self.layer[i]
                layer = max(layer, written, last_kept + 1)  # what it is recomputed from is in memory by then
        return layer, kept_layer

    def _joins(self, node: Node, operand: Node) -> bool:
        """Whether a value can be computed in the row program of its operand: of one domain, and in its step.

        Full rows that read a reduction may have to be a step of their own, see `separate_stages`.
        """
        domain = self.row_domain[node]
        later_stage = node.shape == domain and operand.shape != domain and self.after_reduction[operand]
        return self.row_domain[operand] == domain and not (later_stage and separate_stages(domain))

    def _common_row_domain(self, node: Node, reduced: list[Node]) -> Shape:
        """Return the domain of the operands' reductions if a value can be computed in their step, else its shape."""
        domains = {self.row_domain[i] for i in reduced}
        fitting = [(rows, cols) for rows, cols in domains if rows == node.shape[0] and node.shape[1] in (cols, 1)]
        return max(fitting, key=lambda domain: domain[1], default=node.shape)  # all have as many rows

    def guard_only_reads(self, node: Node, available: Container[Node]) -> list[Node]:
        """List the values that a guard's exact form reads; `available` ones need nothing beneath them."""
        if node.op != "guard":
            return []
        exact = node.inputs[1]

        def stop(n: Node) -> bool:
            return n in available or self._guard_reads(n, exact)

        order = g.topological([exact], lambda n: () if stop(n) else n.inputs)
        return [n for n in order if n.op != "const" and stop(n)]

    def _guard_reads(self, node: Node, exact: Node) -> bool:
        """Whether a guard's exact form reads a value rather than recompute it; it recomputes products not live."""
        if self.in_memory(node):
            return not is_product(node) or node in self.live_set
        if node in self.kept:
            return True
        # A guarded sum is read as its own repair leaves it.
        return (node.reduction and node is not exact) or _is_guarded_sum(node)

    def _reducing_group(self, node: Node) -> ColumnGroup:
        """Return the group of the column step that computes a reduction down the columns."""
        (operand,) = node.inputs
        return ColumnGroup(1 + self.column_layer[operand], operand.shape)

    def _finishing_group(self, node: Node) -> ColumnGroup | None:
        """Return the group of the column step that can compute a value after its reductions; None if there is none."""
        if not node.pointwise or node.shape[0] != 1:
            return None
        groups = {self.column_group[i] for i in node.inputs if i in self.column_group}
        others = [i for i in node.inputs if i not in self.column_group and i.op != "const"]
        if len(groups) != 1 or not all(i.shape[0] == 1 and self._from_arguments(i) for i in others):
            return None
        (group,) = groups
        return group if node.shape[1] == group.domain[1] else None

    def _from_arguments(self, node: Node) -> bool:
        """Whether a value is an argument, or pointwise work on arguments, with no kept value beneath."""
        return is_leaf(node) or (node.pointwise and self.column_layer[node] == 0 and not self.after_reduction[node])

    def frontier(self, operands: Iterable[Node], stored: Container[Node] = ()) -> list[Node]:
        """List the values that a column step reads to compute these; `stored` values need nothing beneath them.

        Column steps cannot reduce along rows.
        """

        def reads(node: Node) -> bool:
            return node in stored or self._column_step_reads(node)

        walk = g.topological(operands, lambda n: () if reads(n) else n.inputs)
        return [n for n in walk if reads(n) and n.op != "const"]

    def _column_step_reads(self, node: Node) -> bool:
        """Whether a column step reads a value from memory rather than recompute it; also true of constants."""
        if self.in_memory(node) or node.op == "const" or node in self.kept:
            return True
        return node.reduction or (self.after_reduction[node] and node.shape[1] == 1) or node in self.read_back

    def _worth_reading_back(self) -> set[Node]:
        """Choose stored values that column steps read, since they take fewer bytes than what they are computed from.

        Values of 16 bits are recomputed, since stored ones are rounded, but for those that are rounded everywhere.
        """
        stored = {base_of(n) for n in self.graph.roots}
        stored |= {base_of(i) for n in self.live_set if n.op in SINGLE_STEPS for i in n.inputs}
        stored = {n for n in stored if n.pointwise and (dtypes.compute_dtype(n.dtype) == n.dtype or is_exact(n))}
        reduced: dict[ColumnGroup, dict[Node, None]] = {}  # the operands of each group's reductions
        for node, group in self.column_group.items():
            if node.reduction and node in self.live_set:
                reduced.setdefault(group, {})[node.inputs[0]] = None
        found: set[Node] = set()
        for operands in reduced.values():
            back, sources = self.frontier(operands, stored), self.frontier(operands)
            if sum(n.nbytes for n in back) < sum(n.nbytes for n in sources):
                found.update(stored.intersection(back))
        return found

    def home_step(self, node: Node) -> StepKey:
        """Return the first step that can compute a value and store it; factors are written with their product."""
        node = node.inputs[0] if node.op == "factor" else node
        if node.op in SINGLE_STEPS:
            return self.layer[node], node.op, (0, 0)
        if node in self.column_group:
            return self.layer[node], "column", self.column_group[node].domain
        return self.layer[node], "row", self.row_domain[node]

    def reads(self, key: StepKey, node: Node) -> bool:
        """Whether a step that needs a value reads it from memory rather than compute it."""
        layer, kind, domain = key
        if kind == "row":
            if self.in_memory(node) or (node in self.kept and self.layer[node] < layer):
                return True
            if not self.after_reduction[node]:
                return False
            return self.row_domain[node] != domain or (self.layer[node] < layer and separate_stages(domain))
        if kind == "column":
            return self.column_group.get(node) != (layer, domain) and self._column_step_reads(node)
        return True


def _is_guarded_sum(node: Node) -> bool:
    return node.op == "guard" and node.inputs[1].reduction
