"""`cf.partial`: shards of one axis, merged, are what one call computes; checked against float64."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support import INF, NAN, NUMPY, Engine, dtype_of, normal, unit

import cupyfuse as cf

COLUMNS, DEPTH, ROWS = 12, 7, 5
WIDTHS = [(12,), (5, 7), (4, 4, 3, 1), (6, 0, 6), (0, 12), (1,) * 12]
WEIGHTS = np.linspace(-1, 1, COLUMNS, dtype=np.float32)


def scores(x, w, b):
    return x @ w.T + b


def labels():
    return np.array([0, 11, -100, 4, 7])


def normalised(y):
    return (y - y.mean(axis=1, keepdims=True)) / np.sqrt(y.var(axis=1, keepdims=True) + 1e-5)


def entropy(y):
    p = cf.softmax(y, axis=1)
    return -(p * np.log(p)).sum(axis=1)


# What follows the scores, and how often shards exchange states.
CHAINS: dict[str, tuple[Callable[..., Any], int]] = {
    "logsumexp": (lambda x, w, b: cf.logsumexp(scores(x, w, b), axis=1), 1),
    "softmax": (lambda x, w, b: cf.softmax(scores(x, w, b), axis=1), 1),
    "log_softmax": (lambda x, w, b: cf.log_softmax(scores(x, w, b), axis=1), 1),
    "normalised": (lambda x, w, b: normalised(scores(x, w, b)), 1),
    "cross_entropy": (lambda x, w, b: cf.cross_entropy(scores(x, w, b), labels()), 1),
    "label_smoothing": (lambda x, w, b: cf.cross_entropy(scores(x, w, b), labels(), label_smoothing=0.1), 1),
    "entropy": (lambda x, w, b: entropy(scores(x, w, b)), 2),
    "extremes": (lambda x, w, b: np.stack([scores(x, w, b).max(axis=1), scores(x, w, b).min(axis=1)]), 1),
    "places": (lambda x, w, b: (scores(x, w, b).argmax(axis=1), scores(x, w, b).argmin(axis=1)), 1),
    "rounded": (lambda x, w, b: np.argmax(np.round(scores(x, w, b)), axis=1), 1),
    "accuracy": (lambda x, w, b: (cf.softmax(scores(x, w, b), 1), scores(x, w, b).argmax(1) == labels()), 1),
    "prod": (lambda x, w, b: np.prod(scores(x, w, b), axis=1), 1),
    "any": (lambda x, w, b: (scores(x, w, b) > 2.5).any(axis=1), 1),
    "count": (lambda x, w, b: (scores(x, w, b) > 0).sum(axis=1), 1),
    "all of it": (lambda x, w, b: scores(x, w, b).sum(), 1),
    "column sums": (lambda x, w, b: scores(x, w, b).sum(axis=0), 0),
    "attention": (lambda x, w, b: cf.softmax(scores(x, w, b), axis=1) @ w, 2),
    "twice": (lambda x, w, b: cf.logsumexp(3 * cf.softmax(scores(x, w, b), axis=1), axis=1), 2),
    "whole vectors": (lambda x, w, b: (scores(x, w, b) * WEIGHTS).sum(axis=1), 1),
    "several": (lambda x, w, b: (scores(x, w, b).mean(axis=1), x.sum(), cf.softmax(scores(x, w, b), axis=1)), 1),
}


def arguments(rng: np.random.Generator, dtype: str = "float32") -> list[Any]:
    return [normal(rng, shape, dtype) for shape in ((ROWS, DEPTH), (COLUMNS, DEPTH), (COLUMNS,))]


def run(
    function: Callable[..., Any], given: Sequence[Any], widths: Sequence[int], engine: Engine = NUMPY, group: int = 100
) -> tuple[list[Any], int]:
    """Return each shard's results, and the number of merges, in groups of `group`."""
    parts = cf.partial(function, {"w": 0, "b": 0}, sum(widths))
    x, w, b = given
    shards = []
    for at, n in zip(np.cumsum([0, *widths]), widths, strict=False):
        shards.append(parts.local(*engine.arrays([x, w[at : at + n], b[at : at + n]]), start=int(at)))
    merges = 0
    while True:
        states = [s.state for s in shards]
        while len(states) > 1:
            states = [parts.combine(states[k : k + group]) for k in range(0, len(states), group)]
        merges += bool(states[0].arrays)
        if shards[0].last:
            return [engine.host(parts.finish(states[0], s)) for s in shards], merges
        shards = [parts.proceed(states[0], s) for s in shards]


def finish(parts: cf.Partial, rows: np.ndarray[Any, Any], widths: Sequence[int]) -> list[Any]:
    """Return each shard's result of columns of a matrix."""
    ends = np.cumsum(widths)
    cut = [(int(e - n), int(e)) for e, n in zip(ends, widths, strict=True)]
    shards = [parts.local(np.ascontiguousarray(rows[:, first:end]), start=first) for first, end in cut]
    while True:
        total = parts.combine([s.state for s in shards])
        if shards[0].last:
            return [parts.finish(total, s) for s in shards]
        shards = [parts.proceed(total, s) for s in shards]


def together(results: Sequence[Any], expected: Any) -> list[Any]:
    """Join the parts of results that are split; all shards have the same bits of the others."""
    found = []
    for position, whole in enumerate(expected):
        values = [np.asarray(r[position] if isinstance(r, tuple) else r) for r in results]
        if whole.shape[-1:] == (COLUMNS,):
            found.append(np.concatenate(values, axis=-1))
        else:
            assert all(np.array_equal(v, values[0], equal_nan=True) for v in values)
            found.append(values[0])
    return found


def expected_of(function: Callable[..., Any], given: Sequence[Any]) -> list[Any]:
    found = cf.fuse(function)(*(np.asarray(a, np.float64) for a in given))
    return [np.asarray(v) for v in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.rotates
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", CHAINS)
def test_shards_are_one_call(name: str, widths: tuple[int, ...], rng: np.random.Generator) -> None:
    function, merges = CHAINS[name]
    given = arguments(rng)
    expected = expected_of(function, given)
    results, found = run(function, given, widths)
    assert found == merges
    # Seven products and twelve terms of a row, each value a rounding; relative to the largest intermediate.
    scale = 30 * (np.abs(given[0]) @ np.abs(given[1]).T).max() if name == "prod" else 8.0
    for got, want in zip(together(results, expected), expected, strict=True):
        assert got.shape == want.shape
        assert np.abs(got.astype(float) - want).max() <= 40 * unit("float32") * scale * max(1, np.abs(want).max())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["logsumexp", "softmax", "normalised", "cross_entropy", "attention"])
def test_dtypes(name: str, dtype: str, rng: np.random.Generator) -> None:
    function, _ = CHAINS[name]
    given = arguments(rng, dtype)
    expected = expected_of(function, given)
    one = np.asarray(cf.fuse(function)(*given))
    results, _ = run(function, given, (5, 7))
    (got,) = together(results, expected)
    assert got.dtype == one.dtype == dtype_of(dtype)
    # No more than the error of one call, and a rounding of the result or of an intermediate.
    own = np.abs(one.astype(float) - expected[0]).max()
    assert np.abs(got.astype(float) - expected[0]).max() <= 2 * own + 4 * unit(dtype) * np.abs(expected[0]).max()


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("name", ["logsumexp", "softmax", "normalised", "cross_entropy", "extremes", "places"])
def test_engines(name: str, engine: Engine, rng: np.random.Generator) -> None:
    function, _ = CHAINS[name]
    given = arguments(rng)
    expected = expected_of(function, given)
    results, _ = run(function, given, (5, 4, 3), engine)
    for got, want in zip(together(results, expected), expected, strict=True):
        assert np.abs(got - want).max() <= 100 * unit("float32") * np.abs(want).max()


@pytest.mark.parametrize("group", [2, 3, 5])
def test_states_merge_in_groups(group: int, rng: np.random.Generator) -> None:
    given = arguments(rng)
    for name in ("logsumexp", "normalised", "label_smoothing", "entropy"):
        function, _ = CHAINS[name]
        expected = expected_of(function, given)
        results, _ = run(function, given, (1,) * 12, group=group)
        for got, want in zip(together(results, expected), expected, strict=True):
            assert np.abs(got - want).max() <= 200 * unit("float32") * max(1, np.abs(want).max())


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("widths", [(2, 2), (1, 3), (4,), (0, 4), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize(
    "name", ["logsumexp", "softmax", "log_softmax", "max", "min", "sum", "mean", "distances", "argmax", "argmin"]
)
def test_special_values_are_those_of_one_call(name: str, widths: tuple[int, ...], dtype: str) -> None:
    """All rows of four of these: infinities and NaN meet at every place of every shard."""
    values = np.array([INF, -INF, NAN, 0.0, -0.0, 3.0], dtype)
    rows = np.stack(np.meshgrid(*[values] * 4), axis=-1).reshape(-1, 4)
    reductions: dict[str, Callable[..., Any]] = {
        "max": lambda x: x.max(axis=1),
        "min": lambda x: x.min(axis=1),
        "argmax": lambda x: x.argmax(axis=1),
        "argmin": lambda x: x.argmin(axis=1),
        "sum": lambda x: x.sum(axis=1),
        "mean": lambda x: x.mean(axis=1),
        "distances": lambda x: cf.log_softmax(x, axis=1).sum(axis=1),
    }
    function = reductions.get(name) or (lambda x: getattr(cf, name)(x, axis=1))
    with np.errstate(all="ignore"):
        expected = np.asarray(cf.fuse(function)(rows))
        found = finish(cf.partial(function, {"x": 1}, 4), rows, widths)
    got = np.concatenate(found, axis=1) if expected.ndim == 2 else found[0]
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("group", [2, 100])
def test_moments_of_shards_without_elements(group: int) -> None:
    """They have no weight, also where they merge among themselves, or where the square of a mean overflows."""
    for x in (np.arange(8.0).reshape(2, 4), np.full((1, 4), 2e19, np.float32)):
        parts = cf.partial(lambda x: x.var(axis=1), {"x": 1}, 4)
        for widths in [(0, 0, 4), (4, 0, 0), (0, 2, 2), (2, 0, 2)]:
            ends = np.cumsum(widths)
            shards = [parts.local(x[:, e - n : e].copy()) for e, n in zip(ends, widths, strict=True)]
            first = parts.combine([s.state for s in shards[:group]])
            total = parts.combine([first, *(s.state for s in shards[group:])])
            np.testing.assert_allclose(parts.finish(total, shards[0]), x.astype(np.float64).var(axis=1))


def test_moments_far_from_zero(rng: np.random.Generator) -> None:
    """Means of shards lose no digits: their rounding, squared, would be larger than the variance."""
    x = (1e4 + 0.01 * rng.standard_normal((40, 64))).astype(np.float32)
    expected = x.astype(np.float64).var(axis=1)
    parts = cf.partial(lambda x: x.var(axis=1), {"x": 1}, 64)
    for width in (32, 16, 1):
        shards = [parts.local(x[:, at : at + width].copy()) for at in range(0, 64, width)]
        got = parts.finish(parts.combine([s.state for s in shards]), shards[0])
        own = np.abs(np.asarray(cf.fuse(lambda x: x.var(axis=1))(x)) - expected).max()
        assert np.abs(got - expected).max() <= 2 * own + 64 * unit("float32") * expected.max()


def test_numbers_are_read_anew(rng: np.random.Generator) -> None:
    parts = cf.partial(lambda x, t: cf.logsumexp(x / t, axis=1), {"x": 1}, 6)
    x = normal(rng, (3, 6), "float64")
    for t in (1.0, 2.0, 0.5):
        shards = [parts.local(x[:, :2].copy(), t), parts.local(x[:, 2:].copy(), t)]
        total = parts.combine([s.state for s in shards])
        np.testing.assert_allclose(parts.finish(total, shards[1]), np.log(np.exp(x / t).sum(axis=1)), rtol=1e-12)


def test_states_can_be_sent(rng: np.random.Generator) -> None:
    x, w, b = arguments(rng)
    parts = pickle.loads(pickle.dumps(cf.partial(head, {"w": 0, "b": 0}, COLUMNS)))
    shard, other = parts.local(x, w[:4], b[:4]), parts.local(x, w[4:], b[4:], start=4)
    sent = pickle.loads(pickle.dumps(other.state))
    assert (sent.round, sent.length, list(sent.arrays)) == (0, 8, ["max", "expsum"])
    got = parts.finish(parts.combine([shard.state, sent]), shard)
    np.testing.assert_allclose(got, np.asarray(head(x, w, b)), rtol=1e-6)


@cf.fuse
def head(x, w, b):
    return cf.logsumexp(scores(x, w, b), axis=1)


# Errors -------------------------------------------------------------------------------------------------------------


def test_what_cannot_be_split_says_so(rng: np.random.Generator) -> None:
    x, w, b = arguments(rng)
    for function, message in [
        (lambda x, w, b: np.sort(scores(x, w, b), axis=1), r"sort.*needs all elements of the split axis"),
        (lambda x, w, b: np.cumsum(scores(x, w, b), axis=1), r"cumsum.*needs all elements"),
        (lambda x, w, b: scores(x, w, b) @ scores(x, w, b).T @ x, None),
        (lambda x, w, b: scores(x, w, b)[:, 1:].sum(axis=1), "slice"),
    ]:
        parts = cf.partial(function, {"w": 0, "b": 0}, COLUMNS)
        if message is None:
            parts.local(x, w[:3], b[:3])
        else:
            with pytest.raises(TypeError, match=message):
                parts.local(x, w[:3], b[:3])


def test_arguments_are_checked(rng: np.random.Generator) -> None:
    x, w, b = arguments(rng)
    with pytest.raises(TypeError, match=r"split: .* has no parameter 'weight'; it has x, w, b"):
        cf.partial(head, {"weight": 0}, COLUMNS)
    with pytest.raises(ValueError, match="split: expected the axis"):
        cf.partial(head, {}, COLUMNS)
    with pytest.raises(ValueError, match="length: expected at least 2"):
        cf.partial(head, {"w": 0}, 1)
    with pytest.raises(TypeError, match="fn: expected a function, got int"):
        cf.partial(3, {"w": 0}, 4)  # type: ignore[arg-type]
    parts = cf.partial(head, {"w": 0, "b": 0}, COLUMNS)
    with pytest.raises(ValueError, match="w has 3, b has 4"):
        parts.local(x, w[:3], b[:4])
    with pytest.raises(ValueError, match="start: 3 elements from 10 are not within the 12"):
        parts.local(x, w[:3], b[:3], start=10)
    with pytest.raises(TypeError, match="argument 'w': expected an array to split, got float"):
        parts.local(x, 1.0, b[:3])
    with pytest.raises(ValueError, match="has no axis 0"):
        parts.local(x, np.ones(()), b[:3])
    shard = parts.local(x, w[:3], b[:3])
    with pytest.raises(ValueError, match="states: expected at least one"):
        parts.combine([])
    with pytest.raises(ValueError, match="merges 3 of the 12 elements"):
        parts.finish(shard.state, shard)
    other = cf.partial(CHAINS["normalised"][0], {"w": 0, "b": 0}, COLUMNS).local(x, w[:3], b[:3])
    with pytest.raises(ValueError, match="belong to different merges"):
        parts.combine([shard.state, other.state])
    with pytest.raises(TypeError, match="states: expected the states of shards"):
        parts.combine([shard])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="split: expected a dict"):
        cf.partial(head, ["w"], COLUMNS)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"length: expected an integer, got 12\.0"):
        cf.partial(head, {"w": 0}, 12.0)  # type: ignore[arg-type]
    summed = cf.partial(lambda x: x.sum(axis=1), {"x": 1}, 6)
    for other in (summed.local(x[:1, :3].copy()), summed.local(x[:, :3].astype(np.float64))):
        with pytest.raises(ValueError, match="merge states of the same rows in the same dtype"):
            summed.combine([summed.local(x[:, :3].copy()).state, other.state])
    one = parts.local(x[:1], w, b)
    with pytest.raises(ValueError, match=r"total: 'max' is float32 of shape \(1, 1\)"):
        parts.finish(one.state, parts.local(x, w, b))
    whole = parts.local(x, w, b)
    with pytest.raises(ValueError, match="more than the 12"):
        parts.combine([whole.state, shard.state])
    with pytest.raises(ValueError, match="call `finish`"):
        parts.proceed(whole.state, whole)
    twice = cf.partial(CHAINS["twice"][0], {"w": 0, "b": 0}, COLUMNS).local(x, w, b)
    with pytest.raises(ValueError, match="call `proceed`"):
        cf.partial(CHAINS["twice"][0], {"w": 0, "b": 0}, COLUMNS).finish(twice.state, twice)
