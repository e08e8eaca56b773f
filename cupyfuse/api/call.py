"""What every call of a fused function does: find the engine where its arrays are, run, hand back the results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import devices, dtypes
from ..devices import Device
from ..engines.row_blocks import ready
from ..plan.plan import Plan
from ..trace import Tracer
from . import arrays
from .arguments import Results, replace


@dataclass(frozen=True)
class Runnable:
    """A plan made ready to run: its executable for one engine, its prepared values, the form of its results."""

    plan: Plan
    results: Results
    execute: Callable[[Sequence[Any], Sequence[Any]], list[Any]]
    prepared: list[Any]


NESTED = (tuple, list, dict)


def holds_tracer(value: Any) -> bool:
    if isinstance(value, NESTED):
        return any(map(holds_tracer, value.values() if isinstance(value, dict) else value))
    return type(value) is Tracer


def arrays_in(values: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
    """The arrays among some arguments, as the engine gets them."""
    found: list[Any] = []

    def leaf(value: Any, name: str) -> None:
        found.append(value if isinstance(value, arrays.Spec) else arrays.enter(value, name).array)

    for position, value in enumerate(values):
        replace(value, names[position] if names else "", leaf, lambda number, name: number)
    return found


def engine_for(leaves: list[Any], values: Sequence[Any], names: Sequence[str]) -> Callable[..., Any]:
    """The engine that runs where the arrays are.

    Raises
    ------
    TypeError
        Arrays are on the CPU and on a GPU, or on several GPUs.
    """
    places = {f"GPU {a.data.device_id}" if arrays.is_cupy(a) else "the CPU" for a in leaves}
    if len(places) > 1:
        where = []
        for name, value in zip(names, values, strict=True):
            for a in arrays_in([value]):
                where.append(f"{name} on {f'GPU {a.data.device_id}' if arrays.is_cupy(a) else 'the CPU'}")
        raise TypeError(
            f"arguments are in different memories: {', '.join(where)}; move them to one, for example with cupy.asarray"
        )
    if not leaves:
        raise TypeError("no argument is an array; pass at least one NumPy, CuPy or DLPack array")
    if arrays.is_cupy(leaves[0]):
        from ..cuda.runtime import on_device
        from ..engines.cuda import CudaExecutable

        return functools.partial(ready, functools.partial(CudaExecutable, runtime=on_device(leaves[0].data.device_id)))
    from ..engines.numpy import NumpyExecutable

    return functools.partial(ready, NumpyExecutable)


def device_of(leaves: Sequence[Any], default: str = "") -> Device | None:
    """The GPU that arrays are on, or else the one that is named; None without a name, or for one not in the table."""
    if leaves and arrays.is_cupy(leaves[0]):
        from ..cuda.runtime import on_device

        return on_device(leaves[0].data.device_id).device
    return devices.find(default) if default else None


def finish(runnable: Runnable, leaves: list[Any], givers: list[Any], out: Any) -> Any:
    """Run, and give the results the caller's form and kind."""
    if runnable.plan.graph.effects:
        _check_effects(runnable.plan, leaves, out)
    if out is None:
        results = runnable.execute([*leaves, *runnable.prepared], [None] * len(runnable.plan.outputs))
    else:
        results = _into(runnable, leaves, out)
    giver = givers[0]
    if giver is not None:
        results = [giver(r) for r in results]
    elif type(leaves[0]) is np.ndarray:
        results = [r[()] if r.ndim == 0 else r for r in results]
    return out if out is not None else runnable.results.rebuild(results)


def _check_effects(plan: Plan, leaves: list[Any], out: Any) -> None:
    """Arguments that the function changes in place have to be writable, and share memory with no other argument."""
    spans = [arrays.span(leaf) for leaf in leaves]
    for arg, _ in plan.graph.effects:
        name = plan.graph.inputs[arg].name
        if isinstance(leaves[arg], np.ndarray) and not leaves[arg].flags.writeable:
            raise ValueError(f"argument {name!r}: the function changes it in place, but the array is read-only")
        low, high = spans[arg]
        for other, (start, stop) in enumerate(spans):
            if other != arg and low < stop and start < high:
                raise ValueError(
                    f"argument {name!r}: the function changes it in place, but it shares memory with argument "
                    f"{plan.graph.inputs[other].name!r}; pass a copy of one of them"
                )


def _into(runnable: Runnable, leaves: list[Any], out: Any) -> list[Any]:
    """Run with the results written to the caller's arrays."""
    wanted = runnable.plan.outputs
    given = list(out) if isinstance(out, (tuple, list)) else [out]
    if len(given) != len(wanted):
        raise ValueError(f"out: expected {len(wanted)} array(s), one for each result, got {len(given)}")
    targets = []
    for position, (array, output) in enumerate(zip(given, wanted, strict=True)):
        name = "out" if len(given) == 1 else f"out[{position}]"
        if not arrays.is_array(array) or isinstance(array, arrays.Spec):
            raise TypeError(f"{name}: expected an array, got {type(array).__name__}")
        target = arrays.enter(array, name).array
        if arrays.is_cupy(target) != arrays.is_cupy(leaves[0]):
            raise TypeError(f"{name}: expected an array in the same memory as the arguments; allocate it beside them")
        try:
            dtype = dtypes.name_of(target.dtype)
        except TypeError as error:
            raise TypeError(f"{name}: {error}") from None
        if tuple(target.shape) != output.shape or dtype != output.dtype:
            raise ValueError(
                f"{name}: expected shape {output.shape} and dtype {output.dtype}, got shape {tuple(target.shape)} and "
                f"dtype {dtype}"
            )
        if isinstance(target, np.ndarray) and not target.flags.writeable:
            raise ValueError(f"{name}: the array is read-only")
        if target.size and any(n > 1 and s == 0 for n, s in zip(target.shape, target.strides, strict=True)):
            raise ValueError(f"{name}: several elements of the array share one place in memory; pass a plain array")
        targets.append(target)
    safe = [
        not any(arrays.overlap(t, other) for other in (*leaves, *runnable.prepared, *targets[:i]))
        for i, t in enumerate(targets)
    ]
    direct = [t if ok else None for t, ok in zip(targets, safe, strict=True)]
    results = runnable.execute([*leaves, *runnable.prepared], direct)
    for target, result, ok in zip(targets, results, safe, strict=True):
        if not ok:
            target[...] = result
    return []
