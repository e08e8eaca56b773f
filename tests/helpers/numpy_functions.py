"""NumPy's functions, plain and fused, and arguments for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from support import INF, NAN, Engine, assert_equal, dtype_of, unit

import cupyfuse as cf

Function = Callable[..., Any]
DTYPES = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "bool")


def plain(function: Function, *arguments: Any) -> Any:
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*arguments)


def compare(function: Function, arguments: list[Any], engine: Engine, ulps: float, dtype: str = "") -> cf.Plan:
    """The fused function gives what the plain one gives: bit for bit, or within so many ulps of float64's results."""
    fused = cf.fuse(function)
    with engine.active(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = engine.host(fused(*engine.arrays(arguments)))
    expected = plain(function, *arguments)
    wide = plain(function, *(a.astype(np.float64) if a.dtype.name in DTYPES else a for a in arguments))
    several = isinstance(expected, (tuple, list))
    triples = zip(actual, expected, wide, strict=True) if several else [(actual, expected, wide)]
    for got, wanted, exact in triples:
        got, wanted, exact = (np.asarray(v) for v in (got, wanted, exact))
        if dtype == "bfloat16" and wanted.dtype.kind == "f":
            wanted = wanted.astype(got.dtype)  # ml_dtypes widens where NumPy calls astype(float)
        assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
        if not ulps or wanted.dtype.kind in "biu":
            assert_equal(got, wanted)
            continue
        value, reference = got.astype(np.float64), exact.astype(np.float64)
        finite = np.isfinite(reference)
        largest = float(ml_dtypes.finfo(wanted.dtype).max)
        fits = finite & (np.abs(reference) < largest / 4)
        np.testing.assert_array_equal(np.isnan(value), np.isnan(reference))
        np.testing.assert_array_equal(value[~finite], reference[~finite])
        size = np.abs(reference[fits]) + 1
        assert np.all(np.abs(value[fits] - reference[fits]) <= ulps * 2 * unit(str(wanted.dtype)) * size)
    return fused.plan(*arguments)


def values(dtype: str, shape: tuple[int, ...] = (6, 9), specials: bool = False, seed: int = 3) -> Any:
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype in INTEGERS:
        low = 0 if dtype.startswith("u") else -5
        return rng.integers(low, 6, shape).astype(dtype)
    x = np.round(rng.standard_normal(shape) * 2, 2)
    if specials:
        hit = rng.random(shape) < 0.2
        x = np.where(hit, rng.choice(np.array([INF, -INF, NAN, 0.0, -0.0]), shape), x)
    return x.astype(dtype_of(dtype))
