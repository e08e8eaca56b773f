"""Chains of per-column multiply-adds, such as bias, BatchNorm and scale, folded into one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Graph, Node
from .linear import convert, scale_factor
from .notes import Note


def fold_affine(node: Node, dependences: _Dependences | None = None) -> Node:
    """((y + b - m) r g + t) s = y a + c, with per-column a = r g s and c = ((b - m) r g + t) s.

    Holds to rounding; guarded by element, also where factors underflow. If y is not a matrix product, its leading
    shifts stay as written, since cancellation could cost digits: (y - m) a + c. Operands that depend on a maximum or
    minimum end a chain: y - min(y) has exact zeros. Saves the loads and the arithmetic of all steps but one; a and c
    are computed once for bound arrays.
    """
    chain, inner = affine_chain(node, dependences)
    if inner.op != "matmul":
        while chain and (chain[-1].op in ("add", "subtract") or _exact_scale(chain[-1])):
            inner = chain.pop()
    # (x + 2**23) - 2**23 rounds to integers: do not cancel the numbers.
    numbers = [s for s in chain if s.op in ("add", "subtract") and any(i.op == "const" for i in s.inputs)]
    if len(chain) < 3 or len(numbers) > 1:
        return node
    scale: Node | None = None
    shift: Node | None = None
    value = inner
    for step in reversed(chain):
        other = next((convert(i, step.dtype) for i in step.inputs if i is not value), None)
        scale, shift = _affine_step(step, value, other, scale, shift)
        value = step
    fast = inner if scale is None else g.pointwise("multiply", inner, scale)
    if shift is not None:
        fast = g.pointwise("add", fast, shift)
    return g.guard(g.cast(fast, node.dtype), node)


def _exact_scale(step: Node) -> bool:
    """Whether a step multiplies by a power of two, which rounds nothing."""
    numbers = [abs(float(i.value)) for i in step.inputs if i.op == "const"]
    return step.op == "negative" or (step.op != "add" and any(math.frexp(n)[0] == 0.5 for n in numbers))


def _affine_step(
    step: Node, value: Node, other: Node | None, scale: Node | None, shift: Node | None
) -> tuple[Node | None, Node | None]:
    """Fold one more step of a chain into `inner * scale + shift`."""
    if step.op == "negative" or (step.op == "subtract" and step.inputs[1] is value):
        scale = scale_factor("multiply", scale, g.const(-1.0))
        shift = None if shift is None else g.pointwise("negative", shift)
    if other is None or step.op == "negative":
        return scale, shift
    if step.op in ("multiply", "divide"):
        return scale_factor(step.op, scale, other), None if shift is None else g.pointwise(step.op, shift, other)
    if step.op == "subtract" and step.inputs[0] is value:
        return scale, g.pointwise("negative", other) if shift is None else g.pointwise("subtract", shift, other)
    return scale, other if shift is None else g.pointwise("add", shift, other)


def affine_chain(node: Node, dependences: _Dependences | None = None) -> tuple[list[Node], Node]:
    """Return the multiply-adds that end in a node, outermost first, and the value that they are applied to.

    `dependences` saves finding those of the values beneath the node again.
    """
    dependences = _find_dependences([node]) if dependences is None else dependences
    chain: list[Node] = []
    while (inner := _affine_inner(node, dependences)) is not None:
        chain.append(node)
        node = inner
    return chain, node


def _affine_inner(node: Node, dependences: _Dependences) -> Node | None:
    """Return the operand that a per-column multiply or add scales or shifts; None for other nodes."""
    if node.op not in ("add", "subtract", "multiply", "divide", "negative") or not dtypes.is_float(node.dtype):
        return None
    if node.shape[1] == 1:
        return None
    values = [i for i in node.inputs if i.shape == node.shape and i in dependences.varying]
    if len(values) != 1 or (node.op == "divide" and values[0] is not node.inputs[0]):
        return None
    others = [i for i in node.inputs if i is not values[0]]
    # y - min(y) has to stay exactly zero where it is zero.
    fixed = all(i.shape[0] == 1 and i not in dependences.varying and i not in dependences.extreme for i in others)
    return values[0] if fixed else None


@dataclass(frozen=True)
class _Dependences:
    """What values depend on, as sets of nodes.

    Attributes
    ----------
    varying : values that depend on a matrix, so that their rows may differ
    extreme : values that depend on the maximum or minimum of a varying value
    """

    varying: set[Node]
    extreme: set[Node]


def _find_dependences(roots: Iterable[Node]) -> _Dependences:
    varying: set[Node] = set()
    extreme: set[Node] = set()
    for node in g.topological(roots, g.eager_inputs):
        inputs = g.eager_inputs(node)
        matrix = node.op == "matmul" or (node.op == "input" and node.ndim >= 2)
        column_reduction = node.reduction and node.axis == 0
        if matrix or (not column_reduction and any(i in varying for i in inputs)):
            varying.add(node)
        if any(i in extreme for i in inputs) or (node.op in ("max", "min") and inputs[0] in varying):
            extreme.add(node)
    return _Dependences(varying, extreme)


def fold_affine_chains(graph: Graph, notes: list[Note]) -> Graph:
    """Fold each chain of per-column multiply-adds once, at its last step."""
    users = g.users(graph.roots)
    dependences = _find_dependences(graph.roots)
    chained = {n for n in users if _affine_inner(n, dependences) is not None}
    inner = {n for n in chained if n not in graph.roots and users[n] and all(u in chained for u in users[n])}
    outermost = [n for n in users if n in chained and n not in inner]
    folds = {n: folded for n in outermost if (folded := fold_affine(n, dependences)) is not n}
    for node in folds:
        steps = [n.op for n in reversed(affine_chain(node, dependences)[0])]
        notes.append(
            Note("per-column multiply-adds are one", " -> ".join(steps), f"{(len(steps) - 2) * node.size:.3g} FLOPs")
        )
    # Last to first: a folded chain may contain earlier ones.
    for node, folded in reversed(folds.items()):
        graph = g.substitute(graph, node, folded)
    return graph
