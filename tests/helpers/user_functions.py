"""Functions as users write them: classifiers, losses, mixtures, transport, attention.

`USERS` holds those of `user_programs`, `user_loops` and `user_classes` too, once these are imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

SIZES = 12, 10, 6  # rows, features, classes
USERS: dict[str, Callable[..., Any]] = {}


def user(function: Callable[..., Any]) -> Callable[..., Any]:
    assert function.__name__ not in USERS
    USERS[function.__name__] = function
    return function


# Arguments by name: x features, w and b a layer, v a vector, y a second batch, p probabilities, t targets, z logits, r
# positive numbers, k labels, ids rows, m a mask.
def arguments(function: Callable[..., Any], dtype: np.dtype[Any], sizes: tuple[int, int, int] = SIZES) -> list[Any]:
    """Draw a function's arguments by the names of its parameters: of so many rows, features and classes."""
    rows, width, classes = sizes
    rng = np.random.default_rng(len(function.__name__))
    probabilities = rng.random((rows, classes)) + 0.1
    made = {
        "x": rng.standard_normal((rows, width)),
        "y": rng.standard_normal((rows, width)),
        "w": rng.standard_normal((classes, width)) / 3,
        "w2": rng.standard_normal((width, classes)) / 3,
        "b": rng.standard_normal(classes),
        "v": rng.standard_normal(width),
        "g": rng.random(width) + 0.5,
        "z": rng.standard_normal((rows, classes)) * 2,
        "p": probabilities / probabilities.sum(axis=1, keepdims=True),
        "t": np.eye(classes)[rng.integers(0, classes, rows)],
        "s": rng.standard_normal((width, width)) / 3 + 2 * np.eye(width),
        "r": rng.random(rows) + 0.1,
    }
    exact = {
        "image": rng.integers(0, 256, (rows, width)).astype(np.uint8),
        "k": rng.integers(0, classes, rows),
        "ids": rng.integers(0, rows, (rows, 3)),
        "m": rng.random((rows, width)) > 0.4,
    }
    names = function.__code__.co_varnames[: function.__code__.co_argcount - len(function.__defaults__ or ())]
    return [exact[name] if name in exact else made[name].astype(dtype) for name in names]


# Classifiers --------------------------------------------------------------------------------------------------------


@user
def softmax_regression(x: Any, w: Any, b: Any) -> Any:
    scores = x @ w.T + b
    scores -= scores.max(axis=1, keepdims=True)
    e = np.exp(scores)
    return e / e.sum(axis=1, keepdims=True)


@user
def predicted_class(x: Any, w: Any, b: Any) -> Any:
    return np.argmax(x @ w.T + b, axis=1)


@user
def confidence(x: Any, w: Any, b: Any) -> Any:
    z = x @ w.T + b
    p = np.exp(z - np.logaddexp.reduce(z, axis=1)[:, None])
    return p.max(axis=1), p.argmax(axis=1)


@user
def margin(z: Any) -> Any:
    ranked = np.sort(z, axis=1)
    return np.diff(ranked, axis=1).max(axis=1)


@user
def nearest_centroid(x: Any, w: Any) -> Any:
    d = np.sum(x**2, axis=1)[:, None] - 2 * np.dot(x, w.T) + np.sum(w**2, axis=1)
    return np.argmin(d, axis=1), np.sqrt(np.maximum(d.min(axis=1), 0))


@user
def perceptron_scores(x: Any, v: Any) -> Any:
    return np.where(np.dot(x, v) >= 0, 1, -1)


@user
def two_layers(x: Any, s: Any, w: Any, b: Any) -> Any:
    hidden = np.maximum(0, np.asarray(x).dot(s))
    return np.inner(hidden, w) + b


@user
def calibrated(z: Any) -> Any:
    temperature = np.std(z) + 1.0
    scaled = z / temperature
    return np.exp(scaled - np.logaddexp.reduce(scaled, axis=-1, keepdims=True))


@user
def accuracy(z: Any, t: Any) -> Any:
    return np.mean(np.argmax(z, axis=1) == np.argmax(t, axis=1))


@user
def gaussian_naive_bayes(x: Any, w: Any, b: Any) -> Any:
    log_likelihood = -0.5 * (np.sum(x**2, axis=1, keepdims=True) - 2 * x @ w.T + np.sum(w * w, axis=1)[np.newaxis, :])
    joint = log_likelihood + b
    return joint - np.logaddexp.reduce(joint, axis=1)[:, np.newaxis]


# Losses -------------------------------------------------------------------------------------------------------------


@user
def cross_entropy(z: Any, t: Any) -> Any:
    log_p = z - np.logaddexp.reduce(z, axis=1, keepdims=True)
    return -np.einsum("ij,ij->i", t, log_p).mean()


@user
def focal_loss(z: Any, t: Any) -> Any:
    p = 1 / (1 + np.exp(-z))
    pt = np.where(t == 1, p, 1 - p)
    return np.mean(-((1 - pt) ** 2) * np.log(np.clip(pt, 1e-7, 1)))


@user
def hinge(z: Any, t: Any) -> Any:
    signs = 2 * t - 1
    return np.sum(np.maximum(0, 1 - signs * z), axis=1)


@user
def huber(x: Any, y: Any) -> Any:
    d = np.abs(x - y)
    return np.average(np.where(d < 1, 0.5 * d * d, d - 0.5), axis=1)


@user
def quantile_loss(x: Any, y: Any) -> Any:
    error = y - x
    return np.maximum(0.9 * error, (0.9 - 1) * error).mean(axis=0)


@user
def kl_divergence(p: Any, z: Any) -> Any:
    log_q = z - np.logaddexp.reduce(z, axis=1)[:, None]
    return np.sum(p * (np.log(p) - log_q), axis=1)


@user
def jensen_shannon(p: Any, t: Any) -> Any:
    q = (t + 0.05) / np.sum(t + 0.05, axis=1, keepdims=True)
    m = 0.5 * (p + q)
    return 0.5 * (p * np.log(p / m)).sum(1) + 0.5 * (q * np.log(q / m)).sum(1)


@user
def label_smoothing(z: Any, t: Any) -> Any:
    n = z.shape[1]
    smooth = t * 0.9 + 0.1 / n
    shifted = z - np.amax(z, axis=1, keepdims=True)
    return -(smooth * (shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))).sum(axis=1)


@user
def brier(p: Any, t: Any) -> Any:
    return np.square(p - t).sum(axis=-1).mean()


@user
def masked_mse(x: Any, y: Any) -> Any:
    valid = (x > -1) & ~np.isclose(x, y)
    return np.sum(np.square(x - y), axis=1, where=valid) / np.maximum(np.count_nonzero(valid, axis=1), 1)


@user
def nan_mse(x: Any, y: Any) -> Any:
    holes = np.where(x > 1, np.nan, x)
    return np.nanmean((holes - y) ** 2, axis=1), np.nansum(holes, axis=0)


@user
def contrastive(x: Any, y: Any) -> Any:
    a = x / np.linalg.norm(x, axis=1, keepdims=True)
    c = y / np.linalg.norm(y, axis=1, keepdims=True)
    logits = a @ c.T / 0.1
    return np.mean(np.logaddexp.reduce(logits, axis=1) - np.einsum("ij,ij->i", a, c) / 0.1)


# Mixtures and probability -------------------------------------------------------------------------------------------


@user
def responsibilities(x: Any, w: Any, b: Any) -> Any:
    log_p = -0.5 * (np.sum(np.square(x), 1)[:, None] + np.sum(np.square(w), 1) - 2 * np.matmul(x, w.T)) + b
    norm = np.logaddexp.reduce(log_p, axis=1, keepdims=True)
    return np.exp(log_p - norm), norm.squeeze(axis=1).sum()


@user
def mixture_means(x: Any, p: Any) -> Any:
    weight = p.sum(axis=0)
    return np.einsum("nk,nd->kd", p, x) / weight[:, None]


@user
def mixture_step(x: Any, p: Any) -> Any:
    counts = p.sum(axis=0) + 1e-9
    means = p.T @ x / counts[:, None]
    squares = p.T @ (x * x) / counts[:, None]
    return counts / len(x), means, squares - means**2


@user
def mahalanobis(x: Any, v: Any, s: Any) -> Any:
    centred = x - v
    precision = np.linalg.inv(s @ s.T)
    return np.sqrt(np.einsum("ij,ij->i", centred @ precision, centred))


@user
def gaussian_log_density(x: Any, s: Any) -> Any:
    covariance = s @ s.T
    _, logdet = np.linalg.slogdet(covariance)
    solved = np.linalg.solve(covariance, x.T)
    return -0.5 * ((x * solved.T).sum(axis=1) + logdet + x.shape[1] * np.log(2 * np.pi))


@user
def entropy(p: Any) -> Any:
    return -np.sum(np.where(p > 0, p * np.log(p), 0.0), axis=-1)


@user
def importance_weights(z: Any) -> Any:
    log_w = z[..., :].sum(axis=1)
    weights = np.exp(log_w - np.logaddexp.reduce(log_w))
    return weights, 1.0 / np.sum(weights**2)


@user
def cumulative_distribution(p: Any) -> Any:
    return np.cumsum(p, axis=1)


@user
def ranked_probability_score(p: Any, t: Any) -> Any:
    return np.sum((np.cumsum(p, axis=1) - np.cumsum(t, axis=1)) ** 2, axis=1)


# Transport ----------------------------------------------------------------------------------------------------------


@user
def sinkhorn(x: Any, y: Any) -> Any:
    cost = (x**2).sum(1)[:, None] + (y**2).sum(1)[None, :] - 2 * x @ y.T
    k = np.exp(-cost / cost.max())
    u = np.ones_like(x.sum(axis=1)) / x.shape[0]
    v = np.ones_like(u)
    for _ in range(3):
        v = 1.0 / (x.shape[0] * (k.T @ u))
        u = 1.0 / (x.shape[0] * (k @ v))
    return u[:, None] * k * v[None, :]


@user
def log_sinkhorn(z: Any) -> Any:
    log_p = z
    for _ in range(3):
        log_p = log_p - np.logaddexp.reduce(log_p, axis=1, keepdims=True)
        log_p = log_p - np.logaddexp.reduce(log_p, axis=0, keepdims=True)
    return np.exp(log_p)


@user
def wasserstein_1d(x: Any, y: Any) -> Any:
    return np.abs(np.sort(x, axis=1) - np.sort(y, axis=1)).mean(axis=1)


@user
def energy_distance(x: Any, y: Any) -> Any:
    def distances(a: Any, b: Any) -> Any:
        return np.sqrt(np.maximum((a * a).sum(1)[:, None] + (b * b).sum(1) - 2 * a @ b.T, 1e-6))

    return 2 * distances(x, y).mean() - distances(x, x).mean() - distances(y, y).mean()


# Attention ----------------------------------------------------------------------------------------------------------


@user
def attention(x: Any, y: Any) -> Any:
    scores = x @ y.T / np.sqrt(x.shape[-1])
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (scores / scores.sum(axis=-1, keepdims=True)) @ y


@user
def causal_attention(x: Any, y: Any) -> Any:
    scores = np.einsum("qd,kd->qk", x, y) * x.shape[1] ** -0.5
    mask = np.tril(np.ones_like(scores)) > 0
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - np.max(scores, axis=1, keepdims=True))
    return weights / np.sum(weights, axis=1, keepdims=True) @ x


@user
def linear_attention(x: Any, y: Any) -> Any:
    q, k = np.where(x > 0, x + 1, np.exp(x)), np.where(y > 0, y + 1, np.exp(y))
    return q @ (k.T @ y) / (q @ k.sum(axis=0))[:, None]


@user
def positional_attention(x: Any, y: Any) -> Any:
    scores = np.tensordot(x, y, axes=([1], [1]))
    scores = scores - 0.1 * np.abs(np.cumsum(np.ones_like(scores), axis=1) - np.cumsum(np.ones_like(scores), axis=0))
    return np.exp(scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)) @ y


@user
def cosine_attention(x: Any, y: Any) -> Any:
    a = x / np.linalg.norm(x, axis=-1, keepdims=True)
    c = y / np.linalg.norm(y, axis=-1, keepdims=True)
    s = np.tanh(a @ c.T)
    return s @ y / np.abs(s).sum(axis=1, keepdims=True)


@user
def rotary(x: Any, y: Any) -> Any:
    turned = np.concatenate([-y, x], axis=1)
    whole = np.concatenate((x, y), axis=-1)
    angle = np.cumsum(np.ones_like(whole), axis=0) / 100
    return whole * np.cos(angle) + turned * np.sin(angle)
