"""Arguments that functions change in place as they run as written: at what price, and not at all where these raise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse.api.as_written import AsWritten
from cupyfuse.engines.host_time import GAIN, planned_seconds, written_seconds

X = np.random.default_rng(5).standard_normal((256, 64))
LABELS = np.arange(256) % 64
BAD = LABELS + np.where(np.arange(256) == 200, 10**6, 0)


@pytest.fixture(autouse=True)
def plans_run() -> Iterator[None]:
    """In the place of the fixture that lets plans run always."""
    yield


def labels(x: Any, i: Any) -> Any:
    x[np.arange(len(i)), i] -= 1
    return x.sum()


def rows(x: Any, i: Any) -> Any:
    x[i] = 0
    return x[0] + 1


def swap(x: Any, i: Any) -> Any:
    x[[0, -1]] = x[[-1, 0]]
    return x[0] @ x[1]


def scatter(x: Any, i: Any) -> Any:
    np.add.at(x, i, 1.0)
    return x[0] + 0


def reverse(x: Any, i: Any) -> Any:
    x[:] = x[::-1]
    return x.sum()


def double(x: Any, i: Any) -> Any:
    y = x.copy()
    x[:] = y * 2
    return y.sum()


def sort_rows(x: Any, i: Any) -> Any:
    x.sort(axis=1)
    return x[:, 0] + 0


def twice(x: Any, i: Any) -> Any:
    x[0] += 1
    x[i] = 0
    return x[0] + 0


def put(x: Any, i: Any) -> Any:
    np.put(x, i, 1.0)
    return x[0] + 0


def gathered(x: Any, i: Any) -> Any:
    x *= 2
    return x[np.arange(len(i)), i].sum()


def unused(x: Any, i: Any) -> Any:
    x *= 2
    x[i]
    return x.sum()


@pytest.mark.parametrize("function", [labels, rows, swap, scatter, reverse, double, sort_rows, twice, put, gathered])
def test_functions_that_change_arguments_run_as_written(function: Callable[..., Any]) -> None:
    """Plans of them took 2 to 14 times as long: they copy what they change, and copy it back."""
    fused, ours, wanted = cf.fuse(function), X.copy(), X.copy()
    for _ in range(12):  # the last ones are recognised
        np.testing.assert_array_equal(fused(ours, LABELS), function(wanted, LABELS))
        np.testing.assert_array_equal(ours, wanted)
    assert fused.plans[-1].as_written


@pytest.mark.parametrize("function", [labels, rows, scatter, twice, put, unused])
def test_arguments_are_as_before_where_functions_raise(function: Callable[..., Any]) -> None:
    fused, x = cf.fuse(function), X.copy()
    for _ in range(12):
        fused(x, LABELS)
    before = x.copy()
    with pytest.raises(IndexError):
        fused(x, BAD)
    assert fused.plans[-1].as_written
    np.testing.assert_array_equal(x, before)
    fused(x, LABELS)


def test_an_integer_power_that_raises_midway_changes_nothing() -> None:
    def raised(x: Any, n: Any) -> Any:
        x **= n
        return x + 1

    fused, x = cf.fuse(raised), np.array([2, 3, 4])
    for _ in range(2):
        with pytest.raises(ValueError, match="negative"):
            fused(x, np.array([2, 1, -1]))
        np.testing.assert_array_equal(x, [2, 3, 4])
    np.testing.assert_array_equal(fused(x, np.array([2, 1, 0])), [5, 4, 2])


def largest(x: Any, mask: Any) -> Any:
    x *= 2
    return x[mask].max()


@pytest.mark.parametrize(("function", "bad"), [(gathered, BAD), (largest, X > 1000)])
def test_what_a_plan_computes_without_errors_raises_as_in_numpy(function: Callable[..., Any], bad: Any) -> None:
    """A copy before each call would take longer than the function."""
    fused, ours, wanted = cf.fuse(function), X.copy(), X.copy()
    for called, x in ((fused, ours), (function, wanted)):
        with pytest.raises((IndexError, ValueError)):
            called(x, bad)
    assert fused.plans[-1].as_written
    np.testing.assert_array_equal(ours, wanted)


def test_arguments_are_put_back_in_their_own_layout() -> None:
    def inverse(x: Any, a: Any) -> Any:
        x *= 2
        return np.linalg.inv(a)

    memory = np.zeros((8, 6))
    x, fused = memory.T[::2], cf.fuse(inverse)
    for _ in range(12):
        with pytest.raises(np.linalg.LinAlgError):
            fused(x + 0, np.zeros((2, 2)))
        memory[:] = 1
        with pytest.raises(np.linalg.LinAlgError):
            fused(x, np.zeros((2, 2)))
        np.testing.assert_array_equal(memory, 1)


@pytest.mark.parametrize("function", [labels, rows, swap, scatter, sort_rows])
def test_no_argument_is_kept_where_nothing_can_be_half_done(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = []
    monkeypatch.setattr(
        "cupyfuse.api.planned_function.AsWritten",
        lambda function, parameters, restored: kept.append(restored) or AsWritten(function, parameters, restored),
    )
    cf.fuse(function)(X.copy(), LABELS)
    cf.fuse(twice)(X.copy(), LABELS)
    assert kept == [(), (0,)]


def test_what_changes_last_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a large table whose few rows a step changes."""

    def step(rows: Any, w: Any, table: Any) -> Any:
        w *= 2
        np.add.at(table, rows, w)
        return w.sum()

    kept = []
    monkeypatch.setattr(
        "cupyfuse.api.planned_function.AsWritten",
        lambda function, parameters, restored: kept.append(restored) or AsWritten(function, parameters, restored),
    )
    fused, w, table = cf.fuse(step), X[:3].copy(), X.copy()
    fused(np.arange(3), w, table)
    assert kept == [(1,)]
    before = table.copy()
    with pytest.raises(IndexError):
        fused(np.array([0, 1, 256]), w, table)
    np.testing.assert_array_equal(w, X[:3] * 2)
    np.testing.assert_array_equal(table, before)


def test_memory_is_bounded_beside_what_is_kept() -> None:
    def doubled(x: Any, i: Any) -> Any:
        x *= 2
        return x.sum()

    few = 2 * X.nbytes - 1
    assert cf.fuse(doubled, max_workspace=few).plan(X, LABELS).as_written
    assert not cf.fuse(unused, max_workspace=few).plan(X, LABELS).as_written
    assert cf.fuse(unused, max_workspace=few + 10000).plan(X, LABELS).as_written


def test_library_steps_hide_no_gains() -> None:
    """They were priced 25 times too high, on both sides, so that what gains beside them seemed small."""

    def counted(x: Any, labels: Any) -> Any:
        return np.logaddexp.reduce(x, axis=1), np.bincount(labels, minlength=64), np.cumsum(x, axis=1)

    plan = cf.fuse(counted).plan(X, LABELS)
    assert not plan.as_written
    assert written_seconds(plan.calls) > GAIN * planned_seconds(plan)
    step = next(s for s in plan.steps if "bincount" in str(s.fused))
    (call,) = [c for c in plan.calls if c.name == "np.bincount"]
    assert step.kind == "Library" and written_seconds([call]) < 3e-6


def test_operations_on_some_elements_that_raise_change_nothing() -> None:
    """Powers at indices raise at the first negative exponent, sorters where the search comes to them."""

    def raised(x: Any, n: Any) -> Any:
        np.power.at(x, [0, 1, 2], n)
        return x + 1

    def searched(x: Any, order: Any) -> Any:
        x[0] = 5
        return np.searchsorted(x, [2, 3], sorter=order)

    for function, bad in ((raised, np.array([2, 1, -1])), (searched, np.array([9, 9, 9]))):
        fused, x = cf.fuse(function), np.array([2, 3, 4])
        for _ in range(12):
            with pytest.raises(ValueError, match=r"negative|range"):
                fused(x, bad)
            np.testing.assert_array_equal(x, [2, 3, 4])
