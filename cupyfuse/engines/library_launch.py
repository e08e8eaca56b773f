"""Launches of library steps: calls of the array library's own functions on whole arrays.

What does not depend on addresses is decided when a plan is loaded: the arguments around the operands, and how each
operand becomes an array of the user's shape. Arguments, and results of earlier library steps, are passed as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from .. import dtypes
from ..cuda.runtime import Runtime
from ..ir.graph import Node
from ..plan.schedule import Step, base_of, contiguous_strides, view_chain
from .kernel_launch import Addresses, Launch, LaunchSpec, Place


class Held(NamedTuple):
    """An array that a call holds beside its address: an argument, or what a library step has returned.

    Attributes
    ----------
    slot : int
        Of the array itself, among the addresses.
    shape : tuple of int
        The user's.
    """

    slot: int
    shape: tuple[int, ...]


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
    """

    def __init__(self, step: Step, storage: dict[Node, str], place: Callable[[Node], Place], held: dict[Node, Held]):
        self._step, self._storage, self._place, self._held = step, storage, place, held

    def spec(self) -> LaunchSpec:
        """Return the binding of the launch."""
        return LaunchSpec(self._bind)

    def _bind(self, runtime: Runtime, _: int) -> Launch:
        """Prepare the call and its operands."""
        call, inputs = self._step.nodes[0].call, self._step.nodes[0].inputs
        assert call is not None
        function = runtime.library_function(call, {n.result: self._storage[n] for n in self._step.outputs})
        operands = [self._operand(runtime, n, shape) for n, shape in zip(inputs, call.shapes, strict=True)]
        stores = [self._store(runtime, n) for n in self._step.outputs]

        def launch(addresses: Addresses, stream: Any) -> None:
            results = function([operand(addresses) for operand in operands])
            for store in stores:
                store(addresses, results)

        return launch

    def _operand(self, runtime: Runtime, node: Node, shape: tuple[int, ...]) -> Callable[[Addresses], Any]:
        """Return a function that makes an operand in the user's shape from what a call holds."""
        base, place = base_of(node), self._place(node)
        held = self._held.get(base)
        if held is not None and all(view.op == "reshape" for view in view_chain(node)):
            if held.shape == shape:
                return itemgetter(held.slot)
            return lambda at: at[held.slot].reshape(shape)
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
            if addresses[slot] is not None:
                runtime.copy(runtime.view(addresses[slot], shape, dtype, strides), result)
            else:
                assert held is not None
                addresses[slot], addresses[held.slot] = runtime.address(result), result

        return store


def release(held: list[Held]) -> LaunchSpec:
    """Return a launch that lets go of arrays that no later step reads; the stream orders the next use of memory."""
    slots = [h.slot for h in held]

    def launch(addresses: Addresses, stream: Any) -> None:
        for slot in slots:
            addresses[slot] = None

    return LaunchSpec(lambda runtime, _: launch)
