"""Launches of emitted kernels: specified from shapes and strides, compiled, then bound to a runtime.

A launch says which kernels it needs and how much workspace before anything is compiled, so that the engine can compile
the kernels of all launches in parallel and lay out one workspace for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import dtypes
from ..cuda.configure import Config, default_config, fitting_vec
from ..cuda.kernel import Kernel
from ..cuda.launch import launcher
from ..cuda.program import COLUMN, FULL, Parameter, Program
from ..cuda.runtime import Runtime
from ..cuda.sources import emit_kernels
from ..ir.graph import Node
from ..ir.numbers import Number
from ..plan.schedule import Step

_MAX_BLOCKS = (1 << 31) - 1

# Addresses of arguments, results, the flag and the workspace's values, by slot; one slot may hold the float arguments,
# and slots of their own hold the arrays that library steps take and give.
Addresses = list[Any]
Launch = Callable[[Addresses, Any], None]  # (addresses, stream)


@dataclass(frozen=True)
class Place:
    """A view of device memory: the slot of its address, and its strides and offset from there in elements."""

    slot: int
    row_stride: int
    col_stride: int
    offset: int = 0

    @property
    def transposed(self) -> Place:
        return Place(self.slot, self.col_stride, self.row_stride, self.offset)

    def slice(self, row: int, down: int, col: int, across: int) -> Place:
        """Return the view of every `down`-th row from `row` on, and every `across`-th column from `col` on."""
        start = self.offset + row * self.row_stride + col * self.col_stride
        return Place(self.slot, self.row_stride * down, self.col_stride * across, start)


@dataclass(frozen=True)
class LaunchSpec:
    """A launch before its kernels are compiled.

    Attributes
    ----------
    bind : callable
        `bind(runtime, slot)` loads the kernels and returns the launch; the slot holds the workspace's address, -1 if
        there is none.
    kernels : tuple of Kernel
    workspace : int
        Bytes of device memory that the launch needs for itself; 0 for none.
    """

    bind: Callable[[Runtime, int], Launch]
    kernels: tuple[Kernel, ...] = ()
    workspace: int = 0


class KernelArguments:
    """The struct of arguments of an emitted kernel, with places for addresses and numbers of a call.

    Parameters
    ----------
    program : Program
    place : callable
        Returns the `Place` of a value.

    Attributes
    ----------
    members : list
        The struct's members, with 0 for addresses.
    format : str
        The struct's format in the notation of Python's `struct`, eight bytes a member.
    pointers : list of (index of the member, slot of the address, bytes from there)
    numbers : list of (index of the member, number)
    vector_pointers : list of (slot of the address, bytes from there, itemsize)
        The pointers that are accessed in vectors.
    row_stride_bits : int
        Bitwise or of all row strides, whose common powers of two limit the vector width.
    """

    def __init__(self, program: Program, place: Callable[[Node], Place]):
        self.rows = program.domain[0]
        self.members: list[Any] = []
        self.format = ""
        self.pointers: list[tuple[int, int, int]] = []
        self.numbers: list[tuple[int, Number]] = []
        self.vector_pointers: list[tuple[int, int, int]] = []
        self.row_stride_bits = 0
        for parameter in program.parameters:
            if parameter.is_number:
                self._add_number(parameter.node)
            else:
                self._add_array(parameter, place(parameter.node))

    def _add_number(self, node: Node) -> None:
        """Append the member for a constant, or for a float argument, which each call fills in."""
        if node.number is not None:
            self.numbers.append((len(self.members), node.number))
        self.members.append(float(node.value))
        self.format += "d"

    def _add_array(self, parameter: Parameter, place: Place) -> None:
        """Append the members for an array: a pointer, and the strides that the kernel takes."""
        start = place.offset * dtypes.ITEMSIZE[parameter.dtype]
        self.pointers.append((len(self.members), place.slot, start))
        self.members.append(0)
        self.format += "Q"
        if parameter.has_rows:
            self.members.append(place.row_stride)
            self.format += "q"
        if parameter.has_cols:
            self.members.append(place.col_stride)
            self.format += "q"
        if parameter.extent in (FULL, COLUMN):
            self.vector_pointers.append((place.slot, start, dtypes.ITEMSIZE[parameter.dtype]))
        if parameter.extent == FULL and self.rows > 1:
            self.row_stride_bits |= abs(place.row_stride)

    def aligned_vec(self, addresses: Addresses, widest: int) -> int:
        """Return the largest number of elements, `widest` over a power of two, that all pointers are aligned to."""
        vec = widest
        while vec > 1 and any((addresses[slot] + start) % (vec * size) for slot, start, size in self.vector_pointers):
            vec //= 2
        return vec

    def launch_by_alignment(self, widest: int, load: Callable[[int], Launch]) -> Launch:
        """Return a launch that takes the variant of a kernel for the alignment of a call's pointers.

        `load(vec)` loads the variant for vectors of `vec` elements: the widest at once, others on their first use.
        """
        aligned = load(widest)
        variants = {widest: aligned}
        pointers = self.vector_pointers
        low_bits = max((widest * size for *_, size in pointers), default=1) - 1  # zero in addresses that are aligned

        def launch(addresses: Addresses, stream: Any) -> None:
            bits = 0
            for slot, start, _ in pointers:
                bits |= addresses[slot] + start
            if not bits & low_bits:
                aligned(addresses, stream)
                return
            vec = self.aligned_vec(addresses, widest)
            if vec not in variants:
                variants[vec] = load(vec)
            variants[vec](addresses, stream)

        return launch


class KernelLaunch:
    """The launch of a step's emitted kernel, with a variant for each vector width that the pointers may allow.

    Parameters
    ----------
    step : Step
    storage : dict
        The dtype in which each value in memory is stored.
    place : callable
        Returns the `Place` of a value.
    flag : int
        Slot of the address of the flag that a conditional launch reads; -1 if the launch is unconditional.
    numbers : int
        Slot of the float arguments; -1 if there are none.
    """

    def __init__(self, step: Step, storage: dict[Node, str], place: Callable[[Node], Place], flag: int, numbers: int):
        self.program = Program(step, storage)
        self.rows, self.cols = step.domain
        self.flag = flag
        self.numbers_slot = numbers
        self.arguments = KernelArguments(self.program, place)
        self.widest = fitting_vec(self.program, self.arguments.row_stride_bits)
        self.config = default_config(self.program, self.widest)
        self.kernels = emit_kernels(self.program, self.config, conditional=flag >= 0)

    def spec(self) -> LaunchSpec:
        """Return the kernels, the workspace and the binding of the launch."""
        return LaunchSpec(self.bind, self.kernels, self._partial_bytes() if self.program.by_columns else 0)

    def _partial_bytes(self) -> int:
        """Return the bytes of the totals that blocks sharing a column leave for the merge."""
        if self.config.shares == 1:
            return 1
        # At most four numbers of at most 8 bytes an accumulator.
        return self.config.shares * self.cols * 32 * max(1, len(self.program.accumulators(0)))

    def bind(self, runtime: Runtime, partial: int) -> Launch:
        """Load the kernels; `partial` is the slot of the workspace."""

        def load(vec: int) -> Launch:
            if vec == self.widest:
                return self._load(runtime, partial, self.config, self.kernels)
            config = default_config(self.program, vec)
            kernels = emit_kernels(self.program, config, conditional=self.flag >= 0)
            return self._load(runtime, partial, config, kernels)

        return self.arguments.launch_by_alignment(self.widest, load)

    def _load(self, runtime: Runtime, partial: int, config: Config, kernels: tuple[Kernel, ...]) -> Launch:
        """Load the kernels of one variant; they are launched one after the other with the same struct."""
        arguments = self.arguments
        # The struct: arguments, rows, columns; of a column step the address of the totals, shares; any flag's address.
        template, form = [*arguments.members, self.rows, self.cols], arguments.format + "qq"
        pointers, numbers = arguments.pointers.copy(), arguments.numbers
        if self.program.by_columns:
            pointers.append((len(template), partial, 0))
            template += [0, config.shares]
            form += "Qq"
            grids = [(-(-self.cols // config.group), config.shares), (-(-self.cols // config.threads), 1)]
        else:
            grids = [(_thread_blocks(config, self.rows, self.cols, runtime.processors), 1)]
        if self.flag >= 0:
            pointers.append((len(template), self.flag, 0))
            template.append(0)
            form += "Q"
        numbers_slot = self.numbers_slot
        runs = [
            launcher(runtime.function(kernel), (max(1, x), y, 1), (config.threads, 1, 1), form, kernel.shared)
            for kernel, (x, y) in zip(kernels, grids, strict=False)  # the second kernel of a column step is the merge
        ]

        def launch(addresses: Addresses, stream: Any) -> None:
            members = template.copy()
            for index, slot, start in pointers:
                members[index] = addresses[slot] + start
            for index, number in numbers:
                members[index] = number.evaluate(addresses[numbers_slot])
            for run in runs:
                run(members, stream)

        return launch


def _thread_blocks(config: Config, rows: int, cols: int, processors: int) -> int:
    """Choose the number of thread blocks that a row template is launched with on a GPU of so many multiprocessors."""
    if config.template == "row_lanes":
        blocks = -(-rows // (config.threads // config.group))
    elif config.template == "elementwise":
        blocks = -(-rows * (cols // config.vec) // config.threads)
    elif config.template == "row_persistent":
        blocks = min(rows, processors * config.blocks)
    else:
        blocks = rows
    return max(1, min(blocks, _MAX_BLOCKS))
