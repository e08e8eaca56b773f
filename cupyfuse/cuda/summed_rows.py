"""Rows whose columns are reduced, too: how many threads compute one, and how many rows a block computes at a time."""

from __future__ import annotations

from ..dtypes import ITEMSIZE
from ..plan.schedule import columns_of_thread, state_size
from .config import MULTIPROCESSORS, Access, Config, power_of_two, whole_warps, widest_vec
from .program import Program

_THREADS_OF_TEAMS, _MOST_THREADS = 256, 1024  # of a block with several rows, and of one
_SHARED_BYTES = 40 << 10  # of the states that the teams of a block merge
# Threads of a multiprocessor, with registers for 16 columns each where their states, one row that is computed and one
# that is loaded take many, as in layer norms, or few, as in RMS norms. Of 180 configurations of backward passes of
# norms and of an affine softmax, 256 to 8192 columns, on an H200 these are best or within 3 %: with 8 columns a thread
# waits longer for reductions, 1.2 to 1.6 times the time in all, and threads that spill take up to three times as long.
_THREADS_OF_MANY, _THREADS_OF_FEW, _FEW_REGISTERS = 512, 640, 104
_REGISTERS_BESIDE = 40  # of a thread, beside these, and one for each element that is widened


def beside_columns(program: Program, access: Access, packed: bool, most: int) -> Config:
    """Choose the threads that compute a row, and then others, with the states of its columns.

    Threads and blocks do not depend on `access.vec`, of which each thread has more if it is narrow: launches of all
    alignments share a workspace.

    Parameters
    ----------
    program : Program
    access : Access
    packed : bool
        Whether threads hold a row as it was loaded.
    most : int
        Elements that a thread may hold.
    """
    assert program.columns is not None
    cols, state, widest = program.domain[1], state_size(program.columns), widest_vec(program)
    each = max(widest, min(columns_of_thread(state, program.input_bytes), most) // widest * widest)
    threads = -(-cols // each)
    group = power_of_two(threads) if threads <= 32 else min(_MOST_THREADS, whole_warps(threads))
    merged = group * -(-cols // (group * widest)) * widest * state
    teams = max(1, _THREADS_OF_TEAMS // group) if merged <= _SHARED_BYTES else 1
    narrow = program.input_bytes < ITEMSIZE["float32"] * len(program.full_inputs)
    registers = _REGISTERS_BESIDE + each * narrow + each * (state + 2 * program.input_bytes) // 4
    most_threads = _THREADS_OF_FEW if registers <= _FEW_REGISTERS else _THREADS_OF_MANY
    blocks = max(1, most_threads // (group * teams))
    return Config(
        "row_columns",
        group * teams,
        -(-cols // (group * access.vec)),
        access.vec,
        group,
        shares=MULTIPROCESSORS * blocks,
        blocks=blocks,
        packed=packed,
    )
