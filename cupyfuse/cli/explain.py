"""`python -m cupyfuse explain`: plan a head, or any function of a module, from shapes alone."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cupyfuse.heads as heads

from .. import dtypes
from ..api.arrays import Spec, spec
from ..api.fuse import Bound, Fused, fuse
from ..errors import TraceError
from ..plan.plan import Plan

_SPEC = "NAME=SHAPE:DTYPE, for example x=1024x8192:float32"
# Files that are not the user's code.
_SKIPPED = (str(Path(__file__).resolve().parent.parent), str(Path(np.__file__).parent), "<frozen")


@dataclass(frozen=True)
class Target:
    """What to plan: a function, and the name by which it was asked for."""

    given: str
    function: Any
    is_head: bool


class Failure(Exception):
    """Planning failed; the message says why and where."""


# Parsing ------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command, except those for the shapes of heads."""
    names = ", ".join(heads.HEADS)
    parser.add_argument("target", metavar="FUNCTION", type=_target, help=f"module:function, or one of {names}")
    parser.add_argument("--spec", action="append", type=_spec, default=[], metavar="NAME=SHAPE:DTYPE",
                        help="an array argument, such as x=1024x8192:float32; repeat it for each")  # fmt: skip
    parser.add_argument("--value", action="append", type=_value, default=[], metavar="NAME=LITERAL",
                        help="another argument, such as axis=1; repeat it for each")  # fmt: skip
    parser.add_argument("--bound", action="store_true", help="with everything but the first argument bound")
    parser.add_argument("--training", action="store_true", help="head_softmax with the statistics of the batch")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--source", action="store_true", help="print the CUDA source instead")
    form.add_argument("--json", action="store_true", help="print the plan as JSON instead")
    form.add_argument("--svg", action="store_true", help="print a picture of the plan instead")


def _target(text: str) -> Target:
    """Parse and import what to plan: `module:function`, or the name of a head."""
    module_name, colon, path = text.partition(":")
    if not colon:
        try:
            return Target(text, heads.find(text), True)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"expected module:function or one of {', '.join(heads.HEADS)}, got {text!r}"
            ) from None
    if not module_name or not path:
        raise argparse.ArgumentTypeError(f"expected module:function, got {text!r}")
    # `python -m` looks into the current folder; the installed command does not.
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise argparse.ArgumentTypeError(f"module {module_name!r} cannot be imported: {error}") from None
    except (Exception, SystemExit) as error:  # a script that is not guarded by __name__ may exit
        raise argparse.ArgumentTypeError(f"importing module {module_name!r} failed: {_describe(error)}") from error
    for name in path.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            where = getattr(found, "__name__", type(found).__name__)
            raise argparse.ArgumentTypeError(f"{where!r} has no {name!r}{_functions_in(found)}") from None
    if not callable(found):
        raise argparse.ArgumentTypeError(f"expected a function, but {text!r} is of type {type(found).__name__}")
    return Target(text, found, False)


def _functions_in(found: Any) -> str:
    """List the fused functions of a module, or all its functions if none is fused, for a message."""
    own = {name: value for name, value in getattr(found, "__dict__", {}).items() if not name.startswith("_")}
    names = [name for name, value in own.items() if isinstance(value, (Fused, Bound))]
    names = names or [name for name, value in own.items() if inspect.isfunction(value)]
    return f"; it has {', '.join(sorted(names)[:10])}" if names else ""


def _spec(text: str) -> tuple[str, Spec]:
    """Parse NAME=SHAPE:DTYPE."""
    name, equals, rest = text.partition("=")
    shape, colon, dtype = rest.partition(":")
    if not equals or not name.isidentifier() or not re.fullmatch(r"scalar|\d+([x,]\d+)*", shape):
        raise argparse.ArgumentTypeError(f"expected {_SPEC} (or 8192, or scalar, as SHAPE), got {text!r}")
    dtype = dtype if colon else "float32"
    lengths = () if shape == "scalar" else tuple(int(n) for n in re.split("[x,]", shape))
    try:
        return name, spec(lengths, dtype)
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(
            f"expected one of {', '.join(dtypes.ITEMSIZE)} as DTYPE, got {dtype!r} in {text!r}"
        ) from None


def _value(text: str) -> tuple[str, Any]:
    """Parse NAME=LITERAL."""
    name, equals, literal = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=LITERAL, for example axis=1, got {text!r}")
    try:
        return name, ast.literal_eval(literal)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise argparse.ArgumentTypeError(
            f"expected a literal of Python after {name}=, such as 0.5, True, '\"tanh\"' or '(0, 1)', got {literal!r}"
        ) from None


# Planning -----------------------------------------------------------------------------------------------------------


def explain(parser: argparse.ArgumentParser, options: argparse.Namespace) -> str:
    """Plan the function, and write the plan in the form that was asked for.

    Raises
    ------
    Failure
        The function cannot be fused, or raised.
    """
    target: Target = options.target
    function = target.function
    if not isinstance(function, (Fused, Bound)):
        try:
            function = fuse(function)
        except (TypeError, ValueError) as error:
            raise Failure(f"{target.given}: {error}") from None
    arguments = _arguments(parser, options, function)
    first = next(iter(_parameters(function)), None)
    try:
        if options.bound and isinstance(function, Fused):
            free = {name: value for name, value in arguments.items() if name == first}
            fixed = {name: value for name, value in arguments.items() if name != first}
            plan: Plan = function.bind(**fixed).plan(**free)
        else:
            plan = function.plan(**arguments)
        return _write(plan, options)
    except TraceError as error:
        raise Failure(str(error)) from None
    except Exception as error:  # whatever the user's function raises
        raise Failure(f"{target.given}: {_describe(error)}") from error


def _arguments(
    parser: argparse.ArgumentParser, options: argparse.Namespace, function: Fused | Bound
) -> dict[str, Spec | Any]:
    """Return the arguments to plan with, by name; exit with status 2 if some are missing or do not fit."""
    target: Target = options.target
    arguments: dict[str, Any] = {}
    if target.is_head:
        arguments.update(_head_arguments(options))
    else:
        _refuse_head_options(parser, options)
    if options.training:
        if target.function is not heads.head_softmax:
            parser.error(f"argument --training: it is for head_softmax, {_name(function)} is the same in training")
        if arguments["x"].shape[0] < 2:
            parser.error("argument --rows: expected at least 2 with --training")
        arguments["training"] = True
    arguments.update(_given_arguments(parser, options, function))
    parameters = _parameters(function)
    missing = [n for n, p in parameters.items() if n not in arguments and p.default is p.empty]
    if missing:
        parser.error(
            f"argument --spec: {_name(function)} also needs {', '.join(missing)}: add "
            f"{' '.join(f'--spec {name}=SHAPE:DTYPE' for name in missing)}, or --value {missing[0]}=LITERAL"
        )
    return arguments


def _head_arguments(options: argparse.Namespace) -> dict[str, Spec]:
    """Return the arrays of a head, of the sizes given or the default ones."""
    rows = heads.ROWS if options.rows is None else options.rows
    inner = heads.IN_FEATURES if options.in_features is None else options.in_features
    columns = heads.OUT_FEATURES if options.out_features is None else options.out_features
    shapes = heads.input_shapes(options.target.function, rows, inner, columns)
    return {name: spec(shape, options.dtype or "float32") for name, shape in shapes.items()}


def _refuse_head_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with status 2 if sizes or a dtype of the heads are given for another function."""
    for name in ("rows", "in_features", "out_features", "dtype"):
        if getattr(options, name) is not None:
            flag, given = name.replace("_", "-"), options.target.given
            parser.error(f"argument --{flag}: it is for the heads; give the arrays of {given} by --spec")


def _given_arguments(
    parser: argparse.ArgumentParser, options: argparse.Namespace, function: Fused | Bound
) -> dict[str, Spec | Any]:
    """Return the arguments given by --spec and --value; exit with status 2 if one is unknown or given twice."""
    parameters = _parameters(function)
    found: dict[str, Any] = {}
    for flag, pairs in (("spec", options.spec), ("value", options.value)):
        for name, value in pairs:
            if name not in parameters:
                known = f"one of {', '.join(parameters)}, the parameters of" if parameters else "no argument by name of"
                parser.error(f"argument --{flag}: expected {known} {_name(function)}, got {name!r}")
            if name in found:
                parser.error(f"argument --{flag}: {name!r} was given twice")
            found[name] = value
    return found


def _parameters(function: Fused | Bound) -> dict[str, inspect.Parameter]:
    """Return the parameters that are left to give, by name."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _name(function: Fused | Bound) -> str:
    """Name a function in messages."""
    return str(getattr(function, "__name__", function))


def _describe(error: BaseException) -> str:
    """Describe an exception: its type and message, and the last line of the user's code that it came through."""
    text = f"{type(error).__name__}: {error}"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_SKIPPED)]
    line = f"\n  at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    return text if text.endswith(line) else text + line  # errors of a trace name the line themselves


def _write(plan: Plan, options: argparse.Namespace) -> str:
    """Write a plan as JSON, SVG, CUDA source or text."""
    if options.json:
        return json.dumps(plan.record(), indent=2) + "\n"
    if options.svg:
        return plan.svg()
    return f"{_source(plan) if options.source else plan}\n"


def _source(plan: Plan) -> str:
    """Return the CUDA source of a plan, and of the plan that prepacks for it."""
    parts = [plan.source()]
    if plan.prepare is not None:
        parts = ["// Run once, when the arguments are bound:", plan.prepare.source(), "// Run in every call:", *parts]
    return "\n\n".join(parts)
