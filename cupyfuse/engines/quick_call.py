"""Calls of plans that allocate what they need, and launch: one generated function for each plan.

Other calls, which copy results, change arguments or hand arrays to library steps, go through `CudaExecutable`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..cuda.runtime import Runtime
from ..cuda.structs import Launch
from ..generated import define

# Takes the arrays, the numbers and the arrays for results, if those are given.
QuickCall = Callable[..., list[Any]]


def quick_call(
    runtime: Runtime,
    arguments: int,
    results: Sequence[Callable[[], Any] | None],
    takes_numbers: bool,
    workspace: int,
    offsets: Sequence[int],
    launch: Launch,
) -> QuickCall:
    """Return the call of a plan.

    Parameters
    ----------
    runtime : Runtime
    arguments : int
        How many arrays it takes.
    results : sequence of callable or None
        Allocate the results, without holding them; None for those that calls give.
    takes_numbers : bool
        Whether numbers are among the addresses.
    workspace : int
        Its bytes, 0 for none.
    offsets : sequence of int
        Of the values in the workspace, whose addresses follow those of arguments and results, and the numbers.
    launch : Launch
    """
    names: dict[str, Any] = {f"empty{k}": empty for k, empty in enumerate(results)}
    names |= {name: getattr(runtime, name) for name in ("address", "hold", "is_current", "made_current", "stream")}
    names |= {"workspace": runtime.workspace, "launch": launch}
    given = [f"a{k}" for k in range(arguments)]
    written = [f"r{k}" for k in range(len(results))]
    allocated = [name for name, empty in zip(written, results, strict=True) if empty is not None]
    addresses = [f"address({name})" for name in (*given, *written)]
    if takes_numbers:
        addresses.append("numbers")
    lines = [f"({', '.join(given)},) = arrays"] if given else []
    if targets := [name for name in written if name not in allocated]:
        lines.append(f"({', '.join(targets)},) = targets")
    lines += [f"{name} = empty{name[1:]}()" for name in allocated]
    if workspace:
        lines += [f"memory = workspace({workspace}, False)", "start = memory.ptr"]
        addresses += [f"start + {offset}" for offset in offsets]
        allocated.append("memory")
    lines.append("on = stream()")
    if allocated and runtime.hold is not None:
        lines.append(f"if on: hold({', '.join(allocated)})")  # nothing captures the default stream
    lines += [f"launch([{', '.join(addresses)}], on)", f"return [{', '.join(written)}]"]
    parameters = "arrays, numbers=(), targets=()"
    names["on_device"] = define("on_device", parameters, lines, names)
    elsewhere = ["if not is_current():", "    with made_current(): return on_device(arrays, numbers, targets)"]
    return define("call", parameters, [*elsewhere, *lines], names)
