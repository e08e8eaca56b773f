"""Reverse-mode differentiation of traced graphs, before any rewriting.

Gradients are ordinary nodes, which rewrites and the scheduler treat as any chain. Derivatives come from the operator
tables. They agree with PyTorch's eager backward for infinities, NaN and boundaries too: an element that a mask excludes
gets 0, whatever its cotangent.

A cotangent may have length one along axes on which it is constant: that of a sum is broadcast over the row only where
an operation needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from .. import dtypes
from ..errors import NotDifferentiable
from ..ir import graph as g
from ..ir.adjoints import exclusive_product, extremum_adjoint
from ..ir.graph import Node, Shape
from ..ir.operators import POINTWISE, REDUCTIONS
from ..ir.rebuild import expression_key
from . import Trace, Tracer, apply


def gradients(outputs: Sequence[Node], cotangents: Sequence[Node | None], wanted: Sequence[Node]) -> list[Node | None]:
    """Compute the vector-Jacobian products of a graph, as nodes.

    Parameters
    ----------
    outputs : sequence of Node
        Values of a traced graph.
    cotangents : sequence of Node or None
        For each output a value that broadcasts to its shape, or None for zero.
    wanted : sequence of Node
        The nodes to differentiate by.

    Returns
    -------
    list of Node or None
        For each wanted node its gradient, of its shape and dtype; None where it is zero everywhere.

    Raises
    ------
    NotDifferentiable
        An operator between a wanted node and an output has no derivative here.
    """
    forward = list(g.topological(outputs))
    targets = set(wanted)
    active: set[Node] = set()  # float nodes that depend on the wanted ones
    for node in forward:
        depends = node.op != "stop_gradient" and any(i in active for i in node.inputs)
        if dtypes.is_float(node.dtype) and (node in targets or depends):
            active.add(node)
    gathered: dict[Node, Node] = {}

    def accumulate(node: Node, cotangent: Node | None) -> None:
        if cotangent is not None and node in active:
            cotangent = g.cast(cotangent, node.dtype)
            gathered[node] = g.pointwise("add", gathered[node], cotangent) if node in gathered else cotangent

    for output, cotangent in zip(outputs, cotangents, strict=True):
        accumulate(output, cotangent)
    for node in reversed(forward):
        if node in gathered and node.inputs and node.op != "stop_gradient":
            for i, cotangent in zip(node.inputs, _vjp(node, gathered[node], active), strict=True):
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


def sum_to_shape(cotangent: Node, shape: Shape, whole: Shape) -> Node:
    """Sum a cotangent of shape `whole` back to `shape` (the adjoint of broadcasting)."""
    for axis in (1, 0):
        if shape[axis] == 1 != whole[axis]:
            if cotangent.shape[axis] == 1 and whole[axis]:  # constant along the axis: its sum is a multiple
                cotangent = g.pointwise("multiply", cotangent, g.axis_length(whole[axis], axis))
                continue
            if cotangent.shape[axis] == 1:  # the sum of nothing is zero, where a multiple of a mean of nothing is NaN
                cotangent = g.broadcast(cotangent, (0, cotangent.shape[1]) if axis == 0 else (cotangent.shape[0], 0))
            cotangent = g.reduce("sum", cotangent, axis)
    return cotangent


# Adjoints of operators ----------------------------------------------------------------------------------------------


def _vjp(node: Node, cotangent: Node, active: set[Node]) -> list[Node | None]:
    """Return the cotangents of a node's inputs, None for zero."""
    if node.op in POINTWISE:
        return _pointwise_vjp(node, cotangent, active)
    if node.op in REDUCTIONS:
        return [_reduction_vjp(node, cotangent)]
    rule = _VJPS.get(node.op)
    if rule is None:
        raise NotDifferentiable(f"{node.op} has no derivative here")
    return rule(node, cotangent)


def _pointwise_vjp(node: Node, cotangent: Node, active: set[Node]) -> list[Node | None]:
    """Return the cotangents of a pointwise operator's inputs, from the derivative in the table."""
    # In the dtype of the result, as the operator is computed.
    operands = [
        i if i.op == "const" or (node.op == "where" and k == 0) else g.cast(i, node.dtype)
        for k, i in enumerate(node.inputs)
    ]
    o = _Namespace()
    partials = POINTWISE[node.op].derivative(o, o.value(node), *map(o.value, operands))
    given = {node, *operands}
    result: list[Node | None] = []
    for k, (i, partial) in enumerate(zip(node.inputs, partials, strict=True)):
        if i not in active or partial is None:
            result.append(None)
            continue
        scaled = scale_cotangent(cotangent, partial._node if isinstance(partial, Tracer) else partial, given)
        if scaled is not None and node.op == "subtract" and k == 1:
            scaled = _without_deviations(scaled, node)
        result.append(None if scaled is None else sum_to_shape(scaled, i.shape, node.shape))
    return result


def _without_deviations(cotangent: Node, node: Node) -> Node | None:
    """Leave out what sums to zero of the cotangent of a mean that `node` subtracts from what it is the mean of.

    These are the deviations times factors that do not vary along the mean's axis: a variance does not depend on what is
    near the mean. As computed, their sum would be a rounding error, and its reduction a stage of a kernel.
    """
    mean = _unchanged(node.inputs[1])
    if mean.op != "mean" or _unchanged(mean.inputs[0]) is not _unchanged(node.inputs[0]):
        return cotangent
    return _without_multiples(cotangent, node, mean.axis) if node.shape[mean.axis] > 1 else cotangent


def _without_multiples(cotangent: Node, of: Node, axis: int) -> Node | None:
    """Return a sum without the terms that are multiples of a value; None if nothing is left."""
    left: dict[Node, Node | None] = {}  # of each sum; loops make long ones, and add values to themselves
    for node in g.topological([cotangent], _terms):
        terms = _terms(node)
        found = [t for t in map(left.__getitem__, terms) if t is not None]
        if _is_multiple(node, of, axis) or (terms and not found):
            left[node] = None
        elif found == list(terms):
            left[node] = node
        else:
            left[node] = found[0] if len(found) < len(terms) else g.pointwise(node.op, *found)
    return left[cotangent]


def _terms(node: Node) -> tuple[Node, ...]:
    """Return what a node is the sum of, or the negative of; nothing for other nodes."""
    is_sum = node.op == "add" and all(i.shape == node.shape for i in node.inputs)
    return node.inputs if is_sum or node.op == "negative" else ()


def _is_multiple(value: Node, of: Node, axis: int) -> bool:
    """Whether a value is a difference `of` two others, or the same, times what does not vary along an axis."""
    while value.op != "subtract":
        if value.op in ("multiply", "divide"):
            whole = [i for i in value.inputs if i.shape[axis] != 1]
            if len(whole) != 1 or (value.op == "divide" and whole[0] is not value.inputs[0]):
                return False
            value = whole[0]
        elif value.op == "negative" or (value.op == "cast" and _is_between_floats(value)):
            value = value.inputs[0]
        else:
            return False
    return value.inputs == of.inputs


def _unchanged(node: Node) -> Node:
    """Return what broadcasts, and casts to wider floats, are of: they change no number."""
    while node.op == "broadcast" or (node.op == "cast" and _is_between_floats(node) and _is_wider(node)):
        node = node.inputs[0]
    return node


def _is_between_floats(cast: Node) -> bool:
    return dtypes.is_float(cast.dtype) and dtypes.is_float(cast.inputs[0].dtype)


def _is_wider(cast: Node) -> bool:
    return dtypes.promote(cast.inputs[0].dtype, cast.dtype) == cast.dtype


def scale_cotangent(cotangent: Node, partial: Node | float, given: Container[Node] = ()) -> Node | None:
    """Multiply a cotangent by a partial derivative; None for zero.

    A derivative `where(c, a, b)` selects between products, so that an infinite cotangent of an excluded element gives
    0. A quotient divides, which rounds once. Nodes in `given`, the values of the forward pass, are plain factors, whose
    zeros times infinity are NaN.

    Parameters
    ----------
    cotangent : of the result
    partial : the derivative of the result by one input
    given : the nodes of the forward pass
    """
    if not isinstance(partial, Node):
        return _scale_by_number(cotangent, partial)
    if partial in given and (partial.op in _CHOICES or _is_zero(partial)):
        return g.pointwise("multiply", cotangent, partial)
    if partial.op == "const" and not partial.name:
        return _scale_by_number(cotangent, float(partial.value))
    if partial.op == "where":
        condition, chosen, other = partial.inputs
        return _scale_by_choice(cotangent, condition, chosen, other, given)
    if partial.op in g.PASS_THROUGH and partial.inputs[0].op == "where":
        condition, *branches = partial.inputs[0].inputs
        chosen, other = (b if b.op == "const" else g.cast(b, partial.dtype) for b in branches)
        return _scale_by_choice(cotangent, condition, chosen, other, given)
    if partial.op == "divide" and partial.inputs[0].op == "const":
        upper = scale_cotangent(cotangent, partial.inputs[0])
        return None if upper is None else g.pointwise("divide", upper, partial.inputs[1])
    return g.pointwise("multiply", cotangent, partial)


def _scale_by_number(cotangent: Node, number: float) -> Node | None:
    if number == 0.0:
        return None
    if number == 1.0:
        return cotangent
    return g.pointwise("negative", cotangent) if number == -1.0 else g.pointwise("multiply", cotangent, g.const(number))


def _scale_by_choice(
    cotangent: Node, condition: Node, chosen: Node, other: Node, given: Container[Node]
) -> Node | None:
    """Scale by one of two derivatives where a condition holds, by the other elsewhere."""
    if condition.op == "const":
        return scale_cotangent(cotangent, chosen if condition.value else other, given)
    products = [scale_cotangent(cotangent, partial, given) for partial in (chosen, other)]
    if products == [None, None]:
        return None
    return g.pointwise("where", condition, *(g.const(0.0) if p is None else p for p in products))


_CHOICES = ("where", *g.PASS_THROUGH)


def _is_zero(node: Node) -> bool:
    return node.op == "const" and not node.name and node.value == 0


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
    o = _Namespace()
    result = g.reduce(row.about, x, axis) if row.about else node
    partial = row.derivative(o, o.value(result), o.value(x))
    scaled = scale_cotangent(cotangent, partial._node if isinstance(partial, Tracer) else partial)
    assert scaled is not None
    if node.op in ("mean", "moment2"):  # whose derivatives in the table leave out 1 / n
        return g.pointwise("divide", scaled, g.axis_length(x.shape[axis], axis))
    return scaled


class _Namespace:
    """The namespace `o` of the operator tables' derivatives, on traced values."""

    def __init__(self) -> None:
        self._trace = Trace()
        self._trace._quiet = True  # record no calls

    def value(self, node: Node) -> Tracer:
        return self._trace.array(node, (0, 1))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *x: apply(name, *x)


def _matmul_vjp(node: Node, cotangent: Node) -> list[Node | None]:
    a, b = node.inputs
    whole = g.broadcast(cotangent, node.shape)
    return [g.matmul(whole, g.transpose(b)), g.matmul(g.transpose(a), whole)]


def _reshape_vjp(node: Node, cotangent: Node) -> list[Node | None]:
    uniform = cotangent.shape == (1, 1)
    return [cotangent if uniform else g.reshape(g.broadcast(cotangent, node.shape), node.inputs[0].shape)]


def _custom_derivative_vjp(node: Node, cotangent: Node) -> list[Node | None]:
    """Multiply the cotangent by the partial derivatives that a `custom_derivative` node holds."""
    value, *rest = node.inputs
    operands, slopes = rest[::2], rest[1::2]
    given = {value, *operands}
    result: list[Node | None] = [None]  # the value and the derivatives have no gradient
    for x, slope in zip(operands, slopes, strict=True):
        scaled = scale_cotangent(cotangent, slope, given)
        result += [None if scaled is None else sum_to_shape(scaled, x.shape, node.shape), None]
    return result


_VJPS: dict[str, Callable[[Node, Node], list[Node | None]]] = {
    "cast": lambda node, cotangent: [cotangent],
    "broadcast": lambda node, cotangent: [sum_to_shape(cotangent, node.inputs[0].shape, node.shape)],
    "transpose": lambda node, cotangent: [g.transpose(cotangent)],
    "reshape": _reshape_vjp,
    "matmul": _matmul_vjp,
    "custom_derivative": _custom_derivative_vjp,
}
