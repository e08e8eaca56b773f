"""How the self-test measures: its formats, its samples, the wider formats that it compares with, and its judgement."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import FLOATS, INF, NAN, ROOT

from cupyfuse import selftest
from cupyfuse.selftest import oracle, samples
from cupyfuse.selftest.formats import FORMATS, Format, available
from cupyfuse.selftest.measure import Allowance, Measurement, measure

HALF, SINGLE = FORMATS["float16"], FORMATS["float32"]


# Formats, samples and the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
def test_formats_are_what_libraries_say(form: Format, rng: np.random.Generator) -> None:
    info = ml_dtypes.finfo(form.dtype)
    assert (form.max, form.normal) == (float(info.max), float(info.smallest_normal))
    assert form.subnormal == float(info.smallest_subnormal)
    assert form.computed.name == ("float64" if form.name == "float64" else "float32")
    x = form.rounded(np.exp2(rng.uniform(form.bottom - form.digits, form.top, 2000)))
    x = x[(x != 0) & np.isfinite(x)]
    following = (np.nextafter if form.name != "bfloat16" else ml_bfloat16_after)(x, np.asarray(np.inf, x.dtype))
    ulp = form.ulp(x.astype(np.float64))
    below = x.astype(np.float64) < form.max
    np.testing.assert_array_equal(ulp[below], (following.astype(np.float64) - x.astype(np.float64))[below])
    assert np.array_equal(form.ulp(np.array([0.0, INF, NAN])), [form.subnormal, form.ulp(1.0), form.ulp(1.0)])


def ml_bfloat16_after(x: Any, _: Any) -> Any:
    """The next larger bfloat16 of positive ones."""
    return (x.view(np.uint16) + np.uint16(1)).view(x.dtype)


def test_formats_without_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [f.name for f in available()] == list(FLOATS)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert [f.name for f in available()] == ["float16", "float32", "float64"]
    assert "bfloat16 was not tested: pip install ml_dtypes" in selftest._engine_sentence(np, quick=False)


@pytest.mark.parametrize("flushing", [False, True])
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
def test_samples_cover_the_format(form: Format, flushing: bool) -> None:
    x = samples.unary(form, flushing)
    assert np.isfinite(x).all() and np.array_equal(form.rounded(x).astype(np.float64), x)
    for sign in (-1, 1):
        side = x[np.sign(x) == sign]
        exponents = np.frexp(side[np.abs(side) >= form.normal])[1] - 1
        assert set(exponents) == set(range(form.bottom, form.top + 1)), "every exponent"
        assert form.max == np.abs(side).max()
        assert (np.abs(side).min() >= form.normal) == flushing
    assert 0.0 in x
    if form.digits <= 11 and not flushing:
        exponents, mantissas = 2 * form.top, 2 ** (form.digits - 1)
        assert len(x) == 2 * (exponents * mantissas + mantissas), "normal and subnormal numbers, zero among the latter"
    a, b = samples.pairs(form, flushing)
    assert len(a) == len(b) > 20_000 and np.isfinite(a).all() and np.isfinite(b).all()
    with np.errstate(over="ignore"):
        neighbours = (a != b) & (np.abs(a - b) <= 8 * form.ulp(a))
    assert neighbours.sum() > 500 and (a == -b).sum() > 100


def test_samples_are_the_same_in_every_run() -> None:
    code = """
import hashlib
from cupyfuse.selftest import chains, formats, samples
import numpy as np
form = formats.FORMATS["float32"]
drawn = [samples.unary(form, False), *samples.pairs(form, False)]
drawn += [a for case in chains.cases(form) for a in case.draw(np.random.default_rng(0)).values()]
print(len(drawn), hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in drawn)).hexdigest())
"""
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout
    assert len(runs[0].stdout) > 64, runs[0].stderr


def test_erf_and_erfc_in_every_precision(rng: np.random.Generator) -> None:
    x = np.concatenate([np.linspace(-6, 26, 3001), rng.standard_normal(1000), [1.5, -1.5, 0.0, np.nextafter(1.5, 2)]])
    for mine, theirs in ((oracle.erf, math.erf), (oracle.erfc, math.erfc)):
        expected = np.array([theirs(v) for v in x.tolist()])
        for dtype, limit in ((np.float64, 128), (np.longdouble, 8)):  # the C library's own errors are a few units
            error = np.abs(mine(x.astype(dtype)).astype(np.float64) - expected) / np.spacing(np.abs(expected))
            assert error.max() <= limit
    assert np.array_equal(oracle.erfc(np.array([INF, -INF])), [0.0, 2.0]) and np.isnan(oracle.erf(np.array([NAN]))[0])


@pytest.mark.skipif(not oracle.EXTENDED, reason="needs a longdouble with more digits than float64")
@pytest.mark.parametrize(
    ("x", "value"),
    [
        (0.5, "0.47950012218695346231725334610803547126354842424203574"),
        (1.5, "0.033894853524689272933406904432446724046543186434870548"),
        (5.0, "1.5374597944280348501883434853833788901180503147234e-12"),
        (26.0, "5.6631924088561428464757278969260924600606580000000e-296"),
    ],
)
def test_the_extended_oracle_has_more_digits_than_float64(x: float, value: str) -> None:
    got = oracle.erfc(np.array([x], np.longdouble))[0]
    assert abs(got / np.longdouble(value) - 1) < 2.0**-58


# Judgement ----------------------------------------------------------------------------------------------------------


def judged(
    got: Any, exact: Any, ulps: float, form: Format = SINGLE, flushing: bool = False, **more: Any
) -> Measurement:
    return measure(np.array(got), np.array(exact, np.float64), Allowance(ulps, **more), form, flushing)


def test_errors_are_counted_in_ulps() -> None:
    exact = np.array([1.0, 3.0, 1e10])
    ulp = SINGLE.ulp(exact)
    inside, outside = judged(exact + 3 * ulp, exact, 3.0), judged(exact + [0, 4, 0] * ulp, exact, 3.0)
    assert inside.first_failure is None and inside.ulps == 3.0 and inside.count == 3
    assert inside.used == pytest.approx(1.0, rel=1e-6)
    assert outside.first_failure == 1 and outside.ulps == 4.0
    assert outside.relative == pytest.approx(4 * 2.0**-22 / 3)


def test_exact_operators_are_exact() -> None:
    assert judged([1.0, -2.5], [1.0, -2.5], 0.0).first_failure is None
    assert judged([1.0, -2.5], [1.0, np.nextafter(-2.5, 0)], 0.0).first_failure == 1
    assert judged([0.0], [1e-39], 0.0).first_failure == 0
    assert judged([0.0], [1e-39], 0.0, flushing=True).first_failure is None
    assert judged([0.0], [1e-37], 0.0, flushing=True).first_failure == 0


def test_a_scale_is_what_digits_are_lost_against() -> None:
    error = 10 * float(SINGLE.ulp(1.0))
    assert judged([1e-3 + error], [1e-3], 12.0).first_failure == 0
    found = judged([1e-3 + error], [1e-3], 12.0, scale=np.array([1.0]))
    assert found.first_failure is None and found.ulps == pytest.approx(10.0, rel=1e-3)
    assert judged([1.0 + error], [1.0], 12.0, scale=np.array([1e-3])).first_failure is None, (
        "a smaller one takes nothing away"
    )
    assert judged([1.0], [2.0], 1.0, scale=np.array([INF])).first_failure == 0, "an infinite scale allows nothing"


def test_sixteen_bits_round_once() -> None:
    exact = 1.0 + 0.5 * float(HALF.ulp(1.0))  # halfway between two neighbours
    for got in (1.0, 1.0 + float(HALF.ulp(1.0))):
        assert judged([got], [exact], 4.0, HALF).first_failure is None
    assert judged([1.0], [1.0 + 0.6 * float(HALF.ulp(1.0))], 4.0, HALF).first_failure == 0
    # Quick exponentials may be a hundredth of an ulp nearer to the other neighbour, and no more.
    slightly = 1.0 + 0.501 * float(HALF.ulp(1.0))
    assert judged([1.0], [slightly], 4.0, HALF).first_failure == 0
    assert judged([1.0], [slightly], 4.0, HALF, quick=True).first_failure is None
    assert judged([1.0], [1.0 + 1e-5], 4.0, SINGLE, quick=True).first_failure == 0, "of 16-bit formats alone"


@pytest.mark.parametrize(
    ("got", "exact", "good"),
    [
        (INF, INF, True),
        (-INF, INF, False),
        (NAN, NAN, True),
        (NAN, INF, False),
        (1.0, NAN, False),
        (1.0, INF, False),
        (INF, 1e39, True),
        (-INF, 1e39, False),
        (INF, 3e38, False),
        (INF, 3.4028235e38, True),
        (NAN, 1.0, False),
        (3e38, 1e39, False),
    ],
)
def test_infinities_nan_and_overflow(got: float, exact: float, good: bool) -> None:
    assert (judged([got], [exact], 2.0).first_failure is None) is good


def test_what_underflow_takes_from_a_factor() -> None:
    assert judged([0.0], [100 * SINGLE.normal], 2.0).first_failure is None
    assert judged([0.0], [2000 * SINGLE.normal], 2.0).first_failure == 0
    assert judged([0.0], [100 * SINGLE.normal], 0.5).first_failure == 0, "arithmetic has no factors"
