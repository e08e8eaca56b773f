"""Launches of products from fp16 halves: splitting, product, repair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan.schedule.products import TILE_ROWS, tile_width
from .launch import launcher
from .runtime import Runtime
from .split import (
    GEMM_THREADS,
    REPAIR_THREADS,
    WARPS_A_TILE,
    gemm_kernel,
    inverse_at,
    repair_kernel,
    split_columns_kernel,
    split_kernel,
)


class Split:
    """The splitting of a (rows, cols) float32 matrix.

    Parameters
    ----------
    runtime : Runtime
    rows, cols : int
    strides : tuple of int
        In elements, from row to row and from column to column; one of them is 1.
    conditional : bool
        Write nothing where a flag on the device is 0.
    """

    def __init__(self, runtime: Runtime, rows: int, cols: int, strides: tuple[int, int], conditional: bool = False):
        by_rows = strides[1] == 1 or cols <= 1
        kernel = split_kernel(conditional) if by_rows else split_columns_kernel(conditional)
        blocks = -(-rows // 8) * 8 if by_rows else -(-rows // 32)
        block = (kernel.config.threads, 1, 1)
        form = "QqQQqq" + "Q" * conditional
        self._launch = launcher(runtime.function(kernel), (blocks, 1, 1), block, form, kernel.shared)
        self._shape, self._stride = (rows, cols), strides[0 if by_rows else 1]
        self._inverse = inverse_at(rows, cols)

    def __call__(self, matrix: int, halves: int, stream: Any = None, *changed: int) -> None:
        """Launch, with the addresses of the matrix, of its halves and, if conditional, of the flag."""
        self._launch((matrix, self._stride, halves, halves + self._inverse, *self._shape, *changed), stream)


class SplitProduct:
    """C = A B' of float32 matrices from their halves.

    Parameters
    ----------
    runtime : Runtime
    shape : tuple of int
        Rows of A, rows of B, columns of both.
    left, right : tuple of int
        Strides of A and of B in elements, from row to row and from column to column.

    Attributes
    ----------
    doubts : int
        Bytes of memory that a call needs for its own use.
    """

    def __init__(self, runtime: Runtime, shape: tuple[int, int, int], left: tuple[int, int], right: tuple[int, int]):
        m, n, k = shape
        width = tile_width(m, n, runtime.processors)
        multiply, repair = gemm_kernel(width), repair_kernel()
        tiles = -(-m // TILE_ROWS) * -(-n // width)
        self._width = width
        self.doubts = tiles * WARPS_A_TILE * 4
        grid, block = (min(tiles, runtime.processors), 1, 1), (GEMM_THREADS, 1, 1)
        self._multiply = launcher(runtime.function(multiply), grid, block, "QQQqqQQQq", multiply.shared)
        grid, block = (runtime.processors, 1, 1), (REPAIR_THREADS, 1, 1)
        self._repair = launcher(runtime.function(repair), grid, block, "QqqQqQqqQqQqQq", repair.shared)
        self._shape, self._left, self._right = shape, left, right
        self._inverses = inverse_at(m, k), inverse_at(n, k)

    def __call__(
        self, halves: Sequence[int], operands: Sequence[int], target: int, doubts: int, stream: Any = None
    ) -> None:
        """Launch, with the addresses of the halves of A and of B, of A and B themselves, of C, of `doubts` bytes."""
        m, n, k = self._shape
        (a, b), (left, right) = halves, operands
        inverse_a, inverse_b = a + self._inverses[0], b + self._inverses[1]
        self._multiply((a, b, target, m, n, inverse_a, inverse_b, doubts, k), stream)
        repaired = (left, *self._left, inverse_a, m, right, *self._right, inverse_b, n, target, k, doubts, self._width)
        self._repair(repaired, stream)
