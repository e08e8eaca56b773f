"""Scheduling: partition a graph into steps.

Arguments, results, matrix products, column reductions and views of computed values are in memory. Everything between
them is computed inside a step: a `RowProgram` (pointwise work and reductions along rows; `MatVec` if it is one
matrix-vector product), `ColumnStats` (reductions down the columns, with the pointwise work before and after them), a
`Gemm`, a `Split`, or a `Copy` of an argument whose layout a kernel cannot read.

The layer of a value is one more than the layers of the values in memory that it reads; values of one layer and one
domain make one step. Cheap pointwise work is recomputed rather than stored. A 16-bit value that is stored, and so
rounded, for some readers and recomputed for others is rounded for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.graph import Graph, Node
from .blocks import NotRowwise, rowwise_values, with_rows
from .memory import (
    Layout,
    contiguous_strides,
    insert_copies,
    resolve,
    results_in_memory,
    rounded,
    row_stride,
)
from .partition import Scheduler
from .products import choose_products
from .steps import Step, column_launches, column_splits, with_bytes

__all__ = [
    "Layout",
    "NotRowwise",
    "Schedule",
    "Step",
    "choose_products",
    "column_launches",
    "column_splits",
    "contiguous_strides",
    "resolve",
    "row_stride",
    "rounded",
    "rowwise_values",
    "schedule",
    "with_rows",
]


@dataclass
class Schedule:
    """Steps in launch order, and the dtype in which each value in memory is stored."""

    graph: Graph
    steps: list[Step]
    storage: dict[Node, str]


def schedule(graph: Graph, layouts: dict[int, Layout] | None = None) -> Schedule:
    """Partition a simplified graph into steps."""
    graph = insert_copies(results_in_memory(graph), layouts or {})
    scheduler = Scheduler(graph)
    raw = scheduler.run()
    while mixed := scheduler.rounded_in_part(raw):
        scheduler = Scheduler(rounded(scheduler.graph, mixed))
        raw = scheduler.run()
    storage = scheduler.storage(raw)
    steps = [with_bytes(step, storage) for step in raw]
    return Schedule(scheduler.graph, steps, storage)
