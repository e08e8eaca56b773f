"""What cannot be traced: an error of the right kind, which names the operation and the user's line."""

from __future__ import annotations

import contextlib
import operator
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.signal
import scipy.spatial
from numpy.lib.stride_tricks import as_strided
from scipy import stats

import cupyfuse as cf

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def from_outside(size: int) -> Any:
    """An array that is not watched: np.frombuffer is not among the functions that create arrays."""
    return np.frombuffer(bytearray(8 * size))


def check(function: Callable[..., Any], error: type[Exception], words: str, *arguments: Any) -> None:
    """The error names the operation (`words`), and the line on which `function` is written."""
    with pytest.raises(error, match=words) as caught:
        cf.fuse(function)(*(arguments or (X,)))
    place = f"{__file__}:{function.__code__.co_firstlineno}"
    assert place in str(caught.value), f"the message does not name {place}:\n{caught.value}"


VALUES_NEEDED: list[tuple[Callable[..., Any], str]] = [
    (lambda x: x if x.sum() > 0 else -x, "branch on an array's values"),
    (lambda x: x * (1 if x.any() else 2), "branch on an array's values"),
    (lambda x: x.max() and x, "branch on an array's values"),
    (lambda x: x * float(x), "conversion .* value"),
    (lambda x: x * (lambda number: number(x.max()))(float), r"conversion .* value(.|\n)*\.item\(\)"),
    (lambda x: x * int(x), "conversion .* value"),
    (lambda x: x + x.__float__(), "conversion .* value"),
    (lambda x: np.tile(x, 99).tolist(), "a list of .* numbers: .*return the array"),
    (lambda x: range(x.max()), "conversion .* value, as a length"),
    (lambda x: np.full(x.argmax(), 2.0), "conversion .* value, as a length"),
    (lambda x: np.ones(x[x > 1].size), "conversion .* value, as a length"),
    (
        lambda x: "%.2f" % x.sum(),  # noqa: UP031
        r"conversion .* value(.|\n)*return what is to be printed",
    ),
    (lambda x: operator.index(x.argmax()), r"conversion .* value(.|\n)*\.item\(\) for a number to compute with"),
    (lambda x: x.sum().item().hex(), r"\.hex: values are not known(.|\n)*return the number"),
    (lambda x: x.sum().as_integer_ratio(), r"\.as_integer_ratio: values are not known(.|\n)*return the number"),
    (lambda x: x * 2 if 1 in x else x, r"`in`.*\(x == value\)\.any\(\)"),
]
UNSUPPORTED: list[tuple[Callable[..., Any], str]] = [
    (lambda x: x[x > 0] + x, r"masked elements and an array"),
    (lambda x: x[x > 0] + x[x > 1], r"different masks"),
    (lambda x: x.__setitem__(x > 0, np.add(x, 1)), r"array of shape \(4, 3\) to masked elements"),
    (lambda x: x.__setitem__(x > 0, x[x > 1]), r"another mask"),
    (lambda x: x.__setitem__([0, 1], x[x > 0]), r"assignment of masked elements"),
    (lambda x: x[x[:, 0] > 0, [0]], r"indexing with a mask beside"),
    (lambda x: [*np.broadcast_to(x[0], (65, 3))], r"iteration over 65"),
    (lambda x: np.sort(x[x > 0]), r"np\.sort: the shape or dtype of its result depends on values"),
    (lambda x: np.cov(x[x[:, 0] > 0]), r"np\.cov: the shape or dtype of its result depends on values"),
    (lambda x: np.quantile(x[x > 0], 0.5, weights=x[x > 0]), r"quantile of masked elements with weights="),
    (lambda x: x[x > 0].sum(where=x[x > 1] > 1), r"an operation on elements of different masks"),
    (lambda x: np.linalg.norm(x[x[:, 0] > 0], -np.inf), r"a norm of a matrix of masked elements"),
    (lambda x: np.linalg.norm(x[x[:, 0] > 0], 2), r"a norm of masked rows"),
    (lambda x: x[True, x > 0], r"indexing with a mask beside other indices"),
    (lambda x: x.view(np.int16), r"view\(.*int16.*of the same size alone; use \.astype"),
    (lambda x: x.view(np.recarray), r"an array of the class recarray.*plain ones"),
    (lambda x: np.ma.masked_where(x > 0, x).sum(), r"class MaskedArray.*use x\[mask\], where= or np\.where"),
    (lambda x: np.ma.masked_array(x, x > 0), r"compiled code that reads arrays in memory"),
    (lambda x: setattr(x, "shape", (-1,)), r"assignment to the attribute 'shape' of an array: make another"),
    (lambda x: setattr(x * 2, "note", 1), r"assignment to the attribute 'note'"),
    (lambda x: np.ndarray.sum(x, axis=0), r"np\.ndarray\.sum of a traced array: take it from the array itself"),
    (lambda x: np.ndarray.__matmul__(x, x.T), r"np\.ndarray\.__matmul__ of a traced array: take it from"),
    (lambda x: statistics.mean(x[0]), r"compiled code that reads arrays in memory"),
    (lambda x: np.random.default_rng(0).shuffle(x), r"exchange of rows .*in another order, as in x\[rng\.permutation"),
    (lambda x: np.random.RandomState(0).shuffle(x), r"exchange of rows by compiled code"),
    (lambda x: memoryview(x), r"compiled code that reads arrays in memory"),
    (lambda x: stats.bartlett(x[0], x[1]), r"scipy\.stats\.bartlett: it calls compiled code|branch on"),
    (lambda x: scipy.signal.find_peaks(x[0]), r"compiled code that reads arrays in memory"),
    (lambda x: scipy.spatial.ConvexHull(x), r"scipy\.spatial\.ConvexHull: its compiled code"),
    (lambda x: np.lib.stride_tricks.as_strided(x, (2, 2)), r"as_strided: .*sliding_window_view"),
    (lambda x: as_strided(x, (2, 2)), r"as_strided: .*sliding_window_view"),
    (lambda x: np.array([x, None], dtype=object), r"an array of objects: .*list or tuple of arrays"),
    (lambda x: np.array([x, "a"]), r"an array of a list with 'a' in it: .*list or tuple of arrays"),
    (lambda x: x * len({x.sum(), x.max()}), r"a number computed from arrays as a key, or in a set: .*list"),
    (lambda x: {x.sum(): 1}.get(x.sum(), 0), r"a number computed from arrays as a key"),
    (lambda x: (x * 2).strides, r"\.strides: .*sliding_window_view"),
    (lambda x: x[x > 0] + x[0], r"masked elements and an array"),
    (lambda x: max(x[0, 0], x[:1, 1]), r"branch on an array's values"),
    (lambda x: x[x[:, 0] > 0].T @ x, r"a product of masked elements"),
    (lambda x: x @ x[x[:, 0] > 0].T, r"masked elements"),
    (lambda x: x[x > 0].reshape(2, -1), r"\.reshape of masked elements"),
    (lambda x: np.compress(x[0] > 0, x, axis=1), r"a result of masked elements"),
    (lambda x: np.r_["0,2", x, x], r"np\.r_ with a directive"),
    (lambda x: [*np.tile(x, 6).flat], r"iteration over 72 elements"),
    (lambda x: (y := x + 1, z := y.reshape(12), z.__iadd__(1), y * 2)[3], r"after a change in place of a reshaped"),
    (lambda x: ~x, r"invert of float64 arrays"),
    (lambda x: np.unique(x), r"np\.unique: the shape of its result depends on values"),
    (lambda x: np.argwhere(x), r"a result of masked elements"),
    (lambda x: len(x.nonzero()[0]), r"len\(\) of masked elements"),
    (lambda x: np.take(x, np.nonzero(x)[0], axis=0), r"np\.take: the shape or dtype"),
    (lambda x: x[np.nonzero(x)[0], [0]], r"an index of masked elements beside others"),
    (lambda x: x.__setitem__(np.nonzero(x)[1], 0), r"an assignment at masked elements"),
    (lambda x: np.bincount(x.astype(int)[0]), r"np\.bincount: the length .* give minlength="),
    (lambda x: np.ix_(x[0] > 0), r"np\.ix_: vectors of integers"),
    (lambda x: np.repeat(x, (x > 0).sum(axis=0), axis=1), r"np\.repeat: the shape"),
    (lambda x: np.apply_along_axis(np.sum, 1, np.tile(x, (20, 1))), r"apply_along_axis over 80 rows"),
    (lambda x: np.put_along_axis(from_outside(4), x[0].astype(int), 0, 0), r"put_along_axis: the array that it"),
    (lambda x: np.array2string(x), r"array2string: it needs values"),
    (lambda x: np.histogram(x, "auto"), r"histogram: the number of bins"),
    (lambda x: np.cumsum(x, out=from_outside(12)), r"np\.cumsum with out="),
    (lambda x: cf.gelu(x + 1j), r"gelu of complex"),
    (lambda x: x & 1, r"bitwise_and of float64 arrays"),
    (lambda x: np.ravel(x, order="K"), r"order='K'"),
    (lambda x: np.add.at(from_outside(4), x[:, 0].astype(int), 1), r"np\.add\.at: the array that it changes"),
    (lambda x: np.add(x, x, where=x > 0), r"np\.add with where="),
    (lambda x: np.exp(x, out=from_outside(12).reshape(4, 3)), r"np\.exp with out="),
    (lambda x: np.clip(x, 0, 1, out=from_outside(12)), r"clip with out="),
    (lambda x: [*np.where(x > 0)[0]], r"an iteration over masked elements|len\(\) of masked elements"),
    (lambda x: x.reshape(3, 4, order="A"), r"order='A'"),
    (lambda x: np.frompyfunc(lambda v: v + 1, 1, 1)(x), r"the ufunc <lambda>"),
    (lambda x: np.vectorize(lambda v: v + 1)(x), r"np\.vectorize: .* call that function on the arrays"),
    (lambda x: np.var(x, dtype=int), r"np\.var with dtype=int64 of a float32 array: .*real float dtype"),
    (lambda x: np.var(x + 1j, where=x > 0), r"where= or mean= of complex"),
    (lambda x: np.require(x, None, "O"), r"np\.require with the requirement O: .*x\.copy\(\)"),
    (lambda x: x + np.ones(3).view(np.recarray), r"a captured array"),
    (lambda x: x + {1, 2, 3}, r"a set"),
    (lambda x: x + ["a", "b", "c"], r"a <U1 array"),
    (lambda x: x + "a", r"a str"),
    (lambda x: x + None, r"a NoneType"),
    (lambda x: (x > 0) - (x > 1), r"subtract.*bool"),
    (lambda x: -(x > 0), r"negative.*bool"),
    (lambda x: +(x > 0), r"positive.*bool"),
    (lambda x: np.positive(x > 0), r"positive.*bool"),
]  # fmt: skip


@pytest.mark.parametrize(("function", "words"), VALUES_NEEDED + UNSUPPORTED)
def test_refused_operations(function: Callable[..., Any], words: str) -> None:
    check(function, cf.TraceError, words)


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda x: np.linalg.inv(x), np.linalg.LinAlgError, "np.linalg.inv: .*must be square"),
        (lambda x: np.sort(x, axis=2), np.exceptions.AxisError, "np.sort"),
        (lambda x: np.concatenate([x, x.T]), ValueError, "np.concatenate"),
        (lambda x: np.copyto(x, x > 0, casting="no"), TypeError, "bool.*float32.*rule 'no'"),
        (lambda x: x.astype(np.int8) + 300, OverflowError, "300 out of bounds for int8"),
        (lambda x: x.sum(axis=2), np.exceptions.AxisError, "sum: axis 2"),
        (lambda x: np.max(x, axis=-3), np.exceptions.AxisError, "max: axis -3"),
        (lambda x: cf.softmax(x, axis=5), np.exceptions.AxisError, "axis 5"),
        (lambda x: x.sum().sum(axis=1), np.exceptions.AxisError, "sum: axis 1"),
        (lambda x: x.sum().max(axis=(0,)), np.exceptions.AxisError, "max: axis 0"),
        (lambda x: x.sum().mean(axis=0), np.exceptions.AxisError, "mean: axis 0"),
        (lambda x: x.sum().var(axis=-1), np.exceptions.AxisError, "axis -1"),
        (lambda x: x.var(axis=2), np.exceptions.AxisError, "axis 2"),
        (lambda x: x.sum(axis=(0, 0)), ValueError, "duplicate"),
        (lambda x: x.sum(axis=1.5), TypeError, "axis"),
        (lambda x: x.sum(axis="rows"), TypeError, "axis"),
        (lambda x: x + x.T, ValueError, r"add.*\(4, 3\) \(3, 4\)"),
        (lambda x: x @ x, ValueError, r"matmul.*\(4, 3\)"),
        (lambda x: x @ 2.0, ValueError, r"matmul"),
        (lambda x: x[4], IndexError, r"index 4 is out of bounds for axis 0 with size 4"),
        (lambda x: x[0, 0, 0], IndexError, r"too many indices"),
        (lambda x: x[[4]], IndexError, r"index 4 is out of bounds"),
        (lambda x: x[[0], [0], [0]], IndexError, r"too many indices"),
        (lambda x: x.__setitem__([0, 1], np.ones(5)), ValueError, r"x\[index\] = y: shape mismatch"),
        (lambda x: np.sum(x, axis=1, out=x), ValueError, r"np\.sum: out has shape \(4, 3\), the result \(4,\)"),
        (lambda x: np.dot(x, x.T, out=x), ValueError, r"np\.dot: out has shape"),
        (lambda x: x.any(ddof=1), TypeError, r"ndarray\.any\(\) got an unexpected keyword argument 'ddof'"),
        (lambda x: x.argmax(axis=(0, 1)), TypeError, r"np\.argmax: axis: expected an integer or None, got \(0, 1\)"),
        (lambda x: np.argmin(x, (-1,)), TypeError, r"np\.argmin: axis: expected an integer or None, got \(-1,\)"),
        (lambda x: (x @ x, "__array_interface__"), ValueError, r"matmul"),
        (lambda x: round(x, 1), TypeError, r"__round__"),
        (lambda x: np.where(x > 0, x), ValueError, r"either both or neither"),
        (lambda x: np.nonzero(x[0, 0]), ValueError, r"0d arrays"),
        (lambda x: x[..., ...], IndexError, r"an index can only have a single ellipsis"),
        (lambda x: x[True, 0, 0, 0], IndexError, r"too many indices"),
        (lambda x: x.__setitem__((False, 1), np.ones(5)), ValueError, r"shape \(5,\) cannot be broadcast"),
        (lambda x: x[x[0] > 0], IndexError, r"mask of shape \(3,\)"),
        (lambda x: x.__setitem__(slice(1, 3), x), ValueError, r"shape \(4, 3\) cannot be assigned to one of \(2, 3\)"),
        (lambda x: np.diag(x[None]), ValueError, r"diag"),
        (lambda x: [*x.sum()], TypeError, r"0-d"),
        (lambda x: x.reshape(5, 2), ValueError, r"reshape.*\(5, 2\)"),
        (lambda x: x.reshape(5, -1), ValueError, r"reshape"),
        (lambda x: x.reshape(-2, -6), ValueError, r"reshape"),
        (lambda x: x.reshape(-1, -1), ValueError, r"reshape"),
        (lambda x: x[:, :, None].reshape(0, -1), ValueError, r"reshape"),
        (lambda x: x.astype(np.int64) ** -1, (ValueError, TypeError), r"power of integers"),
        (lambda x: np.linalg.norm(x[None], "fro"), (ValueError, TypeError), r"norm"),
        (lambda x: x.squeeze(0), ValueError, "squeeze"),
        (lambda x: x.transpose(0, 0), ValueError, "transpose: duplicate"),
        (lambda x: x.transpose(0, 2), np.exceptions.AxisError, "transpose: axis 2 is out of bounds"),
        (lambda x: np.transpose(x, (-3, 0)), np.exceptions.AxisError, "transpose: axis -3 is out of bounds"),
        (lambda x: x.transpose(0), ValueError, "axes"),
        (lambda x: x.transpose(2, 3), ValueError, "axes"),
        (lambda x: x[:, :, :], IndexError, "too many indices"),
        (lambda x: x["name"], IndexError, "valid indices, got 'name'"),
        (lambda x: x[1.0], IndexError, r"valid indices, got 1\.0"),
        (lambda x: np.broadcast_to(x, (3, 3)), ValueError, "broadcast"),
        (lambda x: np.expand_dims(x, 7), np.exceptions.AxisError, "axis 7"),
    ],
)
def test_mistakes_that_numpy_refuses_too(function: Callable[..., Any], error: type[Exception], words: str) -> None:
    """NumPy's own kind of exception, with the operation and the line added."""
    with pytest.raises(error):
        function(X)
    check(function, error, words)


def tried(x: Any) -> Any:
    try:
        scale = x.sum().__float__()
    except Exception:
        scale = 1.0
    return x * scale


def tried_and_replaced(x: Any) -> Any:
    with contextlib.suppress(TypeError):
        return x if x.any() else -x
    raise ValueError("not reached by the plain function")


@pytest.mark.parametrize("function", [tried, tried_and_replaced])
def test_what_is_refused_is_refused_where_the_function_catches_it(function: Callable[..., Any]) -> None:
    """It would go on as the plain function does not."""
    with pytest.raises(cf.TraceError, match="values"):
        cf.fuse(function)(X)


def test_what_numpy_raises_can_be_caught() -> None:
    def tried(x: Any) -> Any:
        try:
            return x @ x
        except ValueError:
            return x @ x.T

    np.testing.assert_allclose(cf.fuse(tried)(X), X @ X.T)


def test_options_of_numpy_that_are_not_known() -> None:
    check(lambda x: np.clip(x, 0, 1, where=x > 0), TypeError, "np.clip.*where")


def test_the_extreme_of_nothing() -> None:
    for name in ("max", "min"):
        check(lambda x, name=name: getattr(x, name)(axis=1), ValueError, name, np.ones((4, 0)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.ones((2, 3), np.longdouble), r"'x'.*longdouble|'x'.*float128"),
        (np.array([[1, 2]], object), r"'x'.*object"),
        (np.array(["a"]), r"'x'.*str"),
        (np.array([np.datetime64("2020-01-01")]), r"'x'.*datetime64"),
        (np.ma.masked_array(X, X > 3), r"'x'.*MaskedArray"),
        (np.zeros(3, [("a", "f4")]), r"'x'.*void"),
    ],
)
def test_arrays_that_cannot_come_in(value: Any, words: str) -> None:
    """The message names the argument, whatever holds it."""
    with pytest.raises(TypeError, match=words):
        cf.fuse(lambda x: x + 1)(value)
    with pytest.raises(TypeError, match=words.replace("'x'", r"x\['k'\]\[1\]['\"]")):
        cf.fuse(lambda x: x["k"][1] + 1)({"k": (X, value)})
    with pytest.raises(TypeError, match=words):
        cf.fuse(lambda x: x + 1).plan(value)


def test_an_error_within_a_nested_function_names_the_inner_line() -> None:
    def helper(y: Any) -> Any:
        return np.unique(y)

    with pytest.raises(cf.TraceError) as caught:
        cf.fuse(lambda x: helper(x) + 1)(X)
    assert f"{__file__}:{helper.__code__.co_firstlineno + 1}" in str(caught.value)
    assert "return np.unique(y)" in str(caught.value), "the text of the line helps to find it"


def test_a_result_of_masked_elements_names_the_line_that_selects_them() -> None:
    def function(x: Any) -> Any:
        y = x[x > 0]
        return x, y

    line = function.__code__.co_firstlineno + 1
    with pytest.raises(cf.TraceError, match=rf"masked elements(.|\n)*{__file__}:{line}: y = x\[x > 0\]"):
        cf.fuse(function)(X)


def test_trace_error_is_a_type_error() -> None:
    assert issubclass(cf.TraceError, TypeError)


def test_a_failed_trace_leaves_nothing_behind() -> None:
    fused = cf.fuse(lambda x, broken: np.unique(x) if broken else x * 2)
    for _ in range(2):
        with pytest.raises(cf.TraceError):
            fused(X, True)
        np.testing.assert_array_equal(fused(X, False), X * 2)


class Box:
    """Compared by identity."""

    value: Any = None


def test_a_traced_array_that_leaks_says_so() -> None:
    kept = Box()
    cf.fuse(lambda x, kept: setattr(kept, "value", x) or x * 2, static=("kept",))(X, kept)
    assert "traced" in repr(kept.value)
    for use in (lambda: kept.value + 1, lambda: np.exp(kept.value), kept.value.sum, lambda: kept.value.T):
        with pytest.raises(cf.TraceError, match="a trace that has ended"):
            use()
    with pytest.raises(cf.TraceError, match=r"another fused function|a trace that has ended"):
        cf.fuse(lambda x, kept: x + kept.value, static=("kept",))(X, kept)
    with pytest.raises(cf.TraceError, match=r"another fused function|a trace that has ended"):
        cf.fuse(lambda x, kept: np.concatenate([x, kept.value]), static=("kept",))(X, kept)


def test_functions_that_return_nothing() -> None:
    with pytest.raises(cf.TraceError, match="it returns nothing, nor changes an array"):
        cf.fuse(lambda x: None)(X)


def test_results_hidden_in_other_objects_are_refused() -> None:
    class Box:
        def __init__(self, value: Any):
            self.value = value

    with pytest.raises(TypeError):
        cf.fuse(lambda x: (x * 2, Box(x + 1)))(X)
    with pytest.raises(TypeError):
        cf.fuse(lambda x: (x * 2, {x + 1}))(X)


@pytest.mark.parametrize("steps", [1000, 3000])
def test_long_chains(steps: int) -> None:
    """Neither Python's recursion limit nor quadratic work stands in the way of a long chain."""

    def chain(x: Any, w: Any, b: Any) -> Any:
        y = x @ w.T
        for _ in range(steps):
            y = y + b
        return y.sum(axis=1)

    b = np.full(2, 0.5)
    expected = (X.astype(float) @ np.ones((3, 2)) + steps * b).sum(axis=1)
    np.testing.assert_allclose(cf.fuse(chain)(X.astype(float), np.ones((2, 3)), b), expected, rtol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x if x > 0 else -x,
        lambda x: max(x[0], x[1]),
        lambda x: x and 1,
        lambda x: x[:0] or x,
        lambda x: x in (None, 2),
        lambda x: 1 if x != "a" else 2,
    ],
)
def test_arrays_of_several_elements_have_no_truth_value(function: Callable[..., Any]) -> None:
    """NumPy's error, which a function may catch."""

    def catching(x: Any) -> Any:
        try:
            return function(x)
        except ValueError:
            return x + 1

    for f in (function, cf.fuse(function)):
        with pytest.raises(ValueError, match=r"truth value of an .* is ambiguous"):
            f(X)
    np.testing.assert_array_equal(cf.fuse(catching)(X), X + 1)


def test_comparisons_with_none_and_text() -> None:
    def function(x: Any) -> Any:
        s = x.sum()
        return x == None, x != "a", s == None, s != None, s == "a", np.asarray(s) == None, x[:0] == None  # noqa: E711

    for found, expected in zip(cf.fuse(function)(X), function(X), strict=True):
        assert type(found) is type(expected)
        np.testing.assert_array_equal(found, expected, strict=True)
