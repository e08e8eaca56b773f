"""Launches of products from fp16 halves: splitting, product, repair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..schedule.products import TILE_ROWS, tile_width
from .halves import (
    GEMM_THREADS,
    REPAIR_THREADS,
    SPLIT_THREADS,
    WARPS_A_TILE,
    gemm_kernel,
    inverse_at,
    repair_kernel,
    split_kernel,
)
from .kernel import struct_packer
from .runtime import Runtime


class Split:
    """The splitting of a (rows, cols) float32 matrix of unit column stride; called with its address and the halves'."""

    def __init__(self, runtime: Runtime, rows: int, cols: int, row_stride: int):
        kernel = split_kernel()
        self._function, self._shared = runtime.function(kernel), kernel.shared
        self._grid, self._block = (-(-rows // 8) * 8, 1, 1), (SPLIT_THREADS, 1, 1)
        self._pack, self._as_value = struct_packer("QqQQqq")
        self._shape, self._row_stride = (rows, cols), row_stride
        self._inverse = inverse_at(rows, cols)

    def __call__(self, matrix: int, halves: int, stream: Any = None) -> None:
        members = (matrix, self._row_stride, halves, halves + self._inverse, *self._shape)
        self._function(self._grid, self._block, (self._as_value(self._pack(*members)),), self._shared, stream)


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
        self._multiply, self._repair = runtime.function(multiply), runtime.function(repair)
        self._shared, self._repair_shared = multiply.shared, repair.shared
        tiles = -(-m // TILE_ROWS) * -(-n // width)
        self._width = width
        self.doubts = tiles * WARPS_A_TILE * 4
        self._grid, self._block = (min(tiles, runtime.processors), 1, 1), (GEMM_THREADS, 1, 1)
        self._repair_grid, self._repair_block = (runtime.processors, 1, 1), (REPAIR_THREADS, 1, 1)
        self._pack, self._as_value = struct_packer("QQQqqQQQq")
        self._repair_pack, self._repair_value = struct_packer("QqqQqQqqQqQqQq")
        self._shape, self._left, self._right = shape, left, right
        self._inverses = inverse_at(m, k), inverse_at(n, k)

    def __call__(
        self, halves: Sequence[int], operands: Sequence[int], target: int, doubts: int, stream: Any = None
    ) -> None:
        """Launch, with the addresses of the halves of A and of B, of A and B themselves, of C, of `doubts` bytes."""
        m, n, k = self._shape
        (a, b), (left, right) = halves, operands
        inverse_a, inverse_b = a + self._inverses[0], b + self._inverses[1]
        members = (a, b, target, m, n, inverse_a, inverse_b, doubts, k)
        arguments = (self._as_value(self._pack(*members)),)
        self._multiply(self._grid, self._block, arguments, self._shared, stream)
        repaired = (left, *self._left, inverse_a, m, right, *self._right, inverse_b, n, target, k, doubts, self._width)
        arguments = (self._repair_value(self._repair_pack(*repaired)),)
        self._repair(self._repair_grid, self._repair_block, arguments, self._repair_shared, stream)
