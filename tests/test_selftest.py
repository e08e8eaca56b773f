"""The self-test: its oracle, its samples, its judgement, what it finds, what it runs, and what it tells."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import FLOATS, HOST, INF, NAN, NUMPY, Engine

import cupyfuse as cf
from cupyfuse import cli, heads, selftest
from cupyfuse.operators import POINTWISE, REDUCTIONS, rows
from cupyfuse.selftest import chains, oracle, pointwise, samples, specials, tables
from cupyfuse.selftest.formats import FORMATS, Format, available
from cupyfuse.selftest.measure import Allowance, Measured, measure
from cupyfuse.selftest.report import Report
from cupyfuse.selftest.target import Failure, Target

ROOT = Path(cf.__file__).resolve().parent.parent
HALF, SINGLE, DOUBLE = FORMATS["float16"], FORMATS["float32"], FORMATS["float64"]


# Formats, samples and the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
def test_formats_are_what_libraries_say(form: Format, rng: np.random.Generator) -> None:
    info = ml_dtypes.finfo(form.dtype)
    assert (form.max, form.normal) == (float(info.max), float(info.smallest_normal))
    assert form.subnormal == float(info.smallest_subnormal)
    assert form.computed.name == ("float64" if form.name == "float64" else "float32")
    x = form.values(np.exp2(rng.uniform(form.bottom - form.digits, form.top, 2000)))
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
    assert "bfloat16 was not tested: pip install ml_dtypes" in selftest._sentence(np)


@pytest.mark.parametrize("flushing", [False, True])
@pytest.mark.parametrize("form", FORMATS.values(), ids=lambda f: f.name)
def test_samples_cover_the_format(form: Format, flushing: bool) -> None:
    x = samples.unary(form, flushing)
    assert np.isfinite(x).all() and np.array_equal(form.values(x).astype(np.float64), x)
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


def judged(got: Any, exact: Any, ulps: float, form: Format = SINGLE, flushing: bool = False, **more: Any) -> Measured:
    return measure(np.array(got), np.array(exact, np.float64), Allowance(ulps, **more), form, flushing)


def test_errors_are_counted_in_ulps() -> None:
    exact = np.array([1.0, 3.0, 1e10])
    ulp = SINGLE.ulp(exact)
    inside, outside = judged(exact + 3 * ulp, exact, 3.0), judged(exact + [0, 4, 0] * ulp, exact, 3.0)
    assert inside.worst is None and inside.ulps == 3.0 and inside.count == 3
    assert inside.used == pytest.approx(1.0, rel=1e-6)
    assert outside.worst == 1 and outside.ulps == 4.0
    assert outside.relative == pytest.approx(4 * 2.0**-22 / 3)


def test_exact_operators_are_exact() -> None:
    assert judged([1.0, -2.5], [1.0, -2.5], 0.0).worst is None
    assert judged([1.0, -2.5], [1.0, np.nextafter(-2.5, 0)], 0.0).worst == 1
    assert judged([0.0], [1e-39], 0.0).worst == 0
    assert judged([0.0], [1e-39], 0.0, flushing=True).worst is None
    assert judged([0.0], [1e-37], 0.0, flushing=True).worst == 0


def test_a_scale_is_what_digits_are_lost_against() -> None:
    error = 10 * float(SINGLE.ulp(1.0))
    assert judged([1e-3 + error], [1e-3], 12.0).worst == 0
    found = judged([1e-3 + error], [1e-3], 12.0, scale=np.array([1.0]))
    assert found.worst is None and found.ulps == pytest.approx(10.0, rel=1e-3)
    assert judged([1.0 + error], [1.0], 12.0, scale=np.array([1e-3])).worst is None, "a smaller one takes nothing away"
    assert judged([1.0], [2.0], 1.0, scale=np.array([INF])).worst == 0, "an infinite scale allows nothing"


def test_sixteen_bits_round_once() -> None:
    exact = 1.0 + 0.5 * float(HALF.ulp(1.0))  # halfway between two neighbours
    for got in (1.0, 1.0 + float(HALF.ulp(1.0))):
        assert judged([got], [exact], 4.0, HALF).worst is None
    assert judged([1.0], [1.0 + 0.6 * float(HALF.ulp(1.0))], 4.0, HALF).worst == 0
    # Quick exponentials may be a hundredth of an ulp nearer to the other neighbour, and no more.
    slightly = 1.0 + 0.501 * float(HALF.ulp(1.0))
    assert judged([1.0], [slightly], 4.0, HALF).worst == 0
    assert judged([1.0], [slightly], 4.0, HALF, quick=True).worst is None
    assert judged([1.0], [1.0 + 1e-5], 4.0, SINGLE, quick=True).worst == 0, "of 16-bit formats alone"


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
    assert (judged([got], [exact], 2.0).worst is None) is good


def test_what_underflow_takes_from_a_factor() -> None:
    assert judged([0.0], [100 * SINGLE.normal], 2.0).worst is None
    assert judged([0.0], [2000 * SINGLE.normal], 2.0).worst == 0
    assert judged([0.0], [100 * SINGLE.normal], 0.5).worst == 0, "arithmetic has no factors"


# What it finds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_operators_are_as_accurate_as_their_rows_say(engine: Engine, dtype: str) -> None:
    target = Target(engine.xp)
    found = pointwise.accuracy(target, FORMATS[dtype])
    assert not target.failures, "\n".join(map(str, target.failures[:20]))
    assert {pointwise.parse_name(name)[0] for name in found} == set(POINTWISE)
    for name, one in found.items():
        row = POINTWISE[pointwise.parse_name(name)[0]]
        assert one.count > 20_000 and (one.ulps == 0) >= row.exact


CHAINS = {"softmax", "log_softmax", "linear", "batch_norm", "batch_norm, training", "head_softmax, training"}
CHAINS |= set(heads.HEADS)


def test_chains_are_as_accurate_as_rounding_allows(engine: Engine) -> None:
    # Kernels on a CPU take half a minute for each dtype; the special values run them all in every one.
    for dtype in FLOATS if engine is not HOST else ["float32"]:
        target = Target(engine.xp)
        found = chains.accuracy(target, FORMATS[dtype])
        assert not target.failures, "\n".join(map(str, target.failures[:20]))
        assert set(found) == {*REDUCTIONS, *CHAINS}
        assert all(one.count > 50 for one in found.values())


@pytest.mark.parametrize("name", ["exp", "log1p", "gelu", "divide", "softsign"])
def test_an_inaccurate_operator_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by some ulps more than its row allows: found; the exact value comes from the same row, in float64."""
    row = POINTWISE[name]
    by = (4 * row.ulps + 4) * 2.0**-23
    wide = row.numpy

    def narrow(*x: Any) -> Any:
        return wide(*x) * (x[0].dtype.type(1 + by) if x[0].dtype == np.float32 else 1)

    monkeypatch.setitem(POINTWISE, name, dataclasses.replace(row, numpy=narrow))
    target = Target(np)
    pointwise.accuracy(target, SINGLE)
    assert {f.what for f in target.failures} == {name}
    (failure,) = target.failures
    assert failure.dtype == "float32"
    assert re.fullmatch(r"-?[\d.e+-]+(, -?[\d.e+-]+)? \(vectors\)", failure.given)
    assert f"({row.ulps:g} ulps)" in failure.expected and float(failure.got) == float(failure.got)


def test_an_inaccurate_reduction_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that accumulates in 16 bits."""
    row = REDUCTIONS["sum"]

    def short(x: Any, axis: int) -> Any:
        if x.dtype != np.float32:
            return row.numpy(x, axis)
        return np.add.accumulate(x.astype(np.float16), axis=axis, dtype=np.float16).take([-1], axis).astype(np.float32)

    monkeypatch.setitem(REDUCTIONS, "sum", dataclasses.replace(row, numpy=short))
    target = Target(np)
    chains.accuracy(target, HALF)
    assert {"sum", "mean"} <= {f.what for f in target.failures}
    assert "5000 elements" in " ".join(f.given for f in target.failures)


def test_the_operator_that_the_documentation_adds(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row and the special values of docs/adding-an-operator.md, as they stand there, are all that it takes."""
    text = (ROOT / "docs" / "adding-an-operator.md").read_text(encoding="utf-8")
    row = eval(re.search(r"```python\n(.*?),\n```", text, re.DOTALL)[1], {"np": np, **vars(rows)})  # type: ignore[index]
    monkeypatch.setitem(POINTWISE, row.name, row)
    assert specials.missing() == [row.name]
    (entries,) = re.findall(rf"^{row.name}\(.*$", text, re.MULTILINE)
    monkeypatch.setattr(specials, "UNARY", f"{tables.UNARY}{entries}\n")
    caches = (specials.pointwise, pointwise.groups)
    try:
        for cache in caches:
            cache.cache_clear()
        assert specials.missing() == []
        target = Target(engine.xp)
        pointwise.check_specials(target, SINGLE)
        assert pointwise.accuracy(target, SINGLE)[f"{row.name}(0.5)"].ulps == 0.5
        assert not target.failures
    finally:
        for cache in caches:
            cache.cache_clear()


# What it runs, and what it tells ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Report, str, str]]:
    """One whole run with NumPy through the command line: the report, what was printed, and the page."""
    path = tmp_path_factory.mktemp("selftest") / "measured-errors.md"
    kept: list[Report] = []
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        whole = selftest.run
        patch.setattr(selftest, "run", lambda xp: kept.append(whole(xp)) or kept[0])
        # test_compile.py compiles more than these.
        patch.setattr(selftest, "cubin", lambda source, architecture: b"")
        patch.setattr("builtins.print", lambda text="", **_: printed.append(str(text)))
        assert cli.main(["selftest", "--engine", "numpy", "--markdown", str(path)]) == 0
    yield kept[0], "\n".join(printed), path.read_text(encoding="utf-8")


def test_a_run_passes_and_says_what_ran(page: tuple[Report, str, str]) -> None:
    report, printed, _ = page
    assert report.passed and list(report.operators) == list(report.chains) == list(report.special) == list(FLOATS)
    assert "The NumPy engine ran" in printed and "No kernel ran" in printed
    assert "[13/13] compiling" in printed
    assert cf.__version__ in printed and np.__version__ in printed
    for name in ("gelu", "softplus(1,20)", "logsumexp", "head_softmax, training"):
        assert re.search(rf"^{re.escape(name)} .*\d\.\d\d", printed, re.MULTILINE), name
    assert "Passed in" in printed and "FAILED" not in printed


def test_every_template_is_among_the_kernels(page: tuple[Report, str, str]) -> None:
    report, printed, text = page
    assert "would have run were compiled" in report.kernels_are
    templates = {path.stem for path in (ROOT / "kernels_cu").glob("*.cu")}
    ways = templates | {"column_stats, in shares", "column_stats, merge of shares"}
    for dtype in FLOATS:
        for vectors in (False, True):
            found = {k.template for k in report.kernels if (k.dtype, k.vectors) == (dtype, vectors)}
            assert found == ways, (dtype, vectors)
    assert len(report.kernels) < 400, "each takes a GPU's user a few tenths of a second"
    for way in ways:
        assert f"  {way}: " in printed and f"- {way}: " in text


def test_the_page_has_the_figures_and_no_folders(page: tuple[Report, str, str]) -> None:
    report, _, text = page
    assert text.startswith("# Measured errors\n") and text.endswith("\n")
    assert f"| `exp` | 4.5 | {max(report.operators[f]['exp'].used for f in ('float32', 'float64')):.0%} |" in text
    assert f"{report.operators['float64']['tanh'].ulps:.2f}" in text
    assert str(Path.home()) not in text and "kernel cache" not in text
    assert max(map(len, (line for line in text.splitlines() if not line.startswith("|")))) <= 120


def rows_of(text: str) -> dict[str, list[str]]:
    """The lines of a page's tables of errors: name, then cells."""
    return {m[1]: m[2].split(" | ") for m in re.finditer(r"^\| `(.+?)` \| (.+) \|$", text, re.MULTILINE)}


def test_the_measured_errors_of_the_documentation_are_those_of_this_table(page: tuple[Report, str, str]) -> None:
    """The page is the output of a command: a new operator, case or allowance asks for another run of it."""
    kept = (ROOT / "docs" / "measured-errors.md").read_text(encoding="utf-8")
    here, there = rows_of(page[2]), rows_of(kept)
    assert list(there) == list(here), "run: python -m cupyfuse selftest --markdown docs/measured-errors.md"
    assert {pointwise.parse_name(n)[0] for n in there} >= set(POINTWISE)
    assert set(there) >= {*REDUCTIONS, *CHAINS}
    for name, cells in there.items():
        assert cells[0] == here[name][0], f"{name}: what is allowed"
        assert len(cells) == 2 + 2 * len(FLOATS)
    assert f"| cupyfuse | {cf.__version__} |" in kept


def test_failures_are_told_and_no_page_is_written(page: tuple[Report, str, str]) -> None:
    failures = [Failure("sqrt", "float32", f"{i}.0 (vectors)", "nan", "1.0") for i in range(5)]
    wrong = dataclasses.replace(page[0], failures=failures)
    text = str(wrong)
    assert not wrong.passed
    assert "FAILED: 5 results are wrong." in text and "Passed" not in text
    assert "sqrt in float32: 0.0 (vectors) gave nan, expected 1.0" in text
    assert "sqrt in float32: 2 more" in text
    with pytest.raises(ValueError, match="failures"):
        wrong.markdown()


def test_kernels_that_do_not_compile_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, architecture: str) -> bytes:
        if "column_merge" in source:
            raise cf.EngineError("undefined identifier")
        return b""

    monkeypatch.setattr(selftest, "cubin", refuse)
    target = Target(np, collecting=True)
    chains.accuracy(target, SINGLE)
    selftest._compile(target)
    assert {f.what for f in target.failures} == {"column_stats, merge of shares"}
    assert "undefined identifier" in str(target.failures[0])


def test_without_nvrtc_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(source: str, architecture: str) -> bytes:
        raise cf.EngineError("compiling without a GPU needs NVRTC: pip install cuda-bindings")

    monkeypatch.setattr(selftest, "cubin", missing)
    target = Target(np)
    assert "none was compiled: EngineError: compiling without a GPU needs NVRTC" in selftest._about_kernels(target)


def test_kernels_are_counted_where_they_run() -> None:
    """The CUDA engine, here with its kernels on the CPU: nothing is collected, what is launched is listed."""
    with HOST.active():
        target = Target(HOST.xp)
        assert target.on_gpu and target.variants == ("vectors", "scalars")
        pointwise.check_specials(target, SINGLE)
    assert {k.template for k in target.kernels.values()} == {"elementwise"}
    assert len(target.kernels) == 2 * len(pointwise.groups())
    assert "were compiled and ran" in selftest._about_kernels(target)
    assert Target(NUMPY.xp).variants == ("vectors",)


def test_it_needs_numpy_alone() -> None:
    code = """
import sys
sys.modules.update(dict.fromkeys("cupy torch scipy ml_dtypes rich cuda".split()))
import numpy as np
from cupyfuse.selftest import pointwise, formats, target
t = target.Target(np)
for form in formats.available():
    pointwise.check_specials(t, form)
print(len(t.failures), *(f.name for f in formats.available()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout.split() == ["0", "float16", "float32", "float64"], done.stderr


@pytest.mark.gpu
def test_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from support import CUDA

    CUDA.require()
    assert cli.main(["selftest", "--engine", "cuda"]) == 0
    assert "were compiled and ran" in capsys.readouterr().out
