"""Real and imaginary parts that are changed in place, bits read as another dtype, and casts that NumPy refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import Engine, assert_equal

import cupyfuse as cf
from cupyfuse.settings import force_plans

Z = (np.arange(12.0) - 5).reshape(3, 4) + 1j * np.arange(12.0, 0, -1).reshape(3, 4)
X = (np.arange(12.0) - 4).reshape(3, 4)
PARTS = (
    *("z.real = 2 * x; return z", "z.imag[:] = x; z.imag += 1; return z, z.real", "z.real[..., 0] = 7; return z"),
    *(
        "r = z.T.real; z[:, 0] = 1; r[2] = 9; return r, z",
        "i = z.imag; z *= 2; return i, z",
        "np.real(z)[1] = 0; return z",
    ),
    *("z.imag[z.imag > 3] = -1; return z", "z.real -= z.real.mean(axis=1, keepdims=True); return z[1:].real"),
    *("c = np.zeros(x.shape, complex); c.real = x; c.imag = 1; return c", "x.real = 3 * x; return x"),
    *(
        "c = np.empty((3, 4), complex); c.real[...] = x; c.imag[...] = -x; return np.abs(c)",
        "z.flat = x; return z.real",
    ),
    *("z.real, z.imag = z.imag.copy(), z.real.copy(); return z", "z[...] = x; return z", "z[:] = x[0]; return z"),
    *("z[...] = 0; return z", "z[1] = 2.5; return z, z.imag", "z[:, :2] = x[:, 1:3]; return z", "z.flat = 1; return z"),
    *("z.fill(3); return z", "z[x > 0] = 1; return z", "z += x; return z", "np.copyto(z, x); return z"),
)
BITS = (
    *("x.view({i})", "(x + 1).view({i}) & 7", "(x.view({i}) >> 1).view(x.dtype)", "(x > 0).view(np.int8).sum(axis=1)"),
    *(
        "x.T.view({i})",
        "x.view(x.dtype)",
        "x[1:, 0].view('{i}'[3:])",
        "x.max().view({i})",
        "x.view({i}).view(np.dtype(x.dtype))",
    ),
)


def function_of(body: str) -> Any:
    scope: dict[str, Any] = {"np": np}
    exec(f"def function(z, x):\n    {body}", scope)
    return scope["function"]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("body", PARTS)
@pytest.mark.parametrize("is_argument", [True, False])
def test_parts_of_complex_arrays_are_views(body: str, is_argument: bool, engine: Engine) -> None:
    function = function_of(body if is_argument else f"z = z * 1; {body}")
    here = Z.copy(), X.copy()
    there = [engine.array(a) for a in here]
    expected = function(*here)
    with force_plans():
        found = cf.fuse(function)(*there)
    expected, found = ((r if isinstance(r, tuple) else (r,)) for r in (expected, found))
    for a, b in zip((*found, *there), (*expected, *here), strict=True):
        a = engine.host(a)
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2.0**-52)  # CuPy's absolute values of complex numbers round otherwise


def test_reals_have_no_imaginary_part_to_set() -> None:
    function = function_of("x.imag = 1; return x")
    for f in (function, cf.fuse(function)):
        with pytest.raises(TypeError, match="imaginary part"):
            f(Z, X)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("text", BITS)
@pytest.mark.parametrize("bits", [16, 32, 64])
def test_bits_are_read_as_another_dtype(text: str, bits: int, engine: Engine) -> None:
    function = function_of(f"return {text.format(i=f'np.int{bits}')}")
    x = X.astype(f"float{bits}")
    with force_plans():
        found = cf.fuse(function)(None, engine.array(x))
    assert_equal(engine.host(found), function(None, x))


CASTS = ("i += x", "i *= 0.5", "m += 1", "np.add(m, x, out=m)", "i[0] -= x[0]", "c = np.arange(4); c += x[0]")


@pytest.mark.parametrize("body", CASTS)
def test_casts_that_numpy_refuses_are_its_error(body: str) -> None:
    """A function may catch it."""
    scope: dict[str, Any] = {"np": np}
    exec(f"def function(x, i, m):\n    {body}\n    return x", scope)
    exec(
        f"def catching(x, i, m):\n    try:\n        {body}\n    except TypeError:\n        i = i + x\n    return i",
        scope,
    )
    given = X, np.arange(12).reshape(3, 4), X > 0
    for f in (scope["function"], cf.fuse(scope["function"])):
        with pytest.raises(TypeError, match="with casting rule 'same_kind'"):
            f(*given)
    with force_plans():
        assert_equal(cf.fuse(scope["catching"])(*given), scope["catching"](*given))


def test_a_conversion_without_a_copy_is_an_error_where_float64_is_asked_for() -> None:
    """A dtype of float64 equals None."""
    for f in (lambda x: np.asarray(x, np.dtype("float64"), copy=False), lambda x: np.array(x, "f8", copy=False)):
        for function in (f, cf.fuse(f)):
            with pytest.raises(ValueError, match="Unable to avoid copy"):
                function(np.ones(3, np.float32))
