"""The report of the matrix products: what "highest" promises beside what was measured, then all figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import families
from .gemm import BASE, ours
from .report import FIGURES, HOW_TIMED, Case, Report, Result, across, case_table, heading, number, numbered, table
from .report import scientific as figure

TIMED = "gpu_evicted"
_MIXED = (
    1.0 + 1e-6
)  # the cancellation from which on terms are of both signs: where all have one it is 1, but for rounding

_HOW = f"""\
{HOW_TIMED}- *max error*: the largest |result − reference| / (|x| |weight|ᵀ) of an element.
- *error*: ‖result − reference‖ / ‖reference‖, by Frobenius norms.
- *bound*: the weight was prepared once by `bind`, which is not timed; the other calls do all of it every time. *rounded
  before*: both operands were stored in bfloat16 beforehand.
- *{BASE}* is `cupy.matmul`; the other products of cuBLAS are its own function, `cublasGemmEx`, with float32
  results. *TF32* and *bfloat16* are what it is allowed to round float32 operands to; it may round less than that.
- *torch* is `torch.matmul` at `torch.set_float32_matmul_precision` "highest" and "high".

Times are compared by single calls: many products in a row run at a clock that depends on what ran before them.
"""


@dataclass(frozen=True)
class Verdict:
    """Errors of "highest" beside those of cuBLAS's float32 product in one case; None where one was not measured.

    Attributes
    ----------
    largest, norm : pair of float, or None
        Max error and error by norms: cupyfuse's, the larger one of bound and unbound, and cuBLAS's.
    mixed : bool
        Whether terms of both signs are summed, so that "highest" is held to cuBLAS's error by norms too.
    """

    largest: tuple[float, float] | None
    norm: tuple[float, float] | None
    mixed: bool

    @property
    def largest_holds(self) -> bool | None:
        return None if self.largest is None else self.largest[0] <= self.largest[1]

    @property
    def norm_holds(self) -> bool | None:
        return None if self.norm is None else self.norm[0] <= self.norm[1]


def judge(case: Case) -> Verdict:
    """Compare the errors of a case."""

    def pair(error: Callable[[Result], float | None]) -> tuple[float, float] | None:
        found = [case.find(name) for name in (ours("highest", True), ours("highest", False), BASE)]
        values = [error(result) if result is not None and not result.failure else None for result in found]
        bound, unbound, base = values
        return None if bound is None or unbound is None or base is None else (max(bound, unbound), base)

    mixed = case.facts.get("cancellation", 1.0) > _MIXED
    return Verdict(pair(lambda r: r.max_error), pair(lambda r: r.error), mixed)


def time_ratio(case: Case, rival: str) -> float | None:
    """How many times as long as cuBLAS's float32 product a rival takes."""
    mine, base = case.find(rival), case.find(BASE)
    times = [result.median(TIMED) if result else None for result in (mine, base)]
    return times[0] / times[1] if times[0] and times[1] else None


def margin(report: Report) -> float | None:
    """How many times the smallest error in the report, of either kind, exceeds what the reference may itself be off."""
    found = []
    for case in report.cases:
        reference = case.facts.get("reference", 0.0)
        if not reference:
            continue
        by_norm = reference * case.facts.get("cancellation", 1.0)
        for result in case.results:
            found += [result.max_error / reference] if result.max_error else []
            found += [result.error / by_norm] if result.error else []
    return min(found, default=None)


def _holds(held: Sequence[bool | None], what: str, where: str) -> str:
    known = [h for h in held if h is not None]
    unknown = f"; {len(held) - len(known)} not measured" if len(known) < len(held) else ""
    return f"- By {what} it is no larger in {sum(known)} of {len(known)} {where}{unknown}."


def _statements(report: Report) -> list[str]:
    """What the figures say about "highest", counted."""
    verdicts = [judge(case) for case in report.cases]
    mixed = [v.norm_holds for v in verdicts if v.mixed]
    alike = [v.norm_holds for v in verdicts if not v.mixed]
    lines = [f'The error of "highest", bound and unbound, beside that of {BASE}:', ""]
    lines += [_holds([v.largest_holds for v in verdicts], "max error", "cases")]
    lines += [_holds(mixed, "Frobenius norms", "cases with terms of both signs")] if mixed else []
    if alike:
        lines += [_holds(alike, "Frobenius norms", "cases with terms of one sign, for which nothing is promised")]
    least = margin(report)
    if least is not None:
        lines += ["", "The reference is a float64 product: exact products, K − 1 additions, so at most (K − 1) 2⁻⁵³ of"]
        lines += [
            f"|x| |weight|ᵀ off. The smallest error measured, of either kind, is {least:,.0f} times that or more."
        ]
    return [*lines, ""]


def _beside(pair: tuple[float, float] | None) -> list[str]:
    """Cupyfuse's error, cuBLAS's, and their ratio."""
    if pair is None:
        return ["–"] * 3
    return [figure(pair[0]), figure(pair[1]), number(pair[0] / pair[1]) if pair[1] else "–"]


def _word(held: bool | None, promised: bool = True) -> str:
    if held is None:
        return "not measured"
    return ("yes" if held else "no") + ("" if promised else " (one sign)")


def _verdicts(cases: Sequence[Case]) -> list[str]:
    """Errors and times of "highest" over cuBLAS's: a row a case."""
    timed = [ours(precision, bound) for precision in ("highest", "high") for bound in (True, False)]
    errors, times = [], []
    for case in cases:
        v = judge(case)
        row = [case.name, *_beside(v.largest), _word(v.largest_holds), *_beside(v.norm), _word(v.norm_holds, v.mixed)]
        errors.append(row)
        times.append([case.name, *(number(time_ratio(case, rival)) for rival in timed)])
    header = ["", "max error", "cuBLAS's", "ratio", "no larger", "error", "cuBLAS's", "ratio", "no larger"]
    lines = ['Errors of "highest", the larger one of bound and unbound, beside those of cuBLAS in float32:', ""]
    lines += [*table(header, errors), "", f"Time over that of {BASE}, {FIGURES[TIMED]}; below 1 is faster:", ""]
    return [*lines, *table(["", *timed], times), ""]


def _sweep(cases: Sequence[Case]) -> list[str]:
    """Tables over K: max error, error by norms, time."""
    notes: list[str] = []
    tables: tuple[tuple[str, Callable[[Case, Result], str]], ...] = (
        ("Max error:", lambda case, result: figure(result.max_error)),
        ("Error by Frobenius norms:", lambda case, result: figure(result.error)),
        (f"Microseconds, {FIGURES[TIMED]}:", lambda case, result: number(result.median(TIMED))),
    )
    lines = []
    for title, cell in tables:
        columns = across(cases, cell, notes)
        rows = zip((f"{case.shape[1]}" for case in cases), *columns.values(), strict=True)
        lines += [title, "", *table(["K", *columns], rows), ""]
    return [*lines, *numbered(notes)]


def gemm_markdown(report: Report) -> str:
    """Verdicts first, then a table a family, then tables over K."""
    lines = [*heading(report), *_statements(report), *_HOW.splitlines(), ""]
    for group in dict.fromkeys(case.group for case in report.cases):
        cases = [case for case in report.cases if case.group == group]
        m, k, n = cases[0].shape
        swept = cases[0].name not in families.FAMILIES
        shape = f"{m} x K x {n}" if swept else f"{m} x {k} x {n}"
        lines += [f"## {group}", "", f"{shape}, (M, K) times (N, K) transposed, float32.", "", *_verdicts(cases)]
        if swept:
            lines += _sweep(cases)
            continue
        for case in cases:
            what = [families.describe(case.name)]
            if "cancellation" in case.facts:
                what += [f"‖|x| |weight|ᵀ‖ is {case.facts['cancellation']:.3g} times ‖x weightᵀ‖."]
            lines += [f"### {case.name}", "", " ".join(what), "", *case_table(case, BASE, TIMED)]
    return "\n".join(lines).rstrip() + "\n"
