"""Run plans with NumPy: the engine without a GPU, and the reference for the CUDA engine.

Each step is evaluated node by node with the operator table's NumPy semantics, in blocks of rows (or of columns) that
fit in the processor's caches. 16-bit floats are widened to float32 on reading and rounded once on writing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import dtypes
from ..ir import graph as g
from ..ir.batches import Batches
from ..ir.graph import Node
from ..ir.operators import POINTWISE, REDUCTIONS
from ..plan.plan import Plan
from ..plan.schedule import Step, base_of, dead_after, view_chain
from .straight_line import StraightLine, straight_line

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 18  # elements per block: a few float32 temporaries of it fit in a second-level cache
_PARTIAL = 128  # rows per partial sum of a column, to bound rounding errors


class NumpyExecutable:
    """A plan loaded for NumPy arrays; those given are not read, as shapes and dtypes are the plan's."""

    def __init__(self, plan: Plan, arrays: Sequence[Array]):
        self.plan = plan
        self._dead = dead_after(plan.steps, plan.graph.roots)
        nodes = (node for step in plan.steps for node in step.nodes)
        self._numbers = [n for n in g.topological(nodes) if n.number is not None]
        in_memory = set(plan.graph.inputs)
        self._programs: list[StraightLine | _LibraryProgram | None] = []  # of each step; None for those in blocks
        for step in plan.steps:
            self._programs.append(_program(step, frozenset(in_memory), plan.scheduled.storage))
            in_memory.update(step.outputs)
        self._results = [(output, output.axes.in_order) for output in plan.outputs]

    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Allocate an uninitialised array."""
        return np.empty(shape, dtypes.to_numpy(dtype))

    def __call__(
        self, arrays: Sequence[Array], outs: Sequence[Array | None] | None = None, numbers: Sequence[float] = ()
    ) -> list[Array]:
        """Run the plan on arguments and prepacked values.

        `outs` holds, for each result, an array to write it to, or None to allocate one; None allocates all. `numbers`
        are the numbers of the call. Arguments that the function changes are written last.
        """
        plan = self.plan
        memory: dict[Node, Array] = {n: _matrix(a) for n, a in zip(plan.graph.inputs, arrays, strict=True)}
        for node in self._numbers:
            assert node.number is not None
            memory[node] = np.asarray(node.number.evaluate(numbers))
        with np.errstate(all="ignore"):
            for step, program, dead in zip(plan.steps, self._programs, self._dead, strict=True):
                if program is None:
                    _run_step(step, memory, plan.scheduled.storage)
                elif isinstance(program, _LibraryProgram):
                    program.run(memory, numbers)
                else:
                    program.run(memory)
                for node in dead:
                    del memory[node]
        results = []
        outs = [None] * len(self._results) if outs is None else outs
        for (output, in_order), out in zip(self._results, outs, strict=True):
            value = _view_of(output.node, memory)
            value = value.reshape(output.shape) if in_order else output.with_user_axes(value)
            if out is None:
                results.append(value)
            else:
                out[...] = value
                results.append(out)
        for arg, node in plan.graph.effects:
            if node.op == "accumulate":
                continue  # written in place
            arrays[arg][...] = _view_of(node, memory).reshape(arrays[arg].shape)
        return results


def _program(step: Step, in_memory: frozenset[Node], storage: dict[Node, str]) -> StraightLine | _LibraryProgram | None:
    """Return the program of a library step, or of a step that is a single block; None for others."""
    if step.kind == "Library":
        return _LibraryProgram(step, storage)
    if step.kind in ("Gemm", "Copy", "Split", "Scan") or not 0 < step.domain[0] * step.domain[1] <= BLOCK:
        return None
    along = 0 if step.kind == "ColumnStats" else 1
    if list(_blocks(step, along)) != [(0, step.domain[1 - along])]:
        return None
    return straight_line(step, in_memory, storage, _view_of, _reduce)


def _matrix(array: Array) -> Array:
    """View an array as rows x columns; a vector is one row. Rows without one stride are copied (see `Layout`)."""
    if array.ndim == 2:
        return array
    shape = (1, 1, *array.shape)
    return array.reshape(math.prod(shape[:-1]), shape[-1])


def _view_of(node: Node, memory: dict[Node, Array]) -> Array:
    """Return a value in memory, or a view of one."""
    value = memory[base_of(node)]
    for view in view_chain(node):
        if view.op == "transpose":
            value = value.T
        elif view.op == "slice":
            ((row, down), (col, across)), (rows, cols) = view.dims, view.shape
            steps = (down * value.strides[0], across * value.strides[1])
            value = np.lib.stride_tricks.as_strided(value[row:, col:], (rows, cols), steps)
        elif view.op == "swap":
            value = value[:, np.arange(view.shape[1]) ^ 1]
        elif view.op == "repeat":
            assert view.repeats is not None
            if not view.repeats.in_memory:  # else the rows of the argument are in their order, wherever they are
                (block, times, inner), numbers = view.repeats[:3], np.arange(view.shape[0])
                value = value[numbers // block * inner + numbers // times % inner]
        else:
            value = value.reshape(view.shape)
    return value


def _strided_view(node: Node, array: Array) -> Array:
    """Return the view of a C-contiguous array that a `strided` node copies, or a `put` node writes to."""
    strides = [stride * array.itemsize for _, stride in node.dims]
    return np.lib.stride_tricks.as_strided(array.reshape(-1)[node.offset :], [n for n, _ in node.dims], strides)


def _batched_product(batches: Batches, *operands: Array) -> Array:
    """Multiply batches of matrices, which are stacked by rows in the operands and in the result."""
    stacks = [x.reshape(batches.stored_shape(k)) for k, x in enumerate(operands)]
    left, right = (x.swapaxes(1, 2) if t else x for x, t in zip(stacks, batches.transposed, strict=True))
    return np.matmul(left, right).reshape(batches.count * batches.rows, batches.cols)


def _widen(array: Array) -> Array:
    """Convert an array to the dtype in which its values are computed."""
    dtype = dtypes.to_numpy(dtypes.compute_dtype(dtypes.name_of(array.dtype)))
    return array if array.dtype == dtype else array.astype(dtype)


def _run_step(step: Step, memory: dict[Node, Array], storage: dict[Node, str]) -> None:
    """Compute the outputs of a step from what is in memory."""
    if step.kind == "Gemm":
        _run_product(step, memory, storage)
    elif step.kind == "Copy":
        (node,) = step.outputs
        source = _view_of(node.inputs[0], memory)
        if node.op == "put":
            memory[node] = np.array(source, order="C")
            target = _strided_view(node, memory[node])
            target[...] = _view_of(node.inputs[1], memory).reshape(target.shape)
        elif node.op == "concat":
            memory[node] = np.concatenate([_view_of(i, memory) for i in node.inputs], axis=1)
        elif node.op == "strided":
            memory[node] = _strided_view(node, source).copy().reshape(node.shape)
        else:
            memory[node] = np.array(source, order="C")
    elif step.kind == "Scan":
        (node,) = step.outputs
        memory[node] = getattr(np, node.op)(_view_of(node.inputs[0], memory), axis=1)
    else:
        for node in step.outputs:
            memory[node] = np.empty(node.shape, dtypes.to_numpy(storage[node]))
        along = 0 if step.kind == "ColumnStats" else 1
        for start, stop in _blocks(step, along):
            _Block(step, memory, along, start, stop).run()


def _run_product(step: Step, memory: dict[Node, Array], storage: dict[Node, str]) -> None:
    """Compute a product, from its operands rather than their splits, and then its epilogue."""
    node = step.product
    a, b = (_widen(_view_of(i, memory)) for i in node.inputs[:2])
    if node.op == "accumulate":
        memory[node] = _accumulate(memory[node.inputs[2]], a, b)
        return
    product = np.matmul(a, b) if node.batches is None else _batched_product(node.batches, a, b)
    memory[node] = product.astype(dtypes.to_numpy(storage[node]), copy=False)
    if step.epilogue is not None:
        others = tuple(n for n in step.epilogue.outputs if n is not node)
        _run_step(replace(step.epilogue, outputs=others), memory, storage)
        if node not in step.outputs:
            del memory[node]


def _accumulate(total: Array, a: Array, b: Array) -> Array:
    """Add a product to a matrix in place, by blocks of rows, without a second matrix of that size."""
    rows = max(1, BLOCK // max(1, total.shape[1]))
    for start in range(0, total.shape[0], rows):
        total[start : start + rows] += np.matmul(a[start : start + rows], b)
    return total


class _LibraryProgram:
    """A library step: a call of NumPy's own function, whose results are copied, as they may be views of operands."""

    def __init__(self, step: Step, storage: dict[Node, str]):
        call, operands = step.nodes[0].call, step.nodes[0].inputs
        assert call is not None
        self._call = call.prepare(call.resolve_in(np), needed=[n.result for n in step.outputs])
        self._operands, self._numbers = list(zip(operands, call.shapes, strict=True)), call.numbers
        self._stores = [(n, n.result, dtypes.to_numpy(storage[n])) for n in step.outputs]

    def run(self, memory: dict[Node, Array], numbers: Sequence[float]) -> None:
        """Compute the step's outputs from what is in memory."""
        operands = [_view_of(node, memory).reshape(shape) for node, shape in self._operands]
        results = self._call([*operands, *(number.evaluate(numbers) for number in self._numbers)])
        for node, number, dtype in self._stores:
            memory[node] = np.array(results[number], dtype, order="C").reshape(node.shape)


def _blocks(step: Step, along: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each block of whole rows (`along` = 1) or of whole columns (`along` = 0)."""
    length, other = step.domain[1 - along], max(step.domain[along], 1)
    size = max(1, BLOCK // other)
    if along == 0:
        size = max(size, 128)  # in a row of memory, a few cache lines at least
        # Reductions of what is in memory make no temporary arrays, which blocks are there to keep small.
        if all(n.reduction and not n.inputs[0].pointwise for n in step.nodes if n.reduction):
            size = max(length, 1)
    for start in range(0, length, size):
        yield start, min(start + size, length)
    if length == 0 and any(n.size for n in step.outputs):
        yield 0, 0


class _Block:
    """Evaluation of a step on a block of its rows (`along` = 1) or of its columns (`along` = 0)."""

    def __init__(self, step: Step, memory: dict[Node, Array], along: int, start: int, stop: int):
        self.step, self.memory, self.along = step, memory, along
        self.start, self.stop = start, stop
        self.values: dict[Node, Array] = {}

    @property
    def length(self) -> int:
        """Number of rows, or columns, of the block."""
        return self.stop - self.start

    def run(self) -> None:
        """Evaluate the step's nodes in order, and write its outputs to memory."""
        # Uses still to come; what exact forms of guards may read counts one more, so that it is never freed.
        read = {*self.step.inputs, *self.step.repair_inputs}
        exact = (n.inputs[1] for n in self.step.nodes if n.op == "guard")
        uses = dict.fromkeys(g.topological(exact, lambda n: () if n in read else n.inputs), 1)
        for node in self.step.nodes:
            for i in g.eager_inputs(node):
                uses[i] = uses.get(i, 0) + 1
        for node in self.step.nodes:
            value = self.evaluate(node)
            self.values[node] = value
            if node in self.step.outputs:
                target = self.cut(self.memory[node], node)
                target[...] = value.astype(target.dtype, copy=False)
            for i in g.eager_inputs(node):
                uses[i] -= 1
                if not uses[i]:
                    # Free temporaries after their last use: the next one takes the memory.
                    self.values.pop(i, None)

    def cut(self, array: Array, node: Node) -> Array:
        """Return the part of a value in memory that this block works on: all of a value that is broadcast to it."""
        blocked = 1 - self.along
        if node.shape[blocked] == 1 or self.step.domain[blocked] != node.shape[blocked]:
            return array
        return array[self.start : self.stop] if blocked == 0 else array[:, self.start : self.stop]

    def value(self, node: Node) -> Array:
        """Return a value, evaluating first what it needs and is missing."""
        if node not in self.values:
            for missing in g.topological([node], self.missing_operands):
                if missing not in self.values and missing.op != "const":
                    self.values[missing] = self.missing_value(missing)
        return self.values[node]

    def stored(self, node: Node) -> bool:
        """Whether a value is in memory; the step's own results have memory too, but perhaps no values yet."""
        return base_of(node) in self.memory and node not in self.step.node_set

    def missing_operands(self, node: Node) -> tuple[Node, ...]:
        """Return the operands to evaluate before a value that is missing."""
        if node in self.values or node.op == "matmul" or self.stored(node):
            return ()
        return g.eager_inputs(node)

    def missing_value(self, node: Node) -> Array:
        """Read or evaluate a value whose operands have been evaluated."""
        if self.stored(node):
            return _widen(self.cut(_view_of(node, self.memory), node))
        return self.product(*node.inputs) if node.op == "matmul" else self.evaluate(node)

    def product(self, a: Node, b: Node) -> Array:
        """Compute this block's part of a product that only a guard reads; the other operand is evaluated whole."""

        def whole(node: Node) -> Array:
            step = replace(self.step, domain=node.shape)
            return _Block(step, self.memory, 1, 0, node.shape[0]).value(node)

        return np.matmul(self.value(a), whole(b)) if self.along else np.matmul(whole(a), self.value(b))

    def operand(self, node: Node, dtype: str) -> Any:
        """Return a value in the dtype in which values of `dtype` are computed."""
        if node.op == "const":
            value = node.value if node.number is None else self.memory[node]
            return np.asarray(value, dtypes.to_numpy(dtypes.compute_dtype(dtype)))
        return self.value(node).astype(dtypes.to_numpy(dtypes.compute_dtype(dtype)), copy=False)

    def evaluate(self, node: Node) -> Array:
        """Apply a node's operator to its operands."""
        if node.op in g.PASS_THROUGH:
            return self.pass_through(node)
        if node.op == "guard":
            return self.guard(node)
        if node.op == "positions":
            return self.cut(np.arange(node.size, dtype=dtypes.to_numpy(node.dtype)).reshape(node.shape), node)
        if node.reduction:
            x = self.value(node.inputs[0]) if node.inputs[0].op != "const" else self.operand(node.inputs[0], node.dtype)
            return _reduce(node, x)
        operator = POINTWISE[node.op]
        values = map(self.operand, node.inputs, g.operand_dtypes(node))
        return np.asarray(operator.numpy(*values))

    def pass_through(self, node: Node) -> Array:
        """Evaluate a cast, rounding to 16 bits where it says so, or a broadcast."""
        value = self.operand(node.inputs[0], node.inputs[0].dtype)
        if dtypes.compute_dtype(node.dtype) != node.dtype and node.inputs[0].dtype != node.dtype:
            value = value.astype(dtypes.to_numpy(node.dtype))
        value = value.astype(dtypes.to_numpy(dtypes.compute_dtype(node.dtype)), copy=False)
        shape = list(node.shape)
        blocked = 1 - self.along
        if node.shape[blocked] == self.step.domain[blocked] != 1:
            shape[blocked] = self.length
        return np.broadcast_to(value, shape)

    def guard(self, node: Node) -> Array:
        """Evaluate the fast form, and the exact form for the elements or row sums where the fast one is not finite."""
        fast, exact = node.inputs
        value = self.value(fast)
        bad = ~np.isfinite(value)
        if not bad.any():
            return value
        if exact.reduction:
            rows = np.flatnonzero(bad[:, 0])
            repaired = value.copy()
            repaired[rows, 0] = self.take(rows).value(exact)[:, 0]
            return repaired
        return np.where(bad, self.uncomputed().value(exact), value)

    def uncomputed(self) -> _Block:
        """Return a block of the same rows or columns without computed values."""
        return _Block(self.step, self.memory, self.along, self.start, self.stop)

    def take(self, rows: Array) -> _RowSubset:
        """Return a block of some of this one's rows, given by index."""
        return _RowSubset(self, rows)


class _RowSubset(_Block):
    """Evaluation of a step on some rows of a block, for the exact forms of guarded row sums."""

    def __init__(self, block: _Block, rows: Array):
        super().__init__(block.step, block.memory, block.along, block.start, block.stop)
        self.rows = rows

    @property
    def length(self) -> int:
        return len(self.rows)

    def uncomputed(self) -> _Block:
        return _RowSubset(self, self.rows)

    def take(self, rows: Array) -> _RowSubset:
        return _RowSubset(self, self.rows[rows])

    def cut(self, array: Array, node: Node) -> Array:
        whole = array[self.start : self.stop] if array.shape[0] == self.step.domain[0] != 1 else array
        return whole[self.rows] if whole.shape[0] == self.stop - self.start and node.shape[0] != 1 else whole


def _reduce(node: Node, x: Array) -> Array:
    """Reduce along the node's axis; long sums down the columns are sums of partial sums."""
    function: Callable[[Array, int], Array] = REDUCTIONS[node.op].numpy
    if node.op == "sum" and node.axis == 0 and x.shape[0] > 2 * _PARTIAL:
        starts = np.arange(0, x.shape[0], _PARTIAL)
        x = np.stack([x[s : s + _PARTIAL].sum(axis=0) for s in starts])
        while x.shape[0] > 2:
            half = x.shape[0] // 2
            x = np.concatenate([x[:half] + x[half : 2 * half], x[2 * half :]])
    return np.asarray(function(x, node.axis))
