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


def choose_blocks(planner: BlockPlanner, at_once: int) -> tuple[Blocks, Plan | None]:
    """Choose what to cut, and plan the blocks.

    Parameters
    ----------
    planner : BlockPlanner
    at_once : int
        Bytes of workspace that a plan without blocks takes.

    Returns
    -------
    blocks : Blocks
    prepare : Plan or None
        Prepacks values of the bound arguments.

    Raises
    ------
    NotRowwise
        No matrix can be taken in blocks, or none with less workspace; or all rows fit beside what blocks would share.
    """
    reasons: list[NotRowwise] = []
    found: list[tuple[Blocks, Plan | None]] = []  # the best way along each axis
    for axis in _AXES:
        planned: list[tuple[Blocks, Plan | None]] = []
        for blocks, prepare in _planned_cuts(planner, axis, at_once, reasons):
            if blocks is None:
                if axis == ROWS and not planned:
                    raise NotRowwise("blocks would share what takes most of it")
                continue  # a matrix that is small beside those that all of its blocks would share
            planned.append((blocks, prepare))
            if blocks.workspace <= 2 * blocks.plan.settings.max_workspace:
                break  # cuts of smaller matrices would make more blocks
        found += [min(planned, key=_cost)] if planned else []
        if found and _fits(found[0][0]) and not _sums_matrices(found[0][0]):
            return found[0]  # blocks of rows that add up nothing large, or the only way
    found.sort(key=_cost)
    if found and (_fits(found[0][0]) or found[0][0].workspace < at_once):
        best, prepare = found[0]
        return (replace(best, choice=_compared(best, found[1][0])) if len(found) > 1 else best), prepare
    raise reasons[0] if reasons else NotRowwise("blocks would take no less")


def _planned_cuts(
    planner: BlockPlanner, axis: Mode, at_once: int, reasons: list[NotRowwise]
) -> Iterator[tuple[Blocks | None, Plan | None]]:
    """Plan the cuts along an axis, those of the largest matrices first; add to `reasons` why others are impossible."""
    for anchors in _candidate_anchor_sets(planner, axis):
        try:
            yield planner.plan(cut(planner.graph, anchors, axis), at_once)
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


def _cost(planned: tuple[Blocks, Plan | None]) -> tuple[float, float]:
    """Order ways: by the time of those that fit the workspace, else by the workspace."""
    blocks, _ = planned
    return 0 if _fits(blocks) else blocks.workspace, blocks.estimated_time


def _compared(best: Blocks, other: Blocks) -> str:
    return f"estimated at {_describe(best)}, where blocks of {other.unit} would take {_describe(other)}"


def _describe(blocks: Blocks) -> str:
    return f"{duration(blocks.estimated_time)} and {quantity(blocks.workspace, 'B')}"
