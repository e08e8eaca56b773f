"""`Trace`: the graph and the recorded calls of one run of the user's function."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .. import dtypes
from ..ir import graph as g
from ..ir.parts import View, operands_as_written
from ..ir.rebuild import operation_key
from . import broadcasting, folds, indexing, library, numpy, operations, products
from .axes import Axes, AxisLabels
from .flat import Flat
from .tracer import Tracer
from .user_code import StepFailed, fail, handlers_around
from .watched import Site

ASSIGNMENT = "setitem"  # the name of calls that assign to elements of an array


@dataclass(frozen=True)
class Call:
    """One array operation of the user's code, with its cost if run by itself.

    Attributes
    ----------
    name : str
    reads, writes : int
        Bytes of its operands and results.
    nodes : tuple of Node
        The nodes that it added to the graph; none for an assignment, which only writes to an array as written.
    """

    name: str
    reads: int
    writes: int
    nodes: tuple[g.Node, ...]

    @property
    def flops(self) -> int:
        return sum(map(g.flops, self.nodes))


class Trace:
    """Inputs, effects and calls of one run of the user's function, and the operations on its tracers."""

    apply = staticmethod(operations.apply)
    reduce = staticmethod(operations.reduce)
    variance = staticmethod(operations.variance)
    clip = staticmethod(operations.clip)
    power = staticmethod(operations.power)
    matmul = staticmethod(products.matmul)
    dot = staticmethod(products.dot)
    reshape = staticmethod(broadcasting.reshape)
    expand = staticmethod(broadcasting.expand)
    refolded = staticmethod(folds.refolded)
    get = staticmethod(indexing.get)
    assign = staticmethod(indexing.assign)
    flat = staticmethod(Flat)
    call_ufunc = staticmethod(numpy.call_ufunc)
    call_function = staticmethod(numpy.call_function)
    call_library = staticmethod(library.call_library)
    call_method = staticmethod(numpy.call_method)

    def __init__(
        self,
        repeats: Trace | None = None,
        captures: bool = False,
        strict: bool = False,
        traced_sites: Container[Site] = (),
        watches: bool = False,
        for_shards: bool = False,
    ) -> None:
        """Begin a trace.

        Parameters
        ----------
        repeats : Trace, optional
            An earlier trace of the same function; an operation in which this one differs is an error.
        captures : bool
            Whether arrays other than arguments become `constants`; otherwise they are an error.
        strict : bool
            Whether library steps are errors.
        traced_sites : container
            Where the function creates arrays, as by `np.zeros`, that are traced from the start.
        watches : bool
            Whether the others that it creates are `Watched`: an assignment that fails adds to `assigned_sites`.
        for_shards : bool
            Whether shards of an axis will run the graph: reductions then keep the folds of arrays, since a shard cannot
            fold the split axis together with others.
        """
        self.strict = strict
        self.for_shards = for_shards
        self.traced_sites, self.watches = traced_sites, watches
        self.assigned_sites: set[Site] = set()
        self.has_created = False  # whether the function created such arrays
        self.inputs: list[g.Node] = []
        self.effects: dict[int, g.Node] = {}  # new values of arguments changed in place, by their positions
        self._at_risk: set[int] = set()  # arguments that were changed before what raises for some values
        self._raises_midway = False
        # What raises for some values, by the places in code that may catch it: its position among all, and its name.
        self.catchable: dict[Hashable, tuple[int, str]] = {}
        self.fails_at = -1  # the position of the one that raises in this trace
        self._raising = 0
        self.calls: list[Call] = []
        self.copies = True  # whether operands may be copied to other folds; else that is the error `CopyNeeded`
        self.folded: dict[tuple[object, ...], g.Node] = {}  # strided copies, to make each once (`folds.Conversion`)
        self.stored: set[g.Node] = set()  # computed values of which parts are read from memory (`parts.part`)
        # Views that are computed again: of which values, and which views of them.
        self.viewed: dict[g.Node, tuple[g.Node, View]] = {}
        self.constants: list[Any] = []  # arrays that the function created, which follow the arguments among the inputs
        self._captures, self._ended = captures, False
        self._constant_nodes: dict[Any, g.Node] = {}
        self._recorded: list[g.Node] | None = [] if captures else None  # all nodes, to compare a second trace
        self._repeats = repeats
        self.numpy_only = True  # whether only NumPy's functions and operators were called, none of this package
        self._quiet = False  # whether operations are not recorded, as within another one

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Record no calls in a `with` block: they are parts of one that is recorded, or cost nothing as written."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    @contextmanager
    def assignment(self, value: Any, written_bytes: int) -> Iterator[None]:
        """Record an assignment to elements, unless within another call, by the bytes that it writes as written.

        The body makes the array's new value.
        """
        if not self._quiet:
            reads = value._node.nbytes if isinstance(value, Tracer) and value._node.op != "const" else 0
            self.calls.append(Call(ASSIGNMENT, reads, written_bytes, ()))
        with self.quiet():
            yield

    @contextmanager
    def call(self, name: str, operands: Iterable[Any]) -> Iterator[Callable[[Any], Any]]:
        """Record the call of an operation, unless within another; the body notes results by the yielded function."""
        if self._quiet:
            yield lambda result: result
            return
        before = [o._node for o in operands if isinstance(o, Tracer)]
        results: list[g.Node] = []

        def record(result: Tracer) -> Tracer:
            results.append(result._node)
            return result

        with self.quiet():
            yield record
        made = g.topological(results, lambda n: () if n in before else operands_as_written(n, self.viewed))
        fresh = [n for n in made if n not in before and n not in self.viewed]
        reads = sum(n.nbytes for n in set(before) if n.op != "const")
        if results:
            self.calls.append(Call(name, reads, sum(n.nbytes for n in results), tuple(fresh)))

    def note_raise(self, name: str, midway: bool = False) -> None:
        """Note that a step raises for some values; `midway` if it may have changed some elements by then.

        Of an operation that its step computes without errors, `note_error` alone tells.
        """
        self._at_risk |= self.effects.keys()
        self._raises_midway |= midway
        self.note_error(name)

    def note_error(self, name: str) -> None:
        """Note that an operation, as written, raises for some values; raise if it is the one that `fails_at` names."""
        position = self._raising
        self._raising += 1
        if handlers := handlers_around():
            self.catchable.setdefault(handlers, (position, name))
        if position == self.fails_at:
            raise StepFailed(name)

    @property
    def at_risk(self) -> tuple[int, ...]:
        """The positions of arguments that may be changed, or partly so, where the function raises for some values."""
        return tuple(self.effects) if self._raises_midway else tuple(sorted(self._at_risk))

    def array(self, node: g.Node, axes: Axes | AxisLabels) -> Tracer:
        """Make the tracer of a node."""
        if self._ended:
            fail(
                "an array of a trace that has ended",
                "it was kept from an earlier run of a fused function; return it instead, and use the result",
            )
        if self._recorded is not None:
            self._recorded.append(node)
            if self._repeats is not None:
                self._compare(node, len(self._recorded) - 1)
        return Tracer(self, node, Axes.of(axes, node.shape))

    def _compare(self, node: g.Node, position: int) -> None:
        """Check that the repeated trace recorded the same operation at this position."""
        assert self._repeats is not None and self._repeats._recorded is not None
        before = self._repeats._recorded
        if position >= len(before) or operation_key(node) != operation_key(before[position]):
            fail(
                "what differs from run to run",
                "a fused function is traced twice, and the second trace did something else here: random numbers, the "
                "time, or state that the first one changed; make it an argument",
            )

    def end(self) -> None:
        """End the trace: its arrays cannot be used any more."""
        self._ended = True

    def constant(self, value: Any) -> Tracer:
        """Make the tracer of an array that the function created; equal arrays are one constant."""
        if not self._captures:
            fail(
                f"an operation with a captured array of shape {tuple(value.shape)}",
                "only arguments of the fused function can be arrays; make it an argument",
            )
        try:
            dtype = dtypes.name_of(value.dtype)
        except TypeError as error:
            fail(f"an operation with a {value.dtype} array", f"{error}; or convert it with .astype")
        key = (type(value), value.shape, dtype, value.tobytes())
        node = self._constant_nodes.get(key)
        if node is None:
            name = f"constant{len(self.constants)}"
            tracer = self.argument(name, tuple(value.shape), dtype)
            tracer._origin = None
            self.constants.append(value.copy())
            self._constant_nodes[key] = tracer._node
            if self._repeats is not None and list(self._repeats._constant_nodes)[len(self.constants) - 1] != key:
                # The graphs hold no values of constants: compare with a node that no graph has.
                self._compare(g.const(0.0, "an array with other values"), len(self._recorded or ()) - 1)
            return tracer
        return self.array(node, Axes.by_rows(value.shape))

    def known(self, tracer: Tracer) -> Any:
        """Return the values of an array that the function created; None for any other array."""
        if tracer._node.op != "input":
            return None
        number = tracer._node.argument - (len(self.inputs) - len(self.constants))  # constants are the last inputs
        return self.constants[number].reshape(tracer.shape) if number >= 0 else None

    def tracer_of(self, value: Any) -> Tracer:
        """Make the tracer of a number or array; tracers of this trace are returned unchanged."""
        return operations.as_tracer(value, self)

    def argument(self, name: str, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None) -> Tracer:
        """Make the tracer of an array argument, whose node has all axes but the last along the rows.

        `strides`, in bytes, tell which conversions copy the array.
        """
        axes = Axes.by_rows(shape)
        node = g.argument(len(self.inputs), name, axes.node_shape, dtype, len(shape))
        self.inputs.append(node)
        tracer = self.array(node, axes)
        tracer._origin = node
        tracer._is_array, tracer._strides = True, strides
        return tracer
