"""Products of more than two matrices: of batches, and of float32 ones as sums of float16 ones."""

from __future__ import annotations

from .batches import Batches
from .graph import Node, Shape, promoted_dtype


def batched_matmul(a: Node, b: Node, batches: Batches) -> Node:
    shape = (batches.count * batches.rows, batches.cols)
    how = f"cuBLAS {a.dtype}, {batches.count} products in strided batches"
    return Node("batched_matmul", (a, b), shape, promoted_dtype((a, b)), how=how, batches=batches)


def split(node: Node, parts: int = 2) -> Node:
    """Split a float32 matrix: a power of two scales each row, an element is the sum of `parts` float16 numbers."""
    return Node("split", (node,), split_shape(node.shape, parts), "float16", parts=parts)


def split_shape(shape: Shape, parts: int = 2) -> Shape:
    """Return the shape of a split in memory: whole tiles of 8 rows x 64 columns, and one float for each row."""
    rows, cols = -(-shape[0] // 8) * 8, -(-shape[1] // 64) * 64
    return rows, parts * cols + 2


def split_matmul(left: Node, right: Node, parts: int = 2) -> Node:
    """`left @ right.T` of float32 matrices from their splits."""
    shape = (left.shape[0], right.shape[0])
    return Node("split_matmul", (split(left, parts), split(right, parts), left, right), shape, "float32", parts=parts)


def with_factors(product: Node) -> Node:
    """Multiply a product from splits of one part by its factors, in the order of `kernels_cu/split_finish.cu`."""
    rows, cols = product.shape
    row, rest, column = (
        Node("factor", (product,), shape, "float32", name=name)
        for name, shape in (("row", (rows, 1)), ("row_rest", (rows, 1)), ("column", (1, cols)))
    )
    value = product
    for factor in (row, column, rest):
        value = Node("multiply", (value, factor), product.shape, "float32")
    return value
