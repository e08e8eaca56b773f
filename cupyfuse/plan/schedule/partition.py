"""Partition of a graph into steps, from the placement of its values."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import count

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Graph, Node, Shape
from .memory import COPIES, base_of, is_exact, is_own_rounding, source_of_copies
from .placement import SINGLE_STEPS, Placement, StepKey
from .steps import Step, fuse_column_steps, fuse_scalar_steps, fuse_splits, step_of


class Scheduler:
    """The partition of one graph: builds the steps from the results backwards.

    Parameters
    ----------
    graph : Graph
    kept : set of Node
        Values that one step stores, see `Placement`.
    round_stored : bool
        Whether 16-bit values of row and column steps are stored in their own dtype, rounded, not in the wider one.
        Results of reductions, and values smaller than the step's domain, such as a mean, stay wide: those of one
        function, such as softmax, need not fit, and belong together.
    """

    def __init__(self, graph: Graph, kept: Set[Node] = frozenset(), round_stored: bool = False):
        self.graph = graph
        self.kept = kept
        self.round_stored = round_stored
        self.placement = Placement(graph, kept)

    def storing(self, kept: Set[Node]) -> Scheduler:
        """Return the partition of the same graph with other values stored."""
        return Scheduler(self.graph, kept, self.round_stored)

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
        key = layer, kind, (rows, cols) = self.placement.home_step(node)
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
            return self.placement.reads(key, node) or (node in self.stored and self.placement.layer[node] < layer)

        nodes, inputs, repair_inputs = self._collect(roots, read)
        if not any(n.reduction for n in nodes):
            # All reductions are in memory: the domain is that of the values left.
            domain = g.broadcast_shapes(*(n.shape for n in nodes))
        return step_of("RowProgram", domain, nodes, inputs, roots, repair_inputs)

    def _column_step(self, roots: list[Node], key: StepKey) -> Step:
        """Build the step of the column reductions `roots`, and of the values computed along with them."""
        nodes, inputs, repair_inputs = self._collect(roots, lambda node: self.placement.reads(key, node))
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
            repair_inputs = dict.fromkeys(
                r for n in inside for r in self.placement.guard_only_reads(n, here) if r not in here
            )
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
        if node.op == "concat":
            self.rounded.update((node, *node.inputs))
        # The operands themselves are read only for elements that the split cannot hold.
        repair_inputs = node.inputs[2:] if node.op == "split_matmul" else ()
        inputs = [i for i in node.inputs if i not in repair_inputs]
        domain = node.inputs[0].shape if node.op == "split" else node.shape
        outputs = [node, *self.factors.get(node, ())]
        return step_of(SINGLE_STEPS[node.op], domain, [node], inputs, outputs, list(repair_inputs))

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


def _by_call(nodes: list[Node]) -> list[list[Node]]:
    """Group the results of the same library call on the same operands."""
    groups: dict[object, list[Node]] = {}
    for node in nodes:
        groups.setdefault((node.call, node.inputs), []).append(node)
    return list(groups.values())
