"""Matrix products: the only place that calls cuBLAS.

CuPy's binding of `cublasGemmEx` is called rather than `cupy.matmul`: it writes float32 results of 16-bit operands,
takes the precision a call at a time, and costs a few microseconds less of the host's time. That binding refuses to work
while a CUDA graph is captured; then the same function of the same library, with the same handle, is called by ctypes.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import EngineError

# cudaDataType_t and cublasComputeType_t
_TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
_COMPUTE_32F, _COMPUTE_64F = 68, 70
_COMPUTE_FLOAT32 = {"tf32": 77, "medium": 75}  # 32F_FAST_TF32, 32F_FAST_16BF; the others sum exact products
_NORMAL, _TRANSPOSED = 0, 1
_DEFAULT_ALGORITHM = -1
# A math mode: partial sums stay in float32, where cuBLAS would else keep them in the 16-bit type of the result.
_NO_REDUCED_PRECISION_REDUCTION = 16

_ONE32, _ZERO32 = np.ones(1, np.float32), np.zeros(1, np.float32)
_ONE64, _ZERO64 = np.ones(1, np.float64), np.zeros(1, np.float64)


@dataclass(frozen=True)
class Operand:
    """How a matrix lies in memory: strides in elements from row to row and from column to column."""

    rows: int
    cols: int
    row_stride: int
    col_stride: int

    def for_blas(self) -> tuple[int, int]:
        """(operation, leading dimension) that make cuBLAS, which counts by columns, see this matrix transposed."""
        by_rows = self.col_stride == 1 or self.cols <= 1
        if by_rows and (self.rows <= 1 or self.row_stride >= self.cols):
            return _NORMAL, max(self.row_stride if self.rows > 1 else self.cols, self.cols, 1)
        return _TRANSPOSED, max(self.col_stride if self.cols > 1 else self.rows, self.rows, 1)


class Gemm:
    """One product C = A B, row-major, made ready for operands of fixed shapes, strides and dtypes.

    Parameters
    ----------
    a, b : Operand
        (M, K) and (K, N).
    dtype : str
        Of both operands.
    out_dtype : str
        Of C, contiguous (M, N): float32 or that of the operands.
    precision : str
        For float32 operands, one of `options.PRECISIONS`.
    """

    def __init__(self, a: Operand, b: Operand, dtype: str, out_dtype: str, precision: str):
        from cupy import cuda

        self._gemm, self._handle = cuda.cublas.gemmEx, cuda.device.get_cublas_handle
        self._mode, self._set_mode = cuda.cublas.getMathMode, cuda.cublas.setMathMode
        self._clear, self._stream = cuda.runtime.memsetAsync, cuda.get_current_stream
        self.m, self.k, self.n = a.rows, a.cols, b.cols
        self._out_bytes = self.m * self.n * {"float64": 8, "float32": 4}.get(out_dtype, 2)
        (self._op_a, self._ld_a), (self._op_b, self._ld_b) = a.for_blas(), b.for_blas()
        self._type, self._out_type = _TYPES[dtype], _TYPES[out_dtype]
        self._narrow = out_dtype in ("float16", "bfloat16")
        if dtype == "float64":
            self._compute = _COMPUTE_64F
            self._alpha, self._beta = _ONE64.ctypes.data, _ZERO64.ctypes.data
        else:
            self._compute = _COMPUTE_FLOAT32.get(precision, _COMPUTE_32F) if dtype == "float32" else _COMPUTE_32F
            self._alpha, self._beta = _ONE32.ctypes.data, _ZERO32.ctypes.data

    def __call__(self, a: int, b: int, c: int) -> None:
        """Launch on CuPy's current stream; the arguments are device addresses."""
        if self.m == 0 or self.n == 0:
            return
        if self.k == 0:
            self._clear(c, 0, self._out_bytes, self._stream().ptr)
            return
        handle = self._handle()
        if not self._narrow:
            self._launch(handle, a, b, c)
            return
        mode = self._mode(handle)
        self._set_mode(handle, mode | _NO_REDUCED_PRECISION_REDUCTION)
        try:
            self._launch(handle, a, b, c)
        finally:
            self._set_mode(handle, mode)

    def _launch(self, handle: int, a: int, b: int, c: int) -> None:
        arguments = self._arguments(a, b, c)
        try:
            self._gemm(handle, *arguments)
        except NotImplementedError:  # CuPy's answer while a graph is captured
            launch_while_capturing(handle, self._stream().ptr, arguments)

    def _arguments(self, a: int, b: int, c: int) -> tuple[int, ...]:
        return (
            self._op_b,
            self._op_a,
            self.n,
            self.m,
            self.k,
            self._alpha,
            b,
            self._type,
            self._ld_b,
            a,
            self._type,
            self._ld_a,
            self._beta,
            c,
            self._out_type,
            self.n,
            self._compute,
            _DEFAULT_ALGORITHM,
        )


# While a graph is captured ------------------------------------------------------------------------------------------


def launch_while_capturing(handle: int, stream: int, arguments: tuple[int, ...]) -> None:
    """cublasGemmEx on a stream that captures.

    Raises
    ------
    EngineError
        cuBLAS refuses, or its library cannot be found.
    """
    library = _library()
    # Setting the stream gives the handle its own workspace back, which outlives every graph.
    _check("cublasSetStream", library.cublasSetStream_v2(handle, stream))
    _check("cublasGemmEx", library.cublasGemmEx(handle, *arguments))


def _check(function: str, status: int) -> None:
    if status:
        raise EngineError(f"{function} failed with status {status} while a CUDA graph was captured")


@lru_cache(maxsize=1)
def _library() -> Any:
    """The cuBLAS that CuPy has loaded."""
    from cupy import cuda

    major = cuda.cublas.getVersion(cuda.device.get_cublas_handle()) // 10000
    name = f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise EngineError(
            f"a product cannot be captured in a CUDA graph: CuPy's binding refuses, and {name}, which could be "
            f"called directly, was not found ({error}); make the product outside of the graph"
        ) from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.cublasSetStream_v2.argtypes = [pointer, pointer]
    library.cublasGemmEx.argtypes = [
        *(pointer, number, number, number, number, number),
        *(pointer, pointer, number, number, pointer, number, number),
        *(pointer, pointer, number, number, number, number),
    ]
    return library
