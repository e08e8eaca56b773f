"""Elements that a mask selects, beside slices and integers too: NumPy's results, dtypes and types of scalars."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from masks import ENGINES, arguments, check, on_engines, program
from support import NUMPY, Engine

import cupyfuse as cf
from cupyfuse.settings import force_plans

# Reading ------------------------------------------------------------------------------------------------------------

SELECTIONS = (
    "x[:, cols].shape, x[:, cols].size, np.size(a[both]), np.shape(x[rows]) | (a[both].size * a[both]).sum() | "
    "a[rows, :].mean(0) | a[rows, ...].sum() | a[rows, 0].sum() | a[..., cols].max(-1) | a[:, cols].sum(1) | "
    "a[:, cols].mean(1, keepdims=True) | a[0, cols].sum() | a[-1, cols].var() | x[rows, 1].mean(0) | "
    "x[rows, :, 1].mean(0) | x[0, cols].sum(0) | x[:, cols, 1].sum(1) | x[:, cols, 0:2].sum(1) | x[both, 0].sum() | "
    "x[both, :2].mean(0) | x[None, both].sum(1) | x[both, None].sum(0) | x[1:3, cols].sum(1) | "
    "x[::-1, cols].sum(1) | x[rows, ::-1].sum(0) | x[:, 0, x[0, 0] > 0].sum(1) | x[0, :, x[0, 0] > 0].sum(0) | "
    "x[:, 0, ..., x[0, 0] > 0].sum(0) | x[0, None, cols].sum(0) | x[0, ..., x[0, 0] > 0].sum(0) | "
    "x[both][:, 0].sum() | x[:, cols][..., 0].sum(1) | a[rows][:, None].sum(0) | x[:, cols].std(1) | "
    "x[:, cols].var(1, ddof=1) | x[:, cols].prod(1) | np.median(a[:, cols], axis=1) | "
    "np.median(x[:, cols], axis=-2) | np.median(a[rows], 0) | np.median(a[:, cols], 1) | "
    "np.ptp(a[:, cols], axis=1) | a[:, cols].any(1) | a[:, cols].all(1) | "
    "x[:, cols].sum(keepdims=True) | x[both].sum(keepdims=True) | x[:, cols].max(0).sum() | a[rows].sum((0, 1)) | "
    "a[rows].sum(np.int64(0)) | (a[:, cols] - a[:, cols].mean(1, keepdims=True)).std(1) | "
    "(a[rows] - a[rows].mean(0, keepdims=True)).std(0) | (a[:, cols] * u[:, None]).sum(1) | "
    "(a[:, cols] * w[cols]).sum(1) | (u[:, None] * a[:, cols]).sum(1) | (a[rows] * u[rows][:, None]).sum(0) | "
    "(x[both] * a[both][:, None]).sum(0) | a[:, cols] @ w[cols] | w[cols] @ a.T[cols] | w[cols] @ w[cols] | "
    "a[:, cols] @ a[:, cols].T | a[rows].T @ u[rows] | u[rows] @ a[rows] | np.matmul(a[:, cols], w[cols]) | "
    "x[both].T @ x[both] | a[both] @ x[both] | (x[both] @ x[0, 0]).sum() | (a[rows] * [1, 2, 3, 4, 5]).sum(0) | "
    "(a[rows] @ np.arange(5)).sum() | a[both].T @ a[both] | a[rows].T[0].sum() | "
    "np.average(u[rows]), np.average(u[rows], weights=u[rows] ** 2) | "
    "np.average(a[rows], axis=0, weights=u[rows] ** 2) | np.average(a[both], None, a[both] ** 2) | "
    "(a.sum() - a[both]).sum() | np.subtract(u[0], a[both]).sum() | "
    "(u[0] > a[both]).sum(), (a[both] == u[0]).sum() | np.where(a[both] > 1, a[both], 0).sum() | "
    "np.ones_like(a[both]).sum(), (np.full_like(a[both], 2) * a[both]).sum(), np.full_like(a[both], a.max()).sum() | "
    "np.zeros_like(a[both], dtype=np.int32).sum() + np.ones_like(a[both]).max() | "
    "np.clip(a[both], a_min=0, a_max=2).sum(), a[both].clip(min=1).sum() | np.round(a[both] / 3, 1).sum() | "
    "a[both].astype(np.float32).sum(), a[both].copy().sum(), a[both].round().sum() | "
    "np.array(a[both]).mean(), np.asarray(a[rows]).sum(0), np.asarray(u[rows], 'f8').max() | "
    "np.array(a[both], 'f4').sum(), np.array(a[both], copy=None).min() | "
    "y = a[both]; z = np.array(y); z *= 2; w = np.asarray(y); w += 1; np.ascontiguousarray(y).sum(), z.sum() | "
    "v = a[both]; v = v if isinstance(v, np.ndarray) else np.array([v]); v.sum(), np.require(v).max() | "
    "a.sum() * a[both].ndim * x[both].ndim | a[both][a[both] > 1].sum() | a[rows][a[rows] > 1].sum() | "
    "a[rows][a[rows][:, 0] > 0].sum(0) | u[rows][u[rows] > 0].size | a[rows][u[rows] > 0][:, 1].sum() | "
    "a[~both].sum(), a[:, ~cols].sum(1), a[both & (a > 0)].mean() | a[a.sum() > 0].sum(0) | "
    "a[a.sum() < 0, 0].sum() | x[x > 0].mean(), x[x > 0].std() | np.arctan2(a[both], u[0]).sum() | "
    "a[both].sum(initial=2), np.prod(u[rows], initial=3), a[rows].max(0, initial=3), u[u > 9].min(initial=1) | "
    "a[both].sum(dtype='f8'), a[rows].mean(0, 'f4'), a[rows].mean(1, dtype='f8').sum() | "
    "np.count_nonzero(a[both]), np.count_nonzero(a[rows], axis=0), np.count_nonzero(a[:, cols], 0).sum() | "
    "np.linalg.norm(a[both]), np.linalg.norm(a[rows], axis=0), np.linalg.norm(a[:, cols], 1, axis=1) | "
    "np.linalg.norm(u[rows], 0), np.linalg.norm(u[rows], 1), np.linalg.norm(u[rows], 3) | "
    "np.linalg.norm(u[rows], np.inf), np.linalg.norm(u[rows], -np.inf), np.linalg.norm(u[rows] + 1j) | "
    "np.linalg.norm(a[rows] - w, axis=1).max(), np.linalg.norm(a[rows], np.inf, 0, True) | "
    "a[np.where(both)].sum(), np.where(both)[0].size, np.nonzero(both)[1].mean(), both.nonzero()[0].max() | "
    "x[np.nonzero(rows)].sum(0), a[:, np.nonzero(cols)[0]].sum(1), a[0, np.flatnonzero(cols)].max() | "
    "i, j = np.where(both); a[i, j].sum(), x[i].sum(0), w[j].sum(), a[i, i].sum(), (i + 2 * j).max(), w[j] @ u[i] | "
    "i = np.flatnonzero(a > 1); a.ravel()[i].sum(), a.flat[i].size, np.take(a, i).max(), np.arange(20)[i].min() | "
    "np.argmax(a[both]), a[both].argmin(), a[rows].argmax(0), a[:, cols].argmin(axis=1), a[rows].argmax(1).max() | "
    "a[:, cols].argmax(1, keepdims=True), np.argmin(a[rows], keepdims=True), x[rows].argmin(0) | "
    "np.nanargmax(a[both]), np.nanargmin(a[:, cols], axis=1), np.where(rows)[0][u[rows].argmax()] | "
    "u[rows][0], u[rows][-1], a[rows][1], a[rows][-1, 2], a[:, cols][0, 1], a[:, cols][:, 1], x[both][2, ::-1] | "
    "u[rows][u[rows].argmin()], np.flatnonzero(both)[0], np.nonzero(rows)[0][-1], x[i := np.argmax(u)][0] | "
    "np.argwhere(both).mean(0), np.argwhere(rows)[:, 0].sum(), np.argwhere(x > 1).max(), np.argwhere(both).size | "
    "np.argwhere(both)[0], tuple(np.argwhere(both)[-1]), a[tuple(np.argwhere(both).T)].sum() | "
    "np.argwhere(rows).ravel().max(), np.argwhere(rows).flatten()[0], a[rows].ravel().argmax() | "
    "np.argwhere(u > 1).sum(), a[rows].reshape(-1)[1], x[:, cols].ravel()[7] | "
    "i, j = np.where(both); a[i, 0].sum(), x[i, 1].mean(0), x[i, -1, ::2].sum(0), x[i, j, 1:].max(0), x[0, j].sum() | "
    "x[np.where(rows)[0], 0].sum(), x[np.nonzero(rows)[0], 1:3, 0].max(0), a[np.flatnonzero(rows), -1].argmin() | "
    "np.compress(rows, a, axis=0).sum(0), a.compress(cols, axis=-1).mean(1), x.compress(u > 0, 0).max(0) | "
    "np.compress(cols[:3], x, 1).sum(1), np.compress(rows, u, axis=0).size, np.compress(w, a, 1).sum(1) | "
    "a[both].sum(where=a[both] > 1), a[both].mean(where=a[both] > 1), a[rows].sum(0, where=a[rows] > 1) | "
    "a[rows].sum(1, where=a[rows] > 1).sum(), a[both].any(where=a[both] > 1) | "
    "a[rows].max(where=a[rows] < 2, initial=0) | "
    "np.std(a[rows], axis=0, where=a[rows] > 0), np.nansum(a[both], where=a[both] > 1) | "
    "a[rows].sum(where=[True, False, True, False, True]), a[rows].var(where=w > 1) | "
    "a[:, cols].sum(1, where=rows[:, None]) | "
    "y = x[:, cols]; y[y > 1].sum(), y[y[..., 0] > 1].sum(0), y[y > 1].argmax() | "
    "a[rows][:, [0, 2]].sum(0), a[rows][:, np.argsort(w)].max(0), a[:, cols][[1, 0]].sum() | "
    "np.histogram(u[rows], 3, (0, 6))[0], np.bincount(np.flatnonzero(both), minlength=20) | "
    "np.cov(a[rows].T), np.corrcoef(u[rows], u[rows] ** 2), np.trapezoid(u[rows]), np.array_equal(u[rows], u[rows]) | "
    "np.interp(u[rows], [0, 6], [1, 2]).sum(), np.digitize(u[rows], [1, 2]).max(), np.isin(u[rows], [1, 2]).sum() | "
    "np.isclose(u[rows], 1).sum(), np.allclose(a[both], a[both]), np.fix(u[rows] / 2).sum() | "
    "np.add.reduce(a[rows]), np.maximum.reduce(a[both], keepdims=True), np.logical_or.reduce(a[:, cols], axis=1)"
)


@pytest.mark.kernels_rotate
@on_engines("float32", "float32 float64 int64 uint8")
@pytest.mark.parametrize("text", SELECTIONS.split(" | "))
def test_selections(text: str, dtype: str, engine: Engine) -> None:
    check(text, engine, dtype)


LEAVING_NAN_OUT = (
    "np.nansum({0}), np.nanprod({0}), np.nanmean({0}), np.nanvar({0}), np.nanstd({0}, ddof=1)",
    "np.nanmax({0}), np.nanmin({0}), np.nanmax({0}, initial=1), np.nanmin({0}, initial=-9)",
    "np.nanmedian({0}), np.nanpercentile({0}, q=30), np.nanquantile({0}, q=0.25), np.sum({0}), np.median({0})",
)


@pytest.mark.kernels_rotate
@on_engines("float32", "float32 float64 int64")
@pytest.mark.parametrize("text", LEAVING_NAN_OUT)
@pytest.mark.parametrize("of", ["y[rows], axis=0", "y[:, cols], axis=1, keepdims=True", "y[both]"])
def test_functions_that_leave_nan_out(text: str, of: str, dtype: str, engine: Engine) -> None:
    holes = "a" if dtype == "int64" else "np.where(a == w[0], np.nan, a).astype(a.dtype)"
    check(f"y = {holes}; {text.format(of)}", engine, dtype)


@pytest.mark.kernels_rotate
@ENGINES
@pytest.mark.parametrize("chosen", ["some", "none"])
@pytest.mark.parametrize("ddof", [0, 2.5, 3, 9])
@pytest.mark.parametrize("text", ["u[rows].var(ddof={})", "a[rows].std(0, ddof={})", "np.var(a[:, cols], 1, ddof={})"])
def test_variances_of_few_elements(text: str, ddof: float, chosen: str, engine: Engine) -> None:
    """NaN or infinity for no more elements than ddof; it was -0.0, or of the wrong sign."""
    check(text.format(ddof), engine, "float64", chosen)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "uint32", "uint64", "bool", "float16"])
def test_inner_products_keep_the_dtype(dtype: str) -> None:
    """And are scalars, where sums of unsigned integers are library steps in uint64."""
    check("(w * 50)[cols] @ (w * 50)[cols]" if dtype != "bool" else "w[cols] @ w[cols]", NUMPY, dtype)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_means_and_variances_of_complex_numbers(dtype: str) -> None:
    check("a[rows].mean(0), a[both].var(), a[:, cols].std(axis=1, ddof=1), a[rows].sum(0)", NUMPY, dtype)


def test_a_float_argument_beside_masked_elements_is_a_parameter() -> None:
    scaled = cf.fuse(lambda x, m, k: (x[m] * k).sum())
    x = np.arange(6, dtype=np.float32)
    with force_plans():
        assert [scaled(x, x > 2, k) for k in (2.0, 3.0)] == [24, 36]
    assert len(scaled._runnables) == 1


# Writing ------------------------------------------------------------------------------------------------------------

CHANGES = (
    "a[:, cols] *= 2; a + 0 | a[rows, 0] += 1; a + 0 | a[0, cols] -= 1; a + 0 | x[:, cols, 0] = 1; x + 0 | "
    "x[..., x[0, 0] > 0] = 2; x + 0 | a[:, cols] = u[:, None]; a + 0 | a[:, cols] = a[:, ::-1][:, cols]; a + 0 | "
    "x[:, cols] = x[0, 0]; x + 0 | x[both, 0] += 1; x + 0 | x[both, 0] = a[both]; x + 0 | x[both, 1:] *= 2; x + 0 | "
    "a[rows, :] = 0; a + 0 | a[rows, ...] = w; a + 0 | a[rows, 1:3] = 5; a + 0 | x[0, :, x[0, 0] > 0] *= 2; x + 0 | "
    "x[0, :, x[0, 0] > 0] = 1; x + 0 | y = a[rows]; y[y > 1] = 0; y.sum(0), a + 0 | "
    "y = a[rows]; y[y > 1] *= 2; y.sum(0) | y = a[both]; y[y > 1] -= 1; y += 1; y.sum(), a + 0 | "
    "y = a[rows]; z = y.T @ y; y *= 2; z, y.sum() | z = a[:, :3]; z[:, cols[:3]] = 0; a + 0 | "
    "z = a.T; z[:, rows] *= 2; a + 0, z + 0 | a[a.sum() > 0] = 1; a + 0 | "
    "y = a[:, cols]; y -= y.sum(1, keepdims=True); y.sum(1), a + 0 | y = a[rows]; y[y[:, 0] > 0] = 7; y.sum(0) | "
    "a[rows, 0] = u[rows]; a + 0 | a[np.where(a < 0)] = 1; a + 0 | i = np.nonzero(both); a[i] *= 2; a + 0 | "
    "i, j = np.where(both); a[i, j] = w[j]; a + 0 | i = np.nonzero(rows)[0]; x[i] = 1; i += 1; i.sum(), x + 0 | "
    "i = np.where(a > 1); a += 1; a[i] = 0; a + 0 | x[:, np.flatnonzero(cols)] = 3; x + 0 | "
    "y = x[:, cols]; y[y > 1] = 0; y.sum(1), x + 0 | y = a.T[:, rows]; y[y > 1] *= 2; y.max(1) | "
    "a[:, cols] = 0; a[~rows, 1] = 3; a + 0 | w[cols] *= w[cols].size; w + 0"
)


@pytest.mark.kernels_rotate
@on_engines("float32", "float32 int64")
@pytest.mark.parametrize("text", CHANGES.split(" | "))
def test_changes_in_place(text: str, dtype: str, engine: Engine) -> None:
    check(text, engine, dtype)


def test_changes_beside_slices_are_fused() -> None:
    def changed(x: Any, columns: Any) -> Any:
        x[:, columns] *= 2
        x[:, columns] += x[:, columns].mean(1, keepdims=True)
        return x - x.mean(1, keepdims=True)

    plan = cf.fuse(changed, strict=True).plan(cf.spec((64, 32), "float32"), cf.spec((32,), "bool"))
    assert {step.kind for step in plan.steps} == {"RowProgram"}


# Refused ------------------------------------------------------------------------------------------------------------

REFUSED = {
    "np.asarray(a[rows], order='F').sum()": "an array of masked elements with order='F'",
    "np.sort(a[both])": r"np\.sort: the shape or dtype of its result depends on values",
    "np.linalg.svd(a[rows])[1]": r"np\.linalg\.svd: the shape or dtype of its result depends on values",
    "np.ediff1d(u[rows]).sum()": r"np\.ediff1d: the shape or dtype of its result depends on values",
    "a[both]": r"a result of masked elements.* return the array and the mask(.|\n)*<string>:2",
    "np.argwhere(both)": "a result of masked elements",
    "len(a[both])": r"len\(\) of masked elements: .*use \.size",
    "[v for v in a[both]]": "an iteration over masked elements",
    "a[rows][0, [0, 1]]": "an index of masked elements by an array beside others",
    "y = a[rows]; z = y[0]; y *= 2; z + 0": "a change in place of a part of masked elements",
    "y = a[rows]; z = y[0]; z *= 2; y.sum()": "may share memory",
    "u, [a[:, cols]]": "a result of masked elements",
    "a @ a[rows].T": "a product of an array with masked elements",
    "a[:, cols] @ a": "a product of masked elements with others",
    "u[:, None] + a[rows]": "masked elements and an array",
    "a[rows][:2]": "a part of masked elements",
    "a[rows][u > 0]": "this index of masked elements",
    "a[rows, cols]": "indexing with a mask beside other indices",
    "y = a[rows]; z = y[:, 0]; y *= 2; z.sum()": "elements that have changed since",
    "y = a[rows]; z = y[:, 0]; z *= 2; y.sum()": "a change in place of a part",
    "y = a[rows]; y[0] = 2; y.sum()": "this assignment to masked elements",
    "np.average(a[rows], weights=u[rows])": "weights of another shape",
    "np.quantile((a[rows] * 9).astype(int), 0.3, method='lower')": "quantile of masked integers that is one of them",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refused(text: str) -> None:
    """By an error of this library, which says how else it is written."""
    with force_plans(), pytest.raises(cf.TraceError, match=f"cannot fuse .*{REFUSED[text]}"):
        cf.fuse(program(text))(*arguments("float64"))


@pytest.mark.parametrize("text", ["a[cols].sum()", "a[:, rows].sum()", "a[both, 0].sum()", "x[0, :, rows].sum()"])
def test_masks_of_other_shapes(text: str) -> None:
    for function in (program(text), cf.fuse(program(text))):
        with force_plans(), pytest.raises(IndexError):
            function(*arguments("float64"))
