"""16-bit matrix products with a bias added before they are rounded: the only place that calls cuBLASLt.

`cublasGemmEx` cannot add a vector to each row. `cublasLtMatmul` can, at the product's own speed, and takes cuBLAS's
handles. Types and functions are those of NVIDIA's header cublasLt.h.
"""

from __future__ import annotations

import ctypes
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
_ITEMSIZE = 2  # bytes of an element of any operand
_MOST_DESCRIPTORS = 16  # that are kept
_MOST_ALIGNED = 256  # bytes of an alignment that make a difference

_ALPHA, _BETA = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
_NO_BYTES = ctypes.c_size_t(0)


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t: an algorithm, and what it takes."""

    _fields_ = (
        ("words", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Object:
    """A descriptor, a layout or a preference of cuBLASLt: destroyed with this object."""

    def __init__(self, library: Any, kind: str, *arguments: Any):
        self._library, self._kind, self.pointer = library, kind, ctypes.c_void_p()
        name = f"cublasLt{kind}Create"
        check(name, getattr(library, name)(ctypes.byref(self.pointer), *arguments))
        weakref.finalize(self, getattr(library, f"cublasLt{kind}Destroy"), self.pointer)

    def set(self, attribute: int, value: Any) -> None:
        """Set an attribute."""
        name = f"cublasLt{self._kind}SetAttribute"
        size = ctypes.c_size_t(ctypes.sizeof(value))
        function = getattr(self._library, name)
        check(name, function(self.pointer, ctypes.c_int(attribute), ctypes.byref(value), size))


class BiasedProduct:
    """A row-major product C = A B + bias, for operands of fixed shapes, strides and dtype.

    Calls may come from several threads, and from a finalizer within a call.

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

    Raises
    ------
    EngineError
        cuBLASLt has no algorithm for them.
    """

    def __init__(self, a: Operand, b: Operand, dtype: str, library: Any, handle: Callable[[], int]):
        self._library, self._handle, kind = library, handle, TYPES[dtype]
        # cuBLAS is column-major: it computes C' = B' A', and takes B first.
        (self._op_a, ld_a), (self._op_b, ld_b) = a.blas_layout(), b.blas_layout()
        m, k, n = a.rows, a.cols, b.cols
        self._b = self._layout(kind, (n, k) if self._op_b == NORMAL else (k, n), ld_b)
        self._a = self._layout(kind, (k, m) if self._op_a == NORMAL else (m, k), ld_a)
        self._c = self._layout(kind, (n, m), n)
        self._descriptors: dict[int, _Object] = {}  # by the address of the bias; never changed once they are here
        # By the alignment of all addresses, in bytes. That for any addresses is asked for here, where PyTorch can still
        # compute in our place if there is none; nothing is read at the address of a bias.
        self._algorithms = {_ITEMSIZE: self._choose(ctypes.c_void_p(handle()), self._describe(_ITEMSIZE), _ITEMSIZE)}

    def __call__(self, a: int, b: int, bias: int, c: int, stream: Any) -> None:
        """Launch the product of matrices at these addresses.

        Raises
        ------
        EngineError
            cuBLASLt refuses it.
        """
        addresses = a | b | bias | c  # whose lowest bit is the alignment that all of them have
        alignment = min(addresses & -addresses, _MOST_ALIGNED)
        pointer, handle = ctypes.c_void_p, ctypes.c_void_p(self._handle())
        descriptor = self._descriptors.get(bias)
        if descriptor is None:
            descriptor = self._describe(bias)
            if len(self._descriptors) >= _MOST_DESCRIPTORS:
                self._descriptors = {}
            self._descriptors[bias] = descriptor
        algorithm = self._algorithms.get(alignment)
        if algorithm is None:
            algorithm = self._algorithms[alignment] = self._choose(handle, descriptor, alignment)
        first, second, result = self._b.pointer, self._a.pointer, self._c.pointer
        status = self._library.cublasLtMatmul(
            *(handle, descriptor.pointer, _ALPHA, pointer(b), first, pointer(a), second, _BETA),
            *(pointer(c), result, pointer(c), result, ctypes.byref(algorithm), None, _NO_BYTES, pointer(stream)),
        )
        check("cublasLtMatmul", status)

    def _choose(self, handle: ctypes.c_void_p, descriptor: _Object, alignment: int) -> _Algorithm:
        """Ask for the algorithm that should be the fastest for an alignment; preferences begin without a workspace."""
        preference, algorithm, count = _Object(self._library, "MatmulPreference"), _Algorithm(), ctypes.c_int()
        for attribute, value in ((_REDUCTIONS, _NO_SPLIT_SUMS), *((attribute, alignment) for attribute in _ALIGNMENTS)):
            preference.set(attribute, ctypes.c_uint32(value))
        first, second, result = self._b.pointer, self._a.pointer, self._c.pointer
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            *(handle, descriptor.pointer, first, second, result, result, preference.pointer),
            *(ctypes.c_int(1), ctypes.byref(algorithm), ctypes.byref(count)),
        )
        check("cublasLtMatmulAlgoGetHeuristic", status)
        check("cublasLtMatmulAlgoGetHeuristic", algorithm.status)
        if count.value != 1:
            raise EngineError("cublasLtMatmulAlgoGetHeuristic found no algorithm for a product with a bias")
        return algorithm

    def _describe(self, bias: int) -> _Object:
        """Create the descriptor of the product with the bias at an address."""
        descriptor = _Object(self._library, "MatmulDesc", ctypes.c_int(COMPUTE_32F), ctypes.c_int(_FLOAT32))
        values = ((_TRANSPOSE_FIRST, self._op_b), (_TRANSPOSE_SECOND, self._op_a), (_EPILOGUE, _WITH_BIAS))
        for attribute, value in values:
            descriptor.set(attribute, ctypes.c_int(value))
        descriptor.set(_BIAS_POINTER, ctypes.c_void_p(bias))
        return descriptor

    def _layout(self, kind: int, shape: tuple[int, int], leading: int) -> _Object:
        """Create the layout of a column-major matrix."""
        sizes = (*map(ctypes.c_uint64, shape), ctypes.c_int64(leading))
        return _Object(self._library, "MatrixLayout", ctypes.c_int(kind), *sizes)
