"""What changes while the compiled launcher learns to recognise calls: plans, variables, defaults, other calls."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from direct_calls import CALLS, array, cache_of, close, learn

import cupyfuse as cf
from cupyfuse.api.direct_calls import DirectCalls

OFFSET: Any = 1.5


def test_calls_are_not_described_again_and_again(module: Any, rng: np.random.Generator) -> None:
    """More plans than are recognised, by turns: Python recognises some of their calls, none often enough."""
    function = cf.fuse(lambda x: x + 1)
    arrays = [array(rng, n, 8) for n in range(1, 7)]
    for x in arrays * CALLS:
        function(x)
        function(x)
        assert cache_of(function).direct is None
    learn(function, arrays[0])


def test_calls_that_arrive_while_others_are_described(module: Any, rng: np.random.Generator) -> None:
    """By a finalizer or in another thread, while the calls are walked."""
    function = cf.fuse(lambda x, a, b: x * a - b)
    x = array(rng, 3, 8)
    cache = learn(function, x, 2.0, 1.0)
    calls = cache._calls
    ((runnable, _, _),) = calls._calls
    forms = [((x, 2.0), {"b": 1.0}), ((x,), {"a": 2.0, "b": 1.0}), ((), {"x": x, "a": 2.0, "b": 1.0})]
    rest = (function.parameters, (function.names, {}, {}))

    def trace(frame: Any, event: str, _: Any) -> Any:
        walks = frame.f_code.co_name in ("<genexpr>", "<dictcomp>")
        if walks and frame.f_code.co_filename.endswith("direct_calls.py") and forms:
            calls.add(runnable, *forms.pop(), *rest)  # tracing is off meanwhile
        return trace

    form = forms.pop()
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        calls.add(runnable, *form, *rest)
    finally:
        sys.settrace(before)
    assert not forms
    close(function(x, 3.0, b=1.0), np.asarray(x) * 3 - 1)


def test_a_cache_may_be_cleared_while_a_call_is_noted(
    module: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = cf.fuse(lambda x: x + 1)
    x = array(rng, 3, 8)
    cache = cache_of(function)
    described = DirectCalls._describe

    def describe(self: DirectCalls, *arguments: Any) -> Any:
        cache.clear()
        return described(self, *arguments)

    monkeypatch.setattr(DirectCalls, "_describe", describe)
    for _ in range(CALLS):
        close(function(x), np.asarray(x) + 1)
    assert cache.direct is None


def test_variables_may_change_while_a_call_is_noted(
    module: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To a mutable value, so that nothing tells whether it changes again."""
    function = cf.fuse(lambda x: x + (OFFSET if type(OFFSET) is float else OFFSET[0]))
    x = array(rng, 3, 8)
    described = DirectCalls._describe

    def describe(self: DirectCalls, *arguments: Any) -> Any:
        monkeypatch.setattr(sys.modules[__name__], "OFFSET", [4.0])
        return described(self, *arguments)

    monkeypatch.setattr(DirectCalls, "_describe", describe)
    for _ in range(CALLS):
        function(x)
    assert OFFSET == [4.0]
    close(function(x), np.asarray(x) + 4)


def test_defaults_may_change_while_a_call_is_noted(
    module: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plain(x: Any, scale: float = 2.0) -> Any:
        return x * scale

    function = cf.fuse(plain)
    x = array(rng, 3, 8)
    described = DirectCalls._describe

    def describe(self: DirectCalls, *arguments: Any) -> Any:
        plain.__defaults__ = (3.0,)
        return described(self, *arguments)

    monkeypatch.setattr(DirectCalls, "_describe", describe)
    for _ in range(CALLS):
        function(x)
    assert plain.__defaults__ == (3.0,)
    close(function(x), np.asarray(x) * 3)
