"""Random functions of arrays and of integers and floats, given or around them, that change from call to call."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
from program_module import ProgramModule
from support import assert_equal

import cupyfuse as cf

_INTEGERS = ["t", "t", "s", "1", "2", "-1", "7", "held.n", "more['m']"]
_OF_INTEGERS = [
    *("({0} + {1})", "({0} - {1})", "({0} * {1})", "({0} // 3)", "({0} % 5)", "({0}**2)", "(-{0})", "abs({0})"),
    *("min({0}, {1})", "max({0}, {1})", "({0} if {1} > 2 else {1})", "int({0})", "({0} & 3)", "(1 if {0} else 0)"),
    *("({0} if {0} % 2 == 0 else {1})", "len(range(abs({0}) % 5))", "(2 ** ({0} % 3 - 1) > 1) + {1}"),
]
_OF_FLOATS = [
    *("({0} + {1})", "({0} * {1})", "(0.9 ** ({2} % 50))", "(1 - {0})", "({0} / ({2} * 2 + 0.5))", "max({0}, {1})"),
    *("math.sqrt(abs({0}))", "({0} * {2})", "float({2})", "({0} if {1} < 1 else {1})", "abs({0}) ** 0.5", "({2} / 4)"),
]
_OF_ARRAYS = [
    *("({0} * {2})", "({0} + {2})", "({2} - {0})", "({0} / {2})", "np.maximum({0}, {2})", "({0} > {2})", "({0} + {1})"),
    *("np.where({0} > {2}, {0}, {2})", "np.where({0} > 0, {2}, {0})", "np.clip({0}, -2, {2})", "({0} * {1})"),
    *("np.sum({0}, axis={3} % 2, keepdims=True)", "({0} + {1}[{3} % 3])", "({0} + np.full(4, {3} % 9))"),
    *("({0} * np.sqrt(abs({2})))", "({0}.reshape({3} % 2 + 1, -1).sum() + {1})", "({0} ** ({3} % 3 + 1))"),
    *("({0} + np.arange({3} % 4 + 1).sum())", "({0} + np.float32({3} % 7))", "({0} // ({2} + 0.25))"),
    *("({0} + np.full(4, {2}))", "({0} * np.array([{2}, 1, {3}, 0.5]))", "({0} + np.linspace(0, {2}, 4))"),
    *("({0} * 0.5 ** (np.arange(4) * abs({2})))", "({0} - np.arange(4.0) * {2})", "({0} * np.int16({3} % 7))"),
    *("({0} * ({3} if type({3}) is int else 0))", "({0} + {{1: 2, 2: 3}}.get({3}, 0))"),
]
_RESULTS = ["number", "t + 1", "{'s': s, 'k': [k * 2]}", "a * number", "(t, number)", "a"]


class _Held:
    """An object with an integer."""

    def __init__(self, n: int):
        self.n = n


class NumberProgram(ProgramModule):
    """A random function of four arrays, two integers, a float, an object and a dict with an integer each.

    Parameters
    ----------
    seed : int
        Draws the function, and the arguments of each call.
    """

    def __init__(self, seed: int):
        self._draw, rng = random.Random(seed), np.random.default_rng(seed)
        self.text = self._source()
        super().__init__(
            f"number_program_{seed}", f"import math\nimport numpy as np\n{self.text}\ndef make(): return f"
        )
        kinds = [np.int64, np.int32, np.int16, int, float, np.float32, np.float64]
        self._numpys = [self._draw.choice(kinds) for _ in range(5)] if self._draw.random() < 0.3 else []
        dtype = self._draw.choice(["int32", "int64", "int8"])
        self._arrays = (
            rng.standard_normal((3, 4), np.float32),
            rng.standard_normal((3, 4)),
            rng.integers(-5, 9, (3, 4)).astype(dtype),
            rng.random((3, 4)) > 0.5,
        )

    def _source(self, parameters: str = "x, y, z, m, t, s, k, held, more") -> str:
        return (
            f"def f({parameters}):\n    a = {self._array(self._draw.randint(1, 3))}\n"
            f"    number = {self._number(2)}\n    return a, {self._draw.choice(_RESULTS)}"
        )

    def arguments(self, call: int) -> tuple[Any, ...]:
        """Draw the arguments of a call."""
        return *self._arrays, *self._numbers(call).values()

    def _numbers(self, call: int) -> dict[str, Any]:
        """Draw what holds the numbers of a call, by name."""
        choice = self._draw.choice
        t, s, k = choice([call, call + 1, -call, 3, 1000, 0]), choice([1, 2, 2, 5]), choice([0.5, 0.5, 1.5, -2.0, 0.0])
        n, m = choice([4, 4, call]), choice([1, 1, call])
        if self._numpys:  # numbers of NumPy's, each of one type
            t, s, k, n, m = (kind(value) for kind, value in zip(self._numpys, (t, s, k, n, m), strict=True))
        self.numbers = t, s, k, n, m  # of the last call
        return {"t": t, "s": s, "k": k, "held": _Held(n), "more": {"m": m}}

    def _integer(self, depth: int) -> str:
        if depth <= 0:
            return self._draw.choice(_INTEGERS)
        return self._draw.choice(_OF_INTEGERS).format(self._integer(depth - 1), self._integer(depth - 1))

    def _number(self, depth: int) -> str:
        if self._draw.random() < 0.6:
            return self._integer(depth)
        if depth <= 0:
            return self._draw.choice(["k", "0.5", f"{self._integer(1)} / 2"])
        parts = self._number(depth - 1), self._number(depth - 1), self._integer(depth - 1)
        return self._draw.choice(_OF_FLOATS).format(*parts)

    def _array(self, depth: int) -> str:
        if depth <= 0:
            return self._draw.choice(["x", "x", "y", "z", "m"])
        arrays = self._array(depth - 1), self._array(depth - 1)
        parts = self._number(self._draw.randint(0, 2)), self._integer(self._draw.randint(0, 2))
        return self._draw.choice(_OF_ARRAYS).format(*arrays, *parts)


class NumbersAround(NumberProgram):
    """A random function of four arrays, around which there are such numbers, and a helper function that reads some.

    They are globals, and variables of an enclosing function.
    """

    def _source(self, parameters: str = "x, y, z, m") -> str:
        self._is_plain = self._draw.random() < 0.5  # nothing mutable is around the function
        self._inner = [name for name in ("t", "s", "k", "held", "more") if self._draw.random() < 0.4]
        helper = f"def helper({parameters}):\n    return {self._array(1)}"
        function = super()._source(parameters).replace("    a =", f"    a = helper({parameters}) +")
        names = ", ".join(self._inner) or "unused"
        assign = f"unused = None\ndef assign(*values):\n    nonlocal {names}\n    {names}, = values"
        lines = [f"{name} = None" for name in self._inner] + "\n".join([helper, function, assign]).split("\n")
        text = "\n".join(["def enclosing():", *(f"    {line}" for line in lines), "    return f, assign"])
        text += "\nf, assign = enclosing()"
        return text.replace("held.n", "held").replace("more['m']", "more") if self._is_plain else text

    def arguments(self, call: int) -> tuple[Any, ...]:
        """Assign to the variables, and return the arrays."""
        values, module = self._numbers(call), self._module.__dict__
        if self._is_plain:
            values = dict(zip(values, self.numbers, strict=True))
        module["assign"](*([values.pop(name) for name in self._inner] or [None]))
        module.update(values)
        return self._arrays


def compare(program: NumberProgram, fused: Any, calls: int) -> str | None:
    """Compare a fused function with the plain one in some calls; return what differs, if anything does."""
    for call in range(calls):
        arguments = program.arguments(call)
        (expected, refusal), (found, error) = (_result_of(f, arguments) for f in (program.function, fused))
        if isinstance(error, cf.TraceError):
            return None
        if (error is None) is not (refusal is None) or (error is None and not _is_same(found, expected)):
            return f"call {call} of {program.numbers}: {found} {error!r}, not {expected} {refusal!r}\n{program.text}"
    return None


def assert_same(found: Any, expected: Any) -> None:
    """Results are of one type and agree to rounding, with the sign of zeros; NaN equals NaN."""
    assert type(found) is type(expected)
    if isinstance(expected, tuple):
        for a, b in zip(found, expected, strict=True):
            assert_same(a, b)
    elif isinstance(expected, (np.ndarray, np.generic)):
        np.testing.assert_allclose(found, expected, rtol=3e-6, strict=True)
        if expected.dtype.kind == "f":
            assert_equal(np.signbit(np.nan_to_num(found, nan=0.0)), np.signbit(np.nan_to_num(expected, nan=0.0)))
    else:
        assert found == expected or (found != found and expected != expected)


def _result_of(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    try:
        with np.errstate(all="ignore"):
            return function(*arguments), None
    except (ArithmeticError, IndexError, TypeError, ValueError) as error:
        return None, error


def _is_same(found: Any, expected: Any) -> bool:
    """Whether results are of the same types and shapes, and equal but for rounding."""
    if type(found) is not type(expected):
        return False
    if isinstance(expected, (tuple, list)):
        return len(found) == len(expected) and all(map(_is_same, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(_is_same(found[key], expected[key]) for key in expected)
    if not isinstance(expected, (np.ndarray, np.generic)):
        return (
            found == expected
            or math.isclose(found, expected, rel_tol=1e-6)
            or (found != found) is (expected != expected) is True
        )
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if expected.dtype.kind != "f":
        return np.array_equal(found, expected)
    # Arrays of float32 may have become ones of float64 on the way.
    scale = np.max(np.abs(expected), initial=0, where=np.isfinite(expected))
    return np.allclose(found, expected, rtol=3e-5, atol=3e-5 * scale, equal_nan=True)
