"""States of reductions: what shards compute of their own elements, and how the states of several shards merge.

Merging is associative up to rounding. A shard without elements has the identity of the merge as its state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeAlias

from ... import dtypes
from ...ir import graph as g
from ...ir.graph import Graph, Node
from ...rewrite.reductions import counted_logsumexp, largest_and_others

Parts: TypeAlias = tuple[Node, ...]  # of one state


@dataclass(frozen=True)
class StateRule:
    """The state of a reduction along the axis that is split.

    Attributes
    ----------
    name : str
        Of the rule, in `RULES`.
    names : tuple of str
        Of the parts of the state.
    local : callable
        `local(x, axis)` returns the parts for the elements of a shard.
    identity : callable
        `identity(dtype)` returns the parts for no elements, as Python numbers.
    merge : callable
        `merge(states)` returns the parts for the elements of all shards.
    value : callable
        `value(parts)` returns the reduction.
    gives_position : bool
        Whether the last part is a position along the axis. That of `local` is one among the elements of a shard.
    """

    name: str
    names: tuple[str, ...]
    local: Callable[[Node, int], Parts]
    identity: Callable[[str], tuple[float, ...]]
    merge: Callable[[Sequence[Parts]], Parts]
    value: Callable[[Parts], Node] = lambda parts: parts[-1]
    gives_position: bool = False


def rule_of(node: Node) -> StateRule | None:
    """Return the rule of a reduction or of a contraction; None for operators whose results do not merge."""
    return RULES.get({"matmul": "contraction", "logsumexp": "counted expsum"}.get(node.op, node.op))


def _fold(op: str, values: Sequence[Node]) -> Node:
    return reduce(lambda a, b: g.pointwise(op, a, b), values)


def _select(condition: Node, chosen: Node, other: Node) -> Node:
    return g.pointwise("where", condition, chosen, other)


def _is(op: str, a: Node, b: Node | float) -> Node:
    return g.pointwise(op, a, b if isinstance(b, Node) else g.const(b))


def _reduction(op: str, merge: str, identity: Callable[[str], float]) -> StateRule:
    """Return the rule of a reduction that merges by a pointwise operator."""
    return StateRule(
        op,
        (op,),
        lambda x, axis: (g.reduce(op, x, axis),),
        lambda dtype: (identity(dtype),),
        lambda states: (_fold(merge, [part for (part,) in states]),),
    )


def _lowest(dtype: str) -> float:
    if dtypes.is_float(dtype):
        return -math.inf
    return 0 if dtype == "bool" else int(_limits(dtype)[0])


def _highest(dtype: str) -> float:
    if dtypes.is_float(dtype):
        return math.inf
    return 1 if dtype == "bool" else int(_limits(dtype)[1])


def _limits(dtype: str) -> tuple[int, int]:
    bits, signed = 8 * dtypes.ITEMSIZE[dtype], not dtype.startswith("u")
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)


_NOWHERE = (1 << 63) - 1  # behind all positions


def _first_place(op: str, best: str, identity: Callable[[str], float]) -> StateRule:
    """Return the rule of the first position of an extremum `op`, or of NaN, which merges by the operator `best`."""

    def merge(states: Sequence[Parts]) -> Parts:
        extremes, places = zip(*states, strict=True)
        extreme = _fold(best, extremes)
        found = [
            _select(_is_same(own, extreme), place, g.const(_NOWHERE))
            for own, place in zip(extremes, places, strict=True)
        ]
        return extreme, _fold("minimum", found)

    return StateRule(
        f"arg{op}",
        (op, f"arg{op}"),
        lambda x, axis: (g.reduce(op, x, axis), g.reduce(f"arg{op}", x, axis)),
        lambda dtype: (identity(dtype), _NOWHERE),
        merge,
        gives_position=True,
    )


def _is_same(a: Node, b: Node) -> Node:
    """Whether two numbers are equal, or both NaN."""
    both = g.pointwise("logical_and", g.pointwise("isnan", a), g.pointwise("isnan", b))
    return g.pointwise("logical_or", _is("equal", a, b), both)


# Reductions about the maximum --------------------------------------------------------------------------------------


def _rescaled(parts: Sequence[Node], tops: Sequence[Node], top: Node, at_top: Sequence[Node]) -> Node:
    """Sum `parts` times exp(top of the shard - top of all), where that top is the smaller one, and else `at_top`.

    Shards of which all elements are -inf add nothing unless all shards are such.
    """
    terms = []
    for part, own, same in zip(parts, tops, at_top, strict=True):
        scaled = g.pointwise("multiply", part, g.pointwise("exp", g.pointwise("subtract", own, top)))
        scaled = _select(_is("equal", own, -math.inf), g.const(0.0), scaled)
        terms.append(_select(_is("equal", own, top), same, scaled))
    return _fold("add", terms)


def _merge_expsums(states: Sequence[Parts]) -> Parts:
    tops, sums = zip(*states, strict=True)
    top = _fold("maximum", tops)
    return top, _rescaled(sums, tops, top, sums)


def _merge_counted(states: Sequence[Parts]) -> Parts:
    tops, counts, others = zip(*states, strict=True)
    top = _fold("maximum", tops)
    same = [_is("equal", own, top) for own in tops]
    count = _fold("add", [_select(at, n, g.const(0.0)) for at, n in zip(same, counts, strict=True)])
    all_of_it = [g.pointwise("add", n, rest) for n, rest in zip(counts, others, strict=True)]
    return top, count, _rescaled(all_of_it, tops, top, others)


def _merge_distances(states: Sequence[Parts]) -> Parts:
    """Merge sums of x - m, with m the maximum of a shard: moving m to that of all adds count (m - top).

    A shard without elements adds 0; one whose maximum is that of all keeps its sum; any other of -inf alone makes it
    -inf.
    """
    tops, counts, sums = zip(*states, strict=True)
    top = _fold("maximum", tops)
    terms = []
    for own, count, total in zip(tops, counts, sums, strict=True):
        moved = g.pointwise("add", total, g.pointwise("multiply", count, g.pointwise("subtract", own, top)))
        moved = _select(_is("equal", own, -math.inf), g.const(-math.inf), moved)
        moved = _select(_is("equal", own, top), total, moved)
        terms.append(_select(_is("equal", count, 0.0), g.const(0.0), moved))
    return top, _fold("add", counts), _fold("add", terms)


def _merge_expdistances(states: Sequence[Parts]) -> Parts:
    """Merge sums of exp(x - m) and of (x - m) exp(x - m), with m a shard's maximum, about the maximum of all."""
    tops, sums, products = zip(*states, strict=True)
    top, total = _merge_expsums(list(zip(tops, sums, strict=True)))
    terms = []
    for own, part, product in zip(tops, sums, products, strict=True):
        down = g.pointwise("subtract", own, top)
        moved = g.pointwise("add", product, g.pointwise("multiply", down, part))
        moved = g.pointwise("multiply", g.pointwise("exp", down), moved)
        moved = _select(_is("equal", own, top), product, moved)
        terms.append(_select(_is("equal", part, 0.0), g.const(0.0), moved))  # no elements: any other sum is at least 1
    return top, total, _fold("add", terms)


# Moments -----------------------------------------------------------------------------------------------------------


def _local_moments(x: Node, axis: int) -> Parts:
    x = g.cast(x, dtypes.compute_dtype(x.dtype))
    mean = g.reduce("mean", x, axis)
    rest = g.reduce("mean", g.pointwise("subtract", x, mean), axis)
    return _count(x, axis), mean, rest, g.reduce("moment2", x, axis)


def _merge_moments(states: Sequence[Parts]) -> Parts:
    """Merge means and biased variances (Chan, Golub and LeVeque, 1983), weighted by numbers of elements.

    A mean is kept in two parts, as its rounding would be squared: means are subtracted from the first one that has
    elements, to which they are close. Shards without elements have no weight, whatever their parts.
    """
    counts, means, rests, variances = zip(*states, strict=True)
    zero = g.const(0.0)
    empty = [_is("equal", n, 0.0) for n in counts]
    total = _fold("add", counts)
    base = means[-1]
    for none, mean in zip(reversed(empty[:-1]), reversed(means[:-1]), strict=True):
        base = _select(none, base, mean)
    shares = [_select(none, zero, g.pointwise("divide", n, total)) for none, n in zip(empty, counts, strict=True)]
    shifts = []
    for none, mean, rest in zip(empty, means, rests, strict=True):
        shift = g.pointwise("add", g.pointwise("subtract", mean, base), rest)
        shifts.append(_select(none, zero, shift))
    shift = _fold("add", [g.pointwise("multiply", s, d) for s, d in zip(shares, shifts, strict=True)])
    terms = []
    for none, share, own, variance in zip(empty, shares, shifts, variances, strict=True):
        distance = g.pointwise("square", g.pointwise("subtract", own, shift))
        terms.append(_select(none, zero, g.pointwise("multiply", share, g.pointwise("add", variance, distance))))
    mean = g.pointwise("add", base, shift)
    return total, mean, g.pointwise("add", g.pointwise("subtract", base, mean), shift), _fold("add", terms)


def _count(x: Node, axis: int) -> Node:
    return g.cast(g.const(float(x.shape[axis])), dtypes.compute_dtype(x.dtype))


_ROWS = (
    _reduction("sum", "add", lambda dtype: 0),
    _reduction("prod", "multiply", lambda dtype: 1),
    _reduction("max", "maximum", _lowest),
    _reduction("min", "minimum", _highest),
    _first_place("max", "maximum", _lowest),
    _first_place("min", "minimum", _highest),
    StateRule(
        "expsum",
        ("max", "expsum"),
        lambda x, axis: (g.reduce("max", x, axis), g.reduce("expsum", x, axis)),
        lambda dtype: (-math.inf, 0.0),
        _merge_expsums,
    ),
    StateRule(  # logsumexp of float64, see `rewrite.reductions.lower_logsumexp`
        "counted expsum",
        ("max", "count", "others"),
        lambda x, axis: ((top := g.reduce("max", x, axis)), *largest_and_others(x, top, axis)),
        lambda dtype: (-math.inf, 0.0, 0.0),
        _merge_counted,
        lambda parts: counted_logsumexp(*parts),
    ),
    StateRule(
        "distances",
        ("max", "count", "distances"),
        lambda x, axis: (g.reduce("max", x, axis), _count(x, axis), g.reduce("distances", x, axis)),
        lambda dtype: (-math.inf, 0.0, 0.0),
        _merge_distances,
    ),
    StateRule(
        "expdistances",
        ("max", "expsum", "expdistances"),
        lambda x, axis: tuple(g.reduce(op, x, axis) for op in ("max", "expsum", "expdistances")),
        lambda dtype: (-math.inf, 0.0, 0.0),
        _merge_expdistances,
    ),
    StateRule(
        "moment2",
        ("count", "mean", "rest of mean", "moment2"),
        _local_moments,
        lambda dtype: (0.0, 0.0, 0.0, 0.0),
        _merge_moments,
    ),
    StateRule(  # a product whose operands are both split; `local` takes the product of a shard
        "contraction",
        ("sum",),
        lambda x, axis: (x,),
        lambda dtype: (0.0,),
        lambda states: (_fold("add", [part for (part,) in states]),),
    ),
)

RULES = {row.name: row for row in _ROWS}


def merge(rules: Sequence[str], parts: Sequence[tuple[g.Shape, str]], count: int) -> Graph:
    """Return the graph that merges the states of `count` shards.

    Parameters
    ----------
    rules : sequence of str
        Names of the rules of one state.
    parts : sequence of (shape, dtype)
        Of the arrays of one state. The graph's inputs are those of the first shard, then those of the second, and so
        on.
    count : int
    """
    inputs = [
        g.argument(k * len(parts) + j, f"part{j} of {k}", *part) for k in range(count) for j, part in enumerate(parts)
    ]
    outputs: list[Node] = []
    for name in rules:
        first = len(outputs)
        states = [inputs[k * len(parts) + first :][: len(RULES[name].names)] for k in range(count)]
        outputs += RULES[name].merge([tuple(state) for state in states])
    return Graph(inputs, [g.cast(n, dtype) for n, (_, dtype) in zip(outputs, parts, strict=True)])
