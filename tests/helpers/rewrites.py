"""Functions given as text, and what rewriting makes of their graphs."""

from __future__ import annotations

from collections import Counter

import numpy as np

import cupyfuse as cf
from cupyfuse import rewrite
from cupyfuse.ir import graph as g

SPECS = {
    "x": cf.spec((6, 5)),
    "w": cf.spec((7, 5)),
    "b": cf.spec(7),
    "r": cf.spec(6),
    "z": cf.spec((6, 7)),
    "h": cf.spec((7, 5), "float16"),
    "d": cf.spec(7, "float64"),
    "s": cf.spec((1, 7)),
}


def traced(text: str) -> g.Graph:
    """The graph of `lambda x, w, b, r, z, h, d, s: text`, as it was written."""
    function = eval(f"lambda {', '.join(SPECS)}: {text}", {"np": np, "cf": cf})
    trace = cf.fuse(function).trace(tuple(SPECS.values()))
    return trace.graph


def ops(graph: g.Graph) -> Counter[str]:
    """How often each operator is evaluated."""
    return Counter(n.op for n in g.topological(graph.roots, g.eager_inputs) if n.op not in ("input", "const"))


def simplified(text: str) -> tuple[Counter[str], list[rewrite.Note]]:
    graph, notes = rewrite.simplify(traced(text))
    return ops(graph), notes
