"""Functions that catch what an operation raises for some values: on NumPy arrays they run as written."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import assert_equal

import cupyfuse as cf

S = np.ones((4, 4))  # singular
G = S + np.eye(4)
LABELS = np.arange(4)


def is_positive_definite(x: Any) -> Any:
    try:
        np.linalg.cholesky(x)
    except np.linalg.LinAlgError:
        return False
    return True


def solve(x: Any) -> Any:
    try:
        return np.linalg.solve(x, x[0])
    except np.linalg.LinAlgError:
        return np.linalg.pinv(x) @ x[0]


def with_jitter(x: Any) -> Any:
    jitter = 0.0
    for _ in range(8):
        try:
            return np.linalg.cholesky(x + jitter * np.eye(len(x)))
        except np.linalg.LinAlgError:
            jitter = max(10 * jitter, 1e-8)
    raise ValueError("not positive definite")


def suppressed(x: Any) -> Any:
    found = x
    with contextlib.suppress(np.linalg.LinAlgError):
        found = np.linalg.inv(x)
    return found


def _inverse(x: Any) -> Any:
    return np.linalg.inv(x)


def around_a_call(x: Any) -> Any:
    try:
        return _inverse(x) - x
    except Exception:
        return 2 * x


def in_place(x: Any) -> Any:
    x += 1
    try:
        x[...] = np.linalg.inv(x)
    except np.linalg.LinAlgError:
        x *= 2
    return x.sum()


def quotient(x: Any) -> Any:
    try:
        return 1 / x.sum().item()
    except ZeroDivisionError:
        return 0.0


def element(x: Any, labels: Any) -> Any:
    try:
        return x[np.arange(4), labels]
    except IndexError:
        return x[:, 0]


def row(x: Any, labels: Any) -> Any:
    try:
        return x[labels]
    except IndexError:
        return x


CASES: list[tuple[Callable[..., Any], list[tuple[Any, ...]]]] = [
    (is_positive_definite, [(G,), (-G,)]),
    (solve, [(G,), (S,)]),
    (with_jitter, [(G,), (S,)]),
    (suppressed, [(G,), (S,)]),
    (around_a_call, [(G,), (S,)]),
    (in_place, [(G - 1,), (S - 1,)]),
    (quotient, [(G,), (0 * G,)]),
    (element, [(G, LABELS), (G, LABELS + 1)]),
    (row, [(G, LABELS), (G, LABELS + 1)]),
]


@pytest.mark.parametrize(("function", "calls"), CASES, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("bound", [False, True], ids=["", "bound"])
def test_the_other_branch_is_taken(function: Callable[..., Any], calls: list[tuple[Any, ...]], bound: bool) -> None:
    fused = cf.fuse(function)
    for arguments in (*calls, *reversed(calls)):
        given, expected = [a.copy() for a in arguments], [a.copy() for a in arguments]
        run = fused.bind(labels=given.pop()) if bound and len(given) == 2 else fused
        assert_equal(run(*given), function(*expected))
        for ours, theirs in zip(given, expected, strict=False):
            assert_equal(ours, theirs)
    assert "it catches what " in fused.plan(*calls[0]).as_written


def translated(x: Any) -> Any:
    try:
        return np.linalg.inv(x)
    except np.linalg.LinAlgError as error:
        raise RuntimeError("singular") from error


def test_errors_are_translated() -> None:
    fused = cf.fuse(translated)
    assert_equal(fused(G), translated(G))
    with pytest.raises(RuntimeError, match="singular"):
        fused(S)


def other_error(x: Any) -> Any:
    try:
        return np.linalg.inv(x)
    except KeyError:
        return x


def cleaned_up(x: Any) -> Any:
    with np.errstate(all="ignore"):
        try:
            return np.linalg.inv(x)
        finally:
            x = None


def raised_again(x: Any) -> Any:
    try:
        return _inverse(x)
    except Exception:
        assert x is not None
        raise


def never_raises(x: Any) -> Any:
    try:
        return np.sort(np.exp(x), axis=0)
    except np.linalg.LinAlgError:
        return x


def before(x: Any) -> Any:
    y = np.linalg.inv(x)
    try:
        return y.reshape(2, 3)
    except ValueError:
        return y.reshape(2, 8)


@pytest.mark.parametrize("function", [other_error, cleaned_up, raised_again, never_raises, before])
def test_functions_that_catch_no_error_have_plans(function: Callable[..., Any]) -> None:
    fused = cf.fuse(function)
    assert_equal(fused(G), function(G))
    assert not fused.plans[-1].as_written


def test_the_handler_of_the_caller_is_its_own() -> None:
    fused = cf.fuse(_inverse)
    try:
        fused(G)
    except np.linalg.LinAlgError:
        raise AssertionError from None
    assert not fused.plans[-1].as_written
