"""Time the functions of users that the tests run: plain and fused, with NumPy on the CPU and with CuPy on a GPU.

The functions are in `tests/helpers`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cupyfuse as cf

from . import options as types
from .lab import Lab, run
from .report import Case, Report, Result, geometric_mean, ratio
from .rivals import OURS, Rival
from .tables import Column, scientific, table
from .timing import describe

HELPERS = Path(__file__).resolve().parents[1] / "tests" / "helpers"
SIZES = {"256 rows": (256, 64, 32), "4096 x 1000": (4096, 1000, 1000)}  # rows, features, classes
SLOWER, OVERHEAD = 1.1, 15.0  # a call is slow that takes more times the plain one's and so many microseconds
DEFAULTS = {"budget": (0.25, 0.025), "sizes": (tuple(SIZES), ("256 rows",))}
PLAIN, FIGURE = "plain", "wall_least"
FIRST, WRITTEN = f"first call ms, {OURS}", f"as written, {OURS}"  # facts of a case

_HOW = """\
Each function is called plain and fused in turn, and the least time of each counts, from an idle device to an idle
device, in microseconds. *error* is ||result - reference|| / ||reference||, the largest of all results, against the
plain function in float64; *plain's* is that of the plain function. *way* is how NumPy arrays ran: as written, or as a
plan. A call is *slow* if it takes more than 1.1 times the plain one and 15 us."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="with NumPy, also where there is a GPU")
    types.add_several(parser, "--dtypes", ("float32", "float64"), default=("float32",))
    types.add_several(parser, "--sizes", SIZES, default=None)
    parser.add_argument("--only", default="", metavar="TEXT", help="functions whose name holds this text")


def functions() -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Return the module that makes arguments, and the functions by name."""
    if str(HELPERS) not in sys.path:
        sys.path.insert(0, str(HELPERS))
    made = importlib.import_module("user_functions")
    for other in ("user_programs", "user_loops"):
        importlib.import_module(other)
    return made, made.USERS


def leaves(results: Any) -> list[Any]:
    """Return results, alone or several, as NumPy arrays of float64."""
    several = results if isinstance(results, (tuple, list)) else [results]
    return [np.asarray(r.get() if hasattr(r, "get") else r).astype(np.float64) for r in several]


def _rival(lab: Lab, function: Callable[..., Any], arguments: Sequence[Any], exact: Sequence[Any]) -> Rival:
    """Return a function on arguments of its own, compared where the reference is finite."""

    def place() -> list[Any]:
        return [lab.cupy.asarray(a.copy()) for a in arguments]

    def attempt() -> list[Any]:
        found = zip(leaves(function(*place())), exact, strict=True)
        return [got[np.isfinite(wanted)] for got, wanted in found]

    expected = [wanted[np.isfinite(wanted)] for wanted in exact]
    return Rival(functools.partial(function, *place()), [attempt], expected, judged=False)


def measure(lab: Lab, case: Case, function: Callable[..., Any], arguments: Sequence[Any], budget: float) -> None:
    """Run a case: one function on arguments of one size and dtype."""
    doubles = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arguments]
    try:
        exact = leaves(function(*doubles))
    except (ValueError, IndexError) as error:
        case.results = [Result(PLAIN, failure=f"takes no arrays of this size: {describe(error)}")]
        return
    fused = cf.fuse(function)

    def ours() -> Rival:
        rival = _rival(lab, fused, arguments, exact)
        lab.device.synchronize()
        began = time.perf_counter()
        rival.call()
        lab.device.synchronize()
        case.facts = {FIRST: (time.perf_counter() - began) * 1e3, WRITTEN: float(bool(fused.plans[-1].as_written))}
        return rival

    factories = {PLAIN: lambda: _rival(lab, function, arguments, exact), OURS: ours}
    run(lab, case, factories, (FIGURE,), budget)


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run every function, at every size in every dtype."""
    made, users = functions()
    chosen = [name for name in users if options.only in name]
    for size, dtype, name in itertools.product(options.sizes, options.dtypes, chosen):
        case = Case(f"{size}, {dtype}", name, SIZES[size], dtype)
        try:
            with np.errstate(all="ignore"):
                arguments = made.arguments(users[name], np.dtype(dtype), SIZES[size])
                measure(lab, case, users[name], arguments, options.budget)
        except Exception as error:
            case.results = [Result(OURS, failure=describe(error))]
        yield case


# The report ---------------------------------------------------------------------------------------------------------


def least(case: Case, rival: str) -> float | None:
    """Return the least time of a rival, in microseconds; None where it has none."""
    found = case.find(rival)
    return found.times[FIGURE].minimum if found and FIGURE in found.times else None


def speedup(case: Case) -> float | None:
    return ratio(least(case, PLAIN), least(case, OURS))


def slow(case: Case) -> bool:
    plain, fused = least(case, PLAIN), least(case, OURS)
    return plain is not None and fused is not None and fused > SLOWER * plain + OVERHEAD


def summary(cases: Sequence[Case]) -> str:
    """Sum up cases in a sentence."""
    mean = geometric_mean(map(speedup, cases))
    if mean is None:
        return "Nothing was measured."
    failures = len(Report("functions", {}, {}, cases=list(cases)).failed())
    about = f"plain / fused: {mean:.2f} on average (geometric), {sum(map(slow, cases))} slow."
    return f"{sum(speedup(case) is not None for case in cases)} functions, {failures} failed; {about}"


def _way(case: Case) -> str:
    failures = [result.failure for result in case.results if result.failure]
    return failures[-1] if failures else "as written" if case.facts.get(WRITTEN) else "plan"


def failed(report: Report) -> list[str]:
    """List the functions that failed, and those that are slow."""
    return report.failed() + [f"{case.group}, {case.name}: slow" for case in report.cases if slow(case)]


def report_lines(report: Report) -> list[str]:
    """Write a table for each size and dtype, a row for each function."""
    columns = [
        Column("function", lambda case: case.name),
        Column("way", _way),
        Column("plain", lambda case: least(case, PLAIN), rival=True),
        Column("fused", lambda case: least(case, OURS), rival=True),
        Column("ratio", speedup),
        Column("slow", lambda case: "SLOW" if slow(case) else ""),
        Column("first call, ms", lambda case: case.facts.get(FIRST)),
        Column("error", lambda case: case.value(OURS, "error"), scientific),
        Column("plain's", lambda case: case.value(PLAIN, "error"), scientific),
    ]
    lines = [*_HOW.splitlines(), ""]
    for group, cases in report.groups().items():
        lines += [f"## {group}", "", summary(cases), "", *table(columns, cases, min)]
    return lines
