"""Losses and what labels choose: values and gradients are PyTorch's, in every rank and reduction."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from passes import execute
from torch_rules import check, draw, not_fused, parts, positive, run, same_gradients, traced

from cupyfuse.ir.graph import Graph
from cupyfuse.plan.build import build
from cupyfuse.plan.traced import Traced
from cupyfuse.torch.rules import Refused, find
from cupyfuse.torch.rules.labels import index_rows_eager

F = torch.nn.functional
INF, NAN = math.inf, math.nan
DTYPES = (torch.float64, torch.float32)
REDUCTIONS = ("none", "mean", "sum")
SHAPES = ((), (5,), (4, 6), (2, 3, 4), (2, 1, 3, 4), (1, 1))
LABELLED = ((4, 6), (6,), (1, 6, 3), (1, 6, 1, 2), (5, 6, 1), (1, 1), (3, 1))

# Element by element -------------------------------------------------------------------------------------------------


def unit(x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(x)


def signs(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, 1.0, -1.0).to(x.dtype)


# name -> the second operand from one that is drawn, further arguments, the operands with gradients
ELEMENTWISE: dict[str, tuple[Any, dict[str, Any], list[int]]] = {
    "mse_loss": (lambda y: y, {}, [0, 1]),
    "l1_loss": (lambda y: y, {}, [0, 1]),
    "smooth_l1_loss": (lambda y: y, {"beta": 0.5}, [0, 1]),
    "smooth_l1_loss of beta 0": (lambda y: y, {"beta": 0.0}, [0, 1]),
    "huber_loss": (lambda y: y, {"delta": 0.75}, [0, 1]),
    "kl_div": (unit, {}, [0, 1]),
    "kl_div of logarithms": (lambda y: y, {"log_target": True}, [0, 1]),
    "binary_cross_entropy_with_logits": (unit, {}, [0, 1]),
    "poisson_nll_loss": (lambda y: y.exp(), {}, [0, 1]),
    "poisson_nll_loss in full": (lambda y: y.exp(), {"full": True}, [0, 1]),
    "soft_margin_loss": (signs, {}, [0]),
    "hinge_embedding_loss": (signs, {"margin": 0.5}, [0]),
}


@pytest.mark.rotates
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_rank_and_reduction(name: str) -> None:
    second, more, wanted = ELEMENTWISE[name]
    function = getattr(F, name.partition(" ")[0])
    for shape, reduction, dtype in itertools.product(SHAPES, REDUCTIONS, DTYPES):
        operands = draw(*shape, dtype=dtype), second(draw(*shape, dtype=dtype, seed=1))
        check(function, *operands, reduction=reduction, **more)
        same_gradients(function, *operands, reduction=reduction, wanted=wanted, **more)


POINTS = (NAN, INF, -INF, 0.0, -0.0, 0.5, -0.5, 0.75, -0.75, 1.0, -1.0, 2.0, 30.0, -30.0, 800.0, -800.0)
COTANGENTS = (1.0, 0.0, INF, -INF, NAN, -2.0)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*ELEMENTWISE, "xlogy"])
def test_special_values(name: str, dtype: torch.dtype) -> None:
    """On a grid of inputs, targets and cotangents.

    A cotangent of 0 has no gradient through `xlogy` even where the logarithm is infinite or NaN, which a slope that it
    is multiplied with cannot say.
    """
    _, more, wanted = ELEMENTWISE.get(name, (None, {}, [0, 1]))
    function, labels = getattr(F, name.partition(" ")[0], torch.xlogy), POINTS
    if name in ("soft_margin_loss", "hinge_embedding_loss"):
        labels = (1.0, -1.0, 0.0)
    if name != "xlogy":
        more = {**more, "reduction": "none"}
    grid = [torch.tensor(values, dtype=dtype) for values in (POINTS, labels, COTANGENTS)]
    x, y, cotangent = (column.contiguous() for column in torch.cartesian_prod(*grid).T)
    check(function, x, y, **more)
    if name in ("xlogy", "kl_div"):
        some = (cotangent != 0) | ((y > 0) & (y < INF))
        x, y, cotangent = x[some], y[some], cotangent[some]
    same_gradients(function, x, y, cotangent=cotangent, wanted=wanted, **more)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_binary_cross_entropy(dtype: torch.dtype) -> None:
    """The logarithms are at least -100; what is no probability is NaN, where PyTorch raises an error."""
    points = torch.tensor((0.0, 1e-30, 0.25, 0.5, 1.0), dtype=dtype)
    grid = torch.cartesian_prod(points, points, torch.tensor(COTANGENTS, dtype=dtype)).T
    x, y, cotangent = (column.contiguous() for column in grid)
    check(F.binary_cross_entropy, x, y, reduction="none")
    same_gradients(F.binary_cross_entropy, x, y, reduction="none", cotangent=cotangent)
    for shape, reduction in itertools.product(SHAPES, REDUCTIONS):
        x, y, w = (
            unit(draw(*shape, dtype=dtype)),
            unit(draw(*shape, dtype=dtype, seed=1)),
            positive(*shape, dtype=dtype),
        )
        for weight in (None, w, w[..., :1] if w.ndim else w):
            check(F.binary_cross_entropy, x, y, weight, reduction=reduction)
            same_gradients(F.binary_cross_entropy, x, y, weight, reduction=reduction, wanted=[0, 1])
    wrong = torch.tensor([-0.5, 1.5, NAN], dtype=dtype)
    rule, arguments, tensors = parts(F.binary_cross_entropy, wrong, torch.ones_like(wrong) / 2, reduction="none")
    (found,) = run(rule, arguments, tensors)
    assert found is not None and found.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_binary_cross_entropy_with_logits(dtype: torch.dtype) -> None:
    function = F.binary_cross_entropy_with_logits
    for shape, reduction in itertools.product(SHAPES[1:], REDUCTIONS):
        x, y = draw(*shape, dtype=dtype), unit(draw(*shape, dtype=dtype, seed=1))
        w, p = positive(*shape, dtype=dtype), positive(shape[-1], dtype=dtype, seed=3)
        for weight, pos_weight in ((w, None), (None, p), (w, p), (p, None)):
            check(function, x, y, weight, reduction=reduction, pos_weight=pos_weight)
            same_gradients(function, x, y, weight, reduction=reduction, pos_weight=pos_weight, wanted=[0, 1])
    x, y, cotangent = (
        column.contiguous()
        for column in torch.cartesian_prod(*(torch.tensor(v, dtype=dtype) for v in (POINTS, POINTS, COTANGENTS))).T
    )
    pos_weight = torch.full_like(x, 2.5)
    check(function, x, y, reduction="none", pos_weight=pos_weight)
    same_gradients(function, x, y, reduction="none", pos_weight=pos_weight, cotangent=cotangent, wanted=[0, 1])


@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "huber_loss"])
def test_weighted_errors(name: str) -> None:
    function = getattr(F, name)
    try:
        function(draw(2), draw(2), weight=draw(2))
    except TypeError:
        pytest.skip("this PyTorch has no weights for it")
    for reduction in REDUCTIONS:
        x, y, w = draw(4, 6), draw(4, 6, seed=1), positive(4, 6)
        check(function, x, y, reduction=reduction, weight=w)
        same_gradients(function, x, y, reduction=reduction, weight=w)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_targets_that_broadcast_and_promote() -> None:
    for function in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
        check(function, draw(4, 6), draw(6, seed=1))
        check(function, draw(4, 6), draw(4, 6, dtype=torch.float32, seed=1))
        check(function, draw(4, 6), torch.arange(6))
        not_fused(function, draw(4, 6, dtype=torch.float32), draw(4, 6), reason="float32 and float64")
        not_fused(function, torch.arange(6), torch.arange(6), reason="operands of int64")
    not_fused(F.binary_cross_entropy, unit(draw(4)), unit(draw(4)).float(), reason="float32")
    not_fused(F.huber_loss, draw(4), draw(4), delta=0.0, reason="delta")


def test_margins_and_similarity() -> None:
    for reduction in REDUCTIONS:
        operands = draw(4, 6), draw(4, 6, seed=1), signs(draw(4, 6, seed=2))
        check(F.margin_ranking_loss, *operands, 0.5, reduction=reduction)
        same_gradients(F.margin_ranking_loss, *operands, 0.5, reduction=reduction, wanted=[0, 1])
        check(F.kl_div, *operands[:1], unit(operands[1]), reduction="batchmean")
    for shape, dim in (((4, 6), 1), ((4, 6), 0), ((2, 3, 4), -1), ((5,), 0)):
        check(F.cosine_similarity, draw(*shape), draw(*shape, seed=1), dim=dim)
        same_gradients(F.cosine_similarity, draw(*shape), draw(*shape, seed=1), dim=dim)
    for shape in ((4, 1), (1, 6), (1, 1)):
        for dim in (0, 1):
            check(F.cosine_similarity, draw(4, 6), draw(*shape, seed=1), dim=dim)
            same_gradients(F.cosine_similarity, draw(*shape), draw(4, 6, seed=1), dim=dim)
    small = torch.tensor([[0.0, 0.0, 0.0], [1e-9, 0.0, 2e-9], [1.0, INF, 0.0], [NAN, 1.0, 2.0]], dtype=torch.float64)
    for a, b in ((small, draw(4, 3)), (draw(4, 3), small), (small, small)):
        check(F.cosine_similarity, a, b)
        same_gradients(F.cosine_similarity, a, b)


# Labels -------------------------------------------------------------------------------------------------------------


def labelled(shape: tuple[int, ...], ignored: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Logits, labels of which the first is ignored where there are several, and the number of classes."""
    classes = shape[0] if len(shape) == 1 else shape[1]
    rest = () if len(shape) == 1 else (shape[0], *shape[2:])
    labels = torch.randint(classes, rest, generator=torch.Generator().manual_seed(3))
    if labels.numel() > 1:
        labels.view(-1)[0] = ignored
    return draw(*shape, dtype=dtype), labels, classes


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", LABELLED, ids=str)
def test_losses_of_classes(shape: tuple[int, ...], reduction: str, dtype: torch.dtype) -> None:
    for ignored in (-100, 2):
        x, labels, classes = labelled(shape, ignored, dtype)
        for weight in (None, positive(classes, dtype=dtype)):
            more: dict[str, Any] = {"weight": weight, "ignore_index": ignored, "reduction": reduction}
            check(F.nll_loss, x, labels, **more)
            same_gradients(F.nll_loss, x, labels, wanted=[0], **more)
            for smoothing in (0.0, 0.25):
                check(F.cross_entropy, x, labels, label_smoothing=smoothing, **more)
                same_gradients(F.cross_entropy, x, labels, label_smoothing=smoothing, wanted=[0], **more)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", LABELLED, ids=str)
def test_cross_entropy_with_probabilities(shape: tuple[int, ...], reduction: str) -> None:
    x, _, classes = labelled(shape, 0, torch.float64)
    for weight, smoothing in itertools.product((None, positive(classes)), (0.0, 0.25)):
        more: dict[str, Any] = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
        check(F.cross_entropy, x, positive(*shape), **more)
        same_gradients(F.cross_entropy, x, positive(*shape), **more)


def test_nothing_to_count() -> None:
    """The mean over nothing is NaN, the sum zero."""
    for reduction in REDUCTIONS:
        for function in (F.nll_loss, F.cross_entropy):
            check(function, draw(0, 6), torch.zeros(0, dtype=torch.int64), reduction=reduction)
            check(function, draw(4, 6), torch.full((4,), -100), reduction=reduction)
            same_gradients(function, draw(4, 6), torch.full((4,), -100), reduction=reduction)
        check(F.cross_entropy, draw(0, 6), draw(0, 6), reduction=reduction)
        check(F.cross_entropy, draw(4, 6), torch.full((4,), -100), reduction=reduction, label_smoothing=0.1)
        for function in (F.mse_loss, F.l1_loss, F.huber_loss):
            check(function, draw(0, 6), draw(0, 6), reduction=reduction)


ROWS = (
    (1.0, 2.0, 3.0),
    (1.0, -INF, 3.0),
    (-INF, -INF, 3.0),
    (-INF, -INF, -INF),
    (1.0, INF, 3.0),
    (INF, INF, 3.0),
    (NAN, 1.0, 2.0),
    (0.0, -0.0, 0.0),
    (500.0, -500.0, 500.0),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.25])
def test_special_logits(smoothing: float, dtype: torch.dtype) -> None:
    """At every label, with every cotangent."""
    x = torch.tensor(ROWS, dtype=dtype)
    for label, cotangent in itertools.product((0, 1, 2, -100), COTANGENTS):
        labels = torch.full((len(ROWS),), label)
        given = torch.full((len(ROWS),), cotangent, dtype=dtype)
        check(F.cross_entropy, x, labels, reduction="none", label_smoothing=smoothing)
        same_gradients(
            F.cross_entropy, x, labels, reduction="none", label_smoothing=smoothing, cotangent=given, wanted=[0]
        )
        if not smoothing:
            check(F.nll_loss, x, labels, reduction="none")
            same_gradients(F.nll_loss, x, labels, reduction="none", cotangent=given, wanted=[0])
    probabilities = torch.tensor([[0.0, 1.0, 0.0]], dtype=dtype).expand(len(ROWS), 3)
    check(F.cross_entropy, x, probabilities.contiguous(), reduction="none", label_smoothing=smoothing)


def test_sixteen_bits() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x, labels, _ = labelled((40, 60), -100, dtype)
        for reduction in REDUCTIONS:
            check(F.cross_entropy, x, labels, reduction=reduction, tolerance=0.02)
            check(F.mse_loss, x, x.flip(0), reduction=reduction, tolerance=0.02)


def test_labels_out_of_range_give_nan() -> None:
    x, labels = draw(4, 6), torch.tensor([0, 6, -1, 5])
    for function in (F.nll_loss, F.cross_entropy):
        with pytest.raises(IndexError):
            function(x, labels)
        rule, arguments, tensors = parts(function, x, labels, reduction="none")
        (found,) = run(rule, arguments, tensors)
        assert found is not None and found.isnan().tolist() == [False, True, True, False]


def test_what_is_refused() -> None:
    x, labels = draw(4, 6), torch.tensor([0, 1, 2, 3])
    not_fused(F.cross_entropy, draw(2, 6, 3), torch.zeros(2, 3, dtype=torch.int64), reason="neither the first nor")
    not_fused(F.cross_entropy, x, labels, torch.ones(6), reason="a weight of shape")
    not_fused(F.cross_entropy, x, labels[:3], reason="labels of shape")
    not_fused(F.cross_entropy, x, labels > 1, reason="labels of bool")
    not_fused(F.cross_entropy, x, x, ignore_index=2, reason="ignore_index beside probabilities")
    not_fused(F.cross_entropy, x, labels, label_smoothing=2.0, reason="label_smoothing")
    not_fused(torch.gather, x, 1, labels[:, None].expand(4, 2), reason="one element of a row")
    not_fused(F.one_hot, labels, reason="depends on values")
    for reduction in ("other", None):
        assert isinstance(find(F.mse_loss, (object(), object()), {"reduction": reduction}), Refused)
    assert isinstance(find(F.mse_loss, (object(), object()), {"reduce": object()}), Refused)


# What labels choose -------------------------------------------------------------------------------------------------


def test_gather() -> None:
    for (shape, dim), dtype in itertools.product((((4, 6), 1), ((4, 6), 0), ((2, 3, 4), -1), ((5,), 0)), DTYPES):
        x = draw(*shape, dtype=dtype)
        rest = tuple(1 if p == dim % len(shape) else n for p, n in enumerate(shape))
        index = torch.randint(shape[dim], rest, generator=torch.Generator().manual_seed(1))
        check(torch.gather, x, dim, index)
        check(torch.take_along_dim, x, index, dim)
        same_gradients(torch.gather, x, dim, index)
    x = torch.tensor(ROWS, dtype=torch.float64)
    for label, cotangent in itertools.product((0, 1, 2), COTANGENTS):
        index = torch.full((len(ROWS), 1), label)
        check("gather", x, 1, index)
        same_gradients("gather", x, 1, index, cotangent=torch.full((len(ROWS), 1), cotangent))


def test_index_rows() -> None:
    for dtype in DTYPES:
        x, index = draw(5, 6, dtype=dtype), torch.tensor([0, 5, -1, -6, 2])
        check(index_rows_eager, x, index)
        same_gradients(index_rows_eager, x, index)
    x = torch.tensor(ROWS, dtype=torch.float64)
    for label, cotangent in itertools.product((0, 2, -1, -3), COTANGENTS):
        index = torch.full((len(ROWS),), label)
        check(index_rows_eager, x, index)
        same_gradients(index_rows_eager, x, index, cotangent=torch.full((len(ROWS),), cotangent))
    rule, arguments, tensors = parts(index_rows_eager, draw(4, 6), torch.tensor([6, -7, 0, -1]))
    (found,) = run(rule, arguments, tensors)
    assert found is not None and found.isnan().tolist() == [True, True, False, False]


def test_one_hot() -> None:
    for shape in ((), (4,), (2, 3)):
        check(F.one_hot, torch.randint(5, shape), 5)


# How they run -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [60, 5000])
@pytest.mark.parametrize(("reduction", "launches"), [("none", 1), ("sum", 2), ("mean", 2)])
def test_cross_entropy_reads_the_logits_once(reduction: str, launches: int, columns: int) -> None:
    """One launch for the rows and one for their number; the kernels give what NumPy does."""
    x = draw(33, columns, dtype=torch.float32)
    labels = torch.randint(columns, (33,), generator=torch.Generator().manual_seed(1))
    labels[3] = -100
    rule, arguments, tensors = parts(F.cross_entropy, x, labels, reduction=reduction)
    trace, (value,) = traced(rule, arguments, tensors)
    assert value is not None
    graph = Graph(trace.inputs, [value.tracer._node])
    plan = build(Traced("cross_entropy", graph, (value.tracer._axes,), ()))
    assert plan.launches == launches
    (found,) = execute(plan, [x.numpy(), labels.numpy()], "host")
    torch.testing.assert_close(torch.tensor(found).view(value.shape), F.cross_entropy(x, labels, reduction=reduction))
