"""Loggers around fused functions, in objects and among arguments: what is logged is so while a call is traced."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupyfuse as cf
from cupyfuse.settings import force_plans

X = np.arange(6.0).reshape(2, 3)
log = logging.getLogger(__name__)


def helper(x: Any) -> Any:
    log.debug("rows %d", len(x))
    return x * 2


def with_levels(x: Any) -> Any:
    if log.isEnabledFor(logging.WARNING):
        log.warning(f"mean {x.mean():.3f} of {x}")
    return helper(x) + 1


def with_errors(x: Any) -> Any:
    try:
        if x.ndim < 3:
            raise ValueError("two dimensions")
    except ValueError:
        log.exception("failed")
    return x + 1


class Layer:
    def __init__(self) -> None:
        self.log, self.w = log, np.ones(3)

    def __call__(self, x: Any) -> Any:
        self.log.info("shape %s, %s", x.shape, x.mean())
        return x * self.w


FUNCTIONS: list[Callable[..., Any]] = [
    helper,
    with_levels,
    with_errors,
    Layer(),
    lambda x, logger=log: (logger.info("called"), x * 3)[1],
    lambda x: (logging.getLogger().getChild("a").info("called"), x * 3)[1],
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_that_log(function: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    fused = cf.fuse(function)
    with force_plans(), caplog.at_level(logging.DEBUG):
        for k in range(3):
            np.testing.assert_array_equal(fused(X * k), function(X * k))
    assert len(fused.plans) == 1 and caplog.records


def test_messages_show_what_stands_for_a_value(caplog: pytest.LogCaptureFixture) -> None:
    def logged(x: Any) -> Any:
        log.info("loss %.4f after %03d of %5s, 100%% %+g", x.mean(), 7, "ab", x.sum().item())
        log.info("%(rate)5.2f %(loss).3e %(name)r", {"rate": 0.5, "loss": x.max(), "name": "a"})
        log.info("rows %02d, 50%%", len(x))
        return x * 2

    with force_plans(), caplog.at_level(logging.INFO):
        cf.fuse(logged)(X)
    text = "<traced array, shape (), float64>"
    messages = [f"loss {text} after 7 of    ab, 100% {text}", f"0.5 {text} 'a'", "rows 02, 50%"]
    assert [record.getMessage() for record in caplog.records] == 2 * messages


@pytest.mark.parametrize(
    ("message", "arguments"), [("%d of %d", 1), ("%.*f", 2), ("%(loss)s of %(rows)d", 0), ("%q", 1), ("loss", 1)]
)
def test_messages_that_do_not_fit_are_reported_by_handlers(
    message: str, arguments: int, capsys: pytest.CaptureFixture[str]
) -> None:
    own = logging.Logger("own")  # without pytest's handlers, which raise
    own.addHandler(logging.StreamHandler())

    def logged(x: Any) -> Any:
        own.warning(message, *[[{"loss": x.sum()}], [x.sum()], [2, x.sum()]][arguments])
        return x * 2

    with force_plans():
        np.testing.assert_array_equal(cf.fuse(logged)(X), X * 2)
    assert "--- Logging error ---" in capsys.readouterr().err


def test_levels_that_change_are_noticed() -> None:
    own, child = logging.getLogger("own"), logging.getLogger("own.child")

    def checked(x: Any, logger: Any = own) -> Any:
        return x * 2 if child.isEnabledFor(logging.DEBUG) or logger.isEnabledFor(logging.ERROR) else x

    class Checked:
        def __init__(self) -> None:
            self.log = child

        def __call__(self, x: Any) -> Any:
            return x + self.log.getEffectiveLevel()

    several = frozenset({child})
    functions = [
        checked,
        Checked(),
        lambda x: x - child.level,
        lambda x: x * sum(each.isEnabledFor(logging.INFO) for each in several),
    ]
    for function in functions:
        fused = cf.fuse(function)

        def check(function: Any = function, fused: Any = fused) -> None:
            np.testing.assert_array_equal(fused(X), function(X))

        with force_plans():
            for level in (logging.INFO, logging.DEBUG, logging.CRITICAL, logging.NOTSET, logging.DEBUG):
                own.setLevel(level)
                child.setLevel(level)
                check()
                child.setLevel(logging.NOTSET)
                check()
            child.disabled = True
            check()
            child.disabled = False
            check()
            logging.disable(logging.INFO)
            try:
                check()
            finally:
                logging.disable(logging.NOTSET)
    own.setLevel(logging.NOTSET)


def test_a_logger_among_arguments_and_another_one() -> None:
    def called(x: Any, logger: Any) -> Any:
        logger.info("called")
        return x * len(logger.name)

    fused = cf.fuse(called)
    with force_plans():
        for name in ("a", "abc", "a"):
            np.testing.assert_array_equal(fused(X, logging.getLogger(name)), X * len(name))
    assert len(fused.plans) == 2
