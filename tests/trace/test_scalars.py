"""Values without dimensions: results of reductions are NumPy scalars, which do not change; 0-d arrays do."""

from __future__ import annotations

import copy
import numbers
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import Engine, assert_close, normal

import cupyfuse as cf
from cupyfuse.settings import force_plans


def program(text: str) -> Callable[..., Any]:
    scope: dict[str, Any] = {"np": np, "cf": cf, "copy": copy}
    exec("def function(x, s):\n" + "".join(f"    {line}\n" for line in text.split("; ")), scope)
    return scope["function"]  # type: ignore[no-any-return]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize(
    "text",
    [
        "loss = x.sum(); total = loss; total += 1; return loss, total",
        "loss = x.sum(); total = loss; total -= 1; total *= 3; total /= 7; total **= 2; return loss, total",
        "mask = (x > 0).any(); other = mask; other &= (x > 1).any(); other |= (x > 2).all(); return mask, other",
        "losses = [x.sum()]; losses.append(losses[0]); losses[1] += 1; losses.append(losses[-1]); return losses",
        "total = 0.0; seen = []\n    for k in range(3): total += (x * k).sum(); seen.append(total)\n    return seen",
        "a = x.mean(); b = a.copy(); b += 1; c = a.astype('float32'); d = c; d *= 3; return a, b, c, d",
        "a = x.max(); b = a[()] if hasattr(a, 'item') and False else a; b += 1; return a, b",
        "a = np.exp(s); b = a; b += 1; return a, b",
        "a = x.sum(); b = a; b += x; return a, b",
        "a = x.sum().astype('float32'); b = a; b += np.float64(0.1); return a, b",
        "a = x.sum(axis=0); b = a; b += 1; return a, b",
        "a = x.sum(axis=(0, 1), keepdims=True); b = a; b += 1; return a, b",
        "b = s; b += 1; return s + 0, x + b",
        "b = s.copy(); c = b; c += 1; return s + 0, b, c",
        "b = np.zeros_like(x.sum()); c = b; c += 1; return b, c",
        "a = x.sum(); b = a[...]; c = b; c += 1; b[...] *= 2; return a, b, x[0, 0][...], np.expand_dims(a, ())",
        "a = copy.copy(x); a += 1; b = copy.deepcopy(s); b += 1; return x + 0, a, s + 0, b",
    ],
)
def test_in_place_operators_of_values_without_dimensions(engine: Engine, text: str, rng: np.random.Generator) -> None:
    """What other names hold afterwards, and what the caller's arrays hold, is NumPy's."""
    function = program(text)
    x, s = normal(rng, (3, 4), "float64"), np.array(2.5)
    plain, given = [x.copy(), s.copy()], [engine.array(x), engine.array(s)]
    expected, actual = function(*plain), engine.host(cf.fuse(function)(*given))
    for a, e in zip((*actual, *engine.host(given)), (*expected, *plain), strict=True):
        assert np.asarray(a).dtype == np.asarray(e).dtype
        assert engine.name != "numpy" or type(a) is type(e)
        assert_close(a, e, 1e-6 * (1 + np.abs(e)))


@pytest.mark.parametrize(
    "text",
    [
        "a = x.sum(); a[...] = 1; return a",
        "a = x.sum(); np.add(a, 1, out=a); return a",
        "a = np.exp(s); np.exp(a, out=a); return a",
    ],
)
def test_scalars_cannot_be_changed(text: str) -> None:
    function, arguments = program(text), (np.ones((2, 2)), np.array(1.0))
    with pytest.raises(TypeError):
        function(*arguments)
    with pytest.raises(TypeError, match="scalar"):
        cf.fuse(function)(*arguments)


def test_isinstance_knows_arrays_and_scalars() -> None:
    def kinds(value: Any) -> list[bool]:
        types = (np.ndarray, np.generic, np.floating, float, int, bool, np.bool_, np.float64, np.float32, tuple, list)
        return [isinstance(value, t) for t in (*types, numbers.Number)]

    def function(x: Any, s: Any) -> Any:
        values = (x, x + 1, x.T, s, s.copy(), x.sum(), x.sum(axis=0), x > 0, (x > 0).any(), np.exp(s), x.sum() * 1)
        values += (x.sum(keepdims=True), x.astype("float32").sum(), np.zeros_like(s), x.reshape(-1), x.sum()[None])
        return x + 1, [kinds(v) for v in values], np.isscalar(x), np.isscalar(x.sum())

    arguments = (np.ones((2, 3)), np.array(1.0))
    assert cf.fuse(function)(*arguments)[1:] == function(*arguments)[1:]


def test_code_that_asks_for_arrays_takes_their_branch() -> None:
    def standard(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            x = np.asarray(x)
        return x - x.mean()

    x = np.arange(3.0)
    np.testing.assert_array_equal(cf.fuse(standard)(x), standard(x))


def test_results_without_dimensions_are_of_numpys_types() -> None:
    """Arrays, scalars or Python's numbers, as NumPy returns them."""

    def function(x: Any, s: Any) -> Any:
        arrays = (s, np.asarray(x.sum()), x[:1, :1].squeeze(), x[0, 0, ...], np.tensordot(x, x), np.zeros_like(x[0, 0]))
        scalars = (x.sum(), s * 2, x[0, 0], np.exp(s), np.vdot(x, x), np.median(x), np.einsum("ij->", x), x.argmax())
        return arrays, scalars, (round(x[0, 0]), np.allclose(x, x), np.cov(x[0]), round(x[0, 0], 1))

    arguments = (np.arange(6.0).reshape(2, 3) + 0.25, np.array(1.5))
    with force_plans():
        actual = cf.fuse(function)(*arguments)
    for ours, theirs in zip(actual, function(*arguments), strict=True):
        assert list(map(type, ours)) == list(map(type, theirs))
        np.testing.assert_allclose(np.stack(ours), np.stack(theirs))


SCALARS: list[Callable[..., Any]] = [
    lambda x, u, z: (x.var(), np.var(x, axis=(0, 1)), x[0].var(), x.std(), x.var(ddof=1), np.nanvar(x)),
    lambda x, u, z: (u.sum().astype(float), u.sum().astype(int), max(u.sum(), 1), min(u.sum(), 99)),
    lambda x, u, z: (z.sum().real, np.vdot(z, z).real, np.real(z.sum()), z[0].imag, z.real.max().astype(complex)),
    lambda x, u, z: (np.asarray(u.sum()), np.asarray(u.sum()).astype(float), np.array(z[0]).real, z.real, z.imag[0]),
]


@pytest.mark.parametrize("function", SCALARS, ids=("variances", "opaque", "complex", "arrays"))
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_scalars_of_variances_and_of_library_steps(function: Callable[..., Any], dtype: str) -> None:
    """They were arrays without dimensions."""
    x = np.linspace(-1, 2, 20).reshape(4, 5).astype(dtype)
    arguments = x, np.arange(1, 13, dtype=np.uint8), np.arange(4) + 1j
    with force_plans():
        got = cf.fuse(function)(*arguments)
    expected = function(*arguments)
    assert [type(g) for g in got] == [type(e) for e in expected]
    for g, e in zip(got, expected, strict=True):
        assert g.dtype == e.dtype
        np.testing.assert_allclose(g, e, rtol=2e-3 if dtype == "float16" else 1e-6)
