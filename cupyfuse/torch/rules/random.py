"""Tell which calls draw random numbers, by the tags of PyTorch's operators."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

F = torch.nn.functional
_SEEDED = torch.Tag.nondeterministic_seeded
# Modules whose functions draw nothing.
_PURE = (
    *("torch.distributed.tensor._api", "_operator", "builtins", "math", "torch.functional", "torch._tensor"),
    *("torch._C._autograd", f"{__package__}.labels", f"{__package__}.pairs"),
)
# Methods of DTensors, and functions of Dynamo's in their place: they move data, and draw nothing.
PLACING = tuple(prefix + name for prefix in ("", "prim_") for name in ("from_local", "to_local", "redistribute"))
# The classes of functions of NumPy in Dynamo's graphs, which PyTorch runs. Those of `np.random` are of the first.
NUMPY_FUNCTIONS = ("numpy_to_tensor_wrapper", "numpy_method_wrapper", "numpy_operator_wrapper")
# Namespaces whose operators carry the tag; authors of others may have left it out.
_TAGGED = ("aten", "prims")

# Operators that draw at some arguments only: the names of a probability and of a training flag, either of which can
# turn drawing off.
_SWITCHES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"), ("p", "train")),
    "rrelu": ("", "training"),
    "scaled_dot_product_attention": ("dropout_p", ""),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), ("dropout", "train")),
}
_DROPOUTS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d")
_FRACTIONAL = [f"fractional_max_pool{n}d{more}" for n in (2, 3) for more in ("", "_with_indices")]
# The switches of the Python functions of `torch.nn.functional` that draw.
_FUNCTIONAL: dict[str, tuple[str, str]] = {
    **dict.fromkeys(_DROPOUTS, ("p", "training")),
    "rrelu": ("", "training"),
    "multi_head_attention_forward": ("dropout_p", "training"),
    **dict.fromkeys(("gumbel_softmax", *_FRACTIONAL), ("", "")),
}


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
        True for an unknown callable, and where the answer depends on an unknown argument.
    """
    kwargs = kwargs or {}
    if isinstance(target, str):  # a method
        if target in PLACING:
            return False
        method = getattr(torch.Tensor, target, None)
        return method is None or _draws_by_name(target, args, kwargs, default=False)
    if type(target).__name__ in NUMPY_FUNCTIONS:
        return bool(getattr(getattr(target, "f", None), "__module__", "") == "torch._numpy.random")
    if isinstance(target, torch._ops.OpOverload):  # operators, whose tags say so in some namespaces
        return target.namespace not in _TAGGED or _draws_by_tags([target], args, kwargs)
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace = target._qualified_op_name.partition("::")[0]
        return namespace not in _TAGGED or _draws_by_tags(_overloads(target), args, kwargs)
    module, name = getattr(target, "__module__", None), getattr(target, "__name__", "")
    # A function written in Python
    if module == F.__name__ and isinstance(target, types.FunctionType):
        return name in _FUNCTIONAL and not _function_is_off(target, args, kwargs)
    if name in PLACING or module in _PURE or (module == "torch" and name.startswith("sym_")):
        return False
    if isinstance(target, types.MethodWrapperType):  # the getter of a tensor's attribute
        return False
    own = getattr(target, "__objclass__", None)
    if own is not None:  # the class of an unbound method
        return not issubclass(torch.Tensor, own) or _draws_by_name(name, args, kwargs, default=False)
    return not isinstance(target, types.BuiltinFunctionType) or _draws_by_name(name, args, kwargs, default=True)


def _draws_by_name(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], default: bool) -> bool:
    """Whether the ATen operator of that name draws; the default where there is none."""
    packet = getattr(torch.ops.aten, name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):  # such as the namespace's own `__eq__`
        return default
    return _draws_by_tags(_overloads(packet), args, kwargs)


def _overloads(packet: Any) -> list[Any]:
    return [getattr(packet, name) for name in packet.overloads()]


def _draws_by_tags(overloads: list[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether one of an operator's overloads is tagged, and the arguments of the call do not turn drawing off."""
    if not any(_SEEDED in overload.tags for overload in overloads):
        return False
    for overload in overloads:
        schema = overload._schema
        switches = _SWITCHES.get(schema.name.partition("::")[2].rstrip("_"))
        if switches is not None and _drawing_is_off(dict(_bind(schema.arguments, args, kwargs)), *switches):
            return False
    return True


def _bind(parameters: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Pair the parameters of an operator's schema with arguments, or with their defaults; misfits are no error."""
    for k, parameter in enumerate(parameters):
        if k < len(args):
            yield parameter.name, args[k]
        else:
            default = parameter.default_value if parameter.has_default_value() else None
            yield parameter.name, kwargs.get(parameter.name, default)


def _function_is_off(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments of a function in `_FUNCTIONAL` turn drawing off."""
    if kwargs.get("_random_samples") is not None:  # a fractional pool's
        return True
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return False
    bound.apply_defaults()
    return _drawing_is_off(bound.arguments, *_FUNCTIONAL[function.__name__])


def _drawing_is_off(bound: Mapping[str, Any], probability: str, training: str) -> bool:
    """Whether a probability of exactly zero, or a training flag that is False, keeps a call from drawing.

    `probability` and `training` are the names of the parameters, empty where the function has none. A
    probability that is no number, or a flag that is no bool, belongs to another overload.
    """
    p, train = bound.get(probability), bound.get(training)
    if (probability and type(p) not in (int, float)) or (training and type(train) is not bool):
        return False
    return (bool(probability) and p == 0) or train is False
