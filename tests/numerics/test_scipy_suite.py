"""SciPy's own tests of logsumexp, softmax and log_softmax, run on ours: with NumPy, on a GPU, and with its kernels on
the CPU.

The module comes out of the installed SciPy and is loaded under a name of ours. Its tests look the functions up when
they run, and find ours. Arrays are NumPy's, or CuPy's on a GPU; the kernels on the CPU get copies of NumPy's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
from support import CUDA, HOST, NUMPY, Engine

import cupyfuse as cf

NAMES = ("logsumexp", "softmax", "log_softmax")
CHECKS = ("xp_assert_equal", "xp_assert_close", "xp_assert_less", "assert_allclose")
FILE = Path(scipy.__file__).parent / "special" / "tests" / "test_logsumexp.py"
NOT_OURS = ("test_wrap_radians",)  # of a helper of SciPy's
# A million elements take a minute on emulated threads; complex numbers never reach a kernel.
NOT_EMULATED = ("test_logsumexp", "test_logsumexp_b", "test_gh22601_infinite_elements")


@contextlib.contextmanager
def foreign_marks() -> Iterator[None]:
    """While SciPy's tests are defined: its marks for other array libraries, which our configuration does not know."""
    names = ("skip_xp_backends", "xfail_xp_backends")
    conftest = types.ModuleType("scipy.conftest")  # the real one would change Hypothesis's settings
    conftest.array_api_compatible = lambda test: test
    before = sys.modules.get("scipy.conftest")
    sys.modules["scipy.conftest"] = conftest
    for name in names:
        setattr(pytest.mark, name, lambda *args, **options: lambda test: test)
    try:
        yield
    finally:
        for name in names:
            delattr(pytest.mark, name)
        del sys.modules["scipy.conftest"]
        if before is not None:
            sys.modules["scipy.conftest"] = before


def loaded() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("scipys_tests", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with foreign_marks():
        spec.loader.exec_module(module)
    return module


def tests_of(module: types.ModuleType) -> dict[str, Any]:
    """The test classes and functions of a module."""
    return {
        name: value
        for name, value in vars(module).items()
        if (isinstance(value, type) and name.startswith("Test")) or (name.startswith("test_") and name not in NOT_OURS)
    }


tests_of.__test__ = False
SUITE = loaded()
globals().update(tests_of(SUITE))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.function.__module__ == __name__:
        return
    engines = [pytest.param(NUMPY, id="numpy"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)]
    if metafunc.function.__name__ not in NOT_EMULATED:
        engines.append(pytest.param(HOST, id="host"))
    metafunc.parametrize("library", engines, indirect=True)


def on_kernels(function: Callable[..., Any], engine: Engine) -> Callable[..., Any]:
    """The function for NumPy's arrays, which it gets as arrays of the engine."""

    def moved(value: Any) -> Any:
        return engine.array(value) if isinstance(value, np.ndarray) else value

    def back(value: Any) -> Any:
        return tuple(map(back, value)) if isinstance(value, tuple) else np.array(value, subok=False)[()]

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        if any(np.iscomplexobj(value) for value in (*args, *options.values())):
            return function(*args, **options)
        return back(function(*map(moved, args), **{name: moved(value) for name, value in options.items()}))

    return call


def on_host(check: Callable[..., None]) -> Callable[..., None]:
    """One of SciPy's checks, for CuPy's arrays."""

    def checked(actual: Any, desired: Any, *args: Any, **options: Any) -> None:
        __tracebackhide__ = True
        assert type(actual) is type(desired) or not hasattr(desired, "get"), "the result is another library's array"
        values = (value.get()[()] if hasattr(value, "get") else value for value in (actual, desired))
        check(*values, *args, **options)

    return checked


@pytest.fixture
def library(request: pytest.FixtureRequest) -> Iterator[Engine | None]:
    """The engine that a test of SciPy's runs on; None for ours."""
    engine: Engine | None = getattr(request, "param", None)
    if engine is None:
        yield None
        return
    engine.require()
    with engine.active():
        yield engine


@pytest.fixture(autouse=True)
def ours(library: Engine | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let SciPy's tests find our functions, and see that each of them calls one."""
    if library is None:
        yield
        return
    calls = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            calls.append(function)
            return function(*args, **options)

        return call

    for name in NAMES:
        function = getattr(cf, name)
        function = on_kernels(function, library) if library is HOST else function
        monkeypatch.setattr(SUITE, name, counted(function), raising=False)
    for name in CHECKS if library is CUDA else ():
        if hasattr(SUITE, name):
            monkeypatch.setattr(SUITE, name, on_host(getattr(SUITE, name)))
    yield
    assert calls, "a test of SciPy's that calls none of our functions"


@pytest.fixture
def xp(library: Engine) -> Any:
    """The array library; CuPy's with the array API's asarray, which takes a device."""
    if library is not CUDA:
        return np
    cupy = library.xp
    namespace = types.ModuleType("cupy")
    namespace.__getattr__ = lambda name: getattr(cupy, name)
    namespace.asarray = lambda values, dtype=None, device=None: cupy.asarray(values, dtype)
    return namespace


@pytest.fixture
def devices() -> list[None]:
    return [None]


@pytest.fixture
def skip_xp_backends() -> None:
    """What tests of older versions of SciPy ask for; they skip nothing here."""


def test_the_suite_is_whole() -> None:
    """A version of SciPy that moves its tests must not go unnoticed."""
    found: set[str] = set()
    for name, value in tests_of(SUITE).items():
        found |= set(vars(value)) if isinstance(value, type) else {name}
    assert {"test_logsumexp", "test_logsumexp_b_shape", "test_softmax_multi_axes"} <= found
    # SciPy 1.15 tests log_softmax elsewhere, by another name.
    assert "test_log_softmax_3d" in found or scipy.__version__.startswith("1.15.")
