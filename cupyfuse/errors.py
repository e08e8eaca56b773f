"""Exceptions of cupyfuse."""

from __future__ import annotations


class TraceError(TypeError):
    """A fused function contains an operation that cannot be traced; the message names it and the user's line."""


class TraceAttributeError(TraceError, AttributeError):
    """A traced array lacks an attribute of NumPy's arrays; `hasattr` is False for it."""


class EngineError(RuntimeError):
    """The engine failed to compile, load or launch a kernel."""


class ClusterError(EngineError):
    """The GPU has no place for the blocks of a cluster at once; other launch configurations may do."""


class NotDifferentiable(TypeError):
    """An operator on the path of a gradient has no derivative; the message names it."""
