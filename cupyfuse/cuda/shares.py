"""Find the exponentials of a row, relative to its maximum, and their shares of their sum."""

from __future__ import annotations

from collections.abc import Callable

from ..ir.graph import Node
from ..plan.schedule import Step


def exponential(step: Step, operand: Node, readers: list[Node]) -> Node | None:
    """Return the value exp(x - m) for the operand x of these reductions and their maximum m, if a step computes it."""
    tops = [n for n in readers if n.op == "max"]
    for node in step.nodes:
        if node.op == "exp" and node.inputs[0].op == "subtract" and node.dtype == operand.dtype:
            x, top = node.inputs[0].inputs
            if x is operand and top in tops:
                return node
    return None


def shares_of(term: Node, step: Step, sums: list[Node], is_rounded: Callable[[Node], bool]) -> set[Node]:
    """Return the readers of an exponential, if all divide it by one of these sums.

    The exponential and its quotients have to satisfy `is_rounded`: 16 bits hide their errors.
    """
    readers = {n for n in step.nodes if term in n.inputs}
    divide = all(n.op == "divide" and n.inputs[0] is term and is_rounded(n) for n in readers)
    by_sum = all(n.inputs[-1] in sums and n.inputs[-1].op == "expsum" for n in readers)
    return readers if term not in step.outputs and is_rounded(term) and divide and by_sum else set()
