"""Plans: the steps that run for given shapes and dtypes, and the rewrites that led to them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .. import devices, dtypes
from ..ir.graph import Graph, Node, Shape
from ..rewrite import Note
from ..settings import Settings
from ..trace import Axes, Call
from .picture import notebook_html, svg
from .report import record, report
from .schedule import Schedule, Step, assign_offsets, base_of, in_order_of_base, state_bytes, step_time

Emitter = Callable[["Plan", bool], Sequence[str]]
_emitter: Emitter


def set_emitter(emitter: Emitter) -> None:
    """Register the function that writes a plan's kernels: `cupyfuse.cuda` imports this package, not the reverse."""
    global _emitter
    _emitter = emitter


@dataclass(frozen=True)
class Output:
    """A result of the function: a value, and the user's axes in it."""

    node: Node
    axes: Axes

    @property
    def shape(self) -> tuple[int, ...]:
        return self.axes.shape

    @property
    def dtype(self) -> str:
        return self.node.dtype

    @property
    def direct(self) -> bool:
        """Whether the step writes the elements in the order of the user's C-contiguous array, under any shape."""
        return self.axes.in_order and in_order_of_base(self.node)

    def with_user_axes(self, matrix: Any) -> Any:
        """View the value, given as rows x columns, with the user's axes."""
        if self.axes.in_order or self.axes.transposed:
            return (matrix if self.axes.in_order else matrix.T).reshape(self.shape)
        stored = [*self.axes.rows, *self.axes.cols]  # the user's axes in the order in which they are stored
        array = matrix.reshape([self.shape[p] for p in stored])
        for place, axis in enumerate(sorted(stored)):
            other = stored.index(axis)
            if other != place:
                array = array.swapaxes(place, other)  # which arrays of all libraries have, by this name
                stored[place], stored[other] = axis, stored[place]
        return array.reshape(self.shape)


class Source(NamedTuple):
    """Where an input of a block comes from.

    Attributes
    ----------
    number : int
        That of an argument, counting prepacked values behind the function's own arguments; if `before`, that of a
        result of the plan `Blocks.before`.
    mode : int
        The part that a block takes: rows, columns, or all (`schedule.cut`).
    before : bool
    shape : tuple of int
        Under which a contiguous argument is read; its own if empty.
    """

    number: int
    mode: int
    before: bool = False
    shape: Shape | tuple[()] = ()


@dataclass(frozen=True)
class Blocks:
    """The blocks in which a plan runs, of rows or of columns.

    Attributes
    ----------
    total, rows : int
        Rows of all blocks, and of one.
    transposed : bool
        Whether these are rows of the transposes of the matrices that are cut: columns of the matrices themselves.
    choice : str
        Why blocks have rows, or columns, where both were estimated; else empty.
    plan : Plan
        For one block. Its results are `collected`; it adds to further arguments, the sums over the blocks.
    last : Plan or None
        For the last block, if it has fewer rows.
    before : Plan or None
        For values that are cut into blocks, but not computed by rows, and for those that several of these plans read.
    common : Plan or None
        For the values that all blocks share, such as split weights.
    zeros : Plan or None
        Writes the zeros that the sums start from.
    after : Plan or None
        For the results `following`, which need all blocks. Its arguments are those of the function, then the collected
        values, then the sums, then the results of `before`.
    arguments : int
        The number of the function's arguments.
    sources : tuple of Source
        Of the inputs of a block, before the common values.
    collected, summed : tuple of (int or None)
        The index of each one among the function's results; None for values that only `after` reads.
    following : tuple of int
        The indices of the results that `after` computes.

    All of these plans run in each call.
    """

    total: int
    rows: int
    transposed: bool
    plan: Plan
    last: Plan | None
    before: Plan | None
    common: Plan | None
    zeros: Plan | None
    after: Plan | None
    arguments: int
    sources: tuple[Source, ...]
    collected: tuple[int | None, ...]
    summed: tuple[int | None, ...]
    following: tuple[int, ...]
    choice: str = ""

    @property
    def unit(self) -> str:
        """What a block has some of."""
        return "columns" if self.transposed else "rows"

    @property
    def count(self) -> int:
        return -(-self.total // self.rows)

    @property
    def first(self) -> tuple[Plan, ...]:
        """The plans that run before the first block."""
        return tuple(p for p in (self.before, self.common, self.zeros) if p is not None)

    def steps_of_call(self) -> Iterator[Step]:
        """Yield each step as often as it runs in a call."""
        for plan in self.first:
            yield from plan.steps
        for _ in range(self.count - (self.last is not None)):
            yield from self.plan.steps
        for following in (self.last, self.after):
            yield from following.steps if following else ()

    @property
    def estimated_time(self) -> float:
        """The seconds that all blocks are estimated to take, see `Plan.estimated_time`."""
        blocks = self.count - (self.last is not None)
        others = [step for p in (*self.first, self.last, self.after) if p is not None for step in p.steps]
        return blocks * self.plan.estimated_time_of(self.plan.steps) + self.plan.estimated_time_of(others)

    @property
    def workspace(self) -> int:
        """The most bytes that a call holds at once beside its arguments, prepacked values and results."""
        held = [o.node.nbytes for p in (self.before, self.common) if p is not None for o in p.outputs]
        sums = zip(self.summed, self.zeros.outputs if self.zeros else (), strict=True)
        held += [o.node.nbytes for k, o in sums if k is None]
        collected = zip(self.collected, self.plan.outputs, strict=True)
        held += [self.total * o.node.shape[1] * dtypes.ITEMSIZE[o.dtype] for k, o in collected if k is None]
        plans = (self.plan, self.last, self.after, *self.first)
        return sum(held) + max(p.workspace for p in plans if p is not None)


@dataclass
class Plan:
    """The steps for one set of shapes, dtypes and memory layouts.

    Attributes
    ----------
    steps : tuple of Step
        In launch order; those of one block, if the plan runs in blocks. A step has `kind` ("Gemm", "MatVec",
        "ColumnStats", "RowProgram", "Scan", "Split", "Copy", or "Library" for a function of NumPy's or CuPy's own,
        counted as one launch), `fused` (names of its operators, or of the function), `reads` and `writes` (bytes),
        `flops`, `launches`, and for products `how` they are computed.
    launches : int
        GPU launches of one call.
    notes : tuple of Note
        The rewrites that were applied.
    prepare : Plan or None
        Prepacks what depends on bound arrays alone; `bind` runs it once.
    prepare_note : str
        When `prepare` runs, for the report, with a placeholder for the bytes that are kept.
    blocks : Blocks or None
        Blocks of rows or columns, if the workspace for all of them would exceed the limit.
    whole : str
        If the plan exceeds `Settings.max_workspace` and still runs on the whole of all rows: why they cannot be taken
        in blocks, for the report. Empty otherwise.
    as_written : str
        For NumPy arrays: why the function runs as written, and not in these steps; empty if it runs in them.
    saving : str
        What a forward plan saves for the backward pass instead of products that exceed the limit, and why.
    feeds : bool
        Whether another plan reads the results, which have no gaps then and are in C order.
    """

    name: str
    settings: Settings
    graph: Graph
    scheduled: Schedule = field(repr=False)
    outputs: tuple[Output, ...]
    notes: tuple[Note, ...]
    calls: tuple[Call, ...]
    prepare: Plan | None = None
    blocks: Blocks | None = None
    prepare_note: str = "once, when the arguments are bound: {} are kept"
    whole: str = ""
    as_written: str = ""
    saving: str = ""
    feeds: bool = False

    @property
    def precision(self) -> str:
        return self.settings.precision

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps in launch order; those of one block, if the plan runs in blocks."""
        if self.blocks is None:
            return tuple(self.scheduled.steps)
        return tuple(step for part in self.parts for step in part.steps)

    @property
    def parts(self) -> tuple[Plan, ...]:
        """The plans that a call runs, each with memory of its own: this one, or those before, for and after blocks."""
        if self.blocks is None:
            return (self,)
        after = () if self.blocks.after is None else (self.blocks.after,)
        return (*self.blocks.first, self.blocks.plan, *after)

    @property
    def conditional(self) -> bool:
        """Whether it can run under a flag on the device: it launches emitted kernels and splits only."""
        launched = [step.kind for step in self.steps if step.launches]
        own_kernels = not {"Gemm", "Copy", "Library", "Scan"}.intersection(launched)
        return own_kernels and self.blocks is None and all(o.direct for o in self.outputs) and not self.graph.effects

    def steps_of_call(self) -> Iterator[Step]:
        """Yield each step as often as it runs in a call."""
        yield from self.scheduled.steps if self.blocks is None else self.blocks.steps_of_call()

    @property
    def launches(self) -> int:
        return sum(step.launches for step in self.steps_of_call())

    @property
    def reads(self) -> int:
        """Bytes read from memory, each value once per step."""
        return sum(step.reads for step in self.steps_of_call())

    @property
    def writes(self) -> int:
        """Bytes written to memory."""
        return sum(step.writes for step in self.steps_of_call())

    @property
    def flops(self) -> int:
        """Floating-point operations, weighted as in the operator table."""
        return sum(step.flops for step in self.steps_of_call())

    @property
    def workspace(self) -> int:
        """The most bytes that a call holds at once beside its arguments, prepacked values and results."""
        if self.blocks is not None:
            return self.blocks.workspace
        results = {base_of(o.node) for o in self.outputs}
        for arg, node in self.graph.effects:
            if node.op == "accumulate" or (node.op == "add" and node.inputs[0] is self.graph.inputs[arg]):
                results.add(node)  # written over the argument
        steps = self.scheduled.steps
        processors = (self.settings.device or devices.find(devices.DEFAULT)).processors
        states = max((state_bytes(step, processors) for step in steps), default=0)
        return states + assign_offsets(steps, self.scheduled.nbytes, self.graph.roots, results)[1]

    def best_time(self, gpu: str = devices.DEFAULT) -> float:
        """Bound the time from below, in seconds: for each step, the larger of bytes / bandwidth and FLOPs / peak.

        Parameters
        ----------
        gpu : str
            A name that contains that of a known device: H200, H100, A100, L40S, RTX 4090, T4.

        Raises
        ------
        ValueError
            The GPU is unknown.
        """
        device = devices.find(gpu)
        return sum(max(self.step_times(step, device)) for step in self.steps_of_call())

    @property
    def estimated_time(self) -> float:
        """The seconds that a call is estimated to take, at the shares of peak rates that steps reach, to compare plans.

        It is for the GPU of the settings; without one, for the default GPU of `best_time`.
        """
        return self.estimated_time_of(self.steps_of_call())

    def estimated_time_of(self, steps: Iterable[Step]) -> float:
        """Estimate the seconds that steps take in this plan's precision, as `estimated_time`."""
        device = self.settings.device or devices.find(devices.DEFAULT)
        return sum(step_time(step, device, *self.step_times(step, device)) for step in steps)

    def step_times(self, step: Step, device: devices.Device) -> tuple[float, float]:
        """Bound the time of a step from below by its bytes and by its arithmetic, in seconds; they overlap."""
        dtype = (step.product.inputs[0] if step.kind == "Gemm" else step.nodes[-1]).dtype
        peak = device.simt64 if dtype == "float64" else device.simt
        if step.kind == "Gemm" and dtype != "float64":
            if step.product.op == "split_matmul" or dtype != "float32":
                peak = device.half
            elif self.precision in ("high", "medium", "tf32"):
                peak = max(device.tf32, device.simt)
        return (step.reads + step.writes) / device.bandwidth, step.flops / peak

    def source(self, inline: bool = False) -> str:
        """Return the CUDA C of every emitted kernel.

        Parameters
        ----------
        inline : bool
            Replace `#include` lines by the headers of `kernels_cu/`, as the compiler sees them.
        """
        return "\n\n".join(_emitter(self, inline))

    def __str__(self) -> str:
        return report(self)

    def record(self, gpu: str = devices.DEFAULT) -> dict[str, Any]:
        """Return what `print` shows as numbers, strings, lists and dicts, as for JSON: bytes, FLOPs, seconds.

        Parameters
        ----------
        gpu : str
            The GPU that `best_seconds` are for, as for `best_time`.
        """
        return record(self, gpu)

    def svg(self, gpu: str = devices.DEFAULT) -> str:
        """Draw the steps, with their bytes, launches and best possible times, as the text of an SVG image.

        Parameters
        ----------
        gpu : str
            The GPU that the times are for, as for `best_time`.

        Examples
        --------
        >>> import cupyfuse as cf
        >>> plan = cf.fuse(lambda x: cf.softmax(x, axis=1)).plan(cf.spec((1024, 8192)))
        >>> plan.svg("A100").startswith("<svg")
        True
        """
        return svg(self, gpu)

    def _repr_html_(self) -> str:
        # Notebooks call it for the last value of a cell.
        return notebook_html(self)
