"""Values of columns alone, as steps of their own: where plans have them, and that they change no result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST, Engine, dtype_of, normal

import cupyfuse as cf
from cupyfuse import devices
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.schedule import columns

ROWS, COLUMNS = 24, 40


def batch_norm(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
    return cf.softmax((x - mean) / np.sqrt(variance + 1e-5) * gamma + beta, axis=1)


def residual(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
    beta += 1
    return np.where(x > 0, x, np.expm1(x)) * (np.tanh(gamma) * beta) + cf.gelu(mean) * x.sum(axis=1, keepdims=True)


def updates(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
    mean *= np.exp(gamma)
    return x * np.sqrt(variance) + mean, np.tanh(beta)


def twice(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
    scale = np.exp(gamma) / np.sqrt(variance)
    return cf.logsumexp(x * scale, axis=1), (x - x.mean(axis=0)) * scale + mean


def outputs(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
    top = x.max(axis=1, keepdims=True)
    return top, x * np.exp(gamma) - top, np.log(variance) * x


def scalars(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
    return x * np.exp(variance.max() + np.sqrt(gamma * gamma)) - np.log(1 + mean[:1] ** 2)


def product_with_vector(x: Any, mean: Any, variance: Any, gamma: Any, beta: Any) -> Any:
    return x @ (gamma / np.sqrt(variance + 1e-5)) + mean[0]


CUT = [batch_norm, residual, twice, outputs, product_with_vector]
# One stores a vector that the row program computes, too; in the other the vectors are a step of their own anyway.
FUNCTIONS = [*CUT, updates, scalars]


def plan_of(function: Callable[..., Any], rows: int, cols: int, dtype: str = "float32", **options: Any) -> Plan:
    vector = cf.spec((cols,), dtype)
    return cf.fuse(function, **options).plan(cf.spec((rows, cols), dtype), vector, vector, vector, vector)


def test_vectors_that_many_rows_would_compute_again_are_computed_once() -> None:
    plan = plan_of(batch_norm, 4096, 8192)
    first, second = plan.steps
    assert first.domain == (1, 8192) and {"sqrt", "add"} <= set(first.fused)
    assert second.domain == (4096, 8192) and "sqrt" not in second.fused
    assert all(n in second.inputs for n in first.outputs)
    assert plan.launches == 2 and plan.writes < 4 * (4096 + 2) * 8192


@pytest.mark.parametrize(
    ("function", "rows", "cols"),
    [
        (batch_norm, 16, 8192),  # too few rows
        (batch_norm, 1 << 16, 16),  # too few elements
        (lambda x, mean, variance, gamma, beta: x * (gamma + beta) - mean, 1 << 14, 1 << 14),  # a launch costs more
        (batch_norm, 1, 1 << 24),  # nothing is repeated
    ],
)
def test_vectors_that_are_cheap_are_not(function: Callable[..., Any], rows: int, cols: int) -> None:
    plan = plan_of(function, rows, cols)
    assert all(step.domain[0] == rows for step in plan.steps)


def test_guards_of_columns_read_what_their_exact_forms_need(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of one row is no vector of an argument's: scales that are bound fold into a guard of one row."""
    monkeypatch.setattr(columns, "_WORTH", -1.0)

    def function(x: Any, m: Any, s: Any, g: Any, t: Any) -> Any:
        return x * np.exp(t) + m / s * g

    rng = np.random.default_rng(0)
    x, m, t = normal(rng, (ROWS, COLUMNS), "float32"), normal(rng, (1, COLUMNS), "float32"), normal(rng, COLUMNS)
    for scale in (1.0, 2e-38):  # of the second the factors' quotient is infinite, where m is 0
        s = np.full(COLUMNS, scale, np.float32)
        m[0, 3] = 0.0
        bound = cf.fuse(function).bind(s=engine.array(s), g=engine.array(1 / s))
        got = engine.host(bound(x=engine.array(x), m=engine.array(m), t=engine.array(t)))
        assert any(step.domain[0] == 1 for step in bound.plans[0].steps)
        with np.errstate(all="ignore"):
            np.testing.assert_allclose(got, function(x, m, s, 1 / s, t), rtol=1e-5, atol=1e-5)


def test_positions_and_casts_are_not_stored() -> None:
    def loss(x: Any, gamma: Any, labels: Any) -> Any:
        return cf.cross_entropy(x * np.exp(gamma), labels)

    specs = cf.spec((8192, 8192), "bfloat16"), cf.spec(8192, "bfloat16"), cf.spec(8192, "int64")
    first, second = cf.fuse(loss).plan(*specs).steps[:2]
    assert [n.op for n in first.outputs] == ["exp"] and "positions" in second.fused


def test_float64_takes_its_own_rate() -> None:
    """Half the rate: half the elements are enough."""
    fewest = [
        next(rows for rows in range(1, 4096) if len(plan_of(batch_norm, rows, 4096, dtype).steps) > 1)
        for dtype in ("float32", "float64")
    ]
    assert 1.9 < fewest[0] / fewest[1] < 2.1


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    chosen: Engine = request.param
    chosen.require()
    if chosen is HOST:
        monkeypatch.setattr(chosen.runtime, "device", devices.DEVICES["H200"])
    with chosen.active():
        yield chosen


def run(engine: Engine, function: Callable[..., Any], values: list[Any]) -> tuple[list[Any], Plan]:
    """Run a function; return its results, its arguments as it left them, and the plan."""
    fused, arrays = cf.fuse(function), engine.arrays([v.copy() for v in values])
    results = fused(*arrays)
    results = list(results) if isinstance(results, tuple) else [results]
    return [engine.host(v) for v in (*results, *arrays)], fused.plans[0]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("special", [None, np.inf, np.nan, 0.0, -1e-5, 3e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_those_of_one_step(
    engine: Engine,
    function: Callable[..., Any],
    dtype: str,
    special: float | None,
    monkeypatch: pytest.MonkeyPatch,
    rng: np.random.Generator,
) -> None:
    """Guards fail where a variance is zero or negative, or a scale overflows; they read the arguments again then."""
    values = [normal(rng, (ROWS, COLUMNS), dtype), *(abs(normal(rng, (COLUMNS,), dtype)) for _ in range(4))]
    if special is not None:
        values[2][3] = np.asarray(special).astype(dtype_of(dtype))
    whole, together = run(engine, function, values)
    monkeypatch.setattr(columns, "_WORTH", -1.0)
    cut, plan = run(engine, function, values)
    assert (len(plan.steps) > len(together.steps)) == (function in CUT)
    rounding = {"float32": 2.0**-22, "float64": 2.0**-50, "bfloat16": 2.0**-8}[dtype]
    for got, expected in zip(cut, whole, strict=True):
        wide = expected.astype(np.float64)
        assert np.array_equal(np.isnan(got.astype(np.float64)), np.isnan(wide))
        # Where terms cancel, what a multiply-add does not round is an error of the terms' size.
        largest = np.max(np.abs(wide), initial=0, where=np.isfinite(wide))
        np.testing.assert_allclose(got.astype(np.float64), wide, rtol=4 * rounding, atol=4 * rounding * min(largest, 8))
