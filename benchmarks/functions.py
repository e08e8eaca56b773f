"""Time the functions of users that the tests run: plain and fused, with NumPy on the CPU and with CuPy on a GPU.

    python -m benchmarks functions           # on a GPU where there is one
    python -m benchmarks functions --cpu

The functions are in `tests/helpers`. A call is *slow* if it takes more than 1.1 times the plain one and 15 us.
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cupyfuse as cf

from . import environment
from . import options as types
from .report import Column, scientific, table, write_json
from .timing import describe

RESULTS = Path(__file__).resolve().parent / "results"
HELPERS = RESULTS.parents[1] / "tests" / "helpers"
SIZES = {"256 rows": (256, 64, 32), "4096 x 1000": (4096, 1000, 1000)}  # rows, features, classes
SLOWER, OVERHEAD = 1.1, 15e-6
SECONDS = 0.25  # for each rival of a function

_HOW = """\
Each function is called plain and fused in turn, and the least time of each counts, from an idle device to an idle
device, in microseconds. *error* is ||result - reference|| / ||reference||, the largest of all results, against the
plain function in float64; *plain's* is that of the plain function. *way* is how NumPy arrays ran: as written, or as a
plan."""


@dataclass
class Row:
    """One function at one size. Fields that were not measured are None."""

    name: str
    size: str
    dtype: str
    failure: str = ""  # why there are no figures
    skipped: str = ""  # likewise, where the plain function says so
    plain: float | None = None  # seconds
    fused: float | None = None
    first: float | None = None  # of the first fused call
    error: float | None = None
    plain_error: float | None = None
    way: str = ""

    @property
    def ratio(self) -> float | None:
        return self.plain / self.fused if self.plain and self.fused else None

    @property
    def slow(self) -> bool:
        return self.plain is not None and self.fused is not None and self.fused > SLOWER * self.plain + OVERHEAD


@dataclass
class Table:
    """All rows, and what they were measured with."""

    environment: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def write(self, folder: Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "functions.json", asdict(self))
        text = self.markdown()
        (folder / "functions.md").write_text(text, encoding="utf-8")
        return text

    def markdown(self) -> str:
        about = ", ".join(f"{name} {value}" for name, value in self.environment.items() if value is not None)
        lines = ["# Functions of users", "", f"{about}.", "", *_HOW.splitlines(), ""]
        columns = [
            Column("function", lambda row: row.name),
            Column("way", lambda row: row.failure or row.skipped or row.way),
            Column("plain", lambda row: row.plain and row.plain * 1e6, rival=True),
            Column("fused", lambda row: row.fused and row.fused * 1e6, rival=True),
            Column("ratio", lambda row: row.ratio),
            Column("slow", lambda row: "SLOW" if row.slow else ""),
            Column("first call, ms", lambda row: row.first and row.first * 1e3),
            Column("error", lambda row: row.error, scientific),
            Column("plain's", lambda row: row.plain_error, scientific),
        ]
        for size, dtype in dict.fromkeys((row.size, row.dtype) for row in self.rows):
            rows = [row for row in self.rows if (row.size, row.dtype) == (size, dtype)]
            lines += [f"## {size}, {dtype}", "", *summary(rows), "", *table(columns, rows, min)]
        return "\n".join(lines)


def summary(rows: Sequence[Row]) -> list[str]:
    """Sum up rows in a sentence."""
    ratios = [row.ratio for row in rows if row.ratio]
    if not ratios:
        return ["Nothing was measured."]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    slow, failed = sum(row.slow for row in rows), sum(bool(row.failure) for row in rows)
    return [f"{len(ratios)} functions, {failed} failed; plain / fused: {mean:.2f} on average (geometric), {slow} slow."]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cpu", action="store_true", help="with NumPy, also where there is a GPU")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, and the small size alone")
    parser.add_argument("--dtypes", type=types.names(("float32", "float64")), default=("float32",), metavar="DTYPE,...")
    parser.add_argument("--only", default="", metavar="TEXT", help="functions whose name holds this text")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: benchmarks/results/...)")


def functions() -> tuple[Any, dict[str, Callable[..., Any]]]:
    """Return the module that makes arguments, and the functions by name."""
    if str(HELPERS) not in sys.path:
        sys.path.insert(0, str(HELPERS))
    made = importlib.import_module("user_functions")
    for other in ("user_programs", "user_loops"):
        importlib.import_module(other)
    return made, made.USERS


class Bench:
    """An array library, and how calls of functions on its arrays are timed."""

    def __init__(self, cupy: Any, seconds: float):
        self.cupy, self.seconds = cupy, seconds

    def place(self, arrays: Iterable[Any]) -> list[Any]:
        return [self.cupy.asarray(a) for a in arrays] if self.cupy else list(arrays)

    def timed(self, call: Callable[[], Any]) -> float:
        if self.cupy:
            self.cupy.cuda.Device().synchronize()
        began = time.perf_counter()
        call()
        if self.cupy:
            self.cupy.cuda.Device().synchronize()
        return time.perf_counter() - began

    def contest(self, plain: Callable[[], Any], fused: Callable[[], Any]) -> tuple[float, float]:
        """Return the least time of each, called in turn."""
        best = [self.timed(plain), self.timed(fused)]
        end = time.perf_counter() + 2 * self.seconds
        rounds = 0
        while time.perf_counter() < end or rounds < 3:
            rounds += 1
            for k, call in enumerate((plain, fused)):
                for _ in range(max(1, min(50, int(0.01 / best[k])))):
                    best[k] = min(best[k], self.timed(call))
        return best[0], best[1]

    def run(self, row: Row, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Fill in a row."""
        wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arguments]
        try:
            exact = leaves(function(*wide))
        except (ValueError, IndexError) as error:
            row.skipped = f"takes no arrays of this size: {describe(error)}"
            return
        head = cf.fuse(function)
        given = self.place(a.copy() for a in arguments)
        row.first = self.timed(lambda: head(*given))
        row.error = largest_error(head(*self.place(a.copy() for a in arguments)), exact)
        row.plain_error = largest_error(function(*self.place(a.copy() for a in arguments)), exact)
        row.way = "as written" if head.plans[-1].as_written else "plan"
        given, own = (self.place(a.copy() for a in arguments) for _ in range(2))
        row.plain, row.fused = self.contest(lambda: function(*own), lambda: head(*given))


def leaves(results: Any) -> list[Any]:
    """Return results, alone or several, as NumPy arrays of float64."""
    several = results if isinstance(results, (tuple, list)) else [results]
    return [np.asarray(r.get() if hasattr(r, "get") else r).astype(np.float64) for r in several]


def largest_error(results: Any, exact: Sequence[Any]) -> float | None:
    """Return the largest relative error of results by norm; None if it is infinite where the reference is not."""
    errors = [0.0]
    for got, wanted in zip(leaves(results), exact, strict=True):
        known = np.isfinite(wanted)
        size = float(np.linalg.norm(wanted[known]))
        errors.append(float(np.linalg.norm((got - wanted)[known])) / (size or 1.0))
    return max(errors) if all(map(math.isfinite, errors)) else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks functions", description=__doc__)
    add_options(parser)
    given = parser.parse_args(arguments)
    cupy = None if given.cpu else available_cupy()
    name = "cpu" if cupy is None else cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    found = environment.collect(cupy, name) if cupy else {"cpu": environment.processor(), **environment.versions()}
    made, users = functions()
    measured, bench = Table(found), Bench(cupy, SECONDS / (10 if given.quick else 1))
    folder = given.output or RESULTS / environment.slug(name)
    text = ""
    with np.errstate(all="ignore"):
        for size, lengths in list(SIZES.items())[: 1 if given.quick else None]:
            made.ROWS, made.WIDTH, made.CLASSES = lengths
            for dtype in given.dtypes:
                for function_name, function in users.items():
                    if given.only in function_name:
                        row = Row(function_name, size, dtype)
                        measured.rows.append(row)
                        try:
                            bench.run(row, function, made.arguments(function, np.dtype(dtype)))
                        except Exception as error:
                            row.failure = describe(error)
                        text = measured.write(folder)
    print(text)
    return 1 if any(row.failure or row.slow for row in measured.rows) else 0


def available_cupy() -> Any:
    """Return CuPy where it finds a GPU, else None."""
    try:
        import cupy
    except ImportError:
        return None
    return cupy if cupy.cuda.is_available() else None
