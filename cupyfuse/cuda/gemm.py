"""Matrix products: the only place that calls cuBLAS.

`cublasGemmEx`, unlike an array library's product, writes float32 results of 16-bit operands, takes the precision per
call, and costs the host a few microseconds less. A `Blas` has the handle and calls the function: `CupyBlas` with CuPy's
handle, `ForeignBlas` with that of another library.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from ..errors import EngineError
from ..ir.batches import Batches

# cudaDataType_t and cublasComputeType_t
_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
_COMPUTE_32F, _COMPUTE_64F = 68, 70
_COMPUTE_FLOAT32 = {"high": 77, "tf32": 77, "medium": 75}  # 32F_FAST_TF32, 32F_FAST_16BF; the others sum exact products
_NORMAL, _TRANSPOSED = 0, 1
_DEFAULT_ALGORITHM = -1
# Math modes. The second keeps partial sums in float32, not in the 16-bit type of the result.
_DEFAULT_MODE, _NO_REDUCED_PRECISION_REDUCTION = 0, 16

_ONE32, _ZERO32 = np.ones(1, np.float32), np.zeros(1, np.float32)
_ONE64, _ZERO64 = np.ones(1, np.float64), np.zeros(1, np.float64)


@dataclass(frozen=True)
class Operand:
    """The shape of a matrix and its strides in elements."""

    rows: int
    cols: int
    row_stride: int
    col_stride: int

    @property
    def transposed(self) -> Operand:
        return Operand(self.cols, self.rows, self.col_stride, self.row_stride)

    def blas_layout(self) -> tuple[int, int]:
        """Return (operation, leading dimension), with which column-major cuBLAS reads the transpose of this matrix."""
        row_major = self.col_stride == 1 or self.cols <= 1
        if row_major and (self.rows <= 1 or self.row_stride >= self.cols):
            return _NORMAL, max(self.row_stride if self.rows > 1 else self.cols, self.cols, 1)
        return _TRANSPOSED, max(self.col_stride if self.cols > 1 else self.rows, self.rows, 1)


@dataclass(frozen=True)
class BatchStrides:
    """The number of batches of a product, and the elements between their operands; 0 for a shared operand."""

    count: int
    left: int
    right: int


def batched_operands(batches: Batches) -> tuple[Operand, Operand, BatchStrides]:
    """Return the operands of the first batch, and the strides to those of the others."""
    operands, strides = [], []
    for which in (0, 1):
        _, rows, cols = batches.stored_shape(which)
        stored = Operand(rows, cols, cols, 1)
        operands.append(stored.transposed if batches.transposed[which] else stored)
        strides.append(0 if batches.shared[which] else rows * cols)
    return operands[0], operands[1], BatchStrides(batches.count, *strides)


class Blas(Protocol):
    """A cuBLAS handle and the way to call it. Streams are those of `Runtime.stream`."""

    def multiply(self, arguments: tuple[Any, ...], result_16_bit: bool, stream: Any) -> None:
        """Call cublasGemmEx with all arguments but the handle; `result_16_bit` tells whether the result has 16 bits."""

    def multiply_batches(self, arguments: tuple[Any, ...], result_16_bit: bool, stream: Any) -> None:
        """Call cublasGemmStridedBatchedEx in the same way."""

    def clear(self, address: int, nbytes: int, stream: Any) -> None:
        """Set memory to zeros."""


class Gemm:
    """A row-major product C = A B, for operands of fixed shapes, strides and dtypes.

    Parameters
    ----------
    a, b : Operand
        (M, K) and (K, N).
    dtype : str
        Of both operands.
    out_dtype : str
        Of C, contiguous (M, N): float32 or that of the operands.
    precision : str
        For float32 operands, one of `settings.PRECISIONS`.
    blas : Blas
    batch_strides : BatchStrides, optional
        For batched products; `a` and `b` are the operands of the first batch.
    accumulate : bool
        Add the product to C instead of overwriting it.
    """

    def __init__(
        self,
        a: Operand,
        b: Operand,
        dtype: str,
        out_dtype: str,
        precision: str,
        blas: Blas,
        batch_strides: BatchStrides | None = None,
        accumulate: bool = False,
    ):
        self._blas = blas
        self._multiply = blas.multiply if batch_strides is None else blas.multiply_batches
        self._accumulate = accumulate
        self.m, self.k, self.n = a.rows, a.cols, b.cols
        self._size = self.m * self.n * (1 if batch_strides is None else batch_strides.count)
        self._out_bytes = self._size * {"float64": 8, "float32": 4}.get(out_dtype, 2)
        (op_a, ld_a), (op_b, ld_b) = a.blas_layout(), b.blas_layout()
        kind, out_kind = _TYPES[dtype], _TYPES[out_dtype]
        self._result_16_bit = out_dtype in ("float16", "bfloat16")
        if dtype == "float64":
            compute = _COMPUTE_64F
            alpha, beta = _ONE64.ctypes.data, (_ONE64 if accumulate else _ZERO64).ctypes.data
        else:
            compute = _COMPUTE_FLOAT32.get(precision, _COMPUTE_32F) if dtype == "float32" else _COMPUTE_32F
            alpha, beta = _ONE32.ctypes.data, (_ONE32 if accumulate else _ZERO32).ctypes.data
        # cuBLAS is column-major: it computes C' = B' A'. The addresses go between these parts of its arguments.
        self._until_b = (op_b, op_a, self.n, self.m, self.k, alpha)
        self._until_a: tuple[int, ...] = (kind, ld_b)
        self._until_c: tuple[int, ...] = (kind, ld_a, beta)
        self._last: tuple[int, ...] = (out_kind, self.n, compute, _DEFAULT_ALGORITHM)
        if batch_strides is not None:
            self._until_a = (kind, ld_b, batch_strides.right)
            self._until_c = (kind, ld_a, batch_strides.left, beta)
            self._last = (out_kind, self.n, self.m * self.n, batch_strides.count, compute, _DEFAULT_ALGORITHM)

    def __call__(self, a: int, b: int, c: int, stream: Any = None) -> None:
        """Launch the product; `a`, `b` and `c` are device addresses."""
        if self._size == 0:
            return
        if self.k == 0:
            if not self._accumulate:
                self._blas.clear(c, self._out_bytes, stream)
            return
        arguments = (*self._until_b, b, *self._until_a, a, *self._until_c, c, *self._last)
        self._multiply(arguments, self._result_16_bit, stream)


class CupyBlas:
    """Call cuBLAS through CuPy's binding, with CuPy's handle and current stream.

    While a CUDA graph is captured the binding refuses, and the same function is called by ctypes.
    """

    def __init__(self) -> None:
        from cupy import cuda

        self._gemm, self._handle = cuda.cublas.gemmEx, cuda.device.get_cublas_handle
        self._batched_gemm = cuda.cublas.gemmStridedBatchedEx
        self._mode, self._set_mode = cuda.cublas.getMathMode, cuda.cublas.setMathMode
        self._clear, self._stream = cuda.runtime.memsetAsync, cuda.get_current_stream

    def multiply(self, arguments: tuple[Any, ...], result_16_bit: bool, stream: Any) -> None:
        self._call(self._gemm, "cublasGemmEx", arguments, result_16_bit)

    def multiply_batches(self, arguments: tuple[Any, ...], result_16_bit: bool, stream: Any) -> None:
        self._call(self._batched_gemm, "cublasGemmStridedBatchedEx", arguments, result_16_bit)

    def _call(self, function: Callable[..., Any], name: str, arguments: tuple[Any, ...], result_16_bit: bool) -> None:
        """Call a function of cuBLAS, whose partial sums are float32 also for 16-bit results."""
        handle = self._handle()
        if not result_16_bit:
            self._launch(function, name, handle, arguments)
            return
        mode = self._mode(handle)
        self._set_mode(handle, mode | _NO_REDUCED_PRECISION_REDUCTION)
        try:
            self._launch(function, name, handle, arguments)
        finally:
            self._set_mode(handle, mode)

    def clear(self, address: int, nbytes: int, stream: Any) -> None:
        self._clear(address, 0, nbytes, self._stream().ptr)

    def _launch(self, function: Callable[..., Any], name: str, handle: int, arguments: tuple[Any, ...]) -> None:
        """Call a function of cuBLAS by CuPy's binding, or by ctypes where that refuses."""
        try:
            function(handle, *arguments)
        except NotImplementedError:  # CuPy's answer while a graph is captured
            library = _cupy_cublas()
            # Setting the stream gives the handle its own workspace back, which outlives every graph.
            _check("cublasSetStream", library.cublasSetStream_v2(handle, self._stream().ptr))
            _check(name, getattr(library, name)(handle, *arguments))


class ForeignBlas:
    """Call cuBLAS by ctypes, with the handle of another library.

    That library sets the handle's stream, workspace and math mode whenever it returns it.

    Parameters
    ----------
    handle : callable
        Returns the handle, for the current stream.
    library : str
        The file of that library's cuBLAS, or of one that depends on it: a handle works only with the copy that made it.

    Raises
    ------
    EngineError
        cuBLAS is not found.
    """

    def __init__(self, handle: Callable[[], int], library: str):
        from cupy import cuda

        self._cublas, self._handle, self._clear = _load_cublas(library), handle, cuda.runtime.memsetAsync

    def multiply(self, arguments: tuple[Any, ...], result_16_bit: bool, stream: Any) -> None:
        self._call("cublasGemmEx", arguments, result_16_bit)

    def multiply_batches(self, arguments: tuple[Any, ...], result_16_bit: bool, stream: Any) -> None:
        self._call("cublasGemmStridedBatchedEx", arguments, result_16_bit)

    def _call(self, name: str, arguments: tuple[Any, ...], result_16_bit: bool) -> None:
        """Call a function of cuBLAS in full precision, whose partial sums are float32 also for 16-bit results."""
        handle = self._handle()
        # The mode may allow TF32. It need not be restored: the owner sets it whenever it returns the handle.
        self._cublas.cublasSetMathMode(handle, _NO_REDUCED_PRECISION_REDUCTION if result_16_bit else _DEFAULT_MODE)
        _check(name, getattr(self._cublas, name)(handle, *arguments))

    def clear(self, address: int, nbytes: int, stream: Any) -> None:
        self._clear(address, 0, nbytes, stream)


def _check(function: str, status: int) -> None:
    if status:
        raise EngineError(f"{function} failed with status {status}")


# The shared library --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _cupy_cublas() -> Any:
    """Load the cuBLAS that CuPy uses, to call it where CuPy's own binding refuses."""
    from cupy import cuda

    major = cuda.cublas.getVersion(cuda.device.get_cublas_handle()) // 10000
    try:
        return _load_cublas(library_name(major))
    except EngineError as error:
        raise EngineError(
            f"a product cannot be captured in a CUDA graph: CuPy's binding refuses, and {error}; compute the product "
            "outside of the graph"
        ) from error


def library_name(major: int | str) -> str:
    """Return the file name of cuBLAS for a major version of CUDA."""
    return f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}"


def _load_cublas(name: str) -> Any:
    """Load cuBLAS from its file, or from that of a library that depends on it, and declare the functions used."""
    pointer, number, stride = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    try:
        library = ctypes.CDLL(name)
        library.cublasSetStream_v2.argtypes = [pointer, pointer]
        library.cublasSetMathMode.argtypes = [pointer, number]
        library.cublasGemmEx.argtypes = [
            *(pointer, number, number, number, number, number),
            *(pointer, pointer, number, number, pointer, number, number),
            *(pointer, pointer, number, number, number, number),
        ]
        library.cublasGemmStridedBatchedEx.argtypes = [
            *(pointer, number, number, number, number, number),
            *(pointer, pointer, number, number, stride, pointer, number, number, stride),
            *(pointer, pointer, number, number, stride, number, number, number),
        ]
    except (OSError, AttributeError) as error:  # no such file, no such function
        raise EngineError(f"cuBLAS was not found: {error}") from error
    return library
