"""The heads: a GEMM and the row operations after it, from `x` to the result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cupyfuse.heads

from cupyfuse import dtypes
from cupyfuse.api.fuse import Fused

from . import tails
from .cases import Lab, Rival, run
from .report import Case

FIGURES = ("gpu_evicted", "gpu_back_to_back", "host")
BUDGET, QUICK_BUDGET = 0.25, 0.04  # GPU seconds for each rival and figure

BOUND = "cupyfuse, bound"
FUSED = "cupyfuse"
UNFUSED = "cupyfuse, unfused"  # head.__wrapped__: the same functions, each in a launch of its own
PLAIN = "CuPy"
EAGER = "torch eager"
COMPILED = "torch.compile"
AUTOTUNED = "torch.compile, max-autotune"

# (name in the report, head, training)
CASES: tuple[tuple[str, Fused, bool], ...] = (
    ("head_logsumexp", cupyfuse.heads.head_logsumexp, False),
    ("head_sum", cupyfuse.heads.head_sum, False),
    ("head_softmax, inference", cupyfuse.heads.head_softmax, False),
    ("head_softmax, training", cupyfuse.heads.head_softmax, True),
)


@dataclass(frozen=True)
class Options:
    """What to run: `shape` is (B, K, N)."""

    shape: tuple[int, int, int] = (
        cupyfuse.heads.ROWS,
        cupyfuse.heads.IN_FEATURES,
        cupyfuse.heads.OUT_FEATURES,
    )
    dtype: str = "float32"
    max_autotune: bool = False
    quick: bool = False
    seed: int = 0

    @property
    def budget(self) -> float:
        return QUICK_BUDGET if self.quick else BUDGET


class Statistics:
    """One rival's own running statistics, which training changes in place."""

    def __init__(self, arguments: Mapping[str, Any]):
        self._initial = {name: arguments[name] for name in ("running_mean", "running_var") if name in arguments}
        self.arrays = {name: array.copy() for name, array in self._initial.items()}

    def reset(self) -> None:
        for name, array in self.arrays.items():
            array[...] = self._initial[name]


class Head:
    """One head on one set of arguments, and how each rival runs it.

    Parameters
    ----------
    lab : Lab
    head : Fused
    training : bool
        For head_softmax: normalise with the batch's statistics.
    arguments : mapping of str to cupy.ndarray
        By the names of the head's parameters.
    product : cupy.ndarray, (B, N) float64
        ``x @ weight.T``, for the reference.
    """

    def __init__(self, lab: Lab, head: Fused, training: bool, arguments: Mapping[str, Any], product: Any):
        self._lab = lab
        self._head = head
        self._name = head.__wrapped__.__name__
        self._training = training
        names = cupyfuse.heads.input_shapes(head)
        self._arguments = {name: arguments[name] for name in names}
        self._flags: dict[str, Any] = {"training": True} if training else {}
        x = self._arguments["x"]
        self._columns = self._arguments["weight"].shape[0] if head is cupyfuse.heads.head_softmax else 1
        self._out = ((x.shape[0], self._columns), dtypes.name_of(x.dtype))
        self.expected = self._reference(product)

    def _reference(self, product: Any) -> list[Any]:
        lab = self._lab
        doubles = {n: lab.as_double(a) for n, a in self._arguments.items() if n not in ("x", "weight")}
        if self._head is cupyfuse.heads.head_logsumexp:
            return [lab.plain.logsumexp_tail(product, doubles["bias"])]
        if self._head is cupyfuse.heads.head_sum:
            # The sums over one element are that element; logsumexp of one element is that element too.
            return [(product + doubles["bias"]).sum(axis=1, keepdims=True)]
        result = lab.plain.softmax_tail(product, **doubles, training=self._training)
        return [result, *self._trained(doubles)]

    def _trained(self, statistics: Mapping[str, Any]) -> list[Any]:
        """The results that training leaves in the running statistics."""
        names = ("running_mean", "running_var") if self._training else ()
        return [self._lab.as_double(statistics[name]) for name in names]

    def _with(self, statistics: Statistics) -> dict[str, Any]:
        return {**self._arguments, **statistics.arrays}

    def factories(self, max_autotune: bool) -> dict[str, Callable[[], Rival]]:
        makers: dict[str, Callable[[], Rival]] = {
            BOUND: self._bound,
            FUSED: self._fused,
            UNFUSED: functools.partial(self._function, self._head.__wrapped__),
            PLAIN: functools.partial(self._function, getattr(self._lab.plain, self._name)),
            EAGER: functools.partial(self._torch, None),
            COMPILED: functools.partial(self._torch, "default"),
        }
        if max_autotune:
            makers[AUTOTUNED] = functools.partial(self._torch, "max-autotune")
        return makers

    def _bound(self) -> Rival:
        statistics = Statistics(self._arguments)
        values = self._with(statistics)
        x = values.pop("x")
        serve = self._head.bind(**values, **self._flags)
        return self._cupyfuse(serve, (x,), statistics)

    def _fused(self) -> Rival:
        statistics = Statistics(self._arguments)
        arguments = (*self._with(statistics).values(), *self._flags.values())
        return self._cupyfuse(self._head, arguments, statistics)

    def _cupyfuse(self, function: Callable[..., Any], arguments: Sequence[Any], statistics: Statistics) -> Rival:
        def results(out: Any) -> list[Any]:
            return [self._lab.as_double(out), *self._trained(statistics.arrays)]

        attempts = self._lab.fused_attempts(function, arguments, self._out, results, statistics.reset)
        return Rival(functools.partial(function, *arguments), attempts, self.expected)

    def _function(self, function: Callable[..., Any]) -> Rival:
        """A function that works on CuPy's arrays one operation at a time."""
        lab, statistics = self._lab, Statistics(self._arguments)
        call = functools.partial(function, *self._with(statistics).values(), *self._flags.values())

        def attempt() -> list[Any]:
            statistics.reset()
            lab.poison_pool(self._out_bytes())
            return [lab.as_double(call()), *self._trained(statistics.arrays)]

        return Rival(call, [attempt], self.expected)

    def _torch(self, mode: str | None) -> Rival:
        torch = self._lab.need_compiler() if mode else self._lab.need_torch()
        lab, statistics = self._lab, Statistics(self._arguments)
        values = self._with(statistics)
        x = torch.share(values.pop("x"))
        module = torch.HEADS[self._name](*values.values(), **self._flags)
        call = functools.partial(torch.compiled(module, mode) if mode else module, x)

        def attempt() -> list[Any]:
            statistics.reset()
            torch.poison(self._out_bytes())
            return [torch.as_double(call(), lab.cupy), *self._trained(statistics.arrays)]

        return Rival(call, [attempt], self.expected)

    def _out_bytes(self) -> int:
        shape, dtype = self._out
        return shape[0] * shape[1] * dtypes.ITEMSIZE[dtype]


def draw(lab: Lab, options: Options) -> dict[str, Any]:
    """The arguments of all heads, on the GPU."""
    inputs = cupyfuse.heads.example_inputs("head_softmax", *options.shape, options.dtype, options.seed)
    return {name: lab.cupy.asarray(value) for name, value in inputs.items()}


def cases(lab: Lab, options: Options) -> Iterator[Case]:
    """Run the heads, then what follows their GEMM alone."""
    if options.dtype not in ("float32", "float16", "bfloat16"):
        raise ValueError(f"dtype: expected float32, float16 or bfloat16, got {options.dtype!r}")
    arguments = draw(lab, options)
    product = lab.as_double(arguments["x"]) @ lab.as_double(arguments["weight"]).T
    for name, head, training in CASES:
        lab.release()
        case = Case("The heads", name, options.shape, options.dtype)
        makers = Head(lab, head, training, arguments, product).factories(options.max_autotune)
        yield run(lab, case, makers, FIGURES, options.budget)
        del makers
    del product
    yield from tails.cases(lab, arguments, options.dtype, options.budget)
