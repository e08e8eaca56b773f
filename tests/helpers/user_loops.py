"""Functions as users write them: gathers, arrays that are filled, loops, classes, SciPy inside, the array API."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy import array, exp, zeros
from numpy.lib.stride_tricks import sliding_window_view
from scipy import linalg, ndimage, signal, special, stats
from scipy.spatial.distance import cdist
from scipy.special import entr, expit, gammaln, log_softmax, logsumexp, softmax, xlogy
from scipy.stats import norm
from user_functions import user

# Gathers and scatters -----------------------------------------------------------------------------------------------


@user
def embedding_bag(x: Any, ids: Any) -> Any:
    keep = (ids != 0)[..., None]
    return (x[ids] * keep).sum(axis=1) / np.maximum(keep.sum(axis=1), 1)


@user
def embedding_gradient(y: Any, ids: Any) -> Any:
    grad = np.zeros_like(y)
    np.add.at(grad, ids[:, 0], y)
    return grad


@user
def skip_gram(x: Any, ids: Any) -> Any:
    centre, context, negative = x[ids[:, 0]], x[ids[:, 1]], x[ids]
    score = np.log(expit((centre * context).sum(axis=1)))
    return -(score + np.log(expit(-np.einsum("bd,bkd->bk", centre, negative))).sum(axis=1)).mean()


@user
def hinge_of_labels(z: Any, k: Any) -> Any:
    margins = np.maximum(0, z - z[np.arange(len(z)), k][:, np.newaxis] + 1.0)
    margins[np.arange(len(z)), k] = 0
    return margins.sum() / z.shape[0]


@user
def cross_entropy_gradient(x: Any, w: Any, k: Any) -> Any:
    p = softmax(x @ w.T, axis=1)
    p[range(len(k)), k] -= 1
    return p.T @ x / len(k)


@user
def smoothed_labels(z: Any, k: Any, eps: float = 0.1) -> Any:
    n, c = z.shape
    target = np.full((n, c), eps / (c - 1))
    target[np.arange(n), k] = 1 - eps
    return -(target * log_softmax(z, axis=-1)).sum(-1).mean()


@user
def one_hot_brier(p: Any, k: Any) -> Any:
    return ((p - np.eye(p.shape[1])[k]) ** 2).sum(axis=1).mean()


@user
def message_passing(x: Any, s: Any, ids: Any) -> Any:
    out = np.zeros_like(x)
    np.add.at(out, ids[:, 1], np.tanh(x[ids[:, 0]] @ s))
    return out / np.maximum(np.bincount(ids[:, 1], minlength=len(x)), 1)[:, None]


@user
def sparse_gates(x: Any, w: Any) -> Any:
    logits = x @ w.T
    chosen = np.argsort(-logits, axis=-1)[:, :2]
    gates = softmax(np.take_along_axis(logits, chosen, axis=-1), axis=-1)
    out = np.zeros_like(logits)
    np.put_along_axis(out, chosen, gates, axis=-1)
    return out


@user
def vector_quantised(x: Any, w: Any) -> Any:
    nearest = (np.square(x).sum(1, keepdims=True) - 2 * x @ w.T + np.square(w).sum(1)).argmin(1)
    return x + (w[nearest] - x), nearest, np.bincount(nearest, minlength=len(w))


@user
def supervised_contrastive(x: Any, k: Any) -> Any:
    unit_rows = x / np.linalg.norm(x, axis=1, keepdims=True)
    similar = unit_rows @ unit_rows.T / 0.5
    np.fill_diagonal(similar, -1e9)
    same = (k[:, None] == k) & ~np.eye(len(x), dtype=bool)
    logp = similar - logsumexp(similar, axis=1, keepdims=True)
    return -(logp * same).sum(1) / np.maximum(same.sum(1), 1)


@user
def confusion_matrix(z: Any, k: Any) -> Any:
    matrix = np.zeros((z.shape[1], z.shape[1]), dtype=int)
    np.add.at(matrix, (k, z.argmax(1)), 1)
    return matrix


@user
def last_tokens(x: Any, ids: Any) -> Any:
    return x.reshape(3, 4, 10)[np.arange(3), ids[:3, 0] % 4], x[:, [0, -1]], x[ids[0, 0]]


# Arrays that are filled ---------------------------------------------------------------------------------------------


@user
def convolution_by_taps(x: Any, s: Any) -> Any:
    out = np.zeros((10, 8))
    for i in range(3):
        for j in range(3):
            out += x[i : i + 10, j : j + 8] * s[i, j]
    return out


@user
def advantage_estimates(r: Any, gamma: float = 0.9) -> Any:
    out, running = np.zeros(len(r)), 0.0
    for t in reversed(range(len(r))):
        running = r[t] + gamma * running
        out[t] = running
    return (out - out.mean()) / (out.std() + 1e-8)


@user
def time_warping(r: Any, v: Any) -> Any:
    cost = np.full((5, 5), np.inf)
    cost[0, 0] = 0
    for i in range(1, 5):
        for j in range(1, 5):
            cost[i, j] = (r[i] - v[j]) ** 2 + min(cost[i - 1, j], cost[i, j - 1], cost[i - 1, j - 1])
    return cost[-1, -1]


@user
def cholesky_by_hand(s: Any) -> Any:
    a = s @ s.T
    low = zeros((4, 4))
    for i in range(4):
        for j in range(i + 1):
            rest = a[i, j] - low[i, :j] @ low[j, :j]
            low[i, j] = np.sqrt(rest) if i == j else rest / low[j, j]
    return low


@user
def hidden_markov(p: Any, k: Any) -> Any:
    move = p[:6] / p[:6].sum(axis=1, keepdims=True)
    alpha = np.zeros((5, 6))
    alpha[0] = move[0] * p[:6, k[0]]
    for t in range(1, 5):
        alpha[t] = (alpha[t - 1] @ move) * p[:6, k[t]]
    return alpha / alpha.sum(axis=1, keepdims=True)


@user
def flash_attention(x: Any, y: Any, z: Any) -> Any:
    out, top, total = np.zeros((12, 6)), np.full(12, -np.inf), np.zeros(12)
    for block in range(0, 12, 4):
        scores = x @ y[block : block + 4].T / math.sqrt(10)
        new = np.maximum(top, scores.max(axis=1))
        p, scale = exp(scores - new[:, None]), exp(top - new)
        total = total * scale + p.sum(axis=1)
        out = out * scale[:, None] + p @ z[block : block + 4]
        top = new
    return out / total[:, None]


@user
def rotary_filled(x: Any) -> Any:
    angle = np.outer(np.arange(12), 100.0 ** (-np.arange(0, 10, 2) / 10))
    out = np.empty_like(x)
    out[..., ::2] = x[..., ::2] * np.cos(angle) - x[..., 1::2] * np.sin(angle)
    out[..., 1::2] = x[..., ::2] * np.sin(angle) + x[..., 1::2] * np.cos(angle)
    return out


@user
def four_dimensional_attention(x: Any, s: Any) -> Any:
    q, k, v = ((x @ w).reshape(2, 6, 2, 5).transpose(0, 2, 1, 3) for w in (s, s.T, s * s))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(5)
    scores += np.triu(np.full((6, 6), -1e9), k=1)
    return (softmax(scores, axis=-1) @ v).transpose(0, 2, 1, 3).reshape(2, 6, 10)


@user
def heat_in_place(x: Any) -> Any:
    u = x.copy()
    for _ in range(3):
        u[1:-1, 1:-1] += 0.1 * (u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1])
    return u


@user
def momentum_in_place(x: Any, y: Any) -> Any:
    y *= 0.9
    x -= 0.1 * y
    x[x < -2] = -2
    return np.linalg.norm(x)


# Classes, dictionaries, functions -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Schedule:
    rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.99)


@user
def adam(x: Any, y: Any, step: int = 3, schedule: Schedule = Schedule()) -> Any:
    first, second = schedule.betas
    m, v = (1 - first) * y, (1 - second) * y**2
    return x - schedule.rate * (m / (1 - first**step)) / (np.sqrt(v / (1 - second**step)) + 1e-8)


class Dense:
    def __init__(self, w: Any, b: Any, activation: Any = None):
        self.w, self.b, self.activation = w, b, activation

    def __call__(self, x: Any) -> Any:
        z = x @ self.w.T + self.b
        return self.activation(z) if self.activation else z


@user
def layers_of_classes(x: Any, w: Any, b: Any, w2: Any, v: Any) -> Any:
    return reduce(lambda h, layer: layer(h), [Dense(w, b, np.tanh), Dense(w2, v)], x)


class Moments(NamedTuple):
    mean: Any
    spread: Any


@user
def moments(x: Any) -> Any:
    return Moments(x.mean(0), x.std(0, ddof=1))


@user
def clipped_gradients(x: Any, w: Any, limit: float = 1.0) -> Any:
    grads = {"x": x, "w": w}
    total = np.sqrt(sum(np.sum(g**2) for g in grads.values()))
    scale = min(1.0, limit / (total + 1e-6))
    return [g * scale for _, g in sorted(grads.items())]


@user
def macro_f1(k: Any, z: Any) -> Any:
    guess, scores = z.argmax(axis=1), []
    for c in range(3):
        hits = np.sum((guess == c) & (k == c))
        scores.append(2 * hits / ((guess == c).sum() + (k == c).sum() + 1e-9))
    return np.mean(scores)


@user
def partial_functions(x: Any, y: Any) -> Any:
    scales = [partial(lambda factor, t: t * factor, i + 1) for i in range(3)]
    return reduce(np.add, (f(x) for f in scales)), np.array([f(y).sum() for f in scales])


# Masks --------------------------------------------------------------------------------------------------------------


@user
def discriminant(x: Any, k: Any) -> Any:
    a, b = x[k < 3], x[k >= 3]
    within = (a - a.mean(0)).T @ (a - a.mean(0)) + (b - b.mean(0)).T @ (b - b.mean(0))
    return np.linalg.solve(within + np.eye(10), b.mean(0) - a.mean(0))


@user
def masked_statistics(x: Any, m: Any) -> Any:
    count = m.sum(axis=1)
    mean = np.where(m, x, 0).sum(axis=1) / np.maximum(count, 1)
    return mean, x[m].std(), x[x > 0].max(), (x * m).sum() / max(1, m.sum())


@user
def elu_of_the_negative(x: Any) -> Any:
    out = x.copy()
    out[x < 0] = np.exp(x[x < 0]) - 1
    return out, np.piecewise(x, [x < 0, x >= 1], [0.0, lambda t: np.sqrt(t), 0.5])


# SciPy inside -------------------------------------------------------------------------------------------------------


@user
def normal_log_likelihood(x: Any, v: Any, s: Any) -> Any:
    low = linalg.cholesky(s @ s.T + np.eye(10), lower=True)
    d = linalg.solve_triangular(low, (x - v).T, lower=True)
    return -0.5 * (d**2).sum(0) - np.log(np.diag(low)).sum() - 5 * np.log(2 * np.pi)


@user
def black_scholes(r: Any, strike: float = 0.5) -> Any:
    d1 = (np.log(r / strike) + 0.03) / 0.2
    return r * norm.cdf(d1) - strike * np.exp(-0.01) * stats.norm.cdf(d1 - 0.2)


@user
def count_likelihoods(p: Any, k: Any) -> Any:
    a = p * 5 + 1
    dirichlet = gammaln(a.sum(1)) - gammaln(a).sum(1) + ((a - 1) * np.log(p)).sum(1)
    return dirichlet, (p[:, 0] - xlogy(k, p[:, 0]) + gammaln(k + 1)).sum(), entr(p).sum(1), special.digamma(a)


@user
def discrepancy(x: Any, y: Any) -> Any:
    gram = lambda a, b: np.exp(-cdist(a, b, "sqeuclidean") / 10)  # noqa: E731
    return gram(x, x).mean() + gram(y, y).mean() - 2 * gram(x, y).mean()


@user
def filtered(x: Any, v: Any) -> Any:
    smooth = ndimage.gaussian_filter(x, 1.0)
    return smooth - x, signal.lfilter([0.5], [1, -0.5], v), np.convolve(v, np.ones(3) / 3, mode="valid")


@user
def rolling_windows(x: Any) -> Any:
    windows = sliding_window_view(x, 3, axis=1)
    return windows.mean(-1), windows.std(-1), np.c_[np.ones(len(x)), x][:, :2], np.r_[x[0], 1.0]


@user
def least_squares(x: Any, r: Any) -> Any:
    design = np.column_stack([np.ones(len(x)), x[:, :3]])
    beta, *_ = np.linalg.lstsq(design, r, rcond=None)
    return beta, r - design @ beta


# The array API ------------------------------------------------------------------------------------------------------


@user
def by_the_standard(x: Any, w: Any) -> Any:
    xp = x.__array_namespace__(api_version="2023.12")
    z = xp.matmul(x, xp.matrix_transpose(w))
    top = xp.max(z, axis=-1, keepdims=True)
    lse = xp.squeeze(top, axis=-1) + xp.log(xp.sum(xp.exp(z - top), axis=-1))
    return lse, xp.concat([z, z], axis=0), xp.permute_dims(z, (1, 0)), xp.linalg.vector_norm(z, axis=1)


@user
def rotations(v: Any, x: Any) -> Any:
    c, s = np.cos(v[0]), np.sin(v[0])
    turn = array([[c, -s], [s, c]])
    return x.reshape(-1, 2) @ turn.T, np.apply_along_axis(lambda row: row / np.abs(row).sum(), 1, x[:3])
