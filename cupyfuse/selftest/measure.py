"""Errors: in ulps, relative to the result, and whether they are within what the operator's row allows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.operators import LOST
from ..ir.operators.table import ROUNDING
from .formats import Array, Format
from .oracle import EXTENDED

# Values that are 16-bit floats to the user: exponentials and quotients by a number of the row are good to this.
QUICK = 1e-5


@dataclass(frozen=True)
class Allowance:
    """What a result may be off, stated in ulps of the format that is computed in.

    Attributes
    ----------
    ulps : of the result, or of `scale` wherever that is larger
    scale : the size that rounding errors have inside, where it can be larger than the result
    quick : whether 16-bit formats use the quick exponential or quotient
    text : the ulps in words, where they depend on sizes
    """

    ulps: float
    scale: Array | None = None
    quick: bool = False
    text: str = ""

    def __str__(self) -> str:
        return (self.text or f"{self.ulps:g}") + (" *" if self.scale is not None and self.ulps else "")

    def size(self, exact: Array) -> Array:
        """The size that an ulp is taken of: the result's, or the scale's wherever that is larger."""
        size = np.abs(exact)
        if self.scale is not None:
            scale = np.asarray(self.scale).astype(size.dtype).ravel()
            size = np.maximum(size, np.where(np.isfinite(scale), scale, 0))
        return size

    def absolute(self, exact: Array, form: Format, flushing: bool) -> Array:
        """The same as an absolute error for each element."""
        ulps = self.ulps
        if form.name == "float64" and not EXTENDED and ulps:
            ulps = 2 * ulps + 2  # the other half of the difference is the oracle's
        with np.errstate(all="ignore"):
            error = ulps * form.computed.ulp(self.size(exact))
            if self.quick and form.computed is not form:
                error = error + QUICK * np.abs(exact)
            if self.ulps > ROUNDING:
                error = error + LOST * form.computed.normal
            if flushing:
                # A result below the smallest normal number is written as zero.
                error = error + form.computed.normal
            if form.computed is not form and self.ulps:
                error = error + form.ulp(np.abs(exact) + error) / 2
        return error


@dataclass
class Measured:
    """The largest errors of one operator in one format.

    Attributes
    ----------
    ulps : in units of the last place: of the result as it is stored or of `scale` as it is computed, the larger one
    relative : relative to the result, or to `scale` where that is larger
    used : as a share of what is allowed; in 16-bit formats that is mostly the rounding of the result itself
    count : results compared
    allowed : the allowance, in words
    worst : index of the first result that is not allowed, or None
    """

    ulps: float = 0.0
    relative: float = 0.0
    used: float = 0.0
    count: int = 0
    allowed: str = ""
    worst: int | None = None

    def merge(self, other: Measured) -> None:
        """Take in what the same operator gave elsewhere; a failure is the other's own matter."""
        self.ulps, self.relative = max(self.ulps, other.ulps), max(self.relative, other.relative)
        self.used, self.count = max(self.used, other.used), self.count + other.count
        self.allowed = self.allowed or other.allowed


def measure(got: Any, exact: Array, allowance: Allowance, form: Format, flushing: bool) -> Measured:
    """Compare results with exact ones.

    Infinities and NaN have to be where the exact values have them, but for overflow: a finite value beyond the largest
    number of the format is infinite there, and one within its allowance of that may be.
    """
    got = np.asarray(got).astype(np.float64).ravel()
    exact = np.asarray(exact).ravel()
    exact = exact if exact.dtype.kind == "f" else exact.astype(np.float64)
    with np.errstate(all="ignore"):
        allowed = allowance.absolute(exact, form, flushing)
        error, result = np.abs(got - exact), np.abs(exact)
        finite, both = np.isfinite(exact), np.isfinite(exact) & np.isfinite(got)
        good = np.where(both, error <= allowed, (got == exact) | (np.isnan(got) & np.isnan(exact)))
        if not good.all():
            edge = exact.dtype.type(form.max) + exact.dtype.type(form.ulp(form.max) / 2)
            good |= np.isinf(got) & finite & (np.sign(got) == np.sign(exact)) & (result + allowed >= edge)
        # What underflow may take from a factor says nothing of rounding.
        counted = both & ((result >= LOST * form.computed.normal) | (allowance.ulps <= ROUNDING))
        size = allowance.size(exact)
        unit = form.ulp(result)
        if allowance.scale is not None:
            unit = np.maximum(unit, form.computed.ulp(size))
        size = np.maximum(result, size * 2.0 ** (form.digits - form.computed.digits))
        measured = Measured(
            _largest(error / unit, counted),
            _largest(error / size, counted & (size >= form.normal)),
            _largest(error / allowed, counted & (error > 0)),
            got.size,
            str(allowance),
        )
    if not good.all():
        measured.worst = int(np.argmax(~good))
    return measured


def _largest(values: Array, where: Array) -> float:
    return float(np.max(values, where=where, initial=0))
