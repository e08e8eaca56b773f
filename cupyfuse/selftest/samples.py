"""Inputs for measuring accuracy: all numbers of 16-bit formats, a dense sample of wider ones; deterministic."""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from .formats import Array, Format

# Where operators cross zero, change branches or saturate.
_BENDS: tuple[float, ...] = (
    0.25,
    0.5,
    0.75,
    1.0,
    1.25,
    1.5,
    2.0,
    3.0,
    3.5,
    4.0,
    6.0,
    10.0,
    20.0,
    math.log(2.0),
    math.e,
)
_BENDS += tuple(k * math.pi / 2 for k in (1, 2, 3, 4, 100))
_GOLDEN = (math.sqrt(5.0) - 1) / 2


def _mantissas(count: int) -> Array:
    """Return 1, and numbers in [1, 2) that the golden ratio spreads evenly."""
    return 1 + np.concatenate([[0.0], np.modf(np.arange(1, count) * _GOLDEN)[0]])


def _normal_only(x: Array, form: Format, flushing: bool) -> Array:
    """Drop subnormal numbers for an engine that flushes them to zero."""
    return x[(np.abs(x) >= form.normal) | (x == 0)] if flushing else x


def _all_of_16_bits(form: Format) -> Array:
    """Return all finite numbers of a 16-bit format as float64."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    if form.name == "float16":
        values = bits.astype(np.uint16).view(np.float16).astype(np.float64)
    else:
        with np.errstate(invalid="ignore"):  # signalling NaN
            values = (bits << 16).view(np.float32).astype(np.float64)
    return values[np.isfinite(values)]


@cache
def unary(form: Format, flushing: bool) -> Array:
    """Return finite numbers of the format as float64: all exponents, dense where operators change."""
    if form.name in ("float16", "bfloat16"):
        return _normal_only(_all_of_16_bits(form), form, flushing)
    each = 24 if form.name == "float32" else 6
    exponents = np.arange(form.bottom, form.top + 1)
    parts = [np.ldexp(_mantissas(each)[:, None], exponents).ravel()]
    parts += [np.linspace(0, 24, 12001), np.linspace(0, 1.1 * form.top * math.log(2.0), 6001), np.arange(200) / 2]
    steps = 1 + np.arange(-8, 9) * 2.0 ** (1 - form.digits)
    parts += [b * steps for b in _BENDS]
    parts += [form.subnormal * np.array([1.0, 2.0, 3.0, 1000.0]), form.normal * steps, form.max / steps[8:]]
    positive = form.rounded(np.concatenate(parts)).astype(np.float64)
    positive = np.unique(positive[np.isfinite(positive)])
    return _normal_only(np.concatenate([-positive[::-1], positive]), form, flushing)


@cache
def pairs(form: Format, flushing: bool) -> tuple[Array, Array]:
    """Return pairs of finite numbers as float64: of all exponents, neighbours, near opposites, ordinary sizes."""
    exponents = np.unique(np.linspace(form.bottom, form.top, 25).astype(int))
    few = np.ldexp(_mantissas(len(exponents)), exponents)
    few = np.concatenate([few, [1.0, 0.5, 3.0, 0.0, form.normal, form.max], _BENDS])
    few = np.concatenate([few, -few])
    a, b = (g.ravel() for g in np.meshgrid(few, few, indexing="ij"))
    near = np.repeat(np.concatenate([few, np.linspace(-30, 30, 401)]), 9)
    steps = 1 + np.resize(np.arange(-4, 5), near.shape) * 2.0 ** (1 - form.digits)
    ordinary = np.arange(1, 20001)
    x = 20 * (2 * np.modf(ordinary * _GOLDEN)[0] - 1)
    y = 20 * (2 * np.modf(ordinary * math.sqrt(2.0))[0] - 1)
    with np.errstate(over="ignore"):
        left = form.rounded(np.concatenate([a, near, near, x])).astype(np.float64)
        right = form.rounded(np.concatenate([b, near * steps, -near * steps, y])).astype(np.float64)
    good = np.isfinite(left) & np.isfinite(right)
    if flushing:
        for each in (left, right):
            good &= (np.abs(each) >= form.normal) | (each == 0)
    return left[good], right[good]


def triples(form: Format, flushing: bool) -> tuple[Array, Array, Array]:
    """Return triples for `where`: pairs behind a condition that is zero in every other one."""
    a, b = pairs(form, flushing)
    return np.where(np.arange(a.size) % 2, b, 0.0), a, b
