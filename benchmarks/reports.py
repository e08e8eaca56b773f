"""The report of the heads through PyTorch: what was asked beside what was measured, then all figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .report import FIGURES, HOW_TIMED, Case, Report, case_table, heading, number, table
from .torch_heads import (
    AUTOTUNED,
    BACKWARD,
    BOUND,
    CHANGED,
    COMPILED,
    EAGER,
    FORWARD,
    FUSED,
    INFERENCE,
    LAUNCH,
    NAMES,
)

TIMED = "gpu_evicted"
RIVALS = (EAGER, COMPILED, AUTOTUNED)

_WHAT = {
    FORWARD: "The module as it was made: in training mode, gradients enabled. No backward pass follows.",
    CHANGED: "The same; before each call, and before the start event, `weight.add_(0)` under `no_grad`.",
    BACKWARD: "`module(x).sum().backward()` with gradients of all parameters, none of x. Errors are those of the "
    "gradients of a sum with random weights; that of a bias before BatchNorm is zero but for noise, and left out.",
    INFERENCE: "After `eval()`, under `no_grad`.",
    LAUNCH: "`torch.nn.Softmax(dim=1)` on a small matrix: what a call takes of the host.",
}
_HOW = f"""\
{HOW_TIMED}\
- *host*: the host's clock around calls that it does not wait for, per call.
- *wall*: the host's clock around one call, from an idle GPU to an idle GPU.
- *error*: ‖result − reference‖ / ‖reference‖ against float64, the worst of a case's results: the output and, in
  training, the running statistics; with backward, the gradients.
- *{FUSED}*, *{EAGER}* and *{COMPILED}* share their parameters; *{BOUND}* is cupyfuse's own function on the same
  memory, its weights bound.
"""


@dataclass(frozen=True)
class Verdict:
    """A figure that was asked for.

    Attributes
    ----------
    what : str
    asked : float
    found : tuple of (str, float or None)
        By whom or what it is measured; None where something is missing.
    at_least : bool
        Whether `asked` is a lower bound; else it is an upper one.
    """

    what: str
    asked: float
    found: tuple[tuple[str, float | None], ...]
    at_least: bool

    @property
    def holds(self) -> bool | None:
        """None where something was not measured."""
        known = [value for _, value in self.found if value is not None]
        if not all(value >= self.asked if self.at_least else value <= self.asked for value in known):
            return False
        return True if len(known) == len(self.found) else None


def _median(case: Case | None, rival: str, figure: str) -> float | None:
    result = case.find(rival) if case else None
    return result.median(figure) if result and not result.failure else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _faster(what: str, case: Case | None, figure: str, asked: float, rivals: Sequence[str]) -> Verdict:
    """How many times as long as ours the rivals take."""
    ours = _median(case, FUSED, figure)
    found = tuple((rival, _ratio(_median(case, rival, figure), ours)) for rival in rivals)
    return Verdict(f"{what}, {FIGURES[figure]}: times faster", asked, found, True)


def _error(what: str, case: Case | None) -> Verdict:
    errors = []
    for rival in (FUSED, EAGER):
        result = case.find(rival) if case else None
        errors.append(result.error if result and not result.failure else None)
    return Verdict(f"{what}: error over eager's", 1.0, ((EAGER, _ratio(*errors)),), False)


def verdicts(report: Report) -> Iterator[Verdict]:
    """What was asked of float32 at the shape of the benchmarks, and what was found."""
    found = {(case.group, case.name): case for case in report.cases}
    for name in NAMES:
        forward, backward = found.get((FORWARD, name)), found.get((BACKWARD, name))
        # A module that does not run max-autotune is not held to it.
        rivals = [r for r in RIVALS if r != AUTOTUNED or (forward and forward.find(AUTOTUNED))]
        over = _ratio(_median(forward, FUSED, TIMED), _median(forward, BOUND, TIMED))
        yield Verdict(f"{name}, forward, {FIGURES[TIMED]}: time over that of `bind`", 1.03, ((BOUND, over),), False)
        if name == "head_sum":
            yield _faster(f"{name}, forward", forward, TIMED, 200.0, rivals)
            yield _faster(f"{name}, forward", forward, "wall", 80.0, rivals)
            changed = found.get((CHANGED, name))
            yield _faster(f"{name}, after a change of the weight", changed, TIMED, 30.0, (EAGER, COMPILED))
        else:
            yield _faster(f"{name}, forward", forward, TIMED, 3.3 / 1.03, rivals)
        yield _faster(f"{name}, forward and backward", backward, TIMED, 2.0, (EAGER, COMPILED))
        yield _error(f"{name}, forward", forward)
        yield _error(f"{name}, gradients", backward)
    for case in report.cases:
        if case.group == LAUNCH:
            host = _median(case, FUSED, "host")
            yield Verdict(f"{case.name}, one launch: microseconds of the host", 20.0, ((FUSED, host),), False)


def _verdict_table(report: Report) -> list[str]:
    rows = []
    for verdict in verdicts(report):
        beside = {rival: number(value) for rival, value in verdict.found}
        against = [beside.get(rival, "") for rival in RIVALS] if set(beside) <= set(RIVALS) else ["", "", ""]
        alone = "" if set(beside) <= set(RIVALS) else next(iter(beside.values()))
        asked = f"{'≥' if verdict.at_least else '≤'} {number(verdict.asked)}"
        word = {True: "yes", False: "no", None: "not measured"}[verdict.holds]
        rows.append([verdict.what, asked, alone, *against, word])
    return table(["", "asked", "found", *(f"beside {rival}" for rival in RIVALS), "holds"], rows)


def torch_markdown(report: Report) -> str:
    """Verdicts, then a table a case, by what is done with the module."""
    lines = [*heading(report)]
    if report.options.get("dtype") == "float32":
        lines += ["## What was asked", "", *_verdict_table(report), ""]
    lines += ["## How it was measured", "", *_HOW.splitlines(), ""]
    for group in dict.fromkeys(case.group for case in report.cases):
        lines += [f"## {group}", "", _WHAT[group], ""]
        for case in report.cases:
            if case.group == group:
                lines += [f"### {case.name}", "", f"{' x '.join(map(str, case.shape))} {case.dtype}", ""]
                lines += [*case_table(case, EAGER, TIMED), *_memory(case)]
    return "\n".join(lines).rstrip() + "\n"


def _memory(case: Case) -> list[str]:
    """What a call takes of the GPU's memory, a row a rival."""
    columns = list(dict.fromkeys(name.partition(", ")[0] for name in case.facts))
    if not columns:
        return []
    rows = [[r, *(number(case.facts.get(f"{column}, {r}")) for column in columns)] for r in (FUSED, EAGER)]
    return ["Of the GPU's memory:", "", *table(["", *columns], rows), ""]
