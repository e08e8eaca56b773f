"""What the tests share: engines, dtypes, awkward arrays, special values, tolerances and the three reference heads.

Tolerances are derived, never tuned. With the unit roundoff ``u`` (half the machine epsilon) of the type that a step
computes in, a sum of ``n`` numbers carries an error of at most ``n u`` times the sum of their absolute values, whatever
the order; a product of matrices ``K u |a| |b|``; one rounding ``u`` times the value. `bounds.py` carries such bounds
through whole chains. 16-bit floats compute in float32 and round once where they are stored.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from cupyfuse.heads import head_logsumexp, head_softmax, head_sum, oracle
from host_cuda.library import Library
from host_cuda.runtime import HostArrays, HostRuntime, installed

import cupyfuse as cf

ROOT = Path(__file__).resolve().parents[2]  # of the checkout
HELPERS = ROOT / "tests" / "helpers"

FLOATS = ("float16", "bfloat16", "float32", "float64")
INF, NAN = float("inf"), float("nan")
SPECIALS = (INF, -INF, NAN, 0.0, -0.0)

DAYS = 7  # in which the cases of tests that rotate have all run


def chosen(session: pytest.Session, test: Callable[..., Any]) -> list[dict[str, Any]]:
    """The parameters of each case of a test that runs in this session: what `-k` and `rotates` have left of them."""
    return [item.callspec.params for item in session.items if getattr(item, "function", None) is test]


def of_day(day: int, cases: Iterable[str]) -> set[str]:
    """A seventh of the cases of each test, of which any seven days in a row have all.

    Cases are dealt out in an order that has nothing to do with their parameters: a day that takes every seventh case of
    a product of seven functions and others would have one function.
    """
    by_test: dict[str, list[str]] = {}
    for case in cases:
        by_test.setdefault(case.partition("[")[0], []).append(case)
    taken = set()
    for test, group in by_test.items():
        group.sort(key=lambda case: (zlib.crc32(case.encode()), case))
        taken.update(group[(day + zlib.crc32(test.encode())) % DAYS :: DAYS])
    return taken


# Engines ------------------------------------------------------------------------------------------------------------


@functools.cache
def docs_script(name: str) -> ModuleType:
    """Import a script that writes a page of the documentation."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def missing_gpu() -> str:
    """Why there is no GPU to test on; an empty string where there is one."""
    try:
        import cupy
    except ImportError:
        return "needs a GPU: CuPy is not installed"
    return "" if cupy.cuda.is_available() else "needs a GPU: CuPy finds none"


def require_hopper() -> None:
    """Skip the test where the GPU has no tensor cores of Hopper's kind."""
    import cupy

    if cupy.cuda.Device().compute_capability != "90":
        pytest.skip("needs a GPU with Hopper's tensor cores")


class Engine:
    """An array library, and the way from NumPy arrays to its own and back.

    "numpy" is the NumPy engine; "cuda" the CUDA engine on a GPU, through CuPy; "host" the CUDA engine with its kernels
    run on the CPU (see host_cuda/README.md).
    """

    def __init__(self, name: str):
        self.name = name

    def require(self) -> None:
        if self.name == "cuda" and missing_gpu():
            pytest.skip(missing_gpu())

    @contextlib.contextmanager
    def active(self) -> Iterator[Engine]:
        """Where the library runs on this engine."""
        if self.name != "host":
            yield self
            return
        with installed(self.runtime):
            yield self

    def prepare(self, calls: Iterable[Callable[[], Any]]) -> None:
        """Compile the host's kernels of some calls together, in half the time that one by one takes."""
        if self.name == "host":
            with self.runtime.only_collecting(), np.errstate(all="ignore"):
                for call in calls:
                    call()

    @functools.cached_property
    def runtime(self) -> HostRuntime:
        asan = "libasan" in os.environ.get("LD_PRELOAD", "")
        return HostRuntime(Library(address_sanitizer=asan), asan)

    @property
    def xp(self) -> Any:
        if self.name == "numpy":
            return np
        if self.name == "host":
            return HostArrays(self.runtime)
        import cupy

        return cupy

    def array(self, values: Any, layout: str = "contiguous") -> Any:
        """The values (a NumPy array) on this engine, lying in memory as `layout` says."""
        return lay_out(self.xp, np.asarray(values), layout)

    def arrays(self, values: Any) -> list[Any]:
        return [self.array(v) for v in values]

    def host(self, values: Any) -> Any:
        """Back to NumPy; also through tuples, lists and dicts."""
        if isinstance(values, tuple) and hasattr(values, "_fields"):
            return type(values)(*map(self.host, values))
        if isinstance(values, (tuple, list)):
            return type(values)(map(self.host, values))
        if isinstance(values, dict):
            return {k: self.host(v) for k, v in values.items()}
        return values if self.name == "numpy" or not hasattr(values, "get") else values.get()


NUMPY, HOST, CUDA = Engine("numpy"), Engine("host"), Engine("cuda")

LAYOUTS = ("contiguous", "fortran", "row_gap", "column_gap", "reversed", "offset", "misaligned", "transposed")


def lay_out(xp: Any, values: np.ndarray[Any, Any], layout: str) -> Any:
    """An array equal to `values` with rows apart, columns apart, negative strides, an odd address, or transposed."""
    itemsize, shape = values.dtype.itemsize, values.shape
    if not values.ndim:
        # CuPy fills an array without dimensions, and 0 is what it fills with for -0.
        return xp.asarray(values.reshape(1).copy()).reshape(())
    if layout == "contiguous":
        return xp.asarray(values.copy())
    if layout == "fortran":
        target = xp.empty(shape, values.dtype, order="F")
    elif layout == "row_gap":
        target = xp.empty((*shape[:-1], shape[-1] + 3), values.dtype)[..., : shape[-1]]
    elif layout == "column_gap":
        target = xp.empty((*shape[:-1], 2 * shape[-1]), values.dtype)[..., ::2]
    elif layout == "reversed":
        target = xp.empty(shape, values.dtype)[(slice(None, None, -1),) * len(shape)]
    elif layout == "offset":
        target = xp.empty((values.size + 1,), values.dtype)[1:].reshape(shape)
    elif layout == "transposed":
        target = xp.empty(shape[::-1], values.dtype).transpose()
    else:
        assert layout == "misaligned"  # an address that is no multiple of the item size: NumPy alone can make one
        raw = xp.empty((values.size + 1) * itemsize, np.uint8)
        if xp is not np:
            return lay_out(xp, values, "offset")
        target = raw[1 : 1 + values.size * itemsize].view(values.dtype).reshape(shape)
    target[...] = xp.asarray(values)
    return target


# Values -------------------------------------------------------------------------------------------------------------


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def info(name: str) -> Any:
    return ml_dtypes.finfo(dtype_of(name))


def unit(name: str) -> float:
    """Unit roundoff of a type: the largest relative error of one rounding to nearest."""
    return float(info(name).eps) / 2


def compute(name: str) -> str:
    """The type that 16-bit floats compute in."""
    return "float32" if name in ("float16", "bfloat16") else name


def normal(rng: np.random.Generator, shape: Any, dtype: str = "float32", scale: float = 1.0) -> np.ndarray[Any, Any]:
    return (rng.standard_normal(shape) * scale).astype(dtype_of(dtype))


def sprinkle(rng: np.random.Generator, values: np.ndarray[Any, Any], share: float, specials: Any = SPECIALS) -> Any:
    """The values with about `share` of them exchanged for special ones."""
    hit = rng.random(values.shape) < share
    return np.where(hit, rng.choice(np.array(specials), values.shape), values.astype(np.float64)).astype(values.dtype)


AXES: dict[tuple[int, ...], tuple[Any, ...]] = {
    (7,): (None, 0, -1, (0,)),
    (5, 8): (None, 0, 1, -2, (0, 1), (1,), (-1, 0)),
    (3, 4, 5): (None, 0, 1, 2, -1, (0, 1), (0, 2), (2, 1), (0, 1, 2)),
    (2, 3, 4, 5): (None, 1, (1, 3), (0, 2)),
    (1, 6): (0, 1, None),
    (6, 1): (0, 1, None),
}
SHAPES_AND_AXES = [(shape, axis) for shape, axes in AXES.items() for axis in axes]


# Comparisons --------------------------------------------------------------------------------------------------------


def kinds(values: Any) -> np.ndarray[Any, Any]:
    """For each element 0 (finite), 1 (+inf), -1 (-inf) or 2 (NaN)."""
    v = np.asarray(values).astype(np.float64)
    return np.where(np.isnan(v), 2, np.where(np.isinf(v), np.sign(np.nan_to_num(v)), 0))


def assert_same_kinds(actual: Any, expected: Any, where: str = "") -> None:
    """Infinite and NaN elements are the same ones."""
    __tracebackhide__ = True
    assert np.shape(actual) == np.shape(expected), f"{where}: shape {np.shape(actual)} != {np.shape(expected)}"
    a, b = kinds(actual), kinds(expected)
    if not np.array_equal(a, b):
        first = tuple(int(i) for i in np.argwhere(a != b)[0])
        got, wanted = np.asarray(actual)[first], np.asarray(expected)[first]
        raise AssertionError(f"{where}: at {first} got {got}, expected {wanted}")


def assert_close(actual: Any, expected: Any, bound: Any, where: str = "") -> None:
    """Same special values, and finite elements within an absolute bound (a number, or one for each element)."""
    __tracebackhide__ = True
    assert_same_kinds(actual, expected, where)
    a, b = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    limit = np.broadcast_to(bound, b.shape)
    with np.errstate(invalid="ignore"):
        bad = np.isfinite(b) & ~(np.abs(a - b) <= limit)
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{where}: {bad.sum()} of {bad.size} elements are off, first at {first}: "
            f"got {a[first]!r}, expected {b[first]!r} within {limit[first]:.3g}"
        )


def assert_equal(actual: Any, expected: Any) -> None:
    """Bit for bit, NaN equal to NaN, with the sign of zeros; same shape and dtype."""
    __tracebackhide__ = True
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    if actual.dtype == dtype_of("bfloat16"):  # NumPy's comparison of NaN does not know this one
        actual, expected = actual.astype(np.float32), expected.astype(np.float32)
    np.testing.assert_array_equal(actual, expected)
    if actual.dtype.kind != "b":
        np.testing.assert_array_equal(np.signbit(actual[actual == 0]), np.signbit(expected[expected == 0]))


# The three reference heads ------------------------------------------------------------------------------------------


def head_softmax_training(
    x: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    gamma: Any,
    beta: Any,
    scale: Any,
    num_batches_tracked: Any,
) -> Any:
    arguments = (x, weight, bias, running_mean, running_var, gamma, beta, scale)
    return head_softmax(*arguments, training=True, num_batches_tracked=num_batches_tracked)


class Head(NamedTuple):
    name: str
    function: cf.Fused
    bound: tuple[str, ...]  # the arguments that are weights

    def plain(self, *arguments: Any) -> Any:
        """Evaluate the oracle of the head, in inference."""
        return oracle.evaluate(self.function, dict(zip(self.function.names, arguments, strict=False))).result

    def arguments(
        self, rng: np.random.Generator, rows: int, inner: int, columns: int, dtype: str = "float32"
    ) -> list[np.ndarray[Any, Any]]:
        """Arguments drawn as the benchmarks do, statistics near those of the product."""
        limit = 1 / np.sqrt(inner)
        arguments = [
            rng.random((rows, inner)),
            rng.uniform(-limit, limit, (columns, inner)),
            rng.uniform(-limit, limit, columns),
        ]
        if self.function is head_softmax:
            arguments += [rng.standard_normal(columns) / 4, rng.uniform(0.2, 1.5, columns)]
            arguments += [rng.uniform(0.5, 1.5, columns), rng.standard_normal(columns), np.array([-1.5])]
        return [a.astype(dtype_of(dtype)) for a in arguments]


HEADS = (
    Head("head_logsumexp", head_logsumexp, ("weight", "bias")),
    Head("head_sum", head_sum, ("weight", "bias")),
    Head("head_softmax", head_softmax, ("weight", "bias", "running_mean", "running_var", "gamma", "beta", "scale")),
)
