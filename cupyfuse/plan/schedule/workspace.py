"""Lifetimes of the values that steps write, their offsets in one workspace, and what they may overwrite."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Container, Iterable, Sequence

from ...ir.concats import column_bounds
from ...ir.graph import Node
from .memory import base_of
from .steps import Step, last_stage, stages_of


def pieces_of(steps: Iterable[Step]) -> dict[Node, tuple[Node, int]]:
    """Return, for each piece of matrices side by side, the whole that it is written in, and its first column there."""
    wholes = [node for step in steps for node in step.outputs if node.op == "concat"]
    return {
        piece: (whole, first)
        for whole in wholes
        for piece, first in zip(whole.inputs, column_bounds(whole), strict=False)
    }


def dead_after(steps: Sequence[Step], live_out: Iterable[Node]) -> list[list[Node]]:
    """List for each step the values, written by it or before, that no later step reads; `live_out` ones never die."""
    last: dict[Node, int] = {}
    for number, step in enumerate(steps):
        last.update(dict.fromkeys(step.outputs, number))
        for node in map(base_of, (*step.inputs, *step.repair_inputs)):
            if node in last:
                last[node] = number
    for node in live_out:
        last.pop(base_of(node), None)
    dead: list[list[Node]] = [[] for _ in steps]
    for node, number in last.items():
        dead[number].append(node)
    return dead


def assign_offsets(
    steps: Sequence[Step],
    size_of: Callable[[Node], int],
    live_out: Iterable[Node],
    elsewhere: Container[Node],
    alignment: int = 1,
) -> tuple[dict[Node, int], int]:
    """Place the values that steps write in one workspace; values with disjoint lifetimes may share memory.

    Pieces of matrices side by side have no place of their own: that of the whole is taken from its first piece on.

    Parameters
    ----------
    steps : sequence of Step
    size_of : callable
        Returns the bytes that a value takes.
    live_out : iterable of Node
        Values that are read after the last step.
    elsewhere : container of Node
        Values that have memory of their own, such as results.
    alignment : int
        Of the offsets, in bytes.

    Returns
    -------
    offsets : dict
        Of each value, in bytes.
    nbytes : int
        Of the workspace.
    """
    offsets: dict[Node, int] = {}
    taken: list[tuple[int, int, int]] = []  # live blocks as (start, end, number of the value), sorted
    blocks: dict[Node, tuple[int, int, int]] = {}
    total = 0
    pieces = pieces_of(steps)
    for step, dead in zip(steps, dead_after(steps, live_out), strict=True):
        wholes = dict.fromkeys(pieces[n][0] if n in pieces else n for n in step.outputs)
        for node in wholes:
            if node in elsewhere or node in blocks:
                continue
            nbytes = max(size_of(node), 1 if alignment > 1 else 0)
            nbytes = -(-nbytes // alignment) * alignment
            start = 0
            for first, end, _ in taken:
                if start + nbytes <= first:
                    break
                start = max(start, end)
            offsets[node] = start
            blocks[node] = (start, start + nbytes, len(blocks))
            insort(taken, blocks[node])
            total = max(total, start + nbytes)
        for node in dead:
            if node in blocks:
                taken.remove(blocks[node])
    return offsets, total


def may_overwrite(steps: Sequence[Step], node: Node, source: Node) -> bool:
    """Whether a step may write `node` over `source`: nothing else reads the old value of an element then."""
    if node.op == "concat":
        return False  # steps before its own write its pieces
    written = False
    for step in steps:
        reads = [n for n in (*step.inputs, *step.repair_inputs) if base_of(n) is source]
        if written and reads:
            return False
        if node in step.outputs:
            written = True
            if reads and node.op != "accumulate" and not _reads_where_it_writes(step, source):
                return False
            if any(n is not source or n in step.repair_inputs or n.shape != node.shape for n in reads):
                return False
            # Later stages of a row program may load the row again.
            if reads and step.kind == "RowProgram" and stages_of(step).get(node, 0) < last_stage(step):
                return False
    return written


def _reads_where_it_writes(step: Step, source: Node) -> bool:
    """Whether a step may write each element over that of `source` which it reads at the same place.

    The epilogue of our product may, unless `source` is an operand, which other tiles still read.
    """
    if step.kind == "Gemm":
        return step.by_tiles and source not in map(base_of, step.product.inputs)
    return step.kind not in ("Split", "Copy", "Library", "Scan")
