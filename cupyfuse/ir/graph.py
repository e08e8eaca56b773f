"""The graph of a chain: a small SSA form over two-dimensional values.

Every value is rows x columns: full (R, C), per-row (R, 1), per-column (1, C), or scalar (1, 1). The tracer maps the
axes of the user's arrays (one-dimensional, transposed, with new axes, more than two) to these.

Operators:

====================  ==================================================================================================
input                 argument number `argument`, called `name`, of `ndim` dimensions
const                 the Python number `value`, weak in promotion; with a `name`, a parameter of the kernel;
                      with a `number`, one that each call brings, and `value` is NaN
positions             0, 1, 2, ... along `axis`: (n, 1) or (1, n)
cast                  the input converted to the node's dtype
broadcast             the input repeated along its axes of length one
stop_gradient         the input as a constant for differentiation
a pointwise operator  a row of `operators.POINTWISE`
a reduction           a row of `operators.REDUCTIONS` along `axis` (0: down the columns, 1: along the rows)
matmul                (R, K) x (K, C)
batched_matmul        `batches.count` matrix products; the matrices of an operand are stacked by rows
accumulate            inputs (a, b, c): a @ b added in place to the argument c
split                 a float32 matrix as `parts` float16 ones and a scale for each row (`kernels_cu/split_pieces.cuh`)
split_matmul          (R, K) x (C, K)^T; inputs: the splits of both operands, then both operands. If `unscaled`, the
                      result has still to be multiplied by its factors
factor                a factor of such a product, by `name`: row, row_rest or column
transpose, reshape    another view of the same elements
slice                 a view of every `step`-th row and column; `dims` has (first, step) for each axis
repeat                a view in which rows come again, as `repeats` says
swap                  a view in which the columns of each pair, 2 k and 2 k + 1, change places
strided               a copy of a strided view of the input: (length, stride) pairs in `dims`, first element `offset`
put                   a copy of the first input with such a view of it replaced by the second input
concat                the inputs side by side in memory, where steps write each where it belongs
cumsum, cumprod       totals of each row up to each column
guard                 inputs (fast, exact): fast where that is finite, else exact, evaluated only there
custom_derivative     inputs (value, x, slope, ...): value, with its own partial derivative `slope` by each `x`
library               result number `result` of `call`, a function of NumPy or CuPy on whole arrays
====================  ==================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from .. import dtypes
from .batches import Batches
from .library import LibraryCall
from .numbers import Number, function_of_numbers
from .operators import POINTWISE, REDUCTIONS, Operator
from .repeats import Repeats

Shape = tuple[int, int]
T = TypeVar("T")

VIEWS = ("transpose", "reshape", "slice", "repeat", "swap")  # of their input in memory
SCANS = ("cumsum", "cumprod")  # running totals along the rows
PASS_THROUGH = ("cast", "broadcast", "stop_gradient")  # their input in another dtype or shape, or without its gradient


@dataclass(frozen=True, eq=False)
class Node:
    """One value of the graph. Nodes compare by identity.

    The fields after `dtype` belong to some operators only; elsewhere they keep their defaults.

    Attributes
    ----------
    axis : of a reduction or of positions
    value : of a const
    name : of an input, of a const that is a kernel parameter, or of a factor
    argument, ndim : of an input: its argument number, and the number of dimensions of the user's array
    gradient : of an extremum: which elements get its gradient, see `adjoints.extremum_adjoint`
    partial : of an extremum: whether it is the first of two steps that reduce a whole matrix
    by_columns : of a split: whether its operand is column-major
    parts : of a split and of its products: 2 for hi and lo, 1 for hi alone
    unscaled : of a product from splits of one part: whether the scales of its operands are still in it
    how : of a matrix product: how it is computed, and why; for reports
    rounds : of a 16-bit product: whether it may be stored rounded, see `plan/rounding.py`
    dims, offset : of slice, strided and put: see above
    repeats : of repeat: which rows come again, or where they are
    batches : of a batched product
    call, result : of a library node: the call, and which of its results this is
    number : of a const that each call brings
    """

    op: str
    inputs: tuple[Node, ...]
    shape: Shape
    dtype: str
    axis: int = -1
    value: Any = 0.0
    name: str = ""
    argument: int = -1
    ndim: int = 2
    gradient: str = ""
    partial: bool = False
    by_columns: bool = False
    parts: int = 0
    unscaled: bool = False
    how: str = ""
    rounds: bool = False
    dims: tuple[tuple[int, int], ...] = ()
    offset: int = 0
    repeats: Repeats | None = None
    batches: Batches | None = None
    call: LibraryCall | None = None
    result: int = 0
    number: Number | None = None

    def __repr__(self) -> str:
        extra = "".join(f" {f.name}={v}" for f in fields(self)[4:] if (v := getattr(self, f.name)) != f.default)
        return f"<{self.op} {self.shape[0]}x{self.shape[1]} {self.dtype}{extra}>"

    @property
    def pointwise(self) -> bool:
        return self.op in POINTWISE or self.op in (*PASS_THROUGH, "guard", "custom_derivative")

    @property
    def reduction(self) -> bool:
        return self.op in REDUCTIONS

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def nbytes(self) -> int:
        return self.size * dtypes.ITEMSIZE[self.dtype]


@dataclass
class Graph:
    """The values that a call returns or writes back.

    Attributes
    ----------
    inputs : the array arguments, by argument number
    outputs : the results, in order
    effects : (argument number, new value) of arguments changed in place
    """

    inputs: list[Node]
    outputs: list[Node]
    effects: list[tuple[int, Node]] = field(default_factory=list)

    @property
    def roots(self) -> list[Node]:
        """The outputs and the new values of changed arguments: all that has to be computed."""
        return [*self.outputs, *(node for _, node in self.effects)]

    @cached_property
    def order(self) -> tuple[Node, ...]:
        """All nodes beneath the roots, inputs first. Many rewrites leave a graph as it is, and go through it again."""
        return tuple(topological(self.roots))

    def replace(self, mapping: dict[Node, Node]) -> Graph:
        """Return the graph with its roots mapped to other nodes."""
        return Graph(
            self.inputs,
            [mapping.get(n, n) for n in self.outputs],
            [(arg, mapping.get(n, n)) for arg, n in self.effects],
        )


# Constructors -------------------------------------------------------------------------------------------------------


def argument(number: int, name: str, shape: Shape, dtype: str, ndim: int = 2) -> Node:
    """Make an input of the graph; `ndim` is the number of dimensions of the user's array."""
    return Node("input", (), shape, dtype, argument=number, name=name, ndim=ndim)


def const(value: complex | float | int | bool, name: str = "") -> Node:
    """Make a constant of a Python number's type, weak in promotion; with a name, a parameter of the kernel."""
    dtype = {bool: "bool", int: "int64", complex: "complex128"}.get(type(value), "float64")
    return Node("const", (), (1, 1), dtype, value=value, name=name)


def number(value: Number, name: str) -> Node:
    """Make a constant whose value each call brings: a number among the arguments, or a function of such arguments."""
    return Node("const", (), (1, 1), "float64", value=math.nan, name=name, number=value)


def axis_length(n: int, axis: int) -> Node:
    """Make a constant of an axis's length; the number of rows is a kernel parameter, as it varies from call to call."""
    return const(float(n), "row_count" if axis == 0 else "")


def broadcast_shapes(*shapes: Shape) -> Shape:
    rows = {s[0] for s in shapes} - {1}
    cols = {s[1] for s in shapes} - {1}
    if len(rows) > 1 or len(cols) > 1:
        raise ValueError(f"shapes {', '.join(map(str, shapes))} cannot be broadcast together")
    return (rows.pop() if rows else 1, cols.pop() if cols else 1)


def pointwise(op: str, *inputs: Node) -> Node:
    """Apply a pointwise operator with NumPy's promotion; constants are weak, as Python scalars are."""
    row = POINTWISE[op]
    if all(n.op == "const" for n in inputs):
        return _fold_constants(op, row, inputs)
    values = inputs[1:] if op == "where" else inputs
    dtype = promoted_dtype(values)
    if row.result == "float":
        dtype = dtypes.float_dtype(dtype, op)
    elif row.result == "bool":
        if dtypes.compute_dtype(dtype) != dtype:
            inputs = tuple(_round_constant(n, dtype) for n in inputs)
        dtype = "bool"
    return Node(op, inputs, broadcast_shapes(*(n.shape for n in inputs)), dtype)


def _round_constant(node: Node, dtype: str) -> Node:
    """Round a constant to the 16-bit dtype of the array that it is compared with, as NumPy does; pass others on."""
    if node.op != "const" or node.dtype == "bool":
        return node

    def rounded(value: float) -> float:
        return float(np.asarray(value).astype(dtypes.to_numpy(dtype)).astype(np.float64))

    if node.number is not None:
        return number(function_of_numbers(dtype, rounded, (node.number,)), node.name)
    return const(rounded(node.value))


def _fold_constants(op: str, row: Operator, inputs: tuple[Node, ...]) -> Node:
    """Apply an operator to constants; the result is a constant, which stays weak in promotion."""

    def fold(*values: float) -> float | int | bool:
        with np.errstate(all="ignore"):
            kinds = ["float64" if row.result == "float" else n.dtype for n in inputs]
            return row.numpy(*map(np.asarray, values, kinds)).item()

    result = fold(*(n.value for n in inputs))
    if not any(n.number for n in inputs):
        return const(result)
    if type(result) is float:
        operands = [n.value if n.number is None else n.number for n in inputs]
        return number(function_of_numbers(op, fold, operands), next(n.name for n in inputs if n.number))
    if row.result == "bool" and all(type(n.value) is float for n in inputs):
        return Node(op, tuple(cast(n, "float64") for n in inputs), (1, 1), "bool")  # a test that each call makes
    # Only floats are brought by a call: another type is fixed here, and the plan serves calls with this value alone.
    return const(fold(*(n.value if n.number is None else n.number.read() for n in inputs)))


def promoted_dtype(nodes: Iterable[Node]) -> str:
    """Return the dtype that NumPy promotes operands to; constants are weak."""
    nodes = list(nodes)
    strong = [n.dtype for n in nodes if n.op != "const"]
    return dtypes.promote_weak(strong, [n.value for n in nodes if n.op == "const"])


def operand_dtypes(node: Node) -> list[str]:
    """Return the dtype in which a pointwise operator takes each operand: its own, or what a comparison promotes to."""
    if node.op == "where":
        return ["bool", node.dtype, node.dtype]
    return [node.dtype if node.dtype != "bool" else promoted_dtype(node.inputs)] * len(node.inputs)


def cast(node: Node, dtype: str) -> Node:
    """Convert to a dtype; a cast constant is no longer weak in promotion."""
    return node if node.dtype == dtype and node.op != "const" else Node("cast", (node,), node.shape, dtype)


def positions(n: int, axis: int, dtype: str = "") -> Node:
    """Make the indices 0, 1, ..., n - 1 along an axis; by default in float32 if that holds them exactly."""
    dtype = dtype or ("float32" if n <= 1 << 24 else "float64")
    if n == 1:
        return cast(const(0), dtype)
    return Node("positions", (), (n, 1) if axis == 0 else (1, n), dtype, axis=axis)


def label_dtype(n: int) -> str:
    """Return the dtype of the indices of n elements that labels are compared with: kernels compare int32 faster."""
    return "int32" if n <= 1 << 31 else "int64"


def stop_gradient(node: Node) -> Node:
    return Node("stop_gradient", (node,), node.shape, node.dtype)


def custom_derivative(value: Node, *pairs: tuple[Node, Node]) -> Node:
    """Give a value its own partial derivatives, as pairs (x, slope)."""
    return Node("custom_derivative", (value, *(n for pair in pairs for n in pair)), value.shape, value.dtype)


def broadcast(node: Node, shape: Shape) -> Node:
    """Repeat a value along its axes of length one."""
    return node if node.shape == shape else Node("broadcast", (node,), shape, node.dtype)


def reduce(op: str, node: Node, axis: int, gradient: str = "") -> Node:
    """Reduce along an axis, which keeps the length one; `gradient` is that of an extremum."""
    shape = (1, node.shape[1]) if axis == 0 else (node.shape[0], 1)
    dtype = "int64" if REDUCTIONS[op].gives_position else node.dtype
    return Node(op, (node,), shape, dtype, axis=axis, gradient=gradient)


def scan(op: str, node: Node) -> Node:
    """Compute running totals along the rows of a float matrix, for one of `SCANS`."""
    return Node(op, (node,), node.shape, node.dtype)


def matmul(a: Node, b: Node) -> Node:
    return Node("matmul", (a, b), (a.shape[0], b.shape[1]), promoted_dtype((a, b)))


def transpose(node: Node) -> Node:
    """Transpose a value; scalars, transposes and positions need no node of their own."""
    if node.shape == (1, 1):
        return node
    if node.op == "transpose":
        return node.inputs[0]
    if node.op == "positions":
        return positions(node.size, 1 - node.axis, node.dtype)
    return Node("transpose", (node,), (node.shape[1], node.shape[0]), node.dtype)


def reshape(node: Node, shape: Shape) -> Node:
    """Reshape a value; of a reshaped one, the value itself."""
    if node.op == "reshape":
        (node,) = node.inputs
    return node if node.shape == shape else Node("reshape", (node,), shape, node.dtype)


def guard(fast: Node, exact: Node) -> Node:
    """Replace elements of `fast` that are not finite by those of `exact`, which is evaluated only there."""
    return Node("guard", (fast, exact), fast.shape, fast.dtype)


def with_inputs(node: Node, inputs: Sequence[Node], shape: Shape | None = None) -> Node:
    """Return the node with other inputs, and another shape if given; itself if nothing changes."""
    inputs = tuple(inputs)
    if inputs == node.inputs and shape in (None, node.shape):  # nodes compare by identity
        return node
    changed = object.__new__(Node)  # dataclasses.replace sets every field by itself, which takes several times as long
    vars(changed).update(vars(node), inputs=inputs, shape=shape or node.shape)
    return changed


# Walks --------------------------------------------------------------------------------------------------------------


def eager_inputs(node: Node) -> tuple[Node, ...]:
    """Return the inputs that are always evaluated: all but the exact form of a guard."""
    return node.inputs[:1] if node.op == "guard" else node.inputs


def topological(roots: Iterable[T], inputs: Callable[[T], Iterable[T]] = attrgetter("inputs")) -> Iterator[T]:
    """Iterate over all nodes beneath the roots, inputs first; not recursive, for long chains."""
    seen: set[T] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        path = [(root, iter(inputs(root)))]
        while path:
            node, rest = path[-1]
            for operand in rest:
                if operand not in seen:
                    seen.add(operand)
                    path.append((operand, iter(inputs(operand))))
                    break
            else:
                path.pop()
                yield node


def users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the nodes that read each node; a guard does not count as a reader of its exact form."""
    found: dict[Node, list[Node]] = {}
    for node in topological(roots, eager_inputs):
        found.setdefault(node, [])
        for i in eager_inputs(node):
            found.setdefault(i, []).append(node)
    return found


def flops(node: Node) -> int:
    """Count the floating-point operations of a node; functions cost what the operator tables say."""
    if node.op in ("matmul", "accumulate"):
        return 2 * node.size * node.inputs[0].shape[1]
    if node.batches is not None:
        return 2 * node.size * node.batches.depth
    if node.op == "split_matmul":
        products = 3 if node.parts == 2 else 1
        return products * 2 * node.size * node.inputs[2].shape[1]
    if node.op == "split":
        return 5 * node.inputs[0].size
    if node.op in POINTWISE:
        return POINTWISE[node.op].flops * node.size
    if node.reduction:
        return REDUCTIONS[node.op].flops * node.inputs[0].size
    return 0
