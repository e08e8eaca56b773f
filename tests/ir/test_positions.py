"""The numbers of rows and columns, which kernels compute where they are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from passes import execute

from cupyfuse.engines.numpy import NumpyExecutable
from cupyfuse.engines.row_blocks import load
from cupyfuse.ir import graph as g
from cupyfuse.ir.graph import Graph, Node
from cupyfuse.plan.build import build
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.traced import Traced
from cupyfuse.settings import Settings

R, C = 37, 45


def leaf(number: int, shape: tuple[int, int], dtype: str = "float32") -> Node:
    return g.argument(number, f"x{number}", shape, dtype)


def planned(inputs: list[Node], *outputs: Node, settings: Settings | None = None) -> Plan:
    return build(Traced("positions", Graph(inputs, list(outputs)), ((0, 1),) * len(outputs), ()), {}, settings)


def chosen(x: Node, label: Node, axis: int) -> Node:
    """The elements of a matrix at the positions that labels give."""
    same = g.pointwise("equal", g.positions(x.shape[axis], axis, "int64"), label)
    return g.reduce("sum", g.pointwise("where", same, x, g.const(0.0)), axis)


Case = tuple[Callable[[Node, Node], Node], Callable[[Any, Any], Any]]
CASES: dict[str, Case] = {
    "one of each row": (lambda x, label: chosen(x, label, 1), lambda x, k: x[np.arange(len(k)), k[:, 0]][:, None]),
    "weighted by column": (
        lambda x, label: g.pointwise("multiply", x, g.positions(x.shape[1], 1)),
        lambda x, k: x * np.arange(x.shape[1], dtype=np.float32),
    ),
    "weighted by row": (
        lambda x, label: g.pointwise("add", x, g.positions(x.shape[0], 0)),
        lambda x, k: x + np.arange(x.shape[0], dtype=np.float32)[:, None],
    ),
    "sums of columns weighted by row": (
        lambda x, label: g.reduce("max", g.pointwise("add", x, g.positions(x.shape[0], 0)), 0),
        lambda x, k: (x + np.arange(x.shape[0], dtype=np.float32)[:, None]).max(0, keepdims=True),
    ),
    "sums of columns and their number": (
        lambda x, label: g.pointwise("add", g.reduce("max", x, 0), g.positions(x.shape[1], 1)),
        lambda x, k: x.max(0, keepdims=True) + np.arange(x.shape[1], dtype=np.float32),
    ),
    "the numbers alone": (
        lambda x, label: g.broadcast(g.positions(x.shape[1], 1, "int64"), x.shape),
        lambda x, k: np.broadcast_to(np.arange(x.shape[1]), x.shape),
    ),
    "of a product": (
        lambda x, label: chosen(g.matmul(x, g.transpose(x)), label, 1),
        lambda x, k: (x @ x.T)[np.arange(len(k)), k[:, 0]][:, None],
    ),
}


# Products are cuBLAS's, which the kernels on the CPU do without.
RUNS = [(name, engine) for name in CASES for engine in ("numpy", "host") if (name, engine) != ("of a product", "host")]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("shape", [(R, C), (1, C), (R, 1), (1, 1), (300, 1000)], ids=str)
@pytest.mark.parametrize(("name", "engine"), RUNS)
def test_both_engines(name: str, engine: str, shape: tuple[int, int]) -> None:
    build_graph, expected = CASES[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    label = rng.integers(0, min(shape) if name == "of a product" else shape[1], (shape[0], 1))
    inputs = [leaf(0, shape), leaf(1, (shape[0], 1), "int64")]
    (found,) = execute(planned(inputs, build_graph(*inputs)), [x, label], engine)
    np.testing.assert_allclose(found, expected(x, label), rtol=1e-5, atol=1e-5)


def test_blocks_of_rows_know_their_columns_and_take_their_rows_from_all() -> None:
    x, k = leaf(0, (4000, 64)), leaf(1, (4000, 1), "int64")
    w = leaf(2, (64, 300))
    tight = Settings(max_workspace=1 << 20)
    y = g.matmul(x, w)
    plan = planned([x, k, w], chosen(y, k, 1), settings=tight)
    assert plan.blocks is not None and plan.blocks.count > 1
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(x.shape), rng.integers(0, 300, (4000, 1)), rng.standard_normal(w.shape)]
    arrays = [a.astype(n.dtype) for a, n in zip(arrays, (x, k, w), strict=True)]
    (found,) = load(NumpyExecutable, plan, arrays)(arrays, [None])
    wanted = np.take_along_axis(arrays[0] @ arrays[2], arrays[1], 1)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)
    numbered = g.reduce("max", g.pointwise("multiply", y, g.positions(4000, 0)), 1)
    plan = planned([x, k, w], numbered, settings=tight)
    assert plan.blocks is not None and plan.blocks.count > 1
    (found,) = load(NumpyExecutable, plan, arrays)(arrays, [None])
    wanted = (arrays[0] @ arrays[2] * np.arange(4000)[:, np.newaxis]).max(axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-2)
