"""The commands of `python -m cupyfuse`: their arguments, and what each runs and prints."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cupyfuse.heads as heads

from .. import __version__, dtypes, selftest
from ..api import arrays
from ..plan.plan import Plan
from ..selftest import machine
from . import demo


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of the process by default.

    Returns
    -------
    int
        0; 1 if the demonstration found a fused result less accurate than the unfused one, the self-test found a wrong
        one, or either could not run.

    Raises
    ------
    SystemExit
        With status 2 for invalid arguments, as argparse does.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    command: Callable[[argparse.ArgumentParser, argparse.Namespace], int] = options.command
    try:
        status = command(options.parser, options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe (`| head`); flushing the rest at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cupyfuse", description="Fused GEMM -> row-operation chains.")
    parser.add_argument("--version", action="version", version=f"cupyfuse {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo_parser = commands.add_parser("demo", help="run the heads fused and unfused: errors, times, bytes, FLOPs")
    _add_shape(demo_parser)
    _add_engine(demo_parser)
    demo_parser.set_defaults(command=_demo, parser=demo_parser)

    selftest_parser = commands.add_parser(
        "selftest", help="compare every operator and kernel with tables of special values and with a wider format"
    )
    _add_engine(selftest_parser)
    selftest_parser.add_argument("--markdown", type=_page, metavar="FILE", help="also write the errors as a page")
    selftest_parser.set_defaults(command=_selftest, parser=selftest_parser)

    info_parser = commands.add_parser("info", help="versions, GPUs, the kernel cache, and what is missing")
    info_parser.set_defaults(command=_info, parser=info_parser)

    explain_parser = commands.add_parser("explain", help="print the plan of a head, from shapes alone")
    explain_parser.add_argument("head", metavar="HEAD", type=_head, help=f"one of {', '.join(heads.HEADS)}")
    _add_shape(explain_parser)
    explain_parser.add_argument("--bound", action="store_true", help="with everything but the batch bound")
    explain_parser.add_argument("--training", action="store_true", help="head_softmax with the statistics of the batch")
    explain_parser.add_argument("--source", action="store_true", help="print the CUDA source instead")
    explain_parser.set_defaults(command=_explain, parser=explain_parser)
    return parser


def _add_shape(parser: argparse.ArgumentParser) -> None:
    for name, default, what in (
        ("rows", heads.ROWS, "rows of the batch"),
        ("in-features", heads.IN_FEATURES, "columns of the batch"),
        ("out-features", heads.OUT_FEATURES, "rows of the weight"),
    ):
        parser.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"{what} (default {default})")
    parser.add_argument("--dtype", choices=dtypes.FLOATS, default="float32", help="default float32")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine", choices=("auto", "numpy", "cuda"), default="auto", help="default: the GPU if there is one"
    )


def _page(text: str) -> Path:
    # Checked before the self-test runs, which takes a minute.
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def _head(text: str) -> Any:
    try:
        return heads.find(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("head: ")) from None


# Commands -----------------------------------------------------------------------------------------------------------


def _demo(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.rows < 2:
        parser.error("argument --rows: expected at least 2, since training normalises with the batch's statistics")
    try:
        xp = machine.array_module(options.engine)
        dtypes.to_numpy(options.dtype)
    except (ValueError, TypeError) as error:
        parser.error(str(error))
    shape = (options.rows, options.in_features, options.out_features)
    try:
        results = demo.run(*shape, options.dtype, options.engine)
    except MemoryError as error:
        print(f"cupyfuse demo: not enough memory for this shape ({error}); try a smaller one", file=sys.stderr)
        return 1
    print(f"{machine.device_name(xp)}; x {shape[0]} x {shape[1]}, weight {shape[2]} x {shape[1]}, {options.dtype}")
    print()
    print(demo.report(results))
    print()
    print("Unfused: one operation at a time. Errors are against float64; times are medians of single calls.")
    print("In inference weights are bound, and what depends on them alone is computed before; not in training.")
    worse = [m for m in results if not m.accurate]
    for m in worse:
        print(
            f"LESS ACCURATE: {m.case.title}: error {m.error_fused:.3g} fused, {m.error_unfused:.3g} unfused, "
            f"allowed beyond it {m.tolerance:.3g} ({demo.ROUNDINGS} roundings)"
        )
    if not worse:
        print("Every fused result is as accurate as the unfused one.")
    return 1 if worse else 0


def _selftest(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        xp = machine.array_module(options.engine)
    except ValueError as error:
        parser.error(str(error))
    report = selftest.run(xp)
    print(report)
    if options.markdown is not None and report.passed:
        try:
            selftest.write_page(report, options.markdown)
        except OSError as error:
            print(f"cupyfuse selftest: {options.markdown} cannot be written: {error}", file=sys.stderr)
            return 1
    return 0 if report.passed else 1


def _info(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    facts, missing = machine.describe(__version__)
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name.ljust(width)}  {value}")
    if missing:
        print("\nmissing:")
    for what, command in missing:
        print(f"  {what}\n      {command}")
    return 0


def _explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    head = options.head
    flags: dict[str, Any] = {}
    if options.training:
        if head is not heads.head_softmax:
            parser.error(f"argument --training: it is for head_softmax, {head.__name__} is the same in training")
        if options.rows < 2:
            parser.error("argument --rows: expected at least 2 with --training")
        flags["training"] = True
    shapes = heads.input_shapes(head, options.rows, options.in_features, options.out_features)
    specs = {name: arrays.spec(shape, options.dtype) for name, shape in shapes.items()}
    x = specs.pop("x")
    plan: Plan = head.bind(**specs, **flags).plan(x) if options.bound else head.plan(x, **specs, **flags)
    print(_source(plan) if options.source else plan)
    return 0


def _source(plan: Plan) -> str:
    parts = [plan.source()]
    if plan.prepare is not None:
        parts = ["// Run once, when the arguments are bound:", plan.prepare.source(), "// Run in every call:", *parts]
    return "\n\n".join(parts)
