"""Scheduling: partition a graph into steps.

Arguments, results, matrix products, column reductions and views of computed values are in memory. Everything between
them is computed inside a step: a `RowProgram` (pointwise work and reductions along rows; `MatVec` if it is one
matrix-vector product), `ColumnStats` (reductions down the columns, with the pointwise work before and after them), a
`Gemm`, a `Split`, a `Scan` (running totals along rows), a `Copy` of an argument whose layout a kernel cannot read, or a
`Library` call.

The layer of a value is one more than the layers of the values in memory that it reads; values of one layer and one
domain make one step. Cheap work is recomputed rather than stored: `recompute` says how much, `cost` how it is counted.
A 16-bit value that is stored, and so rounded, for some readers and recomputed for others is rounded for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ... import dtypes
from ...ir.graph import Graph, Node
from .column_sums import columns_of_thread, guards_keep_apart, share_launches
from .columns import separate_columns
from .cost import MOST_FLOPS, Cost, cost_of, unfused_cost
from .cut import NotRowwise
from .epilogues import fuse_epilogues, store_step
from .memory import (
    Layout,
    RowPlaces,
    base_of,
    contiguous_strides,
    copy_opaque_broadcasts,
    in_order_of_base,
    insert_copies,
    pieces_in_memory,
    results_in_memory,
    round_values,
    row_places,
    row_stride,
    view_chain,
)
from .moments import one_pass_product_variances
from .padding import may_be_padded, padded_length, unaligned_operands
from .products import choose_products
from .recompute import best_partition
from .repeats import can_read_repeats, reads_repeats, repeat_in_place
from .steps import COLUMN_STRIP, Step, column_launches, column_splits, row_shares, stages_of
from .tiles import (
    Tiles,
    depth_of,
    state_bytes,
    state_size,
    takes_epilogues,
    tiles_for,
    tiles_of,
)
from .times import step_time
from .workspace import assign_offsets, dead_after, may_overwrite, pieces_of

__all__ = [
    "MOST_FLOPS",
    "Cost",
    "Layout",
    "RowPlaces",
    "NotRowwise",
    "Schedule",
    "Step",
    "Tiles",
    "assign_offsets",
    "choose_products",
    "depth_of",
    "COLUMN_STRIP",
    "columns_of_thread",
    "column_launches",
    "column_splits",
    "contiguous_strides",
    "cost_of",
    "dead_after",
    "fuse_epilogues",
    "guards_keep_apart",
    "in_order_of_base",
    "may_be_padded",
    "may_overwrite",
    "one_pass_product_variances",
    "base_of",
    "pieces_of",
    "row_shares",
    "row_places",
    "row_stride",
    "round_values",
    "schedule",
    "separate_columns",
    "share_launches",
    "stages_of",
    "state_bytes",
    "state_size",
    "step_time",
    "store_step",
    "takes_epilogues",
    "tiles_for",
    "tiles_of",
    "unaligned_operands",
    "unfused_cost",
    "view_chain",
]


@dataclass
class Schedule:
    """Steps in launch order, and how each value in memory is stored: its dtype, and whether its rows are padded."""

    graph: Graph
    steps: list[Step]
    storage: dict[Node, str]
    padded: set[Node] = field(default_factory=set)

    def row_stride(self, value: Node) -> int:
        """Return the elements from row to row of a value that a step writes."""
        return padded_length(value.shape[1]) if value in self.padded else value.shape[1]

    def nbytes(self, value: Node) -> int:
        """Return the bytes of memory that a value takes, the padding of its rows among them."""
        return value.shape[0] * self.row_stride(value) * dtypes.ITEMSIZE[self.storage[value]]


def schedule(
    graph: Graph,
    layouts: dict[int, Layout] | None = None,
    cost_as_written: Cost | None = None,
    most_flops: float = MOST_FLOPS,
) -> Schedule:
    """Partition a simplified graph into steps with at most `most_flops` times its FLOPs.

    `cost_as_written` is that of the function it was simplified from.
    """
    graph = results_in_memory(pieces_in_memory(copy_opaque_broadcasts(graph)), layouts or {})
    graph = insert_copies(graph, layouts or {})
    with_copies, graph = graph, repeat_in_place(graph, layouts or {})
    while True:
        scheduler, steps = best_partition(graph, cost_as_written, most_flops)
        if any(reads_repeats(step) and not can_read_repeats(step) for step in steps):
            graph = with_copies
            continue
        mixed = scheduler.values_rounded_for_some(steps)
        if not mixed:
            return Schedule(graph, steps, scheduler.storage(steps))
        graph = round_values(graph, mixed)
