"""Nested results of functions that run as written: new ones are returned as they are, shared ones copied."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse.api.as_written import AsWritten
from cupyfuse.api.parameters import Parameters
from cupyfuse.settings import force_plans

X = np.random.default_rng(5).standard_normal((8, 6))


def arrays_in(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list, dict)):
        return [a for item in (value.values() if isinstance(value, dict) else value) for a in arrays_in(item)]
    return [value] if isinstance(value, np.ndarray) else []


def as_written(function: Callable[..., Any]) -> Any:
    return AsWritten(function, Parameters(function))((X,))


def nested(x: Any) -> tuple[Any, ...]:
    return x.sum(), {"W": x + 1, "b": [x * 2, (x - 1, "name", 3, None, True)]}, [(x + 3).T, {}]


def test_new_nested_results_are_returned_as_they_are() -> None:
    ids = []

    def function(x: Any) -> Any:
        result = nested(x)
        ids.extend(map(id, (result, result[1], result[1]["b"], *arrays_in(result))))
        return result

    result = as_written(function)
    assert ids == list(map(id, (result, result[1], result[1]["b"], *arrays_in(result))))


@pytest.mark.parametrize(
    "keep",
    [
        lambda result: result,
        lambda result: result[1],
        lambda result: result[1]["b"],
        lambda result: result[1]["b"][1],
        lambda result: result[2],
        lambda result: arrays_in(result)[:1],
        lambda result: arrays_in(result)[2][1:],
        lambda result: arrays_in(result)[3],
        lambda result: arrays_in(result)[3].base,
    ],
)
def test_what_a_function_keeps_of_nested_results_is_not_returned(keep: Callable[[Any], Any]) -> None:
    kept: list[Any] = []

    def function(x: Any) -> Any:
        result = nested(x)
        kept.append(keep(result))
        return result

    result = as_written(function)
    held = [kept[0]] if isinstance(kept[0], np.ndarray) else arrays_in(kept[0])
    assert held and not any(np.shares_memory(a, b) for a in held for b in arrays_in(result))
    containers = [result[1], result[1]["b"], result[1]["b"][1], result[2]]
    assert not any(c is kept[0] for c in containers)
    for ours, wanted in zip(arrays_in(result), arrays_in(nested(X)), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    result[1]["b"].append(1)
    result[2].append(1)
    plain = nested(X)
    assert result[1]["b"][1][1:] == plain[1]["b"][1][1:] and list(result[1]) == ["W", "b"] and result[2][1:] == [{}, 1]


def once(x: Any) -> Any:
    inner = [x + 1]
    return inner, {"again": inner}


def deep(x: Any) -> Any:
    y = x + 1
    return [[y], {"y": (y, y)}]


def views(x: Any) -> Any:
    y = x + 1
    return {"whole": y, "views": [y[1:], y.T, (y[0],)]}


def of_argument(x: Any) -> Any:
    return [x[0], {"x": x, "row": (x[1:], x.T)}]


def broadcast(x: Any) -> Any:
    return [[np.broadcast_to(x.sum(), (3,))], (np.lib.stride_tricks.sliding_window_view(x[0] + 1, 2),)]


@pytest.mark.parametrize("function", [once, deep, views, of_argument, broadcast])
def test_results_that_share_memory_with_each_other_are_apart(function: Callable[..., Any]) -> None:
    result = as_written(function)
    found = arrays_in(result)
    for k, (ours, wanted) in enumerate(zip(found, arrays_in(function(X)), strict=True)):
        np.testing.assert_array_equal(ours, wanted)
        assert ours.flags.writeable and not any(np.shares_memory(ours, other) for other in (X, *found[:k]))


def test_a_container_that_is_returned_twice_is_two() -> None:
    first, second = as_written(once)
    assert first is not second["again"]


class Tagged(float):
    """A number that holds an array."""

    array: Any


def _tagged(array: Any) -> Tagged:
    made = Tagged(1.0)
    made.array = array
    return made


cf.register(Tagged, lambda t: ([t.array], None), lambda constants, children: _tagged(children[0]))


def test_numbers_of_registered_types_are_taken_apart() -> None:
    array = X.copy()
    for result in as_written(lambda x: (x + 1, _tagged(array))), as_written(lambda x: [x, {"a": _tagged(array)}]):
        tagged = result[1] if isinstance(result, tuple) else result[1]["a"]
        assert type(tagged) is Tagged and not np.shares_memory(tagged.array, array)


def largest_or_zero(x: Any) -> Any:
    return 0.0 if not x.size else x.max()


def described(x: Any) -> Any:
    return x.shape, {"is_float": x.dtype.kind == "f"}


def columns(x: Any) -> Any:
    return {str(n): n for n in range(len(x))}


@pytest.mark.parametrize("function", [largest_or_zero, described, columns])
def test_results_without_arrays_for_some_shapes(function: Any) -> None:
    fused = cf.fuse(function)
    for x in (X[:0], X, X[:0]):
        with force_plans():
            found = fused(x)
        assert found == function(x) and type(found) is type(function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x, f"{x.sum()}"),
        lambda x: {"loss": x.mean(), "text": ["mean " + str(x.mean())]},
        lambda x: {repr(x[0]): x},
        lambda x: (x, "".join(map(str, [x > 0]))),
    ],
)
def test_text_of_an_arrays_values_is_refused(function: Callable[..., Any]) -> None:
    """It would describe the trace. Text of what is known is returned, and anything may be printed."""
    x = np.ones((2, 3))
    with pytest.raises(cf.TraceError, match=r"a text of an array's values.* format it outside"):
        cf.fuse(function)(x)
    fused = cf.fuse(lambda x, s: (print(x), x * s, f"{x.shape} {x.dtype} {s} {len(x)}")[1:])
    result, text = fused(x, 0.5)
    assert text == "(2, 3) float64 0.5 2" and (result == 0.5).all()


def test_records_of_classes_that_the_function_makes() -> None:
    """Each trace makes another class, of the same names and fields."""

    def function(x: Any) -> Any:
        @dataclasses.dataclass
        class Norm:
            mean: Any
            scale: float = 2.0

        pair = collections.namedtuple("pair", "total norm")
        return pair(x.sum(axis=1), Norm(x.mean(axis=1)))

    with force_plans():
        fused = cf.fuse(function)
        for x in (X, 2 * X):
            found, expected = fused(x), function(x)
            assert type(found).__name__ == "pair" and found._fields == ("total", "norm")
            np.testing.assert_allclose(found.total, expected.total)
            np.testing.assert_allclose(found.norm.mean, expected.norm.mean)
            assert (type(found.norm).__qualname__, found.norm.scale) == (type(expected.norm).__qualname__, 2.0)


def test_numbers_of_the_call_are_keys() -> None:
    """They are read, as by any other dict: each value has a plan."""

    def function(x: Any, levels: Any, k: Any) -> Any:
        by_level = {q: np.quantile(x, q) for q in levels}
        counts = collections.Counter({k: 2, round(2 * k): 3})
        made = collections.defaultdict(list, {(k, "a"): x * k, frozenset([k]): k})
        return by_level, counts, made, {k, 7.5}, collections.OrderedDict({k + 1: x})

    fused, x = cf.fuse(function), np.arange(6.0)
    for levels, k in (
        ([0.25, 0.5], 0.5),
        ([0.25, 0.75], 1.5),
        ((0.125,), 0.5),
        ([0.25, 0.5], 3),
        ([1, 0.5], 4),
        ([0, 0.5], 5),
    ):
        found, expected = fused(x, levels, k), function(x, levels, k)
        assert repr(found) == repr(expected)
        assert [*map(type, found)] == [*map(type, expected)]
        assert [type(q) for q in found[0]] == [type(q) for q in expected[0]]
