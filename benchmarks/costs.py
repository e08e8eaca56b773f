"""Compare the cost model with measurements: chains through the library, PyTorch eager and Inductor.

Each chain is measured alone. What Inductor adds to a compiled graph for it is its host time less that of a compiled
function of the same inputs that computes nothing. In training the weights change before each call, as an optimizer
changes them, so that what is folded from them is folded anew.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .lab import Lab, run
from .report import Case, Report, Result
from .rivals import COMPILED, Rival, as_run_by
from .tables import Column, number, table, yes_or_no
from .timing import describe

OURS, EAGER, INDUCTOR = "cupyfuse", "PyTorch eager", "Inductor"
NOTHING = "a compiled function that computes nothing"
GPU, HOST = "gpu_back_to_back", "host_within"
DEFAULTS = {"budget": (0.03, 0.01)}  # GPU seconds for each rival and figure
_HOW = """\
Medians in microseconds of one call, in training forward and backward. *GPU*: events around many queued calls, per call.
*host*: the host's clock around calls that it does not wait for, before each of which other data pass through its
caches, as within a model; of Inductor, less that of a compiled function of the same inputs that computes nothing.
Backward passes run in the thread of the call. *lost*: by the decision, where the longer of GPU and host is waited for.
"""
_PARTS = ("our GPU", "our host", "their GPU", "their host")
PREDICTED = tuple(f"predicted: {part}" for part in _PARTS)  # facts of a case: what the model says, in microseconds
SHARED = "predicted: products that cuBLAS computes either way"  # likewise


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=240.0, help="that the whole may take (default: %(default).0f)")
    parser.add_argument("--precision", choices=("highest", "high", "medium"), default="highest", help="of products")


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run the chains beside eager, for at most half of the time, then beside Inductor, until it is over."""
    from . import cost_chains

    began = time.perf_counter()
    torch = lab.need_torch().torch
    shares = {EAGER: 1.0} if lab.compile_missing else {EAGER: 0.5, INDUCTOR: 1.0}
    for rival, share in shares.items():
        for sized, training in itertools.product(cost_chains.sized_chains(), (False, True)):
            if time.perf_counter() - began >= share * options.seconds:
                break
            group = f"{'Training' if training else 'Inference'} beside {rival}"
            case = Case(group, sized.name, sized.shape, sized.dtype)
            with torch.set_grad_enabled(training):
                try:
                    tensors = draw(torch, sized, training, options.seed, lab.need_torch().device_type())
                    case.facts = predict(torch, sized, tensors, rival == INDUCTOR)
                except Exception as error:  # out of memory, for one
                    case.results = [Result(OURS, failure=describe(error)), Result(rival)]
                else:
                    names = (OURS, rival, *([NOTHING] if rival == INDUCTOR else []))
                    rivals = {name: functools.partial(_rival, lab, sized, tensors, name) for name in names}
                    run(lab, case, rivals, (GPU, HOST), options.budget)
                    del rivals
            if training:
                lab.release()
            yield case


def draw(torch: Any, sized: Any, training: bool, seed: int, device: str) -> list[Any]:
    """Return tensors to call a chain with."""
    torch.manual_seed(seed)
    tensors = []
    for place, (shape, dtype) in enumerate(sized.metas):
        # Vectors are biases, scales and variances: positive. Weights keep the variance of what they multiply.
        values = torch.rand(shape, device=device) + 0.5 if len(shape) == 1 else torch.randn(shape, device=device)
        scale = shape[-1] ** -0.5 if len(shape) > 1 and place in sized.chain.fixed else 1.0
        running = sized.name == "head_softmax" and place in (3, 4)  # statistics, without gradients
        tensors.append((values * scale).to(getattr(torch, dtype)).requires_grad_(training and not running))
    return tensors


def predict(torch: Any, sized: Any, tensors: Sequence[Any], compiled: bool) -> dict[str, float]:
    """Return the model's estimates in microseconds; empty where it makes none."""
    from cupyfuse.torch.chains.runtime import device_of
    from cupyfuse.torch.cost.estimate import estimate
    from cupyfuse.torch.cost.host import host_scale

    found = estimate(
        sized.chain,
        sized.metas,
        requires_grad=[bool(t.requires_grad) for t in tensors],
        precision=torch.get_float32_matmul_precision(),
        device=device_of(tensors[0]),
        compiled=compiled,
    )
    if found.reason:
        return {}
    found = found.on_host(host_scale(tensors[0].device))
    values = (found.fused.gpu, found.fused.host, found.pytorch.gpu, found.pytorch.host)
    return dict(zip((*PREDICTED, SHARED), (v * 1e6 for v in (*values, found.shared)), strict=True))


def _rival(lab: Lab, sized: Any, tensors: list[Any], name: str) -> Rival:
    """Return the chain as a rival, unchecked; `NOTHING` stands for a compiled function that only returns a view."""
    from cupyfuse.torch.chains.runner import Runner

    from .cost_chains import as_written

    torch = lab.need_torch().torch
    called = written = _view if name == NOTHING else as_written(sized.chain)
    if name == OURS:
        runner = called = Runner(sized.chain)
        runner(tensors)
        if runner.refusals:
            raise RuntimeError(f"left to PyTorch: {', '.join(runner.refusals)}")
    elif name != EAGER:
        if name == INDUCTOR:
            lab.need_torch().reset_compiler()
        called = as_run_by(COMPILED, lab, written)
    arguments = (tensors,) if name == OURS else tensors
    if not torch.is_grad_enabled():
        return Rival(lambda: called(*arguments), [], [])
    wanted = [t for t in tensors if t.requires_grad]
    changed = [tensors[k] for k in sized.chain.fixed if tensors[k].requires_grad]
    with torch.no_grad():
        cotangents = [torch.ones_like(result) for result in written(*tensors)]

    def step() -> None:
        torch.autograd.graph.increment_version(changed)
        with torch.autograd.set_multithreading_enabled(False):  # in this thread, whose caches were displaced
            torch.autograd.grad(list(called(*arguments)), wanted, cotangents, allow_unused=name == NOTHING)

    return Rival(step, [], [])


def _view(*tensors: Any) -> list[Any]:
    return [tensors[0].view_as(tensors[0])]


# Predicted beside measured ------------------------------------------------------------------------------------------


class Comparison:
    """A case's times as the model has them and as measured, in microseconds: our GPU, our host, their GPU, their host.

    `chosen` is whether the model runs the chain through this library, `best` the better choice's time where whatever
    takes longer, GPU or host, is waited for, and `lost` what the model's choice takes more.
    """

    def __init__(self, case: Case, predicted: Sequence[float], measured: Sequence[float]):
        self.case, self.predicted, self.measured = case, tuple(predicted), tuple(measured)
        shared = case.facts.get(SHARED, 0.0)
        self.chosen = _gains(predicted, shared)
        self.right = self.chosen == _gains(measured, shared)
        ours, theirs = max(measured[:2]), max(measured[2:])
        self.best = min(ours, theirs)
        self.lost = (ours if self.chosen else theirs) - self.best
        self.ratios = tuple(p / m if m > 0 else math.nan for p, m in zip(predicted, measured, strict=True))


def _gains(times: Sequence[float], shared: float) -> bool:
    """Decide by the rule of `cupyfuse.torch.cost`, for times in microseconds."""
    from cupyfuse.torch.cost.estimate import Estimate, Time

    a, b, c, d, products = (t * 1e-6 for t in (*times, shared))
    return Estimate(Time(a, b, products), Time(c, d, products)).gains()


def comparisons(report: Report) -> Iterator[Comparison]:
    """Yield the cases that were measured and estimated."""
    for case in report.cases:
        rival = INDUCTOR if case.find(INDUCTOR) else EAGER
        found = [case.value(name, figure) for name in (OURS, rival) for figure in (GPU, HOST)]
        measured = [value for value in found if value is not None]
        if len(measured) < 4 or set(PREDICTED) - set(case.facts):
            continue
        if case.find(NOTHING):
            measured[3] = max(measured[3] - (case.value(NOTHING, HOST) or 0.0), 0.1)
        yield Comparison(case, [case.facts[name] for name in PREDICTED], measured)


# The report -------------------------------------------------------------------------------------------------------


def _parts(cell: Callable[..., object], suffix: str = "") -> list[Column]:
    """Return a column for each of the four times; `cell` takes the row and the time's place."""
    return [Column(f"{part}{suffix}", lambda row, k=k: cell(row, k)) for k, part in enumerate(_PARTS)]


def _summarize_ratios(row: tuple[str, list[Comparison]], k: int) -> str:
    """Summarize the ratios of predicted to measured times."""
    kept = sorted(c.ratios[k] for c in row[1] if math.isfinite(c.ratios[k]))
    return " / ".join(map(number, (kept[0], statistics.median(kept), kept[-1]))) if kept else "–"


def report_lines(report: Report) -> list[str]:
    """Write how often the model decides right, its ratios to the measurements, and a table for each group."""
    found = list(comparisons(report))
    wrong = [c for c in found if not c.right]
    by_group = {group: [c for c in found if c.case.group == group] for group in report.groups()}
    group = Column("", lambda c: c.case.group)
    name = Column("", lambda c: f"{c.case.name} {c.case.size} {c.case.dtype}")
    decision = Column("model", lambda c: "fused" if c.chosen else "left")
    measured = _parts(lambda c, k: c.measured[k])
    lines = [
        f"{len(found)} of {len(report.cases)} cases were measured and estimated. The model decides as the measurements "
        f"do in {len(found) - len(wrong)} of them; what it chooses takes {sum(c.lost for c in found):.0f} us longer "
        f"than the best choices, which take {sum(c.best for c in found):.0f} us in all.\n",
        *_HOW.split("\n"),
        "## Predicted over measured\n",
        *table(
            [Column("", lambda row: row[0]), *_parts(_summarize_ratios)],
            [("all: lowest, median, highest", found), *by_group.items()],
        ),
    ]
    if wrong:
        columns = [group, name, decision, *measured, Column("lost", lambda c: c.lost)]
        lines += ["## Wrong decisions\n", *table(columns, wrong)]
    predicted = _parts(lambda c, k: c.predicted[k], ", of model")
    for title, among in by_group.items():
        columns = [name, decision, Column("right", lambda c: yes_or_no(c.right)), *predicted, *measured]
        lines += [f"## {title}\n", *table(columns, among)]
    failures = [
        f"- {case.group}, {case.name} {case.size} {case.dtype}: {result.rival}: {result.failure}"
        for case in report.cases
        for result in case.results
        if result.failure
    ]
    return [*lines, *(["## What failed\n", *failures, ""] if failures else [])]
