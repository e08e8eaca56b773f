"""What makes a plan is in its key: each change of what a function can read is seen, or refused with a way out."""

from __future__ import annotations

import argparse
import collections
import ctypes
import datetime
import enum
import functools
import sys
import threading
import types
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from support import assert_equal

import cupyfuse as cf
from cupyfuse.api import arrays
from cupyfuse.api.signature import Signature
from cupyfuse.settings import force_plans

ONES = np.ones(3)


def mul(k: Any, x: Any) -> Any:
    return x * k


def calls(fused: Callable[..., Any], *arguments: Any) -> list[float]:
    """The first element of the result for each of several arguments."""
    return [float(np.ravel(fused(ONES, a))[0]) for a in arguments]


def times(x: Any, k: Any) -> Any:
    return x * k


class Color(enum.Enum):
    RED = 1.0
    BLUE = 2.0


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Layer:
    """A dataclass with a method, a property, a class attribute and an attribute that is no field."""

    k: Any
    bias: Any = 0.0
    shift: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        self.extra = 1.0

    @property
    def twice(self) -> Any:
        return self.k * 2

    def apply(self, x: Any) -> Any:
        return x * self.k + self.bias + self.shift


class Plain:
    def __init__(self, k: float):
        self.k = k

    def apply(self, x: Any) -> Any:
        return x * self.k


class Slotted:
    __slots__ = ("k",)

    def __init__(self, k: float):
        self.k = k


# Values that a key tells apart --------------------------------------------------------------------------------------


def test_partials_are_told_apart_by_their_arguments() -> None:
    fused = cf.fuse(lambda x, f: f(x))
    assert calls(fused, functools.partial(mul, 2), functools.partial(mul, 5)) == [2, 5]
    assert calls(fused, functools.partial(times, k=2), functools.partial(times, k=5.0)) == [2, 5]
    scale = functools.partial(mul, np.full(3, 7.0))
    assert calls(fused, scale) == [7]
    assert len(fused._runnables) == 5


def test_bound_methods_are_told_apart_by_object_and_function() -> None:
    fused = cf.fuse(lambda x, f: f(x))
    two, three = Layer(2.0), Layer(3.0)
    assert calls(fused, two.apply, three.apply) == [2, 3]
    two.k = 4.0
    assert calls(fused, two.apply) == [4]
    two.extra = 9.0
    assert calls(cf.fuse(lambda x, layer: x * layer.extra), two, three) == [9, 1]

    @dataclass
    class Two:
        k: float

        def first(self, x: Any) -> Any:
            return x * self.k

        def second(self, x: Any) -> Any:
            return x + self.k

    assert calls(fused, Two(4.0).first, Two(4.0).second) == [4, 5]


@pytest.mark.parametrize(
    "values",
    [
        (np.timedelta64(1, "s"), np.timedelta64(1, "m"), np.timedelta64(1, "h")),
        (1, True, 1.0, np.float64(1), np.float32(1), np.int64(1)),
        (0.0, -0.0, 0, False, np.float64(-0.0), np.float64(0.0)),
        (complex(0.0, 0.0), complex(-0.0, 0.0), complex(0.0, -0.0)),
        (slice(1, 2), slice(True, 2), slice(1.0, 2), slice(1, 2, 1)),
        (frozenset({1}), frozenset({True}), frozenset({1.0})),
        (range(0), range(1, 1), range(0, 0, 2)),
        ("1", b"1", 1),
        ((1,), [1], (True,), (1.0,), {0: 1}, {False: 1}, {0.0: 1}, {"0": 1}, {(0,): 1}, {(False,): 1}),
        (np.dtype("f4"), np.dtype("<i4"), np.dtype(">i4"), np.dtype("f4", metadata={"a": 1})),
        (Color.RED, Color.BLUE),
        (None, Ellipsis, NotImplemented),
        (np.exp, np.log, np.sum, np.max, abs, len, np, np.linalg, int, np.float32, Color, str.upper, np.ndarray.sum),
        (Pair(1, 2), Pair(1, True), (1, 2)),
        (np.str_("a"), "a", np.bytes_(b"a")),
        (np.datetime64("2020-01-01"), np.datetime64("2020-01-01T00")),
    ],
    ids=lambda v: type(v[0]).__name__,
)
def test_constants_that_a_function_can_tell_apart_have_plans_of_their_own(values: tuple[Any, ...]) -> None:
    seen: list[str] = []
    fused = cf.fuse(lambda x, v: x + len(repr(v)) * 0 + 1)
    for _ in range(2):
        for value in values:
            assert_equal(fused(ONES, value), ONES + 1)
            seen.append(repr(value))
    assert len(fused._runnables) == len(values)


def test_functions_among_the_arguments_are_told_apart_by_code_and_closure() -> None:
    def make(k: Any) -> Callable[[Any], Any]:
        return lambda x: x * k

    fused = cf.fuse(lambda x, f: f(x))
    assert calls(fused, make(2.0), make(3.0), make(2.0)) == [2, 3, 2]
    assert len(fused._runnables) == 2, "functions of the same code and closure share a plan"
    w = np.array([4.0, 5.0, 6.0])
    assert_equal(fused(ONES, make(w)), w)
    w *= 2
    assert_equal(fused(ONES, make(w)), w)
    assert calls(fused, lambda x, k=7.0: x * k, lambda x, *, k=8.0: x * k) == [7, 8]


def test_dataclasses_named_tuples_and_dicts_hold_arrays() -> None:
    w = np.arange(3.0)
    fused = cf.fuse(lambda x, layer: layer.apply(x) * layer.twice)
    assert_equal(fused(ONES, Layer(w.copy(), bias=w)), (w + w) * (w * 2))
    assert_equal(fused(ONES, Layer(w + 1, bias=w)), (w + 1 + w) * (w + 1) * 2)
    assert len(fused._runnables) == 1
    assert_equal(cf.fuse(lambda x, p: x * p.a + p.b)(ONES, Pair(w, 2.0)), w + 2)

    @dataclass(frozen=True, slots=True)
    class Frozen:
        w: Any
        k: float

    frozen = cf.fuse(lambda x, p: x * p.w * p.k)
    assert_equal(frozen(ONES, Frozen(w, 2.0)), w * 2)
    assert_equal(frozen(ONES, Frozen(w, 3.0)), w * 3)


def test_class_attributes_are_read_in_each_call() -> None:
    @dataclass
    class Config:
        x: Any = None
        scale: ClassVar[float] = 2.0

        @classmethod
        @cf.fuse
        def of_class(cls, x: Any) -> Any:
            return x * cls.scale

        @cf.fuse
        def method(self, x: Any) -> Any:
            return x * self.helper()

        def helper(self) -> Any:
            return self.scale

    as_argument = cf.fuse(lambda x, c: x * c.scale)
    as_global = cf.fuse(lambda x: x * Config.scale)
    for k in (2.0, 3.0, 2.0, 5.0):
        Config.scale = k
        assert Config.of_class(ONES)[0] == k
        assert Config().method(ONES)[0] == k
        assert calls(as_argument, Config(), Config) == [k, k]
        assert as_global(ONES)[0] == k
    Config.helper = lambda self: self.scale + 1  # type: ignore[method-assign]
    assert Config().method(ONES)[0] == 6


def test_fused_methods_of_objects_read_the_object_in_each_call() -> None:
    layer = Layer(2.0)
    fused = cf.fuse(layer.apply)
    for k in (2.0, 3.0, np.float32(4.0)):
        layer.k = k
        assert fused(ONES)[0] == k
    layer.k = np.array([1.0, 2.0, 3.0])
    assert_equal(fused(ONES), layer.k)
    layer.k = layer.k * 2
    assert_equal(fused(ONES), layer.k)
    Layer.shift = 1.0
    try:
        assert_equal(fused(ONES), layer.k + 1)
    finally:
        Layer.shift = 0.0
    assert_equal(fused(ONES), layer.k)
    partial = cf.fuse(functools.partial(mul, layer.k))
    assert_equal(partial(ONES), layer.k)
    layer.k *= 3
    assert_equal(partial(ONES), layer.k)


# Refused, with a way out --------------------------------------------------------------------------------------------


class Float(float):
    pass


class Integer(int):
    pass


class String(str):
    pass


class Listing(list):  # type: ignore[type-arg]
    pass


class Table(dict):  # type: ignore[type-arg]
    pass


class Tuple(tuple):
    pass


class Longer(Pair):
    pass


class OfALibrary(threading.Event):
    pass


class Finalized:
    def __del__(self) -> None:
        pass


@pytest.mark.parametrize(
    "value",
    [
        *(Float(1), Integer(1), String("a"), Listing([1]), Table(a=1), Tuple((1,)), Longer(1, 2)),
        *({1: 2}.keys(), bytearray(b"a"), ctypes.c_double(1.0), OfALibrary(), Finalized()),
        *(OfALibrary().isSet, functools.partial(OfALibrary().isSet, 1), [].append, iter([]), (i for i in ())),
        *(types.MappingProxyType({1: 2}), datetime.date(2020, 1, 1), threading.Lock(), np.random.default_rng(0)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_known_is_refused_with_the_ways_out(value: Any) -> None:
    fused = cf.fuse(lambda x, held: x + 1)
    kind = type(value).__name__ if not isinstance(value, (functools.partial, types.MethodType)) else "OfALibrary"
    for held, name in ((value, "held"), ([value], r"held\[0\]"), ({"k": (value,)}, r"held\['k'\]\[0\]")):
        with pytest.raises(TypeError, match=rf"(?s)['\"]{name}.*{kind}.*static=.*register") as caught:
            fused(ONES, held)
        assert "argument" in str(caught.value)
    with pytest.raises(TypeError, match=rf"variable 'value.*'.*{kind}.*register"):
        cf.fuse(lambda x: x + (value is None))(ONES)


def test_keys_of_dicts_are_constants() -> None:
    with pytest.raises(TypeError, match=r"'held'.*key of type Plain"):
        cf.fuse(lambda x, held: x)(ONES, {Plain(1.0): 1})


@pytest.mark.parametrize("kind", [np.matrix, np.ma.MaskedArray, np.recarray, type("Unit", (np.ndarray,), {})])
def test_subclasses_of_arrays_are_refused(kind: Any) -> None:
    value = np.ones((2, 2)).view(kind)
    for held, name in ((value, "held"), ([value], r"held\[0\]")):
        with pytest.raises(TypeError, match=rf"'{name}'.*plain array.*{kind.__name__}.*asarray"):
            cf.fuse(lambda x, held: x)(ONES, held)


def test_containers_that_contain_themselves_are_refused() -> None:
    held: list[Any] = []
    held.append(held)
    with pytest.raises(TypeError, match="contains itself"):
        cf.fuse(lambda x, held: x)(ONES, held)


# Ways out -----------------------------------------------------------------------------------------------------------


class Hashed:
    """Compared by value."""

    def __init__(self, k: float):
        self.k = k

    def __hash__(self) -> int:
        return hash(self.k)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hashed) and self.k == other.k


def test_static_arguments_are_compared_by_their_hash_and_equality() -> None:
    fused = cf.fuse(lambda x, c: x * c.k, static=("c",))
    assert calls(fused, Hashed(2.0), Hashed(3.0), Hashed(2.0)) == [2, 3, 2]
    assert len(fused._runnables) == 2
    bound = fused.bind(c=Hashed(5.0))
    assert bound(ONES)[0] == 5
    with pytest.raises(TypeError, match=r"static argument 'c'.*hashable.*list"):
        fused(ONES, [1])
    held = Hashed(7.0)
    assert cf.fuse(lambda x: x * held.k, static=("held",))(ONES)[0] == 7
    with pytest.raises(TypeError, match=r"'d' is neither a parameter of .*lambda> \(x, c\) nor a variable that it or"):
        cf.fuse(lambda x, c: x, static=("d",))(ONES, 1.0)
    with pytest.raises(TypeError, match="tuple of names"):
        cf.fuse(lambda x, c: x, static="c")  # type: ignore[call-overload]


@pytest.fixture
def registered() -> type:
    class Linear:
        def __init__(self, weight: Any, slope: float, parts: Any = ()):
            self.weight, self.slope, self.parts = weight, slope, parts

        @cf.fuse
        def forward(self, x: Any) -> Any:
            return self.activate(x @ self.weight.T)

        def activate(self, x: Any) -> Any:
            return cf.leaky_relu(x, self.slope)

    return cf.register(
        Linear, lambda o: ([o.weight, *o.parts], o.slope), lambda slope, c: Linear(c[0], slope, tuple(c[1:]))
    )


def test_registered_types_are_arguments_and_results(registered: Any) -> None:
    x = np.array([[1.0, -2.0, 3.0]])
    layer = registered(np.eye(3), 0.5)
    for slope in (0.5, 0.25, 0.5):
        layer.slope = slope
        assert_equal(layer.forward(x), np.where(x > 0, x, slope * x))
    layer.weight = layer.weight * 2
    assert_equal(layer.forward(x), np.where(x > 0, 2 * x, x))
    assert_equal(layer.forward.bind()(x), np.where(x > 0, 2 * x, x))
    made = cf.fuse(lambda o, x: {"o": type(o)(x * 2, 0.1)})(layer, x)["o"]
    assert type(made) is registered and made.slope == 0.1
    assert_equal(made.weight, x * 2)


def test_registering_is_checked() -> None:
    for wrong in (3, "a", list, np.ndarray, int):
        with pytest.raises(TypeError, match="register: cls"):
            cf.register(wrong, lambda o: ((), None), lambda c, o: None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="register: flatten"):
        cf.register(Plain, None, lambda c, o: None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="register: unflatten"):
        cf.register(Plain, lambda o: ((), None), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("shapes", [([3], [4]), ([3], [3, 3]), ([3, 3], [3])])
def test_arrays_that_the_trace_finds_elsewhere_are_not_taken_for_each_other(shapes: tuple[list[int], ...]) -> None:
    """The `flatten` of an object finds other arrays the second time that it is called."""
    found = iter(shapes)
    cls = type("Turning", (), {})
    cf.register(cls, lambda o: ([np.zeros(n) for n in next(found)], None), lambda constants, children: children)
    with pytest.raises(RuntimeError, match="pass the arrays as arguments"):
        cf.fuse(lambda o, x: (o[0].sum() + x).sum())(cls(), np.ones(5))


def test_results_come_back_as_what_they_were() -> None:
    @dataclass
    class Out:
        y: Any
        k: int = 3
        more: list[Any] = field(default_factory=list)

    point = namedtuple("point", "a b")
    named = cf.fuse(lambda x: point(x + 1, 2))(ONES)
    assert type(named) is point and named.b == 2
    out = cf.fuse(lambda x: Out(x * 2, more=[x, "a"]))(ONES)
    assert type(out) is Out and out.k == 3 and out.more[1] == "a"
    assert_equal(out.y, ONES * 2)
    for wrong in (Listing, Table, Tuple):
        with pytest.raises(TypeError, match=rf"returns a {wrong.__name__}.*register"):
            cf.fuse(lambda x, wrong: wrong({"a": x}) if issubclass(wrong, dict) else wrong([x]))(ONES, wrong)


def test_arguments_that_a_function_changes_are_refused() -> None:
    """The change would be made once, while the function is traced."""

    def grow(x: Any, held: Any) -> Any:
        held.append(1)
        return x

    def assign(x: Any, held: Any) -> Any:
        held["k"] = x
        return x

    def attribute(x: Any, held: Any) -> Any:
        held.k += 1
        return x

    for function, held in (
        (grow, []),
        (grow, [ONES]),
        (assign, {}),
        (assign, {"k": ONES + 0}),
        (attribute, Layer(1.0)),
    ):
        before = repr(held)
        with pytest.raises(cf.TraceError, match=r"a change of 'held'.*\[\.\.\.\] = value"):
            cf.fuse(function)(ONES, held)
        assert repr(held) == before


def test_a_cached_property_is_no_change() -> None:
    @dataclass
    class Scale:
        k: Any
        seen: list[int] = field(default_factory=list)

        @functools.cached_property
        def twice(self) -> Any:
            return self.k * 2

    def change(x: Any, p: Scale) -> Any:
        p.seen.append(1)
        return x * p.twice

    fused = cf.fuse(lambda x, p: x * p.twice)
    for k in (3.0, np.full(3, 3.0)):
        scale = Scale(k)
        for _ in range(2):
            assert fused(ONES, scale)[0] == 6
            assert np.all(scale.twice == 6)
        with pytest.raises(cf.TraceError, match=r"a change of 'p\.seen'"):
            cf.fuse(change)(ONES, scale)
        scale.twice = 8.0
        assert fused(ONES, scale)[0] == 8
        del scale.twice
        assert fused(ONES, scale)[0] == 6


@pytest.mark.parametrize(
    ("make", "read", "change"),
    [
        (lambda k: {"a", k}, lambda c: sum(map(len, c)), lambda c: c.add("z")),
        (lambda k: collections.OrderedDict(a=ONES, k=k), lambda c: c["a"] * len(c["k"]), lambda c: c.update(z=1)),
        (
            lambda k: collections.OrderedDict([(k, 1), ("a", 2)]),
            lambda c: len(next(iter(c))),
            lambda c: c.move_to_end("a", 0),
        ),
        (lambda k: collections.defaultdict(list, k=[k]), lambda c: len(c["k"][0]), lambda c: c["z"]),
        (lambda k: collections.Counter(k), lambda c: c["b"], lambda c: c.update("z")),
        (lambda k: collections.deque([ONES, k], 3), lambda c: c[0] * len(c[1]), lambda c: c.append(1)),
        (lambda k: types.SimpleNamespace(w=ONES, k=k), lambda c: c.w * len(c.k), lambda c: setattr(c, "z", 1)),
        (lambda k: argparse.Namespace(w=ONES, k=k), lambda c: c.w * len(c.k), lambda c: setattr(c, "z", 1)),
    ],
    ids=["set", "OrderedDict", "order", "defaultdict", "Counter", "deque", "SimpleNamespace", "Namespace"],
)
def test_containers_of_the_standard_library(make: Any, read: Any, change: Any) -> None:
    fused = cf.fuse(lambda x, c: x * read(c))
    for k in ("b", "bbb", "b"):
        assert_equal(fused(ONES, make(k)), ONES * read(make(k)))
    container = make("b")
    with pytest.raises(cf.TraceError, match="a change of 'c'"):
        cf.fuse(lambda x, c: change(c) or x * 2)(ONES, container)
    change(container)  # the caller's was not changed: this is the first time
    assert_equal(fused(ONES, container), ONES * read(container))


def test_containers_of_the_standard_library_are_returned() -> None:
    def function(x: Any) -> Any:
        rows = collections.defaultdict(list)
        rows["first"].append(x[:1])
        return collections.OrderedDict(x=x, y=x + 1), collections.Counter("aab"), rows, collections.deque([x], 2)

    with force_plans():
        actual = cf.fuse(function)(ONES)
    assert list(map(type, actual)) == list(map(type, function(ONES)))
    assert actual[1] == {"a": 2, "b": 1} and actual[2].default_factory is list and actual[3].maxlen == 2
    assert_equal(actual[0]["y"], ONES + 1)


def test_containers_that_cannot_be_compared_are_refused() -> None:
    for container in ({OfALibrary()}, collections.defaultdict(lambda: 1), {lambda: 1: 2}):
        with pytest.raises(TypeError, match=r"'c'.*expected"):
            cf.fuse(lambda x, c: x)(ONES, container)


def test_the_first_cupy_array_of_a_process_has_the_key_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    class Array:
        """What a key holds of a CuPy array."""

        shape, dtype, strides, data = (2, 3), np.dtype(np.float32), (12, 4), SimpleNamespace(device_id=0)

    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(ndarray=Array))
    monkeypatch.setattr(arrays, "CUPY_ARRAY", None)
    keys = []
    for _ in range(2):
        signature = Signature()
        signature.add(Array(), "x")
        keys.append(signature.cache_key())
    assert keys[0] == keys[1]
