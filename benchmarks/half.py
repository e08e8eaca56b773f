"""16-bit products by our own kernel beside cuBLAS: alone, with a row program behind them, and in the heads."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cupyfuse.heads

import cupyfuse as cf
from cupyfuse import dtypes, settings

from . import heads
from .lab import Lab, run
from .report import Case, ratio
from .rivals import COMPILED, EAGER, Computation, Rival, spread
from .tables import Column, list_notes, rival_columns, scientific, table
from .timing import FIGURES as TITLES

FIGURES = ("gpu_evicted", "gpu_back_to_back")
OWN, LIBRARY = "own kernel", "cuBLAS, row program"
PRODUCTS, CHAINS, HEADS = "16-bit products", "16-bit products and a row program", "16-bit heads"
GROUPS = (PRODUCTS, CHAINS, HEADS)
DTYPES = ("bfloat16", "float16")
_CUBES = (1024, 2048, 4096, 8192, 16384)
_HEAD_SHAPE = (1024, 8192, 8192)
_VOCABULARY = (8192, 4096, 131072)
_CHECKED = 1 << 23  # elements that are compared

# What follows a linear map: our function of x, weight and bias, by the name of PyTorch's (`pytorch.linear_then`).
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "": lambda x, weight: x @ weight.T,
    "gelu": lambda x, weight, bias: cf.gelu(x @ weight.T + bias),
    "logsumexp": lambda x, weight, bias: cf.logsumexp(x @ weight.T + bias, axis=1),
    "softmax": lambda x, weight, bias: cf.softmax(x @ weight.T + bias, axis=1),
}
_TAILS = (
    ("gelu", _HEAD_SHAPE),
    ("logsumexp", _HEAD_SHAPE),
    ("softmax", _HEAD_SHAPE),
    ("logsumexp", _VOCABULARY),
)


def switched(call: Callable[..., Any], value: str) -> Callable[..., Any]:
    """Return a call that plans with `settings.epilogues(value)`."""

    @functools.wraps(call)
    def within(*arguments: Any, **named: Any) -> Any:
        with settings.epilogues(value):
            return call(*arguments, **named)

    return within


def draw(lab: Lab, shape: tuple[int, int, int], dtype: str, seed: int) -> tuple[Any, Any, Any]:
    """Return Gaussian x (M, K), weight (N, K) over the root of K, and bias (N,)."""
    m, k, n = shape
    random = lab.cupy.random.default_rng(seed)
    stored = dtypes.to_numpy(dtype)
    x = random.standard_normal((m, k), "float32").astype(stored)
    weight = (random.standard_normal((n, k), "float32") / k**0.5).astype(stored)
    return x, weight, random.standard_normal(n, "float32").astype(stored)


def factories(lab: Lab, name: str, arguments: tuple[Any, ...], dtype: str) -> dict[str, Callable[[], Rival]]:
    """Return the rivals of one of `FUNCTIONS`; some rows are compared with float64."""
    rows, columns = arguments[0].shape[0], arguments[1].shape[0]
    every = spread(rows, _CHECKED // columns)
    expected = FUNCTIONS[name](lab.as_double(arguments[0][::every]), *map(lab.as_double, arguments[1:]))

    computation = Computation(lab, [expected], (rows, *expected.shape[1:]), dtype, every)

    def ours() -> Rival:
        return computation.by_ours(cf.fuse(FUNCTIONS[name]), *arguments)

    def torch(rival: str) -> Rival:
        return computation.by_torch(rival, functools.partial(lab.need_torch().linear_then, name), *arguments)

    return {**both_ways(ours), **{rival: functools.partial(torch, rival) for rival in (EAGER, COMPILED)}}


def both_ways(make: Callable[[], Rival]) -> dict[str, Callable[[], Rival]]:
    """Return a rival of ours as it runs with our own kernel, and as it runs with cuBLAS."""

    def planned(value: str) -> Rival:
        rival = make()
        rival.call = switched(rival.call, value)
        rival.attempts = [switched(attempt, value) for attempt in rival.attempts]
        return rival

    return {OWN: functools.partial(planned, "always"), LIBRARY: functools.partial(planned, "never")}


def _heads(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run the bound heads in bfloat16, with epilogues and without."""
    inputs: Mapping[str, Any] = cupyfuse.heads.example_inputs("head_softmax", *_HEAD_SHAPE, DTYPES[0], options.seed)
    arguments = {name: lab.cupy.asarray(value) for name, value in inputs.items()}
    for case, head in heads.whole(lab, arguments):
        if case.name != "head_sum":  # which has no product once its weight is bound
            case.group = HEADS
            yield run(lab, case, both_ways(head.bound), FIGURES, options.budget)


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run products alone, of the heads' shape and cubes of up to `half_size`; products with what follows; the heads."""
    shapes = (_HEAD_SHAPE, *((n, n, n) for n in _CUBES if n <= options.half_size))
    chosen = [(PRODUCTS, dtype, "", shape) for dtype in DTYPES for shape in shapes]
    chosen += [(CHAINS, DTYPES[0], name, shape) for name, shape in _TAILS if min(shape) <= options.half_size]
    for group, dtype, name, shape in chosen:
        lab.release()
        case = Case(group, "", shape, dtype)
        case.name = f"{name or dtype}, {case.size}"
        arguments = draw(lab, shape, dtype, options.seed)[: 3 if name else 2]
        yield run(lab, case, factories(lab, name, arguments, dtype), FIGURES, options.budget)
        del arguments
    yield from _heads(lab, options)


def report_lines(cases: Sequence[Case]) -> list[str]:
    """Write tables for each group: times, rates of our kernel and of cuBLAS and how they compare; errors."""
    time = "gpu_evicted"

    def rate(rival: str) -> Column:
        return Column(
            f"{rival}, TFLOP/s", lambda c: ratio(2e-6 * c.shape[0] * c.shape[1] * c.shape[2], c.value(rival, time))
        )

    def gain(rival: str) -> Column:
        return Column(f"× {rival}", lambda c: ratio(c.value(rival, time), c.value(OWN, time)))

    name = Column("", lambda case: case.name)
    lines = []
    for group in GROUPS:
        found = [case for case in cases if case.group == group]
        if found:
            notes: list[str] = []
            compared = [rate(OWN), rate(LIBRARY), gain(LIBRARY), gain(EAGER), gain(COMPILED)]
            lines += [f"## {group}", "", f"Microseconds, {TITLES[time].title}; ×: {OWN} faster by.", ""]
            lines += table([name, *rival_columns(found, time, notes), *compared], found)
            errors = rival_columns(found, "error", [], scientific)
            lines += ["Errors by Frobenius norms:", "", *table([name, *errors], found, min), *list_notes(notes)]
    return lines
