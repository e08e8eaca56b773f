"""Estimate times of memory traffic and of matrix products on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ... import dtypes
from ...devices import Device
from ...ir import graph as g
from ...ir.graph import Node
from ...plan.schedule.products import LEAST_DEPTH, ROUNDED, rounded_time, split_time
from ...plan.schedule.tiles import share_of_rows
from . import rates


@dataclass(frozen=True)
class Time:
    """Seconds of one call: work on the GPU, of which `products` are cuBLAS's, and the host's work to enqueue it."""

    gpu: float
    host: float
    products: float = 0.0


def total_time(times: Iterable[Time]) -> Time:
    gpu = host = products = 0.0
    for time in times:
        gpu, host, products = gpu + time.gpu, host + time.host, products + time.products
    return Time(gpu, host, products)


@dataclass(frozen=True)
class Machine:
    """A GPU, and the precision of float32 products on it."""

    device: Device
    precision: str

    def memory_time(self, nbytes: float, share: float = rates.STREAM) -> float:
        """Return the seconds that moving bytes takes at a share of the bandwidth."""
        return nbytes / (share * self.device.bandwidth)

    def copy_time(self, node: Node) -> Time:
        """Return the time of a copy of a value whose dimensions are permuted."""
        share = rates.TRANSPOSED[2 if dtypes.ITEMSIZE[node.dtype] <= 2 else 4]
        return Time(rates.LAUNCH + self.memory_time(2 * node.nbytes, share), rates.EAGER_VIEW + rates.EAGER)

    def product_time(
        self, m: int, k: int, n: int, dtype: str, padded: bool = False, lengths: Sequence[int] = ()
    ) -> float:
        """Return the seconds that cuBLAS takes to multiply (m, k) by (k, n).

        It is slow with tensor cores where rows do not begin at multiples of 16 bytes, unless they are `padded`; and its
        16-bit kernels for those multiply whole tiles of rows, few rows apart: (16, 768) by (768, 50257) takes 106 us on
        an H200, (2, 768) 44. Rows of operands and of the result have the `lengths`, by default k and n elements.

        Each processor computes one tile of the result at a time, which makes waves of tiles. Where there are fewer
        tiles than processors, the sums over k are split among several.
        """
        d = self.device
        units = "half" if dtypes.ITEMSIZE[dtype] == 2 else dtype
        if units == "float32" and self.precision not in ("highest", "ieee") and d.tf32 > d.simt:
            units = "tf32"
        peak = {"half": d.half, "float64": d.simt64, "float32": d.simt, "tf32": d.tf32}[units]
        any_rows = padded or units not in ("half", "tf32")
        share = 1.0 if any_rows else share_of_rows(dtypes.ITEMSIZE[dtype], *(lengths or (k, n)))
        rows, cols = rates.CUBLAS_TILE[units]
        moved = self.memory_time(dtypes.ITEMSIZE[dtype] * float(m * k + k * n + m * n))
        if share < 1 and units == "half" and m > rates.FEW_ROWS:
            m = -(-m // rows) * rows
        tiles = -(-m // rows) * -(-n // cols)
        split = max(1, min(d.processors // max(tiles, 1), k // rates.SPLIT_DEPTH))
        waves = -(-tiles * split // d.processors)
        # The share of the elements that all waves have room for.
        busy = min(1.0, m * n * split / (waves * d.processors * rows * cols))
        # A wave that is not full has smaller tiles to choose from: it wastes about half of what it seems to.
        terms = k + rates.CUBLAS_ENDS.get(units, 0)
        flops = 2.0 * m * terms * n / (rates.CUBLAS_SHARE[units] * share * peak * (1 + busy) / 2)
        return rates.LAUNCH + max(flops, moved) + (rates.SPLIT_K if split > 1 else 0.0)

    def split_product_time(self, m: int, k: int, n: int, parts: int, presplit: bool = False) -> float:
        """Return the seconds of a product from hi/lo splits, or from rounded operands where `parts` is 1.

        Splitting the operands counts too, unless they are `presplit`, as for a step of a plan that has other steps.
        """
        left, right = (Node("input", (), shape, "float32") for shape in ((m, k), (k, n)))
        product = g.matmul(left, right)
        if parts == 2:
            return split_time(product, self.device, presplit, presplit)
        rounded = rounded_time(product, self.device, presplit, presplit, is_result=not presplit)
        return max(rounded, self.product_time(m, k, n, "float16"))

    def best_split_product_time(self, m: int, k: int, n: int, dtype: str) -> float | None:
        """Return the seconds of a float32 product from splits made for it; None where cuBLAS is faster."""
        rounded = self.precision in ROUNDED
        if dtype != "float32" or self.precision == "ieee":
            return None
        if not rounded and (not self.device.split or k < LEAST_DEPTH):
            return None
        fast = self.split_product_time(m, k, n, 1 if rounded else 2)
        return fast if fast < self.product_time(m, k, n, dtype) else None
