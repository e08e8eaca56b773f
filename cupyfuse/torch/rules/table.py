"""What a rule is, and the table of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .values import Value


@dataclass(frozen=True)
class Rule:
    """One operation of PyTorch's.

    Attributes
    ----------
    name : PyTorch's own, the one of its spellings that is canonical
    signature : the canonical parameters, with PyTorch's names and defaults
    eager : what PyTorch does, called with the canonical arguments in order; it changes none of them in place
    traced : the same on `Value`s in the places of tensors; raises `TraceError` where it cannot be fused
    view : the result may share memory with the first operand
    idle : nothing is computed
    reduces : rows or columns are reduced, which is worth a fused launch by itself
    product : a matrix product is what it is about
    updates : with these parameters' new values, in this order, behind the result: eager and traced then return tuples.
        None stands for a value that does not change.
    several : traced and eager return all of the operation's results as a tuple, not the first one alone
    """

    name: str
    signature: inspect.Signature
    eager: Callable[..., Any]
    traced: Callable[..., Any]
    view: bool = False
    idle: bool = False
    reduces: bool = False
    product: bool = False
    updates: tuple[str, ...] = ()
    several: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.signature.parameters)


@dataclass(frozen=True)
class Found:
    """A call as the table has it: the rule, its canonical arguments, and whether it changes its first operand."""

    rule: Rule
    arguments: tuple[Any, ...]
    inplace: bool = False


@dataclass(frozen=True)
class Refused:
    """A call of a known operation with options that cannot be fused."""

    reason: str


RULES: dict[str, Rule] = {}


def rule(name: str, eager: Callable[..., Any], **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function on traced values into the table; its parameters are the canonical ones."""

    def enter(traced: Callable[..., Any]) -> Callable[..., Any]:
        if name in RULES:
            raise AssertionError(f"two rules are called {name}")
        RULES[name] = Rule(name, inspect.signature(traced), eager, traced, **more)
        return traced

    return enter


Operand = Value | float | int | bool
