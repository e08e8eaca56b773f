"""What surrounds a function is found again by identity: classes, helpers, their default values and code."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse.settings import force_plans

X = np.arange(6.0).reshape(2, 3)


@dataclass
class Pair:
    first: Any
    second: Any

    factor = 2.0

    def scaled(self, by: Any = None) -> Any:
        return self.first * self.factor + (0 if by is None else by.shift)


class Config:
    shift = 1.0


def helper(x: Any, eps: float = 0.5, *, scale: float = 1.0) -> Any:
    return x * scale + eps


def test_default_values_of_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda x: helper(x))
    for defaults in ((0.5,), (2.0,), (0.5,)):
        monkeypatch.setattr(helper, "__defaults__", defaults)
        np.testing.assert_array_equal(fused(X), X + defaults[0])
    for scale in (3.0, 4.0):
        monkeypatch.setattr(helper, "__kwdefaults__", {"scale": scale})
        np.testing.assert_array_equal(fused(X), X * scale + 0.5)
    assert helper.__kwdefaults__ is not None
    helper.__kwdefaults__["scale"] = 5.0
    np.testing.assert_array_equal(fused(X), X * 5 + 0.5)


def test_code_of_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda x: helper(x))
    np.testing.assert_array_equal(fused(X), X + 0.5)
    monkeypatch.setattr(helper, "__code__", (lambda x, eps=0.5, *, scale=1.0: x - eps * scale).__code__)
    np.testing.assert_array_equal(fused(X), X - 0.5)


def test_classes_that_a_function_names(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda x: Pair(x, x * Config.shift))
    for shift in (1.0, 2.0, 1.0):
        monkeypatch.setattr(Config, "shift", shift)
        result = fused(X)
        assert type(result) is Pair
        np.testing.assert_array_equal(result.second, X * shift)


def test_attributes_of_classes_of_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda p: p.scaled())
    for factor in (2.0, 3.0, 2.0):
        monkeypatch.setattr(Pair, "factor", factor)
        np.testing.assert_array_equal(fused(Pair(X, X)), X * factor)
    monkeypatch.setattr(Pair, "scaled", lambda self: self.first - self.factor)
    np.testing.assert_array_equal(fused(Pair(X, X)), X - 2)


def test_methods_of_arguments_read_classes_around_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda p: p.scaled(Config))
    for shift in (1.0, 4.0, 1.0):
        monkeypatch.setattr(Config, "shift", shift)
        np.testing.assert_array_equal(fused(Pair(X, X)), X * 2 + shift)


def test_attributes_that_swap_their_names() -> None:
    class Bounds:
        low, high = 2.0, 5.0

    fused = cf.fuse(lambda x: x * Bounds.low)
    np.testing.assert_array_equal(fused(X), X * 2)
    low, high = Bounds.low, Bounds.high
    del Bounds.low, Bounds.high
    Bounds.high, Bounds.low = low, high  # the values in the same order
    np.testing.assert_array_equal(fused(X), X * 5)


def test_bases_that_are_exchanged() -> None:
    class Two:
        k = 2.0

    class Three:
        k = 3.0

    class Own(Two):
        pass

    fused = cf.fuse(lambda x: x * Own.k)
    np.testing.assert_array_equal(fused(X), X * 2)
    Own.__bases__ = (Three,)
    np.testing.assert_array_equal(fused(X), X * 3)


@pytest.mark.parametrize("function", [lambda x: helper(x), lambda x: Pair(x, x), lambda p: p.scaled(Config)])
def test_what_cannot_change_is_not_walked_again(function: Any) -> None:
    from cupyfuse.api.signature import Signature

    fused = cf.fuse(function)
    argument = Pair(X, X) if function.__code__.co_varnames[0] == "p" else X
    fused(argument)
    walked = []
    original = Signature.add_function
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Signature, "add_function", lambda *args, **kw: (walked.append(0), original(*args, **kw)))
        fused(argument)
    # Default values by name are in a dict, which may change.
    assert bool(walked) == (function.__code__.co_names == ("helper",))


@functools.lru_cache(maxsize=8)
def causal(n: int) -> Any:
    return np.tri(n) * Config.shift


@functools.cache
def shifted(n: int) -> Any:
    table = np.zeros(n)
    table[1:] = causal(n)[1:, 0]
    return table


def test_cached_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traces read what the functions read, and put nothing into their caches."""
    for function in (lambda x: x @ causal(x.shape[1]), lambda x: x + shifted(3), lambda x, f=causal: x @ f(3)):
        with force_plans():
            fused = cf.fuse(function)
            for shift in (1.0, 2.0):
                monkeypatch.setattr(Config, "shift", shift)
                causal.cache_clear()
                shifted.cache_clear()
                actual = fused(X)
                assert not causal.cache_info().currsize and not shifted.cache_info().currsize
                np.testing.assert_array_equal(actual, function(X))


def test_a_cached_function_of_traced_numbers() -> None:
    double = functools.lru_cache(lambda x, y=0: x * 2 + y)
    total = functools.cache(lambda n: n and n + total(n - 1))
    fused = cf.fuse(lambda x: double(x.sum()) + double(x[0, 0], y=x.max()) + double(3) + total(40) + x)
    with force_plans():
        np.testing.assert_array_equal(fused(X), 2 * X.sum() + 2 * X[0, 0] + X.max() + 826 + X)
        for function in (lambda x: double(x), lambda x: double(3, y=x)):
            with pytest.raises(TypeError, match=r"unhashable type: 'numpy.ndarray'"):
                cf.fuse(function)(X)
    assert not double.cache_info().currsize and not total.cache_info().currsize
    with pytest.raises(cf.TraceError, match="a number computed from arrays as a key"):
        cf.fuse(lambda x: double((x.sum(), 1)))(X)


def test_closure_cells_that_are_assigned_later() -> None:
    """A variable that a function has not needed yet, of its own or of a helper's closure; then deleted, and again."""

    def make(through_helper: bool) -> tuple[Any, Any]:
        def choose() -> Any:
            return factor

        def forget() -> None:
            nonlocal factor
            del factor

        def scaled(x: Any) -> Any:
            try:
                return x * (choose() if through_helper else factor)
            except NameError:
                return x

        def assign(value: Any) -> None:
            nonlocal factor
            factor = value
            if value is None:
                forget()

        factor: Any = None
        forget()
        return cf.fuse(scaled), assign

    for through_helper in (False, True):
        fused, assign = make(through_helper)
        with force_plans():
            for value in (None, 2.0, 3.0, None, np.array([1.0, 2.0, 3.0]), np.array([2.0, 1.0, 3.0]), None):
                assign(value)
                np.testing.assert_array_equal(fused(X), X * (1 if value is None else value))
                np.testing.assert_array_equal(fused(X), X * (1 if value is None else value))


def test_attributes_of_fused_and_cached_functions() -> None:
    @cf.fuse
    def scaled(x: Any, shift: Any = 0.0) -> Any:
        return x * scaled.factor + shift

    @functools.cache
    def table() -> Any:
        return np.ones(3)

    fused = cf.fuse(lambda x: x * table() + table.shift)  # type: ignore[attr-defined]
    bound = scaled.bind(shift=0.5)
    around = cf.fuse(lambda x: scaled(x) + (bound.more if hasattr(bound, "more") else 0.0))
    with force_plans():
        for value in (2.0, 3.0, 2.0, 4.0):
            scaled.factor = value  # type: ignore[attr-defined]
            table.shift = value  # type: ignore[attr-defined]
            np.testing.assert_array_equal(scaled(X), X * value)
            np.testing.assert_array_equal(bound(X), X * value + 0.5)
            np.testing.assert_array_equal(around(X), X * value)
            np.testing.assert_array_equal(fused(X), X + value)
        for more in (1.0, 2.0):
            bound.more = more  # type: ignore[attr-defined]
            np.testing.assert_array_equal(around(X), X * 4 + more)
        scaled.factor = np.ones(3)  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="the array"):
            scaled(X)


def test_a_cached_method_of_a_class_is_refused() -> None:
    class Layer:
        @staticmethod
        @functools.cache
        def mask(n: int) -> Any:
            return np.tri(n)

    with pytest.raises(TypeError, match="lru_cache"):
        cf.fuse(lambda x: x @ Layer.mask(3))(X)


def test_default_values_that_are_replaced() -> None:
    """A call takes the default values that the function has then, of a bound function too."""

    def scale(x: Any, factor: float = 2.0, *, shift: float = 0.0) -> Any:
        return x * factor + shift

    fused, bound = cf.fuse(scale), cf.fuse(scale).bind(shift=1.0)
    x = np.ones(3)
    assert fused(x)[0] == 2.0 and bound(x)[0] == 3.0
    scale.__defaults__ = (5.0,)
    assert fused(x)[0] == 5.0 and bound(x)[0] == 6.0 and fused(x, shift=1.0)[0] == 6.0
    assert scale.__kwdefaults__ is not None
    scale.__kwdefaults__["shift"] = 3.0
    assert fused(x)[0] == 8.0 and fused(x, 1.0)[0] == 4.0 and bound(x)[0] == 6.0
    scale.__defaults__ = None
    with pytest.raises(TypeError, match="factor"):
        fused(x)
