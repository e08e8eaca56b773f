"""Plan a graph that `schedule.cut` cuts into blocks of rows: the plan of a block, and those before and after it.

What is said of rows holds of columns, too, where they are the `Cut.axis`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from ..ir.rebuild import rebuild
from ..rewrite.reductions import drop_unit_reductions
from ..settings import Settings
from ..trace import Axes, AxisLabels
from .block_sums import accumulating_product, add_to_sum
from .plan import Blocks, Output, Plan, Source
from .prepacking import (
    computed_from,
    fixed_values,
    plan_inputs,
    prepackable,
    scheduled_for,
    split_off,
    with_used_inputs,
)
from .report import quantity
from .schedule import (
    Layout,
    NotRowwise,
    choose_products,
    one_pass_product_variances,
    schedule,
    takes_epilogues,
)
from .schedule.cut import (
    COLUMNS,
    LEAST_ROWS,
    ROWS,
    WHOLE,
    Cut,
    Mode,
    Part,
    across_rows,
    modes_of,
    rows_within,
    with_rows,
)
from .schedule.memory import base_of, insert_copies, is_reshaped_argument

# Blocks leave room for what they share within the limit, unless they take more than so many times as long as blocks
# with that on top.
_MOST_TIME = 2


@dataclass(frozen=True)
class BlockParts:
    """The graph of a block, and what is computed apart from it.

    Attributes
    ----------
    graph : Graph
        Of a block that has all rows.
    modes : dict
        What a block has of each value of the graph.
    sources : list of (Node, Mode)
        What the inputs of the graph hold, before the common values: parts of arguments, of prepacked values, and of
        values that are computed before the blocks.
    prepare : Plan or None
        Prepacks values of the bound arguments.
    common : Plan or None
        For the values that all blocks share, which are the last inputs of the graph.
    """

    graph: Graph
    modes: dict[Node, Mode]
    sources: list[Part]
    prepare: Plan | None
    common: Plan | None


class BlockPlanner:
    """Plans cuts of a simplified graph into blocks of rows.

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

    def plan(self, parts: Cut, at_once: int) -> tuple[Blocks | None, Plan | None]:
        """Plan the blocks of one cut.

        Parameters
        ----------
        parts : Cut
        at_once : int
            Bytes of workspace that a plan without blocks takes.

        Returns
        -------
        blocks : Blocks or None
            None if all rows fit once the values that blocks would share are split off.
        prepare : Plan or None
            Prepacks values of the bound arguments.

        Raises
        ------
        NotRowwise
            The cut is of no use; the message says why.
        """
        direct = [self._is_direct(k, parts) for k in range(len(self.graph.outputs))]
        kept = self._bytes_kept(parts, direct)
        block = self._split_block(parts)

        def plan_of(rows: int) -> Plan:
            return self._plan_block(with_rows(block.graph, block.modes, rows), parts, direct)

        def workspace(rows: int) -> int:
            """Return the bytes that a block takes, or the last one, whose products may be computed in another way."""
            rest = parts.rows % rows
            return max(plan_of(rows).workspace, plan_of(rest).workspace if rest else 0)

        shared = sum(o.node.nbytes for o in block.common.outputs) if block.common is not None else 0
        whole = workspace(parts.rows)
        # One block that adds to sums takes more than a plan without blocks, which writes them.
        if min(whole, at_once - shared) <= self.settings.max_workspace:
            return None, block.prepare
        zeros = self._plan_zeros(parts, direct)
        summed = tuple(self._result_index(n, direct) for n in parts.summed)
        totals = zeros.outputs if zeros is not None else ()
        fixed = sum(o.node.nbytes for k, o in zip(summed, totals, strict=True) if k is None)
        computed = [n for n in parts.before if not is_reshaped_argument(n, self.layouts)]
        fixed += sum(n.nbytes for n in computed) + shared
        before, after = self._plan_before(computed), self._plan_after(parts, direct, computed)

        def blocks_of(rows: int) -> Blocks:
            rest = parts.rows % rows
            return Blocks(
                total=parts.rows,
                rows=rows,
                transposed=parts.axis == COLUMNS,
                plan=plan_of(rows),
                last=plan_of(rest) if rest else None,
                before=before,
                common=block.common,
                zeros=zeros,
                after=after,
                arguments=self.arguments,
                sources=tuple(self._source(n, mode, computed) for n, mode in block.sources),
                collected=tuple(self._result_index(n, direct) for n in parts.collected),
                summed=summed,
                following=tuple(k for k in range(len(self.graph.outputs)) if not direct[k]),
            )

        choices = self._choose_rows(block.graph, parts, kept, fixed, whole, workspace)
        within, *beyond = (blocks_of(rows) for rows in choices)
        too_slow = beyond and within.estimated_time > _MOST_TIME * beyond[0].estimated_time
        return beyond[0] if too_slow else within, block.prepare

    def _bytes_kept(self, parts: Cut, direct: Sequence[bool]) -> int:
        """Return the bytes of the values of which all rows are kept for what follows the blocks.

        Raises
        ------
        NotRowwise
            They exceed the workspace.
        """
        results = {self.graph.outputs[k] for k in range(len(direct)) if direct[k]}
        kept = [n for n in parts.collected if n not in results]
        found = sum(n.nbytes for n in kept)
        if found > self.settings.max_workspace:
            raise NotRowwise(self._reason_to_keep(parts, max(kept, key=lambda n: n.nbytes)))
        return found

    def _choose_rows(
        self, block: Graph, parts: Cut, kept: int, fixed: int, whole: int, workspace: Callable[[int], int]
    ) -> list[int]:
        """Choose the rows of a block, so that it fits beside the `kept` bytes; NotRowwise if one row does not.

        `fixed` are the bytes of sums, and of what is computed before the blocks; `block` is the graph of one block that
        has all rows, which take `whole` bytes, and `workspace(rows)` returns the bytes that a block of some rows takes.

        Returns
        -------
        The rows that fit beside the `fixed` bytes within the limit; if these are fewer than `LEAST_ROWS`, also those
        that fit if the `fixed` bytes come on top. Only the latter if not even one row fits beside them.
        """
        # The `fixed` bytes, and addends that cuBLAS does not accumulate, are as large for one row as for all.
        users = g.users(block.roots)
        addends = block.outputs[len(parts.collected) :]
        limit, one = self.settings.max_workspace, workspace(1)
        beyond = limit + fixed + sum(n.nbytes for n in addends if not accumulating_product(n, users))

        def rows_in(most: int) -> int:
            return rows_within(most - kept - fixed, parts.rows, whole, one, workspace)

        least = one + kept + fixed
        if least > beyond:
            what = "one row takes more than that"
            raise NotRowwise(f"{what}, beside the {quantity(kept, 'B')} kept of all rows" if kept else what)
        if least > limit:
            return [rows_in(beyond)]
        rows = rows_in(limit)
        return [rows] if rows >= LEAST_ROWS or beyond == limit else [rows, rows_in(beyond)]

    def _result_index(self, node: Node, direct: Sequence[bool]) -> int | None:
        """Return the index of the result that blocks write directly, if a value is one; else None."""
        return next((k for k, output in enumerate(self.graph.outputs) if direct[k] and output is node), None)

    def _outputs(self, nodes: Sequence[Node], values: Sequence[Node], direct: Sequence[bool]) -> tuple[Output, ...]:
        """Return the nodes of a plan as its outputs: those that are direct results of `values` with the user's axes."""
        found = []
        for node, value in zip(nodes, values, strict=True):
            k = self._result_index(value, direct)
            found.append(Output(node, Axes.of((0, 1) if k is None else self.axes[k], node.shape)))
        return tuple(found)

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

    def _source(self, node: Node, mode: Mode, computed: list[Node]) -> Source:
        """Return where an input of a block comes from; `computed` are the values that precede the blocks."""
        if node in computed:
            return Source(computed.index(node), mode, before=True)
        return Source(base_of(node).argument, mode, shape=() if node.op == "input" else node.shape)

    # The block
    def _split_block(self, parts: Cut) -> BlockParts:
        """Choose the products of a block, and split off what is prepacked or computed once for all blocks."""
        sources = parts.sources
        layouts = {k: self._layout(*source) for k, source in enumerate(sources)}
        bound = frozenset(k for k, (n, mode) in enumerate(sources) if mode == WHOLE and n.argument in self.bound)
        whole = {n for n, (_, mode) in zip(parts.block.inputs, sources, strict=True) if mode == WHOLE}
        graph = choose_products(parts.block, self.settings, fixed_values(parts.block, bound), whole)
        graph = one_pass_product_variances(graph) if takes_epilogues(self.settings) else graph
        graph = insert_copies(graph, layouts)
        graph, sources, prepare = self._prepack(graph, sources, bound)
        graph, modes, common = self._split_common(graph, sources, layouts, parts)
        if any(m != WHOLE and n.op == "input" and not self._layout(n, m).foldable for n, m in sources):
            raise NotRowwise("the rows of an argument have several strides")
        return BlockParts(graph, modes, sources, prepare, common)

    def _prepack(
        self, graph: Graph, sources: list[Part], bound: frozenset[int]
    ) -> tuple[Graph, list[Part], Plan | None]:
        """Split off the values of a block that depend on its `bound` inputs alone.

        Returns the rest of the block, its sources with the prepacked values behind them, and the plan that prepacks.
        """
        if not bound:
            return graph, sources, None
        fixed = prepackable(graph, fixed_values(graph, bound), self.settings)
        rest, prepacking = split_off(graph, fixed, "prepacked")
        # Plans number the function's arguments, and blocks their own inputs.
        prepacking = _renumbered(prepacking, lambda n: sources[n.argument][0].argument)
        prepare = plan_inputs(f"{self.name}: prepacked once", prepacking, self.layouts, self.settings)
        prepacked = rest.inputs[len(sources) :]
        added = [(replace(n, argument=self.arguments + k), WHOLE) for k, n in enumerate(prepacked)]
        return rest, [*sources, *added], prepare

    def _split_common(
        self, graph: Graph, sources: list[Part], layouts: dict[int, Layout], parts: Cut
    ) -> tuple[Graph, dict[Node, Mode], Plan | None]:
        """Split off the values of a block that depend on no part of an input, but on whole ones alone.

        Returns the rest of the block, the modes of its values, and the plan of the common values.
        """
        given = {n: sources[n.argument][1] for n in graph.inputs}
        addends = len(parts.summed)
        modes_of(graph, given, addends, parts.rows)  # raises NotRowwise before common values are planned
        whole = {n for n, mode in given.items() if mode == WHOLE}
        rest, common = split_off(graph, computed_from(graph, lambda n: n in whole), "common", cheap=False)
        given.update(dict.fromkeys(rest.inputs[len(sources) :], WHOLE))
        modes = modes_of(rest, given, addends, parts.rows)
        return rest, modes, plan_inputs(f"{self.name}: for all blocks", common, layouts, self.settings)

    def _layout(self, node: Node, mode: Mode) -> Layout:
        """Return the layout of the part of an input that a block takes."""
        layout = self.layouts.get(node.argument, Layout()) if node.op == "input" else Layout()
        return layout if mode in (WHOLE, ROWS) or node.shape[0] == 1 else replace(layout, contiguous=False)

    def _plan_block(self, graph: Graph, parts: Cut, direct: Sequence[bool]) -> Plan:
        """Plan a block; it adds its addends to the sums, which are further arguments."""
        count = len(parts.collected)
        graph = rebuild(graph, drop_unit_reductions)  # of blocks of one row
        addends = graph.outputs[count:]
        users = g.users(graph.roots)
        sums, effects = [], []
        for k, addend in enumerate(addends):
            number = len(graph.inputs) + k
            sums.append(g.argument(number, f"sum{k}", addend.shape, addend.dtype))
            effects.append((number, add_to_sum(sums[k], addend, users, self.settings)))
        graph = Graph([*graph.inputs, *sums], graph.outputs[:count], effects)
        layouts = {k: self._layout(*source) for k, source in enumerate(parts.sources)}
        scheduled = scheduled_for(graph, layouts, self.settings)
        outputs = self._outputs(scheduled.graph.outputs, parts.collected, direct)
        return Plan(self.name, self.settings, scheduled.graph, scheduled, outputs, (), ())

    # Before and after
    def _plan_zeros(self, parts: Cut, direct: Sequence[bool]) -> Plan | None:
        """Plan the zeros that the sums start from; None without sums."""
        if not parts.summed:
            return None
        zeros = [g.broadcast(g.cast(g.const(0.0), dtypes.compute_dtype(n.dtype)), n.shape) for n in parts.summed]
        scheduled = schedule(Graph([], zeros))
        outputs = self._outputs(scheduled.graph.outputs, parts.summed, direct)
        return Plan(f"{self.name}: zeros", self.settings, scheduled.graph, scheduled, outputs, (), ())

    def _plan_before(self, values: list[Node]) -> Plan | None:
        """Plan the values computed before the first block; None without any."""
        graph = choose_products(Graph(self.graph.inputs, values), self.settings, set())
        return plan_inputs(f"{self.name}: before the blocks", with_used_inputs(graph), self.layouts, self.settings)

    def _plan_after(self, parts: Cut, direct: Sequence[bool], before: list[Node]) -> Plan | None:
        """Plan the results that need all blocks; the arguments are those of `Blocks.after`, after the plan `before`."""
        following = [k for k, written in enumerate(direct) if not written]
        if not following:
            return None
        inputs = list(self.graph.inputs)
        done: dict[Node, Node] = {}
        for node in (*parts.collected, *parts.summed):
            transposed = node in parts.transposed
            dtype = node.dtype if node in parts.collected else dtypes.compute_dtype(node.dtype)
            shape = (node.shape[1], node.shape[0]) if transposed else node.shape
            inputs.append(g.argument(len(inputs), "", shape, dtype))
            done[node] = g.cast(g.transpose(inputs[-1]) if transposed else inputs[-1], node.dtype)
        for node in before:
            inputs.append(g.argument(len(inputs), "", node.shape, node.dtype))
            done.setdefault(node, inputs[-1])
        results = [self.graph.outputs[k] for k in following]
        for node in g.topological(results, lambda n: () if n in done else n.inputs):
            if node not in done:
                done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
        graph = with_used_inputs(Graph(inputs, [done[n] for n in results]))
        chosen = choose_products(graph, self.settings, set())
        scheduled = scheduled_for(chosen, self.layouts, self.settings)
        pairs = zip(scheduled.graph.outputs, following, strict=True)
        outputs = tuple(Output(n, Axes.of(self.axes[k], n.shape)) for n, k in pairs)
        return Plan(f"{self.name}: after the blocks", self.settings, scheduled.graph, scheduled, outputs, (), ())


def _renumbered(graph: Graph, number: Callable[[Node], int]) -> Graph:
    """Give each input of a graph the argument number `number(input)`."""
    done = {n: replace(n, argument=number(n)) for n in graph.inputs}
    for node in g.topological(graph.outputs):
        if node not in done:
            done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
    return Graph([done[n] for n in graph.inputs], [done[n] for n in graph.outputs])
