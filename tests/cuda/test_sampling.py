"""Interpolation, convolution, histograms, and the arguments of calls, as NumPy has them, on CuPy's arrays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cupy_stand_in import CUPY, Array, array
from support import CUDA, NAN, assert_equal

import cupyfuse as cf
from cupyfuse.cuda import sampling
from cupyfuse.cuda.library_functions import arguments_of, resolve
from cupyfuse.errors import EngineError
from cupyfuse.ir.library import LibraryCall, Operand


def call_of(function: str, *arguments: Any, **options: Any) -> LibraryCall:
    return LibraryCall(function, arguments, options, (), (), ())


def function(name: str) -> Any:
    return resolve(call_of(name), CUPY)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_interpolation_is_in_float64(dtype: str, rng: np.random.Generator) -> None:
    x = (rng.standard_normal((4, 5)) * 3).astype("float32").T.view(Array)
    xs, fs = array(np.array([-2, 0, 2], dtype)), array(np.array([0, 3, 4], dtype))
    for options in ({}, {"left": 0.5, "right": -1.5}, {"period": 3.0}):
        found = function("interp")(x, xp=xs, fp=fs, **options)
        np.testing.assert_allclose(found, np.interp(np.asarray(x), xs, fs, **options), rtol=1e-14, atol=1e-15)
    assert function("interp")(array(np.asarray(np.float32(0.5))), xs, fs).shape == ()
    far = array(np.float32([1e8, -3, 1e8 + 8]))
    assert_equal(
        np.asarray(function("interp")(array(np.float32([0.25, 1.5])), array(np.float32([0, 1, 2])), far)),
        np.interp(np.float32([0.25, 1.5]), np.float32([0, 1, 2]), np.asarray(far)),
    )


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("most", [1, 12, 1 << 24])
def test_convolutions_are_sums(mode: str, most: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """NaN and infinities reach the sums that they take part in, and no others."""
    monkeypatch.setattr(sampling, "_MOST_PRODUCTS", most)
    for n in range(1, 8):
        for m in range(1, 8):
            for dtype in ("float32", "complex128", "int64"):
                a, v = ((rng.standard_normal(k) * 9).astype(dtype) for k in (n, m))
                if dtype == "complex128":
                    v = v * 1j
                if dtype == "float32":
                    a[0], v[-1] = NAN, np.inf
                for name in ("convolve", "correlate"):
                    with np.errstate(invalid="ignore"):
                        found, wanted = function(name)(array(a), array(v), mode), getattr(np, name)(a, v, mode)
                    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_histograms_of_integers(rng: np.random.Generator) -> None:
    whole, bins = rng.integers(0, 9, 50), [0, 1.5, 4, 6.5]
    for x in (whole, whole.astype("uint8"), whole.astype("float32")):
        for options in ({"bins": bins}, {"bins": 4}, {"bins": 3, "range": (1, 5)}, {"bins": bins, "density": True}):
            for got, wanted in zip(function("histogram")(array(x), **options), np.histogram(x, **options), strict=True):
                assert_equal(np.asarray(got), wanted.astype(got.dtype))


def test_gathers_by_mode(rng: np.random.Generator) -> None:
    x, index = array(rng.random((3, 4))), array(np.array([0, -1, 7, 2]))
    for axis in (None, 1):
        for mode in ("clip", "wrap"):
            assert_equal(np.asarray(function("take")(x, index, axis, mode=mode)), np.take(x, index, axis, mode=mode))


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("linalg.trace", ((3, 4, 4),), {"offset": 1}),
        ("linalg.diagonal", ((3, 4, 4),), {"offset": -1}),
        ("linalg.outer", ((3,), (4,)), {}),
        ("linalg.tensordot", ((3, 4), (4, 2)), {"axes": 1}),
        ("linalg.vecdot", ((3, 4), (3, 4)), {}),
        ("linalg.vecdot", ((3, 4), (3, 1)), {"axis": 0}),
        ("linalg.svdvals", ((3, 4),), {}),
        ("linalg.matrix_norm", ((2, 3, 4),), {"ord": 2, "keepdims": True}),
        ("linalg.matrix_norm", ((3, 4),), {}),
    ],
)
def test_functions_that_cupy_lacks(name: str, arguments: Any, options: Any, rng: np.random.Generator) -> None:
    given = [rng.random(shape) + 1j * rng.random(shape) for shape in arguments]
    found = resolve(call_of(name), _Lacking())(*given, **options)
    np.testing.assert_allclose(found, getattr(np.linalg, name.rpartition(".")[2])(*given, **options), rtol=1e-12)


class _Lacking:
    """NumPy without what CuPy 14 lacks."""

    __name__ = "cupy"
    linalg = SimpleNamespace(svd=np.linalg.svd, norm=np.linalg.norm)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


# Arguments ----------------------------------------------------------------------------------------------------------


def _histogram2d(x: Any, y: Any, bins: Any = 10, range: Any = None, weights: Any = None, density: bool = False) -> None:
    """With CuPy's parameters."""


THEIRS: Any = SimpleNamespace(
    histogram2d=_histogram2d,
    cov=lambda a, y=None, rowvar=True: None,
    delete=lambda arr, indices, axis=None: None,
    concatenate=lambda tup, axis=0: None,
    linalg=SimpleNamespace(svd=lambda a, full_matrices=True, compute_uv=True: None, pinv=lambda a, rcond=1e-15: None),
    __version__="14",
)
X, Y = Operand(0), Operand(1)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (call_of("histogram2d", X, Y, 10, None, True), ((X, Y, 10, None), {"density": True})),
        (call_of("histogram2d", X, Y, weights=X), ((X, Y), {"weights": X})),
        (call_of("cov", m=X, rowvar=False), ((X,), {"rowvar": False})),
        (call_of("delete", X, obj=2, axis=0), ((X, 2, 0), {})),
        (call_of("concatenate", arrays=[X, Y]), (([X, Y],), {})),
        (call_of("linalg.svd", X, False, hermitian=False), ((X, False), {})),
    ],
    ids=str,
)
def test_arguments_have_cupys_names_and_order(call: LibraryCall, expected: Any) -> None:
    assert arguments_of(call, THEIRS) == expected


def test_an_option_that_cupy_lacks_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"np\.linalg\.pinv has no option hermitian= in CuPy 14; leave it out"):
        arguments_of(call_of("linalg.pinv", X, hermitian=True), THEIRS)


@pytest.mark.gpu
def test_on_a_gpu(rng: np.random.Generator) -> None:
    CUDA.require()
    x, whole, v = rng.standard_normal((40, 30)).astype("float32"), rng.integers(0, 9, 500), rng.random(5, "float32")
    x[3, 4] = NAN

    def functions(x: Any, whole: Any, v: Any) -> Any:
        return (
            np.interp(x.T, [-1, 0, 2], [0, 3, 4], left=0.5),
            np.convolve(x.ravel(), v),
            np.correlate(v, x[0], "same"),
            np.histogram(whole, [0, 1.5, 4])[0],
            np.histogram2d(whole, whole, 4, None, True)[0],
            np.take(v, whole, mode="clip"),
        )

    wanted = functions(x, whole, v)
    for got, expected in zip(CUDA.host(cf.fuse(functions)(*CUDA.arrays([x, whole, v]))), wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
