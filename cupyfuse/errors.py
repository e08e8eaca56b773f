"""Exceptions of cupyfuse."""

from __future__ import annotations


class TraceError(TypeError):
    """An operation of a fused function cannot be traced; the message names it and the line of the user's code."""


class TraceAttributeError(TraceError, AttributeError):
    """Traced arrays lack this array attribute; `hasattr` is False for it."""


class EngineError(RuntimeError):
    """The engine failed to compile, load or launch a kernel."""


class NotDifferentiable(TypeError):
    """A gradient needs the derivative of an operator that has none here; the message names it."""
