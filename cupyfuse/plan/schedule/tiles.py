"""The tiles of 16-bit products by our own kernel, and estimates of its time and of the library's."""

from __future__ import annotations

from dataclasses import dataclass

from ...devices import Device
from ...ir.graph import Node, Shape
from .steps import Step

TILE_ROWS = 128
LINE = 8  # elements of 16 bytes: rows begin at multiples of them where the TMA reads
MOST_STAGED = 16  # bytes of all full results of an epilogue for one element
_TILES = ((256, 2), (256, 1), (128, 2), (128, 1), (64, 1))  # columns, and blocks that share them: those preferred first
_DEPTH = 64  # columns of the operands in one stage
# Measured on an H200 (docs/gemm.md), by the columns of a tile: seconds of a stage, which the bandwidth of shared memory
# limits in narrow tiles, and of a tile beside its stages and its epilogue's arithmetic, in which it is written.
_STAGE = {256: 0.68e-6, 128: 0.355e-6, 64: 0.31e-6}
_TILE = {256: 2.2e-6, 128: 1.7e-6, 64: 1.3e-6}
_STAGE_FLOPS = 2 * TILE_ROWS * 256 * _DEPTH  # of the widest
_ALONE = 1.005  # of a block that shares nothing: its operands take more of the L2's bandwidth
_START, _LAUNCH = 3e-6, 2e-6  # seconds of a product beside its tiles, and of each launch
_EPILOGUE_SHARE = 0.4  # of the arithmetic rate, what epilogues reach, while the tensor cores wait
# Of the half-precision peak, what cuBLAS reaches in large products, and of the bandwidth, what a row program reaches.
_LIBRARY_SHARE, _STREAM_SHARE = 0.78, 0.85
_LONGEST_HELD = 32768  # columns of a row that a row program keeps in registers: longer ones are read in each stage


@dataclass(frozen=True)
class Tiles:
    """How our kernel cuts a product: the columns of a tile, and the blocks of a cluster, which share them."""

    columns: int
    cluster: int

    def count(self, shape: Shape) -> int:
        """Count the tiles of a product, rounded up to whole clusters."""
        return -(-shape[0] // (TILE_ROWS * self.cluster)) * -(-shape[1] // self.columns) * self.cluster

    def blocks(self, shape: Shape, processors: int) -> int:
        """Count the blocks of a launch: whole clusters, at most one block for each multiprocessor."""
        return min(self.count(shape), processors // self.cluster * self.cluster)

    def turns(self, shape: Shape, processors: int) -> int:
        """Count the tiles that a block computes one after the other."""
        return -(-self.count(shape) // self.blocks(shape, processors))

    def seconds(self, shape: Shape, depth: int, processors: int) -> float:
        """Estimate the time of a product that is only written, on an H200 at any number of multiprocessors."""
        stages = -(-depth // _DEPTH) * (_ALONE if self.cluster == 1 else 1.0)
        return self.turns(shape, processors) * (stages * _STAGE[self.columns] + _TILE[self.columns])


def tiles_for(shape: Shape, depth: int, processors: int) -> Tiles:
    """Choose the tiles with which a product of these rows, columns and sums takes the least time."""
    most = max(1, min(-(-shape[0] // TILE_ROWS), processors))  # blocks of a cluster that have rows, and a place
    fitting = [Tiles(columns, min(cluster, most)) for columns, cluster in _TILES]
    return min(fitting, key=lambda tiles: tiles.seconds(shape, depth, processors))


def strip_transposes(operand: Node) -> tuple[Node, bool]:
    """Return the matrix that an operand is a transpose of, or the operand itself; and whether it is transposed."""
    transposed = False
    while operand.op == "transpose":
        operand, transposed = operand.inputs[0], not transposed
    return operand, transposed


def own_time(step: Step, device: Device) -> float:
    """Estimate the seconds of a product by our kernel with its epilogue."""
    product = step.product
    depth, processors = product.inputs[0].shape[1], device.processors
    tiles = tiles_for(product.shape, depth, processors)
    # The table is of an H200, whose rate is that of its widest stages.
    scale = _STAGE_FLOPS * processors / _STAGE[256] / device.own_half
    compute = tiles.seconds(product.shape, depth, processors) * scale
    if step.epilogue is not None:
        elements = tiles.turns(product.shape, processors) * TILE_ROWS * tiles.columns
        work = step.epilogue.flops / product.size
        compute += elements * work * processors / (_EPILOGUE_SHARE * device.simt)
    return max(compute, (step.reads + step.writes) / device.bandwidth) + _START + _LAUNCH * step.launches


def library_time(step: Step, device: Device) -> float:
    """Estimate the seconds of a 16-bit product by cuBLAS."""
    compute = 2 * step.product.size * step.product.inputs[0].shape[1] / (_LIBRARY_SHARE * device.half)
    return max(compute, (step.reads + step.writes) / device.bandwidth) + _START + _LAUNCH


def stream_time(step: Step, device: Device, stages: int) -> float:
    """Estimate the seconds of a row program of so many stages from its bytes."""
    times = stages if step.domain[1] > _LONGEST_HELD else 1
    return (times * step.reads + step.writes) / (_STREAM_SHARE * device.bandwidth) + _LAUNCH * step.launches
