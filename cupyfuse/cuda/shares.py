"""Find the exponentials of a row, relative to its maximum, and their shares of their sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ir.graph import Node
from ..plan.schedule import Step

if TYPE_CHECKING:
    from .program import Program


def exponential(step: Step, operand: Node, readers: list[Node]) -> Node | None:
    """Return the value exp(x - m) for the operand x and its maximum m, which is among its reductions, if a step has it."""
    tops = [n for n in readers if n.op == "max"]
    for node in step.nodes:
        if node.op == "exp" and node.inputs[0].op == "subtract" and node.dtype == operand.dtype:
            x, top = node.inputs[0].inputs
            if x is operand and top in tops:
                return node
    return None


def shares_of(program: Program, term: Node, sums: list[Node]) -> set[Node]:
    """Return the readers of an exponential, if all are its quotient by one of these sums, rounded to 16 bits as it is."""
    readers = {n for n in program.step.nodes if term in n.inputs}
    alone = term not in program.step.outputs and not program.by_columns and program.domain[1] > 1
    divide = all(n.op == "divide" and n.inputs[0] is term and program.may_be_quick(n) for n in readers)
    by_sum = all(n.inputs[-1] in sums and n.inputs[-1].op == "expsum" for n in readers)
    return readers if alone and program.may_be_quick(term) and divide and by_sum else set()
