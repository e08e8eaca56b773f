"""The operator tables: every row against independent formulas, its accuracy, derivatives, dtypes and documentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import special as scipy_special
from support import FLOATS, INF, NAN, assert_equal, compute, dtype_of, unit

from cupyfuse.ir.operators import POINTWISE, REDUCTIONS, Operator, Reduction

POINTWISE_ROWS = [pytest.param(row, id=row.name) for row in POINTWISE.values()]
FLOAT_ROWS = [pytest.param(row, id=row.name) for row in POINTWISE.values() if row.takes_floats]
INTEGER_ROWS = [pytest.param(row, id=row.name) for row in POINTWISE.values() if row.gives_integers]
REDUCTION_ROWS = [pytest.param(row, id=row.name) for row in REDUCTIONS.values()]

# What each operator means, in float64, written without the package: NumPy, SciPy, or the formula of its definition.


def logistic(x: Any) -> Any:
    return scipy_special.expit(x)


def softplus(x: Any) -> Any:
    return np.logaddexp(0.0, x)


def gated_slope(x: Any, z: Any, rate: Any) -> Any:
    """The derivative of x logistic(z), where z has the derivative `rate`."""
    return logistic(z) + x * logistic(z) * logistic(-z) * rate


MEANING: dict[str, Callable[..., Any]] = {
    "relu": lambda x: np.where(x < 0, 0.0, x),
    "relu6": lambda x: np.clip(x, 0, 6),
    "leaky_relu": lambda x, slope: np.where(x < 0, slope * x, x),
    "gelu": lambda x: x * scipy_special.ndtr(x),
    "gelu_tanh": lambda x: x * logistic(2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)),
    "gelu_slope": lambda x: scipy_special.ndtr(x) + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi),
    "gelu_tanh_slope": lambda x: gated_slope(
        x, 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3), 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2)
    ),
    "silu": lambda x: x * logistic(x),
    "silu_slope": lambda x: gated_slope(x, x, 1),
    "sigmoid": logistic,
    "log_sigmoid": scipy_special.log_expit,
    "softplus": lambda x, beta, threshold: np.where(x * beta > threshold, x, softplus(x * beta) / beta),
    "mish": lambda x: x * np.tanh(softplus(x)),
    "elu": lambda x, alpha: np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0))),
    "celu": lambda x, alpha: np.maximum(0, x) + np.minimum(0, alpha * np.expm1(np.minimum(x, 0) / alpha)),
    "selu": lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0))),
    "hardsigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "hardswish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
    "softsign": lambda x: x / (1 + abs(x)),
    "erf": scipy_special.erf,
    "clip": np.clip,
    "hardtanh": np.clip,
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1 / x,
    "sign": lambda x: np.where(x > 0, 1.0, np.where(x < 0, -1.0, x)),
    "safe_multiply": np.multiply,
    "safe_divide": np.divide,
    "finite_or_zero": lambda x: np.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0),
    "log_relative": lambda top, total: np.where(np.isfinite(top), np.log(total), top),
    "plus_log": lambda top, total: np.where(np.isfinite(top), top + np.log(total), top),
}
PARAMETERS = {
    "leaky_relu": (0.01,),
    "softplus": (2.0, 20.0),
    "elu": (0.7,),
    "celu": (1.7,),
    "clip": (-0.75, 1.25),
    "hardtanh": (-0.75, 1.25),
}  # fmt: skip
# Defined, or smooth, for positive operands alone.
POSITIVE = {"sqrt", "log", "log2", "log10", "power", "log_relative", "plus_log"}
ABOVE_MINUS_ONE = {"log1p"}
BELOW_ONE = {"arcsin", "arccos", "arctanh"}


def meaning(row: Operator) -> Callable[..., Any]:
    return MEANING.get(row.name) or getattr(np, row.name)


def operands(row: Operator, rng: np.random.Generator, size: int = 4000) -> list[np.ndarray[Any, Any]]:
    """Operands of ordinary size in the operator's domain; parameters as 0-d arrays."""
    numbers = PARAMETERS.get(row.name, ())
    drawn = [rng.standard_normal(size) * 2 for _ in range(row.arity - len(numbers))]
    if row.name in POSITIVE:
        drawn = [np.abs(d) + 0.05 for d in drawn]
    if row.name in ABOVE_MINUS_ONE:
        drawn = [np.abs(d) - 0.9 for d in drawn]
    if row.name in BELOW_ONE:
        drawn = [0.95 * np.tanh(d) for d in drawn]
    if row.name == "arccosh":
        drawn = [np.abs(d) + 1.01 for d in drawn]
    if row.name == "where":
        drawn[0] = drawn[0] > 0
    return [*drawn, *(np.asarray(n) for n in numbers)]


@pytest.mark.parametrize("row", [*POINTWISE_ROWS, *REDUCTION_ROWS])
def test_every_row_is_complete(row: Operator | Reduction) -> None:
    table = POINTWISE if isinstance(row, Operator) else REDUCTIONS
    assert table[row.name] is row  # type: ignore[index]
    assert len(row.doc) > 2 and row.doc.endswith(".") and "\n" not in row.doc and row.doc == row.doc.strip()
    assert row.flops >= 1


@pytest.mark.parametrize("row", POINTWISE_ROWS)
def test_arity_is_that_of_the_cuda_expression(row: Operator) -> None:
    places = [f"{{{k}}}" for k in range(3)]
    assert [p in row.cuda for p in places] == [k < row.arity for k in range(3)]
    assert row.cuda.count("(") == row.cuda.count(")")


EXACT = {"negative", "absolute", "sign", "floor", "ceil", "rint", "trunc", "finite_or_zero", "where"}
EXACT |= {"fmod", "maximum", "minimum", "clip", "hardtanh", "relu", "relu6"}


@pytest.mark.parametrize("row", POINTWISE_ROWS)
def test_rows_state_their_accuracy(row: Operator, rng: np.random.Generator) -> None:
    """The self-test holds operators to this; here only that the statement makes sense."""
    assert row.exact == (row.name in EXACT or row.result in ("bool", "int"))
    assert row.ulps in (0.0, 0.5) or row.ulps > 0.5
    if row.scale is not None:
        x = operands(row, rng, 50)
        assert not row.exact
        scale = row.scale(*x)
        assert scale.shape == (50,)
        assert np.all(scale >= 0)
        if row.name in ("gelu", "softplus"):  # a multiple of the result, not of its operands
            assert np.all(scale >= np.abs(row.numpy(*x)))


@pytest.mark.parametrize("row", REDUCTION_ROWS)
def test_reductions_state_their_accuracy(row: Reduction, rng: np.random.Generator) -> None:
    x = rng.standard_normal((7, 5))
    for axis in (0, 1):
        scale = row.scale(x, axis)
        assert scale.shape == row.numpy(x, axis).shape
        assert np.all(scale >= np.abs(row.numpy(x, axis)) * (1 - 1e-12))
    assert (row.ulps == 0) == (row.name in ("max", "min", "argmax", "argmin"))


@pytest.mark.parametrize("row", FLOAT_ROWS)
def test_numpy_meaning_is_the_definition(row: Operator, rng: np.random.Generator) -> None:
    x = operands(row, rng)
    with np.errstate(all="ignore"):
        expected = meaning(row)(*x)
        actual = row.numpy(*x)
    # Either formula rounds a handful of times; GELU's and mish's tails lose digits relative to x, not to the result.
    np.testing.assert_allclose(actual, expected, rtol=64 * unit("float64"), atol=64 * unit("float64"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("row", FLOAT_ROWS)
def test_dtype_is_kept(row: Operator, dtype: str, rng: np.random.Generator) -> None:
    """The engines widen 16-bit floats before they apply a row: 32 and 64 bits are what rows see."""
    x = [v if v.dtype == bool else v.astype(dtype) for v in operands(row, rng, 16)]
    result = np.asarray(row.numpy(*x))
    assert result.dtype == (np.bool_ if row.result == "bool" else dtype_of(dtype))
    assert result.shape == (16,)


@pytest.mark.parametrize("row", INTEGER_ROWS)
def test_integers_have_the_same_meaning(row: Operator, rng: np.random.Generator) -> None:
    """Engines compute all integers in int64; that narrow ones wrap is in tests/trace/test_integers.py."""
    x = [rng.integers(-70, 70, 4000) for _ in range(row.arity)]
    with np.errstate(all="ignore"):
        result, expected = row.numpy(*x), meaning(row)(*x)
    assert result.dtype == np.int64
    np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in POINTWISE.values() if not row.takes_floats])
def test_integers_alone_have_no_derivative(row: Operator) -> None:
    x = [np.arange(5)] * row.arity
    assert row.derivative(Namespace(), row.numpy(*x), *x) == (None,) * row.arity


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("row", FLOAT_ROWS)
def test_float32_meaning_is_accurate(row: Operator, dtype: str, rng: np.random.Generator) -> None:
    """Arguments of any type, computed as the engines do, against float64: a few roundings, inside and of the result."""
    x = [v if v.dtype == bool else v.astype(dtype_of(dtype)) for v in operands(row, rng)]
    wide = [v if v.dtype == bool else v.astype(np.float64) for v in x]
    narrow = [v if v.dtype == bool else v.astype(compute(dtype)) for v in x]
    with np.errstate(all="ignore"):
        expected = np.asarray(meaning(row)(*wide), np.float64)
        actual = np.asarray(row.numpy(*narrow), np.float64)
    if row.result == "bool":
        np.testing.assert_array_equal(actual, expected)
        return
    u = unit(compute(dtype))
    sizes = sum(np.abs(v) for v in wide if v.dtype != bool)
    conditioned = np.abs(expected) * (1 + sizes) + sizes + 1  # exponentials move by u |x| |y| when x rounds inside
    assert np.all(np.abs(actual - expected) <= 16 * u * conditioned)


# The ends of the range (special values have tables of their own: test_specials.py) ------------------------------


@pytest.mark.parametrize("x", [30.0, 100.0, 1e4, 5e37])
@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu", "mish", "hardswish", "elu", "selu", "softplus", "relu"])
def test_large_arguments_neither_overflow_nor_turn(name: str, x: float) -> None:
    """Activations are close to x far right, and to a bounded limit far left; 5e37 is near float32's largest number."""
    row = POINTWISE[name]
    parameters = [np.asarray(n, np.float32) for n in PARAMETERS.get(name, ())]
    with np.errstate(all="ignore"):
        right, left = row.numpy(np.array([x, -x], np.float32), *parameters)
    scale = 1.0507009873554805 if name == "selu" else 1.0
    assert right == pytest.approx(scale * x, rel=1e-6)
    assert -2 < left < 1e-20


@pytest.mark.parametrize(("name", "a", "b"), [("safe_multiply", 1e-20, 1e-20), ("safe_divide", 1e-20, 1e20)])
def test_safe_products_own_up_to_lost_digits(name: str, a: float, b: float) -> None:
    """A factor that underflow has touched must send its readers to the exact form: NaN, unless it is zero for good."""
    safe = POINTWISE[name].numpy
    x = np.array([a, 0.0, 3.0, INF], np.float32)
    y = np.array([b, b, 2.0, 2.0], np.float32)
    result = safe(x, y)
    assert np.isnan(result[0])
    assert_equal(result[1:], np.array([0.0, 6.0 if name == "safe_multiply" else 1.5, INF], np.float32))


# Derivatives --------------------------------------------------------------------------------------------------------


class Namespace:
    """Every operator by name, on arrays: what the derivatives of the table are written against."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *x: POINTWISE[name].numpy(*(np.asarray(v) for v in x))


SMOOTH = [row for row in POINTWISE.values() if row.takes_floats and row.result != "bool"]
KINKS = {"relu6": (0, 6), "hardsigmoid": (-3, 3), "hardswish": (-3, 3)} | dict.fromkeys(
    ("clip", "hardtanh"), (-0.75, 1.25)
)
STEPS = {"floor", "ceil", "rint", "trunc", "sign"}  # constant between their jumps


def away_from_kinks(row: Operator, x: list[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    keep = np.abs(x[0]) > 1e-3 if x[0].dtype != bool else np.ones(x[0].shape, bool)
    for kink in KINKS.get(row.name, ()):
        keep &= np.abs(x[0] - kink) > 1e-3
    if row.name in STEPS:
        keep &= np.abs(2 * x[0] - np.rint(2 * x[0])) > 1e-3
    if row.name in ("maximum", "minimum"):
        keep &= np.abs(x[0] - x[1]) > 1e-3
    if row.name in ("fmod", "remainder", "floor_divide"):
        quotient = x[0] / x[1]
        keep &= (np.abs(quotient - np.rint(quotient)) > 1e-2) & (np.abs(x[1]) > 0.1)
    if row.name == "tan":
        keep &= np.abs(np.cos(x[0])) > 0.1
    return [v[keep] if v.ndim else v for v in x]


@pytest.mark.parametrize("row", [pytest.param(row, id=row.name) for row in SMOOTH])
def test_derivative_is_the_slope(row: Operator, rng: np.random.Generator) -> None:
    """Central differences: an error of h² |f'''| / 6 from the formula, and u |f| / h from rounding; h = 1e-5."""
    x = away_from_kinks(row, operands(row, rng, 300))
    h = 1e-5
    y = row.numpy(*x)
    partials = row.derivative(Namespace(), y, *x)
    assert len(partials) == row.arity
    for k, partial in enumerate(partials):
        if x[k].dtype == bool or (row.name, k) == ("log_relative", 0):  # top only says where the sum was infinite
            assert partial is None
            continue
        up, down = ([*x[:k], x[k] + step, *x[k + 1 :]] for step in (h, -h))
        slope = (row.numpy(*up) - row.numpy(*down)) / (2 * h)
        expected = np.broadcast_to(0.0 if partial is None else partial, slope.shape)
        scale = 1 + np.abs(slope) + np.abs(y)
        if row.name in ("reciprocal", "divide"):
            scale = scale * (1 + np.abs(y)) ** 2 * 10
        assert np.all(np.abs(slope - expected) <= 1e-6 * scale**2), f"operand {k}"


REDUCTION_MEANING: dict[str, Callable[..., Any]] = {
    "expsum": lambda x, axis: np.exp(x - x.max(axis, keepdims=True)).sum(axis, keepdims=True),
    "distances": lambda x, axis: x.sum(axis, keepdims=True) - x.shape[axis] * x.max(axis, keepdims=True),
    "expdistances": lambda x, axis: scipy_special.xlogy(*[np.exp(x - x.max(axis, keepdims=True))] * 2).sum(
        axis, keepdims=True
    ),
    "moment2": lambda x, axis: x.var(axis, keepdims=True),
    "logsumexp": lambda x, axis: scipy_special.logsumexp(x, axis, keepdims=True),
}


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("row", REDUCTION_ROWS)
def test_reductions(row: Reduction, axis: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((7, 5))
    expected = REDUCTION_MEANING.get(row.name) or (lambda x, axis: getattr(np, row.name)(x, axis, keepdims=True))
    np.testing.assert_allclose(row.numpy(x, axis), expected(x, axis), rtol=1e-13)


@pytest.mark.parametrize("value", [2.5, -0.0, INF, -INF, NAN])
@pytest.mark.parametrize("row", REDUCTION_ROWS)
def test_what_is_said_of_one_element(row: Reduction, value: float) -> None:
    """`identity_on_one`: the reduction of one element is that element; the other rows have a constant there."""
    x = np.array([[value]])
    with np.errstate(all="ignore"):
        result = row.numpy(x, 1)
    constant = {"expsum": 1.0, "moment2": 0.0, "distances": 0.0, "expdistances": 0.0}.get(row.name)
    assert row.identity_on_one == (constant is None and not row.gives_position)
    if row.gives_position:
        np.testing.assert_array_equal(result, [[0]])
    elif constant is None:
        np.testing.assert_array_equal(result, x)
    else:
        np.testing.assert_array_equal(result, [[constant if np.isfinite(value) else NAN]])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_equal_elements_have_no_variance(dtype: str, axis: int) -> None:
    """As in the kernels, whose deviations are from a first element: sums of equal numbers are rounded."""
    (row,) = [row.values[0] for row in REDUCTION_ROWS if row.values[0].name == "moment2"]
    numbers = np.linspace(0.1, 1, 50, dtype=dtype)
    x = np.broadcast_to(numbers, (7, 50)) if axis == 0 else np.broadcast_to(numbers[:, None], (50, 7))
    assert not row.numpy(x, axis).any()


DIFFERENTIABLE = [row for row in REDUCTION_ROWS if row.values[0].about is None]


@pytest.mark.parametrize("row", DIFFERENTIABLE)
def test_reduction_derivative_is_the_slope(row: Reduction, rng: np.random.Generator) -> None:
    """`derivative` is per element and leaves a mean's 1/n to its division; those about others occur in composites."""
    x, h = rng.standard_normal((1, 6)), 1e-5
    partial = np.broadcast_to(row.derivative(Namespace(), row.numpy(x, 1), x), x.shape)
    for j in range(6):
        step = np.zeros((1, 6))
        step[0, j] = h
        slope = (row.numpy(x + step, 1) - row.numpy(x - step, 1)) / (2 * h)
        factor = 6 if row.name == "mean" else 1
        assert slope[0, 0] * factor == pytest.approx(partial[0, j], rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_slopes_are_finite_where_the_operator_is(name: str, dtype: str) -> None:
    """And so are theirs: PyTorch's of tanh GELU are NaN where cubes overflow."""
    x = np.array([-1e15, -1e10, -40.0, 40.0, 1e10, 1e15], dtype)
    row = POINTWISE[f"{name}_slope"]
    with np.errstate(all="ignore"):
        slope = row.numpy(x)
        (second,) = row.derivative(Namespace(), slope, x)
    np.testing.assert_allclose(slope, x > 0, atol=1e-12)
    np.testing.assert_allclose(second, 0, atol=1e-12)
