"""The benchmark of the heads through PyTorch, without a GPU: verdicts on made-up figures, its cases on the CPU."""

import functools
import json

import pytest
import torch
from benchmark_lab import ENVIRONMENT, FakeDevice, timed

from benchmarks import __main__ as command
from benchmarks import rivals, timing, torch_heads
from benchmarks.__main__ import markdown
from benchmarks.report import Case, Report, check
from cupyfuse import dtypes

pytestmark = pytest.mark.usefixtures("every_chain")

EAGER, COMPILED, AUTOTUNED = torch_heads.EAGER, torch_heads.COMPILED, torch_heads.AUTOTUNED
FUSED, BOUND, DROP_IN = torch_heads.FUSED, torch_heads.BOUND, torch_heads.DROP_IN


def made_up():
    """Every case: ours takes 10 us, bind's 10 us, eager 2500 us, compiled 2400 us, autotuned 2300 us."""
    cases = []
    for name in torch_heads.NAMES:
        for group, figures in torch_heads.FIGURES.items():
            if group == torch_heads.LAUNCH:
                continue
            case = Case(group, name, (1024, 8192, 8192), "float32")
            for rival, median in (
                (FUSED, 10.0),
                (BOUND, 10.0),
                (DROP_IN, 10.0),
                (EAGER, 2500.0),
                (COMPILED, 2400.0),
                (AUTOTUNED, 2300.0),
            ):
                case.results.append(timed(rival, **dict.fromkeys(figures, median)))
            cases.append(case)
    for name in ("no_grad", "with gradients"):
        case = Case(torch_heads.LAUNCH, f"softmax, {name}", torch_heads.SMALL, "float32")
        case.results = [timed(FUSED, host=12.0), timed(DROP_IN, host=9.0), timed(EAGER, host=5.0)]
        cases.append(case)
    return Report("torch", ENVIRONMENT, {"dtype": "float32"}, cases=cases)


def find(report, group, name="head_sum"):
    return next(case for case in report.cases if case.group == group and case.name == name)


def verdicts(report):
    return check(torch_heads.REQUIREMENTS, report.cases)


def found(report, *words):
    return [v for v in verdicts(report) if all(word in v.title for word in words)]


def test_all_verdicts_hold_where_all_figures_are_good():
    report = made_up()
    judged = list(verdicts(report))
    assert all(verdict.holds for verdict in judged)
    assert len(judged) == 5 * 3 + 2 + 2 + 3
    (bound,) = found(report, "head_sum, forward, GPU", "ratio")
    assert (bound.asked, bound.found) == ("≤ 1.03", {BOUND: 1.0})
    (events,) = found(report, "head_sum, forward, GPU", "times faster")
    assert (events.asked, events.found) == ("≥ 200", {EAGER: 250.0, COMPILED: 240.0, AUTOTUNED: 230.0})


@pytest.mark.parametrize(
    ("group", "figure", "median", "words"),
    [
        (torch_heads.FORWARD, "gpu_evicted", 10.4, ["forward, GPU", "ratio"]),
        (torch_heads.FORWARD, "gpu_evicted", 12.0, ["forward, GPU, L2 evicted: times faster"]),
        (torch_heads.FORWARD, "wall", 60.0, ["forward, wall"]),  # the drop-in module's is apart
        (torch_heads.CHANGED, "gpu_evicted", 90.0, ["after a change"]),
        (torch_heads.BACKWARD, "gpu_evicted", 1300.0, ["forward and backward, GPU"]),
    ],
)
def test_a_verdict_fails_by_its_own_figure(group, figure, median, words):
    report = made_up()
    find(report, group).find(FUSED).times[figure] = timing.summarize([median])
    (broken,) = found(report, "head_sum", *words)
    assert broken.holds is False
    others = [v.title for v in verdicts(report) if v.title != broken.title and not v.holds]
    assert all("forward, GPU" in title for title in others)  # one figure, two promises: bind's time, and eager's
    assert "| no |" in markdown(report)


def test_an_error_larger_than_eagers_fails():
    report = made_up()
    find(report, torch_heads.BACKWARD, "head_softmax").find(FUSED).error = 1.01e-7
    assert [v.title for v in verdicts(report) if not v.holds] == ["head_softmax, forward and backward, error, ratio"]


def test_what_was_not_measured_is_not_said_to_hold():
    report = made_up()
    forward = find(report, torch_heads.FORWARD)
    forward.find(COMPILED).failure = "left out on request"
    forward.results.remove(forward.find(AUTOTUNED))
    (speed,) = found(report, "head_sum", "forward, wall")
    assert speed.found == {EAGER: 250.0, COMPILED: None} and speed.holds is None
    find(report, torch_heads.BACKWARD).find(FUSED).failure = "RuntimeError: no"
    assert [v.holds for v in found(report, "head_sum", "backward")] == [None, None]
    assert "not measured" in markdown(report)


def test_the_report(tmp_path):
    report = made_up()
    find(report, torch_heads.BACKWARD).facts = {f"MB at most, {FUSED}": 12.0, f"MB at most, {EAGER}": 345.0}
    text = markdown(report)
    assert text.index("## What was asked") < text.index("## Forward")
    assert f"|  | asked | {BOUND} | {EAGER} | {COMPILED} | {AUTOTUNED} | {FUSED} | {DROP_IN} | holds |" in text
    assert "| head_sum, forward, wall: times faster | ≥ 40 |  | 250 | 240 | 230 |  |  | yes |" in text
    assert "| head_sum, forward, drop-in, wall: times faster | ≥ 80 |  | 250 | 240 | 230 |  |  | yes |" in text
    assert "| softmax, no_grad, one launch, host | ≤ 20 |  |  |  |  | 12.0 |  | yes |" in text
    assert "| MB at most |" in text and "| 12.0 |" in text and "| 345 |" in text
    assert [text.count(f"\n## {group}\n") for group in torch_heads.FIGURES] == [1] * len(torch_heads.FIGURES)
    report.options["dtype"] = "bfloat16"
    assert "What was asked" not in markdown(report)
    command.write(report, tmp_path, "torch")
    assert {path.name for path in tmp_path.iterdir()} == {"torch.json", "torch.md"}


# Timing -------------------------------------------------------------------------------------------------------------


def test_what_is_done_before_a_call_is_not_timed():
    order = []

    class Clock(FakeDevice):
        record = staticmethod(lambda: order.append("record") or 0.0)
        evict = staticmethod(lambda: order.append("evict"))

    contest = timing.Contest(Clock(), {"a": lambda: order.append("call")}, 1e-9, {"a": lambda: order.append("before")})
    assert order.count("before") == order.count("call")
    order.clear()
    contest.measure("gpu_evicted")
    assert order[:5] == ["before", "evict", "record", "call", "record"]
    order.clear()
    assert contest.measure("wall")["a"].n == 7
    assert order == ["before", "call"] * 3 * 7


# The cases on the CPU -----------------------------------------------------------------------------------------------


def parse(more=""):
    return command.parse(f"torch --shape 6x32x40 --quick {more}".split())


@pytest.mark.parametrize(
    ("dtype", "names"), [("float32", torch_heads.NAMES), ("bfloat16", ("head_softmax",))], ids=["float32", "bfloat16"]
)
def test_the_heads_run(torch_lab, hasty, on_cpu, dtype, names):
    cases = list(torch_heads.cases(torch_lab, parse(f"--dtype {dtype} --heads {','.join(names)}")))
    assert [(case.group, case.name) for case in cases[:2]] == [("Forward", names[0]), (torch_heads.CHANGED, names[0])]
    assert len(cases) == 4 * len(names) + 2
    for case in cases:
        for result in case.results:
            assert result.failure == "", (case.group, case.name, result)
            assert set(result.times) == set(torch_heads.FIGURES[case.group])
            # Of 32 and 40 terms; in bfloat16 also of what training divides by a standard deviation.
            assert result.error < (1e-5 if dtype == "float32" else 0.05), (case.group, case.name, result)
    report = Report("torch", ENVIRONMENT, {"dtype": dtype}, cases=cases)
    assert report.failed() == []
    json.dumps(report.cases[0].facts, allow_nan=False)
    markdown(report)


def test_a_module_that_is_not_whole_is_reported(torch_lab, hasty, on_cpu, monkeypatch):
    monkeypatch.setattr(rivals, "fuse", lambda module, **options: _left(module))
    whole = "not all of the module is fused: sort: no rule"
    head = torch_heads.Head(torch_lab, "head_sum", parse())
    for group in (torch_heads.FORWARD, torch_heads.CHANGED):
        ours = {FUSED: functools.partial(head.rival, group, FUSED)}
        case = torch_heads.run(torch_lab, Case("g", "c", (6, 32, 40), "float32"), ours, (), 1.0)
        assert whole in case.results[0].failure
    with pytest.raises(RuntimeError, match=whole):
        torch_heads._launch_factories(torch_lab, "float32", False)[FUSED]()


def _left(module):
    from cupyfuse.torch import Explanation, Part, fuse

    made = fuse(module)
    made.__dict__["explain"] = lambda: Explanation((), (Part("", ("sort",), (), "no rule"),))
    return made


def test_stale_weights_are_found(torch_lab, hasty, monkeypatch):
    """A rival that keeps what it prepared from the weight of its first call."""

    class Stale(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module, self.kept = module, None

        def forward(self, x):
            if self.kept is None:
                self.kept = self.module.linear.weight.detach().sum(0), self.module.linear.bias.detach().sum()
            return (x @ self.kept[0] + self.kept[1])[:, None]

        def explain(self):
            from cupyfuse.torch import Explanation, Part

            return Explanation((Part("", ("sum",)),), ())

    monkeypatch.setattr(rivals, "fuse", Stale)
    head = torch_heads.Head(torch_lab, "head_sum", parse())
    ours = {FUSED: lambda: head.rival(torch_heads.CHANGED, FUSED)}
    case = torch_heads.run(torch_lab, Case("g", "c", (6, 32, 40), "float32"), ours, ("wall",), 1e-9)
    assert case.results[0].failure.startswith("wrong result")


def test_arrays_share_the_memory_of_tensors(torch_lab):
    for dtype in (torch.float32, torch.bfloat16):
        tensor = torch.nn.Parameter(torch.ones(2, 3, dtype=dtype))
        array = torch_lab.torch.as_array(tensor, torch_lab.cupy)
        assert array.dtype == dtypes.to_numpy(str(dtype).removeprefix("torch.")) and array.shape == (2, 3)
        with torch.no_grad():
            tensor.add_(1)
        assert (array == 2).all()


# The command line ---------------------------------------------------------------------------------------------------


def test_options():
    given = command.parse(["torch", "--dtype", "bfloat16", "--shape", "4x5x6"])
    assert (command.file_name(given), command.stated_options(given)["shape"]) == ("torch-bfloat16", "4x5x6")
    assert (given.max_autotune, given.heads, given.seed) == (True, torch_heads.NAMES, 0)
    given = command.parse(["torch", "--no-max-autotune", "--heads", "head_sum", "--quick"])
    assert (command.file_name(given), given.max_autotune, given.heads) == ("torch", False, ("head_sum",))
    assert given.budget == torch_heads.DEFAULTS["budget"][1]


def test_without_a_gpu_it_says_so(capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["torch", "--help"])
    assert stopped.value.code == 0 and "--no-max-autotune" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        command.main(["torch", "--heads", "head_other"])
    assert stopped.value.code == 2
