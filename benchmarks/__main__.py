"""The command line: `python -m benchmarks heads`, and so on: rows, gemm, torch, models, costs, distributed.

Exit codes: 0 all well, 1 cupyfuse failed or was wrong somewhere (the report says where), 2 no GPU or wrong usage.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cupyfuse.settings import PRECISIONS

from . import charts, costs, distributed, environment, gemm, heads, models, rows, torch_heads
from .arguments import some_of
from .cases import Lab, laboratory
from .cost_report import costs_markdown, no_chart
from .device import NoGpu
from .families import FAMILIES
from .models_report import Log, merged, models_markdown, unmeasured
from .report import Case, Report, heads_markdown, rows_markdown
from .timing import describe
from .torch_report import torch_markdown
from .verdicts import gemm_markdown

RESULTS = Path(__file__).resolve().parent / "results"
DTYPES = ("float32", "float16", "bfloat16")
COMPILE_BUDGET, QUICK_COMPILE_BUDGET = 180.0, 40.0


def shape(text: str) -> tuple[int, int, int]:
    """Rows, in_features and out_features, as in '1024x8192x8192'."""
    try:
        lengths = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        lengths = ()
    if len(lengths) != 3 or any(n < 2 for n in lengths):
        raise argparse.ArgumentTypeError(f"expected BxKxN with numbers of at least 2, as 1024x8192x8192, got {text!r}")
    return lengths[0], lengths[1], lengths[2]


def lengths(text: str) -> tuple[int, ...]:
    """Lengths, as in '256,1000,4096'."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or any(n < 1 for n in found):
        raise argparse.ArgumentTypeError(f"expected positive numbers with commas between them, got {text!r}")
    return found


def parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quick", action="store_true", help="fewer repeats and less data, for a first look")
    common.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: benchmarks/results/<gpu>)")
    common.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    common.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    common.add_argument("--seed", type=int, default=0, help="of the data (default: 0)")

    main_parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of cupyfuse on one GPU.")
    names = "{heads,rows,gemm,torch,models,costs,distributed}"
    commands = main_parser.add_subparsers(dest="benchmark", required=True, metavar=names)

    of_heads = commands.add_parser("heads", parents=[common], help="the three heads, and what follows their GEMM alone")
    of_heads.add_argument("--shape", type=shape, default=heads.Options.shape, metavar="BxKxN", help="1024x8192x8192")
    of_heads.add_argument("--dtype", choices=DTYPES, default="float32")
    of_heads.add_argument(
        "--precision", choices=PRECISIONS, default="highest", help="of float32 matrix products, torch's too"
    )
    of_heads.add_argument("--max-autotune", action="store_true", help="torch.compile in this mode too (takes minutes)")

    of_rows = commands.add_parser("rows", parents=[common], help="softmax and logsumexp over rows of many lengths")
    of_rows.add_argument("--lengths", type=lengths, metavar="N,N,...", help="elements in a row")
    of_rows.add_argument("--dtypes", type=some_of(DTYPES), default=rows.Options.dtypes, metavar="DTYPE,...")
    of_rows.add_argument(
        "--compile-budget",
        type=float,
        metavar="SECONDS",
        help=f"time for torch.compile to compile (default: {COMPILE_BUDGET:.0f}, quick {QUICK_COMPILE_BUDGET:.0f})",
    )

    of_gemm = commands.add_parser(
        "gemm", parents=[common], help="errors and times of float32 products, every precision"
    )
    of_gemm.add_argument("--shape", type=shape, default=gemm.Options.shape, metavar="MxKxN", help="of every family")
    of_gemm.add_argument(
        "--families",
        type=some_of(FAMILIES),
        default=gemm.Options.families,
        metavar="NAME,...",
        help=f"data, of {', '.join(FAMILIES)}; K is swept over for {' and '.join(gemm.SWEPT)}",
    )
    of_gemm.add_argument("--depths", type=lengths, metavar="K,K,...", help="the K to sweep over")

    of_torch = commands.add_parser(
        "torch", parents=[common], help="the heads as PyTorch modules: forward, backward, after changes of weights"
    )
    of_torch.add_argument("--shape", type=shape, default=heads.Options.shape, metavar="BxKxN", help="1024x8192x8192")
    of_torch.add_argument("--dtype", choices=DTYPES, default="float32")
    of_torch.add_argument("--heads", type=some_of(torch_heads.NAMES), default=torch_heads.NAMES, metavar="NAME,...")
    of_torch.add_argument(
        "--no-max-autotune", action="store_true", help="leave torch.compile in this mode out (it takes minutes)"
    )

    of_costs = commands.add_parser(
        "costs", parents=[common], help="the cost model of chains beside what they take: through us, eager, compiled"
    )
    of_costs.add_argument(
        "--seconds", type=float, default=costs.Options.seconds, help="that it may take (default: %(default).0f)"
    )
    of_costs.add_argument(
        "--precision", choices=("highest", "high", "medium"), default="highest", help="of float32 matrix products"
    )
    _add_models(commands.add_parser("models", parents=[common], help="whole models: inference and training steps"))
    distributed.options(commands.add_parser("distributed", help="the heads trained by several processes, a GPU each"))
    return main_parser


def _add_models(of_models: argparse.ArgumentParser) -> None:
    """Options of the benchmark of whole models."""
    for option, known in (
        ("models", models.NETWORKS),
        ("dtypes", models.SETTINGS),
        ("modes", models.MODES),
        ("batches", models.BATCHES),
        ("rivals", models.RIVALS),
    ):
        names = tuple(known)
        of_models.add_argument(
            f"--{option}", type=some_of(names), default=names, metavar="NAME,...", help=f"of {', '.join(names)}"
        )
    of_models.add_argument("--seconds", type=float, default=math.inf, help="begin nothing more after so long")
    of_models.add_argument("--add", action="store_true", help="keep the cases of earlier runs that this one leaves out")
    of_models.add_argument("--tiny", action="store_true", help="tiny configurations, to try the benchmark itself")


def plan(given: argparse.Namespace) -> tuple[str, dict[str, Any], Callable[[Lab], Iterator[Case]]]:
    """The report's file name, the options that it states, and what runs the cases."""
    stated: dict[str, Any] = {"quick": given.quick, "seed": given.seed}
    if given.benchmark == "heads":
        options = heads.Options(given.shape, given.dtype, given.max_autotune, given.quick, given.seed)
        stated |= {"shape": "x".join(map(str, given.shape)), "dtype": given.dtype, "precision": given.precision}
        name = "heads" if given.dtype == "float32" else f"heads-{given.dtype}"
        name += "" if given.precision == "highest" else f"-{given.precision}"
        return name, stated, functools.partial(heads.cases, options=options)
    if given.benchmark == "gemm":
        depths = given.depths or (gemm.QUICK_DEPTHS if given.quick else gemm.DEPTHS)
        gemm_options = gemm.Options(given.shape, given.families, depths, given.quick, given.seed)
        stated |= {"shape": "x".join(map(str, given.shape)), "families": " ".join(given.families)}
        stated |= {"depths": " ".join(map(str, depths))}
        return "gemm", stated, functools.partial(gemm.cases, options=gemm_options)
    if given.benchmark == "torch":
        autotuned = not given.no_max_autotune
        torch_options = torch_heads.Options(given.shape, given.dtype, autotuned, given.quick, given.seed)
        stated |= {"shape": "x".join(map(str, given.shape)), "dtype": given.dtype, "max_autotune": autotuned}
        name = "torch" if given.dtype == "float32" else f"torch-{given.dtype}"
        return name, stated, functools.partial(torch_heads.cases, options=torch_options, names=given.heads)
    if given.benchmark == "costs":
        cost_options = costs.Options(given.seconds, given.quick, given.seed)
        stated |= {"seconds": given.seconds, "precision": given.precision}
        name = "costs" if given.precision == "highest" else f"costs-{given.precision}"
        return name, stated, functools.partial(costs.cases, options=cost_options)
    if given.benchmark == "models":
        chosen_options = models.Options(
            given.models, given.dtypes, given.modes, given.batches, given.rivals, given.seconds, given.quick,
            given.tiny, given.seed,
        )  # fmt: skip
        stated |= {"tiny": given.tiny, **({"seconds": given.seconds} if math.isfinite(given.seconds) else {})}
        return "models", stated, functools.partial(models.cases, options=chosen_options)
    seconds = given.compile_budget
    if seconds is None:
        seconds = QUICK_COMPILE_BUDGET if given.quick else COMPILE_BUDGET
    chosen = given.lengths or (rows.QUICK_LENGTHS if given.quick else rows.LENGTHS)
    row_options = rows.Options(chosen, given.dtypes, given.quick, seconds, given.seed)
    stated |= {"bytes": row_options.size, "lengths": " ".join(map(str, chosen)), "compile_budget_s": seconds}
    return "rows", stated, functools.partial(rows.cases, options=row_options)


WRITERS: dict[str, tuple[Callable[[Report], str], Callable[[Report, Path], None] | None]] = {
    "heads": (functools.partial(heads_markdown, base=heads.EAGER), charts.heads),
    "rows": (rows_markdown, charts.rows),
    "gemm": (gemm_markdown, charts.gemm),
    "torch": (torch_markdown, functools.partial(charts.heads, figure=heads.FIGURES[0])),
    "costs": (costs_markdown, no_chart),
    "models": (models_markdown, None),
}


def write(report: Report, folder: Path, name: str) -> str:
    """Write JSON, Markdown and, where there is one, the plot; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    report.write_json(folder / f"{name}.json")
    markdown, draw = WRITERS[report.benchmark]
    text = markdown(report)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    if draw is None:
        return text
    try:
        draw(report, folder / f"{name}.png")
    except Exception as error:  # figures are worth more than their picture
        print(f"no plot: {describe(error)}", file=sys.stderr)
    return text


def _collect(report: Report, cases: Iterator[Case], folder: Path, name: str, keep: bool) -> None:
    """Put the cases into the report as they come, and write them: what is measured stays, whatever happens later."""
    log = Log(folder / f"{name}.jsonl", keep) if report.benchmark == "models" else None
    if log is not None:
        report.cases = merged(log.earlier)
    for case in cases:
        report.cases.append(case)
        if log is not None:
            report.cases = merged(report.cases)
            if not unmeasured(case):
                log.add(case, report.environment)
                write(report, folder, name)
                continue
        report.write_json(folder / f"{name}.json")


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser().parse_args(arguments)
    if given.benchmark == "distributed":
        return distributed.main(list(sys.argv[1:] if arguments is None else arguments)[1:])
    name, stated, cases = plan(given)
    precision = getattr(given, "precision", "highest")
    try:
        with laboratory(precision, not given.no_torch, not given.no_compile) as lab:
            report = Report(given.benchmark, environment.collect(lab.cupy, lab.device.name), stated)
            folder = given.output or RESULTS / environment.slug(lab.device.name)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                _collect(report, cases(lab), folder, name, getattr(given, "add", False))
            except Exception as error:
                report.stopped = describe(error)
    except NoGpu as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    print(write(report, folder, name))
    print(f"written to {folder}: {name}.json, .md and what goes with them", file=sys.stderr)
    failed = report.failed() + ([f"stopped early: {report.stopped}"] if report.stopped else [])
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
