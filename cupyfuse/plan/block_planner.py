"""Plan a graph in blocks of rows: what runs before the blocks, one block, and what follows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..rewrite.reductions import drop_unit_reductions
from ..settings import Settings
from ..trace import Axes, AxisLabels
from .plan import Blocks, Output, Plan, Source
from .prepacking import computed_from, fixed_values, plan_inputs, prepackable, scheduled_for, split_off
from .schedule import (
    Layout,
    NotRowwise,
    base_of,
    choose_products,
    one_pass_variances,
    schedule,
    takes_epilogues,
)
from .schedule.blocks import LEAST_ROWS, ROWS, WHOLE, Cut, Mode, across_rows, cut, modes_of, with_rows
from .schedule.memory import insert_copies

# How many numbers of rows are tried, those of the largest matrices first.
_CANDIDATES = 3
# Matrices smaller by this factor than the largest one with as many rows may be read as a whole.
_SMALLER = 8


class BlockPlanner:
    """Plans a simplified graph in blocks of rows.

    Parameters
    ----------
    name : str
    graph : Graph
        Simplified, its products not chosen yet.
    axes : sequence of Axes or AxisLabels
        The user's axes in the results.
    layouts : dict
        Memory layouts of the arguments.
    settings : Settings
    bound : frozenset of int
        Numbers of the arguments from which values are prepacked.
    """

    def __init__(
        self,
        name: str,
        graph: Graph,
        axes: Sequence[Axes | AxisLabels],
        layouts: dict[int, Layout],
        settings: Settings,
        bound: frozenset[int],
    ):
        self.name, self.graph, self.axes = name, graph, axes
        self.layouts, self.settings, self.bound = layouts, settings, bound
        self.arguments = len(graph.inputs)

    def plan(self, whole: int) -> tuple[Blocks | None, Plan | None]:
        """Choose the rows to cut and plan the blocks.

        Parameters
        ----------
        whole : int
            Bytes of workspace that all rows take at once.

        Returns
        -------
        blocks : Blocks or None
            None if all rows fit once the values that blocks would share are split off.
        prepare : Plan or None
            Prepacks values of the bound arguments.

        Raises
        ------
        NotRowwise
            No matrix's rows can be taken in blocks, or none with less workspace.
        """
        reasons: list[NotRowwise] = []
        best: tuple[Blocks, Plan | None] | None = None
        for anchors in self._anchors():
            try:
                blocks, prepare = self._plan_cut(cut(self.graph, anchors))
            except NotRowwise as reason:
                reasons.append(reason)
                continue
            if blocks is None or blocks.workspace <= 2 * self.settings.max_workspace:
                return blocks, prepare
            if best is None or blocks.workspace < best[0].workspace:
                best = blocks, prepare
        if best is not None and best[0].workspace < whole:
            return best
        raise reasons[0] if reasons else NotRowwise("blocks of rows would take no less")

    def _anchors(self) -> list[set[Node]]:
        """List sets of matrices of as many rows to cut, the largest first: products and their computed operands."""
        products = [n for n in g.topological(self.graph.roots, g.eager_inputs) if n.op == "matmul"]
        found = dict.fromkeys([*products, *(base_of(i) for n in products for i in n.inputs)])
        by_rows: dict[int, list[Node]] = {}
        for node in sorted(found, key=lambda n: -n.nbytes):
            if node.inputs and 1 not in node.shape and node not in self.graph.roots:
                by_rows.setdefault(node.shape[0], []).append(node)
        large = [{n for n in among if _SMALLER * n.nbytes >= among[0].nbytes} for among in by_rows.values()]
        return large[:_CANDIDATES] or [set()]

    def _plan_cut(self, parts: Cut) -> tuple[Blocks | None, Plan | None]:
        """Plan the blocks of one cut, see `plan`."""
        most = self.settings.max_workspace
        results = [self._is_direct(k, parts) for k in range(len(self.graph.outputs))]
        direct = {n for n, found in zip(self.graph.outputs, results, strict=True) if found}
        kept = [n for n in parts.collected if n not in direct]
        rows_kept = sum(n.nbytes for n in kept)
        if rows_kept > most:
            raise NotRowwise(self._reason_to_keep(parts, max(kept, key=lambda n: n.nbytes)))
        graph, modes, common, sources, prepare = self._split_off_shared(parts)

        def plan_of(rows: int) -> Plan:
            return self._plan_block(with_rows(graph, modes, rows), parts, results)

        whole, one = plan_of(parts.rows).workspace, plan_of(1).workspace
        if whole <= most and not parts.summed:
            return None, prepare
        # Addends that no product adds to the sums by itself do not shrink with the rows.
        users = g.users(graph.roots)
        addends = graph.outputs[len(parts.collected) :]
        most += sum(n.nbytes for n in addends if not _accumulating_product(n, users))
        if one > most:
            raise NotRowwise("one row takes more than that")
        most = max(one, most - rows_kept)
        rows = _rows_within(most, parts.rows, whole, one, lambda n: plan_of(n).workspace)
        rest = parts.rows % rows
        before = list(dict.fromkeys(n for n, _ in sources.values() if n.op != "input"))
        blocks = Blocks(
            parts.rows,
            rows,
            plan_of(rows),
            plan_of(rest) if rest else None,
            self._plan_before(before),
            common,
            self._plan_zeros(parts, results),
            self._plan_after(parts, results),
            self.arguments,
            tuple(
                Source(n.argument if n.op == "input" else -1 - before.index(n), mode) for n, mode in sources.values()
            ),
            tuple(self._result_index(n, results) for n in parts.collected),
            tuple(self._result_index(n, results) for n in parts.summed),
            tuple(k for k, n in enumerate(self.graph.outputs) if not results[k]),
        )
        return blocks, prepare

    def _result_index(self, node: Node, results: Sequence[bool]) -> int:
        """Return the index of the direct result that a value of the blocks is; -1 if it is none."""
        pairs = enumerate(zip(self.graph.outputs, results, strict=True))
        return next((k for k, (n, direct) in pairs if direct and n is node), -1)

    def _is_direct(self, number: int, parts: Cut) -> bool:
        """Whether the blocks write a result directly to the memory that the caller gets."""
        node, axes = self.graph.outputs[number], Axes.of(self.axes[number], self.graph.outputs[number].shape)
        if node in self.graph.outputs[:number]:
            return False
        in_order = axes.in_order if axes.folded else axes.labels[:1] == (0,)
        if node in parts.summed:
            return dtypes.compute_dtype(node.dtype) == node.dtype and axes.labels in ((0, 1), (1,))
        return node in parts.collected and node not in parts.transposed and in_order

    def _reason_to_keep(self, parts: Cut, node: Node) -> str:
        """Say why all rows of a collected value have to be kept."""
        if node in self.graph.outputs:
            return "the rows of a result are not along its first dimension"
        users = g.users(self.graph.roots)[node]
        reader = next((n for n in users if n not in parts.collected), users[0])
        if reader.op in ("matmul", "batched_matmul"):
            return f"a {reader.op} takes all rows of what others take row by row"
        return f"{across_rows(reader)} takes all of a value of {node.shape[0]} x {node.shape[1]}"

    # The block
    def _split_off_shared(
        self, parts: Cut
    ) -> tuple[Graph, dict[Node, Mode], Plan | None, dict[int, tuple[Node, Mode]], Plan | None]:
        """Choose the products of a block, and split off what is prepacked or computed once for all blocks.

        Returns the graph of a block and the modes of its values, the plan of the shared values, the sources of the
        block's inputs by number, and the plan that prepacks.
        """
        sources = dict(enumerate(parts.sources))
        block = parts.block
        layouts = {k: self._layout(*source) for k, source in sources.items()}
        bound = frozenset(k for k, (n, mode) in sources.items() if mode == WHOLE and n.argument in self.bound)
        graph = choose_products(block, self.settings, fixed_values(block, bound))
        graph = one_pass_variances(graph) if takes_epilogues(self.settings) else graph
        graph = insert_copies(graph, layouts)
        prepare = None
        if bound:
            fixed = prepackable(graph, fixed_values(graph, bound), self.settings)
            graph, prepacking = split_off(graph, fixed, "prepacked")
            for k, node in enumerate(graph.inputs[len(sources) :]):
                sources[len(sources)] = (replace(node, argument=self.arguments + k), WHOLE)
            prepacking = _renumbered(prepacking, lambda n: sources[n.argument][0].argument)
            prepare = plan_inputs(f"{self.name}: prepacked once", prepacking, self.layouts, self.settings)
        given = {n: sources[n.argument][1] for n in graph.inputs}
        addends = len(parts.summed)
        modes_of(graph, given, addends, parts.rows)  # raises NotRowwise before shared values are planned
        whole = {n for n, mode in given.items() if mode == WHOLE}
        shared = computed_from(graph, lambda n: n in whole)
        graph, common = split_off(graph, shared, "common", cheap=False)
        modes = modes_of(graph, {**given, **dict.fromkeys(graph.inputs[len(sources) :], WHOLE)}, addends, parts.rows)
        planned = plan_inputs(f"{self.name}: for all blocks", common, layouts, self.settings)
        if any(m != WHOLE and n.op == "input" and not self._layout(n, m).foldable for n, m in sources.values()):
            raise NotRowwise("the rows of an argument have several strides")
        return graph, modes, planned, sources, prepare

    def _layout(self, node: Node, mode: Mode) -> Layout:
        """Return the layout of the part of an input that a block takes."""
        layout = self.layouts.get(node.argument, Layout()) if node.op == "input" else Layout()
        return layout if mode in (WHOLE, ROWS) or node.shape[0] == 1 else replace(layout, contiguous=False)

    def _plan_block(self, graph: Graph, parts: Cut, results: Sequence[bool]) -> Plan:
        """Plan a block; it adds its addends to the sums, which are further arguments."""
        count = len(parts.collected)
        graph = g.rewrite(graph, drop_unit_reductions)  # of blocks of one row
        addends = graph.outputs[count:]
        users = g.users(graph.roots)
        sums, effects = [], []
        for k, addend in enumerate(addends):
            number = len(graph.inputs) + k
            sums.append(g.argument(number, f"sum{k}", addend.shape, addend.dtype))
            effects.append((number, _add_to_sum(sums[k], addend, users)))
        graph = Graph([*graph.inputs, *sums], graph.outputs[:count], effects)
        layouts = {k: self._layout(*source) for k, source in enumerate(parts.sources)}
        scheduled = scheduled_for(graph, layouts, self.settings)
        outputs = []
        for node, source in zip(scheduled.graph.outputs, parts.collected, strict=True):
            number = self._result_index(source, results)
            outputs.append(Output(node, Axes.of((0, 1) if number < 0 else self.axes[number], node.shape)))
        return Plan(self.name, self.settings, scheduled.graph, scheduled, tuple(outputs), (), ())

    # Before and after
    def _plan_zeros(self, parts: Cut, results: Sequence[bool]) -> Plan | None:
        """Plan the zeros that the sums start from; None without sums."""
        if not parts.summed:
            return None
        zeros = [g.broadcast(g.cast(g.const(0.0), dtypes.compute_dtype(n.dtype)), n.shape) for n in parts.summed]
        scheduled = schedule(Graph([], zeros))
        outputs = []
        for node, source in zip(scheduled.graph.outputs, parts.summed, strict=True):
            number = self._result_index(source, results)
            outputs.append(Output(node, Axes.of((0, 1) if number < 0 else self.axes[number], node.shape)))
        return Plan(f"{self.name}: zeros", self.settings, scheduled.graph, scheduled, tuple(outputs), (), ())

    def _plan_before(self, values: list[Node]) -> Plan | None:
        """Plan the values that blocks cut but do not compute; None without such values."""
        graph = choose_products(Graph(self.graph.inputs, values), self.settings, set())
        return plan_inputs(f"{self.name}: before the blocks", _with_used_inputs(graph), self.layouts, self.settings)

    def _plan_after(self, parts: Cut, results: Sequence[bool]) -> Plan | None:
        """Plan the results that need all blocks from the function's arguments, `collected` and `summed`."""
        inputs = list(self.graph.inputs)
        done: dict[Node, Node] = {}
        for node in (*parts.collected, *parts.summed):
            transposed = node in parts.transposed
            dtype = node.dtype if node in parts.collected else dtypes.compute_dtype(node.dtype)
            shape = (node.shape[1], node.shape[0]) if transposed else node.shape
            inputs.append(g.argument(len(inputs), "", shape, dtype))
            done[node] = g.cast(g.transpose(inputs[-1]) if transposed else inputs[-1], node.dtype)
        all_results = zip(self.graph.outputs, self.axes, results, strict=True)
        kept = [(n, axes) for n, axes, direct in all_results if not direct]
        if not kept:
            return None
        for node in g.topological([n for n, _ in kept], lambda n: () if n in done else n.inputs):
            if node not in done:
                done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
        graph = _with_used_inputs(Graph(inputs, [done[n] for n, _ in kept]))
        chosen = choose_products(graph, self.settings, set())
        scheduled = scheduled_for(chosen, self.layouts, self.settings)
        pairs = zip(scheduled.graph.outputs, kept, strict=True)
        outputs = [Output(n, Axes.of(axes, n.shape)) for n, (_, axes) in pairs]
        return Plan(f"{self.name}: after the blocks", self.settings, scheduled.graph, scheduled, tuple(outputs), (), ())


def _rows_within(most: int, total: int, whole: int, one: int, workspace: Callable[[int], int]) -> int:
    """Choose the rows of a block, so that blocks of nearly equal size fit in `most` bytes.

    `whole` and `one` are the bytes that all `total` rows and a single one take, `workspace(rows)` those of a block.
    """
    rows = max(1, min(total, 1 + (most - one) // max(1, (whole - one) // max(1, total - 1))))
    if rows >= LEAST_ROWS:
        rows -= rows % LEAST_ROWS
        even = -(-total // -(-total // rows))
        rows = min(rows, -(-even // LEAST_ROWS) * LEAST_ROWS)
    while rows > 1 and workspace(rows) > most:
        rows -= -(-rows // 16)  # not linear in the rows: splits are padded to groups of eight
    return rows


def _accumulating_product(addend: Node, users: dict[Node, list[Node]]) -> Node | None:
    """Return the product that can be computed into the sum: one by cuBLAS that only the addend reads; else None."""
    product = addend.inputs[0] if addend.op == "cast" else addend
    alone = not users[product] or users[product] == [addend]
    return product if product.op == "matmul" and alone else None


def _add_to_sum(total: Node, addend: Node, users: dict[Node, list[Node]]) -> Node:
    """Add an addend to a sum, by the product itself where it can."""
    product = _accumulating_product(addend, users)
    if product is None:
        return g.pointwise("add", total, addend)
    how = f"{product.how}, added to the sum over the blocks"
    return Node("accumulate", (*product.inputs, total), total.shape, total.dtype, how=how)


def _with_used_inputs(graph: Graph) -> Graph:
    """Drop the inputs that no output depends on."""
    used = set(g.topological(graph.outputs))
    return Graph([n for n in graph.inputs if n in used], graph.outputs)


def _renumbered(graph: Graph, number: Callable[[Node], int]) -> Graph:
    """Give each input of a graph the argument number `number(input)`."""
    done = {n: replace(n, argument=number(n)) for n in graph.inputs}
    for node in g.topological(graph.outputs):
        if node not in done:
            done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
    return Graph([done[n] for n in graph.inputs], [done[n] for n in graph.outputs])
