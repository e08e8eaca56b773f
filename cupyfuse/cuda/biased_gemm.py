"""16-bit matrix products with a bias added before they are rounded: the only place that calls cuBLASLt.

`cublasGemmEx` cannot add a vector to each row. `cublasLtMatmul` can, at the product's own speed, and takes cuBLAS's
handles. Types and functions are those of NVIDIA's header cublasLt.h.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import EngineError
from .gemm import COMPUTE_32F, NORMAL, TYPES, Operand, check

_FLOAT32 = TYPES["float32"]  # of the factors, and so of the sum with the bias
# cublasLtMatmulDescAttributes_t, cublasLtEpilogue_t
_TRANSPOSE_FIRST, _TRANSPOSE_SECOND, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_WITH_BIAS = 4
# cublasLtMatmulPreferenceAttributes_t, cublasLtReductionScheme_t
_REDUCTIONS, _ALIGNMENTS = 3, (5, 6, 7, 8)
# No sums are split: most algorithms that split them round each to the result's type before they add the bias, although
# they add the parts in float32 (docs/gemm.md).
_NO_SPLIT_SUMS = 0
_MOST_ALIGNED = 256  # bytes of an alignment that make a difference

_ALPHA, _BETA, _NO_BYTES = (
    ctypes.byref(ctypes.c_float(1.0)),
    ctypes.byref(ctypes.c_float(0.0)),
    ctypes.c_size_t(0),
)


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and what it takes."""

    _fields_ = (
        ("words", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class BiasedProduct:
    """A row-major product C = A B + bias, for operands of fixed shapes, strides and dtype.

    Parameters
    ----------
    a, b : Operand
        (M, K) and (K, N), without an empty side.
    dtype : str
        Of the operands, of the bias (N elements) and of C, contiguous (M, N): float16 or bfloat16. Sums are float32.
    library : ctypes.CDLL
        cuBLASLt, or a library that depends on it.
    handle : callable
        Returns the handle of cuBLASLt, or of cuBLAS.
    """

    def __init__(self, a: Operand, b: Operand, dtype: str, library: Any, handle: Callable[[], int]):
        self._library, self._handle, self._lock = library, handle, threading.Lock()
        (op_a, ld_a), (op_b, ld_b) = a.blas_layout(), b.blas_layout()
        m, k, n = a.rows, a.cols, b.cols
        kind = TYPES[dtype]
        # cuBLAS is column-major: it computes C' = B' A', and takes B first.
        self._description = self._create("MatmulDesc", ctypes.c_int(COMPUTE_32F), ctypes.c_int(_FLOAT32))
        for attribute, value in ((_TRANSPOSE_FIRST, op_b), (_TRANSPOSE_SECOND, op_a), (_EPILOGUE, _WITH_BIAS)):
            self._describe(attribute, ctypes.c_int(value))
        self._first = self._layout(kind, (n, k) if op_b == NORMAL else (k, n), ld_b)
        self._second = self._layout(kind, (k, m) if op_a == NORMAL else (m, k), ld_a)
        self._result = self._layout(kind, (n, m), n)
        self._algorithms: dict[int, _Algorithm] = {}  # by the alignment of all addresses, in bytes
        self._bias: int | None = None  # the address in the description

    def __call__(self, a: int, b: int, bias: int, c: int, stream: Any) -> None:
        """Launch the product of matrices at these addresses.

        Raises
        ------
        EngineError
            cuBLASLt refuses it, or has no algorithm for it.
        """
        addresses = a | b | bias | c  # whose lowest bit is the alignment that all of them have
        alignment = min(addresses & -addresses, _MOST_ALIGNED)
        pointer, handle = ctypes.c_void_p, ctypes.c_void_p(self._handle())
        with self._lock:  # other threads give the same description other biases
            if bias != self._bias:
                self._describe(_BIAS_POINTER, pointer(bias))
                self._bias = bias
            algorithm = self._algorithms.get(alignment)
            if algorithm is None:
                algorithm = self._algorithms[alignment] = self._choose(handle, alignment)
            result = pointer(c)
            status = self._library.cublasLtMatmul(
                *(handle, self._description, _ALPHA, pointer(b), self._first, pointer(a), self._second, _BETA),
                *(result, self._result, result, self._result, ctypes.byref(algorithm)),
                *(None, _NO_BYTES, pointer(stream)),
            )
        check("cublasLtMatmul", status)

    def _choose(self, handle: ctypes.c_void_p, alignment: int) -> _Algorithm:
        """Ask for the algorithm that should be the fastest for an alignment; preferences begin without a workspace."""
        preference, algorithm, count = self._create("MatmulPreference"), _Algorithm(), ctypes.c_int()
        for attribute, value in ((_REDUCTIONS, _NO_SPLIT_SUMS), *((attribute, alignment) for attribute in _ALIGNMENTS)):
            self._set("MatmulPreference", preference, attribute, ctypes.c_uint32(value))
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            *(handle, self._description, self._first, self._second, self._result, self._result, preference),
            *(ctypes.c_int(1), ctypes.byref(algorithm), ctypes.byref(count)),
        )
        check("cublasLtMatmulAlgoGetHeuristic", status)
        check("cublasLtMatmulAlgoGetHeuristic", algorithm.status)
        if count.value != 1:
            raise EngineError("cublasLtMatmulAlgoGetHeuristic found no algorithm for a product with a bias")
        return algorithm

    def _layout(self, kind: int, shape: tuple[int, int], leading: int) -> ctypes.c_void_p:
        """Create the layout of a column-major matrix."""
        sizes = (*map(ctypes.c_uint64, shape), ctypes.c_int64(leading))
        return self._create("MatrixLayout", ctypes.c_int(kind), *sizes)

    def _create(self, kind: str, *arguments: Any) -> ctypes.c_void_p:
        """Create an object of the library's, which is destroyed with this one."""
        made = ctypes.c_void_p()
        check(f"cublasLt{kind}Create", getattr(self._library, f"cublasLt{kind}Create")(ctypes.byref(made), *arguments))
        weakref.finalize(self, getattr(self._library, f"cublasLt{kind}Destroy"), made)
        return made

    def _describe(self, attribute: int, value: Any) -> None:
        """Set an attribute of the product's description."""
        self._set("MatmulDesc", self._description, attribute, value)

    def _set(self, kind: str, target: ctypes.c_void_p, attribute: int, value: Any) -> None:
        """Set an attribute of an object of the library's."""
        name = f"cublasLt{kind}SetAttribute"
        size = ctypes.c_size_t(ctypes.sizeof(value))
        check(name, getattr(self._library, name)(target, ctypes.c_int(attribute), ctypes.byref(value), size))
