"""The command line: its commands, and what it says to arguments that make no sense."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cupyfuse.heads import oracle
from cupyfuse.heads.plain import plain
from support import ROOT

import cupyfuse as cf
from cupyfuse import heads, selftest
from cupyfuse.cli import commands as cli
from cupyfuse.cli import demo
from cupyfuse.cuda import launcher
from cupyfuse.selftest import machine
from cupyfuse.selftest.measure import Measurement
from cupyfuse.selftest.progress import Progress
from cupyfuse.selftest.report import Report
from cupyfuse.selftest.target import Failure

TINY = ["--rows", "8", "--in-features", "12", "--out-features", "20"]
HAS_GPU = machine.array_module("auto") is not np


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120, env=environment)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run with arguments that must be refused; returns what was said."""
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_REPEATS", 2)


# demo ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_demo_tells_errors_times_and_costs_of_every_case(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *TINY, "--dtype", dtype, "--engine", "numpy"]) == 0
    printed = capsys.readouterr()
    for case in demo.CASES:
        assert sum(line.startswith(f"{case.title}  ") for line in printed.out.splitlines()) == 2, case.title
    # Six calls become one launch: the head without its matrix product.
    assert re.search(r"^head_sum +6 -> 1 ", printed.out, re.MULTILINE)
    assert "Every fused result is as accurate as the plain one." in printed.out
    assert f"[1/{2 + len(demo.CASES)}]" in printed.err


def test_demo_prints_the_plans_that_ran(capsys: pytest.CaptureFixture[str]) -> None:
    """NumPy runs products as they are; the plan from shapes alone, which is for an H200, splits one of this size."""
    sizes = ["--rows", "512", "--in-features", "512", "--out-features", "512"]
    assert cli.main(["demo", *sizes, "--engine", "numpy"]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["explain", "head_softmax", *sizes, "--bound"]) == 0
    assert "hi/lo split" in capsys.readouterr().out
    assert "hi/lo split" not in printed and "NumPy runs their steps, with its own matrix product" in printed
    for case in demo.CASES:
        plan = printed.partition(f"{case.title}\n-----")[2].partition("\n\nhead")[0]
        assert f"plan of {case.head.__name__}(x 512 x 512 float32" in plan
        assert ("prepacked once" in plan) == (case.bound and case.head is not heads.head_logsumexp)
        assert "fused:   " in plan and "unfused: " in plan


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("case", demo.CASES, ids=lambda case: case.title)
def test_the_plain_heads_are_the_heads(case: demo.Case, dtype: str) -> None:
    inputs = heads.example_inputs(case.head, 33, 20, 30, dtype)
    training = case.options.get("training", False)
    reference = oracle.evaluate(case.head, inputs, training)
    result = plain(case.head, np)(**inputs, **case.options)
    assert result.dtype == inputs["x"].dtype
    epsilon = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}[dtype]
    # As the demonstration allows: some roundings of the largest value, in float32's sums of 20 terms.
    assert abs(result.astype(np.float64) - reference.result).max() <= demo.ROUNDINGS * epsilon * reference.error_scale
    for name, statistics in reference.statistics.items():
        error = abs(inputs[name].astype(np.float64) - statistics).max()
        assert error <= demo.ROUNDINGS * epsilon * max(1.0, abs(statistics).max())


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_demo_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", *TINY, "--engine", "cuda"]) == 0
    assert "CuPy" in capsys.readouterr().out


def test_the_gpu_clock_runs_between_two_events() -> None:
    happened: list[str] = []

    class Event:
        def __init__(self) -> None:
            self.at = -1

        def record(self) -> None:
            self.at = len(happened)
            happened.append("record")

        def synchronize(self) -> None:
            happened.append("synchronize")

    class Memory:
        def fill(self, value: int) -> None:
            happened.append("evict")

    cuda = SimpleNamespace(Event=Event, get_elapsed_time=lambda start, end: 1000.0 * (end.at - start.at))
    cupy = SimpleNamespace(cuda=cuda, uint8="uint8", empty=lambda size, dtype: Memory())
    assert demo.median_seconds([lambda: happened.append("call")], cupy) == [2.0]
    assert happened[:5] == ["evict", "record", "call", "record", "synchronize"]


@pytest.mark.parametrize("error", [1e-3, float("nan")])
def test_demo_fails_where_fusing_costs_accuracy(
    error: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = demo.run(8, 12, 20, "float32", "numpy")
    wrong = dataclasses.replace(right[0], error_fused=error)
    monkeypatch.setattr(demo, "run", lambda *_: [wrong, *right[1:]])
    assert cli.main(["demo", *TINY, "--engine", "numpy"]) == 1
    assert "LESS ACCURATE: head_logsumexp" in capsys.readouterr().out


def test_demo_says_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*_: object) -> None:
        raise MemoryError("2 TB")

    monkeypatch.setattr(demo, "run", run)
    assert cli.main(["demo", "--engine", "numpy"]) == 1
    assert "not enough memory" in capsys.readouterr().err


@pytest.mark.parametrize("case", demo.CASES, ids=lambda case: case.title)
def test_reference_is_the_head_in_float64(case: demo.Case) -> None:
    inputs = heads.example_inputs(heads.head_softmax, 6, 10, 14, "float64")
    result, size, _ = oracle.evaluate(case.head, inputs, case.options.get("training", False))
    own = {name: inputs[name] for name in case.head.signature.parameters if name in inputs}
    # Two float64 evaluations of values near 1; the sums of ten or fourteen terms round a few times each.
    np.testing.assert_allclose(case.head.__wrapped__(**own, **case.options), result, rtol=1e-13, atol=1e-14)
    assert size >= abs(result).max() > 0


def test_the_cuda_engine_without_a_gpu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "needs CuPy" in refused(capsys, "demo", *TINY, "--engine", "cuda")
    assert machine.array_module("auto") is np


def test_a_bar_replaces_the_lines_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(2) as progress:
        progress.stage("one")
        progress.stage("two")
    assert "[1/2]" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with Progress(1) as progress:
        progress.stage("plain")
    assert capsys.readouterr().err == "[1/1] plain\n"


# selftest (what it does has tests of its own) -----------------------------------------------------------------------


def outcome(**more: Any) -> Report:
    measured = {"float32": {"sqrt": Measurement(0.5, 6e-8, 1.0, 100, "0.5")}, "float64": {}}
    facts = [("cupyfuse", cf.__version__), ("kernel cache", "/home/me/.cupy/kernel_cache")]
    return Report(facts, "The NumPy engine ran.", operators=measured, chains=measured, **more)


@pytest.mark.parametrize("failures", [[], [Failure("sqrt", "float32", "4.0", "3.0", "2.0")]], ids=["passed", "failed"])
def test_selftest_exits_with_what_it_found(
    failures: list[Failure], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = outcome(failures=failures)
    asked: list[object] = []
    monkeypatch.setattr(selftest, "run", lambda xp, quick: asked.append((xp, quick)) or report)
    page = tmp_path / "page.md"
    assert cli.main(["selftest", "--engine", "numpy", "--markdown", str(page)]) == len(failures)
    assert asked == [(np, False)]
    printed = capsys.readouterr().out
    assert ("sqrt in float32: 4.0 gave 3.0, expected 2.0" in printed) == bool(failures)
    assert page.exists() == (not failures)
    assert re.search(r"^sqrt +0\.5 +100% +0\.50 +- +6\.0e-08 +-$", printed, re.MULTILINE)
    if not failures:
        assert "| `sqrt` | 0.5 | 100% | 0.50 | - | 6.0e-08 | - |" in page.read_text(encoding="utf-8")
        assert "/home/me" in printed and "/home/me" not in page.read_text(encoding="utf-8")


def test_selftest_says_when_the_page_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(selftest, "run", lambda xp, quick: outcome())
    monkeypatch.setattr(selftest, "write_page", refuse)
    assert cli.main(["selftest", "--engine", "numpy", "--markdown", str(tmp_path / "page.md")]) == 1
    assert "page.md cannot be written: read-only file system" in capsys.readouterr().err


def test_selftest_without_a_gpu_refuses_the_cuda_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert "needs CuPy" in refused(capsys, "selftest", "--engine", "cuda")


# info ---------------------------------------------------------------------------------------------------------------


def test_info_tells_versions_and_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kernel.cubin").write_bytes(b"1234")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert cf.__version__ in printed
    assert np.__version__ in printed
    assert f"{tmp_path} (1 files, 4 B)" in printed


def test_info_says_what_mends_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "package_version", lambda name: None)
    monkeypatch.setattr(machine, "driver_version", lambda: 13010)
    assert cli.main(["info"]) == 0
    printed = capsys.readouterr().out
    assert "runs CUDA up to 13.1" in printed
    assert 'pip install "cupyfuse[cu13]"' in printed
    assert 'pip install "cupyfuse[torch]"' in printed


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (launcher.Found(object(), "cupyfuse_launcher, interface 1"), "compiled (cupyfuse_launcher, interface 1)"),
        (launcher.Found(None, "CUPYFUSE_LAUNCHER is set"), "Python (CUPYFUSE_LAUNCHER is set)"),
    ],
)
def test_info_says_what_launches(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: launcher.Found, line: str
) -> None:
    monkeypatch.setattr(launcher, "find", lambda: found)
    assert cli.main(["info"]) == 0
    assert re.search(rf"^launches +{re.escape(line)}$", capsys.readouterr().out, re.MULTILINE)


def test_info_survives_a_broken_cupy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(machine, "package_version", lambda name: "14.2.0" if name == "cupy-cuda12x" else None)
    monkeypatch.setattr(machine, "driver_version", lambda: 0)
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert cli.main(["info"]) == 0
    assert "--force-reinstall" in capsys.readouterr().out


def test_info_does_not_import_torch() -> None:
    code = "import sys; from cupyfuse.cli import main; main(['info']); sys.exit('torch' in sys.modules)"
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["run"], "invalid choice: 'run'"),
        (["demo", "--rows", "0"], "argument --rows: expected a whole number of at least 1, got '0'"),
        (["demo", "--rows", "1"], "argument --rows: expected at least 2"),
        (["demo", "--in-features", "many"], "got 'many'"),
        (["demo", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["demo", "--engine", "tpu"], "invalid choice: 'tpu'"),
        (["selftest", "--engine", "tpu"], "invalid choice: 'tpu'"),
        (["selftest", "--markdown"], "expected one argument"),
        (["selftest", "--markdown", "no/such/folder/page.md"], "argument --markdown: expected a file in a folder that"),
        (["selftest", "--markdown", "."], "expected a file in a folder that exists, got '.'"),
        (["selftest", "float32"], "unrecognized arguments: float32"),
        (["explain"], "FUNCTION"),
        (
            ["explain", "head_max"],
            "argument FUNCTION: expected module:function or one of head_logsumexp, head_sum, head_softmax",
        ),
        (["explain", "head_sum", "--training"], "it is for head_softmax"),
        (["explain", "head_softmax", "--training", "--rows", "1"], "expected at least 2 with --training"),
        (["info", "--all"], "unrecognized arguments: --all"),
    ],
    ids=" ".join,
)
def test_arguments_that_make_no_sense(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refused(capsys, *arguments)


def test_it_runs_as_a_module() -> None:
    done = run_python("-m", "cupyfuse", "--version")
    assert (done.returncode, done.stdout) == (0, f"cupyfuse {cf.__version__}\n")
    assert run_python("-m", "cupyfuse", "demo", "--rows", "x").returncode == 2


# The heads' own data ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", heads.HEADS)
def test_example_inputs_lie_where_they_should(name: str, dtype: str) -> None:
    inputs = heads.example_inputs(name, 40, 64, 50, dtype, seed=3)
    assert {key: array.shape for key, array in inputs.items()} == heads.input_shapes(name, 40, 64, 50)
    for array in inputs.values():
        assert array.dtype.name == dtype
    # A 16-bit draw can round up to the end of its range; 1/8 is exact in all four.
    assert inputs["x"].min() >= 0 and inputs["x"].max() <= 1
    for key in ("weight", "bias"):
        spread = inputs[key].astype(np.float64)
        assert 0.1 < abs(spread).max() <= 1 / 8
        assert spread.min() < 0 < spread.max()


def test_example_inputs_are_the_same_for_the_same_seed() -> None:
    first, again = (heads.example_inputs("head_sum", 4, 6, 5, seed=1) for _ in range(2))
    other, softmax = heads.example_inputs("sum", 4, 6, 5, seed=2), heads.example_inputs("softmax", 4, 6, 5, seed=1)
    for name, array in first.items():
        np.testing.assert_array_equal(array, again[name])
        np.testing.assert_array_equal(array, softmax[name])
        assert not np.array_equal(array, other[name])


def test_example_inputs_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="expected one of head_logsumexp"):
        heads.example_inputs("head_max")
    with pytest.raises(TypeError, match="got 'int64'"):
        heads.example_inputs("head_sum", 2, 2, 2, "int64")
