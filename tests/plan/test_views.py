"""Views of computed values: computed again, or read from memory, within the FLOPs and bytes as written."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import Engine, normal

import cupyfuse as cf
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.schedule import MOST_FLOPS, unfused_cost
from cupyfuse.plan.views import with_views_stored
from cupyfuse.settings import force_plans


def three_parts(x: Any) -> Any:
    y = np.exp(np.tanh(x))
    return y[:, :-2] + y[:, 1:-1] + y[:, 2:]


def three_parts_of_rows(x: Any) -> Any:
    y = np.exp(np.tanh(x))
    return y[:-2] + y[1:-1] + y[2:]


def laplace(x: Any, weight: float = 0.25) -> Any:
    return x[1:-1, 1:-1] + weight * (x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:])


def heat(x: Any) -> Any:
    for _ in range(6):
        x = np.tanh(laplace(x))
    return x


def heat_in_place(x: Any) -> Any:
    x = x.copy()
    for _ in range(6):
        x[1:-1, 1:-1] = laplace(x)
    return x


def nine_points(x: Any) -> Any:
    for _ in range(3):
        n, m = x.shape
        parts = [x[i : n - 2 + i, j : m - 2 + j] for i, j in itertools.product(range(3), repeat=2)]
        x = np.sin(sum(parts) - 9.0 * x[1:-1, 1:-1])
    return x


def moving_sum(x: Any) -> Any:
    y = np.sin(x)
    return sum(y[:, k : y.shape[1] - 7 + k] for k in range(8))


def second_differences(x: Any) -> Any:
    return np.diff(np.exp(x), 2, axis=1) + np.diff(np.exp(x), 2, axis=0)[:1, 2:]


def reshaped(x: Any) -> Any:
    y = np.exp(x)
    return y + 1, y.reshape(-1) * 2, y.reshape(2, -1) * np.arange(y.size // 2), y.reshape(-1, 2)[:, :1] - 1


def parts_of_parts(x: Any) -> Any:
    y = np.exp(x)[1:]
    z = y[:, 1:] * y[:, :-1]
    return z[1:] + z[:-1], y


def labelled(x: Any) -> Any:
    y = np.tanh(x) * np.arange(x.shape[1])
    rows = np.exp(x[:, :1])
    return (y * rows)[1:] + (y * rows)[:-1], (y + x.sum(1, keepdims=True))[:, ::-1]


PROGRAMS: tuple[Callable[..., Any], ...] = (
    *(three_parts, three_parts_of_rows, heat, heat_in_place, nine_points, moving_sum, second_differences, reshaped),
    *(parts_of_parts, labelled),
)


def check(fused: Any, plan: Plan, *arguments: Any) -> None:
    """The plan has at most 1.5 times the FLOPs that the trace counts, and moves no more bytes than these operations."""
    traced = fused.trace(arguments)
    assert plan.flops <= MOST_FLOPS * sum(call.flops for call in traced.calls)
    written = unfused_cost(with_views_stored(traced.graph, traced.viewed))
    results = sum(root.nbytes for root in traced.graph.roots)
    assert plan.reads + plan.writes <= written.bytes + 2 * results


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_overlapping_views_take_no_more_than_promised(
    program: Callable[..., Any], engine: Engine, rng: np.random.Generator
) -> None:
    x = normal(rng, (24, 40), "float64")
    fused = cf.fuse(program)
    with force_plans():
        actual = engine.host(fused(*engine.arrays([x])))
    expected = program(x)
    pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
    for a, e in pairs:
        np.testing.assert_allclose(a, e, rtol=1e-9, atol=1e-9)
    check(fused, fused.plan(x), x)


def random_stencils(rng: np.random.Generator) -> str:
    """Draw the text of a program of some rounds, each of which reads overlapping parts of what it computed before."""
    lines = ["y = x * 1.0"]
    for _ in range(rng.integers(1, 12)):
        kind = rng.integers(9)
        function = rng.choice(["np.tanh", "np.sin", "np.exp", "np.abs", "0.5 *", "1 +"])
        step = int(rng.integers(1, 3))
        lines.append(
            {
                0: f"y = {function}(y)",
                1: f"y = {function}(y[:, :-{step}] + y[:, {step}:])",
                2: f"y = {function}(y[:-2] - 2 * y[1:-1] + y[2:])",
                3: f"y = {function}(y[1:-1, 1:-1] + 0.1 * (y[:-2, 1:-1] + y[2:, 1:-1] + y[1:-1, :-2] + y[1:-1, 2:]))",
                4: f"y = np.tanh(np.diff(y, {step}, axis={rng.integers(2)}))",
                5: "z = y[1:, 1:]; y = np.tanh(z[:, :-1] * z[:, 1:] + y.mean(1, keepdims=True)[1:])",
                6: "y[1:-1] = np.tanh(y[:-2] + y[2:])",
                7: "y = (y - y[:, :1])[:, ::-1]; y = np.tanh(y + y[::-1])",
                8: "y = np.tanh(sum(y[:, k:y.shape[1] - 3 + k] for k in range(4)))",
            }[int(kind)]
        )
    lines.append(str(rng.choice(["return y", "return y[1:] + y[:-1]", "return y.sum(), y", "return y[:2], y[:, 1:]"])))
    return "def program(x):\n" + "".join(f"    {line}\n" for line in lines)


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(3))
def test_random_deep_stencils_take_no_more_than_promised(part: int) -> None:
    repeated = stored = 0
    for seed in range(part, 150, 3):
        rng = np.random.default_rng(seed)
        text = random_stencils(rng)
        scope: dict[str, Any] = {"np": np}
        exec(text, scope)
        fused, x = cf.fuse(scope["program"]), normal(rng, (40, 44), "float64")
        with force_plans():
            actual = fused(x)
        expected = scope["program"](x)
        pairs = zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
        for a, e in pairs:
            np.testing.assert_allclose(a, e, rtol=1e-6, atol=1e-6, err_msg=text)
        traced, plan = fused.trace((x,)), fused.plan(x)
        check(fused, plan, x)
        written = unfused_cost(with_views_stored(traced.graph, traced.viewed))
        repeated += plan.flops > 1.01 * written.flops
        stored += unfused_cost(traced.graph).flops > MOST_FLOPS * written.flops
    assert repeated > 3 and stored > 3  # both happen


def test_views_are_computed_again_where_that_takes_few_flops() -> None:
    def gates(x: Any) -> Any:
        y, n = np.tanh(x), x.shape[1] // 4
        return y[:, :n] * y[:, n : 2 * n] + y[:, 2 * n : 3 * n] * y[:, 3 * n :]

    def cheap_after_costly(x: Any) -> Any:
        y = np.exp(np.sin(x))
        z = y[1:] + y[:-1]
        return z[1:] * z[:-1]

    x = cf.spec((64, 64), "float64")
    assert len(cf.fuse(gates).plan(x).steps) == 1
    plan = cf.fuse(cheap_after_costly).plan(x)
    assert len(plan.steps) == 2  # what is costly is stored; sums of its parts are computed twice
    assert [op for op in plan.steps[1].fused if op != "slice"] == ["add", "add", "multiply"]


def test_a_value_of_constants_is_its_own_view() -> None:
    x = np.ones((2, 3), np.float32)
    with force_plans():
        found = cf.fuse(lambda x: x + np.rot90(np.tanh(np.zeros_like(x)), 2))(x)
    np.testing.assert_array_equal(found, x)


def test_bound_calls_promise_the_same(rng: np.random.Generator) -> None:
    def program(x: Any, w: Any) -> Any:
        y = np.exp(np.tanh(x)) + np.exp(np.tanh(w))
        return y[:-2] + y[1:-1] + y[2:]

    x, w = normal(rng, (40, 32), "float64"), normal(rng, (40, 32), "float64")
    with force_plans():
        bound = cf.fuse(program).bind(w=w)
        np.testing.assert_allclose(bound(x), program(x, w), rtol=1e-12)
    plan = cf.fuse(program).bind(w=w).plan(x)
    fixed = unfused_cost(cf.fuse(lambda w: np.exp(np.tanh(w))).trace((w,)).graph).flops
    written = sum(call.flops for call in cf.fuse(program).trace((x, w)).calls) - fixed
    assert plan.flops <= MOST_FLOPS * written


def test_a_view_of_a_value_that_is_computed_from_it() -> None:
    """Reshaping there and back gives the value that was there before."""

    def function(a: Any) -> Any:
        return np.broadcast_to(np.reshape(np.broadcast_to(a, (16, 1)), (-1, 8)), (4, 2, 8))

    a = np.array(3.0, np.float32)
    with force_plans():
        np.testing.assert_array_equal(cf.fuse(function)(a), function(a))
