"""What a chain's forward pass saves for its backward pass: products, statistics of their rows, or the gradients.

Beside products, it saves 16-bit operands that it stores for them anyway, as of a weight behind an activation, and
16-bit probabilities that are results, whose gradients belong to the rounded ones.

Products are stored as long as they fit in `max_workspace`. Beyond that, as for the logits of a large vocabulary, there
are two ways, both in blocks: where one number scales all gradients, the forward pass makes them, in blocks of rows, and
the backward pass scales them; where products outgrow the chain's inputs and outputs, weights aside, the backward pass
computes them again, in blocks of rows or of columns. Of the ways whose memory fits in `max_workspace` the plans'
estimated time decides, else the memory does, and `SavedValues.note` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Node
from ...plan.build import build
from ...plan.plan import Plan
from ...plan.report import duration, quantity
from ...plan.traced import Traced
from ...settings import Settings
from ...trace.autodiff import gradients
from ...trace.saved import (
    extract_graph,
    operands_to_save,
    saved_values,
    stored,
    sums_with_biases,
    values_of_rows,
    with_results,
)
from .chain import TracedChain


@dataclass(frozen=True)
class SavedValues:
    """What the forward pass saves.

    Attributes
    ----------
    nodes : list of Node
    gradients : dict
        Where the forward pass makes the gradients: these by input number, for a cotangent of one; they are `nodes`.
    operands : dict
        Saved nodes that only products of the backward pass read, each with the argument that stands for it there; all
        else computes them again.
    note : str
        What was chosen, and why, where products do not fit.
    """

    nodes: list[Node]
    gradients: dict[int, Node] = field(default_factory=dict)
    operands: dict[Node, Node] = field(default_factory=dict)
    note: str = ""

    @property
    def values(self) -> set[Node]:
        """Saved nodes that anything in the backward pass may read."""
        return set(self.nodes).difference(self.operands)

    def leaf(self, node: Node) -> Node:
        """Return what stands for a saved node in the graph of gradients."""
        return self.operands.get(node) or stored(node)


def saved_operand(node: Node) -> Node:
    """Make the argument that stands for a saved operand in the graph of gradients."""
    return g.argument(0, "operand", node.shape, node.dtype, node.ndim)


_RESIDENT = 32768  # columns of rows that kernels hold in registers: reductions over them cost nothing again


def cotangents_of(traced: TracedChain) -> list[Node]:
    """Make a cotangent for each output."""
    nodes = [(v.tracer._node, v.dtype) for v in traced.outputs]
    return [g.argument(k, f"gradient{k}", n.shape, dtype) for k, (n, dtype) in enumerate(nodes)]


def derive(traced: TracedChain, cotangents: Sequence[Node | None], wanted: Sequence[bool]) -> list[Node | None]:
    """Derive the gradient of each input; None where it is zero or not wanted."""
    sources = [v.tracer._node for v, want in zip(traced.inputs, wanted, strict=True) if want]
    outputs = [v.tracer._node for v in traced.outputs]
    found = iter(gradients(outputs, cotangents, sources, traced.trace.viewed))
    return [next(found) if want else None for want in wanted]


def unit_gradients(traced: TracedChain, wanted: Sequence[bool]) -> dict[int, Node]:
    """Derive the gradients for a cotangent of one."""
    ones = [g.cast(g.const(1.0), v.dtype) if dtypes.is_float(v.dtype) else None for v in traced.outputs]
    return {k: n for k, n in enumerate(derive(traced, ones, wanted)) if n is not None}


def scale_gradients(unit: dict[int, Node], cotangent: Node) -> dict[int, Node]:
    """Multiply gradients for a cotangent of one by the cotangent, a number.

    Zeros stay zeros, also where the cotangent is infinite or NaN. Rows whose labels do not count need this: a mask
    keeps the cotangent from them.
    """
    return {k: _scale_but_zeros(n, g.cast(cotangent, n.dtype)) for k, n in unit.items()}


def _scale_but_zeros(values: Node, factor: Node) -> Node:
    is_zero = g.pointwise("equal", values, g.const(0.0))
    return g.pointwise("where", is_zero, values, g.pointwise("multiply", values, factor))


def choose_saved(
    traced: TracedChain, needs: Sequence[bool], differentiable: Sequence[bool], settings: Settings, shards: int = 0
) -> SavedValues:
    """Choose what to save for the gradients of the inputs in `needs`.

    `differentiable` says for each output whether it depends on one of these inputs; `shards`, where processes have a
    part of the products each, how many.
    """
    outputs = [v.tracer._node for v in traced.outputs]
    given = [c if d else None for c, d in zip(cotangents_of(traced), differentiable, strict=True)]
    roots = {k: n for k, n in enumerate(derive(traced, given, needs)) if n is not None}
    products = saved_values(outputs, list(roots.values()), with_biases=not shards)
    products = with_results(outputs, list(roots.values()), products)
    nbytes = sum(n.nbytes for n in products if n not in outputs)
    most = settings.max_workspace
    if shards:
        # Statistics of rows, too: computed again, all shards would have to exchange them again.
        statistics = saved_values(outputs, list(roots.values()), products=False)
        if nbytes // shards <= most or traced.chain.updates:
            return SavedValues(list(dict.fromkeys([*products, *statistics])))
        # Gradients that the forward pass makes need the statistics of all shards first, and so the products twice, too.
        note = f"{quantity(nbytes, 'B')} of products of {shards} shards are recomputed by the backward pass"
        return SavedValues(with_results(outputs, list(roots.values()), statistics), note=note)
    if nbytes <= most or traced.chain.updates:
        # Statistics of sums with biases, which the forward pass reads unrounded, would not belong to what is saved.
        rounded = not sums_with_biases(outputs).keys().isdisjoint(g.topological(roots.values()))
        if not rounded and max((n.shape[-1] for n in products), default=0) > _RESIDENT:
            statistics = saved_values(outputs, list(roots.values()), products=False)
            products = with_results(outputs, list(roots.values()), dict.fromkeys([*products, *statistics]))
        products += values_of_rows(outputs, list(roots.values()), products)
        return _with_operands(traced, products, list(roots.values()), settings)
    ways = _ways_without_products(traced, needs, differentiable, products, roots)
    times: dict[str, float] = {}
    memory: dict[str, int] = {}
    for name, saved in ways.items():
        forward = build(traced.as_traced(saved.nodes), None, settings)
        backward = _backward_plan(traced, roots, given, saved, settings)
        # Gradients of the forward pass are kept beside those that the backward pass scales.
        kept = sum(n.nbytes for n in saved.nodes if n not in outputs)
        held = 0 if saved.gradients else kept
        if held <= most and all(p.workspace <= most or p.blocks is not None for p in (forward, backward)):
            times[name] = forward.estimated_time + backward.estimated_time
            memory[name] = max(held + forward.workspace, kept + backward.workspace)
    if not times:
        reason = (
            "they are not taken by rows"
            if ways
            else "they take no more than the chain's outputs and its inputs beside the weights"
        )
        return SavedValues(products, note=f"{quantity(nbytes, 'B')} of products are stored: {reason}")

    def cost(name: str) -> tuple[float, float]:
        return 0 if memory[name] <= most else memory[name], times[name]

    best, *others = sorted(times, key=cost)
    rest = [f"{duration(times[name])} and {quantity(memory[name], 'B')} if {name}" for name in others]
    note = (
        f"{quantity(nbytes, 'B')} of products, more than the {quantity(most, 'B')} of max_workspace, are {best}: "
        f"about {duration(times[best])} for both passes and {quantity(memory[best], 'B')}"
        + "".join(f", {each}" for each in rest)
    )
    return replace(ways[best], note=note)


def _with_operands(traced: TracedChain, values: list[Node], gradients: list[Node], settings: Settings) -> SavedValues:
    """Save operands of products beside `values`, if they fit in `max_workspace` and the forward pass stores them.

    Values and operands may take twice that: eager keeps both, too, and to compute operands again takes as much.
    """
    outputs = [v.tracer._node for v in traced.outputs]
    operands = operands_to_save(outputs, gradients, values)
    saved = [*values, *operands]
    fits = sum(n.nbytes for n in operands if n not in outputs) <= settings.max_workspace
    if not operands or not fits or _moved(traced, saved, settings) > _moved(traced, values, settings):
        return SavedValues(values)
    return SavedValues(saved, operands={n: saved_operand(n) for n in operands})


def _moved(traced: TracedChain, saved: list[Node], settings: Settings) -> int:
    """Count the bytes that the forward pass reads and writes."""
    return sum(step.reads + step.writes for step in build(traced.as_traced(saved), None, settings).steps)


def _ways_without_products(
    traced: TracedChain,
    needs: Sequence[bool],
    differentiable: Sequence[bool],
    products: list[Node],
    roots: dict[int, Node],
) -> dict[str, SavedValues]:
    """List what may be saved instead of `products`, for the gradients `roots`.

    Each is named by what becomes of the products, in words for the plan's note.
    """
    ways: dict[str, SavedValues] = {}
    # Computing products again takes time, which is not worth saving a part of what is read and written for each row.
    values = [*(v for k, v in enumerate(traced.inputs) if k not in traced.chain.fixed), *traced.outputs]
    outputs = [v.tracer._node for v in traced.outputs]
    if sum(n.nbytes for n in products if n not in outputs) > sum(v.tracer._node.nbytes for v in values):
        kept = _instead_of_products(outputs, list(roots.values()), products)
        ways["recomputed by the backward pass"] = SavedValues(kept)
    if _gradients_scale_with_one_number(traced, differentiable):
        unit = unit_gradients(traced, needs)
        ways["not needed, since the forward pass makes the gradients"] = SavedValues(list(unit.values()), unit)
    return ways


def _instead_of_products(outputs: Sequence[Node], gradients: list[Node], products: Sequence[Node]) -> list[Node]:
    """List what is saved where the backward pass computes products again, of which no other one is computed.

    These are statistics of rows, such as a softmax's maximum and sum, and products that others are computed of. One
    pass may round a product of 16 bits that the other does not, and read a saved one rounded: statistics would belong
    to other rows, whose shares do not add up to 1, and what follows a softmax multiplies the difference. There
    statistics are saved only where no matrix is computed of them, as in a loss.
    """
    inner = {p for q in products for p in set(g.topological([q])).intersection(products) if p is not q}
    of_rows: dict[Node, set[Node]] = {}  # statistics, by what they are of
    for node in saved_values(outputs, gradients, products=False):
        of_rows.setdefault(node.inputs[0], set()).add(node)
    kept = [p for p in products if p in inner]
    for rows, statistics in of_rows.items():
        is_doubtful = bool(inner) or dtypes.ITEMSIZE[rows.dtype] <= 2
        if not (is_doubtful and _make_a_matrix(statistics, outputs)):
            kept += statistics
    return with_results(outputs, gradients, kept)


def _make_a_matrix(values: set[Node], outputs: Sequence[Node]) -> bool:
    """Whether a matrix is computed of any of these values."""
    dependent = set(values)
    for node in g.topological(outputs):
        if not dependent.isdisjoint(node.inputs):
            dependent.add(node)
    return any(min(node.shape) > 1 for node in dependent - values)


def _gradients_scale_with_one_number(traced: TracedChain, differentiable: Sequence[bool]) -> bool:
    """Whether all gradients are multiples of one number, the cotangent of the only output that has gradients.

    Not in float16: gradients for a cotangent of one could underflow before that number, a loss scale, multiplies them.
    """
    found = [v for v, d in zip(traced.outputs, differentiable, strict=True) if d]
    float16 = any(v.dtype == "float16" for v in (*found, *traced.inputs))
    return len(found) == 1 and found[0].size == 1 and not float16


def _backward_plan(
    traced: TracedChain, roots: dict[int, Node], given: Sequence[Node | None], saved: SavedValues, settings: Settings
) -> Plan:
    """Plan the backward pass from the cotangents in `given` to the gradients in `roots`."""
    if saved.gradients:
        (cotangent,) = (c for c in given if c is not None)
        roots = scale_gradients(saved.gradients, cotangent)
    return build(backward_graph(traced, roots, range(len(traced.inputs)), saved, given), None, settings)


def backward_graph(
    traced: TracedChain, roots: dict[int, Node], inputs: Sequence[int], saved: SavedValues, given: Sequence[Node | None]
) -> Traced:
    """Return the graph of gradients, from inputs, saved values and the given cotangents."""
    leaves = [(traced.inputs[k].tracer._node, traced.chain.names[k]) for k in inputs]
    leaves += [(saved.leaf(node), f"saved{k}") for k, node in enumerate(saved.nodes)]
    leaves += [(c, f"gradient{k}") for k, c in enumerate(given) if c is not None]
    axes = tuple(traced.inputs[k].tracer._axes for k in roots)
    return Traced(f"backward of {traced.chain.name}", extract_graph(list(roots.values()), leaves), axes, ())
