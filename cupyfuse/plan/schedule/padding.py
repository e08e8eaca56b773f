"""Values whose rows are padded in memory: operands of our product, which reads rows at multiples of 16 bytes alone.

It reads them faster at multiples of 128 bytes, a line of L2. On an H200 the product of a transposed 2048 x 50257 matrix
and one of 2048 x 768 takes 214 us so, and 385 with 16 bytes; of 2048 x 50264 without padding 300.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...ir.graph import Node
from .memory import base_of, view_chain
from .steps import Step
from .tiles import LINE, strip_transposes

_L2_LINE = 64  # elements
_LEAST_LINES = 8  # of a row that is padded to whole ones: less than an eighth of it

# Steps that may take any stride of rows, of what they read and of what they write.
_READERS = ("RowProgram", "MatVec", "ColumnStats", "Gemm")


def padded_length(length: int) -> int:
    """Return the elements from row to row of a 16-bit value whose rows of so many elements are padded."""
    unit = _L2_LINE if length > _LEAST_LINES * _L2_LINE else LINE
    return -(-length // unit) * unit


def operands_to_pad(product: Node) -> list[Node]:
    """List the matrices among a 16-bit product's operands that our kernel reads faster, or at all, if padded."""
    matrices = (strip_transposes(operand)[0] for operand in product.inputs)
    return [m for m in matrices if m.shape[0] > 1 and padded_length(m.shape[1]) != m.shape[1]]


def unaligned_operands(product: Node) -> list[Node]:
    """List the matrices among a 16-bit product's operands whose rows do not begin at multiples of 16 bytes."""
    return [m for m in operands_to_pad(product) if m.shape[1] % LINE]


def can_be_padded(value: Node, steps: Sequence[Step], results: Collection[Node]) -> bool:
    """Whether the rows of a value may be padded: one step writes it for others, and all of them take any stride.

    `results` are the values that are read after the last step.
    """
    writers = [step for step in steps if value in step.outputs]
    if value in results or not writers or not all(s.kind == "RowProgram" or s.by_tiles for s in writers):
        return False
    for step in steps:
        for read in (*step.inputs, *step.repair_inputs):
            if base_of(read) is value:
                takes_strides = step.kind in _READERS and not any(n.op in _CONTIGUOUS for n in step.nodes)
                if not takes_strides or any(view.op == "reshape" for view in view_chain(read)):
                    return False
    return True


# Products that read contiguous matrices, or change one.
_CONTIGUOUS = ("batched_matmul", "accumulate")
