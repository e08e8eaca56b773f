"""Choose the blocks in which a plan runs: the matrices that are cut, by rows or by columns.

Blocks of rows add up what contracts the rows, such as the gradient of a weight: each block reads and writes the whole
sum. Blocks of columns add up what contracts the columns, such as the gradient of the features, and each writes its part
of the former. Where blocks of rows would add up matrices, or do not fit the workspace, both ways are planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ..ir import graph as g
from ..ir.graph import Node
from .block_planner import BlockPlanner
from .plan import Blocks, Plan
from .report import duration, quantity
from .schedule import NotRowwise, base_of
from .schedule.cut import COLUMNS, ROWS, Mode, cut

_AXES = (ROWS, COLUMNS)  # in the order in which they are tried
# How many numbers of rows, and of columns, are tried: those of the largest matrices first.
_CANDIDATES = 3
# Matrices smaller by this factor than the largest one with as many rows may be read as a whole.
_SMALLER = 8


def choose_blocks(planner: BlockPlanner, whole: int) -> tuple[Blocks | None, Plan | None]:
    """Choose what to cut, and plan the blocks.

    Parameters
    ----------
    planner : BlockPlanner
    whole : int
        Bytes of workspace that all rows take at once.

    Returns
    -------
    blocks : Blocks or None
        None if all rows fit once the values that blocks would share are split off.
    prepare : Plan or None
        Prepacks values of the bound arguments.

    Raises
    ------
    NotRowwise
        No matrix can be taken in blocks, or none with less workspace.
    """
    reasons: list[NotRowwise] = []
    best: tuple[Blocks, Plan | None] | None = None
    for axis in _AXES:
        for blocks, prepare in _planned_cuts(planner, axis, whole, reasons):
            if blocks is None:
                if axis == ROWS and best is None:
                    return None, prepare
                continue  # a matrix that is small beside those that all of its blocks would share
            best = (blocks, prepare) if best is None else _better(best, (blocks, prepare))
            if blocks.workspace <= 2 * blocks.plan.settings.max_workspace:
                break  # cuts of smaller matrices would make more blocks
        if best is not None and _fits(best[0]) and not _sums_matrices(best[0]):
            return best
    if best is not None and (_fits(best[0]) or best[0].workspace < whole):
        return best
    raise reasons[0] if reasons else NotRowwise("blocks of rows would take no less")


def _planned_cuts(
    planner: BlockPlanner, axis: Mode, whole: int, reasons: list[NotRowwise]
) -> Iterator[tuple[Blocks | None, Plan | None]]:
    """Plan the cuts along an axis, those of the largest matrices first; add to `reasons` why others are impossible."""
    for anchors in _candidate_anchor_sets(planner, axis):
        try:
            yield planner.plan(cut(planner.graph, anchors, axis), whole)
        except NotRowwise as reason:
            reasons.append(reason)


def _candidate_anchor_sets(planner: BlockPlanner, axis: Mode) -> list[set[Node]]:
    """For each row count, the large matrices with that many rows: products and computed operands of products.

    Along the axis COLUMNS they are matrices with as many columns. The counts of the largest matrices come first.
    Without such a matrix the only candidate by rows is the empty set, for which `cut` takes the rows of the results.
    """
    roots = planner.graph.roots
    products = [n for n in g.topological(roots, g.eager_inputs) if n.op == "matmul"]
    matrices = dict.fromkeys([*products, *(base_of(i) for n in products for i in n.inputs)])
    by_length: dict[int, list[Node]] = {}
    for node in sorted(matrices, key=lambda n: -n.nbytes):
        if node.inputs and 1 not in node.shape and node not in roots:
            by_length.setdefault(node.shape[axis], []).append(node)
    found = []
    for largest, *others in list(by_length.values())[:_CANDIDATES]:
        found.append({largest, *(n for n in others if _SMALLER * n.nbytes >= largest.nbytes)})
    return found or [set()] * (axis == ROWS)


def _fits(blocks: Blocks) -> bool:
    return blocks.workspace <= blocks.plan.settings.max_workspace


def _sums_matrices(blocks: Blocks) -> bool:
    return blocks.zeros is not None and any(1 not in o.node.shape for o in blocks.zeros.outputs)


def _better(first: tuple[Blocks, Plan | None], second: tuple[Blocks, Plan | None]) -> tuple[Blocks, Plan | None]:
    """Return the faster one of two ways that fit the workspace; else the one with less workspace."""

    def cost(blocks: Blocks) -> tuple[float, float]:
        return 0 if _fits(blocks) else blocks.workspace, blocks.estimated_time

    (best, prepare), (other, _) = sorted((first, second), key=lambda planned: cost(planned[0]))
    if best.transposed == other.transposed:
        return best, prepare
    choice = f"estimated at {_described(best)}, where blocks of {other.unit} would take {_described(other)}"
    return replace(best, choice=choice), prepare


def _described(blocks: Blocks) -> str:
    return f"{duration(blocks.estimated_time)} and {quantity(blocks.workspace, 'B')}"
