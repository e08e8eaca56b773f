"""Scheduling: partition a graph into the few steps that will run.

Some values have to exist in memory: arguments, results, matrix products, column reductions, other views of computed
values. Everything between them is computed in passing, inside a step: a `RowProgram` (pointwise work and reductions
along rows; called `MatVec` where it is a matrix-vector product), `ColumnStats` (reductions down the columns, with the
pointwise work before and after them), a `Gemm`, or a `Copy` of an argument whose layout a kernel cannot read.

Every value gets a layer, one more than the values in memory that it needs; steps of one layer and one domain are one
step. Cheap pointwise work is computed again where it is needed rather than stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from . import dtypes
from . import graph as g
from .graph import Graph, Node, Shape


@dataclass(frozen=True)
class Layout:
    """How an argument lies in memory, as far as a plan depends on it, seen as rows x columns.

    Neighbouring columns (or rows) are neighbours in memory; all elements are, in C order; cuBLAS can read it.
    """

    unit_cols: bool = True
    unit_rows: bool = False
    contiguous: bool = True
    blas: bool = True

    @property
    def transposed(self) -> Layout:
        return Layout(self.unit_rows, self.unit_cols, False, self.blas)


@dataclass(frozen=True, eq=False)
class Step:
    """One step of a plan: what it computes, what it moves, and how it is launched."""

    kind: str
    fused: tuple[str, ...]
    reads: int
    writes: int
    flops: int
    launches: int
    domain: Shape
    nodes: tuple[Node, ...] = field(repr=False)
    inputs: tuple[Node, ...] = field(repr=False)
    outputs: tuple[Node, ...] = field(repr=False)
    rare: tuple[Node, ...] = field(default=(), repr=False)


@dataclass
class Schedule:
    """Steps in the order in which they run, and the dtype in which each value in memory is stored."""

    graph: Graph
    steps: list[Step]
    storage: dict[Node, str]


def resolve(node: Node) -> Node:
    """The value in memory that a view looks at."""
    while node.op in ("transpose", "reshape"):
        node = node.inputs[0]
    return node


def layout_of(node: Node, layouts: dict[int, Layout]) -> Layout:
    if node.op == "transpose":
        return layout_of(node.inputs[0], layouts).transposed
    if node.op == "input":
        return layouts.get(node.attrs["arg"]) or Layout(True, min(node.shape) <= 1, True)
    return Layout()


def readable_by_rows(node: Node, layouts: dict[int, Layout]) -> bool:
    """Whether neighbouring columns are neighbours in memory, or there is one column only."""
    layout = layout_of(node, layouts)
    return node.shape[1] <= 1 or layout.unit_cols or (node.shape[0] <= 1 and layout.contiguous)


def _copied(node: Node) -> Node:
    return Node("copy", (node,), node.shape, node.dtype)


def insert_copies(graph: Graph, layouts: dict[int, Layout]) -> Graph:
    """Put an explicit copy before every read of an argument whose layout the reader cannot take."""
    live = set(g.topological(graph.roots, g.eager_inputs))
    copies: dict[Node, Node] = {}

    def fit(reader: Node, value: Node) -> Node:
        if value.op == "reshape" and not g.is_leaf(value):
            source = value.inputs[0]
            turned = source.op == "transpose" and min(source.shape) > 1
            return g.reshape(copies.setdefault(source, _copied(source)), value.shape) if turned else value
        if value.op == "reshape":
            source = value.inputs[0]
            whole = layout_of(source, layouts).contiguous and source.op != "transpose"
            return value if whole else g.reshape(copies.setdefault(source, _copied(source)), value.shape)
        if not (value.op in ("input", "transpose") and g.is_leaf(value)):
            return value
        layout = layout_of(value, layouts)
        good = layout.blas if reader.op == "matmul" else readable_by_rows(value, layouts)
        return value if good else copies.setdefault(value, _copied(value))

    done: dict[Node, Node] = {}
    for node in g.topological(graph.roots):
        inputs = tuple(done[i] for i in node.inputs)
        if node in live and (node.pointwise or node.reduction or node.op == "matmul"):
            inputs = tuple(fit(node, i) for i in inputs)
        changed = any(a is not b for a, b in zip(inputs, node.inputs, strict=True))
        done[node] = Node(node.op, inputs, node.shape, node.dtype, node.attrs) if changed else node
    return graph.replace(done)


class _Scheduler:
    def __init__(self, graph: Graph):
        self.graph = graph
        self.live_set = set(g.topological(graph.roots, g.eager_inputs))
        self.reducing: dict[Node, bool] = {}
        self.layer: dict[Node, int] = {}
        self.home: dict[Node, Shape] = {}
        self.column_group: dict[Node, tuple[int, Shape]] = {}
        for node in g.topological(graph.roots):
            self._place(node)

    # Where each value is computed
    def in_memory(self, node: Node) -> bool:
        """Whether a reader finds the value in memory, whoever computed it."""
        return node.op in ("input", "matmul", "copy", "transpose", "reshape") or node in self.column_group

    def _place(self, node: Node) -> None:
        self.reducing[node] = False
        if node.op in ("input", "const"):
            self.layer[node] = 0
        elif node.op in ("transpose", "reshape"):
            self.layer[node] = self.layer[node.inputs[0]]
        elif node.op in ("matmul", "copy"):
            self.layer[node] = 1 + max(self.layer[i] for i in node.inputs)
        elif node.reduction and node.axis == 0:
            layer = 1 + max((self.layer[f] for f in self.frontier(node.inputs[0])), default=0)
            self.layer[node] = layer
            self.column_group[node] = (layer, node.inputs[0].shape)
        else:
            self._place_in_row_program(node)

    def _place_in_row_program(self, node: Node) -> None:
        group = self._finishing_group(node)
        if group is not None:
            self.column_group[node] = group
            self.layer[node] = group[0]
            return
        inputs = [i for i in g.eager_inputs(node) if i.op != "const"]
        reducing = [i for i in inputs if self.reducing[i]]
        self.home[node] = node.inputs[0].shape if node.reduction else self._common_home(node, reducing)
        repairs = node.op == "guard" and node.inputs[1].reduction
        self.reducing[node] = node.reduction or repairs or any(self.home[i] == self.home[node] for i in reducing)
        layer = 1
        for i in inputs:
            separate = self.in_memory(i) or (self.reducing[i] and self.home[i] != self.home[node])
            layer = max(layer, self.layer[i] + (1 if separate else 0))
        for i in self.rare_reads(node):
            beside = not self.in_memory(i) and self.home[i] == self.home[node]
            layer = max(layer, self.layer[i] + (0 if beside else 1))
        self.layer[node] = layer

    def _common_home(self, node: Node, reducing: list[Node]) -> Shape:
        """The domain of the reductions that this value follows, where it can be computed beside them."""
        homes = {self.home[i] for i in reducing}
        fitting = [h for h in homes if h[0] == node.shape[0] and node.shape[1] in (h[1], 1)]
        return max(fitting, key=lambda h: (h[1], h), default=node.shape)

    def rare_reads(self, node: Node) -> list[Node]:
        """The values in memory that a guard's exact form needs beyond those of its fast form."""
        if node.op != "guard":
            return []
        exact = node.inputs[1]
        order = g.topological([exact], lambda n: () if self._known_to_guard(n, exact) else n.inputs)
        return [n for n in order if n.op != "const" and self._known_to_guard(n, exact)]

    def _known_to_guard(self, node: Node, exact: Node) -> bool:
        """Whether a guard reads this value; a product that nothing else computes it repeats, for single rows."""
        if self.in_memory(node):
            return node.op != "matmul" or node in self.live_set
        return node.reduction and node is not exact

    def _finishing_group(self, node: Node) -> tuple[int, Shape] | None:
        """The column step that can compute this per-column value along with its reductions, if there is one."""
        if not node.pointwise or node.shape[0] != 1:
            return None
        groups = set()
        for i in node.inputs:
            if i in self.column_group:
                groups.add(self.column_group[i])
            elif not (i.op == "const" or (i.shape[0] == 1 and self._from_arguments(i))):
                return None
        group = groups.pop() if len(groups) == 1 else None
        return group if group is not None and node.shape[1] == group[1][1] else None

    def _from_arguments(self, node: Node) -> bool:
        """Whether a value is an argument, or pointwise work on arguments alone."""
        return g.is_leaf(node) or (node.pointwise and self.layer[node] == 1 and not self.reducing[node])

    def frontier(self, operand: Node) -> Iterator[Node]:
        """What a column step reads to compute its operand in passing: it cannot reduce along rows."""

        def inward(node: Node) -> Iterable[Node]:
            return () if self._stops(node) else node.inputs

        for node in g.topological([operand], inward):
            if self._stops(node) and node.op != "const":
                yield node

    def _stops(self, node: Node) -> bool:
        if self.in_memory(node) or node.op == "const":
            return True
        return node.reduction or (self.reducing[node] and node.shape[1] == 1)

    # Collecting the steps, from the results backwards
    def run(self) -> list[Step]:
        self.required: dict[tuple[int, str, Shape], dict[Node, None]] = {}
        self.rounded: set[Node] = set()
        self.wanted: set[Node] = set()
        for root in self.graph.roots:
            self._require(root)
        steps: list[tuple[int, Step]] = []
        while self.required:
            key = max(self.required, key=lambda k: (k[0], k[1] == "row", k[2]))
            roots = list(self.required.pop(key))
            layer, kind, domain = key
            if kind == "row":
                steps.append((layer, self._row_step(roots, layer, domain)))
            elif kind == "column":
                steps.append((layer, self._column_step(roots, domain)))
            else:
                steps.extend((layer, self._single_step(node)) for node in roots)
        return _with_riders([step for _, step in sorted(steps, key=lambda s: s[0])])

    def _require(self, node: Node) -> None:
        """Ask for a value to be in memory."""
        node = resolve(node)
        if node.op in ("input", "const"):
            return
        self.wanted.add(node)
        if node.op in ("matmul", "copy"):
            key = (self.layer[node], node.op, (0, 0))
        elif node in self.column_group:
            key = (self.layer[node], "column", self.column_group[node][1])
        else:
            key = (self.layer[node], "row", self.home[node])
        self.required.setdefault(key, {})[node] = None

    def _row_step(self, roots: list[Node], layer: int, domain: Shape) -> Step:
        def read(node: Node) -> bool:
            if self.in_memory(node):
                return True
            if node in self.wanted and self.layer[node] < layer:
                return True
            return self.reducing[node] and self.home[node] != domain

        nodes, inputs, rare = self._collect(roots, read)
        if not any(n.reduction for n in nodes):
            # What it was to follow is in memory already: it is as wide as what it computes.
            domain = g.broadcast(*(n.shape for n in nodes))
        return _step("RowProgram", domain, nodes, inputs, roots, rare)

    def _column_step(self, roots: list[Node], domain: Shape) -> Step:
        group = (self.layer[roots[0]], domain)

        def read(node: Node) -> bool:
            return self.column_group.get(node) != group and self._stops(node)

        nodes, inputs, rare = self._collect(roots, read)
        return _step("ColumnStats", domain, nodes, inputs, roots, rare)

    def _collect(self, roots: list[Node], stop: Callable[[Node], bool]) -> tuple[list[Node], list[Node], list[Node]]:
        """The nodes of a step, the values it always reads, and those that only a guard reads."""
        needed = list(roots)
        while True:
            walk = g.topological(needed, lambda n: () if stop(n) else g.eager_inputs(n))
            order = [n for n in walk if n.op != "const"]
            inside = [n for n in order if not stop(n)]
            outside = [n for n in order if stop(n)]
            rare = dict.fromkeys(r for n in inside for r in self.rare_reads(n) if r not in order)
            beside = [r for r in rare if not stop(r)]
            if not beside:
                break
            needed += beside
        for node in (*outside, *rare):
            self._require(node)
        return inside, outside, list(rare)

    def _single_step(self, node: Node) -> Step:
        for i in node.inputs:
            self._require(i)
            if node.op == "matmul":
                self.rounded.add(resolve(i))
        kind = "Gemm" if node.op == "matmul" else "Copy"
        return _step(kind, node.shape, [node], list(node.inputs), [node], [])

    def storage(self, steps: list[Step]) -> dict[Node, str]:
        """Results in their own dtype; what is read again by a row program keeps the wider type it was computed in."""
        own = {resolve(r) for r in self.graph.roots} | self.rounded
        found: dict[Node, str] = {}
        for node in self.graph.inputs:
            found[node] = node.dtype
        for step in steps:
            for node in (*step.outputs, *(resolve(i) for i in (*step.inputs, *step.rare))):
                if node.op == "copy":
                    found[node] = found[resolve(node.inputs[0])]
                else:
                    exact = node in own or node.op == "input"
                    found[node] = node.dtype if exact else dtypes.compute(node.dtype)
        return found


def _step(
    kind: str, domain: Shape, nodes: list[Node], inputs: list[Node], outputs: list[Node], rare: list[Node]
) -> Step:
    if kind == "RowProgram" and _is_matvec(nodes, domain):
        kind = "MatVec"
    return Step(
        kind=kind,
        fused=tuple(n.op for n in nodes),
        reads=0,
        writes=0,
        flops=sum(g.flops(n) for n in nodes),
        launches=1,
        domain=domain,
        nodes=tuple(nodes),
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        rare=tuple(rare),
    )


def _with_riders(steps: list[Step]) -> list[Step]:
    """Let numbers that depend on arguments alone, such as a counter of batches, ride in the last row program."""
    hosts = [s for s in steps if s.kind in ("RowProgram", "MatVec") and any(n.reduction for n in s.nodes)]
    if not hosts or hosts[-1].domain[0] == 0:
        return steps
    host = hosts[-1]
    riders = [
        s
        for s in steps
        if s.kind == "RowProgram"
        and s.domain == (1, 1) != host.domain
        and all(g.is_leaf(i) for i in s.inputs)
        and not s.rare
        and not {resolve(i) for i in s.inputs} & {resolve(i) for i in (*host.inputs, *host.rare)}
        and not any(resolve(i) in s.outputs for other in steps for i in (*other.inputs, *other.rare))
    ]
    if not riders:
        return steps
    parts = [host, *riders]
    merged = replace(
        host,
        fused=tuple(f for p in parts for f in p.fused),
        flops=sum(p.flops for p in parts),
        nodes=tuple(dict.fromkeys(n for p in parts for n in p.nodes)),
        inputs=tuple(dict.fromkeys(n for p in parts for n in p.inputs)),
        outputs=tuple(n for p in parts for n in p.outputs),
    )
    return [merged if s is host else s for s in steps if s not in riders]


def _is_matvec(nodes: list[Node], domain: Shape) -> bool:
    """Whether all that is done along the rows is one product with a vector."""
    reductions = [n for n in nodes if n.reduction]
    if len(reductions) != 1 or reductions[0].op != "sum":
        return False
    product = reductions[0].inputs[0]
    full = [n for n in nodes if n.shape == domain and domain[1] != 1]
    return (
        product.op == "multiply"
        and full == [product]
        and {i.shape for i in product.inputs} == {domain, (1, domain[1])}
        and all(i.op != "const" for i in product.inputs)
    )


def column_launches(domain: Shape) -> int:
    """One launch where the columns alone fill a GPU; a second one merges where the rows were split as well."""
    return 1 if column_splits(domain) == 1 else 2


def column_splits(domain: Shape) -> int:
    """Among how many blocks each strip of columns shares its rows (a power of two, so that few kernels are built)."""
    rows, cols = domain
    strips = max(1, -(-cols // 32))
    splits = 1
    while strips * splits < 128 and rows // (2 * splits) >= 256:
        splits *= 2
    return splits


def schedule(graph: Graph, layouts: dict[int, Layout] | None = None) -> Schedule:
    """Partition a simplified graph into steps."""
    graph = insert_copies(_results_in_memory(graph), layouts or {})
    scheduler = _Scheduler(graph)
    raw = scheduler.run()
    storage = scheduler.storage(raw)
    steps = [_measured(step, storage) for step in raw]
    return Schedule(graph, steps, storage)


def _results_in_memory(graph: Graph) -> Graph:
    """Results that are arguments, views of them, constants or twice the same are copied by a row program."""
    taken: set[Node] = set()

    def own(node: Node) -> Node:
        base = resolve(node)
        fresh = base.op not in ("input", "const") and base not in taken
        result = node if fresh else Node("cast", (node,), node.shape, node.dtype)
        taken.add(resolve(result))
        return result

    return Graph(graph.inputs, [own(n) for n in graph.outputs], [(arg, own(n)) for arg, n in graph.effects])


def _measured(step: Step, storage: dict[Node, str]) -> Step:
    """The step with its bytes: every value read once and written once, in the dtype it is stored in."""

    def nbytes(nodes: Iterable[Node]) -> int:
        return sum(n.size * dtypes.ITEMSIZE[storage[resolve(n)]] for n in dict.fromkeys(nodes))

    launches = column_launches(step.domain) if step.kind == "ColumnStats" else 1
    if step.domain[0] * step.domain[1] == 0 and all(n.size == 0 for n in step.outputs):
        launches = 0
    return replace(step, reads=nbytes(step.inputs), writes=nbytes(step.outputs), launches=launches)
