"""Accumulators of a stage: which reductions share one, and its type in `kernels_cu/reductions.cuh`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..ir.graph import Node
from ..ir.operators import REDUCTIONS, extended_extremum, extensions, place_bits
from ..plan.schedule import Step
from .c_types import c_type
from .shares import exponential

_SHARES = "ShareSum"


class Accumulator(NamedTuple):
    """An accumulator of a stage: its field in the totals, its device type, its operand, the reductions that read it.

    `term` is the value exp(x - m) of a later stage, if there is one that is what it adds up: x is its operand, m the
    maximum that it finds. Lanes keep it as they add it up.
    """

    name: str
    kind: str
    operand: Node
    readers: list[Node]
    term: Node | None = None

    @property
    def has_shares(self) -> bool:
        """Whether what it adds up is relative to a base of its own, of two words."""
        return self.kind.startswith(_SHARES)

    @property
    def sums_exponentials(self) -> bool:
        """Whether it adds up exponentials, whatever else it finds."""
        return "ExpSum<" in self.kind or _SHARES in self.kind


def find_accumulators(
    step: Step, reductions: dict[Node, list[Node]], shares_of: Callable[[Node, list[Node]], set[Node]]
) -> list[Accumulator]:
    """Make one accumulator for each reduction, or for several that share it.

    Those about an extremum of an operand share one, which gives that extremum, too.

    Parameters
    ----------
    step : Step
    reductions : dict
        The reductions of the stage, by operand.
    shares_of : callable
        Returns the quotients of an exponential by its sums, the second argument, if nothing else reads it.
    """
    found: list[Accumulator] = []
    for operand, nodes in reductions.items():
        groups: dict[str, list[Node]] = {}
        for node in nodes:
            groups.setdefault(extended_extremum(node.op) or node.op, []).append(node)
        # Those that extend nothing come first.
        for op, readers in sorted(groups.items(), key=lambda group: any(n.op != group[0] for n in group[1])):
            kind = _type_of(op, readers)
            # What extends the sum of exponentials adds element by element.
            term = exponential(step, operand, readers) if kind.startswith("ExpSum<Top<") else None
            if term is not None and shares_of(term, readers):
                kind = kind.replace("ExpSum", _SHARES, 1)
            found.append(Accumulator(f"t{len(found)}", kind, operand, readers, term))
    return found


def _type_of(op: str, readers: list[Node]) -> str:
    """Return the C++ type of the accumulator that reductions share: that of `op`, or its base with extensions."""
    x, ops = readers[0].inputs[0], {n.op for n in readers}
    element = c_type(x.dtype if REDUCTIONS[readers[0].op].gives_position else readers[0].dtype)
    if ops == {op}:
        return f"{REDUCTIONS[op].accumulator}<{element}>"
    kind = f"{REDUCTIONS[op].base}<{element}>"
    for row in extensions(ops):
        place = f", u{place_bits(x.shape[readers[0].axis])}" if row.gives_position else ""
        kind = f"{row.accumulator}<{kind}{place}>"
    return kind
