"""Tracing: run the user's function once on stand-ins and write down what it does.

A `Tracer` behaves like an array of known shape and dtype; each operation on it adds a node to the graph of its `Trace`.
From the bottom to the top: `user_code` (errors that name the user's line), `axes`, `value` (what a stand-in knows of
itself), `tracer` (Python's operators, which ask the trace), `broadcasting` (and reshapes), `operations`,
`numpy_functions`, and `trace` with the `Trace` that binds them together.
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
