"""Matrices side by side: kernels write the pieces of a result where they belong; others are stored first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from passes import execute
from torch.nn import functional as F
from torch_rules import Following, to_array

from cupyfuse.ir import graph as g
from cupyfuse.ir.concats import between_zeros, columns_of, concat
from cupyfuse.plan.build import build
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.traced import Traced
from cupyfuse.rewrite import repeat_columns, sink_concats
from cupyfuse.settings import Settings


def rotary(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def plan_of(function: Callable[..., Any], *tensors: Any) -> tuple[Plan, Any]:
    """The plan of a function of PyTorch's, and its result."""
    with Following(list(tensors)) as mode:
        expected = function(*tensors)
    value = mode.values[id(expected)]
    graph = g.Graph(mode.trace.inputs, [value.tracer._node])
    return build(Traced("function", graph, (value.tracer._axes,), ())), expected


# Functions of x and y, with as many columns each; launches as row programs, and whether some are stored first.
FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], int, bool]] = {
    "halves": (lambda x, y: torch.cat((x.exp(), y.tanh()), -1), 1, False),
    "an argument": (lambda x, y: torch.cat((x, y * 2), -1), 1, False),
    "the same twice": (lambda x, y: torch.cat((x.exp(), x.exp()), -1), 1, False),
    "other widths": (lambda x, y: torch.cat((x[..., 1:].exp(), y), -1), 2, False),
    "sums of rows": (lambda x, y: torch.cat((x - x.sum(-1, keepdim=True), y.softmax(-1)), -1), 1, False),
    "one column": (lambda x, y: torch.cat((x.sum(-1, keepdim=True), y), -1), 2, False),
    "nested": (lambda x, y: torch.cat((torch.cat((x, y), -1) * 2, x.exp()), -1), 1, False),
    "a part of it": (lambda x, y: torch.cat((x, y), -1)[..., 2:-2] * 2, 1, False),
    "rotary": (lambda x, y: rotary(x, y, y + 1), 1, False),
    "read as a whole": (lambda x, y: torch.cat((x, y * 2), -1).softmax(-1), 1, True),
}


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 16), (1, 16), (3, 6), (70, 130)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_write_pieces_where_they_belong(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    function, programs, stored = FUNCTIONS[name]
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(dtype) for k in (1, 2))
    plan, expected = plan_of(function, x, y)
    assert ("Copy" in [s.kind for s in plan.steps]) == stored
    if not stored:
        assert sum(s.kind == "RowProgram" for s in plan.steps) <= programs + (name == "a part of it")
    eps, largest = float(torch.finfo(dtype).eps), float(expected.abs().max())
    for engine in ("numpy", "host"):
        (found,) = execute(plan, [to_array(x), to_array(y)], engine)
        np.testing.assert_allclose(
            found.astype(np.float64), expected.double().numpy(), rtol=0, atol=8 * eps * largest, err_msg=engine
        )


def test_products_are_copied_into_their_place() -> None:
    """Their own kernels write without gaps."""
    x, w, v = torch.randn(20, 8), torch.randn(12, 8), torch.randn(4, 8)
    plan, expected = plan_of(lambda x, w, v: torch.cat((F.linear(x, w), F.linear(x, v)), -1), x, w, v)
    for engine in ("numpy", "host"):
        (found,) = execute(plan, [to_array(t) for t in (x, w, v)], engine)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-5)


def test_rows_that_come_again_are_cut_where_they_are() -> None:
    """As of the cosines of rotary embeddings, which are those of all heads: nothing is copied."""
    x, cos, sin = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 1, 16), torch.randn(2, 5, 1, 16)
    plan, expected = plan_of(rotary, x, cos, sin)
    assert [s.kind for s in plan.steps] == ["RowProgram"]
    arrays = [to_array(t.reshape(-1, 16)) for t in (x, cos, sin)]
    for engine in ("numpy", "host"):
        (found,) = execute(plan, arrays, engine)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_results_side_by_side_are_no_blocks() -> None:
    x, w = torch.randn(64, 8), torch.randn(512, 8)
    with Following([x, w]) as mode:
        y = F.linear(x, w)
        result = torch.cat((y.exp()[..., :256], (y * 2)[..., 256:]), -1)
    value = mode.values[id(result)]
    traced = Traced("wide", g.Graph(mode.trace.inputs, [value.tracer._node]), (value.tracer._axes,), ())
    plan = build(traced, None, Settings(max_workspace=1 << 12))
    assert plan.blocks is None and "side by side" in str(plan)


def leaf(rows: int, cols: int, number: int = 0) -> g.Node:
    return g.argument(number, f"x{number}", (rows, cols), "float32")


def test_identities() -> None:
    a, b, c = leaf(4, 6), leaf(4, 2, 1), leaf(4, 8, 2)
    both = concat([a, b])
    assert both.shape == (4, 8) and concat([a]) is a
    total = sink_concats(g.pointwise("add", both, c))
    assert total.op == "concat" and [p.op for p in total.inputs] == ["add", "add"]
    assert [p.shape for p in total.inputs] == [(4, 6), (4, 2)]
    assert [p.inputs[1].op for p in total.inputs] == ["slice", "slice"]
    per_row = sink_concats(g.pointwise("multiply", both, leaf(4, 1, 3)))
    assert all(p.inputs[1].op == "input" for p in per_row.inputs)
    part = sink_concats(columns_of(both, 4, 3))
    assert part.op == "concat" and [p.shape[1] for p in part.inputs] == [2, 1]
    assert sink_concats(columns_of(both, 6, 2)) is b
    nested = sink_concats(concat([both, c]))
    assert nested.inputs == (a, b, c)
    assert [p.shape[1] for p in between_zeros(b, 3, 8).inputs] == [3, 2, 3]
    other = concat([b, a])
    assert [p.shape[1] for p in sink_concats(g.pointwise("add", both, other)).inputs] == [2, 4, 2]
    assert repeat_columns(columns_of(c, 1, 3)).op == "slice"
