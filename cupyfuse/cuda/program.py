"""Analysis of a step for emission: the parameters of its kernel, and the stage that computes each value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Node, Shape
from ..ir.kinds import gives_whole_numbers
from ..ir.operators import POINTWISE
from ..plan.schedule import Step, base_of, stages_of, state_size
from .accumulators import Accumulator, find_accumulators
from .c_types import c_type
from .parameters import ANY, COLUMN, DIVISORS, FULL, ROW, SCALAR, STEPS, STRIDES, Parameter, input_name
from .shares import shares_of

PRODUCT = "product"  # the name of a product that the template computes
# Per-column arrays of a program, at most, of which a thread holds what it has of a pack, values or addresses, at once.
MOST_ARRAYS_AT_ONCE = 4


@dataclass
class Program:
    """A step analysed for emission.

    Attributes
    ----------
    step : Step
    storage : dict
        The dtype in which each value in memory is stored.
    product : Node or None
        The product that the template computes and this step is the epilogue of; it is no parameter.
    names : dict
        The name of each value in the emitted source.
    parameters : list of Parameter
    outputs, loaded : dict
        The parameters that the kernel writes and reads, by node.
    stage : dict
        The stage that computes each value; -1 for values that depend on no element of the rows.
    columns : Step or None
        Of a row program, the reductions down the columns and what follows them.
    own_nodes : tuple of Node
        The other values: those of rows and of their elements.
    """

    step: Step
    storage: dict[Node, str]
    product: Node | None = None
    names: dict[Node, str] = field(default_factory=dict)
    parameters: list[Parameter] = field(default_factory=list)
    outputs: dict[Node, Parameter] = field(default_factory=dict)
    loaded: dict[Node, Parameter] = field(default_factory=dict)
    _fresh: Iterator[int] = field(default_factory=count)
    _accumulators: dict[int, list[Accumulator]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_columns = self.step.kind == "ColumnStats"
        self.columns = self.step.columns
        behind = self.columns.node_set if self.columns else ()
        self.own_nodes = tuple(n for n in self.step.nodes if n not in behind)
        self.stage = stages_of(self.step)
        used: set[str] = set()
        for node in self.step.inputs:
            if node is self.product:
                self.names[node] = PRODUCT
                self.loaded[node] = Parameter(PRODUCT, node, FULL, self.storage[node], False)
            else:
                self._add(node, self.extent(node), False, used)
        for node in self.step.repair_inputs:
            self._add(node, ANY, False, used)
        for node in self._named_numbers():
            self._add(node, SCALAR, False, used)
        for node in self.step.outputs:
            self._add(node, self.extent(node), True, used)
        for number, node in enumerate(self.step.nodes):
            self.names[node] = f"v{number}"
        if self.product is not None:
            self.stage[self.product] = 0

    def fresh_name(self) -> str:
        """Return a name for a value that only a guard computes."""
        return f"w{next(self._fresh)}"

    @property
    def domain(self) -> Shape:
        return self.step.domain

    @cached_property
    def stages(self) -> int:
        """The number of stages."""
        return 1 + max((self.stage[n] for n in self.own_nodes if self.stage[n] >= 0), default=0)

    @cached_property
    def waits_often(self) -> bool:
        """Whether three stages or more wait for reductions, as in the softmax of standardised rows."""
        return self.stages > 3

    @cached_property
    def column_reductions(self) -> dict[Node, list[Node]]:
        """The reductions down the columns beside a row program, grouped by operand."""
        return _by_operand(self.columns.nodes if self.columns else ())

    @cached_property
    def column_stage(self) -> int:
        """The stage whose elements these reduce: the first one that knows all of them."""
        return max((self.stage.get(n, 0) for n in self.column_reductions), default=0)

    @cached_property
    def column_accumulators(self) -> list[Accumulator]:
        """The accumulators of a column: of these reductions, or of a column step."""
        if self.columns is None:
            return self.accumulators(0)
        return find_accumulators(self.columns, self.column_reductions, lambda *_: set())

    @cached_property
    def behind_columns(self) -> set[Node]:
        """The results of columns, and what is read for these alone: one element of each, after all rows."""
        columns = self.step if self.by_columns else self.columns
        if columns is None:
            return set()
        elements = [n.inputs[0] for n in columns.nodes if n.reduction]
        elements += self.own_nodes if self.columns else [n for n in columns.outputs if n.shape == self.domain]
        read = set(g.topological(elements, lambda n: () if n in self.loaded else n.inputs))
        inputs = (i for i in columns.inputs if i in self.loaded and i not in read)
        return {n for n in (*columns.outputs, *inputs) if n.shape[0] == 1}

    def in_vectors(self, parameter: Parameter) -> bool:
        """Whether an array has elements for those of a row, which are accessed in vectors."""
        along_row = parameter.extent in (FULL, COLUMN) and not parameter.is_number
        return along_row and parameter.node not in self.behind_columns

    def reduced(self, stage: int) -> list[Node]:
        """List what a stage reduces, along rows or down the columns beside them."""
        columns = self.column_reductions if stage == self.column_stage else {}
        return list({**self.reductions(stage), **columns})

    def targets(self, stage: int) -> list[Node]:
        """List what a stage computes of elements: what it reduces, and its full results."""
        return [*self.reduced(stage), *self.full_outputs.get(stage, ())]

    def extent(self, node: Node) -> str:
        """Return the extent of a value over the rows and columns of the step.

        In a step of one row or one column several extents have the same shape. Then a value is FULL, but for vectors
        of the user's in a row program of one row: these are per-column as for more rows, so that the bits of a row do
        not depend on the number of rows.
        """
        rows, cols = self.domain
        users_vector = node.ndim == 1  # of computed values `ndim` is always 2
        if users_vector and rows == 1 < cols and node.shape == (1, cols) and not self.by_columns:
            return COLUMN
        if node.shape == (rows, cols):
            return FULL
        if node.shape == (rows, 1):
            return ROW
        return COLUMN if node.shape == (1, cols) else SCALAR

    def is_full(self, node: Node) -> bool:
        """Whether a value has an element for each of the step's, and is read as such."""
        return self.extent(node) == FULL and not (node in self.loaded and self.loaded[node].extent == ANY)

    def _add(self, node: Node, extent: str, written: bool, used: set[str]) -> None:
        """Add a parameter of the kernel for a value, under a name that is not in `used`."""
        base = base_of(node)
        name = f"out{len(self.outputs)}" if written else input_name(node, base)
        stem, copies = name, 1
        while (members := {name, f"{name}_map", *(f"{name}_{each}" for each in (*STRIDES, *DIVISORS, *STEPS))}) & used:
            copies += 1
            name = f"{stem}{copies}"
        used |= members
        dtype = "float64" if node.op == "const" else self.storage[base]
        parameter = Parameter(name, node, extent, dtype, written)
        if parameter.repeats:
            alike = (p.name for p in self.parameters if p.repeats and p.node.repeats == node.repeats)
            parameter = replace(parameter, alike=next(alike, ""))
        self.parameters.append(parameter)
        if written:
            self.outputs[node] = parameter
        else:
            self.loaded[node] = parameter
            self.names[node] = name

    def _named_numbers(self) -> list[Node]:
        """Find the constants that are parameters of the kernel, so that another value needs no other kernel."""
        everything = g.topological(self.step.nodes, lambda n: () if n in self.loaded else n.inputs)
        return [n for n in everything if n.op == "const" and n.name]

    @cached_property
    def divisors(self) -> set[Node]:
        """Per-row values that divide whole rows of their own type, so that a reciprocal can replace the divisions."""
        found = set()
        for node in self.own_nodes:
            if node.op == "divide" and self.extent(node) == FULL and not self.by_columns and node not in self.shares:
                bottom = node.inputs[1]
                same = c_type(bottom.dtype) == c_type(node.dtype)
                if same and bottom.op != "const" and self.extent(bottom) in (ROW, SCALAR) and self.domain[1] > 1:
                    found.add(bottom)
        return found

    @cached_property
    def beneath_steps(self) -> set[Node]:
        """The values that decide which whole number a rounding gives: a small error could take them over the step."""
        operands = [i for n in self.step.nodes if gives_whole_numbers(n) for i in n.inputs]
        return set(g.topological(operands, lambda n: n.inputs if n.pointwise and n not in self.loaded else ()))

    @cached_property
    def reads_columns(self) -> int:
        """Number of per-column arrays that each row reads."""
        return sum(p.extent == COLUMN and not p.is_number for p in self.read_by_rows)

    @cached_property
    def column_reads(self) -> int:
        """How often stages read a value of a per-column array for each element, in all."""
        total = 0
        for stage in range(self.stages):
            read = g.topological(self.targets(stage), lambda n: () if n in self.loaded else g.eager_inputs(n))
            total += sum(n in self.loaded and self.loaded[n].extent == COLUMN for n in read)
        return total

    @cached_property
    def column_sizes(self) -> list[int]:
        """Bytes of an element of each per-column array that each row reads."""
        return [dtypes.ITEMSIZE[p.dtype] for p in self.read_by_rows if p.extent == COLUMN]

    @property
    def columns_known_ahead(self) -> bool:
        """Whether threads have registers for the addresses of packs of all per-column arrays, from row to row."""
        return len(self.column_sizes) <= MOST_ARRAYS_AT_ONCE

    @property
    def read_by_rows(self) -> list[Parameter]:
        """The inputs but for those of column results alone."""
        return [p for p in self.loaded.values() if p.node not in self.behind_columns]

    @cached_property
    def is_double(self) -> bool:
        """Whether any full-size array is float64."""
        return any(p.dtype == "float64" for p in self.parameters if p.extent == FULL)

    @cached_property
    def full_inputs(self) -> list[Parameter]:
        """The inputs in memory that have an element for each of the step's."""
        return [p for p in self.loaded.values() if p.extent == FULL and p.node is not self.product]

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of full inputs for each element."""
        return sum(dtypes.ITEMSIZE[p.dtype] for p in self.full_inputs)

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of full results for each element."""
        return sum(dtypes.ITEMSIZE[p.dtype] for p in self.outputs.values() if p.extent == FULL)

    @cached_property
    def recomputed_flops(self) -> int:
        """FLOPs for each element with which stages compute again, from the inputs, what earlier ones computed."""
        total = 0
        for stage in range(1, self.stages):
            for node in g.topological(self.targets(stage), lambda n: () if n in self.loaded else g.eager_inputs(n)):
                if self.extent(node) == FULL and node not in self.loaded and 0 <= self.stage.get(node, -1) < stage:
                    total += POINTWISE[node.op].flops if node.op in POINTWISE else 0
        return total

    @cached_property
    def by_stage(self) -> dict[int, list[Node]]:
        """The step's values by the stage that computes them."""
        found: dict[int, list[Node]] = {}
        for node in self.own_nodes:
            found.setdefault(self.stage[node], []).append(node)
        return found

    def reductions(self, stage: int) -> dict[Node, list[Node]]:
        """Return the reductions of a stage, grouped by operand."""
        return _by_operand(self.by_stage.get(stage, ()))

    @cached_property
    def full_outputs(self) -> dict[int, list[Node]]:
        """The results with a value for each element, by stage."""
        found: dict[int, list[Node]] = {}
        for node in self.step.outputs:
            if self.extent(node) == FULL and node not in self.behind_columns:
                found.setdefault(self.stage[node], []).append(node)
        return found

    @cached_property
    def first_computed(self) -> dict[Node, int]:
        """The first stage that computes each value, as far as results and reductions need it."""
        computed: dict[Node, int] = {}
        guards: dict[int, list[Node]] = {}
        for stage in range(self.stages):
            for node in g.topological(
                self.targets(stage), lambda n: () if n in computed or n in self.loaded else g.eager_inputs(n)
            ):
                if node not in computed:
                    computed[node] = stage
                    if node.op == "guard":
                        guards.setdefault(stage, []).append(node)
        # Exact forms recompute in each stage what only they need: the last stage counts.
        for stage in reversed(range(self.stages)):
            exact = [guard.inputs[1] for guard in guards.get(stage, ())]
            for node in g.topological(exact, lambda n: () if n in computed or n in self.loaded else n.inputs):
                computed.setdefault(node, stage)
        return computed

    @cached_property
    def last_readers(self) -> dict[Node, int]:
        """The last stage that reads each value to compute another one for the first time."""
        found: dict[Node, int] = {}
        for node, stage in self.first_computed.items():
            for i in node.inputs:
                found[i] = max(stage, found.get(i, stage))
        for node in self.column_reductions:
            found[node] = max(self.column_stage, found.get(node, 0))
        return found

    @cached_property
    def held_values(self) -> int:
        """The most values of an element that are needed at once: what a stage reduces, and what later ones read."""
        full = {n: stage for n, stage in self.first_computed.items() if self.extent(n) == FULL and n.op != "const"}
        most = 1
        for stage in range(self.stages):
            later = {n for n, computed in full.items() if computed <= stage < self.last_readers.get(n, 0)}
            most = max(most, len(later.union(self.reductions(stage))))
        return most

    def accumulators(self, stage: int) -> list[Accumulator]:
        """Return the accumulators of a stage."""
        if stage not in self._accumulators:
            self._accumulators[stage] = find_accumulators(self.step, self.reductions(stage), self._shares_of)
        return self._accumulators[stage]

    @cached_property
    def all_accumulators(self) -> list[Accumulator]:
        """The accumulators of all stages."""
        return [a for stage in range(self.stages) for a in self.accumulators(stage)]

    @cached_property
    def sums_exponentials(self) -> bool:
        """Whether exponentials are summed."""
        return any(a.sums_exponentials for a in self.all_accumulators)

    @cached_property
    def relative_exponentials(self) -> dict[Node, Accumulator]:
        """Values exp(x - m) for the maximum m of the x of a row, which are 1 at most, and what adds each up."""
        return {a.term: a for a in self.all_accumulators if a.term is not None}

    @cached_property
    def shares(self) -> set[Node]:
        """Results of 16 bits exp(x - m) / sum, where nothing else reads the exponential."""
        return {n for term, a in self.relative_exponentials.items() for n in self._shares_of(term, a.readers)}

    @cached_property
    def state_size(self) -> int:
        """Bound the bytes of a slot for the totals of a row: whole words of eight bytes.

        Those of shares have a base of two words beside their step's.
        """
        own = -(-state_size(self.step) // 8) * 8
        return own + 8 * sum(a.has_shares for s in range(self.stages) for a in self.accumulators(s))

    def _shares_of(self, term: Node, sums: list[Node]) -> set[Node]:
        along_rows = not self.by_columns and self.domain[1] > 1
        return shares_of(term, self.step, sums, self.may_be_quick) if along_rows else set()

    def may_be_quick(self, node: Node) -> bool:
        """Whether the rounding of a value to 16 bits hides the error of a quick form."""
        return dtypes.compute_dtype(node.dtype) != node.dtype and node not in self.beneath_steps


def _by_operand(nodes: Iterable[Node]) -> dict[Node, list[Node]]:
    """Group the reductions among nodes by their operand."""
    found: dict[Node, list[Node]] = {}
    for node in nodes:
        if node.reduction:
            found.setdefault(node.inputs[0], []).append(node)
    return found
