"""Launch configurations: the template of a step, its parameters, and how it accesses rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .. import dtypes
from .parameters import FULL
from .program import Program

# A row has to be so many vectors long to be accessed in shifted ones: its single elements are fewer than its threads.
_SHORTEST_SHIFTED = 32
# Vectors that lie in two pay from so many elements on, or where rows are not reduced. On an H200, with them and by
# elements, 32768 x 4096 in bfloat16: softmax 169 and 236 us, GELU 187 and 384; 16384 x 4096 in float32: 170 and 151,
# 155 and 225.
_APART = 8
MULTIPROCESSORS, REGISTERS = 132, 65536  # of an H200, and of each multiprocessor; taken for those of all GPUs
# Threads on a multiprocessor that leave each 64 registers, or 128 for float64.
_THREADS, _DOUBLE_THREADS = 1024, 512
_MERGED_BESIDE_ROWS = 8  # columns of which a block merges the states that many blocks left, a group of threads each


@dataclass(frozen=True)
class Config:
    """The launch configuration of a step.

    Attributes
    ----------
    template : name of the template in `kernels_cu/`
    threads : threads per block
    items : packs of `vec` elements that a thread holds, or has in flight where rows are streamed
    vec : elements per memory access
    group : lanes per row (row_lanes), threads per row (row_columns), or columns per strip (column_stats)
    rows : rows that the lanes of a row load before they compute the first (row_lanes); rows that a block reads at a
        time, one with all its threads or several with a warp each (row_stream); rows that a block computes at a time,
        with as many threads each (row_shared)
    shares : blocks that share the rows of a strip (column_stats), a row (row_shares), or all rows (row_columns)
    blocks : least blocks per multiprocessor, which limits the registers per thread
    cluster : blocks that share a row (row_shared)
    packs : packs that a thread holds in shared memory (row_shared)
    columns : whether values of columns stay in shared memory from row to row (row_shared)
    packed : whether rows stay in registers as they were loaded, and each stage computes what it needs from there
    shifted : whether rows may begin between two packs, at the same place in all arrays
    evict_last : whether the L2 cache evicts rows that are read after those that are written
    apart : whether rows that are read may begin elsewhere in a pack than those that are written
    """

    template: str
    threads: int
    items: int
    vec: int
    group: int = 32
    shares: int = 1
    blocks: int = 1
    cluster: int = 1
    packs: int = 0
    packed: bool = False
    shifted: bool = False
    apart: bool = False
    rows: int = 1
    columns: bool = False
    evict_last: bool = False

    @property
    def merges(self) -> bool:
        """Whether the kernel may leave totals that a second one merges."""
        return self.template in ("column_stats", "row_shares", "row_columns")

    @property
    def merge_threads(self) -> int:
        """Threads per block of the kernel that merges."""
        return {"row_shares": 32, "row_columns": 256}.get(self.template, self.threads)

    @property
    def merged_columns(self) -> int:
        """Columns per block of the kernel that merges those of column_stats or row_columns."""
        return _MERGED_BESIDE_ROWS if self.template == "row_columns" else min(32, self.group)

    def entry(self, merge: bool = False) -> tuple[str, str]:
        """Return the name of the kernel and the template instance that it calls; `merge` is for the merge of shares."""
        if merge and self.template == "row_shares":
            return "row_merge_kernel", f"merge_shares<Program, {self.merge_threads}>"
        if merge:
            return "column_merge_kernel", f"column_merge<Program, {self.merge_threads}, {self.merged_columns}>"
        if self.template == "column_stats":
            parameters = [self.threads, self.group, self.items, self.vec]
        elif self.template == "elementwise":
            parameters = [self.threads, self.vec]
        else:
            lanes = [self.group] if self.template in ("row_lanes", "row_columns") else []
            rows = [self.rows] if self.template in ("row_lanes", "row_stream") else []
            held, last = ([self.packs], [self.cluster, self.rows]) if self.packs else ([], rows)
            threads = self.threads // self.rows if self.packs else self.threads
            parameters = [threads, *lanes, *held, self.items, self.vec, *last]
        return f"{self.template}_kernel", f"{self.template}<Program, {', '.join(map(str, parameters))}>"


class Access(NamedTuple):
    """How a row program reads and writes rows: in vectors of `vec`; rows that are `shifted` begin between two.

    Then those that are read may begin `apart` from those that are written: each vector of them lies in two.
    """

    vec: int
    shifted: bool = False
    apart: bool = False


def widest_vec(program: Program) -> int:
    """Return the elements per access at which no array that is accessed in vectors takes more than 16 bytes."""
    sizes = [dtypes.ITEMSIZE[p.dtype] for p in program.parameters if program.in_vectors(p)]
    return min(8, 16 // max(sizes, default=4))


def fitting_vec(program: Program, row_stride_bits: int | None = None) -> int:
    """Return the widest vector that divides the row length and all row strides, whose bitwise or is given."""
    vec = widest_vec(program)
    while vec > 1 and (program.domain[1] % vec or (row_stride_bits is not None and row_stride_bits % vec)):
        vec //= 2
    return vec


def accesses(
    program: Program, read: Sequence[int] | None = None, written: Sequence[int] | None = None, cols: int | None = None
) -> Iterator[Access]:
    """Yield the ways to access the rows of a program's arrays, widest first.

    Shifted vectors have to begin at the same column in all arrays, or in all that are written. Rows that are read in
    another order do so only if all begin alike. Where pairs of columns change places there are none: a pair would be in
    two.

    Parameters
    ----------
    program : Program
    read, written : sequence of int, optional
        Row strides of the arrays that are read, and of those that are written; contiguous ones by default.
    cols : int, optional
        Columns of a row, if not the program's.
    """
    cols = program.domain[1] if cols is None else cols
    read, written = ([cols] if strides is None else strides for strides in (read, written))
    shifts = not (program.by_columns or program.columns or any(p.swapped for p in program.parameters))
    has_rows = shifts and any(p.extent == FULL for p in program.parameters)
    in_order = not any(p.repeats for p in program.full_inputs)
    vec = widest = widest_vec(program)

    def shiftable(vec: int, strides: Sequence[int]) -> bool:
        return has_rows and cols >= _SHORTEST_SHIFTED * vec and len({n % vec for n in strides}) <= 1

    pays = widest >= _APART or not any(n.reduction for n in program.step.nodes)
    apart = bool(program.full_inputs) and pays and shiftable(widest, written)
    while vec > 1:
        if all(n % vec == 0 for n in (cols, *read, *written)):
            yield Access(vec)
        if shiftable(vec, (*read, *written)) and (in_order or all(n % vec == 0 for n in read)):
            yield Access(vec, True)
        if apart and vec == max(2, widest // 2):  # behind vectors of half as many elements, which are as fast
            yield Access(widest, True, True)
        vec //= 2
    yield Access(1)


def power_of_two(n: int) -> int:
    """Round up to a power of two."""
    return 1 << max(0, n - 1).bit_length()


def whole_warps(threads: float) -> int:
    """Round a number of threads up to whole warps."""
    return 32 * math.ceil(threads / 32)


def resident_blocks(threads: int, double: bool = False) -> int:
    """Return the blocks per multiprocessor that leave a thread registers for a row in them: enough rows in flight."""
    return max(1, (_DOUBLE_THREADS if double else _THREADS) // threads)
