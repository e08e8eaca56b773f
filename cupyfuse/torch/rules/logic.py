"""Comparisons and logic."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from .overloads import overload, swapped, two
from .promotion import as_mask, pointwise
from .table import Operand, rule
from .values import Value, refuse

T = torch.Tensor

_COMPARISONS = {
    "gt": ("greater", "__gt__"),
    "ge": ("greater_equal", "__ge__"),
    "lt": ("less", "__lt__"),
    "le": ("less_equal", "__le__"),
    "eq": ("equal", "__eq__"),
    "ne": ("not_equal", "__ne__"),
}


def _comparison(op: str) -> Callable[[Operand, Operand], Value]:
    def traced(input: Operand, other: Operand) -> Value:
        return pointwise(op, input, other)

    return traced


def _enter_comparisons() -> None:
    for name, (op, method) in _COMPARISONS.items():
        compare = getattr(operator, name)
        rule(name, compare)(_comparison(op))
        # The in-place forms would have to write masks to floats.
        overload(name, getattr(torch, name), getattr(T, name), compare, getattr(T, method), adapt=two)
        if op != "equal":  # torch.equal gives a Python bool
            overload(name, getattr(torch, op), getattr(T, op), adapt=two)


_enter_comparisons()


@rule("logical_and", torch.logical_and)
def logical_and(input: Value, other: Value) -> Value:
    return pointwise("logical_and", as_mask(input), as_mask(other))


@rule("logical_or", torch.logical_or)
def logical_or(input: Value, other: Value) -> Value:
    return pointwise("logical_or", as_mask(input), as_mask(other))


@rule("logical_xor", torch.logical_xor)
def logical_xor(input: Value, other: Value) -> Value:
    return pointwise("not_equal", as_mask(input), as_mask(other))


@rule("logical_not", torch.logical_not)
def logical_not(input: Value) -> Value:
    return pointwise("logical_not", as_mask(input))


def _masks(name: str, *operands: Any) -> None:
    for value in operands:
        if not isinstance(value, bool) and not (isinstance(value, Value) and value.dtype == "bool"):
            refuse(name, "it is fused for masks only")


@rule("bitwise_and", operator.and_)
def bitwise_and(input: Operand, other: Operand) -> Value:
    _masks("bitwise_and", input, other)
    return pointwise("logical_and", input, other)


@rule("bitwise_or", operator.or_)
def bitwise_or(input: Operand, other: Operand) -> Value:
    _masks("bitwise_or", input, other)
    return pointwise("logical_or", input, other)


@rule("bitwise_xor", operator.xor)
def bitwise_xor(input: Operand, other: Operand) -> Value:
    _masks("bitwise_xor", input, other)
    return pointwise("not_equal", input, other)


@rule("bitwise_not", torch.bitwise_not)
def bitwise_not(input: Value) -> Value:
    _masks("bitwise_not", input)
    return pointwise("logical_not", input)


def _spell_logic() -> None:
    for name in ("logical_and", "logical_or", "logical_xor", "logical_not"):
        overload(name, getattr(torch, name), getattr(T, name))
    for name, plain in (("and", "and_"), ("or", "or_"), ("xor", "xor")):
        rule_name = f"bitwise_{name}"
        overload(rule_name, rule_name, getattr(operator, plain), getattr(T, f"__{name}__"), adapt=two)
        overload(rule_name, getattr(T, f"__r{name}__"), adapt=swapped)
        overload(rule_name, getattr(operator, f"i{name}"), getattr(T, f"__i{name}__"), adapt=two, inplace=True)
    overload("bitwise_not", "bitwise_not", operator.invert, T.__invert__)


_spell_logic()
