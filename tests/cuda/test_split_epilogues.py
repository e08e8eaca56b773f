"""Row programs as epilogues of split products: the same bits as apart from it, by kernels on the CPU or on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST, Engine, normal, require_hopper

import cupyfuse as cf
from cupyfuse import devices, settings
from cupyfuse.plan.schedule import products

F32 = np.float32


@pytest.fixture(params=[pytest.param(HOST, id="host"), pytest.param(CUDA, id="cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine that splits the operands of every float32 product, however small."""
    chosen: Engine = request.param
    chosen.require()
    monkeypatch.setattr(products, "LEAST_DEPTH", 1)
    monkeypatch.setattr(products, "split_time", lambda *_: 0.0)
    if chosen is HOST:
        monkeypatch.setattr(chosen.runtime, "device", devices.DEVICES["H200"])
    else:
        require_hopper()
    with chosen.active():
        yield chosen


# Of the product, a bias, a matrix, a column and a number.
Tail = Callable[[Any, Any, Any, Any, float], Any]
TAILS: dict[str, Tail] = {
    "bias": lambda y, b, r, c, t: y + b,
    "gelu": lambda y, b, r, c, t: cf.gelu(y + b),
    "residual": lambda y, b, r, c, t: y + b + r,
    "row_factor": lambda y, b, r, c, t: np.tanh(y * c) - r,
    "number": lambda y, b, r, c, t: y * t,
    "columns": lambda y, b, r, c, t: y * (np.exp(b) / np.sqrt(b * b + 1)),
    "two_results": lambda y, b, r, c, t: (np.tanh(y), cf.relu(y) + b),
    "product": lambda y, b, r, c, t: (y, cf.silu(y + b)),
    "two_readers": lambda y, b, r, c, t: (cf.relu(y), y.sum(axis=0)),
    "bool": lambda y, b, r, c, t: y > b,
    "float16": lambda y, b, r, c, t: (y + b).astype("float16"),
    "float64": lambda y, b, r, c, t: y.astype("float64") * 3 + r,
    "guarded": lambda y, b, r, c, t: cf.relu((y + b - r[:1]) / np.sqrt(b * b + 1e-5) * b),
    "choice": lambda y, b, r, c, t: np.where(y > 0, y, b),
}
SHAPES = [(1, 3, 2), (130, 70, 129), (40, 200, 176), (133, 64, 176), (33, 64, 193)]


def operands(rng: np.random.Generator, shape: tuple[int, int, int], kind: str) -> list[Any]:
    """A, B, a bias, a matrix and a column; `kind` is what must be repaired."""
    m, k, n = shape
    a, b, bias, matrix, column = (normal(rng, s) for s in ((m, k), (n, k), (n,), (m, n), (m, 1)))
    if kind in ("marked", "both"):
        a[m // 2, k // 2], a[-1, 0], b[n // 3, 0], b[-1, -1] = np.inf, np.nan, -np.inf, np.nan
    if kind in ("small", "both"):
        a[:, 0], b[:, 0] = 1e9, 0  # the largest of each row of A meets zeros: sums are small beside it
        a[:, 1:] *= F32(2.0**-8)
    return [x.astype(F32) for x in (a, b, bias, matrix, column)]


def of(tail: Tail) -> Callable[..., Any]:
    return lambda a, b, bias, matrix, column, t: tail(a @ b.T, bias, matrix, column, t)


def bits(engine: Engine, results: Any) -> list[Any]:
    found = engine.host(results)
    return [np.ascontiguousarray(r).view(np.uint8) for r in (found if isinstance(found, tuple) else (found,))]


@pytest.mark.rotates
@pytest.mark.parametrize("kind", ["finite", "marked", "small", "both"])
@pytest.mark.parametrize("name", TAILS)
def test_an_epilogue_gives_the_bits_of_a_row_program(
    name: str, kind: str, engine: Engine, rng: np.random.Generator
) -> None:
    function = of(TAILS[name])
    # Every tail in every shape, and every shape with repairs and without; what is repaired for one reason alone in one.
    turn = (list(TAILS).index(name) + (kind == "both")) % 2
    for shape in SHAPES[turn::2] if kind in ("finite", "both") else SHAPES[-1:]:
        given = [*engine.arrays(operands(rng, shape, kind)), 0.3]
        with settings.epilogues("always"):
            fused: Any = cf.fuse(function)
            plan = fused.plan(*given)
            (gemm,) = (s for s in plan.steps if s.kind == "Gemm")
            assert gemm.epilogue is not None and "epilogue" in gemm.how
            together = bits(engine, fused(*given))
        with settings.epilogues("never"):
            apart: Any = cf.fuse(function)
            assert all(s.epilogue is None for s in apart.plan(*given).steps)
            for one, other in zip(together, bits(engine, apart(*given)), strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.rotates
@pytest.mark.parametrize("layout", ["row_gap", "offset", "contiguous"])
def test_matrices_of_other_layouts(layout: str, engine: Engine, rng: np.random.Generator) -> None:
    a, b, bias, matrix, _ = operands(rng, (40, 64, 130), "both")
    arguments = [engine.array(x) for x in (a, b, bias)]

    def function(a: Any, b: Any, bias: Any, matrix: Any) -> Any:
        return np.tanh(a @ b.T + bias) * matrix

    with settings.epilogues("always"):
        result = cf.fuse(function)(*arguments, engine.array(matrix, layout))
    with settings.epilogues("never"):
        expected = cf.fuse(function)(*arguments, engine.array(matrix))
    np.testing.assert_array_equal(engine.host(result), engine.host(expected))


@pytest.mark.parametrize("columns", [130, 176])
def test_a_matrix_is_changed_once_where_elements_are_repaired(
    columns: int, engine: Engine, rng: np.random.Generator
) -> None:
    """An argument that is changed in place by a product's epilogue: no element of it is read after it was written."""
    a, b, _, matrix, _ = operands(rng, (40, 64, columns), "both")

    def function(a: Any, b: Any, matrix: Any) -> None:
        matrix += a @ b.T

    changed = []
    for choice in ("always", "never"):
        with settings.epilogues(choice):
            target = engine.array(matrix)
            cf.fuse(function)(engine.array(a), engine.array(b), target)
            changed.append(engine.host(target))
    np.testing.assert_array_equal(*changed)


def attention_inputs(x: Any, q: Any, k: Any, v: Any, b: Any, c: Any) -> Any:
    """Products that share the split of an operand, whose tails come after all of them."""
    one, two, three = x @ q.T, x @ k.T, x @ v.T
    return one + b, two + c, cf.gelu(three + b)


def crossed(x: Any, q: Any, k: Any, v: Any, b: Any, c: Any) -> Any:
    """The tail of the first product reads that of the second one, which shares its operand's split."""
    one, two = x @ q.T, cf.relu(x @ k.T + b)
    return one + two, two @ v.T * c


@pytest.mark.rotates
@pytest.mark.parametrize("function", [attention_inputs, crossed])
def test_products_that_share_a_split(function: Callable[..., Any], engine: Engine, rng: np.random.Generator) -> None:
    given = [normal(rng, s).astype(F32) for s in ((40, 64), (64, 64), (64, 64), (64, 64), (64,), (64,))]
    given[0][3, 5] = np.nan
    results = []
    for choice in ("always", "never"):
        with settings.epilogues(choice):
            fused: Any = cf.fuse(function)
            arguments = engine.arrays(given)
            epilogues = [s.epilogue is not None for s in fused.plan(*arguments).steps if s.kind == "Gemm"]
            assert any(epilogues) == (choice == "always")
            results.append(bits(engine, fused(*arguments)))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "tail",
    [
        lambda y, b, r, c, t: cf.logsumexp(y + b, axis=1),
        lambda y, b, r, c, t: cf.softmax(y, axis=1),
        lambda y, b, r, c, t: (y + b) * (r * r[:1] + r[::-1] * r[:, ::-1]),
    ],
)
def test_what_cannot_be_an_epilogue_is_apart(tail: Tail, engine: Engine, rng: np.random.Generator) -> None:
    given = [*engine.arrays(operands(rng, (20, 64, 24), "finite")), 0.3]
    with settings.epilogues("always"):
        fused: Any = cf.fuse(of(tail))
        assert next(s for s in fused.plan(*given).steps if s.kind == "Gemm").epilogue is None
        result = engine.host(fused(*given))
    a, b, *rest = (x.astype(np.float64) for x in engine.host(tuple(given[:-1])))
    expected = tail(a @ b.T, *rest, 0.3)
    np.testing.assert_allclose(result, expected, rtol=2e-5, atol=1e-4)
