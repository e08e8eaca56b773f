"""The benchmark of the cost model without a GPU: its report of made-up figures, its cases on the CPU."""

import json

import pytest
import torch
from benchmark_lab import ENVIRONMENT

from benchmarks import __main__ as command
from benchmarks import cost_chains, cost_report, costs, rivals, timing
from benchmarks.report import Case, Report, Result

OURS, EAGER, INDUCTOR, NOTHING = cost_report.OURS, cost_report.EAGER, cost_report.INDUCTOR, cost_report.NOTHING


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(rivals, "place", lambda: "cpu")


def made_up(predicted, ours, theirs, nothing=None):
    """A case: times of the GPU and of the host, in microseconds."""
    case = Case(
        "Inference beside Inductor" if nothing else "Inference beside PyTorch eager", "chain", (4, 8), "float32"
    )
    case.facts = dict(zip(cost_report.PREDICTED, predicted, strict=True))
    named = [(OURS, ours), (INDUCTOR if nothing else EAGER, theirs), *([(NOTHING, (1.0, nothing))] if nothing else [])]
    for rival, (gpu, host) in named:
        times = {cost_report.FIGURE: gpu, cost_report.HOST: host}
        case.results.append(Result(rival, times={f: timing.summarize([t]) for f, t in times.items()}))
    return case


def report_of(*cases):
    return Report("costs", ENVIRONMENT, {"seconds": 1}, cases=list(cases))


def test_a_right_decision_costs_nothing():
    (found,) = cost_report.comparisons(report_of(made_up((10, 20, 100, 30), (20, 20), (110, 25))))
    assert found.chosen and found.right and found.lost == 0
    assert found.ratios == (0.5, 1.0, pytest.approx(100 / 110), 1.2)


def test_a_wrong_decision_costs_the_difference():
    report = report_of(made_up((10, 20, 100, 30), (120, 20), (110, 25)))
    (found,) = cost_report.comparisons(report)
    assert found.chosen and not found.right and found.lost == 10
    text = cost_report.costs_markdown(report)
    assert "## Wrong decisions" in text and "takes 10 us longer than the best choices, which take 110 us" in text


def test_the_hosts_time_of_a_compiled_graph_itself_is_not_the_chains():
    (found,) = cost_report.comparisons(report_of(made_up((10, 11, 10, 4), (10, 11), (10, 34), nothing=30)))
    assert found.measured == (10, 11, 10, 4) and not found.chosen and found.right


def test_a_case_without_figures_is_told_of(tmp_path):
    case = made_up((10, 20, 100, 30), (120, 20), (110, 25))
    case.find(OURS).times.clear()
    case.find(OURS).failure = "out of memory"
    report = report_of(case)
    assert list(cost_report.comparisons(report)) == []
    text = command.write(report, tmp_path, "costs")
    assert "0 of 1 cases" in text and "cupyfuse: out of memory" in text
    assert {path.name for path in tmp_path.iterdir()} == {"costs.json", "costs.md"}


def test_chains_run_as_they_are_written():
    for question in cost_chains.questions(cost_chains.SMALL):
        tensors = [torch.randn(shape).to(getattr(torch, dtype)) for shape, dtype in question.metas]
        found = cost_chains.as_written(question.chain)(*tensors)
        for got, want in zip(found, question.chain.eager(tensors), strict=True):
            torch.testing.assert_close(got, want)


def test_all_chains_of_the_plan_are_estimated():
    from cupyfuse.torch.cost.estimate import estimate

    for question in cost_chains.questions():
        assert not estimate(question.chain, question.metas).reason, question


def test_the_cases_run(torch_lab, hasty, on_cpu):
    cases = list(costs.cases(torch_lab, costs.Options(plan=cost_chains.SMALL)))
    assert len(cases) == 2 * 2 * 3
    for case in cases:
        assert [r.failure for r in case.results] == [""] * len(case.results), case
    report = report_of(*cases)
    assert len(list(cost_report.comparisons(report))) == len(cases)
    json.dumps(report.cases[0].facts, allow_nan=False)
    assert f"## Training beside {INDUCTOR}" in cost_report.costs_markdown(report)


def test_the_command():
    given = command.parser().parse_args(["costs", "--seconds", "9", "--precision", "high"])
    name, stated, cases = command.plan(given)
    assert (name, stated["seconds"]) == ("costs-high", 9.0)
    assert cases.keywords["options"].seconds == 9.0


def test_one_that_fails_does_not_end_the_run(torch_lab, hasty, on_cpu, monkeypatch):
    monkeypatch.setattr(rivals, "compiled", lambda function, mode="default": 1 / 0)
    cases = list(costs.cases(torch_lab, costs.Options(plan=cost_chains.SMALL[-1:])))
    assert len(cases) == 4
    assert all("ZeroDivisionError" in c.find(INDUCTOR).failure for c in cases if c.find(INDUCTOR))
    assert list(costs.cases(torch_lab, costs.Options(seconds=0.0))) == []
