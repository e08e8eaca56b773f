"""Functions as users write them: norms, images, routers, linear algebra, statistics, signals, physics."""

from __future__ import annotations

from typing import Any

import numpy as np
from user_functions import user

# Norms --------------------------------------------------------------------------------------------------------------


@user
def layer_norm(x: Any, g: Any, v: Any) -> Any:
    mean, var = np.mean(x, axis=-1, keepdims=True), np.var(x, axis=-1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * g + v


@user
def rms_norm(x: Any, g: Any) -> Any:
    return g * x / np.sqrt(np.average(x**2, axis=1)[:, None] + 1e-6)


@user
def batch_norm(x: Any, g: Any, v: Any) -> Any:
    return (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * g + v


@user
def min_max_scale(x: Any) -> Any:
    return (x - x.min(axis=0)) / np.ptp(x, axis=0)


@user
def robust_scale(x: Any) -> Any:
    median = np.median(x, axis=0)
    low, high = np.percentile(x, 25, axis=0), np.percentile(x, 75, axis=0)
    return (x - median) / (high - low)


@user
def unit_ball(x: Any) -> Any:
    length = np.linalg.norm(x, ord=2, axis=1, keepdims=True)
    return x * np.minimum(1, 1 / np.maximum(length, 1e-12))


@user
def clip_by_norm(x: Any) -> Any:
    return x * np.minimum(1.0, 2.0 / np.linalg.norm(x))


@user
def standardise_image(image: Any) -> Any:
    pixels = image / 255.0
    return (pixels - pixels.mean()) / max(1e-3, 1 / pixels.size) / pixels.std()


@user
def standardise_bytes(image: Any) -> Any:
    x = image.astype(np.float32) / 255
    return (x - np.mean(x, axis=1, keepdims=True)) / (np.std(x, axis=1, keepdims=True) + 1e-5)


@user
def winsorise(x: Any) -> Any:
    low, high = np.quantile(x, 0.1, axis=1, keepdims=True), np.quantile(x, 0.9, axis=1, keepdims=True)
    return np.clip(x, low, high)


# Routers ------------------------------------------------------------------------------------------------------------


@user
def top_k_router(x: Any, w: Any) -> Any:
    logits = x @ w.T
    threshold = -np.partition(-logits, 1, axis=1)
    kept = np.where(logits >= np.sort(threshold, axis=1).max(axis=1, keepdims=True), logits, -np.inf)
    gates = np.exp(kept - kept.max(axis=1, keepdims=True))
    return gates / gates.sum(axis=1, keepdims=True)


@user
def load_balance(z: Any) -> Any:
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    chosen = (p == p.max(axis=1, keepdims=True)).astype(p.dtype)
    return z.shape[1] * np.sum(p.mean(axis=0) * chosen.mean(axis=0))


@user
def router_z_loss(z: Any) -> Any:
    return np.mean(np.square(np.logaddexp.reduce(z, axis=-1)))


@user
def hash_router(image: Any) -> Any:
    return (image * 31 + 7) % 5, image // 16, (image & 1) ^ 1


@user
def expert_choice(z: Any) -> Any:
    order = np.argsort(-z, axis=0, kind="stable")
    return np.take_along_axis(z, order, axis=0), order


# Linear algebra -----------------------------------------------------------------------------------------------------


@user
def ridge(x: Any, r: Any) -> Any:
    gram = x.T @ x
    return np.linalg.solve(gram + 0.1 * np.diag(np.ones_like(gram.sum(axis=0))), x.T @ r)


@user
def principal_components(x: Any) -> Any:
    centred = x - x.mean(axis=0)
    return np.abs(centred @ np.linalg.svd(centred, full_matrices=False)[2].T)


@user
def whiten(x: Any) -> Any:
    centred = x - x.mean(axis=0)
    values, vectors = np.linalg.eigh(np.cov(centred, rowvar=False))
    return (centred @ vectors / np.sqrt(values + 1e-3)) @ vectors.T


@user
def power_iteration(s: Any, v: Any) -> Any:
    for _ in range(5):
        v = s @ v
        v = v / np.linalg.norm(v)
    return v @ s @ v, v


@user
def low_rank(x: Any, w: Any, w2: Any) -> Any:
    return np.linalg.multi_dot([x, w2, w])


@user
def gram_schmidt_step(x: Any, v: Any) -> Any:
    unit_vector = v / np.linalg.norm(v)
    return x - np.outer(x @ unit_vector, unit_vector), np.vdot(v, v)


@user
def spectrum(x: Any) -> Any:
    window = np.hanning(x.shape[1])[0] + np.ones_like(x)
    return np.abs(np.fft.rfft(x * window, axis=1)) ** 2 / x.shape[1]


@user
def covariance_shrinkage(x: Any) -> Any:
    centred = x - np.mean(x, axis=0, keepdims=True)
    sample = centred.T @ centred / x.shape[0]
    return 0.9 * sample + 0.1 * np.diag(np.diag(sample))


@user
def gated(x: Any, w2: Any, w: Any) -> Any:
    gate, up = np.split(x, 2, axis=1)
    return np.hstack([gate / (1 + np.exp(-gate)), up]) @ w2


@user
def double_centring(x: Any) -> Any:
    d = np.square(x @ x.T)
    return -0.5 * (d - d.mean(axis=0) - d.mean(axis=1)[:, None] + d.mean())


@user
def moving_average(x: Any) -> Any:
    padded = np.pad(x, ((0, 0), (1, 1)), mode="edge")
    total = np.cumsum(padded, axis=1)
    return (np.roll(total, -2, axis=1) - total) / 2


@user
def interpolated(x: Any) -> Any:
    return np.interp(x.ravel(), [-2.0, 0.0, 2.0], [0.0, 1.0, 0.0]).reshape(x.shape) * x
