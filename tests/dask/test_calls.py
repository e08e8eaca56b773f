"""Functions on Dask arrays: lazy, chunked as their metadata says, and equal to NumPy's results in float64."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from cupyfuse.heads import HEADS, example_inputs
from dask.blockwise import Blockwise
from dask.callbacks import Callback
from dask.graph_manipulation import clone
from dask.highlevelgraph import compute_layer_dependencies
from dask.sizeof import sizeof

import cupyfuse as cf
from cupyfuse.dask.tasks import Program
from cupyfuse.ir import graph as g

ROWS, COLUMNS = 10, 9
CHUNKS: dict[str, Any] = {
    "one chunk": (10, 9),
    "rows": (4, 9),
    "columns": (10, 4),
    "uneven": ((5, 1, 4), (2, 6, 1)),
    "empty": ((4, 0, 1, 5), (0, 3, 6)),
}


@pytest.fixture(autouse=True)
def _synchronous() -> Any:
    with dask.config.set(scheduler="synchronous"):
        yield


def chunked(array: Any, chunks: Any) -> da.Array:
    return da.from_array(array, chunks=chunks)


def matrix(rng: np.random.Generator, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray[Any, Any]:
    return rng.normal(size=(rows, columns))


def flat(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def check(function: Callable[..., Any], *arguments: Any, tolerance: float = 1e-12, **named: Any) -> list[da.Array]:
    """Compare a lazy call with the same call on NumPy arrays, chunk by chunk; return the lazy results."""

    def host(value: Any) -> Any:
        return value.compute() if isinstance(value, da.Array) else value

    lazy = flat(function(*arguments, **named))
    plain = flat(function(*map(host, arguments), **{name: host(value) for name, value in named.items()}))
    for found, want in zip(lazy, plain, strict=True):
        assert isinstance(found, da.Array)
        assert (found.shape, found.dtype, type(found._meta)) == (want.shape, want.dtype, np.ndarray)
        blocks = dask.compute(*found.to_delayed().ravel())
        assert [np.shape(b) for b in blocks] == list(itertools.product(*found.chunks))
        assert all(b.dtype == found.dtype for b in blocks)
        np.testing.assert_allclose(found.compute(), want, rtol=tolerance, atol=tolerance)
    return lazy


# Heads --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["numpy", "whole", "chunked"])
@pytest.mark.parametrize("rows", [(13,), (5, 8), (1, 7, 5)], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_heads(name: str, rows: tuple[int, ...], weights: str) -> None:
    inputs = {k: np.asarray(v, np.float64) for k, v in example_inputs(HEADS[name], 13, 8, 11).items()}
    x = chunked(inputs.pop("x"), (rows, (8,)))
    if weights != "numpy":
        length = 4 if weights == "chunked" else -1
        inputs = {k: chunked(v, (length, *[-1] * (v.ndim - 1))) for k, v in inputs.items()}
    (result,) = check(HEADS[name], x, **inputs)
    assert result.chunks[0] == rows
    assert result.numblocks[1] == (3 if (name, weights) == ("head_softmax", "chunked") else 1)


@pytest.mark.parametrize("name", HEADS)
def test_bound_heads(name: str) -> None:
    inputs = {k: np.asarray(v, np.float64) for k, v in example_inputs(HEADS[name], 13, 8, 11).items()}
    x = inputs.pop("x")
    (result,) = check(HEADS[name].bind(**inputs), chunked(x, (5, 8)))
    assert result.chunks[0] == (5, 5, 3)
    lazy = {k: chunked(v, 4) if v.shape == (11,) else v for k, v in inputs.items()}
    found = HEADS[name].bind(**lazy)(x)
    assert isinstance(found, da.Array)
    np.testing.assert_allclose(found.compute(), HEADS[name](x, **inputs), rtol=1e-12, atol=1e-12)


def test_all_three_axes_of_a_product(rng: np.random.Generator) -> None:
    x, w = matrix(rng), matrix(rng, 12)
    head = cf.fuse(lambda x, w: (cf.softmax(x @ w.T, axis=1), cf.logsumexp(x @ w.T, axis=1), (x @ w.T).sum()))
    for rows, depth, columns in itertools.product((10, 4), (9, 4), (12, 5)):
        softmax, logsumexp, total = check(head, chunked(x, (rows, depth)), chunked(w, (columns, depth)))
        assert softmax.numblocks == (-(-10 // rows), -(-12 // columns))
        assert logsumexp.numblocks == softmax.numblocks[:1] and total.numblocks == ()


# Public functions ---------------------------------------------------------------------------------------------------

ALONG_AXES = ["softmax", "log_softmax", "logsumexp", "sum", "prod", "mean", "max", "min", "var", "std"]
ACTIVATIONS = ["relu", "gelu", "silu", "tanh", "leaky_relu", "softplus", "mish", "hardswish", "erf", "elu"]


@pytest.mark.rotates
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
@pytest.mark.parametrize("name", ALONG_AXES)
def test_functions_along_axes(name: str, chunks: Any, rng: np.random.Generator) -> None:
    x = chunked(matrix(rng), chunks)
    for axis in (-1, 0, None):
        check(getattr(cf, name), x, axis=axis)


def test_chunks_of_one_element(rng: np.random.Generator) -> None:
    x = chunked(matrix(rng, 3, 4), (1, 1))
    for name, axis in itertools.product(("softmax", "logsumexp", "var"), (-1, 0, None)):
        check(getattr(cf, name), x, axis=axis)
    check(cf.cross_entropy, x, np.array([2, 0, 3]))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, rng: np.random.Generator) -> None:
    for chunks in CHUNKS.values():
        check(getattr(cf, name), chunked(matrix(rng), chunks))
    check(getattr(cf, name), chunked(rng.normal(size=7), 3))
    check(getattr(cf, name), chunked(rng.normal(size=(3, 4, 5)), (2, 3, 2)))


@pytest.mark.rotates
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
def test_losses_and_layers(chunks: Any, rng: np.random.Generator) -> None:
    x, target = chunked(matrix(rng), chunks), rng.integers(0, COLUMNS, ROWS)
    target[3] = -100
    for labels, reduction in itertools.product((target, chunked(target, 3)), ("none", "mean", "sum")):
        check(cf.cross_entropy, x, labels, reduction=reduction, label_smoothing=0.1)
    check(cf.cross_entropy, x, cf.softmax(x, axis=1))
    check(cf.mse_loss, x, 2 * x)
    check(cf.linear, x, rng.normal(size=(5, COLUMNS)), rng.normal(size=5))
    check(cf.batch_norm, x, training=True)
    check(cf.batch_norm, x, rng.normal(size=COLUMNS), rng.random(COLUMNS), chunked(rng.normal(size=COLUMNS), 2))
    check(cf.avg_pool1d, x, 3)
    check(cf.clip, x, -0.5, 0.5)
    check(cf.logsumexp, x, axis=1, b=rng.normal(size=(ROWS, COLUMNS)), keepdims=True, return_sign=True)


@pytest.mark.parametrize("chunks", [(2, 4, 5), (3, 4, 5), (2, 3, 2)], ids=str)
def test_three_dimensions(chunks: tuple[int, ...], rng: np.random.Generator) -> None:
    x = chunked(rng.normal(size=(3, 4, 5)), chunks)
    for name, axis in itertools.product(("softmax", "logsumexp", "mean"), (-1, 0, 1, (0, 2), None)):
        check(getattr(cf, name), x, axis=axis)
    check(cf.linear, x, rng.normal(size=(6, 5)))


@pytest.mark.parametrize("chunks", [(2, 3, 4), (4, 3, 2)], ids=str)
def test_variances_and_standard_scores_of_three_dimensions(chunks: tuple[int, ...], rng: np.random.Generator) -> None:
    x = chunked(rng.normal(size=(4, 3, 6)), chunks)
    for function in (np.var, np.std, lambda x: (x - x.mean()) / x.std(ddof=1)):
        check(cf.fuse(function), x)
    images = chunked(rng.normal(size=(3, 4, 5, 6)), (3, 4, 5, 2))
    for reduction in (np.sum, np.max, np.prod, cf.logsumexp):
        check(cf.fuse(lambda x, reduction=reduction: reduction(x, axis=(0, 2, 3))), images)  # type: ignore[misc]


def test_fused_functions_of_three_dimensions(rng: np.random.Generator) -> None:
    x, w = rng.normal(size=(6, 4, 5)), rng.normal(size=(7, 5))
    norm = cf.fuse(lambda x, w: cf.softmax(x @ w.T, axis=-1) - x.mean(axis=-1, keepdims=True))
    for chunks in ((4, 4, 5), (1, 4, 2), (6, 4, 3)):
        (result,) = check(norm, chunked(x, chunks), chunked(w, (3, 5)))
        assert result.chunks[0] == chunked(x, chunks).chunks[0] and result.chunks[2] == (3, 3, 1)
    with pytest.raises(ValueError, match=r"'x'.*chunked along its last axis and along axis 0, got .* axis 1; rechunk"):
        norm(chunked(x, (6, 2, 5)), w)


def test_integers_and_vectors(rng: np.random.Generator) -> None:
    check(cf.softmax, da.arange(12, chunks=5).reshape(3, 4), axis=1)
    check(cf.softmax, chunked(rng.normal(size=12), 5), axis=0)
    check(cf.logsumexp, chunked(rng.normal(size=12), 5))
    check(cf.logsumexp, 0.5, b=chunked(rng.random(5), 2))
    check(cf.softmax, chunked(np.zeros((0, 3)), (1, 2)), axis=1)


# Fused functions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=list(CHUNKS))
def test_fused_functions(chunks: Any, rng: np.random.Generator) -> None:
    x, bias = chunked(matrix(rng), chunks), rng.normal(size=COLUMNS)

    def entropy(y: Any) -> Any:
        p = cf.softmax(y, axis=1)
        return -(p * np.log(p)).sum(axis=1)

    check(cf.fuse(entropy), x)  # two merges
    check(cf.fuse(lambda x: x - x.mean(axis=0)), x)
    check(cf.fuse(lambda x: (x / x.shape[0]).T + np.arange(x.shape[0])), x)  # lengths and positions are of all rows
    check(cf.fuse(lambda x: (np.round(x).argmax(axis=1), np.argmin(np.round(x), axis=0))), x)
    check(cf.fuse(lambda x: x), x)
    check(cf.fuse(lambda x: x + bias), x)  # an array around the function
    check(cf.fuse(lambda x, y: (x - y, y.max(axis=1), x.mean())), x, 2 * x.rechunk((3, 5)))
    found = cf.fuse(lambda p: {"a": p["x"][0] * p["s"], "n": 3})({"x": [x], "s": 2.0})
    assert isinstance(found["a"], da.Array) and found["n"] == 3
    np.testing.assert_array_equal(found["a"].compute(), 2 * x.compute())


def test_floats_belong_to_their_call(rng: np.random.Generator) -> None:
    x = chunked(matrix(rng), (4, 4))
    scaled = cf.fuse(lambda x, t: cf.softmax(x / t, axis=1))
    lazy = [scaled(x, t) for t in (0.5, 2.0)]
    for t, found in zip((0.5, 2.0), lazy, strict=True):
        np.testing.assert_allclose(found.compute(), scaled(x.compute(), t), rtol=1e-12)


def test_float32_and_its_meta(rng: np.random.Generator) -> None:
    x = chunked(matrix(rng).astype(np.float32), (4, 5))
    assert cf.softmax(x, axis=1).dtype == np.float32
    check(cf.softmax, x, axis=1, tolerance=1e-6)
    check(cf.fuse(lambda x: x > 0), x)


def scores(x: Any, w: Any, b: Any) -> Any:
    return x @ w.T + b


CHAINS: dict[str, Callable[..., Any]] = {
    "softmax": lambda x, w, b: cf.softmax(scores(x, w, b), axis=1),
    "down the columns": lambda x, w, b: (cf.softmax(scores(x, w, b), axis=0), scores(x, w, b).var(axis=0)),
    "all of it": lambda x, w, b: cf.log_softmax(scores(x, w, b)),
    "attention": lambda x, w, b: cf.softmax(scores(x, w, b), axis=1) @ w,
    "transposed": lambda x, w, b: scores(x, w, b).T - x.mean(axis=1),
    "batch norm": lambda x, w, b: cf.softmax(cf.batch_norm(scores(x, w, b), training=True), axis=1),
    "positions": lambda x, w, b: scores(x, w, b) * np.arange(12) + np.arange(x.shape[0])[:, None],
    "several": lambda x, w, b: (x * 2, scores(x, w, b).max(), cf.logsumexp(scores(x, w, b), axis=1)),
}


@pytest.mark.rotates
@pytest.mark.parametrize("name", CHAINS)
def test_random_chunks(name: str, rng: np.random.Generator) -> None:
    """Any argument chunked along any axes, in chunks of any lengths, those of length 0 among them."""

    def lengths(n: int) -> tuple[int, ...]:
        cuts = sorted(rng.integers(0, n + 1, rng.integers(0, 3)))
        return tuple(np.diff([0, *cuts, n]).tolist())

    for _ in range(4):
        arrays = [rng.normal(size=shape) for shape in ((5, 7), (12, 7), (12,))]
        lazy = [chunked(a, tuple(map(lengths, a.shape))) if rng.random() < 0.8 else a for a in arrays[1:]]
        check(cf.fuse(CHAINS[name]), chunked(arrays[0], tuple(map(lengths, arrays[0].shape))), *lazy)


# Laziness -----------------------------------------------------------------------------------------------------------


def test_nothing_runs_before_compute(rng: np.random.Generator) -> None:
    values, made = matrix(rng), []

    def make(block_info: Any = None) -> Any:
        (r, s), (c, e) = block_info[None]["array-location"]
        made.append(r)
        return values[r:s, c:e]

    def nothing(*_: Any) -> None:
        raise AssertionError("a task ran")

    x = da.map_blocks(make, chunks=((4, 4, 2), (9,)), meta=np.empty((0, 0)))
    w = rng.normal(size=(5, 9))
    with Callback(pretask=nothing):
        results = [
            cf.softmax(x, axis=1),
            cf.linear(x, w),
            cf.cross_entropy(x, np.zeros(10, int)),
            HEADS["head_sum"](x, w, np.zeros(5)),
            HEADS["head_sum"].bind(weight=w, bias=np.zeros(5))(x),
        ]
        assert all(isinstance(r, da.Array) for r in results) and made == []
    results[0].blocks[1].compute()
    assert made == [4]  # one chunk of the result needs one of the argument
    results[1].compute()
    assert sorted(made) == [0, 4, 4, 8]


def test_weights_are_in_the_graph_once(rng: np.random.Generator) -> None:
    """Beside the program, and under one key: of tasks that need more than a few, Dask keeps other workers away."""
    w, b = rng.normal(size=(5, 9)), rng.normal(size=5)
    x = da.zeros((100, 9), chunks=(1, 9))
    found = HEADS["head_sum"](x, w, b)
    (shared,) = [v for v in dict(found.__dask_graph__()).values() if hasattr(v, "value")]
    assert [type(p) for p in shared.value.programs] == [Program]  # of 100 tasks
    assert [a is w for a in shared.value.arrays].count(True) == [a is b for a in shared.value.arrays].count(True) == 1
    assert w.nbytes + b.nbytes < sizeof(shared.value) < 20_000 and len(pickle.dumps(shared)) < 20_000
    assert all(len(task.dependencies) == 1 for task in tasks_of(found).values())
    again = HEADS["head_sum"](x, w, b)
    assert again.name == found.name != HEADS["head_sum"](x, w, b + 1).name


def tasks_of(array: da.Array) -> dict[Any, Any]:
    """The tasks that Dask makes of an array's graph, without values."""
    (optimized,) = dask.optimize(array)
    return {k: v for k, v in dict(optimized.__dask_graph__()).items() if not hasattr(v, "value")}


def drawn(rows: tuple[int, ...], columns: int, made: list[Any], **more: Any) -> da.Array:
    """Rows that tasks make, each of which adds its place to `made`."""

    def make(block_info: Any = None) -> Any:
        here = block_info[None]
        made.append(here["chunk-location"])
        return np.random.default_rng(here["chunk-location"]).random(here["chunk-shape"])

    return da.map_blocks(make, chunks=(rows, (columns,)), meta=np.empty((0, 0)), **more)


def test_a_chunk_is_one_task(rng: np.random.Generator) -> None:
    """What makes a chunk, the call and what follows are fused."""
    made: list[Any] = []
    x, w, b = drawn((4, 4, 4, 3), 9, made), chunked(rng.normal(size=(5, 9)), -1), rng.normal(size=5)
    for call in (lambda x: HEADS["head_sum"](x, w, b), lambda x: cf.logsumexp(x, axis=1), cf.fuse(lambda x: x - 1)):
        made.clear()
        result = call(x) + 1
        assert len([k for k in tasks_of(result) if k[0] == result.name]) == len(result.chunks[0]) == 4
        assert all(k[0] == result.name for k in tasks_of(result))
        found = result.compute()
        assert sorted(made) == [(k, 0) for k in range(4)]
        np.testing.assert_allclose(found, call(x.compute()) + 1, rtol=1e-12)


def test_reductions_are_one_task_a_chunk_and_merges(rng: np.random.Generator) -> None:
    made: list[Any] = []
    x, w, t = drawn((4,) * 16, 9, made), rng.normal(size=(5, 9)), rng.integers(0, 5, 64)
    loss = cf.fuse(lambda x, w, t: cf.cross_entropy(cf.linear(x, w), t))  # a sum, and a number of rows
    for result in (loss(x, w, t), cf.logsumexp(x, axis=0), cf.fuse(lambda x: (x.sum(), x.max(axis=0)))(x)[0]):
        assert x.name not in {k[0] for k in tasks_of(result)}
        with dask.config.set({"optimization.fuse.active": False}):
            kinds = [str(k).split("-")[1] for k in tasks_of(result) if k[0] != result.name]
        counts = [kinds.count(kind) for kind in ("blocks", "run", "merge", "state")]
        assert counts == [16, 1, 5, 0]
        assert kinds.count("item") <= 4  # what the last task reads, and its results
        made.clear()
        result.compute()
        assert len(made) == 16
    # Two passes over the rows read each chunk several times, and it is made once.
    made.clear()
    cf.fuse(lambda x: (x - x.mean(axis=0)).var(axis=1))(x).compute()
    assert len(made) == 16


def test_no_task_is_called_as_another_layer_is(rng: np.random.Generator) -> None:
    """Dask takes any key whose first part is the name of a fused layer for one of that layer: results were states."""
    functions = [
        lambda x, w: ((x @ w.T).argmin(axis=0), (x @ w.T).sum(axis=0)),
        lambda x, w: (x.max(), x.sum(axis=1), (x * x).mean()),
        lambda x, w: (cf.softmax(x @ w.T, axis=0), x.argmax(axis=0)),
    ]
    for _ in range(16):  # the order in which Dask culls depends on the names, which depend on the values
        for function, chunks in itertools.product(functions, [(4, 9), (4, 5)]):
            x, w = matrix(rng), rng.normal(size=(3, 9))
            results = cf.fuse(function)(chunked(x, chunks), w)
            for result in results:
                layers = result.dask.layers
                for name, layer in layers.items():
                    if isinstance(layer, Blockwise):
                        others = (key for other in layers if other != name for key in layers[other].get_output_keys())
                        assert name not in {key[0] for key in others if isinstance(key, tuple)}
            for got, want in zip(dask.compute(*results), function(x, w), strict=True):
                assert got.dtype == want.dtype
                np.testing.assert_allclose(got, want, rtol=1e-12)


def test_what_follows_a_merge_reads_whole_arrays(rng: np.random.Generator) -> None:
    made: list[Any] = []
    x = drawn((4, 4, 3), 9, [])
    for function in (lambda x, s: x.mean(axis=0) * s, lambda x, s: (x * s).max() + s):
        made.clear()
        found = cf.fuse(function)(x, drawn((1,), 9, made))
        needed = compute_layer_dependencies(found.dask.layers)
        assert all(found.dask.dependencies[name] >= layers for name, layers in needed.items())
        expected = function(x.compute(), drawn((1,), 9, []).compute())
        np.testing.assert_allclose((found + 0).compute(), expected, rtol=1e-12)
        assert len(made) == 1


def test_chunks_that_many_blocks_read_are_made_once(rng: np.random.Generator) -> None:
    made: list[Any] = []
    x, w = drawn((4, 4, 2), 9, []), drawn((6,), 9, made)
    by_rows = cf.fuse(lambda x, w: x @ w.T)
    np.testing.assert_allclose(by_rows(x, w).compute(), x.compute() @ w.compute().T, rtol=1e-12)
    assert len(made) == 2  # for the call, and for the result that it is compared with
    made.clear()
    total = cf.fuse(lambda x, y: x + y)(x, drawn((10,), 9, made))  # of which each block reads some rows
    np.testing.assert_allclose(total.compute(), x.compute() + drawn((10,), 9, []).compute(), rtol=1e-12)
    assert len(made) == 1
    made.clear()
    both = by_rows(drawn((4, 4, 2), 9, made), drawn((3, 3, 1), 9, made))
    assert both.numblocks == (3, 3)
    expected = x.compute() @ drawn((3, 3, 1), 9, []).compute().T
    np.testing.assert_allclose((both * 2).compute(), 2 * expected, rtol=1e-12)
    assert len(made) == 6
    made.clear()
    np.testing.assert_allclose(both.blocks[1, 2].compute(), expected[4:8, 6:], rtol=1e-12)
    assert made == [(1, 0), (2, 0)] or made == [(2, 0), (1, 0)]


def test_graphs_can_be_cloned(rng: np.random.Generator) -> None:
    w, b = rng.normal(size=(5, 9)), rng.normal(size=5)
    x, lazy = chunked(matrix(rng), (4, 9)), chunked(w, -1)
    for result in (cf.linear(x, lazy, b), cf.softmax(x, axis=1), cf.linear(x, w, chunked(b, 2))):
        again = clone(result)
        assert not set(tasks_of(again)) & set(tasks_of(result))
        np.testing.assert_allclose(again.compute(), result.compute(), rtol=1e-12)


def test_fused_layers_of_all_forms(rng: np.random.Generator) -> None:
    """Layers before and behind a call that add axes, drop axes, transpose, or need several results."""
    x = chunked(rng.normal(size=12), 5)
    rows = x.map_blocks(lambda b: np.stack([b, b * b], axis=1), chunks=(x.chunks[0], (2,)), new_axis=1)
    for function in (lambda x: x.sum(axis=1), lambda x: cf.softmax(x, axis=1), lambda x: (x.max(axis=1), x + 1)):
        check(cf.fuse(function), rows)
    two = cf.fuse(lambda x: (x.max(axis=1), x * 3))
    y = chunked(matrix(rng), (4, 9))
    for array in (y, y.T.T, y + 1, y + da.ones((1, 9), chunks=9), rows):
        largest, scaled = two(array)
        plain = two(array.compute())
        found = dask.compute(largest + 1, scaled.T - 1, largest.sum())
        for got, want in zip(found, (plain[0] + 1, plain[1].T - 1, plain[0].sum()), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-12)
        np.testing.assert_allclose((scaled * 2).compute(), plain[1] * 2, rtol=1e-12)
    check(cf.fuse(lambda x, y: x + y), y, y)


def test_merges_are_a_tree(rng: np.random.Generator) -> None:
    x = chunked(rng.normal(size=(2, 64)), (2, 1))
    for every, merges in ((2, 63), (8, 9)):
        with dask.config.set(split_every=every):
            lazy = cf.logsumexp(x, axis=1)
        assert sum("-merge-" in str(k) for k in lazy.__dask_graph__()) == merges
        np.testing.assert_allclose(lazy.compute(), cf.logsumexp(x.compute(), axis=1), rtol=1e-14)


def test_long_chains_are_sent() -> None:
    """Deeper than the stack: a program is a list of operations, not operations within each other."""
    node = x = g.argument(0, "x", (4, 4), "float64")
    for _ in range(3000):
        node = g.pointwise("sin", node)
    from cupyfuse.dask.tasks import Options

    program = Program("chain", g.Graph([x], [node]), [(0, 1)], Options("highest", "measured", 1 << 20, True))
    assert pickle.loads(pickle.dumps(program)).token == program.token


# Errors -------------------------------------------------------------------------------------------------------------


def test_unknown_chunks(rng: np.random.Generator) -> None:
    x = chunked(matrix(rng), (4, 9))
    with pytest.raises(ValueError, match=r"'a': .* known lengths, got unknown ones \(nan\) along axis 0; call .*sizes"):
        cf.logsumexp(x[x[:, 0] > 0], axis=1)
    with pytest.raises(ValueError, match=r"'x': .* unknown ones \(nan\)"):
        HEADS["head_sum"](x[x[:, 0] > 0], np.ones((3, 9)), np.ones(3))
    check(cf.softmax, x[x[:, 0] > 0].compute_chunk_sizes(), axis=1)


def test_what_does_not_merge_says_so(rng: np.random.Generator) -> None:
    x = chunked(matrix(rng), (10, 4))
    with pytest.raises(TypeError, match=r"argument 'x' along axis 1: np.sort of 10 x 9.* one chunk: x.rechunk"):
        cf.fuse(lambda x: np.sort(x, axis=1))(x)
    check(cf.fuse(lambda x: np.sort(x, axis=1)), x.rechunk((10, 9)))
    with pytest.raises(TypeError, match=r"a matmul of 10 x 10 needs all elements"):
        cf.fuse(lambda x: x @ x.T)(x.rechunk((3, 9)))
    with pytest.raises(TypeError, match=r"argument 'running_mean': the function changes it in place"):
        cf.batch_norm(x, np.zeros(9), np.ones(9), training=True)
    with pytest.raises(TypeError, match=r"logsumexp: expected real Dask arrays"):
        cf.logsumexp(x * 1j)


def test_out_is_refused(rng: np.random.Generator) -> None:
    x, out = chunked(matrix(rng), (4, 9)), np.empty((10, 9))
    for call in (
        lambda: cf.softmax(x, axis=1, out=out),  # type: ignore[call-arg]
        lambda: cf.fuse(lambda x: x + 1)(x, out=out),
        lambda: cf.fuse(lambda x, k: x + k).bind(k=1)(x, out=out),
    ):
        with pytest.raises(TypeError, match="out: expected none beside Dask arrays"):
            call()


def test_chunks_are_what_their_array_says(rng: np.random.Generator) -> None:
    x = chunked(matrix(rng), (5, 9))
    wrong = x.map_blocks(lambda b: b.astype(np.float32), dtype=np.float64)
    with pytest.raises(ValueError, match=r"'x': a chunk has shape \(5, 9\) and dtype float32, which is not what"):
        cf.fuse(lambda x: x + 1)(wrong).compute()
    with pytest.raises(TypeError, match=r"'x': expected a plain array, got MaskedArray"):
        cf.fuse(lambda x: x + 1)(da.ma.masked_array(x, mask=False))


def test_arguments_are_checked_as_of_numpy_arrays(rng: np.random.Generator) -> None:
    x = chunked(matrix(rng), (5, 9))
    with pytest.raises(ValueError, match="x: expected 4 columns"):
        cf.linear(x, np.ones((3, 4)))
    with pytest.raises(TypeError, match="a spec has no values"):
        cf.fuse(lambda x, y: x + y)(x, cf.spec((10, 9)))
    with pytest.raises(TypeError, match="of which a fused function cannot tell"):
        cf.fuse(lambda x: x + outer)(np.ones((10, 9)))


outer = da.ones((10, 9))
