"""First positions of extrema: NumPy's, for every dtype and axis, in one pass and without a product in memory."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from support import HOST, INF, NAN, NUMPY, Engine, assert_equal, dtype_of

import cupyfuse as cf
from cupyfuse.cuda import accumulators
from cupyfuse.cuda.fused_gemm import kernels_of
from cupyfuse.cuda.program import Program
from cupyfuse.plan.schedule import state_size, tiles

ENGINES = pytest.mark.parametrize("engine", [NUMPY, HOST], ids=lambda e: e.name)
NUMBERS = np.array([-INF, -1.0, -0.0, 0.0, 1.0, INF, NAN])
FUNCTIONS = {
    "rows": lambda x: (np.argmax(x, axis=1), x.argmin(axis=-1)),
    "columns": lambda x: (x.argmax(0), np.argmin(x, axis=0)),
    "all": lambda x: (np.argmax(x), x.argmin()),
    "kept": lambda x: (np.argmax(x, axis=1, keepdims=True), np.argmin(x, axis=0, keepdims=True)),
    "beside the extrema": lambda x: (x.argmax(1), x.max(1), x.min(1), x.argmin(1), x.argmax(1) == x.argmin(1)),
}


def run(engine: Engine, function: Any, *arrays: Any) -> tuple[Any, ...]:
    with engine.active():
        found = engine.host(cf.fuse(function)(*engine.arrays(list(arrays))))
    return found if isinstance(found, tuple) else (found,)


def check(engine: Engine, function: Any, *arrays: Any) -> None:
    expected = function(*arrays)
    found = run(engine, function, *arrays)
    for ours, right in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        assert_equal(np.asarray(ours), np.asarray(right))


@pytest.mark.kernels_rotate
@ENGINES
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "dtype", ["float16", "float32", "float64", "bool", "int8", "uint16", "int32", "uint32", "int64"]
)
def test_dtypes_and_axes(engine: Engine, name: str, dtype: str, rng: np.random.Generator) -> None:
    """Of few values, each of which occurs several times; the ends of integer dtypes among them."""
    ends = [0, 1] if dtype[0] in "bf" else [np.iinfo(dtype).min, np.iinfo(dtype).max, np.iinfo(dtype).max - 1]
    for shape in ((7, 33), (40, 5), (3, 1)):
        check(engine, FUNCTIONS[name], np.array(ends, dtype)[rng.integers(0, len(ends), shape)])


@pytest.mark.kernels_rotate
@ENGINES
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("columns", [1, 2, 7, 31, 127, 1000, 1031])
def test_ties_zeros_infinities_and_nan(engine: Engine, columns: int, dtype: str, rng: np.random.Generator) -> None:
    """Rows of some of the numbers, in any order: zeros of both signs are equal, and so is NaN to NaN."""
    kinds = [NUMBERS[rng.permutation(7)[: rng.integers(1, 8)]] for _ in range(60)]
    x = np.array([rng.choice(kind, columns) for kind in kinds])
    given = x.astype(dtype_of(dtype))
    for axis, array, values in ((1, given, x), (0, np.ascontiguousarray(given.T), np.ascontiguousarray(x.T))):
        found = run(engine, lambda x, axis=axis: (x.argmax(axis), x.argmin(axis)), array)
        assert_equal(found[0], values.argmax(axis))
        assert_equal(found[1], values.argmin(axis))


@ENGINES
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
@pytest.mark.parametrize("keepdims", [False, True])
def test_more_axes(engine: Engine, axis: int | None, keepdims: bool, rng: np.random.Generator) -> None:
    x = rng.integers(0, 5, (4, 6, 9)).astype("float32")
    check(engine, lambda x: (x.argmax(axis=axis, keepdims=keepdims), np.argmin(x + 1, axis, keepdims=keepdims)), x)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0)])
def test_no_elements(shape: tuple[int, int]) -> None:
    x = np.ones(shape, "float32")
    for axis in (0, 1, None):
        if axis is not None and shape[axis]:
            assert cf.fuse(lambda x, axis=axis: x.argmax(axis))(x).shape == (0,)
            continue
        for function in (np.argmax, np.argmin):
            with pytest.raises(ValueError, match="of an empty sequence"):
                cf.fuse(lambda x, f=function, axis=axis: f(x * 2, axis))(x)


def test_places_beyond_32_bits() -> None:
    """Positions among 2^32 elements and more have 64 bits, in accumulators and in states."""
    for columns, kind in (((1 << 32) - 1, "u32"), (1 << 32, "u64"), (1 << 33, "u64")):
        plan = cf.fuse(lambda x: x.argmax(1)).plan(cf.spec((2, columns), "float32"))
        assert f"FirstPlace<Top<float>, {kind}>" in plan.source()


@pytest.mark.parametrize("columns", [5, 700, 20011])
def test_places_of_64_bits(columns: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    for module in (accumulators, tiles):
        monkeypatch.setattr(module, "place_bits", lambda n: 64)
    check(HOST, FUNCTIONS["rows"], rng.integers(0, 3, (3, columns)).astype("float32"))


def test_several_operands_have_accumulators_of_their_own(rng: np.random.Generator) -> None:
    def places(x: Any, y: Any) -> Any:
        return x.argmax(1), y.argmax(1), (x + y).argmin(1), x.max(1), np.argmax(-x, 1)

    check(HOST, places, *(rng.integers(0, 9, (2, 5, 60)).astype("float32")))


# Passes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [100, 4096, 50257])
@pytest.mark.parametrize("function", [lambda x: x.argmax(1), lambda x: (x.argmin(1), x.min(1), x.argmax(1))])
def test_rows_are_read_once(function: Any, columns: int) -> None:
    plan = cf.fuse(function).plan(cf.spec((100_000, columns), "float32"))
    (step,) = plan.steps
    assert Program(step, plan.scheduled.storage).stages == 1
    assert step.reads == 100_000 * columns * 4


def test_states_of_products_have_room() -> None:
    """An allocation is of what the compiler will need: extremes, those ahead, a sum, and positions."""

    def both(x: Any, w: Any) -> Any:
        y = x @ w.T
        return y.argmax(1), y.argmin(1), cf.logsumexp(y, 1)

    plan = cf.fuse(both).plan(cf.spec((4096, 768), "bfloat16"), cf.spec((32000, 768), "bfloat16"))
    (step,) = plan.steps
    assert step.epilogue is not None and state_size(step.epilogue) == 4 * (4 + 3) + 4
    product, merge = kernels_of(step, plan.scheduled.storage)
    assert "FirstPlace<ExpSum<Top<float>>, u32>" in product.source and "FirstPlace<Bottom<float>, u32>" in merge.source


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_positions_of_a_product_do_not_store_it(dtype: str) -> None:
    specs = cf.spec((8192, 4096), dtype), cf.spec((4096, 128256), dtype)
    plan = cf.fuse(lambda a, b: np.argmax(a @ b, 1)).plan(*specs)
    (product,) = plan.steps
    assert product.kind == "Gemm" and product.epilogue is not None and product.product not in product.outputs


def test_a_loss_and_its_accuracy_are_one_product() -> None:
    def beside(x: Any, w: Any, k: Any) -> tuple[Any, ...]:
        logits = (x @ w.T).astype("float32")
        top = logits.max(axis=1, keepdims=True)
        total = np.exp(logits - top).sum(axis=1, keepdims=True)
        logarithms = logits - top - np.log(total)
        entropy = -(np.exp(logits - top) / total * logarithms).sum(axis=1)
        best = logits.argmax(axis=1)
        return cf.cross_entropy(logits, k), logarithms[np.arange(8192), k], entropy, best, (best == k).mean()

    plan = cf.fuse(beside).plan(
        cf.spec((8192, 4096), "bfloat16"), cf.spec((128256, 4096), "bfloat16"), cf.spec(8192, "int64")
    )
    (product,) = [s for s in plan.steps if s.kind == "Gemm"]
    assert plan.blocks is None and product.epilogue is not None and product.product not in product.outputs
    found = Counter(n.op for n in product.epilogue.nodes if n.reduction)
    assert found == {"max": 1, "expsum": 1, "expdistances": 1, "argmax": 1, "sum": 2}
    assert all(n.shape[1] == 1 or n.shape[0] == 1 for s in plan.steps for n in s.outputs)
    assert "FirstPlace<ExpDistances<ExpSum<Top<float>>>, u32>" in plan.source()
