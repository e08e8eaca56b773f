"""Medians and quantiles of an array on a GPU share one sort, and are NumPy's for any values."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import HOST, INF, NAN, Engine

import cupyfuse as cf
from cupyfuse.plan.plan import Plan

METHODS = ["linear", "lower", "higher", "nearest", "midpoint", "hazen", "inverted_cdf", "interpolated_inverted_cdf"]


def expected(function: Callable[..., Any], *arguments: Any) -> Any:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


def assert_same(got: Any, wanted: Any, dtype: str) -> None:
    assert got.shape == np.shape(wanted) and got.dtype == np.asarray(wanted).dtype
    unit = 64 * np.finfo(dtype).eps  # NumPy's percentiles of float32 have places in float32
    np.testing.assert_allclose(got, wanted, rtol=unit, atol=64 * unit)


def steps(plan: Plan) -> list[str]:
    return [name for step in plan.steps if step.kind == "Library" for name in step.fused]


def of_axis(axis: Any) -> Callable[[Any], Any]:
    return lambda x: (
        np.median(x, axis), np.median(x, axis=axis, keepdims=True), np.quantile(x, 0.3, axis),
        np.percentile(x, 75, axis=axis, keepdims=True), np.quantile(x, 1, axis), np.quantile(x, 0.0, axis),
    )  # fmt: skip


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((7,), None), ((8,), 0), ((5, 8), 1), ((5, 8), 0), ((5, 7), None), ((3, 4, 5), (1, 2)), ((3, 4, 5), -3),
     ((3, 4, 5), (0, 1)), ((3, 4, 5), 1), ((4, 1), 1)],
)  # fmt: skip
def test_values(engine: Engine, shape: tuple[int, ...], axis: Any, dtype: str, rng: np.random.Generator) -> None:
    function = of_axis(axis)
    for nans in (0.0, 0.1):
        x = rng.choice([0.0, -0.0, 1.0, 2.5, *rng.standard_normal(9)], shape).astype(dtype)
        x[rng.random(shape) < nans] = NAN
        x[rng.random(shape) < nans] = -NAN
        results = engine.host(cf.fuse(function)(engine.array(x)))
        for got, wanted in zip(results, expected(function, x), strict=True):
            assert_same(got, wanted, dtype)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("shape", "axis"), [((7,), None), ((5, 8), 1), ((5, 8), 0), ((5, 7), None), ((3, 4, 5), 2)])
def test_several_at_once(
    engine: Engine, shape: tuple[int, ...], axis: Any, dtype: str, rng: np.random.Generator
) -> None:
    x = rng.standard_normal(shape).astype(dtype)
    x[0] = NAN if len(shape) > 1 else x[0]

    def function(x: Any) -> Any:
        low, middle, high = np.percentile(x, [25, 50.0, 75], axis=axis)
        keep = np.quantile(x, (0.1, 0.9), axis=axis, keepdims=True)
        ends = np.quantile(x, [0, 0.5, 1], axis=axis)
        parts = ends[1:], ends[::2], keep[0], np.quantile(x, [0.3], axis), np.quantile(x, [0, 1], axis=axis)
        return low, middle * 2, high, keep, ends, *parts, keep[1] - x

    for got, wanted in zip(engine.host(cf.fuse(function)(engine.array(x))), expected(function, x), strict=True):
        assert_same(got, wanted, dtype)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("method", METHODS)
def test_methods(engine: Engine, method: str, rng: np.random.Generator) -> None:
    for n in (2, 9, 10):
        x = rng.standard_normal((4, n)).astype("float32")
        for q in (0.0, 0.1, 0.37, 0.5, 0.8, 1.0):

            def function(x: Any, q: float = q) -> Any:
                return np.quantile(x, q, axis=1, method=method)

            assert_same(engine.host(cf.fuse(function)(engine.array(x))), expected(function, x), "float32")


def test_infinities(engine: Engine) -> None:
    """As NumPy interpolates them: `2 + (inf - 2) * 0` is NaN, the mean of two infinities of one sign is one."""
    x = np.array([[1, 2, INF, INF], [-INF, -INF, 3, INF], [-INF, 1, 2, INF]])

    def function(x: Any) -> Any:
        quantiles = [np.quantile(x, q, axis=1) for q in (0, 0.0, 0.25, 1 / 3, 0.9, 1.0, 1)]
        return (*quantiles, np.median(x, axis=1), np.median(x[:, 1:], axis=1))

    for got, wanted in zip(engine.host(cf.fuse(function)(engine.array(x))), expected(function, x), strict=True):
        np.testing.assert_allclose(got, wanted)


@pytest.mark.parametrize("method", ["midpoint", "averaged_inverted_cdf", "lower", "median_unbiased"])
def test_infinities_by_other_methods(engine: Engine, method: str) -> None:
    x = np.array([[1, 2, INF, INF], [-INF, -INF, 3, INF], [-INF, 1, 2, INF], [2, INF, INF, INF]])

    def function(x: Any) -> Any:
        return tuple(np.quantile(x, q, axis=1, method=method) for q in (0, 0.0, 0.1, 0.25, 1 / 3, 0.5, 0.9, 1.0, 1))

    for got, wanted in zip(engine.host(cf.fuse(function)(engine.array(x))), expected(function, x), strict=True):
        np.testing.assert_allclose(got, wanted)


def test_one_sort_serves_all() -> None:
    def scale(x: Any) -> Any:
        low, high = np.percentile(x, 25, axis=0), np.quantile(x, 0.75, axis=0)
        return (x - np.median(x, axis=0)) / (high - low)

    plan = cf.fuse(scale).plan(cf.spec((256, 64)))
    assert steps(plan) == ["np.sort"]
    assert "a quantile lies between two elements of a sorted row" in str(plan)

    def both(x: Any) -> Any:
        return np.median(x, axis=0), np.median(x, axis=1), np.median(-x, axis=1)

    # Each alone: libraries partition for a median, in less time than a sort.
    assert steps(cf.fuse(both).plan(cf.spec((256, 64)))) == ["np.median"] * 3
    beside = cf.fuse(lambda x: (*both(x), np.quantile(x, 0.1, axis=-1)))
    assert sorted(steps(beside.plan(cf.spec((256, 64))))) == ["np.median", "np.median", "np.sort"]
    for axis in (0, 1, None):
        spread = cf.fuse(lambda x, axis=axis: np.subtract(*np.percentile(x, [75, 25], axis=axis)))
        plan = spread.plan(cf.spec((256, 64)))
        assert steps(plan) == ["np.sort"] and {step.kind for step in plan.steps} == {"Library", "RowProgram"}
        assert plan.launches <= 3


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: np.median(x, axis=1), "np.median"),  # between other axes
        (lambda x: np.nanmedian(x), "np.nanmedian"),
        (lambda x: np.quantile(x, [[0.1, 0.9]]), "np.quantile"),
        (lambda x: np.quantile(x, np.linspace(0, 1, 9).tolist()), "np.quantile"),
        (lambda x: np.quantile(x, 0.5, weights=x * x, method="inverted_cdf"), "np.quantile"),
        (lambda x: np.median((x > 0).astype(np.int32), axis=2), "np.median"),
        (lambda x: np.quantile(x[x > 0], 0.5), "np.nanquantile"),
        (lambda x: np.median(x[:, :, :1], axis=2), "np.median"),
        (lambda x: np.median(x[:, :, :0], axis=2), "np.median"),
    ],
)
def test_what_is_left_alone(function: Callable[[Any], Any], name: str) -> None:
    assert name in steps(cf.fuse(function).plan(cf.spec((3, 4, 5))))


def test_a_cpu_partitions(rng: np.random.Generator) -> None:
    """There a plan calls NumPy's own function."""

    def function(x: Any) -> Any:
        return np.quantile(x, 0.3, axis=1)

    fused, x = cf.fuse(function), rng.random((4, 5))
    np.testing.assert_array_equal(fused(x, out=np.empty(4)), np.quantile(x, 0.3, axis=1))
    assert steps(fused.plans[-1]) == ["np.quantile"]
    with HOST.active():
        fused(HOST.array(x))
    assert steps(fused.plans[-1]) == ["np.sort"]
