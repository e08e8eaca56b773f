"""Symbols of the tables of special values: their values in a format, and the results that they allow."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

from ..ir.operators.activations import SELU_ALPHA, SELU_SCALE
from .formats import Format

_CONSTANTS = {
    "pi": math.pi,
    "pi/2": math.pi / 2,
    "pi/4": math.pi / 4,
    "3pi/4": 3 * math.pi / 4,
    "ln2": math.log(2.0),
    "ln2/2": math.log(2.0) / 2,
    "ln3": math.log(3.0),
    "selu": SELU_ALPHA * SELU_SCALE,
}
ANY_FINITE = "~"


@cache
def value(symbol: str, form: Format) -> float:
    """Return the number that a symbol stands for.

    Raises
    ------
    ValueError
        `tables.py` lists no such symbol.
    """
    size = symbol.removeprefix("-")
    numbers = {"max": form.max, "nor": form.normal, "sub": form.subnormal, **_CONSTANTS}
    number = numbers[size] if size in numbers else float(size)
    return -number if symbol != size else number


@cache
def choices(expected: str, form: Format) -> tuple[str, ...]:
    """Return the symbols that a table entry allows in a format."""
    return tuple(_choices(expected, form.name))


def _choices(expected: str, name: str) -> Iterator[str]:
    """Yield the symbols that a table entry allows in the format of a name, see `tables.py`."""
    for part in expected.split("|"):
        outside, _, inside = part.rstrip(")").partition("(")
        symbol = inside if inside and name == "float16" else outside
        yield from ("0", "-0") if symbol == "+-0" else (symbol,)


def allows(expected: str, got: float, form: Format, ulps: float, flushing: bool) -> bool:
    """Whether a table entry allows a result.

    Parameters
    ----------
    expected : the entry
    got : the result
    form : the format of the result
    ulps : the error allowed for numbers other than zero
    flushing : whether the engine flushes subnormal numbers to zero
    """
    for symbol in choices(expected, form):
        if _matches(symbol, got, form, ulps) or (flushing and _is_flushed(symbol, got, form, ulps)):
            return True
    return False


def _is_flushed(symbol: str, got: float, form: Format, ulps: float) -> bool:
    """Whether flushing explains a result: zero for a subnormal number, or a subnormal operand returned for zero."""
    if symbol == ANY_FINITE:
        return False
    wanted = value(symbol, form)
    if wanted == 0 and 0 < abs(got) < form.normal:
        return True
    if got != 0:
        return False
    small = 0 < abs(wanted) < form.normal + (ulps * form.subnormal if ulps else 0)
    return small and math.copysign(1.0, got) == math.copysign(1.0, wanted)


def _matches(symbol: str, got: float, form: Format, ulps: float) -> bool:
    """Whether a result is what one symbol stands for, zeros with their sign."""
    if symbol == ANY_FINITE:
        return math.isfinite(got)
    wanted = value(symbol, form)
    if math.isnan(wanted) or not math.isfinite(got):
        return math.isnan(got) if math.isnan(wanted) else got == wanted
    if wanted == 0:
        return got == 0 and math.copysign(1.0, got) == math.copysign(1.0, wanted)
    # 16-bit formats compute in float32: only the final rounding shows.
    slack = ulps if form.computed is form else min(ulps, 1.0)
    return abs(got - wanted) <= slack * float(form.ulp(wanted))
