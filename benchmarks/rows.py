"""Row programs over rows of many lengths: memory bandwidth on data that no cache holds."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from cupyfuse import dtypes

from . import options as types
from .lab import Lab, run
from .report import Case, Report
from .rivals import COMPILED, EAGER, OURS, Computation, Rival, device_copy, spread
from .row_programs import PROGRAMS, RowProgram
from .tables import Column, list_notes, rival_columns, scientific, table

# What options are where they are not given, in full and quick runs.
DEFAULTS = {
    "budget": (0.15, 0.03),  # GPU seconds for each rival of a case
    "bytes": (1 << 30, 1 << 27),
    "lengths": (
        (256, 1000, 1024, 1536, 4096, 5120, 8191, 8192, 11008, 16384, 32768, 50257, 65536, 131072, 262144),
        (256, 1000, 8192, 50257, 262144),
    ),
}
_BLOCK = 1 << 24  # elements drawn; the rest of the data are multiples of them
_CHECKED = 1 << 22  # elements that are compared
_ALIGNED = 512  # elements; CuPy's allocations begin at multiples of 512 bytes
_HOW = """\
GB/s, by medians of GPU time, the L2 cache overwritten before each call; the JSON file beside this one has the times.
Counted are the bytes of matrices that are read and written; the copy reads and writes half of that each. *error*:
cupyfuse's ‖result − reference‖ / ‖reference‖ against float64. Rivals took turns within one run; the fastest is in bold.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--lengths", type=types.lengths, metavar="N,N,...", help="elements in a row")
    types.add_several(parser, "--programs", tuple(PROGRAMS))
    types.add_several(parser, "--dtypes", types.DTYPES, default=("float32", "bfloat16"))


def draw(lab: Lab, dtype: str, count: int, seed: int) -> Any:
    """Draw `count` normal numbers on the GPU: one block of them, repeated with other scales."""
    block = lab.cupy.asarray(np.random.default_rng(seed).standard_normal(min(count, _BLOCK), dtype=np.float32))
    data = lab.cupy.empty(count, dtypes.to_numpy(dtype))
    for number, start in enumerate(range(0, count, _BLOCK)):
        piece = block[: min(_BLOCK, count - start)] * np.float32(1.0 + number / 64)
        data[start : start + _BLOCK] = piece.astype(data.dtype)
    return data


def _operands(program: RowProgram, data: Any, columns: int) -> list[Any]:
    """Return matrices of `columns` columns that share the memory of `data`, then vectors from its beginning.

    Each matrix is aligned as an allocation of its own is.
    """
    apart = data.size // program.matrices // _ALIGNED * _ALIGNED
    rows = max(1, apart // columns)
    matrices = [data[i * apart :][: rows * columns].reshape(rows, columns) for i in range(program.matrices)]
    return matrices + [data[i * columns : (i + 1) * columns].copy() for i in range(program.vectors)]


def _factories(
    lab: Lab, program: RowProgram, operands: list[Any], data: Any, bytes_moved: int
) -> dict[str, Callable[[], Rival]]:
    """Return the rivals of a program, and a copy of as much of `data` as moves as many bytes."""
    x = operands[0]
    every = spread(x.shape[0], _CHECKED // x.shape[1])
    checked = [lab.as_double(m[::every]) for m in operands[: program.matrices]]
    vectors = [lab.as_double(v) for v in operands[program.matrices :]]
    expected = program.written(lab.special, *checked, *vectors)
    shape = x.shape[:1] if program.reduces else x.shape
    computation = Computation(lab, [expected], shape, dtypes.name_of(x.dtype), every)

    def torch(rival: str) -> Rival:
        function = functools.partial(program.torch, lab.need_torch().F)
        return computation.by_torch(rival, function, *operands)

    return {
        OURS: lambda: computation.by_ours(program.fused, *operands),
        EAGER: lambda: torch(EAGER),
        COMPILED: lambda: torch(COMPILED),
        "device copy": lambda: device_copy(lab, data, bytes_moved),
    }


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run every dtype, row length and program."""
    for dtype in options.dtypes:
        data = draw(lab, dtype, options.bytes // dtypes.ITEMSIZE[dtype], options.seed)
        for columns in options.lengths:
            for name in options.programs:
                lab.release()
                program = PROGRAMS[name]
                operands = _operands(program, data, columns)
                rows = operands[0].shape[0]
                moved = program.passes * int(operands[0].nbytes)
                case = Case(f"{name} {dtype}", f"{rows} x {columns}", (rows, columns), dtype, moved)
                rivals = _factories(lab, program, operands, data, moved)
                yield run(lab, case, rivals, ("gpu_evicted",), options.budget)
        del data, operands


def report_lines(report: Report) -> list[str]:
    """Write a table for each operation and dtype, a row for each length."""
    lines = _HOW.split("\n")
    for group, cases in report.groups().items():
        notes: list[str] = []
        length = Column("columns", lambda case: str(case.shape[1]))
        error = Column("error", lambda case: case.value(OURS, "error"), scientific)
        columns = [length, *rival_columns(cases, "GB/s", notes), error]
        lines += [f"## {group}", "", *table(columns, cases, max), *list_notes(notes)]
    return lines
