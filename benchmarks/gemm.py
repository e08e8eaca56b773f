"""Matrix products: float32 ones in every precision, over families of data and over K; 16-bit ones (`half.py`)."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import cupyfuse as cf
from cupyfuse import dtypes
from cupyfuse.settings import PRECISIONS

from . import families, half
from . import options as types
from .lab import Lab, run
from .report import Case, Report, Requirement, check, ratio
from .rivals import EAGER, Computation, Rival, spread
from .tables import (
    ERROR,
    Column,
    case_table,
    explain,
    list_notes,
    number,
    rival_columns,
    scientific,
    table,
    yes_or_no,
)
from .timing import FIGURES as TITLES

FIGURES = ("gpu_evicted", "gpu_back_to_back")
DEFAULTS = {
    "budget": (0.15, 0.02),  # GPU seconds for each rival and figure
    "half_size": (16384, 2048),
    "depths": ((1, 2, 3, 7, 16, 64, 255, 1024, 4096, 8192, 65536), (1, 3, 64, 255, 4096, 65536)),
}
BASE = "cuBLAS float32"
PARTS = ("float32", "16-bit")
SWEPT = ("gaussian", "positive")  # the families over K
SWEEP_ROWS, SWEEP_COLUMNS = 256, 512

# The error of a product that is wrong rather than rounded, in units of |x| |weight|ᵀ: a unit in the last place of
# float32 for every term, and the rounding of both operands to 10 or 7 bits, which may be a truncation.
_OPERANDS = {"highest": 0.0, "high": 2.0**-9, "medium": 2.0**-6, "ieee": 0.0, "tf32": 2.0**-9}

_CHECKED = 1 << 38  # multiplications in float64 for the reference; of larger products some rows are compared
_TINY = 1e-300

# cudaDataType_t and cublasComputeType_t
_FLOAT32, _BFLOAT16 = 0, 14
_COMPUTE_32F, _COMPUTE_32F_FAST_16BF, _COMPUTE_32F_FAST_TF32 = 68, 75, 77

_HOW = f"""\
- *max error*: the largest |result − reference| / (|x| |weight|ᵀ) of an element.
{ERROR}, by Frobenius norms.
- *bound*: the weight was prepacked once by `bind`, which is not timed; the other calls do all of it every time.
  *rounded before*: both operands were stored in bfloat16 beforehand.
- *{BASE}* is `cupy.matmul`; the other products of cuBLAS are its own function, `cublasGemmEx`, with float32
  results. *TF32* and *bfloat16* are what it may round float32 operands to; it may round less.
- *torch* is `torch.matmul` at `torch.set_float32_matmul_precision` "highest" and "high".

Times are compared by single calls: many products in a row run at a clock that depends on what ran before them."""


def add_options(parser: argparse.ArgumentParser) -> None:
    types.add_shape(parser, about="M x K x N of every family")
    types.add_several(parser, "--families", families.FAMILIES)
    types.add_several(parser, "--parts", PARTS)
    parser.add_argument("--half-size", type=int, metavar="N", help="the largest cube of 16-bit products")
    parser.add_argument("--depths", type=types.lengths, metavar="K,K,...", help="the K to sweep over")


def product_name(precision: str, bound: bool) -> str:
    """Name a product by cupyfuse."""
    return f"cupyfuse {precision}, bound" if bound else f"cupyfuse {precision}"


def error_limit(precision: str, depth: int) -> float:
    """Return the error, relative to |x| |weight|ᵀ, from which on a product of `depth` terms is wrong."""
    return (depth + 2) * 2.0**-23 + _OPERANDS[precision]


def product(lab: Lab, x: Any, weight: Any) -> tuple[dict[str, Callable[[], Rival]], dict[str, float]]:
    """Return the rivals of ``x @ weight.T``, of (M, K) and (N, K) float32 arrays, and facts.

    The facts are "cancellation", the norm of |x| |weight|ᵀ over that of the product: 1 where nothing cancels; and
    "reference", a bound of the float64 reference's own error relative to |x| |weight|ᵀ: products of two float32 numbers
    are exact there, so only the additions round.
    """
    (m, k), n, cupy = x.shape, weight.shape[0], lab.cupy
    every = spread(m, _CHECKED // (k * n))
    xs, ws = lab.as_double(x[::every]), lab.as_double(weight)
    expected, sizes = xs @ ws.T, abs(xs) @ abs(ws).T
    norm = float((expected**2).sum())
    facts = {"reference": (k - 1) * 2.0**-53}
    if norm > 0.0:
        facts["cancellation"] = math.sqrt(float((sizes**2).sum()) / norm)
    bounds = [cupy.maximum(sizes, _TINY)]

    def computation(precision: str) -> Computation:
        limit = error_limit(precision, k)
        return Computation(lab, [expected], (m, n), "float32", every, sizes=bounds, limit=limit)

    def ours(precision: str, bound: bool) -> Rival:
        function: Any = cf.fuse(lambda x, weight: x @ weight.T, precision=precision)
        if bound:
            return computation(precision).by_ours(function.bind(weight=weight), x)
        return computation(precision).by_ours(function, x, weight)

    def cublas(dtype: int, compute: int, precision: str) -> Rival:
        """Return cuBLAS's own function, with float32 results; 16-bit operands are rounded here, untimed."""
        gemm, handle = cupy.cuda.cublas.gemmEx, cupy.cuda.device.get_cublas_handle
        stored = dtypes.to_numpy("bfloat16" if dtype == _BFLOAT16 else "float32")
        x_stored, weight_stored = x.astype(stored, copy=False), weight.astype(stored, copy=False)
        one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)

        def call() -> Any:
            # cuBLAS is column-major: it sees all three transposed, and computes weight @ x.T.
            out = cupy.empty((m, n), np.float32)
            a, b, c = weight_stored.data.ptr, x_stored.data.ptr, out.data.ptr
            scale, keep = one.ctypes.data, zero.ctypes.data
            gemm(handle(), 1, 0, n, m, k, scale, a, dtype, k, b, dtype, k, keep, c, _FLOAT32, n, compute, -1)
            return out

        return computation(precision).by(call)

    def torch(name: str, precision: str) -> Rival:
        multiply = functools.partial(lab.need_torch().product, precision=name)
        return computation(precision).by_torch(EAGER, multiply, x, weight)

    rivals: dict[str, Callable[[], Rival]] = {
        product_name(precision, bound): functools.partial(ours, precision, bound)
        for precision in PRECISIONS
        for bound in (True, False)
    }
    return {
        **rivals,
        BASE: lambda: computation("ieee").by(functools.partial(cupy.matmul, x, weight.T)),
        "cuBLAS TF32": lambda: cublas(_FLOAT32, _COMPUTE_32F_FAST_TF32, "tf32"),
        "cuBLAS bfloat16": lambda: cublas(_FLOAT32, _COMPUTE_32F_FAST_16BF, "medium"),
        "cuBLAS bfloat16, rounded before": lambda: cublas(_BFLOAT16, _COMPUTE_32F, "medium"),
        "torch float32": lambda: torch("highest", "ieee"),
        "torch TF32": lambda: torch("high", "tf32"),
    }, facts


def operand_cases(options: argparse.Namespace) -> Iterator[tuple[str, str, str, tuple[int, ...]]]:
    """Yield each case as (group, name, family, shape), the shape being (M, K, N)."""
    for family in options.families:
        yield "Families of data", family, family, options.shape
    for family in options.families:
        if family in SWEPT:
            for depth in options.depths:
                yield f"Over K: {family}", f"K = {depth}", family, (SWEEP_ROWS, depth, SWEEP_COLUMNS)


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run every family at one shape, then the sweep over K; then 16-bit products."""
    for group, name, family, shape in operand_cases(options) if "float32" in options.parts else ():
        lab.release()
        x, weight = (lab.cupy.asarray(operand) for operand in families.draw(family, shape, options.seed))
        rivals, facts = product(lab, x, weight)
        yield run(lab, Case(group, name, shape, "float32", facts=facts), rivals, FIGURES, options.budget)
        del rivals, x, weight
    if "16-bit" in options.parts:
        yield from half.cases(lab, options)


# The report ---------------------------------------------------------------------------------------------------------

_HIGHEST = (product_name("highest", True), product_name("highest", False))
# "highest" is held to cuBLAS's error, by norm where terms of both signs are summed.
BY_ELEMENT = Requirement("max_error", _HIGHEST, 1.0, (BASE,))
BY_NORM = Requirement("error", _HIGHEST, 1.0, (BASE,))


def has_one_sign(case: Case) -> bool:
    """Tell whether all terms have one sign, but for rounding."""
    return case.facts.get("cancellation", 1.0) <= 1.0 + 1e-6


def margin(report: Report) -> float | None:
    """Return how many times the smallest error, of either kind, exceeds what the reference may itself be off."""
    found = []
    for case in report.cases:
        reference = case.facts.get("reference", 0.0)
        by_norm = reference * case.facts.get("cancellation", 1.0)
        for result in case.results if reference else ():
            found += [result.max_error / reference] if result.max_error else []
            found += [result.error / by_norm] if result.error else []
    return min(found, default=None)


def _count_holding(requirement: Requirement, cases: list[Case], measure: str, group: str) -> list[str]:
    """Say in how many cases a requirement of the error, by some measure, holds."""
    holds = [finding.holds for finding in check([requirement], cases)]
    known = [h for h in holds if h is not None]
    unknown = f"; {len(holds) - len(known)} not measured" if len(known) < len(holds) else ""
    return [f"- By {measure} it is no larger in {sum(known)} of {len(known)} {group}{unknown}."] if cases else []


def _error_columns(requirement: Requirement) -> list[Column]:
    """Return the columns that compare an error of "highest" with cuBLAS's."""
    what = requirement.what

    def worst(case: Case) -> float | None:
        return max((e for e in (case.value(rival, what) for rival in _HIGHEST) if e is not None), default=None)

    def holds(case: Case) -> str:
        held = requirement.check(case).holds
        excused = what == "error" and held is not None and has_one_sign(case)
        return yes_or_no(held) + (" (one sign)" if excused else "")

    return [
        Column(what.replace("_", " "), worst, scientific),
        Column("cuBLAS's", lambda case: case.value(BASE, what), scientific),
        Column("ratio", lambda case: requirement.check(case).found[BASE]),
        Column("no larger", holds),
    ]


def _compare_with_cublas(cases: Sequence[Case]) -> list[str]:
    """Write errors of "highest" beside cuBLAS's, and times over cuBLAS's: a row a case."""

    def time(rival: str) -> Column:
        return Column(rival, lambda c: ratio(c.value(rival, "gpu_evicted"), c.value(BASE, "gpu_evicted")))

    name = Column("", lambda case: case.name)
    times = [time(product_name(precision, bound)) for precision in ("highest", "high") for bound in (True, False)]
    lines = ['Errors of "highest", the larger one of bound and unbound, beside those of cuBLAS in float32:', ""]
    lines += table([name, *_error_columns(BY_ELEMENT), *_error_columns(BY_NORM)], cases)
    lines += [f"Time over that of {BASE}, {TITLES['gpu_evicted'].title}; below 1 is faster:", ""]
    return [*lines, *table([name, *times], cases)]


def _tabulate_depths(cases: Sequence[Case]) -> list[str]:
    """Write tables over K: errors of both kinds, and times."""
    notes: list[str] = []
    lines = []
    for title, what, form in (
        ("Max error:", "max_error", scientific),
        ("Error by Frobenius norms:", "error", scientific),
        (f"Microseconds, {TITLES['gpu_evicted'].title}:", "gpu_evicted", number),
    ):
        depth = Column("K", lambda case: str(case.shape[1]))
        lines += [title, "", *table([depth, *rival_columns(cases, what, notes, form)], cases, min)]
    return [*lines, *list_notes(notes)]


def _tabulate_family(case: Case) -> list[str]:
    about = families.FAMILIES[case.name].__doc__ or ""
    if "cancellation" in case.facts:
        about += f" ‖|x| |weight|ᵀ‖ is {case.facts['cancellation']:.3g} times ‖x weightᵀ‖."
    return [f"### {case.name}", "", about, "", *case_table(case, BASE, ["gpu_evicted"])]


def _float32_products(report: Report) -> list[str]:
    """Write the verdicts, how it was measured, and the tables of each group."""
    one_sign = [case for case in report.cases if has_one_sign(case)]
    both_signs = [case for case in report.cases if not has_one_sign(case)]
    promised = "cases with terms of one sign, for which nothing is promised"
    lines = [f'The error of "highest", bound and unbound, beside that of {BASE}:', ""]
    lines += _count_holding(BY_ELEMENT, report.cases, "max error", "cases")
    lines += _count_holding(BY_NORM, both_signs, "Frobenius norms", "cases with terms of both signs")
    lines += _count_holding(BY_NORM, one_sign, "Frobenius norms", promised)
    least = margin(report)
    if least is not None:
        lines += ["", "The reference is a float64 product: exact products, K − 1 additions, so at most (K − 1) 2⁻⁵³ of"]
        about = f"The smallest error measured, of either kind, is {least:,.0f} times that or more."
        lines.append(f"|x| |weight|ᵀ off. {about}")
    lines += ["", *explain(FIGURES, _HOW)]
    for group, cases in report.groups().items():
        m, k, n = cases[0].shape
        swept = cases[0].name not in families.FAMILIES
        about = f"{m} x {'K' if swept else k} x {n}, (M, K) times (N, K) transposed, float32."
        lines += [f"## {group}", "", about, "", *_compare_with_cublas(cases)]
        lines += _tabulate_depths(cases) if swept else [line for case in cases for line in _tabulate_family(case)]
    return lines


def report_lines(report: Report) -> list[str]:
    """Write the verdicts and tables of float32 products, then those of 16-bit ones."""
    halves = [case for case in report.cases if case.group in half.GROUPS]
    report = dataclasses.replace(report, cases=[case for case in report.cases if case.group not in half.GROUPS])
    return [*(_float32_products(report) if report.cases else []), *half.report_lines(halves)]
