"""Emit nodes of the graph as expressions and lines of CUDA C."""

from __future__ import annotations

import math
import re
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Node
from ..ir.operators import POINTWISE
from .c_types import c_type, stored_type
from .parameters import ANY, COLUMN, FULL, Parameter
from .program import Program


def indented(text: str) -> str:
    """Indent the lines of a text by one level."""
    return "\n".join("    " + line if line else line for line in text.split("\n"))


def literal(value: float | int | bool, kind: str) -> str:
    """Write a Python number as a C literal of type `kind`."""
    if kind == "bool":
        return "true" if value else "false"
    if kind == "i64":
        return f"{int(value)}LL"
    with np.errstate(over="ignore"):
        number = float(np.float32(value)) if kind == "float" else float(value)
    if math.isnan(number):
        return f"(infinity<{kind}>() - infinity<{kind}>())"
    if math.isinf(number):
        return f"infinity<{kind}>()" if number > 0 else f"(-infinity<{kind}>())"
    text = repr(float(np.format_float_positional(np.float32(value), unique=True))) if kind == "float" else repr(number)
    text = text if "." in text or "e" in text else text + ".0"
    text += "f" if kind == "float" else ""
    return f"({text})" if number < 0 or math.copysign(1.0, number) < 0 else text


@dataclass
class Scope:
    """The values that a function can read: nodes by their expressions, and the parameters of the program."""

    program: Program
    expressions: ChainMap[Node, str] = field(default_factory=ChainMap)

    def copy(self) -> Scope:
        """Return an inner scope, which sees these expressions and keeps those added to it to itself."""
        return Scope(self.program, self.expressions.new_child())

    def constant(self, node: Node, dtype: str) -> str:
        """Return a constant in the C type that a dtype is computed in: a literal, or a parameter of the kernel."""
        kind = c_type(dtype)
        if node in self.program.loaded:
            return f"static_cast<{kind}>({self.program.names[node]})"
        return literal(node.value, kind)

    def element(self, node: Node, row: str, col: str) -> str:
        """Return the expression that loads one element of a parameter, given its row and column as expressions."""
        p = self.program.loaded[node]
        if p.is_number:
            return p.name
        index = []
        if node.shape[0] != 1 and p.has_rows:
            index.append(f"{p.row(row)} * {p.name}_rows")
        if node.shape[1] != 1:
            index.append(f"{p.col(col)} * {p.name}_cols" if p.extent == ANY else p.col(col))
        return f"widen({p.name}[{' + '.join(index) or '0'}])"


class Body:
    """The lines of one function, and the values that they compute.

    Parameters
    ----------
    scope : Scope
    tile : bool
        Read full and per-column parameters from the tile, at element j.
    optimistic : bool
        Compute only the fast forms of guards. They may stand for the exact ones where all variables in `checks` are
        finite, and all values of the row in `row_checks`.

    Attributes
    ----------
    index : tuple of str
        The row and column that parameters are loaded at, as expressions.
    computed : list of Node
        The values that the lines compute.
    kept : list of Node
        Values that the lines leave in the Element for later stages.
    tile_parameters : list of Parameter
        The parameters read from the tile.
    repair : callable or None
        Emits the repair of a guarded row sum, and returns a call of it; None where such sums cannot occur.
    """

    def __init__(self, scope: Scope, tile: bool = False, optimistic: bool = False):
        self.scope = scope
        self.tile = tile
        self.optimistic = optimistic
        self.checks: list[str] = []
        self.row_checks: list[str] = []
        self.index = ("row", "col")
        self.lines: list[str] = []
        self.computed: list[Node] = []
        self.kept: list[Node] = []
        self.tile_parameters: list[Parameter] = []
        self.repair: Callable[[Node], str] | None = None

    def line(self, text: str) -> None:
        self.lines.append(text)

    def value(self, node: Node) -> str:
        """Return an expression for a value, after emitting lines for what it needs and is not computed yet."""
        if node in self.scope.expressions:
            return self.scope.expressions[node]
        text = ""
        for missing in g.topological([node], self._missing_operands):
            text = self._value(missing)
        return text  # the last one's: that of the node itself

    def _missing_operands(self, node: Node) -> tuple[Node, ...]:
        """Return the operands of a value that have to be computed before it."""
        known = node in self.scope.expressions or node in self.scope.program.loaded
        if node in self.scope.program.shares and not known:
            term, total = node.inputs
            return (total,) if self._is_held(term) else (total, _operand_of(term))
        # Operands of a product are computed within its loop.
        return () if known or node.op == "matmul" else g.eager_inputs(node)

    def _value(self, node: Node) -> str:
        """Return an expression for a value whose operands are computed, after emitting its line."""
        program = self.scope.program
        if node in self.scope.expressions:
            return self.scope.expressions[node]
        if node.op == "const":
            return self.scope.constant(node, node.dtype)
        if node in program.loaded:
            return self._loaded(node)
        name = program.names.get(node) or program.fresh_name()
        kind = c_type(node.dtype)
        if node.op == "matmul":
            self._product(node, name, kind)
            self.scope.expressions[node] = name
            return name
        if node.op == "guard" and self.optimistic:
            self.line(f"const {kind} {name} = {self.value(node.inputs[0])};")
            self.checks.append(name)
        elif node.op == "guard":
            self._emit_guard(node, name, f"{kind} {name}")
        elif node in program.shares:
            self.line(f"const {kind} {name} = {self._share(node)};")
        elif node.op == "divide" and self.optimistic and self._by_row(node):
            self.line(f"const {kind} {name} = {self._quotient(node, name)};")
        else:
            self.line(f"const {kind} {name} = {self.expression(node)};")
        self.scope.expressions[node] = name
        self.computed.append(node)
        return name

    def _quotient(self, node: Node, name: str) -> str:
        """Return the expression of a quotient `name` by a value whose reciprocal the Row holds; note what to check."""
        program, dividend = self.scope.program, node.inputs[0]
        top, bottom = (self.operand(i, node.dtype) for i in node.inputs)
        reciprocal, is_rounded = f"{bottom}_reciprocal", program.may_be_quick(node)
        # A finite reciprocal suffices: a product of 16 bits overflows where the quotient does, exp(x - m) <= 1 nowhere.
        if is_rounded or dividend in program.relative_exponentials:
            self._check_row(reciprocal)
        else:
            self.checks.append(name)
        if is_rounded:
            return f"{top} * {reciprocal}"
        function = "divide_positive" if dividend.op == "exp" else "divide_by"  # an exponential is never -0
        return f"{function}({top}, {bottom}, {reciprocal})"

    def _share(self, node: Node) -> str:
        """Return the expression of an exponential's share of the sum of its row: it is NaN where the sum is."""
        term, total = node.inputs[0], self.value(node.inputs[1])
        if self._is_held(term):
            return f"{self.value(term)} * {total}_share"
        return f"shifted_exp({self.value(_operand_of(term))}, {total}_scale, {total}_shift) * {total}_share"

    def _is_held(self, node: Node) -> bool:
        """Whether the Element holds a value; what this code computes has a name of its own."""
        return self.scope.expressions.get(node, "").startswith("e.")

    def _check_row(self, value: str) -> None:
        if value not in self.row_checks:
            self.row_checks.append(value)

    def assign(self, node: Node, target: str, row: str, col: str) -> None:
        """Emit the computation of a value into a given variable, at a given index."""
        self.index = (row, col)
        if node.op == "guard":
            self._emit_guard(node, target, target)
        else:
            self.line(f"{target} = {self.expression(node)};")

    def _product(self, node: Node, name: str, kind: str) -> None:
        """Emit one element of a product that only a guard reads, as an inner product by this thread alone."""
        a, b = node.inputs
        row, col = self.index
        # Known values of an element do not hold for other columns; those of the row do.
        of_row = {n: text for n, text in self.scope.expressions.items() if text.startswith("r.")}
        inner = Body(Scope(self.scope.program, ChainMap(of_row)).copy())
        inner.index = (row, f"k_{name}")
        left = inner.value(a)
        inner.scope = Scope(self.scope.program, ChainMap(of_row)).copy()
        inner.index = (f"k_{name}", col)
        right = inner.value(b)
        self.line(f"{kind} {name} = 0;")
        self.line(f"for (i64 k_{name} = 0; k_{name} < {a.shape[1]}; ++k_{name}) {{")
        self.lines += [f"    {line}" for line in inner.lines]
        self.line(f"    {name} += {left} * {right};")
        self.line("}")

    def _loaded(self, node: Node) -> str:
        """Return an expression for a parameter's element; one of the tile is widened to its compute dtype once."""
        program = self.scope.program
        parameter = program.loaded[node]
        if not self.tile or parameter.extent not in (FULL, COLUMN):
            return self.scope.element(node, *self.index)
        if parameter not in self.tile_parameters:
            self.tile_parameters.append(parameter)
        name = parameter.name
        self.line(f"const {c_type(parameter.dtype)} at_{name} = widen(tile.{name}, j);")
        self.scope.expressions[node] = f"at_{name}"
        self.computed.append(node)
        return f"at_{name}"

    def _emit_guard(self, node: Node, name: str, declared: str) -> None:
        """Emit the fast form of a guard into `declared`, a variable or its declaration, and then the exact form."""
        fast, exact = node.inputs
        self.line(f"{declared} = {self.value(fast)};")
        self.line(f"if (!isfinite({name})) {{")
        if exact.reduction and exact not in self.scope.expressions:
            if self.repair is None:
                raise AssertionError("a guarded row sum where no repair can be emitted")
            self.line(f"    {name} = {self.repair(node)};")
        else:
            inner = Body(self.scope.copy())
            inner.index, inner.repair = self.index, self.repair
            value = inner.value(exact)
            self.lines += [f"    {line}" for line in inner.lines]
            self.line(f"    {name} = {value};")
        self.line("}")

    def operand(self, node: Node, dtype: str) -> str:
        """Return an expression for a value in the C type that `dtype` is computed in."""
        kind = c_type(dtype)
        if node.op == "const":
            return self.scope.constant(node, dtype)
        text = self.value(node)
        have = c_type(node.dtype)
        return text if have == kind else f"static_cast<{kind}>({text})"

    def expression(self, node: Node) -> str:
        """Return the expression that applies a node's operator to its operands."""
        if node.op in g.PASS_THROUGH:
            return self._pass_through(node)
        if node.op == "positions":
            return f"static_cast<{c_type(node.dtype)}>({self.index[node.axis]})"
        row, taken = POINTWISE[node.op], g.operand_dtypes(node)
        if row.arity == 1 and row.result == "bool" and not dtypes.is_float(taken[0]):
            taken = ["float32"]  # CUDA's isfinite, isnan, ... take floats only
        operands, dtype = list(map(self.operand, node.inputs, taken)), taken[-1]
        if node.op == "equal" and c_type(dtype) == "i64" and any(map(_fits_32_bits, node.inputs)):
            short, other = operands if _fits_32_bits(node.inputs[0]) else operands[::-1]
            return f"equals_int({other}, {short})"
        if row.quick and self.scope.program.may_be_quick(node):
            return formatted(row.quick, operands, c_type(dtype))
        if c_type(dtype) == "i64" and node.op in _WRAPPING:
            # C leaves the overflow of signed integers undefined; NumPy wraps.
            return f"static_cast<i64>({formatted(row.cuda, [f'static_cast<u64>({o})' for o in operands], 'u64')})"
        return formatted(row.cuda, operands, c_type(dtype))

    def _by_row(self, node: Node) -> bool:
        """Whether a quotient divides a row's elements by one value whose reciprocal the Row holds."""
        program, bottom = self.scope.program, node.inputs[1]
        in_row = self.scope.expressions.get(bottom, "").startswith("r.")
        return in_row and bottom in program.divisors and program.extent(node) == FULL

    def stored(self, node: Node, dtype: str) -> str:
        """Return an expression for a value as an array of this dtype stores it."""
        return f"narrow<{stored_type(dtype)}>({self.unrounded(node, dtype)})"

    def unrounded(self, node: Node, dtype: str) -> str:
        """Return an expression for a value before an array of this dtype rounds it."""
        if node.op == "cast" and node.dtype == dtype and _is_rounding(node):
            return self._cast_operand(node)  # what was rounded by itself, and widened, would be rounded twice
        return self.value(node)

    def _cast_operand(self, node: Node) -> str:
        """Return the expression of what a cast to a dtype that is not computed in rounds."""
        source = node.inputs[0]
        value = self.operand(source, source.dtype)
        if dtypes.is_integer(node.dtype):
            return f"static_cast<i64>({value})"
        return value if dtypes.is_float(source.dtype) else f"static_cast<float>({value})"

    def _pass_through(self, node: Node) -> str:
        """Return the expression of a cast or a broadcast; a cast to a 16-bit dtype rounds, and widens again."""
        source = node.inputs[0]
        value = self.operand(source, source.dtype)
        if node.dtype == source.dtype:
            return value
        if _is_rounding(node):
            return f"widen(narrow<{stored_type(node.dtype)}>({self._cast_operand(node)}))"
        return f"({value} != 0)" if node.dtype == "bool" else f"static_cast<{c_type(node.dtype)}>({value})"


def rounded_in_pairs(result: Parameter) -> bool:
    """Whether the elements of a result are float32 until they are stored in 16 bits: two are rounded at a time."""
    node = result.node
    if node.op == "cast" and node.dtype == result.dtype and _is_rounding(node):
        node = node.inputs[0]
    return result.dtype in ("float16", "bfloat16") and c_type(node.dtype) == "float"


def _is_rounding(node: Node) -> bool:
    """Whether a cast goes to a dtype in which nothing is computed, from another one."""
    return node.dtype != node.inputs[0].dtype and dtypes.compute_dtype(node.dtype) != node.dtype


def _operand_of(term: Node) -> Node:
    """Return the x of exp(x - m)."""
    return term.inputs[0].inputs[0]


_IN_32_BITS = ("int8", "int16", "int32", "uint8", "uint16")


def _fits_32_bits(node: Node) -> bool:
    """Whether all values of an integer are known to be in the range of int32."""
    widened = node.op == "cast" and node.dtype == "int64"
    return node.dtype in _IN_32_BITS or (widened and _fits_32_bits(node.inputs[0]))


_WRAPPING = ("add", "subtract", "multiply", "negative", "square")
_NUMBER = re.compile(r"T\((-?[0-9][0-9.e+-]*|nan)\)")


def formatted(template: str, operands: list[str], kind: str) -> str:
    """Fill operands and their type into an operator's CUDA expression."""
    text = _NUMBER.sub(lambda m: literal(float(m.group(1)), kind), template)
    text = text.replace("T(", f"{kind}(")
    return text.format(*operands)


def struct_text(name: str, fields: dict[str, str]) -> str:
    """Write a struct of fields, given as C types by name."""
    return f"struct {name} {{ {' '.join(f'{kind} {field};' for field, kind in fields.items())} }};"


def function_text(head: str, body: Body) -> str:
    """Write a device function."""
    if not body.lines:
        return f"__device__ {head} {{}}"
    return f"__device__ {head} {{\n" + indented("\n".join(body.lines)) + "\n}"
