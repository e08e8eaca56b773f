"""Short rows, of which some lanes of a warp hold one or several in registers: how many lanes, and how many rows."""

from __future__ import annotations

import math

from ..dtypes import ITEMSIZE
from ..ir.operators import REDUCTIONS
from .config import Access, power_of_two, widest_vec
from .program import Program

SHORT = 1024  # columns at most
THREADS = 128  # of a block
# Packs that a lane should have, on average: with fewer it has too little in flight, with more most lengths leave lanes
# idle. Of rows that are shifted, of packs narrower than they may be, of one matrix, of several; of one matrix in
# packs of four elements at most where lanes merge one accumulator.
_SHIFTED, _NARROW, _SINGLE, _SEVERAL, _ONE_MERGE = 4.8, 4.0, 3.2, 2.0, 3.0
# Of narrow packs, where that gives a row up to 8 lanes; up to 16 where reductions of one stage are all, with one array
# of columns at most. Lanes with 2 packs rather than 4 begin with more of a row at once: on an H200 RMS norms of 14 to
# 60 bfloat16 columns take 0.62 to 0.84 of the time, softmax of 28 to 60 0.74 to 0.86, its backward pass 0.68 to 0.84,
# of 100 to 124 all three 0.91 to 0.97; layer norms of 54 would take 1.14. 32 lanes would make it 1.0 to 1.24, and packs
# of one element 1.02 to 1.4 for two matrices or two stages of 16 bits, and log-softmax.
_FEWER_NARROW, _FEWER_LANES, _LANES_OF_FEWER = 3.1, 8, 16
# Packs narrower than four elements, of which a lane holds values: of 16 bits, or where lanes merge much. With 4, on an
# H200, affine maps and softmax of 102 columns take 1.15 times as long, the softmax of standardised rows 1.2.
# Of several matrices, where lanes merge little, the second: a masked softmax of 50 columns takes 1.07 times as long
# with 7, of 66 0.88 with 5.
# A row of three stages or more, with arrays of columns, rather has up to 8 lanes than more packs in each than the
# third: a layer norm of SiLU of 50 columns takes 1.3 times as long with 7 in 4 lanes, of 34 columns 1.12 with 3 in 8.
_NARROW_VALUES, _NARROW_OF_SEVERAL, _MOST_OF_FEW_LANES, _FEW_LANES = 8.0, 5.0, 6, 8
# Where lanes merge accumulators at least so often, and compute values again, or store no row and have no such narrow
# packs, they have so many times as many packs.
_MERGES, _MERGED = 3, 2.0
# Elements of a row that is read once, that a lane should have: by bytes an element where to merge takes few FLOPs; and
# of 16 bits where it takes many, of values and as they were loaded.
_CHEAP_FLOPS, _ELEMENTS, _COSTLY, _COSTLY_LOADED = 2, {2: 16, 4: 16}, 32, 56
# Elements at most of which a lane holds one or two values each, of exponentials of 16-bit ones or of rows that wait
# often, and of rows that are read once: to compute them once saves time as long as registers suffice. On an H200 the
# softmax of standardised rows of 16 to 768 columns is so 1.05 to 1.15 times as fast as with all values computed again
# in each stage, of 1000 of bfloat16 1.13, of float32 1.08 with 6 blocks on a multiprocessor, 0.77 with 8. Two values
# that are no exponentials, or three, take less time to compute again from 16 bits: of a layer norm of 64 to 512 columns
# 0.95 of it, of its backward pass 0.5 to 0.9.
_VALUES, _EXPONENTIALS, _READ_ONCE = 24, 32, 32
_SEVERAL_VALUES = 32  # of all elements together, where they have more than two each
# Bytes that a lane should read and write: else the GPU would have to start more blocks than it can, 0.8 in a
# nanosecond on an H200. Twice as many where a lane with less waits for several arrays of columns, or for the
# reductions of two stages; of several arrays one with as many, too, if a row has 8 lanes at least and begins within a
# sector of the caches: an affine map and softmax of 100 or 196 bfloat16 columns takes 0.91 to 0.96 of the time so.
# Two rows would lose 2 % of 128 to 512 columns, which begin with sectors, and 4 % of 60, in 4 lanes.
_MOVED_BYTES, _SECTOR, _LANES_OF_MORE = 64, 32, 8
# Packs of one row from which on a lane has enough, if it reads columns or computes values again in each stage: affine
# maps and softmax of 51 bfloat16 columns take 0.8 of the time so.
_ENOUGH_PACKS = 6
_HELD_BYTES = 64  # of several rows, for which a lane has registers
# Rows at most; the second where the reductions of two stages follow each other, but for lanes with two packs at most
# and little to compute again: layer norms of 4 to 60 bfloat16 columns take 0.88 to 1.0 of the time with four, those of
# SiLU 1.1. Of values two packs have so many elements in all rows: of layer norms of 14 float32 columns two rows take
# 0.76 of the time of one, four 0.84. RMS norms of 12 to 124 columns take 0.91 to 1.0 with four rows of two packs, too.
_MOST_ROWS, _MOST_OF_STAGES, _FEW_PACKS, _FEW_VALUES, _LITTLE_RECOMPUTED = 4, 2, 2, 8, 16
_MANY_BLOCKS = 1 << 12  # as many are left where lanes have several rows


def lanes(program: Program, packs: int, access: Access, most: int, reduces: bool, packed: bool) -> int:
    """Choose the lanes of a row of so many packs, as measured on an H200 from 2 to 1024 columns.

    Parameters
    ----------
    program : Program
    packs : int
    access : Access
    most : int
        Elements that a lane may hold.
    reduces : bool
        Whether the row is read once, and no row is written.
    packed : bool
        Whether lanes hold the row as it was loaded.
    """
    vec, shifted, apart = access
    # Elements of a row at most that need a lane each (row_lanes.cu).
    singles = (3 if apart else 2) * (vec - 1) if shifted else 1
    fewest = power_of_two(max(singles, min(32, -(-packs // max(1, most // vec)))))
    if reduces:
        return _lanes_of_read_once(program, packs, vec, fewest, packed)
    merges = len(program.all_accumulators)
    of_values = vec < min(4, widest_vec(program)) and not packed and (_are_narrow(program) or merges >= _MERGES)
    more = packed or not (of_values or program.output_bytes)
    scale = _MERGED if merges >= _MERGES and more else 1.0
    if vec > 1 and packs <= 3 * scale:
        return max(fewest, min(math.ceil(packs / scale), 2))  # no shifted row is so short
    if of_values and not shifted and _is_long(program) and program.reads_columns:
        fewest = max(fewest, min(_FEW_LANES, power_of_two(math.ceil(packs / _MOST_OF_FEW_LANES))))
    if _pays_with_fewer(program, packs, access, of_values, packed):
        packs_a_lane = _FEWER_NARROW
    else:
        packs_a_lane = scale * _packs_of_lane(program, vec, shifted, of_values, merges)
    return max(fewest, min(32, power_of_two(math.ceil(packs / packs_a_lane))))


def _packs_of_lane(program: Program, vec: int, shifted: bool, of_values: bool, merges: int) -> float:
    """Return how many packs a lane should have on average; `of_values` is for those of `_NARROW_VALUES`."""
    single = len(program.full_inputs) == 1
    if shifted:
        return _SHIFTED
    if of_values:
        return _NARROW_VALUES if single or merges >= _MERGES else _NARROW_OF_SEVERAL
    if vec < widest_vec(program):
        return _NARROW
    if len(program.full_inputs) > 1:
        return _SEVERAL
    return _ONE_MERGE if merges == 1 and vec <= 4 else _SINGLE


def _pays_with_fewer(program: Program, packs: int, access: Access, of_values: bool, packed: bool) -> bool:
    """Whether a lane should have `_FEWER_NARROW` packs of a row; the parameters are those of `lanes`."""
    vec, shifted, _ = access
    if vec == widest_vec(program) or shifted or of_values or program.is_double:
        return False
    if len(program.all_accumulators) >= _MERGES:
        return False
    is_long, several = _is_long(program), len(program.full_inputs) > 1
    if is_long and not packed and program.recomputed_flops > _LITTLE_RECOMPUTED:
        return False
    is_narrow, sums_alone = _are_narrow(program), program.sums_exponentials and not program.relative_exponentials
    if vec == 1 and (sums_alone or (is_narrow and (is_long or several))):
        return False
    at_once = vec > 1 and not is_long and program.reads_columns <= 1 and not (is_narrow and sums_alone)
    return packs <= _FEWER_NARROW * (_LANES_OF_FEWER if at_once else _FEWER_LANES)


def _is_long(program: Program) -> bool:
    """Whether the reductions of two stages follow each other."""
    return program.stages > 2


def _lanes_of_read_once(program: Program, packs: int, vec: int, fewest: int, packed: bool) -> int:
    """Choose the lanes of a row that is read once: those that hold much merge their accumulators with few others."""
    most_lanes = min(32, power_of_two(-(-packs // 2)), max(64 // vec, fewest))
    elements = _ELEMENTS.get(program.input_bytes, 1)
    if program.input_bytes == 2 and any(
        REDUCTIONS[n.op].flops > _CHEAP_FLOPS for nodes in program.reductions(0).values() for n in nodes
    ):
        elements = _COSTLY_LOADED if packed else _COSTLY
    return max(fewest, min(most_lanes, power_of_two(-(-program.domain[1] // elements))))


def most_of_lane(program: Program, reduces: bool) -> int:
    """Return how many elements of a row a lane may hold as computed values; 0 if it should hold them as loaded.

    `reduces` tells whether the row is read once, and no row is written.
    """
    values, is_narrow = program.held_values, _are_narrow(program)
    holds_terms = bool(program.relative_exponentials)
    if values > 1 and is_narrow and not (values == 2 and holds_terms):
        return 0
    if reduces:
        return _READ_ONCE if values == 1 else 0
    if values > 2:
        return _SEVERAL_VALUES // values
    return _EXPONENTIALS if holds_terms and (is_narrow or program.waits_often) else _VALUES


def _are_narrow(program: Program) -> bool:
    """Whether no matrix that is read has more than 16 bits an element."""
    return all(ITEMSIZE[p.dtype] <= 2 for p in program.full_inputs)


def rows_at_a_time(program: Program, group: int, items: int, vec: int, packed: bool) -> int:
    """Choose the rows that lanes load before they compute one; they have so many packs of a row each.

    On an H200 two rows make the softmax of 16 bfloat16 columns 1.23 times as fast, four an affine map and softmax 1.20.
    Where two stages' reductions follow each other, two rows of several packs, of which lanes hold many values, take 1.1
    to 2 times as long as one after the other.
    """
    elements, is_long, several = items * vec, _is_long(program), program.reads_columns > 1
    held = elements * program.input_bytes
    moved = held + elements * program.output_bytes
    if moved == 0 or any(p.dtype == "float64" for p in program.full_inputs):
        return 1
    asks_for_more = several and group >= _LANES_OF_MORE and _begin_within_sectors(program)
    if moved > _MOVED_BYTES or (moved == _MOVED_BYTES and not asks_for_more):
        return 1
    if items >= _ENOUGH_PACKS and (program.reads_columns or program.recomputed_flops):
        return 1
    is_light = items <= _FEW_PACKS and program.recomputed_flops <= _LITTLE_RECOMPUTED
    waits = is_light and items > 1 and len(program.full_inputs) == 1 and program.reads_columns
    wanted = _MOVED_BYTES * (2 if is_long or several or waits else 1)
    most = _MOST_ROWS
    if is_long and items > 1 and not packed:
        most = _FEW_VALUES // elements if is_light else 1
    elif is_long and not is_light:
        most = _MOST_OF_STAGES
    rows = max(1, min(most, -(-wanted // moved)))
    while rows > 1 and (rows * held > _HELD_BYTES or program.domain[0] * group < _MANY_BLOCKS * THREADS * rows):
        rows -= 1
    return rows


def _begin_within_sectors(program: Program) -> bool:
    """Whether contiguous rows of a matrix begin within 32-byte sectors of the caches, which two rows then share."""
    return any(program.domain[1] * ITEMSIZE[p.dtype] % _SECTOR for p in program.full_inputs)
