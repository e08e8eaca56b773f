"""What a function reads around it: arrays and numbers in closures and globals are read anew in each call."""

from __future__ import annotations

import argparse
import random
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from support import Engine, assert_close, assert_equal, normal

import cupyfuse as cf

ONES = np.ones(3)
W = np.arange(3.0)
K = 2.0
TABLE: dict[str, Any] = {}
SETTINGS = types.ModuleType("settings_of_the_user")
SETTINGS.scale = 2.0  # type: ignore[attr-defined]
SETTINGS.__file__ = __file__
OPTIONS = types.SimpleNamespace(scale=2.0, inner=types.SimpleNamespace(scale=3.0))


def helper(x: Any) -> Any:
    return x * W


def countdown(x: Any, n: int) -> Any:
    return x * W if n == 0 else countdown(x, n - 1)


# Arrays -------------------------------------------------------------------------------------------------------------


def test_arrays_in_globals_and_closures_are_read_in_each_call(
    engine: Engine, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, x = normal(rng, 3, "float64"), normal(rng, (4, 3), "float64")
    w = engine.array(host)
    monkeypatch.setitem(globals(), "W", engine.array(host + 1))

    def function(x: Any) -> Any:
        return (x * w + W) * w.sum() + (W * 2)[None, :]

    fused = cf.fuse(function)

    def check(x: Any) -> None:
        a, b = engine.host(w), engine.host(W)
        expected = (x * a + b) * a.sum() + b * 2
        assert_close(engine.host(fused(engine.array(x))), expected, 1e-12 * (1 + np.abs(expected)))

    check(x)
    w *= 2
    check(x)
    w = engine.array(host - 3)
    check(x)
    monkeypatch.setitem(globals(), "W", engine.array(host * 5))
    check(x)
    assert len(fused._runnables) == 1, "other values of the same shape share a plan"
    monkeypatch.setitem(globals(), "W", engine.array(host[:1]))
    check(x)
    check(x[:2])
    assert "W" in str(fused.plan(engine.array(x))) and len(fused._runnables) == 3


def test_functions_that_are_called_read_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    w = np.array([5.0, 6.0, 7.0])

    def make(k: Any) -> Callable[[Any], Any]:
        def inner(x: Any) -> Any:
            return helper(x) + k * w

        return inner

    inner = make(np.full(3, 2.0))
    fused = cf.fuse(lambda x: inner(x) + countdown(x, 3))
    for _ in range(2):
        for values in (np.ones(3), np.arange(3.0), np.full(3, -1.0)):
            monkeypatch.setitem(globals(), "W", values)
            assert_equal(fused(ONES), values + 2 * w + values)
            w += 1
    inner = make(3.0)
    assert_equal(fused(ONES), W + 3 * w + W)
    monkeypatch.setitem(globals(), "helper", lambda x: x * 0)
    assert_equal(fused(ONES), 3 * w + W)


def test_arrays_in_containers_around_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"w": [np.arange(3.0)], "k": 2.0, "f": lambda x: x * W}
    fused = cf.fuse(lambda x: table["f"](x) + table["w"][0] * table["k"])  # type: ignore[operator,index]
    for change in (lambda: None, lambda: table.update(k=3.0), lambda: table.update(w=[ONES]), lambda: table.clear()):
        change()
        if not table:
            with pytest.raises(KeyError):
                fused(ONES)
            continue
        assert_equal(fused(ONES), fused.__wrapped__(ONES))
    (monkeypatch.setitem(TABLE, "w", np.ones(3)), monkeypatch.setitem(TABLE, "n", 1))
    named = cf.fuse(lambda x: x * TABLE["w"] * TABLE["n"])
    for n in (1, 2, 1):
        TABLE["n"] = n
        TABLE["w"] *= 2
        assert_equal(named(ONES), TABLE["w"] * n)


def test_arrays_around_the_function_that_it_changes_are_changed() -> None:
    state, total = [np.zeros(3)], np.zeros(3)

    def step(x: Any) -> Any:
        state[0] += x
        total[...] = state[0] * 2
        return total + 1

    fused = cf.fuse(step)
    for k in (1, 2, 3):
        assert_equal(fused(ONES), np.full(3, 2.0 * k + 1))
        assert_equal(state[0], np.full(3, float(k)))
        assert_equal(total, np.full(3, 2.0 * k))


def test_a_function_may_read_nothing_but_what_is_around_it() -> None:
    w = np.arange(4.0)
    fused = cf.fuse(lambda: np.exp(w).sum())
    for _ in range(2):
        assert_close(fused(), np.exp(w).sum(), 1e-12)
        w += 1


def test_nested_fused_and_bound_functions_read_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    w, v = np.arange(3.0), np.ones(3)
    inner = cf.fuse(lambda x: x * w)
    serve = cf.fuse(lambda x, v: x + v * W).bind(v=v)
    outer = cf.fuse(lambda x: serve(inner(x)))
    for _ in range(3):
        assert_equal(outer(ONES), w + v * W)
        assert_equal(serve(ONES), 1 + v * W)
        w += 1
        monkeypatch.setitem(globals(), "W", W + 1)
    v *= 3
    assert_equal(outer(ONES), w + v * W)


def test_bound_functions_read_what_is_around_them(rng: np.random.Generator) -> None:
    x, weight, bias = (normal(rng, shape, "float64") for shape in ((4, 5), (6, 5), 6))
    serve = cf.fuse(lambda x, weight: (x @ weight.T + bias).sum(axis=1)).bind(weight=weight)
    for rows in (4, 2):
        for k in (1.0, 2.0):
            bias *= k
            np.testing.assert_allclose(serve(x[:rows]), (x[:rows] @ weight.T + bias).sum(axis=1), rtol=1e-12)
    bias = bias[:1]
    np.testing.assert_allclose(serve(x), (x @ weight.T + bias).sum(axis=1), rtol=1e-12)


# Numbers, modules, objects ------------------------------------------------------------------------------------------


def test_numbers_around_the_function_are_read_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    k = 3.0
    fused = cf.fuse(lambda x: x * k + K)
    for k, other in ((3.0, 2.0), (3, 2.0), (4.0, 5.0), (3.0, 2.0)):
        monkeypatch.setitem(globals(), "K", other)
        assert_equal(fused(ONES), ONES * k + other)


def test_attributes_of_modules_and_objects_are_read_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda x: x * SETTINGS.scale + OPTIONS.scale * OPTIONS.inner.scale)
    for k in (1.0, 2.0, 3.0, 1.0):
        monkeypatch.setattr(SETTINGS, "scale", k)
        assert fused(ONES)[0] == k + OPTIONS.scale * OPTIONS.inner.scale
        monkeypatch.setattr(OPTIONS.inner, "scale", 10 * k)
        assert fused(ONES)[0] == k + OPTIONS.scale * 10 * k
    called = cf.fuse(lambda x: x * SETTINGS.scale())
    for function in (lambda: 5.0, lambda: K, lambda: 7.0):
        monkeypatch.setattr(SETTINGS, "scale", function)
        assert called(ONES)[0] == function()
    monkeypatch.setattr(SETTINGS, "scale", 2.0)
    monkeypatch.delattr(OPTIONS, "scale")
    with pytest.raises(AttributeError):
        fused(ONES)


def test_arrays_that_cannot_be_read_anew_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SETTINGS, "scale", W)

    @dataclass
    class Layer:
        weight: ClassVar[Any] = np.ones(3)

        def apply(self, x: Any) -> Any:
            return helper(x)

    for function, words in (
        (lambda x: x * SETTINGS.scale, r"'SETTINGS\.scale'.*make it an argument"),
        (lambda x: x * Layer.weight, r"Layer.*make it an argument"),
        (lambda x: Layer().apply(x), r"the array W, .*Layer.*make it an argument"),
    ):
        with pytest.raises(TypeError, match=words):
            cf.fuse(function)(ONES)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [types.SimpleNamespace, argparse.Namespace])
def test_namespaces_around_functions_are_read_in_each_call(kind: Any) -> None:
    """Whether code names an attribute, or hands the namespace on, beside other arrays."""
    bias, inner = np.zeros(3), kind(scale=2.0, weights=[np.ones(3)])
    options = kind(weight=np.ones(3), inner=inner, logger=None)

    def handed_on(given: Any, x: Any) -> Any:
        return x * given.weight + given.inner.weights[0] * given.inner.scale

    functions = (
        lambda x: x * options.weight + options.inner.weights[0] * options.inner.scale + bias,
        lambda x: handed_on(options, x) + bias,
        lambda x: x * getattr(options, "weight") + handed_on(options, x * 0) + bias,  # noqa: B009
    )
    fused = [cf.fuse(function) for function in functions]

    def check() -> None:
        for ours, plain in zip(fused, functions, strict=True):
            assert_equal(ours(ONES), plain(ONES))

    check()
    options.weight[1] = bias[0] = 5.0
    check()
    options.weight, inner.scale = np.full(3, 7.0), 3.0
    check()
    inner.weights[0][2] = 9.0
    options.inner = kind(scale=4.0, weights=[np.full(3, 2.0)])
    check()
    options.weight = bias  # one array by two names
    check()
    for unknown in (object(), options, [options, options]):  # attributes are read one by one
        options.logger = unknown
        assert_equal(cf.fuse(lambda x: x * options.inner.scale)(ONES), ONES * 4)
    with pytest.raises(TypeError, match=r"'options\.(inner\.weights|weight)': an array among the attributes"):
        fused[0](ONES)


def test_a_namespace_that_a_function_changes_is_refused() -> None:
    options = types.SimpleNamespace(count=0)

    def counted(given: Any, x: Any) -> Any:
        given.count += 1
        return x * given.count

    with pytest.raises(cf.TraceError, match="a change of 'options'"):
        cf.fuse(lambda x: counted(options, x))(ONES)
    assert options.count == 0


def test_variables_that_a_function_assigns_are_refused() -> None:
    count = 0

    def local(x: Any) -> Any:
        nonlocal count
        count += 1
        return x * count

    scope: dict[str, Any] = {}
    exec("total = 0\ndef function(x):\n    global total\n    total = total + 1\n    return x * total", scope)
    for function, name in ((local, "count"), (scope["function"], "total")):
        with pytest.raises(TypeError, match=rf"{function.__name__} assigns .* '{name}'"):
            cf.fuse(function)(ONES)


def test_a_list_that_collects_values_is_refused() -> None:
    losses: list[Any] = []
    with pytest.raises(cf.TraceError, match="a change of 'losses'"):
        cf.fuse(lambda x: losses.append(x.sum()) or x)(ONES)  # type: ignore[func-returns-value]
    assert losses == []


def test_globals_that_hide_builtins_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda x: x * max(2.0, 3.0))
    assert fused(ONES)[0] == 3
    monkeypatch.setitem(globals(), "max", lambda *values: 7.0)
    assert fused(ONES)[0] == 7
    monkeypatch.delitem(globals(), "max")
    assert fused(ONES)[0] == 3


def test_arrays_of_a_failed_trace_cannot_be_used() -> None:
    def function(x: Any) -> Any:
        error = RuntimeError("failed")
        error.array = x  # type: ignore[attr-defined]
        raise error

    with pytest.raises(RuntimeError, match="failed") as caught:
        cf.fuse(function)(ONES)
    with pytest.raises(cf.TraceError, match="a trace that has ended"):
        caught.value.array + 1  # type: ignore[attr-defined]


def test_the_plain_function_is_left_as_it_is() -> None:
    fused = cf.fuse(helper)
    assert_equal(fused(ONES), W)
    assert helper(ONES) is not fused(ONES) and isinstance(helper(ONES), np.ndarray)
    assert type(W) is np.ndarray and fused.__wrapped__ is helper


# Made while tracing -------------------------------------------------------------------------------------------------


def test_arrays_made_inside_are_constants(engine: Engine, rng: np.random.Generator) -> None:
    def function(x: Any) -> Any:
        n = x.shape[1]
        mask = np.triu(np.ones((n, n)), 1) > 0
        steps = np.arange(n, dtype=np.float64)
        y = np.where(mask, -np.inf, x) + steps
        return np.exp(y - y.max(axis=1, keepdims=True)), x @ np.eye(n), x + np.arange(n), np.linspace(0.0, 1.0, 3)

    x = normal(rng, (5, 5), "float64")
    fused = cf.fuse(function)
    for _ in range(2):
        for actual, expected in zip(engine.host(fused(engine.array(x))), function(x), strict=True):
            assert_close(actual, expected, 1e-12)
    first, second = fused(engine.array(x))[3], fused(engine.array(x))[3]
    first[...] = 7
    assert second[0] == 0, "constants that are returned are the caller's"


def test_an_array_made_inside_is_what_it_was_when_it_was_used() -> None:
    def function(x: Any) -> Any:
        k = np.zeros(3)
        y = x + k
        k += 5
        return y, x + k

    first, second = cf.fuse(function)(ONES)
    assert_equal(first, ONES)
    assert_equal(second, ONES + 5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * np.random.normal(),  # noqa: NPY002
        lambda x: x + np.random.rand(3),  # noqa: NPY002
        lambda x: np.where(np.random.rand(3) > 2, x, np.random.rand()),  # noqa: NPY002
        lambda x: x * random.random(),
        lambda x: x + time.perf_counter(),
        lambda x: np.random.default_rng().random(3) + x,
    ],
)
def test_what_differs_from_trace_to_trace_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(cf.TraceError, match="differs from run to run") as caught:
        cf.fuse(function)(ONES)
    assert f"{__file__}:{function.__code__.co_firstlineno}" in str(caught.value)
    with pytest.raises(cf.TraceError, match="differs from run to run"):
        cf.fuse(function).plan(cf.spec(3, "float64"))


def test_structures_that_differ_from_trace_to_trace_are_refused() -> None:
    flips = iter([True, False] * 2)

    class Flip:
        def __bool__(self) -> bool:
            return next(flips)

    flip = Flip()
    with pytest.raises(cf.TraceError, match="random numbers"):
        cf.fuse(lambda x, flip: (x, time.perf_counter()), static=("flip",))(ONES, flip)
    with pytest.raises(cf.TraceError, match="random numbers"):
        cf.fuse(lambda x, flip: x - x.T if flip else x.T - x, static=("flip",))(np.ones((2, 2)), flip)
    with pytest.raises(cf.TraceError, match=r"random numbers|differs from run to run"):
        cf.fuse(lambda x, flip: (x * 2) if flip else x, static=("flip",))(ONES, flip)


def test_seeded_random_numbers_are_constants() -> None:
    fused = cf.fuse(lambda x: x + np.random.default_rng(7).random(3))
    for _ in range(2):
        assert_equal(fused(ONES), ONES + np.random.default_rng(7).random(3))
