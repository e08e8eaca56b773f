"""Functions that a trace does not rebuild call `float`, `type`, `max` and their like as the rebuilt ones do.

These are methods of classes, functions of the user's modules, what library wrappers hold, and what these call.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import NUMPY, Engine

import cupyfuse as cf
from cupyfuse.errors import TraceError

X = np.linspace(-2, 3, 12, dtype=np.float32).reshape(3, 4)
TEXT = """
import numpy as np

def loss(x):
    return float(np.mean(x**2))

def kind(x):
    return 2.0 if type(x) is np.ndarray else 3.0

def best(x):
    return max(x.sum(), x.mean()), min(x.sum(), x[0, 0]), any(v > 2.5 for v in x[0]), all([x.sum() > 0, True])

def as_type(x):
    return x.astype(float) * float(x.sum()) + isinstance(float(x.sum()), float)
"""


@pytest.fixture
def module() -> Iterator[Any]:
    made = types.ModuleType("module_of_kept_functions")
    exec(TEXT, made.__dict__)
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


class Head:
    """Calls builtins in methods of all kinds, and in what these call."""

    def __init__(self, k: Any = 3, rate: float = 0.5):
        self.k, self.rate, self.w = k, rate, np.ones((5, 4), np.float32)

    def __call__(self, x: Any) -> Any:
        return [float(v) for v in x[0]]

    @staticmethod
    def loss(p: Any) -> float:
        return float(np.mean(p**2))

    @classmethod
    def made(cls, n: Any) -> Any:
        return type(n) is float, int(n)

    @property
    def scale(self) -> Any:
        return float(self.k) * max(self.rate, 0.25)

    @functools.lru_cache  # noqa: B019
    def cached(self) -> float:
        return float(2)

    @contextlib.contextmanager
    def wrapped(self, x: Any) -> Iterator[float]:
        yield float(x.sum())

    def inner(self, x: Any) -> Any:
        later = lambda v: int(v.max()) + round(float(v.min()), 1)  # noqa: E731
        return later(x), bool((x > 2).any()), sorted(float(v) for v in (1, 2))

    def forward(self, x: Any) -> Any:
        with self.wrapped(x) as total:
            parts = self(x), self.loss(x @ self.w.T), self.made(self.rate), x * self.scale, self.inner(x), total
        return parts, type(x) is np.ndarray, max(x.sum(), x.mean())


class Derived(Head):
    def loss(self, p: Any) -> float:  # type: ignore[override]
        return super().loss(p) + float(p.max())


def flat(value: Any) -> list[Any]:
    return [v for item in value for v in flat(item)] if isinstance(value, (tuple, list)) else [value]


def assert_like(engine: Engine, got: Any, wanted: Any) -> None:
    """Values within some roundings of float32; types of Python's numbers, which are arrays of CuPy's."""
    for ours, theirs in zip(flat(engine.host(got)), flat(wanted), strict=True):
        assert type(ours) is type(theirs) or engine.name != "numpy"
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("cls", [Head, Derived])
def test_methods(engine: Engine, cls: type[Head]) -> None:
    head, other = cls(), cls()
    head.w = engine.array(other.w)
    fused = cf.fuse(lambda head, x: head.forward(x))
    for k, rate in ((3, 0.5), (3, 0.75), (4, 0.125), (5, 0.25), (6.5, 2.0)):
        head.k, head.rate = other.k, other.rate = k, rate
        assert_like(engine, fused(head, engine.array(X)), other.forward(X))


@pytest.mark.parametrize("name", ["loss", "kind", "best", "as_type"])
def test_functions_of_modules(engine: Engine, module: Any, name: str) -> None:
    """`kind` took a traced array for something else than an array, and the call returned something else."""
    fused = cf.fuse(eval(f"lambda x: helpers.{name}(x)", {"helpers": module}))
    assert_like(engine, fused(engine.array(X)), getattr(module, name)(X))


def test_numbers_that_methods_convert_need_no_plans_of_their_own() -> None:
    head = Head()
    fused = cf.fuse(lambda head, x: x * head.scale)
    for k in range(3, 12):
        head.k = k
        np.testing.assert_allclose(fused(head, X), X * head.scale, rtol=1e-6)
    assert len(fused.plans) == 2, "of an integer, and of those that change"


def test_what_hides_a_builtin_is_called(module: Any) -> None:
    module.float = lambda v: v * 2
    fused = cf.fuse(eval("lambda x: helpers.loss(x)", {"helpers": module}))
    assert fused(X) == pytest.approx(2 * np.mean(X**2))
    del module.float
    assert fused(X) == pytest.approx(np.mean(X**2))


def test_functions_have_their_code_again(module: Any) -> None:
    functions: list[Callable[..., Any]] = [module.loss, Head.__call__, Head.loss, Head.inner]
    before = [function.__code__ for function in functions]  # type: ignore[attr-defined]
    cf.fuse(eval("lambda x, head: (helpers.loss(x), head.forward(x))", {"helpers": module}))(X, Head())
    with pytest.raises(TraceError, match="branch on an array's values"):
        cf.fuse(lambda x, head: 1 if head.loss(x) > 0 else 2)(X, Head())
    assert [function.__code__ for function in functions] == before  # type: ignore[attr-defined]


def test_traces_in_many_threads_and_plain_calls_beside_them() -> None:
    head, wanted = Head(), Head().forward(X)
    errors: list[BaseException] = []
    plain = Head.loss.__code__

    def call(function: Callable[[], Any]) -> None:
        try:
            for _ in range(5):
                assert_like(NUMPY, function(), wanted)
        except BaseException as error:
            errors.append(error)

    calls = [lambda: cf.fuse(lambda head, x: head.forward(x))(head, X) for _ in range(4)]
    threads = [threading.Thread(target=call, args=(f,)) for f in (*calls, lambda: head.forward(X))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert Head.loss.__code__ is plain
