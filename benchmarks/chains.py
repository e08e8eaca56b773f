"""Thirty chains behind a linear layer, over shapes from tall to wide: bound, beside PyTorch eager and compiled."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import cupyfuse as cf
from cupyfuse import dtypes
from cupyfuse.settings import PRECISIONS

from . import options as types
from .lab import Lab, run
from .report import Case, Report, geometric_mean, ratio
from .rivals import BOUND, COMPILED, EAGER, Computation, Rival, spread
from .row_programs import PROGRAMS, RowProgram
from .tables import Column, list_notes, number, rival_columns, scientific, table

# Rows, in_features, out_features: the chains take them in turn.
SHAPES = (
    (1024, 8192, 8192),
    (128, 32768, 4096),
    (4096, 4096, 4096),
    (32768, 4096, 1024),
    (256, 2048, 32768),
    (16384, 1024, 2048),
    (2048, 768, 3072),
)
DEFAULTS: dict[str, tuple[Any, Any]] = {"budget": (0.2, 0.03)}  # GPU seconds for each rival
_CHECKED = 1 << 22  # elements that are compared
_RIVALS = (EAGER, COMPILED)
_LEAST = 0.98  # of the better rival's speed, that no chain should be below
_HOW = """\
GPU time in microseconds, medians, the L2 cache overwritten before each call: a linear layer with a bias, and what the
chain's name says. *shape*: rows, in_features, out_features.
*×*: the time of the better rival over ours. *error*: ‖result − reference‖ / ‖reference‖ against float64."""


def _softplus(y: Any) -> Any:
    return np.log1p(np.exp(-np.abs(y))) + np.maximum(y, 0)


def _gelu(s: Any, y: Any) -> Any:
    return 0.5 * y * (1 + s.erf(y * 0.5**0.5))


def _leaky(y: Any) -> Any:
    return np.where(y > 0, y, y * 0.01)


def _normalised(y: Any) -> Any:
    return y / np.sqrt((y * y).sum(axis=1, keepdims=True) + 1e-6)


# What follows the linear layer, as NumPy code and in PyTorch; the row programs without more operands, too.
TAILS: dict[str, RowProgram] = {
    "gelu": RowProgram(_gelu, lambda F, y: F.gelu(y)),
    "relu": RowProgram(lambda s, y: np.maximum(y, 0), lambda F, y: F.relu(y)),
    "silu": RowProgram(lambda s, y: y / (1 + np.exp(-y)), lambda F, y: F.silu(y)),
    "double_leaky_relu": RowProgram(lambda s, y: _leaky(y * 2), lambda F, y: F.leaky_relu(y * 2)),
    "sigmoid": RowProgram(lambda s, y: 1 / (1 + np.exp(-y)), lambda F, y: y.sigmoid()),
    "softplus_half": RowProgram(lambda s, y: _softplus(y) * 0.5, lambda F, y: F.softplus(y) * 0.5),
    "tanh_soft_cap": RowProgram(lambda s, y: np.tanh(y / 30) * 30, lambda F, y: (y / 30).tanh() * 30),
    "clamp": RowProgram(lambda s, y: np.clip(y, -1, 1), lambda F, y: y.clamp(-1, 1)),
    "mish": RowProgram(lambda s, y: y * np.tanh(_softplus(y)), lambda F, y: F.mish(y)),
    "square_of_relu": RowProgram(lambda s, y: np.maximum(y, 0) ** 2, lambda F, y: F.relu(y).square()),
    "gelu_mean": RowProgram(lambda s, y: _gelu(s, y).mean(axis=1), lambda F, y: F.gelu(y).mean(1), reduces=True),
    "sigmoid_sum": RowProgram(
        lambda s, y: (1 / (1 + np.exp(-y))).sum(axis=1), lambda F, y: y.sigmoid().sum(1), reduces=True
    ),
    "square_sum_root": RowProgram(
        lambda s, y: np.sqrt((y * y).sum(axis=1)), lambda F, y: y.square().sum(1).sqrt(), reduces=True
    ),
    "absolute_max": RowProgram(lambda s, y: np.abs(y).max(axis=1), lambda F, y: y.abs().amax(1), reduces=True),
    "clamp_logsumexp_mish": RowProgram(
        lambda s, y: (lambda z: z * np.tanh(_softplus(z)))(s.logsumexp(np.clip(y, -2, 2), axis=1)),
        lambda F, y: F.mish(y.clamp(-2, 2).logsumexp(1)),
        reduces=True,
    ),
    "maximum_taken_off_gelu": RowProgram(
        lambda s, y: _gelu(s, y - y.max(axis=1, keepdims=True)), lambda F, y: F.gelu(y - y.amax(1, keepdim=True))
    ),
    "mean_taken_off_square_sum": RowProgram(
        lambda s, y: ((y - y.mean(axis=1, keepdims=True)) ** 2).sum(axis=1),
        lambda F, y: (y - y.mean(1, keepdim=True)).square().sum(1),
        reduces=True,
    ),
    "unit_length": RowProgram(
        lambda s, y: _normalised(y), lambda F, y: y / (y.square().sum(1, keepdim=True) + 1e-6).sqrt()
    ),
    "unit_length_softmax": RowProgram(
        lambda s, y: s.softmax(_normalised(y) * 10, axis=1),
        lambda F, y: F.softmax(y / (y.square().sum(1, keepdim=True) + 1e-6).sqrt() * 10, 1),
    ),
    "soft_cap_softmax": RowProgram(
        lambda s, y: s.softmax(np.tanh(y / 30) * 30, axis=1), lambda F, y: F.softmax((y / 30).tanh() * 30, 1)
    ),
    "temperature_log_softmax": RowProgram(
        lambda s, y: s.log_softmax(y * 0.7, axis=1), lambda F, y: F.log_softmax(y * 0.7, 1)
    ),
    "gelu_twice_logsumexp": RowProgram(
        lambda s, y: s.logsumexp(_gelu(s, _gelu(s, y)), axis=1),
        lambda F, y: F.gelu(F.gelu(y)).logsumexp(1),
        reduces=True,
    ),
    **{name: tail for name, tail in PROGRAMS.items() if tail.matrices == 1 and not tail.vectors},
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=types.DTYPES, default="bfloat16")
    parser.add_argument("--precision", choices=PRECISIONS, default="highest", help="of products, torch's too")
    types.add_several(parser, "--tails", tuple(TAILS))
    types.add_shape(parser, None, "of every chain, in place of the seven in turn: rows, in_features, out_features")


def _operands(lab: Lab, shape: Sequence[int], dtype: str, seed: int) -> tuple[Any, Any, Any]:
    """Draw x, a weight and a bias, such that elements of the product are about one."""
    rows, depth, columns = shape
    rng = np.random.default_rng(seed)
    sizes = ((rows, depth), 1.0), ((columns, depth), depth**-0.5), ((columns,), 0.1)
    drawn = (rng.standard_normal(size, dtype=np.float32) * np.float32(scale) for size, scale in sizes)
    x, weight, bias = (lab.cupy.asarray(array).astype(dtypes.to_numpy(dtype)) for array in drawn)
    return x, weight, bias


def _factories(lab: Lab, tail: RowProgram, x: Any, weight: Any, bias: Any) -> dict[str, Callable[[], Rival]]:
    """Return the rivals of a chain."""
    columns = int(weight.shape[0])
    every = spread(x.shape[0], _CHECKED // columns)
    product = lab.as_double(x[::every]) @ lab.as_double(weight).T + lab.as_double(bias)
    shape = x.shape[:1] if tail.reduces else (x.shape[0], columns)
    computation = Computation(lab, [tail.written(lab.special, product)], shape, dtypes.name_of(x.dtype), every)
    written = tail.written

    def by_torch(rival: str) -> Rival:
        F = lab.need_torch().F
        return computation.by_torch(rival, lambda x, w, b: tail.torch(F, F.linear(x, w, b)), x, weight, bias)

    fused = cf.fuse(lambda x, weight, bias: written(cf, x @ weight.T + bias))
    return {
        BOUND: lambda: computation.by_ours(fused.bind(weight=weight, bias=bias), x),
        **{rival: functools.partial(by_torch, rival) for rival in _RIVALS},
    }


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run every chain, those of one shape one after the other."""
    shapes = (options.shape,) if options.shape else SHAPES
    for start, shape in enumerate(shapes):
        operands = None
        for name in options.tails[start :: len(shapes)]:
            lab.release()
            operands = _operands(lab, shape, options.dtype, options.seed) if operands is None else operands
            case = Case("Chains", name, tuple(shape), options.dtype)
            yield run(lab, case, _factories(lab, TAILS[name], *operands), ("gpu_evicted",), options.budget)


def _times_faster(case: Case) -> float | None:
    """Return the time of the better rival over ours."""
    times = [case.value(rival, "gpu_evicted") for rival in _RIVALS]
    return ratio(min((t for t in times if t is not None), default=None), case.value(BOUND, "gpu_evicted"))


def report_lines(report: Report) -> list[str]:
    """Write a row for each chain, and the geometric mean."""
    notes: list[str] = []
    columns = [
        Column("chain", lambda case: case.name),
        Column("shape", lambda case: case.size),
        *rival_columns(report.cases, "gpu_evicted", notes),
        Column("×", _times_faster, number),
        *(
            Column(f"error, {rival}", lambda case, r=rival: case.value(r, "error"), scientific)
            for rival in (BOUND, EAGER)
        ),
    ]
    found = [(faster, case) for case in report.cases if (faster := _times_faster(case)) is not None]
    worse = [f"{case.name} ({number(faster)})" for faster, case in found if faster < _LEAST]
    errors = [(case.value(BOUND, "error"), case.value(EAGER, "error"), case.name) for case in report.cases]
    larger = [name for ours, eager, name in errors if ours is not None and eager is not None and ours > eager]
    mean = number(geometric_mean(faster for faster, _ in found))
    return [
        *_HOW.split("\n"),
        "",
        f"{len(found)} chains, geometric mean {mean} times the better rival.",
        f"Below {_LEAST} of it: {', '.join(worse) or 'none'}.",
        f"With a larger error than eager's: {', '.join(larger) or 'none'}.",
        "",
        *table(columns, report.cases),
        *list_notes(notes),
    ]
