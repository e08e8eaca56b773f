"""Launches of library steps: calls of the array library's own functions on whole arrays.

What does not depend on addresses is decided when a plan is loaded: the arguments around the operands, and how each
operand becomes an array of the user's shape. Arguments, and results of earlier library steps, are passed as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from .. import dtypes
from ..cuda.runtime import Runtime
from ..cuda.structs import Addresses, Launch
from ..ir.graph import Node
from ..ir.numbers import Number
from ..plan.schedule import Step, base_of, contiguous_strides, in_order_of_base, view_chain
from .kernel_launch import LaunchSpec, Place


class Held(NamedTuple):
    """An array that a call holds beside its address: an argument, or what a library step has returned.

    Attributes
    ----------
    slot : int
        Of the array itself, among the addresses.
    shape : tuple of int
        The user's.
    in_any_order : bool
        Whether the strides of what a library step has returned do not matter: no kernel reads it.
    """

    slot: int
    shape: tuple[int, ...]
    in_any_order: bool = False


class LibraryLaunch:
    """The launch of a library step.

    A result whose slot holds no address when the step runs is given by the step: the array that the function returned
    becomes the value. Otherwise it is copied to the address.

    Parameters
    ----------
    step : Step
    storage : dict
        The dtype in which each value in memory is stored.
    place : callable
        Returns the `Place` of a value.
    held : dict
        The values that calls hold as arrays.
    in_place : bool
        Whether the step may write to its first operand, which it holds.
    numbers : int
        Slot of the numbers of a call; -1 if there are none.
    """

    def __init__(
        self,
        step: Step,
        storage: dict[Node, str],
        place: Callable[[Node], Place],
        held: dict[Node, Held],
        in_place: bool,
        numbers: int,
    ):
        self._step, self._storage, self._place, self._held = step, storage, place, held
        self._in_place, self._numbers = in_place, numbers

    def spec(self) -> LaunchSpec:
        """Return the binding of the launch."""
        return LaunchSpec(self._bind)

    def _bind(self, runtime: Runtime, _: int) -> Launch:
        """Prepare the call and its operands."""
        call, inputs = self._step.nodes[0].call, self._step.nodes[0].inputs
        assert call is not None
        stored = {n.result: self._storage[n] for n in self._step.outputs}
        in_any_order = {n.result for n in self._step.outputs if n in self._held and self._held[n].in_any_order}
        function = runtime.library_function(call, stored, self._in_place, in_any_order)
        operands = [self._operand(runtime, n, shape) for n, shape in zip(inputs, call.shapes, strict=True)]
        stores = [self._store(runtime, n) for n in self._step.outputs]
        operands += [self._number(n) for n in call.numbers]
        if len(operands) == len(stores) == 1:
            (make,), (keep,) = operands, stores
            return lambda addresses, _: keep(addresses, function((make(addresses),)))

        def launch(addresses: Addresses, stream: Any) -> None:
            results = function([operand(addresses) for operand in operands])
            for store in stores:
                store(addresses, results)

        return launch

    def _number(self, number: Number) -> Callable[[Addresses], Any]:
        """Return a function that computes a number that the library's function takes from those of a call."""
        evaluate, slot = number.evaluate, self._numbers
        return lambda at: evaluate(at[slot])

    def _operand(self, runtime: Runtime, node: Node, shape: tuple[int, ...]) -> Callable[[Addresses], Any]:
        """Return a function that makes an operand in the user's shape from what a call holds."""
        base, place = base_of(node), self._place(node)
        held = self._held.get(base)
        if held is not None and in_order_of_base(node):
            if held.shape == shape:
                return itemgetter(held.slot)
            return lambda at: at[held.slot].reshape(shape)
        if held is not None and (index := _index_of(node, held, shape)) is not None:
            if shape == tuple(n for n, i in zip(node.shape, index, strict=True) if isinstance(i, slice)):
                return lambda at: at[held.slot][index]  # in less time than a view of an address
            return lambda at: at[held.slot][index].reshape(shape)
        if held is not None and node.op == "transpose" and node.inputs[0] is base and node.shape == held.shape[::-1]:
            if shape == node.shape:
                return lambda at: at[held.slot].T
            return lambda at: at[held.slot].T.reshape(shape)
        name, matrix, strides = self._storage[base], node.shape, (place.row_stride, place.col_stride)
        dtype, start = runtime.dtype(name), place.offset * dtypes.ITEMSIZE[name]
        if strides == contiguous_strides(matrix):
            in_order = contiguous_strides(shape)
            return lambda at: runtime.view(at[place.slot] + start, shape, dtype, in_order)
        if matrix == shape:
            return lambda at: runtime.view(at[place.slot] + start, matrix, dtype, strides)
        return lambda at: runtime.view(at[place.slot] + start, matrix, dtype, strides).reshape(shape)

    def _store(self, runtime: Runtime, node: Node) -> Callable[[Addresses, list[Any]], None]:
        """Return a function that takes the value of a node from the results."""
        call, number, slot = node.call, node.result, self._place(node).slot
        assert call is not None
        shape, dtype = call.results[number], runtime.dtype(self._storage[node])
        strides, held = contiguous_strides(shape), self._held.get(node)

        def store(addresses: Addresses, results: list[Any]) -> None:
            result = results[number]
            if held is not None:
                addresses[held.slot] = result
            if addresses[slot] is None:
                addresses[slot] = runtime.address(result)
            else:
                runtime.copy(runtime.view(addresses[slot], shape, dtype, strides), result)

        return store


def _index_of(node: Node, held: Held, shape: tuple[int, ...]) -> tuple[slice | int, slice | int] | None:
    """Return the index by which a slice of rows and columns of a held matrix is read; None for other views.

    It is that of one row, or of one column, where a vector is read.
    """
    views = view_chain(node)
    if len(views) != 1 or node.op != "slice" or held.shape != node.inputs[0].shape:
        return None
    if not node.size or any(step <= 0 for _, step in node.dims):
        return None
    (row, _), (col, _) = node.dims
    rows, cols = (slice(i, i + step * n, step) for (i, step), n in zip(node.dims, node.shape, strict=True))
    if shape == (node.shape[0],) and node.shape[1] == 1:
        return rows, col
    return (row, cols) if shape == (node.shape[1],) and node.shape[0] == 1 else (rows, cols)


def rewritten_operand(step: Step, dead: Sequence[Node], storage: dict[Node, str]) -> Node | None:
    """Return the value that a library step may overwrite with its result: its own operand, `dead` after the step."""
    node, (target, *others) = step.nodes[0], step.nodes[0].inputs or (None,)
    if target is None or node.call is None or not node.call.writes or step.outputs != (node,):
        return None
    value = base_of(target)
    alone = value in dead and value not in map(base_of, others)
    return value if in_order_of_base(target) and alone and storage[value] == storage[node] else None


def reads_held_alone(steps: Sequence[Step], value: Node) -> bool:
    """Whether steps read a value by the array that a call holds alone, and write to no such array."""
    for step in steps:
        reads = [n for n in (*step.inputs, *step.repair_inputs) if base_of(n) is value]
        if reads and (step.kind != "Library" or not all(map(in_order_of_base, reads))):
            return False
        call = step.nodes[0].call if step.kind == "Library" else None
        if call is not None and call.writes and base_of(step.nodes[0].inputs[0]) is value:
            return False
    return True


def allocation(slot: int, held: Held, dtype: str) -> LaunchSpec:
    """Return a launch that allocates an array for a value: its address has the slot `slot`."""

    def bind(runtime: Runtime, _: int) -> Launch:
        empty = runtime.allocator(held.shape, runtime.dtype(dtype))

        def launch(addresses: Addresses, stream: Any) -> None:
            array = addresses[held.slot] = empty()
            addresses[slot] = runtime.address(array)

        return launch

    return LaunchSpec(bind)


def release(held: list[Held]) -> LaunchSpec:
    """Return a launch that lets go of arrays that no later step reads; the stream orders the next use of memory."""
    slots = [h.slot for h in held]

    def launch(addresses: Addresses, stream: Any) -> None:
        for slot in slots:
            addresses[slot] = None

    return LaunchSpec(lambda runtime, _: launch)
