"""Running totals along rows by our kernel: on the CPU, thread by thread, and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST, INF, NAN, Engine, assert_equal

import cupyfuse as cf
from cupyfuse.engines.numpy import NumpyExecutable
from cupyfuse.plan.build import build
from cupyfuse.plan.plan import Plan
from cupyfuse.settings import Settings

TOTALS = {"cumsum": np.cumsum, "cumprod": np.cumprod}


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Engine]:
    request.param.require()
    with request.param.active():
        yield request.param


def kinds(plan: Plan) -> list[str]:
    return [step.kind for step in plan.steps]


def bound(name: str, x: Any) -> Any:
    """The largest errors of running totals in any order of operations: a rounding for each."""
    unit, number = np.finfo(x.dtype).eps, np.arange(1, x.shape[-1] + 1)
    return unit * number * TOTALS[name](np.abs(x).astype(np.float64), axis=-1)


SHAPES = [(1, 1), (3, 5), (9, 32), (9, 33), (17, 128), (5, 129), (2, 1024), (2, 1025), (3, 2100), (70, 300)]


@pytest.mark.parametrize("name", TOTALS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES)
def test_totals(device: Engine, name: str, dtype: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
    x = rng.standard_normal(shape).astype(dtype)
    if name == "cumprod":
        x = (1 + 0.1 * x).astype(dtype)
    fused = cf.fuse(lambda x: TOTALS[name](x, axis=1))
    found = device.host(fused(device.array(x)))
    assert kinds(fused.plans[-1]) == ["Scan"] and found.dtype == x.dtype
    exact = TOTALS[name](x.astype(np.longdouble), axis=1)
    assert np.all(np.abs(found - exact) <= bound(name, x))


@pytest.mark.parametrize("layout", ["fortran", "row_gap", "column_gap", "reversed", "offset", "misaligned"])
@pytest.mark.parametrize("cols", [40, 300])
def test_any_strides(device: Engine, layout: str, cols: int, rng: np.random.Generator) -> None:
    x = rng.integers(-9, 9, (6, cols)).astype("float32")  # whose totals are exact
    assert_equal(device.host(cf.fuse(lambda x: np.cumsum(x, axis=1))(device.array(x, layout))), np.cumsum(x, axis=1))


def test_columns_are_read_where_they_are(device: Engine, rng: np.random.Generator) -> None:
    x = rng.integers(-9, 9, (300, 4)).astype("float32")
    fused = cf.fuse(lambda x: (np.cumsum(x[::2, 3]), np.cumsum(x[:, :1])))
    for got, wanted in zip(
        device.host(fused(device.array(x))), (np.cumsum(x[::2, 3]), np.cumsum(x[:, 0])), strict=True
    ):
        assert_equal(got, wanted)
    assert kinds(fused.plans[-1]) == ["Scan", "Scan"]


@pytest.mark.parametrize("cols", [9, 200, 1500])
def test_special_values(device: Engine, cols: int, rng: np.random.Generator) -> None:
    """NaN and infinities reach the elements behind them; -0 stays where nothing else came before."""
    x = rng.integers(0, 4, (40, cols)).astype("float64")
    x[:, : cols // 2] = -0.0
    for value in (NAN, INF, -INF):
        x[rng.integers(0, 40, 30), rng.integers(0, cols, 30)] = value

    def function(x: Any) -> Any:
        return np.cumsum(x, axis=1), np.nancumsum(x, axis=1), np.cumprod(np.sign(x) + 2, axis=1) * 0

    with np.errstate(all="ignore"):
        expected = function(x)
    for got, wanted in zip(device.host(cf.fuse(function)(device.array(x))), expected, strict=True):
        assert_equal(got, wanted)
    zeros = np.full((2, cols), -0.0)
    assert np.signbit(device.host(cf.fuse(lambda x: np.cumsum(x, axis=1))(device.array(zeros)))).all()


def test_within_a_function(device: Engine, rng: np.random.Generator) -> None:
    x = rng.integers(-4, 4, (6, 4, 30)).astype("float32")

    def function(x: Any) -> Any:
        y = np.cumsum(x * 2, axis=-1)[:, 1:] + 1
        total = x[0].ravel().cumsum()
        return y.sum(axis=-1), total - np.cumsum(x[0]), np.cumulative_sum(x[:, 0], axis=1).T, x.swapaxes(0, 2).cumsum(2)

    for got, wanted in zip(device.host(cf.fuse(function)(device.array(x))), function(x), strict=True):
        assert_equal(got, wanted)


def test_the_same_plan_by_numpy(rng: np.random.Generator) -> None:
    x = rng.integers(-4, 4, (6, 300)).astype("float32")
    traced = cf.fuse(lambda x: np.cumsum(x + 1, axis=1) * 2).trace((x,))
    plan = build(traced, settings=Settings())
    assert kinds(plan) == ["RowProgram", "Scan", "RowProgram"]
    assert_equal(NumpyExecutable(plan, [x])([x], [None])[0], np.cumsum(x + 1, axis=1) * 2)
    assert "scan_by_blocks<float, Plus, 256>" in plan.source()


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: np.cumsum(x, axis=0), (5, 7)),
        (lambda x: np.cumsum(x), (2, 1 << 14)),  # one long row
        (lambda x: np.cumsum(x.astype(np.int64), axis=1), (5, 7)),
        (lambda x: np.cumsum(x, axis=1, dtype="float64"), (5, 7)),
        (lambda x: np.cumulative_sum(x, axis=1, include_initial=True), (5, 7)),
    ],
)
def test_what_is_left_to_the_library(function: Callable[[Any], Any], shape: tuple[int, int]) -> None:
    assert "Scan" not in kinds(cf.fuse(function).plan(cf.spec(shape)))


def test_rows_in_blocks(device: Engine, rng: np.random.Generator) -> None:
    """Rows do not depend on each other: where the workspace is small, blocks of them follow one another."""

    def function(x: Any, w: Any) -> Any:
        return np.cumsum(x @ w.T, axis=1).max(axis=1)

    x, w = (rng.integers(-3, 3, shape).astype("float32") for shape in ((600, 8), (50, 8)))
    fused = cf.fuse(function, max_workspace=1 << 16)
    np.testing.assert_array_equal(device.host(fused(*device.arrays([x, w]))), function(x, w))
    assert fused.plans[-1].blocks is not None
