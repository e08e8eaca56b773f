"""`Trace`: the graph and the calls of one run of the user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .. import dtypes
from ..ir import graph as g
from . import broadcasting, indexing, library, numpy, operations, products
from .axes import Axes, Labels
from .flat import Flat
from .tracer import Tracer
from .user_code import fail


@dataclass(frozen=True)
class Call:
    """One array operation of the user's code, with its cost when run unfused.

    Attributes
    ----------
    name : str
    reads, writes : int
        Bytes of its operands and results.
    nodes : tuple of Node
        What it added to the graph.
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
    mask_logic = staticmethod(operations.mask_logic)
    reshape = staticmethod(broadcasting.reshape)
    expand = staticmethod(broadcasting.expand)
    relabel = staticmethod(broadcasting.relabel)
    get = staticmethod(indexing.get)
    assign = staticmethod(indexing.assign)
    flat = staticmethod(Flat)
    call_ufunc = staticmethod(numpy.call_ufunc)
    call_function = staticmethod(numpy.call_function)
    call_library = staticmethod(library.call_library)
    call_method = staticmethod(numpy.call_method)

    def __init__(
        self, repeats: Trace | None = None, captures: bool = False, strict: bool = False, makes: bool = False
    ) -> None:
        """Begin a trace.

        Parameters
        ----------
        repeats : Trace, optional
            An earlier trace of the same function; it is an error if this one does something else.
        captures : bool
            Whether arrays that are no arguments become `constants`; otherwise they are an error.
        strict : bool
            Whether library steps are refused.
        makes : bool
            Whether arrays that the function makes, as by `np.zeros`, are traced from the start.
        """
        self.strict = strict
        self.makes, self.made = makes, False  # the second: whether it made such arrays
        self.inputs: list[g.Node] = []
        self.effects: dict[int, g.Node] = {}  # new values of arguments changed in place, by number of the argument
        self.calls: list[Call] = []
        self.folded: dict[tuple[object, ...], g.Node] = {}  # strided copies, by what they copy
        self.constants: list[Any] = []  # arrays that the function made, which follow the arguments among the inputs
        self._captures, self._ended = captures, False
        self._constant_nodes: dict[Any, g.Node] = {}
        self._made: list[g.Node] | None = [] if captures else None  # in order, to compare a second trace
        self._repeats = repeats
        self.plain = True  # whether no function of this package was called, only NumPy's and array operators
        self._quiet = False  # whether operations belong to a call that is being recorded, or to none of the user's

    @contextmanager
    def call(self, name: str, operands: Iterable[Any]) -> Iterator[Callable[[Any], Any]]:
        """Record the outermost of nested operations; the body passes its result through the yielded function."""
        if self._quiet:
            yield lambda result: result
            return
        before = [o._node for o in operands if isinstance(o, Tracer)]
        results: list[g.Node] = []

        def done(result: Tracer) -> Tracer:
            results.append(result._node)
            return result

        self._quiet = True
        try:
            yield done
        finally:
            self._quiet = False
        fresh = [n for n in g.topological(results, lambda n: () if n in before else n.inputs) if n not in before]
        if results:
            reads = sum(n.nbytes for n in set(before) if n.op != "const")
            self.calls.append(Call(name, reads, sum(n.nbytes for n in results), tuple(fresh)))

    def array(self, node: g.Node, axes: Axes | Labels) -> Tracer:
        """Make a tracer of a node."""
        if self._ended:
            fail(
                "an array of a trace that has ended",
                "it was kept from an earlier run of a fused function; return it instead, and use the result",
            )
        if self._made is not None:
            self._made.append(node)
            if self._repeats is not None:
                self._compare(node, len(self._made) - 1)
        return Tracer(self, node, Axes.of(axes, node.shape))

    def _compare(self, node: g.Node, position: int) -> None:
        assert self._repeats is not None and self._repeats._made is not None
        before = self._repeats._made
        if position >= len(before) or g.operation_key(node) != g.operation_key(before[position]):
            fail(
                "what differs from run to run",
                "a fused function is traced twice, and the second trace did something else here: random numbers, the "
                "time, or state that the first one changed; make it an argument",
            )

    def end(self) -> None:
        """End the trace: its arrays cannot be used any more."""
        self._ended = True

    def constant(self, value: Any) -> Tracer:
        """Make a tracer of an array that the function made."""
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
            # What the array holds is part of the name: traces that differ in it differ.
            name = f"constant{len(self.constants)}"
            tracer = self.argument(name, tuple(value.shape), dtype)
            tracer._origin = None
            self.constants.append(value.copy())
            self._constant_nodes[key] = tracer._node
            if self._repeats is not None and list(self._repeats._constant_nodes)[len(self.constants) - 1] != key:
                self._compare(g.const(0.0, "an array with other values"), len(self._made or ()) - 1)
            return tracer
        return self.array(node, Axes.by_rows(value.shape))

    def known(self, tracer: Tracer) -> Any:
        """Return the values of an array that the function made itself; None of another one."""
        number = tracer._node.argument - (len(self.inputs) - len(self.constants)) if tracer._node.op == "input" else -1
        return self.constants[number].reshape(tracer.shape) if number >= 0 else None

    def tracer_of(self, value: Any) -> Tracer:
        """Make a tracer of a number; tracers of this trace are returned unchanged."""
        return operations.as_tracer(value, self)

    def argument(self, name: str, shape: tuple[int, ...], dtype: str, strides: tuple[int, ...] | None = None) -> Tracer:
        """Make a tracer for an array argument: all axes but the last are rows, and a vector is one row.

        `strides`, in bytes, tell which conversions copy it.
        """
        axes = Axes.by_rows(shape)
        node = g.argument(len(self.inputs), name, axes.node_shape, dtype, len(shape))
        self.inputs.append(node)
        tracer = self.array(node, axes)
        tracer._origin = node
        tracer._is_array, tracer._strides = True, strides
        return tracer
