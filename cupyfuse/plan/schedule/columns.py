"""Values of columns alone, as of a folded BatchNorm: a step of their own where every row would repeat them."""

from __future__ import annotations

from collections.abc import Sequence

from ... import dtypes
from ...devices import Device
from ...ir import graph as g
from ...ir.graph import Node
from .steps import Step, stages_of, step_of, with_bytes
from .tiles import LAUNCH

_REPEATED = 4  # FLOPs of each column that are computed again for every row: a launch takes longer
# Of the peak rate, what vectors reach whose rows each compute them again: on an H200 1024 rows of 8192 elements behind
# a bfloat16 product took 44.5 us with BatchNorm's ten FLOPs a column among theirs, and 20.9 without.
_REPEATED_SHARE = 0.05
_WORTH = 2 * LAUNCH  # seconds: a launch of few elements, and the host's time for it


def take_columns_out(program: Step, steps: Sequence[Step]) -> tuple[Step | None, Step, dict[Node, str]]:
    """Cut values of columns alone off a row program: return their step, the rest, and dtypes of stored values.

    The step is None where they are few operations, or where another one of `steps` stores a value of theirs.
    """
    vectors, work = _values_of_columns(program)
    if program.domain[0] == 1 or work <= _REPEATED:
        return None, program, {}
    others = [n for n in program.nodes if n not in vectors]
    read = {i for n in others for i in g.eager_inputs(n)}
    stored = [n for n in vectors if n in read or n in program.outputs]
    if any(n in step.outputs for step in steps if step is not program for n in stored):
        return None, program, {}
    inputs = [i for i in program.inputs if any(i in g.eager_inputs(n) for n in vectors)]
    columns = step_of("RowProgram", (1, program.domain[1]), list(vectors), inputs, stored, [])
    kept = [i for i in program.inputs if i in read]
    outputs = [o for o in program.outputs if o not in vectors]
    # A guard that fails computes vectors again, from what they were computed from.
    guarded = set(g.topological(n.inputs[1] for n in others if n.op == "guard"))
    repairs = [i for i in dict.fromkeys((*program.repair_inputs, *inputs)) if i in guarded and i not in kept]
    rest = step_of("RowProgram", program.domain, others, [*kept, *stored], outputs, repairs)
    return columns, rest, {n: dtypes.compute_dtype(n.dtype) for n in stored if n not in program.outputs}


def _values_of_columns(program: Step) -> tuple[dict[Node, None], float]:
    """Return the values of columns alone that a row program computes, and the FLOPs of one column."""
    stages = stages_of(program)
    vectors = dict.fromkeys(n for n in program.nodes if n.shape[0] == 1 and stages[n] < 0)
    return vectors, sum(g.flops(n) / n.size for n in vectors if n.shape == (1, program.domain[1]) and n.size)


def separate_columns(steps: Sequence[Step], storage: dict[Node, str], device: Device | None) -> list[Step]:
    """Give the values of columns alone steps of their own, before row programs that would take longer to repeat them.

    Parameters
    ----------
    steps : sequence of Step
    storage : dict
        The dtype in which each value is stored; what the new steps write is added.
    device : Device or None
        Of the plan. NumPy computes vectors once for many rows.
    """
    found: list[Step] = []
    for number, step in enumerate(steps):
        if device is not None and step.kind == "RowProgram" and _repeating_time(step, device) > _WORTH:
            columns, rest, vectors = take_columns_out(step, (*found, *steps[number:]))
            storage.update(vectors)
            found += [with_bytes(s, storage) for s in (columns, rest) if s is not None]
        else:
            found.append(step)
    return found


def _repeating_time(program: Step, device: Device) -> float:
    """Estimate the seconds that a row program takes to compute values of columns for all rows but one."""
    vectors, work = _values_of_columns(program)
    is_double = any(dtypes.compute_dtype(n.dtype) == "float64" for n in vectors)
    rate = device.simt64 if is_double else device.simt
    rows, cols = program.domain
    return work * (rows - 1) * cols / (_REPEATED_SHARE * rate)
