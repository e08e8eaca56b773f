"""Measure the errors of results, in ulps and relative to the result, against their allowance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..ir.operators import UNDERFLOW_ERROR
from ..ir.operators.table import ROUNDING
from .formats import Array, Format
from .oracle import EXTENDED

# Relative error of quick expressions, and of quotients by a row's value, in 16-bit dtypes.
QUICK_ERROR = 1e-5


@dataclass(frozen=True)
class Allowance:
    """The error that a result may have, in ulps of the format in which it is computed.

    Attributes
    ----------
    ulps : the allowed error, relative to the result, or to `scale` where that is larger
    scale : magnitude of intermediate values, whose rounding errors can exceed those of the result
    quick : whether 16-bit formats use a quick expression
    text : formula of the ulps, where they depend on sizes
    """

    ulps: float
    scale: Array | None = None
    quick: bool = False
    text: str = ""

    def __str__(self) -> str:
        return (self.text or f"{self.ulps:g}") + (" *" if self.scale is not None and self.ulps else "")

    def magnitude(self, exact: Array) -> Array:
        """Return the magnitude that ulps are relative to: the larger one of result and scale."""
        size = np.abs(exact)
        if self.scale is not None:
            scale = np.asarray(self.scale).astype(size.dtype).ravel()
            size = np.maximum(size, np.where(np.isfinite(scale), scale, 0))
        return size

    def absolute(self, exact: Array, form: Format, flushing: bool) -> Array:
        """Return the allowance of each element as an absolute error."""
        ulps = self.ulps
        if form.name == "float64" and not EXTENDED and ulps:
            ulps = 2 * ulps + 2  # the reference is in float64 too, with an error of its own
        with np.errstate(all="ignore"):
            error = ulps * form.computed.ulp(self.magnitude(exact))
            if self.quick and form.computed is not form:
                error = error + QUICK_ERROR * np.abs(exact)
            if self.ulps > ROUNDING:
                # Several operations, between which a factor may underflow.
                error = error + UNDERFLOW_ERROR * form.computed.normal
            if flushing:
                # A result below the smallest normal number is written as zero.
                error = error + form.computed.normal
            if form.computed is not form and self.ulps:
                # Storing rounds once more, to 16 bits.
                error = error + form.ulp(np.abs(exact) + error) / 2
        return error


@dataclass
class Measurement:
    """The largest errors of one operator in one format.

    Attributes
    ----------
    ulps : error in ulps of the stored result, or of the computed `scale` where those are larger
    relative : error relative to the result, or to `scale` where that is larger
    used : error as a share of the allowance; in 16-bit formats mostly the rounding of the result itself
    count : number of results compared
    allowed : the allowance as text
    first_failure : index of the first result beyond its allowance, or None
    """

    ulps: float = 0.0
    relative: float = 0.0
    used: float = 0.0
    count: int = 0
    allowed: str = ""
    first_failure: int | None = None

    def merge(self, other: Measurement) -> None:
        """Include the errors of another measurement of the same operator, except its failure."""
        self.ulps, self.relative = max(self.ulps, other.ulps), max(self.relative, other.relative)
        self.used, self.count = max(self.used, other.used), self.count + other.count
        self.allowed = self.allowed or other.allowed


def measure(got: Any, exact: Array, allowance: Allowance, form: Format, flushing: bool) -> Measurement:
    """Compare results with exact ones; `flushing` tells that subnormal numbers are flushed to zero.

    Infinities and NaN have to agree with the exact values, except for overflow: a finite value beyond the format's
    largest number is infinite, and one within its allowance of that number may be.
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
        # Errors from factors that underflow are no measure of rounding.
        counted = both & ((result >= UNDERFLOW_ERROR * form.computed.normal) | (allowance.ulps <= ROUNDING))
        size = allowance.magnitude(exact)
        unit = form.ulp(result)
        if allowance.scale is not None:
            unit = np.maximum(unit, form.computed.ulp(size))
        size = np.maximum(result, size * 2.0 ** (form.digits - form.computed.digits))
        measured = Measurement(
            _largest(error / unit, counted),
            _largest(error / size, counted & (size >= form.normal)),
            _largest(error / allowed, counted & (error > 0)),
            got.size,
            str(allowance),
        )
    if not good.all():
        measured.first_failure = int(np.argmax(~good))
    return measured


def _largest(values: Array, where: Array) -> float:
    """Return the largest of the values that a mask selects, 0 if it selects none."""
    return float(np.max(values, where=where, initial=0))
