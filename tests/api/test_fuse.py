"""`fuse`: ways to decorate and to call, arguments and results of any structure."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from support import LAYOUTS, Engine, assert_equal, normal

import cupyfuse as cf

X = np.arange(12, dtype=np.float32).reshape(4, 3)


@cf.fuse
def scaled(x: Any, factor: float = 2.0, *, shift: float = 0.0) -> Any:
    """A documented function."""
    return x * factor + shift


# Decorating ---------------------------------------------------------------------------------------------------------


def test_three_ways_to_fuse() -> None:
    @cf.fuse
    def bare(x: Any) -> Any:
        return x + 1

    @cf.fuse(precision="high")
    def with_options(x: Any) -> Any:
        return x + 1

    called = cf.fuse(lambda x: x + 1, precision="medium")
    for fused in (bare, with_options, called, cf.fuse(bare)):
        assert isinstance(fused, cf.Fused)
        assert_equal(fused(X), X + 1)


def test_a_fused_function_looks_like_the_function() -> None:
    assert scaled.__name__ == "scaled" and scaled.__doc__ == "A documented function."
    assert scaled.__module__ == __name__ and "scaled" in repr(scaled)
    assert_equal(scaled.__wrapped__(X, 3.0), X * 3)


@pytest.mark.parametrize("wrong", [3, "function", [], X])
def test_only_functions_can_be_fused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="fn: expected a function"):
        cf.fuse(wrong)


def test_precision_is_checked() -> None:
    with pytest.raises(ValueError, match="precision: expected one of 'highest'"):
        cf.fuse(lambda x: x, precision="exact")
    with pytest.raises(ValueError, match="precision"), cf.precision("low"):
        pass  # pragma: no cover


def test_methods_class_methods_and_static_methods() -> None:
    @dataclass
    class Layer:
        """Every kind of method, with state of its own."""

        factor: float = 1.0

        @cf.fuse
        def forward(self, x: Any, shift: float = 0.0) -> Any:
            return x * self.factor + shift

        @classmethod
        @cf.fuse
        def of_class(cls, x: Any) -> Any:
            return x * cls.factor

        @staticmethod
        @cf.fuse
        def static(x: Any) -> Any:
            return x * 4

    two, three = Layer(2.0), Layer(3.0)
    assert_equal(two.forward(X), X * 2)
    assert_equal(three.forward(X, shift=1.0), X * 3 + 1)
    assert_equal(Layer.forward(two, X), X * 2)
    assert_equal(Layer.static(X), X * 4)
    assert_equal(two.static(X), X * 4)
    assert_equal(Layer.of_class(X), X)
    assert two.forward.plan(X).launches == 1
    assert_equal(three.forward.bind(shift=1.0)(X), X * 3 + 1)
    assert_equal(two.forward.__wrapped__(X), X * 2)
    out = np.empty_like(X)
    assert two.forward(X, out=out) is out


def test_static_and_class_methods_are_fused_as_such() -> None:
    class Layer:
        factor = 2.0

        @cf.fuse
        @staticmethod
        def static(x: Any) -> Any:
            return x * 4

        @cf.fuse(max_workspace=1 << 20)
        @classmethod
        def of_class(cls, x: Any) -> Any:
            return x * cls.factor

    class Other(Layer):
        factor = 3.0

    for owner in (Layer, Layer()):
        assert_equal(owner.static(X), X * 4)
        assert_equal(owner.of_class(X), X * 2)
    assert_equal(Other.of_class(X), X * 3)
    assert Other().of_class.plan(X).launches == 1


def test_callables_of_other_kinds() -> None:
    @dataclass
    class Doubler:
        def __call__(self, x: Any) -> Any:
            return x * 2

    assert_equal(cf.fuse(functools.partial(scaled.__wrapped__, factor=5.0))(X), X * 5)
    assert_equal(cf.fuse(Doubler())(X), X * 2)
    assert "Doubler" in str(cf.fuse(Doubler()).plan(X))


def test_one_fused_function_within_another() -> None:
    inner = cf.fuse(lambda x: cf.softmax(x, axis=1))
    outer = cf.fuse(lambda x: inner(x * 2).max(axis=1))
    np.testing.assert_allclose(outer(X), cf.softmax(X * 2, axis=1).max(axis=1), rtol=1e-6)
    assert outer.plan(X).launches == 1
    serve = scaled.bind(factor=3.0)
    assert_equal(cf.fuse(lambda x: serve(x) + 1)(X), X * 3 + 1)
    with pytest.raises(cf.TraceError, match="out="):
        cf.fuse(lambda x: inner(x, out=x))(X)


class Scale:
    def __init__(self, factor: float):
        self.factor = factor

    @cf.fuse
    def apply(self, x: Any) -> Any:
        return x * self.factor


cf.register(Scale, lambda s: ([s.factor], ()), lambda _, children: Scale(*children))


def test_bound_methods_have_the_names_and_attributes_of_their_functions() -> None:
    class Scale:
        def __repr__(self) -> str:
            return "scale"

        @cf.fuse
        def apply(self, x: Any) -> Any:
            """A documented method."""
            return x * 2

        apply.note = 3  # type: ignore[attr-defined]

    method = Scale().apply
    assert (method.__name__, method.__module__, method.note) == ("apply", __name__, 3)
    assert method.__doc__ == "A documented method." and method.__qualname__.endswith("Scale.apply")
    assert repr(method) == f"<<fused {method.__qualname__}> of scale>"


def test_bound_methods_compare_and_pickle_as_python_s_do() -> None:
    first, second = Scale(2.0), Scale(2.0)
    assert first.apply == first.apply != second.apply
    assert len({first.apply, first.apply, second.apply}) == 2 and first.apply.__self__ is first
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(first.apply))(np.ones(2)), [2.0, 2.0])


def test_copies_and_pickles() -> None:
    for twin in (copy.copy(scaled), copy.deepcopy(scaled), pickle.loads(pickle.dumps(scaled))):
        assert_equal(twin(X, 4.0), X * 4)
    bound = scaled.bind(factor=3.0)
    for twin in (copy.copy(bound), copy.deepcopy(bound), pickle.loads(pickle.dumps(bound))):
        assert_equal(twin(X), X * 3)


# Calling ------------------------------------------------------------------------------------------------------------


def test_forms_of_a_call() -> None:
    assert_equal(scaled(X), X * 2)
    assert_equal(scaled(X, 3.0), X * 3)
    assert_equal(scaled(x=X, factor=3.0), X * 3)
    assert_equal(scaled(X, shift=1.0), X * 2 + 1)
    assert_equal(scaled(shift=1.0, factor=1.0, x=X), X + 1)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((), {}), ((X, 1.0, 2.0), {}), ((X,), {"x": X}), ((X,), {"unknown": 1.0}), ((X, X, X, X), {})],
)
def test_wrong_calls_are_pythons_type_errors(args: Any, kwargs: Any) -> None:
    with pytest.raises(TypeError):
        scaled(*args, **kwargs)


def test_variable_arguments() -> None:
    fused = cf.fuse(lambda first, *rest, scale=1.0, **named: first + sum(rest) * scale + named.get("last", 0))
    assert_equal(fused(X), X)
    assert_equal(fused(X, X, X, scale=2.0), X * 5)
    assert_equal(fused(X, X, last=X), X * 3)


def test_defaults_that_are_arrays() -> None:
    assert_equal(cf.fuse(lambda x, y=X: x + y)(X), X + X)


class Pair(NamedTuple):
    low: Any
    high: Any


def test_structures_of_arguments_and_results(engine: Engine) -> None:
    def function(params: Any, scale: float) -> Any:
        (a, b), extra = params["pair"], params["deep"][0]["x"]
        return {"sum": a + b, "list": [a * scale, (b, "text", 3, None)], "named": Pair(a - b, extra), "kept": extra * 2}

    a, b = engine.array(X), engine.array(X + 1)
    result = cf.fuse(function)({"pair": (a, b), "deep": [{"x": a}]}, 2.0)
    assert list(result) == ["sum", "list", "named", "kept"]
    assert isinstance(result["list"], list) and isinstance(result["list"][1], tuple)
    assert type(result["named"]) is Pair
    assert result["list"][1][1:] == ("text", 3, None)
    host = engine.host(result)
    assert_equal(host["sum"], X + X + 1)
    assert_equal(host["list"][0], X * 2)
    assert_equal(engine.host(result["named"].low), np.full_like(X, -1))
    assert_equal(host["kept"], X * 2)


def test_named_tuples_as_arguments() -> None:
    assert_equal(cf.fuse(lambda p: p.low + p.high)(Pair(X, X)), X + X)
    point = namedtuple("point", "a b")
    assert_equal(cf.fuse(lambda p: p.a + p.b)(point(X, 1.0)), X + 1)


def test_one_result_and_a_tuple_of_one_differ() -> None:
    assert isinstance(cf.fuse(lambda x: x + 1)(X), np.ndarray)
    (single,) = cf.fuse(lambda x: (x + 1,))(X)
    assert_equal(single, X + 1)


def test_the_same_value_returned_twice_is_two_arrays() -> None:
    first, second, third = cf.fuse(lambda x: (lambda y: (y, y, x))(x + 1))(X)
    assert_equal(first, second)
    assert not np.shares_memory(first, second) and not np.shares_memory(third, X)


def test_views_of_results_and_arguments_are_arrays_of_their_own() -> None:
    for function in (lambda x: x, lambda x: x.T, lambda x: x[None], lambda x: x.reshape(-1), lambda x: (x + 1).T):
        result = cf.fuse(function)(X)
        assert_equal(result, function(X))
        assert not np.shares_memory(result, X)
        result[...] = 0


def test_zero_dimensional_results_are_numpys_scalars() -> None:
    total = cf.fuse(lambda x: x.sum())(X)
    assert isinstance(total, np.float32) and total == 66


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_layouts_of_arguments(engine: Engine, layout: str, dtype: str, rng: np.random.Generator) -> None:
    x, w, b = normal(rng, (5, 7), dtype), normal(rng, (6, 7), dtype), normal(rng, 6, dtype)
    fused = cf.fuse(lambda x, w, b: cf.softmax(x @ w.T + b, axis=1))
    expected = engine.host(fused(*engine.arrays([x, w, b]))).astype(np.float64)
    actual = engine.host(fused(*(engine.array(a, layout) for a in (x, w, b)))).astype(np.float64)
    np.testing.assert_allclose(actual, expected, rtol=16 * float(np.finfo(np.float32).eps), atol=1e-6)


def test_arrays_of_the_other_byte_order() -> None:
    swapped = X.astype(X.dtype.newbyteorder())
    assert_equal(cf.fuse(lambda x: x * 2)(swapped), X * 2)
    out = np.empty_like(swapped)
    cf.fuse(lambda x: x * 2)(X, out=out)
    np.testing.assert_array_equal(out, X * 2)


def test_memory_mapped_files_are_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", "f4", "w+", shape=(4, 3))
    mapped[...] = X
    result = cf.fuse(lambda x: x * 2)(mapped)
    assert_equal(result, X * 2)


@pytest.mark.parametrize("shape", [(0, 3), (4, 0), (0, 0), (1, 3), (4, 1), (1, 1)])
def test_empty_and_single_rows(engine: Engine, shape: tuple[int, int]) -> None:
    fused = cf.fuse(lambda x, w: (x @ w.T, (x @ w.T).sum(axis=1), cf.relu(x)))
    x, w = np.ones(shape, np.float32), np.ones((5, shape[1]), np.float32)
    product, total, relu = engine.host(fused(*engine.arrays([x, w])))
    assert_equal(product, x @ w.T)
    assert_equal(total, (x @ w.T).sum(axis=1))
    assert_equal(relu, x)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1.0, bytearray(b"a")],), r"x\[1\].*bytearray"),
        ((X, bytearray(b"a")), "'y'.*bytearray"),
        ((X, cf.spec((4, 3))), "'y'.*spec"),
        ((X, {"k": [1.0, bytearray(b"a")]}), r"y\['k'\]\[1\].*bytearray"),
    ],
)
def test_arguments_that_are_no_arrays(arguments: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        cf.fuse(lambda x, y=None: x + 1)(*arguments)


def test_calls_without_arrays_are_those_of_the_function() -> None:
    @cf.fuse
    def rate(step: Any, first: float = 0.5) -> Any:
        return first * 0.5**step if step < 3 else np.float64(first)

    @cf.fuse
    def scaled(x: Any, step: Any) -> Any:
        return x * rate(step)

    for step in (1, 2, 2.5, 4, np.float32(2)):
        result = rate(step)
        assert (type(result), result) == (type(rate.__wrapped__(step)), rate.__wrapped__(step))
        assert_equal(scaled(X, step), X * rate(step))
        assert rate.bind(first=2.0)(step) == 4 * result
    assert_equal(cf.fuse(lambda n: np.eye(n))(3), np.eye(3))
    assert cf.fuse(lambda values: values * 2)([1.0, 2.0]) == [1.0, 2.0, 1.0, 2.0]
    assert_equal(cf.fuse(lambda k: k * X)(2.0), 2 * X)  # an array around it
    with pytest.raises(TypeError, match=r"out: no argument is an array"):
        rate(1, out=np.ones(()))
    with pytest.raises(ZeroDivisionError):
        cf.fuse(lambda k: 1 / k)(0)


def test_a_fused_function_of_nested_arguments_within_another_one() -> None:
    inner = cf.fuse(lambda pair, named: pair[0] * 2 + named["y"])
    outer = cf.fuse(lambda x, y: inner((x, 1.0), {"y": y}) + 1)
    x, y = np.arange(3.0), np.ones(3)
    np.testing.assert_array_equal(outer(x, y), x * 2 + y + 1)


def test_a_parameter_may_be_called_self() -> None:
    """As that of a method, fused in its class and given by name."""

    class Model:
        @cf.fuse
        def forward(self, x: Any) -> Any:
            return x + 1

    fused, x = Model.forward, np.zeros((2, 3))
    assert fused.plan(self=None, x=cf.spec((2, 3))).launches == 1
    np.testing.assert_array_equal(fused(self=None, x=x), x + 1)
    np.testing.assert_array_equal(fused.bind(self=None)(x=x), x + 1)
    assert [plan.name for plan in fused.plans] == ["forward"]
