"""Operations on traced arrays: each checks its operands as NumPy does and adds nodes to the graph."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from .. import dtypes
from ..errors import TraceError
from ..ir import graph as g
from ..ir.operators import POINTWISE, REDUCTIONS, extended_extremum
from .axes import Axes, normalize_axes
from .broadcasting import align
from .folds import axes_without_copy, fold_along, reduces_without_copy, refolded, takes_copy
from .library import call_library
from .number import TracedFloat, TracedInteger, TracedNumber
from .promotion import UFUNCS, convert, integer_form, mask_form
from .python_numbers import limit_for, weakened
from .tracer import TraceProtocol, Tracer
from .user_code import fail, refuse_options, user_line
from .value import NamedConstant
from .watched import unwatched


def as_tracer(value: Any, trace: TraceProtocol) -> Tracer:
    """Return a value as a tracer: a number, an array that the function created, a list of these, or a range.

    Raises
    ------
    TraceError
        The value belongs to another trace, is an array from outside of the function, or is no array, number or list.
    """
    if isinstance(value, Tracer):
        if value._trace is not trace:
            fail("an array of another fused function's trace", "pass it as an argument instead of through a closure")
        return value
    if isinstance(value, TracedNumber):
        if value._trace is not trace:
            fail("a number of another fused function's trace", "pass it as an argument")
        if type(value) is TracedInteger:
            return trace.array(g.const(value.read()), ())
        if type(value) is TracedFloat:
            return trace.array(g.number(value.number, value.name), ())
        number = value.as_float()
        if number is None:
            return as_tracer(value.read(), trace)
        return trace.array(g.cast(g.number(number.number, value.name), value.dtype.name), ())
    if isinstance(value, NamedConstant):
        return trace.array(g.const(float(value), value.name), ())
    if type(value) in (bool, int, float, complex):
        return trace.array(g.const(value), ())
    if isinstance(value, (int, float, complex)) and not isinstance(value, np.generic):
        value = np.asarray(value)[()]  # of another class, as members of an `IntEnum`: they are not weak in promotion
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        try:
            dtype = dtypes.name_of(value.dtype)
        except TypeError as error:
            fail(f"an operation with a {value.dtype} number", f"{error}; or make it a Python number with .item()")
        return trace.array(g.cast(g.const(value.item()), dtype), ())
    value = unwatched(value)
    if type(value) is np.ndarray or hasattr(value, "__cuda_array_interface__"):
        return trace.constant(value)
    if isinstance(value, (list, tuple, range)):
        made = np.asarray(value)  # while a trace runs, also of traced arrays (`numpy/conversions`)
        return made if isinstance(made, Tracer) else trace.constant(made)
    if hasattr(value, "shape") and not isinstance(value, type):
        fail(
            f"an operation with a captured array of shape {tuple(value.shape)}",
            "only arguments of the fused function can be arrays; make it an argument (bind() can fix it)",
        )
    fail(f"an operation with a {type(value).__name__}", "an array or a number is expected")


def recorded(function: Callable[..., Tracer]) -> Callable[..., Tracer]:
    """Record each call of a function in its trace as one operation: of its name, or of the operator it applies."""
    name = function.__name__

    @wraps(function)
    def call(*operands: Any, **options: Any) -> Tracer:
        """Call the function within a recorded call."""
        operation = operands[0] if name in ("apply", "reduce") else name
        trace = trace_of((*operands, *options.values()))
        with trace.call(operation, (*operands, *options.values())) as record:
            return record(function(*operands, **options))

    return call


def trace_of(values: Iterable[Any]) -> TraceProtocol:
    """Return the trace of the first traced array among operands."""
    for value in values:
        if isinstance(value, Tracer):
            return value._trace
    raise AssertionError("no traced operand")


@recorded
def apply(op: str, *operands: Any) -> Tracer:
    """Apply a pointwise operator of the table with NumPy's broadcasting and promotion."""
    trace = trace_of(operands)
    given = weakened(op, [as_tracer(o, trace) for o in _with_integers_as_floats(op, operands)])
    op = mask_form(op, given)
    converted = convert(op, given)
    if converted.library:
        if op not in UFUNCS and op not in ("where", "clip"):
            fail(f"{op} of {given[0].dtype} arrays", "it works on real floats; convert them with .astype first")
        return call_library(op, [_as_library_argument(t) for t in given])
    form = integer_form(op, converted.operands)
    if form is not None:
        result = form(converted.operands[0])
    else:
        nodes, axes = align(converted.operands, op)
        try:
            result = trace.array(g.pointwise(op, *nodes), axes)
        except TraceError as error:
            fail(op, str(error))
    return trace.array(g.cast(result._node, converted.result), result._axes) if converted.result else result


def _with_integers_as_floats(op: str, operands: Sequence[Any]) -> Sequence[Any]:
    """Return operands with floats in the place of traced integers, where they meet arrays of floats."""
    if not any(type(o) is TracedInteger for o in operands) or not POINTWISE[op].takes_floats:
        return operands
    values = operands[1:] if op == "where" else operands
    dtypes_met = [o._node.dtype for o in values if isinstance(o, Tracer) and o._node.op != "const"]
    if not dtypes_met or not all(map(dtypes.is_float, dtypes_met)):
        return operands
    as_floats = [o.as_float() if type(o) is TracedInteger else o for o in values]
    return [*operands[: len(operands) - len(values)], *as_floats]


def _as_library_argument(x: Tracer) -> Any:
    """Return the tracer of a constant as a Python number, which is weak in promotion, or NumPy scalar; arrays as is."""
    node = x._node
    if node.op == "const":
        return _value_of(node)
    number = node.op == "cast" and node.inputs[0].op == "const"
    return dtypes.to_numpy(node.dtype).type(_value_of(node.inputs[0])) if number else x


def _value_of(constant: g.Node) -> Any:
    """Return the value of a constant; of a number that of the call which is traced, for which alone it is."""
    return constant.value if constant.number is None else constant.number.read()


# Reductions for which NumPy accepts axis 0 or -1 of 0-d arrays.
_AXIS_OF_SCALARS = ("sum", "prod", "max", "min")


@recorded
def reduce(op: str, x: Tracer, axis: Any, keepdims: bool = False, dtype: Any = None, **options: Any) -> Tracer:
    """Reduce along one axis, several, or all of them."""
    refuse_options(op, **options)
    if x.ndim == 0 and op in _AXIS_OF_SCALARS and isinstance(axis, (int, np.integer)) and axis in (0, -1):
        axis = ()
    positions = normalize_axes(axis, x.ndim, op)
    if dtype is not None and dtypes.is_float(dtypes.name_of(dtype)) and not dtypes.is_opaque(x._node.dtype):
        x = x.astype(dtype)
    elif dtype is not None or not dtypes.is_float(x._node.dtype):
        return _reduce_integers(op, x, axis, keepdims, dtype)
    if op == "logsumexp" and any(x.shape[p] == 0 for p in positions):
        return reduce("sum", x, axis, keepdims) - np.inf
    if REDUCTIONS[op].gives_position and any(x.shape[p] == 0 for p in positions):
        raise ValueError(f"attempt to get {op} of an empty sequence\n  at {user_line()}")
    if (REDUCTIONS[op].base or extended_extremum(op)) and any(x.shape[p] == 0 for p in positions):
        raise ValueError(f"{op}: zero-size array to a reduction operation which has no identity\n  at {user_line()}")
    return _reduced(op, x, positions, keepdims)


# Reductions that can be computed as reductions of partial ones.
_IN_PARTS = ("sum", "prod", "mean", "max", "min", "logsumexp")


def _reduced(op: str, x: Tracer, positions: Iterable[int], keepdims: bool) -> Tracer:
    """Reduce an array of floats along some axes."""
    x = _fold_for_reduction(op, x, positions)
    node = _reduce_node(op, x._node, _fully_reduced_axes(x, positions))
    return x._trace.array(node, x._axes.reduced(positions, keepdims))


def _fold_for_reduction(op: str, x: Tracer, positions: Iterable[int]) -> Tracer:
    """Fold an array so that its rows are reduced fully or not at all, and so are its columns.

    Where that takes a copy, axes that are reduced without one come first: the copy is then smaller.
    """
    fold = fold_along(x, positions)
    if op in _IN_PARTS and takes_copy(x, fold) and (part := axes_without_copy(x, positions)):
        x = _reduced(op, x, part, keepdims=True)
        fold = fold_along(x, positions)
    return refolded(x, fold)


def _fully_reduced_axes(x: Tracer, positions: Iterable[int]) -> list[int]:
    """Return the axes of the node, 1 before 0, along which there are only axes of the array that are reduced."""
    rows, cols = x._axes.long
    reduced = set(positions)
    candidates = ((1, cols, x._axes.cols), (0, rows, x._axes.rows))
    return [a for a, long, axes in candidates if reduced.issuperset(long) and not reduced.isdisjoint(axes)]


def _reduce_node(op: str, node: g.Node, node_axes: list[int]) -> g.Node:
    """Reduce a node along its columns (1), rows (0), both or neither."""
    if op == "mean" and len(node_axes) == 2:  # one division
        return g.pointwise("divide", _reduce_node("sum", node, node_axes), g.const(float(node.size)))
    if REDUCTIONS[op].gives_position and not node_axes:
        return g.broadcast(g.cast(g.const(0), "int64"), node.shape)
    if REDUCTIONS[op].about == "max" and not node_axes:
        distance = g.pointwise("subtract", node, g.stop_gradient(node))
        return g.pointwise("exp", distance) if op == "expsum" else distance
    for a in node_axes:
        node = g.reduce(op, node, a)
    return node


# The largest magnitudes of dtypes.
_LARGEST = {"bool": 1, **{name: int(np.iinfo(name).max) + 1 for name in dtypes.NARROW}}
_EXACT_IN_FLOAT64 = 1 << 53


def _reduce_integers(op: str, x: Tracer, axis: Any, keepdims: bool, dtype: Any) -> Tracer:
    """Reduce bools, integers or complex numbers, or to such a dtype: in float64 if exact, else by a library step."""
    own = x._node.dtype
    if op == "mean" and dtype is None and not dtypes.is_opaque(own):
        return reduce(op, x.astype("float64"), axis, keepdims)
    if op not in ("sum", "prod", "mean", "max", "min"):
        if dtypes.is_integer(own):
            return reduce(op, x.astype("float64"), axis, keepdims)
        fail(op, f"a float operand is expected, got {own}; convert it with .astype first")
    if dtype is None and _is_exact_in_float64(op, x, axis):
        result = reduce(op, x.astype("float64"), axis, keepdims)
        return result.astype("int64" if op in ("sum", "prod") else own)
    return call_library(op, [x], {"axis": axis, "keepdims": keepdims} | ({} if dtype is None else {"dtype": dtype}))


def _is_exact_in_float64(op: str, x: Tracer, axis: Any) -> bool:
    """Whether float64 gives the very result of NumPy's reduction of bools or integers, for a dtype known here."""
    own = x._node.dtype
    if own not in _LARGEST:
        return False
    if op == "sum":  # of unsigned integers NumPy's sum is uint64
        return not own.startswith("u") and _LARGEST[own] * x.size <= _EXACT_IN_FLOAT64
    if op == "prod":
        return own == "bool"
    return op in ("max", "min") and count(x, axis) > 0


def count(a: Tracer, axis: Any = None) -> int:
    """Return the number of elements along axes, as `numpy.size`."""
    return math.prod(a.shape[p] for p in normalize_axes(axis, a.ndim))


@recorded
def variance(x: Tracer, axis: Any, ddof: float = 0, keepdims: bool = False, **options: Any) -> Tracer:
    """Compute the variance along axes with `ddof` fewer degrees of freedom."""
    refuse_options("var", **options)
    if dtypes.is_complex(x._node.dtype):
        return call_library("var", [x], {"axis": axis, "ddof": ddof, "keepdims": keepdims})
    if not dtypes.is_float(x._node.dtype):
        x = x.astype("float64")
    positions = normalize_axes(axis, x.ndim)
    n, ddof = count(x, axis), float(ddof)
    if not n:
        return reduce("sum", x, axis, keepdims) / max(-ddof, 0.0)
    result = _biased_variance(x, {p for p in positions if x.shape[p] != 1})
    if not keepdims:
        result = result.squeeze(positions)
    if ddof == 0:
        return result._as_result()
    degrees = max(n - ddof, 0)
    return result * (n / degrees) if degrees else result * float(n) / 0.0  # NaN or infinity, as NumPy's


def _biased_variance(x: Tracer, positions: set[int]) -> Tracer:
    """Compute the biased variance along axes that are longer than one, which stay as axes of length one."""
    if reduces_without_copy(x, positions):
        x = refolded(x, fold_along(x, positions))
    if _is_down_columns(x, positions):
        return _reduced("moment2", x, positions, keepdims=True)
    if x.size and (part := axes_without_copy(x, positions)):
        return _variance_of_parts(x, part, positions - part)
    centred = x - _reduced("mean", x, positions, keepdims=True)
    return _reduced("mean", apply("square", centred), positions, keepdims=True)


def _is_down_columns(x: Tracer, positions: set[int]) -> bool:
    """Whether axes are the rows of a node, along which a mean and then deviations would read all of it twice.

    Along the columns both have a row at hand.
    """
    return bool(positions and x.size) and positions == set(x._axes.long[0])


def _variance_of_parts(x: Tracer, part: set[int], rest: set[int]) -> Tracer:
    """Compute the variance along `part` and `rest`, disjoint and not empty, in one pass along `part`.

    It is the mean of the parts' variances plus the variance of their means (Chan, Golub and LeVeque, 1983). The means
    are taken relative to a number near them, and with what their rounding left out: far from zero that counts as much
    as how far the means are apart, and its square as much as the variances about rounded means. What was left out, and
    the number near the means, do not change the result but for its rounding: they are constants to the derivative.
    """
    x = refolded(x, fold_along(x, part))
    means = _reduced("mean", x, part, keepdims=True)
    left_out = _reduced("mean", _constant(x - means), part, keepdims=True)
    within = _biased_variance(x, part)
    if not _is_down_columns(x, part):  # about the rounded means
        within = within - apply("square", left_out)
    kept = [p for p in range(x.ndim) if means.shape[p] != 1]
    in_one_row = rest.issuperset(kept)
    fold = Axes(means.shape, (), tuple(kept)) if in_one_row else fold_along(means, rest)
    means, left_out, within = (refolded(t, fold) for t in (means, left_out, within))
    if in_one_row:  # which is at hand for the mean and for what follows
        near = _reduced("mean", means, rest, keepdims=True)
    else:  # down the columns the mean would take a pass of its own
        near = means[tuple(slice(0, 1) if p in rest else slice(None) for p in range(x.ndim))]
    between = _biased_variance((means - _constant(near)) + left_out, rest)
    return _reduced("mean", within, rest, keepdims=True) + between


def _constant(x: Tracer) -> Tracer:
    """Return an array through which no derivative passes."""
    return x._trace.array(g.stop_gradient(x._node), x._axes)


def clip(x: Any, low: Any = None, high: Any = None, **options: Any) -> Tracer:
    """Clip as `numpy.clip`; Python integers beyond the limits of an integer dtype are no limits."""
    refuse_options("clip", **options)
    if isinstance(x, Tracer) and x.dtype.kind in "iu":
        limits = np.iinfo(x._node.dtype)
        low = None if type(low) is int and low <= limits.min else low
        high = None if type(high) is int and high >= limits.max else high
        low, high = (limit_for(x._node.dtype, limit) for limit in (low, high))
    if low is None and high is None:
        return x._as_result()
    if low is None:
        return apply("minimum", x, high)
    if high is None:
        return apply("maximum", x, low)
    return apply("clip", x, low, high)


def power(base: Any, exponent: Any) -> Tracer:
    """Raise to a power as `numpy.power`; of reals, 2, 1/2, 1 and -1 as the operator `**`, which gives the same."""
    exponent = exponent.read() if type(exponent) is TracedInteger else exponent
    if not isinstance(base, Tracer) or type(exponent) not in (int, float):
        return apply("power", base, exponent)
    if not dtypes.is_float(base._node.dtype):
        return _integer_power(base, exponent)
    if exponent == 1:
        return base._as_result()
    special = {2.0: "square", 0.5: "sqrt", -1.0: "reciprocal"}.get(exponent)
    return apply("power", base, exponent) if special is None else apply(special, base)


def _integer_power(base: Tracer, exponent: float) -> Tracer:
    """Raise integers to a power: small integer exponents by products, float exponents in float64 as NumPy does."""
    if isinstance(exponent, float):
        return apply("power", base, exponent)
    if not dtypes.is_integer(base._node.dtype) or not 1 <= exponent <= 8:
        return call_library("power", [base, exponent])
    result = base._as_result()
    for _ in range(exponent - 1):
        result = result * base
    return result
