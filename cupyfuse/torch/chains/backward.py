"""The backward pass of a chain: what the forward pass saves for it, and how it runs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Node
from ...plan.build import build
from ...plan.plan import Plan, Traced
from ...settings import Settings
from ...trace.autodiff import extract_graph, gradients, saved_values, stored
from ..rules.values import Value
from .chain import Tracing
from .runtime import layout_of, ready
from .tensors import as_matrix


@dataclass(frozen=True)
class _Ready:
    """A backward pass made ready, and for which inputs it gives gradients."""

    plan: Plan
    execute: Any
    places: list[int]


class Backward:
    """The vector-Jacobian product of a chain, for inputs of fixed shapes and dtypes.

    Parameters
    ----------
    tracing : Tracing
        The chain's graph.
    needs : sequence of bool
        For each input, whether its gradient is wanted.
    settings : Settings
    saved : sequence of Node, optional
        What the forward pass saves; chosen unless given.

    Attributes
    ----------
    differentiable : list of bool
        For each output, whether it depends on an input whose gradient is wanted.
    inputs : list of int
        The inputs that the backward pass reads.
    beneath : list of int
        Other inputs, which what is saved was computed from: derivatives of the gradients depend on them.
    saved : list of Node
        What it reads of the forward pass: products, and statistics of columns. All else it computes again.
    """

    def __init__(
        self, tracing: Tracing, needs: Sequence[bool], settings: Settings, saved: Sequence[Node] | None = None
    ):
        self.tracing, self.needs, self.settings = tracing, tuple(needs), settings
        wanted = {v.tracer._node for v, need in zip(tracing.inputs, needs, strict=True) if need}
        reached = _depending(tracing, wanted)
        self.differentiable = [dtypes.is_float(v.dtype) and v.tracer._node in reached for v in tracing.outputs]
        self._cotangents = [
            g.argument(k, f"gradient{k}", v.tracer._node.shape, v.dtype) for k, v in enumerate(tracing.outputs)
        ]
        roots = self._gradients(tuple(self.differentiable), self.needs)
        forward = [v.tracer._node for v in tracing.outputs]
        found = [node for node in roots if node is not None]
        self.saved = saved_values(forward, found) if saved is None else list(saved)
        reading = set(g.topological(found, lambda n: () if n in self.saved else n.inputs))
        self.inputs = [k for k, v in enumerate(tracing.inputs) if v.tracer._node in reading]
        below = set(g.topological(found))
        self.beneath = [k for k, v in enumerate(tracing.inputs) if v.tracer._node in below and k not in self.inputs]
        self._ready: dict[Hashable, _Ready] = {}
        self._flow: dict[Hashable, tuple[bool, list[int]]] = {}

    def _gradients(self, given: tuple[bool, ...], wanted: Sequence[bool]) -> list[Node | None]:
        """The gradient of each input, None where it is not wanted or nothing depends on it."""
        outputs = [v.tracer._node for v in self.tracing.outputs]
        cotangents = [c if there else None for c, there in zip(self._cotangents, given, strict=True)]
        places = [k for k, want in enumerate(wanted) if want]
        found = gradients(outputs, cotangents, [self.tracing.inputs[k].tracer._node for k in places])
        result: list[Node | None] = [None] * len(self.tracing.inputs)
        for k, node in zip(places, found, strict=True):
            result[k] = node
        return result

    def _flowing(self, given: tuple[bool, ...], wanted: tuple[bool, ...]) -> tuple[bool, list[int]]:
        """Whether any gradient is to be computed, and the inputs that outputs depend on in steps only."""
        roots = self._gradients(given, wanted) if any(given) and any(wanted) else [None] * len(wanted)
        outputs = [v.tracer._node for v, there in zip(self.tracing.outputs, given, strict=True) if there]
        above = set(g.topological(outputs, _passing))
        nodes = [v.tracer._node for v in self.tracing.inputs]
        steps = [k for k, want in enumerate(wanted) if want and roots[k] is None and nodes[k] in above]
        return any(root is not None for root in roots), steps

    @property
    def plans(self) -> list[Plan]:
        return [each.plan for each in list(self._ready.values())]

    def plan(self) -> Plan:
        """The plan for contiguous gradients of all outputs."""
        traced, _ = self._traced(tuple(self.differentiable), self.needs)
        return build(traced, {}, self.settings)

    def _traced(self, given: tuple[bool, ...], wanted: Sequence[bool]) -> tuple[Traced, list[int]]:
        roots = self._gradients(given, wanted)
        places = [k for k, node in enumerate(roots) if node is not None]
        names = self.tracing.chain.names
        leaves = [(self.tracing.inputs[k].tracer._node, names[k]) for k in self.inputs]
        leaves += [(stored(node), f"saved{k}") for k, node in enumerate(self.saved)]
        leaves += [(c, f"gradient{k}") for k, c in enumerate(self._cotangents) if given[k]]
        graph = extract_graph([node for node in (roots[k] for k in places) if node is not None], leaves)
        axes = tuple(self.tracing.inputs[k].tracer._axes for k in places)
        return Traced(f"backward of {self.tracing.chain.name}", graph, axes, ()), places

    # Running
    def __call__(self, saved: Sequence[Any], cotangents: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        """The gradients, one for each input of the chain.

        Parameters
        ----------
        saved : the tensors of `inputs`, then of `saved`
        cotangents : one for each output, or None for zero
        wanted : for each input, whether its gradient is
        """
        given = tuple(c is not None and d for c, d in zip(cotangents, self.differentiable, strict=True))
        result: list[Any] = [None] * len(self.tracing.inputs)
        chosen = (given, tuple(wanted))
        if chosen not in self._flow:
            self._flow[chosen] = self._flowing(*chosen)
        flows, steps = self._flow[chosen]
        for k in steps:
            value, like = self.tracing.inputs[k], next(c for c, there in zip(cotangents, given, strict=True) if there)
            result[k] = torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=like.device)
        if not flows:
            return result
        arrays = [as_matrix(t) for t in saved]
        for value, c, there in zip(self.tracing.outputs, cotangents, given, strict=True):
            if there:
                arrays.append(_as_node(value, c))
        key = (given, tuple(wanted), tuple((a.stride(), a.shape) for a in arrays), arrays[0].device)
        ready_one = self._ready.get(key)
        if ready_one is None:
            ready_one = self._ready[key] = self._make(given, tuple(wanted), arrays)
        grads = ready_one.execute(arrays, [None] * len(ready_one.plan.outputs))
        for k, grad in zip(ready_one.places, grads, strict=True):
            result[k] = grad.reshape(self.tracing.inputs[k].shape)
        return result

    def _make(self, given: tuple[bool, ...], wanted: Sequence[bool], arrays: Sequence[Any]) -> _Ready:
        traced, places = self._traced(given, wanted)
        plan = build(traced, dict(enumerate(map(layout_of, arrays))), self.settings)
        return _Ready(plan, ready(plan, arrays), places)

    def eagerly(self, known: Mapping[int, Any], cotangents: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        """The gradients as functions that can be differentiated again, by PyTorch's own operations.

        Parameters
        ----------
        known : the tensors of `inputs` and `beneath` by number
        cotangents, wanted : as above
        """
        like = next((c for c in cotangents if c is not None), None)
        if like is None:
            return [None] * len(wanted)
        with torch.enable_grad():
            inputs = []
            for k, value in enumerate(self.tracing.inputs):
                if k in known:
                    inputs.append(known[k])
                else:
                    # No derivative depends on its value.
                    filler = torch.zeros(value.shape, dtype=getattr(torch, value.dtype), device=like.device)
                    inputs.append(filler.requires_grad_(wanted[k]))
            aliases = [t.view_as(t) if want else t for t, want in zip(inputs, wanted, strict=True)]
            outputs = self.tracing.chain.eager(aliases)[: len(self.tracing.outputs)]
            pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
            if not pairs:
                return [None] * len(wanted)
            sources = [t for t, want in zip(aliases, wanted, strict=True) if want]
            found = iter(
                torch.autograd.grad(
                    [o for o, _ in pairs], sources, [c for _, c in pairs], create_graph=True, allow_unused=True
                )
            )
            return [next(found) if want else None for want in wanted]


def _passing(node: Node) -> Sequence[Node]:
    """The inputs that a node's gradient flows to."""
    flows = dtypes.is_float(node.dtype) and node.op != "stop_gradient"
    return [i for i in node.inputs if dtypes.is_float(i.dtype)] if flows else []


def _depending(tracing: Tracing, wanted: set[Node]) -> set[Node]:
    """The nodes that gradients of the wanted inputs flow to."""
    found = set(wanted)
    for node in g.topological([v.tracer._node for v in tracing.outputs]):
        if any(i in found for i in _passing(node)):
            found.add(node)
    return found


def _as_node(value: Value, cotangent: Any) -> Any:
    """A gradient of an output as the output's node lies: rows x columns."""
    tracer = value.tracer
    matrix = cotangent.reshape(tracer.shape)
    if [a for a in tracer._axes if a is not None] == [1, 0]:
        kept = [k for k, a in enumerate(tracer._axes) if a is not None]
        matrix = matrix.reshape([matrix.shape[k] for k in kept]).t()
    return matrix.reshape(tracer._node.shape)
