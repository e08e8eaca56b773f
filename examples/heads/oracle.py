"""The heads in plain array operations: the reference that the demo, the self-test, the benchmarks and the tests share.

Nothing here uses the code under test. Functions compute in the dtype of their arguments, float64 or wider, and take the
array library as `xp`: NumPy, or one with NumPy's functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cupyfuse import Fused

from . import HEADS

SLOPE, MOMENTUM, EPSILON = 0.01, 0.1, 1e-5  # the heads' defaults
_COLUMN_BLOCK = 1024


class Reference(NamedTuple):
    """Expected results of one call of a head.

    Attributes
    ----------
    result : array
        What the head returns.
    error_scale : float
        The magnitude that rounding errors of the result are proportional to.
    statistics : dict of str to array
        Running mean and variance after a training step; empty in inference.
    """

    result: Any
    error_scale: float
    statistics: dict[str, Any]


def evaluate(head: Fused, arguments: Mapping[str, Any], training: bool = False, xp: Any = np) -> Reference:
    """Evaluate a head in float64 on its arguments by name."""
    y = linear(arguments["x"], arguments["weight"], arguments["bias"], xp)
    return evaluate_tail(head, y, arguments, training, xp)


def evaluate_tail(head: Fused, y: Any, arguments: Mapping[str, Any], training: bool = False, xp: Any = np) -> Reference:
    """Evaluate a head from the result `y` of its linear map (float64, (B, N)) and its other arguments."""
    if head is HEADS["head_sum"]:
        # Rounding errors of the terms are independent: they add up like their squares.
        norm = xp.sqrt(xp.square(y).sum(axis=1))
        result = y.sum(axis=1, keepdims=True)
        return Reference(result, max(_largest(result), _largest(norm)), {})
    if head is HEADS["head_logsumexp"]:
        s = logsumexp(y, xp)
        for _ in range(2):
            s = leaky_relu(s, xp)
        for _ in range(2):
            s = gelu(s, xp)
        return Reference(s, max(_largest(s), _largest(y.max(axis=1))), {})
    names = ("running_mean", "running_var", "gamma", "beta", "scale")
    mean, var, gamma, beta, scale = (arguments[name].astype(xp.float64) for name in names)
    statistics: dict[str, Any] = {}
    if training:
        mean, var, statistics = _train(y, mean, var)
    z = scale * ((y - mean) / xp.sqrt(var + EPSILON) * gamma + beta)
    result = softmax(z, xp)
    # An absolute error of a logit is a relative error of its probability.
    return Reference(result, _largest(result) * max(1.0, _largest(z)), statistics)


def _train(y: Any, running_mean: Any, running_var: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Compute the batch's mean and variance, and the running statistics that they lead to."""
    mean, var = y.mean(axis=0), y.var(axis=0)
    unbiased = var * (y.shape[0] / (y.shape[0] - 1))
    updated = {
        "running_mean": (1.0 - MOMENTUM) * running_mean + MOMENTUM * mean,
        "running_var": (1.0 - MOMENTUM) * running_var + MOMENTUM * unbiased,
    }
    return mean, var, updated


def linear(x: Any, weight: Any, bias: Any, xp: Any = np) -> Any:
    """Compute ``x @ weight.T + bias`` in float64, converting the weight block by block to save memory."""
    x, bias = x.astype(xp.float64), bias.astype(xp.float64)
    y = xp.empty((x.shape[0], weight.shape[0]), xp.float64)
    for start in range(0, weight.shape[0], _COLUMN_BLOCK):
        block = slice(start, start + _COLUMN_BLOCK)
        y[:, block] = x @ weight[block].astype(xp.float64).T + bias[block]
    return y


def logsumexp(y: Any, xp: Any = np) -> Any:
    """Compute the logarithm of the sum of exponentials of each row, as a column."""
    top = y.max(axis=1, keepdims=True)
    top = xp.where(xp.isfinite(top), top, 0.0)  # an infinite shift would make NaN of infinities
    return top + xp.log(xp.exp(y - top).sum(axis=1, keepdims=True))


def softmax(z: Any, xp: Any = np) -> Any:
    """Compute the softmax of each row."""
    e = xp.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def leaky_relu(s: Any, xp: Any = np) -> Any:
    return xp.where(s > 0, s, s * s.dtype.type(SLOPE))


def gelu(s: Any, xp: Any = np) -> Any:
    """Compute ``s * Phi(s)`` in float64 on the host; erfc keeps the digits of Phi that 1 + erf would cancel."""
    host = s if xp is np else xp.asnumpy(s)
    return xp.asarray(0.5 * host * np.vectorize(math.erfc, otypes=[float])(-host * math.sqrt(0.5)))


def _largest(values: Any) -> float:
    return float(abs(values).max()) if values.size else 0.0
