"""The heads in plain CuPy, operation by operation: a rival and, on float64 arrays, the reference of every check."""

from __future__ import annotations

from typing import Any

SLOPE, MOMENTUM, EPSILON = 0.01, 0.1, 1e-5  # the defaults of the heads


class Plain:
    """The three heads for an array library.

    Parameters
    ----------
    xp : module
        `cupy`, or one with NumPy's functions.
    special : module
        `cupyx.scipy.special`, or one with SciPy's functions.
    """

    def __init__(self, xp: Any, special: Any):
        self._xp = xp
        self._special = special

    def activations(self, s: Any) -> Any:
        """LeakyReLU twice, GELU twice."""
        for _ in range(2):
            s = self._xp.where(s > 0, s, s * SLOPE)
        for _ in range(2):
            s = s * (0.5 * (1.0 + self._special.erf(s * 0.5**0.5)))
        return s

    def logsumexp_tail(self, y: Any, bias: Any) -> Any:
        return self.activations(self._special.logsumexp(y + bias, axis=1, keepdims=True))

    def softmax_tail(
        self,
        y: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        gamma: Any,
        beta: Any,
        scale: Any,
        training: bool = False,
    ) -> Any:
        y = y + bias
        mean, var = running_mean, running_var
        if training:
            mean, var = y.mean(axis=0), y.var(axis=0)
            unbiased = var * (y.shape[0] / (y.shape[0] - 1))
            running_mean[...] = (1.0 - MOMENTUM) * running_mean + MOMENTUM * mean
            running_var[...] = (1.0 - MOMENTUM) * running_var + MOMENTUM * unbiased
        z = (y - mean) / self._xp.sqrt(var + EPSILON) * gamma + beta
        return self._special.softmax(scale * z, axis=1)

    def head_logsumexp(self, x: Any, weight: Any, bias: Any) -> Any:
        return self.logsumexp_tail(x @ weight.T, bias)

    def head_sum(self, x: Any, weight: Any, bias: Any) -> Any:
        s = (x @ weight.T + bias).sum(axis=1, keepdims=True)
        s = s.max(axis=1, keepdims=True).mean(axis=1, keepdims=True)
        for _ in range(2):
            s = self._special.logsumexp(s, axis=1, keepdims=True)
        return s

    def head_softmax(
        self,
        x: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        gamma: Any,
        beta: Any,
        scale: Any,
        training: bool = False,
    ) -> Any:
        return self.softmax_tail(x @ weight.T, bias, running_mean, running_var, gamma, beta, scale, training)
