"""Gradients of a loss over classes in blocks of classes: right in every option, dtype and shape, in little memory."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cross_entropies import OPTIONS, REDUCTIONS, draw, reference

import cupyfuse.torch as ct
from cupyfuse.plan import block_choice
from cupyfuse.plan.build import build
from cupyfuse.plan.plan import Plan
from cupyfuse.plan.schedule.cut import ROWS
from cupyfuse.settings import EPILOGUES, Settings
from cupyfuse.torch import losses
from cupyfuse.torch.chains import saving
from cupyfuse.torch.chains.backward import Backward
from cupyfuse.torch.chains.chain import TracedChain

F = torch.nn.functional
FEATURES, ROWS_OF_LOGITS, CLASSES = 8, 24, 700
# Bytes of 128 columns of logits with their gradient, fewer than all logits have. No other test takes as many, so that
# compiled chains are not shared.
SMALL = {torch.float64: 65_003, torch.float32: 40_003, torch.bfloat16: 30_003, torch.float16: 30_003}


class Ways:
    """The runners of the losses computed, and which blocks their plans have."""

    def __init__(self) -> None:
        self.runners: list[Any] = []

    @property
    def backward(self) -> Backward:
        found: Backward = self.runners[-1].executors[-1].backward
        return found

    @property
    def plan(self) -> Plan:
        """The latest backward plan."""
        *_, loaded = (p for p in self.backward._plans.values() if p.execute is not None)
        return loaded.plan


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    found, original = Ways(), losses._runner

    def recorded(*arguments: Any) -> Any:
        found.runners.append(original(*arguments))
        return found.runners[-1]

    monkeypatch.setattr(losses, "_runner", recorded)
    return found


@pytest.fixture
def by_classes(ways: Ways, monkeypatch: pytest.MonkeyPatch) -> Ways:
    """Have products computed again by the backward pass, in blocks of classes, whatever takes the least time."""
    monkeypatch.setattr(saving, "_gradients_scale_with_one_number", lambda *_: False)
    monkeypatch.setattr(block_choice, "_cost", lambda planned: (not planned[0].transposed, 0.0))
    return ways


def operands(rows: int, classes: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Features, weight and bias, of which gradients are wanted, and labels, one of them ignored."""
    x, w = draw(rows, FEATURES, dtype=dtype), draw(classes, FEATURES, dtype=dtype, seed=1)
    b = draw(classes, dtype=dtype, seed=2)
    target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(3))
    special = (classes - 1, -100, 0)[:rows]
    target[: len(special)] = torch.tensor(special)
    return tuple(t.requires_grad_() for t in (x, w, b)) + (target,)


def with_weights(options: dict[str, Any], classes: int, dtype: torch.dtype) -> dict[str, Any]:
    weighted = {"class_weight": draw(classes, dtype=dtype, seed=4).abs()} if "class_weight" in options else {}
    return {**options, **weighted}


def passes(function: Callable[..., Any], given: Any, target: Any, options: Any, cotangent: Any) -> list[torch.Tensor]:
    """The loss and its gradients, in float64."""
    wanted = [t for t in given if t is not None]
    loss = function(given[0], given[1], target, given[2], **options)
    return [t.detach().double() for t in (loss, *torch.autograd.grad(loss, wanted, cotangent.to(loss.dtype)))]


def errors(found: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    return [float((f - r).abs().max() / r.abs().max().clamp(min=1e-300)) for f, r in zip(found, right, strict=True)]


def pairs_of_parameters() -> Iterator[tuple[torch.dtype, dict[str, Any], str, bool]]:
    """Each two of dtype, options, reduction and bias meet; two dtypes for each options and reduction."""
    for (k, options), (n, reduction) in itertools.product(enumerate(OPTIONS), enumerate(REDUCTIONS)):
        for number, dtype in enumerate(list(SMALL)[(k + n) % 2 :: 2]):
            yield dtype, options, reduction, (k // 2 + n + number) % 2 == 0


@pytest.mark.rotates
@pytest.mark.parametrize(("dtype", "options", "reduction", "biased"), list(pairs_of_parameters()), ids=str)
def test_no_further_from_float64_than_other_ways(
    dtype: torch.dtype,
    options: dict[str, Any],
    reduction: str,
    biased: bool,
    by_classes: Ways,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice the error of blocks of rows, or of the whole, allows for another order of sums.

    Logits that are computed again may be rounded another way, by which the probabilities are off.
    """
    rows, classes, most = ROWS_OF_LOGITS, CLASSES, SMALL[dtype]
    options = {**with_weights(options, classes, dtype), "reduction": reduction}
    wide = {**options, **{k: v.double() for k, v in options.items() if k == "class_weight"}}
    x, w, b, target = operands(rows, classes, dtype)
    if options.get("ignore_index") == 7:
        target = torch.where(target == -100, 7, target)
    given = x, w, b if biased else None
    cotangent = draw(rows if reduction == "none" else 1, seed=5).reshape([rows] * (reduction == "none"))
    ours = passes(ct.linear_cross_entropy, given, target, {**options, "max_workspace": most}, cotangent)
    assert by_classes.plan.blocks is not None and by_classes.plan.blocks.transposed
    # Beside the logits there are a few vectors of classes, computed before the blocks.
    assert by_classes.plan.blocks.count > 3 and by_classes.plan.workspace <= most + 2 * 8 * classes
    exact = tuple(None if t is None else t.detach().double().requires_grad_() for t in given)
    right = passes(reference, exact, target, wide, cotangent)
    with monkeypatch.context() as patch:
        patch.setattr(block_choice, "_AXES", (ROWS,))
        others = [
            passes(ct.linear_cross_entropy, given, target, {**options, "max_workspace": other}, cotangent)
            for other in (most + 6, 1 << 28)
        ]
        assert by_classes.plan.blocks is None
    unit = torch.finfo(dtype).eps / 2  # gradients are rounded to the operands' dtype
    with torch.no_grad():
        logits = torch.nn.functional.linear(*exact[:2], exact[2])
    again = float(logits.abs().max()) * unit if dtype == torch.float64 else 0.0
    limits = [max(each) for each in zip(*(errors(other, right) for other in others), strict=True)]
    for mine, theirs in zip(errors(ours, right), limits, strict=True):
        assert mine <= 2 * theirs + 2 * unit + again


SHAPES = [(24, 640), (24, 129), (3, 700), (2, 700), (1, 700), (24, 5), (130, 130), (200, 131), (0, 700)]


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "classes"), SHAPES)
def test_shapes(rows: int, classes: int, dtype: torch.dtype, by_classes: Ways) -> None:
    """Blocks of equal size, short last blocks, fewer classes than a block has, as many as rows, one row, none."""
    x, w, b, target = operands(rows, classes, dtype)
    cotangent = torch.ones(())
    for most, smoothing in itertools.product((1_501, 6_007, 20_011), (0.0, 0.25)):
        options: dict[str, Any] = {"reduction": "sum", "label_smoothing": smoothing}
        ours = passes(ct.linear_cross_entropy, (x, w, b), target, {**options, "max_workspace": most}, cotangent)
        exact = tuple(t.detach().double().requires_grad_() for t in (x, w, b))
        right = passes(reference, exact, target, options, cotangent)
        unit = torch.finfo(dtype).eps
        for mine, theirs in zip(ours, right, strict=True):
            # Of logits of 8 terms, and of gradients that are rounded for the products, of which these are sums.
            torch.testing.assert_close(mine, theirs, rtol=64 * unit, atol=64 * unit * max(1.0, rows**0.5))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_that_are_all_ignored(reduction: str, by_classes: Ways) -> None:
    x, w, b, target = operands(ROWS_OF_LOGITS, CLASSES, torch.float32)
    ignored = torch.full_like(target, -100)
    cotangent = torch.ones([ROWS_OF_LOGITS] * (reduction == "none"))
    for smoothing in (0.0, 0.25):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        ours = passes(
            ct.linear_cross_entropy, (x, w, b), ignored, {**options, "max_workspace": SMALL[x.dtype]}, cotangent
        )
        assert by_classes.plan.blocks is not None and by_classes.plan.blocks.transposed
        theirs = passes(reference, (x, w, b), ignored, options, cotangent)
        torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1)], ids=str)
def test_gradients_of_some_operands(wanted: tuple[int, ...], by_classes: Ways) -> None:
    x, w, b, target = operands(ROWS_OF_LOGITS, CLASSES, torch.float64)
    given = [t.detach().requires_grad_(k in wanted) for k, t in enumerate((x, w, b))]
    ours = ct.linear_cross_entropy(given[0], given[1], target, given[2], max_workspace=SMALL[torch.float64])
    theirs = reference(given[0], given[1], target, given[2])
    leaves = [given[k] for k in wanted]
    torch.testing.assert_close(torch.autograd.grad(ours, leaves), torch.autograd.grad(theirs, leaves))


def test_what_is_allocated(ways: Ways) -> None:
    """Beside operands and gradients, what `max_workspace` says; not the weight's gradient in float32 as well."""
    rows, features, classes, most = 256, 64, 65536, 4 << 20
    x = draw(rows, features, dtype=torch.bfloat16).requires_grad_()
    w = draw(classes, features, dtype=torch.bfloat16, seed=1).requires_grad_()
    target = torch.randint(classes, (rows,), generator=torch.Generator().manual_seed(3))

    def forward() -> torch.Tensor:
        return ct.linear_cross_entropy(x, w, target, max_workspace=most)

    forward().backward()
    assert ways.plan.blocks is not None and ways.plan.blocks.transposed and ways.plan.workspace <= most
    assert "recomputed by the backward pass" in ways.backward.saving.note
    x.grad = w.grad = None
    loss = forward()
    tracemalloc.start()
    try:
        loss.backward()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    gradients = 2 * (rows + classes) * features
    # NumPy widens the operands of products, of which a block's gradient of the logits is the largest, and takes
    # temporaries for some rows of a step at a time.
    limit = 2 * most + gradients + 2 * (4 << 18)
    assert peak < limit < gradients + 4 * classes * features


# Choices for a large vocabulary, from shapes alone --------------------------------------------------------------------


def language_model(rows: int, classes: int, features: int, dtype: str, reduction: str) -> TracedChain:
    options = losses._Options(-100, reduction, 0.0, 0.0, None, None)
    names = ("input", "weight", "target")
    chain = losses._chain(names, dtype in ("bfloat16", "float16"), options)
    return chain.trace((((rows, features), dtype), ((classes, features), dtype), ((rows,), "int64")))


def backward_plan(traced: TracedChain, saved: saving.SavedValues, settings: Settings) -> Plan:
    cotangents = saving.cotangents_of(traced)
    roots = {k: n for k, n in enumerate(saving.derive(traced, cotangents, (True, True, False))) if n is not None}
    return saving._backward_plan(traced, roots, cotangents, saved, settings)


@pytest.mark.rotates
@pytest.mark.parametrize("ours", EPILOGUES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", [2048, 8192])
def test_a_vocabulary_is_taken_in_blocks_of_classes(rows: int, reduction: str, dtype: str, ours: str) -> None:
    """Both passes fit, where the weight's gradient in float32 alone would take eight times the limit."""
    settings = Settings(epilogues=ours)
    traced = language_model(rows, 128256, 4096, dtype, reduction)
    saved = saving.choose_saved(traced, (True, True, False), (True,), settings)
    assert not saved.gradients and "recomputed by the backward pass" in saved.note
    forward, backward = build(traced.as_traced(saved.nodes), None, settings), backward_plan(traced, saved, settings)
    assert forward.workspace <= settings.max_workspace and backward.workspace <= settings.max_workspace
    assert backward.blocks is not None and backward.blocks.transposed
    assert "where blocks of rows would take" in backward.blocks.choice
    products = sum(2 * rows * 128256 * 4096 for _ in range(3))
    assert products <= backward.flops < 1.05 * products


def test_float32_operands_of_blocks_are_split_as_they_are() -> None:
    """The transposes of a block's gradient and of its weights are not copied: fewer, larger blocks fit."""
    settings = Settings()
    traced = language_model(4096, 32000, 2048, "float32", "mean")
    saved = saving.choose_saved(traced, (True, True, False), (True,), settings)
    backward = backward_plan(traced, saved, settings)
    assert backward.blocks is not None and backward.blocks.transposed and backward.blocks.count == 7
    steps = backward.blocks.plan.steps
    # The gradient of the logits, and the sum of that of the features, are epilogues.
    assert [(s.kind, s.epilogue is not None) for s in steps] == [("Gemm", True), ("Gemm", False), ("Gemm", True)]
    assert backward.workspace <= settings.max_workspace


def test_a_small_weight_is_taken_in_blocks_of_rows() -> None:
    """Many rows, few classes: a sum of the weight's gradient is cheap, and three products are fewer than four."""
    settings = Settings()
    traced = language_model(1 << 16, 4096, 1024, "bfloat16", "mean")
    saved = saving.choose_saved(traced, (True, True, False), (True,), settings)
    forward = build(traced.as_traced(saved.nodes), None, settings)
    assert saved.gradients and "the forward pass makes the gradients" in saved.note
    assert forward.blocks is not None and not forward.blocks.transposed
