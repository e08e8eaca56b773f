"""Analysis of a step for emission: the parameters of its kernel, and the stage that computes each value."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import NamedTuple

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Node, Shape
from ..ir.operators import REDUCTIONS
from ..plan.schedule import Step, resolve

# Places: one value per element, per row, per column, or one in all; guards read ANY with both strides.
FULL, ROW, COLUMN, SCALAR, ANY = "full", "row", "column", "scalar", "any"
GIVEN = "product"  # the name of a value that a template computes


@dataclass(frozen=True)
class Parameter:
    """An array or number that a kernel takes.

    An array is passed as a pointer, then its row stride in elements (places FULL, ROW and ANY), then its column stride
    (place ANY); a number as one double.
    """

    name: str
    node: Node
    place: str
    dtype: str
    written: bool

    @property
    def is_number(self) -> bool:
        return self.node.op == "const"

    @property
    def has_rows(self) -> bool:
        return self.place in (FULL, ROW, ANY) and not self.is_number

    @property
    def has_cols(self) -> bool:
        return self.place == ANY and not self.is_number


class Accumulator(NamedTuple):
    """What a stage accumulates of an operand: its field in the totals, its device type, the reductions that read it."""

    name: str
    kind: str
    operand: Node
    readers: list[Node]


@dataclass
class Program:
    """A step analysed for emission: names of values, and the parameters that are written and loaded, by node.

    `given` is an input that the template computes; it is not among the `parameters`.
    """

    step: Step
    storage: dict[Node, str]
    given: Node | None = None
    names: dict[Node, str] = field(default_factory=dict)
    parameters: list[Parameter] = field(default_factory=list)
    outputs: dict[Node, Parameter] = field(default_factory=dict)
    loaded: dict[Node, Parameter] = field(default_factory=dict)
    _fresh: Iterator[int] = field(default_factory=count)
    _accumulators: dict[int, list[Accumulator]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_columns = self.step.kind == "ColumnStats"
        self.stage: dict[Node, int] = {}
        used: set[str] = set()
        for node in self.step.inputs:
            if node is self.given:
                self.names[node] = GIVEN
                self.loaded[node] = Parameter(GIVEN, node, FULL, self.storage[node], False)
            else:
                self._add(node, self.place(node), False, used)
        for node in self.step.repair_inputs:
            self._add(node, ANY, False, used)
        for node in self._named_numbers():
            self._add(node, SCALAR, False, used)
        for node in self.step.outputs:
            self._add(node, self.place(node), True, used)
        for number, node in enumerate(self.step.nodes):
            self.names[node] = f"v{number}"
        if self.given is not None:
            self.stage[self.given] = 0
        for node in self.step.nodes:
            self.stage[node] = self._stage_of(node)

    def fresh_name(self) -> str:
        """Return a name for a value that only a guard computes."""
        return f"w{next(self._fresh)}"

    @property
    def domain(self) -> Shape:
        return self.step.domain

    @cached_property
    def stages(self) -> int:
        return 1 + max((self.stage[n] for n in self.step.nodes if self.stage[n] >= 0), default=0)

    def place(self, node: Node) -> str:
        rows, cols = self.domain
        if rows == 1 < cols and node.ndim == 1 and node.shape == (1, cols) and not self.by_columns:
            # A vector is per-column for a single row too, so that a row's bits do not depend on the number of rows.
            return COLUMN
        if node.shape == (rows, cols):
            return FULL
        if self.by_columns:
            return COLUMN if node.shape == (1, cols) else ROW if node.shape == (rows, 1) else SCALAR
        return ROW if node.shape == (rows, 1) else COLUMN if node.shape == (1, cols) else SCALAR

    def _add(self, node: Node, place: str, written: bool, used: set[str]) -> None:
        """Add a parameter of the kernel for a value, under a name that is not in `used`."""
        base = resolve(node)
        name = f"out{len(self.outputs)}" if written else _input_name(node, base)
        stem, copies = name, 1
        while {name, f"{name}_rows", f"{name}_cols"} & used:
            copies += 1
            name = f"{stem}{copies}"
        used |= {name, f"{name}_rows", f"{name}_cols"}
        dtype = "float64" if node.op == "const" else self.storage[base]
        parameter = Parameter(name, node, place, dtype, written)
        self.parameters.append(parameter)
        if written:
            self.outputs[node] = parameter
        else:
            self.loaded[node] = parameter
            self.names[node] = name

    def _named_numbers(self) -> list[Node]:
        """Find the number arguments of the function: parameters, so that another value needs no other kernel."""
        everything = g.topological(self.step.nodes, lambda n: () if n in self.loaded else n.inputs)
        return [n for n in everything if n.op == "const" and n.name]

    def _stage_of(self, node: Node) -> int:
        """Return the first stage in which a value can be computed; -1 if it depends on no element of the rows."""
        full = self.place(node) == FULL or (node.reduction and node.axis == (0 if self.by_columns else 1))
        stage = 0 if full else -1
        for i in g.eager_inputs(node):
            if i in self.stage:
                after = self.place(i) != FULL and self.place(node) == FULL and self.stage[i] >= 0
                stage = max(stage, self.stage[i] + (1 if after else 0))
        return stage

    @cached_property
    def divisors(self) -> set[Node]:
        """Per-row values that divide whole rows of their own type: a reciprocal can replace the divisions."""
        found = set()
        for node in self.step.nodes:
            if node.op == "divide" and self.place(node) == FULL and not self.by_columns:
                bottom = node.inputs[1]
                same = c_type(bottom.dtype) == c_type(node.dtype)
                if same and bottom.op != "const" and self.place(bottom) in (ROW, SCALAR) and self.domain[1] > 1:
                    found.add(bottom)
        return found

    @cached_property
    def reads_columns(self) -> int:
        """Number of per-column arrays that each row reads."""
        return sum(p.place == COLUMN and not p.written and not p.is_number for p in self.parameters)

    @cached_property
    def light(self) -> bool:
        """Whether a thread holds one value per element at most: one array in, one out, in 32 bits, no guards."""
        full = [p for p in self.parameters if p.place == FULL]
        single = len(full) <= 2 and not self.reads_columns and not any(n.op == "guard" for n in self.step.nodes)
        return single and all(p.dtype != "float64" for p in full)

    @cached_property
    def by_stage(self) -> dict[int, list[Node]]:
        """The step's values by the stage that computes them."""
        found: dict[int, list[Node]] = {}
        for node in self.step.nodes:
            found.setdefault(self.stage[node], []).append(node)
        return found

    def reductions(self, stage: int) -> dict[Node, list[Node]]:
        """Return the reductions of a stage, grouped by operand."""
        found: dict[Node, list[Node]] = {}
        for node in self.by_stage.get(stage, ()):
            if node.reduction:
                found.setdefault(node.inputs[0], []).append(node)
        return found

    @cached_property
    def full_outputs(self) -> dict[int, list[Node]]:
        """The results with a value for each element, by stage."""
        found: dict[int, list[Node]] = {}
        for node in self.step.outputs:
            if self.place(node) == FULL:
                found.setdefault(self.stage[node], []).append(node)
        return found

    @cached_property
    def last_readers(self) -> dict[Node, int]:
        """The last stage in which a value is read by one that no earlier stage has computed."""
        computed: dict[Node, int] = {}  # the first stage in which an element needs a value
        guards: dict[int, list[Node]] = {}
        for stage in range(self.stages):
            targets = [*self.reductions(stage), *self.full_outputs.get(stage, ())]
            for node in g.topological(
                targets, lambda n: () if n in computed or n in self.loaded else g.eager_inputs(n)
            ):
                if node not in computed:
                    computed[node] = stage
                    guards.setdefault(stage, []).extend([node] * (node.op == "guard"))
        # Exact forms compute anew what no element needs otherwise, in each stage: the last one counts.
        for stage in reversed(range(self.stages)):
            exact = [guard.inputs[1] for guard in guards.get(stage, ())]
            for node in g.topological(exact, lambda n: () if n in computed or n in self.loaded else n.inputs):
                computed.setdefault(node, stage)
        found: dict[Node, int] = {}
        for node, stage in computed.items():
            for i in node.inputs:
                found[i] = max(stage, found.get(i, stage))
        return found

    def accumulators(self, stage: int) -> list[Accumulator]:
        """Return the accumulators of a stage; a maximum is read from that of an exponential sum beside it."""
        if stage not in self._accumulators:
            self._accumulators[stage] = self._find_accumulators(stage)
        return self._accumulators[stage]

    def _find_accumulators(self, stage: int) -> list[Accumulator]:
        result: list[Accumulator] = []
        for operand, nodes in self.reductions(stage).items():
            ops = {n.op: n for n in nodes}
            shared = [ops["max"]] if "expsum" in ops and "max" in ops else []
            for node in nodes:
                if node in shared:
                    continue
                kind = f"{REDUCTIONS[node.op].accumulator}<{c_type(node.dtype)}>"
                readers = [node, *shared] if node.op == "expsum" else [node]
                result.append(Accumulator(f"t{len(result)}", kind, operand, readers))
        return result


def _input_name(node: Node, base: Node) -> str:
    """Name a parameter after the user's argument, with a prefix that no other emitted name has."""
    name = node.name or base.name or base.op
    suffix = "" if base is node else "_T" if node.op == "transpose" else "_view"
    return "in_" + re.sub(r"\W", "_", name, flags=re.ASCII) + suffix


_C_TYPES = {
    "bool": "bool",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint32": "u32",
    "uint16": "u16",
    "uint8": "u8",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "float",
    "float64": "double",
}


def stored_type(dtype: str) -> str:
    """Return the C type in which a dtype is stored."""
    return _C_TYPES[dtype]


def c_type(dtype: str) -> str:
    """Return the C type in which a dtype is computed."""
    return _C_TYPES[dtypes.compute_dtype(dtype)]
