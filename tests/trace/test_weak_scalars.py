"""Python numbers beside arrays whose dtypes cannot hold them: NumPy's value, or an error of NumPy's kind."""

from __future__ import annotations

import enum
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse.settings import force_plans


def assigned(a: Any, index: Any, value: Any) -> Any:
    b = a.copy()
    b[index] = value
    return b


def added_in_place(a: Any, value: Any) -> Any:
    b = a.copy()
    b += value
    return b


def filled(a: Any, value: Any) -> Any:
    b = a.copy()
    b.fill(value)
    return b


def copied_to(a: Any, value: Any) -> Any:
    b = a.copy()
    np.copyto(b, value)
    return b


def put_by_mask(a: Any, mask: Any, value: Any) -> Any:
    b = a.copy()
    np.putmask(b, mask, value)
    return b


# What takes an array, a mask and a number.
FUNCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "where": lambda a, c, v: np.where(c, a, v),
    "where of the number": lambda a, c, v: np.where(c, v, a),
    "where of numbers": lambda a, c, v: np.where(c, v, 1),
    "select": lambda a, c, v: np.select([c, a > 1], [a, a + a], v),
    "select of numbers": lambda a, c, v: np.select([c, a > 1], [v, a], 1),
    "clip to at most": lambda a, c, v: np.clip(a, 0, v),
    "clip to at least": lambda a, c, v: np.clip(a, v, None),
    "clip between": lambda a, c, v: a.clip(v, v),
    "maximum": lambda a, c, v: np.maximum(a, v),
    "minimum": lambda a, c, v: np.minimum(v, a),
    "add": lambda a, c, v: a + v,
    "subtract": lambda a, c, v: v - a,
    "multiply": lambda a, c, v: (a + 1) * v,
    "floor_divide": lambda a, c, v: a // v,
    "power": lambda a, c, v: np.power(a, 2) + v,
    "and": lambda a, c, v: a & v,
    "less": lambda a, c, v: a < v,
    "equal": lambda a, c, v: v == a,
    "full_like": lambda a, c, v: a + np.full_like(a, v),
    "full": lambda a, c, v: a + np.full(a.shape, v, a.dtype),
    "assign to one": lambda a, c, v: assigned(a, 0, v),
    "assign to all": lambda a, c, v: assigned(a, slice(None), v),
    "assign to masked": lambda a, c, v: assigned(a, c, v),
    "add in place": lambda a, c, v: added_in_place(a, v),
    "fill": lambda a, c, v: filled(a, v),
    "copyto": lambda a, c, v: copied_to(a, v),
    "putmask": lambda a, c, v: put_by_mask(a, c, v),
    "pad": lambda a, c, v: np.pad(a, 1, constant_values=v),
    "sum from": lambda a, c, v: a.sum(initial=v),
    "max from": lambda a, c, v: a.max(initial=v),
    "append": lambda a, c, v: np.append(a, v),
    "isin": lambda a, c, v: np.isin(a, [v]),
    "isclose": lambda a, c, v: np.isclose(a, v),
    "allclose": lambda a, c, v: np.allclose(a, v),
}
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "float16", "float32")
NUMBERS = (7, -3, 300, -200, 2**40, -(2**40), 2**70, 1e39, 70000.0)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64"])
@pytest.mark.parametrize("number", [2**63, -(2**64), 10**309, -(10**400)])
def test_comparisons_with_any_integer(dtype: str, number: int) -> None:
    a = np.array([0, 1, 127], dtype)
    with force_plans():
        for compare in (np.less, np.greater_equal, np.equal, np.not_equal):
            found = cf.fuse(lambda a, f=compare: f(a, number))(a)
            np.testing.assert_array_equal(found, compare(a, number))


def outcome(function: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """The dtype and the values that a function returns, or the error that it raises."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            found = np.asarray(function(*arguments))
        except (OverflowError, TypeError, ValueError) as error:
            public = (kind for kind in type(error).__mro__ if not kind.__module__.startswith("numpy."))
            return next(public), ""  # NumPy's own classes of TypeError are private
    if found.dtype == object:
        return TypeError, ""  # no array that a fused function can make
    return found.dtype, str(found.tolist())


@pytest.mark.rotates
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_that_a_dtype_cannot_hold(name: str) -> None:
    differ = []
    for dtype, number in itertools.product(DTYPES, NUMBERS):
        a, mask = np.array([0, 1, 1, 0, 1]).astype(dtype), np.array([True, False, True, False, False])
        function = FUNCTIONS[name]
        expected = outcome(lambda a, c, f=function, v=number: f(a, c, v), a, mask)
        with force_plans():
            found = outcome(cf.fuse(lambda a, c, f=function, v=number: f(a, c, v)), a, mask)
        refused = found[0] is cf.TraceError and not isinstance(expected[0], np.dtype)
        if found != expected and not refused:
            differ.append(f"{dtype}, {number}: {found}, not {expected}")
    assert not differ, "\n".join(differ)


class Factor(enum.IntEnum):
    TWO, THREE = 2, 3


class Slope(float, enum.Enum):
    HALF = 0.5


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "bool"])
@pytest.mark.parametrize("value", [Factor.TWO, Factor.THREE, Slope.HALF])
def test_members_of_enums_are_no_weak_numbers(dtype: str, value: Any) -> None:
    """As for NumPy, which takes Python's own classes alone for such."""
    a = np.arange(6).reshape(2, 3).astype(dtype)
    functions: list[Callable[[Any], Any]] = [
        lambda a: a * value,
        lambda a: value + a,
        lambda a: np.maximum(a, value),
        lambda a: np.where(a > value, a, value),
        lambda a: a**value,
        lambda a: np.clip(a, 0, value),
    ]
    with force_plans():
        for function in functions:
            found, expected = cf.fuse(function)(a), function(a)
            np.testing.assert_allclose(found, expected, rtol=1e-6, strict=True)
