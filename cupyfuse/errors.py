"""The exceptions that cupyfuse raises beside Python's own."""

from __future__ import annotations


class TraceError(TypeError):
    """A fused function did something that cannot become part of a fused chain.

    The message names the operation and the line of the user's function.
    """


class TraceAttributeError(TraceError, AttributeError):
    """An attribute of arrays that traced arrays do not have; `hasattr` says so."""


class EngineError(RuntimeError):
    """The engine could not compile, load or launch what the plan asks for."""


class NotDifferentiable(TypeError):
    """A gradient was asked for through an operator that has no derivative here; the message names it."""
