"""Expressions for 16-bit results: their errors before the result is rounded, and where they must not stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST, Engine

import cupyfuse as cf
from cupyfuse.ir.operators import POINTWISE, Operator
from cupyfuse.selftest import oracle, samples
from cupyfuse.selftest.formats import FORMATS
from cupyfuse.selftest.measure import QUICK_ERROR, Allowance
from cupyfuse.trace import apply

HALF, SINGLE = FORMATS["bfloat16"], FORMATS["float32"]
PARAMETERS = {"softplus": (1.5, 20.0), "elu": (0.7,), "celu": (1.7,)}
QUICK = {row.name: row for row in POINTWISE.values() if row.quick}


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[Engine]:
    request.param.require()
    with request.param.active():
        yield request.param


def operands(row: Operator) -> int:
    return row.arity - len(PARAMETERS.get(row.name, ()))


def split(x: Any) -> tuple[Any, Any]:
    """Two numbers of 16 bits, whose sum in float32 keeps 16 bits of x: kernels compute it without rounding it."""
    high = x.astype(HALF.dtype)
    with np.errstate(invalid="ignore"):
        return high, (x - high.astype(np.float32)).astype(HALF.dtype)


def applied(names: list[str], count: int, dtype: str) -> Any:
    """A fused function that returns several operators of the sums of its arguments, which it takes in pairs."""

    def function(*parts: Any) -> Any:
        sums = [high + low for high, low in zip(parts[::2], parts[1::2], strict=True)]
        return tuple(apply(name, *sums, *PARAMETERS.get(name, ())).astype(dtype) for name in names)

    return cf.fuse((lambda a, b: function(a, b)) if count == 1 else (lambda a, b, c, d: function(a, b, c, d)))


@pytest.mark.parametrize("count", [1, 2])
def test_quick_expressions_are_as_accurate_as_they_say(device: Engine, count: int) -> None:
    """All but a hundredth of the allowance in 16 bits is the rounding of the result: this looks at the rest."""
    names = [name for name, row in QUICK.items() if operands(row) == count]
    assert len(names) > 1
    drawn = (samples.unary(SINGLE, True),) if count == 1 else samples.pairs(SINGLE, True)
    with np.errstate(over="ignore"):
        parts = [part for x in drawn for part in split(x.astype(np.float32))]
    with np.errstate(invalid="ignore"):
        sums = [a.astype(np.float32) + b.astype(np.float32) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    # Where a part is flushed to zero, the sum on a GPU is another one.
    good = np.all([np.isfinite(s) & ((s == 0) | (np.abs(s) >= 2.0**-110)) for s in sums], axis=0)
    parts, sums = [p[good] for p in parts], [s[good] for s in sums]
    assert good.sum() > 10_000
    # Casts to float32 give what the kernel computes for results of 16 bits, before they are rounded.
    results = applied(names, count, "float32")(*map(device.array, parts))
    for name, got in zip(names, map(device.host, results), strict=True):
        row, numbers = QUICK[name], PARAMETERS.get(name, ())
        with np.errstate(all="ignore"):
            exact = np.asarray(oracle.wide_formula(name)(*(np.asarray(s, np.float64) for s in (*sums, *numbers))))
            scale = None if row.scale is None else row.scale(*sums, *map(np.float32, numbers))
            size, error = np.abs(exact), np.abs(got - exact)
            allowed = Allowance(row.ulps, scale).absolute(exact, SINGLE, True) + QUICK_ERROR * size
            same = (got == exact.astype(np.float32)) | (np.isnan(got) & np.isnan(exact))
            overflows = np.isinf(got) & (size > SINGLE.max * (1 - QUICK_ERROR))
            good = np.where(np.isfinite(exact), (error <= allowed) | overflows, same)
        worst = int(np.argmin(good))
        given = [float(s[worst]) for s in sums]
        assert good.all(), (name, given, float(got[worst]), float(exact[worst]))


@pytest.mark.parametrize("count", [1, 2])
def test_special_values_of_quick_expressions_are_those_of_the_exact_ones(device: Engine, count: int) -> None:
    """With the signs of zeros, where the result is an infinity, a zero or NaN; tables.py holds the numbers."""
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 3e38, -3e38], np.float32)
    grids = [x.ravel() for x in np.meshgrid(values, values, indexing="ij")][:count]
    names = [name for name, row in QUICK.items() if operands(row) == count]
    parts = [part.astype(HALF.dtype) for x in grids for part in (x, np.copysign(0, x))]
    sums = [p.astype(np.float32) for p in parts[::2]]
    results = applied(names, count, "bfloat16")(*map(device.array, parts))
    for name, got in zip(names, (device.host(r).astype(np.float32) for r in results), strict=True):
        with np.errstate(all="ignore"):
            want = np.asarray(QUICK[name].numpy(*sums, *map(np.float32, PARAMETERS.get(name, ()))))
        special, zero = ~np.isfinite(want) | (want == 0), want == 0
        np.testing.assert_array_equal(got[special], want[special], name)
        np.testing.assert_array_equal(np.signbit(got[zero]), np.signbit(want[zero]), name)


ROUNDINGS = {
    "floor": np.floor,
    "rint": lambda x: np.rint(x * 2),
    "trunc": lambda x: np.trunc(np.minimum(x, 100)),
    "int32": lambda x: x.astype(np.int32),
    "floor_divide": lambda x: x // 2,
    "remainder": lambda x: x % 2,
}


@pytest.mark.parametrize("name", ROUNDINGS)
def test_values_that_are_rounded_to_whole_numbers_are_exact(name: str) -> None:
    """floor(6 / 3) is 2, which a quotient slightly below would miss."""
    rounding = ROUNDINGS[name]
    specs = [cf.spec((64, 64), "bfloat16"), cf.spec((64, 64), "bfloat16")]
    text = cf.fuse(lambda x, y: rounding(x / y)).plan(*specs).source()
    assert " / " in text and "quick_" not in text
    both = cf.fuse(lambda x, y: (np.tanh(y), rounding(np.sqrt(x)))).plan(*specs).source()
    assert "quick_tanh" in both and "quick_sqrt" not in both


def test_other_values_are_quick_in_16_bits_alone() -> None:
    def function(x: Any, y: Any) -> Any:
        return np.where(x / y > 1, x, y)

    half, single = (cf.fuse(function).plan(*[cf.spec((64, 64), d)] * 2).source() for d in ("float16", "float32"))
    assert "quick_quotient(" in half and "quick_" not in single
