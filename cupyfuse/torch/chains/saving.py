"""What a chain's forward pass saves for its backward pass: products, statistics of their rows, or the gradients.

Products are stored as long as they fit in `max_workspace`. Beyond that, as for the logits of a large vocabulary, either
the gradients themselves are made in the forward pass, where one number scales them all, or the backward pass computes
the products again, where these outgrow the chain's inputs and outputs; both in blocks of rows. The plans' estimated
time decides, and `Saved.note` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Node
from ...plan.build import build
from ...plan.plan import Plan, Traced
from ...plan.report import duration, quantity
from ...settings import Settings
from ...trace.autodiff import gradients
from ...trace.saved import extract_graph, saved_values, stored
from .chain import TracedChain


@dataclass(frozen=True)
class Saved:
    """What the forward pass saves.

    Attributes
    ----------
    nodes : list of Node
    made : dict
        The gradients by input number, for a cotangent of one, where the forward pass makes them; these are `nodes`.
    note : str
        Why, where products do not fit.
    """

    nodes: list[Node]
    made: dict[int, Node] = field(default_factory=dict)
    note: str = ""


def cotangents_of(traced: TracedChain) -> list[Node]:
    """Make a cotangent for each output."""
    nodes = [(v.tracer._node, v.dtype) for v in traced.outputs]
    return [g.argument(k, f"gradient{k}", n.shape, dtype) for k, (n, dtype) in enumerate(nodes)]


def derive(traced: TracedChain, cotangents: Sequence[Node | None], wanted: Sequence[bool]) -> list[Node | None]:
    """Derive the gradient of each input; None where it is zero or not wanted."""
    sources = [v.tracer._node for v, want in zip(traced.inputs, wanted, strict=True) if want]
    found = iter(gradients([v.tracer._node for v in traced.outputs], cotangents, sources))
    return [next(found) if want else None for want in wanted]


def made_gradients(traced: TracedChain, wanted: Sequence[bool]) -> dict[int, Node]:
    """Derive the gradients for a cotangent of one."""
    ones = [g.cast(g.const(1.0), v.dtype) if dtypes.is_float(v.dtype) else None for v in traced.outputs]
    return {k: n for k, n in enumerate(derive(traced, ones, wanted)) if n is not None}


def choose(traced: TracedChain, needs: Sequence[bool], differentiable: Sequence[bool], settings: Settings) -> Saved:
    """Choose what to save for the gradients of the inputs in `needs`."""
    outputs = [v.tracer._node for v in traced.outputs]
    cotangents = cotangents_of(traced)
    given = [c if d else None for c, d in zip(cotangents, differentiable, strict=True)]
    roots = {k: n for k, n in enumerate(derive(traced, given, needs)) if n is not None}
    products = saved_values(outputs, list(roots.values()))
    nbytes = sum(n.nbytes for n in products if n not in outputs)
    most = settings.max_workspace
    if nbytes <= most or traced.chain.updates:
        return Saved(products)
    ways: dict[str, Saved] = {}
    # Computing products again takes time, which is not worth saving a part of what the chain reads and writes anyway.
    if nbytes > sum(v.tracer._node.nbytes for v in (*traced.inputs, *traced.outputs)):
        ways["recomputed by the backward pass"] = Saved(saved_values(outputs, list(roots.values()), products=False))
    if _scaled_by_one_number(traced, differentiable):
        made = made_gradients(traced, needs)
        ways["not needed, since the forward pass makes the gradients"] = Saved(list(made.values()), made)
    times: dict[str, float] = {}
    for name, saved in ways.items():
        plans = [_forward(traced, saved, settings), _backward(traced, roots, given, saved, settings)]
        kept = sum(n.nbytes for n in saved.nodes if n not in outputs and n not in saved.made.values())
        if kept <= most and all(p.workspace <= most or p.blocks is not None for p in plans):
            gpu = settings.device.name if settings.device is not None else "H200"
            times[name] = sum(p.best_time(gpu) for p in plans)
    if not times:
        reason = "they are not taken by rows" if ways else "they take no more than the chain's inputs and outputs"
        return Saved(products, note=f"{quantity(nbytes, 'B')} of products are stored: {reason}")
    best = min(times, key=times.__getitem__)
    rest = [f"{duration(t)} if {name}" for name, t in times.items() if name != best]
    note = (
        f"{quantity(nbytes, 'B')} of products, more than the {quantity(most, 'B')} of max_workspace, are {best}: "
        f"{duration(times[best])} at best for both passes" + "".join(f", {each}" for each in rest)
    )
    return Saved(ways[best].nodes, ways[best].made, note)


def _scaled_by_one_number(traced: TracedChain, differentiable: Sequence[bool]) -> bool:
    """Whether all gradients are multiples of one cotangent, and none is so small before it that float16 loses it."""
    found = [v for v, d in zip(traced.outputs, differentiable, strict=True) if d]
    narrow = any(v.dtype == "float16" for v in (*found, *traced.inputs))
    return len(found) == 1 and found[0].size == 1 and not narrow


def _forward(traced: TracedChain, saved: Saved, settings: Settings) -> Plan:
    return build(traced.as_traced(saved.nodes), None, settings)


def _backward(
    traced: TracedChain, roots: dict[int, Node], given: Sequence[Node | None], saved: Saved, settings: Settings
) -> Plan:
    if saved.made:
        (cotangent,) = (c for c in given if c is not None)
        roots = scaled(saved.made, cotangent)
    return build(backward_graph(traced, roots, range(len(traced.inputs)), saved, given), None, settings)


def scaled(made: dict[int, Node], cotangent: Node) -> dict[int, Node]:
    """Multiply gradients that were made for a cotangent of one."""
    return {k: g.pointwise("multiply", n, g.cast(cotangent, n.dtype)) for k, n in made.items()}


def backward_graph(
    traced: TracedChain, roots: dict[int, Node], inputs: Sequence[int], saved: Saved, given: Sequence[Node | None]
) -> Traced:
    """Return the graph of gradients, from inputs, saved values and the given cotangents."""
    leaves = [(traced.inputs[k].tracer._node, traced.chain.names[k]) for k in inputs]
    leaves += [(stored(node), f"saved{k}") for k, node in enumerate(saved.nodes)]
    leaves += [(c, f"gradient{k}") for k, c in enumerate(given) if c is not None]
    axes = tuple(traced.inputs[k].tracer._axes for k in roots)
    return Traced(f"backward of {traced.chain.name}", extract_graph(list(roots.values()), leaves), axes, ())
