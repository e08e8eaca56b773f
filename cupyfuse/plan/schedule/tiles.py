"""The tiles of 16-bit products by our own kernel, and estimates of its time and of the library's."""

from __future__ import annotations

from dataclasses import dataclass

from ...devices import Device
from ...ir.graph import Node, Shape
from .steps import Step, stages_of

TILE_ROWS = 128
LINE = 8  # elements of 16 bytes: rows begin at multiples of them where the TMA reads
MOST_STAGED = 16  # bytes of all full results of an epilogue for one element
_TILES = ((256, 2), (256, 1), (128, 2), (128, 1))  # columns, and blocks that share them: those preferred first
_FIXED_COLUMNS = 28  # the cost of a tile beside its products, in columns, as that of the split product
_ALONE = 1.06  # the cost of a block that shares nothing: its operands take more of the L2's bandwidth
_DEPTH = 64  # columns of the operands in one stage
LAUNCH = 2e-6  # seconds
# Of the half-precision peak, what cuBLAS reaches in large products, and of the bandwidth, what a row program reaches.
LIBRARY_SHARE, _STREAM_SHARE = 0.77, 0.85
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

    def columns_in_turn(self, shape: Shape, processors: int) -> float:
        """Count the columns that a block computes in all its tiles, the fixed cost of a tile included as columns."""
        turns = -(-self.count(shape) // self.blocks(shape, processors))
        return turns * (self.columns + _FIXED_COLUMNS) * (_ALONE if self.cluster == 1 else 1.0)


def tiles_for(shape: Shape, processors: int) -> Tiles:
    """Choose the tiles with which a product of these rows and columns takes the least time."""
    most = max(1, min(-(-shape[0] // TILE_ROWS), processors))  # blocks of a cluster that have rows, and a place
    fitting = [Tiles(columns, min(cluster, most)) for columns, cluster in _TILES]
    return min(fitting, key=lambda tiles: tiles.columns_in_turn(shape, processors))


def strip_transposes(operand: Node) -> tuple[Node, bool]:
    """Return the matrix that an operand is a transpose of, or the operand itself; and whether it is transposed."""
    transposed = False
    while operand.op == "transpose":
        operand, transposed = operand.inputs[0], not transposed
    return operand, transposed


def own_time(step: Step, device: Device) -> float:
    """Estimate the seconds of a product by our kernel with its epilogue."""
    product = step.product
    depth = -(-product.inputs[0].shape[1] // _DEPTH) * _DEPTH
    columns = tiles_for(product.shape, device.processors).columns_in_turn(product.shape, device.processors)
    compute = 2 * TILE_ROWS * columns * depth * device.processors / device.own_half
    return max(compute, (step.reads + step.writes) / device.bandwidth) + LAUNCH * step.launches


def library_time(step: Step, device: Device) -> float:
    """Estimate the seconds of a 16-bit product by cuBLAS."""
    compute = 2 * step.product.size * step.product.inputs[0].shape[1] / (LIBRARY_SHARE * device.half)
    return max(compute, (step.reads + step.writes) / device.bandwidth) + LAUNCH


def stream_time(step: Step, device: Device, stages: int) -> float:
    """Estimate the seconds of a row program of so many stages from its bytes."""
    times = stages if step.domain[1] > _LONGEST_HELD else 1
    return (times * step.reads + step.writes) / (_STREAM_SHARE * device.bandwidth) + LAUNCH * step.launches


def last_stage(step: Step) -> int:
    """Return the number of the last stage of a row program; the first one is stage 0."""
    return max(stages_of(step).values(), default=0)
