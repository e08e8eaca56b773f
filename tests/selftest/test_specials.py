"""The tables of special values: proven against eager PyTorch, NumPy and SciPy, and kept by every engine and dtype."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import special as scipy_special
from support import FLOATS, Engine

from cupyfuse import EngineError
from cupyfuse.api.fuse import Fused
from cupyfuse.ir.operators import POINTWISE, REDUCTIONS
from cupyfuse.selftest import pointwise, reductions, specials, symbols
from cupyfuse.selftest.formats import FORMATS, Format
from cupyfuse.selftest.target import Target

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered|Mean of empty|Degrees of freedom:RuntimeWarning")


# Eager definitions --------------------------------------------------------------------------------------------------


def torched(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of PyTorch's, on NumPy arrays."""
    return lambda x: function(torch.tensor(x)).numpy()


def gelu(x: Any) -> Any:
    """The formula of PyTorch's documentation and of its GPU kernels; its vectorised CPU kernels differ at infinity."""
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2.0)))


def gelu_tanh(x: Any) -> Any:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def slope(function: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative of a function of PyTorch's by its autograd, on NumPy arrays."""

    def call(x: Any) -> Any:
        given = torch.tensor(x, requires_grad=True)
        (found,) = torch.autograd.grad(function(given).sum(), given)
        return found.numpy()

    return call


def safe(function: Callable[..., Any]) -> Callable[..., Any]:
    """The package's own: a product or quotient, NaN where it is smaller than 1e-30 and no factor is zero."""

    def call(a: Any, b: Any) -> Any:
        result = function(a, b)
        nothing = a == 0 or (function is np.multiply and b == 0)
        return result if nothing or not abs(result) < 1e-30 else result * np.nan

    return call


EAGER: dict[str, Callable[..., Any]] = {
    "relu": torched(F.relu),
    "relu6": torched(F.relu6),
    # F.leaky_relu refuses slopes that are no plain numbers on some paths; this is its formula.
    "leaky_relu": lambda x, slope: x if x > 0 else x * slope,
    "gelu": torched(gelu),
    "gelu_tanh": torched(gelu_tanh),
    "silu": torched(F.silu),
    "mish": torched(F.mish),
    "gelu_slope": slope(gelu),
    # PyTorch's is NaN where its cubes overflow, too.
    "gelu_tanh_slope": lambda x: slope(gelu_tanh)(np.clip(x, -1e3, 1e3)) + 0 * x,
    "silu_slope": slope(F.silu),
    "hardswish": torched(F.hardswish),
    "hardsigmoid": torched(F.hardsigmoid),
    "sigmoid": torched(torch.sigmoid),
    "log_sigmoid": torched(F.logsigmoid),
    "softplus": lambda x, beta, threshold: x if x * beta > threshold else np.log1p(np.exp(x * beta)) / beta,
    "elu": lambda x, alpha: x if x > 0 else alpha * np.expm1(x),
    "celu": lambda x, alpha: x if x > 0 else alpha * np.expm1(x / alpha),
    "selu": torched(F.selu),
    "softsign": torched(F.softsign),
    "erf": scipy_special.erf,
    "where": lambda condition, a, b: a if condition != 0 else b,
    "clip": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "hardtanh": lambda x, low, high: np.minimum(np.maximum(x, low), high),
    "finite_or_zero": lambda x: x if np.isfinite(x) else np.zeros_like(x),
    "log_relative": lambda top, total: np.log(total) if np.isfinite(top) else top,
    "plus_log": lambda top, total: top + np.log(total) if np.isfinite(top) else top,
    "safe_multiply": safe(np.multiply),
    "safe_divide": safe(np.divide),
}
# With their default parameters, PyTorch's own functions for what is written out above.
TORCH_OWN = {
    "leaky_relu(0.125)": lambda x: F.leaky_relu(x, 0.125),
    "leaky_relu(0)": lambda x: F.leaky_relu(x, 0.0),
    "leaky_relu(inf)": lambda x: F.leaky_relu(x, math.inf),
    "leaky_relu(nan)": lambda x: F.leaky_relu(x, math.nan),
    "softplus(1,20)": lambda x: F.softplus(x, 1.0, 20.0),
    "softplus(2,20)": lambda x: F.softplus(x, 2.0, 20.0),
    "elu(0.75)": lambda x: F.elu(x, 0.75),
    "celu(1.5)": lambda x: F.celu(x, 1.5),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "clip(-0.75,1.25)": lambda x: torch.clamp(x, -0.75, 1.25),
    "hardtanh(-0.75,1.25)": lambda x: F.hardtanh(x, -0.75, 1.25),
    "absolute": torch.abs,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "reciprocal": torch.reciprocal,
    "rint": torch.round,
}
# PyTorch multiplies by 6 before it divides by 6, which overflows; the table has x itself there.
OVERFLOWS = {("hardswish", ("max",))}


def eager(name: str) -> Callable[..., Any]:
    operator, numbers = pointwise.parse_name(name)
    function = EAGER.get(operator) or getattr(np, operator)
    return lambda *x: function(*x, *(x[0].dtype.type(n) for n in numbers))


def run_eagerly(function: Callable[..., Any], operands: tuple[str, ...], form: Format) -> float:
    """The function in the type that the format is computed in, its result rounded to the format."""
    # Arrays of one element: NumPy takes a single exponent 0.5 for a square root, which has other special values.
    given = [form.rounded([symbols.value(s, form)]).astype(form.computed.dtype) for s in operands]
    with np.errstate(all="ignore"):
        return float(np.asarray(function(*given)).astype(form.dtype)[0])


def tolerance(name: str) -> float:
    return POINTWISE[pointwise.parse_name(name)[0]].ulps


# The tables themselves ----------------------------------------------------------------------------------------------


def test_every_operator_and_reduction_has_special_values(monkeypatch: pytest.MonkeyPatch) -> None:
    assert specials.missing() == []
    monkeypatch.setitem(POINTWISE, "softshrink", dataclasses.replace(POINTWISE["relu"], name="softshrink"))
    monkeypatch.setitem(REDUCTIONS, "norm", dataclasses.replace(REDUCTIONS["sum"], name="norm"))
    assert specials.missing() == ["norm", "softshrink"]


def test_every_row_has_as_many_operands_as_its_operator() -> None:
    for name, cases in specials.pointwise_cases().items():
        operator, numbers = pointwise.parse_name(name)
        assert {len(c.operands) for c in cases} == {POINTWISE[operator].arity - len(numbers)}, name


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", specials.pointwise_cases())
def test_the_table_is_what_eager_definitions_give(name: str, dtype: str) -> None:
    form = FORMATS[dtype]
    for case in specials.pointwise_cases()[name]:
        got = run_eagerly(eager(name), case.operands, form)
        if (name, case.operands) in OVERFLOWS and dtype != "float16":
            assert got == math.inf and case.expected == "max"
            continue
        # Eager float32 that is rounded to 16 bits, as the engines do it, is itself only so accurate.
        assert symbols.allows(case.expected, got, form, tolerance(name), False), (case, got)


@pytest.mark.parametrize("name", TORCH_OWN)
def test_the_table_is_what_pytorch_gives_in_float64(name: str) -> None:
    form = FORMATS["float64"]
    for case in specials.pointwise_cases()[name]:
        got = float(TORCH_OWN[name](torch.tensor([symbols.value(case.operands[0], form)], dtype=torch.float64)))
        assert symbols.allows(case.expected, got, form, tolerance(name), False), (case, got)


EAGER_REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": np.sum,
    "prod": np.prod,
    "max": np.max,
    "min": np.min,
    "mean": np.mean,
    "moment2": np.var,
    "expsum": lambda x: np.exp(x - x.max()).sum(),
    "distances": lambda x: (x - x.max()).sum(),
    "expdistances": lambda x: ((x - x.max()) * np.exp(x - x.max())).sum(),
    "argmax": np.argmax,
    "argmin": np.argmin,
    "logsumexp": scipy_special.logsumexp,
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_the_table_of_reductions_is_what_numpy_and_scipy_give(name: str, dtype: str) -> None:
    form = FORMATS[dtype]
    for row in specials.reduction_rows():
        x = form.rounded([symbols.value(c, form) for c in row.cells]).astype(form.computed.dtype)
        if row.expected[name] == "error":
            with pytest.raises(ValueError, match=r"zero-size array|empty sequence"):
                EAGER_REDUCTIONS[name](x)
            continue
        with np.errstate(all="ignore"):
            got = float(np.asarray(EAGER_REDUCTIONS[name](x)).astype(form.dtype))
        assert symbols.allows(row.expected[name], got, form, 16, False), (row, name, got)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_the_table_of_rows_is_what_scipy_gives(name: str, dtype: str) -> None:
    form = FORMATS[dtype]
    for row in specials.softmax_rows():
        x = form.rounded([symbols.value(c, form) for c in row.cells]).astype(form.computed.dtype)
        with np.errstate(all="ignore"):
            result = getattr(scipy_special, name)(x).astype(form.dtype)
        for expected, got in zip(row.expected[name].split(","), result, strict=True):
            assert symbols.allows(expected, float(got), form, 16, False), (row, name, got)
        if name == "softmax":  # PyTorch's agrees; its log_softmax is NaN all along a row with an infinity
            result = torch.softmax(torch.tensor(x.astype(np.float64)), 0).numpy()
            for expected, got in zip(row.expected[name].split(","), result, strict=True):
                assert symbols.allows(expected, float(got), FORMATS["float64"], 16, False), (row, name, got)


# Symbols ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "got", "allowed"),
    [
        ("0", 0.0, True),
        ("0", -0.0, False),
        ("-0", -0.0, True),
        ("+-0", -0.0, True),
        ("0", 1e-45, False),
        ("nan", math.nan, True),
        ("nan", math.inf, False),
        ("inf", math.inf, True),
        ("inf", -math.inf, False),
        ("inf", 3e38, False),
        ("-inf|nan", math.nan, True),
        ("-inf|nan", math.inf, False),
        ("~", 3e38, True),
        ("~", math.inf, False),
        ("~", math.nan, False),
        ("1", 1.0, True),
        ("1", 1.0 + 2.0**-23, True),
        ("1", 1.0 + 2.0**-22, False),
        ("ln2", 0.69314718, True),
        ("max", math.inf, False),
        ("inf(max)", math.inf, True),
        ("sub", 1.4e-45, True),
        ("sub", 4.2e-45, False),
    ],
)
def test_what_an_entry_allows(expected: str, got: float, allowed: bool) -> None:
    assert symbols.allows(expected, got, FORMATS["float32"], 1.0, False) is allowed


def test_entries_that_depend_on_the_format_and_on_the_engine() -> None:
    half, single = FORMATS["float16"], FORMATS["float32"]
    assert symbols.allows("inf(max)", half.max, half, 0.0, False)
    assert not symbols.allows("inf(max)", math.inf, half, 0.0, False)
    for flushing in (False, True):
        assert symbols.allows("-sub", -0.0, single, 0.0, flushing) is flushing
        assert not symbols.allows("-sub", 0.0, single, 0.0, flushing), "with the sign"
        assert not symbols.allows("nor", 0.0, single, 0.0, flushing), "normal numbers are no zeros"
    assert symbols.allows("nor", 0.0, single, 1.0, True), "but rounding may take one below"
    with pytest.raises(ValueError, match="infinite"):
        symbols.value("infinite", single)


def test_subnormal_operands_may_be_taken_for_zero() -> None:
    cases = specials.pointwise_cases()["ceil"]
    (tiny,) = [c for c in cases if c.operands == ("sub",)]
    assert specials.expected_when_flushed(tiny, cases) == "1|0"
    (one,) = [c for c in cases if c.operands == ("1",)]
    assert specials.expected_when_flushed(one, cases) == "1"


# Engines ------------------------------------------------------------------------------------------------------------


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", FLOATS)
def test_operators_keep_the_table(engine: Engine, dtype: str) -> None:
    target = Target(engine.xp)
    compared = pointwise.check_specials(target, FORMATS[dtype])
    assert not target.failures, "\n".join(map(str, target.failures[:20]))
    assert compared == len(target.variants) * sum(map(len, specials.pointwise_cases().values())) > 2000


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("dtype", FLOATS)
def test_reductions_keep_the_table(engine: Engine, dtype: str) -> None:
    target = Target(engine.xp)
    compared = reductions.check_specials(target, FORMATS[dtype])
    assert not target.failures, "\n".join(map(str, target.failures[:20]))
    assert compared > len(REDUCTIONS) * len(specials.reduction_rows())


@pytest.mark.parametrize(
    ("name", "wrong", "given", "got"),
    [
        ("relu", lambda x: np.fmax(x, x.dtype.type(0)), "relu of nan (vectors)", "0.0"),
        ("reciprocal", lambda x: 1 / np.abs(x), "reciprocal of -0 (vectors)", "inf"),
        ("trunc", lambda x: np.trunc(x) + 0, "trunc of -0 (vectors)", "0.0"),
        ("hardswish", lambda x: x * np.clip(x + 3, 0, 6) / 6, "hardswish of max (vectors)", "inf"),
    ],
)
def test_a_wrong_operator_is_named(
    name: str, wrong: Callable[..., Any], given: str, got: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POINTWISE, name, dataclasses.replace(POINTWISE[name], numpy=wrong))
    monkeypatch.setattr(pointwise, "groups", pointwise.groups.__wrapped__)  # plans hold the functions of their rows
    target = Target(np)
    pointwise.check_specials(target, FORMATS["float32"])
    assert {f.what for f in target.failures} == {name}
    assert (given, got) in {(f.given, f.got) for f in target.failures}
    assert f"{name} in float32: {given} gave {got}, expected" in "\n".join(map(str, target.failures))


def test_a_wrong_reduction_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(REDUCTIONS["max"], numpy=lambda x, axis: np.fmax.reduce(x, axis=axis, keepdims=True))
    monkeypatch.setitem(REDUCTIONS, "max", wrong)
    target = Target(np)
    reductions.check_specials(target, FORMATS["float32"])
    found = {(f.what, f.given) for f in target.failures}
    assert ("max", "nan,1,2 (reductions of 3 elements along axis 1)") in found
    assert ("max", "nan,1,2 (reductions of 5000 elements along axis 1)") in found


@pytest.mark.parametrize("error", [EngineError, RuntimeError, MemoryError])
def test_what_does_not_run_is_a_failure(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not compile; CuPy's errors of the device, and of its memory, are the other two."""

    def refuse(self: Fused, *args: Any, **kwargs: Any) -> None:
        raise error("the kernel elementwise_kernel could not be compiled")

    monkeypatch.setattr(Fused, "__call__", refuse)
    target = Target(np)
    assert pointwise.check_specials(target, FORMATS["float32"]) == 0
    assert len(target.failures) == len(pointwise.groups())
    assert "could not be compiled" in str(target.failures[0])
