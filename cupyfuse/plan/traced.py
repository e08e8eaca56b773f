"""What a trace of a function leaves for planning."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..ir.graph import Graph
from ..ir.parts import Viewed
from ..trace import Axes, AxisLabels, Call


@dataclass(frozen=True)
class Traced:
    """The trace of a function.

    Attributes
    ----------
    name : str
    graph : Graph
    axes : tuple
        For each result.
    calls : tuple of Call
        The operations as written.
    numpy_only : bool
        Whether all of them are NumPy's functions or array operators, none this package's.
    viewed : dict
        For views of computed values that the graph computes again: the value, and which view of it.
    at_risk : tuple of int
        Positions of arguments that the function, as written, may have changed where it raises for some values.
    saved : int
        How many results, the last ones, are saved for a backward pass.
    caught : str
        The name of an operation whose errors for some values the function catches, if there is one.
    """

    name: str
    graph: Graph
    axes: tuple[Axes | AxisLabels, ...]
    calls: tuple[Call, ...]
    numpy_only: bool = True
    viewed: Viewed = field(default_factory=dict)
    at_risk: tuple[int, ...] = ()
    saved: int = 0
    caught: str = ""
