"""Changes in place, and the views that follow them: as in NumPy, or refused where NumPy may copy or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import Engine

import cupyfuse as cf
from cupyfuse.settings import force_plans
from cupyfuse.trace.broadcasting import reshaped_strides

X = np.arange(1.0, 17).reshape(4, 4) + 0.25
VIEWS = (
    *("np.flip(x)", "np.flip(x, 0)", "np.flip(x, (0, 1))", "np.fliplr(x)", "np.flipud(x)", "np.rot90(x)"),
    *("np.rot90(x, 2)", "np.rot90(x, -1)", "np.rot90(x, 4)", "np.split(x, 2)[1]", "np.split(x, [1, 3], axis=1)[1]"),
    *("np.array_split(x, 3)[0]", "np.hsplit(x, 2)[0]", "np.vsplit(x, 2)[0]", "np.dsplit(x[None], 2)[0]"),
    *("np.unstack(x, axis=1)[2]", "np.diagonal(x)", "np.diag(x, 1)", "np.linalg.diagonal(x)", "x.diagonal()"),
    *("np.einsum('ij->ji', x)", "np.einsum('ij->ij', x)", "np.einsum('ji', x)", "np.real(x)", "x.real", "x.conj()"),
    *("np.einsum('ii->i', x)", "np.einsum('aii->ia', x[None])", "np.einsum('ii->i', x[::-1, 1:].T[:2, :2])"),
    *("np.asarray(x)", "np.array(x, copy=None)", "np.atleast_1d(x)", "np.atleast_3d(x)", "x.reshape(4, 1, 4)"),
    *("np.squeeze(x)", "np.expand_dims(x, 0)", "x.T", "x.mT", "np.swapaxes(x, 0, 1)", "np.moveaxis(x, 0, 1)"),
    *("np.meshgrid(x[0], x[1], sparse=True, copy=False)[0]", "np.nan_to_num(x, copy=False)"),
    *("x.astype(np.float64, copy=False)", "x[...]", "x[None]", "x[1:, ::-1]", "x[1]", "x[:, 2][1:]"),
)
COPIES = (
    *("np.conj(x)", "+x", "np.array(x)", "np.copy(x)", "x.flatten()", "np.meshgrid(x[0], x[1])[0]", "np.nan_to_num(x)"),
    *("np.meshgrid(x[0], x[1], sparse=True)[0]", "np.clip(x, None, None)", "np.round(x)", "x.astype(np.float64)"),
    *("np.where(True, x, 0)", "x.sum(axis=())", "x[:1].max(axis=0)", "x ** 1", "np.argmax(x)", "np.argmin(x, 0)"),
    *("np.outer(x[0], x[1])", "np.dot(x, x[None])", "np.vdot(x, x)", "np.tensordot(x, x, 2)", "np.inner(x, x)"),
    *("np.tril(x)", "np.take(x, [0, 1])", "np.concatenate([x])", "np.pad(x, 0)", "np.roll(x, 0)", "np.sort(x)"),
    *("np.trace(x)", "np.linalg.norm(x)", "cf.logsumexp(x)", "cf.avg_pool1d(x, 2)", "x[1, 2]", "x.min(axis=0)"),
    *("np.where(x[0, 0] > 1, x.max(), 2.0)[None]", "np.asarray(x.max())[None]", "np.copy(x.max())[None]"),
    *("x.max()[None]", "np.expand_dims(x.max(), 0)", "x.max()[...]", "(x.sum() * 2)[None, None]"),
)
# NumPy copies some of them, if the array lies in memory in another order.
UNDECIDED = (
    *("x.ravel()", "x.reshape(2, 8)", "np.ascontiguousarray(x)", "np.asfortranarray(x)", "np.asarray(x, order='F')"),
    *("np.broadcast_to(x, (2, 4, 4))", "np.broadcast_arrays(x, x[:1])[1]"),
    *("np.meshgrid(x[0], x[1], copy=False)[0]",),
)


def changing(text: str, change: str) -> Any:
    scope: dict[str, Any] = {"np": np, "cf": cf}
    exec(f"def function(x):\n    x = x * 2\n    y = {text}\n    {change}", scope)
    return scope["function"]


def of_numpy(function: Any) -> Any:
    try:
        return function(X)
    except (ValueError, TypeError) as error:  # of what is read-only, or a scalar
        return type(error)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("change", ["x += 1; return y * 1", "y += 1; return x * 1", "y *= y; return x - 1"])
@pytest.mark.parametrize("text", (*VIEWS, *COPIES))
def test_changes_are_seen_where_numpy_sees_them(text: str, change: str, engine: Engine) -> None:
    function = changing(text, change)
    expected = of_numpy(function)
    if isinstance(expected, type):
        with pytest.raises(expected):
            cf.fuse(function)(engine.array(X))
    else:
        result = engine.host(cf.fuse(function)(engine.array(X)))
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, rtol=1e-13)


@pytest.mark.parametrize(
    "scalar",
    ["np.where(x[0, 0] > 1, x.max(), 2.0)", "np.asarray(x.max())", "np.copy(x.max())", "np.tensordot(x, x, 2)"],
)
def test_arrays_without_dimensions_have_views_and_scalars_have_none(scalar: str, engine: Engine) -> None:
    for text in (scalar, "x.max()"):
        for change in ("z = y[None]; z += 1; return y * 1", "z = y[None]; y += 1; return z * 1"):
            function = changing(text, change)
            result = engine.host(cf.fuse(function)(engine.array(X)))
            np.testing.assert_allclose(result, function(X), rtol=1e-13)


@pytest.mark.parametrize("change", ["x += 1; return y", "y += 1; return x"])
@pytest.mark.parametrize("text", UNDECIDED)
def test_changes_that_depend_on_the_layout_are_refused(text: str, change: str) -> None:
    with pytest.raises(cf.TraceError, match=r"may share memory|after a change in place of a reshaped one"):
        cf.fuse(changing(text, change))(X)


CONTIGUOUS = (
    *("x", "x[1:3]", "x[2, 2:]", "x.copy()", "np.copy(x)", "np.array(x)", "np.zeros((4, 4))", "np.eye(4)[:2]"),
    *("x.sum(0)", "x[1] * 2", "np.full((2, 3, 2), x[0, 0])", "np.ones_like(x)", "x.T.T[:, None]", "np.arange(8.0)"),
)


@pytest.mark.kernels_rotate
@pytest.mark.parametrize("change", ["y[1:] += x[0, 0]", "z[...] = x[1, 2]", "z[0] *= 2; y[0] = 1; z -= y.sum()"])
@pytest.mark.parametrize("text", CONTIGUOUS)
def test_what_is_contiguous_is_reshaped_as_a_view(text: str, change: str, engine: Engine) -> None:
    """Arguments, copies, arrays that the function creates, vectors that it computes, and parts of these."""
    scope: dict[str, Any] = {"np": np}
    exec(
        f"def function(x):\n    z = {text}\n    y = z.reshape(2, -1)\n    {change}\n    return y * 1, z * 1, x * 1",
        scope,
    )
    with engine.active(), force_plans():
        found = engine.host(cf.fuse(scope["function"])(engine.array(X)))
    for ours, theirs in zip(found, scope["function"](X.copy()), strict=True):
        assert ours.shape == theirs.shape
        np.testing.assert_allclose(ours, theirs, rtol=1e-13)


def test_strides_tell_whether_a_reshaped_array_is_a_view(rng: np.random.Generator) -> None:
    """As NumPy decides for arrays with permuted, stepped, reversed and repeated axes."""
    lengths = {1: (1,), 2: (2,), 3: (3,), 4: (2, 2), 6: (2, 3)}
    for _ in range(500):
        memory = np.zeros(tuple(rng.integers(1, 7, 3)))
        steps = tuple(slice(None, None, int(rng.choice([1, 1, 2, -1]))) for _ in range(3))
        x = memory.transpose(rng.permutation(3))[steps]
        x = np.broadcast_to(x, (int(rng.integers(1, 3)), *x.shape))
        split = [part for n in x.shape for part in lengths.get(n, (n,))]
        for new in ((x.size,), (*x.shape[:2], -1), tuple(split), (-1, *x.shape[2:]), (1, x.size, 1)):
            reshaped = x.reshape(new)
            found = reshaped_strides(x.shape, x.strides, reshaped.shape)
            if x.size > 1:
                assert (found is not None) == np.shares_memory(reshaped, memory)
            if found is not None and x.size > 1:
                pairs = zip(reshaped.shape, found, reshaped.strides, strict=True)
                assert all(ours == theirs for n, ours, theirs in pairs if n != 1)


LAYOUTS_IN_MEMORY = {
    "C": X,
    "F": np.asfortranarray(X),
    "reversed": X[::-1],
    "gaps": np.repeat(X, 2, axis=1)[:, ::2],
    "three axes": np.arange(16.0).reshape(2, 2, 4).transpose(2, 1, 0),
    "vector": X[0],
    "vector with gaps": X[:, 1],
    "no axes": np.array(2.5),
}
CONVERSIONS = (
    *("np.ascontiguousarray(x)", "np.asfortranarray(x)", "np.ascontiguousarray(x.T)", "np.asfortranarray(x.T)"),
    *("np.ascontiguousarray(x[..., :2])", "np.asarray(x, order='F')", "np.asarray(x.T, order='C')"),
    *("np.array(x, copy=None, order='F')", "np.array(x, copy=None, order='C')", "np.array(x, copy=False, order='F')"),
    *("np.array(x, order='F')", "np.asarray(x, copy=False, order='C')", "np.asarray(x, order='K')", "x.ravel()"),
    *("x.ravel('F')", "x.reshape(-1)", "np.reshape(x, x.shape, copy=True)", "np.reshape(x, -1, copy=True)"),
    *("np.meshgrid(x, copy=False)[0]", "np.meshgrid(x, x, sparse=True, copy=False)[1]", "np.diff(x, n=0)"),
    *("np.linalg.matrix_power(x, 1)", "np.expand_dims(x, ())", "np.nan_to_num(x, copy=False)", "x.imag", "+x"),
    *("np.clip(x, None, None)", "np.conj(x)", "x ** 1", "x.argmax()", "np.diag(x)", "np.polyint(x, 0)", "x[...]"),
)


@pytest.mark.rotates
@pytest.mark.parametrize("layout", LAYOUTS_IN_MEMORY)
@pytest.mark.parametrize("text", (*CONVERSIONS, *VIEWS, *COPIES))
def test_changes_of_arguments_of_any_layout_are_numpys_or_refused(text: str, layout: str) -> None:
    changes = (
        "x += 1; return y * 1",
        "y += 1; return x * 1",
        "y[...] = 3; return x * 1",
        "z = y[...]; z += 1; return x * 1",
    )
    for change in changes:
        scope: dict[str, Any] = {"np": np, "cf": cf}
        exec(f"def function(x):\n    y = {text}\n    {change}", scope)
        here, there = (in_memory_as(LAYOUTS_IN_MEMORY[layout]) for _ in range(2))
        try:
            expected = scope["function"](here)
        except (TypeError, ValueError, IndexError, AttributeError, np.linalg.LinAlgError):
            with pytest.raises((TypeError, ValueError, IndexError, AttributeError)):
                cf.fuse(scope["function"])(there)
            continue
        with force_plans():
            try:
                result = cf.fuse(scope["function"])(there)
            except (cf.TraceError, TypeError, ValueError):
                assert text not in KNOWN, (change, layout)
                np.testing.assert_array_equal(there, LAYOUTS_IN_MEMORY[layout])
                continue
        assert result.shape == expected.shape
        np.testing.assert_allclose(result, expected, rtol=1e-13)
        np.testing.assert_allclose(there, here, rtol=1e-13)


def in_memory_as(array: Any) -> Any:
    """A copy with the same strides."""
    steps = [abs(s) * (n - 1) for s, n in zip(array.strides, array.shape, strict=True)]
    memory = np.zeros(sum(steps) // array.itemsize + 1)
    first = sum(step for step, s in zip(steps, array.strides, strict=True) if s < 0) // array.itemsize
    copy = np.lib.stride_tricks.as_strided(memory[first:], array.shape, array.strides)
    copy[...] = array
    return copy


# Of these the strides of an argument tell whether they copy.
KNOWN = (
    "np.ascontiguousarray(x)",
    "np.asfortranarray(x)",
    "np.ascontiguousarray(x.T)",
    "np.array(x, copy=None, order='F')",
    *("x.ravel()", "x.ravel('F')", "x.reshape(-1)"),
)


def test_python_numbers_are_returned_as_such() -> None:
    for text in ("np.allclose(x, x + 1)", "np.array_equal(x, x)", "[np.allclose(x, x), x]"):
        scope: dict[str, Any] = {"np": np}
        exec(f"def function(x):\n    return {text}", scope)
        with force_plans():
            result, expected = cf.fuse(scope["function"])(X), scope["function"](X)
        first = [r[0] if isinstance(r, list) else r for r in (result, expected)]
        assert first[0] is first[1]


def test_statistics_of_complex_arrays(engine: Engine) -> None:
    z = X + 2j * X.T
    for text in ("np.var(x)", "x.std(axis=0)", "np.isclose(x, x + 1e-12j)", "np.linalg.vector_norm(x, axis=())"):
        function = eval(f"lambda x: {text}", {"np": np})
        np.testing.assert_allclose(engine.host(cf.fuse(function)(engine.array(z))), function(z), rtol=1e-13)


def test_vector_norms_of_complex_arrays_ask_for_absolute_values_alone(engine: Engine) -> None:
    z = X + 2j * X.T
    for options in ({}, {"axis": 1}, {"axis": (0, 1), "ord": 3}, {"axis": 0, "ord": np.inf}, {"axis": (), "ord": 0}):
        fused = cf.fuse(lambda x, options=options: np.linalg.vector_norm(x, **options))
        assert [s.fused for s in fused.plan(z).steps if s.kind == "Library"] == [("np.absolute",)]
        expected = np.linalg.vector_norm(z, **options)
        np.testing.assert_allclose(engine.host(fused(engine.array(z))), expected, rtol=1e-13)


def test_views_of_complex_arrays_are_views() -> None:
    z = X + 1j * X.T
    for text in ("np.flip(x, 1)", "np.split(x, 2)[0]", "np.rot90(x)"):
        function = changing(text, "return y")
        np.testing.assert_array_equal(cf.fuse(function)(z), function(z))


@pytest.mark.parametrize(
    "text", ["np.flip(x, 2)", "np.split(x, 3)", "np.rot90(x, axes=(0, 0))", "np.broadcast_arrays(x, x[:3])"]
)
def test_errors_name_the_line(text: str) -> None:
    with pytest.raises(ValueError):
        changing(text, "return y")(X)
    with pytest.raises(ValueError, match=r"\n  at "):
        cf.fuse(changing(text, "return y"))(X)


@pytest.mark.parametrize("dtype", ["complex128", "uint64", "float64"])
@pytest.mark.parametrize("text", ["x[1] = 0", "x[:, 1:3] = 2", "x[..., 0] = 1", "x[0, :, ::2] = 3"])
def test_numbers_are_assigned_to_parts_of_arrays_of_any_dtype(text: str, dtype: str, engine: Engine) -> None:
    """A number that kernels do not take the dtype of was an operand of a library step that is nowhere in memory."""
    scope: dict[str, Any] = {}
    exec(f"def function(x):\n    {text}\n    return x + x", scope)
    x = np.arange(24).reshape(2, 3, 4).astype(dtype)
    expected = scope["function"](x.copy())
    given = engine.array(x)
    with force_plans():
        np.testing.assert_array_equal(engine.host(cf.fuse(scope["function"])(given)), expected, strict=True)
