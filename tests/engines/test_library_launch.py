"""Library steps on the CUDA engine: what is copied, what is handed on as it is, and how long it lives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import CUDA, HOST

import cupyfuse as cf
from cupyfuse.cuda.runtime import CupyRuntime
from cupyfuse.ir.library import LibraryCall, Operand

RNG = np.random.default_rng(3)
X = RNG.standard_normal((6, 8)).astype(np.float32)


class Count:
    """How often an engine copied, and viewed memory as an array."""

    copies = views = 0


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> Iterator[Count]:
    found, runtime = Count(), HOST.runtime
    copy, view = runtime.copy, runtime.view

    def counted_copy(target: Any, source: Any) -> None:
        found.copies += 1
        copy(target, source)

    def counted_view(*arguments: Any) -> Any:
        found.views += 1
        return view(*arguments)

    monkeypatch.setattr(runtime, "copy", counted_copy)
    monkeypatch.setattr(runtime, "view", counted_view)
    with HOST.active():
        yield found


@pytest.mark.parametrize(
    ("function", "copies", "views"),
    [
        (lambda x: np.argsort(x, axis=1), 0, 0),
        (lambda x: np.cumsum(np.sort(x, axis=1), axis=0), 0, 0),
        (lambda x: np.sort(x, axis=1).sum(axis=1), 0, 0),  # a kernel reads the result where it is
        (lambda x: np.sort(x * 2, axis=1), 0, 1),  # what a kernel wrote
        (lambda x: np.cumsum(x.T, axis=0), 0, 0),
        (lambda x: np.sort(np.sort(x, axis=0).T, axis=0), 0, 0),
        (lambda x: np.cumsum(x[1::2, 2:5], axis=0), 0, 0),
        (lambda x: np.sort(x[::2, 3]), 0, 0),
        (lambda x: np.cumsum(x[::-1], axis=0), 0, 1),
        (lambda x: np.sort(np.sort(x, axis=None)), 0, 0),
        (lambda x: np.linalg.svd(x, full_matrices=False), 0, 0),
        (lambda x: np.sort(x, axis=1).reshape(4, 12), 0, 0),
        (lambda x: np.sort(x, axis=1).T, 0, 0),
        (lambda x: written(np.zeros((4, 8)), x), 0, 0),  # what nobody reads later is written to in place
        (lambda x: written(np.sort(x, axis=0) * 2, x), 0, 0),
        (lambda x: written(np.sort(x, axis=0), x), 0, 0),
        (lambda x: written(written(x + 1, x), x), 0, 0),
    ],
)
def test_arrays_of_their_own_are_handed_on(count: Count, function: Callable[..., Any], copies: int, views: int) -> None:
    x = HOST.array(X)
    fused = cf.fuse(function)
    results, wanted = HOST.host(fused(x)), function(X)
    several = isinstance(wanted, tuple)
    for got, expected in zip(results, wanted, strict=True) if several else [(results, wanted)]:
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert (count.copies, count.views) == (copies, views)


def written(z: Any, x: Any) -> Any:
    """What is left after scatters onto an array."""
    np.add.at(z, [0, 2, 0, 3, 1, 1], x)
    z[np.array([1, 1])] = -1
    return z


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (z := x * 2, written(z.copy(), x), z),
        lambda x: (written(x.copy(), x), x),
        lambda x: (z := np.sort(x, axis=0), z.sum(axis=1), written(z + 0, z), z.sum(axis=0)),
        lambda x: scattered_from_itself(x * 2),
        lambda x: (y := written(x * 2, x), np.cumsum(y, axis=0), written(y * 1, x)),
    ],
)
def test_what_is_read_later_is_not_written_to(count: Count, function: Callable[..., Any]) -> None:
    x = HOST.array(X)
    for got, wanted in zip(HOST.host(cf.fuse(function)(x)), function(X.copy()), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(x, X)


def scattered_from_itself(z: Any) -> Any:
    np.add.at(z, [0, 1, 0], z[1:4])
    z[[5, 4]] = z[[4, 5]]
    before = z.sum(axis=0)
    z[[0, 0]] = 3
    return before, z


def test_results_that_other_steps_read_are_written_to_out(count: Count) -> None:
    fused = cf.fuse(lambda x: (y := np.sort(x, axis=1), np.cumsum(y, axis=1), y * 2))
    outs = [HOST.array(np.zeros_like(X)) for _ in range(3)]
    fused(HOST.array(X), out=outs)
    ordered = np.sort(X, axis=1)
    for got, wanted in zip(HOST.host(outs), (ordered, np.cumsum(ordered, axis=1), ordered * 2), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_results_are_copied_where_the_caller_wants_them(count: Count) -> None:
    fused = cf.fuse(lambda x: np.sort(x, axis=1))
    x, whole = HOST.array(X), HOST.array(np.zeros((6, 16), np.float32))
    for out in (HOST.array(np.zeros_like(X)), whole[:, ::2]):
        assert fused(x, out=out) is out
        np.testing.assert_array_equal(out, np.sort(X, axis=1))
    assert count.copies == 2 and not whole[:, 1::2].any()


@pytest.mark.parametrize(
    "function",
    [
        lambda a, x: np.cumsum(a, axis=0) + x,
        lambda a, x: (np.sort(a, axis=0), x + 1),
        lambda a, x: np.linalg.inv(a[:, :6] @ a[:, :6].T + np.eye(6, dtype="float32"))[:, :1] + x,
    ],
)
def test_results_for_another_plan_are_in_c_order(count: Count, function: Callable[..., Any]) -> None:
    """Of bound arguments, which the plan that reads them takes for matrices without gaps."""
    a, x = X[:6], np.ones((6, X.shape[1]), np.float32)
    bound = cf.fuse(function).bind(a=HOST.array(a))
    results, wanted = HOST.host(bound(HOST.array(x))), function(a, x)
    pairs = zip(results, wanted, strict=True) if isinstance(wanted, tuple) else [(results, wanted)]
    for got, expected in pairs:
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_arguments_changed_in_place_are_written_where_they_are(count: Count) -> None:
    def change(x: Any) -> Any:
        x.sort(axis=1)
        return np.cumsum(x, axis=1)

    for layout in ("contiguous", "fortran"):
        x, expected = HOST.array(X, layout), X.copy()
        result = cf.fuse(change)(x)
        np.testing.assert_allclose(HOST.host(result), change(expected), rtol=1e-6)
        np.testing.assert_array_equal(x, expected)


def test_values_are_released_after_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Any]] = []
    live: list[int] = []
    provide = HOST.runtime.library_function

    def watched(call: LibraryCall, stored: dict[int, str], *options: Any) -> Any:
        function = provide(call, stored, *options)

        def run(operands: Any) -> Any:
            live.append(sum(reference() is not None for reference in held))
            results = function(operands)
            held.append(weakref.ref(results[0]))
            return results

        return run

    monkeypatch.setattr(HOST.runtime, "library_function", watched)
    with HOST.active():
        result = cf.fuse(lambda x: np.flip(np.sort(np.cumsum(np.sort(x, axis=1), axis=0), axis=0), 1).sum(axis=1))(
            HOST.array(X)
        )
    expected = np.sort(np.cumsum(np.sort(X, axis=1), axis=0), axis=0).sum(axis=1)
    np.testing.assert_allclose(HOST.host(result), expected, rtol=1e-5)
    assert live == [0, 1, 1]
    del result
    gc.collect()
    assert not any(reference() is not None for reference in held)


def test_nothing_is_called_for_no_elements(count: Count) -> None:
    x = HOST.array(np.zeros((0, 4), np.float32))
    assert cf.fuse(lambda x: np.sort(x, axis=1))(x).shape == (0, 4)
    np.testing.assert_array_equal(HOST.host(cf.fuse(lambda x: np.sort(x, axis=1).sum(axis=0))(x)), np.zeros(4))


# What CuPy returns --------------------------------------------------------------------------------------------------


class Array:
    """As much of CuPy's array as tells whose memory it is."""

    def __init__(
        self, memory: Any = None, base: Any = None, dtype: str = "float32", strides: tuple[int, ...] = (12, 4)
    ):
        self.data = SimpleNamespace(mem=memory or object())
        self.base, self.dtype, self.shape, self.strides = base, np.dtype(dtype), (2, 3), strides
        self.itemsize = self.dtype.itemsize
        self.flags = SimpleNamespace(c_contiguous=strides == (12, 4), f_contiguous=False)
        self.copied = False


def returned(
    function: Callable[..., Any],
    operand: Array,
    dtypes: tuple[str, ...] = ("float32",),
    in_place: bool = False,
    in_any_order: tuple[int, ...] = (),
) -> list[Any]:
    """What CuPy's runtime makes of the results of a library function."""

    def copy(array: Any, dtype: Any, order: str) -> Array:
        made = Array(dtype=dtype)
        made.copied = True
        return made

    runtime: Any = object.__new__(CupyRuntime)
    runtime._cupy = SimpleNamespace(ndarray=Array, array=copy, f=function, __name__="cupy")
    runtime.is_capturing = lambda: False
    call = LibraryCall("f", (Operand(0),), {}, ((2, 3),), ((2, 3),) * len(dtypes), dtypes)
    results: list[Any] = runtime.library_function(call, dict(enumerate(dtypes)), in_place, in_any_order)([operand])
    return results


def test_an_array_of_its_own_is_the_value() -> None:
    made = []

    def own(x: Array) -> Array:
        array = Array()
        made.append(id(array))
        return array

    (result,) = returned(own, Array())
    assert id(result) == made[0] and not result.copied
    (result,) = returned(lambda x: Array(base=Array()), Array())  # a reshaped one, whose base nobody else holds
    assert not result.copied


def test_views_in_c_order_leave_their_strides_to_cupy() -> None:
    def array(shape: Any, dtype: Any, pointer: Any, strides: Any) -> Any:
        return strides

    cuda = SimpleNamespace(MemoryPointer=lambda memory, _: memory, UnownedMemory=lambda address, *_: address)
    runtime: Any = object.__new__(CupyRuntime)
    runtime._cupy, runtime._device = SimpleNamespace(ndarray=array, cuda=cuda), 0
    assert runtime.view(64, (2, 3), np.dtype("float64"), (3, 1)) is None
    assert runtime.view(64, (2, 3), np.dtype("float64"), (1, 2)) == (8, 16)
    assert runtime.view(64, (2, 3), np.dtype("float32"), (0, -1)) == (0, -4)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((Operand(0),), {}),
        ((Operand(0), Operand(1)), {"axis": 1}),
        ((Operand(1), Operand(0)), {}),
        ((Operand(1),), {"weights": Operand(0)}),
        ((2, [Operand(1), 3]), {"axis": 0}),
        ((), {"a": (Operand(0), Operand(0)), "b": None}),
    ],
)
def test_calls_hold_operands_in_the_places_of_their_placeholders(
    arguments: tuple[Any, ...], options: dict[str, Any]
) -> None:
    def filled(value: Any) -> Any:
        if isinstance(value, Operand):
            return "xy"[value.index]
        if isinstance(value, dict):
            return {k: filled(v) for k, v in value.items()}
        return type(value)(map(filled, value)) if isinstance(value, (tuple, list)) else value

    found: list[Any] = []

    def function(*args: Any, **kwargs: Any) -> float:
        found.append((args, kwargs))
        return 1.0

    call = LibraryCall("f", arguments, options, ((), ()), ((),), ("float64",))
    assert call.prepare(function)(["x", "y"]) == [1.0]
    assert found == [(filled(arguments), filled(options))]


CACHED = Array()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: Array(memory=x.data.mem, base=x),
        lambda x: Array(memory=x.data.mem),  # as of `as_strided`
        lambda x: Array(strides=(4, 8)),
        lambda x: Array(dtype="float64"),
        lambda x: CACHED,
        lambda x: Array(memory=CACHED.data.mem, base=CACHED),
        lambda x: SimpleNamespace(shape=(2, 3), dtype=np.dtype("float32")),
    ],
    ids=["operand", "view", "strided view", "strides", "dtype", "kept", "view of kept", "another type"],
)
def test_what_is_no_value_is_copied(function: Callable[..., Any]) -> None:
    (result,) = returned(function, Array())
    assert result.copied and result.dtype == np.float32


def test_what_no_kernel_reads_may_have_any_order_of_axes() -> None:
    (result,) = returned(lambda x: Array(strides=(4, 8)), Array(), in_any_order=(0,))
    assert not result.copied
    for strides in ((4, 16), (0, 4), (-12, 4), (24, 8)):  # with gaps, repeated, reversed
        (result,) = returned(lambda x, strides=strides: Array(strides=strides), Array(), in_any_order=(0,))  # type: ignore[misc]
        assert result.copied


@pytest.mark.parametrize(
    ("function", "orders"),
    [
        (lambda x: (order := np.argsort(x, axis=0), np.take_along_axis(x, order, axis=0)), [True, True]),
        (lambda x: np.sort(x, axis=0) + 1, [False]),  # a kernel reads it
        (lambda x: np.sort(x, axis=0).T, [True]),
        (lambda x: np.cumsum(np.sort(x, axis=0)[::2], axis=0), [False, True]),  # a view of its memory
        (lambda x: written(np.sort(x, axis=0), x), [False, False, True]),  # the next step writes to it
    ],
)
def test_which_results_may_have_any_order(
    function: Callable[..., Any], orders: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[bool] = []
    provide = HOST.runtime.library_function

    def note(call: LibraryCall, stored: dict[int, str], in_place: bool, in_any_order: Any) -> Any:
        found.extend(k in in_any_order for k in stored)
        return provide(call, stored, in_place, in_any_order)

    monkeypatch.setattr(HOST.runtime, "library_function", note)
    with HOST.active():
        results = HOST.host(cf.fuse(function)(HOST.array(X)))
    assert found == orders
    for got, wanted in zip(results, function(X), strict=True):
        np.testing.assert_allclose(got, wanted)


def test_an_operand_written_in_place_is_the_value() -> None:
    operand = Array()
    assert returned(lambda x: x, operand, in_place=True)[0] is operand
    (result,) = returned(lambda x: Array(memory=x.data.mem), operand, in_place=True)
    assert result.copied
    assert returned(lambda x: x, Array(dtype="float64"), in_place=True)[0].copied


def test_results_that_share_memory_are_copied() -> None:
    def twice(x: Array) -> tuple[Array, Array]:
        array = Array()
        return array, array

    def halves(x: Array) -> list[Array]:
        whole = Array()
        return [Array(memory=whole.data.mem, base=whole) for _ in range(2)]

    for function in (twice, halves):
        first, second = returned(function, Array(), ("float32", "float32"))
        assert first is not second and first.data.mem is not second.data.mem
        assert first.copied


@pytest.mark.gpu
def test_values_on_a_gpu_share_no_memory() -> None:
    CUDA.require()
    x = CUDA.array(X)
    cases = (
        lambda x: np.sort(x, axis=1),
        lambda x: np.flip(np.sort(x, axis=1)),
        lambda x: np.asarray(x, dtype=complex).real,
        lambda x: np.diagonal(x),
        lambda x: np.linalg.svd(x, full_matrices=False),
        lambda x: np.histogram(x, bins=4, range=(-3, 3)),
        lambda x: np.lib.stride_tricks.sliding_window_view(x, 3, axis=1),
    )
    for function in cases:
        results = cf.fuse(function)(x)
        found = list(results) if isinstance(results, tuple) else [results]
        for k, array in enumerate(found):
            assert not any(CUDA.xp.may_share_memory(array, other) for other in (x, *found[:k]))
            array[...] = 0
    np.testing.assert_array_equal(x.get(), X)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.sort(x[:, 1]),
        lambda x: np.sort(x[::2, 2]),
        lambda x: np.sort(x[1]),
        lambda x: np.sort(x[1, 1:]),
        lambda x: np.sort(x[1:, :1], axis=0),
        lambda x: np.sort(x[:1, 1:].T, axis=0),
        lambda x: np.sort(x[:, 1:2].ravel()),
        lambda x: np.sort(x[:2, 1:].ravel()),
        lambda x: np.sort(x[1:2, 1:2]),
    ],
)
def test_rows_columns_and_parts_of_arguments(function: Callable[[Any], Any]) -> None:
    with HOST.active():
        np.testing.assert_array_equal(HOST.host(cf.fuse(function)(HOST.array(X))), function(X))


def test_a_transposed_column_is_read_as_a_vector() -> None:
    x = np.arange(6, dtype="float32")[::-1].reshape(6, 1).copy()

    def function(x: Any) -> Any:
        return np.sort(x.T, axis=1), np.sort(x.T[0])

    with HOST.active():
        for got, wanted in zip(HOST.host(cf.fuse(function)(HOST.array(x))), function(x), strict=True):
            np.testing.assert_array_equal(got, wanted)
