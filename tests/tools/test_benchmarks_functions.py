"""`python -m benchmarks functions`: plain and fused calls of users' functions, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks.functions import Row, largest_error, summary


def test_functions_of_users_are_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["functions", "--cpu", "--quick", "--only", "layer_norm", "--output", str(tmp_path)]) in (0, 1)
    (row,) = json.loads((tmp_path / "functions.json").read_text())["rows"]
    assert row["name"] == "layer_norm" and row["plain"] > 0 and row["fused"] > 0 and not row["failure"]
    assert row["error"] < 1e-6 and row["way"] in ("as written", "plan")
    assert "1 functions, 0 failed" in capsys.readouterr().out
    assert "| layer_norm |" in (tmp_path / "functions.md").read_text()


def test_slow_calls_are_counted() -> None:
    rows = [Row("a", "s", "float32", plain=1e-3, fused=1.2e-3), Row("b", "s", "float32", plain=1e-6, fused=15e-6)]
    assert [row.slow for row in rows] == [True, False]
    assert summary(rows) == ["2 functions, 0 failed; plain / fused: 0.24 on average (geometric), 1 slow."]
    assert summary([Row("a", "s", "float32", failure="no")]) == ["Nothing was measured."]


def test_errors_are_relative_to_what_is_finite() -> None:
    exact = [np.array([3.0, 4.0, np.inf])]
    assert largest_error(np.array([3.0, 4.5, np.nan]), exact) == pytest.approx(0.1)
    assert largest_error(np.array([3.0, np.inf, np.inf]), exact) is None
