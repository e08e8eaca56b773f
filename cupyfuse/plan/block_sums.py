"""Sums over blocks of rows: how each block adds what it has to them."""

from __future__ import annotations

from ..ir import graph as g
from ..ir.graph import Node
from ..settings import Settings
from .rounding import is_16_bit_product
from .schedule import may_be_padded, takes_epilogues, unaligned_operands


def accumulating_product(addend: Node, users: dict[Node, list[Node]]) -> Node | None:
    """Return the cuBLAS product that an addend is, or is a cast of, if nothing else reads it; else None."""
    product = addend.inputs[0] if addend.op == "cast" else addend
    alone = not users[product] or users[product] == [addend]
    return product if product.op == "matmul" and alone else None


def add_to_sum(total: Node, addend: Node, users: dict[Node, list[Node]], settings: Settings) -> Node:
    """Add an addend to a sum; a product by cuBLAS accumulates into it directly.

    Where rows of operands do not begin at multiples of 16 bytes, but may be padded as they are computed, our kernel is
    faster, and the sum is its epilogue: of (8192, 12241) by (12241, 768) cuBLAS takes 1159 us on an H200, ours 210.
    """
    product = accumulating_product(addend, users)
    if product is None or (takes_epilogues(settings) and _takes_padded(product)):
        return g.pointwise("add", total, addend)
    how = f"{product.how}, added to the sum over the blocks"
    return Node("accumulate", (*product.inputs, total), total.shape, total.dtype, how=how)


def _takes_padded(product: Node) -> bool:
    """Whether a 16-bit product has operands whose rows are not aligned, but may be padded as they are computed."""
    unaligned = unaligned_operands(product) if is_16_bit_product(product) else []
    return bool(unaligned) and all(map(may_be_padded, unaligned))
