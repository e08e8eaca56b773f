"""The benchmark of norms in training, without a GPU: its cases on the CPU, its report, its options."""

import copy

import pytest
from benchmark_lab import ENVIRONMENT

from benchmarks import __main__ as command
from benchmarks import norms
from benchmarks.__main__ import markdown
from benchmarks.report import Report
from benchmarks.rivals import BACKEND, COMPILED, EAGER, FUSED


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_functions_run(torch_lab, hasty, on_cpu, dtype):
    given = command.parse(["norms", "--quick", "--no-compile", "--dtypes", dtype, "--functions", "layer norm,GELU"])
    given.shapes = ((40, 32),)
    cases = list(norms.cases(torch_lab, given))
    groups = [f"{group}, {name}" for name in ("layer norm", "GELU") for group in (norms.FORWARD, norms.BACKWARD)]
    assert [case.group for case in cases] == groups
    for case in cases:
        found = {result.rival: result for result in case.results}
        assert set(found) == {FUSED, BACKEND, EAGER, COMPILED, norms.COPY}
        for rival in (FUSED, EAGER):
            assert found[rival].failure == "", (case.group, found[rival])
            assert set(found[rival].times) == set(norms.FIGURES)
            assert found[rival].error < (1e-6 if dtype == "float32" else 0.02)
    text = markdown(Report("norms", ENVIRONMENT, {}, cases=cases))
    assert "## What was asked" in text and norms.COPY in text


def test_a_wrong_gradient_is_reported(torch_lab, hasty, on_cpu, monkeypatch):
    right = norms.as_run_by

    def wrong(way, lab, module):
        if way == FUSED:
            module = copy.deepcopy(module)
            module.register_forward_hook(lambda module, inputs, result: result + 0.5 * inputs[0])
            return module
        return right(way, lab, module)

    monkeypatch.setattr(norms, "as_run_by", wrong)
    given = command.parse(["norms", "--quick", "--no-compile", "--dtypes", "float32", "--functions", "softmax"])
    given.shapes = ((40, 32),)
    failures = Report("norms", ENVIRONMENT, {}, cases=list(norms.cases(torch_lab, given))).failed()
    assert len([f for f in failures if FUSED in f and "wrong result" in f]) == 2


def test_options():
    assert command.parse(["norms"]).shapes == norms.DEFAULTS["shapes"][0]
    assert command.parse(["norms", "--quick"]).shapes == norms.DEFAULTS["shapes"][1]
    assert command.file_name(command.parse(["norms"])) == "norms"
