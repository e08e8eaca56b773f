"""np.einsum and np.tensordot: matrix products and weighted sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import HOST, INF, NUMPY, Engine, assert_close, normal

import cupyfuse as cf

# fmt: off
CONTRACTIONS = [
    "abc,adc->abd", "abc,abc->ab", "abc,bc->ac", "abc,c->ab", "abcd,cde->abe", "ab,bc,cd->ad", "ab,bc,cd,de",
    "abc,adc,bd->ac", "ab,cd->abcd", "abc,cba->", "a,b,c->abc", "a,a,a->a", "abcd,dce->eab", "abc->ca",
    "abc,de->", "ab,ab,ab->", "...ab,...bc->...ac", "...ab,...bc", "...ab,bc->...ac", "...a,...a",
    "a...,b...->ab...", "...,...", "ab...->b...",
    "ae,ea->ae", "ae,ee->a", "bb->b", "bb", "abb,b->a", "bbb->b", "...bb->...",
]
# fmt: on


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("text", CONTRACTIONS)
@pytest.mark.parametrize("engine", [NUMPY, HOST], ids=lambda e: e.name)
def test_contractions_are_products_and_sums(engine: Engine, text: str, rng: np.random.Generator) -> None:
    """Of any number of operands and axes, an ellipsis among them; no library step does any."""
    sizes = dict(zip("abcde", (2, 3, 4, 5, 2), strict=True))
    spread = [(3, 2), (2,), (2,)] if text.startswith("...ab,...bc") else [(2, 3)] * 4
    terms = text.partition("->")[0].split(",")
    operands = []
    for term, axes in zip(terms, spread, strict=False):
        before, dots, after = term.partition("...")
        shape = (*(sizes[c] for c in before), *(axes if dots else ()), *(sizes[c] for c in after))
        operands.append(normal(rng, shape, "float64"))

    def contract(*operands: Any) -> Any:
        return np.einsum(text, *operands)

    expected = np.asarray(contract(*operands))
    with engine.active():
        fused = cf.fuse(contract)
        arguments = [engine.array(x) for x in operands]
        actual = np.asarray(engine.host(fused(*arguments)))
        assert all(step.kind != "Library" for step in fused.plan(*arguments).steps)
    assert actual.shape == expected.shape
    # At most 120 terms of at most four factors are summed.
    size = contract(*(np.abs(x) for x in operands))
    assert_close(actual, expected, 124 * float(np.finfo(float).eps) * size)


@pytest.mark.parametrize(
    ("left", "right", "axes"),
    [((2, 3, 4), (3, 4, 5), 2), ((2, 3), (4,), 0), ((2, 3, 4), (4, 2, 5), ([0, 2], [1, 0])), ((2, 3, 4), (4, 5, 6), 1)],
)
def test_tensordot_is_a_product(
    left: tuple[int, ...], right: tuple[int, ...], axes: Any, rng: np.random.Generator
) -> None:
    x, y = normal(rng, left, "float64"), normal(rng, right, "float64")
    fused = cf.fuse(lambda x, y: np.tensordot(x, y, axes))
    np.testing.assert_allclose(fused(x, y), np.tensordot(x, y, axes), rtol=1e-13, atol=1e-13)
    assert all(step.kind != "Library" for step in fused.plan(x, y).steps)


@pytest.mark.parametrize("text", ["ab,abz->ab", "ab,az->b", "ab,bz->a", "ab,az->", "az,bz->ab"])
def test_einsum_of_no_terms_is_zero(text: str) -> None:
    """Also beside an infinite operand; NumPy's own gives NaN for some strides of an empty array."""
    first, second = (tuple(0 if c == "z" else 3 for c in term) for term in text.split("->")[0].split(","))
    x, y = np.full(first, INF), np.ones(second)
    result = cf.fuse(lambda x, y: np.einsum(text, x, y))(x, y)
    np.testing.assert_array_equal(result, np.zeros([3] * len(text.split("->")[1])))


def test_einsum_sums_in_the_promoted_dtype(rng: np.random.Generator) -> None:
    x, y = normal(rng, (3, 50, 4), "float32"), normal(rng, (3, 4), "float64")
    result = cf.fuse(lambda x, y: np.einsum("abc,ac->ca", x, y))(x, y)
    np.testing.assert_allclose(result, np.einsum("abc,ac->ca", x.astype(np.float64), y), rtol=1e-13)


def test_operands_may_change_afterwards(rng: np.random.Generator) -> None:
    def contract(x: Any, y: Any) -> Any:
        z = np.tensordot(x, y, 2) + np.einsum("abc,bcd->ad", x, y)
        x[:, :1] = -1.0
        return z + x.sum()

    x, y = normal(rng, (2, 3, 4), "float64"), normal(rng, (3, 4, 5), "float64")
    mine, theirs = x.copy(), x.copy()
    np.testing.assert_allclose(cf.fuse(contract)(mine, y), contract(theirs, y), rtol=1e-13, atol=1e-13)
    np.testing.assert_array_equal(mine, theirs)
