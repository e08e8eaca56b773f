"""Column-wise scales that become one, and all identities together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from rewrites import SPECS, ops, simplified, traced
from support import HEADS, assert_close, normal, unit

import cupyfuse as cf
from cupyfuse import rewrite
from cupyfuse.ir import graph as g
from cupyfuse.ir.rebuild import rebuild

# Column-wise scales -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("(x @ w.T + b) / d * b + b", "divide -> multiply"),
        ("((x @ w.T - b) / np.sqrt(b + 1) * b + b) * 2", "divide -> multiply"),
        ("-(x @ w.T + b) * b * d", "negative -> multiply -> multiply"),
        ("b - (x @ w.T * 2 * d * b + b)", "multiply -> multiply -> multiply"),
        ("((b - x @ w.T) - b) / 3 / d", "divide -> divide"),
        ("z * b / d", "multiply -> divide"),
        ("cf.batch_norm(cf.linear(x, w), b, b, b, b) - 2.0", "divide -> multiply"),
    ],
)
def test_column_wise_scales_become_one(text: str, steps: str, rng: np.random.Generator) -> None:
    graph, notes = rewrite.simplify(traced(text))
    (note,) = (n for n in notes if n.identity.startswith("per-column scales"))
    assert note.what == steps
    names = steps.split(" -> ")
    assert note.saved == f"{42 * (sum(4 if n == 'divide' else 1 for n in names) - 1)} FLOPs"
    written = Counter(n.op for n in g.topological(traced(text).roots) if n.shape == (6, 7))
    full = Counter(n.op for n in g.topological(graph.roots, g.eager_inputs) if n.shape == (6, 7))
    expected = written - Counter(names) + Counter(multiply=1)
    assert {op: full[op] for op in ("add", "subtract", "multiply", "divide", "negative")} == {
        op: expected[op] for op in ("add", "subtract", "multiply", "divide", "negative")
    }
    arguments = [np.abs(normal(rng, s.shape, s.dtype)) + s.shape[0] % 2 for s in SPECS.values()]
    arguments = [a.astype(s.dtype) for a, s in zip(arguments, SPECS.values(), strict=True)]
    function = eval(f"lambda {', '.join(SPECS)}: {text}", {"np": np, "cf": cf})
    wide = function(*[a.astype(np.float64) for a in arguments])
    assert_close(cf.fuse(function)(*arguments), wide, 1e-5 * (1 + np.abs(wide).max()))


@pytest.mark.parametrize(
    "text",
    [
        "(x @ w.T + b) * b",
        "((x @ w.T + b) * b + b) * b - b",
        "(x @ w.T - b) / b + b",
        "((x @ w.T + r[:, None]) * b + b)",
        "(x @ w.T * b + z) * b + r[:, None]",
        "b / ((x @ w.T + b) * b)",
        "np.tanh((x @ w.T + b) * b) * 2",
        "(x + 1) * 2 + 3",
        "(lambda y: (y + y) * b * b)(x @ w.T)",
        "s * b / d * b + z",
        "(x @ w.T + b) * b * d",
    ],
)
def test_other_chains_are_left_alone(text: str) -> None:
    _, notes = simplified(text)
    assert not any("per-column scales" in n.identity for n in notes)


CHAINS = {
    "add": lambda y, v: y + v,
    "subtract": lambda y, v: y - v,
    "reversed": lambda y, v: v - y,
    "multiply": lambda y, v: y * v,
    "divide": lambda y, v: y / v,
    "negative": lambda y, v: -y,
}


@pytest.mark.rotates
@settings(max_examples=settings().max_examples // 4)
@given(
    names=st.lists(st.sampled_from(sorted(CHAINS)), min_size=2, max_size=8),
    inner=st.sampled_from(["onehot", "product", "matrix"]),
    scales=st.lists(st.sampled_from([1e-12, 1e-5, 0.1, 1.0, 3.0, 1e4, 1e8]), min_size=8, max_size=8),
    spread=st.sampled_from([0.0, 1e-6, 0.3]),
    bound=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_chain_is_much_less_accurate_than_as_written(
    names: list[str], inner: str, scales: list[float], spread: float, bound: bool, seed: int
) -> None:
    """Means far above deviations, factors of any size: at most 4 times the error as written, and some roundings."""
    rng = np.random.default_rng(seed)
    rows, columns = 9, 5
    table = (scales[0] * (1 + spread * rng.standard_normal((rows, columns)))).astype(np.float32)
    left = np.eye(rows) if inner == "onehot" else rng.standard_normal((rows, rows)) / rows
    vectors = [(s * (1 + spread * rng.standard_normal(columns))).astype(np.float32) for s in scales[: len(names)]]

    def chain(x: Any, t: Any, *vectors: Any) -> Any:
        y = t if inner == "matrix" else x @ t
        for name, vector in zip(names, vectors, strict=True):
            y = CHAINS[name](y, vector)
        return y

    arguments = [left.astype(np.float32), table, *vectors]
    parameters = ", ".join(f"v{i}" for i in range(len(names)))
    function = eval(f"lambda x, t, {parameters}: chain(x, t, {parameters})", {"chain": chain})
    with np.errstate(all="ignore"):
        exact, written = function(*[a.astype(np.float64) for a in arguments]), function(*arguments)
        fused = cf.fuse(function)
        result = (
            fused.bind(**{f"v{i}": v for i, v in enumerate(vectors)})(*arguments[:2]) if bound else fused(*arguments)
        )
        # Column by column: errors of one scale.
        error, allowed = (np.abs(a - exact).max(axis=0) for a in (result, written))
        allowed = 4 * allowed + 8 * unit("float32") * np.abs(exact).max(axis=0) + 1e-37
    known = np.isfinite(allowed) & np.isfinite(written).all(axis=0)
    assert (error <= allowed)[known].all()


def test_a_mean_far_above_the_deviation_cancels_as_written(rng: np.random.Generator) -> None:
    """What one multiply-add a column made of it had an error of 3e-2."""

    def normalised(onehot: Any, table: Any, mean: Any, std: Any, gamma: Any, beta: Any) -> Any:
        return (onehot @ table - mean) / std * gamma + beta

    table = (1e4 + 1e-2 * rng.standard_normal((50, 30))).astype(np.float32)
    onehot = np.eye(50, dtype=np.float32)[rng.integers(0, 50, 200)]
    vectors = [table.mean(axis=0), table.std(axis=0) + np.float32(1e-3), *normal(rng, (2, 30))]
    exact = normalised(*[a.astype(np.float64) for a in (onehot, table, *vectors)])
    fused = cf.fuse(normalised)
    bound = fused.bind(table=table, mean=vectors[0], std=vectors[1], gamma=vectors[2], beta=vectors[3])
    for result in (fused(onehot, table, *vectors), bound(onehot)):
        assert_close(result, exact, 4e-7 * (1 + np.abs(exact)))


def test_what_an_extreme_is_taken_from_is_not_folded_away(rng: np.random.Generator) -> None:
    """y - min(y) is zero where y is smallest, and nowhere below: its root is a number."""

    def spread(x: Any, w: Any, b: Any) -> Any:
        y = x @ w.T * b + b
        low, high = y.min(axis=0), y.max()
        return np.sqrt((y - low) / (high - low) * 2), np.sqrt(high - (y * b - b) / b + 1 - y) * 0

    x, w, b = normal(rng, (200, 30)), normal(rng, (40, 30)), np.abs(normal(rng, (40,))) + 1
    scaled, _ = cf.fuse(spread)(x, w, b)
    assert not np.isnan(scaled).any() and (scaled == 0).sum() == 40


def test_a_chain_is_folded_once_and_where_it_ends() -> None:
    _, notes = simplified("(lambda y: (y + 2, y * d))((x @ w.T + b) * b / b)")
    folds = [n.what for n in notes if "per-column scales" in n.identity]
    assert sorted(folds) == ["multiply -> divide", "multiply -> divide -> multiply"]


# All together -------------------------------------------------------------------------------------------------------


def test_simplifying_is_idempotent() -> None:
    for head in HEADS:
        columns = [cf.spec(7)] * (len(head.bound) - 3) + [cf.spec(1)] * (len(head.bound) > 2)
        fused = cf.fuse(head.function)
        values, _ = fused.parameters.bind((SPECS["x"], SPECS["w"], SPECS["b"], *columns), {})
        traced = fused.trace(values)
        once, _ = rewrite.simplify(traced.graph)
        twice, _ = rewrite.simplify(once)
        assert ops(once) == ops(twice)


def test_the_written_graph_is_left_alone() -> None:
    graph = traced("(x @ w.T + b).sum(axis=1)")
    before = [(n.op, n.inputs) for n in g.topological(graph.roots)]
    rewrite.simplify(graph)
    assert [(n.op, n.inputs) for n in g.topological(graph.roots)] == before


def test_notes_of_plans_reach_the_reader() -> None:
    text = str(cf.fuse(HEADS[1].function).plan(SPECS["x"], SPECS["w"], SPECS["b"]))
    assert "a reduction along an axis of length 1 is the identity" in text
    assert "logsumexp of 6 x 1 along axis 1 (2 times); saves 48 bytes each" in text
    assert "the sum of a linear map is a matrix-vector product" in text
    assert "evaluated as written" in text


def test_a_rewrite_that_changes_nothing_returns_the_graph_whose_order_is_known():
    x = g.argument(0, "x", (4, 3), "float32")
    graph = g.Graph([x], [g.pointwise("exp", g.pointwise("tanh", x))])
    assert rebuild(graph, lambda node: node) is graph
    assert rebuild(graph, rewrite.drop_no_ops).order is graph.order
    changed = rebuild(graph, lambda node: x if node.op == "tanh" else node)
    assert [n.op for n in changed.order] == ["input", "exp"] and [n.op for n in graph.order] == ["input", "tanh", "exp"]
