"""Operations on traced arrays: each checks its operands as NumPy does and adds nodes to the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NoReturn

import numpy as np

from .. import dtypes
from ..errors import TraceError
from ..ir import graph as g
from .axes import Axes, normalize_axes
from .broadcasting import align, matrix_node
from .number import TracedNumber
from .tracer import TraceProtocol, Tracer
from .user_code import fail, user_line
from .value import ScalarArgument


def as_tracer(value: Any, trace: TraceProtocol) -> Tracer:
    """Make a tracer of a number; arrays have to be arguments of the fused function."""
    if isinstance(value, Tracer):
        if value._trace is not trace:
            fail("an array of another fused function's trace", "pass it as an argument instead of through a closure")
        return value
    if type(value) is TracedNumber:
        if value._trace is not trace:
            fail("a number of another fused function's trace", "pass it as an argument")
        return trace.array(g.number(value._number, value.name), ())
    if isinstance(value, ScalarArgument):
        return trace.array(g.const(float(value), value.name), ())
    if isinstance(value, (bool, int, float)) and not isinstance(value, np.generic):
        return trace.array(g.const(value), ())
    if isinstance(value, (np.generic, np.ndarray)) and value.ndim == 0:
        try:
            dtype = dtypes.name_of(value.dtype)
        except TypeError as error:
            fail(f"an operation with a {value.dtype} number", f"{error}; or make it a Python number with .item()")
        return trace.array(g.cast(g.const(value.item()), dtype), ())
    if type(value) is np.ndarray or hasattr(value, "__cuda_array_interface__"):
        return trace.constant(value)
    if hasattr(value, "shape"):
        fail(
            f"an operation with a captured array of shape {tuple(value.shape)}",
            "only arguments of the fused function can be arrays; make it an argument (bind() can fix it)",
        )
    fail(f"an operation with a {type(value).__name__}", "an array or a number is expected")


def recorded(function: Callable[..., Tracer]) -> Callable[..., Tracer]:
    """Record each call of a function as one operation under the function's name."""
    name = function.__name__

    @wraps(function)
    def call(*operands: Any, **options: Any) -> Tracer:
        named = operands[0] if name in ("apply", "reduce") else name
        trace = trace_of((*operands, *options.values()))
        with trace.call(named, (*operands, *options.values())) as done:
            return done(function(*operands, **options))

    return call


def trace_of(values: Iterable[Any]) -> TraceProtocol:
    for value in values:
        if isinstance(value, Tracer):
            return value._trace
    raise AssertionError("no traced operand")


@recorded
def apply(op: str, *operands: Any) -> Tracer:
    """Apply a pointwise operator with NumPy's broadcasting and promotion."""
    trace = trace_of(operands)
    traced = [as_tracer(o, trace) for o in operands]
    dtype = g.promoted(t._node for t in traced)
    if op in _REFUSED_FOR_MASKS and dtype == "bool":
        fail(f"{op} of masks (bool arrays)", _REFUSED_FOR_MASKS[op])
    if op in _INTEGER_RULES and dtype == "int64":
        return _INTEGER_RULES[op](*traced)
    nodes, axes = align(traced, op)
    try:
        return trace.array(g.pointwise(op, *nodes), axes)
    except TraceError as error:
        fail(op, str(error))


def _refuse_integers(op: str) -> Callable[..., Tracer]:
    def refuse(*_: Tracer) -> NoReturn:
        fail(f"{op} of integers", "NumPy computes it in integers; convert with .astype(np.float64) first")

    return refuse


# Integer semantics of operators whose table rows are float functions.
_INTEGER_RULES: dict[str, Callable[..., Tracer]] = {
    "absolute": lambda x: apply("maximum", x, -x),
    "sign": lambda x: (x > 0).astype("int64") - (x < 0).astype("int64"),
    "floor": lambda x: x.copy(),
    "ceil": lambda x: x.copy(),
    "trunc": lambda x: x.copy(),
    "reciprocal": _refuse_integers("reciprocal"),
    "power": _refuse_integers("power"),
}
_REFUSED_FOR_MASKS = {
    "subtract": "use ~, ^ or np.logical_not, as NumPy asks for",
    "negative": "use ~, ^ or np.logical_not, as NumPy asks for",
    "square": "a mask is its own square",
}


# Reductions for which NumPy accepts axis 0 or -1 of 0-d arrays.
_AXIS_OF_SCALARS = ("sum", "prod", "max", "min")


def _refuse_options(operation: str, **options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            fail(f"{operation} with {name}=", "that option is not supported in a fused function")


@recorded
def reduce(op: str, x: Tracer, axis: Any, keepdims: bool = False, dtype: Any = None, **options: Any) -> Tracer:
    """Reduce along one axis, several, or all of them."""
    _refuse_options(op, **options)
    if x.ndim == 0 and op in _AXIS_OF_SCALARS and isinstance(axis, (int, np.integer)) and axis in (0, -1):
        axis = ()
    positions = normalize_axes(axis, x.ndim, op)
    if dtype is not None:
        x = x.astype(dtype)
    elif x._node.dtype == "bool" and op in ("sum", "prod"):
        return reduce(op, x.astype("float64"), axis, keepdims).astype("int64")
    elif not dtypes.is_float(x._node.dtype):
        x = x.astype("float64") if op == "mean" else x
    if not dtypes.is_float(x._node.dtype):
        fail(op, f"a float operand is expected, got {x._node.dtype}; convert it with .astype first")
    if op == "logsumexp" and any(x.shape[p] == 0 for p in positions):
        return reduce("sum", x, axis, keepdims) - np.inf
    if op in ("max", "min", "expsum") and any(x.shape[p] == 0 for p in positions):
        raise ValueError(f"{op}: zero-size array to a reduction operation which has no identity\n  at {user_line()}")
    labels = sorted({x._axes[p] for p in positions} - {None}, reverse=True)  # type: ignore[type-var]
    node = x._node
    if op == "mean" and len(labels) == 2:
        total = g.reduce("sum", g.reduce("sum", node, 1), 0)
        node = g.pointwise("divide", total, g.const(float(x._node.size)))
    elif op == "expsum" and not labels:
        node = g.pointwise("exp", g.pointwise("subtract", node, g.stop_gradient(node)))
    else:
        for label in labels:
            node = g.reduce(op, node, label)  # type: ignore[arg-type]
    return x._trace.array(node, _reduced_axes(x, positions, keepdims))


def _reduced_axes(x: Tracer, positions: tuple[int, ...], keepdims: bool) -> Axes:
    if keepdims:
        return x._axes
    return tuple(a for p, a in enumerate(x._axes) if p not in positions)


def count(x: Tracer, axis: Any) -> int:
    """Count the elements that a reduction along `axis` combines."""
    total = 1
    for p in normalize_axes(axis, x.ndim):
        total *= x.shape[p]
    return total


@recorded
def variance(x: Tracer, axis: Any, ddof: float = 0, keepdims: bool = False, **options: Any) -> Tracer:
    """Compute the variance with `ddof` fewer degrees of freedom."""
    _refuse_options("var", **options)
    if not dtypes.is_float(x._node.dtype):
        x = x.astype("float64")
    positions = normalize_axes(axis, x.ndim)
    n = count(x, axis)
    if len(positions) == 1 and x._axes[positions[0]] == 0 and x.shape[positions[0]] > 1:
        result = reduce("moment2", x, axis, keepdims)
    else:
        centred = x - reduce("mean", x, axis, keepdims=True)
        result = reduce("mean", apply("square", centred), axis, keepdims)
    if ddof == 0:
        return result
    degrees = max(n - ddof, 0)
    return result * (n / degrees) if degrees else result * float(n) / 0.0


def clip(x: Any, low: Any = None, high: Any = None, **options: Any) -> Tracer:
    _refuse_options("clip", **options)
    if low is None and high is None:
        return x.copy()
    if low is None:
        return apply("minimum", x, high)
    if high is None:
        return apply("maximum", x, low)
    return apply("clip", x, low, high)


def power(base: Any, exponent: Any) -> Tracer:
    """Raise to a power as `numpy.power`, with its special cases for the exponents 2, 1/2, 1, -1."""
    if isinstance(exponent, (int, float)) and not (
        isinstance(exponent, (bool, ScalarArgument, np.generic)) or type(exponent) is TracedNumber
    ):
        if isinstance(base, Tracer) and not dtypes.is_float(base._node.dtype):
            return _integer_power(base, exponent)
        short: dict[float, Callable[[], Tracer]] = {
            2.0: lambda: apply("square", base),
            1.0: lambda: base.copy(),
            0.5: lambda: apply("sqrt", base),
            -1.0: lambda: apply("reciprocal", base),
        }
        if float(exponent) in short and isinstance(base, Tracer):
            return short[float(exponent)]()
    return apply("power", base, exponent)


def _integer_power(base: Tracer, exponent: float) -> Tracer:
    """Raise integers to a power: small ones by products, float exponents in float64 as NumPy does."""
    if isinstance(exponent, float):
        return power(base.astype("float64"), exponent)
    if base._node.dtype != "int64" or not 1 <= exponent <= 8:
        return _refuse_integers("power")(base)
    result = base.copy()
    for _ in range(exponent - 1):
        result = result * base
    return result


def mask_logic(op: str, symbol: str, *operands: Any) -> Tracer:
    for o in operands:
        if not isinstance(o, bool) and not (isinstance(o, Tracer) and o._node.dtype == "bool"):
            fail(f"the operator {symbol}", "it works on masks (comparisons); got another dtype")
    return apply(op, *operands)


@recorded
def matmul(a: Any, b: Any) -> Tracer:
    """Multiply vectors and matrices as `numpy.matmul`; a product with a vector becomes a weighted sum."""
    trace = trace_of((a, b))
    a, b = as_tracer(a, trace), as_tracer(b, trace)
    for operand in (a, b):
        if operand.ndim == 0:
            raise ValueError(
                f"matmul: operands need 1 or 2 dimensions, got shapes {a.shape} and {b.shape}\n  at {user_line()}"
            )
        if operand.ndim > 2:
            fail("matmul", f"operands need 1 or 2 dimensions, got shapes {a.shape} and {b.shape}")
        if not dtypes.is_float(operand._node.dtype):
            fail("matmul", f"float operands are expected, got {operand._node.dtype}")
    if a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"matmul: the last dimension of {a.shape} must equal the first of {b.shape} "
            f"({a.shape[-1]} != {b.shape[0]})\n  at {user_line()}"
        )
    if a.ndim == 1 and b.ndim == 1:
        return reduce("sum", apply("multiply", a, b), 0)
    if b.ndim == 1:
        return reduce("sum", apply("multiply", a, trace.array(b._node, (None, *b._axes))), 1)
    if a.ndim == 1:
        return reduce("sum", apply("multiply", trace.array(a._node, (*a._axes, None)), b), 0)
    return trace.array(g.matmul(matrix_node(a), matrix_node(b)), (0, 1))


def dot(a: Any, b: Any) -> Tracer:
    """`numpy.dot`; numbers take part in promotion as arrays do."""
    trace = trace_of((a, b))
    a, b = (o if isinstance(o, Tracer) else as_tracer(np.asarray(o), trace) for o in (a, b))
    return matmul(a, b) if a.ndim and b.ndim else apply("multiply", a, b)
