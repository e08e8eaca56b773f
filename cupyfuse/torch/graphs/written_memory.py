"""The memory that a captured graph writes to."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch.fx import Graph

from .captured import storage_of
from .importer import ImportedGraph
from .inplace import functionalised
from .nodes import results_of


class WrittenMemory:
    """The memory that a captured graph writes to."""

    def __init__(self, graph: Graph):
        self._graph = graph

    @cached_property
    def _written(self) -> set[int]:
        """The storages that anything writes to; those of all inputs if one of them is, as they may share memory."""
        captured = ImportedGraph(self._graph).captured
        written = {storage_of(captured.tensors[n]) for o in captured.operations for n in o.written}
        written.update(map(storage_of, functionalised(self._graph)))
        inputs = {storage_of(captured.tensors[n]) for n in captured.inputs}
        return written if written.isdisjoint(inputs) else written | inputs

    def is_written_to(self, node: Any) -> bool:
        """Whether the memory of a node's results is written to, before or after."""
        return any(storage_of(t) in self._written for t in results_of(node))
