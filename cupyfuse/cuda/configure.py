"""Launch configurations: the template of a step and its parameters, chosen from the numbers of rows and columns."""

from __future__ import annotations

from dataclasses import dataclass

from .. import dtypes
from ..plan.schedule import column_splits, state_size
from .program import COLUMN, FULL, Program

# Elements of a row that a thread may hold: more leave registers for too few threads to hide latency.
_MAX_HELD = 32
# Likewise of row_persistent, where a thread holds per-column inputs and the next row as well.
_MAX_HELD_PERSISTENT = 8
_SHARED_BYTES = 48 << 10  # static shared memory of a block


@dataclass(frozen=True)
class Config:
    """The launch configuration of a step.

    Attributes
    ----------
    template : name of the template in `kernels_cu/`
    threads : threads per block
    items : packs of `vec` elements that a thread has in flight
    vec : elements per memory access
    group : lanes per row (row_lanes), or columns per strip (column_stats)
    shares : blocks that share the rows of a strip (column_stats)
    blocks : least blocks per multiprocessor, which limits the registers per thread
    """

    template: str
    threads: int
    items: int
    vec: int
    group: int = 32
    shares: int = 1
    blocks: int = 1

    def entry(self, merge: bool = False) -> tuple[str, str]:
        """Return the name of the kernel and the template instance that it calls; `merge` is for the merge of shares."""
        if self.template == "column_stats":
            if merge:
                return "column_merge_kernel", f"column_merge<Program, {self.threads}>"
            parameters = [self.threads, self.group, self.items, self.vec]
        elif self.template == "elementwise":
            parameters = [self.threads, self.vec]
        else:
            lanes = [self.group] if self.template == "row_lanes" else []
            parameters = [self.threads, *lanes, self.items, self.vec]
        return f"{self.template}_kernel", f"{self.template}<Program, {', '.join(map(str, parameters))}>"


def widest_vec(program: Program) -> int:
    """Return the elements per access at which no array that is accessed in vectors takes more than 16 bytes."""
    sizes = [dtypes.ITEMSIZE[p.dtype] for p in program.parameters if p.extent in (FULL, COLUMN) and not p.is_number]
    return min(8, 16 // max(sizes, default=4))


def fitting_vec(program: Program, row_stride_bits: int | None = None) -> int:
    """Return the widest vector that divides the row length and all row strides, whose bitwise or is given."""
    vec = widest_vec(program)
    while vec > 1 and (program.domain[1] % vec or (row_stride_bits is not None and row_stride_bits % vec)):
        vec //= 2
    return vec


def _power_of_two(n: int) -> int:
    """Round up to a power of two."""
    return 1 << max(0, n - 1).bit_length()


def default_config(program: Program, vec: int) -> Config:
    """Choose the configuration of a step whose pointers and strides allow vectors of `vec` elements."""
    rows, cols = program.domain
    if program.by_columns:
        strip = max(vec, min(32, _power_of_two(cols)))
        threads = 256 if rows <= 2048 else 512
        while threads > 32 and threads // 32 * strip * state_size(program.step) > _SHARED_BYTES:
            threads //= 2  # every warp has accumulators of its own in shared memory
        return Config("column_stats", threads, 4 if vec < 8 else 2, vec, strip, column_splits(program.domain))
    if not any(n.reduction for n in program.step.nodes):
        return Config("elementwise", 256, 1, vec)
    packs = max(1, -(-cols // vec))
    if cols <= 1024:
        lanes = min(32, _power_of_two(-(-packs // 2)))
        items = -(-packs // lanes)
        if items * vec <= _MAX_HELD:
            return Config("row_lanes", 128, items, vec, lanes, blocks=_blocks(128))
    if program.stages == 1 and not _writes_rows(program):
        # The threads of a row depend on its length alone, so that a row's bits do not depend on the number of rows.
        return Config("row_stream", min(1024, max(128, _power_of_two(cols) // 128)), max(1, 8 // vec), vec)
    if program.reads_columns in (1, 2) and packs * vec <= 1024 * _MAX_HELD_PERSISTENT:
        threads = min(1024, max(128, _power_of_two(-(-packs * vec // _MAX_HELD_PERSISTENT))))
        return Config("row_persistent", threads, -(-packs // threads), vec, blocks=_blocks(threads))
    for threads in (128, 256, 512, 1024):
        items = -(-packs // threads)
        if items * vec <= (_MAX_HELD if threads == 1024 or (program.light and vec >= 4) else 16):
            return Config("row_block", threads, items, vec, blocks=_blocks(threads))
    return Config("row_stream", 1024, max(1, 8 // vec), vec)


def _blocks(threads: int) -> int:
    """Return the blocks per multiprocessor that leave a thread 64 registers: enough rows in flight to hide latency."""
    return max(1, 1024 // threads)


def _writes_rows(program: Program) -> bool:
    """Whether a step has a full-size result."""
    return any(program.extent(n) == FULL for n in program.step.outputs)
