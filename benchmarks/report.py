"""Results of a benchmark as data, their JSON, and requirements on them."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .timing import FIGURES, Summary

OUT_OF_TIME = "out of time"  # why a rival took no part; not a failure


@dataclass
class Result:
    """What one rival did in one case."""

    rival: str
    error: float | None = None  # ||result - reference|| / ||reference|| against float64
    times: dict[str, Summary] = field(default_factory=dict)  # by figure
    failure: str = ""  # why the rival took no part, or no part any more
    missing: dict[str, str] = field(default_factory=dict)  # figures that could not be taken, with the reason
    max_error: float | None = None  # the largest error of an element, relative to its size in the case


@dataclass
class Case:
    """One thing computed by several rivals; group and name are headings in the report."""

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes_moved: int = 0  # that the case must read and write at least; 0 where arithmetic takes the time
    results: list[Result] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)  # of the data by name, of a rival by "name, rival"

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        """Rebuild a case from a report's JSON."""
        results = [
            Result(**{**result, "times": {figure: Summary(**times) for figure, times in result["times"].items()}})
            for result in fields["results"]
        ]
        return cls(**{**fields, "shape": tuple(fields["shape"]), "results": results})

    def find(self, rival: str) -> Result | None:
        return next((r for r in self.results if r.rival == rival), None)

    def value(self, rival: str, what: str) -> float | None:
        """Return a rival's "error", "max_error", "GB/s", or median of a figure; None where it failed or has none."""
        result = self.find(rival)
        if result is None or result.failure:
            return None
        if what in ("error", "max_error"):
            return result.error if what == "error" else result.max_error
        if what == "GB/s":
            time = self.value(rival, "gpu_evicted")
            return self.bytes_moved / time / 1e3 if self.bytes_moved and time else None
        return result.times[what].median if what in result.times else None

    @property
    def size(self) -> str:
        return " x ".join(map(str, self.shape))

    @property
    def unmeasured(self) -> bool:
        """Whether there was no time for any rival."""
        return all(result.failure == OUT_OF_TIME for result in self.results)


@dataclass
class Report:
    """All cases of one run of one benchmark, with what it ran on."""

    benchmark: str
    environment: dict[str, Any]
    options: dict[str, Any]
    stopped: str = ""  # the error that ended the run before its last case
    cases: list[Case] = field(default_factory=list)

    def failed(self) -> list[str]:
        """List where cupyfuse itself failed or was wrong."""
        return [
            f"{case.group}, {case.name}: {result.rival}: {result.failure}"
            for case in self.cases
            for result in case.results
            if result.failure not in ("", OUT_OF_TIME) and result.rival.startswith("cupyfuse")
        ]

    def groups(self) -> dict[str, list[Case]]:
        """Return the cases by group, in the order in which the groups came."""
        found: dict[str, list[Case]] = {}
        for case in self.cases:
            found.setdefault(case.group, []).append(case)
        return found

    def write_json(self, path: Path) -> None:
        """Write JSON atomically: an aborted run leaves the old file or the new one."""
        unfinished = path.with_suffix(".part")
        content = json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False)
        unfinished.write_text(content + "\n", encoding="utf-8")
        os.replace(unfinished, path)


def read_cases(path: Path) -> list[Case]:
    """Read the cases of a report's JSON; none where there is no such file."""
    if not path.exists():
        return []
    return [Case.from_json(case) for case in json.loads(path.read_text(encoding="utf-8"))["cases"]]


def merge(cases: Iterable[Case]) -> list[Case]:
    """Keep one case of each group and name, the last that was measured, where the first stood; order by group."""
    found: dict[tuple[str, str], Case] = {}
    for case in cases:
        key = case.group, case.name
        if key not in found or not case.unmeasured:
            found[key] = case
    groups = list(dict.fromkeys(group for group, _ in found))
    return sorted(found.values(), key=lambda case: groups.index(case.group))


# Requirements -------------------------------------------------------------------------------------------------------


def ratio(a: float | None, b: float | None) -> float | None:
    """Divide, where both are known."""
    if a is None or b is None:
        return None
    return a / b if b else 1.0 if a == 0 else float("inf")


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are known; None where none is."""
    logarithms = [math.log(value) for value in values if value]
    return math.exp(statistics.fmean(logarithms)) if logarithms else None


class Requirement(NamedTuple):
    """A bound that some cases are held to: on a figure of cupyfuse, or on its ratio to a rival's."""

    what: str  # the figure, or "error" or "max_error"
    ours: tuple[str, ...]  # the rivals held to it, of which the worst counts
    bound: float
    rivals: tuple[str, ...] = ()  # what they are compared with; empty where the figure itself is bounded
    faster: bool = False  # bound the rival's figure over ours from below, not ours over the rival's from above
    group: str = ""  # of the cases; empty for all
    names: tuple[str, ...] = ()  # of the cases; empty for all
    way: str = ""  # named in the report where ours are run in several ways

    def covers(self, case: Case) -> bool:
        return self.group in ("", case.group) and (not self.names or case.name in self.names)

    def check(self, case: Case) -> Finding:
        """Compare a case with the bound."""
        mine = [case.value(rival, self.what) for rival in self.ours]
        known = [value for value in mine if value is not None]
        worst = max(known) if known and len(known) == len(mine) else None
        found: dict[str, float | None] = {}
        for rival in self.rivals:
            if case.find(rival) is None and len(self.rivals) > 1:  # one that does not run here
                continue
            theirs = case.value(rival, self.what)
            found[rival] = ratio(theirs, worst) if self.faster else ratio(worst, theirs)
        return Finding(self, case, found if self.rivals else {self.ours[0]: worst})


class Finding(NamedTuple):
    """A requirement checked on a case: by rival the ratio, or the figure itself; None where unmeasured."""

    requirement: Requirement
    case: Case
    found: dict[str, float | None]

    @property
    def holds(self) -> bool | None:
        """Whether the bound holds; None where it may, but something was not measured."""
        known = [value for value in self.found.values() if value is not None]
        bound, faster = self.requirement.bound, self.requirement.faster
        if not all(value >= bound if faster else value <= bound for value in known):
            return False
        return True if len(known) == len(self.found) else None

    @property
    def title(self) -> str:
        requirement = self.requirement
        what = FIGURES[requirement.what].title if requirement.what in FIGURES else requirement.what.replace("_", " ")
        compared = "" if not requirement.rivals else ": times faster" if requirement.faster else ", ratio"
        way = f", {requirement.way}" if requirement.way else ""
        return f"{self.case.name}, {self.case.group.lower()}{way}, {what}{compared}"

    @property
    def asked(self) -> str:
        return f"{'≥' if self.requirement.faster else '≤'} {self.requirement.bound:.3g}"


def check(requirements: Iterable[Requirement], cases: Iterable[Case]) -> list[Finding]:
    """Hold cases to all requirements that cover them."""
    cases = list(cases)
    return [requirement.check(case) for requirement in requirements for case in cases if requirement.covers(case)]
