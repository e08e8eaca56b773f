"""Functions of libraries that wrap the user's: what these read is read in each call."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy.special import expit
from support import assert_equal

import cupyfuse as cf
from cupyfuse.settings import force_plans

ONES = np.ones(3)
K = 2.0
W = np.arange(3.0)


@contextlib.contextmanager
def temperature() -> Iterator[float]:
    yield K


@functools.singledispatch
def dispatched(kind: Any, x: Any) -> Any:
    return x


@dispatched.register
def _(kind: int, x: Any) -> Any:
    return x * K if kind else dispatched(1, x)


@dataclass
class Layer:
    bias: float

    @contextlib.contextmanager
    def temperature(self) -> Iterator[float]:
        yield K + self.bias


def with_context(x: Any) -> Any:
    with temperature() as t:
        return x * t


def with_method(x: Any) -> Any:
    with Layer(0.0).temperature() as t:
        return x * t


@pytest.mark.parametrize(
    "function",
    [
        with_context,
        with_method,
        lambda x: dispatched(1, x),
        lambda x: dispatched(0, x),
        lambda x: (temperature,)[0]().__enter__() * x,
        temperature()(with_context),
    ],
)
def test_what_wrapped_functions_read_is_read_in_each_call(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(function)
    for k in (2.0, 3.0, 5.0, 2.0):
        monkeypatch.setitem(globals(), "K", k)
        assert_equal(fused(ONES), ONES * k)
    assert len(fused._runnables) == 3


def test_functions_that_are_registered_later_are_noticed() -> None:
    @functools.singledispatch
    def scaled(kind: Any, x: Any) -> Any:
        return x

    fused = cf.fuse(lambda x: scaled(1, x))
    assert fused(ONES)[0] == 1
    for k in (3.0, 4.0):
        scaled.register(int, lambda kind, x, k=k: x * k)  # type: ignore[misc]
        assert fused(ONES)[0] == k


def test_arrays_that_wrapped_functions_read_are_refused() -> None:
    """The function of the library is not made again, so that none can stand for them."""

    @contextlib.contextmanager
    def weights() -> Iterator[Any]:
        yield W

    def function(x: Any) -> Any:
        with weights() as w:
            return x * w

    @weights()  # which holds the generator function in an object
    def decorated(x: Any) -> Any:
        return x

    for fused, name in ((cf.fuse(function), "weights"), (cf.fuse(lambda x: decorated(x)), "decorated")):
        with pytest.raises(TypeError, match=rf"the array W, which the wrapper .*{name} holds or .*make it an argument"):
            fused(ONES)


def test_objects_that_wrapped_functions_hold_are_known_or_refused() -> None:
    class Scale:
        def __init__(self, k: float):
            self.k = k

        def __call__(self) -> Iterator[float]:
            yield self.k

    scale = Scale(2.0)
    held: Callable[..., Any] = contextlib.contextmanager(scale)

    def function(x: Any) -> Any:
        with held() as k:
            return x * k

    fused = cf.fuse(function)
    assert fused(ONES)[0] == 2
    scale.k = 3.0
    assert fused(ONES)[0] == 3
    scale.k = np.full(3, 4.0)  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"the array helper.*k, which the Scale holds.*make it an argument"):
        fused(ONES)
    scale.k = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"(?s)k'.*lock.*static="):
        fused(ONES)
    assert cf.fuse(lambda x, held: x + 1, static=("held",))(ONES, held)[0] == 2


def test_functions_of_libraries_that_wrap_their_own_are_constants() -> None:
    from scipy import special

    fused = cf.fuse(lambda x: special.expit(x) + np.linalg.norm(x) + cf.gelu(x))
    assert_equal(fused(ONES), fused(ONES))
    assert len(fused._runnables) == 1


def with_scale(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(x: Any, scale: float = 2.0) -> Any:
        return function(x) * scale

    return wrapper


def times(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(factor: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * factor

    return wrapper


def passing_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def changing_x(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(x: Any, *args: Any, **kwargs: Any) -> Any:
        return function(x + 1, *args, **kwargs)

    return wrapper


def with_default(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(x: Any, y: Any = 5.0, *args: Any, **kwargs: Any) -> Any:
        return function(x, y, *args, **kwargs)

    return wrapper


def squared(x: Any) -> Any:
    return x * x


def added(x: Any, y: Any = 3.0) -> Any:
    return x + y


class Model:
    @passing_on
    def added(self, x: Any, y: Any = 3.0) -> Any:
        return x + y

    @with_scale
    def plain(self) -> Any:
        return W


WRAPPED: tuple[tuple[Callable[..., Any], tuple[str, ...]], ...] = (
    (with_scale(squared), ("x", "scale")),
    (passing_on(with_scale(squared)), ("x", "scale")),
    (with_scale(passing_on(squared)), ("x", "scale")),
    (times(added), ("factor", "args", "kwargs")),
    (passing_on(added), ("x", "y")),
    (changing_x(added), ("x", "y")),
    (functools.lru_cache(changing_x(added)), ("x", "y")),
    (with_default(added), ("x", "y", "args", "kwargs")),
    (Model.added, ("self", "x", "y")),
    (Model().added, ("x", "y")),
)


@pytest.mark.parametrize(("function", "names"), WRAPPED)
def test_parameters_are_those_of_what_is_called(function: Callable[..., Any], names: tuple[str, ...]) -> None:
    assert cf.fuse(function).names == names


def test_wrappers_with_parameters_of_their_own() -> None:
    fused = cf.fuse(with_scale(squared))
    assert_equal(fused(W), W * W * 2)
    assert_equal(fused(W, scale=5.0), W * W * 5)
    assert_equal(fused.bind(scale=3.0)(W), W * W * 3)
    assert_equal(cf.fuse(with_default(added))(W), W + 5)
    fused = cf.fuse(times(added))
    assert_equal(fused(2.0, W), (W + 3) * 2)
    assert_equal(fused(2.0, W, y=1.0), (W + 1) * 2)
    assert_equal(cf.fuse(changing_x(added)).bind(y=W)(W), 2 * W + 1)
    with pytest.raises(TypeError, match="factor"):
        cf.fuse(times(added))()


@pytest.mark.parametrize(("ufunc", "names"), [(np.square, ("x",)), (np.logaddexp, ("x1", "x2")), (expit, ("x",))])
def test_ufuncs_take_their_operands(ufunc: Any, names: tuple[str, ...]) -> None:
    """They refuse some of their own defaults beside others."""
    fused, arguments = cf.fuse(ufunc), [W] * len(names)
    assert fused.names == names
    assert_equal(fused(*arguments), ufunc(*arguments))
    with force_plans():
        np.testing.assert_allclose(cf.fuse(ufunc)(*arguments), ufunc(*arguments), rtol=1e-12)
