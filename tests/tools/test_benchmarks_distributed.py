"""The benchmark of several processes, on the CPU: what it writes, and that rows which fail do not end it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support import ROOT

from benchmarks import __main__ as command
from benchmarks import distributed
from benchmarks.distributed import BACKEND, FORMS, Row, Table

pytest.importorskip("torch")

CHOSEN = ["distributed", "--processes", "2", "--heads", "head_sum", "--dtypes", "float32", "--no-backend"]


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RANK", raising=False)


def rows(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "distributed.json").read_text())["rows"])


def test_two_processes_train_right_and_go_on_behind_what_is_written(tmp_path: Path) -> None:
    assert command.main([*CHOSEN, "--output", str(tmp_path)]) == 0
    first = rows(tmp_path)
    assert [row["form"] for row in first] == [*FORMS[:-1]] * 2
    assert all(Row(**row).right and row["milliseconds"] > 0 for row in first)
    assert all(row["chains"] == 1 for row in first if row["chains"] is not None)
    text = (tmp_path / "distributed.md").read_text()
    assert "## float32, fully_shard" in text and "NO" not in text
    # The processes ended within a row: the next ones run those behind it.
    found = json.loads((tmp_path / "distributed.json").read_text())
    found["rows"] = [{**first[0], "failure": "the processes ended, or were stuck"}]
    (tmp_path / "distributed.json").write_text(json.dumps(found))
    assert command.main([*CHOSEN, "--output", str(tmp_path), "--keep"]) == 1
    again = rows(tmp_path)
    assert again[0]["failure"] and not any(row["failure"] for row in again[1:]) and len(again) == len(first)


def test_processes_are_not_waited_for_where_one_fails() -> None:
    script = "import os, sys, time; time.sleep(0 if os.environ['RANK'] == '0' else 60); sys.exit(3)"
    statuses = distributed.start([sys.executable, "-c", script], 2, 1.0)
    assert statuses[0] == 3 and statuses[1] < 0


def test_rows_and_their_report() -> None:
    plan = distributed.plan(("head_sum",), ("float32",), FORMS)
    assert len(plan) == 2 * len(FORMS) and [row.form for row in plan[-2:]] == [BACKEND] * 2
    right = Row("head_sum", "float32", "DDP", FORMS[0], "", 1e-7, 1e-7, 0.0, 0.0, 1.5, 1)
    wrong = Row("head_sum", "float32", "DDP", FORMS[1], "", 1e-2, 1e-7)
    failed = Row("head_sum", "float32", "DDP", FORMS[2], "process 1: RuntimeError: no")
    assert right.right and not wrong.right and not failed.right
    text = Table({"gpu": "cpu"}, {"shape": "1x2x3"}, [right, wrong, failed]).markdown()
    assert "| yes |" in text and "| NO |" in text and "RuntimeError: no" in text


def test_unknown_heads_are_refused() -> None:
    with pytest.raises(SystemExit):
        command.main(["distributed", "--heads", "head_of_hair"])
