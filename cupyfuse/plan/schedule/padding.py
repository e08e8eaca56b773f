"""Values whose rows are padded in memory: operands of our product, which reads rows at multiples of 16 bytes alone.

It reads them faster at multiples of 128 bytes, a line of L2. On an H200 the product of a transposed 2048 x 50257 matrix
and one of 2048 x 768 takes 214 us with rows of 50304 elements, and 300 to 385 with rows of 50264.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ...ir import graph as g
from ...ir.graph import Node
from ...ir.products import strip_transposes
from .memory import base_of, view_chain
from .steps import Step
from .tiles import LINE

_L2_LINE = 64  # elements of 2 bytes
_LEAST_LINES = 8  # rows longer than so many lines are padded to whole ones, by less than an eighth
_ANY_STRIDE = ("RowProgram", "MatVec", "ColumnStats", "Gemm")  # steps that read rows of any stride
_CONTIGUOUS = ("batched_matmul", "accumulate")  # but not those of these products


def padded_length(length: int) -> int:
    """Return the elements from row to row of a 16-bit value whose rows of so many elements are padded."""
    unit = _L2_LINE if length > _LEAST_LINES * _L2_LINE else LINE
    return -(-length // unit) * unit


def operands_to_pad(product: Node) -> list[Node]:
    """List the matrices among a 16-bit product's operands that our kernel reads faster, or at all, if padded.

    A single row needs no stride.
    """
    matrices = dict.fromkeys(strip_transposes(operand)[0] for operand in product.inputs)
    return [m for m in matrices if m.shape[0] > 1 and padded_length(m.shape[1]) != m.shape[1]]


def unaligned_operands(product: Node) -> list[Node]:
    """List those among them that it does not read otherwise: their rows do not begin at multiples of 16 bytes."""
    return [m for m in operands_to_pad(product) if m.shape[1] % LINE]


def may_be_padded(matrix: Node) -> bool:
    """Whether a matrix is a value that steps write, not an argument, a constant or a view.

    Nor is it a single column, whose transpose is read as a row without gaps.
    """
    return matrix.shape[1] > 1 and matrix.op not in ("input", "const", *g.VIEWS)


def can_be_padded(value: Node, steps: Sequence[Step], results: Collection[Node]) -> bool:
    """Whether the rows of a value can be padded: our kernels write it, for steps that take any stride.

    `results` are the values that are read after the last step.
    """
    writers = [step for step in steps if value in step.outputs]
    if value in results or not may_be_padded(value) or not writers:
        return False
    if not all(step.kind == "RowProgram" or step.by_tiles for step in writers):
        return False
    for step in steps:
        for read in (*step.inputs, *step.repair_inputs):
            if base_of(read) is value:
                any_stride = step.kind in _ANY_STRIDE and not any(n.op in _CONTIGUOUS for n in step.nodes)
                if not any_stride or any(view.op in ("reshape", "repeat") for view in view_chain(read)):
                    return False
    return True
