"""Estimates of the time of steps, at the shares of the peak rates that they reach."""

from __future__ import annotations

from ... import dtypes
from ...devices import Device
from ...ir.graph import Node
from ..rounding import is_16_bit_product
from .steps import Step, last_stage
from .tiles import LAUNCH, STREAM_SHARE, library_time, own_time

# A matrix that a product is added to is read and written at this share of the bandwidth: 512 rows added to a float32
# one of 128256 x 4096 take 3.2 ms on an H200, where the arithmetic takes 0.7. One of few bytes stays in the L2 cache:
# 8192 rows added to one of 768 x 3072 take 55 us, as without.
_SUM_SHARE, _SUM_HELD = 0.28, 32 << 20
# Of the peak rate, what large products by cuBLAS and from splits reach, and the arithmetic of row programs.
_PRODUCT_SHARE = 0.78
_LONGEST_HELD = 32768  # columns of a row that a block keeps in registers; longer ones are kept in shared memory
_SHARED_ROWS = 0.95  # of `STREAM_SHARE` is reached then
# Of `STREAM_SHARE`, with columns reduced in the same launch: where a matrix has 16-bit elements, and otherwise.
_SUMMED_NARROW, _SUMMED = 0.68, 0.9


def sum_time(product: Node, device: Device) -> float:
    """Estimate the seconds of reading and writing the matrix that a product is added to; the product overlaps them."""
    return 2 * product.nbytes / (_SUM_SHARE * device.bandwidth) if product.nbytes > _SUM_HELD else 0.0


def step_time(step: Step, device: Device, moving: float, computing: float) -> float:
    """Estimate the seconds of a step.

    Parameters
    ----------
    step : Step
    device : Device
    moving, computing : float
        The seconds for its bytes and for its arithmetic, at peak rates.
    """
    if step.by_tiles and device.own_half:
        return own_time(step, device)
    if step.kind == "Gemm" and device.own_half and is_16_bit_product(step.product) and step.product.batches is None:
        return library_time(step, device)
    computing /= _PRODUCT_SHARE
    launches = LAUNCH * step.launches
    if step.kind == "Gemm":
        if step.product.op == "accumulate":
            moving = max(moving, sum_time(step.product, device))
        return max(computing, moving) + launches
    stages = last_stage(step) + 1 if step.kind == "RowProgram" else 1
    return max(computing, stream_time(step, device, stages))


def stream_time(step: Step, device: Device, stages: int) -> float:
    """Estimate the seconds of a row program of so many stages from its bytes."""
    times, share = 1, STREAM_SHARE
    if step.columns is not None:
        full = [n for n in step.inputs if n.shape == step.domain]
        share *= _SUMMED_NARROW if any(dtypes.ITEMSIZE[n.dtype] == 2 for n in full) else _SUMMED
    if stages > 1 and step.domain[1] > _LONGEST_HELD:
        if device.has_warpgroups:  # and clusters
            share *= _SHARED_ROWS
        else:  # each stage reads the row again
            times = stages
    return (times * step.reads + step.writes) / (share * device.bandwidth) + LAUNCH * step.launches
