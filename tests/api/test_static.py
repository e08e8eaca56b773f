"""Arguments and variables in `static`: the names that errors advise, and names that nothing reads."""

from __future__ import annotations

import logging
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf

X = np.array([1.0, 2.0, 3.0])
log = logging.StreamHandler()
lock = threading.Lock()
rng = np.random.default_rng(0)
settings = types.ModuleType("settings_with_a_handler")
settings.__file__ = __file__
settings.log = log  # type: ignore[attr-defined]


def helper(x: Any) -> Any:
    log.flush()
    return x * 2


def locked(x: Any) -> Any:
    with lock:
        return helper(x)


def by_module(x: Any) -> Any:
    settings.log.flush()
    return x * 3


class Layer:
    log = log

    def __init__(self, k: float):
        rng.standard_normal(3)
        self.k = k

    def __call__(self, x: Any) -> Any:
        log.flush()
        return x * self.k

    def scaled(self, x: Any) -> Any:
        return type(self)(2.0)(x)


def by_attribute(x: Any, layer: Any) -> Any:
    layer.log.flush()
    return x * layer.k


def advised(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the names that errors advise to put in `static`, one after the other, until there is no error."""
    names: list[str] = []
    while len(names) < 5:
        fused = cf.fuse(function, static=tuple(names))
        try:
            for _ in range(12):
                np.testing.assert_array_equal(fused(*args), function(*args))
        except TypeError as error:
            names += eval(str(error).partition("static=")[2].partition(" if")[0][:-1])
        else:
            return names
    raise AssertionError(names)


layer = Layer(3.0)


@pytest.mark.parametrize(
    ("function", "args", "names"),
    [
        (lambda x: helper(x) + 1, (X,), ["log"]),
        (lambda x: locked(x) + 1, (X,), ["lock", "log"]),
        (lambda x: by_module(x), (X,), ["settings"]),
        (lambda x: layer(x), (X,), ["log"]),
        (lambda x, layer: layer(x), (X, layer), ["log"]),
        (lambda x, held: held[0](x), (X, [Layer(1.0)]), ["log"]),
        (lambda x, f: f(x), (X, helper), ["log"]),
        (by_attribute, (X, layer), ["layer"]),
        (lambda x: by_attribute(x, layer), (X,), ["layer"]),
        (lambda x, items: x + len(items), (X, (1, lock)), ["items"]),
    ],
)
def test_errors_name_what_static_takes(function: Callable[..., Any], args: tuple[Any, ...], names: list[str]) -> None:
    assert advised(function, *args) == names


def test_variables_in_static_are_compared_by_equality(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(x: Any) -> Any:
        return x * len(log.name)

    monkeypatch.setitem(globals(), "log", logging.getLogger("a"))
    fused = cf.fuse(lambda x: scaled(x), static=("log",))
    bound = cf.fuse(lambda x, k: scaled(x) * k, static=("log",)).bind(k=2.0)
    for name in ("a", "abc", "a"):
        monkeypatch.setitem(globals(), "log", logging.getLogger(name))
        np.testing.assert_array_equal(fused(X), X * len(name))
        np.testing.assert_array_equal(bound(X), X * len(name) * 2)
    assert len(fused.plans) == 2


def test_a_fused_function_within_another_has_the_names_of_that_one() -> None:
    inner = cf.fuse(helper)
    with pytest.raises(TypeError, match=r"static=\('log',\)"):
        cf.fuse(lambda x: inner(x))(X)
    np.testing.assert_array_equal(cf.fuse(lambda x: inner(x), static=("log",))(X), X * 2)


def test_defaults_of_other_functions_are_no_variables() -> None:
    def by_default(x: Any, log: Any = log) -> Any:
        return x

    def by_keyword(x: Any, *, log: Any = log) -> Any:
        return x

    for function in (by_default, by_keyword, types.MethodType(lambda held, x: (held.log, x)[1], layer)):
        wrapped = function if isinstance(function, types.MethodType) else (lambda x, f=function: f(x))
        with pytest.raises(TypeError, match=r"make it an argument or a variable and name that in cf.fuse\(static="):
            cf.fuse(wrapped)(X)


@pytest.mark.parametrize("name", ["lgo", "y", "wrapped", "rng"])
def test_names_that_nothing_reads_are_an_error(name: str) -> None:
    fused = cf.fuse(lambda x, k=1.0: layer.k * helper(x) * k, static=("log", name))
    message = rf"static: '{name}' is neither a parameter of .*lambda> \(x, k\) nor a variable that it or a function"
    for call in (
        lambda: fused(X),
        lambda: fused.bind(k=2.0)(X),
        lambda: fused.plan(cf.spec((3,), "float64")),
        lambda: cf.fuse(lambda: helper(X), static=("log", name))(),
    ):
        with pytest.raises(TypeError, match=message if call.__code__.co_freevars != ("name",) else "it has none"):
            call()
    assert cf.fuse(fused, static=("log",))(X)[0] == 6
