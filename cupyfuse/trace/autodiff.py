"""Reverse-mode differentiation of traced graphs, before any rewriting.

Gradients are ordinary nodes, which rewrites and the scheduler treat as any chain. Derivatives come from the operator
tables. They agree with PyTorch's eager backward for infinities, NaN and boundaries too: an element that a mask excludes
gets 0, whatever its cotangent.

A cotangent may have length one along axes on which it is constant: that of a sum is broadcast over the row only where
an operation needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from .. import dtypes
from ..errors import NotDifferentiable
from ..ir import graph as g
from ..ir.adjoints import exclusive_product, extremum_adjoint
from ..ir.concats import between_zeros, column_bounds, columns_of, columns_shown
from ..ir.graph import Node
from ..ir.operators import POINTWISE, REDUCTIONS
from ..ir.pairs import swap_pairs, swapped_pairs
from ..ir.parts import Repeated, Viewed
from ..ir.rebuild import expression_key
from ..ir.slices import repeats_of, strided_copy
from . import Trace, Tracer, apply
from .cotangents import scale_cotangent, sum_to_shape, without_deviations
from .quotients import cotangent_of_divisor, cotangent_of_share


def gradients(
    outputs: Sequence[Node],
    cotangents: Sequence[Node | None],
    wanted: Sequence[Node],
    viewed: Viewed = MappingProxyType({}),
) -> list[Node | None]:
    """Compute the vector-Jacobian products of a graph, as nodes.

    Parameters
    ----------
    outputs : sequence of Node
        Values of a traced graph.
    cotangents : sequence of Node or None
        For each output a value that broadcasts to its shape, or None for zero.
    wanted : sequence of Node
        The nodes to differentiate by.
    viewed : mapping
        The trace's views of computed values. Where a repeated value was computed again from repeated inputs, its
        cotangents are added up over the repeats first, and passed to the value once: its operators may round, or have
        infinite slopes.

    Returns
    -------
    list of Node or None
        For each wanted node its gradient, of its shape and dtype; None where it is zero everywhere.

    Raises
    ------
    NotDifferentiable
        An operator between a wanted node and an output has no derivative here.
    """
    repeated = {n: found for n, found in viewed.items() if isinstance(found[1], Repeated)}

    def operands(node: Node) -> tuple[Node, ...]:
        """Return a node's inputs, and behind these the value that it repeats; no value is computed from its repeats."""
        return (*node.inputs, repeated[node][0]) if node in repeated else node.inputs

    forward = list(g.topological(outputs, operands))
    targets = set(wanted)
    active: set[Node] = set()  # float nodes that depend on the wanted ones
    for node in forward:
        depends = node.op != "stop_gradient" and any(i in active for i in node.inputs)
        if dtypes.is_float(node.dtype) and (node in targets or depends):
            active.add(node)
    passed = _Forward(set(forward), active, targets)
    gathered: dict[Node, Node] = {}
    views: dict[object, Node] = {}  # equal ones have one cotangent, which is added up in their shape
    first = {node: views.setdefault(expression_key(node), node) for node in forward if node.op in g.VIEWS}

    def accumulate(node: Node, cotangent: Node | None) -> None:
        node = first.get(node, node)
        if cotangent is not None and node in active:
            cotangent = g.cast(cotangent, node.dtype)
            gathered[node] = g.pointwise("add", gathered[node], cotangent) if node in gathered else cotangent

    for output, cotangent in zip(outputs, cotangents, strict=True):
        accumulate(output, cotangent)
    for node in reversed(forward):
        if node in gathered and node in repeated:
            value, view = repeated[node]
            (cotangent,) = _strided_vjp(view.of_stored(value), gathered[node], passed.nodes)
            accumulate(value, cotangent)
        elif node in gathered and node.inputs and node.op != "stop_gradient":
            for i, cotangent in _vjp(node, gathered[node], passed):
                accumulate(i, cotangent)
    found = [g.broadcast(gathered[n], n.shape) if n in gathered else None for n in wanted]
    return _reuse_forward(forward, found)


def _reuse_forward(forward: Iterable[Node], roots: Sequence[Node | None]) -> list[Node | None]:
    """Eliminate common subexpressions of backward roots against the forward graph."""
    done = {n: n for n in forward}
    seen: dict[object, Node] = {}
    for node in done:
        seen.setdefault(expression_key(node), node)
    for node in g.topological(r for r in roots if r is not None):
        if node not in done:
            fresh = g.with_inputs(node, [done[i] for i in node.inputs])
            # Inputs of the graph are distinct even where their names and positions agree.
            done[node] = seen.setdefault(expression_key(fresh), fresh) if node.inputs else node
    return [None if r is None else done[r] for r in roots]


# Adjoints of operators ----------------------------------------------------------------------------------------------


class _Forward(NamedTuple):
    """What the backward pass knows of the forward pass.

    Attributes
    ----------
    nodes : set of Node
    active : set of Node
        Those that are floats and depend on what is wanted.
    wanted : set of Node
        What is differentiated by.
    """

    nodes: set[Node]
    active: set[Node]
    wanted: set[Node]


def _vjp(node: Node, cotangent: Node, forward: _Forward) -> Iterable[tuple[Node, Node | None]]:
    """Return inputs of a node, or what is beneath them where steps are skipped, with cotangents, None for zero."""
    of_share = cotangent_of_share(node, cotangent, forward.wanted)
    if of_share is not None:
        return [of_share]
    if node.op in POINTWISE:
        return _pointwise_vjp(node, cotangent, forward)
    if node.op in REDUCTIONS:
        return [(node.inputs[0], _reduction_vjp(node, cotangent))]
    rule = _VJPS.get(node.op)
    if rule is None:
        raise NotDifferentiable(f"{node.op} has no derivative here")
    return zip(node.inputs, rule(node, cotangent, forward.nodes), strict=True)


def _pointwise_vjp(node: Node, cotangent: Node, forward: _Forward) -> list[tuple[Node, Node | None]]:
    """Return the cotangents of a pointwise operator's inputs, from the derivative in the table."""
    # In the dtype of the result, as the operator is computed.
    operands = [
        i if i.op == "const" or (node.op == "where" and k == 0) else g.cast(i, node.dtype)
        for k, i in enumerate(node.inputs)
    ]
    o = _Namespace()
    partials = POINTWISE[node.op].derivative(o, o.value(node), *map(o.value, operands))
    given = {node, *operands}
    result: list[tuple[Node, Node | None]] = []
    for k, (i, partial) in enumerate(zip(node.inputs, partials, strict=True)):
        if i not in forward.active or partial is None:
            continue
        of_divisor = cotangent_of_divisor(node, k, cotangent, forward.nodes, forward.wanted)
        if of_divisor is not None:
            result.append(of_divisor)
            continue
        scaled = scale_cotangent(cotangent, partial._node if isinstance(partial, Tracer) else partial, given)
        if scaled is not None and node.op == "subtract" and k == 1:
            scaled = without_deviations(scaled, node)
        if scaled is not None:
            result.append((i, sum_to_shape(scaled, i.shape, node.shape, forward.nodes)))
    return result


def _reduction_vjp(node: Node, cotangent: Node) -> Node | None:
    """Return the cotangent of a reduction's input, by formula or from the derivative in the table."""
    x, axis = node.inputs[0], node.axis
    row = REDUCTIONS[node.op]
    if x.shape[axis] == 1 and row.identity_on_one:
        return cotangent
    if node.op == "prod":
        return g.pointwise("multiply", cotangent, exclusive_product(x, node, (axis,)))
    if node.op in ("max", "min"):
        return extremum_adjoint(node, cotangent)
    if node.op in ("mean", "moment2"):  # whose derivatives in the table leave out 1 / n
        cotangent = g.pointwise("divide", cotangent, g.axis_length(x.shape[axis], axis))
    o = _Namespace()
    result = g.reduce(row.about, x, axis) if row.about else node
    partial = row.derivative(o, o.value(result), o.value(x))
    return scale_cotangent(cotangent, partial._node if isinstance(partial, Tracer) else partial)


class _Namespace:
    """The namespace `o` of the operator tables' derivatives, on traced values."""

    def __init__(self) -> None:
        self._trace = Trace()
        self._trace._quiet = True  # record no calls

    def value(self, node: Node) -> Tracer:
        return self._trace.array(node, (0, 1))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *x: apply(name, *x)


def _matmul_vjp(node: Node, cotangent: Node, _: Container[Node]) -> list[Node | None]:
    a, b = node.inputs
    whole = g.broadcast(cotangent, node.shape)
    return [g.matmul(whole, g.transpose(b)), g.matmul(g.transpose(a), whole)]


def _reshape_vjp(node: Node, cotangent: Node, _: Container[Node]) -> list[Node | None]:
    uniform = cotangent.shape == (1, 1)
    return [cotangent if uniform else g.reshape(g.broadcast(cotangent, node.shape), node.inputs[0].shape)]


def _strided_vjp(node: Node, cotangent: Node, _: Container[Node]) -> list[Node | None]:
    """Add up the rows of the cotangent that belong to one row of the input: `node` repeats all of them.

    Where columns of pairs change places, those of the cotangent change back.
    """
    (x,), (rows, cols) = node.inputs, node.shape
    swapped = swapped_pairs(node)
    if swapped is not None and rows * swapped.length == x.size:
        whole = between_zeros(swap_pairs(g.broadcast(cotangent, node.shape)), *swapped)
        return [g.reshape(whole, x.shape)]
    found = repeats_of(node)
    if found is None or rows // found.block * found.inner * cols != x.size:
        raise NotDifferentiable("a strided copy has a gradient only if it repeats all rows, or swaps pairs of columns")
    block, times, inner = found[:3]
    blocks, rounds = rows // block, block // (times * inner)
    whole = g.broadcast(cotangent, node.shape)
    if blocks > 1 or times > 1:
        size = times * inner * cols
        dims = ((rounds, size), (times, cols), (blocks, rounds * size), (inner, times * cols), (cols, 1))
        whole = strided_copy(whole, dims, (rounds * times, blocks * inner * cols))
    total = g.reduce("sum", g.reshape(whole, (rounds * times, x.size)), 0)
    return [g.reshape(total, x.shape)]


def _slice_vjp(node: Node, cotangent: Node, _: Container[Node]) -> list[Node | None]:
    """Put the cotangent of some columns among zeros."""
    shown = columns_shown(node)
    if shown is None:
        raise NotDifferentiable("a slice has a gradient only if it shows neighbouring columns of all rows")
    return [between_zeros(g.broadcast(cotangent, node.shape), shown[0], node.inputs[0].shape[1])]


def _concat_vjp(node: Node, cotangent: Node, _: Container[Node]) -> list[Node | None]:
    bounds = itertools.pairwise(column_bounds(node))
    return [columns_of(cotangent, first, end - first) for first, end in bounds]


def _custom_derivative_vjp(node: Node, cotangent: Node, forward: Container[Node]) -> list[Node | None]:
    """Multiply the cotangent by the partial derivatives that a `custom_derivative` node holds."""
    value, *rest = node.inputs
    operands, slopes = rest[::2], rest[1::2]
    given = {value, *operands}
    result: list[Node | None] = [None]  # the value and the derivatives have no gradient
    for x, slope in zip(operands, slopes, strict=True):
        scaled = scale_cotangent(cotangent, slope, given)
        result += [None if scaled is None else sum_to_shape(scaled, x.shape, node.shape, forward), None]
    return result


_VJPS: dict[str, Callable[[Node, Node, Container[Node]], list[Node | None]]] = {
    "cast": lambda node, cotangent, _: [cotangent],
    "broadcast": lambda node, cotangent, forward: [sum_to_shape(cotangent, node.inputs[0].shape, node.shape, forward)],
    "transpose": lambda node, cotangent, _: [g.transpose(cotangent)],
    "reshape": _reshape_vjp,
    "matmul": _matmul_vjp,
    "strided": _strided_vjp,
    "slice": _slice_vjp,
    "concat": _concat_vjp,
    "custom_derivative": _custom_derivative_vjp,
}
