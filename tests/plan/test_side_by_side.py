"""Matrices side by side: kernels write the pieces where they belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from passes import execute
from torch.nn import functional as F
from torch_rules import Following, to_array

import cupyfuse as cf
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


def plan_of(function: Callable[..., Any], *tensors: Any, settings: Settings | None = None) -> tuple[Plan, Any]:
    """The plan of a function of PyTorch's, and its result."""
    with Following(list(tensors)) as mode:
        expected = function(*tensors)
    value = mode.values[id(expected)]
    graph = g.Graph(mode.trace.inputs, [value.tracer._node])
    traced = Traced("function", graph, (value.tracer._axes,), ())
    return build(traced, None, settings or Settings()), expected


# Functions of x and y, with as many columns each, and their launches.
FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], int]] = {
    "halves": (lambda x, y: torch.cat((x.exp(), y.tanh()), -1), 1),
    "an argument": (lambda x, y: torch.cat((x, y * 2), -1), 1),
    "the same twice": (lambda x, y: torch.cat((x.exp(), x.exp()), -1), 1),
    "other widths": (lambda x, y: torch.cat((x[..., 1:].exp(), y), -1), 2),
    "sums of rows": (lambda x, y: torch.cat((x - x.sum(-1, keepdim=True), y.softmax(-1)), -1), 1),
    "one column": (lambda x, y: torch.cat((x.sum(-1, keepdim=True), y), -1), 1),
    "nested": (lambda x, y: torch.cat((torch.cat((x, y), -1) * 2, x.exp()), -1), 1),
    "a part of it": (lambda x, y: torch.cat((x, y), -1)[..., 2:-2] * 2, 1),
    "rotary": (lambda x, y: rotary(x, y, y + 1), 1),
    "reduced": (lambda x, y: torch.cat((x, y * 2), -1).softmax(-1), 2),
    "read as a whole": (lambda x, y: torch.cat((x, y[..., 1:] * 2), -1).softmax(-1), 3),
}


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(5, 16), (1, 16), (3, 6), (70, 130)], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_write_pieces_where_they_belong(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    function, launches = FUNCTIONS[name]
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(k)).to(dtype) for k in (1, 2))
    plan, expected = plan_of(function, x, y)
    if shape == (5, 16):
        assert plan.launches == launches
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


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("columns", [3, 5, 8])
def test_epilogues_write_pieces_between_multiples_of_16_bytes(columns: int, rows: int) -> None:
    """Rows of the whole begin anywhere, whatever the width of the product."""
    generator = torch.Generator().manual_seed(0)
    x, w, v = (torch.randn(n, 16, generator=generator).to(torch.bfloat16) for n in (rows, 24, 32))
    y = torch.randn(rows, columns, generator=generator).to(torch.bfloat16)

    def function(x: Any, w: Any, v: Any, y: Any) -> Any:
        return torch.cat((F.gelu(F.linear(x, w)), y, F.linear(x, v).tanh()), -1)

    plan, expected = plan_of(function, x, w, v, y, settings=Settings(epilogues="always"))
    assert sum(step.by_tiles for step in plan.steps) == 2
    for engine in ("numpy", "host"):
        (found,) = execute(plan, [to_array(t) for t in (x, w, v, y)], engine)
        np.testing.assert_allclose(found.astype(np.float32), expected.float().numpy(), rtol=2e-2, atol=2e-2)


def test_what_is_read_as_a_whole_several_times_is_stored_once() -> None:
    """A norm takes the mean of its operand, and of its deviation's square."""
    x, y, w = torch.randn(20, 8), torch.randn(20, 5), torch.randn(4, 13)
    plan, expected = plan_of(lambda x, y, w: F.linear(F.layer_norm(torch.cat((x.exp(), y), -1), (13,)), w), x, y, w)
    assert [s.kind for s in plan.steps].count("Copy") == 1
    for engine in ("numpy", "host"):
        (found,) = execute(plan, [to_array(t) for t in (x, y, w)], engine)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-5)
    plan, _ = plan_of(lambda x, y: torch.cat((x, y), -1).softmax(-1), x, y)
    assert [s.kind for s in plan.steps].count("Copy") == 1


def test_rows_that_come_again_are_cut_where_they_are() -> None:
    """As of the cosines of rotary embeddings, which are those of all heads: nothing is copied."""
    x, cos, sin = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 1, 16), torch.randn(2, 5, 1, 16)
    plan, expected = plan_of(rotary, x, cos, sin)
    assert [s.kind for s in plan.steps if s.launches] == ["RowProgram"]
    arrays = [to_array(t.reshape(-1, 16)) for t in (x, cos, sin)]
    for engine in ("numpy", "host"):
        (found,) = execute(plan, arrays, engine)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_blocks_of_rows() -> None:
    x, w = torch.randn(64, 8), torch.randn(512, 8)
    with Following([x, w]) as mode:
        y = F.linear(x, w)
        expected = torch.cat((y[..., 256:].exp(), y[..., :256] * 2), -1)
    value = mode.values[id(expected)]
    traced = Traced("wide", g.Graph(mode.trace.inputs, [value.tracer._node]), (value.tracer._axes,), ())
    plan = build(traced, None, Settings(max_workspace=1 << 14))
    assert plan.blocks is not None and plan.workspace <= 1 << 14
    for engine in ("numpy", "host"):
        (found,) = execute(plan, [to_array(x), to_array(w)], engine)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-4)


def test_what_products_read_is_written_in_pieces() -> None:
    """Into the workspace, and its memory is free for others once the product is there."""
    x, y, w = torch.randn(20, 8), torch.randn(20, 8), torch.randn(4, 16)
    plan, expected = plan_of(lambda x, y, w: F.linear(torch.cat((x.exp(), y.tanh()), -1), w).exp(), x, y, w)
    assert plan.launches == 3 and plan.workspace < 2 * 20 * 16 * 4
    for engine in ("numpy", "host"):
        (found,) = execute(plan, [to_array(t) for t in (x, y, w)], engine)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_pieces_stay_while_others_are_computed() -> None:
    """Of the workspace nothing is taken twice: the first piece is there before a product that the second one needs."""
    x, y, w, v = torch.randn(20, 8), torch.randn(20, 8), torch.randn(8, 8), torch.randn(4, 16)

    def function(x: Any, y: Any, w: Any, v: Any) -> Any:
        return F.linear(torch.cat((x.exp(), F.linear(F.linear(y, w), w).tanh()), -1), v)

    plan, expected = plan_of(function, x, y, w, v)
    for engine in ("numpy", "host"):
        (found,) = execute(plan, [to_array(t) for t in (x, y, w, v)], engine)
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-4, atol=1e-4)


def test_a_library_function_that_writes_to_its_operand() -> None:
    """It has a copy: an array of its own would be there only once all pieces are."""

    def replaced(x: Any, places: Any) -> Any:
        y = np.exp(x)
        np.put(y, places, 7.0)
        return y

    traced = cf.fuse(replaced).trace((cf.spec((5, 8), "float32"), cf.spec(3, "int64")))
    (result,), x = traced.graph.outputs, leaf(5, 4)
    whole = concat([g.pointwise("exp", x), g.pointwise("tanh", x)])
    graph = g.Graph([x, traced.graph.inputs[1]], [g.with_inputs(result, [whole, *result.inputs[1:]])])
    array, places = np.linspace(-1, 1, 20, dtype=np.float32).reshape(5, 4), np.array([0, 5, 39])
    expected = np.concatenate([np.exp(array), np.tanh(array)], axis=1)
    np.put(expected, places, 7.0)
    for engine in ("numpy", "host"):
        (found,) = execute(build(Traced("f", graph, ((0, 1),), traced.calls)), [array, places], engine)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def leaf(rows: int, cols: int, number: int = 0) -> g.Node:
    return g.argument(number, f"x{number}", (rows, cols), "float32")


def sunk(node: g.Node) -> g.Node:
    (found,) = sink_concats(g.Graph([], [node])).outputs
    return found


def test_identities() -> None:
    a, b, c = leaf(4, 6), leaf(4, 2, 1), leaf(4, 8, 2)
    both = concat([a, b])
    assert both.shape == (4, 8) and concat([a]) is a
    total = sunk(g.pointwise("add", both, c))
    assert total.op == "concat" and [p.op for p in total.inputs] == ["add", "add"]
    assert [p.shape for p in total.inputs] == [(4, 6), (4, 2)]
    assert [p.inputs[1].op for p in total.inputs] == ["slice", "slice"]
    per_row = sunk(g.pointwise("multiply", both, leaf(4, 1, 3)))
    assert all(p.inputs[1].op == "input" for p in per_row.inputs)
    part = sunk(columns_of(both, 4, 3))
    assert part.op == "concat" and [p.shape[1] for p in part.inputs] == [2, 1]
    assert sunk(columns_of(both, 6, 2)) is b
    assert sunk(concat([both, c])).inputs == (a, b, c)
    assert [p.shape[1] for p in between_zeros(b, 3, 8).inputs] == [3, 2, 3]
    other = concat([b, a])
    assert [p.shape[1] for p in sunk(g.pointwise("add", both, other)).inputs] == [2, 4, 2]
    assert repeat_columns(columns_of(c, 1, 3)).op == "slice"


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "prod", "sum", "amax", "argmax", "var", "layer_norm"])
def test_reductions_of_a_part_of_several(name: str) -> None:
    """A slice of matrices side by side may be of several again, which a reduction reads as a whole."""
    functions: dict[str, Callable[[Any], Any]] = {
        "softmax": lambda z: z.softmax(-1),
        "logsumexp": lambda z: z.logsumexp(-1),
        "prod": lambda z: (z * 0.5).prod(-1),
        "sum": lambda z: z.sum(-1),
        "amax": lambda z: z.amax(-1) + z.mean(-1),
        "argmax": lambda z: z.argmax(-1),
        "var": lambda z: z.var(-1),
        "layer_norm": lambda z: F.layer_norm(z, z.shape[-1:]),
    }
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    for part in (slice(2, -2), slice(3, -2), slice(1, 7)):
        plan, expected = plan_of(lambda x, y, p=part: functions[name](torch.cat((x * 2, y), -1)[..., p]), x, y)
        for engine in ("numpy", "host"):
            (found,) = execute(plan, [to_array(x), to_array(y)], engine)
            np.testing.assert_allclose(found.reshape(expected.shape), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_rows_of_pieces_are_reduced() -> None:
    """Of pieces of one width; others are stored, and read as a whole by all that goes with the reduction."""
    a, b, c = leaf(4, 6), leaf(4, 6, 1), leaf(4, 2, 2)
    assert sunk(g.reduce("max", concat([a, b]), 1)).op == "maximum"
    assert sunk(g.reduce("mean", concat([a, b]), 1)).op == "divide"
    for op, pieces in (("sum", [a, c]), ("argmax", [a, b])):
        both = g.pointwise("exp", concat(pieces))
        whole = sunk(g.pointwise("subtract", both, g.reduce(op, both, 1)))
        assert whole.op == "subtract" and whole.inputs[0].op == "exp"


def test_vectors_and_parts_of_what_is_reduced_are_read_as_a_whole_too() -> None:
    a, b, c = leaf(1, 5), leaf(1, 7, 1), leaf(4, 12, 2)
    scaled = g.pointwise("multiply", c, concat([a, b]))
    for value in (scaled, columns_of(concat([leaf(4, 8), leaf(4, 4, 1)]), 2, 9)):
        for op in ("argmax", "logsumexp"):
            assert sunk(g.reduce(op, value, 1)).op == op
    even = g.pointwise("multiply", c, concat([leaf(1, 6), leaf(1, 6, 1)]))
    assert sunk(g.reduce("sum", even, 1)).op == "add"
