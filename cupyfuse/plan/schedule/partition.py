"""Partition of a graph into steps: place each value in a layer and a domain, then build the steps."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Set
from itertools import count
from typing import NamedTuple

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Graph, Node, Shape
from .memory import COPIES, base_of, is_exact, is_own_rounding, source_of_copies
from .steps import Step, fuse_column_steps, fuse_scalar_steps, fuse_splits, separate_stages, step_of

# The kind of step of each operator that is a step of its own.
_SINGLE_STEPS = {
    **dict.fromkeys(("matmul", "batched_matmul", "split_matmul", "accumulate"), "Gemm"),
    "split": "Split",
    **dict.fromkeys(COPIES, "Copy"),
    **dict.fromkeys(g.SCANS, "Scan"),
    "library": "Library",
}
_IN_MEMORY = {"input", *g.VIEWS, "factor", *_SINGLE_STEPS}

StepKey = tuple[int, str, Shape]  # layer, kind ("row", "column" or an operator) and domain of a step


class ColumnGroup(NamedTuple):
    """The column step that computes a value, by its layer and its domain."""

    layer: int
    domain: Shape


class Scheduler:
    """The partition of one graph.

    A layer is a position in the order of steps: a step reads only what steps of lower layers have written. A domain is
    the rows and columns that a step runs over. `_place_all` gives each value both; `run` builds the steps from the
    results backwards.

    Parameters
    ----------
    graph : Graph
    kept : set of Node
        Values that one step stores, and all later ones read; others are computed again wherever they are needed.
    round_stored : bool
        Whether 16-bit values of row and column steps are stored in their own dtype, rounded, not in the wider one.
        Results of reductions, and values smaller than the step's domain, such as a mean, stay wide: those of one
        function, such as softmax, need not fit, and belong together.
    """

    def __init__(self, graph: Graph, kept: Set[Node] = frozenset(), round_stored: bool = False):
        self.graph = graph
        self.kept = kept
        self.round_stored = round_stored
        self.live_set = set(g.topological(graph.roots, g.eager_inputs))  # without values that only guards read
        self.read_back: set[Node] = set()  # stored values that column steps read rather than recompute
        self._place_all()
        self.read_back = self._worth_reading_back()
        if self.read_back:
            self._place_all()

    def _place_all(self) -> None:
        """Choose the layer and the step of every value."""
        self.after_reduction: dict[Node, bool] = {}  # whether a value depends on a reduction of its own step
        self.layer: dict[Node, int] = {}
        self.row_domain: dict[Node, Shape] = {}  # the domain of the row program that computes a value
        self.column_group: dict[Node, ColumnGroup] = {}
        self.column_layer: dict[Node, int] = {}  # the last layer that a column step reads to compute a value
        self.kept_layer: dict[Node, int] = {}  # the last layer of the kept values that a row step computes with a value
        for node in g.topological(self.graph.roots):
            self._place(node)
            reads = self._column_step_reads(node)
            below = (self.column_layer[i] for i in node.inputs)
            self.column_layer[node] = self.layer[node] if reads else max(below, default=0)

    # Where each value is computed
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
        elif node.op in _SINGLE_STEPS:
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
            return not g.is_product(node) or node in self.live_set
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
        return g.is_leaf(node) or (node.pointwise and self.column_layer[node] == 0 and not self.after_reduction[node])

    def frontier(self, operand: Node) -> Iterator[Node]:
        """Yield the values that a column step reads to compute its operand; column steps cannot reduce along rows."""

        def inward(node: Node) -> Iterable[Node]:
            return () if self._column_step_reads(node) else node.inputs

        for node in g.topological([operand], inward):
            if self._column_step_reads(node) and node.op != "const":
                yield node

    def _column_step_reads(self, node: Node) -> bool:
        """Whether a column step reads a value from memory rather than recompute it; also true of constants."""
        if self.in_memory(node) or node.op == "const" or node in self.kept:
            return True
        return node.reduction or (self.after_reduction[node] and node.shape[1] == 1) or node in self.read_back

    def _worth_reading_back(self) -> set[Node]:
        """Choose stored values that column steps read, since they take fewer bytes than what they are computed from.

        16-bit values are recomputed: stored ones are rounded.
        """
        stored = {base_of(n) for n in self.graph.roots}
        stored |= {base_of(i) for n in self.live_set if n.op in _SINGLE_STEPS for i in n.inputs}
        reduced: dict[ColumnGroup, dict[Node, None]] = {}  # the operands of each group's reductions
        for node, group in self.column_group.items():
            if node.reduction and node in self.live_set:
                reduced.setdefault(group, {})[node.inputs[0]] = None
        found: set[Node] = set()
        for operands in reduced.values():
            if all(n in stored and n.pointwise and dtypes.compute_dtype(n.dtype) == n.dtype for n in operands):
                sources = {f for n in operands for f in self.frontier(n)}
                if sum(n.nbytes for n in operands) < sum(n.nbytes for n in sources):
                    found.update(operands)
        return found

    # Building the steps, from the results backwards
    def home_step(self, node: Node) -> StepKey:
        """Return the first step that can compute a value and store it; factors are written with their product."""
        node = node.inputs[0] if node.op == "factor" else node
        if node.op in _SINGLE_STEPS:
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

    def run(self) -> list[Step]:
        """Return the steps in the order of their launches."""
        return self._in_order(self._build())

    def run_within(self, most_flops: float) -> list[Step] | None:
        """Return the steps in the order of their launches; None if they have more than `most_flops` FLOPs."""
        steps: list[tuple[int, Step]] = []
        for layer, step in self._build():
            steps.append((layer, step))
            most_flops -= step.flops
            if most_flops < 0:
                return None
        return self._in_order(steps)

    def _in_order(self, steps: Iterable[tuple[int, Step]]) -> list[Step]:
        """Sort steps by layer, and fuse those that need no launch of their own."""
        return fuse_column_steps(
            fuse_scalar_steps(fuse_splits([step for _, step in sorted(steps, key=lambda s: s[0])]))
        )

    def _build(self) -> Iterator[tuple[int, Step]]:
        """Yield each step with its layer, the last one first."""
        self.required: dict[StepKey, dict[Node, None]] = {}  # values still to compute, by step
        self.queue: list[tuple[int, bool, Shape, int, StepKey]] = []  # a heap of the steps still to build
        self.sequence = count()  # orders steps of one layer, kind and domain as they were required
        self.rounded: set[Node] = set()  # stored in their own dtype, not the wider one that they are computed in
        self.stored: set[Node] = set()  # values that some step writes to memory
        self.factors: dict[Node, dict[Node, None]] = {}  # factors to write, by their product
        for root in self.graph.roots:
            self._require(root)
            self._round(base_of(root))
        while self.queue:
            *_, key = heapq.heappop(self.queue)
            roots = list(self.required.pop(key))
            if key[1] == "row":
                built = [self._row_step(roots, key)]
            elif key[1] == "column":
                built = [self._column_step(roots, key)]
            elif key[1] == "library":
                built = [self._library_step(nodes) for nodes in _by_call(roots)]
            else:
                built = [self._single_step(node) for node in roots]
            for step in built:
                yield key[0], step

    def _require(self, node: Node) -> None:
        """Let a step compute a value and store it, unless it is in memory from the start."""
        node = base_of(node)
        if node.op in ("input", "const"):
            return
        self.stored.add(node)
        if node.op == "factor":
            self.factors.setdefault(node.inputs[0], {})[node] = None
            node = node.inputs[0]
        key = layer, kind, (rows, cols) = self.home_step(node)
        per_row_or_column = node.reduction or node.shape != (rows, cols)
        if self.round_stored and kind in ("row", "column") and not per_row_or_column:
            self._round(node)
        if key not in self.required:
            self.required[key] = {}
            heapq.heappush(self.queue, (-layer, kind != "row", (-rows, -cols), next(self.sequence), key))
        self.required[key][node] = None

    def _row_step(self, roots: list[Node], key: StepKey) -> Step:
        """Build the row program that computes and stores `roots`."""
        layer, _, domain = key

        def read(node: Node) -> bool:
            return self.reads(key, node) or (node in self.stored and self.layer[node] < layer)

        nodes, inputs, repair_inputs = self._collect(roots, read)
        if not any(n.reduction for n in nodes):
            # All reductions are in memory: the domain is that of the values left.
            domain = g.broadcast_shapes(*(n.shape for n in nodes))
        return step_of("RowProgram", domain, nodes, inputs, roots, repair_inputs)

    def _column_step(self, roots: list[Node], key: StepKey) -> Step:
        """Build the step of the column reductions `roots`, and of the values computed along with them."""
        nodes, inputs, repair_inputs = self._collect(roots, lambda node: self.reads(key, node))
        return step_of("ColumnStats", key[2], nodes, inputs, roots, repair_inputs)

    def _collect(self, roots: list[Node], stop: Callable[[Node], bool]) -> tuple[list[Node], list[Node], list[Node]]:
        """Return the nodes of a step that computes `roots`, the values that it reads, and those that only guards read.

        `stop(node)` tells whether the step reads a value instead of computing it. What is read is required.
        """
        needed = list(roots)
        while True:
            walk = g.topological(needed, lambda n: () if stop(n) else g.eager_inputs(n))
            order = [n for n in walk if n.op != "const"]
            inside = [n for n in order if not stop(n)]
            outside = [n for n in order if stop(n)]
            here = set(order)
            repair_inputs = dict.fromkeys(r for n in inside for r in self.guard_only_reads(n, here) if r not in here)
            computed_here = [r for r in repair_inputs if not stop(r)]
            if not computed_here:
                break
            needed += computed_here
        for node in (*outside, *repair_inputs):
            self._require(node)
        return inside, outside, list(repair_inputs)

    def _single_step(self, node: Node) -> Step:
        """Build the step of one matrix product, split, copy or scan."""
        for i in node.inputs:
            self._require(i)
            if node.op in ("matmul", "batched_matmul", "accumulate", "split", "put"):
                self._round(base_of(i))
        self.rounded.update(i for i in node.inputs if i.op == "split")
        # The operands themselves are read only for elements that the split cannot hold.
        repair_inputs = node.inputs[2:] if node.op == "split_matmul" else ()
        inputs = [i for i in node.inputs if i not in repair_inputs]
        domain = node.inputs[0].shape if node.op == "split" else node.shape
        outputs = [node, *self.factors.get(node, ())]
        return step_of(_SINGLE_STEPS[node.op], domain, [node], inputs, outputs, list(repair_inputs))

    def _library_step(self, nodes: list[Node]) -> Step:
        """Build the step of one library call; `nodes` are the results of it that are read."""
        for i in nodes[0].inputs:
            self._require(i)
            self._round(base_of(i))
        # 16-bit floats stay wide here as in kernels, so that what sorting or choosing returns equals an operand.
        self.rounded.update(n for n in nodes if not dtypes.is_float(n.dtype))
        return step_of("Library", nodes[0].shape, nodes, list(nodes[0].inputs), nodes, [])

    def _round(self, node: Node) -> None:
        """Mark a value to be stored in its own dtype, as results and operands of products are."""
        self.rounded.add(source_of_copies(node))

    def storage(self, steps: list[Step]) -> dict[Node, str]:
        """Return the dtype of each value in memory: its own if rounded or exact, else the one it is computed in."""
        found = {node: node.dtype for node in self.graph.inputs}
        for step in steps:
            for node in (*step.outputs, *(base_of(i) for i in (*step.inputs, *step.repair_inputs))):
                if node.op in COPIES:
                    found[node] = found[base_of(node.inputs[0])]
                else:
                    own = node in self.rounded or is_exact(node)
                    found[node] = node.dtype if own else dtypes.compute_dtype(node.dtype)
        return found

    def values_rounded_for_some(self, steps: list[Step]) -> set[Node]:
        """Find 16-bit values that some steps read from memory, where they are rounded, and others recompute."""
        rounded = {n for n in self.rounded if dtypes.compute_dtype(n.dtype) != n.dtype and not is_own_rounding(n)}
        if not rounded:
            return rounded
        read: set[Node] = set()
        computed: set[Node] = set()
        for step in steps:
            if step.kind in ("RowProgram", "MatVec", "ColumnStats"):
                read.update(source_of_copies(base_of(i)) for i in (*step.inputs, *step.repair_inputs))
                computed.update(i for n in step.nodes for i in n.inputs if i in step.nodes)
        return rounded & read & computed


def _is_guarded_sum(node: Node) -> bool:
    return node.op == "guard" and node.inputs[1].reduction


def _by_call(nodes: list[Node]) -> list[list[Node]]:
    """Group the results of the same library call on the same operands."""
    groups: dict[object, list[Node]] = {}
    for node in nodes:
        groups.setdefault((node.call, node.inputs), []).append(node)
    return list(groups.values())
