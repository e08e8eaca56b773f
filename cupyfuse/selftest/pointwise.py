"""Check pointwise operators: special values against their tables, accuracy over all exponents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..api.fuse import Fused
from ..ir.operators import POINTWISE
from ..trace import apply
from . import oracle, samples, specials
from .formats import Array, Format
from .measure import Allowance, Measurement, measure
from .symbols import allows, value
from .target import Failure, Target

# Operators in one kernel: so many that there are few kernels, and each compiles quickly.
_GROUP_SIZE = 12


@dataclass(frozen=True, eq=False)
class Group:
    """Operators with the same number of array operands, fused into one function that returns all their results."""

    operands: int
    names: tuple[str, ...]
    fused: Fused


@cache
def parse_name(name: str) -> tuple[str, tuple[float, ...]]:
    """Split an operator's name from its parameters: `softplus(2,20)` is ("softplus", (2.0, 20.0))."""
    operator, _, numbers = name.partition("(")
    return operator, tuple(float(n) for n in numbers.rstrip(")").split(",") if n)


@cache
def groups() -> tuple[Group, ...]:
    """Return all operators, with the parameters that the tables of special values name."""
    found = []
    for operands in (1, 2, 3):
        names = [name for name, cases in specials.pointwise_cases().items() if len(cases[0].operands) == operands]
        for start in range(0, len(names), _GROUP_SIZE):
            chunk = tuple(names[start : start + _GROUP_SIZE])
            found.append(Group(operands, chunk, Fused(_group_function(chunk, operands))))
    return tuple(found)


def _group_function(names: Sequence[str], operands: int) -> Callable[..., tuple[Any, ...]]:
    """Return the function that applies operators to one, two or three arrays."""

    def one(a: Any) -> tuple[Any, ...]:
        return tuple(_apply_named(name, a) for name in names)

    def two(a: Any, b: Any) -> tuple[Any, ...]:
        return tuple(_apply_named(name, a, b) for name in names)

    def three(a: Any, b: Any, c: Any) -> tuple[Any, ...]:
        return tuple(_apply_named(name, a, b, c) for name in names)

    return (one, two, three)[operands - 1]


def _apply_named(name: str, *operands: Any) -> Any:
    """Apply an operator, with the parameters in its name, to arrays."""
    operator, numbers = parse_name(name)
    if operator == "where":
        operands = (apply("not_equal", operands[0], 0.0), *operands[1:])
    return apply(operator, *operands, *numbers)


# Special values -----------------------------------------------------------------------------------------------------


def check_specials(target: Target, form: Format) -> int:
    """Compare results with every entry of the tables, record failures, and return the number of entries."""
    compared = 0
    for group in groups():
        cases = {name: specials.pointwise_cases()[name] for name in group.names}
        given = sorted({case.operands for each in cases.values() for case in each})
        index = {operands: i for i, operands in enumerate(given)}
        columns = [form.rounded([value(s, form) for s in column]) for column in zip(*given, strict=True)]
        for variant, name, result in _results(target, group, columns, form):
            ulps = POINTWISE[parse_name(name)[0]].ulps
            for case in cases[name]:
                got = float(result[index[case.operands]])
                flushing = target.flushing(form)
                expected = specials.expected_when_flushed(case, cases[name]) if flushing else case.expected
                if not allows(expected, got, form, ulps, flushing):
                    call = f"{name} of {', '.join(case.operands)} ({variant})"
                    target.failures.append(Failure(name, form.name, call, repr(got), expected))
            compared += len(cases[name])
    return compared


def _results(target: Target, group: Group, columns: Sequence[Array], form: Format) -> Iterator[tuple[str, str, Array]]:
    """Run the operators of a group in every variant; yield the variant, the operator's name and its result."""
    for variant in target.variants:
        results = target.run_flat(group.fused, columns, form, variant, ", ".join(group.names))
        for name, result in zip(group.names, results, strict=True) if results is not None else ():
            yield variant, name, result


# Accuracy -----------------------------------------------------------------------------------------------------------


def accuracy(target: Target, form: Format) -> dict[str, Measurement]:
    """Measure the largest errors in one format, by operator; record failures."""
    found: dict[str, Measurement] = {}
    for group in groups():
        flushing = target.flushing(form)
        if group.operands == 1:
            inputs: tuple[Array, ...] = (samples.unary(form, flushing),)
        else:
            inputs = samples.pairs(form, flushing) if group.operands == 2 else samples.triples(form, flushing)
        columns = [form.rounded(x) for x in inputs]
        for variant, name, result in _results(target, group, columns, form):
            if not _is_measured(name, group):
                continue
            exact, allowance = _exact(name, form, inputs)
            one = measure(result, exact, allowance, form, flushing)
            found.setdefault(name, Measurement()).merge(one)
            at = one.first_failure
            if at is not None:
                target.failures.append(_failure(name, form, variant, inputs, result, exact, allowance, at))
    return found


def _is_measured(name: str, group: Group) -> bool:
    """Whether accuracy is measured for this name: with fixed finite parameters, where the operator has any."""
    operator, numbers = parse_name(name)
    if not numbers:
        return group.operands == 1 or operator not in {parse_name(n)[0] for n in specials.pointwise_cases() if "(" in n}
    return bool(np.isfinite(numbers).all())


def _exact(name: str, form: Format, inputs: tuple[Array, ...]) -> tuple[Array, Allowance]:
    """Return an operator's exact results and their allowance."""
    operator, numbers = parse_name(name)
    row = POINTWISE[operator]
    wide = [oracle.wider(x, form) for x in (*inputs, *numbers)]
    narrow = [np.asarray(x, form.computed.dtype) for x in (*inputs, *numbers)]
    if operator == "where":
        wide[0] = wide[0] != 0
    with np.errstate(all="ignore"):
        exact = oracle.wide_formula(operator)(*wide)
        scale = None if row.scale is None else row.scale(*narrow)
    return exact, Allowance(row.ulps, scale, bool(row.quick))


def _failure(
    name: str,
    form: Format,
    variant: str,
    inputs: tuple[Array, ...],
    result: Array,
    exact: Array,
    allowance: Allowance,
    at: int,
) -> Failure:
    """Describe the result number `at`, which is beyond its allowance."""
    given = ", ".join(repr(float(x[at])) for x in inputs)
    allowed = np.broadcast_to(allowance.absolute(exact, form, False), exact.shape)[at]
    wanted = f"{float(exact[at])!r} within {float(allowed):.3g} ({allowance.ulps:g} ulps)"
    return Failure(name, form.name, f"{given} ({variant})", repr(float(result[at])), wanted)
