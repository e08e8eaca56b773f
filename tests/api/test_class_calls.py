"""What `__init__` reads is read where a function may call the class, and makes no difference elsewhere."""

from __future__ import annotations

import abc
import builtins
import dataclasses
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator, Set
from typing import Any, Generic, TypeVar

import numpy as np
import pytest

import cupyfuse as cf

X = np.ones((2, 3))
K = 2.0
RNG = np.random.default_rng(0)
LOG = logging.getLogger(__name__)
TABLE = np.arange(12.0).reshape(3, 4)
COUNT = 0
T = TypeVar("T")


class Registered:
    known: dict[str, type] = {}  # noqa: RUF012

    def __init_subclass__(cls, **options: Any) -> None:
        Registered.known[cls.__name__] = cls
        LOG.debug("%s", cls)

    def __class_getitem__(cls, item: Any) -> Any:
        return (cls, RNG.normal())

    def __init__(self) -> None:
        LOG.debug("made")
        self.calls = 0


class Linear(Registered):
    def __init__(self, columns: int):
        global COUNT
        super().__init__()
        COUNT += 1
        self.w = TABLE[:, :columns] + RNG.standard_normal((3, columns))
        self.slope = 0.5

    def forward(self, x: Any) -> Any:
        return cf.leaky_relu(x @ self.w, self.slope)


class Scaled(Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * len(self)

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("cls", [Linear, Scaled])
def test_what_init_reads_may_be_of_any_kind(cls: Any) -> None:
    layer = cls(4)
    around, given = cf.fuse(lambda x: layer.forward(x)), cf.fuse(lambda x, l: l.forward(x))
    method = cf.fuse(layer.forward)
    for _ in range(12):
        for found in (around(X), given(X, layer), given.bind(l=layer)(X), method(X)):
            np.testing.assert_allclose(found, layer.forward(X), rtol=1e-12)
    assert len(around.plans) == len(given.plans) == len(method.plans) == 1


def test_what_init_reads_is_refused_where_the_class_is_called() -> None:
    layer = Linear(4)
    for function in (lambda x, l: type(l)(4).forward(x), lambda x, l: Linear(4).forward(x) + l.forward(x)):
        with pytest.raises(TypeError, match=r"(Linear.__init__ assigns|'RNG.standard_normal)"):
            cf.fuse(function)(X, layer)


# Ways to call a class -----------------------------------------------------------------------------------------------


class Owner:
    def __get__(self, held: Any, owner: Any = None) -> Any:
        return owner


class ClassProperty(property):
    def __get__(self, held: Any, owner: Any = None) -> Any:
        assert self.fget is not None
        return self.fget(owner)


class Leaf(Generic[T]):
    owner = Owner()

    def __init__(self, k: float = 1.0):
        self.k, self.own = k * K, 1.0

    @classmethod
    def make(cls) -> Any:
        return cls(2.0)

    @ClassProperty
    def default(cls) -> Any:
        return cls(2.0)  # type: ignore[operator]

    def copied(self) -> Any:
        return __class__(self.own)  # type: ignore[name-defined]

    def super_class(self) -> Any:
        return super().__self_class__(self.own)  # type: ignore[misc]

    def nested(self) -> Any:
        return (lambda: __class__(self.own))()  # type: ignore[name-defined]


class Deep(Leaf[float]):
    def __init__(self, k: float = 1.0):
        super().__init__(k + K)


class Sized:
    def __init__(self) -> None:
        self.k = K

    @classmethod
    def __len__(cls) -> int:  # type: ignore[override]
        return int(cls().k)


class Fresh:
    def __init__(self) -> None:
        self.k = K

    def renewed(self) -> float:
        made = object.__new__(Fresh)
        made.__init__()  # type: ignore[misc]
        return made.k


@dataclasses.dataclass
class Record:
    k: float = dataclasses.field(default=1.0, init=False)
    n: float = 1.0

    def __init__(self, n: float = 1.0):
        self.n, self.k = n, K


class Numbers(Set[int]):
    def __init__(self, items: Any):
        self.items, self.k = list(items), K

    def __contains__(self, item: object) -> bool:
        return item in self.items

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


class Hooked(abc.ABC):  # noqa: B024
    seen = 0.0

    @classmethod
    def __subclasshook__(cls, other: Any) -> Any:
        return other is Leaf and other().k > 4


class Meta(type):
    def __call__(cls, *args: Any) -> Any:
        made = super().__call__(*args)
        made.k = K
        return made


class Made(metaclass=Meta):
    def __init__(self, k: float = 0.0):
        self.k = k


ALIAS = Leaf[int]
HELD = types.SimpleNamespace(kind=Leaf, maker=functools.partial(Leaf, 2.0), make=Deep.make)
KINDS = [Leaf, {"deep": Deep}]
kind_of = type


@pytest.mark.parametrize(
    "function",
    [
        lambda x, l: x * Leaf(2.0).k,
        lambda x, l: x * Deep(2.0).k,
        lambda x, l: x * type(l)(2.0).k,
        lambda x, l: x * kind_of(l)(2.0).k,
        lambda x, l: x * builtins.type(l)(2.0).k,
        lambda x, l: x * next(map(type, [l]))(2.0).k,
        lambda x, l: x * l.__class__(2.0).k,
        lambda x, l: x * getattr(l, "__class__")(2.0).k,  # noqa: B009
        lambda x, l: x * l.__reduce_ex__(4)[1][0](2.0).k,
        lambda x, l: x * l.make().k,
        lambda x, l: x * l.owner(2.0).k,
        lambda x, l: x * l.default.k,
        lambda x, l: x * l.copied().k,
        lambda x, l: x * l.super_class().k,
        lambda x, l: x * l.nested().k,
        lambda x, l: x * ALIAS(2.0).k,
        lambda x, l: x * HELD.kind(2.0).k,
        lambda x, l: x * HELD.maker().k,
        lambda x, l: x * HELD.make().k,
        lambda x, l: x * KINDS[0](2.0).k,  # type: ignore[operator]
        lambda x, l: x * KINDS[1]["deep"](2.0).k,  # type: ignore[index]
        lambda x, l: x * Fresh().renewed(),
        lambda x, l: x * dataclasses.replace(Record(), n=2.0).k,
        lambda x, l: x * (Numbers([1, 2]) & Numbers([2])).k,  # type: ignore[attr-defined]
        lambda x, l: x * 2 if isinstance(l, Hooked) else x,
        lambda x, l: x * Made(1.0).k,
    ],
)
def test_what_init_reads_is_read_in_each_call_of_code_that_calls_it(
    function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    leaf, deep = Leaf(1.5), Deep(2.5)
    around = cf.fuse(lambda x: function(x, leaf))
    given, of_subclass = cf.fuse(function), cf.fuse(function)
    for k in (2.0, 3.0, 5.0, 2.0):
        monkeypatch.setitem(globals(), "K", k)
        abc.ABC.register(type("Another", (), {}))  # forgets what `__subclasshook__` said
        for _ in range(12):
            np.testing.assert_array_equal(around(X), function(X, leaf))
            np.testing.assert_array_equal(given(X, leaf), function(X, leaf))
            np.testing.assert_array_equal(of_subclass(X, deep), function(X, deep))


@pytest.mark.parametrize(
    ("function", "held"),
    [
        (lambda x, held: x * dataclasses.replace(held, n=2.0).k, Record(2.0)),
        (lambda x, held: x * (held & held).k, Numbers([1, 2])),
        (lambda x, held: x * held.renewed(), Fresh()),
        (lambda x, held: x * len(held), Sized()),
        (lambda x, held: x * held(2.0).k, Leaf),
        (lambda x, held: x * held[0]["a"](2.0).k, [{"a": Deep}]),
    ],
)
def test_classes_of_arguments_that_are_called(
    function: Callable[..., Any], held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fused = cf.fuse(function)
    for k in (2.0, 3.0, 5.0, 2.0):
        monkeypatch.setitem(globals(), "K", k)
        for _ in range(12):
            np.testing.assert_array_equal(fused(X, held), function(X, held))


def test_a_class_may_be_called_where_it_is_an_argument_not_where_its_object_is(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda x, held, cls: x * held.k * (1.0 if cls is None else cls().k))
    fresh = Fresh()
    for cls, k, plans in ((None, 2.0, 1), (None, 3.0, 1), (Fresh, 3.0, 2), (Fresh, 4.0, 3), (None, 5.0, 3)):
        monkeypatch.setitem(globals(), "K", k)
        for _ in range(12):
            np.testing.assert_array_equal(fused(X, fresh, cls), X * fresh.k * (1.0 if cls is None else k))
        assert len(fused.plans) == plans


def test_a_generic_alias_calls_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = cf.fuse(lambda x: x * ALIAS(2.0).k)
    for k in (2.0, 3.0):
        monkeypatch.setitem(globals(), "K", k)
        np.testing.assert_array_equal(fused(X), X * 2 * k)


def test_classes_whose_methods_are_generated_are_read() -> None:
    """As attrs does, whose `evolve` calls the class of an object."""
    module = types.ModuleType("with_generated_methods")
    sys.modules[module.__name__] = module
    exec("def evolve(held): return (lambda cls: cls(1.0))(held.__class__)\nclass Leaf: own = 1.0", module.__dict__)
    scope = {"scale": 2.0}
    exec("def __init__(self, k): self.k = k * scale", scope)
    leaf_class: Any = module.Leaf
    leaf_class.__init__ = scope["__init__"]
    leaf = leaf_class(1.0)
    library = types.FunctionType(copy_of(leaf).__code__.replace(co_filename=np.__file__), {"__name__": "numpy"})
    fused = cf.fuse(lambda x: x * library(leaf).k)
    for scale in (2.0, 3.0):
        scope["scale"] = scale
        assert fused(X)[0, 0] == scale
    del sys.modules[module.__name__]


def copy_of(leaf: Any) -> Any:
    def evolve(held: Any) -> Any:
        return held.__class__(1.0)

    return evolve


def test_subclasses_that_code_makes_are_registered_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        k = 1.0

        def __init_subclass__(cls, **options: Any) -> None:
            cls.k = K

        def __class_getitem__(cls, item: Any) -> float:
            return K

    base = Base()

    def subclassed(x: Any) -> Any:
        class Sub(Base):
            pass

        return x * Sub.k * base.k

    for function in (subclassed, lambda x: x * Base[0], lambda x: x * base.__class_getitem__(0)):
        fused = cf.fuse(function)
        for k in (2.0, 3.0):
            monkeypatch.setitem(globals(), "K", k)
            np.testing.assert_array_equal(fused(X), function(X))
