"""Launch configurations: the template of a step and its parameters, by its shape, dtypes, stages and access to rows."""

from __future__ import annotations

from dataclasses import replace

from ..dtypes import ITEMSIZE
from ..plan.schedule import COLUMN_STRIP, column_splits, row_shares, state_size
from .block_rows import as_loaded, as_values, most_as_loaded
from .config import MULTIPROCESSORS, REGISTERS, Access, Config, power_of_two, resident_blocks, whole_warps, widest_vec
from .parameters import FULL, ROW
from .program import Program
from .shared_rows import in_shared_memory, pays_where_shifted, pays_where_waiting
from .short_rows import SHORT, THREADS, lanes, most_of_lane, rows_at_a_time
from .summed_rows import beside_columns

# Values of a row that a thread may hold: with more, registers suffice for too few threads to hide latency.
_MAX_HELD = 32
# Where rows are packed: FLOPs for each element that stages may compute again, and bytes of its inputs. On an H200 the
# backward passes of softmax and of norms, with 24 FLOPs, 4 values and 12 bytes an element, run packed at 0.85 to 0.98
# of a copy's rate from 256 to 8192 columns, and with their values in registers at 0.26 to 0.6. That of a softmax behind
# BatchNorm has 42. Values that take more than so many FLOPs each to compute again are held instead in rows up to so
# long: of 1000 columns of bfloat16 the softmax of a GELU takes 52 us so, and 102 packed, a layer norm of SiLU 52 and
# 60; from 8192 columns on the difference is below a tenth.
_MOST_RECOMPUTED, _MOST_INPUT_BYTES = 48, 16
_FLOPS_OF_HELD, _LONGEST_HELD = 12, 8192
_SHARED_BYTES = 48 << 10  # static shared memory of a block
# Strips of columns that leave some multiprocessors with one and others with two are cut in halves: the statistics of
# 4096 x 11008 float32, 172 strips, take 75 us on an H200, with 344 of them 58.
_MOST_UNEVEN = 198
# Of a lane that holds a row, beside what it loads. On an H200 the sum of three float32 matrices of 768 columns and its
# layer norm take 102 us with eight blocks of 64 registers, 55 with four; with a fourth of bfloat16 132 and 61; the
# sums of one or two matrices, and softmax, 0.92 to 1.0 of the time.
_REGISTERS_BESIDE_LOADS = 44
# Threads on a multiprocessor that each have registers for rows that are read once, 32 to 64: for one accumulator of
# 16-bit elements as they are loaded, for float64, for any other.
_SIMPLE_THREADS, _HEAVY_THREADS, _LIGHT_THREADS = 2048, 1024, 1536
# Rows that are read once have a warp each up to so many packs, longer ones a block. An H200 starts no more than 0.8
# blocks in a nanosecond: it sums 61008 rows of 1100 bfloat16 in 43 us with a warp for each, in 77 with a block of 64
# threads. Of longer rows, 2048 elements, few take 8 us with a warp for each, 6 with a block.
_PACKS_OF_A_WARP = 192
# Short rows that are read once, or have more than so many values an element, are held as they were loaded where else
# lanes would have room for so many times as many packs. The softmax of standardised rows of 36 to 200 columns takes
# 0.75 to 0.97 of the time by values, the backward pass of a layer norm 1.1 to 1.2.
_MOST_IDLE, _FEW_VALUES = 1.1, 2
# Rows so long, and so many, get a block each where elements depend on several values of the row, which would be loaded
# for each pack: so an H200 makes the gradient of the logits of a loss 1.2 to 1.5 times as fast; with one value it is
# up to 15 % slower.
_LONG_ROW, _MANY_ROWS = 1024, 512
# Rows that take so many bytes at least, of so many read and written, for which stages compute so many FLOPs again at
# most, are evicted last from the L2 cache: on an H200 softmax, norms and their like run at 1.01 of a copy's rate so, at
# 0.975 else. With less than twice what the cache holds, a kernel that reads the results next waits longer.
_LEAST_ROW_BYTES, _MUCH_MOVED, _FEW_RECOMPUTED = 2000, 1 << 27, 3
_EVICTED_LAST_THREADS = 1280  # on a multiprocessor


def default_config(program: Program, access: Access, clusters: bool = False) -> Config:
    """Choose the configuration of a step whose pointers and strides allow this access.

    Reductions down columns take column_stats, work without reductions elementwise, or row_stream where much depends on
    the row alone. Rows take row_lanes up to 1024 columns; where they are read once, row_stream or row_shares; else, the
    longer they are, row_block, row_shared, row_stream.

    `clusters` tells whether the GPU has clusters of blocks.
    """
    if program.columns is not None:
        packed = _is_packed(program)
        return beside_columns(program, access, packed, most_as_loaded(program) if packed else _most_held(program))
    config = _configure(program, access, clusters)
    config = replace(config, shifted=access.shifted, apart=access.apart)
    return _evicted_last(program, config) if clusters and _evicts_last(program, config) else config


def _evicts_last(program: Program, config: Config) -> bool:
    """Whether rows that are read, and written, take less time where the L2 cache evicts last what was read."""
    rows, cols = program.domain
    moved = rows * cols * (program.input_bytes + program.output_bytes)
    whole = [ITEMSIZE[p.dtype] for p in program.full_inputs if config.vec * ITEMSIZE[p.dtype] == 16]
    # Registers do not suffice for threads with many packs of a log_softmax.
    roomy = config.items < 8 or not _sums_exponentials_alone(program)
    if config.template == "row_block":
        # Threads with few packs have too little in flight. One block of a multiprocessor waits for itself. So softmax
        # and log_softmax of up to 6 packs take 1.0 to 1.025 of the time, of 7 or 8 packs 0.98 to 1.0; norms take 0.97
        # to 0.98, and so does all that several blocks compute.
        waits = config.blocks == 1 and program.sums_exponentials
        suited = config.items > (6 if waits else 2) and (roomy or not waits)
    else:
        suited = config.template == "row_lanes" and roomy
    return (
        suited
        and not (config.apart or program.is_double)
        and program.output_bytes > 0
        and program.recomputed_flops <= _FEW_RECOMPUTED
        and cols * max(whole, default=0) >= _LEAST_ROW_BYTES
        and moved >= _MUCH_MOVED
    )


def _sums_exponentials_alone(program: Program) -> bool:
    """Whether a sum of exponentials has terms that no later stage reads."""
    return any(a.kind.startswith("ExpSum") and a.term is None for a in program.all_accumulators)


def _evicted_last(program: Program, config: Config) -> Config:
    """Return a configuration with loads that are evicted last: they take registers, but leave as many blocks."""
    blocks, simple = config.blocks, len(program.full_inputs) == 1 and not program.reads_columns
    if config.template == "row_block" and config.items <= 4 and config.packed and simple:
        blocks = _EVICTED_LAST_THREADS // config.threads
    return replace(config, evict_last=True, blocks=blocks)


def _configure(program: Program, access: Access, clusters: bool) -> Config:
    """Choose the template and its parameters."""
    vec, apart = access.vec, access.apart
    rows, cols = program.domain
    if program.by_columns:
        strip = max(vec, min(COLUMN_STRIP, 32 * vec, power_of_two(cols)))
        shares, size = column_splits(program.domain), state_size(program.step)
        if shares == 1 and MULTIPROCESSORS < -(-cols // strip) <= _MOST_UNEVEN and strip > vec:
            strip //= 2
        # With at most one block for each multiprocessor, 512 threads keep more loads in flight.
        threads = 512 if -(-cols // strip) * shares <= MULTIPROCESSORS else 256
        # Every warp has accumulators of its own in shared memory, and where shares are merged every thread.
        while max(threads, threads // 32 * strip) * size > _SHARED_BYTES and threads > 32:
            strip, threads = (strip // 2, threads) if strip > 32 else (strip, threads // 2)
        return Config("column_stats", threads, 4, vec, strip, shares)
    if not any(n.reduction for n in program.step.nodes):
        if cols >= _LONG_ROW and rows >= _MANY_ROWS and sum(p.extent == ROW for p in program.parameters) > 1:
            threads, blocks = (256, 6) if cols < 16384 else (512, 3)
            return Config("row_stream", threads, 1, vec, blocks=blocks)
        return Config("elementwise", 256, 1, vec)
    packs = max(1, -(-cols // vec))
    packed = _is_packed(program)
    reduces = program.stages == 1 and not _writes_rows(program)
    in_lanes = _in_lanes(program, packs, access, packed, reduces) if cols <= SHORT else None
    may_be_shared = clusters and packed and not (reduces or apart)
    if may_be_shared and (pays_where_shifted(program, access, in_lanes) or pays_where_waiting(program, access)):
        shared = in_shared_memory(program, access, packed)
        if shared is not None:
            return shared
    if in_lanes is not None:
        return in_lanes
    if reduces:
        return _stream(program, packs, vec)
    in_registers = None
    if packed:
        in_registers = as_loaded(program, packs, access, clusters)
    elif not (clusters and _holds_much(program)):
        in_registers = as_values(program, packs, vec, _most_held(program))
    if in_registers is not None:
        return in_registers
    # What is held in shared memory is copied there in whole packs.
    shared = in_shared_memory(program, access, packed) if clusters and not apart else None
    return shared or Config("row_stream", 1024, max(1, 8 // vec) if program.input_bytes <= 4 else 1, vec)


def _in_lanes(program: Program, packs: int, access: Access, packed: bool, reduces: bool) -> Config | None:
    """Choose the lanes of a short row, which hold few values or the row as it was loaded; None if it is too long."""
    if not packed:
        return _lanes_of(program, packs, access, reduces, _most_held(program), packed=False)
    loaded = _lanes_of(program, packs, access, reduces, most_as_loaded(program), packed=True)
    values = _lanes_of(program, packs, access, reduces, most_of_lane(program, reduces), packed=False)
    if values is None or loaded is None:
        return values or loaded
    # With fewer elements a lane, more of the lanes may be idle, or all lanes of a warp merge accumulators for one row.
    many_idle = values.group * values.items > _MOST_IDLE * loaded.group * loaded.items
    if many_idle and (reduces or program.held_values > _FEW_VALUES):
        return loaded
    return loaded if reduces and values.group == 32 > loaded.group else values


def _lanes_of(program: Program, packs: int, access: Access, reduces: bool, most: int, packed: bool) -> Config | None:
    """Choose the lanes of a row, of which each may hold so many elements; None if they do not suffice."""
    if most < access.vec:
        return None
    group = lanes(program, packs, access, most, reduces, packed)
    items = -(-packs // group)
    if items * access.vec > most:
        return None
    rows = rows_at_a_time(program, group, items, access.vec, packed)
    # What a lane loads at once, and what most programs compute with: fewer blocks leave that many registers a lane.
    # Values that it holds where it waits often count 4 bytes each: the softmax of 1000 standardised bfloat16 takes 0.97
    # of the time so.
    element = max(program.input_bytes, 4) if program.waits_often and not packed else program.input_bytes
    registers = rows * items * access.vec * element // 4 + _REGISTERS_BESIDE_LOADS
    blocks = max(1, min(resident_blocks(THREADS, program.is_double), REGISTERS // (THREADS * registers)))
    return Config("row_lanes", THREADS, items, access.vec, group, blocks=blocks, packed=packed, rows=rows)


def _is_packed(program: Program) -> bool:
    """Whether rows are held as they were loaded, and stages compute again what they need of them."""
    if program.recomputed_flops > _FLOPS_OF_HELD * program.held_values and program.domain[1] <= _LONGEST_HELD:
        return False
    guarded = any(n.op == "guard" for n in program.step.nodes)
    few = program.recomputed_flops <= _MOST_RECOMPUTED and 0 < program.input_bytes <= _MOST_INPUT_BYTES
    # Sums of exponentials are rescaled for each pack, which float64 results would show.
    return few and not guarded and not program.is_double


def _holds_much(program: Program) -> bool:
    """Whether values in registers take more time than to compute them again from shared memory.

    On an H200 the backward pass of a float64 layer norm takes 1010 us so, 1630 with its four values in registers.
    """
    few = 2 if program.is_double else 3
    return program.held_values > few and program.recomputed_flops <= _MOST_RECOMPUTED and program.input_bytes > 0


def _most_held(program: Program) -> int:
    """Return how many elements of a row a thread may hold, converted, and have registers left to compute with.

    Of float64 it is 256 bytes of inputs, or half of that beside arrays with an element for each column; of others
    `_MAX_HELD` values, of which an element has `Program.held_values` but one that takes the place of what it is
    computed from. It is a pack at least.
    """
    if not program.is_double:
        return max(widest_vec(program), _MAX_HELD // max(1, program.held_values - 1))
    held = 16 if program.reads_columns else _MAX_HELD
    return max(1, min(held, 256 // max(program.input_bytes, 8)))


def _stream(program: Program, packs: int, vec: int) -> Config:
    """Choose the threads that read a row once and hold none of it.

    They do not depend on the number of rows, so that neither do a row's bits, unless rows are so few that blocks share
    each. A thread asks for at most 16 bytes of each array at a time, for 8 of 16-bit ones in narrower vectors: many
    threads, not many bytes of one, hide how long loads take, and the registers of more bytes leave fewer threads. As
    measured on an H200 from 1100 to 4194304 columns, 16 to 65536 rows: with 64 bytes the cosine similarity of float32
    rows takes 2.2 times as long, a cross entropy 1.5 times.
    """
    items = max(1, min(4, widest_vec(program)) // vec)
    rows = 1  # of a block
    if packs <= _PACKS_OF_A_WARP:
        threads, rows = THREADS, THREADS // 32
    elif vec == 8 and packs > 1024:
        threads = min(512, max(128, power_of_two(program.domain[1]) // 128))
    else:
        threads = max(64, whole_warps(packs / max(8, -(-packs // 256))))
    accumulators = program.accumulators(0)
    simple = len(accumulators) == 1 and accumulators[0].operand in program.loaded and program.input_bytes == 2
    resident_threads = _SIMPLE_THREADS if simple else _HEAVY_THREADS if program.is_double else _LIGHT_THREADS
    blocks = min(32, resident_threads // threads)
    shares = row_shares(program.domain)
    if shares > 1:
        return Config("row_shares", threads, items, vec, shares=shares, blocks=blocks)
    return Config("row_stream", threads, items, vec, blocks=blocks, rows=rows)


def _writes_rows(program: Program) -> bool:
    """Whether a step has a full-size result."""
    return any(program.extent(n) == FULL for n in program.step.outputs)
