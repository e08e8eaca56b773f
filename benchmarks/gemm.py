"""Matrix products: float32 ones in every precision, over families of data and over K; 16-bit ones (`half.py`)."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cupyfuse as cf
from cupyfuse import dtypes
from cupyfuse.settings import PRECISIONS

from . import families, half, heads
from . import options as types
from .device import Call
from .lab import Lab, Rival, run
from .report import Case

FIGURES = ("gpu_evicted", "gpu_back_to_back")
DEFAULTS = {
    "budget": (0.15, 0.02),  # GPU seconds for each rival and figure
    "half_size": (16384, 2048),
    "depths": ((1, 2, 3, 7, 16, 64, 255, 1024, 4096, 8192, 65536), (1, 3, 64, 255, 4096, 65536)),
}
BASE = "cuBLAS float32"
PARTS = ("float32", "16-bit")
SWEPT = ("gaussian", "positive")  # the families over K
SWEEP_ROWS, SWEEP_COLUMNS = 256, 512

# The error of a product that is wrong rather than rounded, in units of |x| |weight|ᵀ: a unit in the last place of
# float32 for every term, and the rounding of both operands to 10 or 7 bits, which may be a truncation.
_OPERANDS = {"highest": 0.0, "high": 2.0**-9, "medium": 2.0**-6, "ieee": 0.0, "tf32": 2.0**-9}

_CHECKED = 1 << 38  # multiplications in float64 for the reference; of larger products some rows are compared
_TINY = 1e-300

# cudaDataType_t and cublasComputeType_t
_FLOAT32, _BFLOAT16 = 0, 14
_COMPUTE_32F, _COMPUTE_32F_FAST_16BF, _COMPUTE_32F_FAST_TF32 = 68, 75, 77


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", type=types.shape, default=heads.SHAPE, metavar="MxKxN", help="of every family")
    parser.add_argument(
        "--families",
        type=types.names(families.FAMILIES),
        default=tuple(families.FAMILIES),
        metavar="NAME,...",
        help=f"data, of {', '.join(families.FAMILIES)}; K is swept over for {' and '.join(SWEPT)}",
    )
    parser.add_argument(
        "--parts", type=types.names(PARTS), default=PARTS, metavar="NAME,...", help=f"some of {', '.join(PARTS)}"
    )
    parser.add_argument("--half-size", type=int, metavar="N", help="the largest cube of 16-bit products")
    parser.add_argument("--depths", type=types.lengths, metavar="K,K,...", help="the K to sweep over")


def product_name(precision: str, bound: bool) -> str:
    """Name a product by cupyfuse."""
    return f"cupyfuse {precision}, bound" if bound else f"cupyfuse {precision}"


def error_limit(precision: str, depth: int) -> float:
    """Return the error, relative to |x| |weight|ᵀ, from which on a product of `depth` terms is wrong."""
    return (depth + 2) * 2.0**-23 + _OPERANDS[precision]


class Product:
    """One product ``x @ weight.T`` of (M, K) and (N, K) float32 arrays, and how each rival computes it.

    Its facts are "cancellation", the norm of |x| |weight|ᵀ over that of the product: 1 where nothing cancels; and
    "reference", a bound of the float64 reference's own error relative to |x| |weight|ᵀ: products of two float32 numbers
    are exact there, so only the additions round.
    """

    def __init__(self, lab: Lab, x: Any, weight: Any):
        self._lab, self._x, self._weight = lab, x, weight
        self._m, self._k, self._n = x.shape[0], x.shape[1], weight.shape[0]
        few = max(1, min(self._m, _CHECKED // (self._k * self._n)))
        self._checked = slice(None, None, -(-self._m // few))
        xs, ws = lab.as_double(x[self._checked]), lab.as_double(weight)
        self._expected = [xs @ ws.T]
        sizes = abs(xs) @ abs(ws).T
        self._sizes = [lab.cupy.maximum(sizes, _TINY)]
        norm = float((self._expected[0] ** 2).sum())
        self.facts = {"reference": (self._k - 1) * 2.0**-53}
        if norm > 0.0:
            self.facts["cancellation"] = math.sqrt(float((sizes**2).sum()) / norm)

    def factories(self) -> dict[str, Callable[[], Rival]]:
        fused = {
            product_name(precision, bound): functools.partial(self._fused, precision, bound)
            for precision in PRECISIONS
            for bound in (True, False)
        }
        matmul = functools.partial(self._lab.cupy.matmul, self._x, self._weight.T)
        single = functools.partial(self._cublas, _FLOAT32)
        return {
            **fused,
            BASE: lambda: self._returning(matmul, "ieee"),
            "cuBLAS TF32": functools.partial(single, _COMPUTE_32F_FAST_TF32, "tf32"),
            "cuBLAS bfloat16": functools.partial(single, _COMPUTE_32F_FAST_16BF, "medium"),
            "cuBLAS bfloat16, rounded before": functools.partial(self._cublas, _BFLOAT16, _COMPUTE_32F, "medium"),
            "torch float32": functools.partial(self._torch, "highest", "ieee"),
            "torch TF32": functools.partial(self._torch, "high", "tf32"),
        }

    def _checks(self, precision: str) -> dict[str, Any]:
        def sample(result: Any, double: Callable[[Any], Any]) -> list[Any]:
            return [double(result[self._checked])]

        return {"sample": sample, "sizes": self._sizes, "limit": error_limit(precision, self._k)}

    def _fused(self, precision: str, bound: bool) -> Rival:
        function: Any = cf.fuse(lambda x, weight: x @ weight.T, precision=precision)
        arguments = (self._x,) if bound else (self._x, self._weight)
        if bound:
            function = function.bind(weight=self._weight)
        shape = self._m, self._n
        return self._lab.fused_rival(function, arguments, self._expected, shape, "float32", **self._checks(precision))

    def _returning(self, call: Call, precision: str, torch: Any = None) -> Rival:
        size = 4 * self._m * self._n
        return self._lab.rival(call, self._expected, size, torch=torch, **self._checks(precision))

    def _cublas(self, dtype: int, compute: int, precision: str) -> Rival:
        """Return cuBLAS's own function, with float32 results; 16-bit operands are rounded here, untimed."""
        cupy = self._lab.cupy
        gemm, handle = cupy.cuda.cublas.gemmEx, cupy.cuda.device.get_cublas_handle
        stored = dtypes.to_numpy("bfloat16" if dtype == _BFLOAT16 else "float32")
        x, weight = self._x.astype(stored, copy=False), self._weight.astype(stored, copy=False)
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
        m, k, n = self._m, self._k, self._n

        def call() -> Any:
            # cuBLAS is column-major: it sees all three transposed, and computes weight @ x.T.
            out = cupy.empty((m, n), np.float32)
            a, b, c = weight.data.ptr, x.data.ptr, out.data.ptr
            scale, keep = one.ctypes.data, zero.ctypes.data
            gemm(handle(), 1, 0, n, m, k, scale, a, dtype, k, b, dtype, k, keep, c, _FLOAT32, n, compute, -1)
            return out

        return self._returning(call, precision)

    def _torch(self, name: str, precision: str) -> Rival:
        torch = self._lab.need_torch()
        call = functools.partial(torch.product, torch.as_tensor(self._x), torch.as_tensor(self._weight), name)
        return self._returning(call, precision, torch)


def operand_cases(options: argparse.Namespace) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Yield each case as (group, name, family, shape), the shape being (M, K, N)."""
    for family in options.families:
        yield "Families of data", family, family, options.shape
    for family in options.families:
        if family in SWEPT:
            for depth in options.depths:
                yield f"Over K: {family}", f"K = {depth}", family, (SWEEP_ROWS, depth, SWEEP_COLUMNS)


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run every family at one shape, then the sweep over K; then 16-bit products."""
    for group, name, family, shape in operand_cases(options) if "float32" in options.parts else ():
        lab.release()
        x, weight = (lab.cupy.asarray(operand) for operand in families.draw(family, shape, options.seed))
        product = Product(lab, x, weight)
        case = Case(group, name, shape, "float32", facts=product.facts)
        yield run(lab, case, product.factories(), FIGURES, options.budget)
        del product, x, weight
    if "16-bit" in options.parts:
        yield from half.cases(lab, options)
