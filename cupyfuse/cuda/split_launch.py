"""Launches of float32 products on fp16 tensor cores: split the operands, multiply, repair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..plan.schedule.products import TILE_ROWS, tile_width
from .gemm import Operand
from .launch import launcher
from .program import Program
from .runtime import Runtime
from .split import (
    FINISH_THREADS,
    GEMM_THREADS,
    REPAIR_THREADS,
    WARPS_A_TILE,
    column_cluster,
    finish_kernel,
    inverse_at,
    padded,
    plain_program,
    product_kernels,
    split_columns_kernel,
    split_rows_kernel,
)

# Formats follow the structs in `split.py`: "Q" for an address, "q" for an integer.


class Split:
    """The launch that splits a (rows, cols) float32 matrix.

    Parameters
    ----------
    rows, cols : int
    strides : tuple of int
        In elements, from row to row and from column to column; one of them is 1.
    parts : int
        2 for hi and lo, 1 for hi alone.
    conditional : bool
        Write nothing where a flag on the device is 0.
    processors : int
        Multiprocessors of the GPU.
    """

    def __init__(
        self,
        rows: int,
        cols: int,
        strides: tuple[int, int],
        parts: int = 2,
        conditional: bool = False,
        processors: int = 1,
    ):
        self._by_rows = strides[1] == 1 or cols <= 1
        if self._by_rows:
            self.kernel = split_rows_kernel(conditional, parts)
        else:
            self.kernel = split_columns_kernel(conditional, parts, column_cluster(rows, cols, parts, processors))
        self._inverse = inverse_at(rows, cols, parts)
        self._shape, self._stride = (rows, cols), strides[0 if self._by_rows else 1]
        self._form = "QqQQqq" + "Q" * conditional

    def load(self, runtime: Runtime) -> Callable[..., None]:
        """Load the kernel; call it with the addresses of the matrix, the split and, if conditional, the flag."""
        kernel, rows, stride = self.kernel, self._shape[0], self._stride
        blocks = -(-rows // 8) * 8 if self._by_rows else -(-rows // 32) * kernel.cluster
        block = (kernel.config.threads, 1, 1)
        run = launcher(runtime.function(kernel), (blocks, 1, 1), block, self._form, kernel.shared)
        inverse = self._inverse

        def launch(matrix: int, tiles: int, stream: Any = None, *flag: int) -> None:
            run((matrix, stride, tiles, tiles + inverse, *self._shape, *flag), stream)

        return launch


class SplitProduct:
    """The launches that compute C = A B' of float32 matrices from their hi/lo splits, and a row program of C.

    Parameters
    ----------
    shape : tuple of int
        Rows of A, rows of B, columns of both.
    left, right : tuple of int
        Strides of A and of B in elements, from row to row and from column to column.
    processors : int
        Multiprocessors of the GPU.
    program : Program, optional
        The row program; without one C is stored.
    vec : int, optional
        Elements per access of the row program, 1 or 2.

    Attributes
    ----------
    kernels : tuple of Kernel
    workspace : int
        Bytes of device memory for what is left to the repair.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        left: tuple[int, int],
        right: tuple[int, int],
        processors: int,
        program: Program | None = None,
        vec: int = 1,
    ):
        m, n, _ = shape
        self._width = tile_width(m, n, processors)
        self._tiles = -(-m // TILE_ROWS) * -(-n // self._width)
        self.kernels = product_kernels(program or plain_program((m, n)), self._width, vec)
        # For each warp's part of a tile a word, and a bit for each element.
        self.workspace = self._tiles * WARPS_A_TILE * 4 * (1 + 32 * -(-self._width // 64))
        self._shape, self._left, self._right, self._processors = shape, left, right, processors

    def load(self, runtime: Runtime, form: str = "Qq") -> Callable[..., None]:
        """Load the kernels.

        Call the result with the addresses of both splits, of A and B, and of the workspace, and the members of the row
        program's struct, whose format is `form`: of one that stores C its address and its row stride.
        """
        (m, n, k), width = self._shape, self._width
        (left_row, left_col), (right_row, right_col) = self._left, self._right
        gemm, repair = self.kernels
        form = f"QQQqqQqQqqQqqQq{form}qq"
        grid, block = (min(self._tiles, self._processors), 1, 1), (GEMM_THREADS, 1, 1)
        run_gemm = launcher(runtime.function(gemm), grid, block, form, gemm.shared)
        grid, block = (self._processors, 1, 1), (REPAIR_THREADS, 1, 1)
        run_repair = launcher(runtime.function(repair), grid, block, form, repair.shared)
        offset_a, offset_b = inverse_at(m, k), inverse_at(n, k)

        def launch(
            tiles: Sequence[int], operands: Sequence[int], workspace: int, arguments: Sequence[Any], stream: Any = None
        ) -> None:
            (a, b), (x, y) = tiles, operands
            first, second = (x, left_row, left_col, a + offset_a, m), (y, right_row, right_col, b + offset_b, n)
            members = (a, b, *first, *second, k, workspace, width, *arguments, m, n)
            run_gemm(members, stream)
            run_repair(members, stream)

        return launch


class RoundedProduct:
    """The launches that compute C = A B' of float32 matrices from splits in one part, by cuBLAS's fp16 product.

    Rows and columns of C have still to be multiplied by factors, see `split_finish.cu`. The parameters are those of
    `SplitProduct`.

    Attributes
    ----------
    kernels : tuple of Kernel
    """

    def __init__(self, shape: tuple[int, int, int], left: tuple[int, int], right: tuple[int, int], processors: int):
        self.kernels = (finish_kernel(),)
        self._shape, self._left, self._right, self._processors = shape, left, right, processors

    def load(self, runtime: Runtime) -> Callable[..., None]:
        """Load the kernels: the fp16 product of two splits, and what then writes the factors that undo its scales.

        Call the result with the addresses of both splits, of A and B, of C, and of the three factors to write."""
        (m, n, k), left, right = self._shape, self._left, self._right
        depth = padded(k)
        a_parts, b_parts = Operand(m, depth, depth, 1), Operand(depth, n, 1, depth)
        product = runtime.product(a_parts, b_parts, "float16", "float32", "ieee")
        (kernel,) = self.kernels
        grid, block = (self._processors, 1, 1), (FINISH_THREADS, 1, 1)
        finish = launcher(runtime.function(kernel), grid, block, "QqqQqQqqQqQqQQQ", kernel.shared)
        offset_a, offset_b = inverse_at(m, k, 1), inverse_at(n, k, 1)

        def launch(
            parts: Sequence[int],
            operands: Sequence[int],
            target: int,
            factor_targets: Sequence[int],
            stream: Any = None,
        ) -> None:
            (a, b), (x, y) = parts, operands
            product(a, b, target, stream)
            finish((x, *left, a + offset_a, m, y, *right, b + offset_b, n, target, k, *factor_targets), stream)

        return launch
