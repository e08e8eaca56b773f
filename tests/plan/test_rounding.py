"""16-bit products stored rounded: where the code as written rounds them, and the bytes are worth it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from passes import execute
from support import HOST, normal

import cupyfuse as cf
from benchmarks.chains import TAILS
from cupyfuse import devices, settings
from cupyfuse.plan.build import build
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.rounding import may_store_rounded
from cupyfuse.plan.schedule import epilogues, fused_product, rounded
from cupyfuse.settings import Settings
from cupyfuse.torch.chains.chain import Call, Chain
from cupyfuse.torch.rules.symbols import Ref

LARGE = (16384, 1024, 2048)


def plan_of(tail: Callable[..., Any], dtype: str = "bfloat16", shape: tuple[int, int, int] = LARGE) -> Plan:
    m, k, n = shape
    linear = cf.fuse(lambda x, w, b: tail(x @ w.T + b))
    return linear.plan(cf.spec((m, k), dtype), cf.spec((n, k), dtype), cf.spec(n, dtype))


def is_stored_rounded(plan: Plan) -> bool:
    (product,) = (s for s in plan.steps if s.kind == "Gemm")
    said = f"stored in {product.product.dtype}: the code as written rounds it, too" in str(plan)
    assert said == (product.writes == 2 * product.product.size and product.outputs != plan.steps[-1].outputs)
    return said


# As written ----------------------------------------------------------------------------------------------------------

AS_WRITTEN: dict[str, Callable[[Any], Any]] = {
    "one operation": lambda y: cf.log_softmax(y, axis=1),
    "a temperature": lambda y: cf.log_softmax(y * 0.7, axis=1),
    "a unit length": lambda y: y / np.sqrt((y * y).sum(axis=1, keepdims=True) + 1e-6),
    "a softmax by hand": lambda y: (lambda e: e / e.sum(axis=1, keepdims=True))(
        np.exp(y - y.max(axis=1, keepdims=True))
    ),
    "two results": lambda y: (cf.softmax(np.tanh(y), axis=1), np.exp(y * 3)),
    "conversions": lambda y: cf.softmax((y * 3).astype("float32"), axis=1).astype(y.dtype),
    "a result in float32": lambda y: cf.softmax(y.astype("float32") * 0.7, axis=1),
}
NOT_STORED: dict[str, Callable[[Any], Any]] = {
    "a result beside": lambda y: (cf.log_softmax(y * 0.7, axis=1), y),
    "nothing behind": lambda y: y,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", [*AS_WRITTEN, *NOT_STORED])
def test_what_is_rounded_as_written(name: str, dtype: str) -> None:
    tail = (AS_WRITTEN | NOT_STORED)[name]
    traced = cf.fuse(lambda x, w, b: tail(x @ w.T + b)).trace(
        (cf.spec((64, 32), dtype), cf.spec((48, 32), dtype), cf.spec(48, dtype))
    )
    assert may_store_rounded(traced.graph, traced.calls) == (name in AS_WRITTEN)
    assert not may_store_rounded(traced.graph, ()), "what was written is unknown"


def torch_plan(*tail: tuple[str, Any]) -> Plan:
    """The plan of a linear layer and operations of PyTorch, each on the result of the one before."""
    calls = [Call("linear", (Ref(0), Ref(1), Ref(2)), (3,))]
    calls += [Call(rule, (Ref(k), *more), (k + 1,)) for k, (rule, more) in enumerate(tail, 3)]
    chain = Chain(("x", "w", "b"), tuple(calls), outputs=calls[-1].results, updates=(), fixed=frozenset())
    m, k, n = LARGE
    metas = tuple((shape, "bfloat16") for shape in ((m, k), (n, k), (n,)))
    return build(chain.trace(metas).as_traced(), None, Settings())


def test_what_an_operation_computes_inside_is_not_rounded() -> None:
    """The product of PyTorch's `linear` is inside: the sum with the bias is what is rounded."""
    for tail in ((("softmax", (1,)),), (("layer_norm", ((2048,),)), ("softmax", (1,)))):
        plan = torch_plan(*tail)
        assert is_stored_rounded(plan) and plan.steps[0].fused == ("matmul", "add")


# Plans ---------------------------------------------------------------------------------------------------------------


def written(name: str) -> Callable[[Any], Any]:
    return lambda y: TAILS[name].written(cf, y)


def test_what_is_worth_it() -> None:
    """What the row program reads is beyond the L2 cache, and the product's epilogue cannot do without reading it."""
    for name, shape in (("soft_cap_softmax", LARGE), ("unit_length", (32768, 1024, 2048))):
        plan = plan_of(written(name), shape=shape)
        assert is_stored_rounded(plan) and [s.kind for s in plan.steps] == ["Gemm", "RowProgram"]
        assert plan.steps[0].fused == ("matmul", "add") and plan.steps[1].reads == plan.steps[0].writes
    assert not is_stored_rounded(plan_of(written("soft_cap_softmax"), shape=(4096, 1024, 2048))), (
        "the L2 cache holds it"
    )
    assert not is_stored_rounded(plan_of(written("square_sum_root"))), "the epilogue sums the squares"


def test_the_library_stores_it_where_it_can_add_the_bias() -> None:
    """It has the faster products; but its epilogue reads a bias that is an argument alone."""
    m, k, n = LARGE
    for function, by, in_epilogue in (
        (lambda x, w, b: x @ w.T, "cuBLAS", False),
        (lambda x, w, b: x @ w.T + b, "cuBLAS", True),
        (lambda x, w, b: x @ w.T + w[:, 0], "own", False),
    ):
        plan = cf.fuse(lambda x, w, b, f=function: cf.softmax(np.tanh(f(x, w, b) / 30) * 30, axis=1)).plan(
            cf.spec((m, k), "bfloat16"), cf.spec((n, k), "bfloat16"), cf.spec(n, "bfloat16")
        )
        (product,) = (s for s in plan.steps if s.kind == "Gemm")
        assert is_stored_rounded(plan) and product.how.startswith(by)
        assert product.by_library == in_epilogue == ("cuBLASLt" in plan.source()), "its bias added"


CAST_BIAS: dict[str, Callable[[Any, Any], Any]] = {
    "read by the product's sum": lambda y, b: cf.softmax(np.tanh(y * 0.7), axis=1),
    "read behind it, too": lambda y, b: cf.softmax(y * b * 0.7, axis=1),
}


@pytest.mark.parametrize("name", CAST_BIAS)
def test_a_bias_is_cast_in_the_epilogue(all_that_may: None, name: str, rng: np.random.Generator) -> None:
    """As under autocast, where weights and biases are float32."""

    def linear(x: Any, w: Any, b: Any) -> Any:
        rounded = b.astype(x.dtype)
        return CAST_BIAS[name](x @ w.T + rounded, rounded)

    x, w, b = operands(rng, "bfloat16", (70, 64, 136))
    b = b.astype(np.float32) + 100.3  # the cast shows
    plan = cf.fuse(linear).plan(*(cf.spec(a.shape, a.dtype) for a in (x, w, b)))
    assert is_stored_rounded(plan) and plan.steps[0].fused == ("matmul", "cast", "add")
    exact = (x.astype(np.float64) @ w.astype(np.float64).T + b.astype(x.dtype).astype(np.float64)).astype(x.dtype)
    expected = CAST_BIAS[name](exact.astype(np.float64), b.astype(x.dtype).astype(np.float64))
    (by_numpy,), (by_kernels,) = (execute(plan, [x, w, b], engine) for engine in ("numpy", "host"))
    for found in (by_numpy, by_kernels):
        assert error(found, expected) < 2**-7


def test_a_cast_bias_and_nothing_behind_it() -> None:
    """The sum is what the next product reads, and saved for the backward pass."""
    calls = (
        Call("to", (Ref(2), "bfloat16"), (4,)),
        Call("linear", (Ref(0), Ref(1), Ref(4)), (5,)),
        Call("linear", (Ref(5), Ref(3), None), (6,)),
    )
    chain = Chain(("x", "w", "b", "v"), calls, outputs=(6,), updates=(), fixed=frozenset())
    m, k, n = LARGE
    metas = ((m, k), "bfloat16"), ((n, k), "bfloat16"), ((n,), "float32"), ((n, n), "bfloat16")
    traced = chain.trace(metas)
    plan = build(traced.as_traced([traced.values[5].tracer._node]), None, Settings())
    assert [s.fused for s in plan.steps] == [("matmul", "cast", "add"), ("matmul",)]


@pytest.mark.parametrize("columns", [32000, 32002, 32003])
def test_our_kernel_computes_rows_that_begin_anywhere(columns: int) -> None:
    """Up to seven times as fast as cuBLAS, which is the faster one where they begin at multiples of 16 bytes."""
    for tail in (lambda y: y, lambda y: cf.log_softmax(y, axis=1)):
        plan = plan_of(tail, shape=(1024, 4096, columns))
        (product,) = (s for s in plan.steps if s.kind == "Gemm")
        assert product.by_tiles == bool(columns % 8), plan
        with settings.epilogues("never"):
            by_library = plan_of(tail, shape=(1024, 4096, columns))
        assert not any(s.by_tiles for s in by_library.steps)
        assert (by_library.estimated_time > 2 * plan.estimated_time) == bool(columns % 8)


def test_what_others_read_is_kept_as_it_is() -> None:
    """Another step, or the caller."""
    tail = written("soft_cap_softmax")
    for function in (lambda y: (tail(y), (y * 3).max(axis=0)), lambda y: (tail(y), y)):
        (product,) = (s for s in plan_of(function).steps if s.kind == "Gemm")
        assert "stored in" not in product.how


@pytest.fixture
def all_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product is stored rounded that may be, however small and whatever the estimates say.

    cuBLAS computes the small ones, since the host's time does not count.
    """
    monkeypatch.setattr(fused_product, "_HOST_SHARE", 0.0)
    monkeypatch.setattr(rounded, "_HELD", 0)
    monkeypatch.setattr(epilogues, "WORTH", 1e9)


def operands(rng: np.random.Generator, dtype: str, shape: tuple[int, int, int]) -> tuple[Any, Any, Any]:
    m, k, n = shape
    drawn = rng.standard_normal((m, k)), rng.standard_normal((n, k)) * k**-0.5, rng.standard_normal((1, n)) * 0.1
    return tuple(a.astype(normal(rng, 1, dtype).dtype) for a in drawn)  # type: ignore[return-value]


def error(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected))


class Special:
    """SciPy's functions, as the chains call this package's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(scipy.special, name)


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", TAILS)
def test_results_are_no_less_accurate_than_as_written(
    all_that_may: None, name: str, dtype: str, rng: np.random.Generator
) -> None:
    """A linear layer rounds once as written, and so does each operation of PyTorch behind it."""
    shape = (200, 128, 256)
    plan = plan_of(written(name), dtype, shape)
    x, w, b = operands(rng, dtype, shape)
    expected = TAILS[name].written(Special(), x.astype(np.float64) @ w.astype(np.float64).T + b.astype(np.float64))
    found = execute(plan, [x, w, b], "numpy")[0].reshape(expected.shape)
    y = (x.astype(np.float32) @ w.astype(np.float32).T + b.astype(np.float32)).astype(x.dtype)
    kind = getattr(torch, dtype)
    eager = TAILS[name].torch(torch.nn.functional, torch.tensor(y.astype(np.float32)).to(kind))
    # Where both round the same, sums in another order decide.
    assert error(found, expected) <= error(eager.double().numpy(), expected) * (1 + 1e-3)


# Operations of full size, as NumPy code and in PyTorch, of which chains are drawn.
OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "tanh": (lambda s, y: np.tanh(y), lambda y: y.tanh()),
    "scale": (lambda s, y: y * 0.7, lambda y: y * 0.7),
    "third": (lambda s, y: y / 3, lambda y: y / 3),
    "shift": (lambda s, y: y + 0.3, lambda y: y + 0.3),
    "relu": (lambda s, y: np.maximum(y, 0), torch.relu),
    "square": (lambda s, y: y * y, torch.square),
    "mean": (lambda s, y: y - y.mean(axis=1, keepdims=True), lambda y: y - y.mean(1, keepdim=True)),
    "top": (lambda s, y: y - y.max(axis=1, keepdims=True), lambda y: y - y.amax(1, keepdim=True)),
    "length": (
        lambda s, y: y / np.sqrt((y * y).sum(axis=1, keepdims=True) + 1),
        lambda y: y / ((y * y).sum(1, keepdim=True) + 1).sqrt(),
    ),
    "softmax": (lambda s, y: s.softmax(y, axis=1), lambda y: y.softmax(1)),
    "log_softmax": (lambda s, y: s.log_softmax(y, axis=1), lambda y: y.log_softmax(1)),
    "sigmoid": (lambda s, y: 1 / (1 + np.exp(-y)), lambda y: 1 / (1 + (-y).exp())),
}


@pytest.mark.rotates
@pytest.mark.parametrize("seed", range(60))
def test_chains_drawn_are_no_less_accurate_than_as_written(all_that_may: None, seed: int) -> None:
    rng, shape = np.random.default_rng(seed), (128, 64, 256)
    dtype, names = ("bfloat16", "float16")[seed % 2], tuple(map(str, rng.choice(list(OPERATIONS), rng.integers(2, 5))))

    def tail(s: Any, y: Any) -> Any:
        for name in names:
            y = OPERATIONS[name][0](s, y)
        return y

    plan = plan_of(lambda y: tail(cf, y), dtype, shape)
    x, w, b = operands(rng, dtype, shape)
    expected = tail(Special(), x.astype(np.float64) @ w.astype(np.float64).T + b.astype(np.float64))
    y = (x.astype(np.float32) @ w.astype(np.float32).T + b.astype(np.float32)).astype(x.dtype)
    eager = torch.tensor(y.astype(np.float32)).to(getattr(torch, dtype))
    for name in names:
        eager = OPERATIONS[name][1](eager)
    (found,) = execute(plan, [x, w, b], "numpy")
    # Of 32768 roundings the norm of two samples differs by less than one in a hundred.
    missed, missed_by_torch = (np.linalg.norm(r.astype(np.float64) - expected) for r in (found, eager.float().numpy()))
    assert missed <= 1.01 * missed_by_torch, names


ROUNDED = ("unit_length", "soft_cap_softmax", "gelu_mean", "entropy", "standardised_softmax", "silu")


@pytest.mark.rotates
@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ROUNDED)
def test_kernels_compute_as_numpy_does(
    all_that_may: None,
    name: str,
    dtype: str,
    by_library: bool,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = (70, 64, 136)
    monkeypatch.setattr(epilogues, "_library_adds_bias", lambda *_: by_library)
    monkeypatch.setattr(fused_product, "library_time", lambda *_: 0.0 if by_library else 1.0)
    plan = plan_of(written(name), dtype, shape)
    assert "stored in" in str(plan) and any(step.by_library for step in plan.steps) == by_library
    arrays = list(operands(rng, dtype, shape))
    arrays[2] += np.asarray(100, arrays[2].dtype)  # what is rounded shows
    monkeypatch.setattr(HOST.runtime, "device", devices.DEVICES["H200"])
    (by_numpy,), (by_kernels,) = (execute(plan, arrays, engine) for engine in ("numpy", "host"))
    unit = float(np.finfo(np.float32).eps) * 2 ** (16 if dtype == "bfloat16" else 13)
    wide, found = by_numpy.astype(np.float64), by_kernels.astype(np.float64)
    np.testing.assert_allclose(found, wide, rtol=2 * unit, atol=2 * unit * float(np.abs(wide).max()))


@pytest.mark.parametrize("by_library", [False, True])
@pytest.mark.parametrize("rule", ["softmax", "gelu"])
def test_sums_saved_for_gradients_are_read_as_they_are_stored(
    by_library: bool, rule: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are results: the kernel that computes them writes them, and the row program behind it the other one."""
    m, k, n = 70, 64, 136
    calls = (
        Call("linear", (Ref(0), Ref(1), Ref(2)), (3,)),
        Call(rule, (Ref(3), *((1, None)[: rule == "softmax"])), (4,)),
    )
    traced = Chain(("x", "w", "b"), calls, outputs=(4,)).trace(
        (((m, k), "float16"), ((n, k), "float16"), ((n,), "float16"))
    )
    monkeypatch.setattr(epilogues, "GAIN", 1e9)
    monkeypatch.setattr(epilogues, "_library_adds_bias", lambda *_: by_library)
    monkeypatch.setattr(fused_product, "library_time", lambda *_: 0.0 if by_library else 1.0)
    monkeypatch.setattr(fused_product, "_HOST_SHARE", 0.0)
    plan = build(traced.as_traced([traced.values[3].tracer._node]), None, Settings())
    assert [s.kind for s in plan.steps] == ["Gemm", "RowProgram"] and plan.steps[0].fused == ("matmul", "add")
    assert "stored in float16" in plan.steps[0].how and plan.steps[0].by_library == by_library
    x, w, b = operands(rng, "float16", (m, k, n))
    b += np.asarray(100, b.dtype)  # what is rounded shows
    y = (x.astype(np.float32) @ w.astype(np.float32).T + b.astype(np.float32)).astype(x.dtype)
    monkeypatch.setattr(HOST.runtime, "device", devices.DEVICES["H200"])
    for engine in ("numpy", "host"):
        result, saved = execute(plan, [x, w, b], engine)
        np.testing.assert_allclose(saved.astype(np.float64), y.astype(np.float64), rtol=2.0**-10)
        read = saved.astype(np.float64)
        expected = scipy.special.softmax(read, axis=1) if rule == "softmax" else read  # GELU of 100 is 100
        np.testing.assert_allclose(result.astype(np.float64), expected, rtol=2.0**-10)


@pytest.mark.parametrize("engine", ["numpy", "host"])
def test_the_library_rounds(all_that_may: None, engine: str, rng: np.random.Generator) -> None:
    x, w = normal(rng, (70, 64), "bfloat16"), normal(rng, (136, 64), "bfloat16", 0.125)
    fused = cf.fuse(lambda x, w: np.exp((x @ w.T) * 7) * 3)
    plan = fused.plan(cf.spec(x.shape, "bfloat16"), cf.spec(w.shape, "bfloat16"))
    assert plan.steps[0].how.startswith("cuBLAS") and "stored in bfloat16" in plan.steps[0].how
    (found,) = execute(plan, [x, w], engine)
    product = (x.astype(np.float32) @ w.astype(np.float32).T).astype(x.dtype).astype(np.float64)
    # The exponential shows what is rounded. Sums in another order may be rounded the other way.
    share = np.isclose(found.astype(np.float64), np.exp(product * 7) * 3, rtol=2.0**-8 * 1.01, atol=0).mean()
    assert share > 0.99


def test_later_stages_and_reductions_read_the_rounded_values(all_that_may: None, rng: np.random.Generator) -> None:
    """The largest distance from the maximum is 0, as of numbers that were rounded alike."""

    def largest(y: Any) -> Any:
        return (np.exp(y - y.max(axis=1, keepdims=True)) * 3).max(axis=1)

    plan = plan_of(largest, "bfloat16", (70, 64, 136))
    assert "stored in" in str(plan)
    arrays = list(operands(rng, "bfloat16", (70, 64, 136)))
    for engine in ("numpy", "host"):
        (found,) = execute(plan, arrays, engine)
        np.testing.assert_array_equal(found.astype(np.float32), 3)
