"""The tiles of products by our kernel of 16-bit operands, and estimates of its time, of cuBLAS's and of epilogues."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ... import dtypes
from ...devices import Device
from ...ir import graph as g
from ...ir.graph import Node, Shape
from ...ir.operators import POINTWISE, REDUCTIONS, extended_extremum, extensions, place_bits
from ...ir.products import strip_transposes
from ...settings import Settings
from ..rounding import is_16_bit_product
from .memory import base_of
from .split_tiles import tile_width
from .steps import Step

TILE_ROWS = 128
LINE = 8  # elements of 16 bytes: rows begin at multiples of them where the TMA reads
MOST_STAGED = 16  # bytes of all full results of an epilogue for one element
# Columns, blocks that share them, and whether warpgroups alternate: those preferred first.
_TILES = (
    (256, 2, False),
    (256, 1, False),
    (192, 1, False),
    (128, 2, False),
    (128, 1, False),
    (64, 1, False),
    (128, 2, True),
    (128, 1, True),
)
_DEPTH = 64  # columns of the operands in one stage
# Seconds, measured on an H200 (docs/gemm.md): of a stage by the columns of a tile, which shared memory limits in
# narrow ones; of a tile beside its stages; in a tile of 256 columns, of each FLOP of an element, of each of
# its first two bytes, and of each further one.
_STAGE = {256: 0.67e-6, 192: 0.52e-6, 128: 0.355e-6, 64: 0.31e-6}
_TILE, _FLOP, _FIRST_BYTES, _BYTE = 0.6e-6, 0.31e-6, 0.8e-6, 0.9e-6
# In such a tile of each matrix beside the product that an epilogue reads, and of each byte of its elements: what
# fetching ahead does not hide. H200, bfloat16, 4096 x 768 x 3072: a bias 32.8 us, a bfloat16 residual 46.6, two in
# float32 72; 8192 x 4096 x 4096: 343, 381 and 436; 2048 x 5632 x 2048: 63, 69 and 74.
_MATRIX, _MATRIX_BYTE = 2.6e-6, 0.35e-6
# In such a tile, of each reduction along rows beside its FLOPs: the totals of rows, which tiles leave and others merge.
_REDUCTION = 0.4e-6
# Of the time of the bytes that the L2 cache does not hold, what sums of up to so many terms take longer, longer ones
# less. H200, float16: 4096 x 768 x 3072 takes 33 us, 16384 rows 116; 48 and 167 with a GELU beside it.
_BEYOND, _CACHED, _SHALLOW = 0.4, 50 << 20, 1024
# Of the FLOPs of an operator, those of its quick form: GELU behind 1024 x 8192 x 8192 takes 11 us more than a clamp.
_QUICK_SHARE = 0.7
_UNSCALING = 5  # FLOPs of an element whose operands have scales
_UNDER_PRODUCTS = 0.85  # share of an epilogue's time that it takes while the other warpgroup multiplies
_STAGE_FLOPS = 2 * TILE_ROWS * 256 * _DEPTH  # of the widest
_ALONE = 1.005  # of a block that shares nothing: its operands take more of the L2's bandwidth
START, LAUNCH = 3e-6, 2e-6  # seconds of a product beside its tiles, and of each launch
_LIBRARY_SHARE = 0.98  # of our kernel's time without an epilogue, what cuBLAS takes
# cuBLAS may also split sums: that adds `_SPLIT` seconds, at `_SPLIT_SHARE` of the peak rates.
_SPLIT, _SPLIT_SHARE = 3.4e-6, 0.75
# Of its speed, what cuBLAS reaches with tensor cores where all rows, of results too, begin at multiples of so many
# elements, by the bytes of an operand's. On an H200 1024 x 4096 x N takes in bfloat16, with results in float32 or not,
# 362 us for N = 32000, 1 ms for 32002 and 32004, 2.6 ms for 32001; in TF32 650 us, and 2.1 ms for 32001 and 32002.
_ALIGNED_SHARE = {2: {8: 1.0, 4: 0.37, 2: 0.37, 1: 0.15}, 4: {4: 1.0, 2: 0.31, 1: 0.31}}
# Seconds that a tile of 256 columns takes longer where rows of a result do not begin at multiples of 16 bytes.
# On an H200 8192 x 768 x N takes 892 us in bfloat16 for N = 50256, 1109 to 1128 for 50257, 50258 and 50260.
_UNALIGNED_FINISH = 2.4e-6
# Seconds, measured on an H200, that the epilogue of a split product adds for each FLOP of an element and each column of
# a tile: those of all tiles but the last of each multiprocessor run under the products of the next.
_SPLIT_FLOP = 6e-9
STREAM_SHARE = 0.85  # of the bandwidth, what products and row programs reach


def takes_epilogues(settings: Settings) -> bool:
    """Whether plans may have products by our kernel at all."""
    device = settings.device
    if device is None or not device.has_warpgroups or settings.epilogues == "never":
        return False
    return settings.epilogues == "always" or device.own_half > 0


@dataclass(frozen=True)
class Tiles:
    """How our kernel cuts a product.

    Attributes
    ----------
    columns : of a tile
    cluster : blocks that share the columns, each with rows of its own
    alternating : whether the warpgroups of a block compute tiles in turn, rather than half of each
    """

    columns: int
    cluster: int
    alternating: bool = False

    def count_tiles(self, shape: Shape) -> int:
        """Count the tiles of a product, rounded up to whole clusters."""
        return -(-shape[0] // (TILE_ROWS * self.cluster)) * -(-shape[1] // self.columns) * self.cluster

    def count_blocks(self, shape: Shape, processors: int) -> int:
        """Count the blocks of a launch: whole clusters, at most one block for each multiprocessor."""
        return min(self.count_tiles(shape), processors // self.cluster * self.cluster)

    def seconds(self, shape: Shape, depth: int, finish: float, processors: int, reading: float = 0.0) -> float:
        """Estimate the time of a product on an H200 with so many multiprocessors.

        Parameters
        ----------
        shape : tuple of int
            Of the product.
        depth : int
            Elements of a sum.
        finish : float
            Seconds that the results of a tile of 256 columns take (`finish_time`).
        processors : int
        reading : float
            Seconds that such a tile waits for what its epilogue reads (`reading_time`).
        """
        turns = -(-self.count_tiles(shape) // self.count_blocks(shape, processors))
        stages = -(-depth // _DEPTH) * (_ALONE if self.cluster == 1 else 1.0) * _STAGE[self.columns]
        waiting = turns * reading * self.columns / 256
        if self.alternating:
            # A warpgroup has as many elements of a tile as of a shared one of twice the columns.
            end = _TILE + _UNDER_PRODUCTS * finish * 2 * self.columns / 256
            return -(-turns // 2) * max(2 * stages, stages + end) + end + waiting
        return turns * (stages + _TILE + finish * self.columns / 256) + waiting


def finish_time(step: Step) -> float:
    """Estimate the seconds that the results of a tile of 256 columns take: to compute in an epilogue, and to write."""
    size = step.product.size
    flops = quick_flops(step.epilogue) / size if step.by_tiles and step.epilogue else 0.0
    if step.product.op == "split_matmul":
        flops += _UNSCALING
    finish = tile_finish(flops, (step.writes - sum(n.nbytes for n in _splits(step))) / size)
    if step.by_tiles:
        finish += _REDUCTION * sum(n.reduction for n in step.epilogue.nodes) if step.epilogue else 0.0
        results = (n for n in step.outputs if n.shape == step.product.shape)
        finish += sum(unaligned_finish(n.shape, dtypes.ITEMSIZE[n.dtype]) for n in results)
    return finish


def reading_time(step: Step) -> float:
    """Estimate the seconds that a tile of 256 columns waits for matrices beside the product that its epilogue reads."""
    product = step.product
    if not step.by_tiles or step.epilogue is None:
        return 0.0
    matrices = [i for i in step.epilogue.inputs if i is not product and i.shape == product.shape]
    if not matrices:
        return 0.0
    operands = {base_of(i) for n in (product, *_splits(step)) for i in n.inputs}
    read = {i: i.nbytes for i in step.inputs if base_of(i) in operands}
    # What is stored wider than its dtype, as products are, shows in the bytes of the step alone.
    nbytes = step.reads - sum(read.values()) + sum(read.get(i, 0) for i in matrices)
    return _MATRIX * len(matrices) + _MATRIX_BYTE * max(0, nbytes) / product.size


def unaligned_finish(shape: Shape, itemsize: int) -> float:
    """Estimate the seconds that a tile of 256 columns takes our kernel longer if rows of a result begin anywhere."""
    return _UNALIGNED_FINISH * min(1.0, shape[0] / TILE_ROWS) if shape[1] * itemsize % 16 else 0.0


def quick_flops(step: Step) -> float:
    """Count all FLOPs of a row program or an epilogue, in quick forms where 16-bit values have them."""
    return sum(map(_quick_flops, step.nodes))


def _quick_flops(node: Node) -> float:
    row = POINTWISE.get(node.op)
    if row is None or not row.quick or dtypes.compute_dtype(node.dtype) == node.dtype:
        return g.flops(node)
    return _QUICK_SHARE * node.size * (row.quick_flops or row.flops)


def tile_finish(flops: float, written: float) -> float:
    """Estimate the seconds that the results of a tile of 256 columns take, of so many FLOPs and bytes an element."""
    return _FLOP * flops + _FIRST_BYTES * min(written, 2) + _BYTE * max(written - 2, 0)


def state_size(step: Step) -> int:
    """Bound the bytes of a state that a step leaves for a row, a column or a row of a tile; 0 without reductions."""
    reductions = [n for n in step.nodes if n.reduction]
    # Those about an extremum of the same elements share an accumulator, which holds the extremum, too.
    shared: dict[tuple[Node, str, int], list[str]] = {}
    words = []
    for node in reductions:
        extremum = extended_extremum(node.op)
        if extremum is None:
            words.append((REDUCTIONS[node.op].words, _word(node.dtype)))
        else:
            shared.setdefault((node.inputs[0], extremum, node.axis), []).append(node.op)
    for (x, _, axis), names in shared.items():
        own, place = _word(x.dtype), place_bits(x.shape[axis]) // 8
        words += [(2, own), *((row.words, place if row.gives_position else own) for row in extensions(names))]
    aligned = max((word for _, word in words), default=4)  # an accumulator begins at most at multiples of these
    sizes = [-(-count * word // aligned) * aligned for count, word in words]
    return sum(sizes)


def _word(dtype: str) -> int:
    return max(4, dtypes.ITEMSIZE[dtypes.compute_dtype(dtype)])


def state_bytes(step: Step, processors: int) -> int:
    """Bound the bytes of the states that a product's tiles leave."""
    if step.epilogue is None or not state_size(step.epilogue):
        return 0
    rows, columns = step.product.shape
    return rows * -(-columns // tiles_of(step, processors).columns) * state_size(step.epilogue)


def tiles_of(step: Step, processors: int) -> Tiles:
    """Choose the tiles of a product's step."""
    return tiles_for(step.product.shape, depth_of(step.product), finish_time(step), processors, reading_time(step))


def is_half_product(node: Node) -> bool:
    """Whether our kernel of 16-bit operands may compute a node: a 16-bit product, or one of splits in one part."""
    if node.op == "split_matmul":
        return node.parts == 1 and not node.unscaled
    return is_16_bit_product(node)


def depth_of(product: Node) -> int:
    """Return the terms of each sum of a product, without padding of its splits."""
    return product.inputs[2 if product.op == "split_matmul" else 0].shape[1]


def _splits(step: Step) -> list[Node]:
    """Return the splits of operands that a product's step computes."""
    return [n for n in step.nodes if n.op == "split"]


def tiles_for(shape: Shape, depth: int, finish: float, processors: int, reading: float = 0.0) -> Tiles:
    """Choose the tiles with which a product takes the least time; the parameters are those of `Tiles.seconds`."""
    most = max(1, min(-(-shape[0] // TILE_ROWS), processors))  # blocks of a cluster that have rows, and a place
    fitting = [Tiles(columns, min(cluster, most), alternating) for columns, cluster, alternating in _TILES]
    return min(fitting, key=lambda tiles: tiles.seconds(shape, depth, finish, processors, reading))


def own_time(step: Step, device: Device) -> float:
    """Estimate the seconds of a product by our kernel with its epilogue, and of the splits of its operands."""
    split = sum(n.inputs[0].nbytes + n.nbytes for n in _splits(step)) / (STREAM_SHARE * device.bandwidth)
    return _tiles_time(step, device) + split + START + LAUNCH * step.launches


def library_time(step: Step, device: Device) -> float:
    """Estimate the seconds of a 16-bit product by cuBLAS; with a bias it splits no sums."""
    share = library_share(step.product, 2)
    whole = _LIBRARY_SHARE * _tiles_time(step, device) / share
    if step.by_library:
        return whole + START + LAUNCH
    flops = 2 * step.product.size * depth_of(step.product)
    split = max(flops / device.half, (step.reads + step.writes) / device.bandwidth) / (share * _SPLIT_SHARE) + _SPLIT
    return min(whole, split) + START + LAUNCH


def library_share(product: Node, itemsize: int) -> float:
    """Return the share of its speed that cuBLAS reaches with tensor cores, from the lengths of rows in memory.

    Operands have elements of 2 bytes, or of 4, for TF32.
    """
    matrices = (*(strip_transposes(operand)[0] for operand in product.inputs), product)
    return share_of_rows(itemsize, *(n.shape[1] for n in matrices if n.shape[0] > 1))


def share_of_rows(itemsize: int, *lengths: int) -> float:
    """Return the share of its speed that cuBLAS reaches with rows of these lengths."""
    return _ALIGNED_SHARE[itemsize][math.gcd(16 // itemsize, *lengths)]


def _tiles_time(step: Step, device: Device) -> float:
    """Estimate the seconds of a product's tiles: of their arithmetic and what the L2 cache does not hold, or bytes."""
    if not step.product.size:
        return 0.0
    # What the split of an operand writes is what the product reads.
    moved = step.reads + step.writes - sum(n.inputs[0].nbytes for n in _splits(step))
    depth = depth_of(step.product)
    beyond = _BEYOND * max(0, moved - _CACHED) / device.bandwidth * _SHALLOW / max(depth, _SHALLOW)
    return max(
        product_time(step.product.shape, depth, finish_time(step), device, reading_time(step)) + beyond,
        moved / (STREAM_SHARE * device.bandwidth),
    )


def product_time(shape: Shape, depth: int, finish: float, device: Device, reading: float = 0.0) -> float:
    """Estimate the seconds of a 16-bit product's tiles; the parameters are those of `Tiles.seconds`."""
    given = shape, depth, finish, device.processors, reading
    # The table is of an H200, whose rate is that of its widest stages.
    scale = _STAGE_FLOPS * device.processors / _STAGE[256] / device.own_half
    return tiles_for(*given).seconds(*given) * scale


def split_epilogue_time(step: Step, device: Device) -> float:
    """Estimate what the epilogue of a split product adds to its time: what it reads and writes beside the product."""
    epilogue, product = step.epilogue, step.product
    assert epilogue is not None
    others = sum(n.nbytes for n in epilogue.inputs if n is not product)
    written = sum(n.nbytes for n in epilogue.outputs) - product.nbytes
    moved = max(0, others + written) / (STREAM_SHARE * device.bandwidth)
    width = tile_width(*product.shape, device.processors)
    return moved + _SPLIT_FLOP * width * epilogue.flops / product.size
