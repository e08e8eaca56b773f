"""Values of columns alone, as of a folded BatchNorm: a step of their own where every row would repeat them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from ... import dtypes
from ...devices import Device
from ...ir import graph as g
from ...ir.graph import Node
from .steps import Step, stages_of, step_of, with_bytes
from .tiles import LAUNCH

_MOST_REPEATED = 4  # FLOPs of a column that every row may compute again: a launch takes longer than these
# Share of the peak rate at which rows compute vectors again: on an H200, BatchNorm's ten FLOPs a column made 1024 rows
# of 8192 behind a bfloat16 product take 44.5 us instead of 20.9.
_REPEATED_SHARE = 0.05
_WORTH = 2 * LAUNCH  # seconds: a launch of few elements, and the host's time for it


class Separated(NamedTuple):
    """A row program in two steps.

    Attributes
    ----------
    columns : Step or None
        Computes the values of columns alone; None where the program stays whole.
    rest : Step
    storage : dict
        The dtype of each value that `columns` writes for `rest`.
    """

    columns: Step | None
    rest: Step
    storage: dict[Node, str]


def take_columns_out(program: Step, steps: Sequence[Step]) -> Separated:
    """Cut values of columns alone off a row program.

    It stays whole if it has one row, if they take at most `_MOST_REPEATED` FLOPs a column, or if another one of `steps`
    stores one of them.
    """
    vectors = _costly_vectors(program)
    if program.domain[0] == 1 or _work(vectors, program) <= _MOST_REPEATED:
        return Separated(None, program, {})
    outputs = [o for o in program.outputs if o not in vectors]
    needed = _needed(outputs, (*program.inputs, *vectors))
    # Results of one element, such as BatchNorm's counter, may be among the vectors.
    stored = [n for n in vectors if n in needed or n in program.outputs]
    if any(n in step.outputs for step in steps if step is not program for n in stored):
        return Separated(None, program, {})
    rest = _part(program, program.domain[0], needed.keys() - vectors.keys(), stored, outputs)
    columns = _part(program, 1, _needed(stored, program.inputs), [], stored)
    return Separated(columns, rest, {n: dtypes.compute_dtype(n.dtype) for n in stored if n not in program.outputs})


def _part(program: Step, rows: int, needed: Container[Node], given: Sequence[Node], outputs: list[Node]) -> Step:
    """Return the step of those nodes and inputs of a program that are `needed`; it also reads the `given` values."""
    nodes = [n for n in program.nodes if n in needed]
    inputs = [i for i in program.inputs if i in needed]
    # Exact forms of guards compute vectors again, too, from what they were computed from.
    exact = set(g.topological(n.inputs[1] for n in nodes if n.op == "guard"))
    repairs = [i for i in dict.fromkeys((*program.repair_inputs, *program.inputs)) if i in exact and i not in inputs]
    return step_of("RowProgram", (rows, program.domain[1]), nodes, [*inputs, *given], outputs, repairs)


def _needed(roots: Iterable[Node], given: Container[Node]) -> dict[Node, None]:
    """Return what roots are computed from, and the roots, down to `given` values."""
    return dict.fromkeys(g.topological(roots, lambda n: () if n in given else g.eager_inputs(n)))


def _costly_vectors(program: Step) -> dict[Node, None]:
    """Return the values of columns alone that take arithmetic: not positions, nor casts of arguments."""
    stages = stages_of(program)
    found: dict[Node, None] = {}
    for node in program.nodes:
        alone = node.shape[0] == 1 and stages[node] < 0
        if alone and (g.flops(node) or any(i in found for i in g.eager_inputs(node))):
            found[node] = None
    return found


def _work(vectors: Iterable[Node], program: Step) -> float:
    """Return the FLOPs of one column."""
    return sum(g.flops(n) / n.size for n in vectors if n.shape == (1, program.domain[1]) and n.size)


def separate_columns(steps: Sequence[Step], storage: dict[Node, str], device: Device | None) -> list[Step]:
    """Give the values of columns alone steps of their own, where rows would take longer to repeat them.

    Parameters
    ----------
    steps : sequence of Step
    storage : dict
        The dtype in which each value is stored; what the new steps write is added.
    device : Device or None
        Of the plan. NumPy computes vectors once for many rows.

    Returns
    -------
    list of Step
        In the order of their launches.
    """
    if device is None:
        return list(steps)
    found: list[Step] = []
    for number, step in enumerate(steps):
        if step.kind in ("RowProgram", "MatVec") and _repeating_time(step, device) > _WORTH:
            columns, rest, vectors = take_columns_out(step, (*found, *steps[number:]))
            storage.update(vectors)
            found += [with_bytes(s, storage) for s in (columns, rest) if s is not None]
        else:
            found.append(step)
    return found


def _repeating_time(program: Step, device: Device) -> float:
    """Estimate the seconds that a row program takes to compute values of columns for all rows but one."""
    vectors = _costly_vectors(program)
    is_double = any(dtypes.compute_dtype(n.dtype) == "float64" for n in vectors)
    rate = device.simt64 if is_double else device.simt
    rows, cols = program.domain
    return _work(vectors, program) * (rows - 1) * cols / (_REPEATED_SHARE * rate)
