"""The graph of a chain: a small SSA form over two-dimensional values.

Every value is rows x columns: full (R, C), per-row (R, 1), per-column (1, C), or scalar (1, 1). The tracer maps the
axes of the user's arrays (one-dimensional, transposed, with new axes, more than two) to these.

Operators:

====================  ==================================================================================================
input                 argument number `argument`, called `name`, of `ndim` dimensions
const                 the Python number `value`, weak in promotion; with a `name`, a parameter of the kernel;
                      with a `number`, one that a call brings, and `value` is NaN
positions             0, 1, 2, ... along `axis`: (n, 1) or (1, n)
cast                  the input converted to the node's dtype
broadcast             the input repeated along its axes of length one
stop_gradient         the input as a constant for differentiation
a pointwise operator  a row of `operators.POINTWISE`
a reduction           a row of `operators.REDUCTIONS` along `axis` (0: down the columns, 1: along the rows)
matmul                (R, K) x (K, C)
batched_matmul        products of `batches.count` pairs of matrices, which lie one below the other in each operand
accumulate            the third input plus (R, K) x (K, C), written over that input, an argument
put                   the first input with regular places replaced by the second, likewise
split                 a float32 matrix as `parts` float16 ones and a scale for each row (`kernels_cu/split_pieces.cuh`)
split_matmul          (R, K) x (C, K)^T from splits; inputs: both splits, both operands; from splits of one part but for
                      its factors
factor                the `name` factor (row, row_rest, column) of a product from splits of one part, as a row or column
transpose, reshape    another view of the same elements
part                  a view of rows and columns at regular distances: `dims` are (first, step) of each
strided               a copy of regular places of the input's elements in C order: pairs (length, stride), `offset`
guard                 `guard(fast, exact)`: fast where that is finite, else exact, evaluated only there
sloped                `sloped(value, x, slope, ...)`: value, with its own partial derivatives `slope` by each `x`
library               result number `result` of `call`, a function of NumPy or CuPy on whole arrays
====================  ==================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np

from .. import dtypes
from .batches import Batches
from .library import LibraryCall
from .numbers import Number, computed
from .operators import POINTWISE, REDUCTIONS, Operator

Shape = tuple[int, int]
T = TypeVar("T")

# Operators that are views of their input in memory.
VIEWS = ("transpose", "reshape", "part")
# Operators that pass on their one input: in another dtype, in a larger shape, without its gradient.
PASS_THROUGH = ("cast", "broadcast", "stop_gradient")


@dataclass(frozen=True, eq=False)
class Node:
    """One value of the graph. Nodes compare by identity.

    The fields after `dtype` belong to some operators only; elsewhere they keep their defaults.

    Attributes
    ----------
    axis : of a reduction or of positions
    value : of a const
    name : of an input, or of a const that is a kernel parameter
    number : of a const that each call brings
    argument, ndim : of an input: its argument number, and the dimensions of the user's array
    gradient : of an extreme: which elements get its gradient, see `adjoints.extreme_adjoint`
    partial : of an extreme: whether it is the first of two steps that reduce a whole matrix
    by_columns : of a split: whether columns are contiguous in memory
    parts : of a split and of its products: 2 for hi and lo, 1 for hi alone
    how : of a matrix product: how it is computed, and why
    dims, offset : of a part, a strided copy, and of put: see above
    batches : of a batched product
    call, result : of a library step: the call, and which of its results this is
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
    how: str = ""
    dims: tuple[tuple[int, int], ...] = ()
    offset: int = 0
    batches: Batches | None = None
    call: LibraryCall | None = None
    result: int = 0
    number: Number | None = None

    def __repr__(self) -> str:
        extra = "".join(f" {f.name}={v}" for f in fields(self)[4:] if (v := getattr(self, f.name)) != f.default)
        return f"<{self.op} {self.shape[0]}x{self.shape[1]} {self.dtype}{extra}>"

    @property
    def pointwise(self) -> bool:
        return self.op in POINTWISE or self.op in (*PASS_THROUGH, "guard", "sloped")

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
        return [*self.outputs, *(node for _, node in self.effects)]

    def replace(self, mapping: dict[Node, Node]) -> Graph:
        """Return the graph with its roots mapped to other nodes."""
        return Graph(
            self.inputs,
            [mapping.get(n, n) for n in self.outputs],
            [(arg, mapping.get(n, n)) for arg, n in self.effects],
        )


# Constructors -------------------------------------------------------------------------------------------------------


def argument(number: int, name: str, shape: Shape, dtype: str, ndim: int = 2) -> Node:
    """Make an input of the graph; `ndim` is that of the user's array."""
    return Node("input", (), shape, dtype, argument=number, name=name, ndim=ndim)


def const(value: complex | float | int | bool, name: str = "") -> Node:
    names = {bool: "bool", int: "int64", complex: "complex128"}
    dtype = names.get(type(value), "float64")
    return Node("const", (), (1, 1), dtype, value=value, name=name)


def number(value: Number, name: str) -> Node:
    """Return a float argument of the call, or what is computed of such."""
    return Node("const", (), (1, 1), "float64", value=math.nan, name=name, number=value)


def count(n: int, axis: int) -> Node:
    """Return an axis's length as a node; the number of rows is a kernel parameter, as it varies from call to call."""
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
    dtype = promoted(values)
    if row.result == "float":
        dtype = dtypes.float_dtype(dtype, op)
    elif row.result == "bool":
        if dtypes.compute_dtype(dtype) != dtype:
            inputs = tuple(_rounded_to(n, dtype) for n in inputs)
        dtype = "bool"
    return Node(op, inputs, broadcast_shapes(*(n.shape for n in inputs)), dtype)


def _rounded_to(node: Node, dtype: str) -> Node:
    """Round a constant to the 16-bit dtype of the array that it is compared with, as NumPy does."""
    if node.op != "const" or node.dtype == "bool":
        return node

    def rounded(value: float) -> float:
        return float(np.asarray(value).astype(dtypes.to_numpy(dtype)).astype(np.float64))

    if node.number is not None:
        return number(computed(dtype, rounded, (node.number,)), node.name)
    return const(rounded(node.value))


def _fold_constants(op: str, row: Operator, inputs: tuple[Node, ...]) -> Node:
    """Apply an operator to constants; the result is a constant, which stays weak in promotion."""

    def fold(*values: float) -> float | int | bool:
        with np.errstate(all="ignore"):
            kinds = ["float64" if row.result == "float" else n.dtype for n in inputs]
            return row.numpy(*map(np.asarray, values, kinds)).item()

    if not any(n.number for n in inputs):
        return const(fold(*(n.value for n in inputs)))
    if type(fold(*(n.value for n in inputs))) is not float:
        return const(fold(*(n.value if n.number is None else n.number.read() for n in inputs)))
    operands = [n.value if n.number is None else n.number for n in inputs]
    return number(computed(op, fold, operands), next(n.name for n in inputs if n.number))


def promoted(nodes: Iterable[Node]) -> str:
    nodes = list(nodes)
    strong = [n.dtype for n in nodes if n.op != "const"]
    return dtypes.promote_weak(strong, [n.value for n in nodes if n.op == "const"])


def operand_dtype(node: Node) -> str:
    """Return the dtype in which a node is computed: its own, or that of the operands of a comparison."""
    if node.dtype != "bool" or node.op in (*PASS_THROUGH, "where"):
        return node.dtype
    return promoted(node.inputs)


def cast(node: Node, dtype: str) -> Node:
    return node if node.dtype == dtype and node.op != "const" else Node("cast", (node,), node.shape, dtype)


def positions(n: int, axis: int, dtype: str = "") -> Node:
    """0, 1, 2, ... along an axis; a constant for one element."""
    dtype = dtype or ("float32" if n <= 1 << 24 else "float64")
    if n == 1:
        return cast(const(0), dtype)
    return Node("positions", (), (n, 1) if axis == 0 else (1, n), dtype, axis=axis)


def stop_gradient(node: Node) -> Node:
    return Node("stop_gradient", (node,), node.shape, node.dtype)


def sloped(value: Node, *pairs: tuple[Node, Node]) -> Node:
    """Return a value with its own partial derivatives, given as pairs (x, slope)."""
    return Node("sloped", (value, *(n for pair in pairs for n in pair)), value.shape, value.dtype)


def broadcast(node: Node, shape: Shape) -> Node:
    """Repeat a value along its axes of length one."""
    return node if node.shape == shape else Node("broadcast", (node,), shape, node.dtype)


def reduce(op: str, node: Node, axis: int, gradient: str = "") -> Node:
    shape = (1, node.shape[1]) if axis == 0 else (node.shape[0], 1)
    return Node(op, (node,), shape, node.dtype, axis=axis, gradient=gradient)


def matmul(a: Node, b: Node) -> Node:
    return Node("matmul", (a, b), (a.shape[0], b.shape[1]), promoted((a, b)))


def is_product(node: Node) -> bool:
    return node.op in ("matmul", "split_matmul", "batched_matmul", "accumulate")


def transpose(node: Node) -> Node:
    if node.shape == (1, 1):
        return node
    if node.op == "transpose":
        return node.inputs[0]
    if node.op == "positions":
        return positions(node.size, 1 - node.axis, node.dtype)
    return Node("transpose", (node,), (node.shape[1], node.shape[0]), node.dtype)


def library(call: LibraryCall, inputs: Sequence[Node], result: int, shape: Shape, dtype: str) -> Node:
    """Return one result of a library's function; `inputs` are the operands of its call."""
    return Node("library", tuple(inputs), shape, dtype, call=call, result=result)


def reshape(node: Node, shape: Shape) -> Node:
    return node if node.shape == shape else Node("reshape", (node,), shape, node.dtype)


def guard(fast: Node, exact: Node) -> Node:
    return Node("guard", (fast, exact), fast.shape, fast.dtype)


def with_inputs(node: Node, inputs: Sequence[Node], shape: Shape | None = None) -> Node:
    """Return the node with other inputs, and another shape if given; itself if nothing changes."""
    shape = shape or node.shape
    if shape == node.shape and all(a is b for a, b in zip(inputs, node.inputs, strict=True)):
        return node
    return replace(node, inputs=tuple(inputs), shape=shape)


def operation(node: Node) -> tuple[object, ...]:
    """Return a key of what a node does: all but its inputs."""
    # repr tells -0.0 from 0.0, and NaN equals itself.
    own = (node.axis, repr(node.value), node.name, node.number, node.argument, node.ndim)
    how = (node.gradient, node.partial, node.by_columns, node.parts, node.how, node.call, node.result)
    return node.op, node.shape, node.dtype, *own, *how, node.dims, node.offset, node.batches


def signature(node: Node) -> tuple[object, ...]:
    """Return a key that is equal for nodes with the same operation on the same inputs."""
    return *operation(node), node.inputs


# Walks --------------------------------------------------------------------------------------------------------------


def eager_inputs(node: Node) -> tuple[Node, ...]:
    """Return the inputs that are always evaluated: all but the exact form of a guard."""
    return node.inputs[:1] if node.op == "guard" else node.inputs


def topological(roots: Iterable[T], inputs: Callable[[T], Iterable[T]] = lambda n: n.inputs) -> Iterator[T]:  # type: ignore[attr-defined]
    """Iterate over all nodes beneath the roots, inputs first; not recursive, for long chains."""
    seen: set[T] = set()
    for root in roots:
        stack: list[T | None] = [root]
        while stack:
            node = stack.pop()
            if node is None:  # all operands of the node beneath have been yielded
                yield stack.pop()  # type: ignore[misc]
            elif node not in seen:
                seen.add(node)
                stack += (node, None)
                stack += reversed(tuple(inputs(node)))


def rewrite(graph: Graph, rule: Callable[[Node], Node]) -> Graph:
    """Rebuild the graph bottom-up, applying `rule` to each node with its rebuilt inputs."""
    done: dict[Node, Node] = {}
    for node in topological(graph.roots):
        done[node] = rule(with_inputs(node, [done[i] for i in node.inputs]))
    return graph.replace(done)


def substitute(graph: Graph, target: Node, value: Node) -> Graph:
    """Replace one node by another everywhere except beneath the other."""
    done: dict[Node, Node] = {}
    for node in topological(graph.roots):
        done[node] = value if node is target else with_inputs(node, [done[i] for i in node.inputs])
    return graph.replace(done)


def users(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return the readers of every node; a guard does not count as a reader of its exact form."""
    found: dict[Node, list[Node]] = {}
    for node in topological(roots, eager_inputs):
        found.setdefault(node, [])
        for i in eager_inputs(node):
            found.setdefault(i, []).append(node)
    return found


def is_leaf(node: Node) -> bool:
    """Whether a node is an argument, a constant, or a view of one, readable before anything runs."""
    while node.op in VIEWS:
        node = node.inputs[0]
    return node.op in ("input", "const")


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
