"""Launches of float32 products on fp16 tensor cores: split the operands, multiply, repair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..plan.schedule.split_tiles import TILE_ROWS, tile_width
from .gemm import Operand
from .launch import sequence
from .program import Program
from .runtime import Runtime
from .split import (
    FINISH_THREADS,
    GEMM_THREADS,
    REPAIR_THREADS,
    ROW_ROOM,
    WARPS_A_TILE,
    column_cluster,
    finish_kernel,
    holds_columns,
    inverse_at,
    padded,
    plain_program,
    product_kernels,
    row_team,
    split_columns_kernel,
    split_rows_kernel,
)
from .structs import Addresses, KernelCall, Launch, Struct, StructLaunch, integers, pointer

# Members follow the structs in `split.py`.

_ROUNDS = 4  # of blocks that fill the GPU: the most that a conditional split of rows starts


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
            team = row_team(cols)
            self.kernel = split_rows_kernel(conditional, parts, team)
            self._rows_of_block = self.kernel.config.threads // team
        else:
            cluster = column_cluster(rows, cols, parts, processors)
            self.kernel = split_columns_kernel(conditional, parts, cluster, holds_columns(cols, cluster, parts))
        self._inverse = inverse_at(rows, cols, parts)
        self._shape, self._stride = (rows, cols), strides[0 if self._by_rows else 1]
        self._processors = processors
        self._conditional = conditional

    def launch(self, runtime: Runtime, matrix: int, tiles: int, flag: int = -1) -> StructLaunch:
        """Load the kernel; the slots are those of the addresses of matrix, split and, if conditional, flag."""
        kernel, rows = self.kernel, self._shape[0]
        if self._by_rows:
            blocks = -(-rows // 8) * 8 // self._rows_of_block
            if self._conditional:
                # Mostly the flag is 0, and to start blocks is all the work. With fewer, which have more rows each, what
                # is split takes longer.
                blocks = min(blocks, self._processors * ROW_ROOM // kernel.config.threads * _ROUNDS)
        else:
            blocks = -(-rows // 32) * kernel.cluster
        call = KernelCall(runtime.function(kernel), (blocks, 1, 1), (kernel.config.threads, 1, 1), kernel.shared)
        struct = pointer(matrix) + integers(self._stride) + pointer(tiles) + pointer(tiles, self._inverse)
        struct += integers(*self._shape)
        return StructLaunch([call], struct + pointer(flag) if self._conditional else struct)


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

    def launch(
        self, runtime: Runtime, tiles: Sequence[int], operands: Sequence[Struct], workspace: int, arguments: Struct
    ) -> StructLaunch:
        """Load the kernels.

        The slots are those of the addresses of both splits and of the workspace; `operands` are pointers to A and B.
        `arguments` are those of the row program: of one that stores C a pointer to it and its row stride.
        """
        (m, n, k), (gemm, repair) = self._shape, self.kernels
        grid, block = (min(self._tiles, self._processors), 1, 1), (GEMM_THREADS, 1, 1)
        multiply = KernelCall(runtime.function(gemm), grid, block, gemm.shared)
        grid, block = (self._processors, 1, 1), (REPAIR_THREADS, 1, 1)
        recompute = KernelCall(runtime.function(repair), grid, block, repair.shared)
        (a, b), (x, y) = tiles, operands
        struct = (
            pointer(a) + pointer(b) + operand_members(x, self._left, a, m, k) + operand_members(y, self._right, b, n, k)
        )
        struct += integers(k) + pointer(workspace) + integers(self._width) + arguments + integers(m, n)
        return StructLaunch([multiply, recompute], struct)


def operand_members(
    matrix: Struct, strides: tuple[int, int], tiles: int, rows: int, cols: int, parts: int = 2
) -> Struct:
    """Return the members for an operand to which `matrix` points, and for the scales of its split in a slot."""
    return matrix + integers(*strides) + pointer(tiles, inverse_at(rows, cols, parts)) + integers(rows)


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

    def launch(
        self, runtime: Runtime, parts: Sequence[int], operands: Sequence[Struct], target: int, factors: Sequence[int]
    ) -> Launch:
        """Load the kernels: the fp16 product of two splits, and what then writes the factors that undo its scales.

        The slots are those of the addresses of both splits, of C, and of the three factors; `operands` are pointers to
        A and B.
        """
        (m, n, k), (a, b), (x, y) = self._shape, parts, operands
        depth = padded(k)
        a_parts, b_parts = Operand(m, depth, depth, 1), Operand(depth, n, 1, depth)
        product = runtime.product(a_parts, b_parts, "float16", "float32", "ieee")
        (kernel,) = self.kernels
        grid, block = (self._processors, 1, 1), (FINISH_THREADS, 1, 1)
        finish = KernelCall(runtime.function(kernel), grid, block, kernel.shared)
        struct = operand_members(x, self._left, a, m, k, parts=1) + operand_members(y, self._right, b, n, k, parts=1)
        struct += pointer(target) + integers(k)
        for factor in factors:
            struct += pointer(factor)

        def multiply(at: Addresses, stream: Any) -> None:
            product(at[a], at[b], at[target], stream)

        return sequence([multiply, StructLaunch([finish], struct)])
