"""What the rules for PyTorch's operations mean: ranks, dtypes, dimensions, special values, and what they refuse."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch_rules import OF_ONE, OF_ONE_POSITIVE, OF_TWO, check, draw, not_fused, parts, pointwise, run

import cupyfuse.torch as ct
from cupyfuse.torch.rules import RULES, Refused, find

F = torch.nn.functional
T = torch.Tensor
DTYPES = (torch.float64, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
SHAPES = ((), (5,), (4, 6), (2, 3, 4), (2, 1, 3, 4), (1, 1), (0, 3), (3, 0), (2, 0, 4))
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 30.0, -30.0, 1e30, -1e30)

POINTWISE = [n for n in RULES if pointwise(n, (1,), torch.float64) is not None and n != "identity"]


def function(name: str) -> Any:
    """A spelling of a pointwise rule."""
    return next(found for place in (F, torch, T) if (found := getattr(place, name, None)) is not None)


# Element by element -------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_rules_take_every_rank(name: str) -> None:
    for shape, dtype in itertools.product(SHAPES, DTYPES):
        args, kwargs = pointwise(name, shape, dtype) or ((), {})
        check(function(name), *args, **kwargs)


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_rules_take_sixteen_bits(name: str) -> None:
    for dtype in HALVES:
        args, kwargs = pointwise(name, (3, 4), dtype) or ((), {})
        check(function(name), *args, tolerance=0.02, **kwargs)


@pytest.mark.parametrize("name", [n for n in (*OF_ONE, *OF_ONE_POSITIVE) if n not in ("identity", "logical_not")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_of_functions_of_one_operand(name: str, dtype: torch.dtype) -> None:
    # PyTorch's vectorised gelu of +inf is NaN in float32 on a CPU, and inf on a GPU and in float64.
    values = [v for v in SPECIAL if not (name == "gelu" and v == math.inf and dtype == torch.float32)]
    check(function(name), torch.tensor(values, dtype=dtype))


@pytest.mark.parametrize("name", [*OF_TWO, "pow"])
def test_special_values_of_functions_of_two_operands(name: str) -> None:
    for dtype in DTYPES:
        a, b = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=dtype)] * 2).T.contiguous()
        check(function(name), a, b)


@pytest.mark.parametrize("number", [0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5, math.inf, math.nan])
def test_powers_with_a_number(number: float) -> None:
    for dtype in DTYPES:
        values = torch.tensor(SPECIAL, dtype=dtype)
        check(torch.pow, values, number)
        check(T.__rpow__, values, number)


@pytest.mark.parametrize(
    ("target", "args", "kwargs"),
    [
        (F.leaky_relu, (0.2,), {}),
        (F.leaky_relu, (), {"negative_slope": -0.5}),
        (F.gelu, (), {"approximate": "tanh"}),
        (F.elu, (1.5,), {}),
        (F.celu, (1.5,), {}),
        (F.softplus, (2, 3), {}),
        (F.hardtanh, (-0.5, 2.0), {}),
        (F.hardshrink, (1.0,), {}),
        (F.softshrink, (1.0,), {}),
        (F.threshold, (0.25, 5.0), {}),
        (F.rrelu, (0.1, 0.9), {}),
        (torch.clamp, (-1, 1), {}),
        (torch.clamp, (1, -1), {}),
        (torch.clamp, (), {"max": 1}),
        (torch.add, (2,), {"alpha": 0.5}),
        (torch.sub, (2.5,), {"alpha": 3}),
        (torch.lerp, (torch.tensor(1.0), 0.25), {}),
        (torch.lerp, (torch.tensor(1.0), 0.75), {}),
        (torch.logaddexp, (torch.tensor(1.0),), {}),
    ],
)
def test_parameters(target: Any, args: Any, kwargs: Any) -> None:
    check(target, torch.tensor(SPECIAL), *args, **kwargs)


def check_clamp(x: Any, low: Any, high: Any) -> None:
    """Check `clamp` with two tensors as bounds, which from PyTorch 2.14 on share the slope where they meet."""
    if torch.__version__ < (2, 14):
        check(torch.clamp, x, low, high)
    else:
        not_fused(torch.clamp, x, low, high, reason="two tensors as bounds")


def test_lerp_by_a_tensor_and_clamp_by_tensors() -> None:
    check(torch.lerp, draw(4, 6), draw(4, 6, seed=1), draw(4, 6, seed=2))
    check_clamp(draw(4, 6), draw(6, seed=1), draw(4, 1, seed=2))
    check(torch.clamp, draw(4, 6), max=draw(4, 6, seed=1))
    not_fused(torch.clamp, draw(4, 6), min=math.nan, reason="NaN")


def test_integers_are_limited() -> None:
    count, mask = torch.arange(-3, 6), torch.arange(-3, 6) > 1
    for bounds in ((-1, 4), (4, -1), (2,), (None, 2), (True,), (torch.tensor(1), torch.tensor(3)), (count.flip(0),)):
        check(torch.clamp, count, *bounds)
    for target in (torch.clamp, T.clamp_min, T.clamp_max, torch.maximum, torch.minimum):
        check(target, count, mask * 3)
    check(torch.clamp, mask, 0, 2)
    check(torch.clamp, count, 0.5, 2)
    check(torch.clamp, count, torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max)
    not_fused(torch.clamp, mask, mask, reason="arithmetic on masks")


def test_prelu_has_one_slope_or_one_for_each_channel() -> None:
    check(F.prelu, draw(4, 6), draw(6, seed=1))
    for shape in ((), (5,), (4, 6), (2, 3, 4)):
        check(F.prelu, draw(*shape), draw(1, seed=1))
    check(F.prelu, draw(4, 3, 1), draw(3, seed=1))
    check(F.prelu, draw(2, 3, 4), draw(3, seed=1))


# Broadcasting and dtypes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((4, 6), (6,)),
        ((4, 6), (4, 1)),
        ((4, 1), (1, 6)),
        ((4, 6), (1,)),
        ((4, 6), ()),
        ((1, 1, 1), (4, 6)),
        ((2, 3, 4), (4,)),
        ((2, 3, 4), (2, 3, 1)),
        ((2, 3, 4), (1, 1, 4)),
        ((2, 3, 4), (2, 1, 1)),
        ((2, 3, 4), (3, 4)),
        ((2, 3, 4), (1, 1, 1)),
        ((2, 1, 4), (2, 1, 1)),
        ((2, 1, 3, 4), (4,)),
        ((2, 1, 3, 4), (2, 1, 3, 1)),
        ((3, 1, 4), (1, 1, 4)),
        ((5, 1, 1), (1, 1, 7)),
        ((2, 0, 4), (4,)),
        ((2, 3, 4), (3, 1)),
        ((2, 3, 4), (2, 1, 4)),
        ((2, 3, 4), (1, 3, 1)),
        ((2, 3, 5, 4), (3, 1, 4)),
        ((0, 3), (3,)),
    ],
)
def test_broadcasting(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    for a, b in ((left, right), (right, left)):
        check(torch.sub, draw(*a), draw(*b, seed=1))


@pytest.mark.parametrize(
    ("left", "right"), [((2, 3, 7), (2, 1, 7)), ((2, 1, 5), (1, 3, 1)), ((2, 1, 3, 1, 4), (1, 5, 1, 2, 4))]
)
def test_broadcasting_along_a_leading_dimension_is_not_fused(left: Any, right: Any) -> None:
    not_fused(torch.add, draw(*left), draw(*right), reason="broadcasts along a leading dimension")


def test_shapes_that_do_not_broadcast() -> None:
    not_fused(torch.add, draw(4, 6), draw(5), reason="do not broadcast")


def test_promotion_is_pytorchs() -> None:
    """Dimensions before none, tensors before numbers, and within these by category."""
    dtypes = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
    floats = [draw(*shape, dtype=dtype) for shape in ((2, 3), ()) for dtype in dtypes]
    others = [draw(2, 3) > 0, torch.tensor(True), 2, 2.5, True]
    mask = torch.tensor([True, False, True])
    for a, b in [*itertools.product(floats, floats + others), *itertools.product(others[:2], floats)]:
        check(torch.mul, a, b, tolerance=0.02)
        check(torch.gt, a, b)
        check(torch.where, mask, a, b)


def test_numbers_alone_make_the_default_dtype() -> None:
    mask = draw(2, 3) > 0
    check(torch.where, mask, 1.0, 0.0)
    check(torch.mul, mask, 2.5)
    check(torch.div, mask, 2)
    assert run(*parts(torch.where, mask, 1.0, 0.0))[0].dtype == torch.get_default_dtype()  # type: ignore[union-attr]


def test_masks_and_integers_do_not_calculate() -> None:
    mask = draw(2, 3) > 0
    not_fused(torch.sub, mask, mask, reason="masks")
    not_fused(torch.sum, torch.arange(3), reason="integers")
    not_fused(torch.bitwise_and, torch.arange(3), torch.arange(3), reason="masks only")
    not_fused(T.to, draw(3), torch.int64, reason="floats as integers")


def test_arithmetic_of_masks_and_counts() -> None:
    x, mask, other = draw(2, 3), draw(2, 3) > 0, draw(2, 3, seed=1) > 0
    count = torch.arange(6).view(2, 3)
    for target in (torch.add, torch.mul):
        for a, b in itertools.product((mask, count, x), (other, count, x, True, 2, 2.5)):
            check(target, a, b)
    for a, b in ((mask, x), (x, mask), (count, mask), (x, count)):
        check(torch.where, mask, a, b)
    check(torch.where, mask, count, 2)
    check(T.masked_fill, count, mask, 7)
    check(T.masked_fill, mask, other, True)
    check(T.masked_fill, x, mask, 7)
    check(T.masked_fill, x, mask, torch.tensor(7))
    check(torch.rsub, mask.float(), 1)
    check(torch.rsub, mask.long(), 1)
    check(T.long, mask)
    check(T.float, count)
    not_fused(T.masked_fill, count, mask, 2.5, reason="a float in an operand of int64")
    not_fused(T.masked_fill, count, mask, torch.tensor(2.5), reason="float32 in an operand of int64")
    for dtype in DTYPES:
        check(torch.mul, draw(4, 6, dtype=dtype), draw(4, 6) > 0)
        check_clamp(draw(4, 6, dtype=dtype), draw(4, 6, dtype=dtype, seed=1) > 0, draw(6, dtype=dtype))


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (F.scaled_dot_product_attention, "left whole"),
        ("split_with_sizes", "part of a tensor"),
        (torch.cat, "side by side"),
        ("unbind", "part of a tensor"),
        (torch.tensor_split, "part of a tensor"),
        (torch.stack, "side by side"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_left_whole(target: Any, reason: str) -> None:
    found = find(target, (object(),), {})
    assert isinstance(found, Refused) and reason in found.reason


# Along dimensions ---------------------------------------------------------------------------------------------------

REDUCTIONS = ("sum", "mean", "logsumexp", "amax", "amin", "var", "std")
DIMS: tuple[tuple[tuple[int, ...], Any], ...] = (
    *(((5,), d) for d in (0, -1, (0,))),
    *(((4, 6), d) for d in (0, 1, -1, -2, (0, 1))),
    *(((2, 3, 4), d) for d in (2, 0, -1, (1, 2), (0, 1), (0, 1, 2))),
    *(((2, 1, 3, 4), d) for d in (3, 1, 0, (2, 3), (1, 2, 3), (0, 1))),
    *(((4, 1), d) for d in (0, 1)),
    *(((1, 6), d) for d in (0, 1)),
    *(((1, 1), d) for d in (0, 1)),
    *(((0, 3), d) for d in (1,)),
    ((), 0),
)


@pytest.mark.rotates
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("keepdim", [False, True])
def test_reductions(name: str, keepdim: bool) -> None:
    for (shape, dim), dtype in itertools.product(DIMS, DTYPES):
        check(getattr(torch, name), draw(*shape, dtype=dtype), dim=dim, keepdim=keepdim)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_of_sixteen_bits_accumulate_in_more(name: str) -> None:
    for dtype in HALVES:
        check(getattr(torch, name), draw(4, 300, dtype=dtype), dim=1, tolerance=0.01)


@pytest.mark.parametrize("name", ["prod", "max", "min"])
def test_reductions_along_one_dimension(name: str) -> None:
    for shape, dim in DIMS:
        if isinstance(dim, int):
            check(getattr(torch, name), draw(*shape), dim, True)


@pytest.mark.parametrize("function", [torch.argmax, torch.argmin])
def test_positions_of_extremes(function: Any) -> None:
    """The first of those that tie; of a NaN where there is one; among all elements of a vector."""
    for (shape, dim), keepdim, dtype in itertools.product(DIMS, (False, True), (*DTYPES, *HALVES)):
        if isinstance(dim, int):
            check(function, draw(*shape).round().to(dtype), dim, keepdim)
    for shape in ((), (5,), (1, 5, 1)):
        check(function, draw(*shape))
    nan, inf = math.nan, math.inf
    special = torch.tensor([[nan, 1, inf], [1, nan, nan], [inf, inf, 1], [-inf, -inf, -inf], [0.0, -0.0, 0.0]])
    check(function, special, 1)
    check(function, special, dim=0)
    not_fused(function, draw(2, 3, 4), 1, reason="neither the first nor the last")
    not_fused(function, draw(3, 4), reason="among all elements of a matrix")
    not_fused(function, torch.arange(3), 0, reason="an operand of int64")
    not_fused(function, draw(3, 0), 1, reason="argm")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", ["sum", "mean", "prod", "max", "min", "amax", "amin", "var", "std"])
def test_reductions_of_everything(name: str) -> None:
    for shape in ((), (5,), (4, 6), (2, 3, 4), (2, 1, 3, 4)):
        check(getattr(torch, name), draw(*shape))
        check(name, draw(*shape))


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_reductions_of_nothing() -> None:
    for name in ("sum", "mean", "prod", "var"):
        check(getattr(torch, name), draw(3, 0), dim=1)
        check(getattr(torch, name), draw(0, 3), dim=0)
    check(torch.logsumexp, draw(3, 0), 1)
    not_fused(torch.amax, draw(3, 0), 1, reason="zero-size")


def test_reductions_with_a_dtype() -> None:
    for name in ("sum", "mean", "prod"):
        check(getattr(torch, name), draw(4, 6, dtype=torch.float32), dim=1, dtype=torch.float64)
    check(torch.sum, draw(4, 6) > 0)
    check(torch.sum, draw(4, 6) > 0, 1)
    check(torch.mean, draw(4, 6) > 0, dtype=torch.float32)
    not_fused(torch.mean, draw(4, 6) > 0, reason="an operand of bool")


def test_inner_dimensions_are_not_reduced() -> None:
    for target in (torch.sum, torch.var, torch.logsumexp, torch.softmax):
        not_fused(target, draw(2, 3, 4), 1, reason="neither the first nor the last")
    not_fused(torch.sum, draw(2, 3, 4), (0, 2), reason="neither the first nor the last")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("correction", [0, 1, 0.5, 3, 4])
def test_degrees_of_freedom(correction: float) -> None:
    for shape in ((3, 4), (3, 1), (1, 4)):
        for dim in (0, 1, (0, 1)):
            check(torch.var, draw(*shape), dim, correction=correction)
            check(torch.std, draw(*shape), dim, correction=correction)


@pytest.mark.parametrize("target", [torch.softmax, torch.log_softmax, F.softmax, F.log_softmax, F.softmin])
def test_normalised_exponentials(target: Any) -> None:
    for (shape, dim), dtype in itertools.product(DIMS, DTYPES):
        if isinstance(dim, int):
            check(target, draw(*shape, dtype=dtype), dim)
    check(target, draw(4, 6, dtype=torch.float32), dim=1, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
@pytest.mark.parametrize("target", [F.softmax, F.log_softmax, F.softmin])
def test_the_dimension_that_nobody_names(target: Any) -> None:
    for shape in ((), (5,), (4, 6), (2, 3, 4), (2, 1, 1, 4)):
        if shape != (2, 1, 1, 4):
            check(target, draw(*shape))


ROWS = (
    (1.0, 2.0, 3.0),
    (1.0, math.inf, 3.0),
    (1.0, -math.inf, 3.0),
    (math.inf, -math.inf, 3.0),
    (math.nan, 2.0, math.inf),
    (math.inf,) * 3,
    (-math.inf,) * 3,
    (0.0, -0.0, 0.0),
    (1e30, -1e30, 1e30),
)


@pytest.mark.parametrize("name", [*REDUCTIONS, "prod", "softmax", "log_softmax", "softmin"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_along_a_dimension(name: str, dtype: torch.dtype) -> None:
    target = getattr(torch, name, None) or getattr(F, name)
    for dim in (0, 1):
        rows = torch.tensor(ROWS, dtype=dtype)
        # var's sum of squares overflows, in PyTorch's way of adding or ours.
        if name not in ("var", "std") or dtype == torch.float64:
            check(target, rows if dim else rows.T, dim=dim)
        check(target, (rows if dim else rows.T)[:3, :3], dim=dim)


@pytest.mark.parametrize("order", [1, 2, math.inf, -math.inf, 0, 3, 2.5, 1.5, 0.5, -1])
def test_norms(order: float) -> None:
    for (shape, dim), dtype in itertools.product(DIMS, DTYPES):
        check(torch.linalg.vector_norm, draw(*shape, dtype=dtype), order, dim=dim, keepdim=True)
        if isinstance(dim, int) and shape:
            check(F.normalize, draw(*shape, dtype=dtype), p=order, dim=dim)
    check(torch.linalg.vector_norm, torch.tensor(ROWS, dtype=torch.float64), order, dim=1)
    check(F.normalize, torch.tensor(ROWS, dtype=torch.float64), order)


# What PyTorch raises ------------------------------------------------------------------------------------------------


class _Called(torch.nn.Module):
    def __init__(self, function: Any):
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def _taken(x: Any, function: Any) -> Any:
    y = x + 0
    function(y)
    return y.sum(-1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1).sum(-1) - True,
        lambda x: (True - (x + 1)).sum(-1),
        lambda x: 2.5 * (1 - (x > 0)),
        lambda x: ((x > 0) - x).sum(-1),
        lambda x: (x - (x > 0)).sum(-1),
        lambda x: torch.rsub(x + 1, x > 0).sum(-1),
        lambda x: torch.rsub(x > 0, 2.5).sum(-1),
        lambda x: _taken(x, lambda y: y.sub_(True)),
        lambda x: _taken(x, lambda y: y.sub_(x, alpha=True)),
        lambda x: torch.sub(x + 0, x, alpha=True) + 0,
        lambda x: torch.add(x + 0, x, alpha=False) + 0,
        lambda x: torch.add((x > 0).to(torch.int64) * 2, 1, alpha=1.5) * x,
        lambda x: F.celu(x + 1, 0.0).sum(-1),
        lambda x: F.linear(x, x[:1] * 2, x.sum(-1)) * 2,
        lambda x: F.linear(x[0] * 1, x[:3], x.sum(-1).expand(2, 3)) * 2,
        lambda x: torch.addmm(x @ x.T, x[:1], x[:1].T) * 2,
    ],
)
def test_errors_are_pytorchs(function: Any) -> None:
    """The fake tensors of a record raise few of them."""
    x = draw(3, 4)
    with pytest.raises(RuntimeError) as wanted:
        function(x)
    fused = ct.fuse(_Called(function))
    for _ in range(2):
        with pytest.raises(RuntimeError) as found:
            fused(x)
        assert str(found.value) == str(wanted.value)


def test_sums_with_a_factor_have_the_dtype_of_the_result() -> None:
    half, mask = draw(3, 4, dtype=torch.float16), draw(3, 4) > 0
    check(torch.add, half, mask, alpha=1.5)
    check(torch.add, draw(3, 4), True, alpha=1.5)
    not_fused(torch.add, mask, True, alpha=2, reason="a factor alpha")
    not_fused(torch.logsumexp, half, (), reason="no dimensions")
