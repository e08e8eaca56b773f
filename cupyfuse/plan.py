"""Plans: what will run for given shapes and dtypes, and what was done to get there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import devices, dtypes
from . import graph as g
from .graph import Graph, Node
from .rewrite import Note, simplify
from .schedule import Layout, Schedule, Step, resolve, schedule
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


@dataclass
class Plan:
    """What runs for one set of shapes, dtypes and memory layouts.

    Attributes
    ----------
    steps : tuple of Step
        In the order in which they run. A step has `kind` ("Gemm", "MatVec", "ColumnStats", "RowProgram", "Copy"),
        `fused` (names of the operators in it), `reads` and `writes` (bytes), `flops` and `launches`.
    launches : int
        GPU launches of one call.
    notes : tuple of Note
        The rewrites that were applied.
    prepare : Plan or None
        What `bind` runs once, for values that depend on bound arrays alone.
    """

    name: str
    precision: str
    graph: Graph
    scheduled: Schedule = field(repr=False)
    outputs: tuple[Output, ...]
    notes: tuple[Note, ...]
    calls: tuple[Call, ...]
    prepare: Plan | None = None

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(self.scheduled.steps)

    @property
    def launches(self) -> int:
        return sum(step.launches for step in self.steps)

    @property
    def reads(self) -> int:
        """Bytes read from memory, every value once a step."""
        return sum(step.reads for step in self.steps)

    @property
    def writes(self) -> int:
        """Bytes written to memory."""
        return sum(step.writes for step in self.steps)

    @property
    def flops(self) -> int:
        """Floating-point operations, transcendental functions counted as the operator table says."""
        return sum(step.flops for step in self.steps)

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
        return sum(self._step_time(step, device) for step in self.steps)

    def _step_time(self, step: Step, device: devices.Device) -> float:
        dtype = step.nodes[0].dtype
        peak = device.simt64 if dtype == "float64" else device.simt
        if step.kind == "Gemm" and dtype != "float64":
            fast = device.half if dtype != "float32" or self.precision == "medium" else device.tf32
            peak = fast if dtype != "float32" or self.precision in ("high", "medium") else device.simt
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
    precision: str = "highest",
    bound: frozenset[int] = frozenset(),
) -> Plan:
    """Simplify and schedule a traced function; with bound arguments, split off what can be prepared once."""
    graph, notes = simplify(traced.graph)
    prepare = None
    if bound:
        graph, prepared = split_bound(graph, bound)
        if prepared.outputs:
            inner = schedule(prepared, layouts)
            outputs = tuple(Output(n, (0, 1)) for n in inner.graph.outputs)
            prepare = Plan(f"{traced.name}: prepared once", precision, inner.graph, inner, outputs, (), ())
    done = schedule(graph, layouts)
    outputs = tuple(Output(n, axes) for n, axes in zip(done.graph.outputs, traced.axes, strict=True))
    return Plan(traced.name, precision, done.graph, done, outputs, tuple(notes), traced.calls, prepare)


def split_bound(graph: Graph, bound: frozenset[int]) -> tuple[Graph, Graph]:
    """Split off the values that depend on bound arguments alone.

    Returns the graph of the call, in which those values are further inputs (numbered after the arguments), and the
    graph that prepares them. An argument that the call changes in place is never taken as fixed.
    """
    changing = {arg for arg, _ in graph.effects}
    static: dict[Node, bool] = {}
    reducing: dict[Node, bool] = {}
    for node in g.topological(graph.roots):
        real = [i for i in node.inputs if i.op != "const"]
        fixed_input = node.op == "input" and node.attrs["arg"] in bound - changing
        static[node] = fixed_input or (bool(real) and all(static[i] for i in real))
        reducing[node] = node.reduction or node.op == "matmul" or any(reducing[i] for i in node.inputs)
    eager = set(g.topological(graph.roots, lambda n: () if static[n] else g.eager_inputs(n)))
    wanted: dict[Node, bool] = {}  # value -> whether it is needed in its own dtype, not a wider one
    for root in map(resolve, graph.roots):
        if static[root] and root.op not in ("input", "const"):
            wanted[root] = True
    for node in g.topological(graph.roots, lambda n: () if static[n] else n.inputs):
        if static[node]:
            continue
        for i in node.inputs:
            base = resolve(i)
            # A guard's exact form computes cheap things again for the rare element that needs them.
            if static.get(base) and base.op != "input" and (reducing[base] or i in eager):
                wanted[base] = wanted.get(base, False) or node.op == "matmul"
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
            {"arg": first + k, "name": f"prepared{k}", "ndim": 2 if node.shape[0] > 1 else 1},
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
    if plan.prepare is not None:
        lines += ["", "prepared once, when the arguments are bound:"]
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
    return lines or ["  nothing to compute"]


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
