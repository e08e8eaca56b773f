"""Blocks of rows: which plans take them, that they change no result, and that the workspace is as small as asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from chains import Chain, chains
from searched import EXAMPLES, searched
from support import HEADS, HOST, Engine, Head, dtype_of

import cupyfuse as cf
from cupyfuse import devices
from cupyfuse.plan import block_choice
from cupyfuse.plan.schedule.cut import COLUMNS, ROWS
from cupyfuse.settings import epilogues

SMALL = 6000  # bytes of workspace: a few rows of the products below


def normal(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[Any]:
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("rows", [2, 3, 64, 65, 130])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("head", [h for h in HEADS if h.name != "head_sum"], ids=lambda h: h.name)
def test_blocks_change_no_result(engine: Engine, head: Head, bound: bool, rows: int, rng: np.random.Generator) -> None:
    arguments = engine.arrays(head.arguments(rng, rows, 20, 150))
    names = list(cf.fuse(head.function).signature.parameters)
    results = []
    for workspace in (1 << 20, SMALL):
        fused: Any = cf.fuse(head.function, max_workspace=workspace)
        if bound:
            fixed = {n: a for n, a in zip(names, arguments, strict=False) if n in head.bound}
            fused = fused.bind(**fixed)
            given = [a for n, a in zip(names, arguments, strict=False) if n not in fixed]
        else:
            given = arguments
        plan = fused.plan(*given)
        assert (plan.blocks is not None) == (workspace == SMALL and rows * 150 * 4 > SMALL)
        assert plan.workspace <= workspace
        out = engine.array(np.full(plan.outputs[0].shape, np.nan, np.float32))
        assert fused(*given, out=out) is out
        results += [engine.host(fused(*given)), engine.host(out)]
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], rtol=1e-5)


def test_several_results_and_arguments(engine: Engine, rng: np.random.Generator) -> None:
    """What has a row for each row of the results is cut; what has not is computed once, for all blocks."""

    def chain(x: Any, w: Any, each: Any, bias: Any) -> Any:
        y = x @ (w * w.max()) + bias
        return cf.softmax(y * each, axis=1), y.max(axis=1), (y.sum(axis=1, keepdims=True) + each).astype(np.float64)

    arguments = engine.arrays(normal(rng, (97, 31), (31, 45), (97, 1), (45,)))
    fused = cf.fuse(chain, max_workspace=SMALL)
    plan = fused.plan(*arguments)
    assert plan.blocks is not None and {s.number for s in plan.blocks.sources if s.mode == ROWS} == {0, 2}
    for result, expected in zip(fused(*arguments), chain(*map(engine.host, arguments)), strict=True):
        np.testing.assert_allclose(engine.host(result), expected, rtol=1e-4, atol=1e-5)


# Results of other shapes than the rows of the product --------------------------------------------------------------


def descend(x: Any, w: Any, labels: Any, rate: Any) -> Any:
    """A step of softmax regression: the mean loss, what is right, the new weight, the gradient of a bias."""
    y = x @ w.T
    error = cf.softmax(y, axis=1) - np.where(labels[:, None] == np.arange(w.shape[0]), 1.0, 0.0).astype(y.dtype)
    error = error / float(x.shape[0])
    return cf.cross_entropy(y, labels), y.argmax(axis=1) == labels, w - rate * (error.T @ x), error.sum(axis=0)


def descended(x: Any, w: Any, labels: Any, rate: float) -> Any:
    """The same in float64 by NumPy."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    y = x @ w.T
    rows = np.arange(len(x))
    probabilities = np.exp(y - y.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    loss = -np.log(probabilities[rows, labels]).mean()
    probabilities[rows, labels] -= 1
    return loss, y.argmax(axis=1) == labels, w - rate * (probabilities.T @ x) / len(x), probabilities.mean(axis=0)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("rows", [65, 130])
def test_sums_over_blocks_and_what_follows(engine: Engine, rows: int, bound: bool, rng: np.random.Generator) -> None:
    x, w = normal(rng, (rows, 20), (150, 20))
    labels = rng.integers(0, 150, rows)
    expected = descended(x, w, labels, 0.5)
    arguments = engine.arrays((x, w, labels))
    fused: Any = cf.fuse(descend, max_workspace=SMALL)
    given: tuple[Any, ...] = (*arguments, 0.5)
    if bound:
        fused, given = fused.bind(w=arguments[1], labels=arguments[2], rate=0.5), arguments[:1]
    plan = fused.plan(*given)
    blocks = plan.blocks
    assert blocks is not None and blocks.after is not None and blocks.zeros is not None
    assert f"{blocks.count} blocks of {blocks.rows} rows" in str(plan) and "after them" in str(plan)
    assert len(plan.steps) == sum(len(p.steps) for p in (*blocks.first, blocks.plan, blocks.after))
    # Roundings of 20 products and of 150 exponentials, in float32.
    results = [fused(*given)]
    if engine.name == "numpy":
        wide = np.full((150, 40), np.nan, np.float32)
        out = [np.empty((), np.float32), np.empty(2 * rows, bool)[::2], wide[:, ::2], np.empty(150, np.float32)]
        assert all(a is b for a, b in zip(fused(*given, out=out), out, strict=True))
        results.append(out)
    for found in results:
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(engine.host(ours), theirs, rtol=1e-4, atol=1e-6)


def test_one_float_for_all_parts(engine: Engine, rng: np.random.Generator) -> None:
    """A float that a call brings is read before the blocks, in them and after them, and belongs to no plan."""

    def chain(x: Any, w: Any, s: float) -> Any:
        y = (x @ (w * w.max() * s).T) * s
        return cf.logsumexp(y, axis=1).sum() * s, (y.T @ x) * s

    x, w = normal(rng, (70, 20), (60, 20))
    fused = cf.fuse(chain, max_workspace=SMALL)
    for s in (0.5, 0.25):
        for found, expected in zip(fused(*engine.arrays((x, w)), s), chain(x, w, s), strict=True):
            np.testing.assert_allclose(engine.host(found), expected, rtol=1e-4, atol=1e-4)
    assert fused.plans[-1].blocks is not None and len(fused.plans) == 1


def test_what_several_blocks_read_of_all_rows_is_computed_before(engine: Engine, rng: np.random.Generator) -> None:
    def chain(x: Any, w: Any) -> Any:
        gram = np.tanh(x)
        return cf.softmax(gram @ gram.T, axis=1), cf.logsumexp(gram @ w.T, axis=1)

    x, w = normal(rng, (90, 5), (40, 5))
    fused = cf.fuse(chain, max_workspace=SMALL)
    plan = fused.plan(x, w)
    assert plan.blocks is not None and plan.blocks.before is not None
    for found, expected in zip(fused(*engine.arrays((x, w))), chain(x, w), strict=True):
        np.testing.assert_allclose(engine.host(found), expected, rtol=1e-4, atol=1e-6)


def test_what_blocks_and_what_follows_them_share_is_computed_once(engine: Engine, rng: np.random.Generator) -> None:
    """Reductions of arguments that all blocks need, that precede them, and that results need beside the blocks."""

    def chain(x: Any, w: Any) -> Any:
        top = w.max(axis=0)
        scale = np.exp(np.median(top))
        return cf.logsumexp((x * scale) @ w.T, axis=1).sum() * top, scale + 1

    x, w = normal(rng, (90, 5), (40, 5))
    fused = cf.fuse(chain, max_workspace=SMALL)
    plan = fused.plan(x, w)
    assert plan.blocks is not None and plan.blocks.before is not None and plan.blocks.after is not None
    names = [name for step in plan.steps for name in step.fused]
    assert names.count("max") == 2, "the maximum of the columns, and that of each row"
    assert names.count("np.median") == 1
    for found, expected in zip(fused(*engine.arrays((x, w))), chain(x, w), strict=True):
        np.testing.assert_allclose(engine.host(found), expected, rtol=1e-4, atol=1e-6)


def test_pointwise_work_is_shared_where_twice_would_be_too_much(engine: Engine, rng: np.random.Generator) -> None:
    def chain(x: Any, w: Any) -> Any:
        small = np.logaddexp(w, 1.5 * w)
        return (x @ np.roll(small, 1).T).max(axis=1), (small * 2).sum(axis=1)

    x, w = normal(rng, (90, 5), (40, 5))
    fused = cf.fuse(chain, max_workspace=SMALL)
    plan = fused.plan(x, w)
    assert plan.blocks is not None and plan.blocks.after is not None
    assert [name for step in plan.steps for name in step.fused].count("logaddexp") == 1
    for found, expected in zip(fused(*engine.arrays((x, w))), chain(x, w), strict=True):
        np.testing.assert_allclose(engine.host(found), expected, rtol=1e-4, atol=1e-5)


def test_pointwise_work_of_three_parts_is_shared_where_again_would_be_too_much(
    engine: Engine, rng: np.random.Generator
) -> None:
    """What precedes the blocks, what these share, and each block would compute the probabilities."""

    def chain(x: Any) -> Any:
        shares = cf.softmax(x, axis=1)
        odds = shares - cf.logsumexp(shares, axis=1, keepdims=True)
        return odds - odds.mean(axis=0)

    x = normal(rng, (200, 16))[0]
    given = engine.array(x, "column_gap")  # a copy of all rows, of which blocks would copy theirs alone
    fused = cf.fuse(chain, max_workspace=SMALL)
    plan = fused.plan(given)
    assert [name for step in plan.steps for name in step.fused].count("exp") == 1
    assert plan.blocks is None and plan.whole
    np.testing.assert_allclose(engine.host(fused(given)), chain(x), rtol=1e-4, atol=1e-5)


def test_what_takes_most_of_the_workspace_is_shared(engine: Engine, rng: np.random.Generator) -> None:
    """Blocks are of no use where they read all of a value that is stored before them."""

    def chain(x: Any) -> Any:
        costly = np.exp(np.sin(np.exp(x)))
        return costly - costly.mean(axis=0)

    x = normal(rng, (200, 16))[0]
    fused = cf.fuse(chain, max_workspace=SMALL)
    plan = fused.plan(x)
    assert plan.blocks is None and plan.workspace > SMALL and "not in blocks, as blocks would share" in str(plan)
    np.testing.assert_allclose(engine.host(fused(engine.array(x))), chain(x), rtol=1e-4, atol=1e-5)


def test_what_follows_blocks_shares_products_that_these_would_take_by_rows(
    engine: Engine, rng: np.random.Generator
) -> None:
    """Beside the matrix that is cut, whose rows are as many."""

    def chain(x: Any, w: Any) -> Any:
        small = x @ w[:3].T
        return cf.logsumexp(x @ w.T, axis=1), np.tanh(small), (small.T @ x).sum(axis=0)

    x, w = normal(rng, (90, 5), (40, 5))
    fused = cf.fuse(chain, max_workspace=SMALL)
    plan = fused.plan(x, w)
    assert plan.blocks is not None
    assert [s.product.shape[1] for s in plan.steps if s.kind == "Gemm"].count(3) == 1
    for found, expected in zip(fused(*engine.arrays((x, w))), chain(x, w), strict=True):
        np.testing.assert_allclose(engine.host(found), expected, rtol=1e-4, atol=1e-5)


# Blocks of columns ---------------------------------------------------------------------------------------------------


def gradients_of_linear(x: Any, w: Any, labels: Any, top: Any, cotangent: Any) -> Any:
    """From the maxima of rows, as a forward pass saves them, to the gradients of both operands and of a bias."""
    y = x @ w.T
    error = np.exp(y - top[:, None]) - np.where(labels[:, None] == np.arange(w.shape[0]), 1.0, 0.0).astype(y.dtype)
    error = (error * cotangent[:, None]).astype(x.dtype)
    return error.T @ x, error @ w, error.sum(axis=0)


def by_hand(x: Any, w: Any, labels: Any, top: Any, cotangent: Any) -> Any:
    """The same in float64 by NumPy."""
    x, w, top, cotangent = (a.astype(np.float64) for a in (x, w, top, cotangent))
    error = np.exp(x @ w.T - top[:, None])
    error[np.arange(len(x)), labels] -= 1
    error *= cotangent[:, None]
    return error.T @ x, error @ w, error.sum(axis=0)


@pytest.mark.parametrize(("rows", "columns"), [(24, 300), (24, 512), (300, 300), (2, 700), (129, 130)])
def test_columns_of_a_product_whose_gradients_they_give(
    engine: Engine, rows: int, columns: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_choice, "_AXES", (COLUMNS,))
    x, w, top, cotangent = normal(rng, (rows, 10), (columns, 10), (rows,), (rows,))
    labels = rng.integers(0, columns, rows)
    labels[-1] = columns - 1  # in the last block
    arguments = x * 0.1, w, labels, np.abs(top) + 3, cotangent
    most = 12 * columns + 8 * rows * min(columns // 2, 140)  # the positions of columns; logits and their gradient
    fused = cf.fuse(gradients_of_linear, max_workspace=most)
    plan = fused.plan(*arguments)
    blocks = plan.blocks
    assert blocks is not None and blocks.transposed and plan.workspace <= most
    assert f"{blocks.count} blocks of {blocks.rows} columns" in str(plan)
    assert plan.record()["blocks"] == {"count": blocks.count, "columns": blocks.rows, "choice": ""}
    found, expected = fused(*engine.arrays(arguments)), by_hand(*arguments)
    for ours, theirs in zip(found, expected, strict=True):
        # Sums of at most 700 terms of about 1, each rounded a few times.
        np.testing.assert_allclose(engine.host(ours), theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


def specs_of_gradients(rows: int, features: int, columns: int) -> list[Any]:
    """Arguments of `gradients_of_linear`, the operands in 16 bits."""
    shapes = (rows, features), (columns, features), (rows,), (rows,), (rows,)
    kinds = ("bfloat16", "bfloat16", "int64", "float32", "float32")
    return [cf.spec(shape, kind) for shape, kind in zip(shapes, kinds, strict=True)]


@pytest.mark.parametrize("columns", [512, 584])
def test_columns_by_our_own_kernel(columns: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its epilogue makes the gradient of the logits, which are in no memory."""
    monkeypatch.setattr(block_choice, "_AXES", (COLUMNS,))
    monkeypatch.setattr(HOST.runtime, "device", devices.DEVICES["H200"])
    rows, bfloat16 = 72, dtype_of("bfloat16")
    x, w, top, cotangent = normal(rng, (rows, 64), (columns, 64), (rows,), (rows,))
    labels = rng.integers(0, columns, rows)
    labels[-1] = columns - 1
    arguments = (x * 0.1).astype(bfloat16), w.astype(bfloat16), labels, np.abs(top) + 3, cotangent
    with HOST.active(), epilogues("always"):
        fused = cf.fuse(gradients_of_linear, max_workspace=50_000)
        given = HOST.arrays(arguments)
        found, plan = fused(*given), fused.plan(*given)
    blocks = plan.blocks
    assert blocks is not None and blocks.transposed and blocks.count > 1 and plan.workspace <= 50_000
    assert any(s.epilogue is not None and s.epilogue.nodes for s in blocks.plan.steps)
    expected = by_hand(*(a.astype(np.float64) if a.dtype == bfloat16 else a for a in arguments))
    for ours, theirs in zip(found, expected, strict=True):
        # The gradient of the logits and the results are rounded to bfloat16, and its terms may cancel.
        values = HOST.host(ours).astype(np.float64)
        np.testing.assert_allclose(values, theirs, rtol=2.0**-7, atol=2.0**-8 * np.abs(theirs).max())


def test_columns_are_summed_where_a_product_contracts_them(engine: Engine, rng: np.random.Generator) -> None:
    x, w = normal(rng, (50, 20), (60, 20))
    fused = cf.fuse(lambda x, w: self_product(x @ w.T), max_workspace=SMALL)
    plan = fused.plan(x, w)
    assert plan.blocks is not None and plan.blocks.transposed and plan.workspace <= SMALL
    y = x.astype(np.float64) @ w.T
    np.testing.assert_allclose(engine.host(fused(*engine.arrays((x, w)))), y @ y.T, rtol=1e-4, atol=1e-4)


def test_sums_of_a_gradient_that_is_scaled_take_blocks(rng: np.random.Generator) -> None:
    """Blocks of its columns would share the logits: they are no reason to compute these at once."""

    def scaled(x: Any, w: Any) -> Any:
        y = cf.softmax(x @ w.T, axis=1)
        return y.max(axis=1), (y.T @ x) / 3.0

    x, w = normal(rng, (600, 32), (200, 32))
    plan = cf.fuse(scaled, max_workspace=100_000).plan(x, w)
    assert plan.blocks is not None and plan.workspace <= 100_000 and not plan.whole


def test_what_blocks_share_counts_unless_they_would_take_twice_as_long(rng: np.random.Generator) -> None:
    """A copy of an argument leaves room for some rows, or for one, or for none: then it comes on top."""

    def of_reshaped(x: Any, w: Any) -> Any:
        return cf.logsumexp(np.reshape(x, (120, 32)) @ w.T, axis=1)

    x, w = normal(rng, (16, 240), (503, 32))
    expected = of_reshaped(x.T.astype(np.float64), w)
    copied = x.nbytes
    for limit, most in ((60_000, 60_000), (20_000, 20_000 + copied), (10_000, 10_000 + copied)):
        fused = cf.fuse(of_reshaped, max_workspace=limit)
        plan = fused.plan(x.T, w)
        assert plan.blocks is not None and plan.blocks.before is not None
        assert most - copied // 2 < plan.workspace <= most
        np.testing.assert_allclose(fused(x.T, w), expected, rtol=1e-5)


def test_reshaped_arguments_are_read_where_they_are(engine: Engine, rng: np.random.Generator) -> None:
    """By blocks of their rows, and by what follows the blocks."""

    def of_reshaped(x: Any, w: Any) -> Any:
        rows = np.reshape(x, (120, 32))
        return cf.logsumexp(rows @ w.T, axis=1).mean() + rows.mean(), cf.logsumexp(rows @ w.T, axis=1)

    x, w = normal(rng, (6, 40, 16), (503, 32))
    fused = cf.fuse(of_reshaped, max_workspace=60_000)
    plan = fused.plan(x, w)
    assert plan.blocks is not None and plan.blocks.before is None and plan.workspace <= 60_000
    found = fused(*engine.arrays((x, w)))
    for ours, theirs in zip(found, of_reshaped(x.astype(np.float64), w), strict=True):
        np.testing.assert_allclose(engine.host(ours), theirs, rtol=1e-5)


def test_reshaped_results_are_copied_once(rng: np.random.Generator) -> None:
    fused = cf.fuse(lambda x: (np.reshape(x, (30, 20)), np.reshape(x, (30, 20)), x))
    (x,) = normal(rng, (20, 30))
    plan = fused.plan(x.T)
    assert [step.kind for step in plan.steps].count("Copy") == 1
    results = fused(x.T)
    for found, expected in zip(results, (x.T.reshape(30, 20), x.T.reshape(30, 20), x.T), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert not any(np.shares_memory(a, b) for a, b in zip((*results, x), (*results[1:], x, results[0]), strict=True))


def test_columns_where_the_sum_of_rows_would_take_the_time_or_the_memory() -> None:
    """The time of sums counts, and their memory; without sums of matrices there are rows, and no choice."""
    specs = specs_of_gradients(2048, 1024, 32768)
    with epilogues("never"):
        plan = cf.fuse(gradients_of_linear, max_workspace=64 << 20).plan(*specs)
        alone = cf.fuse(lambda *a: gradients_of_linear(*a)[1], max_workspace=64 << 20).plan(*specs)
    assert plan.blocks is not None and plan.blocks.transposed and plan.workspace <= 64 << 20
    assert "where blocks of rows would take" in plan.blocks.choice
    assert plan.estimated_time >= plan.best_time()
    accumulating = [s for s in plan.blocks.plan.steps if s.kind == "Gemm" and s.product.op == "accumulate"]
    assert [s.domain for s in accumulating] == [(2048, 1024)], "the gradient of the features alone is a sum"
    assert alone.blocks is not None and not alone.blocks.transposed and not alone.blocks.choice


def test_what_masks_need_of_all_columns_is_no_matrix_in_memory() -> None:
    """A row sum of pointwise work is computed for all blocks at once, though blocks compute that work, too."""

    def smoothed(x: Any, w: Any, labels: Any, top: Any) -> Any:
        wanted = np.where(labels[:, None] == np.arange(w.shape[0]), 0.9, 0.1).astype(top.dtype)
        error = np.exp(x @ w.T - top[:, None]) * wanted.sum(axis=1, keepdims=True) - wanted
        return error.astype(x.dtype).T @ x, error.astype(x.dtype) @ w

    plan = cf.fuse(smoothed, max_workspace=8 << 20).plan(*specs_of_gradients(512, 128, 16384)[:4])
    assert plan.blocks is not None and plan.blocks.transposed and plan.workspace <= 8 << 20


def test_a_last_block_takes_no_more_than_the_others() -> None:
    """Fewer columns may be another kernel's, which writes logits that the others keep in registers."""
    for columns in range(100_000, 130_000, 4_096):
        plan = cf.fuse(gradients_of_linear).plan(*specs_of_gradients(8192, 4096, columns))
        assert plan.blocks is not None and plan.blocks.transposed and plan.workspace <= 256 << 20


def self_product(y: Any) -> Any:
    return y @ y.T


WHOLE: list[tuple[Callable[..., Any], str]] = [
    (lambda x, w: cf.softmax(x @ w.T, axis=0), "across rows"),
    (lambda x, w: (x @ w.T).T * 2, "rows"),
    (lambda x, w: self_product(cf.softmax(x @ w.T, axis=1)), "takes all rows of what others take row by row"),
]


@pytest.mark.parametrize(("chain", "reason"), WHOLE)
def test_what_cannot_be_cut_is_computed_whole_and_says_why(
    engine: Engine, chain: Any, reason: str, rng: np.random.Generator
) -> None:
    arguments = engine.arrays(normal(rng, (50, 20), (60, 20)))
    fused = cf.fuse(chain, max_workspace=SMALL)
    plan = fused.plan(*arguments)
    assert plan.blocks is None and reason in plan.whole and plan.whole in str(plan)
    results, expected = fused(*arguments), chain(*map(engine.host, arguments))
    pairs = zip(results, expected, strict=True) if isinstance(results, tuple) else [(results, expected)]
    for result, value in pairs:
        np.testing.assert_allclose(engine.host(result), value, rtol=1e-3, atol=1e-4)


@pytest.mark.rotates
@pytest.mark.parametrize("part", range(6))
def test_random_chains_in_blocks(part: int) -> None:
    @searched(part, EXAMPLES // 30, chain=chains(("float32", "float64")))
    def check(chain: Chain) -> None:
        arguments = [a.copy() for a in chain.arrays]
        chain.check(cf.fuse(chain.function, max_workspace=300)(*arguments), arguments)

    check()


def test_a_vocabulary_takes_little_workspace() -> None:
    def head(x: Any, weight: Any) -> Any:
        return cf.logsumexp(x @ weight.T, axis=1)

    x, weight = cf.spec((8192, 4096)), cf.spec((131072, 4096))
    for dtype in ("float32", "bfloat16"):
        fused = cf.fuse(head).bind(weight=cf.spec(weight.shape, dtype))
        plan = fused.plan(cf.spec(x.shape, dtype))
        assert plan.workspace <= 256 << 20
        if dtype == "bfloat16":
            assert plan.blocks is None and plan.steps[0].epilogue is not None, "no product in memory"
            with epilogues("never"):
                plan = fused.plan(cf.spec(x.shape, dtype))
        assert plan.blocks is not None and plan.workspace <= 256 << 20
        assert plan.blocks.rows % 128 == 0 and plan.blocks.rows >= 256
        assert f"{plan.blocks.count} blocks of {plan.blocks.rows} rows" in str(plan)
    tight = cf.fuse(head, max_workspace=1 << 20).bind(weight=weight).plan(x)
    assert tight.workspace <= 1 << 20


def test_any_integer_bounds_the_workspace() -> None:
    assert cf.fuse(lambda x: x, max_workspace=np.int64(5)).settings(None).max_workspace == 5  # type: ignore[call-overload]


@pytest.mark.parametrize(("value", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_the_bound_is_checked(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="max_workspace: expected a"):
        cf.fuse(lambda x: x, max_workspace=value)


def test_copies_are_made_once_for_all_blocks(rng: np.random.Generator) -> None:
    x, w = normal(rng, (150, 40), (60, 80))
    fused = cf.fuse(lambda x, w: cf.softmax(x @ w.T, axis=1), max_workspace=SMALL)
    plan = fused.plan(x, w[:, ::2])
    assert plan.blocks is not None and plan.blocks.common is not None and plan.blocks.rows > 8
    assert [s.kind for s in plan.blocks.common.steps] == ["Copy"]
    np.testing.assert_allclose(fused(x, w[:, ::2]), cf.softmax(x @ w[:, ::2].T, axis=1), rtol=1e-4, atol=1e-6)


def test_blocks_of_halves_stay_within_the_bound() -> None:
    x, w = cf.spec((32, 700)), cf.spec((600, 700))
    for most in range(20_000, 90_000, 1_700):
        plan = cf.fuse(lambda x, w: cf.softmax((x * 2) @ w.T, axis=1), max_workspace=most).bind(w=w).plan(x)
        assert plan.workspace <= most or "one row takes more" in plan.whole


def test_what_is_kept_of_all_rows_counts_within_the_bound(rng: np.random.Generator) -> None:
    """Beside it one row may take more than the rest of the bound: then the plan says so."""

    def ordered(x: Any, w: Any) -> Any:
        return np.sort(cf.logsumexp(x @ w.T, axis=1))

    x, w = normal(rng, (700, 8), (300, 8))
    kept, row = 4 * 700, 4 * 300
    for most in (kept, kept + row - 1, kept + row, kept + 3 * row):
        fused = cf.fuse(ordered, max_workspace=most)
        plan = fused.plan(x, w)
        if most < kept + row:
            assert (
                plan.blocks is None and plan.whole == "one row takes more than that, beside the 2.8 kB kept of all rows"
            )
        else:
            assert plan.blocks is not None and plan.workspace <= most
        np.testing.assert_allclose(fused(x, w), ordered(x.astype(np.float64), w), rtol=1e-5)


def test_an_empty_array_may_have_any_strides() -> None:
    """NumPy makes empty arrays whose strides are 0: no two elements share a place where there are none."""
    out = np.lib.stride_tricks.as_strided(np.empty(0), (5, 0), (0, 8))
    assert cf.fuse(lambda x: x * 2)(np.empty((5, 0)), out=out) is out


def test_what_precedes_the_blocks_may_take_numbers_of_the_call(rng: np.random.Generator, engine: Engine) -> None:
    """It is computed by each call, not when the plan is loaded."""

    def transported(costs: Any, rate: Any) -> Any:
        kernel = np.exp(-costs / rate)
        return kernel @ np.diag(kernel.T @ (1 / kernel.sum(axis=1)))

    costs = np.abs(normal(rng, (70, 50))[0])
    fused = cf.fuse(transported, max_workspace=SMALL)
    blocks = fused.plan(costs, 0.5).blocks
    assert blocks is not None and blocks.before is not None
    for rate in (0.5, 1.5, 0.75):
        expected = transported(costs.astype(np.float64), rate)
        # Sums of at most 70 terms, all positive, of exponentials of numbers above -10.
        np.testing.assert_allclose(engine.host(fused(engine.array(costs), rate)), expected, rtol=1e-4)
