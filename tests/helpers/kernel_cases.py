"""Programs, shapes and layouts that together reach every line of `kernels_cu/`: what the kernel tests run, and what
`mutants.py` breaks."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support import INF, NAN, compute, dtype_of, lay_out, normal, unit

import cupyfuse as cf

Arrays = list[np.ndarray[Any, Any]]


# Programs: what is computed, and from what ------------------------------------------------------------------------


def affine_softmax(y: Any, a: Any, c: Any) -> Any:
    """Two stages with per-column inputs, a full-size and a per-row result."""
    z = cf.softmax(y * a + c, axis=1)
    return z, cf.logsumexp(y + c, axis=1, keepdims=True)


def softmax(y: Any) -> Any:
    return cf.softmax(y, axis=1)


def normalised(y: Any) -> Any:
    """Three stages: mean, mean of squares, and the quotient by a number of the row."""
    d = y - y.mean(axis=1, keepdims=True)
    return d / np.sqrt((d * d).mean(axis=1, keepdims=True) + 0.25)


def layer_norm(y: Any, a: Any, c: Any) -> Any:
    """The same, and per-column inputs that no stage but the last reads."""
    return normalised(y) * a + c


def reductions(y: Any) -> Any:
    """Every accumulator in one pass; the product is of numbers near 1."""
    near = 1 + y / (8.0 * y.shape[1])
    return y.sum(axis=1), near.prod(axis=1), y.max(axis=1), y.min(axis=1), cf.logsumexp(y, axis=1), y.var(axis=1)


def column_reductions(y: Any) -> Any:
    near = 1 + y / (8.0 * y.shape[0])
    return y.sum(axis=0), near.prod(axis=0), y.max(axis=0), y.min(axis=0), cf.logsumexp(y, axis=0), y.var(axis=0)


def column_sums(y: Any) -> Any:
    """Sums alone, which are added up in parts."""
    return y.sum(axis=0), (y * y).mean(axis=0)


def extremes(y: Any) -> Any:
    """By themselves, not along with a sum of exponentials, which has the maximum already."""
    return y.max(axis=1), y.min(axis=1)


def column_extremes(y: Any) -> Any:
    return y.max(axis=0), y.min(axis=0)


def places(y: Any) -> Any:
    """Of rounded numbers, which have ties; beside what shares the accumulator of the maximum."""
    z = np.round(y)
    return z.argmax(axis=1), z.argmin(axis=1), z.max(axis=1), cf.logsumexp(z, axis=1)


def column_places(y: Any) -> Any:
    z = np.round(y)
    return z.argmax(axis=0), z.argmin(axis=0), z.min(axis=0)


def moments(y: Any) -> Any:
    return y.mean(axis=1), y.var(axis=1)


def column_moments(y: Any) -> Any:
    return y.mean(axis=0), y.var(axis=0)


def pointwise(y: Any, a: Any, r: Any) -> Any:
    return cf.gelu(y * a), y + r


def per_row(y: Any, r: Any) -> Any:
    """A result for each row of a step without reductions."""
    return y * r, np.exp(r)


def masks(y: Any) -> Any:
    positive = y > 0
    return np.where(positive, y, -1.0).sum(axis=1), positive.sum(axis=1), positive.any(axis=1), positive


def conversions(y: Any) -> Any:
    return (y * 3).astype(np.float16), (y * 5).astype("bfloat16"), y.astype(np.float64)


def folded(x: Any, w: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
    """A guard for each element: folded factors, and the form that was written where they are not finite."""
    return cf.softmax(cf.batch_norm(x @ w.T, mean, var, gamma, beta), axis=1)


def collapsed(x: Any, w: Any, b: Any) -> Any:
    """A guard for each row: a product that is not computed but where the collapsed sum is not finite."""
    return (x @ w.T + b).sum(axis=1)


def exponentials(y: Any) -> Any:
    """The sum alone, which of infinite rows is NaN, as it is written."""
    return np.exp(y - y.max(axis=1, keepdims=True)).sum(axis=1)


def normalised_columns(y: Any) -> Any:
    return cf.softmax((y - y.mean(axis=0)) / np.sqrt(y.var(axis=0) + 0.25), axis=1)


@dataclass(frozen=True)
class Case:
    """One program over arrays of one shape, dtype and layout.

    Errors are bounded in roundings of the largest result (or of 1): one for each term of a sum or a product, and 64 for
    what is computed of an element. Far from zero the square of a mean's error is the variance's too: one rounding for
    each element that one of 32 lanes adds, and five where the lanes' sums meet.
    """

    program: Callable[..., Any]
    shape: tuple[int, int]
    dtype: str = "float32"
    layout: str = "contiguous"
    special: bool = False
    offset: float = 0.0

    @property
    def roundings(self) -> float:
        return 64 + max(self.shape)

    @property
    def name(self) -> str:
        parts = [self.program.__name__, "x".join(map(str, self.shape)), self.dtype]
        parts += [self.layout] if self.layout != "contiguous" else []
        parts += ["special"] if self.special else []
        return "-".join(parts + (["offset"] if self.offset else []))

    def arguments(self) -> Arrays:
        """Draw the case's arguments, special values among them if it has any."""
        rng = np.random.default_rng(zlib.crc32(self.name.encode()))
        rows, cols = self.shape
        y = normal(rng, self.shape, self.dtype) + dtype_of(self.dtype).type(self.offset)
        if self.program in (folded, collapsed):
            return self._linear(rng)
        if self.special:
            y[rows // 2, cols // 2], y[0] = NAN, -INF
            y[-1, cols // 3] = INF
        columns = [(cols,)] * 2
        shapes = {affine_softmax: columns, layer_norm: columns, pointwise: [(cols,), (rows, 1)], per_row: [(rows, 1)]}
        return [y, *(normal(rng, shape, self.dtype) for shape in shapes.get(self.program, []))]

    def _linear(self, rng: np.random.Generator) -> Arrays:
        """Draw x, weight and columns for a product that is folded or collapsed."""
        rows, cols = self.shape
        x, w = normal(rng, (rows, 13), self.dtype), normal(rng, (cols, 13), self.dtype)
        if self.special:
            # Infinite products of one sign, and of both: their sum is infinite, or NaN.
            x[rows // 2, 3], x[0, 1], x[1, 2] = NAN, INF, INF
            w[:, 1], w[:, 2] = np.abs(w[:, 1]), np.abs(w[:, 2])
            w[0, 2] = -0.5
        columns = [normal(rng, cols, self.dtype) for _ in range(4)]
        columns[1] = np.abs(columns[1]) + dtype_of(self.dtype).type(0.5)
        if self.special and self.program is folded:
            # Factors whose product underflows, though no value of the chain as written does.
            columns[1][0], columns[2][0] = 1e30, 1e-28
        return [x, w, *(columns if self.program is folded else columns[:1])]

    def laid_out(self, xp: Any) -> list[Any]:
        return [lay_out(xp, a, self.layout) for a in self.arguments()]

    def expected(self) -> tuple[Any, ...]:
        """The program as it is written, in float64."""
        with np.errstate(all="ignore"):
            result = self.program(*[a.astype(np.float64) for a in self.arguments()])
        return result if isinstance(result, tuple) else (result,)

    def check(self, results: tuple[Any, ...]) -> None:
        """Compare a kernel's results with float64: the same NaN and infinities, and errors within the bound."""
        __tracebackhide__ = True
        for number, (got, want) in enumerate(zip(results, self.expected(), strict=True)):
            got, want = np.asarray(got), np.asarray(want)
            where = f"{self.name}, result {number}"
            assert got.shape == want.shape, where
            if want.dtype.kind in "bi":
                np.testing.assert_array_equal(got, want, err_msg=where)
                continue
            a, b = got.astype(np.float64), want.astype(np.float64)
            np.testing.assert_array_equal(np.isnan(a), np.isnan(b), err_msg=where)
            np.testing.assert_array_equal(np.isposinf(a), np.isposinf(b), err_msg=where)
            np.testing.assert_array_equal(np.isneginf(a), np.isneginf(b), err_msg=where)
            finite = np.isfinite(b)
            if finite.any():
                name = str(got.dtype)
                size = np.maximum(1.0, np.abs(b[finite]).max())
                roundoff = unit(compute(self.dtype))
                bound = self.roundings * roundoff * size + 2 * unit(name) * np.abs(b[finite])
                if self.program is moments:
                    bound += ((self.shape[1] / 32 + 5) * roundoff * self.offset) ** 2
                assert (np.abs(a[finite] - b[finite]) <= bound).all(), where


LANES = [(1, 1), (7, 1), (5, 2), (37, 3), (9, 31), (3, 33), (70, 5), (5, 64), (6, 127), (3, 1000), (2, 1023), (3, 1024)]
BLOCKS = [(2, 1025), (3, 1500), (4, 2048), (2, 5000), (1, 8191), (2, 16385)]
COLUMNS = [(1, 1), (2, 3), (5, 40), (33, 1), (70, 33), (300, 7), (600, 5), (1100, 36), (2100, 3), (5400, 34)]

CASES: list[Case] = [
    *(Case(affine_softmax, shape) for shape in [*LANES, *BLOCKS[:4]]),
    # Rows enough for a block to take several, the per-column inputs staying where they are.
    Case(affine_softmax, (29, 1100)),
    Case(affine_softmax, (7, 8192)),
    Case(affine_softmax, (26, 1025), "float16"),
    *(Case(affine_softmax, shape, dtype) for dtype in ("float16", "bfloat16", "float64") for shape in LANES[3:8:2]),
    *(Case(softmax, shape) for shape in [*LANES[1::3], *BLOCKS, (1, 32768), (2, 32769), (1, 40001)]),
    *(Case(softmax, shape, dtype) for dtype in ("float16", "bfloat16", "float64") for shape in [(3, 1032), (2, 4099)]),
    *(Case(normalised, shape) for shape in [(5, 7), (3, 200), (2, 3000), (1, 40002)]),
    *(Case(layer_norm, shape, dtype) for shape in LANES[2:10:2] for dtype in ("float32", "bfloat16")),
    *(Case(layer_norm, shape) for shape in [(3, 1000), (2, 5000)]),
    *(
        Case(normalised, (4, 300), layout=layout)
        for layout in ("fortran", "row_gap", "column_gap", "reversed", "offset")
    ),
    *(Case(reductions, shape) for shape in [(5, 1), (9, 30), (3, 513), (2, 1500), (3, 5001), (1, 70000)]),
    # Nothing but negative and nothing but positive numbers.
    *(Case(p, (30, 70), offset=offset) for p in (extremes, column_extremes) for offset in (-6.0, 6.0)),
    *(Case(reductions, (4, 40), offset=offset) for offset in (-6.0, 6.0)),
    *(Case(column_reductions, (300, 8), offset=offset) for offset in (-6.0, 6.0)),
    *(Case(reductions, (3, 700), dtype) for dtype in ("float16", "bfloat16", "float64")),
    Case(moments, (4, 600), offset=100_000.0),
    *(Case(extremes, (2, cols)) for cols in (3000, 3001)),
    # Rows that blocks share.
    *(Case(exponentials, (2, 16400), dtype) for dtype in ("float16", "float32", "float64")),
    *(Case(extremes, (3, 20003), special=special) for special in (False, True)),
    *(Case(places, (3, 20003), special=special) for special in (False, True)),
    Case(collapsed, (2, 16500)),
    Case(collapsed, (2, 16501), special=True),
    Case(softmax, (1, 131075)),
    *(Case(places, shape) for shape in [(7, 1), (5, 2), (9, 31), (3, 513), (2, 1500), (3, 5001), (1, 40001)]),
    *(Case(places, (3, 700), dtype) for dtype in ("float16", "bfloat16", "float64")),
    *(Case(column_places, shape) for shape in COLUMNS),
    *(Case(column_reductions, shape) for shape in COLUMNS),
    *(Case(column_sums, shape) for shape in COLUMNS),
    *(Case(column_sums, (40, 48), dtype) for dtype in ("float16", "bfloat16", "float64")),
    *(Case(column_reductions, (40, 48), dtype) for dtype in ("float16", "bfloat16", "float64")),
    *(Case(column_moments, shape, offset=100_000.0) for shape in [(1500, 4), (40, 3)]),
    *(Case(pointwise, shape) for shape in [(1, 1), (3, 5), (40, 64), (3, 1001)]),
    *(Case(pointwise, (5, 48), dtype) for dtype in ("float16", "bfloat16", "float64")),
    Case(per_row, (6, 50)),
    *(Case(masks, shape) for shape in [(4, 9), (2, 1200)]),
    *(Case(conversions, (3, 40), dtype) for dtype in ("float32", "float64")),
    Case(folded, (9, 20)),
    Case(folded, (9, 20), special=True),
    Case(folded, (5, 1100), special=True),
    Case(collapsed, (9, 20)),
    Case(collapsed, (9, 20), special=True),
    Case(normalised_columns, (21, 24)),
    *(
        Case(p, (9, 50), special=True)
        for p in (softmax, reductions, column_reductions, normalised, exponentials, extremes, places, column_places)
    ),
    *(Case(program, (5, 1400), special=True) for program in (softmax, reductions, affine_softmax, places)),
    *(Case(program, (1030, 5), special=True) for program in (column_reductions, column_places, column_sums)),
]
