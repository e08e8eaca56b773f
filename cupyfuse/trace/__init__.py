"""Tracing: run the user's function once on stand-ins and write down what it does.

A `Tracer` behaves like an array of known shape and dtype; each operation on it adds a node to the graph of its `Trace`.
From the bottom to the top: `user_code` (errors that name the user's line), `value` (what a stand-in knows of itself),
`axes` (broadcasting, reshapes), `operations`, `tracer`, `recorder`, and `numpy_functions`, which is loaded when a
function of NumPy's is traced for the first time.
"""

from .axes import broadcast_to, matrix_node, normalize_axes, reshape
from .axes import matrix_node as _matrix
from .operations import apply, as_tracer, clip, matmul, power, reduce, variance
from .recorder import Call, Trace
from .tracer import Tracer
from .user_code import fail, user_line
from .value import Axes, ScalarArgument

__all__ = [
    "Axes",
    "Call",
    "ScalarArgument",
    "Trace",
    "Tracer",
    "_matrix",
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
