"""Batched matrix products, and products of float32 matrices from float16 splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .batches import Batches
from .graph import Node, Shape, promoted_dtype


def batched_matmul(a: Node, b: Node, batches: Batches) -> Node:
    """Multiply stacks of matrices; the rows of all batches are stacked in the result too."""
    shape = (batches.count * batches.rows, batches.cols)
    how = f"cuBLAS {a.dtype}, {batches.count} products in strided batches"
    return Node("batched_matmul", (a, b), shape, promoted_dtype((a, b)), how=how, batches=batches)


def split(node: Node, parts: int = 2) -> Node:
    """Split a float32 matrix into `parts` float16 ones, hi and lo or hi alone, with a power-of-two scale a row."""
    return Node("split", (node,), split_shape(node.shape, parts), "float16", parts=parts)


def split_shape(shape: Shape, parts: int = 2) -> Shape:
    """Return the shape of a split in float16 elements: rows padded to 8, columns to 64, and a float32 scale a row.

    A split in two parts also has a byte for each row and 64 columns: whether lo has anything there.
    """
    rows, blocks = -(-shape[0] // 8) * 8, -(-shape[1] // 64)
    return rows, parts * 64 * blocks + 2 + (-(-blocks // 2) if parts == 2 else 0)


def split_matmul(left: Node, right: Node, parts: int) -> Node:
    """Multiply float32 matrices from their splits: left @ right.T."""
    shape = (left.shape[0], right.shape[0])
    return Node("split_matmul", (split(left, parts), split(right, parts), left, right), shape, "float32", parts=parts)


def with_factors(product: Node) -> Node:
    """Leave its scales to a product from splits of one part, and multiply it by its factors.

    That is in the order of `kernels_cu/split_finish.cu`.
    """
    rows, cols = product.shape
    product = replace(product, unscaled=True)
    row, rest, column = (
        Node("factor", (product,), shape, "float32", name=name)
        for name, shape in (("row", (rows, 1)), ("row_rest", (rows, 1)), ("column", (1, cols)))
    )
    value = product
    for factor in (row, column, rest):
        value = Node("multiply", (value, factor), product.shape, "float32")
    return value


def sum_with_row(product: Node, readers: Sequence[Node]) -> Node | None:
    """Return the sum with one row, such as a bias, that is all that a product is read for; None if there is none."""
    if len(readers) != 1 or readers[0].op != "add" or readers[0].dtype != product.dtype:
        return None
    others = [i for i in readers[0].inputs if i is not product]
    return readers[0] if len(others) == 1 and others[0].shape[0] == 1 else None


def strip_transposes(operand: Node) -> tuple[Node, bool]:
    """Return the matrix that an operand is a transpose of, or the operand itself; and whether it is transposed."""
    transposed = False
    while operand.op == "transpose":
        operand, transposed = operand.inputs[0], not transposed
    return operand, transposed
