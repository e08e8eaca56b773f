"""Rules for layers and shapes, what folds of values meet, what is refused, against PyTorch."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch_rules import agree, canonical, check, draw, follow, not_fused, numbered, positive, run

import cupyfuse.torch as ct
from cupyfuse.ir.kinds import is_leaf
from cupyfuse.torch.rules import RULES, Refused, find
from cupyfuse.torch.rules.pairs import swap_pairs
from cupyfuse.torch.rules.values import Value
from cupyfuse.trace import Trace

F = torch.nn.functional
T = torch.Tensor
DTYPES = (torch.float64, torch.float32)
HALVES = (torch.float16, torch.bfloat16)

# Normalisation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (*DTYPES, *HALVES), ids=str)
def test_layer_norm_and_rms_norm(dtype: torch.dtype) -> None:
    for shape in ((5,), (4, 6), (2, 3, 4), (2, 1, 3, 4), (4, 1)):
        x = draw(*shape, dtype=dtype)
        for count in range(1, len(shape) + 1):
            last = shape[-count:]
            w, b = (draw(*last, dtype=dtype, seed=k) for k in (1, 2))
            check(F.layer_norm, x, last, w, b, tolerance=0.03 * (dtype in HALVES))
            check(F.layer_norm, x, list(last), eps=0.1, tolerance=0.03 * (dtype in HALVES))
            check(F.rms_norm, x, last, w, tolerance=0.03 * (dtype in HALVES))
            check(F.rms_norm, x, last, eps=0.1, tolerance=0.03 * (dtype in HALVES))
    check(F.rms_norm, draw(2, 3, dtype=dtype) * 1e-4, (3,), tolerance=0.03 * (dtype in HALVES))
    not_fused(F.layer_norm, draw(4, 6), (5,), reason="last dimensions")


def test_group_norm() -> None:
    for groups in (1, 2, 3, 6):
        check(F.group_norm, draw(4, 6), groups)
        check(F.group_norm, draw(4, 6), groups, draw(6), draw(6, seed=1), 0.1)
        check(F.group_norm, draw(4, 6, 3), groups)
        check(F.group_norm, draw(1, 6, 3), groups, draw(6), draw(6, seed=1))
        check(F.group_norm, draw(4, 6, 3), groups, draw(6), draw(6, seed=1))
    for dims in ((2,), (2, 4)):
        check(F.group_norm, draw(4, 6, *dims), 2, draw(6), draw(6, seed=1))


def test_instance_norm() -> None:
    for shape in ((4, 1, 6), (4, 2, 6), (4, 1, 2, 3)):
        check(F.instance_norm, draw(*shape))
    check(F.instance_norm, draw(4, 1, 6), None, None, draw(1), draw(1, seed=1), eps=0.1)
    check(F.instance_norm, draw(4, 2, 6), None, None, draw(2), draw(2, seed=1))


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("track", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.1, 0.0, 1.0])
def test_batch_norm_as_a_module(affine: bool, track: bool, momentum: float | None) -> None:
    """Results and running statistics agree with PyTorch's module over steps of training, then inference."""
    for dtype in DTYPES:
        module = torch.nn.BatchNorm1d(6, eps=1e-3, momentum=momentum, affine=affine, track_running_stats=track)
        module = module.to(dtype)
        if affine:
            torch.nn.init.normal_(module.weight)
            torch.nn.init.normal_(module.bias)
        for step, training in enumerate((True, True, True, False)):
            module.train(training)
            x = draw(5, 6, dtype=dtype, seed=step)
            buffers = [module.running_mean, module.running_var, module.num_batches_tracked]
            before = [None if b is None else b.clone() for b in buffers]
            mean, var, count = before
            options = (training, momentum, module.eps)
            arguments = [x, mean, var, module.weight, module.bias, count, *options]
            y = module(x)
            rule = RULES["batch_norm_module"]
            for results in (run(rule, *numbered(arguments)), rule.eager(*arguments)):
                agree(results[0], y)
                for new, after in zip(results[1:], buffers, strict=True):
                    if after is None or not training:
                        assert new is None
                    else:
                        agree(new, after)


def test_statistics_that_are_no_longer_tracked_stay_as_they_are() -> None:
    """As where a model's statistics are frozen while it trains: in inference they are still read."""
    head = ct.HeadSoftmax(8, 6)
    head.bn.track_running_stats = False
    plain, x = copy.deepcopy(head), draw(5, 8, dtype=torch.float32)
    for training in (True, True, False):
        head.train(training), plain.train(training)
        agree(head(x), torch.softmax(plain.scale * plain.bn(plain.gemm(x)), dim=1))
        for buffer, other in zip(head.bn.buffers(), plain.bn.buffers(), strict=True):
            agree(buffer, other)


@pytest.mark.parametrize("dtype", (*DTYPES, *HALVES), ids=str)
def test_batch_norm_as_a_function(dtype: torch.dtype) -> None:
    """The new running statistics are results; the ones that were given stay as they are."""
    stats = torch.float32 if dtype in HALVES else dtype
    w, b, mean, var = (draw(6, dtype=stats, seed=k) for k in range(4))
    for training in (False, True):
        for x in (draw(5, 6, dtype=dtype), draw(5, 6, 1, dtype=dtype)):
            if dtype not in HALVES or training is False:
                check(F.batch_norm, x, mean, var.abs() + 0.5, w, b, training, 0.3, tolerance=0.03 * (dtype in HALVES))
    check(F.batch_norm, draw(5, 6, dtype=stats), None, None, training=True)
    check(F.batch_norm, draw(5, 6, dtype=stats), mean, var.abs(), training=False, eps=0.1)


@pytest.mark.parametrize("dims", [(3,), (1, 4), (2, 4), (7, 7), (2, 3, 5), (0, 4)], ids=str)
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_norm_of_images(dims: Any, rows: int, dtype: torch.dtype) -> None:
    for channels in (1, 6):
        x = draw(rows, channels, *dims, dtype=dtype)
        mean, var = draw(channels, dtype=dtype), positive(channels, dtype=dtype)
        check(F.batch_norm, x, mean, var, eps=0.01)
        check(F.batch_norm, x, mean, var, draw(channels, dtype=dtype, seed=1), draw(channels, dtype=dtype, seed=2))


def test_batch_norm_that_is_not_fused() -> None:
    mean, var = draw(6), draw(6).abs()
    not_fused(F.batch_norm, draw(5, 6, 3), mean, var, training=True, reason="rows, columns")
    not_fused(F.batch_norm, draw(1, 6), mean, var, training=True, reason="training batch of 1 rows")
    assert RULES["batch_norm"].updates == ("running_mean", "running_var")
    assert RULES["batch_norm_module"].updates == ("running_mean", "running_var", "num_batches_tracked")
    for name, rule in RULES.items():
        assert set(rule.updates) <= set(rule.signature.parameters), name


# Products and pools -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear(dtype: torch.dtype) -> None:
    for shape in ((6,), (4, 6), (2, 3, 6), (2, 1, 3, 6), (0, 6), (2, 0, 6), (1, 6)):
        x = draw(*shape, dtype=dtype)
        for n in (1, 5):
            check(F.linear, x, draw(n, 6, dtype=dtype), draw(n, dtype=dtype))
            check(F.linear, x, draw(n, 6, dtype=dtype))
        check(F.linear, x, draw(6, dtype=dtype))
    not_fused(F.linear, draw(4, 6), draw(5, 6, dtype=torch.float32), reason="operands of float64 and float32")
    not_fused(F.linear, draw(4, 6), draw(5, 7), reason="do not fit")


@pytest.mark.parametrize("rows", [(), (1,), (3,), (2, 3)])
@pytest.mark.parametrize("bias", [(), (1,), (6,), (1, 6), (2, 6), (3, 6), (2, 3, 6), (3, 1)])
@pytest.mark.parametrize("weight", [(6, 4), (1, 4), (4,)])
def test_biases_are_what_pytorch_takes(rows: Any, bias: Any, weight: Any) -> None:
    x, w, b = draw(*rows, 4), draw(*weight, seed=1), draw(*bias, seed=2)
    layer = ct.LinearGELU(4, 6)
    layer.weight, layer.bias = torch.nn.Parameter(w), torch.nn.Parameter(b)
    calls = [
        (lambda: F.linear(x, w, b).logsumexp(-1), lambda: ct.linear_logsumexp(x, w, b)),
        (lambda: F.gelu(F.linear(x, w, b)), lambda: layer(x)),
    ]
    for plain, fused in calls:
        try:
            wanted = plain()
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)) as found:
                fused()
            assert str(found.value) == str(error)
        else:
            agree(fused().detach(), wanted)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((4, 6), (6, 3)),
        ((6,), (6, 3)),
        ((4, 6), (6,)),
        ((6,), (6,)),
        ((2, 3, 6), (6, 3)),
        ((2, 3, 6), (6,)),
        ((2, 1, 3, 6), (6, 3)),
        ((4, 0), (0, 3)),
        ((0, 6), (6, 3)),
        ((1, 6), (6, 1)),
    ],
)
def test_matmul(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        check(torch.matmul, draw(*left, dtype=dtype), draw(*right, dtype=dtype, seed=1))


def test_batched_products_are_left_to_torch() -> None:
    not_fused(torch.matmul, draw(2, 3, 6), draw(2, 6, 3), reason="batched products")
    not_fused(torch.matmul, draw(3, 6), draw(2, 6, 3), reason="batched products")
    not_fused(torch.matmul, draw(3, 5), draw(6, 3), reason="do not fit")


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0.5, 1), (1, 2), (0, 1), (2, 0.5), (0, 0)])
def test_addmm(beta: float, alpha: float) -> None:
    for shape in ((3,), (4, 3), (1, 3), (4, 1), ()):
        check(torch.addmm, draw(*shape), draw(4, 6), draw(6, 3), beta=beta, alpha=alpha)
    if beta == 0:
        check(torch.addmm, torch.full((3,), torch.nan).double(), draw(4, 6), draw(6, 3), beta=beta, alpha=alpha)


@pytest.mark.parametrize("target", [F.avg_pool1d, F.max_pool1d])
def test_pools(target: Any) -> None:
    for shape in ((4, 6), (4, 1, 6), (4, 3, 6)):
        for width in (1, 2, 3, 6):
            check(target, draw(*shape), width)
            check(target, draw(*shape), width, stride=width, padding=0)
    not_fused(target, draw(4, 6), 4, reason="do not divide")
    check(target, torch.tensor([[torch.nan, 1.0, torch.inf, 2.0, -torch.inf, 3.0]]), 2)


def test_adaptive_pools() -> None:
    for size in (1, 2, 3, 6):
        check(F.adaptive_avg_pool1d, draw(4, 3, 6), size)
    not_fused(F.adaptive_avg_pool1d, draw(4, 3, 6), 4, reason="different widths")


# Shapes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "shape", "args"),
    [
        (T.reshape, (4, 6), (24,)),
        (T.reshape, (4, 6), (-1, 3)),
        (T.reshape, (2, 3, 4), (6, -1)),
        (T.reshape, (2, 3, 4), (2, 12)),
        (T.reshape, (0, 3), (3, 0)),
        (T.reshape, (1,), ((),)),
        (torch.flatten, (), ()),
        (torch.flatten, (2, 3, 4), (0, 1)),
        (torch.flatten, (2, 3, 4), (-2,)),
        (T.unflatten, (2, 12), (-1, (3, -1))),
        (torch.unsqueeze, (4, 6), (-1,)),
        (torch.unsqueeze, (), (0,)),
        (torch.squeeze, (1, 4, 1), (0,)),
        (torch.squeeze, (1, 4, 1), (-2,)),
        (torch.squeeze, (1, 4, 1), ((0, 2),)),
        (torch.t, (5,), ()),
        (torch.t, (), ()),
        (torch.transpose, (2, 1, 4), (0, 2)),
        (torch.transpose, (2, 1, 4), (0, 1)),
        (torch.transpose, (1, 3, 4), (-1, -2)),
        (torch.permute, (2, 3, 4), ((2, 0, 1),)),
        (torch.permute, (2, 3, 4), ((1, 2, 0),)),
        (torch.permute, (2, 1, 3, 4), ((2, 3, 1, 0),)),
        (torch.permute, (), ((),)),
        (T.expand, (1, 6), (4, -1)),
        (T.expand, (4, 1), (4, 6)),
        (T.expand, (6,), (2, 4, 6)),
        (T.expand, (), (4, 6)),
        (T.expand, (2, 1, 1), (2, 3, 4)),
        (T.expand, (4, 6), (4, 6)),
        (T.__getitem__, (4, 6), (None,)),
        (T.__getitem__, (4, 6), ((slice(None), None, slice(None)),)),
        (T.__getitem__, (4, 6), (Ellipsis,)),
        (T.__getitem__, (4, 1, 6), ((Ellipsis, -1, slice(0, None)),)),
        (T.__getitem__, (1, 6), (0,)),
        (T.__getitem__, (1, 6), (slice(0, 1),)),
        (T.__getitem__, (2, 1, 6), ((slice(None), slice(-1, 5), slice(1, 4)),)),
        (T.__getitem__, (4, 6), ((Ellipsis, None, slice(-9, 9)),)),
        (T.__getitem__, (4, 6), ((slice(0, 4), slice(3, -1)),)),
        (swap_pairs, (4,), (True,)),
        (swap_pairs, (2,), (False, True)),
        (swap_pairs, (3, 2), (True, True)),
        (swap_pairs, (2, 1, 3, 6), (True,)),
    ],
)
def test_shapes(target: Any, shape: tuple[int, ...], args: Any) -> None:
    check(target, draw(*shape), *args)


@pytest.mark.parametrize(
    ("target", "shape", "args", "reason"),
    [
        (torch.transpose, (2, 3, 4), (0, 2), "does not exchange rows and columns"),
        (torch.permute, (2, 3, 4), ((1, 0, 2),), "does not exchange rows and columns"),
        (T.expand, (3, 1, 7), (2, 3, 4, 7), "leading dimension"),
        (T.__getitem__, (4, 6), (0,), "a part of a tensor"),
        (T.__getitem__, (4, 6), ((slice(None), 2),), "a part of a tensor"),
        (T.__getitem__, (4, 6), (slice(1, 3),), "a part of a tensor"),
        (torch.chunk, (4, 6), (2,), "a part of a tensor"),
        (T.split, (4, 6), (2,), "a part of a tensor"),
        (torch.narrow, (4, 6), (0, 1, 2), "a part of a tensor"),
        (torch.narrow, (4, 6), (1, 3, -2), "a part of a tensor"),
        (torch.chunk, (4, 0), (3, 1), "a part of a tensor"),
        (F.glu, (4, 6), (0,), "a part of a tensor"),
        (swap_pairs, (4, 5), (), r"a value of shape \(4, 5\)"),
        (swap_pairs, (0, 6), (), r"a value of shape \(0, 6\)"),
    ],
)
def test_shapes_that_are_not_fused(target: Any, shape: Any, args: Any, reason: str) -> None:
    not_fused(target, draw(*shape), *args, reason=reason)


# Folds that meet ----------------------------------------------------------------------------------------------------

# Functions of x (2, 3, 8), y (2, 3), w (8, 8), v (8,), and how many computed values they fold anew.
CHAINS: dict[str, tuple[int, Callable[..., Any]]] = {
    "reduced rows meet an argument": (0, lambda x, y, w, v: torch.logsumexp(x, -1) * y + x.sum(-1)),
    "reduced rows meet each other": (0, lambda x, y, w, v: x.sum(-1) / (x * x).sum(-1, keepdim=True).squeeze(-1)),
    "reduced rows meet their rows": (0, lambda x, y, w, v: (x - x.mean(-1, keepdim=True)) * x.std(-1)[..., None]),
    "reduced rows are reduced again": (1, lambda x, y, w, v: F.relu(x.sum(-1)).softmax(-1)),
    "reduced rows are a matrix": (1, lambda x, y, w, v: x.sum(-1).t() * y.t()),
    "a layer": (0, lambda x, y, w, v: F.layer_norm(x + F.linear(F.gelu(x), w, v), (8,), v, v)),
    "a head": (0, lambda x, y, w, v: F.gelu(F.leaky_relu(torch.logsumexp((x @ w).flatten(0, 1), 1, keepdim=True)))),
    "a channel of one": (
        0,
        lambda x, y, w, v: F.instance_norm(F.linear(x.flatten(0, 1), w).unsqueeze(1)).squeeze(1) * v,
    ),
    "a pool of computed rows": (2, lambda x, y, w, v: F.max_pool1d(torch.tanh(x), 4).amax(-1)),
    "groups of columns": (1, lambda x, y, w, v: torch.sin(x).view(2, 3, 2, 4).softmax(-1).reshape(2, 3, 8) * v),
    "all elements in a row": (0, lambda x, y, w, v: torch.sin(w).view(-1).softmax(0).view(8, 8) + v),
    "all elements": (0, lambda x, y, w, v: torch.sin(x).sum() / torch.sin(x).std() + v.mean()),
    "a transpose of a computed matrix": (0, lambda x, y, w, v: torch.sin(w).T.softmax(1) * v + w),
    "a batch as rows": (0, lambda x, y, w, v: x * torch.sigmoid(x.sum((1, 2), keepdim=True))),
    "columns of a batch": (0, lambda x, y, w, v: x - x.mean((0, 1)) + x.mean((0, 1), keepdim=True)),
    "a transposed operand": (1, lambda x, y, w, v: torch.exp(y.t()).reshape(2, 3) * x.sum(-1)),
    "a mask": (0, lambda x, y, w, v: x.masked_fill(x > 0, -1.0).where(y[..., None] > 0, v).to(torch.float32)),
    "numbers from both sides": (0, lambda x, y, w, v: 1 - 2 / (1 + torch.exp(2 * x)) ** 2),
    "what PyTorch's modules call": (
        0,
        lambda x, y, w, v: torch.nn.Sequential(
            torch.nn.Hardswish(), torch.nn.Softmin(-1), torch.nn.Dropout().eval(), torch.nn.Flatten(), torch.nn.ReLU6()
        )(x),
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_folds_that_meet(name: str) -> None:
    refolded, function = CHAINS[name]
    assert follow(function, draw(2, 3, 8), draw(2, 3, seed=1), draw(8, 8, seed=2), draw(8, seed=3)) == refolded


def test_a_view_of_an_argument_costs_nothing() -> None:
    trace = Trace()
    x = Value.argument(trace, "x", (2, 3, 4), "float32")
    assert (x.shape, x.dtype, x.tracer._node.shape) == ((2, 3, 4), "float32", (6, 4))
    assert x.view((24,)).tracer is x.tracer
    assert all(is_leaf(x.view(shape).settled._node) for shape in ((24,), (2, 12), (2, 3, 2, 2)))
    assert Value.argument(trace, "z", (), "int64").shape == ()


# What is refused, and what is not known -----------------------------------------------------------------------------

REFUSED: tuple[tuple[str, Any, tuple[Any, ...], dict[str, Any]], ...] = (
    ("rounding_mode='floor'", torch.div, (draw(3), 2), {"rounding_mode": "floor"}),
    ("out= writes", torch.exp, (draw(3),), {"out": draw(3)}),
    ("out= writes", torch.norm, (draw(3, 3), 2, 0, False, draw(3)), {}),
    ("draws random numbers", F.dropout, (draw(3), 0.5), {}),
    ("draws random numbers", torch.dropout, (draw(3), 0.5, True), {}),
    ("draws random numbers", F.rrelu, (draw(3),), {"training": True}),
    ("decimals", torch.round, (draw(3),), {"decimals": 2}),
    ("depends on values", torch.where, (draw(3) > 0,), {}),
    ("between devices", T.to, (draw(3), "cpu"), {}),
    ("between devices", T.to, (draw(3), torch.device("cpu"), torch.float32), {}),
    ("a copy", T.to, (draw(3), torch.float32), {"copy": True}),
    ("complex64 is no dtype", T.to, (draw(3), torch.complex64), {}),
    ("int32 is no dtype", torch.sum, (draw(3),), {"dtype": torch.int32}),
    ("the bits of its elements", T.view, (draw(3), torch.int64), {}),
    ("sizes depend on the values", T.view, (draw(3), torch.tensor(3)), {}),
    ("order nan", torch.linalg.vector_norm, (draw(3), float("nan")), {}),
    ("norm of a matrix", torch.linalg.norm, (draw(3, 3), 2), {}),
    ("norm of a matrix", torch.norm, (draw(3, 3), "nuc"), {}),
    ("order nan", F.normalize, (draw(3, 3), float("nan")), {}),
    ("running statistics", F.instance_norm, (draw(2, 1, 3), draw(1), draw(1)), {}),
    ("windows of 2 every 1", F.avg_pool1d, (draw(3, 4), 2, 1), {}),
    ("padded", F.max_pool1d, (draw(3, 4), 2), {"padding": 1}),
    ("positions", F.max_pool1d, (draw(3, 4), 2), {"return_indices": True}),
    ("holes", F.max_pool1d, (draw(3, 4), 1), {"dilation": 2}),
    ("a part of a tensor", T.__getitem__, (draw(3, 4), (slice(None), slice(0, 4, 2))), {}),
    ("a part of a tensor", T.__getitem__, (draw(3, 4), draw(3, 4) > 0), {}),
    ("batched products", torch.bmm, (draw(2, 3, 4), draw(2, 4, 3)), {}),
    ("it sorts", torch.sort, (draw(3),), {}),
    ("its arguments are not known", torch.exp, (draw(3), 1, 2, 3), {}),
    ("its arguments are not known", torch.sum, (draw(3),), {"nonsense": 1}),
)


@pytest.mark.parametrize(("reason", "target", "args", "kwargs"), REFUSED)
def test_refusals_say_why(reason: str, target: Any, args: Any, kwargs: Any) -> None:
    found, _ = canonical(target, args, kwargs)
    assert isinstance(found, Refused), found
    assert reason in found.reason


@pytest.mark.parametrize("target", [torch.conv1d, "no_such_method", "conv1d", len, T.shape.__get__, print, {}, getattr])
def test_what_is_not_known(target: Any) -> None:
    assert find(target, (object(), "shape"), {}) is None


@pytest.mark.parametrize("name", ["exp", "logsumexp", "T", "mT", "data", "add_", "view", "max"])
def test_methods_by_name(name: str) -> None:
    args = {"logsumexp": (1,), "add_": (1,), "view": (-1,)}.get(name, ())
    expected = getattr(draw(3, 4), name) if name in ("T", "mT", "data") else None
    assert check(name, draw(3, 4), *args, expected=expected).inplace == name.endswith("_")


def test_attributes_by_getattr() -> None:
    check(getattr, draw(3, 4), "T")


def test_canonical_arguments_are_json() -> None:
    """Tuples, dtypes and sizes in every form come out as tuples and strings."""
    for target, args, kwargs, expected in (
        (T.view, (torch.Size([2, 6]),), {}, [[2, 6]]),
        (F.layer_norm, ([4],), {"eps": 1}, [[4], None, None, 1]),
        (torch.sum, ([0, 1],), {"dtype": torch.float64}, [[0, 1], False, "float64"]),
        (torch.softmax, (np.int64(1),), {}, [1, None]),
        (T.__getitem__, ((None, slice(None), ...),), {}, [["new", "all", "rest"]]),
    ):
        found, _ = canonical(target, (draw(3, 4), *args), kwargs)
        assert json.loads(json.dumps(found.arguments[1:])) == expected
        assert len(found.arguments) == len(found.rule.signature.parameters)


def test_properties_of_rules() -> None:
    assert RULES["linear"].product
    assert RULES["softmax"].reduces
    assert RULES["reshape"].view
    assert RULES["reshape"].no_op
    assert not RULES["to"].no_op
    assert all(name == rule.name for name, rule in RULES.items())
    assert RULES["leaky_relu"].signature.parameters["negative_slope"].default == 0.01


# Functions ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_results_along_any_dimension_are_contiguous(name: str) -> None:
    x = draw(2, 3, 4, 5)
    for given in (x, x.permute(3, 0, 2, 1), x.to(memory_format=torch.channels_last)):
        for dim in range(-4, 4):
            wanted, found = getattr(torch, name)(given, dim), getattr(ct, name)(given, dim)
            agree(found, wanted)
            assert found.stride() == wanted.stride()
    assert torch.autograd.gradcheck(lambda y: getattr(ct, name)(y, 1).view(-1), draw(2, 3, 4).requires_grad_())


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("dim", [True, 1.0, "a", None, (0, 1), [0, 1], (True,), [1.0], np.int64(1), torch.tensor(1)])
def test_dimensions_are_what_pytorch_takes(name: str, dim: Any) -> None:
    x = draw(2, 3, 4)
    try:
        wanted = getattr(torch, name)(x, dim)
    except (TypeError, RuntimeError):  # older versions take a string for a name
        with pytest.raises(TypeError):
            getattr(ct, name)(x, dim)
    else:
        agree(getattr(ct, name)(x, dim), wanted)


def test_types_of_other_arguments() -> None:
    x, w = draw(3, 4), draw(6, 4)
    for value in (1, None, "yes", np.bool_(True), torch.tensor(True)):
        with pytest.raises(TypeError, match="keepdim: expected a bool"):
            ct.logsumexp(x, 1, value)
        with pytest.raises(TypeError, match="keepdim: expected a bool"):
            ct.linear_logsumexp(x, w, keepdim=value)
    for function in (ct.softmax, ct.log_softmax):
        agree(function(x.float(), 1, dtype=float), function(x.float(), 1, dtype=torch.float64))
        for dtype in ("float64", True, np.float64, 1):
            with pytest.raises(TypeError, match="dtype: expected a"):
                function(x, 1, dtype=dtype)


def test_unknown_forms_of_gelu_are_left_to_torch() -> None:
    head = ct.HeadLogSumExp(4, 5, approximate="tahn")
    with pytest.raises(RuntimeError, match="approximate argument must be either none or tanh"):
        head(torch.ones(3, 4))
    assert "approximate is neither 'none' nor 'tanh' but 'tahn'" in " ".join(str(head.explain()).split())


def test_only_modules_are_refreshed_and_explained() -> None:
    for function in (ct.refresh, ct.explain):
        with pytest.raises(TypeError, match=r"module: expected a torch\.nn\.Module, got int"):
            function(3)
