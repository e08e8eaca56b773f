"""`python -m benchmarks functions`: plain and fused calls of users' functions, on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import functions
from benchmarks.functions import FIGURE, OURS, PLAIN
from benchmarks.lab import Lab, cpu_lab, measure_errors
from benchmarks.report import Case, Result, read_cases
from benchmarks.timing import summarize


def test_functions_of_users_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["functions", "--cpu", "--quick", "--only", "layer_norm", "--output", str(tmp_path)]) in (0, 1)
    (case,) = read_cases(tmp_path / "functions.json")
    assert (case.name, case.group) == ("layer_norm", "256 rows, float32")
    assert functions.least(case, PLAIN) > 0 and functions.least(case, OURS) > 0 and case.facts[functions.FIRST] > 0
    assert case.value(OURS, "error") < 1e-6
    assert "1 functions, 0 failed" in capsys.readouterr().out
    assert "| layer_norm |" in (tmp_path / "functions.md").read_text()


def timed(plain: float, fused: float) -> Case:
    times = {PLAIN: plain, OURS: fused}
    results = [Result(rival, times={FIGURE: summarize([time, 9 * time])}) for rival, time in times.items()]
    return Case("s", "a", (1, 1, 1), "float32", results=results)


def test_slow_calls_are_counted() -> None:
    cases = [timed(1000.0, 1200.0), timed(1.0, 15.0)]
    assert list(map(functions.slow, cases)) == [True, False]
    assert functions.summary(cases) == "2 functions, 0 failed; plain / fused: 0.24 on average (geometric), 1 slow."
    failing = Case("s", "b", (1, 1, 1), "float32", results=[Result(OURS, failure="no")])
    assert functions.summary([failing]) == "Nothing was measured."
    report = command.Report("functions", {"gpu": "cpu"}, {}, cases=[*cases, failing])
    assert functions.failed(report) == ["s, b: cupyfuse: no", "s, a: slow"]


def test_errors_are_relative_to_what_is_finite() -> None:
    exact = [np.array([3.0, 4.0, np.inf])]
    for last, error in ((np.nan, 0.1), (np.inf, 0.1)):
        rival = functions._rival(_lab(), lambda last=last: np.array([3.0, 4.5, last]), [], exact)
        assert measure_errors(rival)[0] == pytest.approx(error)


def _lab() -> Lab:
    with cpu_lab() as lab:
        return lab


def test_what_takes_no_arrays_of_a_size_is_not_a_failure() -> None:
    def function(x: Any) -> Any:
        return x.reshape(7, 7)

    case = Case("s", "a", (1, 1, 1), "float32")
    functions.measure(_lab(), case, function, [np.ones(3)], 1e-9)
    assert "takes no arrays of this size: ValueError" in case.results[0].failure
    assert command.Report("functions", {}, {}, cases=[case]).failed() == []
