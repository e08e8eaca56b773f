"""The tables: rules, the callables that stand for them, and operations that are never fused."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Adapter = Callable[..., Any]
F = torch.nn.functional
# Where the callables of a name are looked up, with and without a trailing underscore.
_NAMESPACES = (torch, torch.Tensor, F, torch.special, torch.linalg, torch._C._nn, torch._C._VariableFunctions)


@dataclass(frozen=True)
class Rule:
    """One operation of PyTorch's.

    Attributes
    ----------
    name : PyTorch's
    signature : the canonical parameters, with PyTorch's names and defaults
    eager : PyTorch's function of the canonical arguments, in order; changes none of them in place
    traced : the same function of `Value`s in the places of tensors; raises `TraceError` for what cannot be fused
    view : whether the result may share memory with the first operand
    no_op : whether nothing is computed
    reduces : whether it reduces rows or columns, which is worth a fused launch by itself
    product : whether it is a matrix product
    several : whether it has several results; of other operations' the first one alone is computed
    updates : parameters that are updated in place, in training; `eager` and `traced` then return a tuple of the result
        and their new values, None for one that does not change
    """

    name: str
    signature: inspect.Signature
    eager: Callable[..., Any]
    traced: Callable[..., Any]
    view: bool = False
    no_op: bool = False
    reduces: bool = False
    product: bool = False
    several: bool = False
    updates: tuple[str, ...] = ()

    def updated(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the argument of each parameter in `updates`; None for each where the call is not in training."""
        named = dict(zip(self.signature.parameters, arguments, strict=True))
        return [named[name] if named["training"] is True else None for name in self.updates]


@dataclass(frozen=True)
class Overload:
    """A callable of PyTorch's that stands for a rule; `adapt` turns its arguments into canonical ones."""

    rule: str
    adapt: Adapter | None
    inplace: bool = False


@dataclass(frozen=True)
class Adapted:
    """Canonical arguments with the rule, if it is another, and whether the call is in place."""

    arguments: tuple[Any, ...]
    rule: str = ""
    inplace: bool = False


@dataclass(frozen=True)
class Found:
    """A call resolved: its rule, the canonical arguments, and whether it changes its first operand."""

    rule: Rule
    arguments: tuple[Any, ...]
    inplace: bool = False


@dataclass(frozen=True)
class Refused:
    """A call of a known operation with options that cannot be fused."""

    reason: str


RULES: dict[str, Rule] = {}
OVERLOADS: dict[Any, Overload] = {}
# Callables that are never fused, with the reason.
UNFUSED: dict[Any, str] = {}


def rule(
    *targets: Any,
    name: str = "",
    eager: Callable[..., Any] | None = None,
    adapt: Adapter | None = None,
    **properties: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter the decorated function of traced values as a rule; its parameters are the canonical ones.

    Parameters
    ----------
    *targets : callable or str
        Overloads, as `overload` takes them; all callables of the rule's name unless given.
    name : str
        The decorated function's own unless given.
    eager : callable
        PyTorch's function of that name, called with the optional arguments by keyword, unless given.
    adapt : callable
        From the arguments of the targets to the canonical ones.
    **properties
        Further fields of `Rule`.
    """

    def enter(traced: Callable[..., Any]) -> Callable[..., Any]:
        own = name or traced.__name__
        if own in RULES:
            raise AssertionError(f"two rules are called {own}")
        signature = inspect.signature(traced)
        RULES[own] = Rule(own, signature, eager or _with_keywords(function_of(own), signature), traced, **properties)
        overload(own, *(targets or (own,)), adapt=adapt)
        return traced

    return enter


def function_of(name: str) -> Callable[..., Any]:
    """Return PyTorch's function of a name, from `torch.nn.functional` if it is there."""
    function: Callable[..., Any] = getattr(F, name, None) or getattr(torch, name)
    return function


def _with_keywords(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """Wrap a function to take the canonical arguments by position: optional ones go by keyword, dtypes by name."""
    required = sum(p.default is p.empty for p in signature.parameters.values())
    optional = tuple(signature.parameters)[required:]
    if not optional:
        return function
    has_dtype = "dtype" in optional

    def call(*arguments: Any) -> Any:
        options = dict(zip(optional, arguments[required:], strict=True))
        if has_dtype and options["dtype"] is not None:
            options["dtype"] = getattr(torch, options["dtype"])
        return function(*arguments[:required], **options)

    return call


def overload(rule: str, *targets: Any, adapt: Adapter | None = None, inplace: bool = False) -> None:
    """Enter callables as overloads of a rule.

    A string names all of PyTorch's functions and methods of that name, and their in-place forms.
    """
    for target in targets:
        if isinstance(target, str):
            for callable_ in _callables_named(target):
                _enter_overload(callable_, Overload(rule, adapt, inplace))
            for callable_ in _callables_named(target + "_"):
                _enter_overload(callable_, Overload(rule, adapt, True))
        else:
            _enter_overload(target, Overload(rule, adapt, inplace))


def leave_unfused(reason: str, *names: str) -> None:
    """Enter the callables of these names, in-place forms included, as never fused."""
    for name in names:
        UNFUSED.update(dict.fromkeys((*_callables_named(name), *_callables_named(name + "_")), reason))


def _callables_named(name: str) -> Iterable[Any]:
    """Yield PyTorch's callables of a name."""
    for namespace in _NAMESPACES:
        # Only what `nn.functional` defines: it imports other things under names of operations.
        found = namespace.__dict__.get(name) if namespace is F else getattr(namespace, name, None)
        if callable(found) and not isinstance(found, (type, types.ModuleType)):
            yield found


def _enter_overload(target: Any, entry: Overload) -> None:
    present = OVERLOADS.setdefault(target, entry)
    if present != entry:
        raise AssertionError(f"{target} stands for {present.rule} and {entry.rule}")


# Adapters of several rules: methods name their second operand in ways of their own.


def binary_operands(input: Any, other: Any) -> tuple[Any, Any]:
    return input, other


def swapped_operands(input: Any, other: Any) -> tuple[Any, Any]:
    return other, input
