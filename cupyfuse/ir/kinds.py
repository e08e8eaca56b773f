"""What kind of value a node is: tests that several passes make."""

from __future__ import annotations

from .. import dtypes
from .graph import VIEWS, Node


def is_product(node: Node) -> bool:
    return node.op in ("matmul", "split_matmul", "batched_matmul", "accumulate")


def is_leaf(node: Node) -> bool:
    """Whether a node is an argument, a constant, or a view of one, readable before anything runs."""
    while node.op in VIEWS:
        node = node.inputs[0]
    return node.op in ("input", "const")


def squared(node: Node) -> Node | None:
    """Return the value that a node is the square of, in either spelling; None if it is none."""
    is_square = node.op == "square" or (node.op == "multiply" and node.inputs[0] is node.inputs[1])
    return node.inputs[0] if is_square else None


def gives_whole_numbers(node: Node) -> bool:
    """Whether a value is a float rounded to a whole number, or a multiple of one subtracted."""
    if node.op == "cast":
        return dtypes.is_integer(node.dtype) and dtypes.is_float(node.inputs[0].dtype)
    return node.op in ("floor", "ceil", "rint", "trunc", "floor_divide", "remainder", "fmod")
