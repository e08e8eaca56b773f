"""Functions whose calls the compiled launcher recognises: how many calls that takes, and what recognises them."""

from __future__ import annotations

from typing import Any

import numpy as np
from support import HOST

from cupyfuse.api.fuse import Fused

F32 = np.float32
CALLS = 40  # after as many calls the compiled launcher recognises them


def array(rng: np.random.Generator, *shape: int, dtype: Any = F32) -> Any:
    return HOST.array(rng.standard_normal(shape).astype(dtype))


def learn(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call often enough; return what recognises direct calls."""
    for _ in range(CALLS):
        function(*args, **kwargs)
    cache = cache_of(function)
    assert cache.direct is not None
    return cache


def cache_of(function: Any) -> Any:
    if isinstance(function, Fused):
        return function.inline_cache
    if hasattr(function, "_inline_cache"):
        return function._inline_cache
    cells = (cell.cell_contents for cell in function.__closure__)
    return next(value.inline_cache for value in cells if isinstance(value, Fused))


def is_direct(cache: Any, *args: Any, **kwargs: Any) -> bool:
    return cache.direct(args, kwargs) is not None


def softmax(x: Any) -> Any:
    x = np.asarray(x, np.float64)
    e = np.exp(x - x.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-5, atol=1e-6)
