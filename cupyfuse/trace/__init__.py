"""Tracing: run the user's function once on tracers, and build the graph of what it does.

A `Tracer` behaves like an array of known shape and dtype; each operation on it adds a node to the graph of its `Trace`.
From the bottom up: `user_code` (errors that name the user's line), `axes`, `value` (array attributes), `watched`
(arrays that the function created), `tracer` (operators and methods, which call the trace; Python's operators in
`arithmetic`, changes in place and views in `changes`), `folds` (arrays of several dimensions as rows x columns),
`broadcasting` (and reshapes), `promotion` and `library` (steps that run the array library's own functions; `failures`:
which of them raise for some values), `operations`, `exponentials`, `products`, `labels`, `parts`, `masked`, `places`
and `indexing`, `shape_functions`, `numpy` (functions and ufuncs), and `trace`, which binds them together. `autodiff`
(with `cotangents`, which are scaled and summed, and `quotients`, whose operands belong together) and `saved` build
backward passes.
"""

from .axes import Axes, AxisLabels, normalize_axes
from .broadcasting import broadcast_to, matrix_node, reshape
from .number import TracedNumber, traced_number
from .numbers_of_call import NumbersOfCall
from .operations import apply, as_tracer, clip, power, reduce, variance
from .products import matmul
from .trace import ASSIGNMENT, Call, Trace
from .tracer import Tracer
from .user_code import fail, refusals_reach_the_caller, user_line
from .value import DESCRIPTION, NUMPY_NUMBERS, NamedConstant

__all__ = [
    "ASSIGNMENT",
    "Axes",
    "AxisLabels",
    "Call",
    "DESCRIPTION",
    "NUMPY_NUMBERS",
    "NamedConstant",
    "NumbersOfCall",
    "Trace",
    "TracedNumber",
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
    "traced_number",
    "refusals_reach_the_caller",
    "reshape",
    "user_line",
    "variance",
]
