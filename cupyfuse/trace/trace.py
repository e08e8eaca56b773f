"""`Trace`: the graph and the calls of one run of the user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..ir import graph as g
from . import broadcasting, indexing, numpy_functions, operations, products
from .axes import Axes, Labels
from .tracer import Tracer


@dataclass(frozen=True)
class Call:
    """One array operation of the user's code, with its cost when run unfused."""

    name: str
    reads: int
    writes: int
    flops: int


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
    call_ufunc = staticmethod(numpy_functions.call_ufunc)
    call_function = staticmethod(numpy_functions.call_function)

    def __init__(self) -> None:
        self.inputs: list[g.Node] = []
        self.effects: dict[int, g.Node] = {}  # new values of arguments changed in place, by number of the argument
        self.calls: list[Call] = []
        self.folded: dict[tuple[object, ...], g.Node] = {}  # strided copies, by what they copy
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
            self.calls.append(Call(name, reads, sum(n.nbytes for n in results), sum(g.flops(n) for n in fresh)))

    def array(self, node: g.Node, axes: Axes | Labels) -> Tracer:
        """Make a tracer of a node."""
        return Tracer(self, node, Axes.of(axes, node.shape))

    def tracer_of(self, value: Any) -> Tracer:
        """Make a tracer of a number; tracers of this trace are returned unchanged."""
        return operations.as_tracer(value, self)

    def argument(self, name: str, shape: tuple[int, ...], dtype: str) -> Tracer:
        """Make a tracer for an array argument: all axes but the last are rows, and a vector is one row."""
        rank = len(shape)
        axes = Axes(shape, tuple(range(rank - 1)), tuple(range(rank))[-1:])
        node = g.argument(len(self.inputs), name, axes.node_shape, dtype, rank)
        self.inputs.append(node)
        tracer = self.array(node, axes)
        tracer._origin = node
        return tracer
