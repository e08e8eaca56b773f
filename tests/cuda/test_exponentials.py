"""Sums of exponentials: what they are relative to, where the maximum of a row rises, is huge, or is not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forced_rows import force, program_of
from support import HOST, dtype_of

import cupyfuse as cf
from cupyfuse.cuda.config import Config
from cupyfuse.cuda.sources import emit_kernels

CONFIGURATIONS = [
    Config("row_lanes", 64, 3, 4, 32),
    Config("row_lanes", 64, 3, 4, 16, packed=True),
    Config("row_block", 32, 4, 4),
    Config("row_block", 64, 2, 4, packed=True),
    Config("row_stream", 64, 2, 4),
    Config("row_shared", 32, 2, 2, cluster=2, packs=2),
]
COLS = 251


def rows() -> np.ndarray:
    """Rows of which each is a case: magnitudes up to the largest, maxima that rise far or little, or come last."""
    rng = np.random.default_rng(5)
    position, spread = np.arange(COLS), rng.standard_normal(COLS) * 3
    found = [spread, spread - 1000, spread * 1e3, spread * 1e8, spread * 1e30]
    found += [np.full(COLS, value) for value in (0.0, -0.0, 88.0, -3.3e38, 3.3e38, 1.19e9, -1.19e9, 1.21e9, -1.21e9)]
    found += [position * step + start for step in (0.1, 2.0, -2.0, 40.0) for start in (-1e4, 0.0, 3e8)]
    found += [np.where(position < 9, -3.3e38, spread)]  # masked by the least number
    found += [np.where(position == place, 2e9, spread) for place in (0, COLS - 1)]  # two ways to scale in a row
    found += [np.where(position < 200, 1.19e9, 1.25e9)]
    found += [np.where(position < COLS // 2, -np.inf, spread - 1000), np.where(position > 3, -np.inf, -3.3e38)]
    found += [np.where(position == 100, -2e9, -3.3e38), np.where(position < 200, -2e9, -1e9 - 64.0 * position)]
    return np.array(found, "float32")


def shares(x: np.ndarray) -> np.ndarray:
    wide = x.astype("float64")
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def normalizers(x: np.ndarray) -> np.ndarray:
    wide = x.astype("float64")
    top = wide.max(axis=1)
    return top + np.log(np.exp(wide - top[:, None]).sum(axis=1))


def run(function: Any, x: np.ndarray) -> np.ndarray:
    with HOST.active():
        return HOST.host(cf.fuse(function)(HOST.xp.asarray(x)))


@pytest.mark.rotates
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: f"{c.template}{'-packed' * c.packed}")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_sums_of_exponentials_of_any_magnitude(monkeypatch: pytest.MonkeyPatch, config: Config, dtype: str) -> None:
    """The rounded base of the exponentials cancels, and where its rounding would not be small, there is none."""
    force(monkeypatch, config, COLS)
    x = rows()
    if dtype == "float16":
        x = x[np.abs(np.where(np.isfinite(x), x, 0)).max(axis=1) < 6e4]
    unit = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    given = x.astype(dtype_of(dtype))
    exact = given.astype("float32")
    found = np.asarray(run(lambda y: cf.softmax(y, axis=1), given)).astype("float64")
    wanted = shares(exact)
    # An exponential of d has a relative error that grows with d; below the normal numbers all is 0.
    distance = np.abs(exact.astype("float64") - exact.max(axis=1, keepdims=True).astype("float64"))
    bound = wanted * (unit + 2.0**-22 * (4 + np.minimum(distance, 100))) + (
        2.0**-24 if dtype == "float16" else 2.0**-125
    )
    assert np.all(np.abs(found - wanted) <= bound)
    total = np.asarray(run(lambda y: cf.logsumexp(y, axis=1), given)).astype("float64")
    largest = np.abs(normalizers(exact))
    assert np.all(np.abs(total - normalizers(exact)) <= unit * (1 + largest) + 2.0**-20)


def entropy(y: Any) -> Any:
    logarithms = cf.log_softmax(y, axis=1)
    return -(np.exp(logarithms) * logarithms).sum(axis=1)


@pytest.mark.rotates
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: f"{c.template}{'-packed' * c.packed}")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entropies_of_any_magnitude(monkeypatch: pytest.MonkeyPatch, config: Config, dtype: str) -> None:
    """Distances are counted in the exponents themselves, and move with their base."""
    force(monkeypatch, replace(config, vec=min(config.vec, 2)) if dtype == "float64" else config, COLS)
    x = rows()
    x = x[np.isfinite(x).all(axis=1)].astype(dtype)
    plan = cf.fuse(entropy).plan(cf.spec(x.shape, dtype))
    assert "ExpDistances" in plan.source()
    found = np.asarray(run(entropy, x)).astype("float64")
    share = shares(x)
    distance = x.max(axis=1, keepdims=True).astype("float64") - x
    sizes = np.where(share > 0, np.minimum(distance, 1e3), 0)
    wanted = (share * sizes).sum(axis=1) + np.log(np.exp(-np.minimum(distance, 1e3)).sum(axis=1))
    weight = (share * (1 + sizes) ** 2).sum(axis=1)
    assert np.all(np.abs(found - wanted) <= 16 * np.finfo(dtype).eps * (weight + wanted))


@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: f"{c.template}{'-packed' * c.packed}")
def test_rows_without_a_finite_maximum(monkeypatch: pytest.MonkeyPatch, config: Config) -> None:
    force(monkeypatch, config, COLS)
    x = np.zeros((4, COLS), "float16")
    x[0] = -np.inf
    x[1, 17] = np.inf
    x[2, 250] = np.nan
    found = run(lambda y: cf.softmax(y, axis=1), x)
    assert np.isnan(found[:3]).all()
    np.testing.assert_allclose(found[3], 1 / COLS, rtol=2.0**-11)


def reduced_distances(y: Any, maximum: Any) -> Any:
    distance = y - y.max(axis=1, keepdims=True)
    powers = np.exp(distance)
    return powers / powers.sum(axis=1, keepdims=True), distance.min(axis=1)


def reduced_operands(y: Any, maximum: Any) -> Any:
    powers = np.exp(y - y.max(axis=1, keepdims=True))
    total = powers.sum(axis=1, keepdims=True)
    return powers / total, maximum(y, total).sum(axis=1)


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: f"{c.template}{'-packed' * c.packed}")
@pytest.mark.parametrize("reductions", [reduced_distances, reduced_operands])
def test_what_later_stages_reduce_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, reductions: Any, config: Config, dtype: str
) -> None:
    """Lanes keep exponentials in the place of their operands, but where a later stage reads those or the distances."""
    force(monkeypatch, config, COLS)
    x = np.random.default_rng(3).standard_normal((5, COLS)).astype(dtype)
    with HOST.active():
        found = HOST.host(cf.fuse(lambda y: reductions(y, np.maximum))(HOST.xp.asarray(x)))
    for one, wanted in zip(found, reductions(x.astype("float64"), np.maximum), strict=True):
        np.testing.assert_allclose(one.astype("float64"), wanted, rtol=16 * np.finfo(dtype).eps, atol=2.0**-24)


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=lambda c: f"{c.template}{'-packed' * c.packed}")
def test_rows_are_divided_by_values_without_a_reciprocal(
    monkeypatch: pytest.MonkeyPatch, config: Config, dtype: str
) -> None:
    """Which is checked once a row: zeros, infinities, NaN, and numbers so small or large that it would lose digits."""
    force(monkeypatch, config, COLS)
    divisors = np.array([0, -0.0, np.inf, -np.inf, np.nan, 2e-31, -2e-31, 1e-37, 3e31, -1e38, 0.75, 1e30], "float32")
    x = np.random.default_rng(4).uniform(0.1, 1, (len(divisors), COLS)).astype("float32")
    x *= np.where(np.isfinite(divisors) & (divisors != 0), np.abs(divisors), 1)[:, None]
    x[:, 0] = 0
    given, by = x.astype(dtype_of(dtype)), divisors.astype(dtype_of(dtype))[:, None]
    with HOST.active():
        function = cf.fuse(lambda y, d: ((y / d), (y / d).max(axis=1)))
        found, largest = HOST.host(function(HOST.xp.asarray(given), HOST.xp.asarray(by)))
    with np.errstate(all="ignore"):
        wanted = given.astype("float64") / by.astype("float64")
    tolerance = {"float32": 2.0**-22, "bfloat16": 2.0**-8}[dtype]
    np.testing.assert_allclose(np.asarray(found).astype("float64"), wanted, rtol=tolerance)
    np.testing.assert_allclose(np.asarray(largest).astype("float64"), wanted.max(axis=1), rtol=tolerance)


def test_shares_of_16_bits_take_one_multiply_add_and_one_product() -> None:
    """Their exponentials need no exact maximum; those of 32 bits, or that something else reads, have it."""

    def text(function: Any, dtype: str) -> str:
        program = program_of(function, cf.spec((4096, 4096), dtype))
        (kernel,) = emit_kernels(program, Config("row_block", 128, 4, 8, packed=True))
        return kernel.source.split("struct Program {")[1]

    def softmax(y: Any) -> Any:
        return cf.softmax(y, axis=1)

    def with_powers(y: Any) -> Any:
        powers = np.exp(y - y.max(axis=1, keepdims=True))
        return powers, powers / powers.sum(axis=1, keepdims=True)

    assert "shifted_exp(" in text(softmax, "bfloat16")
    assert "shifted_exp(" not in text(softmax, "float32")
    assert "shifted_exp(" not in text(with_powers, "bfloat16")


def powers_of(y: Any) -> tuple[Any, Any, Any]:
    """The distances from the maximum, their exponentials, and the shares of those."""
    distances = y - y.max(axis=1, keepdims=True)
    powers = np.exp(distances)
    return distances, powers, powers / powers.sum(axis=1, keepdims=True)


def read_for_the_first_time(y: Any) -> Any:
    return powers_of(y)[2] * np.tanh(y)


def read_in_two_later_stages(y: Any) -> Any:
    """Both reads need nothing but the operand, and could be computed before the exponentials are."""
    _, powers, parts = powers_of(y)
    return powers * np.tanh(y) - (parts * np.cos(y)).sum(axis=1, keepdims=True)


def distances_are_a_result(y: Any) -> Any:
    distances, _, parts = powers_of(y)
    return distances, parts


def distances_are_reduced(y: Any) -> Any:
    distances, _, parts = powers_of(y)
    return parts, distances.min(axis=1), distances.argmin(axis=1)


@pytest.mark.parametrize(
    "function",
    [
        read_for_the_first_time,
        read_in_two_later_stages,
        distances_are_a_result,
        distances_are_reduced,
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_terms_that_lanes_hold_leave_what_later_stages_read(
    monkeypatch: pytest.MonkeyPatch, function: Any, dtype: str
) -> None:
    force(monkeypatch, CONFIGURATIONS[0], COLS)
    check_against_float64(function, dtype)


def test_distances_that_shares_leave_out_are_there_for_later_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that hold values have those of the exact forms, too, where they compute shares in their place."""

    def less_squares(y: Any) -> Any:
        distances, _, parts = powers_of(y)
        return parts, np.tanh(distances) - (parts * parts).sum(axis=1, keepdims=True)

    force(monkeypatch, Config("row_block", 32, 4, 4), COLS)
    check_against_float64(less_squares, "bfloat16")


def check_against_float64(function: Any, dtype: str) -> None:
    given = (np.random.default_rng(8).standard_normal((5, COLS)) * 3).astype(dtype_of(dtype))
    found, wanted = run(function, given), function(given.astype("float64"))
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for got, want in pairs:
        np.testing.assert_allclose(
            np.asarray(got).astype("float64"), want, rtol=2.0**-6, atol=2.0**-6 if dtype == "bfloat16" else 1e-6
        )
