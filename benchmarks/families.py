"""Operands of float32 matrix products: families of data, each hard on products in a way of its own.

A family takes a NumPy generator and the shape M, K, N, and gives ``x`` (M, K) and ``weight`` (N, K), both float32,
for ``x @ weight.T``. Its docstring is what the report says of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Pair = tuple[Any, Any]
Family = Callable[[np.random.Generator, int, int, int], Pair]

OUTLIER = np.float32(1e4)
RESIDUE = np.float32(1e-2)  # what is left of a pair that cancels, relative to its members
RANK, NOISE = 16, np.float32(0.05)
_EVERY = 64  # one row, or one k, of so many is an outlier

# (1 - e)(1 + e) with e = 2**-10 is 1 - 2**-20, of factors that float16 and TF32 hold exactly; 1 - 2**-24 is the largest
# float32 number below 1.
BELOW = np.array((1 - 2**-10, 1 - 2**-24), np.float32)
ABOVE = np.array((1 + 2**-10, 1), np.float32)

FAMILIES: dict[str, Family] = {}


def _family(function: Family) -> Family:
    FAMILIES[function.__name__.replace("_", "-")] = function
    return function


def _normal(rng: np.random.Generator, rows: int, columns: int) -> Any:
    return rng.standard_normal((rows, columns), dtype=np.float32)


def _uniform(rng: np.random.Generator, rows: int, columns: int) -> Any:
    return rng.random((rows, columns), dtype=np.float32)


@_family
def gaussian(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Both standard normal."""
    return _normal(rng, m, k), _normal(rng, n, k)


@_family
def positive(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Both uniform on [0, 1): partial sums only grow."""
    return _uniform(rng, m, k), _uniform(rng, n, k)


@_family
def heavy_tailed(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Both of Student's t distribution with 2 degrees of freedom: no variance, a few elements dwarf the others."""

    def draw(rows: int) -> Any:
        # A normal number over the root of a chi-squared one's mean; with 2 degrees that mean is exponential.
        spread = np.sqrt(rng.standard_exponential((rows, k), dtype=np.float32))
        return _normal(rng, rows, k) / np.maximum(spread, np.float32(1e-6))

    return draw(m), draw(n)


@_family
def outlier_rows(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Standard normal; one row of x in 64, and one of weight, is 10,000 times larger."""
    x, weight = gaussian(rng, m, k, n)
    for operand in (x, weight):
        operand[rng.choice(len(operand), max(1, len(operand) // _EVERY), replace=False)] *= OUTLIER
    return x, weight


@_family
def outlier_columns(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Standard normal; one k in 64 is 10,000 times larger in x, and others are in weight."""
    x, weight = gaussian(rng, m, k, n)
    chosen = rng.permutation(k)[: 2 * max(1, k // _EVERY)]
    x[:, chosen[::2]] *= OUTLIER
    weight[:, chosen[1::2]] *= OUTLIER
    return x, weight


@_family
def cancelling(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Positive products, then the same with the other sign but for 1 % noise: sums grow to K/8 and end near 0."""
    x, weight = positive(rng, m, k, n)
    half = k // 2
    x[:, half : 2 * half] = x[:, :half]
    noise = RESIDUE * _normal(rng, n, half)
    weight[:, half : 2 * half] = -weight[:, :half] * (1 + noise)
    weight[:, 2 * half :] *= RESIDUE  # an odd K leaves one without a partner
    return x, weight


@_family
def truncating(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """Products just below a power of two: sums rounded toward zero lose a unit in every step, to nearest hardly any."""
    chosen = rng.integers(0, 2, k)
    scales = [np.exp2(rng.integers(-3, 4, (rows, 1))).astype(np.float32) for rows in (m, n)]
    return BELOW[chosen] * scales[0], ABOVE[chosen] * scales[1]


@_family
def orthogonal(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """x standard normal, weight with orthonormal rows or columns."""
    x, size = _normal(rng, m, k), max(k, n)
    # A random orthogonal matrix: the Kronecker product of two uniformly distributed ones, its columns shuffled.
    small = max(d for d in range(1, math.isqrt(size) + 1) if size % d == 0)
    factors = []
    for length in (small, size // small):
        q, r = np.linalg.qr(rng.standard_normal((length, length)))
        factors.append((q * np.sign(np.diag(r))).astype(np.float32))
    return x, np.ascontiguousarray(np.kron(*factors)[:, rng.permutation(size)][:n, :k])


@_family
def low_rank(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """x standard normal, weight of rank 16 plus 5 % noise, over the root of K."""
    rank = min(RANK, k, n)
    signal = _normal(rng, n, rank) @ _normal(rng, rank, k) / np.float32(math.sqrt(rank))
    return _normal(rng, m, k), (signal + NOISE * _normal(rng, n, k)) / np.float32(math.sqrt(k))


@_family
def one_hot(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """One element of each row of x is 1, the others are 0, weight standard normal: float32 products are exact."""
    x = np.zeros((m, k), np.float32)
    x[np.arange(m), rng.integers(0, k, m)] = 1
    return x, _normal(rng, n, k)


@_family
def head(rng: np.random.Generator, m: int, k: int, n: int) -> Pair:
    """The data of the heads: x uniform on [0, 1), weight uniform between -1 and 1 over the root of K."""
    return _uniform(rng, m, k), (2 * _uniform(rng, n, k) - 1) / np.float32(math.sqrt(k))


def draw(name: str, shape: tuple[int, ...], seed: int) -> Pair:
    """Draw a family's operands: the same on every machine, whichever others are drawn."""
    return FAMILIES[name](np.random.default_rng([seed, *shape, *name.encode()]), *shape)
