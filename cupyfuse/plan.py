"""Plans: what will run for given shapes and dtypes, and what was done to get there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import devices, dtypes
from . import graph as g
from .graph import Graph, Node
from .rewrite import Note, simplify
from .schedule import Layout, NotByRows, Schedule, Step, choose_products, resolve, rows_apart, schedule, with_rows
from .schedule.blocks import LEAST_ROWS
from .settings import Settings
from .trace import Axes, Call


@dataclass(frozen=True)
class Output:
    """A result of the function: which value, and how the user's axes lie in it."""

    node: Node
    axes: Axes

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(1 if a is None else self.node.shape[a] for a in self.axes)

    @property
    def dtype(self) -> str:
        return self.node.dtype

    @property
    def direct(self) -> bool:
        """Whether the user's array, contiguous in C order, is the value's memory as the step writes it."""
        order = [a for a in self.axes if a is not None and self.node.shape[a] != 1]
        return resolve(self.node) is self.node and order == sorted(order)

    def presented(self, matrix: Any) -> Any:
        """The value (rows x columns) as the user's axes have it; never a copy."""
        order = [a for a in self.axes if a is not None]
        rest = [a for a in (0, 1) if a not in order]
        return matrix.transpose(order + rest).reshape(self.shape)


@dataclass(frozen=True)
class Traced:
    """One run of a function on stand-ins."""

    name: str
    graph: Graph
    axes: tuple[Axes, ...]
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Blocks:
    """How a plan runs in blocks of rows.

    Attributes
    ----------
    total, rows : int
        Rows of the results, and of one block.
    plan : Plan
        Of one block.
    last : Plan or None
        Of the last block, where it has fewer rows.
    common : Plan or None
        Of what all blocks need and none changes, such as the halves of weights; it runs once a call, before them.
    arguments : frozenset of int
        The numbers of the arguments that are cut into blocks.
    """

    total: int
    rows: int
    plan: Plan
    last: Plan | None
    common: Plan | None
    arguments: frozenset[int]

    @property
    def count(self) -> int:
        return -(-self.total // self.rows)


@dataclass
class Plan:
    """What runs for one set of shapes, dtypes and memory layouts.

    Attributes
    ----------
    steps : tuple of Step
        In the order in which they run; those of one block, where the plan runs in blocks of rows. A step has `kind`
        ("Gemm", "MatVec", "ColumnStats", "RowProgram", "Split", "Copy"), `fused` (names of the operators in it),
        `reads` and `writes` (bytes), `flops`, `launches`, and for products `how` they are computed.
    launches : int
        GPU launches of one call.
    notes : tuple of Note
        The rewrites that were applied.
    prepare : Plan or None
        What `bind` runs once, for values that depend on bound arrays alone.
    blocks : Blocks or None
        The blocks of rows that it runs in, where the workspace would else be larger than asked.
    """

    name: str
    settings: Settings
    graph: Graph
    scheduled: Schedule = field(repr=False)
    outputs: tuple[Output, ...]
    notes: tuple[Note, ...]
    calls: tuple[Call, ...]
    prepare: Plan | None = None
    blocks: Blocks | None = None
    whole: str = ""  # why it does not run in blocks, where it should

    @property
    def precision(self) -> str:
        return self.settings.precision

    @property
    def steps(self) -> tuple[Step, ...]:
        if self.blocks is None:
            return tuple(self.scheduled.steps)
        return (*(self.blocks.common.steps if self.blocks.common else ()), *self.blocks.plan.steps)

    def _every_step(self) -> Iterator[Step]:
        """Each step as often as it runs."""
        if self.blocks is None:
            yield from self.scheduled.steps
            return
        yield from self.blocks.common.steps if self.blocks.common else ()
        for _ in range(self.blocks.count - (self.blocks.last is not None)):
            yield from self.blocks.plan.steps
        yield from self.blocks.last.steps if self.blocks.last else ()

    @property
    def launches(self) -> int:
        return sum(step.launches for step in self._every_step())

    @property
    def reads(self) -> int:
        """Bytes read from memory, every value once a step."""
        return sum(step.reads for step in self._every_step())

    @property
    def writes(self) -> int:
        """Bytes written to memory."""
        return sum(step.writes for step in self._every_step())

    @property
    def flops(self) -> int:
        """Floating-point operations, transcendental functions counted as the operator table says."""
        return sum(step.flops for step in self._every_step())

    @property
    def workspace(self) -> int:
        """Bytes that a call takes beside its arguments, prepared values and results."""
        if self.blocks is not None:
            common = self.blocks.common
            return self.blocks.plan.workspace + (sum(o.node.nbytes for o in common.outputs) if common else 0)
        results = {resolve(o.node) for o in self.outputs}
        stored = [n for step in self.scheduled.steps for n in step.outputs if n not in results]
        return sum(n.size * dtypes.ITEMSIZE[self.scheduled.storage[n]] for n in stored)

    def best_time(self, gpu: str = devices.DEFAULT) -> float:
        """Seconds that the hardware needs at best: for each step the larger of bytes/bandwidth and FLOPs/peak.

        Parameters
        ----------
        gpu : str
            A name that contains one of the known devices': H200, H100, A100, L40S, RTX 4090, T4.

        Raises
        ------
        ValueError
            The GPU is not known.
        """
        device = devices.find(gpu)
        return sum(self._step_time(step, device) for step in self._every_step())

    def _step_time(self, step: Step, device: devices.Device) -> float:
        dtype = step.nodes[-1].dtype
        peak = device.simt64 if dtype == "float64" else device.simt
        if step.kind == "Gemm" and dtype != "float64":
            split = step.nodes[-1].op == "split_matmul"
            fast = device.tf32 if dtype == "float32" and self.precision == "tf32" else device.half
            peak = fast if split or dtype != "float32" or self.precision in ("medium", "tf32") else device.simt
        return max((step.reads + step.writes) / device.bandwidth, step.flops / peak)

    def source(self, inline: bool = False) -> str:
        """The CUDA C of every emitted kernel.

        Parameters
        ----------
        inline : bool
            With the headers of `kernels_cu/` in their places, as the compiler gets it, instead of `#include` lines.
        """
        from .cuda import emit

        return "\n\n".join(emit.plan_sources(self, inline=inline))

    def __str__(self) -> str:
        return _report(self)


def build(
    traced: Traced,
    layouts: dict[int, Layout] | None = None,
    settings: Settings | None = None,
    bound: frozenset[int] = frozenset(),
) -> Plan:
    """Simplify and schedule a traced function; with bound arguments, split off what can be prepared once."""
    settings = settings or Settings()
    graph, notes = simplify(traced.graph)
    graph = choose_products(graph, settings, fixed_values(graph, bound))
    prepare = None
    if bound:
        graph, prepared = split_fixed(graph, fixed_values(graph, bound, settings.keep_halves), "prepared")
        prepare = _preparing(f"{traced.name}: prepared once", prepared, layouts, settings)

    def planned(graph: Graph) -> Plan:
        done = schedule(graph, layouts)
        outputs = tuple(Output(n, axes) for n, axes in zip(done.graph.outputs, traced.axes, strict=True))
        return Plan(traced.name, settings, done.graph, done, outputs, tuple(notes), traced.calls, prepare)

    plan = planned(graph)
    if plan.workspace > settings.max_workspace:
        try:
            plan.blocks = _in_blocks(graph, plan, planned, layouts)
        except NotByRows as reason:
            plan.whole = str(reason)
    return plan


def _preparing(name: str, graph: Graph, layouts: dict[int, Layout] | None, settings: Settings) -> Plan | None:
    """The plan of values that another plan takes as inputs."""
    if not graph.outputs:
        return None
    done = schedule(graph, layouts)
    return Plan(name, settings, done.graph, done, tuple(Output(n, (0, 1)) for n in done.graph.outputs), (), ())


def _in_blocks(
    graph: Graph, plan: Plan, planned: Callable[[Graph], Plan], layouts: dict[int, Layout] | None
) -> Blocks | None:
    """Blocks of as many rows as the workspace allows, all of nearly one size; None if what is cut is small enough."""
    together = rows_apart(graph)
    if any(o.axes[:1] != (0,) for o in plan.outputs):
        raise NotByRows("the rows of a result are not along its first dimension")
    graph, common = split_fixed(graph, _without(graph, together), "common", cheap=False)
    together = rows_apart(graph)
    total, most = graph.outputs[0].shape[0], plan.settings.max_workspace
    whole, one = (planned(with_rows(graph, together, n)).workspace for n in (total, 1))
    if whole <= most:
        return None
    each = max(1, (whole - one) // max(1, total - 1))
    rows = max(1, min(total, 1 + (most - one) // each))
    if rows >= LEAST_ROWS:
        rows -= rows % LEAST_ROWS
        even = -(-total // -(-total // rows))
        rows = min(rows, -(-even // LEAST_ROWS) * LEAST_ROWS)
    rest = total % rows
    return Blocks(
        total,
        rows,
        planned(with_rows(graph, together, rows)),
        planned(with_rows(graph, together, rest)) if rest else None,
        _preparing(f"{plan.name}: for all blocks", common, layouts, plan.settings),
        frozenset(int(n.attrs["arg"]) for n in graph.inputs if n in together),
    )


def _without(graph: Graph, together: set[Node]) -> set[Node]:
    """The values that depend on no row in particular."""
    found: set[Node] = set()
    for node in g.topological(graph.roots):
        real = [i for i in node.inputs if i.op != "const"]
        if (node.op == "input" and node not in together) or (real and all(i in found for i in real)):
            found.add(node)
    return found


def fixed_values(graph: Graph, bound: frozenset[int], keep_halves: bool = True) -> set[Node]:
    """The values that depend on bound arguments alone; never on one that the call changes in place."""
    changing = {arg for arg, _ in graph.effects}
    fixed: set[Node] = set()
    for node in g.topological(graph.roots):
        real = [i for i in node.inputs if i.op != "const"]
        argument = node.op == "input" and node.attrs["arg"] in bound - changing
        kept = keep_halves or node.op != "halves"
        if argument or (kept and real and all(i in fixed for i in real)):
            fixed.add(node)
    return fixed


def split_fixed(graph: Graph, static: set[Node], name: str, cheap: bool = True) -> tuple[Graph, Graph]:
    """Split off fixed values, such as those that depend on bound arguments alone.

    Returns the graph of the rest, in which those that it needs are further inputs (numbered after the arguments), and
    the graph that prepares them. Without `cheap`, pointwise work on arguments stays where it is.
    """
    reducing: dict[Node, bool] = {}
    for node in g.topological(graph.roots):
        reducing[node] = node.reduction or node.op in _OWN_DTYPE or any(reducing[i] for i in node.inputs)
    eager = set(g.topological(graph.roots, lambda n: () if n in static else g.eager_inputs(n)))
    wanted: dict[Node, bool] = {}  # value -> whether it is needed in its own dtype, not a wider one
    for root in map(resolve, graph.roots):
        if root in static and root.op not in ("input", "const"):
            wanted[root] = True
    for node in g.topological(graph.roots, lambda n: () if n in static else n.inputs):
        if node in static:
            continue
        for i in node.inputs:
            base = resolve(i)
            # A guard's exact form computes cheap things again for the rare element that needs them.
            if base in static and base.op != "input" and (reducing[base] or (cheap and i in eager)):
                wanted[base] = wanted.get(base, False) or node.op in _OWN_DTYPE
    first = len(graph.inputs)
    inputs = list(graph.inputs)
    mapping: dict[Node, Node] = {}
    for k, (node, own) in enumerate(wanted.items()):
        dtype = node.dtype if own else dtypes.compute(node.dtype)
        mapping[node] = Node(
            "input",
            (),
            node.shape,
            dtype,
            {"arg": first + k, "name": f"{name}{k}", "ndim": 2 if node.shape[0] > 1 else 1},
        )
        inputs.append(mapping[node])
    outputs = [g.cast(node, mapping[node].dtype) for node in wanted]
    done: dict[Node, Node] = dict(mapping)
    for node in g.topological(graph.roots, lambda n: () if n in mapping else n.inputs):
        if node not in done:
            changed = tuple(done[i] for i in node.inputs)
            same = all(a is b for a, b in zip(changed, node.inputs, strict=True))
            done[node] = node if same else Node(node.op, changed, node.shape, node.dtype, node.attrs)
    main = graph.replace(done)
    main.inputs = inputs
    needed = set(g.topological(outputs))
    return main, Graph([n for n in graph.inputs if n in needed], outputs)


_OWN_DTYPE = ("matmul", "split_matmul", "halves")  # what reads its operands as they are stored


# Printing -----------------------------------------------------------------------------------------------------------


def quantity(value: float, unit: str) -> str:
    """A number with a decimal prefix, as in '33.6 MB'."""
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _report(plan: Plan) -> str:
    inputs = ", ".join(
        f"{n.attrs['name']} {n.shape[0]} x {n.shape[1]} {n.dtype}" for n in plan.graph.inputs if "name" in n.attrs
    )
    lines = [f"plan of {plan.name}({inputs}), precision {plan.precision}", ""]
    lines += _table(plan.steps)
    lines += _memory(plan)
    if plan.prepare is not None:
        kept = quantity(sum(o.node.nbytes for o in plan.prepare.outputs), "B")
        lines += ["", f"prepared once, when the arguments are bound: {kept} are kept"]
        lines += _table(plan.prepare.steps)
    if plan.notes:
        lines += ["", "rewritten:"]
        merged: dict[tuple[str, str, str], int] = {}
        for note in plan.notes:
            key = (note.identity, note.what, note.saved)
            merged[key] = merged.get(key, 0) + 1
        for (identity, what, saved), times in merged.items():
            lines.append(f"  - {identity}:")
            lines.append(
                f"      {what}{f' ({times} times)' if times > 1 else ''}; saves {saved}{' each' * (times > 1)}"
            )
    guards = [n for step in plan.steps for n in step.nodes if n.op == "guard"]
    if guards:
        lines.append("  - guarded: what comes out infinite or NaN is evaluated as written, on the device")
    lines += ["", *_totals(plan)]
    return "\n".join(lines)


def _table(steps: Sequence[Step]) -> list[str]:
    lines = []
    for number, step in enumerate(steps, 1):
        cost = f"reads {quantity(step.reads, 'B')}, writes {quantity(step.writes, 'B')}, {quantity(step.flops, 'FLOP')}"
        launches = f"{step.launches} launch" + ("es" if step.launches != 1 else "")
        lines.append(f"  {number}. {step.kind} over {step.domain[0]} x {step.domain[1]}: {launches}; {cost}")
        lines.append(f"     fused: {', '.join(step.fused)}")
        lines += [f"     by:    {step.how}"] * bool(step.how)
    return lines or ["  nothing to compute"]


def _memory(plan: Plan) -> list[str]:
    """How much memory a call takes, where that is what decided how it runs."""
    most = quantity(plan.settings.max_workspace, "B")
    if plan.blocks is not None:
        b = plan.blocks
        shared = f"; {len(b.common.steps)} for all blocks first" if b.common else ""
        return [
            "",
            f"the steps run for {b.count} blocks of {b.rows} rows, one after the other{shared}: "
            f"{quantity(plan.workspace, 'B')} of",
            f"workspace, where all rows at once would take more than the {most} of max_workspace",
        ]
    if plan.whole:
        workspace = quantity(plan.workspace, "B")
        return ["", f"{workspace} of workspace, more than the {most} of max_workspace: not in blocks, as {plan.whole}"]
    return []


def _totals(plan: Plan) -> list[str]:
    moved = plan.reads + plan.writes
    device = devices.DEFAULT
    lines = [
        f"fused:   {plan.launches} launch{'es' * (plan.launches != 1)}, {quantity(moved, 'B')} moved, "
        f"{quantity(plan.flops, 'FLOP')}; "
        f"at best {plan.best_time(device) * 1e6:.3g} us on an {device}"
    ]
    if plan.calls:
        unfused = sum(c.reads + c.writes for c in plan.calls)
        work = sum(c.flops for c in plan.calls)
        names = ", ".join(c.name for c in plan.calls)
        lines.append(
            f"unfused: {len(plan.calls)} operations ({names}), {quantity(unfused, 'B')} moved, {quantity(work, 'FLOP')}"
        )
    return lines
