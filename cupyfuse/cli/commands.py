"""The commands of `python -m cupyfuse`: parse their arguments, run them, print their output."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import cupyfuse.heads as heads

from .. import __version__, dtypes, selftest
from ..selftest import machine
from ..selftest.report import align_columns
from . import demo, explain, output


class Outcome(NamedTuple):
    """The exit status of a command, and what it writes to standard output and standard error."""

    status: int
    text: str = ""
    error: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    Parameters
    ----------
    argv : sequence of str, optional
        The arguments; those of the process by default.

    Returns
    -------
    int
        0 for success. 1 if the demonstration found a fused result less accurate than the plain one, the self-test found
        a wrong one, a command could not run, or its output could not be written. 130 after Ctrl-C and 141 if the reader
        of the output has gone, as shells report these.

    Raises
    ------
    SystemExit
        With status 2 for invalid arguments, as argparse does.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        output.write_error("interrupted")
        return output.INTERRUPTED
    except BrokenPipeError:  # progress on a standard error that nobody reads any more
        return output.READER_GONE


def _run(argv: Sequence[str] | None) -> int:
    """Parse the arguments, run the command, write its output, and return the exit status."""
    parser = _parser()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            options = parser.parse_args(argv)
    except SystemExit:  # after --help, --version, or an invalid argument
        if (text := printed.getvalue()) and (status := output.write(text)):
            return status
        raise
    command: Callable[[argparse.ArgumentParser, argparse.Namespace], Outcome] = options.command
    outcome = command(options.parser, options)
    status = output.write(outcome.text) if outcome.text else 0
    if outcome.error:
        output.write_error(outcome.error)
    return outcome.status or status


def _parser() -> argparse.ArgumentParser:
    """Return the parser; it sets `command` to the function of the chosen command, and `parser` to its parser."""
    parser = argparse.ArgumentParser(prog="cupyfuse", description="Fused GEMM -> row-operation chains.")
    parser.add_argument("--version", action="version", version=f"cupyfuse {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    demo_parser = commands.add_parser(
        "demo", help="run the heads fused and in plain NumPy or CuPy: plans, errors, times"
    )
    _add_shape(demo_parser)
    demo_parser.set_defaults(rows=heads.ROWS, in_features=heads.IN_FEATURES, out_features=heads.OUT_FEATURES)
    demo_parser.set_defaults(dtype="float32")
    _add_engine(demo_parser)
    demo_parser.set_defaults(command=_demo, parser=demo_parser)

    selftest_parser = commands.add_parser(
        "selftest", help="compare every operator and kernel with tables of special values and with a wider format"
    )
    _add_engine(selftest_parser)
    extent = selftest_parser.add_mutually_exclusive_group()
    extent.add_argument(
        "--quick",
        action="store_true",
        help="in seconds: on a GPU float32 and int64 alone, without one no compilation of kernels",
    )
    extent.add_argument("--markdown", type=_page_path, metavar="FILE", help="also write the errors as a page")
    selftest_parser.set_defaults(command=_selftest, parser=selftest_parser)

    info_parser = commands.add_parser("info", help="versions, GPUs, the kernel cache, and what is missing")
    info_parser.set_defaults(command=_info, parser=info_parser)

    explain_parser = commands.add_parser("explain", help="print the plan of a function, from shapes alone")
    explain.add_arguments(explain_parser)
    _add_shape(explain_parser)
    explain_parser.set_defaults(command=_explain, parser=explain_parser)
    return parser


def _add_shape(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the shapes and the dtype of a head's inputs, None unless given."""
    for name, default, what in (
        ("rows", heads.ROWS, "rows of the batch"),
        ("in-features", heads.IN_FEATURES, "columns of the batch"),
        ("out-features", heads.OUT_FEATURES, "rows of the weight"),
    ):
        parser.add_argument(f"--{name}", type=_positive_int, metavar="N", help=f"{what} (default {default})")
    parser.add_argument("--dtype", choices=dtypes.FLOATS, help="default float32")


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the argument that chooses NumPy or a GPU."""
    parser.add_argument(
        "--engine", choices=("auto", "numpy", "cuda"), default="auto", help="default: the GPU if there is one"
    )


def _page_path(text: str) -> Path:
    """Parse the path of a page to write; it is checked before the self-test runs, which takes a minute."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text!r}")
    return path


def _positive_int(text: str) -> int:
    """Parse a whole number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


# Commands -----------------------------------------------------------------------------------------------------------


def _demo(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Outcome:
    """Run the heads fused and plain, and report plans, errors and times."""
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
        return Outcome(1, error=f"demo: not enough memory for this shape ({error}); try a smaller one")
    data = f"x {shape[0]} x {shape[1]}, weight {shape[2]} x {shape[1]}, {options.dtype}"
    text = f"{machine.device_name(xp)}; {data}\n\n{demo.report(results, xp)}\n"
    return Outcome(0 if all(m.accurate for m in results) else 1, text)


def _selftest(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Outcome:
    """Run the self-test, and write its page if asked for."""
    try:
        xp = machine.array_module(options.engine)
    except ValueError as error:
        parser.error(str(error))
    report = selftest.run(xp, options.quick)
    if options.markdown is not None and report.passed:
        try:
            selftest.write_page(report, options.markdown)
        except OSError as error:
            return Outcome(1, f"{report}\n", f"selftest: {options.markdown} cannot be written: {error}")
    return Outcome(0 if report.passed else 1, f"{report}\n")


def _info(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Outcome:
    """List versions and devices, and how to install what is missing."""
    facts, missing = machine.describe(__version__)
    lines = [align_columns(facts)]
    if missing:
        lines += ["", "missing:"]
    for what, command in missing:
        lines += [f"  {what}", f"      {command}"]
    return Outcome(0, "\n".join(lines) + "\n")


def _explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Outcome:
    """Plan a function from shapes, and print the plan."""
    try:
        return Outcome(0, explain.explain(parser, options))
    except explain.Failure as error:
        return Outcome(1, error=f"explain: {error}")
