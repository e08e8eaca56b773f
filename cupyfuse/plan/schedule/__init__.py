"""Scheduling: partition a graph into the few steps that will run.

Some values have to exist in memory: arguments, results, matrix products, column reductions, other views of computed
values. Everything between them is computed in passing, inside a step: a `RowProgram` (pointwise work and reductions
along rows; called `MatVec` where it is a matrix-vector product), `ColumnStats` (reductions down the columns, with the
pointwise work before and after them), a `Gemm`, or a `Copy` of an argument whose layout a kernel cannot read.

Every value gets a layer, one more than the values in memory that it needs; steps of one layer and one domain are one
step. Cheap pointwise work is computed again where it is needed rather than stored. Where a value of 16 bits is stored,
and so rounded, for some of its readers, and computed again for others, it is rounded for these too.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...ir.graph import Graph, Node
from .blocks import NotByRows, rows_apart, with_rows
from .memory import Layout, insert_copies, resolve, results_in_memory, rounded
from .partition import Scheduler
from .products import choose_products
from .steps import Step, column_launches, column_splits, measured

__all__ = [
    "Layout",
    "NotByRows",
    "Schedule",
    "Step",
    "choose_products",
    "column_launches",
    "column_splits",
    "resolve",
    "rounded",
    "rows_apart",
    "schedule",
    "with_rows",
]


@dataclass
class Schedule:
    """Steps in the order in which they run, and the dtype in which each value in memory is stored."""

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
    steps = [measured(step, storage) for step in raw]
    return Schedule(scheduler.graph, steps, storage)
