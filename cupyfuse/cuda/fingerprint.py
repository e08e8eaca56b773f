"""Fingerprints of matrices: detect on the device, in one launch, whether they changed since values were prepacked."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from .configure import Config
from .kernel import Kernel, translation_unit
from .launch import launcher
from .runtime import Runtime

THREADS = 256
BLOCKS = 4  # per multiprocessor, at most
STATE_BYTES = 64  # of each stream's state, and of the state that all share; zero-initialised
CHANGED_AT = 12  # offset of the flag in a state, in bytes
MOST_MATRICES = 64  # 56 bytes each, of the 4 KB of a kernel's arguments
_RUN = 32  # bytes, a memory sector
_RUNS_A_ROW, _RUNS = 8, 8192  # least runs that are read of a row, and of a matrix: up to 256 KB is read whole

Shape = tuple[int, int, int, int, int]  # rows, columns, strides in elements, bytes of an element


@lru_cache
def fingerprint_kernel(count: int) -> Kernel:
    """Return the kernel that hashes `count` matrices."""
    source = translation_unit(
        "fingerprint",
        f"struct Program {{ Sampled matrices[{count}]; u64 token; FingerprintState* state; FingerprintKept* kept; }};",
        "fingerprint_kernel",
        f"fingerprint<{THREADS}>(p.matrices, p.token, p.state, p.kept)",
        THREADS,
    )
    return Kernel("fingerprint_kernel", source, (), Config("fingerprint", THREADS, 1, 1))


class Fingerprint:
    """The check whether matrices of fixed shapes and strides have changed.

    Parameters
    ----------
    runtime : Runtime
    shapes : sequence of (rows, cols, row stride, column stride, itemsize)
        At most `MOST_MATRICES`; strides in elements.
    """

    def __init__(self, runtime: Runtime, shapes: Sequence[Shape]):
        self._members: list[int] = []  # of each matrix, as in `struct Sampled` of fingerprint.cu; 0 for its address
        pieces = 0
        for shape in shapes:
            rows, cols, row_stride, col_stride, itemsize = _by_rows(shape)
            places = _sampled_runs(rows, cols, itemsize)
            self._members += [0, row_stride * itemsize, col_stride * itemsize, rows, cols, itemsize, places]
            pieces += 2 * rows * places
        blocks = max(1, min(-(-pieces // THREADS), runtime.processors * BLOCKS))
        kernel = fingerprint_kernel(len(shapes))
        form = "Qqqqqqq" * len(shapes) + "QQQ"
        self._launch = launcher(runtime.function(kernel), (blocks, 1, 1), (THREADS, 1, 1), form)

    def __call__(self, matrices: Sequence[int], token: int, state: int, kept: int, stream: Any = None) -> None:
        """Launch, given the addresses of the matrices, of the stream's state and of the shared state."""
        members = self._members.copy()
        members[::7] = matrices
        members += (token, state, kept)
        self._launch(members, stream)


def _by_rows(shape: Shape) -> Shape:
    """Return the shape with the smaller stride along the rows, and broadcast axes of length one."""
    rows, cols, row_stride, col_stride, itemsize = shape
    rows, cols = (min(n, 1) if stride == 0 else n for n, stride in ((rows, row_stride), (cols, col_stride)))
    if rows > 1 and (cols <= 1 or abs(row_stride) < abs(col_stride)):
        rows, cols, row_stride, col_stride = cols, rows, col_stride, row_stride
    return rows, cols, row_stride, col_stride, itemsize


def _sampled_runs(rows: int, cols: int, itemsize: int) -> int:
    """Count the runs that are read of each row: all of a small matrix."""
    runs = -(-cols * itemsize // _RUN)
    return min(runs, max(_RUNS_A_ROW, -(-_RUNS // max(1, rows))))
