"""The benchmark of whole models, without a GPU: ratios and reports on made-up figures, tiny models on the CPU."""

import dataclasses
import json
import subprocess
import sys
import weakref

import pytest
import torch
from benchmark_lab import ENVIRONMENT, FakeDevice, timed
from support import ROOT

from benchmarks import __main__ as command
from benchmarks import models, timing
from benchmarks.__main__ import markdown
from benchmarks.models import mean_ratio
from benchmarks.more_networks import ALL_NETWORKS, MORE_NETWORKS
from benchmarks.networks import NETWORKS
from benchmarks.report import OUT_OF_TIME, Case, Report, Result, check, merge

EAGER, COMPILED, FUSED, BACKEND = models.EAGER, models.COMPILED, models.FUSED, models.BACKEND


def made_up(name="bert, large", fused=5e3, setting="bfloat16"):
    """Eager takes 10 ms, torch.compile and our backend 8 ms, ours what is asked for; graphs were left out."""
    case = Case(models.group_title(models.INFERENCE, setting), name, (32, 128), "bfloat16")
    for rival, median in ((EAGER, 10e3), (FUSED, fused), (BACKEND, 8e3), (COMPILED, 8e3)):
        case.results.append(timed(rival, 1e-3, **dict.fromkeys(models.FIGURES, median)))
        case.facts[f"first call s, {rival}"] = 12.5
    return case


def late(name="llama, large"):
    return dataclasses.replace(made_up(name), results=[Result(FUSED, failure=OUT_OF_TIME)], facts={})


def report(*cases):
    return Report("models", ENVIRONMENT, {"quick": False}, cases=list(cases))


# Reports ------------------------------------------------------------------------------------------------------------


def ratios(cases):
    """The times of `fuse` over eager's."""
    (requirement,) = (r for r in models.REQUIREMENTS if (r.what, r.ours) == ("wall_loop", (FUSED,)))
    return check([requirement], cases)


def test_ratios_and_their_geometric_mean():
    cases = [made_up(), made_up("gpt2, large", 20e3)]
    assert [(f.found, f.holds) for f in ratios(cases)] == [({EAGER: 0.5}, True), ({EAGER: 2.0}, False)]
    assert mean_ratio(ratios(cases)) == pytest.approx(1.0)
    assert mean_ratio([]) is None
    cases[0].find(EAGER).failure = "RuntimeError: no"
    assert [f.found[EAGER] for f in ratios(cases)] == [None, 2.0]


def test_the_threshold_lies_between_noise_and_being_behind():
    holds = {time: ratios([made_up(fused=time)])[0].holds for time in (10e3, 10.2e3, 10.3e3)}
    assert holds == {10e3: True, 10.2e3: True, 10.3e3: False}


def test_the_report_ends_with_verdicts():
    failing = made_up("vit, small")
    failing.find(BACKEND).failure = "RuntimeError: boom | bang"
    text = markdown(report(made_up(), made_up("gpt2, large", 20e3), failing, late()))
    assert "| cupyfuse.torch.fuse | 1.0e-03 | 5.00 | 5.00 | 2.00 | 2.00 | 12.5 |" in text
    assert "- `bert`: BERT-base" in text and "`t5`" not in text
    body, verdicts = text.split("## Verdicts")
    assert "- cupyfuse backend: RuntimeError: boom" in body
    row = next(line for line in verdicts.splitlines() if line.startswith("| Inference, bfloat16: bert, large"))
    assert row.split("|")[2:6] == [" 0.50 ", " 0.50 ", " 1.00 ", " 1.00 "]
    assert (
        f"- {FUSED} / {EAGER}, wall, loop: geometric mean 0.79, worst 2.00, behind (above 1.02) in 1 of 3: "
        "gpt2, large (Inference, bfloat16) 2.00." in verdicts
    )
    assert "- cupyfuse backend: failed in 1 of 3 cases." in verdicts
    assert "Out of time: 1 cases: llama, large (Inference, bfloat16)." in verdicts
    assert "llama" not in body.replace("`llama`", "")
    assert "No rival failed." in markdown(report(made_up()))
    assert "## Verdicts" in markdown(report(late()))


def test_only_what_was_tried_counts_as_failed():
    assert report(made_up(), late()).failed() == []
    failing = made_up()
    failing.find(FUSED).failure = "wrong result: relative error 3"
    assert len(report(failing, late()).failed()) == 1


def test_later_cases_take_the_place_of_earlier_ones():
    first, second, other = made_up(), made_up(fused=4e3), made_up(setting="float32")
    missed = dataclasses.replace(late(), name="bert, large")
    assert merge([first, other, made_up("mlp, small"), second, missed]) == [second, made_up("mlp, small"), other]
    assert merge([missed, first]) == [first] and merge([missed]) == [missed]


def test_what_is_written(tmp_path):
    run = report()
    for cases in ([made_up()], [made_up("gpt2, large"), late()]):
        command.collect(run, iter(cases), tmp_path, "models", add=True)
    assert {path.name for path in tmp_path.iterdir()} == {"models.json", "models.md"}
    fields = json.loads((tmp_path / "models.json").read_text())["cases"]
    assert [c["name"] for c in fields] == ["bert, large", "gpt2, large", "llama, large"]
    assert Case.from_json(fields[0]) == made_up()
    again = report()
    command.collect(again, iter([made_up(fused=4e3)]), tmp_path, "models", add=True)
    assert again.cases == [made_up(fused=4e3), made_up("gpt2, large")]
    command.collect(again := report(), iter([]), tmp_path, "models", add=False)
    assert again.cases == []


def test_committed_results_can_be_read():
    folder = ROOT / "benchmarks" / "results" / "nvidia-h200"
    for path in folder.glob("*.json"):
        fields = json.loads(path.read_text())
        markdown(Report(**{**fields, "cases": [Case.from_json(case) for case in fields["cases"]]}))


# Timing -------------------------------------------------------------------------------------------------------------


def test_calls_in_a_loop_and_calls_that_are_queued():
    order = []

    class Clock(FakeDevice):
        hold = staticmethod(lambda microseconds: order.append("hold"))
        record = staticmethod(lambda: order.append("record") or 0.0)
        synchronize = staticmethod(lambda: order.append("wait"))

        def elapsed(self, start, end):
            return 1e4

    contest = timing.Contest(Clock(), {"a": lambda: order.append("call")}, 1e-9)
    order.clear()
    assert contest.measure("gpu_queued")["a"].n == 5
    assert order == ["hold", "record", "call", "record"] * 5
    order.clear()
    assert contest.measure("wall_loop")["a"].n == 5
    calls = order.count("call") // 5
    assert calls == 9  # 30 ms of calls of 10 / 3 ms
    assert order == ["wait", *["call"] * calls, "wait"] * 5


# The cases on the CPU -----------------------------------------------------------------------------------------------


def run(torch_lab, **changed):
    given = command.parse(["models", "--tiny", "--quick", "--batches", "small", "--dtypes", "float32"])
    for option, value in changed.items():
        assert hasattr(given, option)
        setattr(given, option, value)
    return list(models.cases(torch_lab, given))


@pytest.mark.rotates
@pytest.mark.parametrize("name", [n for n, network in ALL_NETWORKS.items() if "timm" not in network.what])
def test_tiny_models_run_in_every_mode(torch_lab, hasty, on_cpu, name):
    # Nothing is compiled in this lab; what `fuse` makes of such models is for tests/torch/test_families.py.
    more = ("fuse", "backend", "compile") if name in ("mlp", "distilbert") else ()
    found = run(torch_lab, models=(name,), rivals=("eager", *more, "compile-graphs"))
    assert [case.group for case in found] == [models.group_title(mode, "float32") for mode in models.MODES]
    for case in found:
        assert case.shape[0] == ALL_NETWORKS[name].batches[0]
        for result in case.results:
            assert result.failure == "", (case.group, result)
            assert set(result.times) == set(models.FIGURES)
            assert result.error < 1e-5, (case.group, result)  # sums of 100 terms, some tens of operations in a row
            assert case.facts[f"first call s, {result.rival}"] > 0
    markdown(Report("models", ENVIRONMENT, {}, cases=found))


def test_settings(torch_lab, hasty, on_cpu, monkeypatch):
    seen, trials = [], []
    begin = models.Trial.__init__

    def watched(self, *args):
        assert [trial() for trial in trials] == [None] * len(trials)  # no two models are in memory at once
        trials.append(weakref.ref(self))
        seen.append(torch.get_float32_matmul_precision())
        begin(self, *args)

    monkeypatch.setattr(models.Trial, "__init__", watched)
    found = run(torch_lab, models=("mlp",), rivals=("eager",), dtypes=tuple(models.SETTINGS), modes=("inference",))
    assert seen == ["highest", "high", "highest"] and torch.get_float32_matmul_precision() == "highest"
    assert [case.dtype for case in found] == ["float32", "float32", "bfloat16"]
    assert found[0].results[0].error < 1e-5 < found[2].results[0].error < 0.05
    assert [case.group for case in found] == [
        'Inference, float32 at "highest"', 'Inference, float32 at "high"', "Inference, bfloat16",
    ]  # fmt: skip


def test_a_rival_that_fails_is_a_cell_of_the_report(torch_lab, hasty, on_cpu, monkeypatch):
    made = models.as_run_by

    def broken(rival, lab, module):
        if rival == FUSED:
            raise RuntimeError("boom")
        if rival != BACKEND:
            return made(rival, lab, module)
        other = torch.nn.Linear(32, 7)
        return lambda input: other(input)  # of other weights

    monkeypatch.setattr(models, "as_run_by", broken)
    (case,) = run(torch_lab, models=("mlp",), modes=("inference",), rivals=("eager", "fuse", "backend", "compile"))
    failures = {result.rival: result.failure for result in case.results}
    assert failures[FUSED] == "RuntimeError: boom" and failures[BACKEND].startswith("wrong result")
    assert failures[EAGER] == failures[COMPILED] == "" and case.find(COMPILED).times


def test_a_training_step_starts_every_rival_from_the_same_weights(torch_lab, hasty, on_cpu, monkeypatch):
    monkeypatch.setattr(models, "LEARNING_RATE", 0.5)
    (case,) = run(torch_lab, models=("mlp",), modes=("training",), rivals=("eager", "compile"))
    first, second = case.results
    assert first.error == second.error and first.error < 1e-5  # with BatchNorm's statistics


def test_a_model_that_cannot_be_built_is_reported(torch_lab, hasty, on_cpu, monkeypatch):
    def missing(tiny):
        raise ModuleNotFoundError("No module named 'timm'", name="timm")

    monkeypatch.setitem(models.ALL_NETWORKS, "vit", dataclasses.replace(NETWORKS["vit"], build=missing))
    found = run(torch_lab, models=("vit", "mlp"), modes=("inference",), rivals=("eager", "compile"))
    assert [r.failure for r in found[0].results] == ["ModuleNotFoundError: No module named 'timm'"] * 2
    assert not any(r.failure for r in found[1].results)


def test_nothing_is_begun_once_the_time_is_over(torch_lab, hasty, on_cpu):
    found = run(torch_lab, seconds=0.0)
    assert len(found) == len(NETWORKS) * 2
    assert len(run(torch_lab, seconds=0.0, models=("more", "bert"))) == (len(MORE_NETWORKS) + 1) * 2
    assert {r.failure for case in found for r in case.results} == {OUT_OF_TIME}
    assert all(case.unmeasured for case in found)


# The command line ---------------------------------------------------------------------------------------------------


def test_options():
    arguments = "models --models bert,mlp --dtypes float32-high --modes training --rivals eager --seconds 90 --tiny"
    given = command.parse(arguments.split())
    assert (given.models, given.dtypes, given.batches) == (("bert", "mlp"), ("float32-high",), tuple(models.BATCHES))
    assert (command.file_name(given), command.stated_options(given)["seconds"], given.tiny) == ("models", 90, True)
    assert "seconds" not in command.stated_options(command.parse(["models"]))  # JSON has no infinity
    with pytest.raises(SystemExit):
        command.parse(["models", "--models", "resnext"])


def test_torch_and_the_libraries_are_imported_when_they_are_needed():
    code = "import sys, benchmarks.__main__; assert not {'torch', 'transformers', 'timm'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
