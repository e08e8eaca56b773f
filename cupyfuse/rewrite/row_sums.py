"""Rewrites of sums along an axis that wait for other reductions of the same elements: one pass computes both.

The sums of softmaxes, of their logarithms and of both, and elements that are chosen by a label.
"""

from __future__ import annotations

from collections.abc import Sequence

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Node
from ..ir.operators import POINTWISE

_MOST_COUNTED = 1 << 32  # elements that an accumulator of distances counts, and one more


def recognize_distances(node: Node) -> Node:
    """sum(x - m) = distances(x) with m = max(x), and sum((x - m) - log(s)) = distances(x) - n log(s), s = expsum(x).

    The second is the sum of a log_softmax, as label smoothing has it, also where it takes 0 for an m that is not
    finite: such rows are NaN in either form. Its two terms have the same sign, so that nothing cancels. NaN for a row
    with +inf or of -inf, and -inf for others with -inf, as written. Saves a pass over the row.
    """
    if node.op != "sum" or node.inputs[0].op != "subtract" or node.inputs[0].shape[node.axis] >= _MOST_COUNTED:
        return node
    value = node.inputs[0]
    if (x := _distance_operand(value, node.axis)) is not None:
        return g.reduce("distances", x, node.axis)
    x = _log_probability_operand(value, node.axis)
    if x is None or value.inputs[1].op == "plus_log":
        return node
    count = g.axis_length(x.shape[node.axis], node.axis)
    total = g.pointwise("multiply", value.inputs[1], count)
    return g.pointwise("subtract", g.reduce("distances", x, node.axis), total)


def recognize_entropy(node: Node) -> Node:
    """sum(p log p) = e / s - log(s) and sum(p x) = e / s + m, for the softmax p of x, with m = max(x), s = expsum(x).

    e is expdistances(x), the sum of (x - m) exp(x - m). NaN for a row with an infinity, as written, where 0 meets it;
    an x - m that overflows without one may give NaN for 0. Saves a pass over the row.
    """
    if node.op != "sum" or node.inputs[0].op != "multiply":
        return node
    for p, factor in (node.inputs[0].inputs, node.inputs[0].inputs[::-1]):
        x = _probability_operand(p, node.axis)
        if x is None or x.dtype != node.dtype:
            continue
        top, total = g.reduce("max", x, node.axis), g.reduce("expsum", x, node.axis)
        share = g.pointwise("divide", g.reduce("expdistances", x, node.axis), total)
        if factor is x:
            return g.pointwise("add", share, top)
        if _log_probability_operand(factor, node.axis) is x:
            return g.pointwise("subtract", share, g.pointwise("log", total))
    return node


def _distance_operand(node: Node, axis: int) -> Node | None:
    """Return x where a value is x - max(x); else None."""
    if node.op != "subtract":
        return None
    x, top = node.inputs
    same = top.op == "max" and top.axis == axis and top.inputs[0] is x and x.dtype == node.dtype
    return x if same else None


def _finite_distance_operand(node: Node, axis: int) -> Node | None:
    """Return x where a value is x - max(x), or x where that maximum is not finite; else None."""
    if node.op != "subtract" or node.inputs[1].op != "finite_or_zero":
        return None
    x, base = node.inputs
    return x if _is_reduction(base.inputs[0], "max", x, axis) and x.dtype == node.dtype else None


def _exponential_operand(node: Node, axis: int) -> Node | None:
    """Return x where a value is exp(x - max(x)); else None."""
    return _distance_operand(node.inputs[0], axis) if node.op == "exp" else None


def _probability_operand(node: Node, axis: int) -> Node | None:
    """Return x where a value is the softmax of x, or the exponential of its logarithm; else None."""
    if node.op == "exp":
        return _log_probability_operand(node.inputs[0], axis)
    x = _exponential_operand(node.inputs[0], axis) if node.op == "divide" else None
    return x if x is not None and _is_reduction(node.inputs[1], "expsum", x, axis) else None


def _log_probability_operand(node: Node, axis: int) -> Node | None:
    """Return x where a value is the logarithm of x's softmax; else None.

    That is (x - max(x)) - log(expsum(x)), in this form or that of log_softmax, or x - logsumexp(x).
    """
    if node.op != "subtract":
        return None
    value, normalizer = node.inputs
    x = _finite_distance_operand(value, axis)
    if x is not None:
        is_log = normalizer.op == "log_relative" and _is_reduction(normalizer.inputs[0], "max", x, axis)
        return x if is_log and _is_reduction(normalizer.inputs[1], "expsum", x, axis) else None
    x = _distance_operand(value, axis)
    if x is not None:
        is_log = normalizer.op == "log" and _is_reduction(normalizer.inputs[0], "expsum", x, axis)
        return x if is_log else None
    if normalizer.op != "plus_log" or value.dtype != node.dtype:
        return None
    top, total = normalizer.inputs
    both = _is_reduction(top, "max", value, axis) and _is_reduction(total, "expsum", value, axis)
    return value if both else None


def _is_reduction(node: Node, op: str, x: Node, axis: int) -> bool:
    return node.op == op and node.axis == axis and node.inputs[0] is x


# Elements that are chosen by a label --------------------------------------------------------------------------------


def sum_of_choices(node: Node) -> Node:
    """sum_j f(a, b if j == k else c) = (n - 1) f(a, c) + f(a, b) for values that are constant along the sum; n f(a, c)
    for a k out of range.

    f is pointwise. This is the sum of the gradients of a loss of labels. Holds to rounding, and is nearer to float64;
    infinities and NaN as written, as f is evaluated as written. Saves a pass over the row.
    """
    axis = node.axis
    if node.op != "sum" or node.inputs[0].shape[axis] < 2:
        return node
    two = _two_values(node.inputs[0], axis)
    if two is None:
        return node
    elsewhere, at_label, condition = two
    count = g.axis_length(node.inputs[0].shape[axis], axis)
    others = g.pointwise("multiply", elsewhere, g.pointwise("subtract", count, g.const(1.0)))
    total = g.pointwise("add", others, at_label)
    total = _if_in_range(condition, total, g.pointwise("multiply", elsewhere, count), axis)
    return g.broadcast(g.cast(total, node.dtype), node.shape)  # both values may be constant along the other axis


def _two_values(value: Node, axis: int) -> tuple[Node, Node, Node] | None:
    """Return what a value is elsewhere and at a label's position along an axis, and the condition that compares it.

    None if the value varies otherwise, or not at all.
    """
    both: dict[Node, tuple[Node, Node]] = {}
    conditions: dict[Node, Node] = {}  # by label

    def operands(node: Node) -> tuple[Node, ...]:
        if node.shape[axis] == 1 or not node.pointwise:
            return ()
        return node.inputs[1:] if _is_choice(node, axis) else node.inputs

    for node in g.topological([value], operands):
        if node.shape[axis] == 1:
            both[node] = node, node
        elif _is_choice(node, axis):
            condition, chosen, other = node.inputs
            label = _label(condition, axis)
            assert label is not None
            conditions.setdefault(label, condition)
            both[node] = g.cast(both[other][0], node.dtype), g.cast(both[chosen][1], node.dtype)
        elif node.op == "broadcast":
            filled, chosen = both[node.inputs[0]]
            both[node] = g.cast(filled, node.dtype), g.cast(chosen, node.dtype)  # constants are weak no more
        elif node.op in POINTWISE or node.op == "cast":
            elsewhere, at_label = zip(*(both[i] for i in node.inputs), strict=True)
            both[node] = _applied(node, elsewhere), _applied(node, at_label)
        else:
            return None
    if len(conditions) != 1:
        return None
    (condition,) = conditions.values()
    return *both[value], condition


def _is_choice(node: Node, axis: int) -> bool:
    """Whether a value is one of two by whether a label is the position along an axis."""
    return node.op == "where" and node.shape[axis] != 1 and _label(node.inputs[0], axis) is not None


def _applied(node: Node, inputs: Sequence[Node]) -> Node:
    """Apply a pointwise operator to values of other shapes."""
    return g.with_inputs(node, inputs, g.broadcast_shapes(*(i.shape for i in inputs)))


def choose_before_reductions(node: Node) -> Node:
    """sum_j(f(x_j, r) if j == k else 0) = f(x_k, r) for an r that depends on reductions of the row.

    f is arithmetic without division by x. Exact, but for the sign of zeros. A k out of range gives 0, as written. Saves
    a pass over the row: x_k is found in the pass that computes the reductions.
    """
    if node.op != "sum":
        return node
    chosen, axis = _chosen(node.inputs[0], node.axis), node.axis
    if chosen is None or chosen.shape[axis] == 1:
        return node
    domain = node.inputs[0].shape
    late = _LateValues(domain, axis)
    if not late(chosen):
        return node
    order = list(g.topological([chosen], lambda n: n.inputs if late(n) else ()))
    wide = [n for n in order if n.shape[axis] != 1]
    if not all(n.op in _MOVED or not late(n) for n in wide) or any(_divides_by_late(n, axis) for n in wide):
        return node
    leaves = [n for n in wide if not late(n)]
    if len(leaves) != 1:
        return node
    condition, zero = node.inputs[0].inputs[0], g.const(0.0)
    done: dict[Node, Node] = {}
    for n in order:
        if n.shape[axis] == 1:
            done[n] = n
        elif n is leaves[0]:
            done[n] = g.reduce("sum", g.cast(g.pointwise("where", condition, n, zero), n.dtype), axis)
        else:
            done[n] = _applied(n, [done.get(i, i) for i in n.inputs])
    return g.cast(_if_in_range(condition, done[chosen], zero, axis), node.dtype)


# What may be computed of a chosen element, rather than of all.
_MOVED = ("add", "subtract", "multiply", "divide", "negative", "exp", "log", "cast")


def _divides_by_late(node: Node, axis: int) -> bool:
    """Whether a value divides by elements, whose zeros would lose their sign."""
    return node.op == "divide" and node.inputs[1].shape[axis] != 1


class _LateValues:
    """Tells which values with an element for each of a domain can be computed only after reductions along an axis."""

    def __init__(self, domain: tuple[int, int], axis: int):
        self._domain, self._axis = domain, axis
        self._found: dict[Node, bool] = {}
        self._waiting: dict[Node, bool] = {}

    def __call__(self, node: Node) -> bool:
        for n in g.topological([node], lambda n: () if n in self._found else n.inputs if self._is_wide(n) else ()):
            if n not in self._found:
                self._found[n] = self._is_wide(n) and any(
                    self._found.get(i, False) or (i.shape[self._axis] == 1 and self._waits(i)) for i in n.inputs
                )
        return self._found[node]

    def _is_wide(self, node: Node) -> bool:
        return node.pointwise and node.shape == self._domain

    def _waits(self, value: Node) -> bool:
        """Whether a value that is constant along the axis depends on a reduction of the domain along it."""
        if value not in self._waiting:
            order = g.topological([value], lambda n: () if n.reduction or n in self._waiting else n.inputs)
            self._waiting[value] = any(
                self._waiting.get(n, False)
                or (n.reduction and n.axis == self._axis and n.inputs[0].shape == self._domain)
                for n in order
            )
        return self._waiting[value]


def _chosen(value: Node, axis: int) -> Node | None:
    """Return b where a value is b at the position of a label along an axis, and 0 elsewhere; else None."""
    if value.op != "where":
        return None
    condition, chosen, other = value.inputs
    is_zero = other.op == "const" and not other.name and other.value == 0
    return chosen if is_zero and _label(condition, axis) is not None else None


def _label(condition: Node, axis: int) -> Node | None:
    """Return the label that a condition compares with the positions along an axis; None if it is no such condition."""
    if condition.op != "equal":
        return None
    for at, label in (condition.inputs, condition.inputs[::-1]):
        if at.op == "cast" and dtypes.is_integer(at.dtype):
            at = at.inputs[0]
        counts = at.op == "positions" and dtypes.is_integer(at.dtype) and dtypes.is_integer(label.dtype)
        if counts and at.shape[axis] != 1 == label.shape[axis]:
            return label
    return None


def _if_in_range(condition: Node, value: Node, other: Node, axis: int) -> Node:
    """Return a value where the label of a condition is one of the positions along an axis, and another where not."""
    label = _label(condition, axis)
    assert label is not None
    inside = g.pointwise(
        "logical_and",
        g.pointwise("greater_equal", label, g.const(0)),
        g.pointwise("less", label, g.const(condition.shape[axis])),
    )
    return g.pointwise("where", inside, value, other)
