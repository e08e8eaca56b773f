"""Gradients of every rule at NaN, infinities, zeros of both signs, ties and boundaries, against PyTorch's autograd.

PyTorch's own kernels disagree about some of these: the vectorised ones for a CPU give NaN where its formulas, which
run for strided tensors and on a GPU, give a number (`selu`, `elu`, `hardtanh` and others of NaN). The formulas are what
is compared with: operands are strided.

What is not equal, and why:

- the product along a dimension of rows with infinities: PyTorch takes quotients, or products of the others, for all
  rows together, depending on whether any of them has a zero; here each row decides for itself;
- `instance_norm` with some infinite cotangents: which of infinities and NaN come out is a matter of the order in which
  a kernel adds up, other on a CPU than on a GPU;
- float32 whose squares overflow in variances and norms: PyTorch adds up in float64 on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch_rules import LOSSES, agree, draw, eager_vjp, fill, parts, pointwise, vjp

from cupyfuse.torch.rules import RULES

F = torch.nn.functional
T = torch.Tensor
INF, NAN = math.inf, math.nan
DTYPES = (torch.float64, torch.float32)
POINTS = (NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 3.0, -3.0, 6.0, 20.0, 30.0, -30.0, 1e30, -1e30)
FEWER = (NAN, INF, -INF, 0.0, -0.0, 0.5, -1.0, 1.0, 2.0)
COTANGENTS = (1.0, 0.0, INF, -INF, NAN, -2.0)
# PyTorch's constant 1 / 6 is float32's in float64 too.
LOOSE = {"hardsigmoid": 1e-6}
IN_STEPS = ("gt", "ge", "lt", "le", "eq", "ne", "isnan", "isinf", "isfinite", "identity")


def call_of(name: str) -> Any:
    return next(found for place in (F, torch, T) if (found := getattr(place, name, None)) is not None)


def takes_floats(name: str) -> bool:
    """Whether it is a rule of single elements, some of which are floats."""
    args, _ = pointwise(name, (1,), torch.float64) or ((), {})
    return any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args)


POINTWISE = [name for name in RULES if takes_floats(name) and name not in (*IN_STEPS, *LOSSES)]


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def compared(rule: Any, arguments: Any, tensors: Any, cotangent: Any, tolerance: float, wanted: Any = None) -> None:
    if wanted is None:
        wanted = [k for k, t in enumerate(tensors) if t.is_floating_point()]
    ours = vjp(rule, arguments, tensors, cotangent, wanted)
    theirs = eager_vjp(rule, arguments, list(map(strided, tensors)), strided(cotangent), wanted)
    for k, a, b in zip(wanted, ours, theirs, strict=True):
        zeros = torch.zeros_like(tensors[k])
        agree(zeros if a is None else a, zeros if b is None else b, tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_rules(name: str, dtype: torch.dtype) -> None:
    """On a grid of points and cotangents."""
    args, kwargs = pointwise(name, (1,), dtype) or ((), {})
    floats = [k for k, a in enumerate(args) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    points = torch.tensor(FEWER if len(floats) > 2 else POINTS, dtype=dtype)
    *grid, cotangent = torch.cartesian_prod(*[points] * len(floats), torch.tensor(COTANGENTS, dtype=dtype)).T
    values = list(args)
    for k, a in enumerate(args):
        if k in floats:
            values[k] = grid[floats.index(k)].contiguous()
        elif isinstance(a, torch.Tensor):
            values[k] = torch.arange(len(cotangent)) % 2 == 0
    rule, arguments, tensors = parts(call_of(name), *values, **kwargs)
    result = rule.eager(*fill(arguments, tensors))
    if result.is_floating_point():
        compared(rule, arguments, tensors, cotangent.contiguous().to(result.dtype), LOOSE.get(name, 0.0))


# Along dimensions ---------------------------------------------------------------------------------------------------

ROWS = (
    (1.0, 2.0, 3.0, 0.5),
    (2.0, 2.0, 2.0, 2.0),
    (0.0, 0.0, 0.0, 0.0),
    (0.0, -0.0, 1.0, -1.0),
    (1.0, INF, 3.0, 0.5),
    (1.0, -INF, 3.0, 2.0),
    (INF, -INF, 3.0, 1.0),
    (NAN, 2.0, INF, 1.0),
    (1.0, NAN, 2.0, NAN),
    (INF,) * 4,
    (-INF,) * 4,
    (NAN,) * 4,
    (3.0, 3.0, -1.0, 3.0),
    (0.0, 1.0, 2.0, 3.0),
    (0.0, INF, 2.0, 3.0),
    (0.0, NAN, 2.0, 3.0),
)
ALONG = ("sum", "mean", "logsumexp", "amax", "amin", "var", "std", "var_mean", "std_mean")
ORDERS = (1, 2, INF, -INF, 0, 3, 4, 2.5, 1.5, 0.5, -1, -2.5)
OF_ALL = ("sum", "mean", "prod", "amax", "amin", "max", "min", "var", "std", "var_mean", "std_mean")


def along(dtype: torch.dtype) -> Iterator[tuple[str, Any, tuple[Any, ...], dict[str, Any]]]:
    """Calls of the rules that are no functions of single elements."""
    x = torch.tensor(ROWS, dtype=dtype)
    weight, bias = (draw(4, seed=k, dtype=dtype) for k in (1, 2))
    for name in ("softmax", "log_softmax", "softmin"):
        yield name, getattr(F, name), (x, -1), {}
    for name in ALONG:
        yield name, getattr(torch, name), (x, -1), {}
        yield name, getattr(torch, name), (x.T.contiguous(), 0), {}
    for row in x:
        yield "prod", torch.prod, (row[None], -1), {}
        yield "prod", torch.prod, (row[:, None].contiguous(), 0), {}
        for name in OF_ALL:
            yield name, getattr(torch, name), (torch.stack([row, row.flip(0)]),), {}
        for order in ORDERS:
            yield "vector_norm", torch.linalg.vector_norm, (torch.stack([row, row.flip(0)]), order), {}
    for name in ("max", "min"):
        yield f"{name}_dim", getattr(torch, name), (x, -1), {}
        yield f"{name}_dim", getattr(torch, name), (x.T.contiguous(), 0), {}
    for order in ORDERS:
        yield "vector_norm", torch.linalg.vector_norm, (x, order, -1), {}
        yield "normalize", F.normalize, (x, order, -1), {}
    yield "layer_norm", F.layer_norm, (x, (4,), weight, bias), {}
    yield "rms_norm", F.rms_norm, (x, (4,), weight), {}
    yield "group_norm", F.group_norm, (x, 2, weight, bias), {}
    yield "instance_norm", F.instance_norm, (x[:, None],), {}
    yield "batch_norm", F.batch_norm, (x, bias, weight.abs() + 0.25, weight, bias), {}
    for k in range(0, len(ROWS), 2):
        yield "batch_norm", F.batch_norm, (x[k : k + 2], bias, weight.abs() + 0.25, weight, bias, True), {}
    yield "avg_pool1d", F.avg_pool1d, (x, 2), {}
    yield "max_pool1d", F.max_pool1d, (x, 2), {}
    yield "adaptive_avg_pool1d", F.adaptive_avg_pool1d, (x, 2), {}
    yield "linear", F.linear, (x, draw(3, 4, dtype=dtype), draw(3, dtype=dtype)), {}
    yield "matmul", torch.matmul, (draw(3, 4, dtype=dtype), x.T.contiguous()), {}
    yield "addmm", torch.addmm, (draw(16, 3, dtype=dtype), x, draw(4, 3, dtype=dtype)), {"beta": 0.5, "alpha": 2}
    yield "prelu", F.prelu, (x, weight), {}


def cotangents(shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Iterator[torch.Tensor]:
    count = math.prod(shape)
    plain = torch.linspace(0.5, 1.5, count, dtype=dtype)
    yield plain.reshape(shape)
    for value in (0.0, INF, -INF, NAN):
        yield torch.full(shape, value, dtype=dtype)
        mixed = plain.clone()
        mixed[::3] = value
        # PyTorch's norms on a CPU multiply x and its mean apart: NaN where the deviations' gradient is infinite.
        if not (name in ("instance_norm", "layer_norm") and math.isinf(value)):
            yield mixed.reshape(shape)


@pytest.mark.rotates
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rules_along_dimensions(dtype: torch.dtype) -> None:
    for name, target, args, kwargs in along(dtype):
        rule, arguments, tensors = parts(target, *args, **kwargs)
        assert rule.name == name
        result = rule.eager(*fill(arguments, tensors))
        result = result[0] if isinstance(result, tuple) else result
        wanted = [0, 3, 4] if name == "batch_norm" else None
        for cotangent in cotangents(tuple(result.shape), dtype, name):
            compared(rule, arguments, tensors, cotangent, 1e-4 if dtype == torch.float32 else 1e-7, wanted)


@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("correction", [0, 1, 0.5, 3, 4, 5])
def test_degrees_of_freedom(correction: float) -> None:
    for target in (torch.var, torch.std, torch.var_mean, torch.std_mean):
        for shape, dim in (((3, 4), 1), ((3, 4), 0), ((2, 2), None), ((2, 2), (0, 1)), ((4, 1), 1)):
            rule, arguments, tensors = parts(target, draw(*shape), dim, correction=correction)
            result = rule.eager(*fill(arguments, tensors))
            result = result[0] if isinstance(result, tuple) else result
            compared(rule, arguments, tensors, torch.ones_like(result), 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [7, 9])
def test_deviations_of_equal_elements_are_zero(rows: int, dtype: torch.dtype) -> None:
    """Down columns also of numbers whose sum is rounded: PyTorch gives them no gradient at all."""
    rule, arguments, tensors = parts(torch.std, torch.linspace(0.1, 1, 50, dtype=dtype).repeat(rows, 1), 0)
    cotangent = torch.ones_like(rule.eager(*fill(arguments, tensors)))
    (found,) = vjp(rule, arguments, tensors, cotangent, [0])
    assert found is not None and not found.any()


# Rules whose gradients are those of what they view, choose or name, masks' and positions', and losses, which have tests
# of their own.
ELSEWHERE = {
    *LOSSES,
    *("z_loss", "index_rows"),
    *("identity", "contiguous", "clone", "detach", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "t"),
    *("transpose", "permute", "expand", "expand_as", "view_as", "getitem", "batch_norm_module"),
    *("narrow", "chunk", "split", "glu", "cat", "swap_pairs"),
    *("logical_and", "logical_or", "logical_xor", "logical_not"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not"),
    *("argmax", "argmin"),
}


def test_every_rule_is_here() -> None:
    names = {name for name, *_ in along(torch.float64)} | set(POINTWISE) | set(IN_STEPS) | ELSEWHERE
    assert set(RULES) <= names, set(RULES) - names
