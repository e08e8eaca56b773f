"""What stands in for functions that CuPy lacks or computes otherwise, with NumPy in CuPy's place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.signal
import scipy.stats
from cupy_stand_in import CUPY, SUMS
from support import CUDA, NAN, assert_equal

import cupyfuse as cf
from cupyfuse.cuda.library_functions import arguments_of, resolve
from cupyfuse.errors import EngineError
from cupyfuse.ir.library import LibraryCall, Operand, writing_call


def call_of(function: str, *arguments: Any, **options: Any) -> LibraryCall:
    return LibraryCall(function, arguments, options, (), (), ())


DTYPES = [*SUMS, "bool", "int8", "uint8", "int16", "uint16"]


SCATTERS = [(name, dtype) for name in ("add", "subtract", "maximum", "minimum") for dtype in DTYPES]
SCATTERS.remove(("subtract", "bool"))  # NumPy refuses it
SCATTERS += [(name, dtype) for name in ("add", "subtract") for dtype in ("complex64", "complex128")]


@pytest.mark.parametrize(("name", "dtype"), SCATTERS)
def test_scatters(name: str, dtype: str, rng: np.random.Generator) -> None:
    """Bit for bit: small integers add up exactly in any order; large ones wrap around."""
    x, values = (rng.integers(-9, 9, n).astype(dtype) for n in (5, 40))
    if np.dtype(dtype).kind in "iu":
        limits = np.iinfo(dtype)
        x[:2], values[:2] = (limits.min, limits.max), (limits.max, limits.min)
    index = rng.integers(-5, 5, 40)
    at = resolve(call_of(writing_call(f"{name}.at")), CUPY)
    for given in (values, values[0], values[:1]):
        expected, before = x.copy(), x.copy()
        getattr(np, name).at(expected, index, given)
        found = at(x, index, given)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == x.dtype and np.array_equal(x, before)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("name", ["maximum", "minimum"])
def test_extremes_of_special_values(name: str, dtype: str) -> None:
    tiny, large = np.finfo(dtype).smallest_subnormal, np.finfo(dtype).max
    values = np.array([np.inf, -np.inf, NAN, -NAN, 0, tiny, -tiny, large, -large, 1, 1 + np.finfo(dtype).eps], dtype)
    x, others = (a.ravel() for a in np.meshgrid(values, values))
    expected = x.copy()
    with np.errstate(invalid="ignore"):
        getattr(np, name).at(expected, np.arange(x.size), others)
    assert_equal(resolve(call_of(writing_call(f"{name}.at")), CUPY)(x, np.arange(x.size), others), expected)


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        (np.array([0, 2, 0, -1, 3]), (5, 3)),
        ((slice(None), np.array([1, 1, 0])), (4, 3)),
        ((np.array([0, 0, 1]), np.array([2, -1, 0])), (3,)),
        ((np.array([[0, 1], [1, 0]]), slice(1, None)), (2, 2, 2)),
        ([1, 1], (1, 2, 3)),
        (np.zeros(0, int), (0, 3)),
    ],
)
def test_the_last_of_several_values_stays(index: Any, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    """Whatever the order of the writes: CuPy's is that of its threads, here it is the other way round."""

    class Reversed(np.ndarray[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            elements = np.arange(self.size).reshape(self.shape)[key].ravel()[::-1]
            flat = np.broadcast_to(value, np.empty(self.shape)[key].shape).ravel()[::-1]
            self.view(np.ndarray).reshape(-1)[elements] = flat

    x, value = rng.random((4, 3)), rng.random(shape)
    expected = x.copy()
    expected[index] = value
    x = x.view(Reversed)
    assert_equal(np.asarray(resolve(call_of("setitem"), CUPY)(x, index, value)), expected)


def test_assignments_that_cannot_repeat_are_made_at_once(rng: np.random.Generator) -> None:
    limited = SimpleNamespace(asarray=np.asarray, __name__="cupy")  # nothing else is called
    x = rng.random((4, 3))
    for index, value in (([0, 0], 2.0), (x > 0.5, np.ones((x > 0.5).sum())), ((slice(2), 1), np.ones(2))):
        expected = x.copy()
        expected[index] = value
        assert_equal(resolve(call_of("setitem"), limited)(x, index, value), expected)


def test_values_that_are_arrays_of_the_dtype_are_added_as_they_are(rng: np.random.Generator) -> None:
    limited = SimpleNamespace(ndarray=np.ndarray, add=np.add, __name__="cupy")  # nothing else is called
    x, values, index = rng.random(4), rng.random(6), np.array([0, 1, 1, 3, -1, 0])
    expected = x.copy()
    np.add.at(expected, index, values)
    assert_equal(resolve(call_of(writing_call("add.at")), limited)(x, index, values), expected)


@pytest.mark.parametrize("name", ["cdf", "sf", "logcdf", "logsf", "ppf", "isf", "pdf", "logpdf"])
def test_the_normal_distribution(name: str, rng: np.random.Generator) -> None:
    numpy = SimpleNamespace(**{n: getattr(np, n) for n in ("asarray", "where", "square", "exp", "log")}, __name__="np")
    method, expected = resolve(call_of(f"scipy.stats.norm.{name}"), numpy), getattr(scipy.stats.norm, name)
    for x in (rng.random(9), rng.standard_normal(9), np.array([0.0, 1.0, np.inf, -np.inf, NAN])):
        for options in ((), (0.5,), (0.5, 2.0), (rng.random(x.size), np.linspace(-1, 3, x.size))):
            # A difference and a quotient, each rounded, whose errors the function magnifies by at most 40 here.
            with np.errstate(all="ignore"):
                np.testing.assert_allclose(method(x, *options), expected(x, *options), rtol=1e-13, atol=1e-15)


def test_lists_become_arrays_where_cupy_takes_none() -> None:
    x = Operand(0)
    (given, xp, fp), options = arguments_of(call_of("interp", x, [0.0, 1.0], fp := [3, 4], left=0.5), np)
    assert given is x and type(xp) is np.ndarray and options == {"left": 0.5}
    assert_equal(fp, np.array([3, 4]))
    (b, _, given), _ = arguments_of(call_of("scipy.signal.lfilter", [0.5], (1, -0.5), x), np)
    assert type(b) is np.ndarray and given is x
    _, options = arguments_of(call_of("digitize", x, bins=[1, 2]), np)
    assert type(options["bins"]) is np.ndarray
    for call in (call_of("pad", x, [(1, 2)]), call_of("concatenate", [x, x]), call_of("kron", x, [x, x])):
        assert arguments_of(call, np) == (call.arguments, {})


@pytest.mark.gpu
def test_on_a_gpu(rng: np.random.Generator) -> None:
    CUDA.require()
    m, ids = rng.standard_normal((64, 8)), rng.integers(0, 64, 500)
    values = rng.standard_normal((500, 8))
    values[::50] = NAN

    def scatter(m: Any, ids: Any, values: Any) -> Any:
        z, high, low = m.copy(), m.copy(), m.copy()
        z[ids] = values
        np.maximum.at(high, ids, values)
        np.minimum.at(low, ids, values)
        whole = np.zeros(64, np.int16)
        np.subtract.at(whole, ids, 3)
        return z, high, low, whole

    def libraries(m: Any, ids: Any, values: Any) -> Any:
        cdf = scipy.stats.norm.cdf(m, 0.5, 2.0)
        return cdf, np.interp(m[0], [0.0, 1.0], [3, 4]), scipy.signal.lfilter([0.5], [1, -0.5], m[:, 0])

    for dtype in (np.float32, np.float64):
        given = m.astype(dtype), ids, values.astype(dtype)
        for got, wanted in zip(CUDA.host(cf.fuse(scatter)(*CUDA.arrays(given))), scatter(*given), strict=True):
            assert_equal(got, wanted)
        for got, wanted in zip(CUDA.host(cf.fuse(libraries)(*CUDA.arrays(given))), libraries(*given), strict=True):
            unit = np.finfo(dtype).eps
            np.testing.assert_allclose(got, wanted, rtol=100 * unit, atol=100 * unit)  # sums of few terms below 4


def test_a_function_that_cupy_lacks_is_named() -> None:
    from cupyfuse.cuda.runtime import CupyRuntime

    runtime: Any = object.__new__(CupyRuntime)
    runtime._cupy = SimpleNamespace(__name__="cupy", __version__="14")
    with pytest.raises(EngineError, match=r"np\.kron has no counterpart in CuPy 14"):
        runtime.library_function(call_of("kron"), {})
