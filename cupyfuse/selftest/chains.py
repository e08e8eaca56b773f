"""Accuracy of chains: reductions, softmax, products, normalisation, the heads of networks.

Every case computes exact results in a wider format, and derives its error bound: n ulps of the summed magnitudes for a
sum of n terms, K ulps of |x| |w| for an inner product of K terms, and an exponential adds the error of its argument.
Nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np

import cupyfuse.heads as heads
from cupyfuse.heads.oracle import leaky_relu, logsumexp

from ..api import functions as cf
from ..api.fuse import Fused
from ..ir.operators import POINTWISE, REDUCTIONS
from . import oracle, reductions
from .formats import Array, Format
from .measure import Allowance, Measurement, measure
from .reductions import COLUMNS, FINAL_ULPS, HELD, LANES, LONG, SHARED, STREAMED, all_reductions, reduction_allowance
from .target import Failure, Target

Exact = tuple[str, Array, Allowance]
# Row lengths for which `row_block` is chosen, in vectors of elements.
_BLOCKS = (2048, 2047)
_MANY_ROWS = 6000  # so many that reductions of their columns share a launch with those of rows


@dataclass(frozen=True, eq=False)
class Case:
    """One fused function on one set of data.

    Attributes
    ----------
    name : description, with the sizes
    fused : the function
    draw : draws the arguments in float64, by name
    exact : computes the name, exact value and allowance of each result from the arguments in a wider format
    bound : names of the arguments to bind before the call
    options : keyword arguments other than arrays
    """

    name: str
    fused: Fused
    draw: Callable[[np.random.Generator], dict[str, Array]]
    exact: Callable[[dict[str, Array]], list[Exact]]
    bound: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)


# Reductions and rows ------------------------------------------------------------------------------------------------


def _draw_near_one(rng: np.random.Generator, shape: tuple[int, int]) -> dict[str, Array]:
    """Draw x near 1 and -1: products of thousands of factors stay in range, and sums cancel."""
    return {"x": np.exp2(rng.standard_normal(shape) / 32) * rng.choice([-1.0, 1.0, 1.0], shape)}


def _draw_normal(rng: np.random.Generator, shape: tuple[int, int]) -> dict[str, Array]:
    """Draw x from a normal distribution, wide enough for exponentials that differ by orders of magnitude."""
    return {"x": rng.standard_normal(shape) * 4}


def _exact_reductions(x: Array, axis: int, form: Format) -> list[Exact]:
    """Return every exact reduction of x along an axis."""
    narrow = x.astype(form.computed.dtype)
    found = []
    for name, row in REDUCTIONS.items():
        allowance = reduction_allowance(name, x.shape[axis])
        found.append((name, row.numpy(x, axis), replace(allowance, scale=row.scale(narrow, axis))))
    return found


def _exact_softmax_rows(logits: Array, sizes: Array, extra: float) -> list[Exact]:
    """Return exact softmax and log_softmax of logits that have errors of up to `extra` ulps of `sizes` each."""
    top = logits.max(axis=1, keepdims=True)
    part = np.exp(logits - top)
    total = part.sum(axis=1, keepdims=True)
    result, logarithm = part / total, logits - top - np.log(total)
    ulps = logits.shape[1] + 2 * FINAL_ULPS
    worst = extra * sizes.max(axis=1, keepdims=True)
    # An absolute error of a logit is a relative one of its exponential; so is that of the row's sum.
    scale = result * (1 + (top - logits) + 2 * worst / ulps)
    logscale = 1 + (top - logits) + np.abs(np.log(total)) + 2 * worst / ulps
    text = f"n + {2 * FINAL_ULPS:g}"
    return [
        ("softmax", result, Allowance(ulps, scale, True, text)),
        ("log_softmax", logarithm, Allowance(ulps, logscale, text=text)),
    ]


# Products -----------------------------------------------------------------------------------------------------------


def _draw_head(rng: np.random.Generator, head: Fused, rows: int, inner: int, columns: int) -> dict[str, Array]:
    """Draw the arguments of a head."""
    return heads.example_inputs(head, rows, inner, columns, "float64", seed=int(rng.integers(1 << 30)))


def _linear(a: dict[str, Array]) -> tuple[Array, Array, float]:
    """Return the exact linear map, the magnitudes that its errors are relative to, and their bound in ulps."""
    y = a["x"] @ a["weight"].T + a["bias"]
    return y, np.abs(a["x"]) @ np.abs(a["weight"]).T + np.abs(a["bias"]), a["x"].shape[1] + 2.0


def _exact_linear(a: dict[str, Array]) -> list[Exact]:
    """Return the exact linear map."""
    y, sizes, ulps = _linear(a)
    return [("linear", y, Allowance(ulps, sizes, text="K + 2"))]


def _exact_sum(a: dict[str, Array]) -> list[Exact]:
    """Return the exact result of head_sum: row sums of a linear map."""
    y, sizes, ulps = _linear(a)
    total = y.sum(axis=1, keepdims=True)
    sizes = sizes.sum(axis=1, keepdims=True)
    return [("head_sum", total, Allowance(ulps + y.shape[1] + 2, sizes, text="K + N + 4"))]


def _exact_logsumexp(a: dict[str, Array]) -> list[Exact]:
    """Return the exact result of head_logsumexp: two leaky ReLUs and two GELUs of a linear map's logsumexp."""
    y, sizes, ulps = _linear(a)
    top = y.max(axis=1, keepdims=True)
    s = logsumexp(y)
    scale = sizes.max(axis=1, keepdims=True) + 1 + np.abs(top) + np.abs(s - top)
    ulps += y.shape[1] + FINAL_ULPS
    for _ in range(2):
        s = leaky_relu(s)
    # GELU's slope is at most 1.13.
    for _ in range(2):
        s, scale = oracle.wide_formula("gelu")(s), 1.13 * scale + np.abs(s)
    gelus = 4 * POINTWISE["gelu"].ulps
    return [("head_logsumexp", s, Allowance(ulps + gelus, scale, text=f"K + N + {2 + FINAL_ULPS + gelus:g}"))]


def _normalised(y: Array, sizes: Array, a: dict[str, Array], training: bool) -> tuple[Array, Array, float]:
    """Return batch-normalised columns, the magnitudes that errors are relative to, and the ulps added to those of y."""
    if training:
        mean, var = y.mean(axis=0), y.var(axis=0)
        sizes, roundings = sizes + sizes.mean(axis=0), 2.0 * y.shape[0] + 16
    else:
        mean, var = a["running_mean"], a["running_var"]
        sizes, roundings = sizes + np.abs(mean), 16.0
    factor = a["gamma"] / np.sqrt(var + y.dtype.type(1e-5))
    standard = (y - mean) / np.sqrt(var + y.dtype.type(1e-5))
    # A relative error of the deviation is one of the standardised value.
    spread = np.abs(factor) * sizes * (1 + (2 * np.abs(standard) if training else 0))
    return standard * a["gamma"] + a["beta"], spread + np.abs(a["beta"]) + np.abs(standard * a["gamma"]), roundings


def _exact_batch_norm(a: dict[str, Array], training: bool) -> list[Exact]:
    """Return exact batch normalisation, with the statistics of the batch in training."""
    z, sizes, roundings = _normalised(a["x"], np.abs(a["x"]), a, training)
    name, text = ("batch_norm, training", "2 B + 16") if training else ("batch_norm", "16")
    return [(name, z, Allowance(roundings, sizes, text=text))]


def _exact_softmax(a: dict[str, Array], training: bool) -> list[Exact]:
    """Return the exact result of head_softmax: softmax of a linear map, batch-normalised and scaled."""
    y, sizes, ulps = _linear(a)
    z, sizes, roundings = _normalised(y, sizes, a, training)
    (_, result, allowance), _ = _exact_softmax_rows(a["scale"] * z, np.abs(a["scale"]) * sizes, ulps + roundings)
    name, text = "head_softmax", f"2 K + N + {2 * (2 + 16 + FINAL_ULPS):g}"
    if training:
        name, text = f"{name}, training", f"{text} + 4 B"
    return [(name, result, replace(allowance, text=text))]


# The cases ----------------------------------------------------------------------------------------------------------


def _batch_norm(x: Any, running_mean: Any, running_var: Any, gamma: Any, beta: Any, training: bool = False) -> Any:
    return cf.batch_norm(x, running_mean, running_var, gamma, beta, training)


def _affine_softmax(x: Any, a: Any, c: Any) -> Any:
    return cf.softmax(x * a + c, axis=1), cf.log_softmax(x * a + c, axis=1)


def _draw_affine(rng: np.random.Generator, length: int) -> dict[str, Array]:
    """Draw the arguments of `_affine_softmax`."""
    return _draw_normal(rng, (9, length)) | {name: rng.uniform(0.5, 1.5, length) for name in "ac"}


def _exact_affine(a: dict[str, Array]) -> list[Exact]:
    """Return the exact results of `_affine_softmax`."""
    product = a["x"] * a["a"]
    return _exact_softmax_rows(product + a["c"], np.abs(product) + np.abs(a["c"]), 2.0)


def _shares_and_columns(x: Any) -> Any:
    y = cf.softmax(x, axis=1)
    return y, y.sum(axis=0)


def _exact_shares_and_columns(a: dict[str, Array]) -> list[Exact]:
    """Return the exact results of `_shares_and_columns`."""
    (name, y, allowance), _ = _exact_softmax_rows(a["x"], np.zeros((1, 1)), 0.0)
    rows, cols = y.shape
    total = Allowance(cols + rows + 2 * FINAL_ULPS, y.sum(axis=0), text=f"N + R + {2 * FINAL_ULPS:g}")
    return [(name, y, allowance), ("column sums of softmax", y.sum(axis=0), total)]


def _draw_batch(rng: np.random.Generator, rows: int, columns: int) -> dict[str, Array]:
    """Draw the arguments of `_batch_norm`."""
    arguments = _draw_head(rng, heads.head_softmax, rows, 1, columns)
    arguments["x"] = rng.standard_normal((rows, columns)) + 3
    return {name: arguments[name] for name in ("x", "running_mean", "running_var", "gamma", "beta")}


@cache
def shared_functions() -> dict[str, Fused]:
    """Return the functions that cases share, by name; each is traced, and its kernels compiled, once."""
    functions = (cf.linear.__wrapped__, _batch_norm, _affine_softmax, _shares_and_columns)  # type: ignore[attr-defined]
    return {f.__name__: Fused(f) for f in functions}


def cases(form: Format) -> Iterator[Case]:
    """Yield every case of a format."""
    for length in (1, *LANES, *STREAMED):
        yield Case(
            f"{length} elements",
            all_reductions(1),
            partial(_draw_near_one, shape=(17, length)),
            lambda a: _exact_reductions(a["x"], 1, form),
        )
    for rows, columns in ((LANES[0], COLUMNS[0]), (LANES[1], COLUMNS[1]), (SHARED, COLUMNS[0]), (SHARED, COLUMNS[1])):
        yield Case(
            f"{rows} elements, columns",
            all_reductions(0),
            partial(_draw_near_one, shape=(rows, columns)),
            lambda a: _exact_reductions(a["x"], 0, form),
        )
    for length in (1, *LANES, *HELD, *LONG):
        yield Case(
            f"{length} elements",
            reductions.softmax_functions(),
            partial(_draw_normal, shape=(9, length)),
            lambda a: _exact_softmax_rows(a["x"], np.zeros((9, 1)), 0.0),
        )
    yield from _column_cases()
    yield from _product_cases()
    if form.name == "float32":
        yield _large_product()


def _column_cases() -> Iterator[Case]:
    """Yield cases with per-column inputs, of rows whose columns are reduced, and of batch normalisation."""
    yield Case(
        f"{_MANY_ROWS} x {LANES[0]}",
        shared_functions()["_shares_and_columns"],
        partial(_draw_normal, shape=(_MANY_ROWS, LANES[0])),
        _exact_shares_and_columns,
    )
    for length in _BLOCKS:
        yield Case(
            f"x a + c of {length} elements",
            shared_functions()["_affine_softmax"],
            partial(_draw_affine, length=length),
            _exact_affine,
        )
    for rows, columns in ((LANES[0], LANES[0]), (SHARED, COLUMNS[1])):
        for training in (False, True):
            yield Case(
                f"{rows} x {columns}",
                shared_functions()["_batch_norm"],
                partial(_draw_batch, rows=rows, columns=columns),
                partial(_exact_batch_norm, training=training),
                options={"training": training},
            )


def _product_cases() -> Iterator[Case]:
    """Yield cases of matrix products and of the heads of networks, with and without bound weights."""
    weights = ("weight", "bias")
    statistics = ("running_mean", "running_var", "gamma", "beta", "scale")
    for rows, inner, columns in ((32, 64, 96), (9, 257, 4097)):
        size = f"{rows} x {inner} x {columns}"
        plain = partial(_draw_head, head=heads.head_sum, rows=rows, inner=inner, columns=columns)
        yield Case(size, shared_functions()["linear"], plain, _exact_linear)
        bound: tuple[str, ...]
        for bound in ((), weights):
            how = f"{size}, bound" if bound else size
            yield Case(how, heads.head_sum, plain, _exact_sum, bound)
            yield Case(how, heads.head_logsumexp, plain, _exact_logsumexp, bound)
        draw = partial(_draw_head, head=heads.head_softmax, rows=rows, inner=inner, columns=columns)
        yield Case(size, heads.head_softmax, draw, partial(_exact_softmax, training=False))
        everything = (*weights, *statistics)
        yield Case(f"{size}, bound", heads.head_softmax, draw, partial(_exact_softmax, training=False), everything)
        training = {"training": True}
        yield Case(size, heads.head_softmax, draw, partial(_exact_softmax, training=True), options=training)


def _large_product() -> Case:
    """Return a product large enough for the hi/lo split on Hopper."""
    rows, inner, columns = 512, 600, 2048
    draw = partial(_draw_head, head=heads.head_sum, rows=rows, inner=inner, columns=columns)
    return Case(f"{rows} x {inner} x {columns}", shared_functions()["linear"], draw, _exact_linear)


# Measuring ----------------------------------------------------------------------------------------------------------


def accuracy(target: Target, form: Format) -> dict[str, Measurement]:
    """Measure the largest errors in one format over all cases, by name of the result; record failures."""
    found: dict[str, Measurement] = {}
    flushing = target.flushing(form)
    for case in cases(form):
        drawn = {k: form.rounded(v) for k, v in case.draw(np.random.default_rng(0)).items()}
        wide = {k: oracle.wider(v, form) for k, v in drawn.items()}
        with np.errstate(all="ignore"):
            expected = case.exact(wide)
        names = ", ".join(name for name, *_ in expected)
        results = target.run_named(case.fused, drawn, case.bound, form, f"{names} ({case.name})", **case.options)
        if results is None:
            continue
        results = results if isinstance(results, list) else [results]
        for (name, exact, allowance), result in zip(expected, results, strict=True):
            one = measure(result, exact, allowance, form, flushing)
            found.setdefault(name, Measurement()).merge(one)
            if one.first_failure is not None:
                target.failures.append(_failure(name, case, form, result, exact, allowance, one.first_failure))
    return found


def _failure(
    name: str, case: Case, form: Format, result: Array, exact: Array, allowance: Allowance, at: int
) -> Failure:
    """Describe the result number `at`, which is beyond its allowance."""
    got, wanted = float(np.ravel(result)[at]), float(np.ravel(exact)[at])
    allowed = float(np.broadcast_to(allowance.absolute(np.ravel(exact), form, False), exact.size)[at])
    where = f"{case.name}, result {np.unravel_index(at, np.shape(exact))}, random numbers of seed 0"
    return Failure(name, form.name, where.replace("np.int64", ""), repr(got), f"{wanted!r} within {allowed:.3g}")
