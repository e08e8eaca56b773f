"""Fingerprints: detect on the device, in one launch, whether matrices changed since values were prepacked from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from .config import Config
from .kernel import Kernel, translation_unit
from .launch import sequence
from .runtime import Runtime
from .structs import KernelCall, Struct, StructLaunch, integers, pointer

THREADS = 256
BLOCKS = 4  # per multiprocessor, at most; all find room at once
_MOST_BLOCKS = 2**16 - 1  # a state counts them in 16 bits
STATE_BYTES = 64  # of each stream's state, and of the one that all streams share; zeros at first
CHANGED_AT = 12  # byte offset of the flag in a stream's state
MOST_MATRICES = 64  # 56 bytes each, of the 4 KB of a kernel's arguments
_RUN_BYTES = 32  # a memory sector
_PIECES_A_RUN = 2  # of 16 bytes: one a thread
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
        BLOCKS,
    )
    return Kernel("fingerprint_kernel", source, (), Config("fingerprint", THREADS, 1, 1))


class Fingerprint:
    """The launch that checks whether matrices of fixed shapes and strides have changed.

    Parameters
    ----------
    runtime : Runtime
        Its device has to be current.
    shapes : sequence of (rows, cols, row stride, column stride, itemsize)
        At most `MOST_MATRICES`; strides in elements.
    """

    def __init__(self, runtime: Runtime, shapes: Sequence[Shape]):
        struct, pieces = Struct(), 0
        for slot, shape in enumerate(shapes):
            rows, cols, row_stride, col_stride, itemsize = _with_rows_along_memory(shape)
            runs = _sampled_runs(rows, cols, itemsize)
            # `struct Sampled` of fingerprint.cu
            struct += pointer(slot) + integers(row_stride * itemsize, col_stride * itemsize, rows, cols, itemsize, runs)
            pieces += _PIECES_A_RUN * rows * runs
        blocks = max(1, min(-(-pieces // THREADS), runtime.processors * BLOCKS, _MOST_BLOCKS))
        token, state, kept = (pointer(len(shapes) + k) for k in range(3))
        call = KernelCall(runtime.function(fingerprint_kernel(len(shapes))), (blocks, 1, 1), (THREADS, 1, 1))
        self._launch = sequence([StructLaunch([call], struct + token + state + kept)])

    def __call__(self, matrices: Sequence[int], token: int, state: int, kept: int, stream: Any = None) -> None:
        """Launch the check; it sets the flag of the stream's state.

        `token` counts the changes that the host knows of. All other arguments but the stream are addresses: of the
        matrices, of the stream's state and of the state `kept` for all streams.
        """
        self._launch([*matrices, token, state, kept], stream)


def _with_rows_along_memory(shape: Shape) -> Shape:
    """Exchange rows and columns where rows have the smaller stride, and give broadcast axes the length one."""
    rows, cols, row_stride, col_stride, itemsize = shape
    rows, cols = (min(n, 1) if stride == 0 else n for n, stride in ((rows, row_stride), (cols, col_stride)))
    if rows > 1 and (cols <= 1 or abs(row_stride) < abs(col_stride)):
        rows, cols, row_stride, col_stride = cols, rows, col_stride, row_stride
    return rows, cols, row_stride, col_stride, itemsize


def _sampled_runs(rows: int, cols: int, itemsize: int) -> int:
    """Count the runs of 32 bytes that are read of each row; of a small matrix all."""
    runs = -(-cols * itemsize // _RUN_BYTES)
    return min(runs, max(_RUNS_A_ROW, -(-_RUNS // max(1, rows))))
