"""Numbers that NumPy returns as Python's, such as `x[mask].size`: weak in promotion, and Python's in arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from masks import arguments, check, on_engines, program
from support import Engine

import cupyfuse as cf
from cupyfuse.settings import force_plans

NUMBERS = (
    "a[both].sum() / max(a[both].size, 1) | (a[both] ** 2).sum() / (a[both].size - 1) | "
    "a.sum() * a[both].size ** 0.5 | a[both].sum() / max(a[both].shape[0], 1) | a[both].size / a.size | "
    "a * a[both].size | a - a[both].size / 2 | a[both].size - a | a // a[both].size | np.add(a, a[both].size) | "
    "np.hypot(a, a[both].size) | np.arctan2(a[both].size, a) | np.maximum(a, a[both].size) | "
    "np.where(a > 1, a, a[both].size) | np.clip(a, 0, a[both].size) | "
    "np.clip(a, a[rows].size * -300, a[rows].size * 300) | np.ldexp(a, a[both].size) | np.fmax(a, a[both].size) | "
    "np.heaviside(a, a[both].size) | np.logaddexp(a, a[both].size) | a > a[both].size | a == a[both].size | "
    "-a[both].size, abs(a[both].size - 99), +a[both].size, ~a[both].size, a[both].size ** 2 | "
    "round(a[both].size / 3), round(a[both].size / 3, 1), a[both].size // 2, 2 ** u[rows].size, a[both].size ** -1 | "
    "divmod(a[both].size, 3) | a[both].size > 3, (a[both].size > 3) & (a[both].size < 5), (a[both].size > 3) + 1 | "
    "(a[both].size > 3) + (u[rows].size > 1), -(a[both].size > 3), a[both].size ** 0.5 / 2, a[both].size != 3 | "
    "a * (a[both].size > 3) | a * (a[both].size * 1j) | min(a[both].size, 3), max(9.5, a[both].size) | "
    "np.sqrt(a[both].size), np.add(a[both].size, 1), np.float32(2) * a[both].size | a / (a[both].size * 300) | "
    "a.max() * np.float64(2) * a[both].size | np.array([a[both].size, 2]) | np.allclose(a, a) * a | "
    "round(a[0, 0]) * a | np.dot(u, a[both].size) | "
    "x[both].shape, x[rows].size | "
    "a.max().item(), a.max().item() * 2 * a, a[0, 0].item() > 1, -a.min().item(), a.sum().item() / 3, a.item(1) | "
    "a.item(0, 1), a.item((1, 0)), a.item(-1), (a > 1).item(0), a[:1, :1].item() * a, a.argmax().item() // 2 | "
    "isinstance(a.argmax().item(), int), isinstance(a[both].size / 2, float), isinstance((a > 1).item(0), bool) | "
    "a / (abs(a.max().item()) + 1), 1 / (a.argmax().item() + 1), a.argmax().item() % 3, 2 ** a[both].size | "
    "float(a.max()), float(a.sum()) / 3, -float(a.argmax()), float((a > 1).any()) | a * float(a[0, 0]) | "
    "a / (abs(float(a.max())) + 1) | float(a.max().item()) * a | abs(float(a[0, 1])) ** 0.5 * a | "
    "int(a.max()), int(a[0, 1]) * a, bool((a > 1).any()), bool(a[0, 0]) * a, complex(a.max()) | "
    "int(a[both].size) * a, int('12', base=3), int(), int(a.max().item()) // 2 | "
    "math.floor(a.max()) * a, math.ceil(a.max() / 3), math.floor(a[both].size / 2) | "
    "(a * 1j).sum().item().imag * a, (a.sum() * 2j).item().real, (a.max() + 2j).item().conjugate() * a | "
    "float(a[both].size) * a, float(3), float('inf'), float(), float(np.float32(2.5)) | "
    "math.trunc(a.max().item()) * a, math.trunc(a.sum() / np.float64(3)) | "
    "max(a.max(), a.min(), key=abs), min(range(3), key=lambda i: a[i % 2, 0]) | "
    "max(range(2), key=lambda i: a[i].sum()) * a, max(['a', 'bc'], key=len) == 'bc' | "
    "max(a.max(), np.array(1, a.dtype)) * a | "
    "min([1.5, 0.5], key=lambda v: v * a[0, 1]) * a, max([a.max(), a.min()], default=0) | "
    "(a.sum() / 2).is_integer(), a.max().is_integer() | "
    "(a.max().item() / 3).is_integer(), float(a[0, 0]).is_integer() * a, (a.max() / 0).is_integer() | "
    "divmod(a.sum(), 3) | "
    "divmod(99, a.max() + 1), divmod(a.max().item(), 4) | round(a.sum() / 7, 1), round(float(a.sum()) / 7, 1) * a | "
    "any(u > 1), all(u > 1), any(v > 5 for v in u), all(v < 9 for v in a[0]), any([]), all(w > -9) * a | "
    "any(u[rows] > 1), all([1, *u]), any([2, *u]), all([0, *u]), any([0, *u]), any(np.ones(2) > 3) | "
    "math.gcd(a[both].size, 6) * a, math.isqrt(a[both].size), math.comb(a[both].size, 2), math.ldexp(a.max(), 2) | "
    "math.isclose(a.max(), 6, rel_tol=1e-3), math.isclose(a.max(), a.max().item()) | "
    "n = a[both].size; n += 1; n **= 2; n, a * n | (a[both] / a[both].size).sum()"
)


@pytest.mark.kernels_rotate
@on_engines("float32 int8", "float16 float32 float64 int8 uint8 int64")
@pytest.mark.parametrize("text", NUMBERS.split(" | "))
def test_numbers_of_elements_are_weak(text: str, dtype: str, engine: Engine) -> None:
    """As Python's: float32 stays float32, arithmetic among them gives Python's numbers, ufuncs of them NumPy's."""
    if "round(a[0" in text and dtype == "uint8":
        text = text.replace("a[0, 0]", "a[0, 1]")
    check(text, engine, dtype)


def test_a_default_is_for_one_iterable() -> None:
    with force_plans(), pytest.raises(TypeError, match="default"):
        cf.fuse(lambda x: max(x.sum(), x.max(), default=1))(np.ones(3))


@pytest.mark.parametrize("text", ["a * (a[both].size * 300)", "np.maximum(a, a[both].size * 300)", "a + -a[both].size"])
def test_numbers_that_do_not_fit_beside_narrow_integers(text: str) -> None:
    """NumPy's error, in the call: the number is not known before."""
    function, given = program(text), arguments("uint8")
    for f in (function, cf.fuse(function)):
        with force_plans(), pytest.raises(OverflowError, match=r"Python integer -?\d+ out of bounds for uint8"):
            f(*given)
    small = program(text.replace("300", "1").replace("-", ""))
    with force_plans():
        np.testing.assert_array_equal(cf.fuse(small)(*given), small(*given))


def test_a_float_argument_beside_a_number_of_elements_is_a_parameter() -> None:
    scaled = cf.fuse(lambda x, m, k: (x[m].sum() * k / (x[m].size * k), x[m].size * k))
    x = np.arange(6, dtype=np.float32)
    with force_plans():
        for k in (2.0, 3.0):
            mean, total = scaled(x, x > 2, k)
            assert (mean, type(mean), total, type(total)) == (4, np.float32, 3 * k, float)
        assert len(scaled._runnables) == 1


SCALE: Any = 2.0


def total(x: Any, n: int = 0) -> Any:
    return float(x.sum()) * SCALE if n == 0 else as_floats(x, n - 1)


def as_floats(x: Any, n: int = 0) -> Any:
    """Uses `float` as a type, and so for what it is."""
    kind = {int: 1.0, float: SCALE}[float] + isinstance(SCALE, float)
    return x.astype(float) * kind * SCALE if n == 0 else total(x, n - 1)


@pytest.mark.parametrize("n", range(3))
def test_float_is_a_type_in_functions_that_use_it_as_one(engine: Engine, n: int, monkeypatch: Any) -> None:
    """Functions of one module, whose globals are the same, among them a number that changes."""
    function = lambda x: (total(x, n) * x, as_floats(x, n) + SCALE, total(x * 2, n))  # noqa: E731
    fused, x = cf.fuse(function), np.arange(6, dtype=np.float32)
    for scale in (2.0, 3.0, 4.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        for ours, theirs in zip(fused(engine.array(x)), function(x), strict=True):
            np.testing.assert_allclose(engine.host(ours), theirs, rtol=1e-6)
            assert np.asarray(engine.host(ours)).dtype == np.asarray(theirs).dtype


def both_ways(x: Any) -> Any:
    """Calls the types of numbers, and uses them as types, in the function itself and in functions in it."""
    lowest = lambda v, kinds=(int, bool): int(v.min()) if isinstance(v, np.ndarray) and int in kinds else v  # noqa: E731
    whole = x.astype(int) * int(x.max()) + lowest(x) * np.zeros(len(x), dtype=float)
    kinds = [int in (int, float), isinstance(int(x.sum()), int), {float: 1}[float], isinstance(x.sum().item(), float)]
    return whole, np.ones(3, bool) & bool(x.any()), [float(v) for v in x], kinds, complex(x.max()) * x.astype(complex)


def test_types_of_numbers_that_are_called_and_used_as_types(engine: Engine) -> None:
    fused = cf.fuse(both_ways)
    for x in (np.array([1.5, 2.25, -3]), np.array([4.5, 5, 6])):
        for ours, theirs in zip(fused(engine.array(x)), both_ways(x), strict=True):
            ours = [engine.host(v) for v in ours] if isinstance(ours, list) else engine.host(ours)
            np.testing.assert_array_equal(ours, theirs)
            assert np.asarray(ours).dtype == np.asarray(theirs).dtype


def test_types_are_those_of_the_plain_function() -> None:
    def types(x: Any, k: Any) -> Any:
        made, some = np.zeros(3), x[x > 1]
        values = [x, x + 1, x[0], x.sum(), x.sum().item(), float(x.sum()), k, 2 * k, made, some, np.add, np.array([k])]
        isinstances = [isinstance(v, np.ndarray) for v in values]
        kinds = [type(x) is np.ndarray, type(k) is float, {float: 1}[type(k)], type(np.add) is np.ufunc]
        return [type(v).__name__ for v in values], isinstances, kinds, type(k)(2), type("Other", (), {"a": 1}).a

    fused, x = cf.fuse(types), np.arange(4, dtype=np.float32)
    with force_plans():
        for k in (0.5, 1.5, 2.5):
            assert fused(x, k) == types(x, k)


@pytest.mark.parametrize("names", [10, 120, 200, 300])
def test_types_are_called_in_code_of_many_names(names: int) -> None:
    """A new name's number has no room in instructions of 128 names and more, but behind an EXTENDED_ARG."""
    space = {f"v{k}": 1.0 for k in range(names)} | {"np": np}
    read, x = " + ".join(f"v{k}" for k in range(names)), np.arange(3, dtype=np.float32)
    for text in (f"float(x.sum()) + {read}", f"{read} + float(x.sum()), x.astype(float)"):
        function = eval(f"lambda x: ({text}, 0)[0]", space)
        with force_plans():
            assert cf.fuse(function)(x) == function(x)
    early = eval(f"lambda x: (float(x.sum()) + {read}, x.astype(float))[0]", space)
    if names > 120:
        with pytest.raises(cf.TraceError, match=r"\.item\(\)"):
            cf.fuse(early)(x)


def test_float_of_a_scalar_is_a_float() -> None:
    fused = cf.fuse(lambda x: (float(x.sum()), x / float(x.max())))
    with force_plans():
        for x in (np.arange(1, 4, dtype=np.float32), np.arange(1, 4, dtype=np.int16)):
            found, scaled = fused(x)
            assert type(found) is float and found == 6.0 and scaled.dtype == (x / 3.0).dtype
            np.testing.assert_array_equal(scaled, x / 3.0)
        with pytest.raises(cf.TraceError, match="conversion of a traced array"):
            fused(np.ones(3, np.complex64))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint64", "bool"])
def test_int_and_bool_of_a_scalar_are_pythons(dtype: str) -> None:
    function = lambda x: (int(x.sum()), bool(x.sum()), int(x.mean()) // 2, round(x.mean()), x * int(x.max()))  # noqa: E731
    fused = cf.fuse(function)
    for x in (np.arange(5).astype(dtype), np.array([0, 3]).astype(dtype)):
        with force_plans():
            found, expected = fused(x), function(x)
        assert found[:4] == expected[:4] and list(map(type, found)) == list(map(type, expected))
        np.testing.assert_array_equal(found[4], expected[4])
        assert found[4].dtype == expected[4].dtype


def test_integers_that_need_more_than_64_bits_are_an_error() -> None:
    with force_plans(), pytest.raises(OverflowError):
        cf.fuse(lambda x: int(x.sum()))(np.array([1e300]))


def test_a_global_of_the_name_is_called(monkeypatch: Any) -> None:
    fused, x = cf.fuse(lambda x: float(x.sum()) * x), np.arange(3.0)
    with force_plans():
        np.testing.assert_array_equal(fused(x), 3.0 * x)
        monkeypatch.setitem(globals(), "float", lambda v: v + 1)
        np.testing.assert_array_equal(fused(x), 4.0 * x)


RAISING: list[tuple[Callable[[Any], Any], type[Exception]]] = [
    (lambda x: 1 / x[x > 9].size, ZeroDivisionError),
    (lambda x: 7 // x[x > 9].size, ZeroDivisionError),
    (lambda x: 7 % x.item(0), ZeroDivisionError),
    (lambda x: divmod(7, x[x > 9].size), ZeroDivisionError),
    (lambda x: x[x > 9].size ** -1, ZeroDivisionError),
    (lambda x: x.item(0) ** -0.5, ZeroDivisionError),
    (lambda x: 2.0 ** (x[x < 9].size * 1000), OverflowError),
    (lambda x: (x.max().item() * 1e200) ** 2, OverflowError),
    (lambda x: int(x.sum() * np.nan), ValueError),
    (lambda x: x * int(x.sum() * np.inf), OverflowError),
    (lambda x: round(x.sum() * np.nan), ValueError),
    (lambda x: math.floor(x.sum() * np.inf), OverflowError),
    (lambda x: math.trunc(x.sum().item() * np.inf), OverflowError),
    (lambda x: math.isqrt(x.argmin() - 1), ValueError),
]


@pytest.mark.parametrize("number", range(len(RAISING)))
def test_arithmetic_of_numbers_raises_as_pythons(number: int) -> None:
    """They were infinities and zeros, as NumPy's numbers give."""
    function, error = RAISING[number]
    x = np.arange(4, dtype=np.float32)
    with pytest.raises(error) as expected:
        function(x)
    with force_plans(), pytest.raises(error) as found:
        cf.fuse(function)(x)
    assert str(found.value) == str(expected.value)


# Functions of `math` of an array's numbers, and of a float argument.
OF_MATH: list[Callable[[Any, float], Any]] = [
    lambda x, k: (x * math.sqrt(x.max()), math.exp(-x.max().item()), math.log(x.max(), 2), math.log(k, x.max())),
    lambda x, k: (math.hypot(x.max(), x.min()), math.copysign(k, x.min()), x * math.log1p(x.var()) / math.sqrt(4)),
    lambda x, k: (math.isnan(x.sum()), math.isfinite(x.max()), [math.tanh(v) for v in x[0]], math.sqrt(x[x > 0].size)),
    lambda x, k: math.sqrt(x.min()),
    lambda x, k: math.log(x.sum() * 0),
    lambda x, k: math.exp(x.max() * 1e4),
    lambda x, k: math.pow(x.min(), k),
    lambda x, k: math.sqrt(x),
]


@pytest.mark.parametrize("number", range(len(OF_MATH)))
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_functions_of_math_are_pythons(number: int, dtype: str) -> None:
    """Floats that are weak in promotion, and Python's errors."""
    function = OF_MATH[number]
    fused = cf.fuse(function)
    for x, k in ((np.arange(-2, 10).reshape(3, 4), 1.5), (np.arange(2, 14).reshape(3, 4), 2.5)):
        x = x.astype(dtype)
        try:
            expected = function(x, k)
        except (ValueError, OverflowError, TypeError) as error:
            with force_plans(), pytest.raises(type(error)):
                fused(x, k)
            continue
        with force_plans():
            found = fused(x, k)
        for a, b in zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]:
            assert type(a) is type(b) and getattr(a, "dtype", None) == getattr(b, "dtype", None)
            np.testing.assert_allclose(a, b, rtol=1e-5)


def test_truncation_of_numpys_numbers_is_an_error() -> None:
    with force_plans(), pytest.raises(TypeError, match=r"type numpy\.float32 doesn't define __trunc__ method\n  at "):
        cf.fuse(lambda x: math.trunc(x.sum()))(np.ones(3, np.float32))


def test_printed_scalars_may_have_a_format(capsys: Any) -> None:
    """As without one, what is printed tells no value; a format that the type does not have is an error."""

    def logged(x: Any) -> Any:
        print(f"mean {x.mean():.2f}, {x.sum().item():8.3e} of {x.argmax():d} in {x} and {x.sum()}")
        return x.mean()

    x = np.arange(4, dtype=np.float32)
    with force_plans():
        assert cf.fuse(logged)(x) == 1.5
        assert "mean <traced array, shape (), float32>, <traced" in capsys.readouterr().out
        with pytest.raises(ValueError, match="format code 'd'"):
            cf.fuse(lambda x: (f"{x.mean():d}", x)[1])(x)
        with pytest.raises(TypeError, match=r"unsupported format string passed to numpy\.ndarray\.__format__\n  at "):
            cf.fuse(lambda x: (f"{x:.2f}", x)[1])(x)
        with pytest.raises(cf.TraceError, match="text"):
            cf.fuse(lambda x: f"{x.mean():.2f}")(x)


def test_powers_of_numbers_that_become_complex_are_an_error() -> None:
    with force_plans(), pytest.raises(TypeError, match="gives a complex for these values, where a plan has float64"):
        cf.fuse(lambda x: (x.min().item() - 1) ** 0.5)(np.arange(4.0))


def test_item_of_several_elements() -> None:
    x = np.ones((2, 3))
    for function in (lambda x: x.item(), lambda x: x.item(1, 1, 1), lambda x: x.item(6), lambda x: x.item(0, 3)):
        with pytest.raises((ValueError, IndexError)) as expected:
            function(x)
        with pytest.raises(type(expected.value)):
            cf.fuse(function)(x)


def test_lists_are_not_repeated_by_a_number_of_elements() -> None:
    """They became arrays, times the number."""
    for repeated in (lambda x: [1] * x[x > 0].size, lambda x: x[x > 0].size * (1, 2)):
        with pytest.raises(cf.TraceError, match="a conversion of a traced array"):
            cf.fuse(repeated)(np.ones(3))
