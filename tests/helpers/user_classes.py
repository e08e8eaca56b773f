"""Functions as users write them around classes of their own, whose methods call `float`, `int`, `type` and `max`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from user_functions import user


class Mixture:
    """Spherical Gaussians, fitted by expectation and maximisation."""

    def __init__(self, count: int):
        self.count = count

    def expect(self, x: Any, means: Any, variances: Any) -> Any:
        distances = ((x[:, None] - means) ** 2).sum(-1)
        log_p = -0.5 * distances / variances - 0.5 * x.shape[1] * np.log(variances)
        total = np.logaddexp.reduce(log_p, axis=1)
        return float(total.mean()), np.exp(log_p - total[:, None])

    def fit(self, x: Any, iterations: float = 2.0) -> Any:
        means, variances, likelihoods = x[: self.count], np.ones(self.count, x.dtype), []
        for _ in range(int(iterations)):
            likelihood, shares = self.expect(x, means, variances)
            size = shares.sum(0) + 0.125
            means = shares.T @ x / size[:, None]
            variances = (shares * ((x[:, None] - means) ** 2).sum(-1)).sum(0) / size / x.shape[1] + 0.25
            likelihoods.append(likelihood)
        return means, variances, *likelihoods, int(size.argmax())


@user
def mixture_of_a_class(x: Any) -> Any:
    return Mixture(3).fit(x)


class Optimiser:
    def __init__(self, rate: float = 0.25, limit: float = 1.0):
        self.rate, self.limit = rate, limit

    def norm(self, gradient: Any) -> float:
        return float(np.sqrt(np.sum(gradient * gradient)))

    def step(self, weight: Any, gradient: Any) -> Any:
        if type(gradient) is not np.ndarray:
            raise TypeError(f"expected an array, got {type(gradient)}")
        scale = max(self.norm(gradient) / self.limit, 1.0)
        return weight - self.rate / scale * gradient


class Momentum(Optimiser):
    def step(self, weight: Any, gradient: Any) -> Any:
        moved = super().step(weight, gradient)
        return moved - 0.5 * np.sign(gradient) / (self.norm(moved) + 1), max(self.norm(moved), float(abs(moved).max()))


@user
def optimisers(v: Any, g: Any) -> Any:
    return Optimiser().step(v, g), *Momentum(rate=0.5).step(v, g)


@dataclass(frozen=True)
class Settings:
    heads: float = 2.0
    eps: float = 1e-3
    causal: int = 1


@dataclass
class Block:
    weight: Any
    settings: Settings = field(default_factory=Settings)

    def norm(self, x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + self.settings.eps)

    def attend(self, x: Any) -> Any:
        rows, width = x.shape
        heads = int(self.settings.heads)
        q = (x @ self.weight).reshape(rows, heads, width // heads).swapaxes(0, 1)
        scores = q @ q.swapaxes(1, 2) / math.sqrt(float(width // heads))
        if bool(self.settings.causal):
            scores = np.where(np.tri(rows, dtype=bool), scores, float("-inf"))
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        return (shares / shares.sum(-1, keepdims=True) @ q).swapaxes(0, 1).reshape(rows, width)

    def __call__(self, x: Any) -> Any:
        return self.norm(x + self.attend(self.norm(x)))


@user
def block_of_a_transformer(x: Any, s: Any) -> Any:
    return Block(s)(x) + Block(s, Settings(heads=5, causal=0))(x)


class Vector:
    """With the operators of a vector, some of which give Python's numbers."""

    def __init__(self, elements: Any):
        self.elements = elements

    def __add__(self, other: Any) -> Vector:
        return Vector(self.elements + (other.elements if isinstance(other, Vector) else other))

    def __matmul__(self, other: Vector) -> float:
        return float(self.elements @ other.elements)

    def __abs__(self) -> float:
        return math.sqrt(self @ self)

    def __len__(self) -> int:
        return int(self.elements.shape[0])

    def __iter__(self) -> Any:
        return iter(self.elements)

    @functools.cached_property
    def share(self) -> Any:
        return self.elements / abs(self)


@user
def vectors_with_operators(v: Any, g: Any) -> Any:
    a, b = Vector(v), Vector(g)
    return (a + b + 1).elements, a @ b, max(abs(a), abs(b)), len(a), a.share * b.share, sum(float(x) for x in a)


class Metrics:
    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def update(self, **values: Any) -> None:
        self.values.update({name: float(value) for name, value in values.items()})


def rounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        result = function(*args)
        return round(result, 1) if isinstance(result, float) else result

    return call


@rounded
def share_of_positive(x: Any) -> float:
    return float(np.mean(x > 0)) * 0.5


@user
def metrics_of_a_class(x: Any, y: Any) -> Any:
    metrics = Metrics()
    metrics.update(squared=np.mean((x - y) ** 2), absolute=abs(x - y).mean())
    metrics.update(largest=max((x - y).max(), x.max()), positive=share_of_positive(x))
    worst = max(range(len(x)), key=lambda i: abs(x[i] - y[i]).sum())
    return *metrics.values.values(), worst
