"""The Markdown of each benchmark: how it was measured, what it must show, its tables."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from . import costs, families, gemm, half, losses, models, torch_heads
from .half_report import half_products
from .lab import BOUND, COMPILED, EAGER, FUSED
from .networks import NETWORKS
from .report import (
    FIGURES,
    OUT_OF_TIME,
    Case,
    Column,
    Report,
    case_heading,
    case_table,
    heading,
    list_notes,
    number,
    ratio,
    rival_columns,
    scientific,
    table,
)  # fmt: skip
from .verdicts import Finding, Requirement, check, yes_or_no

_ERROR = "- *error*: ‖result − reference‖ / ‖reference‖ against float64"
_HOW_HEADS = f"""\
{_ERROR}, the worst of a case's results.
- *{BOUND}* had its weights folded and prepacked once by `bind`; *cupyfuse, unfused* is `head.__wrapped__`, the same
  functions called one after the other; *CuPy* are CuPy's own operations."""
_HOW_ROWS = """\
GB/s, by medians of GPU time, the L2 cache overwritten before each call; the JSON file beside this one has the times.
Softmax counts bytes read and written, logsumexp bytes read; the copy reads and writes half of that each. *error*:
cupyfuse's ‖result − reference‖ / ‖reference‖ against float64. Rivals took turns within one run; the fastest is in bold.
"""
_HOW_GEMM = f"""\
- *max error*: the largest |result − reference| / (|x| |weight|ᵀ) of an element.
{_ERROR}, by Frobenius norms.
- *bound*: the weight was prepacked once by `bind`, which is not timed; the other calls do all of it every time.
  *rounded before*: both operands were stored in bfloat16 beforehand.
- *{gemm.BASE}* is `cupy.matmul`; the other products of cuBLAS are its own function, `cublasGemmEx`, with float32
  results. *TF32* and *bfloat16* are what it may round float32 operands to; it may round less.
- *torch* is `torch.matmul` at `torch.set_float32_matmul_precision` "highest" and "high".

Times are compared by single calls: many products in a row run at a clock that depends on what ran before them."""
_HOW_TORCH = f"""\
{_ERROR}, the worst of a case's results: the output and, in
  training, the running statistics; with backward, the gradients.
- *{torch_heads.FUSED}*, *{EAGER}* and *{COMPILED}* share their parameters; *{BOUND}* is cupyfuse's own
  function on the same memory, its weights bound. *MB* and *allocations* are of a call without its result."""
_HOW_MODELS = f"""\
- The rivals of a case share one module's parameters. Inference is a call under `no_grad` after `eval()`. A training
  step is forward, loss, backward, and a step of a fused AdamW that all rivals share; dropout is off.
{_ERROR}, of the same module (its own conversions to
  float32 stay): in inference of the output, in training the larger one of the loss's and of all gradients' together.
- "highest" and "high" are of matrix products; convolutions are as PyTorch has them, in TF32 where it allows that.
- *first call*: seconds from `fuse` or `torch.compile` to the end of the first call; the Inductor's caches on disk are
  those that earlier cases left.
- *peak*: the most that tensors took during a call, beyond parameters, optimizer and inputs. *kept*: what the allocator
  holds more after the first calls than before, graphs and prepacked weights among it.
- *graphs*: `fuse(graphs=True)`, and `mode="reduce-overhead"` of `torch.compile`; *{models.BACKEND}* is
  `torch.compile(backend="cupyfuse")`."""
_HOW_COSTS = """\
Medians in microseconds of one call, in training forward and backward. *GPU*: events around many queued calls, per call.
*host*: the host's clock around calls that it does not wait for; of Inductor, less that of a compiled function of the
same inputs that computes nothing. *lost*: by the decision, where the longer of GPU and host is waited for.
"""


def _explain(figures: Sequence[str], text: str, unit: str = "microseconds") -> list[str]:
    """Explain a report: its unit, its figures, then the rest."""
    intro = f"Medians in {unit}; the JSON file beside this one has the quartiles, extremes and counts."
    explained = [f"- *{FIGURES[f][0]}*: {FIGURES[f][1]}." for f in figures]
    return [f"{intro} Rivals took turns within one run.", "", *explained, *text.splitlines(), ""]


def _write_cases(
    report: Report, base: str, compared: Sequence[str], about: dict[str, str] | None = None, milliseconds: bool = False
) -> list[str]:
    """Write a table a case, by group; `about` says what a group is."""
    lines = []
    for group, cases in report.groups().items():
        lines += [f"## {group}", "", *([about[group], ""] if about else [])]
        for case in cases:
            lines += [*case_heading(case), *case_table(case, base, compared, milliseconds)]
    return lines


# Heads and rows -----------------------------------------------------------------------------------------------------


def heads(report: Report) -> list[str]:
    figures = ("gpu_evicted", "gpu_back_to_back", "gpu_graph", "host")
    return [*_explain(figures, _HOW_HEADS), *_write_cases(report, EAGER, ["gpu_back_to_back"])]


def rows(report: Report) -> list[str]:
    lines = _HOW_ROWS.split("\n")
    for group, cases in report.groups().items():
        notes: list[str] = []
        length = Column("columns", lambda case: str(case.shape[1]))
        error = Column("error", lambda case: case.value(FUSED, "error"), scientific)
        columns = [length, *rival_columns(cases, "GB/s", notes), error]
        lines += [f"## {group}", "", *table(columns, cases, max), *list_notes(notes)]
    return lines


# Matrix products ----------------------------------------------------------------------------------------------------

_HIGHEST = (gemm.product_name("highest", True), gemm.product_name("highest", False))
# "highest" is held to cuBLAS's error, by norm where terms of both signs are summed.
BY_ELEMENT = Requirement("max_error", _HIGHEST, 1.0, (gemm.BASE,))
BY_NORM = Requirement("error", _HIGHEST, 1.0, (gemm.BASE,))


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


def _count_holding(requirement: Requirement, cases: list[Case], what: str, where: str) -> list[str]:
    """Say in how many cases a requirement holds."""
    holds = [finding.holds for finding in check([requirement], cases)]
    known = [h for h in holds if h is not None]
    unknown = f"; {len(holds) - len(known)} not measured" if len(known) < len(holds) else ""
    return [f"- By {what} it is no larger in {sum(known)} of {len(known)} {where}{unknown}."] if cases else []


def _compare_with_cublas(cases: Sequence[Case]) -> list[str]:
    """Write errors of "highest" beside cuBLAS's, and times over cuBLAS's: a row a case."""

    def columns(requirement: Requirement) -> list[Column]:
        what = requirement.what

        def worst(case: Case) -> float | None:
            return max((e for e in (case.value(rival, what) for rival in _HIGHEST) if e is not None), default=None)

        def holds(case: Case) -> str:
            held = requirement.check(case).holds
            return yes_or_no(held) + (
                " (one sign)" if what == "error" and held is not None and has_one_sign(case) else ""
            )

        return [
            Column(what.replace("_", " "), worst, scientific),
            Column("cuBLAS's", lambda case: case.value(gemm.BASE, what), scientific),
            Column("ratio", lambda case: requirement.check(case).found[gemm.BASE]),
            Column("no larger", holds),
        ]

    def time(rival: str) -> Column:
        return Column(rival, lambda c: ratio(c.value(rival, "gpu_evicted"), c.value(gemm.BASE, "gpu_evicted")))

    name = Column("", lambda case: case.name)
    times = [time(gemm.product_name(precision, bound)) for precision in ("highest", "high") for bound in (True, False)]
    lines = ['Errors of "highest", the larger one of bound and unbound, beside those of cuBLAS in float32:', ""]
    lines += table([name, *columns(BY_ELEMENT), *columns(BY_NORM)], cases)
    lines += [f"Time over that of {gemm.BASE}, {FIGURES['gpu_evicted'][0]}; below 1 is faster:", ""]
    return [*lines, *table([name, *times], cases)]


def _tabulate_depths(cases: Sequence[Case]) -> list[str]:
    """Write tables over K: errors of both kinds, and times."""
    notes: list[str] = []
    lines = []
    for title, what, form in (
        ("Max error:", "max_error", scientific),
        ("Error by Frobenius norms:", "error", scientific),
        (f"Microseconds, {FIGURES['gpu_evicted'][0]}:", "gpu_evicted", number),
    ):
        depth = Column("K", lambda case: str(case.shape[1]))
        lines += [title, "", *table([depth, *rival_columns(cases, what, notes, form)], cases, min)]
    return [*lines, *list_notes(notes)]


def products(report: Report) -> list[str]:
    halves = [case for case in report.cases if case.group in half.GROUPS]
    report = dataclasses.replace(report, cases=[case for case in report.cases if case not in halves])
    return [*(_float32_products(report) if report.cases else []), *half_products(halves)]


def _float32_products(report: Report) -> list[str]:
    lines = [f'The error of "highest", bound and unbound, beside that of {gemm.BASE}:', ""]
    lines += _count_holding(BY_ELEMENT, report.cases, "max error", "cases")
    for sign, where in (
        (False, "cases with terms of both signs"),
        (True, "cases with terms of one sign, for which nothing is promised"),
    ):
        lines += _count_holding(
            BY_NORM, [case for case in report.cases if has_one_sign(case) is sign], "Frobenius norms", where
        )
    least = margin(report)
    if least is not None:
        lines += ["", "The reference is a float64 product: exact products, K − 1 additions, so at most (K − 1) 2⁻⁵³ of"]
        lines += [
            f"|x| |weight|ᵀ off. The smallest error measured, of either kind, is {least:,.0f} times that or more."
        ]
    lines += ["", *_explain(gemm.FIGURES, _HOW_GEMM)]
    for group, cases in report.groups().items():
        m, k, n = cases[0].shape
        swept = cases[0].name not in families.FAMILIES
        shape = f"{m} x {'K' if swept else k} x {n}"
        lines += [
            f"## {group}",
            "",
            f"{shape}, (M, K) times (N, K) transposed, float32.",
            "",
            *_compare_with_cublas(cases),
        ]
        lines += _tabulate_depths(cases) if swept else []
        for case in () if swept else cases:
            about = families.FAMILIES[case.name].__doc__ or ""
            if "cancellation" in case.facts:
                about += f" ‖|x| |weight|ᵀ‖ is {case.facts['cancellation']:.3g} times ‖x weightᵀ‖."
            lines += [f"### {case.name}", "", about, "", *case_table(case, gemm.BASE, ["gpu_evicted"])]
    return lines


# PyTorch ------------------------------------------------------------------------------------------------------------

_USED = {
    torch_heads.FORWARD: "The module as it was made: in training mode, gradients enabled. No backward pass follows.",
    torch_heads.CHANGED: "The same; before each call, and before the start event, `weight.add_(0)` under `no_grad`.",
    torch_heads.BACKWARD: "`module(x).sum().backward()` with gradients of all parameters, none of x. Errors are those "
    "of the gradients of a sum with random weights; that of a bias before BatchNorm is zero but for noise, left out.",
    torch_heads.INFERENCE: "After `eval()`, under `no_grad`.",
    torch_heads.LAUNCH: "`torch.nn.Softmax(dim=1)` on a small matrix: what a call takes of the host.",
}


def _write_findings(findings: Sequence[Finding]) -> list[str]:
    """Write what was asked beside what was found."""
    rivals = dict.fromkeys(rival for finding in findings for rival in finding.found)
    beside = [Column(rival, lambda f, rival=rival: f.found.get(rival, "")) for rival in rivals]
    columns = [Column("", lambda f: f.title), Column("asked", lambda f: f.asked), *beside]
    return table([*columns, Column("holds", lambda f: yes_or_no(f.holds))], findings)


def torch(report: Report) -> list[str]:
    lines = []
    if report.options.get("dtype") == "float32":
        findings = sorted(check(torch_heads.REQUIREMENTS, report.cases), key=lambda f: report.cases.index(f.case))
        lines += ["## What was asked", "", *_write_findings(findings)]
    lines += ["## How it was measured", "", *_explain(torch_heads.FIGURES[torch_heads.FORWARD], _HOW_TORCH)]
    return [*lines, *_write_cases(report, EAGER, ["gpu_evicted"], _USED)]


# Losses -------------------------------------------------------------------------------------------------------------

_HOW_LOSSES = f"""\
{_ERROR}, the worst of the loss and, after a backward pass, of the gradients.
- *{losses.PRODUCT}* is that of the logits, and backward those of both gradients, on logits in the operands' dtype;
  *{EAGER}* converts the logits to float32. *peak MB*: the most beyond the operands, gradients included."""


def language_losses(report: Report) -> list[str]:
    lines = ["## What was asked", "", *_write_findings(list(check(losses.REQUIREMENTS, report.cases)))]
    lines += ["## How it was measured", "", *_explain(losses.FIGURES, _HOW_LOSSES)]
    return [*lines, *_write_cases(report, EAGER, ["gpu_evicted"])]


# Whole models -------------------------------------------------------------------------------------------------------


def geometric_mean(findings: Sequence[Finding]) -> float | None:
    """Return the geometric mean of ratios; None where none was measured."""
    values = [value for finding in findings for value in finding.found.values() if value]
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def _write_ratios(report: Report) -> list[str]:
    """Write ratios of times, a row a case, and geometric means; then who is behind, and who failed."""
    rows: list[tuple[str, list[Case]]] = []
    for group, cases in report.groups().items():
        rows += [*((f"{group}: {case.name}", [case]) for case in cases), (f"**{group}, geometric mean**", cases)]
    rows.append(("**All, geometric mean**", report.cases))
    columns = [Column("", lambda row: row[0])]
    sums = []
    for requirement in models.REQUIREMENTS:
        pair = f"{requirement.ours[0]} / {requirement.rivals[0]}, {FIGURES[requirement.what][0]}"
        columns.append(Column(pair, lambda row, r=requirement: geometric_mean(check([r], row[1]))))
        found = [f for f in check([requirement], report.cases) if f.holds is not None]
        ordered = sorted(found, key=lambda f: geometric_mean([f]) or 0.0, reverse=True)
        behind = "; ".join(
            f"{f.case.name} ({f.case.group}) {number(geometric_mean([f]))}" for f in ordered if not f.holds
        )
        if found:
            count = f"behind (above {requirement.bound}) in {sum(not f.holds for f in found)} of {len(found)}"
            about = f"geometric mean {number(geometric_mean(found))}, worst {number(geometric_mean(ordered[:1]))}"
            sums.append(f"- {pair}: {about}, {count}{': ' if behind else ''}{behind}.")
    lines = ["## Verdicts", "", "Time over that of the rival; below 1 is faster.", "", *table(columns, rows)]
    return [*lines, *sums, "", *_count_failures(report.cases), ""]


def _count_failures(cases: Sequence[Case]) -> list[str]:
    """Count how many times each rival raised or was wrong."""
    lines = []
    for rival in dict.fromkeys(result.rival for case in cases for result in case.results):
        results = [r for r in (case.find(rival) for case in cases) if r is not None and r.failure != OUT_OF_TIME]
        failed = sum(bool(result.failure) for result in results)
        lines += [f"- {rival}: failed in {failed} of {len(results)} cases."] if failed else []
    return lines or ["No rival failed."]


def whole_models(report: Report) -> list[str]:
    """Write the lines of the report on whole models; cases that time ran out for are named at the end."""
    measured = dataclasses.replace(report, cases=[case for case in report.cases if not case.unmeasured])
    present = {case.name.partition(",")[0] for case in measured.cases}
    lines = _explain(models.FIGURES, _HOW_MODELS, "milliseconds")
    lines += [f"- `{name}`: {network.what}" for name, network in NETWORKS.items() if name in present]
    lines += ["", *_write_cases(measured, EAGER, models.FIGURES, milliseconds=True), *_write_ratios(measured)]
    missing = [f"{case.name} ({case.group})" for case in report.cases if case.unmeasured]
    return [*lines, *([f"Out of time: {len(missing)} cases: {'; '.join(missing)}.", ""] if missing else [])]


# The cost model -----------------------------------------------------------------------------------------------------

_PARTS = ("our GPU", "our host", "their GPU", "their host")


def _parts(cell: Callable[..., object], suffix: str = "") -> list[Column]:
    """Return a column for each of the four times; `cell` takes the row and the time's place."""
    return [Column(f"{part}{suffix}", lambda row, k=k: cell(row, k)) for k, part in enumerate(_PARTS)]


def _summarize_ratios(row: tuple[str, list[costs.Comparison]], k: int) -> str:
    """Summarize the ratios of predicted to measured times."""
    kept = sorted(c.ratios[k] for c in row[1] if math.isfinite(c.ratios[k]))
    return " / ".join(map(number, (kept[0], statistics.median(kept), kept[-1]))) if kept else "–"


def cost_model(report: Report) -> list[str]:
    found = list(costs.comparisons(report))
    wrong = [c for c in found if not c.right]
    by_group = {group: [c for c in found if c.case.group == group] for group in report.groups()}
    group = Column("", lambda c: c.case.group)
    name = Column("", lambda c: f"{c.case.name} {' x '.join(map(str, c.case.shape))} {c.case.dtype}")
    decision = Column("model", lambda c: "fused" if c.chosen else "left")
    measured = _parts(lambda c, k: c.measured[k])
    lines = [
        f"{len(found)} of {len(report.cases)} cases were measured and estimated. The model decides as the measurements "
        f"do in {len(found) - len(wrong)} of them; what it chooses takes {sum(c.lost for c in found):.0f} us longer "
        f"than the best choices, which take {sum(c.best for c in found):.0f} us in all.\n",
        *_HOW_COSTS.split("\n"),
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
        f"- {case.group}, {case.name} {' x '.join(map(str, case.shape))} {case.dtype}: {result.rival}: {result.failure}"
        for case in report.cases
        for result in case.results
        if result.failure
    ]
    return [*lines, *(["## What failed\n", *failures, ""] if failures else [])]


WRITERS = {
    "heads": heads, "rows": rows, "gemm": products, "torch": torch, "losses": language_losses, "models": whole_models,
    "costs": cost_model,
}  # fmt: skip


def markdown(report: Report) -> str:
    """Write a report of any benchmark."""
    return "\n".join([*heading(report), *WRITERS[report.benchmark](report)]).rstrip() + "\n"
