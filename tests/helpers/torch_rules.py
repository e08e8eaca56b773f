"""Running single rules of `cupyfuse.torch.rules` on tensors, through a trace, a plan and the NumPy engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cupyfuse import dtypes
from cupyfuse.engines.numpy import NumpyExecutable
from cupyfuse.errors import TraceError
from cupyfuse.ir import graph as g
from cupyfuse.ir.kinds import is_leaf
from cupyfuse.plan.build import build
from cupyfuse.plan.traced import Traced
from cupyfuse.torch.chains.backward import cotangent_matrix
from cupyfuse.torch.rules import Found, Rule, find
from cupyfuse.torch.rules.values import Value
from cupyfuse.trace import Trace
from cupyfuse.trace.autodiff import gradients
from cupyfuse.trace.saved import extract_graph

# Rules whose gradients at special values `test_losses.py` tests.
LOSSES = (
    *("nll_loss", "cross_entropy", "linear_cross_entropy", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
    *("kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss", "soft_margin_loss"),
    *("hinge_embedding_loss", "margin_ranking_loss", "cosine_similarity", "gather", "one_hot", "xlogy"),
)


class Operand:
    """What stands for a tensor in a record: `find` must not look at it."""

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number

    def _untouchable(self, *_: Any) -> Any:
        raise AssertionError("find looks at a tensor")

    __eq__ = __bool__ = __len__ = __iter__ = __index__ = __float__ = __getitem__ = _untouchable
    __hash__ = object.__hash__


def numbered(tree: Any) -> tuple[Any, list[torch.Tensor]]:
    """The structure with operands in the places of tensors, and the tensors."""
    tensors: list[torch.Tensor] = []

    def leaf(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tensors.append(value)
        return Operand(len(tensors) - 1)

    return pytree.tree_map(leaf, tree), tensors


def canonical(target: Any, args: Any, kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
    """What `find` says of a call, and the tensors that its operands stand for."""
    (args, kwargs), tensors = numbered((args, kwargs))
    return find(target, tuple(args), kwargs), tensors


def fill(arguments: Any, values: Any) -> list[Any]:
    return [
        values[a.number] if isinstance(a, Operand) else tuple(fill(a, values)) if isinstance(a, tuple) else a
        for a in arguments
    ]


def to_array(tensor: torch.Tensor) -> Any:
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtypes.to_numpy("bfloat16"))
    return tensor.numpy()


def to_tensor(array: Any, shape: tuple[int, ...]) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).reshape(shape)
    return torch.from_numpy(array.copy()).reshape(shape)


def traced(rule: Rule, arguments: Any, tensors: list[torch.Tensor]) -> tuple[Trace, list[Value | None]]:
    """The rule on traced values of the tensors' shapes."""
    trace = Trace()
    values = [
        Value.argument(trace, f"x{k}", tuple(t.shape), str(t.dtype).removeprefix("torch."))
        for k, t in enumerate(tensors)
    ]
    result = rule.traced(*fill(arguments, values))
    return trace, list(result) if isinstance(result, tuple) else [result]


def run(rule: Rule, arguments: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The rule's results, computed by a plan."""
    trace, results = traced(rule, arguments, tensors)
    return execute(trace, results, tensors)


def execute(trace: Trace, results: list[Value | None], tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    wanted = [v for v in results if v is not None]
    nodes = [v.tracer._node for v in wanted]
    plan = build(Traced("rule", g.Graph(trace.inputs, nodes), tuple(v.tracer._axes for v in wanted), ()))
    arrays = [to_array(t if t.dim() <= 2 else t.reshape(t.shape[:-1].numel(), t.shape[-1])) for t in tensors]
    found = iter(NumpyExecutable(plan, arrays)(arrays, [None] * len(wanted)))
    return [None if v is None else to_tensor(next(found), v.shape) for v in results]


def agree(got: Any, expected: torch.Tensor, tolerance: float = 0.0) -> None:
    """Shape and dtype are the same, special values too, and other values nearly."""
    assert tuple(got.shape) == tuple(expected.shape)
    assert got.dtype == expected.dtype
    if torch.equal(got, expected):  # which is quicker to tell
        return
    eps = torch.finfo(expected.dtype).eps if expected.dtype.is_floating_point else 0.0
    torch.testing.assert_close(
        got, expected, rtol=max(64 * eps, tolerance), atol=max(64 * eps, tolerance), equal_nan=True
    )


def check(target: Any, *args: Any, tolerance: float = 0.0, expected: Any = None, **kwargs: Any) -> Found:
    """A call by any spelling gives what PyTorch gives, traced and by the rule's eager form."""
    found, tensors = canonical(target, args, kwargs)
    assert isinstance(found, Found), f"{target}: {found}"
    assert all(_is_plain(a) for a in found.arguments), found.arguments
    given = [t.clone() for t in tensors]
    if expected is None:
        call = getattr(torch.Tensor, target) if isinstance(target, str) else target
        args, kwargs = pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, (args, kwargs))
        expected = call(*args, **kwargs)
        expected = expected[0] if isinstance(expected, tuple) else expected
    eager = found.rule.eager(*fill(found.arguments, given))
    eager = list(eager) if isinstance(eager, tuple) else [eager]
    agree(eager[0], expected, tolerance)
    for before, after in zip(tensors, given, strict=True):
        assert torch.equal(before.nan_to_num(), after.nan_to_num()), "the eager form changed an operand"
    results = run(found.rule, found.arguments, tensors)
    assert [r is None for r in results] == [r is None for r in eager]
    for got, want in zip(results, eager, strict=True):
        if got is not None:
            agree(got, want, tolerance)
    return found


def _is_plain(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return all(map(_is_plain, argument))
    return argument is None or isinstance(argument, (bool, int, float, str, Operand))


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def positive(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return draw(*shape, dtype=dtype, seed=seed).abs() + 0.25


def parts(target: Any, *args: Any, **kwargs: Any) -> tuple[Rule, Any, list[torch.Tensor]]:
    """The rule of a call, its arguments, and the tensors in it."""
    found, tensors = canonical(target, args, kwargs)
    assert isinstance(found, Found), f"{target}: {found}"
    return found.rule, found.arguments, tensors


def not_fused(target: Any, *args: Any, reason: str, **kwargs: Any) -> None:
    """A call that has a rule, which cannot be traced for these shapes and dtypes, and says why."""
    rule, arguments, tensors = parts(target, *args, **kwargs)
    with pytest.raises(TraceError, match=reason):
        traced(rule, arguments, tensors)


class Following(TorchFunctionMode):
    """Traces what a function asks PyTorch for, beside what PyTorch computes."""

    def __init__(self, tensors: list[torch.Tensor]):
        super().__init__()
        self.trace = Trace()
        self.held = list(tensors)
        self.values = {
            id(t): Value.argument(self.trace, f"x{k}", tuple(t.shape), str(t.dtype).removeprefix("torch."))
            for k, t in enumerate(tensors)
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            found, tensors = canonical(func, args, kwargs or {})
            assert isinstance(found, Found), f"{func}: {found}"
            value = found.rule.traced(*fill(found.arguments, [self.values[id(t)] for t in tensors]))
            assert value.shape == tuple(result.shape), func
            assert value.dtype == str(result.dtype).removeprefix("torch."), func
            self.values[id(result)] = value
            self.held.append(result)
        return result


def follow(function: Any, *tensors: torch.Tensor) -> int:
    """A whole function gives what PyTorch gives; returns how many trips to memory its folds take."""
    with Following(list(tensors)) as mode:
        expected = function(*tensors)
    value = mode.values[id(expected)]
    (got,) = execute(mode.trace, [value], list(tensors))
    agree(got, expected)
    nodes = g.topological([value.tracer._node])
    return sum(n.op == "reshape" and not is_leaf(n) for n in nodes)


# What rules are called with; spellings without an adapter all take the same -----------------------------------------

# fmt: off
OF_ONE = (
    "neg", "abs", "square", "exp", "exp2", "expm1", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "erf",
    "floor", "ceil", "trunc", "isnan", "isinf", "isfinite", "sign", "round", "positive", "identity",
    "contiguous", "clone", "detach", "relu", "silu", "sigmoid", "mish", "selu", "hardsigmoid", "hardswish",
    "softsign", "logsigmoid", "hardtanh", "relu6", "leaky_relu", "rrelu", "gelu", "elu", "celu", "softplus",
    "tanhshrink", "hardshrink", "softshrink", "logical_not", "asinh",
)
OF_ONE_POSITIVE = (
    "sqrt", "rsqrt", "reciprocal", "log", "log2", "log10", "log1p",
)
OF_ONE_BELOW_ONE = ("asin", "acos", "atanh")
OF_TWO = (
    "add", "sub", "mul", "div", "atan2", "logaddexp", "maximum", "minimum", "gt", "ge", "lt", "le", "eq", "ne",
    "logical_and", "logical_or", "logical_xor",
)
# fmt: on
MASKS = ("bitwise_and", "bitwise_or", "bitwise_xor")
Call = tuple[tuple[Any, ...], dict[str, Any]]


def pointwise(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Call | None:
    """Arguments of any shape for the rules that work element by element."""
    x, y, z = (draw(*shape, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    if name in OF_ONE:
        return (x,), {}
    if name in OF_ONE_POSITIVE:
        return (positive(*shape, dtype=dtype),), {}
    if name in OF_ONE_BELOW_ONE:
        return (x / 8,), {}
    if name == "acosh":
        return (1 + x.abs(),), {}
    if name in OF_TWO:
        return (x, y), {}
    if name in MASKS:
        return (x > 0, y > 0), {}
    more: dict[str, Call] = {
        "pow": ((x.abs() + 0.25, y), {}),
        "addcmul": ((x, y, z), {"value": 0.5}),
        "addcdiv": ((x, y, z.abs() + 0.25), {"value": 2}),
        "lerp": ((x, y, 0.3), {}),
        "xlogy": ((x, y.abs() + 0.25), {}),
        "clamp": ((x, -0.5, 0.5), {}),
        "where": ((x > 0, y, z), {}),
        "masked_fill": ((x, y > 0, 7.5), {}),
        "bitwise_not": ((x > 0,), {}),
        "threshold": ((x, 0.25, -2.0), {}),
        "to": ((x, torch.float64), {}),
        "type_as": ((x, draw(3)), {}),
    }
    return more.get(name)


def call_of(name: str, dtype: torch.dtype = torch.float64) -> Call:
    """Arguments of every rule."""
    x, x3, channels = (draw(*s, dtype=dtype) for s in ((4, 6), (2, 3, 6), (6,)))
    w, mean, var = (f(6, dtype=dtype, seed=k) for k, f in ((4, draw), (5, draw), (6, positive)))
    more: dict[str, Call] = {
        "prelu": ((x, channels), {}),
        "softmax": ((x, -1), {}),
        "log_softmax": ((x, -1), {}),
        "softmin": ((x, -1), {}),
        "sum": ((x, -1), {}),
        "mean": ((x, -1), {}),
        "prod": ((x, -1), {}),
        "logsumexp": ((x, -1), {}),
        "max": ((x,), {}),
        "min": ((x,), {}),
        "max_dim": ((x, -1), {}),
        "min_dim": ((x, -1), {}),
        "amax": ((x, -1), {}),
        "amin": ((x, -1), {}),
        "argmax": ((x, -1), {}),
        "argmin": ((x, -1), {}),
        "var": ((x, -1), {}),
        "std": ((x, -1), {}),
        "var_mean": ((x, -1), {}),
        "std_mean": ((x, -1), {}),
        "vector_norm": ((x,), {}),
        "layer_norm": ((x, (6,), w, channels), {}),
        "rms_norm": ((x, (6,), w), {}),
        "normalize": ((x,), {}),
        "group_norm": ((x, 2), {"weight": w, "bias": channels}),
        "instance_norm": ((x3[:, :1],), {}),
        "batch_norm": ((x, mean, var), {"weight": w, "bias": channels}),
        "linear": ((x, draw(3, 6, dtype=dtype), draw(3, dtype=dtype)), {}),
        "matmul": ((x, draw(6, 3, dtype=dtype)), {}),
        "addmm": ((draw(4, 3, dtype=dtype), x, draw(6, 3, dtype=dtype)), {}),
        "avg_pool1d": ((x, 2), {}),
        "max_pool1d": ((x, 2), {}),
        "adaptive_avg_pool1d": ((x, 2), {}),
        "reshape": ((x, (3, 8)), {}),
        "flatten": ((x3, 1), {}),
        "unflatten": ((x, 1, (2, 3)), {}),
        "unsqueeze": ((x, 1), {}),
        "squeeze": ((x3[:, :1],), {}),
        "t": ((x,), {}),
        "transpose": ((x, 0, 1), {}),
        "permute": ((x3, (1, 2, 0)), {}),
        "expand": ((x[:1], (4, 6)), {}),
        "expand_as": ((x[:1], x), {}),
        "view_as": ((x, draw(3, 8)), {}),
        "getitem": ((x, (slice(None), None)), {}),
        "narrow": ((x, 1, 2, 3), {}),
        "chunk": ((x, 4, 1), {}),
        "glu": ((x,), {}),
        "swap_pairs": ((x, True), {}),
        "gather": ((x, -1, torch.tensor([[0], [5], [2], [2]])), {}),
        "index_rows": ((x, torch.tensor([0, 5, -2, 2])), {}),
        "one_hot": ((torch.tensor([0, 5, 2, 2]), 6), {}),
        "cosine_similarity": ((x, draw(4, 6, dtype=dtype, seed=1)), {}),
    }
    found = pointwise(name, (4, 6), dtype) or more.get(name)
    assert found is not None, f"the rule {name} has no test"
    return found


# Gradients ----------------------------------------------------------------------------------------------------------


def vjp(
    rule: Rule, arguments: Any, tensors: list[torch.Tensor], cotangent: torch.Tensor, wanted: list[int]
) -> list[torch.Tensor | None]:
    """The gradients of a rule's first result, computed by a plan; None where nothing flows."""
    trace, results = traced(rule, arguments, tensors)
    value = results[0]
    assert value is not None
    node = value.tracer._node
    leaf = g.argument(0, "cotangent", node.shape, node.dtype)
    found = gradients([node], [leaf], [trace.inputs[k] for k in wanted])
    roots = [n for n in found if n is not None]
    if not roots:
        return [None for _ in found]
    leaves = [*((n, n.name) for n in trace.inputs), (leaf, "cotangent")]
    plan = build(Traced("gradient", extract_graph(roots, leaves), ((0, 1),) * len(roots), ()))
    arrays = [to_array(t if t.dim() <= 2 else t.reshape(t.shape[:-1].numel(), t.shape[-1])) for t in tensors]
    arrays.append(to_array(cotangent_matrix(value, cotangent)))
    done = iter(NumpyExecutable(plan, arrays)(arrays, [None] * len(roots)))
    return [
        None if n is None else to_tensor(next(done), tuple(tensors[k].shape))
        for n, k in zip(found, wanted, strict=True)
    ]


def eager_vjp(
    rule: Rule, arguments: Any, tensors: list[torch.Tensor], cotangent: torch.Tensor, wanted: list[int]
) -> list[torch.Tensor | None]:
    """The same by PyTorch's autograd."""
    leaves = [t.detach().clone().requires_grad_(k in wanted) for k, t in enumerate(tensors)]
    result = rule.eager(*fill(arguments, leaves))
    result = result[0] if isinstance(result, tuple) else result
    if not result.requires_grad:
        return [None for _ in wanted]
    return list(torch.autograd.grad(result, [leaves[k] for k in wanted], cotangent, allow_unused=True))


def same_gradients(
    target: Any, *args: Any, cotangent: Any = None, tolerance: float = 0.0, wanted: Any = None, **kwargs: Any
) -> None:
    """A call's gradients, by all of its floating-point tensors unless told, are eager's, special values too."""
    rule, arguments, tensors = parts(target, *args, **kwargs)
    wanted = [k for k, t in enumerate(tensors) if t.is_floating_point()] if wanted is None else wanted
    result = rule.eager(*fill(arguments, tensors))
    result = result[0] if isinstance(result, tuple) else result
    if cotangent is None:
        cotangent = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64).reshape(result.shape)
    cotangent = cotangent.to(result.dtype)
    ours = vjp(rule, arguments, tensors, cotangent, wanted)
    theirs = eager_vjp(rule, arguments, tensors, cotangent, wanted)
    for k, a, b in zip(wanted, ours, theirs, strict=True):
        zeros = torch.zeros_like(tensors[k])
        agree(zeros if a is None else a, zeros if b is None else b, tolerance)
