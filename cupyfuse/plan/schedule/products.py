"""Choice of matrix products: cuBLAS in the operands' dtype, or the hi/lo split of float32 operands on tensor cores.

x = inverse (hi + 2**-11 lo), with float16 numbers hi and lo and a power of two for each row, keeps 22 of 24 bits. The
product of two such matrices is three products of float16 matrices with float32 sums; the fourth, of both low parts, is
below the rounding of the result.
"""

from __future__ import annotations

from dataclasses import replace

from ...devices import Device
from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...settings import Settings

# Shorter sums are so accurate in float32 that 22 bits of the operands would show.
LEAST_DEPTH = 512
# Seconds for two more launches, and for what cannot overlap at their ends.
_OVERHEAD = 8e-6
# Tiles of a split product: rows, and the available widths.
TILE_ROWS, TILE_WIDTHS = 128, (168, 160, 144, 128, 96, 64)
_FIXED_WIDTH = 28  # cost of a tile beside its products, in columns


def choose_products(graph: Graph, settings: Settings, fixed: set[Node]) -> Graph:
    """Replace each float32 product by the one that will run, with the reason in its field `how`.

    `fixed` are the values that depend on bound arguments alone, so that their hi/lo splits can be prepacked.
    """
    live = set(g.topological(graph.roots, g.eager_inputs))
    done: dict[Node, Node] = {}
    shared: _Shared = {}
    for node in g.topological(graph.roots):
        done[node] = g.with_inputs(node, [done[i] for i in node.inputs])
        if node.op == "matmul" and node in live:
            left_prepacked, right_prepacked = (settings.keep_halves and i in fixed for i in node.inputs)
            done[node] = _choose(done[node], settings, right_prepacked, left_prepacked, shared)
    return graph.replace(done)


# Operands that several products may share, by (one of "transposed", "split", "rounded"; the original).
_Shared = dict[tuple[str, Node], Node]


def _choose(node: Node, settings: Settings, right_prepacked: bool, left_prepacked: bool, shared: _Shared) -> Node:
    """Return a product in the form in which it runs: of rounded operands, of hi/lo splits, or as it is."""
    if _rounds_operands(node, settings):
        return _round_operands(node, shared)
    reason = _reason_against(node, settings, right_prepacked, left_prepacked)
    if reason:
        return replace(node, how=reason)
    left, right = _operands(node, shared)
    product = g.split_matmul(left, right)
    parts = [shared.setdefault(("split", i.inputs[0]), i) for i in product.inputs[:2]]
    how = "fp16 hi/lo split on tensor cores: 3 products with float32 sums, special values repaired"
    return replace(product, inputs=(*parts, left, right), how=how)


def _rounds_operands(node: Node, settings: Settings) -> bool:
    """Whether to round operands to bfloat16 before a product: cuBLAS itself would round them to TF32."""
    device = settings.device
    if settings.precision != "medium" or node.dtype != "float32" or device is None or device.tf32 <= device.simt:
        return False
    return float32_time(node, device) > 4 * _OVERHEAD


def _operands(node: Node, shared: _Shared) -> tuple[Node, Node]:
    """Return the operands of a product, the right one transposed: sums run along the rows of both."""
    right = node.inputs[1]
    return node.inputs[0], shared.setdefault(("transposed", right), g.transpose(right))


def _round_operands(node: Node, shared: _Shared) -> Node:
    operands = _operands(node, shared)
    left, right = (shared.setdefault(("rounded", i), g.cast(i, "bfloat16")) for i in operands)
    inputs = (left, g.transpose(right))
    how = "cuBLAS bfloat16 with float32 sums, operands rounded before, as the precision 'medium' asks"
    return Node("matmul", inputs, node.shape, "float32", how=how)


def _reason_against(node: Node, settings: Settings, right_prepacked: bool, left_prepacked: bool) -> str:
    """Explain why a product is left to cuBLAS; empty if the split is faster and as accurate."""
    library = f"cuBLAS {node.dtype}"
    if node.dtype != "float32":
        return f"{library} with {'float64' if node.dtype == 'float64' else 'float32'} sums"
    if settings.precision in ("ieee", "medium", "tf32"):
        kind = {"ieee": "float32", "medium": "bfloat16 or better", "tf32": "TF32"}[settings.precision]
        return f"cuBLAS {kind}, as the precision {settings.precision!r} asks"
    if settings.device is None:
        return library
    if not settings.device.split:
        return f"{library}: the hi/lo split is not faster on an {settings.device.name}"
    if node.inputs[0].shape[1] < LEAST_DEPTH:
        return f"{library}: sums of fewer than {LEAST_DEPTH} products are more accurate so"
    fast = split_time(node, settings.device, right_prepacked, left_prepacked)
    plain = float32_time(node, settings.device)
    if fast >= plain:
        return f"{library}: {plain * 1e6:.3g} us, where the hi/lo split would take {fast * 1e6:.3g} us"
    return ""


def float32_time(node: Node, device: Device) -> float:
    """Estimate the seconds of cuBLAS for a float32 product, at the rate measured for large ones."""
    return max(g.flops(node) / (0.76 * device.simt), _operand_bytes(node) / device.bandwidth) + 2e-6


def split_time(node: Node, device: Device, right_prepacked: bool = False, left_prepacked: bool = False) -> float:
    """Estimate the seconds of a split product, with the splits of operands that are not prepacked."""
    (rows, depth), cols = node.inputs[0].shape, node.shape[1]
    columns = tile_columns(rows, cols, tile_width(rows, cols, device.processors), device.processors)
    flops = 3 * 2 * TILE_ROWS * columns * (-(-depth // 64) * 64) * device.processors
    compute = max(flops / device.split, _operand_bytes(node) / device.bandwidth)
    split = 8 * depth * (rows * (not left_prepacked) + cols * (not right_prepacked)) / (0.85 * device.bandwidth)
    return compute + split + _OVERHEAD


def tile_columns(rows: int, cols: int, width: int, processors: int) -> int:
    """Count the columns that each multiprocessor computes in all its tiles, `_FIXED_WIDTH` for each tile included."""
    tiles = -(-rows // TILE_ROWS) * -(-cols // width)
    return -(-tiles // processors) * (_FIXED_WIDTH + width)


def tile_width(rows: int, cols: int, processors: int) -> int:
    """Choose the tile width with which a product takes the least time on so many multiprocessors."""
    return min(TILE_WIDTHS, key=lambda width: tile_columns(rows, cols, width, processors))


def _operand_bytes(node: Node) -> float:
    (rows, depth), cols = node.inputs[0].shape, node.shape[1]
    return 4.0 * (rows * depth + cols * depth + rows * cols)
