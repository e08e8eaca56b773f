"""Launches of products with their epilogues: of 16-bit operands or splits in one part, and of splits in two."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from typing import Any

from .. import dtypes
from ..cuda import split
from ..cuda.config import Access, fitting_vec
from ..cuda.fused_gemm import MERGE_THREADS, THREADS, GemmShape, emit_gemm, program_of, shape_of, widest_access
from ..cuda.kernel import Kernel
from ..cuda.runtime import Runtime
from ..cuda.split import padded
from ..cuda.split_launch import SplitProduct, operand_members
from ..cuda.staged_results import PANEL_ROWS, results_of
from ..cuda.structs import (
    Addresses,
    KernelCall,
    Struct,
    StructLaunch,
    TensorMap,
    integers,
    pointer,
    tensor_map,
    with_padding,
)
from ..cuda.tensor_map import ALIGNMENT, WORDS, MatrixBoxes
from ..ir.graph import Node
from ..ir.products import strip_transposes
from ..plan.schedule import Step, base_of, depth_of, state_bytes
from .kernel_launch import KernelArguments, LaunchSpec, Place

_ITEMSIZE = 2
_MOST_MAPS = 64  # of a matrix, by address: callers use few addresses again and again
_MERGING_WARPS = MERGE_THREADS // 32


class _Mapped(ABC):
    """A matrix that kernels access through a tensor map, which is cached by address.

    `start` is the first byte of the matrix behind the address in a slot.
    """

    def __init__(self, slot: int, start: int, matrix: MatrixBoxes, runtime: Runtime):
        self._slot, self._start, self._matrix = slot, start, matrix
        self._encode = runtime.tensor_map
        self._maps: dict[int, array[int]] = {}

    @property
    def tensor_map(self) -> TensorMap:
        """The tensor map as member of a struct."""
        return TensorMap(self.map, self._slot, self._start, self._matrix)

    def map(self, addresses: Addresses) -> tuple[array[int], Any]:
        """Return the words of the tensor map, and what to hold until the launch."""
        address = addresses[self._slot] + self._start
        if address % ALIGNMENT:
            return self._map_unaligned(address)
        return self._words(address), None

    @abstractmethod
    def _map_unaligned(self, address: int) -> tuple[array[int], Any]:
        """Return the same for an address that no tensor map takes."""

    def _words(self, address: int) -> array[int]:
        words = self._maps.get(address)
        if words is None:
            if len(self._maps) >= _MOST_MAPS:
                self._maps.clear()
            words = self._maps[address] = array("Q", self._encode(self._matrix, address))
        return words


class _MappedOperand(_Mapped):
    """An operand; one that is not aligned is copied first.

    `shape` is that of its lines in memory, `stride` that from line to line in elements.
    """

    def __init__(
        self, place: Place, shape: tuple[int, int], stride: int, dtype: str, box: tuple[int, int], runtime: Runtime
    ):
        count, length = shape
        self._shape, self._strides = (count, length), (stride, 1)
        # One line has no stride: any multiple that covers it will do.
        nbytes = stride * _ITEMSIZE if count > 1 else -(-length * _ITEMSIZE // ALIGNMENT) * ALIGNMENT
        self._runtime, self._dtype = runtime, runtime.dtype(dtype)
        super().__init__(place.slot, place.offset * _ITEMSIZE, MatrixBoxes(count, length, nbytes, box), runtime)

    def _map_unaligned(self, address: int) -> tuple[array[int], Any]:
        """Copy the operand to aligned memory."""
        runtime, stride = self._runtime, self._matrix.stride // _ITEMSIZE
        memory = runtime.workspace(self._matrix.lines * self._matrix.stride)
        source = runtime.view(address, self._shape, self._dtype, self._strides)
        runtime.copy(runtime.view(memory.ptr, self._shape, self._dtype, (stride, 1)), source)
        return self._words(memory.ptr), memory


class _MappedResult(_Mapped):
    """A result of a product's epilogue; where it is not aligned, the kernel writes it without the map."""

    def __init__(self, place: Place, shape: tuple[int, int], itemsize: int, panel: int, runtime: Runtime):
        lines, length = shape
        matrix = MatrixBoxes(lines, length, place.row_stride * itemsize, (PANEL_ROWS, panel), itemsize)
        super().__init__(place.slot, place.offset * itemsize, matrix, runtime)

    def _map_unaligned(self, address: int) -> tuple[array[int], Any]:
        return array("Q", [0] * WORDS), None


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
        Slot of the numbers of a call; -1 if there are none.
    processors : int
        Multiprocessors of the GPU.
    """

    def __init__(
        self, step: Step, storage: dict[Node, str], place: Callable[[Node], Place], numbers: int, processors: int
    ):
        self._step, self._place, self._processors = step, place, processors
        self._dtype = storage[base_of(step.product.inputs[0])]
        self._program = program_of(step, storage)
        self._arguments = KernelArguments(self._program, place, numbers, stores_vectors=False)
        self._widest = widest_access(self._program, self._arguments.row_stride_bits)
        self._shape = self._shape_for(self._widest)
        self._shares = -(-step.domain[1] // self._shape.tiles.columns)
        self._kernels = emit_gemm(self._program, self._shape)

    def _shape_for(self, vec: int) -> GemmShape:
        """Return the template parameters for accesses of `vec` elements."""
        strides = [self._place(result.node).row_stride for result in results_of(self._program)]
        return shape_of(self._step, self._program, self._processors, vec, strides)

    def spec(self) -> LaunchSpec:
        """Return the kernels, the workspace and the binding of the launch."""
        return LaunchSpec(self._bind, self._kernels, state_bytes(self._step, self._processors))

    def _bind(self, runtime: Runtime, states: int) -> StructLaunch:
        """Load the kernels; `states` is the slot of the workspace, where tiles leave the states of reductions."""

        def load(access: Access) -> StructLaunch:
            if access.vec == self._widest:
                return self._load(runtime, states, self._shape, self._kernels)
            shape = self._shape_for(access.vec)
            return self._load(runtime, states, shape, emit_gemm(self._program, shape))

        return self._arguments.launch_by_alignment(Access(self._widest), load)

    def _load(self, runtime: Runtime, states: int, shape: GemmShape, kernels: tuple[Kernel, ...]) -> StructLaunch:
        """Load the kernels of one variant; they are launched one after the other with the same struct."""
        step, arguments = self._step, self._arguments
        first, second = (self._operand(number, box, runtime) for number, box in enumerate(shape.boxes))
        struct = tensor_map(first.tensor_map) + tensor_map(second.tensor_map)
        if not shape.shifted:
            struct += self._maps_of_results(shape.panel, runtime)
        struct += integers(depth_of(step.product))
        if step.product.op == "split_matmul":
            struct += self._scales()
        struct += arguments.struct + integers(*step.domain)
        struct += (pointer(states) if states >= 0 else integers(0)) + integers(self._shares)
        blocks = shape.tiles.count_blocks(step.domain, self._processors)
        merging = min(-(-step.domain[0] // _MERGING_WARPS), (1 << 31) - 1)
        grids = [((blocks, 1, 1), (THREADS, 1, 1)), ((merging, 1, 1), (MERGE_THREADS, 1, 1))]
        calls = [
            KernelCall(runtime.function(kernel), *grid, kernel.shared)
            for kernel, grid in zip(kernels, grids, strict=False)
        ]
        return StructLaunch(calls, with_padding(struct))

    def _operand(self, number: int, box: tuple[int, int], runtime: Runtime) -> _MappedOperand:
        """Return one of the operands that the kernel reads."""
        product = self._step.product
        operand = product.inputs[number]
        place = self._place(operand)
        if product.op == "split_matmul":  # rows are padded, and scales follow them
            lines, length = product.inputs[2 + number].shape
            return _MappedOperand(place, (lines, length), padded(length), self._dtype, box, runtime)
        matrix, transposed = strip_transposes(operand)
        stride = place.col_stride if transposed else place.row_stride
        return _MappedOperand(place, matrix.shape, stride, self._dtype, box, runtime)

    def _maps_of_results(self, panel: int, runtime: Runtime) -> Struct:
        """Return the members for the tensor maps of the results, stored in panels of so many columns."""
        struct, shape = Struct(), self._program.domain
        for result in results_of(self._program):
            itemsize = dtypes.ITEMSIZE[result.dtype]
            struct += tensor_map(_MappedResult(self._place(result.node), shape, itemsize, panel, runtime).tensor_map)
        return struct

    def _scales(self) -> Struct:
        """Return the members for the operands of parts, and for the scales of these."""
        node, members = self._step.product, integers()
        for part, operand in zip(node.inputs[:2], node.inputs[2:], strict=True):
            place = self._place(operand)
            pointer_to, strides = place.pointer("float32"), (place.row_stride, place.col_stride)
            members += operand_members(pointer_to, strides, self._place(part).slot, *operand.shape, parts=1)
        return members


class SplitProductLaunch:
    """The launches of a product from hi/lo splits with its epilogue, and of its repair.

    The parameters are those of `ProductLaunch`.
    """

    def __init__(
        self, step: Step, storage: dict[Node, str], place: Callable[[Node], Place], numbers: int, processors: int
    ):
        node = step.product
        self._processors = processors
        self._places = [place(i) for i in node.inputs]
        self._shape = *node.shape, node.inputs[2].shape[1]
        self._program = split.program_of(step, storage)
        self._arguments = KernelArguments(self._program, place, numbers)
        self._widest = min(2, fitting_vec(self._program, self._arguments.row_stride_bits))
        self._product = self._product_for(self._widest)

    def _product_for(self, vec: int) -> SplitProduct:
        """Return the launches whose epilogue accesses `vec` elements at a time."""
        left, right = ((p.row_stride, p.col_stride) for p in self._places[2:4])
        return SplitProduct(self._shape, left, right, self._processors, self._program, vec)

    def spec(self) -> LaunchSpec:
        """Return the kernels, the workspace and the binding of the launch."""
        return LaunchSpec(self._bind, self._product.kernels, self._product.workspace)

    def _bind(self, runtime: Runtime, workspace: int) -> StructLaunch:
        """Load the kernels; `workspace` is the slot of the workspace."""

        def load(access: Access) -> StructLaunch:
            is_widest = access.vec == self._widest
            return self._load(runtime, workspace, self._product if is_widest else self._product_for(access.vec))

        return self._arguments.launch_by_alignment(Access(self._widest), load)

    def _load(self, runtime: Runtime, workspace: int, product: SplitProduct) -> StructLaunch:
        a, b = (p.slot for p in self._places[:2])
        x, y = (p.pointer("float32") for p in self._places[2:4])
        return product.launch(runtime, (a, b), (x, y), workspace, self._arguments.struct)
