"""Check operators on integers: pairs of awkward numbers of every dtype, against NumPy's own functions."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from .. import dtypes
from ..api.fuse import Fused
from ..ir.operators import POINTWISE
from ..trace import apply
from .formats import Array, Format
from .target import Failure, Target

# Only names and dtypes are read: integers have no exponent.
FORMATS = [Format(name, int(np.iinfo(name).max).bit_length(), 0) for name in (*dtypes.NARROW, "int64")]
_SMALL = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127)


@cache
def ufuncs() -> dict[str, np.ufunc]:
    """Return NumPy's function for each operator whose result of integers is an integer, where it has one."""
    named = {name: getattr(np, name, None) for name, row in POINTWISE.items() if row.gives_integers}
    return {name: ufunc for name, ufunc in named.items() if isinstance(ufunc, np.ufunc)}


@cache
def _everything() -> Fused:
    """Return the function that applies all operators to two arrays, or to the first."""

    def everything(a: Any, b: Any) -> tuple[Any, ...]:
        return tuple(apply(name, *(a, b)[: ufunc.nin]) for name, ufunc in ufuncs().items())

    return Fused(everything)


def pairs(form: Format) -> tuple[Array, Array]:
    """Return all pairs of small numbers, counts of shifts around all widths, and both ends of the range."""
    limits = np.iinfo(form.dtype)
    wanted = {*_SMALL, *(-s for s in _SMALL), limits.max // 3}
    wanted |= {end for k in range(3) for end in (limits.min + k, limits.max - k)}
    values = [v for v in sorted(wanted) if limits.min <= v <= limits.max]
    a, b = np.meshgrid(*[np.array(values, form.dtype)] * 2)
    return a.ravel(), b.ravel()


def check(target: Target, form: Format) -> int:
    """Compare the results with NumPy's, record the first failure of each operator, and return the number of results."""
    a, b = pairs(form)
    for variant in target.variants:
        results = target.run_flat(_everything(), (a, b), form, variant, ", ".join(ufuncs()))
        if results is None:
            continue
        for (name, ufunc), got in zip(ufuncs().items(), results, strict=True):
            with np.errstate(all="ignore"):
                expected = ufunc(*(a, b)[: ufunc.nin])
            wrong = np.flatnonzero((got != expected) | (got.dtype != expected.dtype))
            if wrong.size:
                at = wrong[0]
                given = ", ".join(str(x[at]) for x in (a, b)[: ufunc.nin])
                numbers = (f"{x[at]} ({x.dtype})" for x in (got, expected))
                target.failures.append(Failure(name, form.name, f"{given} ({variant})", *numbers))
    return len(ufuncs()) * a.size
