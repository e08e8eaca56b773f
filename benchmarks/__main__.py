"""The command line: `python -m benchmarks heads`, and so on: the names in `BENCHMARKS`, and distributed.

Exit codes: 0 all well, 1 cupyfuse failed or was wrong somewhere (the report says where), 2 no GPU or wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cupyfuse.selftest.machine import array_module

from . import (
    chains,
    costs,
    distributed,
    environment,
    first_calls,
    functions,
    gemm,
    heads,
    losses,
    models,
    norms,
    rows,
    tables,
    torch_heads,
)
from .device import Host, NoGpu
from .lab import Lab, cpu_lab, open_lab
from .report import Case, Report, merge, read_cases
from .timing import describe

RESULTS = Path(__file__).resolve().parent / "results"
# A benchmark's module has `add_options`, `DEFAULTS` (of options that quick runs have other ones of), `cases`, and
# `report_lines`; it may have `failed`, which lists what exit code 1 is for.
BENCHMARKS: dict[str, tuple[Any, str]] = {
    "heads": (heads, "the three heads, and what follows their GEMM alone"),
    "rows": (rows, "row programs over rows of many lengths"),
    "chains": (chains, "thirty chains behind a linear layer"),
    "gemm": (gemm, "errors and times of float32 products, every precision"),
    "torch": (torch_heads, "the heads as PyTorch modules: forward, backward, after changes of weights"),
    "norms": (norms, "norms and activations with weights in training: forward, backward"),
    "losses": (losses, "the loss of a language model: forward, backward, memory"),
    "models": (models, "whole models: inference and training steps"),
    "first-calls": (first_calls, "the first call of whole models, without caches on disk and with them"),
    "costs": (costs, "the cost model of chains beside what they take: through us, eager, compiled"),
    "functions": (functions, "functions of users, plain and fused, also on a CPU"),
}
_NOT_STATED = ("benchmark", "output", "add", "no_torch", "no_compile", "budget")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--quick", action="store_true", help="fewer repeats and less data, for a first look")
    common.add_argument("--output", type=Path, metavar="DIR", help="where to write (default: benchmarks/results/<gpu>)")
    rivals = argparse.ArgumentParser(add_help=False)
    rivals.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    rivals.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    rivals.add_argument("--seed", type=int, default=0, help="of the data (default: 0)")
    whole = argparse.ArgumentParser(prog="python -m benchmarks", description="Benchmarks of cupyfuse on one GPU.")
    names = f"{{{','.join([*BENCHMARKS, 'distributed'])}}}"
    commands = whole.add_subparsers(dest="benchmark", required=True, metavar=names)
    for name, (module, about) in BENCHMARKS.items():
        parents = [common] if module is functions else [common, rivals]
        module.add_options(commands.add_parser(name, parents=parents, help=about, description=module.__doc__))
    distributed.add_options(commands.add_parser("distributed", help="the heads trained by several processes"))
    return whole


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse a command line, and fill in what quick and full runs differ in."""
    given = parser().parse_args(arguments)
    if given.benchmark in BENCHMARKS:
        for option, (full, quick) in BENCHMARKS[given.benchmark][0].DEFAULTS.items():
            if getattr(given, option, None) is None:
                setattr(given, option, quick if given.quick else full)
    return given


def stated_options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options that a report states."""

    def text(option: str, value: Any) -> Any:
        return ("x" if option == "shape" else " ").join(map(str, value)) if isinstance(value, tuple) else value

    options = {k: v for k, v in vars(given).items() if k not in _NOT_STATED and v not in (None, "")}
    return {k: text(k, v) for k, v in options.items() if not (isinstance(v, float) and math.isinf(v))}


def file_name(given: argparse.Namespace) -> str:
    """Return the report's name: the benchmark's, with dtype and precision where they are not the usual ones."""
    parts = [given.benchmark]
    for option, usual in (("dtype", "float32"), ("precision", "highest")):
        parts += [getattr(given, option)] if getattr(given, option, usual) != usual else []
    return "-".join(parts)


def markdown(report: Report) -> str:
    return tables.markdown(report, BENCHMARKS[report.benchmark][0].report_lines)


def write(report: Report, folder: Path, name: str) -> str:
    """Write JSON and Markdown; return the Markdown."""
    return tables.write(report, BENCHMARKS[report.benchmark][0].report_lines, folder, name)


def collect(report: Report, cases: Iterator[Case], folder: Path, name: str, add: bool) -> None:
    """Write the report after each case, so that an aborted run keeps what it measured.

    With `add` the cases of the existing file stay, except those that are measured again.
    """
    report.cases = [case for case in read_cases(folder / f"{name}.json") if not case.unmeasured] if add else []
    for case in cases:
        report.cases.append(case)
        if report.benchmark == "models":
            report.cases = merge(report.cases)
        write(report, folder, name)


def laboratory(given: argparse.Namespace) -> contextlib.AbstractContextManager[Lab]:
    """Open what the benchmark runs on: the GPU; for functions the CPU on request, and where there is no GPU."""
    if given.benchmark == "functions":
        return cpu_lab() if given.cpu or array_module("auto") is np else open_lab("highest", False, False)
    return open_lab(getattr(given, "precision", "highest"), not given.no_torch, not given.no_compile)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark, write its report, and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    given = parse(arguments)
    if given.benchmark == "distributed":
        return distributed.main(given, arguments)
    module, _ = BENCHMARKS[given.benchmark]
    name = file_name(given)
    try:
        with laboratory(given) as lab:
            cupy = None if isinstance(lab.device, Host) else lab.cupy
            report = Report(given.benchmark, environment.collect(lab.device.name, cupy), stated_options(given))
            folder = given.output or RESULTS / environment.slug(lab.device.name)
            try:
                collect(report, module.cases(lab, given), folder, name, getattr(given, "add", False))
            except Exception as error:
                report.stopped = describe(error)
    except NoGpu as error:
        print(f"python -m benchmarks: {error}", file=sys.stderr)
        return 2
    print(write(report, folder, name))
    print(f"written to {folder}: {name}.json, {name}.md", file=sys.stderr)
    failed = getattr(module, "failed", Report.failed)(report)
    failed += [f"stopped early: {report.stopped}"] if report.stopped else []
    for line in failed:
        print(f"failed: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
