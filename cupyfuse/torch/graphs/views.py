"""Rewrite a captured graph's views and indices of the results of products, so that chains can grow over them.

Kernels work on whole rows, from the start of a matrix. What reads a product's result through a slice of its rows, with
its columns in the second dimension, or by an index for each row would need all of it in memory.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Graph

from .channels_last import keep_channels_last
from .indices import index_rows, remove_broadcasts
from .losses_by_channel import reduce_last
from .nodes import example_of
from .pairs import join_pairs
from .permuted_rows import permute_rows
from .row_slices import slice_operands
from .written_memory import WrittenMemory


def rewrite_views(graph: Graph, kept: Collection[str] = ()) -> None:
    """Rewrite the views and indices of a captured graph, in place.

    The results of the nodes whose names are in `kept` are not reordered.
    """
    memory = WrittenMemory(graph)
    for rewrite in (remove_broadcasts, index_rows, slice_operands, reduce_last, keep_channels_last, join_pairs):
        for node in list(graph.nodes):
            if rewrite is keep_channels_last and node.name in kept:
                continue
            if node.op in ("call_function", "call_method") and example_of(node) is not None:
                rewrite(node, memory)
    permute_rows(graph, memory, kept)
