"""The arguments of cuBLAS: a stand-in takes them as its reference manual defines them, and computes with NumPy."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from support import normal

from cupyfuse.cuda.gemm import BatchStrides, Gemm, Operand

_KINDS = {0: np.float32, 1: np.float64, 2: np.float16}  # cudaDataType_t


def _matrices(
    address: int, kind: int, operation: int, shape: tuple[int, int], leading: int, step: int, count: int
) -> np.ndarray[Any, Any]:
    """The operands op(A) of all batches, from column-major memory."""
    dtype = np.dtype(_KINDS[kind])
    rows, cols = shape if operation == 0 else shape[::-1]
    assert leading >= max(1, rows)
    extent = (count - 1) * step + (cols - 1) * leading + rows
    memory = np.frombuffer((ctypes.c_byte * (extent * dtype.itemsize)).from_address(address), dtype)
    strides = (step * dtype.itemsize, dtype.itemsize, leading * dtype.itemsize)
    found = np.lib.stride_tricks.as_strided(memory, (count, rows, cols), strides)
    return found if operation == 0 else found.swapaxes(1, 2)


class ColumnMajorBlas:
    """cublasGemmEx and cublasGemmStridedBatchedEx without their handle, on a CPU's memory."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def multiply(self, arguments: tuple[Any, ...], narrow: bool, stream: Any) -> None:
        self.calls.append("gemm")
        op_a, op_b, m, n, k, alpha, a, kind_a, lda, b, kind_b, ldb, beta, c, kind_c, ldc, compute, algorithm = arguments
        rest = (beta, c, kind_c, ldc, 0, 1, compute, algorithm)
        self._run((op_a, op_b, m, n, k, alpha, a, kind_a, lda, 0, b, kind_b, ldb, 0, *rest))

    def multiply_batches(self, arguments: tuple[Any, ...], narrow: bool, stream: Any) -> None:
        self.calls.append("batches")
        self._run(arguments)

    def _run(self, arguments: tuple[Any, ...]) -> None:
        op_a, op_b, m, n, k, alpha, a, kind_a, lda, step_a, b, kind_b, ldb, step_b, *rest = arguments
        beta, c, kind_c, ldc, step_c, count, compute, algorithm = rest
        scale = ctypes.c_double if compute == 70 else ctypes.c_float
        assert (scale.from_address(alpha).value, algorithm) == (1.0, -1)
        adds = scale.from_address(beta).value
        assert adds in (0.0, 1.0)
        left = _matrices(a, kind_a, op_a, (m, k), lda, step_a, count)
        right = _matrices(b, kind_b, op_b, (k, n), ldb, step_b, count)
        target = _matrices(c, kind_c, 0, (m, n), ldc, step_c, count)
        product = left.astype(np.float64) @ right.astype(np.float64)
        target[...] = product + target if adds else product  # as cuBLAS, which reads no result that it does not add to

    def clear(self, address: int, nbytes: int, stream: Any) -> None:
        self.calls.append("clear")
        ctypes.memset(address, 0, nbytes)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("shared", [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("sizes", [(3, 4, 5, 2), (1, 1, 5, 1), (2, 3, 1, 4), (4, 1, 3, 3)])
def test_batches(
    sizes: tuple[int, int, int, int],
    shared: tuple[bool, bool],
    turned: tuple[bool, bool],
    dtype: str,
    rng: np.random.Generator,
) -> None:
    count, m, k, n = sizes
    stacks, operands, steps = [], [], []
    for rows, cols, one, transposed in zip((m, k), (k, n), shared, turned, strict=True):
        memory = normal(rng, (1 if one else count, *((cols, rows) if transposed else (rows, cols))), dtype)
        operand = Operand(*memory.shape[1:], memory.shape[2], 1)
        operands.append(operand.transposed if transposed else operand)
        steps.append(0 if one else rows * cols)
        stacks.append(memory)
    blas, out = ColumnMajorBlas(), np.full((count, m, n), 9, dtype)
    gemm = Gemm(*operands, dtype, dtype, "highest", blas, BatchStrides(count, *steps))
    gemm(*(x.ctypes.data for x in (*stacks, out)))
    left, right = ((x.swapaxes(1, 2) if t else x).astype(np.float64) for x, t in zip(stacks, turned, strict=True))
    # The stand-in's sums of float64 may run in another order.
    np.testing.assert_allclose(out, (left @ right).astype(dtype), rtol=0, atol=1e-14)
    assert blas.calls == ["batches"]


@pytest.mark.parametrize("turned", [False, True])
def test_one_product(turned: bool, rng: np.random.Generator) -> None:
    a, b, out = normal(rng, (3, 4)), normal(rng, (5, 4) if turned else (4, 5)), np.empty((3, 5), np.float32)
    right = Operand(4, 5, 1, 4) if turned else Operand(4, 5, 5, 1)
    blas = ColumnMajorBlas()
    Gemm(Operand(3, 4, 4, 1), right, "float32", "float32", "highest", blas)(*(x.ctypes.data for x in (a, b, out)))
    np.testing.assert_array_equal(out, (a.astype(np.float64) @ (b.T if turned else b)).astype(np.float32))
    assert blas.calls == ["gemm"]


def test_empty_batches() -> None:
    blas = ColumnMajorBlas()
    out = np.full((2, 3, 4), 9.0)
    empty_sums = Operand(3, 0, 0, 1), Operand(0, 4, 4, 1)
    Gemm(*empty_sums, "float64", "float64", "highest", blas, BatchStrides(2, 0, 0))(0, 0, out.ctypes.data)
    assert blas.calls == ["clear"] and not out.any()
    no_batches = Operand(3, 2, 2, 1), Operand(2, 4, 4, 1)
    Gemm(*no_batches, "float64", "float64", "highest", blas, BatchStrides(0, 6, 8))(0, 0, 0)
    assert blas.calls == ["clear"]


@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float64", "float64"), ("float32", "float32"), ("float16", "float32")]
)
@pytest.mark.parametrize("depth", [4, 0])
def test_a_product_that_adds_to_its_result(depth: int, dtype: str, out_dtype: str, rng: np.random.Generator) -> None:
    """Of transposed operands, as gradients of weights are; a sum of no terms leaves the result as it is."""
    a, b = normal(rng, (depth, 3), dtype), normal(rng, (depth, 5), dtype)
    total = normal(rng, (3, 5), out_dtype)
    expected = total + a.T.astype(np.float64) @ b.astype(np.float64)
    blas = ColumnMajorBlas()
    left, right = Operand(3, depth, 1, 3), Operand(depth, 5, 5, 1)
    Gemm(left, right, dtype, out_dtype, "ieee", blas, accumulate=True)(a.ctypes.data, b.ctypes.data, total.ctypes.data)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert blas.calls == (["gemm"] if depth else [])
