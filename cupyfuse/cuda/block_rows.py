"""Rows that the threads of a block hold in registers: how many threads, and what each holds of a row."""

from __future__ import annotations

from collections.abc import Iterator

from ..dtypes import ITEMSIZE
from .config import REGISTERS, Access, Config, power_of_two, resident_blocks, whole_warps, widest_vec
from .program import MOST_ARRAYS_AT_ONCE, Program

_MOST_PACKS, _MOST_THREADS = 8, 1024
# Bytes of rows as they were loaded that a lane holds, or a thread of few rows, and that all threads of a multiprocessor
# hold of many.
_BYTES_OF_THREAD, _BYTES_HELD = 128, 140_000
# Elements for which code that computes much again, more than so many FLOPs each, is repeated: instructions of more do
# not stay in their cache.
_MUCH_RECOMPUTED, _MOST_REPEATED = 12, 32
# The rate at which blocks compute rows, as a share of a copy's: these powers of the share of their packs that threads
# use, and of the threads for which a multiprocessor has registers; n / (n + _PACK_LOSS) for n packs of a thread, whose
# loads overlap; n / (n + _BLOCK_LOSS) for n blocks of a multiprocessor. Fitted to 1300 measurements of an H200
# (softmax, norms, affine maps, their backward passes; 1100 to 16384 columns), among which it chooses within 1 % of the
# best on average, within 15 % at worst. Threads with many packs gain most: the softmax of rows of 1501 bfloat16 takes
# 129 us by a warp for each, 175 by four.
# The loads of packs that are shifted take longer: _SHIFTED_PACK_LOSS.
_USED_POWER, _RESIDENT_POWER, _PACK_LOSS, _SHIFTED_PACK_LOSS, _BLOCK_LOSS = 0.4, 0.4, 0.5, 0.8, 0.1
# What is left of the rate of threads with so many packs where values of columns of one array are read, and of several,
# for which registers do not suffice: the softmax of an affine map of 4096 float32 has 0.85 of a copy's rate so, 0.95 to
# 0.99 with 4 to 7 packs. Exponentials of 16 bits are summed in fewer registers.
_MANY_PACKS, _LEFT_WITH_ONE_ARRAY, _LEFT_WITH_SEVERAL = 8, 0.92, 0.85
# So few threads on a multiprocessor have registers for `_MOST_PACKS_OF_FEW` packs, of which values of several arrays of
# columns make use: so layer norms of 16384 float32 run at 1.0 of a copy's rate, the softmax of an affine map at 0.96.
_FEW_THREADS, _MOST_PACKS_OF_FEW = 896, 10
# Of fewer rows than so many, each has more threads, and these hold less: 1024 rows of 1536 bfloat16 take 8.4 us by a
# warp for each, 6.7 by four. There are two choices and no more: a row's bits seldom depend on the number of rows.
MANY_ROWS = 1 << 12
# Packs that each of half as many threads may hold where a block has a multiprocessor to itself, more than `_MOST_PACKS`
# and `_BYTES_HELD`, of one matrix without values of columns: two blocks then overlap. On an H200 the softmax of 17408
# float32, or of 36864 bfloat16, columns is 1.2 times as fast so, of standardised rows 1.4 times; with 12 packs each it
# takes up to 1.5 times as long.
_MOST_PACKS_OF_TWO = 10
# Where values of so many arrays of columns are read, blocks leave each thread registers for what it loads of the row,
# for those values of a pack, of `MOST_ARRAYS_AT_ONCE`, and so many to compute with, `_MORE_TO_COMPUTE` where stages
# compute much again. With fewer some are spilled. On an H200 a softmax of 16384 x 8192 float32 behind BatchNorm takes
# 351 us in three blocks of 320 threads, 294 in two of 512, its backward pass 712 in two blocks of 512, 552 in two of
# 256. Behind a bias, too, it takes 359 us in two of 512, 388 in three of 256.
_MANY_ARRAYS, _TO_COMPUTE, _MORE_TO_COMPUTE = 3, 32, 40
# Packs that a thread holds of few rows where values of more arrays are read, if a block has threads enough: behind a
# bias and BatchNorm the softmax of 1024 x 8192 float32 takes 30.7 us in two blocks of 512 threads with 4 packs each,
# 34.3 in three of 256 with 8.
_FEW_PACKS = 4
# Packs of a thread up to which a block that has a multiprocessor to itself does not lose by values of one array of
# columns beside one matrix. The rate on an H200, as a share of a copy's, in registers and in shared memory: norms of
# 17408 float32 columns 0.92 to 0.96 and 0.92 to 0.93, of 20480 to 28672 columns 0.995 to 1.01 and 0.93 to 0.95, of
# 32768, with 8 packs, 0.90 and 0.94; where exponentials are summed, of 17408 to 24576, 0.81 to 0.98 and 0.89 to 0.93.
_MOST_PACKS_WITH_ONE_ARRAY = 7
# Threads that have a row in values, and how many elements each may hold, in order of preference.
_THREADS_WITH_VALUES = (128, 16), (256, 16), (512, 16), (_MOST_THREADS, 32)


def as_loaded(program: Program, packs: int, access: Access, clusters: bool) -> Config | None:
    """Choose the threads that hold a row as it was loaded; None if it is too long.

    Several blocks on a multiprocessor let one load while another computes. One that has it to itself waits for its
    loads, the longer where they are shifted or where columns have values, beside one narrow array or of few rows; not
    for those of one array beside few packs. Two may hold more together than `_BYTES_HELD` then. Where values of several
    arrays of columns are read, few threads, each with more registers, may hold more packs.
    """
    vec, many = access.vec, program.domain[0] >= MANY_ROWS
    narrow = program.input_bytes <= ITEMSIZE["float32"] or not many
    reads_much = program.reads_columns > 0 and narrow and not (many and _is_norm_of_few_packs(program, packs, vec))
    waits = clusters and (access.shifted or reads_much)
    most_threads = _MOST_THREADS // 2 if waits else _MOST_THREADS
    if not many:
        return _of_few_rows(program, packs, vec, most_threads)
    several = program.reads_columns > 1
    repeated = _MOST_REPEATED // vec if program.recomputed_flops > _MUCH_RECOMPUTED else _MOST_PACKS_OF_FEW
    best: tuple[float, Config] | None = None
    for threads in _numbers_of_threads(packs, min(repeated, _MOST_PACKS_OF_FEW if several else _MOST_PACKS)):
        items = -(-packs // threads)
        blocks = _blocks(program, threads, items, vec)
        roomy = several and threads * blocks <= _FEW_THREADS
        if (items > _MOST_PACKS and not roomy) or blocks == 0:
            continue
        rate = _rate(packs / (threads * items), items, threads, blocks, access.shifted)
        if items >= _MANY_PACKS and not roomy:
            rate *= _left_with_columns(program, vec)
        held = items * vec * program.input_bytes * threads * blocks
        if threads <= most_threads and held <= _BYTES_HELD and rate > (best[0] if best else 0.0):
            best = rate, Config("row_block", threads, items, vec, blocks=blocks, packed=True)
    if best is None:
        return None
    alone = best[1].blocks == 1 and len(program.full_inputs) == 1 and not (program.reads_columns or access.shifted)
    return (_two_blocks(packs, vec) if alone else None) or best[1]


def _is_norm_of_few_packs(program: Program, packs: int, vec: int) -> bool:
    """Whether a program of one matrix reads one array of columns, and sums no exponentials."""
    one_of_each = len(program.full_inputs) == program.reads_columns == 1 and not program.sums_exponentials
    return one_of_each and vec == widest_vec(program) and packs <= _MOST_PACKS_WITH_ONE_ARRAY * _MOST_THREADS


def _left_with_columns(program: Program, vec: int) -> float:
    """Return the share of their rate that threads keep whose registers do not suffice for values of columns."""
    if program.reads_columns == 0 or (vec == 8 and program.sums_exponentials):
        return 1.0
    # For those of many arrays `_blocks` leaves registers.
    several = 1 < program.reads_columns < _MANY_ARRAYS
    return _LEFT_WITH_SEVERAL if several else _LEFT_WITH_ONE_ARRAY


def _blocks(program: Program, threads: int, items: int, vec: int) -> int:
    """Return how many blocks of a multiprocessor have registers for `items` packs of a row a thread; 0 if none has."""
    blocks = resident_blocks(threads)
    if len(program.column_sizes) < _MANY_ARRAYS:
        return blocks
    of_columns = sum(sorted(program.column_sizes)[-MOST_ARRAYS_AT_ONCE:])
    loaded = vec * (items * program.input_bytes + of_columns) // ITEMSIZE["float32"]
    computing = _MORE_TO_COMPUTE if program.recomputed_flops > _MUCH_RECOMPUTED else _TO_COMPUTE
    return min(blocks, REGISTERS // (threads * (loaded + computing)))


def _two_blocks(packs: int, vec: int) -> Config | None:
    """Choose the threads of two blocks on a multiprocessor, each of a row; None if it is too long."""
    most_threads = _MOST_THREADS // 2
    items = -(-packs // most_threads)
    if items > _MOST_PACKS_OF_TWO:
        return None
    return Config(
        "row_block", whole_warps(packs / items), items, vec, blocks=resident_blocks(most_threads), packed=True
    )


def most_as_loaded(program: Program) -> int:
    """Return how many elements a lane may hold as they were loaded, or a thread of few rows, and compute with."""
    return min(_BYTES_OF_THREAD // program.input_bytes, 32 if program.reads_columns else 64)


def _of_few_rows(program: Program, packs: int, vec: int, most_threads: int) -> Config | None:
    """Choose the least number of threads that hold a row: fewer blocks of more would leave multiprocessors idle."""
    most = most_as_loaded(program)
    options = [(128, min(most, 32 if vec == 8 else 16)), (256, min(most, 32))]
    options += [(256, most)] * (packs * vec > 8192) + [(512, most), (1024, min(most, 32))]
    if not program.columns_known_ahead:
        options = [*((threads, min(elements, _FEW_PACKS * vec)) for threads, elements in options), *options]
    for threads, elements in options:
        items = -(-packs // threads)
        blocks = _blocks(program, threads, items, vec)
        if items * vec <= elements and threads <= most_threads and blocks > 0:
            return Config("row_block", threads, items, vec, blocks=blocks, packed=True)
    return None


def _numbers_of_threads(packs: int, most: int) -> Iterator[int]:
    """Yield numbers of threads that may have a row, each at most so many packs of it."""
    for items in range(1, most + 1):
        threads = whole_warps(packs / items)
        yield power_of_two(threads)  # which divides those of a multiprocessor
        yield threads


def _rate(used: float, items: int, threads: int, blocks: int, shifted: bool) -> float:
    """Estimate the rate of threads with so many packs each, of which they use a share, as a share of a copy's."""
    rate = used**_USED_POWER * (threads * blocks / _MOST_THREADS) ** _RESIDENT_POWER
    loss = _SHIFTED_PACK_LOSS if shifted else _PACK_LOSS
    return rate * items / (items + loss) * blocks / (blocks + _BLOCK_LOSS)


def as_values(program: Program, packs: int, vec: int, most: int) -> Config | None:
    """Choose the threads that hold values of a row, each at most so many elements; None if it is too long."""
    double = program.is_double
    for most_threads, elements in _THREADS_WITH_VALUES:
        threads = min(most_threads, _MOST_THREADS // 2) if double else most_threads
        items = -(-packs // threads)
        if items * vec <= min(elements, most):
            threads = whole_warps(packs / items)
            return Config("row_block", threads, items, vec, blocks=resident_blocks(threads, double))
    return None
