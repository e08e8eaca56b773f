"""Calls that are recognised without a walk through their arguments: exactly those whose keys are equal."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import assert_equal

import cupyfuse as cf
from cupyfuse.api.parameters import Parameters
from cupyfuse.settings import force_plans

ENOUGH = 10  # calls, after which one more is recognised


class Text(str):
    """A string that functions can tell from others."""


class Kind(enum.Enum):
    FIRST = 1


class Pair(NamedTuple):
    a: Any
    b: Any


class Twin(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass
class Layer:
    a: Any
    b: Any = 2.0


@dataclasses.dataclass
class Other:
    a: Any
    b: Any = 2.0


@dataclasses.dataclass(slots=True)
class Slotted:
    a: Any
    b: Any = 2.0


class Half(Layer):
    __slots__ = ("c",)


def half(*, with_slot: bool) -> Half:
    made = Half(array(2))
    if with_slot:
        made.c = array(2)
    return made


def array(*shape: int, dtype: Any = np.float64, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(1, 9, shape or (2,)).astype(dtype)


SHARED = array(2)
VALUES: dict[str, Callable[[], Any]] = {
    "array": array,
    "longer": lambda: array(3),
    "matrix": lambda: array(2, 1),
    "float32": lambda: array(2, dtype=np.float32),
    "integers": lambda: array(2, dtype=np.int64),
    "strided": lambda: array(4)[::2],
    "reversed": lambda: array(2)[::-1],
    "the same array": lambda: SHARED,
    "one": lambda: 1,
    "true": lambda: True,
    "float": lambda: 1.0,
    "another float": lambda: -0.0,
    "nan": lambda: float("nan"),
    "numpy float": lambda: np.float64(1.0),
    "narrow numpy float": lambda: np.float32(1.0),
    "another narrow numpy float": lambda: np.float32(-0.0),
    "numpy integer": lambda: np.int64(1),
    "numpy bool": lambda: np.bool_(True),
    "none": lambda: None,
    "text": lambda: "a",
    "another text": lambda: "b",
    "its own text": lambda: Text("a"),
    "member": lambda: Kind.FIRST,
    "type": lambda: np.dtype("f4"),
    "list": lambda: [array(), 1],
    "tuple": lambda: (array(), 1),
    "shorter tuple": lambda: (array(),),
    "list of two": lambda: [array(), array(seed=1)],
    "list of one twice": lambda: [SHARED, SHARED],
    "pair": lambda: Pair(array(), 1),
    "twin": lambda: Twin(array(), 1),
    "dict": lambda: {"a": array(), "b": 1},
    "dict of keys made anew": lambda: {"".join(["", "a"]): array(), chr(98): 1},
    "dict in another order": lambda: {"b": 1, "a": array()},
    "dict of fewer": lambda: {"a": array()},
    "dict of other keys": lambda: {"a": array(), "c": 1},
    "dict of its own text": lambda: {Text("a"): array(), "b": 1},
    "dict of numbers": lambda: {0: array(), 1: 1},
    "dict of truths": lambda: {False: array(), True: 1},
    "ordered dict": lambda: collections.OrderedDict(a=array(), b=1),
    "empty dict": dict,
    "empty list": list,
    "empty tuple": tuple,
    "nested": lambda: {"a": [Layer(array(), (1.5, None)), {"b": array(seed=1)}], "b": Pair(1, 2)},
    "nested otherwise": lambda: {"a": [Layer(array(), (1.5, None)), {"c": array(seed=1)}], "b": Pair(1, 2)},
    "layer": lambda: Layer(array()),
    "layer without a float": lambda: Layer(array(), 2),
    "other": lambda: Other(array()),
    "slotted": lambda: Slotted(array()),
    "slotted with a number": lambda: Slotted(array(), 2),
    "half without its slot": lambda: half(with_slot=False),
    "half with its slot": lambda: half(with_slot=True),
    "function": lambda: len,
}


def first(x: Any, value: Any) -> Any:
    return x + 1


def key_of(fused: Any, *values: Any) -> Any:
    return fused.signature_of(values).cache_key(*fused.product_settings)


def recognised(fused: Any, *values: Any) -> bool:
    """Whether a call is recognised."""
    settings = (*fused.product_settings, True)  # tests force plans
    return fused.inline_cache.find(values, frozenset(), settings) is not None


REFUSED = {"its own text", "dict of its own text"}
WALKED = {"member", "type", "ordered dict", "function", "half without its slot", "list of one twice"} | {
    "numpy bool",
    "dict of numbers",
    "dict of truths",
}


@pytest.mark.parametrize("name", sorted(VALUES.keys() - REFUSED))
def test_calls_are_recognised_if_their_keys_are_equal(name: str) -> None:
    x = array(2, seed=5)
    fused = cf.fuse(first)
    for _ in range(ENOUGH):
        fused(x, VALUES[name]())
    key = key_of(fused, x, VALUES[name]())
    assert recognised(fused, x, VALUES[name]()) == (name not in WALKED)
    for other, make in VALUES.items():
        value = make()
        if recognised(fused, x, value):
            assert key_of(fused, x, value) == key, other
        # An array given twice has another key.
        assert not recognised(fused, SHARED, value) or key_of(fused, SHARED, value) == key, other


@pytest.mark.parametrize("order", list(itertools.permutations(("dict", "nested", "layer", "slotted", "pair")))[::17])
def test_the_last_calls_are_recognised(order: tuple[str, ...]) -> None:
    fused = cf.fuse(first)
    for name in order:
        for _ in range(ENOUGH):
            fused(array(), VALUES[name]())
    assert [recognised(fused, array(), VALUES[name]()) for name in order] == [False, True, True, True, True]
    fused(array(), VALUES[order[0]]())
    assert [recognised(fused, array(), VALUES[name]()) for name in order] == [True, False, True, True, True]


def test_values_that_differ_give_their_own_results() -> None:
    """Floats are arguments of one plan, unless the function reads them."""

    @cf.fuse
    def scaled(x: Any, options: dict[str, Any], shift: float = 1.0) -> Any:
        return x * options["scale"] + (shift if options["scale"] > 0 else 0.0)

    unread = cf.fuse(lambda x, options: x * options["scale"] + options["shift"])
    x = array()
    for scale in np.linspace(-2.0, 2.0, 2 * ENOUGH).tolist():
        np.testing.assert_array_equal(unread(x, {"scale": scale, "shift": 1}), x * scale + 1, strict=True)
    assert recognised(unread, x, {"scale": 7.0, "shift": 1})
    assert not recognised(unread, x, {"scale": 7, "shift": 1})
    for scale in (2.0, 3.0, -1.0, 2.0, -2.0, 3.0) * ENOUGH:
        for shift in (0.5, 1.0):
            np.testing.assert_array_equal(
                scaled(x, {"scale": scale}, shift), x * scale + (shift if scale > 0 else 0.0), strict=True
            )
        np.testing.assert_array_equal(scaled(x, {"scale": scale}), x * scale + (scale > 0), strict=True)


FACTOR = 2.0
ROW = array(seed=3)


def scaled_by_variables(x: Any, layer: Layer) -> Any:
    return x * FACTOR + ROW * layer.a


def test_variables_around_a_function_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    fused, x, layer = cf.fuse(scaled_by_variables), array(), Layer(array(seed=2))

    def check() -> None:
        for _ in range(ENOUGH):
            np.testing.assert_array_equal(fused(x, layer), scaled_by_variables(x, layer), strict=True)

    check()
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    check()
    monkeypatch.setitem(globals(), "ROW", array(seed=4))
    assert recognised(fused, x, layer)  # an array of the same shape has the same plan
    check()
    ROW[:] = 7
    check()
    monkeypatch.setitem(globals(), "ROW", array(1))
    check()
    monkeypatch.setitem(globals(), "ROW", x)
    check()


def test_members_of_classes_are_read_anew() -> None:
    class Scaled:
        factor = 2.0

    @dataclasses.dataclass
    class Weighted(Scaled):
        w: Any

        def __call__(self, x: Any) -> Any:
            return x * self.w * self.factor

    @cf.fuse
    def call(x: Any, layer: Any) -> Any:
        return layer(x)

    x, layer = array(), Weighted(array(seed=1))

    def check() -> None:
        for _ in range(ENOUGH):
            np.testing.assert_array_equal(call(x, layer), layer(x), strict=True)

    check()
    assert recognised(call, x, layer)
    Scaled.factor = 5.0
    check()
    Weighted.__call__ = lambda self, x: x - self.w  # type: ignore[method-assign]
    check()
    layer.factor = 7.0  # type: ignore[misc]
    check()


def test_default_values_are_read_anew() -> None:
    def plain(x: Any, w: Any = SHARED, scale: float = 2.0, name: str = "a") -> Any:
        return x * w * scale

    fused, x = cf.fuse(plain), array(seed=8)

    def check(*args: Any) -> None:
        for _ in range(ENOUGH):
            np.testing.assert_array_equal(fused(x, *args), plain(x, *args), strict=True)

    check()
    check(x)
    check(x, 3.0)
    plain.__defaults__ = (array(seed=9), -3.0, "a")
    check()
    plain.__defaults__ = (array(2, 1), 4, "a")
    check()
    check(x)


def test_arrays_reshaped_in_place_are_seen() -> None:
    fused = cf.fuse(lambda p: p["x"] @ p["x"])
    p = {"x": array(4)}
    for _ in range(ENOUGH):
        assert fused(p) == p["x"] @ p["x"]
    p["x"].shape = (2, 2)
    np.testing.assert_array_equal(fused(p), p["x"] @ p["x"], strict=True)


def test_bound_functions_recognise_the_rest() -> None:
    def plain(x: Any, a: Any, options: dict[str, Any], scale: float) -> Any:
        return (x @ a[0] + a[1]) * scale if options["add"] else x @ a[0] * scale

    head, a = cf.fuse(plain), (array(2, 3), array(3, seed=1))
    bound = head.bind(a=a)
    for x in (array(4, 2), array(5, 2), array(4, 2, dtype=np.float32)):
        for add in (True, False):
            for scale in (2.0, 3.0):
                for _ in range(ENOUGH):
                    expected = plain(x, a, {"add": add}, scale)
                    np.testing.assert_array_equal(bound(x, {"add": add}, scale), expected, strict=True)
    settings = (*head.product_settings, True)
    assert bound._inline_cache.find((x, {"add": False}, 5.0), frozenset(), settings) is not None


def test_what_bound_objects_hold_is_compared() -> None:
    """Their arrays, numbers and keys may be replaced, changed in place with `refresh`, and put back."""

    def plain(x: Any, layer: Layer, others: dict[str, Any]) -> Any:
        return x @ layer.a * layer.b + others["row"] * others["scale"]

    layer, others = Layer(array(2, 3), 2.0), {"row": array(3, seed=1), "scale": 3}
    bound = cf.fuse(plain).bind(layer=layer, others=others)
    settings = (*cf.fuse(plain).product_settings, True)

    def check(is_recognised: bool = True) -> None:
        for x in [array(4, 2), *(array(5, 2, seed=k) for k in range(ENOUGH))]:
            np.testing.assert_array_equal(bound(x), plain(x, layer, others), strict=True)
        assert (bound._inline_cache.find((x,), frozenset(), settings) is not None) == is_recognised

    check()
    before = layer.a
    layer.a = array(2, 3, seed=9)
    check()
    layer.a[:] = 5
    bound.refresh()
    check()
    layer.a = before
    check()
    layer.b = 3.0
    check()
    layer.b = -0.0
    check()
    others["scale"] = True
    check()
    others["more"] = 1
    check()
    others["row"] = others["row"][::-1]
    check()
    others["row"] = np.float64(2.0)
    check()
    others["row"] = np.float32(2.0)
    check()
    others["row"] = np.complex64(2.0)
    check(is_recognised=False)


def test_settings_belong_to_a_call() -> None:
    fused = cf.fuse(lambda x, w: x @ w)
    x = array(2, 2, dtype=np.float32)
    for _ in range(ENOUGH):
        fused(x, x + 1)
    with cf.precision("ieee"):
        fused(x, x + 1)
    assert [plan.settings.precision for plan in fused.plans] == ["highest", "ieee"]


def test_nothing_keeps_arrays_alive() -> None:
    """Neither arguments and variables, nor bound arrays once the bound function is gone."""

    def make() -> tuple[Any, list[Any]]:
        row, w = array(), array(2, 2)

        def plain(x: Any, w: Any) -> Any:
            return x @ w + row

        fused = cf.fuse(plain)
        bound = fused.bind(w=w)
        for _ in range(ENOUGH):
            bound(array())
            fused(array(), w)
        assert recognised(fused, array(), w)
        arrays = [weakref.ref(row)]
        row = array(seed=1)
        fused(array(), w)
        bound(array())
        return fused, [*arrays, weakref.ref(w)]

    gc.collect()
    gc.disable()
    try:
        fused, references = make()
        assert [r() is None for r in references] == [True, True], fused
    finally:
        gc.enable()


def test_arguments_come_in_any_form() -> None:
    """By position and by name, in any order, again and again; what does not fit is refused each time."""

    def function(a: int, b: int, /, c: int, d: int = 4) -> None: ...

    parameters = Parameters(function)
    for _ in range(3):
        for args, kwargs in [((1, 2, 3, 5), {}), ((1, 2, 3), {"d": 5}), ((1, 2), {"d": 5, "c": 3})]:
            assert parameters.find(args, kwargs) == ((1, 2, 3, 5), frozenset())
        assert parameters.find((1, 2), {"c": 7, "d": 8}) == ((1, 2, 7, 8), frozenset())
        assert parameters.find((1, 2), {"c": 3}) == ([1, 2, 3, 4], {"d"})
        for args, kwargs in [((1,), {"b": 2, "c": 3, "d": 4}), ((1, 2, 3), {"e": 4}), ((1, 2, 3, 4), {"d": 4})]:
            assert parameters.find(args, kwargs) is None


class Model:
    def __init__(self) -> None:
        self.w, self.k, self.steps, self.parts = np.ones(3), 2.0, 0, [np.ones(3), 1.0]

    def apply(self, x: Any) -> Any:
        return x * self.w * self.k + self.parts[0] * self.parts[1]


def test_calls_are_recognised_whatever_variables_hold_and_changes_seen() -> None:
    model, params, values = Model(), {"w": np.ones(3), "b": 2.0}, [1.0, np.ones(3)]
    options = types.SimpleNamespace(scale=1.0, w=np.ones(3), steps=[0.0])

    def inner(x: Any, held: Any = values) -> Any:
        return x + held[1] * params["b"]

    functions: list[Any] = [
        model.apply,
        lambda x: model.apply(x) + params["w"],
        lambda x: inner(x) - values[0],
        lambda x: cf.fuse(inner)(x) * params["b"] if params else x,
        lambda x: (lambda o: x * o.w + o.steps[0])(options) * options.scale,
        functools.partial(lambda a, x: x * a[1] + a[0], values),
    ]
    x = np.arange(3.0)
    changes: list[Callable[[], Any]] = [
        lambda: model.w.__setitem__(0, 5),
        lambda: setattr(model, "w", np.full(3, 2.0)),
        lambda: setattr(model, "k", 3.0),
        lambda: setattr(model, "steps", 1),
        lambda: model.parts.__setitem__(1, 4.0),
        lambda: params.update(b=5.0, w=np.full(3, 7.0)),
        lambda: values.__setitem__(0, 8.0),
        lambda: values.append(1.0),
        lambda: params.update(new=1),
        lambda: vars(options).update(scale=2.0, w=np.full(3, 3.0)),
        lambda: options.steps.__setitem__(0, 4.0),
        lambda: setattr(options, "new", None),
        lambda: setattr(inner, "__defaults__", ([0.0, np.full(3, 9.0)],)),
        lambda: setattr(Model, "apply", lambda self, x: x - self.k),
    ]
    with force_plans():
        fused = [cf.fuse(f) for f in functions]
        for change in (lambda: None, *changes):
            change()
            for function, f in zip(functions, fused, strict=True):
                for _ in range(12):
                    assert_equal(f(x), function(x))
        for f in fused:
            for _ in range(100):
                f(x)
        found = [f.inline_cache.find(*f.parameters.bind((x,), {}), f.call_settings) is not None for f in fused]
        assert all(found)


def test_what_generated_code_cannot_compare_is_walked() -> None:
    settings = [1.0]

    class Holder:
        kept = settings

    def of_class(x: Any) -> Any:
        return x * Holder.kept[0] + params["b"]

    def keywords(x: Any, *, k: Any = settings) -> Any:
        return x * k[0] + params["b"]

    def calls(x: Any) -> Any:
        return keywords(x)

    def called(x: Any) -> Any:
        return x * called.rates[0] + params["b"]  # type: ignore[attr-defined]

    called.rates = settings  # type: ignore[attr-defined]
    params = {"b": 1.0}
    x = np.arange(3.0)
    with force_plans():
        fused = [cf.fuse(f) for f in (of_class, keywords, calls, called)]
        for k in range(3):
            settings[0] = float(k)
            for f in fused:
                for _ in range(12):
                    assert_equal(f(x), x * k + 1)
