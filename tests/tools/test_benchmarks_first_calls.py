"""The benchmark of first calls: its verdicts on made-up figures, and one tiny model in real processes."""

import argparse

import pytest
from benchmark_lab import ENVIRONMENT

from benchmarks import first_calls
from benchmarks.__main__ import parse
from benchmarks.report import Case, Report, Result
from benchmarks.rivals import BACKEND, COMPILED, FUSED


class Lab:
    def need_torch(self):
        return None


def made_up(**seconds):
    """torch.compile takes 10 s and 3 s; ours what is asked for by (first, second) process."""
    case = Case("Inference, bfloat16", "bert", (32,), "bfloat16")
    for rival, (fresh, again) in {COMPILED: (10.0, 3.0), **seconds}.items():
        case.results.append(Result(rival))
        case.facts |= {f"{first_calls.FRESH}, {rival}": fresh, f"{first_calls.AGAIN}, {rival}": again}
    return case


def verdict(rival, fresh, again):
    report = Report("first-calls", ENVIRONMENT, {}, cases=[made_up(**{rival: (fresh, again)})])
    (line,) = (line for line in first_calls.report_lines(report) if f"bert, {rival} |" in line)
    return line.split(" | ")[-1].rstrip(" |")


@pytest.mark.parametrize(
    ("rival", "fresh", "again", "expected"),
    [
        (FUSED, 10.0, 5.0, "yes"),
        (FUSED, 10.1, 5.0, "no"),
        (FUSED, 9.0, 5.1, "no"),
        (BACKEND, 13.0, 6.5, "yes"),
        (BACKEND, 13.1, 6.5, "no"),
        (BACKEND, 5.0, 6.6, "no"),
    ],
)
def test_first_calls_are_held_to_that_of_torch_compile_and_second_processes_to_half(rival, fresh, again, expected):
    assert verdict(rival, fresh, again) == expected


@pytest.mark.rotates
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_tiny_model_in_two_processes(mode):
    options = ["--models", "mlp", "--dtypes", "float32", "--modes", mode, "--rivals", "fuse", "--tiny"]
    given = parse(["first-calls", *options])
    assert isinstance(given, argparse.Namespace)
    (case,) = first_calls.cases(Lab(), given)
    assert case.find(FUSED).failure == ""
    assert case.group.lower().startswith(mode)
    assert all(case.facts[f"{what}, {FUSED}"] > 0 for what in (first_calls.FRESH, first_calls.AGAIN))


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="KeyError: 'no such model'"):
        first_calls._run(("no such model", "float32", "training", FUSED, True), "/nonexistent")
