"""Run plans on a GPU: allocate from its memory pool, launch on the current stream, never synchronise.

Arrays are the runtime's (`cuda/runtime.py`), which alone knows their library. All that does not depend on addresses is
prepared when a plan is loaded: launch configurations, argument structs, the layout of one workspace. A call fills in
the addresses and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..cuda.launch import sequence
from ..cuda.runtime import Runtime
from ..cuda.structs import Addresses
from ..errors import EngineError
from ..ir import graph as g
from ..ir.graph import Node
from ..plan.plan import Output, Plan
from ..plan.schedule import (
    Step,
    assign_offsets,
    base_of,
    dead_after,
    may_overwrite,
    pieces_of,
    row_places,
    row_stride,
    view_chain,
)
from .kernel_launch import LaunchSpec, Place
from .launch_specs import LaunchSpecs, ShapeAndStrides
from .library_launch import Held, allocation, reads_held_alone, release, rewritten_operand
from .quick_call import QuickCall, quick_call

_ALIGNMENT = 256  # of values in the workspace, in bytes


@dataclass(frozen=True)
class _Result:
    """A result as the steps write it.

    Attributes
    ----------
    output : Output
    shape : tuple of int
    empty : callable
        Allocates it.
    direct : bool
        Whether that is what the caller gets.
    held : int
        Slot of the array that a library step gives, -1 for other results.
    """

    output: Output
    shape: tuple[int, ...]
    empty: Callable[[], Any]
    direct: bool
    held: int = -1


def load(plan: Plan, arrays: Sequence[Any], runtime: Runtime) -> CudaExecutable:
    """Load a plan for arrays like those of later calls: arguments, then prepacked values."""
    return CudaExecutable(plan, arrays, runtime).load()


class CudaExecutable:
    """A plan for arrays of fixed shapes, dtypes and strides on one device.

    Making one begins to compile its kernels, in other threads; `load` is to be called before any call.

    Parameters
    ----------
    plan : Plan
    arrays : sequence of arrays
        Arguments, then prepacked values, with the shapes, dtypes and strides of those of later calls.
    runtime : Runtime
    conditional : bool
        For `run_if_changed`, where a flag in device memory decides whether kernels do anything. The plan has to be
        `conditional`.

    Raises
    ------
    EngineError
        The plan cannot run with these arrays.

    Attributes
    ----------
    quick : callable or None
        `quick(arrays, numbers)` does what a call without `outs` does, in less of the host's time; None for plans that
        do more than allocate and launch.
    """

    def __init__(self, plan: Plan, arrays: Sequence[Any], runtime: Runtime, conditional: bool = False):
        self.plan = plan
        self.runtime = runtime
        self._places: dict[Node, Place] = {}
        strides: dict[Node, ShapeAndStrides] = {}
        self._slots = 0
        self._temporaries: list[tuple[int, int]] = []  # slots of the workspace's values, and their offsets in it
        for node, array in zip(plan.graph.inputs, arrays, strict=True):
            self._places[node] = self._argument_place(array)
            if array.ndim > 2:
                strides[node] = tuple(array.shape), tuple(runtime.strides(array))
        for o in plan.outputs:
            base = base_of(o.node)
            self._places[base] = Place(self._slot(), base.shape[1], 1)
        nodes = g.topological(node for step in plan.steps for node in step.nodes)
        takes_numbers = any(node.number is not None or (node.call is not None and node.call.numbers) for node in nodes)
        self._numbers = self._slot() if takes_numbers else -1  # of the numbers of a call
        self._flag = self._slot() if conditional else -1
        library_steps = [step for step in plan.steps if step.kind == "Library" and step.launches]
        self._holds_arguments = bool(library_steps)
        self._held = self._hold_arguments(arrays) if library_steps else {}
        self._first_unset = self._slots
        self._overwritten: list[int] = []  # arguments that steps write to
        self._copies = self._place_effects(arrays)
        for step in library_steps:
            self._hold_results(step)
        self._dead = dead_after(plan.steps, plan.graph.roots)
        self._allocated: dict[Node, Held] = {}  # values in arrays of their own, which library steps overwrite
        in_place = [step for step, dead in zip(plan.steps, self._dead, strict=True) if self._let_rewrite(step, dead)]
        self._results = [self._result(o) for o in plan.outputs]
        offsets, self._workspace = assign_offsets(
            plan.steps, plan.scheduled.nbytes, plan.graph.roots, self._places, _ALIGNMENT
        )
        for node, offset in offsets.items():
            self._places[node] = Place(self._workspace_slot(offset), plan.scheduled.row_stride(node), 1)
        # The place of a whole may be that of a result, so pieces have theirs when all others have.
        for piece, (whole, first) in pieces_of(plan.steps).items():
            self._places[piece] = self._places[whole].slice(0, 1, first, 1)
        self._specs = LaunchSpecs(plan, runtime, self._place, strides, self._held, in_place, self._flag, self._numbers)
        with runtime.made_current():
            specs = self._launch_specs()
        runtime.compile_ahead([kernel for spec in specs for kernel in spec.kernels])
        self._launches = [(spec, self._reserve(spec.workspace) if spec.workspace else -1) for spec in specs]
        self._unset = [None] * (self._slots - self._first_unset)  # what `_launch` and library steps fill in
        does_more = library_steps or conditional or self._copies or self._overwritten
        self._is_plain = not does_more and all(result.direct for result in self._results)
        self.quick: QuickCall | None = None

    def load(self) -> CudaExecutable:
        """Load the kernels, and return the executable.

        Raises
        ------
        EngineError
            A kernel cannot be compiled or loaded.
        """
        runtime = self.runtime
        with runtime.made_current():
            self._enqueue = sequence([spec.bind(runtime, slot) for spec, slot in self._launches])
        unheld = [runtime.allocator(r.shape, runtime.dtype(r.output.dtype), held=False) for r in self._results]
        self.quick = self._write_quick_call(unheld) if self._is_plain else None
        self._quick_into = self._write_quick_call([None] * len(unheld)) if self._is_plain else None
        return self

    def _write_quick_call(self, results: Sequence[Callable[[], Any] | None]) -> QuickCall:
        """Return the call that allocates results by these functions, or takes arrays for them."""
        assert [slot for slot, _ in self._temporaries] == list(range(self._first_unset, self._slots))
        return quick_call(
            self.runtime,
            arguments=len(self.plan.graph.inputs),
            results=results,
            takes_numbers=self._numbers >= 0,
            workspace=self._workspace,
            offsets=[offset for _, offset in self._temporaries],
            launch=self._enqueue,
        )

    def _slot(self) -> int:
        """Return a new slot of the list of addresses."""
        self._slots += 1
        return self._slots - 1

    def _argument_place(self, array: Any) -> Place:
        """Return the place of an argument, or prepacked value, as rows x columns."""
        strides = self.runtime.strides(array)
        if len(strides) == 2:
            return Place(self._slot(), strides[0], strides[1])
        # Rows with several strides are read by copies, which take all strides, or by the index of each.
        places = row_places(array.shape, strides)
        down = places.stride if places else row_stride(array.shape, strides) or 0
        return Place(self._slot(), down, strides[-1] if strides else 0)

    def _hold_arguments(self, arrays: Sequence[Any]) -> dict[Node, Held]:
        """Return the arguments, which follow their addresses in slots of their own."""
        inputs = self.plan.graph.inputs
        return {node: Held(self._slot(), tuple(array.shape)) for node, array in zip(inputs, arrays, strict=True)}

    def _hold_results(self, step: Step) -> None:
        """Let a library step give its results, but for those that overwrite arguments."""
        written = {self._places[node].slot for node in self.plan.graph.inputs}
        for node in step.outputs:
            if node not in self._places:
                self._places[node] = Place(self._slot(), node.shape[1], 1)
            if self._places[node].slot not in written:
                assert node.call is not None
                shape = node.call.results[node.result]
                graph = self.plan.graph
                in_order = graph.roots if self.plan.feeds else [n for _, n in graph.effects]
                in_any_order = node not in map(base_of, in_order) and reads_held_alone(self.plan.steps, node)
                self._held[node] = Held(self._slot(), shape, in_any_order)

    def _let_rewrite(self, step: Step, dead: Sequence[Node]) -> bool:
        """Let a library step write its result over an operand, then an array of its own, if it can; return whether."""
        if step.kind != "Library" or not step.launches:
            return False
        value = rewritten_operand(step, dead, self.plan.scheduled.storage)
        if value is None or value.op == "concat" or (value in self._places and value not in self._held):
            return False  # pieces are written before there would be an array for the whole
        if value not in self._held:
            call = step.nodes[0].call
            assert call is not None
            self._places[value] = Place(self._slot(), value.shape[1], 1)
            self._held[value] = self._allocated[value] = Held(self._slot(), call.shapes[0])
        return True

    def _result(self, output: Output) -> _Result:
        """Return a result as the steps write it."""
        base = base_of(output.node)
        shape = output.shape if output.direct else base.shape
        empty = self.runtime.allocator(shape, self.runtime.dtype(output.dtype))
        held = self._held[base].slot if base in self._held else -1
        return _Result(output, shape, empty, output.direct, held)

    def _launch_specs(self) -> list[LaunchSpec]:
        """List the launches of all steps; what library steps have given is released after its last use."""
        found = []
        for step, dead in zip(self.plan.steps, self._dead, strict=True):
            for node in step.outputs:
                if node in self._allocated:
                    dtype = self.plan.scheduled.storage[node]
                    found.append(allocation(self._places[node].slot, self._allocated[node], dtype))
            found += self._specs.of(step) if step.launches else []
            released = [self._held[node] for node in dead if node in self._held]
            found += [release(released)] if released else []
        return found

    def _workspace_slot(self, offset: int) -> int:
        """Return a new slot, for the address at an offset in the workspace."""
        slot = self._slot()
        self._temporaries.append((slot, offset))
        return slot

    def _reserve(self, nbytes: int) -> int:
        """Reserve memory at the end of the workspace for one launch; return the slot of its address."""
        slot = self._workspace_slot(self._workspace)
        self._workspace += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        return slot

    def _place_effects(self, arrays: Sequence[Any]) -> list[tuple[int, Node]]:
        """Let steps overwrite arguments where no later read needs the old value; return the copies to make."""
        copies = []
        for arg, node in self.plan.graph.effects:
            source, contiguous = self.plan.graph.inputs[arg], self.runtime.is_contiguous(arrays[arg])
            if contiguous and node not in self._places and may_overwrite(self.plan.steps, node, source):
                self._places[node] = Place(self._places[source].slot, node.shape[1], 1)
                self._overwritten.append(arg)
            elif node.op == "accumulate":
                raise EngineError(
                    f"argument {source.name!r}: expected a C-contiguous array, as a product is added to it in place; "
                    "got one with other strides"
                )
            else:
                copies.append((arg, node))
        return copies

    def _place(self, node: Node) -> Place:
        """Return the place of a value or of a view of one."""
        place = self._places[base_of(node)]
        for view in view_chain(node):
            if view.op == "transpose":
                place = place.transposed
            elif view.op == "slice":
                (row, down), (col, across) = view.dims
                place = place.slice(row, down, col, across)
            elif view.op == "reshape":
                place = Place(place.slot, view.shape[1], 1)
            # A "repeat" reads the rows of what it is a view of, where these are, and a "swap" its columns.
        return place

    def allocate(self) -> list[Any]:
        """Allocate the results as the steps write them."""
        with self.runtime.made_current():
            return [result.empty() for result in self._results]

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """Allocate an uninitialised array."""
        with self.runtime.made_current():
            return self.runtime.allocator(shape, self.runtime.dtype(dtype))()

    def __call__(
        self, arrays: Sequence[Any], outs: Sequence[Any] | None = None, numbers: Sequence[float] = ()
    ) -> list[Any]:
        """Launch the plan on arguments and prepacked values.

        `outs` holds, for each result, an array to write it to, or None to allocate one; None allocates all. `numbers`
        are the numbers of the call.
        """
        if outs is None and self.quick is not None:
            return self.quick(arrays, numbers)
        if not self.runtime.is_current():
            with self.runtime.made_current():
                return self(arrays, outs, numbers)
        if outs is None:
            return self._run(arrays, [None] * len(self._results), numbers)
        if self._quick_into is None or not all(map(self._is_target, outs)):
            return self._run(arrays, outs, numbers)
        results = self._quick_into(arrays, numbers, outs)
        for result in results:
            self.runtime.bump_version(result)
        return results

    def _is_target(self, out: Any) -> bool:
        """Whether steps can write to what is given for a result."""
        return out is not None and self.runtime.is_contiguous(out)

    def _run(self, arrays: Sequence[Any], outs: Sequence[Any], numbers: Sequence[float]) -> list[Any]:
        """Launch the plan, the device being current, and deliver each result where the caller wants it."""
        runtime, address = self.runtime, self.runtime.address
        addresses: Addresses = list(map(address, arrays))
        written = []
        finished = True  # every result is a new array, which a step writes as the caller gets it
        for result, out in zip(self._results, outs, strict=True):
            finished &= out is None and result.direct
            if result.direct and self._is_target(out):
                array = out
            else:
                array = result.empty() if result.held < 0 else None
            written.append(array)
            addresses.append(None if array is None else address(array))
        if self._numbers >= 0:
            addresses.append(numbers)
        if self._holds_arguments:
            addresses += arrays
        memory = self._launch(addresses, runtime.stream())
        for k, result in enumerate(self._results):
            if written[k] is None:
                written[k] = _in_shape(addresses[result.held], result.shape)
        if not finished:
            written = [self._deliver(*each) for each in zip(self._results, written, outs, strict=True)]
        if self._copies or self._overwritten:
            self._write_effects(arrays, addresses)
        del memory  # effects read it
        return written

    def run_if_changed(self, arguments: Sequence[int], results: Sequence[int], flag: int, stream: Any) -> Any:
        """Launch a conditional plan: recompute `results`, arrays of `allocate`, unless the device finds 0 at `flag`.

        All are addresses. Returns the workspace, which has to live as long as a recording of the launches is replayed.
        """
        return self._launch([*arguments, *results, flag], stream)

    def _launch(self, addresses: Addresses, stream: Any) -> Any:
        """Launch all steps, and return the workspace, to be kept until its values have been read.

        `addresses` holds those of arguments, results and flag, by slot; those in the workspace are appended here. None
        is that of a value which a library step gives.
        """
        addresses += self._unset
        memory = None
        if self._workspace:
            memory = self.runtime.workspace(self._workspace)
            start = memory.ptr
            for slot, offset in self._temporaries:
                addresses[slot] = start + offset
        self._enqueue(addresses, stream)
        return memory

    def _deliver(self, result: _Result, written: Any, out: Any) -> Any:
        """Return a result with the caller's axes, copied to `out` where the steps could not write it there."""
        if not result.direct:
            written = result.output.with_user_axes(_apply_views(result.output.node, written))
        if out is None:
            return written
        if out is written:
            self.runtime.bump_version(out)
        else:
            self.runtime.copy(out, written)
        return out

    def _write_effects(self, arrays: Sequence[Any], addresses: Addresses) -> None:
        """Copy new values to the arguments that steps could not overwrite, and tell their library of all changes."""
        for arg in self._overwritten:
            self.runtime.bump_version(arrays[arg])
        for arg, node in self._copies:
            value = self._specs.view(node, self._place(node), addresses)
            self.runtime.copy(arrays[arg], value.reshape(arrays[arg].shape))


def _in_shape(array: Any, shape: tuple[int, ...]) -> Any:
    return array if array.shape == shape else array.reshape(shape)


def _apply_views(node: Node, base: Any) -> Any:
    """Apply the transposes and reshapes that make a result of its base to the base's array."""
    for view in view_chain(node):
        base = base.T if view.op == "transpose" else base.reshape(view.shape)
    return base
