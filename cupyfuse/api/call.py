"""One call of a fused function: choose the engine, check `out`, run the plan, export the results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import devices
from ..devices import Device
from ..engines.row_blocks import load
from ..plan.plan import Plan
from ..trace import Tracer
from . import arrays
from .as_written import AsWritten
from .dependence import Dependence
from .results import Results
from .structures import structure_of
from .targets import import_targets


@dataclass(eq=False)
class Runnable:
    """A plan loaded by an engine, with the arrays and the result structure that a call needs.

    Attributes
    ----------
    plan : Plan
    results : Results
        The structure of the results.
    execute : callable
        Runs the plan on arrays, the arrays of `out` or None, and the call's numbers.
    kept : list of array
        Constants and prepacked values, which follow the arguments.
    as_written : AsWritten or None
        The function itself, where it is called instead of the plan.
    depends : Dependence
        The numbers that it serves.
    calls : int
        How many were walked by `Signature`, after the one that compiled, or since the recognizer was forgotten.
    forgotten : int
        How often that was.
    found : int
        How many were recognised by generated code since the last one that was walked.
    recognizer : Recognizer, False or None
        Recognises further calls; False if they have to be walked, None if that is not known yet.
    is_plain : bool
        Whether a call that exports nothing returns the only result as the engine gives it.
    quick : callable or None
        What `execute` does where nothing is given for results, in less of the host's time.
    """

    plan: Plan
    results: Results
    execute: Callable[[Sequence[Any], Sequence[Any] | None, Sequence[float]], list[Any]]
    kept: list[Any]
    as_written: AsWritten | None = None
    depends: Dependence = field(default_factory=Dependence)
    calls: int = 0
    forgotten: int = 0
    found: int = 0
    recognizer: Any = None
    is_plain: bool = field(init=False)
    quick: Callable[[Sequence[Any], Sequence[float]], list[Any]] | None = field(init=False)

    def __post_init__(self) -> None:
        self.quick = getattr(self.execute, "quick", None)
        changes = self.as_written is not None or bool(self.plan.graph.effects)
        self.is_plain = self.results.is_single and not self.results.scalars and not changes


def tracer_in(value: Any, parents: tuple[int, ...] = ()) -> Tracer | None:
    """Return the first traced array that an argument is or contains; `parents` are the ids of its containers."""
    if type(value) is Tracer:
        return value
    if id(value) in parents:
        return None
    try:
        structure = structure_of(value)
    except TypeError:
        return None
    found = (tracer_in(c, (*parents, id(value))) for c in structure.children) if structure else ()
    return next((t for t in found if t is not None), None)


def contains_tracer(value: Any) -> bool:
    return tracer_in(value) is not None


def engine_for(leaves: Sequence[Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return the function that loads plans for the device of the arrays, whose names are for the error messages.

    Raises
    ------
    TypeError
        Arrays are on the CPU and on a GPU, or on several GPUs.
    """
    places = ["the CPU" if (place := arrays.place_of(a)) is None else f"GPU {place}" for a in leaves]
    if len(set(places)) > 1:
        where = ", ".join(f"{name} on {place}" for name, place in zip(names, places, strict=True))
        raise TypeError(f"arguments are on different devices: {where}; move them to one, for example with cupy.asarray")
    if arrays.is_cupy(leaves[0]):
        from ..cuda.runtime import on_device
        from ..engines import cuda

        return functools.partial(load, functools.partial(cuda.load, runtime=on_device(leaves[0].data.device_id)))
    from ..engines.numpy import NumpyExecutable

    return functools.partial(load, NumpyExecutable)


# Runs the plan over bound arrays, given the leaves and the engine's loader; returns the prepacked values.
Prepack = Callable[[Plan, Sequence[Any], Callable[..., Any]], "list[Any]"]


def deferred(engine: Callable[..., Any], plan: Plan, prepack: Prepack | None) -> Callable[..., list[Any]]:
    """Return a function that runs a plan, which is loaded by its first call: plans of functions that run as written.

    The first call also computes the values that depend on bound arrays alone.
    """
    loaded: list[tuple[Callable[..., list[Any]], list[Any]]] = []

    def execute(values: Sequence[Any], *rest: Any) -> list[Any]:
        if not loaded:
            prepacked = prepack(plan.prepare, values, engine) if prepack and plan.prepare else []
            loaded.append((engine(plan, [*values, *prepacked]), prepacked))
        run_plan, prepacked = loaded[0]
        return run_plan([*values, *prepacked], *rest)

    return execute


def device_of(leaves: Sequence[Any], default: str = "") -> Device | None:
    """Return the GPU that the arrays are on; for arrays on the CPU the one named `default`, or None."""
    if leaves and arrays.is_cupy(leaves[0]):
        from ..cuda.runtime import on_device

        return on_device(leaves[0].data.device_id).device
    return devices.find(default) if default else None


def run(
    runnable: Runnable,
    leaves: list[Any],
    numbers: Sequence[float],
    export: Callable[[Any], Any] | None,
    out: Any,
    values: Sequence[Any] = (),
) -> Any:
    """Run a plan, and return the results in the function's structure and the caller's array library.

    Parameters
    ----------
    runnable : Runnable
    leaves : list of array
    numbers : sequence of float or int
        The float and integer arguments.
    export : callable or None
        Exports results to the library of the first array.
    out : array, sequence of arrays, or None
        Receives the results.
    values : sequence
        The value of each parameter, for a function that runs as written.
    """
    if out is None and export is None and runnable.is_plain:
        operands = [*leaves, *runnable.kept] if runnable.kept else leaves
        quick = runnable.quick
        return (runnable.execute(operands, None, numbers) if quick is None else quick(operands, numbers))[0]
    if runnable.plan.graph.effects:
        _check_effects(runnable.plan, leaves)
    if runnable.as_written is not None and out is None:
        return runnable.as_written(values, leaves)
    if out is not None:
        _run_into(runnable, leaves, numbers, out)
        return out
    results = runnable.execute([*leaves, *runnable.kept], None, numbers)
    if export is not None:
        results = [export(r) for r in results]
    elif type(leaves[0]) is np.ndarray:
        for position in runnable.results.scalars:
            results[position] = results[position][()]
    return runnable.results.rebuild(results, numbers)


def _check_effects(plan: Plan, leaves: list[Any]) -> None:
    """Check that arguments modified in place are writable, and share no memory with other arguments.

    The same array may be several arguments: one traced array stands for all of them.
    """
    for arg, _ in plan.graph.effects:
        changed, name = leaves[arg], plan.graph.inputs[arg].name
        if isinstance(changed, np.ndarray) and not changed.flags.writeable:
            raise ValueError(f"argument {name!r}: the function changes it in place, but the array is read-only")
        for other, leaf in enumerate(leaves):
            if leaf is not changed and arrays.share_memory(changed, leaf):
                raise ValueError(
                    f"argument {name!r}: the function changes it in place, but it shares memory with argument "
                    f"{plan.graph.inputs[other].name!r}; pass a copy of one of them"
                )


def _check_targets(plan: Plan, leaves: list[Any], targets: list[Any]) -> None:
    """Check that targets share no memory with arguments modified in place, but for one that is given the same value."""
    for arg, value in plan.graph.effects:
        # A cast to its own dtype is the value as it is stored.
        written = [value, *(value.inputs if value.op == "cast" and value.inputs[0].dtype == value.dtype else ())]
        for target, output in zip(targets, plan.outputs, strict=True):
            is_written = output.node in written and output.axes.in_order
            is_result = is_written and arrays.is_same(target, leaves[arg])
            if not is_result and arrays.share_memory(leaves[arg], target):
                name = plan.graph.inputs[arg].name
                raise ValueError(f"out: shares memory with argument {name!r}, which the function changes in place")


def _run_into(runnable: Runnable, leaves: list[Any], numbers: Sequence[float], out: Any) -> None:
    """Run a plan, and write the results to `out`: directly, or by a copy where memory overlaps with other operands."""
    targets = import_targets(runnable.plan.outputs, leaves[0], out)
    _check_targets(runnable.plan, leaves, targets)
    operands = [*leaves, *runnable.kept]
    direct = []
    for position, target in enumerate(targets):
        is_shared = arrays.may_share_memory_with_any(target, [*operands, *targets[:position]])
        direct.append(None if is_shared else target)
    results = runnable.execute(operands, direct, numbers)
    for target, passed, result in zip(targets, direct, results, strict=True):
        if passed is None:
            target[...] = result
