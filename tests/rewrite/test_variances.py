"""Squared distances from a mean take the pass of the mean: spellings, values, special values, gradients, and plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from passes import Passes, torch_passes
from support import HOST, INF, NAN, assert_equal, normal

import cupyfuse as cf
from cupyfuse import devices, rewrite, settings
from cupyfuse.ir import graph as g
from cupyfuse.settings import force_plans

CENTRES: dict[str, Callable[..., Any]] = {
    "mean": lambda x, axis: x - x.mean(axis=axis, keepdims=True),
    "average, negated": lambda x, axis: np.average(x, axis=axis, keepdims=True) - x,
    "sum": lambda x, axis: x - x.sum(axis=axis, keepdims=True) / x.shape[axis],
}
SQUARES: dict[str, Callable[..., Any]] = {
    "power": lambda d: d**2,
    "product": lambda d: d * d,
    "of sizes": lambda d: np.square(np.abs(d)),
}
TOTALS: dict[str, Callable[..., Any]] = {
    "sum": lambda s, axis: s.sum(axis=axis),
    "mean": lambda s, axis: s.mean(axis=axis),
    "unbiased": lambda s, axis: s.sum(axis=axis) / (s.shape[axis] - 1),
    "root": lambda s, axis: np.sqrt(s.sum(axis=axis, keepdims=True)),
}
SPELLINGS = list(itertools.product(CENTRES, SQUARES, TOTALS))
OTHERS: dict[str, Callable[..., Any]] = {
    "another centre": lambda x, axis: np.square(x - x.max(axis=axis, keepdims=True)).sum(axis=axis),
    "another axis": lambda x, axis: np.square(x - x.mean(axis=1 - axis, keepdims=True)).sum(axis=axis),
    "another value's mean": lambda x, axis: np.square(x - np.abs(x).mean(axis=axis, keepdims=True)).sum(axis=axis),
    "another count": lambda x, axis: np.square(x - x.sum(axis=axis, keepdims=True) / 5).sum(axis=axis),
    "two distances": lambda x, axis: (
        (x - x.mean(axis=axis, keepdims=True)) * (x + x.mean(axis=axis, keepdims=True))
    ).sum(axis=axis),
    "one element": lambda x, axis: np.square(x[:1, :1] - x[:1, :1].mean(axis=axis, keepdims=True)).sum(axis=axis),
}


def spelled(centre: str, square: str, total: str, axis: int) -> Callable[[Any], Any]:
    return lambda x: TOTALS[total](SQUARES[square](CENTRES[centre](x, axis)), axis)


def reductions(function: Callable[[Any], Any], axis: int) -> list[str]:
    """The reductions that are left where both identities apply."""
    graph, _ = rewrite.simplify(cf.fuse(function).trace((cf.spec((7, 33), "float32"),)).graph)
    graph = rewrite.one_pass_variances(graph, lambda _, along: along == axis)
    return [n.op for n in g.topological(graph.roots) if n.reduction]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("centre", "square", "total"), SPELLINGS)
def test_one_pass_is_left(centre: str, square: str, total: str, axis: int) -> None:
    assert reductions(spelled(centre, square, total, axis), axis) == ["moment2"]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("other", OTHERS)
def test_other_sums_are_as_written(other: str, axis: int) -> None:
    assert "moment2" not in reductions(lambda x: OTHERS[other](x, axis), axis)


def test_columns_are_read_once() -> None:
    """Rows without a product are left: a kernel has the row at hand."""

    def standardised(x: Any, axis: int) -> Any:
        d = x - x.mean(axis=axis, keepdims=True)
        return d / np.sqrt((d * d).mean(axis=axis, keepdims=True) + 1e-5)

    down, across = (
        cf.fuse(lambda x, axis=axis: standardised(x, axis)).plan(cf.spec((512, 256), "float32")) for axis in (0, 1)
    )
    assert [s.kind for s in down.steps] == ["ColumnStats", "RowProgram"]
    assert [s.kind for s in across.steps] == ["RowProgram"] and "moment2" not in across.steps[0].fused


def error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("offset", [0.0, 30.0, 3000.0])
@pytest.mark.parametrize("total", TOTALS)
def test_columns_are_as_accurate_as_written(total: str, offset: float, rng: np.random.Generator) -> None:
    """Also of numbers far from zero; one unit of the mean, squared, is what two passes lose there."""
    x = rng.standard_normal((600, 40)).astype(np.float32) + np.float32(offset)
    function = spelled("mean", "product", total, 0)
    expected = function(x.astype(np.float64))
    with HOST.active():
        found = HOST.host(cf.fuse(function)(HOST.array(x)))
    unit = float(np.finfo(np.float32).eps)
    assert error(found, expected) <= error(function(x), expected) + 2 * unit


@pytest.mark.rotates
@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("total", TOTALS)
def test_rows_of_products(
    total: str, dtype: str, offset: float, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the product's epilogue, and as accurate as 16-bit arrays one operation after the other."""
    x, w = normal(rng, (33, 64), dtype), normal(rng, (200, 64), dtype)
    b = (normal(rng, (200,), "float32") * np.float32(0.1) + np.float32(offset)).astype(x.dtype)
    tail = spelled("mean", "power", total, 1)

    def function(x: Any, w: Any, b: Any) -> Any:
        return tail(x @ w.T + b)

    expected = function(*(a.astype(np.float64) for a in (x, w, b)))
    monkeypatch.setattr(HOST.runtime, "device", devices.DEVICES["H200"])
    with HOST.active(), settings.epilogues("always"):
        fused = cf.fuse(function)
        given = HOST.arrays((x, w, b))
        assert [s.kind for s in fused.plan(*given).steps] == ["Gemm"]
        found = HOST.host(fused(*given))
    kind = getattr(torch, dtype)
    y = torch.nn.functional.linear(*(torch.tensor(a.astype(np.float32)).to(kind) for a in (x, w, b)))
    squares = (y - y.mean(1, keepdim=True)).square()
    eager = {
        "sum": lambda: squares.sum(1),
        "mean": lambda: squares.mean(1),
        "unbiased": lambda: squares.sum(1) / 199,
        "root": lambda: squares.sum(1, keepdim=True).sqrt(),
    }[total]()
    assert error(found, expected) <= error(eager.double().numpy(), expected) + 2.0**-12


SPECIAL = np.array([[0.0, -0.0, 1.0], [INF, 1.0, 2.0], [-INF, -INF, 0.0], [INF, -INF, 0.0], [1.0, NAN, 2.0], [3, 3, 3]])


@pytest.mark.parametrize("engine", ["numpy", "host"])
@pytest.mark.parametrize("total", TOTALS)
def test_special_values(total: str, engine: str) -> None:
    function = spelled("mean", "power", total, 0)
    x = np.ascontiguousarray(SPECIAL.T.astype(np.float32))
    with np.errstate(all="ignore"):
        expected = function(x)
        if engine == "numpy":
            found = cf.fuse(function)(x)
        else:
            with HOST.active():
                found = HOST.host(cf.fuse(function)(HOST.array(x)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Mean of empty slice")
@pytest.mark.parametrize("shape", [(0, 5), (1, 5), (5, 0)])
@pytest.mark.parametrize("total", TOTALS)
def test_few_rows(total: str, shape: tuple[int, int]) -> None:
    x, function = np.full(shape, 3.0, np.float32), spelled("mean", "power", total, 0)
    with np.errstate(all="ignore"), force_plans():
        assert_equal(cf.fuse(function)(x), function(x))


@pytest.mark.parametrize("engine", ["numpy", "host"])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("total", ["sum", "mean"])
def test_gradients(total: str, axis: int, engine: str, rng: np.random.Generator) -> None:
    arrays = rng.standard_normal((9, 6)), rng.standard_normal((7, 6))

    def by_torch(x: Any, w: Any) -> Any:
        y = x @ w.T
        return getattr((y - y.mean(axis, keepdim=True)) ** 2, total)(axis)

    results, cotangents, gradients = torch_passes(by_torch, arrays, (0, 1), rng)
    tail = spelled("mean", "power", total, axis)
    found = Passes(lambda x, w: tail(x @ w.T), arrays)(arrays, cotangents, engine)
    for actual, expected in zip((*found[0], *found[1]), (*results, *gradients), strict=True):
        np.testing.assert_allclose(actual.reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)
