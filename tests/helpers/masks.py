"""Programs of arrays and masks, and the check that what they give, and to what they change arrays, is NumPy's."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import HOST, NUMPY, Engine, assert_close, dtype_of

import cupyfuse as cf
from cupyfuse.settings import force_plans

ENGINES = pytest.mark.parametrize("engine", [NUMPY, HOST], ids=lambda e: e.name)


def on_engines(host: str, numpy: str) -> Any:
    """Dtypes on the engine that compiles kernels, and on NumPy's."""
    pairs = [(engine, d) for engine, names in ((HOST, host), (NUMPY, numpy)) for d in names.split()]
    return pytest.mark.parametrize(("engine", "dtype"), pairs, ids=lambda v: getattr(v, "name", v))


MASKS = {"rows": (1, 0, 1, 1), "cols": (1, 0, 1, 1, 0), "both": ((1, 1, 0, 0, 1), (0, 0, 1, 0, 0), (0,) * 5, (1,) * 5)}


def program(text: str) -> Callable[..., Any]:
    """A function of arrays (x of three axes, a of two, u of rows, w of columns) and masks of the same axes."""
    *lines, last = text.split("; ")
    scope: dict[str, Any] = {"np": np, "cf": cf, "math": math}
    body = "".join(f"    {line}\n" for line in (*lines, f"return {last}"))
    exec(f"def function(x, a, u, w, rows, cols, both):\n{body}", scope)
    return scope["function"]  # type: ignore[no-any-return]


def arguments(dtype: str, chosen: str = "some") -> list[Any]:
    rng = np.random.default_rng(5)
    low = 0 if dtype[0] in "ub" else -4
    arrays = [rng.integers(low, 7, shape).astype(dtype_of(dtype)) for shape in ((4, 5, 3), (4, 5), 4, 5)]
    masks = [np.array(m, bool) for m in MASKS.values()]
    return arrays + (masks if chosen == "some" else [np.zeros_like(m) for m in masks])


def check(text: str, engine: Engine, dtype: str, chosen: str = "some") -> None:
    """Results, their dtypes and the types of scalars, and what the arguments hold afterwards, are NumPy's."""
    function, given = program(text), arguments(dtype, chosen)
    on_engine = engine.arrays(given)
    with engine.active(), force_plans():
        found = engine.host(cf.fuse(function)(*on_engine))
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = function(*given)
    results = zip(found, expected, strict=True) if isinstance(expected, tuple) else [(found, expected)]
    for ours, theirs in results:
        assert engine is not NUMPY or type(ours) is type(theirs)  # other engines' scalars are arrays
        assert (np.shape(ours), np.asarray(ours).dtype) == (np.shape(theirs), np.asarray(theirs).dtype)
        if np.asarray(theirs).dtype.kind == "c":
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
        else:
            # Sums and products of at most 60 numbers up to 6 that are integers, and what is computed of them in a few
            # steps: 2^-11, 2^-24 or 2^-53 times some tens.
            unit = np.finfo(theirs.dtype).eps if getattr(theirs, "dtype", None) in (np.float16, np.float32) else 1e-14
            assert_close(ours, theirs, 32 * unit * (1 + np.abs(np.asarray(theirs, np.float64))))
    for ours, theirs in zip(engine.host(on_engine), given, strict=True):
        np.testing.assert_array_equal(ours, theirs)
