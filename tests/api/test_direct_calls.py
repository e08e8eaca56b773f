"""Calls that the compiled launcher recognises: those that Python would, and no others, with the same results."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from direct_calls import CALLS, F32, array, cache_of, close, is_direct, learn, softmax
from support import HOST

import cupyfuse as cf
from cupyfuse.api.direct_calls import DirectCalls
from cupyfuse.cuda import launcher

OFFSET: Any = 1.5
FACTOR: Any = 1


def test_arrays_are_compared(module: Any, rng: np.random.Generator) -> None:
    function = cf.fuse(lambda x: cf.softmax(x, axis=1))
    x = array(rng, 5, 24)
    cache = learn(function, x)
    other, wide = array(rng, 5, 24), array(rng, 5, 48)
    close(cache.direct((other,), {}), softmax(other))
    close(function(other), softmax(other))
    assert is_direct(cache, x=x) == is_direct(cache) == False  # noqa: E712
    for value in (
        wide,
        wide[:, ::2],
        array(rng, 24, 5).T,
        array(rng, 5, 24, dtype=np.float64),
        np.asarray(x)[:4],
        None,
    ):
        assert not is_direct(cache, value)
        if value is not None:
            close(function(value), softmax(value))
    assert not is_direct(cache, np.array(other)) and not is_direct(cache, other, other)
    assert not is_direct(cache, other, out=other) and is_direct(cache, other)


def test_a_device_is_compared(module: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    function = cf.fuse(lambda x: cf.softmax(x, axis=1))
    x = array(rng, 5, 24)
    cache = learn(function, x)
    monkeypatch.setattr("host_cuda.runtime.DEVICE", "another")
    assert not is_direct(cache, x)


def test_constants_are_compared_by_type_and_value(module: Any, rng: np.random.Generator) -> None:
    @cf.fuse
    def function(x: Any, n: Any, name: str = "a", flag: Any = None) -> Any:
        return x * (n if name == "a" else -n) + (1 if flag else 0)

    x = array(rng, 3, 8)
    cache = learn(function, x, 2, "a", flag=True)
    learn(function, x, 2, name="a", flag=True)
    assert is_direct(cache, x, 1 + 1, "".join(["a"]), flag=True)
    assert is_direct(cache, x, 2, flag=True, name="a")

    class Two(int): ...

    assert not is_direct(cache, x, Two(2), "a", flag=True)
    for n, name, flag in [(3, "a", True), (2.0, "a", True), (2, "b", True), (2, "a", 1)]:
        assert not is_direct(cache, x, n, name, flag=flag)
        close(function(x, n, name, flag=flag), np.asarray(x) * (n if name == "a" else -n) + 1)
    assert not is_direct(cache, x, 2, "a", flag=False) and not is_direct(cache, x, 2, "a", other=True)
    assert not is_direct(cache, x, 2, "a") and not is_direct(cache, x, 2)


def test_floats_are_arguments(module: Any, rng: np.random.Generator) -> None:
    function = cf.fuse(lambda x, a, b: x * a - b)
    x = array(rng, 3, 8)
    cache = learn(function, x, 0.5, 1.0)
    for a, b in [(2.0, 3.0), (-0.0, 1.5)]:
        assert is_direct(cache, x, a, b)
        close(function(x, a, b), np.asarray(x, np.float64) * a - b)
    assert not is_direct(cache, x, 2, 3.0) and not is_direct(cache, x, np.float64(2), 3.0)


def test_integers_that_change_are_arguments(module: Any, rng: np.random.Generator) -> None:
    function = cf.fuse(lambda x, n, t: x * t + n)
    x = array(rng, 3, 8)
    for t in range(3):
        function(x, 4, t)
    cache = learn(function, x, 4, 5)
    for t in (7, -1, 10**6):
        assert is_direct(cache, x, 4, t)
        close(function(x, 4, t), np.asarray(x, np.float64) * t + 4)
    branching = cf.fuse(lambda x, k: x * (1 / k if k > 1 else k))
    cache = learn(branching, x, 2.0)
    assert is_direct(cache, x, 3.5) and not is_direct(cache, x, 0.5) and not is_direct(cache, x, -1.0)
    close(branching(x, 0.5), np.asarray(x, np.float64) * 0.5)
    cache = learn(function, x, 4, 5)
    assert not is_direct(cache, x, 5, 3) and not is_direct(cache, x, 4, True) and not is_direct(cache, x, 4, 3.0)


def test_an_array_given_twice_makes_another_plan(module: Any, rng: np.random.Generator) -> None:
    function = cf.fuse(lambda x, y: x * 2 - y)
    x, y = array(rng, 3, 8), array(rng, 3, 8)
    cache = learn(function, x, y)
    assert is_direct(cache, y, x) and not is_direct(cache, x, x)
    close(function(x, x), np.asarray(x))


def test_settings_are_compared(module: Any, rng: np.random.Generator) -> None:
    function = cf.fuse(lambda x, w: x @ w.T)
    x, w = array(rng, 4, 16), array(rng, 8, 16)
    cache = learn(function, x, w)
    with cf.precision("high"):
        assert not is_direct(cache, x, w)
        learn(function, x, w)
        assert is_direct(cache, x, w)
    assert is_direct(cache, x, w)


def test_variables_around_are_compared(module: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    function = cf.fuse(lambda x: x + OFFSET)
    x = array(rng, 3, 8)
    cache = learn(function, x)
    assert is_direct(cache, x)
    monkeypatch.setattr(sys.modules[__name__], "OFFSET", 4.0)
    assert not is_direct(cache, x)
    close(function(x), np.asarray(x) + 4.0)


def test_numbers_and_arrays_around_are_read(
    module: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, weight, axis = sys.modules[__name__], array(rng, 3, 8), 0

    def reading(x: Any, k: float) -> Any:
        return (x * k + weight * OFFSET - FACTOR).sum(axis=axis)

    function, x = cf.fuse(reading), array(rng, 3, 8)

    def assign(offset: Any, factor: Any) -> None:
        monkeypatch.setattr(this, "OFFSET", offset)
        monkeypatch.setattr(this, "FACTOR", factor)

    def expected(k: float) -> Any:
        return (np.asarray(x, np.float64) * k + np.asarray(weight, np.float64) * OFFSET - FACTOR).sum(axis=axis)

    for offset, factor in ((0.5, 1), (0.25, 2), (0.125, 3)):
        assign(offset, factor)
        function(x, 2.0)
    cache = learn(function, x, 2.0)
    for offset, factor in ((0.75, 7), (-2.0, 10**6), (1e-3, 0)):
        assign(offset, factor)
        assert is_direct(cache, x, 3.0) and not is_direct(cache, weight, 3.0)
        close(function(x, 3.0), expected(3.0))
    weight = array(rng, 3, 8)
    assert is_direct(cache, x, 3.0)
    close(function(x, 3.0), expected(3.0))
    for change in (lambda: assign(2, 0), lambda: assign(0.5, 1.0), lambda: assign(0.5, True)):
        change()
        assert not is_direct(cache, x, 3.0)
        close(function(x, 3.0), expected(3.0))
    assign(0.5, 3)
    assert is_direct(cache, x, 3.0)
    axis = 1
    assert not is_direct(cache, x, 3.0)
    close(function(x, 3.0), expected(3.0))


def test_defaults_may_be_replaced(module: Any, rng: np.random.Generator) -> None:
    def plain(x: Any, scale: float = 2.0, shift: Any = None) -> Any:
        return x * scale + (0 if shift is None else shift)

    function = cf.fuse(plain)
    x = array(rng, 3, 8)
    cache = learn(function, x)
    assert is_direct(cache, x) and not is_direct(cache, x, 2.0)
    plain.__defaults__ = (3.0, None)
    assert not is_direct(cache, x)
    close(function(x), np.asarray(x) * 3)
    plain.__defaults__ = (3.0, [1.0])
    with contextlib.suppress(Exception):
        learn(function, x)
    assert not is_direct(cache, x), "a list may change"


def test_public_functions_are_direct(module: Any, rng: np.random.Generator) -> None:
    x, other = array(rng, 5, 24), array(rng, 5, 24)
    cache = learn(cf.softmax, x, axis=1)
    close(cache.direct((other,), {"axis": 1}), softmax(other))
    close(cf.softmax(other, axis=1), softmax(other))
    close(cf.softmax(other, axis=0), softmax(np.asarray(other).T).T)
    target = HOST.xp.empty((5, 24), F32)
    assert cf.softmax(other, axis=1, out=target) is target
    close(target, softmax(other))


@pytest.mark.parametrize("given", [{"axis": 1}, {"axis": 1, "b": "array"}])
def test_functions_that_convert_are_direct_where_they_need_not(
    module: Any, rng: np.random.Generator, given: dict[str, Any]
) -> None:
    x, other, factors = array(rng, 5, 24), array(rng, 5, 24), array(rng, 24)
    factors[...] = abs(factors)
    given = {name: factors if value == "array" else value for name, value in given.items()}
    cache = learn(cf.logsumexp, x, **given)
    want = np.log((np.exp(np.asarray(other, np.float64)) * np.asarray(given.get("b", 1.0))).sum(axis=1))
    close(cache.direct((other,), given), want)
    whole = HOST.array(np.arange(24).reshape(2, 12))
    close(cf.logsumexp(whole, axis=1), np.log(np.exp(np.arange(24.0).reshape(2, 12)).sum(axis=1)))


def test_bound_functions_are_direct(module: Any, rng: np.random.Generator) -> None:
    function = cf.fuse(lambda x, w, n, b: cf.softmax(x @ w.T * n + b, axis=1))
    x, w, b = array(rng, 5, 16), array(rng, 24, 16), array(rng, 24)
    bound = function.bind(w=w, n=3, b=b)
    cache = learn(bound, x)
    other = array(rng, 5, 16)
    want = softmax(np.asarray(other, np.float64) @ np.asarray(w, np.float64).T * 3 + np.asarray(b))
    close(cache.direct((other,), {}), want)
    w[...] = array(rng, 24, 16)
    bound.refresh()
    close(bound(other), softmax(np.asarray(other, np.float64) @ np.asarray(w, np.float64).T * 3 + np.asarray(b)))
    assert not is_direct(cache, b) and not is_direct(cache, x, x)


@pytest.mark.parametrize("case", ["list", "two results", "bound list", "changed argument", "dict"])
def test_other_calls_are_left_to_python(module: Any, rng: np.random.Generator, case: str) -> None:
    x, y = array(rng, 3, 8), array(rng, 3, 8)

    def change(x: Any) -> Any:
        x += 1
        return x * 2

    function, args = {
        "list": (cf.fuse(lambda xs: xs[0] + xs[1]), ([x, y],)),
        "two results": (cf.fuse(lambda x: (x + 1, x * 2)), (x,)),
        "bound list": (cf.fuse(lambda x, w: x + w[0]).bind(w=[y]), (x,)),
        "changed argument": (cf.fuse(change), (x,)),
        "dict": (cf.fuse(lambda d: d["x"] + d["y"]), ({"x": x, "y": y},)),
    }[case]
    for _ in range(CALLS):
        function(*args)
    assert cache_of(function).direct is None


def test_calls_of_forgotten_plans_are_forgotten(module: Any, rng: np.random.Generator) -> None:
    function = cf.fuse(lambda x: x + 1)
    arrays = [array(rng, n, 8) for n in range(1, 8)]
    for x in arrays:
        learn(function, x)
    cache = cache_of(function)
    assert [is_direct(cache, x) for x in arrays] == [False] * 3 + [True] * 4
    for x in arrays:
        close(function(x), np.asarray(x) + 1)


def test_another_thread_may_replace_defaults(
    module: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between Python's recognition of a call and its description for C."""

    def plain(x: Any, scale: float = 2.0) -> Any:
        return x * scale

    def add(self: DirectCalls, *arguments: Any) -> None:
        plain.__defaults__ = (3.0,)
        original(self, *arguments)

    original = DirectCalls.add
    monkeypatch.setattr(DirectCalls, "add", add)
    function, x = cf.fuse(plain), array(rng, 3, 8)
    while plain.__defaults__ == (2.0,):
        function(x)
    for _ in range(12):
        close(function(x), np.asarray(x) * 3)


def test_threads_add_calls_while_others_are_forgotten(module: Any, rng: np.random.Generator) -> None:
    function, x = cf.fuse(lambda x: x + 1), array(rng, 3, 8)
    cache = learn(function, x)
    calls, (runnable,) = cache._calls, cache._runnables
    names = function.names, {}, {}
    thread = threading.Thread(target=calls.add, args=(runnable, (), {"x": x}, function.parameters, names))

    class Interrupted(list[Any]):
        def __contains__(self, item: Any) -> bool:
            if not thread.ident:
                thread.start()
                thread.join(0.1)
            return False

    calls.keep(Interrupted())
    thread.join()
    assert calls.recognize((x,), {}) is None and calls.recognize((), {"x": x}) is not None


def test_without_the_launcher_nothing_is_direct(
    module: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "find", lambda: launcher.Found(None, ""))
    function = cf.fuse(lambda x: x + 1)
    for _ in range(CALLS):
        function(array(rng, 3, 8))
    assert cache_of(function).direct is None and not cache_of(function).takes_notes


def test_a_plan_that_fails_raises(module: Any, rng: np.random.Generator) -> None:
    function = cf.fuse(lambda x: x + 1)
    x = array(rng, 3, 8)
    cache = learn(function, x)
    (call,) = cache._calls._calls.values()

    def fail(*_: Any) -> None:
        raise ValueError("no luck")

    recognize = module.recognizer(function.settings_of_call, ((*call[:-1], fail),))
    with pytest.raises(ValueError, match="no luck"):
        recognize((x,), {})


# Safety --------------------------------------------------------------------------------------------------------------

VALUE = (0, 0, None, None)
CALL = (1, (), "settings", None, None, None, None, (VALUE,), (), None, lambda arrays, numbers: [arrays, numbers])


def settings() -> str:
    return "settings"


def test_wrong_arguments_raise(module: Any) -> None:
    recognize = module.recognizer(settings, (CALL,))
    assert recognize((None,), {}) == []
    for arguments in [(), ((),), ([], {}), ((), []), ((), {}, 1)]:
        with pytest.raises(TypeError):
            recognize(*arguments)


def broken_calls() -> list[Any]:
    def with_value(*value: Any) -> Any:
        return (*CALL[:7], (value,), *CALL[8:])

    parts = [
        CALL[:k] + (wrong,) + CALL[k + 1 :]
        for k, wrong in [(0, "1"), (0, -1), (1, []), (7, []), (8, []), (9, 1), (10, 1)]
    ]
    values = [with_value(), with_value(*VALUE[:3]), with_value(0, 1, None, None), with_value("0", 0, None, None)]
    values += [with_value(4, 0, None, None), with_value(0, "0", None, None), with_value(0, 0, None, None, 1)]
    values += [with_value(1 << 70, 0, None, None), with_value(0, 1 << 70, None, None), (*CALL[:7], (1,), *CALL[8:])]
    return [None, (), CALL[:10], *parts, *values]


@pytest.mark.parametrize("call", [pytest.param(call, id=str(k)) for k, call in enumerate(broken_calls())])
def test_calls_are_checked(module: Any, call: Any) -> None:
    with pytest.raises(ValueError, match="not valid"):
        module.recognizer(settings, (call,))


def test_what_fails_while_it_is_compared_is_not_recognised(module: Any) -> None:
    class Odd:
        @property
        def shape(self) -> Any:
            raise ZeroDivisionError

    class Interrupted(Odd):
        @property
        def shape(self) -> Any:
            raise KeyboardInterrupt

    def recognizer(cls: type) -> Callable[..., Any]:
        value = (4, 0, None, cls, (1,), (4,), "f", 0)
        found: Callable[..., Any] = module.recognizer(settings, ((*CALL[:7], (value,), *CALL[8:]),))
        return found

    assert recognizer(Odd)((Odd(),), {}) is None
    with pytest.raises(KeyboardInterrupt):
        recognizer(Interrupted)((Interrupted(),), {})
    for surroundings in [(1, None), (lambda: None, None, print, 1)]:  # no function, no snapshot
        call = (1, (), "settings", *(None, None), *(None, None), (VALUE,), (), *CALL[9:])
        call = (*call[:3], *surroundings, *call[3 + len(surroundings) :])
        assert module.recognizer(settings, (call,))((None,), {}) is None
    for given in (None, {}, {"given": ()}, {"given": [None]}):  # of too little around the function
        found = None if given is None else SimpleNamespace(key=1, **given)
        call = (0, (), "settings", *(None, None), lambda found=found: found, 1, ((0, 0, None, None),), (), *CALL[9:])
        assert module.recognizer(settings, (call,))((), {}) is None
    call = (0, (), "settings", *(None, None), lambda: SimpleNamespace(key=1, given=(None,)), 1, *call[7:])
    assert module.recognizer(settings, (call,))((), {}) == []


def test_nothing_is_leaked(module: Any, rng: np.random.Generator) -> None:
    array_of = SimpleNamespace
    x, names, kept = array_of(shape=(300,), strides=(400,), dtype="f", data=array_of(device_id=500)), ("n",), object()
    y = array_of(shape=(300,), strides=(401,), dtype="f", data=array_of(device_id=500))
    values = (
        (4, 0, None, SimpleNamespace, (300,), (400,), "f", 500),
        *((1, 1, None, 70000), (2, 2, None, float), (3, -1, kept, None), (2, 4, None, float)),
    )
    result, run_with = object(), []

    def run(arrays: Any, numbers: Any) -> Any:
        run_with[:] = [arrays, numbers]
        return [result]

    def plain(n: int = 1) -> None: ...

    around = SimpleNamespace(key="key", given=(None, 4.5))

    def covers(numbers: Any) -> bool:
        return numbers[1] != 3.5

    call = (2, names, "settings", plain, plain.__defaults__, lambda: around, "key", values, (kept,), covers, run)
    recognize = module.recognizer(settings, (call,))
    number, integer, other = 2.5, 70000, 3.5
    counted = [
        x,
        x.shape,
        x.strides,
        x.data,
        y,
        kept,
        result,
        number,
        integer,
        call,
        plain.__defaults__,
        around,
        around.given,
        around.given[1],
        None,
        *values,
        run,
    ]

    def rounds(count: int) -> None:
        for _ in range(count):
            assert recognize((x, integer), {"n": number}) is result
            assert recognize((y, integer), {"n": number}) is None
            assert recognize((x, integer), {"m": number}) is None
            assert recognize((kept, integer), {"n": number}) is None
            assert recognize((x, 1), {"n": number}) is None
            assert recognize((x, integer), {"n": other}) is None

    rounds(100)
    assert run_with == [[x, kept, kept], [integer, number, around.given[1]]]
    before = [sys.getrefcount(value) for value in counted]
    rounds(20_000)
    after = [sys.getrefcount(value) for value in counted]
    assert all(abs(a - b) < 10 for a, b in zip(after, before, strict=True)), (before, after)


def test_recognizers_are_freed(module: Any) -> None:
    class Run:
        def __call__(self, arrays: Any, numbers: Any) -> Any: ...

    run: Any = Run()
    run.recognize = module.recognizer(settings, ((*CALL[:10], run),))  # a cycle
    reference = weakref.ref(run)
    del run
    gc.collect()
    assert reference() is None
