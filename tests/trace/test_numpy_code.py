"""NumPy functions as people write them, decorated and nothing else: the same results, in few launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import Engine, assert_close, normal, unit

import cupyfuse as cf


def layer_norm(x: Any, gamma: Any, beta: Any, eps: float = 1e-5) -> Any:
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps) * gamma + beta


def rms_norm(x: Any, gamma: Any, beta: Any) -> Any:
    return x * gamma / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + 1e-6) + beta * 0


def log_softmax(x: Any, gamma: Any, beta: Any) -> Any:
    shifted = x - np.max(x, axis=1, keepdims=True)
    return shifted - np.log(np.sum(np.exp(shifted), axis=1, keepdims=True))


def cross_entropy(x: Any, gamma: Any, beta: Any) -> Any:
    """Against a soft target made of the other arguments."""
    target = np.exp(gamma) / np.exp(gamma).sum()
    log_p = x - x.max(axis=1)[:, None]
    log_p -= np.log(np.exp(log_p).sum(axis=1))[:, None]
    return -(target * log_p).sum(axis=1).mean()


def entropy(x: Any, gamma: Any, beta: Any) -> Any:
    p = np.exp(x - x.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return -(p * np.log(p)).sum(axis=1)


def cosine_similarity(x: Any, gamma: Any, beta: Any) -> Any:
    return (x @ gamma) / (np.linalg.norm(x, axis=1) * np.linalg.norm(gamma))


def unit_rows(x: Any, gamma: Any, beta: Any) -> Any:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)


def squared_distances(x: Any, gamma: Any, beta: Any) -> Any:
    squares = (x * x).sum(axis=1)
    return np.maximum(squares[:, None] - 2 * (x @ x.T) + squares[None, :], 0)


def standardise(x: Any, gamma: Any, beta: Any) -> Any:
    return (x - x.mean(axis=0)) / x.std(axis=0, ddof=1)


def min_max(x: Any, gamma: Any, beta: Any) -> Any:
    low, high = x.min(axis=0), x.max(axis=0)
    return (x - low) / (high - low)


def covariance(x: Any, gamma: Any, beta: Any) -> Any:
    centred = x - x.mean(axis=0, keepdims=True)
    return centred.T @ centred / (len(x) - 1)


def huber(x: Any, gamma: Any, beta: Any, delta: float = 1.0) -> Any:
    error = np.abs(x - beta)
    return np.where(error <= delta, 0.5 * error**2, delta * (error - 0.5 * delta)).mean()


def winsorise(x: Any, gamma: Any, beta: Any) -> Any:
    mean, std = x.mean(axis=1, keepdims=True), x.std(axis=1, keepdims=True)
    return np.clip(x, mean - 2 * std, mean + 2 * std)


def gated(x: Any, gamma: Any, beta: Any) -> Any:
    gate = 1 / (1 + np.exp(-(x * gamma + beta)))
    return np.tanh(x) * gate + x * (1 - gate)


def masked_mean(x: Any, gamma: Any, beta: Any) -> Any:
    mask = (x > -1) & ~np.isnan(x)
    return np.where(mask, x, 0).sum(axis=1) / np.maximum(mask.sum(axis=1), 1)


def gaussian_log_density(x: Any, gamma: Any, beta: Any) -> Any:
    z = (x - beta) / np.exp(gamma)
    return (-0.5 * z**2 - gamma - 0.5 * np.log(2 * np.pi)).sum(axis=1)


def attention(x: Any, gamma: Any, beta: Any) -> Any:
    scores = (x * gamma) @ (x + beta).T / np.sqrt(x.shape[1])
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True)) @ x


def statistics(x: Any, gamma: Any, beta: Any) -> Any:
    z = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
    return {"skew": (z**3).mean(axis=1), "kurtosis": (z**4).mean(axis=1) - 3, "range": np.max(x, 1) - np.min(x, 1)}


def power_iteration(x: Any, gamma: Any, beta: Any) -> Any:
    v = gamma
    for _ in range(4):
        v = x.T @ (x @ v)
        v = v / np.linalg.norm(v)
    return v


FUNCTIONS: dict[Callable[..., Any], int] = {  # and the launches of each
    layer_norm: 1,
    rms_norm: 1,
    log_softmax: 1,
    cross_entropy: 3,
    entropy: 1,
    cosine_similarity: 2,
    unit_rows: 1,
    squared_distances: 3,
    standardise: 2,
    min_max: 2,
    covariance: 4,
    huber: 2,
    winsorise: 1,
    gated: 1,
    masked_mean: 1,
    gaussian_log_density: 1,
    attention: 4,
    statistics: 1,
    power_iteration: 12,
}


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("shape", [(33, 20), (2, 7), (300, 64)])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_existing_functions(
    engine: Engine, function: Callable[..., Any], shape: tuple[int, int], rng: np.random.Generator
) -> None:
    arguments = [normal(rng, shape), normal(rng, shape[1:]), normal(rng, shape[1:])]
    exact = function(*[a.astype(np.float64) for a in arguments])
    unfused = function(*[a.copy() for a in arguments])
    fused = engine.host(cf.fuse(function)(*engine.arrays(arguments)))
    if not isinstance(exact, dict):
        exact, unfused, fused = {"result": exact}, {"result": unfused}, {"result": fused}
    for name, expected in exact.items():
        assert np.asarray(fused[name]).dtype == np.asarray(unfused[name]).dtype
        # No further from float64 than NumPy's own float32, give or take the order of the sums.
        own = np.abs(unfused[name] - expected).max()
        assert_close(fused[name], expected, 4 * own + 8 * unit("float32") * (1 + np.abs(expected)), name)


@pytest.mark.parametrize(("function", "launches"), FUNCTIONS.items(), ids=lambda v: getattr(v, "__name__", None))
def test_launches(function: Callable[..., Any], launches: int) -> None:
    plan = cf.fuse(function).plan(cf.spec((300, 64)), cf.spec(64), cf.spec(64))
    assert plan.launches <= launches, str(plan)
