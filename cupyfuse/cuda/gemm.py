"""Matrix products: with `biased_gemm`, the only place that calls cuBLAS.

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
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import EngineError
from ..ir.batches import Batches

# cudaDataType_t and cublasComputeType_t
TYPES = {"float16": 2, "bfloat16": 14, "float32": 0, "float64": 1}
COMPUTE_32F, _COMPUTE_64F = 68, 70
_COMPUTE_FLOAT32 = {"high": 77, "tf32": 77, "medium": 75}  # 32F_FAST_TF32, 32F_FAST_16BF; the others sum exact products
NORMAL, _TRANSPOSED = 0, 1
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
            return NORMAL, max(self.row_stride if self.rows > 1 else self.cols, self.cols, 1)
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


# (a, b, c, stream), with a bias (a, b, bias, c, stream): launches a row-major product of matrices at these addresses.
Multiply = Callable[..., None]


class Arguments(NamedTuple):
    """The arguments of cublasGemmEx or of cublasGemmStridedBatchedEx, but the handle and the three addresses.

    cuBLAS is column-major: it computes C' = B' A', and takes B first.

    Attributes
    ----------
    until_b, until_a, until_c, last : tuple of int
        What is before each address, and what is behind them.
    batched : bool
        Whether they are those of cublasGemmStridedBatchedEx.
    result_16_bit : bool
        Whether the result has 16 bits.
    """

    until_b: tuple[int, ...]
    until_a: tuple[int, ...]
    until_c: tuple[int, ...]
    last: tuple[int, ...]
    batched: bool
    result_16_bit: bool

    @property
    def function(self) -> str:
        return "cublasGemmStridedBatchedEx" if self.batched else "cublasGemmEx"


class Blas(Protocol):
    """A cuBLAS handle and the way to call it. Streams are those of `Runtime.stream`."""

    def product(self, arguments: Arguments) -> Multiply:
        """Prepare a product. Partial sums are float32 also for 16-bit results."""

    def clear(self, address: int, nbytes: int, stream: Any) -> None:
        """Set memory to zeros."""

    def light_library(self) -> tuple[Any, Callable[[], int]]:
        """Return cuBLASLt, and a function that returns a handle for it: cuBLAS's own."""


def gemm(
    a: Operand,
    b: Operand,
    dtype: str,
    out_dtype: str,
    precision: str,
    blas: Blas,
    batch_strides: BatchStrides | None = None,
    accumulate: bool = False,
) -> Multiply:
    """Prepare a row-major product C = A B, for operands of fixed shapes, strides and dtypes.

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

    Returns
    -------
    callable
        Launches the product, given the addresses of A, B and C, and the stream.
    """
    m, k, n = a.rows, a.cols, b.cols
    size = m * n * (1 if batch_strides is None else batch_strides.count)
    if size == 0 or (k == 0 and accumulate):
        return lambda a, b, c, stream=None: None
    if k == 0:
        nbytes = size * {"float64": 8, "float32": 4}.get(out_dtype, 2)
        return lambda a, b, c, stream=None: blas.clear(c, nbytes, stream)
    (op_a, ld_a), (op_b, ld_b) = a.blas_layout(), b.blas_layout()
    kind, out_kind = TYPES[dtype], TYPES[out_dtype]
    if dtype == "float64":
        compute = _COMPUTE_64F
        alpha, beta = _ONE64.ctypes.data, (_ONE64 if accumulate else _ZERO64).ctypes.data
    else:
        compute = _COMPUTE_FLOAT32.get(precision, COMPUTE_32F) if dtype == "float32" else COMPUTE_32F
        alpha, beta = _ONE32.ctypes.data, (_ONE32 if accumulate else _ZERO32).ctypes.data
    between_b: tuple[int, ...] = ()
    between_a: tuple[int, ...] = ()
    between_c: tuple[int, ...] = ()
    if batch_strides is not None:
        between_b, between_a, between_c = (batch_strides.right,), (batch_strides.left,), (m * n, batch_strides.count)
    return blas.product(
        Arguments(
            (op_b, op_a, n, m, k, alpha),
            (kind, ld_b, *between_b),
            (kind, ld_a, *between_a, beta),
            (out_kind, n, *between_c, compute, _DEFAULT_ALGORITHM),
            batched=batch_strides is not None,
            result_16_bit=out_dtype in ("float16", "bfloat16"),
        )
    )


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

    def product(self, arguments: Arguments) -> Multiply:
        until_b, until_a, until_c, last, batched, result_16_bit = arguments
        function, handle_of = self._batched_gemm if batched else self._gemm, self._handle

        def multiply(a: int, b: int, c: int, stream: Any = None) -> None:
            handle = handle_of()
            try:
                function(handle, *until_b, b, *until_a, a, *until_c, c, *last)
            except NotImplementedError:  # CuPy's answer while a graph is captured
                library = _cupy_cublas()
                # Setting the stream gives the handle its own workspace back, which outlives every graph.
                opaque = ctypes.c_void_p(handle)
                check("cublasSetStream", library.cublasSetStream_v2(opaque, ctypes.c_void_p(self._stream().ptr)))
                _by_ctypes(library, arguments)(opaque, a, b, c)

        def multiply_in_float32(a: int, b: int, c: int, stream: Any = None) -> None:
            handle = handle_of()
            mode = self._mode(handle)
            self._set_mode(handle, mode | _NO_REDUCED_PRECISION_REDUCTION)
            try:
                multiply(a, b, c)
            finally:
                self._set_mode(handle, mode)

        return multiply_in_float32 if result_16_bit else multiply

    def clear(self, address: int, nbytes: int, stream: Any) -> None:
        self._clear(address, 0, nbytes, self._stream().ptr)

    def light_library(self) -> tuple[Any, Callable[[], int]]:
        return _load_light(_cupy_library_name()), self._handle


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
        self._library = library

    def product(self, arguments: Arguments) -> Multiply:
        run, handle_of, set_mode = _by_ctypes(self._cublas, arguments), self._handle, self._cublas.cublasSetMathMode
        # The mode may allow TF32. It need not be restored: the owner sets it whenever it returns the handle.
        mode = _NO_REDUCED_PRECISION_REDUCTION if arguments.result_16_bit else _DEFAULT_MODE

        def multiply(a: int, b: int, c: int, stream: Any = None) -> None:
            handle = ctypes.c_void_p(handle_of())
            set_mode(handle, mode)
            run(handle, a, b, c)

        return multiply

    def clear(self, address: int, nbytes: int, stream: Any) -> None:
        self._clear(address, 0, nbytes, stream)

    def light_library(self) -> tuple[Any, Callable[[], int]]:
        return _load_light(self._library), self._handle


def check(function: str, status: int) -> None:
    if status:
        raise EngineError(f"{function} failed with status {status}")


# By ctypes -----------------------------------------------------------------------------------------------------------

# The types of `Arguments` by function: "i" for an int, "l" for 64 bits, "p" for a pointer.
_KINDS = {
    "cublasGemmEx": ("iiiiip", "ii", "iip", "iiii"),
    "cublasGemmStridedBatchedEx": ("iiiiip", "iil", "iilp", "iiliii"),
}
# ctypes passes a Python int as an int of C. With the types declared it would convert every argument in every call,
# which takes as long again.
_CONVERSIONS: dict[str, Callable[[int], Any]] = {"i": int, "l": ctypes.c_longlong, "p": ctypes.c_void_p}


def _by_ctypes(library: Any, arguments: Arguments) -> Callable[[ctypes.c_void_p, int, int, int], None]:
    """Return a function that calls cuBLAS with a handle and the addresses of A, B and C."""
    name = arguments.function
    function, address = getattr(library, name), ctypes.c_void_p
    until_b, until_a, until_c, last = (
        tuple(_CONVERSIONS[kind](value) for kind, value in zip(kinds, values, strict=True))
        for kinds, values in zip(_KINDS[name], arguments[:4], strict=True)
    )

    def call(handle: ctypes.c_void_p, a: int, b: int, c: int) -> None:
        status = function(handle, *until_b, address(b), *until_a, address(a), *until_c, address(c), *last)
        if status:
            check(name, status)

    return call


@lru_cache(maxsize=1)
def _cupy_cublas() -> Any:
    """Load the cuBLAS that CuPy uses, to call it where CuPy's own binding refuses."""
    try:
        return _load_cublas(_cupy_library_name())
    except EngineError as error:
        raise EngineError(
            f"a product cannot be captured in a CUDA graph: CuPy's binding refuses, and {error}; compute the product "
            "outside of the graph"
        ) from error


def _cupy_library_name() -> str:
    """Return the file name of the cuBLAS that CuPy uses."""
    from cupy import cuda

    return library_name(cuda.cublas.getVersion(cuda.device.get_cublas_handle()) // 10000)


def library_name(major: int | str) -> str:
    """Return the file name of cuBLAS for a major version of CUDA."""
    return f"cublas64_{major}.dll" if sys.platform == "win32" else f"libcublas.so.{major}"


def _load_cublas(name: str) -> Any:
    """Load cuBLAS from its file, or from that of a library that depends on it."""
    try:
        library = ctypes.CDLL(name)
        for function in ("cublasSetStream_v2", "cublasSetMathMode", *_KINDS):
            getattr(library, function).restype = ctypes.c_int
    except (OSError, AttributeError) as error:  # no such file, no such function
        raise EngineError(f"cuBLAS was not found: {error}") from error
    return library


def _load_light(cublas: str) -> Any:
    """Load cuBLASLt, on which cuBLAS depends, given the file of cuBLAS or of a library that depends on it."""
    name = cublas.replace("cublas64", "cublasLt64")  # Windows does not find functions of what a library depends on
    try:
        library = ctypes.CDLL(name)
        library.cublasLtMatmul.restype = ctypes.c_int
    except (OSError, AttributeError) as error:
        raise EngineError(f"cuBLASLt was not found: {error}") from error
    return library
