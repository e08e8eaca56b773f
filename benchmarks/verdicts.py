"""Requirements on reports, as data: a bound on a figure of cupyfuse, or on its ratio to a rival's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .report import FIGURES, Case, ratio


class Requirement(NamedTuple):
    """A bound that some cases are held to."""

    what: str  # the figure, or "error" or "max_error"
    ours: tuple[str, ...]  # the rivals held to it, of which the worst counts
    bound: float
    rivals: tuple[str, ...] = ()  # what they are compared with; empty where the figure itself is bounded
    faster: bool = False  # bound the rival's figure over ours from below, not ours over the rival's from above
    group: str = ""  # of the cases; empty for all
    names: tuple[str, ...] = ()  # of the cases; empty for all

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


@dataclass(frozen=True)
class Finding:
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
        what = FIGURES[requirement.what][0] if requirement.what in FIGURES else requirement.what.replace("_", " ")
        compared = "" if not requirement.rivals else ": times faster" if requirement.faster else ", ratio"
        return f"{self.case.name}, {self.case.group.lower()}, {what}{compared}"

    @property
    def asked(self) -> str:
        return f"{'≥' if self.requirement.faster else '≤'} {self.requirement.bound:.3g}"


def yes_or_no(holds: bool | None) -> str:
    return "not measured" if holds is None else "yes" if holds else "no"


def check(requirements: Iterable[Requirement], cases: list[Case]) -> list[Finding]:
    """Hold cases to all requirements that cover them."""
    return [requirement.check(case) for requirement in requirements for case in cases if requirement.covers(case)]
