"""What functions ask of arrays and numbers: attributes, protocols, and how arrays lie in memory, as NumPy answers."""

from __future__ import annotations

import collections.abc
import numbers
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np
import pytest
from support import lay_out

import cupyfuse as cf
from cupyfuse.settings import force_plans

X = np.arange(12.0).reshape(3, 4)
# `mT` raises an error for vectors.
_NAMES = sorted({*dir(np.ndarray), *dir(np.float64), *dir(float), "device", "fnord", "__name__", "itemset"} - {"mT"})
_PROTOCOLS = (
    collections.abc.Hashable,
    collections.abc.Iterable,
    collections.abc.Sized,
    collections.abc.Sequence,
    numbers.Number,
    np.generic,
)


@runtime_checkable
class Shaped(Protocol):
    shape: tuple[int, ...]


class _OfRank(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return getattr(value, "ndim", None) == 2


class Matrix(metaclass=_OfRank): ...


class _OfSign(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return bool(value > 0)


class Positive(metaclass=_OfSign): ...


def _has(x: Any) -> list[str]:
    return [name for name in _NAMES if hasattr(x, name)]


def _is(x: Any) -> list[bool]:
    return [
        *(isinstance(x, cls) for cls in _PROTOCOLS),
        isinstance(x, (Shaped, Matrix)),
        isinstance(x, Matrix),
        isinstance(x, (list, np.ndarray)),
    ]


PROBES: list[Callable[[Any], Any]] = [
    lambda x: (x * 2, _has(x), _is(x)),
    lambda x: (x * 2, _has(x * 2), _is(x * 2)),
    lambda x: (x * 2, _has(x.sum()), _is(x.sum())),
    lambda x: (x * 2, _has(x.argmax()), _is(x.argmax())),
    lambda x: (x * 2, _has(x.sum().item()), _is(x.sum().item())),
    lambda x: (x * 2, _has(x[x > 2]), _is(x[x > 2])),
    lambda x: (x * 2, getattr(x, "fnord", 3), getattr(x, "shape", None), getattr(x.sum(), "itemset", 4)),
    lambda x: x * 2 if hasattr(x.sum(), "__len__") else x * 3,
]


@pytest.mark.parametrize("probe", PROBES)
def test_probes_have_the_answers_of_numpy(probe: Callable[[Any], Any]) -> None:
    with force_plans():
        found, expected = cf.fuse(probe)(X), probe(X)
    assert found[1:] == expected[1:] if isinstance(expected, tuple) else np.array_equal(found, expected)


def test_numbers_of_the_call_have_the_attributes_of_their_types() -> None:
    function = lambda x, k: (x * k, _has(k), _is(k))  # noqa: E731
    fused = cf.fuse(function)
    with force_plans():
        for k in (1.5, 2.5, 3.5, np.float32(2), np.float32(3), np.float32(4)):
            assert fused(X, k)[1:] == function(X, k)[1:]


def test_attributes_that_are_refused_have_no_defaults() -> None:
    for function in (lambda x: getattr(x, "base", None) is None, lambda x: getattr(x * 2, "strides", None) is None):
        with force_plans(), pytest.raises(cf.TraceError, match=r"in memory is not known(.|\n)*test_probing"):
            cf.fuse(lambda x, f=function: x if f(x) else x + 1)(X)


def test_names_of_attributes_are_strings() -> None:
    with force_plans(), pytest.raises(TypeError, match="attribute name must be string"):
        cf.fuse(lambda x: x if hasattr(x, 3) else x + 1)(X)  # type: ignore[arg-type]


def test_classes_that_decide_by_values() -> None:
    for function in (lambda x: isinstance(x.sum(), Positive), lambda x: isinstance(x.sum().item(), Positive)):
        with force_plans(), pytest.raises(cf.TraceError, match="branch on an array's values"):
            cf.fuse(lambda x, f=function: x if f(x) else -x)(X)  # type: ignore[misc]


LAYOUTS = ["contiguous", "fortran", "column_gap", "reversed"]
_FLAGS = ("c_contiguous", "f_contiguous", "contiguous", "fortran", "fnc", "forc")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[::2],
        lambda x: x[:, 1:],
        lambda x: x[:1],
        lambda x: x[0],
        lambda x: x[:, None, ::-1],
        lambda x: x.copy(),
        lambda x: np.array(x, order="F"),
        lambda x: np.array(x, order="C"),
        lambda x: np.asarray([x[0], x[1]], order="F"),
        lambda x: np.full(x.shape, x.sum(), order="F"),
        lambda x: np.full((2, 3), x[0, 0]),
        lambda x: np.full_like(x, x.sum(), order="F"),
        lambda x: np.zeros_like(x, order="F"),
        lambda x: np.broadcast_to(x[0], x.shape),
        lambda x: np.broadcast_to(x.sum(), 3),
        lambda x: np.broadcast_to(x.sum(axis=1)[:1], 3),
        lambda x: np.broadcast_to(x.sum(axis=1), 3),
        lambda x: x.flat[::2],
        lambda x: x[0] * 2,
        lambda x: x[0, 0],
    ],
)
def test_flags_and_strides_of_arguments_and_their_views(layout: str, view: Callable[[Any], Any]) -> None:
    def told(x: Any) -> Any:
        y = view(x)
        flags = y.flags
        by_key = [flags[name.upper()] for name in _FLAGS], flags["C"], flags["F"]
        strides = y.strides if x.ndim == y.ndim and 1 not in y.shape else None
        return y + 1, [getattr(flags, name) for name in _FLAGS], by_key, strides

    x = lay_out(np, X, layout)
    with force_plans():
        assert cf.fuse(told)(x)[1:] == told(x)[1:]


@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (0, 4), (3, 0)])
def test_strides_of_arguments_along_axes_of_one_element(shape: tuple[int, int]) -> None:
    fused = cf.fuse(lambda x: (x + 1, x.strides))
    with force_plans():
        for x in (X[: shape[0], : shape[1]], np.ones(shape), np.ones(shape, order="F")):
            assert fused(x)[1] == x.strides


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["C", "F", "f", "c"])
@pytest.mark.parametrize("flat", [lambda y: y.ravel(), lambda y: y.ravel("F"), lambda y: y.reshape(-1)])
def test_changes_of_flat_views_of_copies_in_an_order(flat: Callable[[Any], Any], order: Any, layout: str) -> None:
    def function(x: Any) -> Any:
        copied, full = np.array(x, order=order), np.full_like(x, x.sum(), order=order)
        flat(copied)[1] = 100
        flat(full)[1] = 100
        return copied, full, x.ravel(order), x.flatten(order), x.reshape(4, 3, order=order)

    with force_plans():
        found = cf.fuse(function)(lay_out(np, X, layout))
        for one, other in zip(found, function(lay_out(np, X, layout)), strict=True):
            np.testing.assert_array_equal(one, other)


def test_arrays_like_others_and_traced_numbers_are_not_taken_for_contiguous() -> None:
    function = lambda x: np.ravel(np.full_like(x, x.sum()))  # noqa: E731

    def changed(x: Any) -> Any:
        made = np.full_like(x.T, x.sum())
        made.ravel()[1] = 100
        return made

    with force_plans():
        for x in (X, np.asfortranarray(X)):
            np.testing.assert_array_equal(cf.fuse(function)(x), function(x))
        np.testing.assert_array_equal(cf.fuse(changed)(np.asfortranarray(X)), changed(np.asfortranarray(X)))
        with pytest.raises(cf.TraceError, match="change in place of a reshaped one"):
            cf.fuse(changed)(X)  # in NumPy a copy, which is not known


def test_branches_on_flags() -> None:
    function = lambda x: x * 2 if x.flags["C_CONTIGUOUS"] else np.ascontiguousarray(x) + 1  # noqa: E731
    fused = cf.fuse(function)
    with force_plans():
        for x in (X, np.asfortranarray(X), X[:, ::2], X):
            np.testing.assert_array_equal(fused(x), function(x))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda x: x.flags.writeable, cf.TraceError, "the flag WRITEABLE of an array"),
        (lambda x: x.flags["O"], cf.TraceError, "the flag O of an array"),
        (lambda x: x[:1].strides, cf.TraceError, "how an array lies in memory"),
        (lambda x: x.reshape(3, 4, 1).strides, cf.TraceError, "how an array lies in memory"),
        (lambda x: x[:0].copy().strides, cf.TraceError, "how an array lies in memory"),
        (lambda x: (x * 2).flags.c_contiguous, cf.TraceError, "np.ascontiguousarray"),
        (lambda x: x.flags.fnord, AttributeError, "fnord"),
        (lambda x: x.flags["c"], KeyError, "Unknown flag"),
        (lambda x: setattr(x.flags, "writeable", False), cf.TraceError, "a change of an array's flags"),
        (lambda x: x.flags.__setitem__("WRITEABLE", False), cf.TraceError, "a change of an array's flags"),
    ],
)
def test_flags_that_are_not_known(function: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    with force_plans(), pytest.raises(error, match=message):
        cf.fuse(lambda x: x if function(x) else x + 1)(X)
