"""The self-test's report, as text and as a page of the documentation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..dtypes import is_float
from .measure import Measurement
from .oracle import EXTENDED
from .target import Failure, LaunchedKernel

_NOTES = """\
Errors are against a wider format: float64, or numpy.longdouble for float64 results. They are in ulps of the stored
result, and relative to it; where terms cancel (*), both refer to the computed terms. "used" is the largest share of the
allowance in float32 and float64; 16-bit results may be off by float32's allowance and half an ulp of their own. n, K, N
and B are the elements reduced, the terms of an inner product, the columns of a product, and the rows of a batch."""
# The facts on the page: those that the figures depend on.
_VERSIONS = ("cupyfuse", "Python", "NumPy", "CuPy", "CUDA driver", "CUDA runtime", "NVRTC", "GPU 0")
# The most failures listed for an operator in a format; further ones are counted.
_FAILURES_LISTED = 3


@dataclass
class Report:
    """The outcome of one run.

    Attributes
    ----------
    facts : versions and devices, as (name, value)
    engine : a sentence that names the engine
    special : number of special values compared, by format
    integers : number of results of integers compared, by dtype
    operators, chains : the largest errors, by format and by name of the operator or result
    kernels, kernels_title : the distinct kernels, and a heading that says whether they ran
    failures : wrong results
    seconds : duration of the run
    """

    facts: list[tuple[str, str]]
    engine: str
    special: dict[str, int] = field(default_factory=dict)
    integers: dict[str, int] = field(default_factory=dict)
    operators: dict[str, dict[str, Measurement]] = field(default_factory=dict)
    chains: dict[str, dict[str, Measurement]] = field(default_factory=dict)
    kernels: Sequence[LaunchedKernel] = ()
    kernels_title: str = ""
    failures: Sequence[Failure] = ()
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.failures

    def __str__(self) -> str:
        parts = [self.engine, align_columns(self.facts), *self._sections(), _NOTES, self._verdict()]
        return "\n\n".join(parts)

    def _sections(self) -> Iterator[str]:
        """Yield the tables of errors, the number of special values, and the list of kernels, as text."""
        for title, table in (("operator", self.operators), ("reductions, rows and products", self.chains)):
            yield align_columns([_head(title, table), *_rows(table)])
        for title, counts in (
            ("special values compared with their tables", self.special),
            ("results of integers compared with NumPy's", self.integers),
        ):
            yield f"{title}: {', '.join(f'{count} in {name}' for name, count in counts.items())}"
        yield self.kernels_title + "".join(f"\n  {line}" for line in _kernel_lines(self.kernels))

    def _verdict(self) -> str:
        """Say whether the run passed, or list the failures."""
        if self.passed:
            return f"Passed in {self.seconds:.0f} s: every result is within its allowance."
        lines = [f"FAILED: {len(self.failures)} results are wrong."]
        counts: Counter[tuple[str, str]] = Counter()
        for failure in self.failures:
            counts[failure.what, failure.dtype] += 1
            if counts[failure.what, failure.dtype] <= _FAILURES_LISTED:
                lines.append(f"  {failure}")
        for (what, dtype), count in counts.items():
            if count > _FAILURES_LISTED:
                lines.append(f"  {what} in {dtype}: {count - _FAILURES_LISTED} more")
        return "\n".join(lines)

    def markdown(self) -> str:
        """Return the report as a page of the documentation.

        Raises
        ------
        ValueError
            There were failures.
        """
        if not self.passed:
            raise ValueError(f"a run with {len(self.failures)} failures is not written as a page; print the report")
        lines = ["# Measured errors", ""]
        lines += [
            "Written by `python -m cupyfuse selftest --markdown FILE`, not by hand. [numerics.md](numerics.md) says"
        ]
        lines += ["what is promised, and where the allowances come from.", "", self.engine, ""]
        lines += _table(
            ("", ""), [(name, value.partition(" on ")[0]) for name, value in self.facts if name in _VERSIONS]
        )
        lines += ["", "## Operators", "", _NOTES, ""]
        if not EXTENDED:
            lines += [
                "`numpy.longdouble` is no wider than float64 on this machine: float64 is compared with float64.",
                "",
            ]
        for number, (title, table) in enumerate((("operator", self.operators), ("result", self.chains))):
            if number:
                lines += ["", "## Reductions, rows, products and heads", ""]
            lines += _table(_head(title, table), [(f"`{row[0]}`", *row[1:]) for row in _rows(table)])
        lines += ["", "## Special values and kernels", ""]
        lines += ["Results compared with the tables of special values (`cupyfuse/selftest/tables.py`, `pairs.py`):", ""]
        lines += _table(tuple(self.special), [tuple(map(str, self.special.values()))])
        lines += ["", self.kernels_title, ""]
        if self.kernels:
            lines += [f"- {line}" for line in _kernel_lines(self.kernels)]
        return "\n".join(lines).rstrip() + "\n"


def _head(title: str, table: dict[str, dict[str, Measurement]]) -> tuple[str, ...]:
    """Return the heading of a table of errors, whose columns `_rows` fills."""
    ulps, relative = list(table), list(table)
    ulps[0], relative[0] = f"ulps: {ulps[0]}", f"relative: {relative[0]}"
    return (title, "allowed", "used", *ulps, *relative)


def _rows(table: dict[str, dict[str, Measurement]]) -> list[tuple[str, ...]]:
    """Return a row for each name: allowance, its used share, largest errors in ulps and relative, by format."""
    names = dict.fromkeys(name for each in table.values() for name in each)
    rows = []
    for name in names:
        found = [each.get(name) for each in table.values()]
        allowed = next(m.allowed for m in found if m is not None)
        ulps = ["-" if m is None else "0" if not m.ulps else f"{m.ulps:.2f}" for m in found]
        relative = ["-" if m is None else "0" if not m.relative else f"{m.relative:.1e}" for m in found]
        wide = [table[f][name].used for f in ("float32", "float64") if name in table.get(f, {})]
        rows.append((name, allowed, f"{max(wide, default=0.0):.0%}" if allowed != "0" else "-", *ulps, *relative))
    return rows


def _kernel_lines(kernels: Sequence[LaunchedKernel]) -> list[str]:
    """Summarise the kernels by template: number, variants, formats."""
    lines = []
    for template in sorted({k.template for k in kernels}):
        group = [k for k in kernels if k.template == template]
        formats = ", ".join(dict.fromkeys(k.dtype if is_float(k.dtype) else "integers" for k in group))
        found = {k.vectors for k in group}
        variants = [word for word, vectors in (("vectors", True), ("scalars", False)) if vectors in found]
        lines.append(f"{template}: {len(group)}, in {' and '.join(variants)}, in {formats}")
    return lines


def align_columns(rows: Sequence[tuple[str, ...]]) -> str:
    """Align the cells of rows in columns of text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _table(head: Sequence[str], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Write a table in Markdown, as lines."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]


def write_page(report: Report, path: Path) -> None:
    """Write a report as a page of the documentation, with Unix line ends on every system."""
    path.write_text(report.markdown(), encoding="utf-8", newline="\n")
