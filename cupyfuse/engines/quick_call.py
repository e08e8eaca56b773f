"""Calls of plans that allocate results and a workspace, and launch: one generated function for each plan.

Other calls, which write to arrays of the caller or hand arrays to library steps, go through `CudaExecutable`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..cuda.launch import Launch, compile_text
from ..cuda.runtime import Runtime

# Takes the arrays and the float arguments, the device being current.
QuickCall = Callable[[Sequence[Any], Sequence[float]], list[Any]]


def quick_call(
    runtime: Runtime,
    arguments: int,
    results: Sequence[Callable[[], Any]],
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
    results : sequence of callable
        Allocate the results.
    takes_numbers : bool
        Whether the float arguments are among the addresses.
    workspace : int
        Its bytes, 0 for none.
    offsets : sequence of int
        Of the values in the workspace, whose addresses follow those of arguments and results, and the numbers.
    launch : Launch
    """
    names: dict[str, Any] = {f"empty{k}": empty for k, empty in enumerate(results)}
    names |= {"address": runtime.address, "workspace": runtime.workspace, "stream": runtime.stream, "launch": launch}
    given = [f"a{k}" for k in range(arguments)]
    made = [f"r{k}" for k in range(len(results))]
    addresses = [f"address({name})" for name in (*given, *made)]
    if takes_numbers:
        addresses.append("numbers")
    lines = [f"({', '.join(given)},) = arrays"] if given else []
    lines += [f"{name} = empty{k}()" for k, name in enumerate(made)]
    if workspace:
        lines += [f"memory = workspace({workspace})", "start = memory.ptr"]
        addresses += [f"start + {offset}" for offset in offsets]
    lines += [f"launch([{', '.join(addresses)}], stream())", f"return [{', '.join(made)}]"]
    text = "\n".join(["def call(arrays, numbers):", *(f"    {line}" for line in lines), ""])
    exec(compile_text(text), names)
    found: QuickCall = names.pop("call")  # a cycle would keep the kernels alive
    return found
