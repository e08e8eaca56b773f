"""What GPUs and hosts reach in practice: the constants of the cost model, each with its source, and what follows.

"rows", "gemm", "heads" and "torch" are reports in benchmarks/results/nvidia-h200, with PyTorch 2.11. Host times are for
a host on which a small operation takes PyTorch eager 5 us; on a slower one, all of them grow alike.
`python -m benchmarks costs` holds the estimates beside measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ... import dtypes
from ...devices import Device
from ...ir import graph as g
from ...ir.graph import Node
from ...plan.schedule.products import LEAST_DEPTH, split_time

US = 1e-6

# Both sides of a comparison share their products, whose errors cancel; what remains is off by some percent. What is
# gained has to be more than this share of what PyTorch takes.
MARGIN = 0.10

# GPU seconds
LAUNCH = 1.5 * US  # from the end of a kernel to the work of the next: heads, small tails replayed as graphs
REDUCTION = 1.0 * US  # filling and draining a kernel whose blocks wait for a row: heads, tails of 1024 rows
CHECK = 2.0 * US  # a launch that finds prepared weights unchanged; an estimate

# Shares of the bandwidth
STREAM = 0.88  # pointwise work and reductions along rows: rows, copy and logsumexp at 4.2 of 4.8 TB/s
COLUMNS = 0.7  # reductions down columns; an estimate
TRANSPOSED = 0.6  # copies that transpose; an estimate
HELD_COLUMNS, REREAD = 32768, 0.57  # softmax of longer rows: rows, 2.6 to 2.8 TB/s
INDUCTOR_HELD = 1024  # the longest row that Inductor keeps in registers
INDUCTOR_WIDE = {2: (0.35, 0.42), 4: (0.65, 0.70)}  # longer rows, by itemsize, written back or only reduced: rows

# Shares of the float32 peak of row work, with reductions and without: rows, softmax bfloat16 at 3.3 TB/s
ALU_ROWS, ALU = 0.27, 0.4

# Products by cuBLAS, by the units that compute them: share of the peak, tile
CUBLAS_SHARE = {"float64": 0.8, "float32": 0.76, "tf32": 0.80, "half": 0.74}  # gemm; float64 is an estimate
CUBLAS_TILE = {"float64": (64, 64), "float32": (128, 64), "tf32": (128, 128), "half": (128, 128)}
# Of results of few tiles, the sums are split into parts of at least this depth: gemm, 256 x K x 512
SPLIT_DEPTH, SPLIT_K = 256, 3.0 * US

# How many times as long as their forward rates say our backward steps take (costs.md): row programs compute again what
# they need, operands of products are copied to lie as cuBLAS and the split kernels take them.
BACKWARD_ROWS, BACKWARD_HALVES, BACKWARD_PRODUCT = 2.0, 1.5, 1.15

# Host seconds
CALL = 8.0 * US  # a chain: finding what is ready for its inputs, allocating its outputs
OUR_LAUNCH = 3.0 * US
OUR_PRODUCT = 8.0 * US  # cuBLAS: its handle, its mode, its call
FUNCTION = 47.0 * US  # a node of autograd, forward and backward: costs.md, softmax(2 x) with gradients
EAGER = 5.0 * US  # an operation that launches one kernel
EAGER_PRODUCT = 8.0 * US
EAGER_VIEW = 1.5 * US
EAGER_GRADED = 4.0 * US  # what autograd adds to an operation, and once more to its backward
INDUCTOR_LAUNCH = 4.0 * US
INDUCTOR_PRODUCT = 7.0 * US


@dataclass(frozen=True)
class Time:
    """Seconds of one call: work on the GPU, and what the host spends to enqueue it."""

    gpu: float
    host: float

    def __add__(self, other: Time) -> Time:
        return Time(self.gpu + other.gpu, self.host + other.host)


# Machines -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """A GPU, and the precision of float32 products on it."""

    device: Device
    precision: str

    def memory(self, nbytes: float, share: float = STREAM) -> float:
        """Seconds of moving so many bytes at a share of the bandwidth."""
        return nbytes / (share * self.device.bandwidth)

    def product(self, m: int, k: int, n: int, dtype: str) -> float:
        """Seconds of a product by cuBLAS: (m, k) by (k, n)."""
        kind = "half" if dtypes.ITEMSIZE[dtype] == 2 else "float64" if dtype == "float64" else "float32"
        if kind == "float32" and self.precision not in ("highest", "ieee") and self.device.tf32 > self.device.simt:
            kind = "tf32"
        d = self.device
        peak = {"half": d.half, "float64": d.simt64, "float32": d.simt, "tf32": d.tf32}[kind]
        rows, cols = CUBLAS_TILE[kind]
        tiles = -(-m // rows) * -(-n // cols)
        split = max(1, min(d.processors // max(tiles, 1), k // SPLIT_DEPTH))
        waves = -(-tiles * split // d.processors)
        busy = min(1.0, m * n * split / (waves * d.processors * rows * cols))
        # A wave that is not full has smaller tiles to choose from: it wastes about half of what it seems to.
        flops = 2.0 * m * k * n / (CUBLAS_SHARE[kind] * peak * (1 + busy) / 2)
        moved = self.memory(dtypes.ITEMSIZE[dtype] * float(m * k + k * n + m * n))
        return LAUNCH + max(flops, moved) + (SPLIT_K if split > 1 else 0.0)

    def halves(self, m: int, k: int, n: int, kept: tuple[bool, bool] = (False, False)) -> float:
        """Seconds of a product from fp16 halves; `kept` says which operands are split already."""
        left, right = (Node("input", (), shape, "float32") for shape in ((m, k), (k, n)))
        return split_time(g.matmul(left, right), self.device, kept[1], kept[0])

    def halves_instead(self, m: int, k: int, n: int, dtype: str) -> float | None:
        """Seconds of a product from fp16 halves, both operands split for it; None where cuBLAS is to compute it."""
        if dtype != "float32" or self.precision not in ("highest", "high") or not self.device.split or k < LEAST_DEPTH:
            return None
        fast = self.halves(m, k, n)
        return fast if fast < self.product(m, k, n, dtype) else None


def total(times: Iterable[Time]) -> Time:
    gpu = host = 0.0
    for time in times:
        gpu, host = gpu + time.gpu, host + time.host
    return Time(gpu, host)
