"""Tracing: run the user's function once on tracers, and build the graph of what it does.

A `Tracer` behaves like an array of known shape and dtype; each operation on it adds a node to the graph of its `Trace`.
From the bottom up: `user_code` (errors that name the user's line), `axes`, `value` (array attributes), `tracer`
(operators and methods, which call the trace), `broadcasting` (and reshapes), `promotion` and `library` (steps that run
the array library's own functions), `operations`, `numpy` (functions and ufuncs), and `trace`, which binds them
together. `autodiff` and `saved` build backward passes.
"""

from .axes import Axes, normalize_axes
from .broadcasting import broadcast_to, matrix_node, reshape
from .operations import apply, as_tracer, clip, matmul, power, reduce, variance
from .trace import Call, Trace
from .tracer import Tracer
from .user_code import fail, user_line
from .value import ScalarArgument

__all__ = [
    "Axes",
    "Call",
    "ScalarArgument",
    "Trace",
    "Tracer",
    "apply",
    "as_tracer",
    "broadcast_to",
    "clip",
    "fail",
    "matmul",
    "matrix_node",
    "normalize_axes",
    "power",
    "reduce",
    "reshape",
    "user_line",
    "variance",
]
