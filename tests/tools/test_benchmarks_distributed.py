"""The benchmark of several processes, on the CPU: what it writes, and that rows which fail do not end it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from support import ROOT

from benchmarks import __main__ as command
from benchmarks import distributed, vocabulary
from benchmarks.distributed import ENDED, FORMS, INSIDE, PLAIN_ERROR
from benchmarks.report import Case, Report, Result, read_cases
from benchmarks.timing import summarize

pytest.importorskip("torch")

CHOSEN = ["distributed", "--processes", "2", "--heads", "head_sum", "--dtypes", "float32", "--no-backend"]


# Of the second process, which ends while it trains a form.
DYING = """
import os
if os.environ.get("RANK") == "1":
    from benchmarks import distributed, vocabulary
    train = distributed.Trial.train
    def end(self, result):
        os._exit(3) if (result.rival, self._wrapper) == (distributed.INSIDE, "DDP") else train(self, result)
    distributed.Trial.train = end
"""


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("RANK", raising=False)


def found(folder: Path) -> list[tuple[Case, Result]]:
    return [(case, result) for case in read_cases(folder / "distributed.json") for result in case.results]


@pytest.mark.rotates
def test_processes_train_right_and_where_they_end_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(DYING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    assert command.main([*CHOSEN, "--output", str(tmp_path)]) == 1
    assert [result.rival for _, result in found(tmp_path)] == [*FORMS[:-1]] * 2
    for case, result in found(tmp_path):
        if case.group == "float32, DDP" and result.rival == INSIDE:
            assert result.failure == ENDED and not result.times
            continue
        assert not result.failure and case.value(result.rival, "wall_loop") > 0 and result.error < 1e-5
        assert case.facts.get(f"{distributed.FUSED_CHAINS}, {result.rival}", 1) == 1
    text = (tmp_path / "distributed.md").read_text()
    assert "## float32, fully_shard" in text and text.count("\n### head_sum\n") == 2
    # With --keep, and one process as torchrun starts it, only the case that is not whole is measured again.
    path = tmp_path / "distributed.json"
    written = json.loads(path.read_text())
    del written["cases"][0]["results"][2]
    path.write_text(json.dumps(written))
    port = distributed.free_port()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    assert command.main([*CHOSEN, "--output", str(tmp_path), "--keep"]) == 0
    again = json.loads(path.read_text())["cases"]
    assert again[1] == written["cases"][1] and len(again[0]["results"]) == len(FORMS) - 1
    assert again[0]["results"][0]["times"] != written["cases"][0]["results"][0]["times"]


@pytest.mark.rotates
def test_a_vocabulary_is_split(tmp_path: Path) -> None:
    chosen = ["--dtypes", "float32", "--shape", "32x16x51"]
    arguments = ["distributed", "--vocabulary", "--processes", "2", *chosen, "--output", str(tmp_path)]
    assert command.main(arguments) == 0
    cases = read_cases(tmp_path / "vocabulary.json")
    assert len(cases) == 4
    for case in cases:
        assert [result.rival for result in case.results] == [*vocabulary.RIVALS]
        for result in case.results:
            assert not result.failure and result.error < vocabulary.WRONG[case.dtype], (case, result)
            assert case.value(result.rival, "wall_loop") > 0
        if "backward" in case.group:
            assert case.facts[f"{vocabulary.GRADIENTS}, {vocabulary.SPLIT}"] <= vocabulary.WRONG[case.dtype]
    text = (tmp_path / "vocabulary.md").read_text()
    assert "## logsumexp, forward and backward" in text and "| cupyfuse, split |" in text


def test_processes_are_not_waited_for_where_one_fails() -> None:
    script = "import os, sys, time; time.sleep(0 if os.environ['RANK'] == '0' else 60); sys.exit(3)"
    statuses = distributed.start([sys.executable, "-c", script], 2, 1.0)
    assert statuses[0] == 3 and statuses[1] < 0


def test_forms_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    case, order = Case("float32, DDP", "head_sum", (4, 8, 16), "float32"), []
    dist = types.SimpleNamespace(barrier=lambda: None, all_reduce=lambda *of: None, ReduceOp=torch.distributed.ReduceOp)
    worker = types.SimpleNamespace(torch=torch, dist=dist, rank=0, device="cpu", synchronize=lambda: None)
    trial = distributed.Trial(worker, case)
    trial._models = {form: torch.nn.Linear(8, 16) for form in "abc"}
    monkeypatch.setattr(trial, "_step", lambda model, optimizer, x: order.append(model))
    results = [Result(form) for form in "abc"]
    trial.time(results)
    names = {model: form for form, model in trial._models.items()}
    turns = [names[model] for model in order[:: distributed.TIMED_STEPS]]
    assert len(order) == 3 * (distributed.ROUNDS + 1) * distributed.TIMED_STEPS
    assert "".join(turns).startswith("abcbcacababc")
    assert [result.times["wall_loop"].n for result in results] == [distributed.ROUNDS] * 3


def test_the_report() -> None:
    case = Case("float32, DDP", "head_sum", (1, 2, 3), "float32", facts={f"{PLAIN_ERROR}, {FORMS[0]}": 2e-7})
    case.results = [Result(FORMS[0], 1e-7, {"wall_loop": summarize([1500.0])}), Result(FORMS[1], failure="no")]
    text = "\n".join(distributed.report_lines(Report("distributed", {}, {}, cases=[case])))
    assert f"| {FORMS[0]} | 1.0e-07 | 1500 | 1.00 | 2.0e-07 |" in text
    assert f"- {FORMS[1]}: no" in text


def test_unknown_heads_are_refused() -> None:
    with pytest.raises(SystemExit):
        command.main(["distributed", "--heads", "head_of_hair"])
