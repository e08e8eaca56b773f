"""Functions as users write them run fused, and with their weights bound, as they run plain: NumPy's engine and kernels.

The functions are in `user_functions`, `user_programs`, `user_loops` and `user_classes`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import user_classes  # noqa: F401
import user_loops  # noqa: F401
import user_programs  # noqa: F401
from support import HOST, NUMPY, Engine, chosen, dtype_of, unit
from user_functions import USERS, arguments

import cupyfuse as cf

WEIGHTS = ("w", "b", "v", "g", "s")
# NumPy's einsum, SciPy's distances and filters have no bfloat16.
_WIDE = ("cross_entropy", "mixture_means", "causal_attention", "skip_gram", "discrepancy", "filtered")
BFLOAT16 = [name for name in USERS if name not in _WIDE]


@functools.cache
def fused(name: str) -> cf.Fused:
    return cf.fuse(USERS[name])


def bound(name: str, given: dict[str, Any]) -> cf.Bound | None:
    """The function with its weights bound; None where all of its arguments are weights, or none is."""
    weights = {n: a for n, a in given.items() if n in WEIGHTS}
    return fused(name).bind(**weights) if weights and len(weights) < len(given) else None


def given_to(name: str, dtype: str, engine: Engine) -> dict[str, Any]:
    return dict(zip(fused(name).names, engine.arrays(arguments(USERS[name], dtype_of(dtype))), strict=False))


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> None:
    """The kernels of today's functions, compiled together."""
    cases = [case | {"dtype": "bfloat16"} for case in chosen(request.session, test_in_bfloat16)]
    cases += chosen(request.session, test_users_functions)
    with HOST.active(), HOST.runtime.only_collecting():
        for name, dtype in [(case["name"], case["dtype"]) for case in cases if case["engine"] is HOST]:
            given = given_to(name, dtype, HOST)
            # Where nothing is computed, library steps meet any values, and the rest of a plan is compiled later.
            with suppress(np.linalg.LinAlgError, IndexError, ValueError):
                fused(name)(**given)
                if (serve := bound(name, given)) is not None:
                    serve(**{n: a for n, a in given.items() if n not in WEIGHTS})


def test_there_are_many() -> None:
    assert len(USERS) >= 100


def leaves(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def run(name: str, dtype: str, engine: Engine) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield what the fused and the bound function return, and their arguments afterwards."""
    with engine.active():
        given = given_to(name, dtype, engine)
        result = fused(name)(**given)
        yield engine.host(result), {n: engine.host(a) for n, a in given.items()}
        given = given_to(name, dtype, engine)
        serve = bound(name, given)
        if serve is not None:
            rest = {n: a for n, a in given.items() if n not in WEIGHTS}
            result = serve(**rest)
            yield engine.host(result), {n: engine.host(a) for n, a in rest.items()}


@pytest.mark.rotates
@pytest.mark.parametrize("engine", [NUMPY, HOST], ids=["numpy", "host"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", USERS)
@pytest.mark.usefixtures("compiled")
def test_users_functions(name: str, dtype: str, engine: Engine) -> None:
    """Within a thousand roundings of the plain function in float64: conditions are mild, sums have ten terms."""
    exact, given = given_to(name, "float64", NUMPY), given_to(name, dtype, NUMPY)
    for n, a in given.items():
        exact[n] = a.astype(float) if a.dtype.kind == "f" else a.copy()
    expected, plain = USERS[name](**exact), USERS[name](**given)
    for actual, after in run(name, dtype, engine):
        assert type(actual) is type(plain) or engine is HOST
        for n, a in after.items():
            np.testing.assert_allclose(a.astype(float), given[n].astype(float), rtol=20 * unit(dtype), err_msg=n)
        for got, wanted, own in zip(*map(leaves, (actual, expected, plain)), strict=True):
            got, wanted, own = np.asarray(got), np.asarray(wanted), np.asarray(own)
            assert (got.shape, got.dtype) == (own.shape, own.dtype)
            if own.dtype.kind in "biu":
                np.testing.assert_array_equal(got, own)
            else:
                # Some results are wider than what they are computed from.
                tolerance = 2000 * max(unit(dtype), unit(str(own.dtype)))
                np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.rotates
@pytest.mark.parametrize("engine", [NUMPY, HOST], ids=["numpy", "host"])
@pytest.mark.parametrize("name", BFLOAT16)
@pytest.mark.usefixtures("compiled")
def test_in_bfloat16(name: str, engine: Engine) -> None:
    """As accurate as NumPy: at most twice its error, and four roundings of the largest number, of which one is kept."""
    given = given_to(name, "bfloat16", NUMPY)
    exact = {n: a.copy() if a.dtype.kind in "biu" else a.astype(float) for n, a in given.items()}
    expected, plain = USERS[name](**exact), USERS[name](**given)
    for actual, _ in run(name, "bfloat16", engine):
        for got, wanted, own in zip(*map(leaves, (actual, expected, plain)), strict=True):
            got, wanted, own = (np.asarray(a).astype(float) for a in (got, wanted, own))
            assert got.shape == own.shape
            allowed = 2 * np.abs(own - wanted).max() + 4 * 2 * unit("bfloat16") * np.abs(wanted).max()
            np.testing.assert_allclose(got, wanted, rtol=0, atol=allowed)
