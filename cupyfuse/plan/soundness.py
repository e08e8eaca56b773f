"""Check a plan before it runs: each step reads what is in memory by then, and each value is written once.

A step that reads a value too early finds what other values have left in that memory: no error shows it. So a plan whose
steps are in a wrong order, or do not name all that they read, raises an error where it is built.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..ir import graph as g
from ..ir.graph import Node, Shape
from .plan import Blocks, Output, Plan
from .schedule import Step, base_of


class Given(NamedTuple):
    """An array that a plan is given: an argument, or what a plan before it has computed."""

    shape: Shape
    dtype: str


_NOTHING = Given((0, 0), "nothing")  # an argument that is not there
Phase = tuple[Plan, Mapping[int, Given]]  # a plan, and what it is given by argument number


def check_plan(plan: Plan, arguments: Sequence[Node], bound: Container[int] = ()) -> None:
    """Check that all steps of a plan read what is in memory by then.

    Parameters
    ----------
    plan : Plan
    arguments : sequence of Node
        Those of the function.
    bound : container of int
        Numbers of the arguments that are there when values are prepacked.

    Raises
    ------
    AssertionError
        A step reads what no earlier one has written, or writes what is there. The message names both.
    """
    for phase, given in _phases(plan, arguments, bound):
        for node in phase.graph.inputs:
            value = given.get(node.argument, _NOTHING)
            if value != (node.shape, node.dtype):
                raise AssertionError(f"{phase.name}: {node} is given {value}")
        _check_steps(phase)


def _check_steps(plan: Plan) -> None:
    """Check the steps of a plan, each by itself and their order, without those of its blocks."""
    there = set(plan.graph.inputs)
    for number, step in enumerate(plan.scheduled.steps):
        for fault in (*_reads_too_early(step, there), *_undeclared_reads(step), *_wrong_writes(step, there)):
            raise AssertionError(f"{plan.name}: step {number}, {step.kind} of {', '.join(step.fused)}, {fault}")
        there.update(step.outputs)
    for root in map(base_of, plan.graph.roots):
        if root not in there:
            raise AssertionError(f"{plan.name}: no step writes the result {root}")


def _reads_too_early(step: Step, there: Container[Node]) -> Iterator[str]:
    """Say which values a step reads that are not in memory."""
    for value in map(base_of, (*step.inputs, *step.repair_inputs)):
        if value not in there and value.op != "const":
            yield f"reads {value} before it is written"


def _undeclared_reads(step: Step) -> Iterator[str]:
    """Say what a step, or its epilogue, needs that it neither computes before nor has among its inputs."""
    known = {*step.inputs, *step.repair_inputs}
    for node in step.nodes:
        for operand in _operands(node, known):
            if operand not in known and operand.op != "const":
                yield f"computes {node} from {operand}, which is none of its inputs"
        known.add(node)
    if step.epilogue is not None:
        yield from _undeclared_reads(step.epilogue)
        for value in (*step.epilogue.inputs, *step.epilogue.repair_inputs):
            if value not in known:
                yield f"has an epilogue that reads {value}, which is none of its inputs"


def _operands(node: Node, known: Container[Node]) -> Iterable[Node]:
    """Return what a node is computed from: of the exact form of a guard, only the arguments that it reaches."""
    if node.op != "guard":
        return node.inputs
    exact = g.topological(node.inputs[1:], lambda n: () if n in known else n.inputs)
    return (node.inputs[0], *(n for n in exact if n.op == "input"))


def _wrong_writes(step: Step, there: Container[Node]) -> Iterator[str]:
    """Say what a step writes that is there already, or that it does not compute; factors come with their product."""
    for node in step.outputs:
        if node in there:
            yield f"writes {node} again"
        if (node.inputs[0] if node.op == "factor" else node) not in step.node_set:
            yield f"writes {node}, which it does not compute"


def _phases(plan: Plan, arguments: Sequence[Node], bound: Container[int]) -> Iterator[Phase]:
    """Yield the plans that run for a plan, in their order, each with what it is given by argument number."""
    given = [Given(n.shape, n.dtype) for n in arguments]
    if plan.prepare is not None:
        yield plan.prepare, {k: value for k, value in enumerate(given) if k in bound}
        given += _results(plan.prepare)
    if plan.blocks is None:
        yield plan, dict(enumerate(given))
    else:
        yield from _phases_of_blocks(plan.blocks, given)


def _phases_of_blocks(blocks: Blocks, given: Sequence[Given]) -> Iterator[Phase]:
    """Yield the plans of blocks, as `_phases`, each with the arguments that `Blocks` says it has, in their order.

    A block is given its parts of the sources, then what blocks share, then the sums.
    """
    before, common, zeros = map(_results, (blocks.before, blocks.common, blocks.zeros))
    if blocks.before is not None:
        yield blocks.before, dict(enumerate(given))
    arrays = {False: dict(enumerate(given)), True: dict(enumerate(before))}
    read = [(arrays[s.before].get(s.number, _NOTHING), s) for s in blocks.sources]
    sources = [(Given(s.shape or value.shape, value.dtype), s.mode) for value, s in read]
    if blocks.common is not None:
        yield blocks.common, dict(enumerate(value for value, _ in sources))
    if blocks.zeros is not None:
        yield blocks.zeros, {}
    for block, rows in ((blocks.plan, blocks.rows), (blocks.last, blocks.total % blocks.rows)):
        if block is not None:
            parts = [_part(*source, blocks.total, rows) for source in sources]
            yield block, dict(enumerate([*parts, *common, *zeros]))
    if blocks.after is not None:
        collected = [Given((blocks.total, o.node.shape[1]), o.dtype) for o in blocks.plan.outputs]
        yield blocks.after, dict(enumerate([*given[: blocks.arguments], *collected, *zeros, *before]))


def _results(plan: Plan | None) -> list[Given]:
    outputs: Sequence[Output] = () if plan is None else plan.outputs
    return [Given(o.node.shape, o.dtype) for o in outputs]


def _part(value: Given, mode: int, total: int, rows: int) -> Given:
    """Return the part of an array that a block takes along the axis `mode`: `rows` of `total`."""
    down, across = (rows if axis == mode and n == total else n for axis, n in enumerate(value.shape))
    return value._replace(shape=(down, across))
