"""The benchmark of the cost model without a GPU: its report of made-up figures, its cases on the CPU."""

import json

import pytest
import torch
from benchmark_lab import ENVIRONMENT, timed

from benchmarks import __main__ as command
from benchmarks import cost_chains, costs, pytorch
from benchmarks.__main__ import markdown
from benchmarks.report import Case, Report

OURS, EAGER, INDUCTOR, NOTHING = costs.OURS, costs.EAGER, costs.INDUCTOR, costs.NOTHING
SMALL = (
    (cost_chains.linear_gelu, ("bfloat16",), ((4, 16, 8),)),
    (cost_chains.head_sum, ("float32",), ((4, 16, 8),)),
    (cost_chains.scaled_softmax, ("float32",), ((4, 16),)),
)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(cost_chains, "PLAN", SMALL)


def run(lab, arguments="costs"):
    return list(costs.cases(lab, command.parse(arguments.split())))


def made_up(predicted, ours, theirs, nothing=None):
    """A case: times of the GPU and of the host, in microseconds."""
    case = Case(
        "Inference beside Inductor" if nothing else "Inference beside PyTorch eager", "chain", (4, 8), "float32"
    )
    case.facts = dict(zip(costs.PREDICTED, predicted, strict=True))
    named = [(OURS, ours), (INDUCTOR if nothing else EAGER, theirs), *([(NOTHING, (1.0, nothing))] if nothing else [])]
    for rival, (gpu, host) in named:
        case.results.append(timed(rival, None, **{costs.GPU: gpu, costs.HOST: host}))
    return case


def report_of(*cases):
    return Report("costs", ENVIRONMENT, {"seconds": 1}, cases=list(cases))


def test_a_right_decision_costs_nothing():
    (found,) = costs.comparisons(report_of(made_up((10, 20, 100, 30), (20, 20), (110, 25))))
    assert found.chosen and found.right and found.lost == 0
    assert found.ratios == (0.5, 1.0, pytest.approx(100 / 110), 1.2)


def test_a_wrong_decision_costs_the_difference():
    report = report_of(made_up((10, 20, 100, 30), (120, 20), (110, 25)))
    (found,) = costs.comparisons(report)
    assert found.chosen and not found.right and found.lost == 10
    text = markdown(report)
    assert "## Wrong decisions" in text and "takes 10 us longer than the best choices, which take 110 us" in text


def test_the_hosts_time_of_a_compiled_graph_itself_is_not_the_chains():
    (found,) = costs.comparisons(report_of(made_up((10, 11, 10, 4), (10, 11), (10, 34), nothing=30)))
    assert found.measured == (10, 11, 10, 4) and not found.chosen and found.right


def test_a_case_without_figures_is_told_of(tmp_path):
    case = made_up((10, 20, 100, 30), (120, 20), (110, 25))
    case.find(OURS).times.clear()
    case.find(OURS).failure = "out of memory"
    report = report_of(case)
    assert list(costs.comparisons(report)) == []
    text = command.write(report, tmp_path, "costs")
    assert "0 of 1 cases" in text and "cupyfuse: out of memory" in text
    assert {path.name for path in tmp_path.iterdir()} == {"costs.json", "costs.md"}


def test_chains_run_as_they_are_written(small):
    for sized in cost_chains.sized_chains():
        tensors = [torch.randn(shape).to(getattr(torch, dtype)) for shape, dtype in sized.metas]
        found = cost_chains.as_written(sized.chain)(*tensors)
        for got, want in zip(found, sized.chain.eager(tensors), strict=True):
            torch.testing.assert_close(got, want)


def test_all_chains_of_the_plan_are_estimated():
    from cupyfuse.torch.cost.estimate import estimate

    for sized in cost_chains.sized_chains():
        assert not estimate(sized.chain, sized.metas).reason, sized


def test_the_cases_run(torch_lab, hasty, on_cpu, small):
    cases = run(torch_lab)
    assert len(cases) == 2 * 2 * 3
    for case in cases:
        assert [r.failure for r in case.results] == [""] * len(case.results), case
    report = report_of(*cases)
    assert len(list(costs.comparisons(report))) == len(cases)
    json.dumps(report.cases[0].facts, allow_nan=False)
    assert f"## Training beside {INDUCTOR}" in markdown(report)


def test_the_command():
    given = command.parse(["costs", "--seconds", "9", "--precision", "high"])
    assert (command.file_name(given), given.seconds) == ("costs-high", 9.0)


def test_one_that_fails_does_not_end_the_run(torch_lab, hasty, on_cpu, monkeypatch):
    monkeypatch.setattr(cost_chains, "PLAN", SMALL[-1:])
    monkeypatch.setattr(pytorch, "compile_static", lambda *of: 1 / 0)
    cases = run(torch_lab)
    assert len(cases) == 4
    assert all("ZeroDivisionError" in c.find(INDUCTOR).failure for c in cases if c.find(INDUCTOR))
    monkeypatch.setattr(costs, "predict", lambda *of: 1 / 0)
    assert all("ZeroDivisionError" in c.find(OURS).failure for c in run(torch_lab))
    assert run(torch_lab, "costs --seconds 0") == []
