"""A graph that one process runs by itself: planned for the layouts of its operands, and loaded."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from ...ir.graph import Graph, topological
from ...plan.build import build
from ...plan.plan import Plan
from ...plan.traced import Traced
from ...settings import Settings
from ...trace.saved import extract_graph
from ..chains.runtime import load
from ..chains.tensors import layout_of

_MOST_LAYOUTS = 64


class Leaf:
    """A graph of matrices, run on this process's device.

    Parameters
    ----------
    name : str
        Of its plans.
    graph : Graph
    settings : Settings

    Attributes
    ----------
    result_modes : tuple
        Of each result, how the levels beneath split it; there are none.
    """

    def __init__(self, name: str, graph: Graph, settings: Settings):
        self._settings = settings
        self.result_modes: tuple[tuple[int, ...], ...] = ((),) * len(graph.outputs)
        place = {node: k for k, node in enumerate(graph.inputs)}
        # Results that are operands as they are: a plan would copy them.
        self._given = [place.get(node, -1) for node in graph.outputs]
        computed = [node for node in graph.outputs if node not in place]
        reached = set(topological(computed))
        # A plan of constants alone has an operand, too: its device is where the plan runs.
        self._read = [k for k, node in enumerate(graph.inputs) if node in reached] or [0]
        leaves = [(graph.inputs[k], graph.inputs[k].name) for k in self._read]
        axes = ((0, 1),) * len(computed)
        self._traced = Traced(name, extract_graph(computed, leaves), axes, ()) if computed else None
        self._loaded: dict[Hashable, tuple[Plan, Any]] = {}

    @property
    def plans(self) -> list[Plan]:
        return [plan for plan, _ in self._loaded.values()]

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        """Return the results, from an operand for each input; those that are not read may be None."""
        found = iter(self._run([operands[k] for k in self._read]) if self._traced is not None else ())
        return [operands[k] if k >= 0 else next(found) for k in self._given]

    def _run(self, operands: list[Any]) -> list[Any]:
        key = tuple((t.shape, t.stride()) for t in operands), operands[0].device
        loaded = self._loaded.get(key)
        if loaded is None:
            assert self._traced is not None
            plan = build(self._traced, dict(enumerate(map(layout_of, operands))), self._settings)
            if len(self._loaded) >= _MOST_LAYOUTS:
                self._loaded.clear()
            loaded = self._loaded[key] = plan, load(plan, operands)
        _, execute = loaded
        with torch.no_grad():
            results: list[Any] = execute(operands)
        return results
