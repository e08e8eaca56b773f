"""16-bit products by our own kernel beside cuBLAS: alone, with a row program behind them, and in the heads."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import cupyfuse.heads

import cupyfuse as cf
from cupyfuse import dtypes, settings

from . import heads
from .lab import COMPILED, EAGER, Lab, Rival, run
from .report import Case

FIGURES = ("gpu_evicted", "gpu_back_to_back")
OWN, LIBRARY = "own kernel", "cuBLAS, row program"
PRODUCTS, CHAINS, HEADS = "16-bit products", "16-bit products and a row program", "16-bit heads"
GROUPS = (PRODUCTS, CHAINS, HEADS)
DTYPES = ("bfloat16", "float16")
_CUBES = (1024, 2048, 4096, 8192, 16384)
_HEAD_SHAPE = (1024, 8192, 8192)
_VOCABULARY = (8192, 4096, 131072)

# What follows a linear map: our function of x, weight and bias, by the name of PyTorch's (`rivals.linear_then`).
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


def shapes(options: argparse.Namespace) -> tuple[tuple[int, int, int], ...]:
    """Return the shapes (M, K, N) of products alone: the heads', then cubes of up to `half_size`."""
    return (_HEAD_SHAPE, *((n, n, n) for n in _CUBES if n <= options.half_size))


def draw(lab: Lab, shape: tuple[int, int, int], dtype: str, seed: int) -> tuple[Any, Any, Any]:
    """Return Gaussian x (M, K), weight (N, K) over the root of K, and bias (N,)."""
    m, k, n = shape
    random = lab.cupy.random.default_rng(seed)
    stored = dtypes.to_numpy(dtype)
    x = random.standard_normal((m, k), "float32").astype(stored)
    weight = (random.standard_normal((n, k), "float32") / k**0.5).astype(stored)
    return x, weight, random.standard_normal(n, "float32").astype(stored)


class Chain:
    """One of `FUNCTIONS`, and how each rival runs it; some rows are compared with float64."""

    def __init__(self, lab: Lab, name: str, arguments: tuple[Any, ...], dtype: str):
        self._lab, self._name, self._arguments, self._dtype = lab, name, arguments, dtype
        rows, columns = arguments[0].shape[0], arguments[1].shape[0]
        self._checked = slice(None, None, max(1, rows * columns >> 23))
        wide = [lab.as_double(a[self._checked] if k == 0 else a) for k, a in enumerate(arguments)]
        self._expected = [FUNCTIONS[name](*wide)]
        self._shape = (rows, *self._expected[0].shape[1:])

    def factories(self) -> dict[str, Callable[[], Rival]]:
        return {
            OWN: functools.partial(self._fused, "always"),
            LIBRARY: functools.partial(self._fused, "never"),
            EAGER: functools.partial(self._torch, False),
            COMPILED: functools.partial(self._torch, True),
        }

    def _sample(self, result: Any, double: Callable[[Any], Any]) -> list[Any]:
        return [double(result[self._checked])]

    def _fused(self, value: str) -> Rival:
        function = switched(cf.fuse(FUNCTIONS[self._name]), value)
        return self._lab.fused_rival(
            function, self._arguments, self._expected, self._shape, self._dtype, sample=self._sample
        )

    def _torch(self, compiling: bool) -> Rival:
        torch = self._lab.need_torch(compiling)
        function = functools.partial(torch.linear_then, self._name)
        if compiling:
            function = torch.compile_static(function)
        call = functools.partial(function, *map(torch.as_tensor, self._arguments))
        size = 2 * self._shape[0] * (self._shape[1] if len(self._shape) > 1 else 1)
        return self._lab.rival(call, self._expected, size, self._sample, torch=torch)


def _heads(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run the bound heads in bfloat16, with epilogues and without."""
    inputs: Mapping[str, Any] = cupyfuse.heads.example_inputs("head_softmax", *_HEAD_SHAPE, DTYPES[0], options.seed)
    arguments = {name: lab.cupy.asarray(value) for name, value in inputs.items()}
    wide = lab.as_double(arguments["x"]) @ lab.as_double(arguments["weight"]).T
    for name, head, training in heads.CASES:
        if name != "head_sum":  # which has no product once its weight is bound
            lab.release()
            rivals = heads.Head(lab, head, training, arguments, wide)

            def bound(value: str, rivals: heads.Head = rivals) -> Rival:
                rival = rivals.bound()
                rival.call = switched(rival.call, value)
                rival.attempts = [switched(attempt, value) for attempt in rival.attempts]
                return rival

            factories = {OWN: functools.partial(bound, "always"), LIBRARY: functools.partial(bound, "never")}
            case = Case(HEADS, name, _HEAD_SHAPE, DTYPES[0])
            yield run(lab, case, factories, FIGURES, options.budget)


def cases(lab: Lab, options: argparse.Namespace) -> Iterator[Case]:
    """Run products alone, products with what follows them, and the heads."""
    for dtype in DTYPES:
        for shape in shapes(options):
            lab.release()
            x, weight, _ = draw(lab, shape, dtype, options.seed)
            name = f"{dtype}, {' x '.join(map(str, shape))}"
            chain = Chain(lab, "", (x, weight), dtype)
            yield run(lab, Case(PRODUCTS, name, shape, dtype), chain.factories(), FIGURES, options.budget)
            del x, weight, chain
    for name, shape in _TAILS:
        if min(shape) <= options.half_size:
            lab.release()
            chain = Chain(lab, name, draw(lab, shape, DTYPES[0], options.seed), DTYPES[0])
            case = Case(CHAINS, f"{name}, {' x '.join(map(str, shape))}", shape, DTYPES[0])
            yield run(lab, case, chain.factories(), FIGURES, options.budget)
            del chain
    yield from _heads(lab, options)
