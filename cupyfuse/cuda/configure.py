"""Which template runs a step, and with how many threads: chosen from the row length and the number of rows."""

from __future__ import annotations

from dataclasses import dataclass

from .. import dtypes
from ..plan.schedule import column_splits
from .program import COLUMN, FULL, Program

# Elements that a thread may hold of a row. More would not leave enough registers for enough threads to hide latency.
_MOST_HELD = 32
# The same where per-column inputs and the next row are held beside it.
_MOST_STAYING = 8


@dataclass(frozen=True)
class Config:
    """One way to launch a step.

    Attributes
    ----------
    template : name of the template in `kernels_cu/`
    threads : threads of a block
    items : packs of `vec` elements that a thread has in flight at once
    vec : elements that a thread moves as one access
    group : lanes that share a row (row_lanes), or columns of a strip (column_stats)
    shares : blocks that share the rows of a strip (column_stats)
    blocks : blocks that a multiprocessor has to hold at once, which limits the registers of a thread
    """

    template: str
    threads: int
    items: int
    vec: int
    group: int = 32
    shares: int = 1
    blocks: int = 1


def widest_vec(program: Program) -> int:
    """Elements in one 16-byte access of the widest array that the step reads or writes by elements."""
    sizes = [dtypes.ITEMSIZE[p.dtype] for p in program.parameters if p.place in (FULL, COLUMN) and not p.is_number]
    return min(8, 16 // max(sizes, default=4))


def fitting_vec(program: Program, aligned: int | None = None) -> int:
    """The widest vector that divides the row length (and `aligned`, what pointers and strides allow)."""
    vec = widest_vec(program)
    while vec > 1 and (program.domain[1] % vec or (aligned is not None and aligned % vec)):
        vec //= 2
    return vec


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def default_config(program: Program, vec: int) -> Config:
    """The configuration for a step whose pointers and strides allow vectors of `vec` elements."""
    rows, cols = program.domain
    if program.by_columns:
        strip = max(vec, min(32, _power_of_two(cols)))
        threads = 256 if rows <= 2048 else 512
        return Config("column_stats", threads, 4 if vec < 8 else 2, vec, strip, column_splits(program.domain))
    if not any(n.reduction for n in program.step.nodes):
        return Config("elementwise", 256, 1, vec)
    packs = max(1, -(-cols // vec))
    if cols <= 1024:
        lanes = min(32, _power_of_two(-(-packs // 2)))
        items = -(-packs // lanes)
        if items * vec <= _MOST_HELD:
            return Config("row_lanes", 128, items, vec, lanes, blocks=_blocks(128))
    if program.stages == 1 and not _keeps(program):
        # One pass over a row: more threads only where a row has more work, so that a row's result never depends on how
        # many rows there are.
        return Config("row_stream", min(1024, max(128, _power_of_two(cols) // 128)), max(1, 8 // vec), vec)
    if program.reads_columns in (1, 2) and packs * vec <= 1024 * _MOST_STAYING:
        threads = min(1024, max(128, _power_of_two(-(-packs * vec // _MOST_STAYING))))
        return Config("row_persistent", threads, -(-packs // threads), vec, blocks=_blocks(threads))
    for threads in (128, 256, 512, 1024):
        items = -(-packs // threads)
        if items * vec <= (_MOST_HELD if threads == 1024 or (program.light and vec >= 4) else 16):
            return Config("row_block", threads, items, vec, blocks=_blocks(threads))
    return Config("row_stream", 1024, max(1, 8 // vec), vec)


def _blocks(threads: int) -> int:
    """As many blocks on a multiprocessor as leave 64 registers to a thread: enough rows in flight to hide latency."""
    return max(1, 1024 // threads)


def _keeps(program: Program) -> bool:
    return any(program.place(n) == FULL for n in program.step.outputs)
