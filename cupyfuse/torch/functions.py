"""Functions with PyTorch's signatures, on tensors of any rank, with gradients.

They run as PyTorch's own operations where they cannot be fused: under a compiler, a transform or autocast, on devices
other than CPUs and NVIDIA GPUs, for dtypes that cupyfuse does not compute with.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple, TypeAlias

import torch

from .chains.chain import Call, Chain
from .chains.eligibility import PLAIN_TYPES
from .chains.runner import Runner
from .rules import RULES
from .rules.symbols import Ref
from .rules.table import function_of

Tensor: TypeAlias = torch.Tensor


class Step(NamedTuple):
    """An operation of a chain, on the result of the one before.

    Attributes
    ----------
    name : of a rule, which is that of PyTorch's function
    arguments : those after the first; `Ref(k)` stands for the k-th input of the chain
    options : further arguments, as (name, value) pairs
    """

    name: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


@functools.lru_cache(maxsize=1024)
def _runner(steps: tuple[Step, ...], names: tuple[str, ...]) -> Runner:
    """Return the runner of steps, from a cache; constants of a step always have one type, so that 1 is never True."""
    return Runner(build_chain(steps, names))


def build_chain(steps: tuple[Step, ...], names: tuple[str, ...], fixed: frozenset[int] = frozenset()) -> Chain:
    """Build the chain that applies each step to the result of the one before, the first to the first input.

    `names` are those of the inputs, which steps refer to by `Ref`; `fixed` are the inputs that seldom change.
    """
    calls: list[Call] = []
    updates: list[tuple[int, int]] = []
    value, unused = 0, len(names)  # the number of the running value, and the first free number
    for step in steps:
        rule = RULES[step.name]
        bound = rule.signature.bind(Ref(value), *step.arguments, **dict(step.options))
        bound.apply_defaults()
        filled = tuple(bound.arguments.values())
        value, unused = unused, unused + 1
        results = [value]
        for target in rule.updated(filled):
            if not isinstance(target, Ref):
                results.append(-1)  # not updated in this call
                continue
            results.append(unused)
            updates.append((target.number, unused))
            unused += 1
        calls.append(Call(rule.name, filled, tuple(results)))
    changing = {target for target, _ in updates}
    return Chain(names, tuple(calls), outputs=(value,), updates=tuple(updates), fixed=fixed - changing)


def _run(steps: tuple[Step, ...], **tensors: Any) -> Tensor:
    """Run steps on tensors, which errors and plans call by these names; `Ref(k)` in a step is the k-th."""
    values = tuple(tensors.values())
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            if any(isinstance(value, torch.fx.Proxy) for value in values):
                return apply_steps(steps, values)  # `torch.fx` records PyTorch's operations
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if torch.compiler.is_dynamo_compiling() or torch._C._is_any_autocast_enabled():
        return apply_steps(steps, values)
    result: Tensor = _runner(steps, tuple(tensors))(values)[0]
    return result


def apply_steps(steps: tuple[Step, ...], values: tuple[Any, ...]) -> Tensor:
    """Run steps by PyTorch's own functions, in eager or for a compiler to capture."""
    result = values[0]
    for name, arguments, options in steps:
        operands = (values[a.number] if isinstance(a, Ref) else a for a in arguments)
        result = function_of(name)(result, *operands, **dict(options))
    return result


def _run_along(name: str, input: Any, dim: Any, options: tuple[Any, ...], keepdim: bool) -> Tensor:
    """Run a rule along a dimension of a tensor, with the options that follow `dim`.

    Dimensions that are neither the first nor the last are moved to the end.
    """
    if not torch.compiler.is_dynamo_compiling() and type(dim) is int and type(input) in PLAIN_TYPES:
        runner = _runners_along.get((name, dim, options, input.dim()))
        if runner is not None and not torch._C._is_any_autocast_enabled():
            known: Tensor = runner((input,))[0]
            return known
    if not isinstance(input, torch.Tensor) or isinstance(dim, tuple):
        return _run((Step(name, (dim, *options)),), input=input)
    rank = max(input.dim(), 1)
    dim = _as_index(dim)
    if not -rank <= dim < rank:
        raise IndexError(f"dim: expected one of the {input.dim()} dimensions of input, got {dim}")
    if dim % rank not in (0, rank - 1):
        result = _run((Step(name, (-1, *options)),), input=input.movedim(dim, -1))
        return result.movedim(-1, dim).contiguous() if keepdim else result
    steps = (Step(name, (dim % rank, *options)),)
    if not torch.compiler.is_dynamo_compiling():
        _runners_along[name, dim, options, input.dim()] = _runner(steps, ("input",))
    return _run(steps, input=input)


# Of the calls along the first or the last dimension, by name, dimension, options and rank.
_runners_along: dict[tuple[str, int, tuple[Any, ...], int], Runner] = {}


def _as_index(dim: Any) -> int:
    """Convert a dimension to an int as PyTorch does: anything with `__index__` but a bool."""
    if torch.compiler.is_dynamo_compiling():  # which may know it as a symbol, that has no attributes
        return int(dim)
    if isinstance(dim, bool) or not hasattr(dim, "__index__"):
        raise TypeError(f"dim: expected an int, got {type(dim).__name__}")
    return operator.index(dim)


def _as_flag(keepdim: Any) -> bool:
    """Return `keepdim`, which has to be a bool."""
    if not isinstance(keepdim, bool):
        raise TypeError(f"keepdim: expected a bool, got {type(keepdim).__name__}")
    return keepdim


# Reductions ---------------------------------------------------------------------------------------------------------


def logsumexp(input: Tensor, dim: int | tuple[int, ...], keepdim: bool = False) -> Tensor:
    """Logarithm of the sum of exponentials along a dimension; as `torch.logsumexp`.

    Parameters
    ----------
    input : Tensor
        Of any rank.
    dim : int or tuple of int
    keepdim : bool
        Keep the dimensions, with length one.

    Returns
    -------
    Tensor

    Raises
    ------
    TypeError
        An argument is of another type.
    IndexError
        `input` has no such dimension.
    """
    if isinstance(dim, (tuple, list)):
        dim = tuple(map(_as_index, dim))
    keepdim = _as_flag(keepdim)
    return _run_along("logsumexp", input, dim, (keepdim,), keepdim)


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Exponentials divided by their sum along a dimension; as `torch.softmax`.

    Parameters
    ----------
    input : Tensor
        Of any rank.
    dim : int
    dtype : torch.dtype, optional
        To convert `input` to before.

    Returns
    -------
    Tensor
        Of the shape of `input`, contiguous.

    Raises
    ------
    TypeError
        An argument is of another type.
    IndexError
        `input` has no such dimension.
    """
    return _normalize("softmax", input, dim, dtype)


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Logarithm of `softmax`; as `torch.log_softmax`, with the parameters, results and errors of `softmax`."""
    return _normalize("log_softmax", input, dim, dtype)


def _normalize(name: str, input: Any, dim: Any, dtype: Any) -> Tensor:
    """Run `softmax` or `log_softmax`, by name."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) or dtype in (float, int, bool)):
        raise TypeError(f"dtype: expected a torch.dtype, got {type(dtype).__name__}")

    if dtype is not None and isinstance(input, (torch.Tensor, torch.fx.Proxy)):
        input = input.to(dtype)
    return _run_along(name, input, dim if type(dim) is int else _as_index(dim), (), True)


# Linear layers ------------------------------------------------------------------------------------------------------


def _linear(input: Any, weight: Any, bias: Any, *steps: Step) -> Tensor:
    """Run a linear layer and the steps after it."""
    if bias is None:
        return _run((Step("linear", (Ref(1),)), *steps), input=input, weight=weight)
    return _run((Step("linear", (Ref(1), Ref(2))), *steps), input=input, weight=weight, bias=bias)


def linear_logsumexp(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, keepdim: bool = False) -> Tensor:
    """`torch.nn.functional.linear`, then logsumexp over its last dimension.

    Parameters
    ----------
    input : Tensor, (..., in_features)
    weight : Tensor, (out_features, in_features)
    bias : Tensor, (out_features,), optional
    keepdim : bool
        Keep the last dimension, with length one.

    Returns
    -------
    Tensor, (...) or (..., 1)

    Raises
    ------
    TypeError
        An argument is of another type.
    RuntimeError
        Shapes or dtypes do not fit.
    """
    return _linear(input, weight, bias, Step("logsumexp", (-1, _as_flag(keepdim))))


def linear_softmax(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, then softmax over its last dimension; parameters as for `linear_logsumexp`."""
    return _linear(input, weight, bias, Step("softmax", (-1,)))


def linear_log_softmax(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, then log-softmax over its last dimension; parameters as for `linear_logsumexp`."""
    return _linear(input, weight, bias, Step("log_softmax", (-1,)))


def linear_gelu(input: Tensor, weight: Tensor, bias: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """`torch.nn.functional.linear`, then GELU; parameters as for `linear_logsumexp`."""
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', got {approximate!r}")
    return _linear(input, weight, bias, Step("gelu", options=(("approximate", approximate),)))
