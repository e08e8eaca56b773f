"""Fingerprints of matrices: one launch that tells, on the device, whether to prepare anew what depends on them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from .configure import Config
from .kernel import Kernel, translation_unit
from .launch import launcher
from .runtime import Runtime

THREADS = 256
BLOCKS = 4  # a multiprocessor, at most
STATE_BYTES = 64  # of one stream's state, and of what is kept for all: zeros at first
CHANGED_AT = 12  # the flag's place in a state, in bytes
MOST_MATRICES = 64  # 56 bytes each, of the 4 KB that a kernel's arguments may have
_RUN = 32  # bytes that are read together
_RUNS_A_ROW, _RUNS = 8, 8192  # of longer rows, at least; of a matrix that has as many: all of 256 KB

Shape = tuple[int, int, int, int, int]  # rows, columns, strides in elements, bytes of an element


@lru_cache
def fingerprint_kernel(count: int) -> Kernel:
    """The kernel for so many matrices."""
    source = translation_unit(
        "fingerprint",
        f"struct Program {{ Sampled matrices[{count}]; u64 token; FingerprintState* state; FingerprintKept* kept; }};",
        "fingerprint_kernel",
        f"fingerprint<{THREADS}>(p.matrices, p.token, p.state, p.kept)",
        THREADS,
    )
    return Kernel("fingerprint_kernel", source, (), Config("fingerprint", THREADS, 1, 1))


class Fingerprint:
    """The check of matrices of fixed shapes and strides.

    Parameters
    ----------
    runtime : Runtime
    shapes : sequence of (rows, cols, row stride, column stride, itemsize)
        At most `MOST_MATRICES`; strides in elements.
    """

    def __init__(self, runtime: Runtime, shapes: Sequence[Shape]):
        self._members: list[int] = []
        pieces = 0
        for shape in shapes:
            rows, cols, row_stride, col_stride, itemsize = _by_rows(shape)
            places = _places(rows, cols, itemsize)
            self._members += [0, row_stride * itemsize, col_stride * itemsize, rows, cols, itemsize, places]
            pieces += 2 * rows * places
        blocks = max(1, min(-(-pieces // THREADS), runtime.processors * BLOCKS))
        kernel = fingerprint_kernel(len(shapes))
        form = "Qqqqqqq" * len(shapes) + "QQQ"
        self._launch = launcher(runtime.function(kernel), (blocks, 1, 1), (THREADS, 1, 1), form)

    def __call__(self, matrices: Sequence[int], token: int, state: int, kept: int, stream: Any = None) -> None:
        """Launch, with the addresses of the matrices, of the stream's state and of what is kept."""
        members = self._members.copy()
        members[::7] = matrices
        members += (token, state, kept)
        self._launch(members, stream)


def _by_rows(shape: Shape) -> Shape:
    """The same elements with those that are neighbours in memory in rows, and none twice."""
    rows, cols, row_stride, col_stride, itemsize = shape
    rows, cols = (min(n, 1) if stride == 0 else n for n, stride in ((rows, row_stride), (cols, col_stride)))
    if rows > 1 and (cols <= 1 or abs(row_stride) < abs(col_stride)):
        rows, cols, row_stride, col_stride = cols, rows, col_stride, row_stride
    return rows, cols, row_stride, col_stride, itemsize


def _places(rows: int, cols: int, itemsize: int) -> int:
    """How many runs of each row are read: all of a small matrix."""
    runs = -(-cols * itemsize // _RUN)
    return min(runs, max(_RUNS_A_ROW, -(-_RUNS // max(1, rows))))
