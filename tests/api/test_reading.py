"""What a fused function reads anew in each call, and callables and objects of unusual kinds."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import pytest
from numpy.lib.mixins import NDArrayOperatorsMixin
from scipy import signal, spatial, special

import cupyfuse as cf
from cupyfuse.settings import force_plans

X = np.array([1.0, 2.0, 3.0])


def check(fused: Any, plain: Callable[..., Any], *args: Any) -> None:
    """Assert that a function gives what the plain one does, also once calls are recognised."""
    for _ in range(12):
        np.testing.assert_array_equal(fused(*args), plain(*args), strict=True)


def test_keywords_of_a_partial() -> None:
    scaled = functools.partial(lambda x, k: x * k, k=2.0)
    for fused in (cf.fuse(scaled), cf.fuse(lambda x: scaled(x)), cf.fuse(lambda x: (scaled,)[0](x))):
        scaled.keywords["k"] = 2.0
        check(fused, scaled, X)
        scaled.keywords["k"] = 9.0
        check(fused, scaled, X)


def test_default_values_of_callable_objects() -> None:
    class Model:
        def __call__(self, x: Any, scale: float = 3.0) -> Any:
            return x * scale

    @dataclasses.dataclass
    class Layer:
        w: Any

        def __call__(self, x: Any, scale: float = 3.0) -> Any:
            return x * self.w * scale

    cf.register(Model, lambda model: ([], None), lambda constants, children: Model())
    for model in (Model(), Layer(X), Layer(X).__call__):
        fused = cf.fuse(model)
        check(fused, model, X)
        function = getattr(model, "__func__", None) or type(model).__call__
        function.__defaults__ = (7.0,)
        check(fused, model, X)
        check(fused, model, X, 5.0)
        function.__defaults__ = (3.0,)


def test_modules_without_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Namespace packages, and modules that are made by hand."""
    (tmp_path / "spread").mkdir()
    (tmp_path / "spread" / "conf.py").write_text("SCALE = 2.0\ndef scaled(x):\n    return x * SCALE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import spread.conf

    made = types.ModuleType("made")
    vars(made).update(SCALE=2.0, scaled=lambda x: x)
    functions = (
        lambda x: x * spread.conf.SCALE,
        lambda x: spread.conf.scaled(x),
        lambda x: made.scaled(x * vars_of(made)),
    )

    def vars_of(module: Any) -> Any:
        return module.SCALE

    fused = [cf.fuse(function) for function in functions]
    for scale in (2.0, 5.0):
        spread.conf.SCALE = made.SCALE = scale  # type: ignore[attr-defined]
        for one, function in zip(fused, functions, strict=True):
            check(one, function, X)
    spread.conf.scaled = lambda x: -x
    made.scaled = lambda x: x + 1  # type: ignore[attr-defined]
    for one, function in zip(fused, functions, strict=True):
        check(one, function, X)
    del sys.modules["spread.conf"], sys.modules["spread"]


def test_attributes_that_functions_get_later() -> None:
    def act(x: Any) -> Any:
        return x

    def plain(x: Any) -> Any:
        other: Any = act
        return other(x) * (other.scale if hasattr(other, "scale") else 1)

    fused = cf.fuse(plain)
    check(fused, plain, X)
    act.scale = 5.0  # type: ignore[attr-defined]
    check(fused, plain, X)
    act.scale = 6.0  # type: ignore[attr-defined]
    check(fused, plain, X)
    del act.scale  # type: ignore[attr-defined]
    check(fused, plain, X)


@runtime_checkable
class Scaled(Protocol):
    scale: float

    def _shifted(self, x: Any) -> Any: ...


def test_members_of_protocols() -> None:
    @dataclasses.dataclass
    class Layer:
        w: Any

        def _shifted(self, x: Any) -> Any:
            return x

    def plain(layer: Any) -> Any:
        return layer.w * 2 if isinstance(layer, Scaled) else layer.w

    fused = cf.fuse(plain)
    check(fused, plain, Layer(X))
    Layer.scale = 1.0  # type: ignore[attr-defined]
    check(fused, plain, Layer(X))
    del Layer._shifted
    check(fused, plain, Layer(X))


class Swapped(NamedTuple):
    a: Any
    b: Any

    def __iter__(self) -> Any:
        return iter((self[1], self[0]))


class Repeated(NamedTuple):
    a: Any
    count: int

    def __iter__(self) -> Any:
        return iter([self[0]] * self[1])


def test_namedtuples_that_iterate_otherwise() -> None:
    def plain(x: Any, pair: Any) -> Any:
        return x + pair.a - 2 * pair[1]

    fused = cf.fuse(plain)
    check(fused, plain, X, Swapped(1.0, 5.0))
    check(fused, plain, X, Swapped(X, X + 2))
    check(fused, plain, X, Repeated(1.5, 2))
    check(fused, plain, X, Repeated(1.5, 3))


def test_keys_of_dicts_may_be_numbers_of_numpy() -> None:
    def plain(x: Any, weights: Any) -> Any:
        return x * len(weights) + weights[np.int64(1)]

    check(cf.fuse(plain), plain, X, {np.int64(0): 2.0, np.int64(1): 3.0})
    check(cf.fuse(plain), plain, X, {0: 2.0, 1: X})


class WithSlot:
    __slots__ = ("w",)


@dataclasses.dataclass
class Redeclared(WithSlot):
    __slots__ = ("k", "w")
    w: Any
    k: float


def test_a_slot_that_a_subclass_declares_again() -> None:
    def plain(x: Any, layer: Any) -> Any:
        return x * layer.w + layer.k

    check(cf.fuse(plain), plain, X, Redeclared(X, 2.0))


@pytest.mark.parametrize(
    "plain",
    [
        lambda x: np.zeros(3),
        lambda x: (np.arange(4), "text"),
        lambda x: sum((x[i] for i in range(len(x) - 3)), np.zeros(3)),
    ],
)
def test_functions_may_return_what_no_argument_changes(plain: Any) -> None:
    fused = cf.fuse(plain)
    for _ in range(3):
        got, wanted = fused(X), plain(X)
        assert type(got) is type(wanted)
        for a, b in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(a, b, strict=not isinstance(b, str))
        if isinstance(got, np.ndarray):
            got[:] = 7  # the caller's own
    with pytest.raises(cf.TraceError, match="returns nothing"):
        cf.fuse(lambda x: None)(X)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (special.softmax, (X,)),
        (special.logsumexp, (X,)),
        (signal.hilbert, (X,)),
        (np.linalg.pinv, (np.eye(3) + 0.1,)),
        (spatial.distance.euclidean, (X, X + 1)),
    ],
)
def test_functions_of_libraries_fuse_directly(function: Any, args: Any) -> None:
    np.testing.assert_allclose(cf.fuse(function)(*args), function(*args), rtol=1e-12)


class Own:
    """Takes part in no operation of NumPy's, but has its own."""

    __array_ufunc__ = None

    def __radd__(self, other: Any) -> Any:
        return other * 3

    def __lt__(self, other: Any) -> Any:
        return other > 2


def test_operands_that_opt_out_of_numpy() -> None:
    own = Own()
    fused = cf.fuse(lambda x: (x + own, x > own), static=("own",))
    total, greater = fused(X)
    np.testing.assert_array_equal(total, X + own)
    np.testing.assert_array_equal(greater, own < X)


class Wrapped(NDArrayOperatorsMixin):
    """Takes part in NumPy's operations by its protocol."""

    def __init__(self, value: Any):
        self.value = value

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        plain = (i.value if isinstance(i, Wrapped) else i for i in inputs)
        return Wrapped(getattr(ufunc, method)(*plain, **options))


class Before:
    """Comes before arrays by its priority."""

    __array_priority__ = 10.0

    def __rsub__(self, other: Any) -> Any:
        return other * 5

    def __matmul__(self, other: Any) -> Any:
        return other * 7


@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((x - Wrapped(x * 2)).value, (Wrapped(x) - x * 3).value, (2 ** Wrapped(x)).value),
        lambda x: (np.add(x, Wrapped(x)).value, (x < Wrapped(x * x)).value, np.exp(Wrapped(x)).value),
        lambda x: (x - Before(), Before() @ x),
    ],
)
def test_operands_that_take_over(function: Any) -> None:
    with force_plans():
        found = cf.fuse(function)(X)
    for actual, expected in zip(found, function(X), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-15)
