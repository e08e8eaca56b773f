"""Straight-line programs: steps that fit in the caches as lists of NumPy calls, compiled when a plan is loaded.

A program gives the bits that evaluation in blocks gives (`numpy.py`), with less work for each node: shapes, dtypes, the
last use of each value, and common subexpressions are known. A maximum that is subtracted again, as in softmax, is
computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.graph import Node
from ..ir.operators import POINTWISE
from ..plan.schedule import Step, base_of

Array = np.ndarray[Any, np.dtype[Any]]
Memory = dict[Node, Array]
# The slot of an operand, and the dtype to convert it to; None for none.
_Operand = tuple[int, "np.dtype[Any] | None"]


class _Call(NamedTuple):
    """One NumPy call: `values[target] = function(*values[operands])`, operands converted to their dtypes."""

    function: Callable[..., Array]
    operands: tuple[_Operand, ...]
    target: int
    dead: tuple[int, ...]  # slots of values that no later call reads


class _NotStraightLine(Exception):
    """A node has an operator that needs branches or loops."""


class StraightLine:
    """The program of a step. Values are in slots: constants, loads from memory, numbers, and results of calls.

    Parameters
    ----------
    step : Step
    in_memory : collection of Node
        The values in memory when the step begins.
    storage : dict
        The dtype in which each value in memory is stored.
    view, reduce : callable
        `view(node, memory)` reads a value in memory; `reduce(node, array)` reduces it.
    """

    def __init__(
        self,
        step: Step,
        in_memory: Collection[Node],
        storage: dict[Node, str],
        view: Callable[[Node, Memory], Array],
        reduce: Callable[[Node, Array], Array],
    ):
        self._in_memory, self._view, self._reduce = in_memory, view, reduce
        self._nodes = frozenset(step.nodes)
        self._slots: dict[Node, int] = {}
        self._shared: dict[Any, int] = {}  # slots of calls, constants and numbers, by what they compute
        self._initial: list[Array | None] = []  # by slot: a constant, or None
        self._loads: list[tuple[int, Node, np.dtype[Any]]] = []
        self._numbers: list[tuple[int, Node]] = []
        self._calls: list[_Call] = []
        for node in step.nodes:
            self._slot(node)
        self._stores = [(self._slots[n], n, dtypes.to_numpy(storage[n])) for n in step.outputs]
        kept = {slot for slot, _, _ in self._stores} | {i for i, value in enumerate(self._initial) if value is not None}
        for k, call in reversed(list(enumerate(self._calls))):
            dead = tuple({slot for slot, _ in call.operands} - kept)
            kept.update(dead)
            self._calls[k] = call._replace(dead=dead)

    def run(self, memory: Memory) -> None:
        """Compute the step's outputs from what is in memory."""
        values: list[Any] = self._initial.copy()
        loaded = []
        for slot, node, dtype in self._loads:
            value = self._view(node, memory)
            values[slot] = value if value.dtype is dtype else value.astype(dtype)
            loaded.append(values[slot])
        for slot, node in self._numbers:
            values[slot] = memory[node]
        for function, operands, target, dead in self._calls:
            given = []
            for slot, kind in operands:
                value = values[slot]
                given.append(value if kind is None or value.dtype is kind else value.astype(kind))
            result = function(*given)
            values[target] = result
            for slot in dead:
                values[slot] = None
        taken: list[Array] = []
        for slot, node, dtype in self._stores:
            value = values[slot]
            fresh = type(value) is np.ndarray and value.base is None and value.flags.c_contiguous
            if fresh and value.dtype is dtype and value.shape == node.shape and not _is_among(value, (*loaded, *taken)):
                memory[node] = value
                taken.append(value)
            else:
                memory[node] = np.empty(node.shape, dtype)
                memory[node][...] = value

    # Compiling the program
    def _new_slot(self, value: Array | None = None) -> int:
        """Return a new slot, which begins with a constant or empty."""
        self._initial.append(value)
        return len(self._initial) - 1

    def _add_call(self, name: Any, function: Callable[..., Array], *operands: _Operand) -> int:
        """Add a call, unless one of the same name and operands is there; return the slot of its result."""
        slot = self._shared.get((name, operands))
        if slot is None:
            slot = self._shared[name, operands] = self._new_slot()
            self._calls.append(_Call(function, operands, slot, ()))
        return slot

    def _slot(self, node: Node) -> int:
        """Return the slot of a value, after compiling it if it is new."""
        slot = self._slots.get(node)
        if slot is None:
            slot = self._slots[node] = self._compile(node)
        return slot

    def _compile(self, node: Node) -> int:
        """Add the load, or the calls, that compute a value; return its slot."""
        base = base_of(node)
        if base in self._in_memory and node not in self._nodes:
            slot = self._new_slot()
            self._loads.append((slot, node, _computed_in(base.dtype)))
            return slot
        if node.op in g.PASS_THROUGH:
            return self._pass_through(node)
        if node.op == "positions":
            return self._new_slot(np.arange(node.size, dtype=dtypes.to_numpy(node.dtype)).reshape(node.shape))
        if node.reduction:
            return self._reduction(node)
        if node.op not in POINTWISE:
            raise _NotStraightLine
        operands = map(self._operand, node.inputs, g.operand_dtypes(node))
        return self._add_call(node.op, POINTWISE[node.op].numpy, *operands)

    def _operand(self, node: Node, dtype: str) -> _Operand:
        """Return the slot of an operand of a call in `dtype`, and the dtype to convert it to."""
        kind = _computed_in(dtype)
        if node.op != "const":
            return self._slot(node), kind
        if node.number is not None:
            slot = self._shared.get(node)
            if slot is None:
                slot = self._shared[node] = self._new_slot()
                self._numbers.append((slot, node))
            return slot, kind
        key = ("const", repr(node.value), kind)
        if key not in self._shared:
            self._shared[key] = self._new_slot(np.asarray(node.value, kind))
        return self._shared[key], None

    def _pass_through(self, node: Node) -> int:
        """Compile a cast, a broadcast or stop_gradient."""
        (inner,) = node.inputs
        operand = self._operand(inner, inner.dtype)
        kind = _computed_in(node.dtype)
        rounds = dtypes.compute_dtype(node.dtype) != node.dtype and inner.dtype != node.dtype
        stored = dtypes.to_numpy(node.dtype)
        if inner.op != "const" and not rounds and inner.dtype == node.dtype and inner.shape == node.shape:
            return operand[0]

        def convert(value: Array) -> Array:
            if rounds:
                value = value.astype(stored)
            return np.broadcast_to(value.astype(kind, copy=False), node.shape)

        return self._add_call((node.op, node.dtype, node.shape, rounds), convert, operand)

    def _reduction(self, node: Node) -> int:
        """Compile a reduction; expsum in calls that it may share with the operators around it."""
        (inner,) = node.inputs
        kind = _computed_in(inner.dtype)
        operand = self._operand(inner, node.dtype) if inner.op == "const" else (self._slot(inner), kind)
        if node.op != "expsum" or inner.op == "const":
            return self._add_call((node.op, node.axis), lambda x: self._reduce(node, x), operand)
        axis = node.axis
        top = self._add_call(("max", axis), lambda x: x.max(axis=axis, keepdims=True), operand)
        shifted = self._add_call("subtract", POINTWISE["subtract"].numpy, operand, (top, kind))
        exponential = self._add_call("exp", POINTWISE["exp"].numpy, (shifted, kind))
        return self._add_call(("sum", axis, "pairwise"), lambda x: x.sum(axis=axis, keepdims=True), (exponential, kind))


def _computed_in(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype in which values of a dtype are computed."""
    return np.dtype(dtypes.to_numpy(dtypes.compute_dtype(dtype)))


def _is_among(value: Array, others: Sequence[Array]) -> bool:
    """Whether an array is, by identity, one of several."""
    return any(value is other for other in others)


def straight_line(
    step: Step,
    in_memory: Collection[Node],
    storage: dict[Node, str],
    view: Callable[[Node, Memory], Array],
    reduce: Callable[[Node, Array], Array],
) -> StraightLine | None:
    """Return the straight-line program of a step, given as for `StraightLine`; None if it has none."""
    try:
        return StraightLine(step, in_memory, storage, view, reduce)
    except _NotStraightLine:
        return None
