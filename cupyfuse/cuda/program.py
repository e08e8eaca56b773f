"""What a step becomes on the GPU: the parameters of its kernel, and which stage computes what."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Node, Shape
from ..ir.operators import POINTWISE, REDUCTIONS
from ..plan.schedule import Step, resolve

# A parameter's place: one value an element, a row, a column, or one for all; "any" is read with strides, by guards.
FULL, ROW, COLUMN, SCALAR, ANY = "full", "row", "column", "scalar", "any"


@dataclass(frozen=True)
class Parameter:
    """One array (or number) that a kernel is given.

    The kernel takes a pointer, then `rows`, the stride from row to row in elements, for full, row and any places, then
    `cols`, the stride from column to column, for the place any. A number is one double.
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


@dataclass
class Program:
    """A step analysed for emission."""

    step: Step
    storage: dict[Node, str]
    names: dict[Node, str] = field(default_factory=dict)
    parameters: list[Parameter] = field(default_factory=list)
    outputs: dict[Node, Parameter] = field(default_factory=dict)
    loaded: dict[Node, Parameter] = field(default_factory=dict)
    _fresh: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.by_columns = self.step.kind == "ColumnStats"
        self.stage: dict[Node, int] = {}
        taken: set[str] = set()
        for node in self.step.inputs:
            self._add(node, self.place(node), False, taken)
        for node in self.step.rare:
            self._add(node, ANY, False, taken)
        for node in self._named_numbers():
            self._add(node, SCALAR, False, taken)
        for node in self.step.outputs:
            self._add(node, self.place(node), True, taken)
        for number, node in enumerate(self.step.nodes):
            self.names[node] = f"v{number}"
        for node in self.step.nodes:
            self.stage[node] = self._stage_of(node)

    def fresh_name(self) -> str:
        """A name for a value that only a guard computes."""
        return f"w{next(self._fresh)}"

    @property
    def domain(self) -> Shape:
        return self.step.domain

    @property
    def stages(self) -> int:
        return 1 + max((self.stage[n] for n in self.step.nodes if self.stage[n] >= 0), default=0)

    def place(self, node: Node) -> str:
        rows, cols = self.domain
        if rows == 1 < cols and node.ndim == 1 and node.shape == (1, cols) and not self.by_columns:
            # A vector stays per-column where there is one row, so that the row is computed as it is among others.
            return COLUMN
        if node.shape == (rows, cols):
            return FULL
        if self.by_columns:
            return COLUMN if node.shape == (1, cols) else ROW if node.shape == (rows, 1) else SCALAR
        return ROW if node.shape == (rows, 1) else COLUMN if node.shape == (1, cols) else SCALAR

    def _add(self, node: Node, place: str, written: bool, taken: set[str]) -> None:
        base = resolve(node)
        name = f"out{len(self.outputs)}" if written else _hint(node, base)
        stem, copies = name, 1
        while {name, f"{name}_rows", f"{name}_cols"} & taken:
            copies += 1
            name = f"{stem}{copies}"
        taken |= {name, f"{name}_rows", f"{name}_cols"}
        dtype = "float64" if node.op == "const" else self.storage[base]
        parameter = Parameter(name, node, place, dtype, written)
        self.parameters.append(parameter)
        if written:
            self.outputs[node] = parameter
        else:
            self.loaded[node] = parameter
            self.names[node] = name

    def _named_numbers(self) -> list[Node]:
        """Numbers that the function was called with: parameters, so that another value needs no other kernel."""
        everything = g.topological(self.step.nodes, lambda n: () if n in self.loaded else n.inputs)
        return [n for n in everything if n.op == "const" and n.name]

    def _stage_of(self, node: Node) -> int:
        """The stage whose elements, or after whose reductions, a value can be computed; -1 before the first."""
        full = self.place(node) == FULL or (node.reduction and node.axis == (0 if self.by_columns else 1))
        stage = 0 if full else -1
        for i in g.eager_inputs(node):
            if i in self.stage:
                after = self.place(i) != FULL and self.place(node) == FULL and self.stage[i] >= 0
                stage = max(stage, self.stage[i] + (1 if after else 0))
        return stage

    @cached_property
    def divisors(self) -> set[Node]:
        """The per-row values by which whole rows are divided in one floating-point type."""
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
        """How many per-column inputs every row needs."""
        return sum(p.place == COLUMN and not p.written and not p.is_number for p in self.parameters)

    @cached_property
    def light(self) -> bool:
        """Whether a thread holds little besides one value an element: one array in, one out, in 32 bits, no guards."""
        full = [p for p in self.parameters if p.place == FULL]
        single = len(full) <= 2 and not self.reads_columns and not any(n.op == "guard" for n in self.step.nodes)
        return single and all(p.dtype != "float64" for p in full)

    def reductions(self, stage: int) -> dict[Node, list[Node]]:
        """The reductions of a stage, by operand."""
        found: dict[Node, list[Node]] = {}
        for node in self.step.nodes:
            if node.reduction and self.stage[node] == stage:
                found.setdefault(node.inputs[0], []).append(node)
        return found

    def accumulators(self, stage: int) -> list[tuple[str, str, Node, list[Node]]]:
        """(name, device type, operand, reductions that read it) for each accumulator of a stage."""
        result: list[tuple[str, str, Node, list[Node]]] = []
        for operand, nodes in self.reductions(stage).items():
            ops = {n.op: n for n in nodes}
            shared = [ops["max"]] if "expsum" in ops and "max" in ops else []
            for node in nodes:
                if node in shared:
                    continue
                kind = f"{REDUCTIONS[node.op].accumulator}<{c_type(node.dtype)}>"
                readers = [node, *shared] if node.op == "expsum" else [node]
                result.append((f"t{len(result)}", kind, operand, readers))
        return result


def _hint(node: Node, base: Node) -> str:
    """A readable parameter name that no other name of the emitted text can be mistaken for."""
    name = re.sub(r"\W", "_", node.name or base.name or f"{base.op}_").lstrip("_")
    if base is not node:
        name += "_T" if node.op == "transpose" else "_view"
    if _GENERATED.fullmatch(name) or name in _RESERVED or not name[:1].isalpha():
        name = f"in_{name}"
    return name


_GENERATED = re.compile(r"at_.*|in_.*|out\d*|repair.*|[vwtp]\d*|k_w\d+|product\d+|prepared\d+_|.*_kernel|[A-Z].*")
# C++'s words, those of the templates, and every function that an operator's expression calls.
_RESERVED_TEXT = """
alignas auto bool break case catch char class const continue default delete do double else enum extern false float for
friend goto if inline int long mutable namespace new operator private protected public register return short signed
sizeof static struct switch template this throw true try typedef typename union unsigned using virtual void volatile
while i64 u32 u64 f16 bf16 row col rows cols partial shares changed e j k r o p t tile totals team begin load element
store finish commit peek add stages reduces slot mask upper members settle merge exchange lead widen narrow infinity
nan_max nan_min divide_by reciprocal_of exp_in_sum plus_log quick_divide quick_exp
load_pack store_pack load_columns largest_of has_exact shared_finish
exact_element again fine total repair
"""
_CALLED = {name for operator in POINTWISE.values() for name in re.findall(r"([a-z_0-9]+)\(", operator.cuda)}
_RESERVED = set(_RESERVED_TEXT.split()) | _CALLED

_C_TYPES = {
    "bool": "bool",
    "int64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "float",
    "float64": "double",
}


def stored_type(dtype: str) -> str:
    """The C type of an element in memory."""
    return _C_TYPES[dtype]


def c_type(dtype: str) -> str:
    """The C type in which values of a dtype are computed."""
    return _C_TYPES[dtypes.compute(dtype)]
