"""Powers of negative numbers in the code of a graph.

`torch.fx` writes `-2.0 ** x`, which Python reads as `-(2.0 ** x)`.
Compilers run the graph's nodes, so this is for graphs whose code is called.
"""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import GraphModule, Node


def call_powers_of_numbers(module: GraphModule) -> None:
    """Have powers of numbers written as calls, in a captured graph and the graphs that it calls."""
    for each in (m for m in module.modules() if isinstance(m, GraphModule)):
        powers = [n for n in each.graph.nodes if n.target is operator.pow and not isinstance(n.args[0], Node)]
        for node in powers:
            node.target = _power
        if powers:
            each.recompile()


def _power(base: Any, exponent: Any) -> Any:
    return base**exponent
