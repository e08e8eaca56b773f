"""`Trace`: the graph and the calls of one run of the user's function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import TraceError
from ..ir import graph as g
from . import broadcasting, library, numpy, operations
from .axes import Axes
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
    matmul = staticmethod(operations.matmul)
    dot = staticmethod(operations.dot)
    mask_logic = staticmethod(operations.mask_logic)
    reshape = staticmethod(broadcasting.reshape)
    expand = staticmethod(broadcasting.expand)
    relabel = staticmethod(broadcasting.relabel)
    call_ufunc = staticmethod(numpy.call_ufunc)
    call_function = staticmethod(numpy.call_function)
    call_library = staticmethod(library.call_library)
    call_method = staticmethod(numpy.call_method)

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict  # whether library steps are refused
        self.inputs: list[g.Node] = []
        self.effects: dict[int, g.Node] = {}  # new values of arguments changed in place, by number of the argument
        self.calls: list[Call] = []
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

    def array(self, node: g.Node, axes: Axes) -> Tracer:
        """Make a tracer of a node."""
        return Tracer(self, node, axes)

    def tracer_of(self, value: Any) -> Tracer:
        """Make a tracer of a number; tracers of this trace are returned unchanged."""
        return operations.as_tracer(value, self)

    def argument(self, name: str, shape: tuple[int, ...], dtype: str) -> Tracer:
        """Make a tracer for an array argument of rank 0, 1 or 2."""
        if len(shape) > 2:
            raise TraceError(
                f"argument {name!r} has {len(shape)} dimensions, shape {shape}: fused functions take arrays of at most "
                "2; reshape it to (rows, columns) first, for example x.reshape(-1, x.shape[-1])"
            )
        node_shape = ((1, 1), (1, *shape), shape)[len(shape)]
        node = g.argument(len(self.inputs), name, node_shape, dtype, len(shape))  # type: ignore[arg-type]
        self.inputs.append(node)
        tracer = self.array(node, ((), (1,), (0, 1))[len(shape)])
        tracer._origin = node
        return tracer
