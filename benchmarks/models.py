"""Whole models, inference and training steps: eager, compiled, and through `cupyfuse.torch`; also as CUDA graphs.

A case is one model in one setting (dtype and precision of float32 products), mode and batch. All rivals of a case share
one module's parameters. Each is called a few times, compared with the same module in float64, and then timed in turn
with the others.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .lab import Lab, run
from .more_networks import ALL_NETWORKS, MORE_NETWORKS
from .networks import NETWORKS
from .options import add_several
from .report import OUT_OF_TIME, Case, Finding, Report, Requirement, Result, check, geometric_mean
from .rivals import (
    BACKEND,
    BACKEND_GRAPHS,
    COMPILED,
    COMPILED_GRAPHS,
    EAGER,
    FUSED,
    FUSED_GRAPHS,
    Rival,
    Unavailable,
    as_run_by,
)
from .tables import ERROR, Column, case_tables, explain, number, table
from .timing import FIGURES as TITLES
from .timing import describe

RIVALS = {
    "eager": EAGER,
    "fuse": FUSED,
    "backend": BACKEND,
    "compile": COMPILED,
    "fuse-graphs": FUSED_GRAPHS,
    "backend-graphs": BACKEND_GRAPHS,
    "compile-graphs": COMPILED_GRAPHS,
}

# A setting's name: its dtype, and the precision of float32 matrix products.
SETTINGS = {"float32": ("float32", "highest"), "float32-high": ("float32", "high"), "bfloat16": ("bfloat16", "highest")}
INFERENCE, TRAINING = "inference", "training"
MODES = (INFERENCE, TRAINING)
MORE = "more"  # stands for all of `MORE_NETWORKS`
BATCHES = {"large": 1, "small": 0}  # places in a network's `batches`
FIGURES = ("gpu_queued", "wall_loop")
DEFAULTS = {"budget": (0.5, 0.1)}  # GPU seconds for each rival and figure

# Ours are not to be slower than what they replace; up to 1.02 times is noise.
REQUIREMENTS = tuple(
    Requirement(figure, (ours,), 1.02, (other,))
    for ours, other in (
        (FUSED, EAGER),
        (BACKEND, COMPILED),
        (FUSED_GRAPHS, COMPILED_GRAPHS),
        (BACKEND_GRAPHS, COMPILED_GRAPHS),
    )
    for figure in FIGURES
)

WARM_UP = 4  # calls before the one that is compared: graphs are captured in the second or third
LEARNING_RATE = 1e-6  # every step writes every weight, and they stay about what they were
# A result is wrong, and not timed, from this many times eager's error on, and eager's counts as this much at least.
WRONG, LEAST = 20.0, {"float32": 1e-6, "float32-high": 1e-4, "bfloat16": 2e-3}

_HOW = f"""\
- The rivals of a case share one module's parameters. Inference is a call under `no_grad` after `eval()`. A training
  step is forward, loss, backward, and a step of a fused AdamW that all rivals share; dropout is off.
{ERROR}, of the same module (its own conversions to
  float32 stay): in inference of the output, in training the larger one of the loss's and of all gradients' together.
- "highest" and "high" are of matrix products; convolutions are as PyTorch has them, in TF32 where it allows that.
- *first call*: seconds from `fuse` or `torch.compile` to the end of the first call; the Inductor's caches on disk are
  those that earlier cases left.
- *peak*: the most that tensors took during a call, beyond parameters, optimizer and inputs. *kept*: what the allocator
  holds more after the first calls than before, graphs and prepacked weights among it.
- *graphs*: `fuse(graphs=True)`, and `mode="reduce-overhead"` of `torch.compile`; *{BACKEND}* is
  `torch.compile(backend="cupyfuse")`."""


def add_options(parser: argparse.ArgumentParser) -> None:
    text = f"of {', '.join(NETWORKS)}, which are the default, or {MORE}: {', '.join(MORE_NETWORKS)}"
    add_several(parser, "--models", (*ALL_NETWORKS, MORE), default=tuple(NETWORKS), help=text)
    for option, known in {"dtypes": SETTINGS, "modes": MODES, "batches": BATCHES, "rivals": RIVALS}.items():
        add_several(parser, f"--{option}", known)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing more after so long")
    parser.add_argument("--add", action="store_true", help="keep the cases of earlier runs that this one leaves out")
    parser.add_argument("--tiny", action="store_true", help="tiny configurations, to try the benchmark itself")


class Work:
    """A model with drawn inputs, in one setting, mode and batch: what all rivals of a case run."""

    def __init__(self, pytorch: Any, name: str, setting: str, mode: str, batch: str, tiny: bool, seed: int = 0):
        torch, self._step = pytorch.torch, pytorch.Step
        self._network, self._training = ALL_NETWORKS[name], mode == TRAINING
        dtype = getattr(torch, SETTINGS[setting][0])
        torch.manual_seed(seed)
        with torch.device(pytorch.device_type()):
            self.module = self._network.build(tiny).to(dtype).train(self._training)
            given = self._network.inputs(self._network.batches[BATCHES[batch]], tiny)
        self.inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in given.items()}
        self.shape = tuple(next(iter(given.values())).shape)
        self._labels = self.inputs.get("labels")
        if not (self._training and self._network.result):  # only modules that compute a loss take labels
            self.inputs.pop("labels", None)

    def step(self, called: Any, module: Any = None, inputs: dict[str, Any] | None = None) -> Any:
        """Return the output or, in training, the loss and its gradients, of the module as a rival calls it.

        `module` and `inputs` take the place of this one's.
        """
        arguments = self.inputs if inputs is None else inputs
        parameters = (self.module if module is None else module).parameters() if self._training else ()

        def forward() -> Any:
            returned = called(**arguments)
            return self._network.loss(returned, self._labels) if self._training else self._network.output(returned)

        return self._step(forward, [p for p in parameters if p.requires_grad])


class Trial:
    """One case: the work, what it should compute, and how each rival runs it."""

    def __init__(self, lab: Lab, name: str, options: argparse.Namespace, setting: str, mode: str, batch: str):
        self._lab, self._setting, self._training = lab, setting, mode == TRAINING
        self._rivals = lab.need_torch()
        self._torch = torch = self._rivals.torch
        self._work = work = Work(self._rivals, name, setting, mode, batch, options.tiny, options.seed)
        self._module, self.shape = work.module, work.shape
        exact = copy.deepcopy(self._module).double()
        doubles = {k: v.double() if v.is_floating_point() else v for k, v in work.inputs.items()}
        self._expected = self._results(work.step(exact, exact, doubles))
        del exact
        self._initial: list[Any] = []
        if self._training:
            self._initial = [t.detach().clone() for t in self._tensors()]
            parameters = [p for p in self._module.parameters() if p.requires_grad]
            fused = self._rivals.device_type() == "cuda"
            self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=fused)
            self._call(work.step(self._module))  # the optimizer's state is the model's
            self._reset()

    def _tensors(self) -> list[Any]:
        return [*self._module.parameters(), *self._module.buffers()]

    # What is computed
    def _call(self, step: Any) -> None:
        """Take a step; in training update the weights by it."""
        step()
        if self._training:
            self._optimizer.step()

    def _results(self, step: Any) -> list[Any]:
        """Return the result and, in training, all gradients as one, in float64."""
        result, *gradients = step.results()
        return [result, self._torch.cat([g.flatten() for g in gradients])] if gradients else [result]

    def _reset(self) -> None:
        """Restore the first weights; drop the gradients."""
        with self._torch.no_grad():
            for tensor, initial in zip(self._tensors(), self._initial, strict=False):
                tensor.copy_(initial)
        for parameter in self._module.parameters():
            parameter.grad = None

    # The rivals
    def rival(self, name: str, case: Case, deadline: float) -> Rival:
        """Build a rival and call it a few times; enter what its first calls took into the case's facts."""
        if time.monotonic() >= deadline:
            raise Unavailable(OUT_OF_TIME)
        self._reset()
        allocated, reserved = self._rivals.memory_held()
        self._lab.device.synchronize()
        began = time.perf_counter()
        step = self._work.step(as_run_by(name, self._lab, self._module))

        def call() -> None:
            if name in (COMPILED_GRAPHS, BACKEND_GRAPHS):
                self._torch.compiler.cudagraph_mark_step_begin()
            self._call(step)

        call()
        self._lab.device.synchronize()
        case.facts[f"first call s, {name}"] = time.perf_counter() - began
        for _ in range(WARM_UP - 1):
            call()
        if self._rivals.device_type() == "cuda":
            memory, kept = self._rivals.measure_memory(call), self._rivals.memory_held()[1] - reserved
            peak = memory.before + memory.peak - allocated
            case.facts |= {f"peak MB, {name}": peak / 1e6, f"kept MB, {name}": kept / 1e6}

        def attempt() -> list[Any]:
            self._reset()
            found = self._results(step)
            self._reset()
            return found

        eager = case.value(EAGER, "error")
        limit = WRONG * max(eager, LEAST[self._setting]) if eager is not None and name != EAGER else math.inf
        return Rival(call, [attempt], self._expected, limit=limit)


def group_title(mode: str, setting: str) -> str:
    """Return the heading of the cases of a mode and a setting."""
    dtype, precision = SETTINGS[setting]
    words = f'{dtype} at "{precision}"' if dtype == "float32" else dtype
    return f"{'Inference' if mode == INFERENCE else 'Training step'}, {words}"


def _measure(lab: Lab, case: Case, trial: Trial, options: argparse.Namespace, deadline: float) -> None:
    """Run a case; the model is gone with this frame, before the next one is built."""
    case.shape = trial.shape
    factories = {RIVALS[name]: functools.partial(trial.rival, RIVALS[name], case, deadline) for name in options.rivals}
    run(lab, case, factories, FIGURES, options.budget)


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run everything that the options ask for, every model once before any of them again.

    Where a model cannot be built, or the time is over, all rivals of the case fail with the reason.
    """
    torch = lab.need_torch()
    deadline = time.monotonic() + options.seconds
    names = [each for name in options.models for each in (MORE_NETWORKS if name == MORE else (name,))]
    for setting, mode, batch, name in itertools.product(options.dtypes, options.modes, options.batches, names):
        network, (dtype, precision) = ALL_NETWORKS[name], SETTINGS[setting]
        case = Case(group_title(mode, setting), f"{name}, {batch}", (network.batches[BATCHES[batch]],), dtype)
        try:
            if time.monotonic() >= deadline:
                raise Unavailable(OUT_OF_TIME)
            lab.release()
            with torch.matmul_precision(precision), torch.torch.set_grad_enabled(mode == TRAINING):
                _measure(lab, case, Trial(lab, name, options, setting, mode, batch), options, deadline)
        except Exception as error:
            failure = str(error) if isinstance(error, Unavailable) else describe(error)
            case.results = [Result(RIVALS[rival], failure=failure) for rival in options.rivals]
        yield case


# The report ---------------------------------------------------------------------------------------------------------


def mean_ratio(findings: Sequence[Finding]) -> float | None:
    return geometric_mean(value for finding in findings for value in finding.found.values())


def _write_ratios(report: Report) -> list[str]:
    """Write ratios of times, a row a case, and geometric means; then who is behind, and who failed."""
    rows: list[tuple[str, list[Case]]] = []
    for group, cases in report.groups().items():
        rows += [*((f"{group}: {case.name}", [case]) for case in cases), (f"**{group}, geometric mean**", cases)]
    rows.append(("**All, geometric mean**", report.cases))
    columns, sums = [Column("", lambda row: row[0])], []
    for requirement in REQUIREMENTS:
        pair = f"{requirement.ours[0]} / {requirement.rivals[0]}, {TITLES[requirement.what].title}"
        columns.append(Column(pair, lambda row, r=requirement: mean_ratio(check([r], row[1]))))
        found = [f for f in check([requirement], report.cases) if f.holds is not None]
        if not found:
            continue
        found.sort(key=lambda f: mean_ratio([f]) or 0.0, reverse=True)
        behind = [f"{f.case.name} ({f.case.group}) {number(mean_ratio([f]))}" for f in found if not f.holds]
        count = f"behind (above {requirement.bound}) in {len(behind)} of {len(found)}"
        about = f"geometric mean {number(mean_ratio(found))}, worst {number(mean_ratio(found[:1]))}"
        sums.append(f"- {pair}: {about}, {count}{': ' if behind else ''}{'; '.join(behind)}.")
    lines = ["## Verdicts", "", "Time over that of the rival; below 1 is faster.", "", *table(columns, rows)]
    return [*lines, *sums, "", *_count_failures(report.cases), ""]


def _count_failures(cases: Sequence[Case]) -> list[str]:
    """Count how many times each rival raised or was wrong."""
    lines = []
    for rival in dict.fromkeys(result.rival for case in cases for result in case.results):
        results = [r for r in (case.find(rival) for case in cases) if r is not None and r.failure != OUT_OF_TIME]
        failed = sum(bool(result.failure) for result in results)
        lines += [f"- {rival}: failed in {failed} of {len(results)} cases."] if failed else []
    return lines or ["No rival failed."]


def report_lines(report: Report) -> list[str]:
    """Write a table a case and the verdicts; cases that time ran out for are named at the end."""
    measured = dataclasses.replace(report, cases=[case for case in report.cases if not case.unmeasured])
    present = {case.name.partition(",")[0] for case in measured.cases}
    lines = explain(FIGURES, _HOW, "milliseconds")
    lines += [f"- `{name}`: {network.what}" for name, network in ALL_NETWORKS.items() if name in present]
    lines += ["", *case_tables(measured, EAGER, FIGURES, milliseconds=True), *_write_ratios(measured)]
    missing = [f"{case.name} ({case.group})" for case in report.cases if case.unmeasured]
    return [*lines, *([f"Out of time: {len(missing)} cases: {'; '.join(missing)}.", ""] if missing else [])]
