"""The benchmark of 16-bit products without a GPU: what its rivals compute, what they plan, and its report."""

import argparse

import numpy as np
import pytest
from benchmark_lab import ENVIRONMENT, timed

from benchmarks import half
from benchmarks.__main__ import markdown, parse
from benchmarks.lab import measure_errors
from benchmarks.report import Case, Report
from benchmarks.rivals import COMPILED, EAGER
from cupyfuse import settings

OPTIONS = argparse.Namespace(seed=0, half_size=64, budget=1e-9)


@pytest.mark.parametrize("name", half.FUNCTIONS)
@pytest.mark.parametrize("dtype", half.DTYPES)
def test_rivals_compute_the_same(torch_lab, name, dtype):
    arguments = half.draw(torch_lab, (5, 16, 24), dtype, 0)[: 3 if name else 2]
    factories = half.factories(torch_lab, name, arguments, dtype)
    assert list(factories) == [half.OWN, half.LIBRARY, EAGER, COMPILED]
    for rival, make in factories.items():
        error, _ = measure_errors(make())
        assert 0 < error < 1e-2, rival


def test_calls_plan_as_they_are_switched():
    seen = [half.switched(settings.current_epilogues, value)() for value in ("always", "never")]
    assert seen == ["always", "never"] and settings.current_epilogues() == "measured"


def test_cases(lab, monkeypatch, hasty):
    monkeypatch.setattr(half, "_CUBES", (16, 32, 128))
    monkeypatch.setattr(half, "_HEAD_SHAPE", (4, 16, 24))
    monkeypatch.setattr(half, "_TAILS", (("gelu", (4, 16, 24)), ("logsumexp", (128, 128, 128))))
    cases = list(half.cases(lab, OPTIONS))
    assert [case.group for case in cases] == [half.PRODUCTS] * 6 + [half.CHAINS] + [half.HEADS] * 3
    assert [case.shape for case in cases[:3]] == [(4, 16, 24), (16, 16, 16), (32, 32, 32)]
    for case in cases:
        done = [result for result in case.results if not result.failure]
        assert [result.rival for result in done] == [half.OWN, half.LIBRARY], case.results
        assert set(done[0].times) == set(half.FIGURES)


def test_the_command_line_takes_parts():
    assert parse(["gemm", "--parts", "16-bit"]).half_size == 16384
    assert parse(["gemm", "--quick"]).half_size == 2048 and parse(["gemm"]).parts == ("float32", "16-bit")


def test_the_report_says_how_much_faster():
    case = Case(half.PRODUCTS, "bfloat16, 10 x 10 x 10", (10, 10, 10), "bfloat16")
    for rival, time in ((half.OWN, 2.0), (half.LIBRARY, 3.0), (EAGER, 4.0)):
        case.results.append(timed(rival, 1e-3, gpu_evicted=time))
    text = markdown(Report("gemm", ENVIRONMENT, {}, cases=[case]))
    row = next(line for line in text.splitlines() if line.startswith("| bfloat16, 10 x 10 x 10"))
    assert np.allclose([float(cell) for cell in row.split("|")[-4:-2]], [1.5, 2.0])
    assert "float32" not in text.partition("## 16-bit")[0].replace("float32 ", "")
