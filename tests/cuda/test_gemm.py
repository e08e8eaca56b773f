"""The arguments of cuBLAS: a stand-in takes them as its reference manual defines them, and computes with NumPy."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import normal

from cupyfuse.cuda import gemm as gemm_module
from cupyfuse.cuda.gemm import Arguments, BatchStrides, CupyBlas, ForeignBlas, Multiply, Operand, gemm
from cupyfuse.errors import EngineError

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

    def product(self, arguments: Arguments) -> Multiply:
        until_b, until_a, until_c, last, batched, _ = arguments

        def multiply(a: int, b: int, c: int, stream: Any = None) -> None:
            # The second operand comes first: that is row-major.
            self.run((*until_b, b, *until_a, a, *until_c, c, *last), batched)

        return multiply

    def run(self, arguments: tuple[Any, ...], batched: bool) -> None:
        """Call one of the functions with all arguments but the handle."""
        self.calls.append("batches" if batched else "gemm")
        if not batched:
            *first, beta, c, kind_c, ldc, compute, algorithm = arguments
            arguments = (*first[:9], 0, *first[9:], 0, beta, c, kind_c, ldc, 0, 1, compute, algorithm)
        self._compute(arguments)

    def _compute(self, arguments: tuple[Any, ...]) -> None:
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
    multiply = gemm(*operands, dtype, dtype, "highest", blas, BatchStrides(count, *steps))
    multiply(*(x.ctypes.data for x in (*stacks, out)))
    left, right = ((x.swapaxes(1, 2) if t else x).astype(np.float64) for x, t in zip(stacks, turned, strict=True))
    # The stand-in's sums of float64 may run in another order.
    np.testing.assert_allclose(out, (left @ right).astype(dtype), rtol=0, atol=1e-14)
    assert blas.calls == ["batches"]


@pytest.mark.parametrize("turned", [False, True])
def test_one_product(turned: bool, rng: np.random.Generator) -> None:
    a, b, out = normal(rng, (3, 4)), normal(rng, (5, 4) if turned else (4, 5)), np.empty((3, 5), np.float32)
    right = Operand(4, 5, 1, 4) if turned else Operand(4, 5, 5, 1)
    blas = ColumnMajorBlas()
    gemm(Operand(3, 4, 4, 1), right, "float32", "float32", "highest", blas)(*(x.ctypes.data for x in (a, b, out)))
    np.testing.assert_array_equal(out, (a.astype(np.float64) @ (b.T if turned else b)).astype(np.float32))
    assert blas.calls == ["gemm"]


def test_empty_batches() -> None:
    blas = ColumnMajorBlas()
    out = np.full((2, 3, 4), 9.0)
    empty_sums = Operand(3, 0, 0, 1), Operand(0, 4, 4, 1)
    gemm(*empty_sums, "float64", "float64", "highest", blas, BatchStrides(2, 0, 0))(0, 0, out.ctypes.data)
    assert blas.calls == ["clear"] and not out.any()
    no_batches = Operand(3, 2, 2, 1), Operand(2, 4, 4, 1)
    gemm(*no_batches, "float64", "float64", "highest", blas, BatchStrides(0, 6, 8))(0, 0, 0)
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
    gemm(left, right, dtype, out_dtype, "ieee", blas, accumulate=True)(a.ctypes.data, b.ctypes.data, total.ctypes.data)
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert blas.calls == (["gemm"] if depth else [])


# By ctypes and by CuPy ----------------------------------------------------------------------------------------------

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
_GEMM = [*[_INT] * 5, _POINTER, _POINTER, _INT, _INT, _POINTER, _INT, _INT, _POINTER, _POINTER, *[_INT] * 4]
_BATCHES = [
    *(*[_INT] * 5, _POINTER, _POINTER, _INT, _INT, _LONG, _POINTER, _INT, _INT, _LONG),
    *(_POINTER, _POINTER, _INT, _INT, _LONG, _INT, _INT, _INT),
]
HANDLE = 0x7F00_0000_4D20


class Library:
    """cuBLAS as a loaded library: functions of C, whose arguments have the types of its reference manual."""

    def __init__(self) -> None:
        self.blas, self.modes, self.streams, self.status = ColumnMajorBlas(), [], [], 0
        self._callbacks: list[Any] = []
        self.cublasGemmEx = self._function(_GEMM, lambda *arguments: self.blas.run(arguments, batched=False))
        self.cublasGemmStridedBatchedEx = self._function(_BATCHES, lambda *arguments: self.blas.run(arguments, True))
        self.cublasSetMathMode = self._function([_INT], self.modes.append)
        self.cublasSetStream_v2 = self._function([_POINTER], self.streams.append)

    def _function(self, types: list[Any], run: Any) -> Any:
        def called(handle: int, *arguments: Any) -> int:
            if handle != HANDLE:
                return 99
            run(*arguments)
            return self.status

        callback = ctypes.CFUNCTYPE(_INT, _POINTER, *types)(called)
        self._callbacks.append(callback)
        return ctypes.CFUNCTYPE(_INT)(ctypes.cast(callback, _POINTER).value)  # of undeclared arguments, as once loaded


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    cuda = SimpleNamespace(
        runtime=SimpleNamespace(memsetAsync=None),
        device=SimpleNamespace(get_cublas_handle=lambda: HANDLE),
        get_current_stream=lambda: SimpleNamespace(ptr=5),
        cublas=SimpleNamespace(
            gemmEx=None, gemmStridedBatchedEx=None, getMathMode=lambda handle: 3, setMathMode=lambda *_: None
        ),
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gemm_module, "_load_cublas", lambda name: found)
    monkeypatch.setattr(gemm_module, "_cupy_cublas", lambda: found)
    return found


def check_products(blas: Any, rng: np.random.Generator, dtype: str) -> None:
    """One product, and a batch of two, of transposed and plain operands."""
    a, b, out = normal(rng, (3, 4), dtype), normal(rng, (5, 4), dtype), np.empty((3, 5), dtype)
    gemm(Operand(3, 4, 4, 1), Operand(4, 5, 1, 4), dtype, dtype, "ieee", blas)(*(x.ctypes.data for x in (a, b, out)))
    np.testing.assert_array_equal(out, (a.astype(np.float64) @ b.T).astype(dtype))
    a, b, out = normal(rng, (2, 3, 4), dtype), normal(rng, (2, 4, 5), dtype), np.empty((2, 3, 5), dtype)
    operands, strides = (Operand(3, 4, 4, 1), Operand(4, 5, 5, 1)), BatchStrides(2, 12, 20)
    gemm(*operands, dtype, dtype, "ieee", blas, strides)(*(x.ctypes.data for x in (a, b, out)))
    np.testing.assert_array_equal(out, (a.astype(np.float64) @ b).astype(dtype))


@pytest.mark.parametrize(("dtype", "mode"), [("float32", 0), ("float16", 16)])
def test_the_cublas_of_another_library(library: Library, dtype: str, mode: int, rng: np.random.Generator) -> None:
    blas = ForeignBlas(lambda: HANDLE, "the file")
    check_products(blas, rng, dtype)
    assert library.blas.calls == ["gemm", "batches"] and library.modes == [mode] * 2
    library.status = 7
    with pytest.raises(EngineError, match="cublasGemmEx failed with status 7"):
        check_products(blas, rng, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("captures", [False, True])
def test_the_cublas_of_cupy(
    library: Library, captures: bool, dtype: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its binding; by ctypes while a graph is captured, where that refuses. The mode is put back in any case."""
    cublas, modes = sys.modules["cupy"].cuda.cublas, []

    def binding(batched: bool) -> Any:
        def call(handle: int, *arguments: Any) -> None:
            if captures:
                raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
            assert handle == HANDLE
            library.blas.run(arguments, batched)

        return call

    monkeypatch.setattr(cublas, "gemmEx", binding(batched=False))
    monkeypatch.setattr(cublas, "gemmStridedBatchedEx", binding(batched=True))
    monkeypatch.setattr(cublas, "setMathMode", lambda handle, mode: modes.append(mode))
    check_products(CupyBlas(), rng, dtype)
    assert library.blas.calls == ["gemm", "batches"]
    assert modes == ([3 | 16, 3] * 2 if dtype == "float16" else [])
    assert library.streams == ([5, 5] if captures else [])
