"""The heads in plain NumPy or CuPy, one operation at a time: what the demo compares the fused heads with."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cupyfuse import Fused, dtypes

from . import HEADS
from .oracle import EPSILON, MOMENTUM, leaky_relu, logsumexp, softmax


def plain(head: Fused, xp: Any) -> Callable[..., Any]:
    """Return a head as a function of `xp`, NumPy or CuPy; it takes the head's own array arguments by name.

    It computes in the dtype of its arguments, 16-bit ones in float32, and returns their dtype. It updates the running
    statistics of training in place, as the head does.
    """
    tail: dict[str, Callable[..., Any]] = {
        "head_logsumexp": _logsumexp_tail,
        "head_sum": _sum_tail,
        "head_softmax": _softmax_tail,
    }
    (name,) = (name for name, each in HEADS.items() if each is head)

    def run(x: Any, weight: Any, bias: Any, **rest: Any) -> Any:
        y = _product(x, weight, xp) + _wide(bias, xp)
        return tail[name](y, xp, **rest).astype(x.dtype)

    return run


def _wide(array: Any, xp: Any) -> Any:
    """Convert a 16-bit array to float32."""
    return array.astype(xp.float32) if array.dtype.itemsize == 2 else array


def _product(x: Any, weight: Any, xp: Any) -> Any:
    """Multiply ``x @ weight.T`` with a float32 result for 16-bit operands."""
    # CuPy multiplies float16 on tensor cores. For 16-bit numbers NumPy has no BLAS, which takes minutes.
    if xp is not np and dtypes.name_of(x.dtype) == "float16":
        return _wide(x @ weight.T, xp)
    return _wide(x, xp) @ _wide(weight, xp).T


def _sum_tail(y: Any, xp: Any) -> Any:
    s = y.sum(axis=1, keepdims=True)
    s = s.max(axis=1, keepdims=True)
    s = s.mean(axis=1, keepdims=True)
    return logsumexp(logsumexp(s, xp), xp)


def _logsumexp_tail(y: Any, xp: Any) -> Any:
    s = logsumexp(y, xp)
    s = leaky_relu(leaky_relu(s, xp), xp)
    return _gelu(_gelu(s, xp), xp)


def _gelu(s: Any, xp: Any) -> Any:
    return 0.5 * s * (1 + _erf(s * math.sqrt(0.5), xp))


def _erf(x: Any, xp: Any) -> Any:
    if xp is np:  # NumPy has none, and SciPy may be missing
        return np.vectorize(math.erf, otypes=[x.dtype])(x)
    from cupyx.scipy.special import erf

    return erf(x)


def _softmax_tail(
    y: Any,
    xp: Any,
    running_mean: Any,
    running_var: Any,
    gamma: Any,
    beta: Any,
    scale: Any,
    training: bool = False,
) -> Any:
    mean, var = running_mean, running_var
    if training:
        mean, var = y.mean(axis=0), y.var(axis=0)
        unbiased = var * (y.shape[0] / (y.shape[0] - 1))
        for running, batch in ((running_mean, mean), (running_var, unbiased)):
            running[...] = (1 - MOMENTUM) * _wide(running, xp) + MOMENTUM * batch
    mean, var, gamma, beta, scale = (_wide(a, xp) for a in (mean, var, gamma, beta, scale))
    z = (y - mean) / xp.sqrt(var + EPSILON) * gamma + beta
    return softmax(scale * z, xp)
