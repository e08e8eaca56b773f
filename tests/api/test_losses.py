"""Losses: PyTorch's values and gradients in every shape and option, one pass over the rows for all that is wanted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from passes import Passes
from support import Engine

import cupyfuse as cf

F = torch.nn.functional
INF, NAN = math.inf, math.nan
REDUCTIONS = ("none", "mean", "sum")
SHAPES = ((5, 7), (7,), (1, 7), (5, 7, 3), (2, 7, 3, 4), (5, 1), (1, 1))
# float64 against float64: a few roundings of values below 100
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def draw(rng: np.random.Generator, shape: tuple[int, ...], ignored: int = -100) -> tuple[Any, Any, int]:
    """Logits, labels of which the first is ignored where there are several, and the number of classes."""
    axis = min(1, len(shape) - 1)
    labels = np.asarray(rng.integers(0, shape[axis], (*shape[:axis], *shape[axis + 1 :])))
    if labels.size > 1:
        labels.flat[0] = ignored
    return rng.standard_normal(shape), labels, shape[axis]


def same(function: Any, theirs: Any, arrays: Sequence[Any], **options: Any) -> None:
    """The same values as PyTorch's, eager and fused, and for matrices the same gradient by the first array."""
    tensors = [torch.tensor(a) for a in arrays]
    tensors[0].requires_grad_()
    named = {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    expected = theirs(*tensors, **named)
    weights = [k for k, v in options.items() if isinstance(v, np.ndarray)]
    rest = {k: v for k, v in options.items() if k not in weights}
    everything = [*arrays, *(options[k] for k in weights)]

    def call(x: Any, target: Any, *given: Any) -> Any:
        return function(x, target, **rest, **dict(zip(weights, given, strict=True)))

    by_weights: tuple[Any, ...] = (
        lambda x, y: call(x, y),
        lambda x, y, w: call(x, y, w),
        lambda x, y, w, v: call(x, y, w, v),
    )
    fused = cf.fuse(by_weights[len(weights)])
    with np.errstate(all="ignore"):
        for found in (call(*everything), fused(*everything)):
            np.testing.assert_allclose(found, expected.detach().numpy(), **CLOSE)
    if 1 <= arrays[0].ndim <= 2:
        cotangent = np.random.default_rng(0).standard_normal(tuple(expected.shape))
        _, (gradient,) = Passes(fused.__wrapped__, everything, [0])(everything, [cotangent])
        expected.backward(torch.tensor(cotangent))
        wanted = tensors[0].grad
        assert wanted is not None
        np.testing.assert_allclose(gradient, wanted.numpy(), **CLOSE)


@pytest.mark.rotates
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_labels(shape: tuple[int, ...], reduction: str, rng: np.random.Generator) -> None:
    for ignored in (-100, 0):
        x, labels, classes = draw(rng, shape, ignored)
        for weight, smoothing in itertools.product((None, rng.uniform(0.5, 2, classes)), (0.0, 0.25)):
            options: dict[str, Any] = {"weight": weight, "ignore_index": ignored, "reduction": reduction}
            options = {k: v for k, v in options.items() if v is not None}
            same(cf.cross_entropy, F.cross_entropy, (x, labels), label_smoothing=smoothing, **options)
            if not smoothing:
                same(cf.nll_loss, F.nll_loss, (x, labels), **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_probabilities(shape: tuple[int, ...], reduction: str, rng: np.random.Generator) -> None:
    x, _, classes = draw(rng, shape)
    target = rng.uniform(0, 1, shape)
    for options, smoothing in itertools.product(({}, {"weight": rng.uniform(0.5, 2, classes)}), (0.0, 0.25)):
        more: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, **options}
        same(cf.cross_entropy, F.cross_entropy, (x, target), **more)


def limited(x: Any, target: Any, z_loss: float, soft_cap: float, temperature: float, **options: Any) -> Any:
    """The options that PyTorch does not have, written with its operations."""
    logits = soft_cap * torch.tanh(x / soft_cap) / temperature
    loss = F.cross_entropy(logits, target, reduction="none", **options)
    counted = torch.ones_like(loss) if target.shape == x.shape else (target != -100).to(x.dtype)
    weight = options.get("weight")
    if weight is not None and target.shape != x.shape:
        counted = counted * weight[target.clamp(min=0)]
    return loss + z_loss * torch.logsumexp(logits, 1) ** 2 * counted, counted


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("kind", ["labels", "probabilities"])
def test_further_options(kind: str, reduction: str, rng: np.random.Generator) -> None:
    x, target, classes = draw(rng, (6, 7))
    target = target if kind == "labels" else rng.uniform(0, 1, x.shape)
    own = {"z_loss": 0.01, "soft_cap": 1.5, "temperature": 0.7}

    def theirs(x: Any, target: Any, **options: Any) -> Any:
        assert options.pop("reduction") == reduction
        values, counted = limited(x, target, **options)
        return {"none": values, "sum": values.sum(), "mean": values.sum() / counted.sum()}[reduction]

    for options in ({}, {"weight": rng.uniform(0.5, 2, classes)}, {"label_smoothing": 0.25}):
        same(cf.cross_entropy, theirs, (x, target), reduction=reduction, **own, **options)


ROWS = (
    *((1.0, 2.0, 3.0), (1.0, -INF, 3.0), (-INF, -INF, 3.0), (-INF, -INF, -INF), (1.0, INF, 3.0), (INF, INF, 3.0)),
    *((NAN, 1.0, 2.0), (0.0, -0.0, 0.0), (500.0, -500.0, 500.0), (1e6, 1e6 + 1, 1e6 - 1)),
)


@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_special_logits(engine: Engine, smoothing: float) -> None:
    """At every label; a mean over nothing is NaN, a sum 0."""
    x = np.array(ROWS)
    for label in (0, 1, 2, -100):
        labels = np.full(len(ROWS), label)
        for reduction in REDUCTIONS:
            options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
            expected = F.cross_entropy(torch.tensor(x), torch.tensor(labels), **options)
            found = engine.host(cf.cross_entropy(engine.array(x), engine.array(labels), **options))
            np.testing.assert_allclose(found, expected.numpy(), **CLOSE)


def test_labels_out_of_range_give_nan(engine: Engine, rng: np.random.Generator) -> None:
    x, labels = engine.array(rng.standard_normal((4, 6))), engine.array(np.array([0, 6, -1, 5]))
    for function in (cf.cross_entropy, cf.nll_loss):
        found = engine.host(function(x, labels, reduction="none"))
        assert np.isnan(found).tolist() == [False, True, True, False]


ELEMENTWISE: dict[str, tuple[Any, Any]] = {
    "kl_div": (F.kl_div, {}),
    "kl_div of logarithms": (F.kl_div, {"log_target": True}),
    "binary_cross_entropy_with_logits": (F.binary_cross_entropy_with_logits, {}),
    "mse_loss": (F.mse_loss, {}),
    "huber_loss": (F.huber_loss, {"delta": 0.75}),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str, rng: np.random.Generator) -> None:
    theirs, options = ELEMENTWISE[name]
    function = getattr(cf, name.partition(" ")[0])
    for shape, reduction in itertools.product(((), (5,), (4, 6), (2, 3, 4)), REDUCTIONS):
        x, target = np.asarray(rng.standard_normal(shape)), np.asarray(rng.uniform(0, 1, shape))
        same(function, theirs, (x, target), reduction=reduction, **options)
    x, target = rng.standard_normal((4, 6)), rng.uniform(0, 1, (4, 6))
    if theirs is F.kl_div:
        same(function, theirs, (x, target), reduction="batchmean", **options)
    if theirs is F.binary_cross_entropy_with_logits:
        weights = {"weight": rng.uniform(0.5, 2, (4, 6)), "pos_weight": rng.uniform(0.5, 2, 6)}
        same(function, theirs, (x, target), **weights)
        extreme = np.array([800.0, -800.0, 0.0, -0.0])
        same(function, theirs, (extreme, np.array([0.0, 1.0, 0.5, 1.0])), reduction="none")


def focal(x: Any, target: Any, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "none") -> Any:
    """The formula of torchvision's `sigmoid_focal_loss`."""
    p = torch.sigmoid(x)
    loss = F.binary_cross_entropy_with_logits(x, target, reduction="none")
    loss = loss * (1 - (p * target + (1 - p) * (1 - target))) ** gamma
    if alpha >= 0:
        loss = loss * (alpha * target + (1 - alpha) * (1 - target))
    return {"none": loss, "mean": loss.mean(), "sum": loss.sum()}[reduction]


def test_focal_and_hinge(rng: np.random.Generator) -> None:
    x, target = rng.standard_normal((4, 6)), rng.integers(0, 2, (4, 6)).astype(float)
    for reduction, gamma, alpha in itertools.product(REDUCTIONS, (2.0, 1.5), (0.25, -1.0)):
        same(cf.sigmoid_focal_loss, focal, (x, target), reduction=reduction, gamma=gamma, alpha=alpha)

    def hinge(x: Any, target: Any) -> Any:
        return (1 - x * target).clamp(min=0)

    same(cf.hinge_loss, hinge, (x, 2 * target - 1))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_narrow_dtypes(engine: Engine, dtype: str, rng: np.random.Generator) -> None:
    """Computed in float32: a row of 60 classes and a mean of 40 are off by less than 1e-5; float16 is rounded once."""
    x, labels, _ = draw(rng, (40, 60))
    x = x.astype(dtype)
    for reduction in REDUCTIONS:
        found = engine.host(cf.cross_entropy(engine.array(x), engine.array(labels), reduction=reduction))
        expected = F.cross_entropy(torch.tensor(x.astype(np.float64)), torch.tensor(labels), reduction=reduction)
        assert np.asarray(found).dtype == dtype
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5 + np.finfo(dtype).eps / 2)


def everything(y: Any, labels: Any) -> Any:
    """A loss with all that is measured beside it."""
    loss = cf.cross_entropy(y, labels, reduction="none", label_smoothing=0.1, z_loss=1e-4, soft_cap=30.0)
    logarithms = cf.log_softmax(y, axis=1)
    of_label = np.take_along_axis(logarithms, labels[:, None], 1)[:, 0]
    entropy = -(np.exp(logarithms) * logarithms).sum(axis=1)
    best = y.argmax(axis=1)
    return loss, of_label, entropy, best, best == labels


@pytest.mark.parametrize("columns", [60, 3000])
def test_one_pass_for_all_that_is_measured(engine: Engine, columns: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((9, columns)).astype(np.float32)
    labels = x.argmax(axis=1)
    labels[::2] = rng.integers(0, columns, 5)
    fused = cf.fuse(everything)
    plan = fused.plan(x, labels)
    (step,) = plan.steps
    assert step.kind == "RowProgram" and step.domain == x.shape and plan.launches == 1
    assert step.reads == x.nbytes + labels.nbytes
    found = fused(engine.array(x), engine.array(labels))
    y = torch.tensor(x.astype(np.float64))
    capped = 30.0 * torch.tanh(y / 30.0)
    loss = F.cross_entropy(capped, torch.tensor(labels), reduction="none", label_smoothing=0.1)
    loss = loss + 1e-4 * torch.logsumexp(capped, 1) ** 2
    logarithms = torch.log_softmax(y, 1)
    expected = [loss, logarithms[range(9), labels], -(logarithms.exp() * logarithms).sum(1)]
    for ours, theirs in zip(found, expected, strict=False):
        np.testing.assert_allclose(engine.host(ours), theirs.numpy(), rtol=1e-5)
    best = x.argmax(axis=1)
    np.testing.assert_array_equal(engine.host(found[3]), best)
    np.testing.assert_array_equal(engine.host(found[4]), best == labels)


def test_a_mean_takes_one_launch_more() -> None:
    fused = cf.fuse(lambda y, labels: cf.cross_entropy(y, labels))
    plan = fused.plan(cf.spec((64, 5000), "float32"), cf.spec((64,), "int64"))
    assert [s.domain for s in plan.steps] == [(64, 5000), (1, 64)]


def test_lists_and_tensors() -> None:
    assert cf.cross_entropy([[0.0, 0.0]], [1]) == pytest.approx(math.log(2))
    found = cf.cross_entropy(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    assert isinstance(found, torch.Tensor) and float(found) == pytest.approx(math.log(4))


X = np.zeros((4, 6))
LABELS = np.zeros(4, np.int64)
WRONG: list[tuple[Any, str]] = [
    (lambda: cf.cross_entropy(X, LABELS, reduction="other"), "reduction: expected one of 'none', 'mean', 'sum', got"),
    (lambda: cf.cross_entropy(X, LABELS[:3]), r"target: expected integers of shape \(4,\), or probabilities"),
    (lambda: cf.cross_entropy(X, LABELS.astype(float)), "target: expected integers .* got float64"),
    (lambda: cf.cross_entropy(X, X.astype(int)), "target: expected probabilities as floats, got int64"),
    (lambda: cf.cross_entropy(X, LABELS, weight=np.ones(5)), r"weight: expected one for each class, shape \(6,\)"),
    (lambda: cf.cross_entropy(X, LABELS, label_smoothing=1.5), "label_smoothing: expected a share from 0 to 1, got"),
    (lambda: cf.cross_entropy(X, LABELS, soft_cap=0.0), "soft_cap: expected a positive number or None, got 0.0"),
    (lambda: cf.cross_entropy(X, LABELS, temperature=-1.0), "temperature: expected a positive number"),
    (lambda: cf.cross_entropy(X, X, ignore_index=2), "ignore_index: labels are needed"),
    (lambda: cf.cross_entropy(np.zeros((4, 0)), LABELS), "input: expected at least one class"),
    (lambda: cf.mse_loss(X, X[:2]), r"target: expected the shape of input, \(4, 6\), got"),
    (lambda: cf.huber_loss(X, X, delta=0.0), "delta: expected a positive number, got 0.0"),
    (lambda: cf.kl_div(X, X, reduction="batch"), "'batchmean', got 'batch'"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_what_does_not_fit_is_named(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
