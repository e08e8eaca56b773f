"""Launches of the steps of a plan, specified from the places of values before any kernel is compiled.

In the functions that launch, `at` holds the addresses by slot, and one-letter names are slots.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from .. import dtypes
from ..cuda.gemm import Operand, batched_operands
from ..cuda.runtime import Runtime
from ..cuda.scan import Scan
from ..cuda.split_launch import RoundedProduct, Split
from ..cuda.structs import Addresses, Launch, StructLaunch
from ..ir.graph import Node
from ..plan.plan import Plan
from ..plan.schedule import Step, base_of, contiguous_strides
from .kernel_launch import KernelLaunch, LaunchSpec, Place
from .library_launch import Held, LibraryLaunch
from .product_launch import ProductLaunch, SplitProductLaunch

ShapeAndStrides = tuple[tuple[int, ...], tuple[int, ...]]


class LaunchSpecs:
    """Specifies the launches of a plan's steps.

    Parameters
    ----------
    plan : Plan
    runtime : Runtime
    place : callable
        Returns the `Place` of a value.
    strides : dict
        Shapes and strides, in elements, of arguments of more than two dimensions.
    held : dict
        The values that calls hold as arrays, for library steps.
    in_place : collection of Step
        Library steps that may write to their first operands.
    flag : int
        Slot of the address of the flag that conditional launches read; -1 if launches are unconditional.
    numbers : int
        Slot of the numbers of a call; -1 if there are none.
    """

    def __init__(
        self,
        plan: Plan,
        runtime: Runtime,
        place: Callable[[Node], Place],
        strides: dict[Node, ShapeAndStrides],
        held: dict[Node, Held],
        in_place: Collection[Step],
        flag: int,
        numbers: int,
    ):
        self._storage, self._precision = plan.scheduled.storage, plan.precision
        self._runtime, self._place, self._strides = runtime, place, strides
        self._held, self._in_place = held, in_place
        self._flag, self._numbers = flag, numbers

    def of(self, step: Step) -> list[LaunchSpec]:
        """List the launches of a step in their order."""
        storage = self._storage
        if step.by_library:
            return [self._biased_gemm_spec(step)]
        if step.kind == "Gemm" and (step.epilogue is not None or step.product.parts == 2):
            splits = [self._split_spec(n) for n in step.nodes if n.op == "split"]
            launch = SplitProductLaunch if step.product.parts == 2 else ProductLaunch
            return [*splits, self._with_epilogue(launch, step)]
        if step.kind in ("Gemm", "Split"):
            return [self._product_spec(step, node) for node in step.nodes]
        if step.kind == "Copy":
            (node,) = step.outputs
            return [self._put_spec(node) if node.op == "put" else self._copy_spec(node)]
        if step.kind == "Scan":
            return [self._scan_spec(node) for node in step.outputs]
        if step.kind == "Library":
            in_place = step in self._in_place
            return [LibraryLaunch(step, storage, self._place, self._held, in_place, self._numbers).spec()]
        device = self._runtime.device
        clusters = device is not None and device.has_warpgroups
        return [KernelLaunch(step, storage, self._place, self._flag, self._numbers, clusters).spec()]

    def _with_epilogue(self, launch: type[ProductLaunch] | type[SplitProductLaunch], step: Step) -> LaunchSpec:
        """Return the launch of a product by our kernels, with its epilogue."""
        return launch(step, self._storage, self._place, self._numbers, self._runtime.processors).spec()

    def _product_spec(self, step: Step, node: Node) -> LaunchSpec:
        """Return the launch of a product, or of the split of an operand, in a Gemm or Split step."""
        if node.op == "split":
            return self._split_spec(node)
        if node.op != "split_matmul":
            return self._gemm_spec(node)
        factors = [n for n in step.outputs if n.op == "factor" and n.inputs[0] is node]
        return self._rounded_product_spec(node, factors)

    def _gemm_spec(self, node: Node) -> LaunchSpec:
        """Return the launch of a product by cuBLAS."""
        a, b = node.inputs[:2]
        storage, precision, accumulate = self._storage, self._precision, node.op == "accumulate"
        left, right, target = self._place(a), self._place(b), self._place(node)
        x, y, z = left.slot, right.slot, target.slot
        if node.batches is None:
            first, second = (Operand(*i.shape, p.row_stride, p.col_stride) for i, p in ((a, left), (b, right)))
            batch_strides = None
        else:
            first, second, batch_strides = batched_operands(node.batches)

        def bind(runtime: Runtime, _: int) -> Launch:
            dtypes_of = storage[base_of(a)], storage[node]
            product = runtime.product(first, second, *dtypes_of, precision, batch_strides, accumulate)
            return lambda at, stream: product(at[x], at[y], at[z], stream)

        return LaunchSpec(bind)

    def _biased_gemm_spec(self, step: Step) -> LaunchSpec:
        """Return the launch of a 16-bit product by cuBLASLt, which adds a bias."""
        product, (result,) = step.product, step.outputs
        a, b = product.inputs
        (bias,) = (i for i in result.inputs if i is not product)
        left, right, vector, target = map(self._place, (a, b, bias, result))
        x, y, v, z = left.slot, right.slot, vector.slot, target.slot
        first, second = (Operand(*i.shape, p.row_stride, p.col_stride) for i, p in ((a, left), (b, right)))

        def bind(runtime: Runtime, _: int) -> Launch:
            multiply = runtime.biased_product(first, second, product.dtype)
            return lambda at, stream: multiply(at[x], at[y], at[v], at[z], stream)

        return LaunchSpec(bind)

    def _split_spec(self, node: Node) -> LaunchSpec:
        """Return the launch that splits an operand of a product."""
        (matrix,) = node.inputs
        source, target = self._place(matrix), self._place(node)
        x, y, flag = source.slot, target.slot, self._flag
        strides = source.row_stride, source.col_stride
        split = Split(*matrix.shape, strides, node.parts, flag >= 0, self._runtime.processors)

        def bind(runtime: Runtime, _: int) -> StructLaunch:
            return split.launch(runtime, x, y, flag)

        return LaunchSpec(bind, (split.kernel,))

    def _scan_spec(self, node: Node) -> LaunchSpec:
        """Return the launch of a scan."""
        source, z = self._place(node.inputs[0]), self._place(node).slot
        x, start = source.slot, source.offset * dtypes.ITEMSIZE[node.dtype]
        scan = Scan(node.op, node.shape, (source.row_stride, source.col_stride), node.dtype)

        def bind(runtime: Runtime, _: int) -> StructLaunch:
            return scan.launch(runtime, x, start, z)

        return LaunchSpec(bind, (scan.kernel,))

    def _rounded_product_spec(self, node: Node, factors: Sequence[Node]) -> LaunchSpec:
        """Return the launch of a product from splits in one part, which also writes its factors."""
        places = [self._place(i) for i in (*node.inputs, node)]
        a, b, z = places[0].slot, places[1].slot, places[4].slot
        x, y = (p.pointer("float32") for p in places[2:4])
        by_name = {n.name: self._place(n).slot for n in factors}
        slots = [by_name[name] for name in ("row", "row_rest", "column")]
        left, right = ((p.row_stride, p.col_stride) for p in places[2:4])
        product = RoundedProduct((*node.shape, node.inputs[2].shape[1]), left, right, self._runtime.processors)

        def bind(runtime: Runtime, _: int) -> Launch:
            return product.launch(runtime, (a, b), (x, y), z, slots)

        return LaunchSpec(bind, product.kernels)

    def _copy_spec(self, node: Node) -> LaunchSpec:
        """Return the copy of an argument or of a strided view."""
        x, z = self._place(node.inputs[0]).slot, self._place(node).slot
        shape, strides, offset = self._copied_view(node)
        name = self._storage[node]
        dtype, start = self._runtime.dtype(name), offset * dtypes.ITEMSIZE[name]
        target_strides = contiguous_strides(shape)

        def launch(at: Addresses, stream: Any) -> None:
            view = self._runtime.view
            source = view(at[x] + start, shape, dtype, strides)
            self._runtime.copy(view(at[z], shape, dtype, target_strides), source)

        return LaunchSpec(lambda runtime, _: launch)

    def _put_spec(self, node: Node) -> LaunchSpec:
        """Return the copy of a matrix, and the copy of a value to a strided view of that."""
        whole_slot, value_slot = (self._place(i).slot for i in node.inputs)
        result_slot = self._place(node).slot
        name = self._storage[node]
        dtype, start = self._runtime.dtype(name), node.offset * dtypes.ITEMSIZE[name]
        lengths, strides = zip(*node.dims, strict=True)
        whole_strides, value_strides = contiguous_strides(node.shape), contiguous_strides(lengths)

        def launch(at: Addresses, stream: Any) -> None:
            view, copy = self._runtime.view, self._runtime.copy
            whole, result = (view(at[slot], node.shape, dtype, whole_strides) for slot in (whole_slot, result_slot))
            copy(result, whole)
            copy(
                view(at[result_slot] + start, lengths, dtype, strides),
                view(at[value_slot], lengths, dtype, value_strides),
            )

        return LaunchSpec(lambda runtime, _: launch)

    def _copied_view(self, node: Node) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Return the shape, strides and offset, in elements, of the view that a copy reads."""
        (value,) = node.inputs
        if node.op == "strided":
            return tuple(n for n, _ in node.dims), tuple(s for _, s in node.dims), node.offset
        if value in self._strides:
            return *self._strides[value], 0
        place = self._place(value)
        return node.shape, (place.row_stride, place.col_stride), place.offset

    def view(self, node: Node, place: Place, addresses: Addresses) -> Any:
        """Return the memory of a value at `place` as an array."""
        name = self._storage[base_of(node)]
        start = addresses[place.slot] + place.offset * dtypes.ITEMSIZE[name]
        return self._runtime.view(start, node.shape, self._runtime.dtype(name), (place.row_stride, place.col_stride))
