"""The self-test: what it finds, what it runs, and what it tells."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import CUDA, FLOATS, HOST, NUMPY, ROOT, Engine

import cupyfuse as cf
from cupyfuse import heads, selftest
from cupyfuse.cli import commands as cli
from cupyfuse.ir.operators import POINTWISE, REDUCTIONS
from cupyfuse.ir.operators import table as rows
from cupyfuse.selftest import chains, integers, pointwise, specials, tables
from cupyfuse.selftest.formats import FORMATS, Format
from cupyfuse.selftest.report import Report
from cupyfuse.selftest.target import Failure, LaunchedKernel, Target

HALF, SINGLE = FORMATS["float16"], FORMATS["float32"]
ON_FLOATS = {name for name, row in POINTWISE.items() if row.takes_floats}


# What it finds ------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", FLOATS)
def test_operators_are_as_accurate_as_their_rows_say(engine: Engine, dtype: str) -> None:
    target = Target(engine.xp)
    found = pointwise.accuracy(target, FORMATS[dtype])
    assert not target.failures, "\n".join(map(str, target.failures[:20]))
    assert {pointwise.parse_name(name)[0] for name in found} == ON_FLOATS
    for name, one in found.items():
        row = POINTWISE[pointwise.parse_name(name)[0]]
        assert one.count > 20_000
        flushed = engine is CUDA and one.used <= 1  # subnormal results of exact operators
        assert one.ulps == 0 or flushed or not row.exact


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("form", integers.FORMATS, ids=lambda form: form.name)
def test_operators_on_integers_are_numpys(engine: Engine, form: Format) -> None:
    target = Target(engine.xp)
    a, _ = integers.pairs(form)
    assert integers.check(target, form) == len(integers.ufuncs()) * a.size
    assert not target.failures, "\n".join(map(str, target.failures[:20]))


def test_every_operator_on_integers_alone_is_checked() -> None:
    assert set(integers.ufuncs()) >= set(POINTWISE) - ON_FLOATS


@pytest.mark.parametrize(("name", "function"), [("left_shift", lambda a, b: a << (b & 63)), ("remainder", np.fmod)])
def test_a_wrong_operator_on_integers_is_named(name: str, function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POINTWISE, name, dataclasses.replace(POINTWISE[name], numpy=function))
    monkeypatch.setattr(integers, "_everything", integers._everything.__wrapped__)
    target = Target(np)
    integers.check(target, integers.FORMATS[-1])
    (failure,) = target.failures
    assert (failure.what, failure.dtype) == (name, "int64")
    assert re.fullmatch(r"-?\d+, -?\d+ \(vectors\)", failure.given) and failure.got != failure.expected


CHAINS = {"softmax", "log_softmax", "linear", "batch_norm", "batch_norm, training", "head_softmax, training"}
CHAINS |= {"column sums of softmax"}
CHAINS |= set(heads.HEADS)


@pytest.mark.rotates
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
    monkeypatch.setattr(pointwise, "groups", pointwise.groups.__wrapped__)  # plans hold the functions of their rows
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


@pytest.mark.kernels_rotate
def test_the_operator_that_the_documentation_adds(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row and the special values of docs/adding-an-operator.md, as they stand there, are all that it takes."""
    text = (ROOT / "docs" / "adding-an-operator.md").read_text(encoding="utf-8")
    row = eval(re.search(r"```python\n(.*?)\n```", text, re.DOTALL)[1], {"np": np, **vars(rows)})  # type: ignore[index]
    monkeypatch.setitem(POINTWISE, row.name, row)
    assert specials.missing() == [row.name]
    (entries,) = re.findall(rf"^{row.name}\(.*$", text, re.MULTILINE)
    monkeypatch.setattr(specials, "UNARY", f"{tables.UNARY}{entries}\n")
    caches = (specials.pointwise_cases, pointwise.groups)
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
        patch.setattr(selftest, "run", lambda xp, quick: kept.append(whole(xp, quick)) or kept[0])
        # test_compile.py compiles more than these.
        patch.setattr(selftest, "cubin", lambda source, architecture: b"")
        patch.setattr("builtins.print", lambda text="", **_: printed.append(str(text)))
        assert cli.main(["selftest", "--engine", "numpy", "--markdown", str(path)]) == 0
    yield kept[0], "\n".join(printed), path.read_text(encoding="utf-8")


def test_a_run_passes_and_says_what_ran(page: tuple[Report, str, str]) -> None:
    report, printed, _ = page
    assert report.passed and list(report.operators) == list(report.chains) == list(report.special) == list(FLOATS)
    assert list(report.integers) == [form.name for form in integers.FORMATS]
    assert "The NumPy engine ran" in printed and "No kernel ran" in printed
    assert "[14/14] compiling" in printed
    assert cf.__version__ in printed and np.__version__ in printed
    for name in ("gelu", "softplus(1,20)", "logsumexp", "head_softmax, training"):
        assert re.search(rf"^{re.escape(name)} .*\d\.\d\d", printed, re.MULTILINE), name
    assert "Passed in" in printed and "FAILED" not in printed


def test_every_template_is_among_the_kernels(page: tuple[Report, str, str]) -> None:
    report, printed, text = page
    assert "would have run were compiled" in report.kernels_title
    # Products of this size do not run from halves, nor with epilogues.
    others = ("split_", "fingerprint", "gemm", "scan")
    templates = {path.stem for path in (ROOT / "kernels_cu").glob("*.cu") if not path.stem.startswith(others)}
    every = templates | {"column_stats, in shares"}
    every |= {f"{template}, merge of shares" for template in ("column_stats", "row_columns", "row_shares")}
    # Rows of any length, if they are long, are accessed in vectors.
    long = {"row_block", "row_shared", "row_shares", "row_shares, merge of shares", "row_stream"}
    wide = {"row_columns", "row_columns, merge of shares"}  # whole vectors of at most four bytes an element
    for dtype in FLOATS:
        found = {v: {k.template for k in report.kernels if (k.dtype, k.vectors) == (dtype, v)} for v in (False, True)}
        wanted = every - wide if dtype == "float64" else every
        assert found[True] | found[False] == wanted, dtype
        assert wanted - long - wide <= found[False], dtype
        assert wanted - {"row_stream"} <= found[True], dtype
    assert len(report.kernels) < 400, "each takes a GPU's user a few tenths of a second"
    for way in every:
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
    assert {pointwise.parse_name(n)[0] for n in there} >= ON_FLOATS
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
    assert {f.what for f in target.failures} == {f"{name}, merge of shares" for name in ("column_stats", "row_columns")}
    assert "undefined identifier" in str(target.failures[0])


def test_a_quick_run_compiles_nothing_and_checks_the_rest(
    page: tuple[Report, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(source: str, architecture: str) -> bytes:
        raise AssertionError("a quick run without a GPU compiles nothing")

    monkeypatch.setattr(selftest, "cubin", refuse)
    monkeypatch.setattr(selftest, "available", lambda: [HALF, SINGLE])  # the others take longer, and run alike
    report = selftest.run(np, quick=True)
    assert report.passed and "[7/7]" in capsys.readouterr().err
    assert report.kernels_title == "No kernel ran, and none was compiled: the run was quick."
    whole = page[0]
    for name in ("float16", "float32"):
        assert list(report.operators[name]) == list(whole.operators[name])
        assert list(report.chains[name]) == list(whole.chains[name])


def test_a_quick_run_on_kernels_is_float32_and_int64_alone() -> None:
    with HOST.active(), pytest.MonkeyPatch.context() as patch:
        for part in (selftest.reductions, selftest.chains):  # minutes on a CPU
            patch.setattr(part, "check_specials", lambda *_: 0, raising=False)
            patch.setattr(part, "accuracy", lambda *_: {}, raising=False)
        patch.setattr(selftest.machine, "device_name", lambda xp: "kernels on a CPU")
        report = selftest.run(HOST.xp, quick=True)
    assert report.passed and list(report.operators) == ["float32"]
    assert {k.dtype for k in report.kernels} == {"float32", "int64"}
    assert "A quick run: float32 and int64 alone." in str(report)


def test_after_an_interruption_nothing_more_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def interrupted(source: str, architecture: str) -> bytes:
        compiled.append(source)
        raise KeyboardInterrupt

    monkeypatch.setattr(selftest, "cubin", interrupted)
    monkeypatch.setattr(selftest.os, "cpu_count", lambda: 1)
    target = Target(np, collecting=True)
    target.kernels = {(str(i), "elementwise"): LaunchedKernel("elementwise", "float32", False) for i in range(10_000)}
    with pytest.raises(KeyboardInterrupt):
        selftest._compile(target)
    assert 0 < len(compiled) < 10_000


def test_without_nvrtc_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(source: str, architecture: str) -> bytes:
        raise cf.EngineError("compiling without a GPU needs NVRTC: pip install cuda-bindings")

    monkeypatch.setattr(selftest, "cubin", missing)
    target = Target(np)
    assert "none was compiled: EngineError: compiling without a GPU needs NVRTC" in selftest._kernels_title(target)


def test_kernels_are_counted_where_they_run() -> None:
    """The CUDA engine, here with its kernels on the CPU: nothing is collected, what is launched is listed."""
    with HOST.active():
        target = Target(HOST.xp)
        assert target.on_gpu and target.variants == ("vectors", "scalars")
        pointwise.check_specials(target, SINGLE)
    assert {k.template for k in target.kernels.values()} == {"elementwise"}
    assert len(target.kernels) == 2 * len(pointwise.groups())
    assert "were compiled and ran" in selftest._kernels_title(target)
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
