"""Which operations draw random numbers, as PyTorch's dispatcher tags them."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

F = torch.nn.functional
_SEEDED = torch.Tag.nondeterministic_seeded
# Modules whose functions compute what their arguments say, and nothing else.
_PURE = ("_operator", "builtins", "math", "torch.functional", "torch._tensor")
# Namespaces whose operators carry the tag; authors of others may have left it out.
_TAGGED = ("aten", "prims")


def draws(target: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether a call takes numbers from a random generator, so that its order among such calls matters.

    Parameters
    ----------
    target : callable or str
        As Dynamo's graphs hold it; a string is a method of tensors.
    args, kwargs
        Its arguments; what stands for a tensor or a symbol counts as unknown.

    Returns
    -------
    bool
        True for a callable that is not known, and where it depends on an argument that is not known.
    """
    kwargs = kwargs or {}
    if isinstance(target, str):
        method = getattr(torch.Tensor, target, None)
        return method is None or _by_name(target, args, kwargs, known=True)
    if isinstance(target, torch._ops.OpOverload):
        return target.namespace not in _TAGGED or (_SEEDED in target.tags and not _idle([target], args, kwargs))
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = target._qualified_op_name
        return name.partition("::")[0] not in _TAGGED or _by_overloads(target, args, kwargs)
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    if module == F.__name__ and isinstance(target, types.FunctionType):
        conditions = _FUNCTIONAL.get(name)
        return conditions is not None and conditions(target, args, kwargs)
    if module in _PURE or (module == "torch" and name.startswith("sym_")):
        return False
    if isinstance(target, types.MethodWrapperType):  # the getter of a tensor's attribute
        return False
    own = getattr(target, "__objclass__", None)
    if own is not None:
        return not issubclass(torch.Tensor, own) or _by_name(name, args, kwargs, known=True)
    return not isinstance(target, types.BuiltinFunctionType) or _by_name(name, args, kwargs, known=False)


def _by_name(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], known: bool) -> bool:
    """The answer of the operator of that name; of none, that a known callable dispatches no operator that draws."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # such as the namespace's own `__eq__`
        return not known
    return _by_overloads(packet, args, kwargs)


def _by_overloads(packet: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    overloads = [getattr(packet, name) for name in packet.overloads()]
    return any(_SEEDED in overload.tags for overload in overloads) and not _idle(overloads, args, kwargs)


# Calls that draw nothing ----------------------------------------------------------------------------------------

# For operators that draw at some arguments only: (the probability, whether it is training), either of which stops it.
_SWITCHES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), ("p", "train")),
    "rrelu": ("", "training"),
    "scaled_dot_product_attention": ("dropout_p", ""),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), ("dropout", "train")),
}


def _idle(overloads: list[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments of an operator's call, bound to one of its overloads, say that it draws nothing."""
    for overload in overloads:
        schema = overload._schema
        switches = _SWITCHES.get(schema.name.partition("::")[2].rstrip("_"))
        if switches is not None and _off(dict(_bound(schema.arguments, args, kwargs)), *switches):
            return True
    return False


def _bound(parameters: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for k, parameter in enumerate(parameters):
        if k < len(args):
            yield parameter.name, args[k]
        else:
            default = parameter.default_value if parameter.has_default_value() else None
            yield parameter.name, kwargs.get(parameter.name, default)


def _off(bound: Mapping[str, Any], probability: str, training: str) -> bool:
    """Whether a probability of exactly zero, or not training, keeps an operation from drawing.

    With a probability that is no number, or training that is no bool, the arguments belong to another overload.
    """
    p, train = bound.get(probability), bound.get(training)
    if (probability and type(p) not in (int, float)) or (training and type(train) is not bool):
        return False
    return (bool(probability) and p == 0) or train is False


# Of `torch.nn.functional`'s Python functions, those that draw, and unless what.
_Condition = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], bool]


def _unless(probability: str, training: str) -> _Condition:
    def condition(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        try:
            bound = inspect.signature(target).bind(*args, **kwargs)
        except (TypeError, ValueError):
            return True
        bound.apply_defaults()
        return not _off(bound.arguments, probability, training)

    return condition


def _unless_sampled(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("_random_samples") is None


_DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_FRACTIONAL = [f"fractional_max_pool{n}d{more}" for n in (2, 3) for more in ("", "_with_indices")]
_FUNCTIONAL: dict[str, _Condition] = {
    **dict.fromkeys(_DROPOUTS, _unless("p", "training")),
    "rrelu": _unless("", "training"),
    "multi_head_attention_forward": _unless("dropout_p", "training"),
    "gumbel_softmax": lambda target, args, kwargs: True,
    **dict.fromkeys(_FRACTIONAL, _unless_sampled),
}
