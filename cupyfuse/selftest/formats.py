"""Floating-point formats: limits, and units in the last place."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import dtypes

Array = Any


@dataclass(frozen=True)
class Format:
    """A binary format of `digits` significant bits, the hidden one included, and exponents `bottom` to `top`."""

    name: str
    digits: int
    top: int

    @property
    def bottom(self) -> int:
        return 1 - self.top

    @cached_property
    def max(self) -> float:
        """The largest finite number."""
        return (2.0 - 2.0 ** (1 - self.digits)) * 2.0**self.top

    @cached_property
    def normal(self) -> float:
        """The smallest positive normal number."""
        return 2.0**self.bottom

    @cached_property
    def subnormal(self) -> float:
        """The smallest positive number."""
        return float(np.ldexp(1.0, self.bottom + 1 - self.digits))

    @cached_property
    def computed(self) -> Format:
        """The format in which values of this one are computed."""
        return FORMATS[dtypes.compute_dtype(self.name)]

    @property
    def dtype(self) -> np.dtype[Any]:
        return dtypes.to_numpy(self.name)

    def ulp(self, x: Array) -> Array:
        """Return the distance between neighbouring numbers at x."""
        with np.errstate(all="ignore"):
            size = np.where(np.isfinite(x), np.abs(x), 1)
            exponent = np.where(size == 0, self.bottom, np.frexp(size)[1] - 1)
        return np.ldexp(np.ones_like(size), np.maximum(exponent, self.bottom) + 1 - self.digits)

    def rounded(self, x: Array) -> np.ndarray[Any, Any]:
        """Round numbers to an array of this format."""
        with np.errstate(over="ignore"):
            return np.asarray(x, np.float64).astype(self.dtype)


FORMATS = {
    f.name: f
    for f in (
        Format("float16", 11, 15),
        Format("bfloat16", 8, 127),
        Format("float32", 24, 127),
        Format("float64", 53, 1023),
    )
}


def available() -> list[Format]:
    """Return the formats that NumPy arrays can have here; bfloat16 needs ml_dtypes."""
    found = []
    for form in FORMATS.values():
        try:
            form.dtype  # noqa: B018
        except TypeError:
            continue
        found.append(form)
    return found
