"""The report of whole models: a table a case, then verdicts; and the log that keeps each case once it is measured."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .models import BACKEND, COMPILED, EAGER, FIGURES, FUSED, GRAPHED, REDUCED, REDUCED_BACKEND
from .networks import NETWORKS
from .report import FIGURES as NAMES
from .report import OUT_OF_TIME, Case, Report, Result, heading, number, scientific, table
from .timing import Summary

BEHIND = 1.02  # from here on a ratio of times is no noise
PAIRS = ((FUSED, EAGER), (BACKEND, COMPILED), (GRAPHED, REDUCED), (REDUCED_BACKEND, REDUCED))
_MEASURED = ("first call s", "peak MB", "kept MB")

_HOW = f"""\
Medians in milliseconds; the JSON file beside this one has the quartiles, extremes and counts. The rivals of a case
share one module's parameters and took turns within one run.

- *{NAMES["gpu_queued"]}*: events around one call, queued behind a kernel that holds the stream for at most 20 ms, so
  that the GPU need not wait for the host; calls that take the host longer have gaps in them.
- *{NAMES["wall_loop"]}*: the host's clock around a few calls in a row, from an idle GPU to an idle GPU, per call.
- Inference is a call under `no_grad` after `eval()`. A training step is forward, loss, backward, and a step of a fused
  AdamW that all rivals share; dropout is off.
- *error*: ‖result − reference‖ / ‖reference‖ against the same module in float64 (its own conversions to float32 stay).
  In inference that of the output; in training the larger one of the loss's and that of all gradients together.
- "highest" and "high" are of matrix products; convolutions are as PyTorch has them, in TF32 where it allows that.
- *first call*: seconds from `fuse` or `torch.compile` to the end of the first call; the Inductor's caches on disk are
  those that earlier cases left.
- *peak*: the most that tensors took during a call, beyond parameters, optimizer and inputs. *kept*: what the allocator
  holds more after the first calls than before, graphs and prepared weights among it.
- *graphs*: `fuse(graphs=True)`, and `mode="reduce-overhead"` of `torch.compile`; *{BACKEND}* is
  `torch.compile(backend="cupyfuse")`.
"""


@dataclass(frozen=True)
class Ratio:
    """The time of one of ours over that of what it replaces, in one case."""

    case: Case
    ours: str
    other: str
    figure: str
    value: float

    @property
    def behind(self) -> bool:
        return self.value > BEHIND


def ratios(cases: Sequence[Case], figures: Sequence[str] = FIGURES) -> Iterator[Ratio]:
    """Every pair that was measured."""
    for case in cases:
        for ours, other in PAIRS:
            for figure in figures:
                times = [_median(case.find(rival), figure) for rival in (ours, other)]
                if times[0] and times[1]:
                    yield Ratio(case, ours, other, figure, times[0] / times[1])


def mean(found: Sequence[Ratio]) -> float | None:
    """The geometric mean."""
    return math.exp(sum(math.log(ratio.value) for ratio in found) / len(found)) if found else None


def _median(result: Result | None, figure: str) -> float | None:
    return result.median(figure) if result and not result.failure else None


def unmeasured(case: Case) -> bool:
    """Whether there was no time for any of a case."""
    return all(result.failure == OUT_OF_TIME for result in case.results)


def models_markdown(report: Report) -> str:
    """A table a case, by mode and setting; at the end the verdicts."""
    measured = [case for case in report.cases if not unmeasured(case)]
    lines = [*heading(report), *_HOW.splitlines(), ""]
    lines += [f"- `{name}`: {network.what}" for name, network in NETWORKS.items() if _of(name, measured)]
    for group in dict.fromkeys(case.group for case in measured):
        lines += ["", f"## {group}", ""]
        for case in measured:
            if case.group == group:
                lines += [f"### {case.name}", "", f"{' x '.join(map(str, case.shape))} {case.dtype}", ""]
                lines += _case_table(case)
    lines += _verdicts(measured)
    missing = [f"{case.name} ({case.group})" for case in report.cases if unmeasured(case)]
    lines += [f"Out of time: {len(missing)} cases: {'; '.join(missing)}.", ""] if missing else []
    return "\n".join(lines).rstrip() + "\n"


def _of(name: str, cases: Sequence[Case]) -> bool:
    return any(case.name.partition(",")[0] == name for case in cases)


def _case_table(case: Case) -> list[str]:
    columns = [what for what in _MEASURED if any(fact.startswith(what) for fact in case.facts)]
    header = [
        "",
        "error",
        *(f"{NAMES[f]}, ms" for f in FIGURES),
        *(f"× {EAGER}, {NAMES[f]}" for f in FIGURES),
        *columns,
    ]
    rows, notes = [], []
    for result in case.results:
        mine = [_median(result, figure) for figure in FIGURES]
        base = [_median(case.find(EAGER), figure) for figure in FIGURES]
        row = [result.rival, scientific(result.error), *(number(t / 1e3 if t else None) for t in mine)]
        row += [number(b / t if t and b else None) for b, t in zip(base, mine, strict=True)]
        row += [number(case.facts.get(f"{what}, {result.rival}")) for what in columns]
        rows.append(row)
        notes += [f"- {result.rival}: {result.failure}"] if result.failure else []
    return [*table(header, rows), "", *notes, *([""] if notes else [])]


def _verdicts(cases: Sequence[Case]) -> list[str]:
    """Ratios of times, a row a case; geometric means; who is behind, and who failed."""
    lines = ["", "## Verdicts", "", "Time over that of the rival; below 1 is faster.", ""]
    columns = [(ours, other, figure) for ours, other in PAIRS for figure in FIGURES]
    header = ["", *(f"{ours} / {other}, {NAMES[figure]}" for ours, other, figure in columns)]
    rows = []
    for group in dict.fromkeys(case.group for case in cases):
        among = [case for case in cases if case.group == group]
        found = list(ratios(among))
        for case in among:
            rows.append([f"{group}: {case.name}", *(_cell([r for r in found if r.case is case], c) for c in columns)])
        rows.append([f"**{group}, geometric mean**", *(_cell(found, c) for c in columns)])
    rows.append(["**All, geometric mean**", *(_cell(list(ratios(cases)), c) for c in columns)])
    lines += [*table(header, rows), ""]
    for ours, other, figure in columns:
        found = [r for r in ratios(cases) if (r.ours, r.other, r.figure) == (ours, other, figure)]
        late = sorted((r for r in found if r.behind), key=lambda r: -r.value)
        if found:
            lines += [f"- {ours} / {other}, {NAMES[figure]}: geometric mean {number(mean(found))}, worst "
                      f"{number(max(r.value for r in found))}, behind (above {BEHIND}) in {len(late)} of {len(found)}"
                      + "".join(f"{'; ' if k else ': '}{r.case.name} ({r.case.group}) {number(r.value)}"
                                for k, r in enumerate(late)) + "."]  # fmt: skip
    lines += ["", *_failures(cases), ""]
    return lines


def _cell(found: Sequence[Ratio], column: tuple[str, str, str]) -> str:
    return number(mean([r for r in found if (r.ours, r.other, r.figure) == column]))


def _failures(cases: Sequence[Case]) -> list[str]:
    """How many times each rival raised or was wrong."""
    lines = []
    for rival in dict.fromkeys(result.rival for case in cases for result in case.results):
        results = [r for r in (case.find(rival) for case in cases) if r is not None and r.failure != OUT_OF_TIME]
        failed = sum(bool(result.failure) for result in results)
        lines += [f"- {rival}: failed in {failed} of {len(results)} cases."] if failed else []
    return lines or ["No rival failed."]


# The log ------------------------------------------------------------------------------------------------------------


class Log:
    """Cases as JSON lines, written as they come: what is measured stays, whatever ends the run.

    Parameters
    ----------
    path : Path
    keep : bool
        Whether what the file holds stays. Of two cases of one name the later one counts.
    """

    def __init__(self, path: Path, keep: bool):
        self._path = path
        self.earlier = list(self._read()) if keep and path.exists() else []
        if not keep:
            path.write_text("", encoding="utf-8")

    def _read(self) -> Iterator[Case]:
        for line in self._path.read_text(encoding="utf-8").splitlines():
            try:
                yield decoded(json.loads(line)["case"])
            except (ValueError, KeyError, TypeError):  # the line that a run was writing when it was ended
                continue

    def add(self, case: Case, environment: dict[str, Any]) -> None:
        line = json.dumps({"case": dataclasses.asdict(case), "environment": environment}, allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def decoded(fields: dict[str, Any]) -> Case:
    """A case from what `dataclasses.asdict` made of it."""
    results = [
        Result(**{**result, "times": {figure: Summary(**summary) for figure, summary in result["times"].items()}})
        for result in fields["results"]
    ]
    return Case(**{**fields, "shape": tuple(fields["shape"]), "results": results})


def merged(cases: Sequence[Case]) -> list[Case]:
    """One case of each name, the last one that was measured, where the first one stood; by headings."""
    found: dict[tuple[str, str], Case] = {}
    for case in cases:
        key = case.group, case.name
        if key not in found or not unmeasured(case):
            found[key] = case
    groups = list(dict.fromkeys(group for group, _ in found))
    return sorted(found.values(), key=lambda case: groups.index(case.group))
