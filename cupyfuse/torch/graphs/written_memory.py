"""The memory that a captured graph writes to."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch.fx import Graph

from .captured import CapturedGraph, storage_of
from .importer import ImportedGraph, keeps_statistics
from .inplace import functionalised
from .nodes import results_of


def merged_inputs(captured: CapturedGraph) -> dict[int, int]:
    """Map storages of inputs that may be one memory to one of them.

    The graph is captured with inputs of separate memory, and may be called with inputs that share theirs. As soon as
    one of them is changed in place, all inputs of its dtype count as one memory.
    """
    tensors, inputs = captured.tensors, captured.inputs
    own = {storage_of(tensors[n]) for n in inputs}
    written = {n for o in captured.operations if not keeps_statistics(o) for n in o.written}
    merged: dict[int, int] = {}
    for dtype in {tensors[n].dtype for n in written if storage_of(tensors[n]) in own}:
        alike = [storage_of(tensors[n]) for n in inputs if tensors[n].dtype is dtype]
        merged.update(dict.fromkeys(alike, alike[0]))
    return merged


def written_storages(captured: CapturedGraph) -> set[int]:
    """Return the storages that operations write to, with those of inputs that may share their memory."""
    written = {storage_of(captured.tensors[n]) for o in captured.operations for n in o.written}
    return written.union(merged_inputs(captured))


class WrittenMemory:
    """The memory that a captured graph writes to, as it is when first asked for.

    Rewrites may replace nodes meanwhile: storages are told by address, and those found are held.
    """

    def __init__(self, graph: Graph):
        self._graph = graph

    @cached_property
    def _captured(self) -> CapturedGraph:
        return ImportedGraph(self._graph).captured

    @cached_property
    def _changed(self) -> set[int]:
        return self._with_inputs(written_storages(self._captured))

    @cached_property
    def _written(self) -> set[int]:
        written = written_storages(self._captured)
        return self._with_inputs(written.union(map(storage_of, functionalised(self._graph))))

    def _with_inputs(self, written: set[int]) -> set[int]:
        """Add the storages of all inputs to those written to if one is among them, as inputs may share memory."""
        inputs = {storage_of(self._captured.tensors[n]) for n in self._captured.inputs}
        return written if written.isdisjoint(inputs) else written | inputs

    def is_written_to(self, node: Any) -> bool:
        """Whether the memory of a node's results is written to, before or after."""
        return any(storage_of(t) in self._written for t in results_of(node))

    def is_changed(self, node: Any) -> bool:
        """As `is_written_to`, but for operations that were functionalised: in the graph these return new values."""
        return any(storage_of(t) in self._changed for t in results_of(node))
