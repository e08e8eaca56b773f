"""Rows that blocks hold in shared memory: the blocks and threads of a row, and what stays there from row to row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from .block_rows import MANY_ROWS
from .config import MULTIPROCESSORS, Access, Config
from .program import Program

# Of a multiprocessor with clusters: shared memory, of which the system takes some for each block; of a block.
_MULTIPROCESSOR_BYTES, _BLOCK_BYTES, _MOST_BYTES = 228 << 10, 1 << 10, 227 << 10
_LINE = 128  # bytes of a line of a cache
_MOST_CLUSTER = 16  # blocks of a cluster on Hopper; more than 8 have to be allowed (compile.py)
# Packs that a thread holds in shared memory, of float64 the second: with more, a block has too few threads.
_MOST_PACKS, _MOST_DOUBLE_PACKS = 14, 16
# Threads on a multiprocessor that each have registers, 40 to 128: for a program that computes little, for one that also
# widens 16-bit values of columns, for any other, for float64.
_LIGHT_THREADS, _WIDENING_THREADS, _THREADS, _DOUBLE_THREADS = 1536, 1280, 1024, 512
# FLOPs for each element that stages compute again, and bytes of its inputs, of a program that computes little.
_LITTLE_RECOMPUTED, _LITTLE_INPUT_BYTES = 8, 8
# FLOPs for each element that stages may compute again where values of columns are held: layer norms of SiLU (30) take
# 1.1 to 1.3 times as long so on an H200, backward passes of layer norms (9) 0.6 to 1.0.
_MOST_RECOMPUTED = 16
# Rows, or elements, from which on values of columns are held: of fewer rows, which do not share blocks, it takes up
# to 1.3 times as long on an H200.
_MANY_ROWS, _MANY_ELEMENTS = 1 << 10, 1 << 24
# The rate at which blocks hold rows in shared memory, as a share of a copy's, of n on a multiprocessor: n / (n + the
# first number) for single blocks, n / (n + the second) for those of clusters, which wait for each other. For them it
# grows with this power of the bytes that a multiprocessor holds, up to so many, and is this share where rows begin
# between two packs. Fitted to 534 measurements of an H200 from 16384 to 1048576 columns, among which it chooses within
# 1.3 % of the best on average, within 6 % at worst. Clusters that compute more than little lose more (the third), and
# those that wait in many stages: by 13 backward passes of norms and softmax from 8192 to 65536 columns, among which it
# chooses within 7 % of the best on average.
_BLOCK_LOSS, _CLUSTER_LOSS, _HEAVY_CLUSTER_LOSS = 0.08, 0.15, 0.3
_HELD_POWER, _ENOUGH_HELD, _SHIFTED_SHARE = 0.2, 192 << 10, 0.9
# Multiprocessors of the groups in which an H200 has room for clusters, as its driver tells: all blocks of a cluster are
# in one group. The other 8 multiprocessors take clusters of two blocks alone.
_GROUPS = (18, 18, 16, 16, 16, 16, 16, 8)
# The bytes of rows that are read again for each stage, over those of rows that are read once, from which on blocks of a
# cluster have their multiprocessors to themselves where two do not fit: of rows without values of columns and float64,
# and of others. On an H200 a cluster alone has 0.75 of a copy's rate, with values of columns 0.46 to 0.64; of rows that
# are read again the softmax of one matrix has 0.64, a layer norm 0.36 (524288 columns of float32).
_READ_AGAIN, _SLOW_READ_AGAIN = 1.5, 1.6
# The share of the rate that is left where stages read values of columns from the L2 cache: the bytes of rows over those
# of rows and columns, times the second number, at most the first. On an H200 clusters keep 0.85 to 0.9 for norms of
# float32, 0.72 for the softmax of an affine map, which reads both arrays twice. In shifted rows values of columns are
# read one by one, each of which takes as long as so many bytes of rows. Where each of two blocks or more has a whole
# row that is not shifted, the square root of the share is left.
_MOST_FROM_CACHE, _FROM_CACHE, _SHIFTED_BYTES = 0.86, 2.2, 1.2
# The rate where they are held: of n rows at a time on a multiprocessor n / (n + the first number), of n blocks of
# clusters n / (n + the second), less the third for each of their blocks; times these powers of the share of packs that
# threads have, of 1024 threads, and of these bytes of rows; in shifted rows this share. Fitted to 870
# measurements of an H200 from 8191 to 262144 columns (affine maps, norms), with as many clusters as have room at once,
# among which it chooses within 1 % of the best on average, within 6 % at worst.
_ROW_LOSS, _OWN_LOSS, _LOSS_OF_BLOCK = 0.045, 0.04, 0.003
_PACKS_POWER, _THREADS_POWER, _ROWS_POWER, _ENOUGH_ROWS = 0.13, 0.11, 0.17, 130 << 10
_LEAST_OF_CLUSTER = 4096  # bytes of a row that a block of a cluster holds at least
# Rows that a block computes at a time, where they share values of columns, and blocks of several rows on a
# multiprocessor: each has all of its 16 named barriers, of which there are 64.
_ROWS_AT_A_TIME, _MOST_BLOCKS_OF_ROWS = (1, 2, 3, 4, 6, 8), 4
_TEAMS = 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 512  # threads of a block for each of these rows
# Blocks that hold values of columns follow each other so often where each still has as many rows as it computes at a
# time: an H200 does not give all multiprocessors equal shares of its memory's rate. Clusters do not, for which whole
# groups of multiprocessors would have to be free: so they are 1.05 to 1.3 times as fast, if no more of them than this
# part are left out because all rows of one have to begin at the same place in a pack.
_TURNS, _FEW_LEFT_OUT = 4, 16
# Reads of values of columns, in each element's stages, from which on rows that begin between two packs of 4 elements
# take less time in shared memory than in registers, of few rows and of many; half as many for packs of 8. On an H200
# many layer norms of bfloat16 take 0.7 to 0.8 of the time so, of float32 up to 1.09, RMS norms of bfloat16 up to 1.13.
_READS_THAT_PAY, _READS_THAT_PAY_OF_MANY = 2, 4
# Columns, and rows, from which on this is so of rows that would else be in the lanes of a warp as they were loaded, and
# read values of columns more than once.
_SHORTEST, _MANY_SHORT_ROWS = 513, 1 << 12
# Packs of many rows from which on those that wait often, without values of columns, take less time in shared memory
# than in registers, which leave 1024 threads: the softmax of standardised rows of 8192 to 32768 float32, or 11008 to
# 32768 bfloat16, columns takes 0.81 to 0.97 of it on an H200; of 4096 float32, or 8192 bfloat16, it takes longer.
_PACKS_THAT_PAY = 1300


def in_shared_memory(program: Program, access: Access, packed: bool) -> Config | None:
    """Choose the blocks that hold a row in shared memory, of a GPU with clusters; None if it is too long.

    Parameters
    ----------
    program : Program
    access : Access
    packed : bool
        Whether stages may compute again what they need of a row, as it was loaded.
    """
    options = list(_options(program, access, packed))
    if _may_hold_columns(program):
        options += _options_with_columns(program, access)
    if not options:
        return None
    _, threads, items, packs, blocks, cluster, rows = max(options, key=lambda option: option.rate)
    return Config(
        "row_shared",
        threads * max(1, rows),
        items,
        access.vec,
        blocks=blocks,
        cluster=cluster,
        packs=packs,
        rows=max(1, rows),
        columns=rows > 0,
    )


def pays_where_shifted(program: Program, access: Access, in_lanes: Config | None) -> bool:
    """Whether rows that would have room in registers are better held in shared memory, for their values of columns.

    `in_lanes` is the configuration of a short row in the lanes of a warp.
    """
    if not (access.shifted and _may_hold_columns(program)):
        return False
    rows, cols = program.domain
    if in_lanes is None:
        least = _READS_THAT_PAY_OF_MANY if rows >= MANY_ROWS else _READS_THAT_PAY
        return program.column_reads * access.vec >= 4 * least
    # Lanes that hold computed values read those of columns in fewer stages.
    return in_lanes.packed and program.column_reads > 1 and cols >= _SHORTEST and rows >= _MANY_SHORT_ROWS


def pays_where_waiting(program: Program, access: Access) -> bool:
    """Whether rows that would have room in registers are better held in shared memory, as they wait often."""
    rows, cols = program.domain
    many = rows >= MANY_ROWS and cols >= _PACKS_THAT_PAY * access.vec
    return many and program.waits_often and not program.reads_columns and _is_light(program)


def _may_hold_columns(program: Program) -> bool:
    """Whether values of columns may stay in shared memory from row to row."""
    rows, cols = program.domain
    many = rows >= _MANY_ROWS or rows * cols >= _MANY_ELEMENTS
    return many and program.reads_columns > 0 and not program.is_double and program.recomputed_flops <= _MOST_RECOMPUTED


class _Option(NamedTuple):
    """A configuration: its rate as a share of a copy's, and what it sets (`threads` for each row).

    `rows` is 0 where no values of columns are held.
    """

    rate: float
    threads: int
    items: int
    packs: int
    blocks: int
    cluster: int
    rows: int = 0


def _options(program: Program, access: Access, packed: bool) -> Iterator[_Option]:
    """Yield the configurations in which each stage reads values of columns."""
    vec, shifted, _ = access
    packs, double = max(1, -(-program.domain[1] // vec)), program.is_double
    is_light = packed and _is_light(program)
    waits_little = _computes_little(program) and not program.waits_often
    if is_light:
        resident_threads = _WIDENING_THREADS if program.reads_columns and vec == 8 else _LIGHT_THREADS
    else:
        resident_threads = _DOUBLE_THREADS if double else _THREADS
    most = _MOST_DOUBLE_PACKS if double else _MOST_PACKS
    fewest, memory = _fewest(program), _Memory(program)
    from_cache = _left_from_cache(program, shifted) if _may_hold_columns(program) else 1.0
    for cluster in range(1, _MOST_CLUSTER + 1):
        for threads in (512, 256, 128) if double else (1024, 768, 512, 384, 256):
            held = -(-packs // (threads * cluster))
            # Code that is repeated for all packs computes one while others are on their way.
            items = held if is_light else max(1, (8 if double else 4) // vec)
            held = -(-held // items) * items
            part = memory.held(held * threads * vec)
            blocks = min(_MULTIPROCESSOR_BYTES // memory.block(part, threads, cluster), resident_threads // threads)
            if held <= most and blocks >= (fewest if cluster > 1 else 1):
                rate = packs / (held * threads * cluster) * _rate(part, blocks, cluster, shifted, waits_little)
                rate *= from_cache if shifted or cluster > 1 or blocks == 1 else math.sqrt(from_cache)
                yield _Option(rate, threads, items, held, blocks, cluster)


def _computes_little(program: Program) -> bool:
    return program.recomputed_flops <= _LITTLE_RECOMPUTED and program.input_bytes <= _LITTLE_INPUT_BYTES


def _is_light(program: Program) -> bool:
    """Whether a program that computes little has one accumulator at most in each stage, so that few registers do."""
    return _computes_little(program) and all(len(program.accumulators(s)) <= 1 for s in range(program.stages))


def _left_from_cache(program: Program, shifted: bool) -> float:
    """Return the share of a rate that is left where stages read values of columns from the L2 cache."""
    of_rows = program.input_bytes + program.output_bytes
    if shifted:
        return of_rows / (of_rows + _SHIFTED_BYTES * program.column_reads)
    of_columns = program.column_reads * sum(program.column_sizes) / len(program.column_sizes)  # by their mean size
    return min(_MOST_FROM_CACHE, _FROM_CACHE * of_rows / (of_rows + of_columns))


def _fewest(program: Program) -> int:
    """Return how many rows at a time multiprocessors of clusters have to have: a cluster alone leaves them idle."""
    again = program.stages * program.input_bytes + program.output_bytes
    limit = _SLOW_READ_AGAIN if program.is_double or program.reads_columns else _READ_AGAIN
    return 1 if again >= limit * (program.input_bytes + program.output_bytes) else 2


def _rate(part: int, blocks: int, cluster: int, shifted: bool, waits_little: bool) -> float:
    """Estimate the rate of blocks that each hold so many bytes of a row, as a share of a copy's."""
    if cluster == 1:
        return blocks / (blocks + _BLOCK_LOSS)
    held = min(1.0, part * _blocks_of_whole_clusters(blocks, cluster) / _ENOUGH_HELD) ** _HELD_POWER
    loss = _CLUSTER_LOSS if waits_little else _HEAVY_CLUSTER_LOSS
    return blocks / (blocks + loss) * held * (_SHIFTED_SHARE if shifted else 1.0)


@lru_cache(maxsize=4096)
def _blocks_of_whole_clusters(blocks: int, cluster: int, places: int = 1) -> float:
    """Return how many blocks of whole clusters a multiprocessor has on average, if it has room for `blocks`.

    `places` is as in `turns_of_clusters`; single blocks are so many that it hardly matters.
    """
    if cluster == 1:
        return float(blocks)
    sizes = (MULTIPROCESSORS,) if cluster == 2 else _GROUPS
    clusters = sum(size * blocks // cluster for size in sizes if size >= cluster)
    turns = turns_of_clusters(cluster, clusters, places)
    launched = clusters * turns // places * places
    return launched / turns * cluster / MULTIPROCESSORS


def _options_with_columns(program: Program, access: Access) -> Iterator[_Option]:
    """Yield the configurations in which values of columns stay in shared memory."""
    vec, shifted, _ = access
    packs, fewest, memory = max(1, -(-program.domain[1] // vec)), _fewest(program), _Memory(program)
    for cluster in range(1, _MOST_CLUSTER + 1):
        for threads in _TEAMS:
            held = -(-packs // (threads * cluster))
            elements = held * threads * vec
            if held > _MOST_PACKS or (cluster > 1 and elements * program.input_bytes < _LEAST_OF_CLUSTER):
                continue
            used = packs / (held * threads * cluster)
            of_row, of_columns = memory.held(elements), memory.held_columns(elements)
            for rows in _ROWS_AT_A_TIME:
                taken = memory.block(rows * of_row + of_columns, threads, cluster, rows)
                blocks = min(_MULTIPROCESSOR_BYTES // taken, _THREADS // (threads * rows))
                if taken > _MOST_BYTES or blocks < 1:
                    break  # as for more rows
                if rows > 1:
                    blocks = min(blocks, _MOST_BLOCKS_OF_ROWS)
                if cluster > 1 and blocks * rows < fewest:
                    continue
                held_of_rows = elements * program.input_bytes * used * rows
                whole = _blocks_of_whole_clusters(blocks, cluster, vec if shifted else 1)
                rate = _rate_with_columns(used, threads * rows, held_of_rows, blocks, whole, rows, cluster)
                if shifted:
                    rate *= _SHIFTED_SHARE
                yield _Option(rate, threads, held, held, blocks, cluster, rows)


def _rate_with_columns(
    used: float, threads: int, held: float, blocks: int, whole: float, rows: int, cluster: int
) -> float:
    """Estimate the rate of blocks that hold values of columns, as a share of a copy's.

    Parameters
    ----------
    used : float
        The share of the packs for which threads have room that rows have.
    threads, held : number
        Threads of a block, and the bytes of rows that it holds.
    blocks, whole, rows, cluster : number
        Blocks on a multiprocessor, and those of whole clusters; rows that each computes at a time; blocks of a cluster.
    """
    rate = blocks * rows / (blocks * rows + _ROW_LOSS)
    if cluster > 1:
        rate *= blocks / (blocks + _OWN_LOSS) * (1 - _LOSS_OF_BLOCK * cluster)
    rate *= used**_PACKS_POWER * min(1.0, threads * whole / 1024) ** _THREADS_POWER
    return rate * min(1.0, held * whole / _ENOUGH_ROWS) ** _ROWS_POWER


def turns_of_clusters(cluster: int, at_once: int, places: int) -> int:
    """Return how often clusters that hold values of columns follow each other, of which so many have room at once.

    Parameters
    ----------
    cluster, at_once : int
        Blocks of a cluster, and clusters.
    places : int
        Where in a pack rows begin: a multiple of so many clusters is launched.
    """
    many_left_out = at_once % places > at_once / _FEW_LEFT_OUT
    return _TURNS if cluster == 1 or many_left_out else 1


class _Memory:
    """The shared memory that blocks of a program take."""

    def __init__(self, program: Program):
        self.element = program.input_bytes
        self.lines = _LINE * len(program.full_inputs)
        self.columns = program.column_sizes
        self.totals = program.state_size

    def held(self, elements: int) -> int:
        """Return the bytes that a row of so many elements takes."""
        return elements * self.element + self.lines

    def held_columns(self, elements: int) -> int:
        """Return the bytes that values of so many columns take."""
        return sum(-(-elements * size // _LINE) * _LINE for size in self.columns)

    def block(self, held: int, threads: int, cluster: int, rows: int = 1) -> int:
        """Return all that a block takes, which holds so many bytes and has so many threads for each row."""
        scratch = rows * (2 * (threads // 32 + cluster) * self.totals + 16)
        return held + -(-scratch // _LINE) * _LINE + _BLOCK_BYTES


def held_bytes(program: Program, elements: int, rows: int = 1, columns: bool = False) -> int:
    """Return the bytes of shared memory that rows of so many elements take, and values of as many columns if held."""
    memory = _Memory(program)
    return rows * memory.held(elements) + (memory.held_columns(elements) if columns else 0)
