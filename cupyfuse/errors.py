"""Exceptions of cupyfuse."""

from __future__ import annotations


class TraceError(TypeError):
    """A fused function contains an operation that cannot be traced; the message names it and the user's line."""


class TraceAttributeError(TraceError, AttributeError):
    """A traced array lacks an attribute of NumPy's arrays; `hasattr` is False for it in code of libraries."""


class EngineError(RuntimeError):
    """The engine failed to compile, load or launch a kernel."""


class ClusterError(EngineError):
    """The GPU has no place for the blocks of a cluster at once; other launch configurations may do."""


class NotDifferentiable(TypeError):
    """An operator on the path of a gradient has no derivative; the message names it."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; the name of its type where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
