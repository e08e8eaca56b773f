"""Launches of products with their epilogues: 16-bit ones, which read operands through tensor maps, and split ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cuda import split
from ..cuda.configure import Access, fitting_vec
from ..cuda.fused_gemm import MERGE_THREADS, THREADS, GemmShape, emit_gemm, program_of, shape_of
from ..cuda.kernel import Kernel
from ..cuda.launch import launcher
from ..cuda.runtime import Runtime
from ..cuda.split_launch import SplitProduct
from ..cuda.tensor_map import ALIGNMENT, WORDS, MatrixBoxes
from ..ir.graph import Node
from ..plan.schedule import Step, base_of, state_bytes, strip_transposes
from .kernel_launch import Addresses, KernelArguments, Launch, LaunchSpec, Place

_ITEMSIZE = 2
_MOST_MAPS = 64  # of an operand, by address: callers use few addresses again and again
_STRUCT_MEMBERS = 16  # tensor maps are aligned, so that a struct's members are a multiple of this
_MERGING_WARPS = MERGE_THREADS // 32


class _MappedOperand:
    """An operand read through a tensor map, which is cached by address; one that is not aligned is copied first."""

    def __init__(self, operand: Node, place: Place, dtype: str, box: tuple[int, int], runtime: Runtime):
        matrix, transposed = strip_transposes(operand)
        count, length = matrix.shape
        stride = place.col_stride if transposed else place.row_stride
        self._slot, self._start = place.slot, place.offset * _ITEMSIZE
        self._shape, self._strides = (count, length), (stride, 1)
        # One line has no stride: any multiple that covers it will do.
        nbytes = stride * _ITEMSIZE if count > 1 else -(-length * _ITEMSIZE // ALIGNMENT) * ALIGNMENT
        self._matrix = MatrixBoxes(count, length, nbytes, box, dtype)
        self._encode, self._runtime, self._dtype = runtime.tensor_map, runtime, runtime.dtype(dtype)
        self._maps: dict[int, tuple[int, ...]] = {}

    def map(self, addresses: Addresses) -> tuple[tuple[int, ...], Any]:
        """Return the words of the tensor map, and the memory of the copy, if one was made, to hold until the launch."""
        address, copy = addresses[self._slot] + self._start, None
        if address % ALIGNMENT:
            copy = self._copy_aligned(address)
            address = copy.ptr
        words = self._maps.get(address)
        if words is None:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            words = self._maps[address] = self._encode(self._matrix, address)
        return words, copy

    def _copy_aligned(self, address: int) -> Any:
        """Copy an operand whose address is no multiple of 16 bytes to aligned memory."""
        runtime, stride = self._runtime, self._matrix.stride // _ITEMSIZE
        memory = runtime.workspace(self._matrix.lines * self._matrix.stride)
        source = runtime.view(address, self._shape, self._dtype, self._strides)
        runtime.copy(runtime.view(memory.ptr, self._shape, self._dtype, (stride, 1)), source)
        return memory


class ProductLaunch:
    """The launches of a product's step: the kernel of the product, and one that merges the states of reductions.

    Parameters
    ----------
    step : Step
    storage : dict
        The dtype in which each value in memory is stored.
    place : callable
        Returns the `Place` of a value.
    numbers : int
        Slot of the float arguments; -1 if there are none.
    processors : int
        Multiprocessors of the GPU.
    """

    def __init__(
        self, step: Step, storage: dict[Node, str], place: Callable[[Node], Place], numbers: int, processors: int
    ):
        self._step, self._place, self._numbers, self._processors = step, place, numbers, processors
        self._dtype = storage[base_of(step.product.inputs[0])]
        self._program = program_of(step, storage)
        self._arguments = KernelArguments(self._program, place)
        self._widest = min(2, fitting_vec(self._program, self._arguments.row_stride_bits))
        self._shape = self._shape_for(self._widest)
        self._shares = -(-step.domain[1] // self._shape.tiles.columns)
        self._kernels = emit_gemm(self._program, self._shape)

    def _shape_for(self, vec: int) -> GemmShape:
        """Return the template parameters for accesses of `vec` elements."""
        return shape_of(self._step, self._program, self._processors, vec)

    def spec(self) -> LaunchSpec:
        """Return the kernels, the workspace and the binding of the launch."""
        return LaunchSpec(self._bind, self._kernels, state_bytes(self._step, self._processors))

    def _bind(self, runtime: Runtime, states: int) -> Launch:
        """Load the kernels; `states` is the slot of the workspace, where tiles leave the states of reductions."""

        def load(access: Access) -> Launch:
            if access.vec == self._widest:
                return self._load(runtime, states, self._shape, self._kernels)
            shape = self._shape_for(access.vec)
            return self._load(runtime, states, shape, emit_gemm(self._program, shape))

        return self._arguments.launch_by_alignment(Access(self._widest), load)

    def _load(self, runtime: Runtime, states: int, shape: GemmShape, kernels: tuple[Kernel, ...]) -> Launch:
        """Load the kernels of one variant; they are launched one after the other with the same struct."""
        step, arguments = self._step, self._arguments
        first, second = (
            _MappedOperand(operand, self._place(operand), self._dtype, box, runtime)
            for operand, box in zip(step.product.inputs, shape.boxes, strict=True)
        )
        # The struct: two tensor maps, depth, the epilogue's arguments, rows, columns, address of the states, shares.
        # The template begins at the depth, so that the epilogue's arguments follow at index 1.
        depth = step.product.inputs[0].shape[1]
        template = [depth, *arguments.members, *step.domain, 0, self._shares]
        pad = [0] * (-(2 * WORDS + len(template)) % _STRUCT_MEMBERS)
        template += pad
        pointers = [(1 + index, slot, start) for index, slot, start in arguments.pointers]
        if states >= 0:
            pointers.append((1 + len(arguments.members) + 2, states, 0))
        numbers = [(1 + index, number) for index, number in arguments.numbers]
        form = f"{2 * WORDS}Qq{arguments.format}qqQq{'q' * len(pad)}"
        numbers_slot = self._numbers
        blocks = shape.tiles.count_blocks(step.domain, self._processors)
        merging = min(-(-step.domain[0] // _MERGING_WARPS), (1 << 31) - 1)
        grids = [((blocks, 1, 1), (THREADS, 1, 1)), ((merging, 1, 1), (MERGE_THREADS, 1, 1))]
        runs = [
            launcher(runtime.function(kernel), *grid, form, kernel.shared)
            for kernel, grid in zip(kernels, grids, strict=False)
        ]

        def launch(addresses: Addresses, stream: Any) -> None:
            (a, copy_of_a), (b, copy_of_b) = first.map(addresses), second.map(addresses)
            members = template.copy()
            for index, slot, start in pointers:
                members[index] = addresses[slot] + start
            for index, number in numbers:
                members[index] = number.evaluate(addresses[numbers_slot])
            members[:0] = (*a, *b)
            for run in runs:
                run(members, stream)
            del copy_of_a, copy_of_b  # the next owner's work on this stream comes after ours

        return launch


class SplitProductLaunch:
    """The launches of a product from hi/lo splits with its epilogue, and of its repair.

    The parameters are those of `ProductLaunch`.
    """

    def __init__(
        self, step: Step, storage: dict[Node, str], place: Callable[[Node], Place], numbers: int, processors: int
    ):
        node = step.product
        self._numbers, self._processors = numbers, processors
        self._places = [place(i) for i in node.inputs]
        self._shape = *node.shape, node.inputs[2].shape[1]
        self._program = split.program_of(step, storage)
        self._arguments = KernelArguments(self._program, place)
        self._widest = min(2, fitting_vec(self._program, self._arguments.row_stride_bits))
        self._product = self._product_for(self._widest)

    def _product_for(self, vec: int) -> SplitProduct:
        """Return the launches whose epilogue accesses `vec` elements at a time."""
        left, right = ((p.row_stride, p.col_stride) for p in self._places[2:4])
        return SplitProduct(self._shape, left, right, self._processors, self._program, vec)

    def spec(self) -> LaunchSpec:
        """Return the kernels, the workspace and the binding of the launch."""
        return LaunchSpec(self._bind, self._product.kernels, self._product.workspace)

    def _bind(self, runtime: Runtime, workspace: int) -> Launch:
        """Load the kernels; `workspace` is the slot of the workspace."""

        def load(access: Access) -> Launch:
            is_widest = access.vec == self._widest
            return self._load(runtime, workspace, self._product if is_widest else self._product_for(access.vec))

        return self._arguments.launch_by_alignment(Access(self._widest), load)

    def _load(self, runtime: Runtime, workspace: int, product: SplitProduct) -> Launch:
        arguments, numbers_slot = self._arguments, self._numbers
        template, pointers, numbers = arguments.members, arguments.pointers, arguments.numbers
        a, b, x, y = (p.slot for p in self._places)
        run = product.load(runtime, arguments.format)

        def launch(at: Addresses, stream: Any) -> None:
            members = template.copy()
            for index, slot, start in pointers:
                members[index] = at[slot] + start
            for index, number in numbers:
                members[index] = number.evaluate(at[numbers_slot])
            run((at[a], at[b]), (at[x], at[y]), at[workspace], members, stream)

        return launch
