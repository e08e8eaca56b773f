"""The benchmark of losses, without a GPU: its cases on the CPU, its report, its options."""

import json

import pytest
from benchmark_lab import ENVIRONMENT

from benchmarks import __main__ as command
from benchmarks import losses
from benchmarks.__main__ import markdown
from benchmarks.report import Report

THEIRS = (losses.LIGER, losses.CCE, losses.QUACK)


def parse(more=""):
    return command.parse(f"losses --quick {more}".split())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_losses_run(torch_lab, hasty, on_cpu, dtype):
    cases = list(losses.cases(torch_lab, parse(f"--shape 24x32x50 --dtype {dtype}")))
    assert [case.group for case in cases] == [losses.FORWARD, losses.BACKWARD]
    for case in cases:
        for result in case.results:
            if result.rival in THEIRS and "not installed" in result.failure:
                continue
            assert result.failure == "", (case.group, result)
            assert set(result.times) == set(losses.FIGURES)
            if result.rival != losses.PRODUCT:
                # Of 32 terms; in bfloat16 of a rounded gradient, and of rounded logits in eager.
                assert result.error < (1e-5 if dtype == "float32" else 0.05), (case.group, result)
        assert f"peak MB, {losses.OURS}" in case.facts
    report = Report("losses", ENVIRONMENT, {"dtype": dtype}, cases=cases)
    assert report.failed() == []
    json.dumps(report.cases[0].facts, allow_nan=False)
    text = markdown(report)
    assert "## What was asked" in text and losses.PRODUCT in text and "peak MB" in text


def test_a_wrong_loss_is_reported(torch_lab, hasty, on_cpu, monkeypatch):
    right, wrong = losses.loss_of, {losses.OURS: 1.5}
    monkeypatch.setattr(losses, "loss_of", lambda lab, r, *of: lambda: right(lab, r, *of)() * wrong.get(r, 1.0))
    cases = list(losses.cases(torch_lab, parse("--shape 24x32x50 --dtype float32")))
    failures = Report("losses", ENVIRONMENT, {}, cases=cases).failed()
    assert len(failures) == 2 and all("wrong result" in failure for failure in failures)


def test_options():
    given = parse()
    assert given.shapes == losses.DEFAULTS["shapes"][1] and given.shape is None
    assert command.parse(["losses"]).shapes[0] == (8192, 4096, 128256, "bfloat16")
    assert command.stated_options(parse("--shape 4x5x6"))["shape"] == "4x5x6"
    assert "shape" not in command.stated_options(given) and command.file_name(given) == "losses"
