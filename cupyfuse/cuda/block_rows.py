"""Rows that the threads of a block hold in registers: how many threads, and what each holds of a row."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ..dtypes import ITEMSIZE
from .config import Access, Config, power_of_two, resident_blocks, whole_warps
from .program import Program

_MOST_PACKS, _MOST_THREADS = 8, 1024
_BYTES_HELD = 140_000  # of rows as they were loaded, by the threads of a multiprocessor
# Elements for which code that computes much again, more than so many FLOPs each, is repeated: instructions of more do
# not stay in their cache.
_MUCH_RECOMPUTED, _MOST_REPEATED = 12, 32
# The rate at which blocks compute rows, as a share of a copy's: these powers of the share of packs that threads have,
# and of the threads for which a multiprocessor has registers; n / (n + the third) for n packs of a thread, whose loads
# overlap; n / (n + the fourth) for n blocks of a multiprocessor. Fitted to 1300 measurements of an H200 (softmax,
# norms, affine maps, their backward passes; 1100 to 16384 columns), among which it chooses within 1 % of the best on
# average, within 15 % at worst. Threads with many packs gain most: the softmax of rows of 1501 bfloat16 takes 129 us by
# a warp for each, 175 by four.
_USED_POWER, _RESIDENT_POWER, _PACK_LOSS, _BLOCK_LOSS = 0.4, 0.4, 0.5, 0.1
# The same of threads with so many packs where values of columns are read and no exponentials are summed. Those of 16
# bits are widened, for which there are no registers left: a layer norm of 2048 bfloat16 takes 161 us so, 130 else.
_MANY_PACKS, _FEW_REGISTERS = 8, 0.85
# And this power of the share of places that rows have in the waves of blocks of so many multiprocessors: 1024 rows of
# 1536 bfloat16 take 8.4 us by a warp for each, 6.7 by four.
_WAVE_POWER, _PROCESSORS = 0.5, 132
# Threads that have a row in values, and how many elements each may hold, in order of preference.
_THREADS_WITH_VALUES = (128, 16), (256, 16), (512, 16), (_MOST_THREADS, 32)


def as_loaded(program: Program, packs: int, access: Access, clusters: bool) -> Config | None:
    """Choose the threads that hold a row as it was loaded; None if it is too long.

    Several blocks on a multiprocessor let one load while another computes. One that has it to itself waits for its
    loads, the longer where they are shifted or where columns have values beside one narrow array.
    """
    vec, shifted, _ = access
    waits = clusters and (shifted or (program.reads_columns > 0 and program.input_bytes <= ITEMSIZE["float32"]))
    sums_exponentials = any(a.kind.startswith("ExpSum") for s in range(program.stages) for a in program.accumulators(s))
    repeated = _MOST_REPEATED if program.recomputed_flops > _MUCH_RECOMPUTED else _MOST_PACKS * vec
    best: tuple[float, Config] | None = None
    for threads in _numbers_of_threads(packs, repeated // vec):
        items, blocks = -(-packs // threads), resident_blocks(threads)
        held = items * vec * program.input_bytes * threads * blocks
        if threads > (_MOST_THREADS // 2 if waits else _MOST_THREADS) or held > _BYTES_HELD:
            continue
        rate = _rate(packs / (threads * items), items, threads, blocks, program.domain[0])
        if program.reads_columns and items >= _MANY_PACKS and not sums_exponentials:
            rate *= _FEW_REGISTERS if vec < 8 else 0.0
        if rate > (best[0] if best else 0.0):
            best = rate, Config("row_block", threads, items, vec, blocks=blocks, packed=True)
    return None if best is None else best[1]


def _numbers_of_threads(packs: int, most: int) -> Iterator[int]:
    """Yield numbers of threads that may have a row, each at most so many packs of it."""
    for items in range(1, most + 1):
        threads = whole_warps(packs / items)
        yield power_of_two(threads)  # of which blocks have all registers of a multiprocessor
        yield threads


def _rate(used: float, items: int, threads: int, blocks: int, rows: int) -> float:
    """Estimate the rate of threads with so many packs each, of which they use a share, as a share of a copy's."""
    waves = rows / (_PROCESSORS * blocks)
    rate = used**_USED_POWER * (threads * blocks / _MOST_THREADS) ** _RESIDENT_POWER
    rate *= items / (items + _PACK_LOSS) * blocks / (blocks + _BLOCK_LOSS)
    return rate * (waves / math.ceil(waves)) ** _WAVE_POWER if rows else rate


def as_values(program: Program, packs: int, vec: int, most: int) -> Config | None:
    """Choose the threads that hold values of a row, each at most so many elements; None if it is too long."""
    double = program.is_double
    for most_threads, few in _THREADS_WITH_VALUES:
        threads = min(most_threads, _MOST_THREADS // 2) if double else most_threads
        items = -(-packs // threads)
        if items * vec <= min(few, most):
            threads = whole_warps(packs / items)
            return Config("row_block", threads, items, vec, blocks=resident_blocks(threads, double))
    return None
