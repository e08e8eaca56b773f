"""Comparisons and logic."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from ...ir.operators import COMPARISONS
from .table import binary_operands, overload, rule, swapped_operands
from .values import Operand, Value, as_mask, pointwise, refuse

T = torch.Tensor

# Of masks: the operator, and Python's name for it.
_LOGIC = {"and": ("logical_and", "and_"), "or": ("logical_or", "or_"), "xor": ("not_equal", "xor")}


def _binary(op: str, convert: Callable[[Any], Any] = lambda operand: operand) -> Callable[[Operand, Operand], Value]:
    """Make the rule of an operator of two operands, each converted before."""

    def traced(input: Operand, other: Operand) -> Value:
        return pointwise(op, convert(input), convert(other))

    return traced


def _require_mask(name: str, operand: Any) -> Any:
    """Return a mask; refuse any other operand."""
    if not isinstance(operand, bool) and not (isinstance(operand, Value) and operand.dtype == "bool"):
        refuse(name, "it is fused for masks only")
    return operand


# In-place forms of comparisons and of `logical_*` would have to write masks to floats.
for _name, _op in COMPARISONS.items():
    _compare = getattr(operator, _name)
    _targets = [getattr(torch, _name), getattr(T, _name), _compare, getattr(T, f"__{_name}__")]
    if _op != "equal":  # torch.equal gives a Python bool
        _targets += [getattr(torch, _op), getattr(T, _op)]
    rule(*_targets, name=_name, eager=_compare, adapt=binary_operands)(_binary(_op))

for _name, (_op, _plain) in _LOGIC.items():
    _bits, _words = f"bitwise_{_name}", f"logical_{_name}"
    _python = getattr(operator, _plain)
    rule(getattr(torch, _words), getattr(T, _words), name=_words)(_binary(_op, as_mask))
    _masks_only = functools.partial(_require_mask, _bits)
    _targets = [_bits, _python, getattr(T, f"__{_name}__")]
    rule(*_targets, name=_bits, eager=_python, adapt=binary_operands)(_binary(_op, _masks_only))
    overload(_bits, getattr(T, f"__r{_name}__"), adapt=swapped_operands)
    overload(_bits, getattr(operator, f"i{_name}"), getattr(T, f"__i{_name}__"), adapt=binary_operands, inplace=True)


@rule(torch.logical_not, T.logical_not)
def logical_not(input: Value) -> Value:
    return pointwise("logical_not", as_mask(input))


@rule("bitwise_not", operator.invert, T.__invert__)
def bitwise_not(input: Value) -> Value:
    return pointwise("logical_not", _require_mask("bitwise_not", input))
