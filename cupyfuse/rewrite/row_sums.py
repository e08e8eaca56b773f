"""Rewrites of sums along an axis that wait for other reductions of the same elements: one pass computes both.

The sums of softmaxes, of their logarithms and of both, and elements that are chosen by a label.
"""

from __future__ import annotations

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Node

_MOST_COUNTED = 1 << 32  # elements that an accumulator of distances counts, and one more


def recognize_distances(node: Node) -> Node:
    """sum(x - m) = distances(x) with m = max(x), and sum((x - m) - log(s)) = distances(x) - n log(s), s = expsum(x).

    The second is the sum of a log_softmax, as label smoothing has it. Its two terms have the same sign, so that nothing
    cancels. NaN for a row with +inf or of -inf, and -inf for others with -inf, as written. Saves a pass over the row.
    """
    if node.op != "sum" or node.inputs[0].op != "subtract" or node.inputs[0].shape[node.axis] >= _MOST_COUNTED:
        return node
    value = node.inputs[0]
    if (x := _distance_operand(value, node.axis)) is not None:
        return g.reduce("distances", x, node.axis)
    x = _log_probability_operand(value, node.axis)
    if x is None or _distance_operand(value.inputs[0], node.axis) is None:
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
    """Return x where a value is (x - max(x)) - log(expsum(x)) or x - logsumexp(x); else None."""
    if node.op != "subtract":
        return None
    value, normalizer = node.inputs
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
    """sum_j(f(b if j == k else 0)) = (n - 1) f(0) + f(b) for an f linear in it; n f(0) for a k out of range.

    Several labels have an f(b) each. This is the sum of the cotangents of a loss of labels. Holds to rounding, and is
    nearer to float64; f is computed as written, also where its numbers are not finite. Saves a pass over the row.
    """
    if node.op != "sum":
        return node
    value, axis = node.inputs[0], node.axis

    def operands(n: Node) -> tuple[Node, ...]:
        return n.inputs if n.op in _LINEAR and n.shape[axis] != 1 else ()

    order = list(g.topological([value], operands))
    wide = [n for n in order if n.shape[axis] != 1]
    choices = [n for n in wide if not operands(n)]
    if not all(_is_linear(n, axis) if operands(n) else _chooses_number(n, axis) for n in wide):
        return node
    conditions = list(dict.fromkeys(n.inputs[0] for n in choices))
    if not 0 < len(conditions) < value.shape[axis]:  # some element is not chosen
        return node

    def element_at(condition: Node | None) -> Node:
        """Compute the element at the label of a condition; at no label for None."""
        done: dict[Node, Node] = {}
        for n in order:
            if n.shape[axis] == 1:
                done[n] = n
            elif operands(n):
                done[n] = g.pointwise(n.op, *(done[i] for i in n.inputs))
            else:
                done[n] = g.cast(n.inputs[1] if n.inputs[0] is condition else n.inputs[2], n.dtype)
        return g.cast(done[value], value.dtype)

    count, parts = g.axis_length(value.shape[axis], axis), []
    for condition in conditions:
        chosen = g.cast(_in_range(condition, axis), dtypes.compute_dtype(value.dtype))
        count = g.pointwise("subtract", count, chosen)
        parts.append(_if_in_range(condition, element_at(condition), axis))
    total = g.pointwise("multiply", element_at(None), count)
    for part in parts:
        total = g.pointwise("add", total, part)
    return g.cast(total, node.dtype)


_LINEAR = ("add", "subtract", "negative", "multiply", "divide")


def _is_linear(node: Node, axis: int) -> bool:
    """Whether an operator is linear in those of its operands that differ along an axis."""
    if node.op not in ("multiply", "divide"):
        return True
    wide = [i.shape[axis] != 1 for i in node.inputs]
    return wide == [True, False] or (wide == [False, True] and node.op == "multiply")


def _chooses_number(node: Node, axis: int) -> bool:
    """Whether a value is a number of the row at a label, and 0 elsewhere."""
    chosen = _chosen(node, axis)
    return chosen is not None and chosen.shape[axis] == 1


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
            inputs = [done.get(i, i) for i in n.inputs]
            done[n] = g.with_inputs(n, inputs, g.broadcast_shapes(*(i.shape for i in inputs)))
    return g.cast(_if_in_range(condition, done[chosen], axis), node.dtype)


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


def _in_range(condition: Node, axis: int) -> Node:
    """Return whether the label of a condition is one of the positions along an axis."""
    label = _label(condition, axis)
    assert label is not None
    not_negative = g.pointwise("greater_equal", label, g.const(0))
    return g.pointwise("logical_and", not_negative, g.pointwise("less", label, g.const(condition.shape[axis])))


def _if_in_range(condition: Node, value: Node, axis: int) -> Node:
    """Return a value where the label of a condition is one of the positions along an axis, else 0."""
    return g.pointwise("where", _in_range(condition, axis), value, g.const(0.0))
