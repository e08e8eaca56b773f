"""Rows and parts at traced numbers, `W[labels[0]]`: views, as NumPy's are at numbers, and copies at arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import Engine, assert_close

import cupyfuse as cf

TEXTS = (
    "r = W[k[1]]; W[0] = 9; W[2] *= 2; return r * 1, W",
    "r = W[k[1]]; r += 1; W[1] = 5; return r * 1, W",
    "W[k[0], 1:3] *= 2; W[:, k[0]] += 1; W[..., k[1]] -= x[:3]; return W",
    "W[k[0]][0] = 5; W[k[1]][::2] += x[::2]; return W",
    "a = W[k[1]]; b = a[1:]; b -= 3; W[k[1]] = a * 2; return W, b * 1",
    "W[k[0], None] += 1; W[k[1], ::-1] = x; W[-k[0]] += 1; return W",
    "W[int(k[0])] -= x; W[int(k[1]), 2:] = 0; return W",
    "for i in k: W[i] += x\n    return W",
    "for i in range(3): W[k[i % 2]] -= W[i] * 0.5\n    return W",
    "r = W.T[k[0]]; r *= 2; return W, r.sum()",
    "V = W.reshape(4, 3); V[k[0]] += 1; return V * 1",
    "W[np.argmax(x)] = x; s = W[np.argmax(W[:, 0])]; s -= s.mean(); return W",
    "T = np.zeros((2, 3, 4)); T[k[0] - 1, k[1]] = x; u = T[k[0] - 1]; u[0] += 7; return T, u * 1",
    "np.add(W[k[0]], x, out=W[k[0]]); return W",
    "W[k[0]] += W[k[1]]; W[k[1]] -= W[k[0]]; return W",
    "W[k[0]], W[k[1]] = W[k[1]].copy(), W[k[0]].copy(); return W",
    "r = W[k[:1]]; s = W[np.asarray(k[1])]; c = W[k[1]].copy(); W[:] = 0; return r, s * 1, c",
    "W[k[0]] = 2; return np.sum(W, 0), W[k[0]] + 1",
)


def compare(engine: Engine, text: str, matrix: Any, x: Any, same: Callable[[Any, Any], None]) -> None:
    """Compare results and arguments with NumPy's, for two sequences of numbers."""
    scope: dict[str, Any] = {"np": np}
    exec(f"def function(W, x, k):\n    {text}\n", scope)
    fused = cf.fuse(scope["function"])
    for numbers in ([1, 2], [2, 1]):
        plain = [matrix.copy(), x.copy(), np.array(numbers)]
        given = engine.arrays([a.copy() for a in plain])
        expected, actual = scope["function"](*plain), fused(*given)
        many = isinstance(expected, tuple)
        for a, e in zip(actual if many else [actual], expected if many else [expected], strict=True):
            same(engine.host(a), e)
        for a, e in zip(given, plain, strict=True):
            same(engine.host(a), e)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("text", TEXTS)
def test_changes(engine: Engine, text: str) -> None:
    matrix, x = np.arange(12.0).reshape(3, 4) ** 1.5, np.array([3.0, 1, 2, 0])
    compare(engine, text, matrix, x, lambda a, e: assert_close(a, e, 1e-15 * (1 + np.abs(e))))


ELEMENTS = (
    "i = k[0]; v = x[i]; x[i] = x[0]; x[0] = v; return x",
    "v = x[x.argmax()]; x[...] = 0; return v * 1",
    "v = x[x.argmin()]; v += 1; return x, v",
    "v = x.flat[k[1]]; x[:] = 7; return v * 1",
    "v = [x[i] for i in k]; x[:] = 7; return v[0] + v[1]",
    "v = W[k[0], k[1]]; u = W[0, k[1]]; W[...] = 7; return v * 1, u * 1",
    "v = x[..., x.argmin()]; x[k[0]] = 9; x[-1] = 4; return v * 1",
    "i = x.argmax(); x[i] /= 2; x[i] -= x[i] * x[0]; return x",
    "r = W[k[0]]; v = r[k[1]]; W[...] = 7; return r * 1, v * 1",
    "v = W[np.array(1)]; v += 100; W[np.array(2), 1:] = 5; return v, W[np.array(0), np.array(1)] + W[1, np.array(2)]",
    "v = W[np.array(1), 1:]; W[...] = 7; return v * 1, x[np.array(2)]",
)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("text", ELEMENTS)
def test_an_element_at_numbers_is_a_copy(engine: Engine, text: str) -> None:
    """As NumPy's scalars are; at an ellipsis besides it is a view without dimensions."""
    matrix, x = np.arange(12.0).reshape(3, 4), np.array([3.0, 1, 2, 0.5])
    compare(engine, text, matrix, x, np.testing.assert_array_equal)


@pytest.mark.parametrize("dtype", ["float16", "bool", "uint8", "complex128"])
def test_an_element_at_a_number_is_a_scalar(dtype: str) -> None:
    x = np.array([3, 1, 0, 5]).astype(dtype)
    found = cf.fuse(lambda x: x[x.argmax()])(x)
    assert type(found) is type(x[0]) and found == x.max()
