"""Attributes that code reads by name, of classes, enums, modules and functions, are read in each call."""

from __future__ import annotations

import abc
import dataclasses
import enum
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from support import assert_equal

import cupyfuse as cf

ONES = np.ones(3)
K = 2.0
SETTINGS = types.ModuleType("settings_of_the_user")
SETTINGS.__file__ = __file__
SETTINGS.scale = 2.0  # type: ignore[attr-defined]
SETTINGS.times = lambda x: x * K  # type: ignore[attr-defined]


def check(fused: Callable[..., Any], arguments: tuple[Any, ...], change: Callable[[float], object]) -> None:
    """Compare with the plain function after each of several changes."""
    for value in (3.0, 5.0, 3.0, 7.0):
        change(value)
        expected = fused.__wrapped__(*arguments)  # type: ignore[attr-defined]
        assert value in (expected[0], expected[0] - 1), "the function reads what was changed"
        for _ in range(2):
            assert_equal(fused(*arguments), expected)


@pytest.fixture
def set_global(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    return lambda value: monkeypatch.setitem(globals(), "K", value)


# Enums --------------------------------------------------------------------------------------------------------------


class Mode(enum.Enum):
    FAST = 1
    SLOW = 2

    @property
    def factor(self) -> float:
        return K

    def times(self, x: Any) -> Any:
        return x * K

    def __call__(self, x: Any) -> Any:
        return x * K


@pytest.mark.parametrize(
    "function",
    [
        lambda x, e: x * e.factor,
        lambda x, e: e.times(x),
        lambda x, e: e(x),
        lambda x, e: x * Mode.SLOW.factor,
        lambda x, e: x * Mode["SLOW"].factor,
        lambda x, e: sum(x * k.factor for k in {e: 1}),
    ],
)
def test_methods_of_enums_read_in_each_call(function: Any, set_global: Callable[[float], None]) -> None:
    check(cf.fuse(function), (ONES, Mode.FAST), set_global)
    check(cf.fuse(lambda x, held: sum(x * e.factor for e in held)), (ONES, {Mode.FAST: 1}), set_global)
    check(cf.fuse(lambda x, held: sum(x * e.factor for e in held)), (ONES, frozenset({Mode.FAST})), set_global)


def test_attributes_of_members_of_enums_are_read_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kind(enum.Enum):
        A = [1.0]  # noqa: RUF012
        B = [2.0]  # noqa: RUF012

        def times(self, x: Any) -> Any:
            return x

    def set_scale(value: float) -> None:
        Kind.A.scale = value  # type: ignore[attr-defined]

    set_scale(1.0)
    check(cf.fuse(lambda x, e: x * e.scale), (ONES, Kind.A), set_scale)
    check(cf.fuse(lambda x: x * Kind.A.scale), (ONES,), set_scale)  # type: ignore[attr-defined]
    check(cf.fuse(lambda x, e: x * e.value[0]), (ONES, Kind.B), lambda k: Kind.B.value.__setitem__(0, k))
    check(cf.fuse(lambda x, e: e.times(x)), (ONES, Kind.B), lambda k: setattr(Kind, "times", lambda self, x: x * k))
    Kind.A.scale = ONES  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"array e\.scale, which the Enum.* holds.*make it an argument"):
        cf.fuse(lambda x, e: x * e.scale)(ONES, Kind.A)


# Classes ------------------------------------------------------------------------------------------------------------


class Meta(type):
    scale = 2.0

    @property
    def factor(cls) -> float:
        return K

    def __getitem__(cls, index: int) -> float:
        return K


class WithMeta(metaclass=Meta):
    pass


def test_attributes_of_metaclasses_are_read_in_each_call(
    monkeypatch: pytest.MonkeyPatch, set_global: Callable[[float], None]
) -> None:
    change = lambda value: monkeypatch.setattr(Meta, "scale", value)  # noqa: E731
    check(cf.fuse(lambda x: x * WithMeta.scale), (ONES,), change)
    check(cf.fuse(lambda x, c: x * c.scale), (ONES, WithMeta), change)
    check(cf.fuse(lambda x: x * WithMeta.factor), (ONES,), set_global)
    check(cf.fuse(lambda x, c: x * c[0]), (ONES, WithMeta), set_global)


def test_subclasses_that_are_registered_later_are_noticed() -> None:
    class Scaling(metaclass=abc.ABCMeta):  # noqa: B024
        scale = 2.0

    @dataclass
    class Layer:
        k: float

    around = cf.fuse(lambda x, p: x * 2 if isinstance(p, Scaling) else x)
    given = cf.fuse(lambda x, p, c: x * 2 if isinstance(p, c) else x)
    assert around(ONES, Layer(1.0))[0] == given(ONES, Layer(1.0), Scaling)[0] == 1
    Scaling.register(Layer)
    assert around(ONES, Layer(1.0))[0] == given(ONES, Layer(1.0), Scaling)[0] == 2


def test_class_patterns_read_in_each_call(monkeypatch: pytest.MonkeyPatch, set_global: Callable[[float], None]) -> None:
    @dataclass
    class Layer:
        bias: Any
        scale: ClassVar[float] = 2.0
        __match_args__ = ("scale", "factor")

        @property
        def factor(self) -> float:
            return K

    def by_name(x: Any, p: Any) -> Any:
        match p:
            case Layer(scale=k):
                return x * k

    def by_position(x: Any, p: Any) -> Any:
        match p:
            case Layer(k):
                return x * k

    def of_property(x: Any, p: Any) -> Any:
        match p:
            case Layer(_, k):
                return x * k

    change = lambda value: monkeypatch.setattr(Layer, "scale", value)  # noqa: E731
    check(cf.fuse(by_name), (ONES, Layer(1.0)), change)
    check(cf.fuse(by_position), (ONES, Layer(1.0)), change)
    check(cf.fuse(of_property), (ONES, Layer(1.0)), set_global)
    monkeypatch.setattr(Layer, "scale", 3.0)
    fused = cf.fuse(by_position)
    assert fused(ONES, Layer(1.0))[0] == 3
    monkeypatch.setattr(Layer, "__match_args__", ("bias",))
    assert fused(ONES, Layer(1.0))[0] == 1


@pytest.mark.parametrize("names", [{}, {"__name__": "__main__"}], ids=["builtins", "main"])
def test_classes_that_exec_makes_are_read_in_each_call(names: dict[str, Any]) -> None:
    scope = {"dataclass": dataclass, "K": 2.0, **names}
    exec(
        "@dataclass\n"
        "class Layer:\n"
        "    k: object\n"
        "    def __call__(self, x): return x * K\n"
        "    def __eq__(self, other): return K\n"
        "    def __getattr__(self, name):\n"
        "        if name == 'scale': return K\n"
        "        raise AttributeError(name)\n",
        scope,
    )
    layer = scope["Layer"](1.0)
    for function in (lambda x, p: p(x), lambda x, p: x * p.scale, lambda x, p: x * (p == p)):
        check(cf.fuse(function), (ONES, layer), lambda value: scope.update(K=value))


def test_methods_that_dataclasses_generates_are_not_looked_at() -> None:
    """They hold what no key can, such as marks of missing defaults."""

    @dataclass(order=True, frozen=True)
    class Layer:
        k: Any
        parts: list[Any] = dataclasses.field(default_factory=list)

    fused = cf.fuse(lambda x, p: x * p.k if isinstance(p, Layer) else x)
    assert_equal(fused(ONES, Layer(ONES * 2)), ONES * 2)
    assert_equal(fused(ONES, Layer(ONES * 3)), ONES * 3)
    assert len(fused._runnables) == 1


def test_classes_that_make_dataclass_makes_are_read_in_each_call(set_global: Callable[[float], None]) -> None:
    made = dataclasses.make_dataclass("made", ["k"], namespace={"times": lambda self, x: x * K, "scale": 2.0})
    check(cf.fuse(lambda x, p: p.times(x)), (ONES, made(1.0)), set_global)
    check(cf.fuse(lambda x, p: x * p.scale), (ONES, made(1.0)), lambda value: setattr(made, "scale", value))


def test_a_bound_method_as_a_class_attribute_is_read_in_each_call(set_global: Callable[[float], None]) -> None:
    @dataclass
    class Scale:
        k: float

        def times(self, x: Any) -> Any:
            return x * self.k * K

    @dataclass
    class Layer:
        bias: float

    scale = Scale(1.0)
    Layer.act = scale.times  # type: ignore[attr-defined]
    fused = cf.fuse(lambda x, p: p.act(x))
    check(fused, (ONES, Layer(0.0)), set_global)
    set_global(1.0)
    check(fused, (ONES, Layer(0.0)), lambda value: setattr(scale, "k", value))


def test_an_attribute_that_moves_to_another_class_is_noticed() -> None:
    @dataclass
    class First:
        k: float

    @dataclass
    class Second:
        k: float

    First.shift = 2.0  # type: ignore[attr-defined]
    fused = cf.fuse(lambda x, p, q: x + getattr(p, "shift", 0.0) + sum(q.shift for _ in ()))
    assert fused(ONES, First(1.0), Second(1.0))[0] == 3
    del First.shift  # type: ignore[attr-defined]
    Second.shift = 2.0  # type: ignore[attr-defined]
    assert fused(ONES, First(1.0), Second(1.0))[0] == 1


# Modules ------------------------------------------------------------------------------------------------------------


def use(module: Any, x: Any) -> Any:
    return x * module.scale


def by_default(x: Any, module: Any = SETTINGS) -> Any:
    return x * module.scale


MODULES = (SETTINGS,)


class Holder:
    settings = SETTINGS


def alias(x: Any) -> Any:
    settings = SETTINGS
    return x * settings.scale


@pytest.mark.parametrize(
    "function",
    [
        alias,
        lambda x: use(SETTINGS, x),
        lambda x: x * MODULES[0].scale,
        lambda x: x * Holder.settings.scale,
        lambda x: by_default(x),
        lambda x: x * (SETTINGS if x.ndim else np).scale,  # type: ignore[attr-defined]
    ],
)
def test_modules_are_read_in_each_call_however_they_are_met(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(cf.fuse(function), (ONES,), lambda value: monkeypatch.setattr(SETTINGS, "scale", value))
    check(cf.fuse(lambda x, m: use(m, x)), (ONES, SETTINGS), lambda k: monkeypatch.setattr(SETTINGS, "scale", k))
    monkeypatch.setattr(SETTINGS, "scale", ONES)
    with pytest.raises(
        TypeError,
        match=r"(which the module settings_of_the_user holds|an array among the attributes).*make it an argument",
    ):
        cf.fuse(function)(ONES)


def test_functions_of_modules_read_in_each_call(set_global: Callable[[float], None]) -> None:
    check(cf.fuse(lambda x, m: m.times(x)), (ONES, SETTINGS), set_global)
    later = types.ModuleType("later")
    later.__file__ = __file__
    fused = cf.fuse(lambda x, m: x * m.scale if hasattr(m, "scale") and m.scale else x)
    assert fused(ONES, later)[0] == 1
    later.scale = 3.0  # type: ignore[attr-defined]
    assert fused(ONES, later)[0] == 3


def test_modules_of_libraries_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda x, m: m.exp(x))
    assert_equal(fused(ONES, np), np.exp(ONES))
    monkeypatch.setattr(np, "newaxis_of_the_test", ONES, raising=False)
    assert_equal(fused(ONES, np), np.exp(ONES))
    assert len(fused._runnables) == 1


# What several functions read -----------------------------------------------------------------------------------------

SHARED = types.SimpleNamespace(
    object=type("Settings", (), {})(), module=types.ModuleType("shared_settings"), function=lambda x: x
)
SHARED.module.__file__ = __file__
SHARED.nested = type("Holder", (), {"inner": type("Settings", (), {})()})()


def readers(kind: str) -> tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]:
    """Return what holds `scale` and `shift`, and functions of which one reads the scale, and the other the shift."""
    if kind == "nested":
        nested = SHARED.nested
        return nested.inner, lambda x: x * nested.inner.scale, lambda x: x + nested.inner.shift
    shared = getattr(SHARED, kind)
    return shared, lambda x: x * shared.scale, lambda x: x + shared.shift


@pytest.mark.parametrize("first", ["scale", "shift"])
@pytest.mark.parametrize("kind", ["object", "module", "function", "nested"])
def test_functions_that_share_a_variable_may_read_other_attributes_of_it(kind: str, first: str) -> None:
    holder, scaled, shifted = readers(kind)
    inner, outer = (scaled, shifted) if first == "scale" else (shifted, scaled)
    fused = cf.fuse(lambda x: outer(inner(x)))
    for scale, shift in ((2.0, 3.0), (2.0, 5.0), (4.0, 5.0), (4.0, 7.0), (2.0, 3.0)):
        holder.scale, holder.shift = scale, shift
        for _ in range(2):
            assert_equal(fused(ONES), ONES * scale + shift if first == "scale" else (ONES + shift) * scale)


# Functions ----------------------------------------------------------------------------------------------------------


def test_attributes_of_functions_are_read_in_each_call() -> None:
    def helper(x: Any) -> Any:
        return x

    def caught(x: Any) -> Any:
        try:
            return helper(x) * helper.scale  # type: ignore[attr-defined]
        except AttributeError:
            return helper(x)

    fused = cf.fuse(caught)
    assert fused(ONES)[0] == 1
    change = lambda value: setattr(helper, "scale", value)  # noqa: E731
    check(fused, (ONES,), change)
    del helper.scale  # type: ignore[attr-defined]
    assert fused(ONES)[0] == 1
    named = cf.fuse(lambda x: x * len(helper.__name__))
    for name in ("a", "abc", "a"):
        helper.__name__ = name
        assert named(ONES)[0] == len(name)
    helpers = (helper,)
    change(2.0)
    check(cf.fuse(lambda x, f: f(x) * f.scale), (ONES, helper), change)
    check(cf.fuse(lambda x: x * helpers[0].scale), (ONES,), change)  # type: ignore[attr-defined]
