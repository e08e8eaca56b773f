"""Run plans on a GPU: allocate from its memory pool, launch on the current stream, never synchronise.

Arrays are the runtime's (`cuda/runtime.py`), which alone knows their library. What does not depend on addresses is
settled when a plan is made ready: launch configurations, argument lists with places for the addresses, where each value
lies in one workspace. A call fills in the addresses and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .. import dtypes
from ..cuda.configure import Config, default_config, fitting_vec
from ..cuda.emit import emit
from ..cuda.gemm import Operand
from ..cuda.kernel import Kernel
from ..cuda.launch import launcher
from ..cuda.program import COLUMN, FULL, Program
from ..cuda.runtime import Runtime
from ..cuda.split_launch import Split, SplitProduct
from ..ir.graph import Node
from ..plan.plan import Output, Plan
from ..plan.schedule import Step, resolve

_ALIGNMENT = 256  # of values in the workspace, in bytes
_MOST_BLOCKS = (1 << 31) - 1

Addresses = list[int]
Launch = Callable[[Addresses, Any], None]  # with the stream


@dataclass(frozen=True)
class Place:
    """Where a value lies: the number of its address, and its strides in elements."""

    slot: int
    row_stride: int
    col_stride: int

    @property
    def transposed(self) -> Place:
        return Place(self.slot, self.col_stride, self.row_stride)


@dataclass(frozen=True)
class _Form:
    """A result as a call allocates it."""

    output: Output
    new: Callable[[], Any]
    direct: bool


class CudaExecutable:
    """A plan made ready for arrays of fixed shapes, dtypes and strides on one device.

    Parameters
    ----------
    plan : Plan
    arrays : sequence of arrays
        Like those it will be called with: arguments, then prepared values.
    runtime : Runtime
        The device.
    conditional : bool
        Run by `run_if_changed` alone, of a plan with `conditional`.

    Raises
    ------
    EngineError
        A kernel cannot be compiled or loaded.
    """

    def __init__(self, plan: Plan, arrays: Sequence[Any], runtime: Runtime, conditional: bool = False):
        self.plan = plan
        self.runtime = runtime
        self.conditional = conditional
        self._places: dict[Node, Place] = {}
        self._slots = 0
        self._temporaries: list[tuple[int, int]] = []  # (slot, offset in the workspace)
        self._workspace = 0
        for node, array in zip(plan.graph.inputs, arrays, strict=True):
            self._places[node] = self._argument(array)
        self._forms = []
        for o in plan.outputs:
            base = resolve(o.node)
            self._places[base] = Place(self._slot(), base.shape[1], 1)
            shape = o.shape if o.direct else base.shape
            self._forms.append(_Form(o, runtime.allocator(shape, runtime.dtype(o.dtype)), o.direct))
        self.flag = self._slot() if conditional else -1  # of the flag's address
        self._overwritten: list[int] = []  # the arguments that steps write to
        self._copies = self._effects(arrays)
        for step in plan.steps:
            for node in step.outputs:
                if node not in self._places:
                    self._places[node] = self._temporary(node.shape, dtypes.ITEMSIZE[plan.scheduled.storage[node]])
        with runtime.made_current():
            self._load_together()
            self._launches = [launch for step in plan.steps if step.launches for launch in self._ready(step)]
        self._unset = [0] * len(self._temporaries)

    def _load_together(self) -> None:
        """Have the kernels of all steps compiled at the same time: find out which, then make the steps ready."""
        runtime, slots, temporaries, workspace = self.runtime, self._slots, list(self._temporaries), self._workspace
        load_together = getattr(runtime, "load_together", None)
        if load_together is None:
            return
        asked = _Asked(runtime)
        self.runtime = asked
        try:
            for step in self.plan.steps:
                if step.launches:
                    self._ready(step)
        finally:
            self.runtime, self._slots, self._temporaries, self._workspace = runtime, slots, temporaries, workspace
        load_together(asked.kernels)

    # Places
    def _slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def _argument(self, array: Any) -> Place:
        strides = self.runtime.strides(array)
        if len(strides) == 2:
            return Place(self._slot(), strides[0], strides[1])
        return Place(self._slot(), 0, strides[0] if strides else 0)

    def _temporary(self, shape: tuple[int, int], itemsize: int) -> Place:
        place = Place(self._slot(), shape[1], 1)
        self._temporaries.append((place.slot, self._workspace))
        size = max(shape[0] * shape[1] * itemsize, 1)
        self._workspace += -(-size // _ALIGNMENT) * _ALIGNMENT
        return place

    def _effects(self, arrays: Sequence[Any]) -> list[tuple[int, Node]]:
        """Let steps write to arguments that change, where nothing reads the old value later; else copy at the end."""
        copies = []
        for arg, node in self.plan.graph.effects:
            source = self.plan.graph.inputs[arg]
            if self.runtime.contiguous(arrays[arg]) and node not in self._places and self._in_place(node, source):
                self._places[node] = Place(self._places[source].slot, node.shape[1], 1)
                self._overwritten.append(arg)
            else:
                copies.append((arg, node))
        return copies

    def _in_place(self, node: Node, source: Node) -> bool:
        """Whether the step that computes `node` may write it over `source`, reading each element where it writes."""
        written = False
        for step in self.plan.steps:
            reads = [n for n in (*step.inputs, *step.rare) if resolve(n) is source]
            if written and reads:
                return False
            if node in step.outputs:
                written = True
                if reads and step.kind in ("Gemm", "Split", "Copy"):
                    return False
                if any(n is not source or n in step.rare or n.shape != node.shape for n in reads):
                    return False
        return written

    def place(self, node: Node) -> Place:
        if node.op == "transpose":
            return self.place(node.inputs[0]).transposed
        if node.op == "reshape":
            return Place(self.place(node.inputs[0]).slot, node.shape[1], 1)
        return self._places[node]

    # Making steps ready
    def _ready(self, step: Step) -> list[Launch]:
        if step.kind in ("Gemm", "Split"):
            kinds = {"matmul": self._gemm, "halves": self._split, "split_matmul": self._split_product}
            return [kinds[node.op](node) for node in step.nodes]
        if step.kind == "Copy":
            return [self._copy(step)]
        return [_KernelLaunch(self, step)]

    def _gemm(self, node: Node) -> Launch:
        a, b = node.inputs
        storage = self.plan.scheduled.storage
        left, right, target = self.place(a), self.place(b), self.place(node)
        product = self.runtime.product(
            Operand(*a.shape, left.row_stride, left.col_stride),
            Operand(*b.shape, right.row_stride, right.col_stride),
            storage[resolve(a)],
            storage[node],
            self.plan.precision,
        )
        x, y, z = left.slot, right.slot, target.slot
        return lambda at, stream: product(at[x], at[y], at[z], stream)

    def _split(self, node: Node) -> Launch:
        (matrix,) = node.inputs
        source, target = self.place(matrix), self.place(node)
        split = Split(self.runtime, *matrix.shape, (source.row_stride, source.col_stride), self.conditional)
        x, y, flag = source.slot, target.slot, self.flag
        if self.conditional:
            return lambda at, stream: split(at[x], at[y], stream, at[flag])
        return lambda at, stream: split(at[x], at[y], stream)

    def _split_product(self, node: Node) -> Launch:
        depth = node.inputs[2].shape[1]
        places = [self.place(i) for i in (*node.inputs, node)]
        a, b, x, y, z = (p.slot for p in places)
        strides = [(p.row_stride, p.col_stride) for p in places[2:4]]
        product = SplitProduct(self.runtime, (*node.shape, depth), *strides)
        doubts = self._temporary((1, product.doubts), 1).slot
        return lambda at, stream: product((at[a], at[b]), (at[x], at[y]), at[z], at[doubts], stream)

    def _copy(self, step: Step) -> Launch:
        (node,) = step.outputs
        source, target = self.place(node.inputs[0]), self.place(node)

        def launch(addresses: Addresses, stream: Any) -> None:
            self.runtime.copy(self._view(node, target, addresses), self._view(node, source, addresses))

        return launch

    def _view(self, node: Node, place: Place, addresses: Addresses) -> Any:
        """A value, or another one like it, as an array of the runtime's."""
        dtype = self.runtime.dtype(self.plan.scheduled.storage[resolve(node)])
        return self.runtime.view(addresses[place.slot], node.shape, dtype, (place.row_stride, place.col_stride))

    def partial_sums(self, size: int) -> int:
        """A slot for the totals that the shares of a column step leave for the merge."""
        return self._temporary((1, size), 1).slot

    def allocate(self) -> list[Any]:
        """Arrays for the results as the steps write them."""
        with self.runtime.made_current():
            return [form.new() for form in self._forms]

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array for a result."""
        with self.runtime.made_current():
            return self.runtime.allocator(shape, self.runtime.dtype(dtype))()

    # Running
    def __call__(self, arrays: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        """Launch the plan on the arrays (arguments, then prepared values).

        `outs` holds, for each result, an array to write it to or None for a new one.
        """
        if self.runtime.is_current():
            return self._run(arrays, outs)
        with self.runtime.made_current():
            return self._run(arrays, outs)

    def _run(self, arrays: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        runtime, address = self.runtime, self.runtime.address
        addresses = list(map(address, arrays))
        written = []
        as_written = True  # the results are what the steps write, in memory that is new
        for form, out in zip(self._forms, outs, strict=True):
            if out is not None and form.direct and runtime.contiguous(out):
                array = out
            else:
                array = form.new()
            as_written &= out is None and form.direct
            written.append(array)
            addresses.append(address(array))
        memory = self._launch(addresses)
        if not as_written:
            written = [self._finished(*each) for each in zip(self._forms, written, outs, strict=True)]
        if self._copies or self._overwritten:
            self._write_effects(arrays, addresses)
        del memory  # effects read it
        return written

    def run_if_changed(self, arrays: Sequence[Any], results: Sequence[Any], flag: int) -> None:
        """Compute the results anew, in arrays of `allocate`, unless the word at the address `flag` is 0 by then."""
        address = self.runtime.address
        self._launch([*map(address, arrays), *map(address, results), flag])

    def _launch(self, addresses: Addresses) -> Any:
        """Launch the steps, given the addresses of arguments, results and flag; returns the workspace."""
        addresses += self._unset
        memory = None
        if self._workspace:
            memory = self.runtime.workspace(self._workspace)
            start = memory.ptr
            for slot, offset in self._temporaries:
                addresses[slot] = start + offset
        stream = self.runtime.stream()
        for launch in self._launches:
            launch(addresses, stream)
        return memory

    def _finished(self, form: _Form, written: Any, out: Any) -> Any:
        """A result as the user's axes have it, or in the array that was given for it."""
        if not form.direct:
            written = form.output.presented(_looked(form.output.node, written))
        if out is None:
            return written
        if out is written:
            self.runtime.changed(out)
        else:
            self.runtime.copy(out, written)
        return out

    def _write_effects(self, arrays: Sequence[Any], addresses: Addresses) -> None:
        for arg in self._overwritten:
            self.runtime.changed(arrays[arg])
        for arg, node in self._copies:
            value = self._view(node, self.place(node), addresses)
            self.runtime.copy(arrays[arg], value.reshape(arrays[arg].shape))


def _looked(node: Node, base: Any) -> Any:
    if node.op == "transpose":
        return _looked(node.inputs[0], base).T
    if node.op == "reshape":
        return _looked(node.inputs[0], base).reshape(node.shape)
    return base


class _Asked:
    """A runtime that notes the kernels that it is asked for, and loads none."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self.kernels: list[Kernel] = []

    def function(self, kernel: Kernel) -> Any:
        self.kernels.append(kernel)
        return kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


class _KernelLaunch:
    """A step that runs as a kernel of ours, in as many variants as pointers of different alignment ask for."""

    def __init__(self, executable: CudaExecutable, step: Step):
        self.executable = executable
        self.program = Program(step, executable.plan.scheduled.storage)
        self.rows, self.cols = step.domain
        self.places = [None if p.is_number else executable.place(p.node) for p in self.program.parameters]
        self.arguments: list[Any] = []
        self.format = ""  # of the struct that the kernel takes, eight bytes a member
        self.holes: list[tuple[int, int]] = []  # (position among the arguments, slot of the address)
        self.vector_slots: list[tuple[int, int]] = []  # (slot, bytes of an element) of what is read in vectors
        self.strides = 0  # every row stride, or-ed: what they are all multiples of decides the vectors
        self._list_arguments()
        self.variants: dict[int, Launch] = {}
        self.widest = fitting_vec(self.program, self.strides)
        self.unaligned = max((self.widest * size for _, size in self.vector_slots), default=1) - 1
        self.partial = executable.partial_sums(self._partial_bytes()) if self.program.by_columns else -1
        self._variant(self.widest)

    def _list_arguments(self) -> None:
        for p, place in zip(self.program.parameters, self.places, strict=True):
            if place is None:
                self.arguments.append(float(p.node.attrs["value"]))
                self.format += "d"
                continue
            self.holes.append((len(self.arguments), place.slot))
            self.arguments.append(0)
            self.format += "Q" + "q" * p.has_rows + "q" * p.has_cols
            if p.has_rows:
                self.arguments.append(place.row_stride)
            if p.has_cols:
                self.arguments.append(place.col_stride)
            if p.place in (FULL, COLUMN):
                self.vector_slots.append((place.slot, dtypes.ITEMSIZE[p.dtype]))
            if p.place == FULL and self.rows > 1:
                self.strides |= abs(place.row_stride)

    def _partial_bytes(self) -> int:
        config = default_config(self.program, 1)
        if config.shares == 1:
            return 1
        # At most four numbers of at most 8 bytes an accumulator.
        return config.shares * self.cols * 32 * max(1, len(self.program.accumulators(0)))

    def __call__(self, addresses: Addresses, stream: Any) -> None:
        together = 0
        for slot, _ in self.vector_slots:
            together |= addresses[slot]
        if together & self.unaligned:
            self._variant(self._aligned_vec(addresses))(addresses, stream)
        else:
            self.variants[self.widest](addresses, stream)

    def _aligned_vec(self, addresses: Addresses) -> int:
        """The widest vector that every pointer is aligned to."""
        vec = self.widest
        while vec > 1 and any(addresses[slot] % (vec * size) for slot, size in self.vector_slots):
            vec //= 2
        return vec

    def _variant(self, vec: int) -> Launch:
        if vec not in self.variants:
            config = default_config(self.program, vec)
            kernel = emit(self.program, config, conditional=self.executable.conditional)
            if config.template == "column_stats":
                self.variants[vec] = self._column_launch(kernel, config)
            else:
                self.variants[vec] = self._row_launch(kernel, config)
        return self.variants[vec]

    def _with_flag(
        self, members: list[Any], holes: list[tuple[int, int]], form: str
    ) -> tuple[list[Any], list[tuple[int, int]], str]:
        """Members, holes and format of the struct, with the flag of a conditional kernel."""
        if not self.executable.conditional:
            return members, holes, self.format + form
        return [*members, 0], [*holes, (len(members), self.executable.flag)], self.format + form + "Q"

    def _row_launch(self, kernel: Kernel, config: Config) -> Launch:
        function = self.executable.runtime.function(kernel)
        processors = self.executable.runtime.processors
        grid, block = (row_blocks(config, self.rows, self.cols, processors), 1, 1), (config.threads, 1, 1)
        template, holes, form = self._with_flag([*self.arguments, self.rows, self.cols], self.holes, "qq")
        run = launcher(function, grid, block, form, kernel.shared)

        def launch(addresses: Addresses, stream: Any) -> None:
            members = template.copy()
            for position, slot in holes:
                members[position] = addresses[slot]
            run(members, stream)

        return launch

    def _column_launch(self, kernel: Kernel, config: Config) -> Launch:
        function = self.executable.runtime.function(kernel)
        shares = config.shares
        grid, block = (max(1, -(-self.cols // config.group)), shares, 1), (config.threads, 1, 1)
        template = [*self.arguments, self.rows, self.cols, 0, shares]
        template, holes, form = self._with_flag(template, [*self.holes, (len(template) - 2, self.partial)], "qqQq")
        runs = [launcher(function, grid, block, form, kernel.shared)]
        if shares > 1:
            merge = emit(self.program, config, merge=True, conditional=self.executable.conditional)
            grid = (max(1, -(-self.cols // config.threads)), 1, 1)
            function = self.executable.runtime.function(merge)
            runs.append(launcher(function, grid, block, form, merge.shared))

        def launch(addresses: Addresses, stream: Any) -> None:
            members = template.copy()
            for position, slot in holes:
                members[position] = addresses[slot]
            for run in runs:
                run(members, stream)

        return launch


def row_blocks(config: Config, rows: int, cols: int, processors: int) -> int:
    """How many blocks a row template is launched with on a GPU with so many multiprocessors."""
    if config.template == "row_lanes":
        blocks = -(-rows // (config.threads // config.group))
    elif config.template == "elementwise":
        blocks = -(-rows * (cols // config.vec) // config.threads)
    elif config.template == "row_persistent":
        blocks = min(rows, processors * config.blocks)
    else:
        blocks = rows
    return max(1, min(blocks, _MOST_BLOCKS))
