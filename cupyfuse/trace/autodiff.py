"""The backward pass as a graph: vector-Jacobian products of graphs as they are traced, before any rewriting.

What a gradient is made of are ordinary nodes, so the rewrites and the scheduler treat a backward pass as they treat any
chain. Derivatives come from the operator tables; what they do to a cotangent agrees with PyTorch's eager backward, for
infinities, NaN and boundaries too: an element that a mask shuts out gets 0 whatever its cotangent is.

A cotangent on its way may be shorter than its value, with length one along axes on which it does not change: the
cotangent of a sum is not expand over the row until something needs it so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any

from .. import dtypes
from ..errors import NotDifferentiable
from ..ir import graph as g
from ..ir.adjoints import exclusive_product, extreme_adjoint
from ..ir.graph import Graph, Node, Shape
from ..ir.operators import POINTWISE, REDUCTIONS
from . import Trace, Tracer, apply


def gradients(outputs: Sequence[Node], cotangents: Sequence[Node | None], wanted: Sequence[Node]) -> list[Node | None]:
    """Vector-Jacobian products of a graph.

    Parameters
    ----------
    outputs : sequence of Node
        Values of a graph as it was traced.
    cotangents : sequence of Node or None
        For each output a value of its shape, or one that can be expand to it; None for an output that does not count.
    wanted : sequence of Node
        The nodes whose gradients are asked for.

    Returns
    -------
    list of Node or None
        For each wanted node its gradient, of its shape and dtype; None where no output depends on it, or only in steps.

    Raises
    ------
    NotDifferentiable
        An operator between a wanted node and an output has no derivative here.
    """
    forward = list(g.topological(outputs))
    targets = set(wanted)
    active: set[Node] = set()
    for node in forward:
        flows = dtypes.is_float(node.dtype) and node.op != "stop_gradient"
        if dtypes.is_float(node.dtype) and (node in targets or (flows and any(i in active for i in node.inputs))):
            active.add(node)
    gathered: dict[Node, Node] = {}

    def give(node: Node, cotangent: Node | None) -> None:
        if cotangent is not None and node in active:
            cotangent = g.cast(cotangent, node.dtype)
            gathered[node] = g.pointwise("add", gathered[node], cotangent) if node in gathered else cotangent

    for output, cotangent in zip(outputs, cotangents, strict=True):
        give(output, cotangent)
    for node in reversed(forward):
        if node in gathered and node.inputs and node.op != "stop_gradient":
            for i, cotangent in zip(node.inputs, _vjp(node, gathered[node], active), strict=True):
                give(i, cotangent)
    found = [g.broadcast(gathered[n], n.shape) if n in gathered else None for n in wanted]
    return _reuse_forward(forward, found)


def _reuse_forward(forward: Iterable[Node], roots: Sequence[Node | None]) -> list[Node | None]:
    """The roots, with what the forward pass computes as well taken from it."""
    done = {n: n for n in forward}
    seen: dict[object, Node] = {}
    for node in done:
        seen.setdefault(g.signature(node), node)
    for node in g.topological(r for r in roots if r is not None):
        if node not in done:
            fresh = g.with_inputs(node, [done[i] for i in node.inputs])
            # A cotangent may be called as an argument is.
            done[node] = seen.setdefault(g.signature(fresh), fresh) if node.inputs else node
    return [None if r is None else done[r] for r in roots]


def sum_to_shape(cotangent: Node, shape: Shape, whole: Shape) -> Node:
    """From the cotangent of a value of the shape `whole` that of one of the first shape, which was expand to it."""
    for axis in (1, 0):
        if shape[axis] == 1 != whole[axis]:
            if cotangent.shape[axis] != 1:
                cotangent = g.reduce("sum", cotangent, axis)
            else:
                cotangent = g.pointwise("multiply", cotangent, g.count(whole[axis], axis))
    return cotangent


# The step from a value to its inputs --------------------------------------------------------------------------------


def _vjp(node: Node, cotangent: Node, active: set[Node]) -> list[Node | None]:
    """For each input of a node the cotangent that the node's own gives it, or None."""
    if node.op in POINTWISE:
        return _pointwise_vjp(node, cotangent, active)
    if node.op in REDUCTIONS:
        return [_reduction_vjp(node, cotangent)]
    rule = _VJPS.get(node.op)
    if rule is None:
        raise NotDifferentiable(f"{node.op} has no derivative here")
    return rule(node, cotangent)


def _pointwise_vjp(node: Node, cotangent: Node, active: set[Node]) -> list[Node | None]:
    # Operands meet in the dtype of the result, and so do the derivatives.
    operands = [
        i if i.op == "const" or (node.op == "where" and k == 0) else g.cast(i, node.dtype)
        for k, i in enumerate(node.inputs)
    ]
    within = _Namespace()
    partials = POINTWISE[node.op].derivative(within, within.value(node), *map(within.value, operands))
    given = {node, *operands}
    result: list[Node | None] = []
    for i, partial in zip(node.inputs, partials, strict=True):
        if i not in active or partial is None:
            result.append(None)
            continue
        scaled = scale_cotangent(cotangent, partial._node if isinstance(partial, Tracer) else partial, given)
        result.append(None if scaled is None else sum_to_shape(scaled, i.shape, node.shape))
    return result


def scale_cotangent(cotangent: Node, partial: Node | float, given: Container[Node] = ()) -> Node | None:
    """A cotangent times a partial derivative, None for zero.

    Choices choose between products, so that what is shut out is 0 even of an infinite cotangent; quotients divide, and
    round once. What the chain itself gave is a factor whatever it is: a choice is made before the product, and zero
    times infinity is NaN.
    """
    if isinstance(partial, Node) and partial in given and (partial.op in _CHOICES or _is_zero(partial)):
        return g.pointwise("multiply", cotangent, partial)
    if isinstance(partial, Node) and partial.op in g.PASS_THROUGH and partial.inputs[0].op == "where":
        condition, *choices = partial.inputs[0].inputs
        dtype = partial.dtype
        partial = g.pointwise("where", condition, *(c if c.op == "const" else g.cast(c, dtype) for c in choices))
    if isinstance(partial, Node) and partial.op == "const" and not partial.name:
        partial = float(partial.value)
    if not isinstance(partial, Node):
        if partial in (0.0, 1.0, -1.0):
            return None if partial == 0.0 else cotangent if partial == 1.0 else g.pointwise("negative", cotangent)
        return g.pointwise("multiply", cotangent, g.const(partial))
    if partial.op == "where":
        condition, *branches = partial.inputs
        if condition.op == "const":
            return scale_cotangent(cotangent, branches[0 if condition.value else 1], given)
        products = [scale_cotangent(cotangent, branch, given) for branch in branches]
        if products == [None, None]:
            return None
        return g.pointwise("where", condition, *(g.const(0.0) if p is None else p for p in products))
    if partial.op == "divide" and partial.inputs[0].op == "const":
        upper = scale_cotangent(cotangent, partial.inputs[0])
        return None if upper is None else g.pointwise("divide", upper, partial.inputs[1])
    return g.pointwise("multiply", cotangent, partial)


_CHOICES = ("where", *g.PASS_THROUGH)


def _is_zero(node: Node) -> bool:
    return node.op == "const" and not node.name and node.value == 0


def _reduction_vjp(node: Node, cotangent: Node) -> Node | None:
    x, axis = node.inputs[0], node.axis
    row = REDUCTIONS[node.op]
    if x.shape[axis] == 1 and row.identity_on_one:
        return cotangent
    if node.op == "prod":
        return g.pointwise("multiply", cotangent, exclusive_product(x, node, (axis,)))
    if node.op in ("max", "min"):
        return extreme_adjoint(node, cotangent)
    within = _Namespace()
    result = g.reduce(row.about, x, axis) if row.about else node
    partial = row.derivative(within, within.value(result), within.value(x))
    scaled = scale_cotangent(cotangent, partial._node if isinstance(partial, Tracer) else partial)
    assert scaled is not None
    if node.op in ("mean", "moment2"):
        return g.pointwise("divide", scaled, g.count(x.shape[axis], axis))
    return scaled


class _Namespace:
    """The namespace that derivatives are written against, on traced values; what they do is nobody's call to report."""

    def __init__(self) -> None:
        self._trace = Trace()
        self._trace._quiet = True

    def value(self, node: Node) -> Tracer:
        return self._trace.array(node, (0, 1))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *x: apply(name, *x)


def _matmul_vjp(node: Node, cotangent: Node) -> list[Node | None]:
    a, b = node.inputs
    whole = g.broadcast(cotangent, node.shape)
    return [g.matmul(whole, g.transpose(b)), g.matmul(g.transpose(a), whole)]


def _reshape_vjp(node: Node, cotangent: Node) -> list[Node | None]:
    same = cotangent.shape == (1, 1)
    return [cotangent if same else g.reshape(g.broadcast(cotangent, node.shape), node.inputs[0].shape)]


def _sloped_vjp(node: Node, cotangent: Node) -> list[Node | None]:
    value, *rest = node.inputs
    operands, slopes = rest[::2], rest[1::2]
    given = {value, *operands}
    result: list[Node | None] = [None]
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
    "sloped": _sloped_vjp,
}


# Two passes out of one graph ----------------------------------------------------------------------------------------


def saved_values(forward: Sequence[Node], gradients: Sequence[Node]) -> list[Node]:
    """What a forward pass hands to its backward pass, beside its arguments; all else is computed again.

    These are products and reductions down the columns that the gradients need. Where they need a product for nothing
    but reductions along its rows, it is the reductions that are saved, and the product need not be computed at all.
    Where gradients go to the elements that equal an extreme, it is the elements that are saved: computed again they may
    be rounded otherwise, and none would equal it.

    Parameters
    ----------
    forward, gradients : sequence of Node
        The roots of the two passes, in one graph.
    """
    computed = dict.fromkeys(g.topological(forward))
    found = _compared_extremes(computed, gradients)
    compared = [n for n in computed if n in found]  # what is inside of another first
    kept: set[Node] = set()

    def saved(node: Node) -> bool:
        down = node.reduction and node.axis == 0 and node not in compared
        return node in computed and (node.op == "matmul" or down or node in kept)

    for extreme in compared:
        kept.update(_inputs_to_save([extreme.inputs[0]], saved))

    above = {n for n in computed if n.op == "matmul"}
    for node in g.topological(forward):
        if any(i in above for i in node.inputs):
            above.add(node)

    def short(node: Node) -> bool:
        return node in above and node in computed and node.reduction and node.axis == 1 and node not in compared

    needed = _reachable(gradients, lambda n: saved(n) or short(n))
    direct = {n for n in needed if n.op == "matmul"}

    known: dict[Node, bool] = {}

    def stops(node: Node) -> bool:
        if not short(node):
            return saved(node)
        if node not in known:
            known[node] = not any(p in direct for p in _reachable([node.inputs[0]], saved))
        return known[node]

    return [n for n in _reachable(gradients, stops) if stops(n)]


def _compared_extremes(computed: Collection[Node], gradients: Sequence[Node]) -> set[Node]:
    """The extremes whose own elements are compared with them."""

    def stop(node: Node) -> bool:
        return node in computed and (node.op == "matmul" or (node.reduction and node.op not in _EXTREMES))

    pairs = [n.inputs for n in _reachable(gradients, stop) if n.op == "equal"]
    return {b for a, b in pairs if b in computed and b.op in _EXTREMES and b.inputs[0] is a}


_EXTREMES = ("max", "min")
# What gives the same bits of the same bits, in whichever kernel and beside whichever operations.
_EXACT_OPS = {
    *_EXTREMES,
    *(
        "broadcast",
        "stop_gradient",
        "transpose",
        "reshape",
        "negative",
        "absolute",
        "maximum",
        "minimum",
        "clip",
        "where",
        "relu",
        "isnan",
    ),
    *("equal", "not_equal", "greater", "greater_equal", "less", "less_equal"),
    *("logical_and", "logical_or", "logical_not"),
}


def _is_exact(node: Node) -> bool:
    if node.op == "cast":
        source = node.inputs[0]
        return source.op == "const" or dtypes.promote(source.dtype, node.dtype) == node.dtype
    return node.op in _EXACT_OPS or not node.inputs


def _inputs_to_save(roots: list[Node], saved: Callable[[Node], bool]) -> list[Node]:
    """What has to be saved so that these values can be had again to the last bit."""
    found = [n for n in _reachable(roots, lambda n: saved(n) or not _is_exact(n)) if not saved(n) and not _is_exact(n)]
    return found if sum(n.size for n in found) <= sum(n.size for n in roots) else roots


def stored(node: Node) -> Node:
    """A saved value as it is handed over: statistics of 16 bits in float32, in which they were computed."""
    return g.cast(node, dtypes.compute(node.dtype)) if node.reduction else node


def _is_stored(node: Node) -> bool:
    if node.op != "cast" or not node.inputs[0].reduction:
        return False
    return g.signature(node) == g.signature(stored(node.inputs[0]))


def _reachable(roots: Iterable[Node], stop: Callable[[Node], bool]) -> list[Node]:
    return list(g.topological(roots, lambda n: () if stop(n) else n.inputs))


def extract_graph(outputs: Sequence[Node], leaves: Sequence[tuple[Node, str]]) -> Graph:
    """A graph of its own, whose arguments stand for nodes of another.

    Parameters
    ----------
    outputs : sequence of Node
    leaves : sequence of (Node, str)
        The nodes that are arguments, in their order, and their names; one that nothing needs is an argument all the
        same. One that widens another node, as `stored` makes it, stands for that too.
    """
    inputs: list[Node] = []
    done: dict[Node, Node] = {}
    for number, (node, name) in enumerate(leaves):
        leaf = g.argument(number, name, node.shape, node.dtype, node.ndim)
        inputs.append(leaf)
        done.setdefault(node, leaf)
        if _is_stored(node):
            done.setdefault(node.inputs[0], leaf)
    for node in g.topological(outputs, lambda n: () if n in done else n.inputs):
        if node not in done:
            done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
    return Graph(inputs, [done[n] for n in outputs])
