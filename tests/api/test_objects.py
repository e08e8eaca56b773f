"""Objects of the user's own classes: as `self`, as arguments, around functions, and what they hold."""

from __future__ import annotations

import abc
import copy
import functools
import logging
import operator
import threading
import types
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import numpy as np
import pytest
from support import assert_equal

import cupyfuse as cf
from cupyfuse.errors import TraceError

X = np.arange(6.0).reshape(2, 3)
MISSING = object()
T = TypeVar("T")


class Layer:
    def __init__(self, scale: float = 1.0):
        self.w, self.scale = np.full((3, 3), scale), scale

    def __call__(self, x: Any) -> Any:
        return np.tanh(x @ self.w) * self.scale


class Net:
    """A network as people write it, with things that no plan reads."""

    def __init__(self, depth: int = 2):
        self.layers = [Layer(1.0 + i) for i in range(depth)]
        self.bias: Any = np.zeros(3)
        self.steps, self.losses = 0, [0.5]
        self.lock, self.log, self.generator = threading.Lock(), logging.getLogger(__name__), np.random.default_rng(0)
        self.parent = self

    def plain(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        mask = getattr(self, "mask", None)
        return x + self.bias if mask is None else np.where(mask, x, self.bias)

    forward = cf.fuse(plain)


def test_networks_are_as_plain_ones_whatever_changes() -> None:
    net = Net()

    def check(plans: int) -> None:
        for _ in range(10):  # walked at first, then recognised
            assert_equal(net.forward(X), net.plain(X))
        assert len(Net.forward._runnables) - known == plans

    known = len(Net.forward._runnables)
    check(1)
    net.bias = net.bias + 1
    net.layers[1].w[0] = 5
    net.layers[0].scale = 0.25
    check(1)
    net.steps += 1  # which no code reads, as all these
    net.losses.append(0.25)
    net.generator.random(3)
    check(1)
    net.layers.append(Layer(3.0))
    check(2)
    net.layers[2] = net.layers[0]  # the same object twice
    check(3)
    net.layers[2] = copy.copy(net.layers[0])  # another one, with the same array
    check(4)
    net.mask = X[0] > 1  # type: ignore[attr-defined]
    check(5)
    net.layers[2].__dict__["other"] = 1
    check(6)
    net.layers[0].w = np.ones((3, 3), "float32")
    check(7)


def test_objects_are_read_wherever_they_are() -> None:
    net, layer = Net(), Layer(2.0)
    functions: list[Any] = [
        lambda x: net.plain(x) + layer.w[0],
        layer,
        layer.__call__,
        lambda x, held=layer: held(x),
        lambda x: [f(x) for f in (layer, net.plain)][1],
    ]
    fused = [cf.fuse(f) for f in functions]
    for scale in (1.0, 2.0):
        layer.scale = scale
        layer.w, net.bias = np.full((3, 3), scale), np.full(3, scale)
        for function, f in zip(functions, fused, strict=True):
            assert_equal(f(X), function(X))
    both = cf.fuse(lambda x, a, b: a(x) + b.w[0] if a is b else b(x))
    for a, b in ((layer, layer), (layer, Layer(3.0)), (Layer(1.0), Layer(1.0)), (layer, layer)):
        for _ in range(10):
            assert_equal(both(X, a, b), a(X) + b.w[0] if a is b else b(X))


def test_bound_objects_are_folded_until_they_change() -> None:
    net = Net()
    head = Net.forward.bind(self=net)
    assert_equal(head(X), net.plain(X))
    net.bias = net.bias + 2
    net.layers[0] = Layer(0.5)
    net.layers[1].scale = 4.0
    assert_equal(head(X), net.plain(X))
    layer = Layer(2.0)
    swapped = cf.fuse(lambda first, x, second: first(x) + second(x)).bind(second=layer)
    for first in (Layer(1.0), Layer(3.0), layer):
        assert_equal(swapped(first, X), first(X) + layer(X))
        first.w = first.w + 1
        assert_equal(swapped(first, X), first(X) + layer(X))


class Slotted:
    __slots__ = ("k", "unset", "w")

    def __init__(self) -> None:
        self.k, self.w = 2.0, np.ones(3)


class Properties(abc.ABC, Generic[T]):
    def __init__(self) -> None:
        self._w = np.ones(3)

    @property
    def w(self) -> Any:
        return self._w * 2

    @abc.abstractmethod
    def apply(self, x: Any) -> Any: ...


class Dynamic(Properties[int]):
    def __init__(self) -> None:
        super().__init__()
        self._values = {"more": np.full(3, 3.0)}
        self.__private = 4.0

    def __getattr__(self, name: str) -> Any:
        return self._values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)

    def apply(self, x: Any) -> Any:
        return x * self.w + self.more * self.__private

    def __iter__(self) -> Iterator[Any]:
        yield self._w


def test_attributes_of_any_kind_are_read() -> None:
    slotted, dynamic = Slotted(), Dynamic()
    of_slots = cf.fuse(lambda x, s: x * s.w + s.k + (1 if hasattr(s, "unset") else 0))
    of_properties = cf.fuse(lambda x, d: d.apply(x) + sum(d))
    for k in range(12):
        slotted.k, dynamic._w = k / 2, dynamic._w + 1
        if k > 9:
            slotted.unset = k  # type: ignore[attr-defined]
        dynamic._values["more"][0] = k
        assert_equal(of_slots(X, slotted), X * slotted.w + slotted.k + (k > 9))
        assert_equal(of_properties(X, dynamic), dynamic.apply(X) + sum(dynamic))


def test_methods_and_classes_are_compared() -> None:
    class Scale:
        k = 2.0

        def apply(self, x: Any) -> Any:
            return x * self.k

    scale = Scale()
    fused = cf.fuse(lambda x, s: s.apply(x))
    assert_equal(fused(X, scale), X * 2)
    Scale.k = 3.0
    assert_equal(fused(X, scale), X * 3)
    scale.k = 4.0
    assert_equal(fused(X, scale), X * 4)
    Scale.apply = lambda self, x: x - self.k  # type: ignore[method-assign, assignment]
    assert_equal(fused(X, scale), X - 4)

    class Other(Scale):
        def apply(self, x: Any) -> Any:
            return super().apply(x) + 1

    assert_equal(fused(X, Other()), X - 2)


def test_changes_of_objects_are_refused_and_objects_stay_as_they_were() -> None:
    class Counter:
        def __init__(self) -> None:
            self.count, self.kept, self.w = 0, [1.0], np.ones(3)

    def counts(x: Any, c: Any) -> Any:
        c.count += 1
        return x

    def stores(x: Any, c: Any) -> Any:
        c.last = x
        return x

    def replaces(x: Any, c: Any) -> Any:
        c.kept = [*c.kept, 2.0]
        return x

    def writes(x: Any, c: Any) -> Any:
        c.never_read = 5
        return x

    def deletes(x: Any, c: Any) -> Any:
        del c.count
        return x

    counter = Counter()
    counter.never_read = 1  # type: ignore[attr-defined]
    before = dict(vars(counter))
    for function in (counts, stores, replaces, writes, deletes):
        with pytest.raises(TraceError, match="cannot fuse a change of 'c'"):
            cf.fuse(function)(X, counter)
        assert vars(counter) == before
    record = {"kept": [1.0]}
    with pytest.raises(TraceError, match="cannot fuse a change of 'c'"):
        cf.fuse(lambda x, c: (c.update(kept=[*c["kept"], 2.0]), x)[1])(X, record)
    assert record == {"kept": [1.0]}

    @cf.fuse
    def in_place(x: Any, c: Any) -> Any:
        c.w += x[0]
        return c.w * 2

    assert_equal(in_place(X, counter), (1 + X[0]) * 2)
    assert_equal(counter.w, 1 + X[0])


def test_what_no_code_names_cannot_be_read() -> None:
    net = Net()
    for function, name in (
        (lambda x, n, name: x * vars(n)[name], "steps"),
        (lambda x, n, name: x + getattr(n, name), "steps"),
        (lambda x, n, name: x if vars(n)[name] == 1 else x + 1, "generator"),
        (lambda x, n, name: x if isinstance(vars(n)[name], int) else x + 1, "lock"),
        (lambda x, n, name: x + len([*vars(n)[name]]), "losses"),
        (lambda x, n, name: np.add(x, vars(n)[name]), "steps"),
        (lambda x, n, name: copy.deepcopy(n).bias + x, ""),
    ):
        with pytest.raises(TypeError, match=r"'n\.\w+'( is read by a name|: expected)"):
            cf.fuse(function)(X, net, name)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"(?s)'n\.lock'.*lock.*static="):
        cf.fuse(lambda x, n: x if n.lock else x + 1)(X, net)
    assert cf.fuse(lambda n: 1.0)(types.SimpleNamespace(held=Slotted())) == 1.0


def test_names_of_what_is_refused_may_be_those_of_other_attributes() -> None:
    class Head:
        def __init__(self) -> None:
            self.log, self.exp, self.w = logging.StreamHandler(), [threading.Lock()], np.ones(3)

        def plain(self, x: Any) -> Any:
            return np.log(np.exp(x * self.w).sum(axis=1))

        def logs(self, x: Any) -> Any:
            self.log.flush()
            return x

        loss = cf.fuse(plain)

    head = Head()
    for w in (1.0, 2.0):
        head.w = np.full(3, w)
        for _ in range(12):
            assert_equal(head.loss(X), head.plain(X))
    with pytest.raises(TypeError, match=r"(?s)'fn\.__self__\.log'.*StreamHandler.*static="):
        cf.fuse(head.logs)(X)
    head.log = np.full(3, 7.0)  # type: ignore[assignment]
    assert_equal(head.loss(X), head.plain(X))


def test_sentinels_are_themselves() -> None:
    class Reader:
        def read(self, x: Any, mask: Any = MISSING) -> Any:
            return x if mask is MISSING else x * mask

    reader = Reader()

    @cf.fuse
    def read(x: Any, mask: Any = MISSING) -> Any:
        return reader.read(x, mask) + (1 if mask is MISSING else 2)

    assert_equal(read(X), X + 1)
    assert_equal(read(X, X), X * X + 2)
    assert_equal(read(X, MISSING), X + 1)


def test_nested_functions_of_objects_are_one_trace() -> None:
    class Model:
        def __init__(self) -> None:
            self.net, self.k = Net(), 2.0

        @cf.fuse
        def forward(self, x: Any) -> Any:
            return self.net.forward(x) * self.k

        @cf.fuse
        def loss(self, x: Any, y: Any) -> Any:
            return ((self.forward(x) - y) ** 2).mean() + self.net.layers[0].w.sum()

    model = Model()
    for k in (1.0, 3.0):
        model.k, model.net.bias = k, np.full(3, k)
        expected = model.net.plain(X) * k
        assert_equal(model.forward(X), expected)
        assert np.isclose(model.loss(X, X), ((expected - X) ** 2).mean() + model.net.layers[0].w.sum())


def test_slots_without_a_value_and_getattr() -> None:
    class Half:
        __slots__ = ("k", "more")

        def __getattr__(self, name: str) -> Any:
            if name == "more":
                asked.append(name)
                return 0.25
            raise AttributeError(name)

    asked: list[str] = []
    half = Half()
    half.k = 2.0  # type: ignore[attr-defined]
    fused = cf.fuse(lambda x, h: x * h.k)
    for _ in range(10):
        assert_equal(fused(X, half), X * 2)
    assert not asked
    more = cf.fuse(lambda x, h: x * h.more)
    for value in (0.25, 3.0):
        for _ in range(10):
            assert_equal(more(X, half), X * value)
        half.more = 3.0  # type: ignore[attr-defined]


def test_objects_that_classes_hold_are_read_in_each_call() -> None:
    class Unit:
        k = 1.0

    class Scale:
        unit = Unit()

        def apply(self, x: Any) -> Any:
            return x * self.unit.k

        def count(self, x: Any) -> Any:
            self.unit.n = getattr(self.unit, "n", 0) + 1
            return x

    scale = Scale()
    fused = cf.fuse(lambda x, s: s.apply(x))
    for k in (1.0, 2.0, 3.0):
        Scale.unit.k = k
        for _ in range(10):
            assert_equal(fused(X, scale), X * k)
    with pytest.raises(TraceError, match=r"cannot fuse a change of 's\.unit'"):
        cf.fuse(lambda x, s: s.count(x))(X, scale)
    assert vars(Scale.unit) == {"k": 3.0}


def test_classes_of_objects_must_not_be_changed() -> None:
    def changes(x: Any, layer: Any) -> Any:
        layer.__class__ = Net
        return x

    layer = Layer()
    with pytest.raises(TraceError, match="cannot fuse a change of 'layer'"):
        cf.fuse(changes)(X, layer)
    assert type(layer) is Layer


def test_classes_that_hide_attributes_are_refused() -> None:
    class Base:
        __slots__ = ("k",)

    class Hidden(Base):
        __slots__ = ()

        @property
        def k(self) -> Any:  # type: ignore[override]
            return Base.k.__get__(self) * 2  # type: ignore[attr-defined]

    class Again(Base):
        __slots__ = ("k",)

    class OwnDict:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            return {}

    class Alike(type):
        def __eq__(cls, other: object) -> bool:
            return isinstance(other, Alike)

        def __hash__(cls) -> int:
            return 1

    class One(metaclass=Alike):
        pass

    for cls in (Hidden, Again, OwnDict, One):
        with pytest.raises(TypeError, match="argument 'o': expected an array"):
            cf.fuse(lambda x, o: x * o.k)(X, cls())  # type: ignore[attr-defined]


class Setting:
    def __init__(self) -> None:
        self.k = 2.0


SETTING = Setting()


def test_objects_that_methods_read_around_them_are_the_same_ones_elsewhere() -> None:
    class Reader:
        default = Setting()

        def read(self, x: Any, given: Any, other: Any = SETTING) -> Any:
            x = x * given.k + (10 if given is SETTING else 20 if given is self.default else 30)
            return x if other is SETTING else -x

    reader, other = Reader(), Setting()
    fused = cf.fuse(lambda x, r, s, t: r.read(x, s, t))
    for s in (SETTING, other, Reader.default, SETTING):
        for t in (SETTING, other):
            for k in (1.0, 3.0):
                s.k = k
                for _ in range(10):
                    assert_equal(fused(X, reader, s, t), reader.read(X, s, t))


def test_attributes_by_computed_names_may_be_compared_with_none() -> None:
    class Options:
        def __init__(self) -> None:
            self.k, self.bias1 = 2.0, None

        def apply(self, x: Any, number: int) -> Any:
            return x * self.k + (1 if getattr(self, f"bias{number}") is None else 2)

    options = Options()
    fused = cf.fuse(lambda x, o, n: o.apply(x, n))
    of_dict = cf.fuse(lambda x, o: x + sum(value is None for value in o.__dict__.values()))
    for bias in (None, 3, None, 4):
        options.bias1 = bias  # type: ignore[assignment]
        for _ in range(10):
            assert_equal(fused(X, options, 1), options.apply(X, 1))
            assert_equal(of_dict(X, options), X + (bias is None))


class Gate:
    def __init__(self, w: float = 1.0):
        self.w = np.full(3, w)


def test_objects_that_free_and_bound_arguments_hold_are_read_as_bound() -> None:
    class Context:
        def __init__(self, layer: Gate):
            self.layer = layer

    layer = Gate()
    context, x = Context(layer), np.arange(3.0)
    bound = cf.fuse(lambda ctx, layer, x: x * (layer.w * 2) * ctx.layer.w).bind(layer=layer)
    for w in (1.0, 10.0):
        layer.w = np.full(3, w)
        for _ in range(20):
            assert_equal(bound(context, x), x * (layer.w * 2) * layer.w)


def test_computed_names_of_objects_that_classes_hold() -> None:
    class Settings:
        def __init__(self) -> None:
            self.scale = 2.0

    class Reader:
        settings = Settings()

        def apply(self, x: Any, name: str) -> Any:
            return x * vars(self.settings)[name]

    reader = Reader()
    fused = cf.fuse(lambda x, r, name: r.apply(x, name))
    for scale in (2.0, 5.0):
        Reader.settings.scale = scale
        assert_equal(fused(X, reader, "scale"), X * scale)


def test_what_is_compared_by_identity_is_known_by_any_name() -> None:
    class Options:
        def __init__(self) -> None:
            self.first, self.second, self.third, self.w = None, True, MISSING, np.ones(3)

    def read(x: Any, o: Any, name: str) -> Any:
        found = operator.attrgetter(name)(o)
        if found is None:
            return x + o.w
        if found is True:
            return x - o.w
        return x * 2 if found is MISSING else x * 3 if found is False else x * 4

    options, fused = Options(), cf.fuse(read)
    for _ in range(10):
        for name in ("first", "second", "third"):
            assert_equal(fused(X, options, name), read(X, options, name))
    fused = cf.fuse(read)
    for value in (5, MISSING, 5, None, 5, True, 5, False):
        options.second = value  # type: ignore[assignment]
        for _ in range(12):
            assert_equal(fused(X, options, "second"), read(X, options, "second"))


SCALE = np.ones(3)


def scaled_by_global(x: Any) -> Any:
    return x * SCALE


def test_functions_that_classes_and_variables_hold_read_no_array_unnoticed() -> None:
    class Policy:
        def __init__(self) -> None:
            self.act = scaled_by_global

    class Owner:
        policy = Policy()

        def apply(self, x: Any, function: Any) -> Any:
            return function(x) + self.policy.act(x)

    module = types.ModuleType("module_of_the_user")
    module.act, module.policy = scaled_by_global, Policy()  # type: ignore[attr-defined]
    for function in (
        lambda x: Owner().apply(x, scaled_by_global),
        lambda x: scaled_by_global(x) + module.act(x),
        lambda x: scaled_by_global(x) + module.policy.act(x),
    ):
        with pytest.raises(TypeError, match=r"SCALE.*make it an argument|an array.*make it an argument"):
            cf.fuse(function)(X)  # type: ignore[arg-type]


def test_objects_without_attributes_stay_without() -> None:
    class Empty:
        pass

    def store(e: Any, x: Any) -> Any:
        e.last = x * 2
        return e.last + 1

    def fail(e: Any, x: Any) -> Any:
        e.last = x
        raise KeyError("as the user says")

    empty = Empty()
    for function, error in ((store, TraceError), (store, TraceError), (fail, KeyError)):
        with pytest.raises(error):
            cf.fuse(function)(empty, X)
        assert not vars(empty)


def test_cached_properties_of_objects_that_classes_hold() -> None:
    class Table:
        def __init__(self) -> None:
            self.n = 3

        @functools.cached_property
        def values(self) -> Any:
            return np.arange(self.n)

    class Owner:
        table = Table()

        def apply(self, x: Any) -> Any:
            return x * self.table.values

    fused, owner = cf.fuse(lambda x, o: o.apply(x)), Owner()
    for _ in range(3):
        assert_equal(fused(X, owner), X * np.arange(3))
        assert "values" not in vars(Owner.table)


def test_what_is_too_deep_or_made_anew_is_an_error_that_says_so() -> None:
    class Node:
        def __init__(self, following: Any):
            self.following, self.k = following, 1.0

    class Wrap:
        def __init__(self, a: Any):
            self.a = a

    node = None
    for _ in range(600):
        node = Node(node)
    with pytest.raises(TypeError, match=r"'n\.following.*more than 100 levels deep"):
        cf.fuse(lambda x, n: x * n.following.k)(X, node)
    cf.register(Wrap, lambda w: ([Gate()], None), lambda _, children: Wrap(children[0]))
    with pytest.raises(TypeError, match=r"argument 'w\[0\]'.*Gate"):
        cf.fuse(lambda x, w: x * w.a.w)(X, Wrap(1))
